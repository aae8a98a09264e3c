"""Families of models: exact answers for every subset, programs that are compiled once."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from problems import by_chains

import foldwise as fw
from foldwise.sampling import blocks as sampler_module
from foldwise.scores.logscore import climbed
from foldwise.support import runtime

SUBSETS = [(1, *rest) for rest in product([0, 1], repeat=2)]


def regression_family(problem, subsets=SUBSETS, **arguments):
    """The regression with some of its covariates; an intercept always."""
    X, noise = problem.X[:, :3], problem.noise

    def row_log_density(beta, y, selection):
        z = (y - X @ (selection * beta)) / noise
        return -0.5 * z**2 - jnp.log(noise) - 0.5 * jnp.log(2 * jnp.pi)

    def simulate(key, beta, selection):
        return X @ (selection * beta) + noise * jax.random.normal(key, (len(X),))

    return fw.model_family(
        lambda beta, selection: -0.5 * jnp.sum((beta / problem.prior[:3]) ** 2),
        None,
        np.zeros(3),
        len(X),
        subsets,
        simulate=simulate,
        row_log_density=row_log_density,
        y=problem.y,
        **arguments,
    )


def exact(problem, subset):
    """The same regression without the covariates that are not selected."""
    X = problem.X[:, :3][:, np.array(subset) == 1]
    return problems.LinearProblem(
        X, problem.y, problem.noise, problem.prior[: X.shape[1]], problem.folds, "subset"
    )


@pytest.fixture(scope="module")
def found(seed):
    problem = problems.five_fold()
    family = regression_family(problem)
    made = []
    original = runtime.Program

    def counting(*arguments):
        made.append(arguments[0].__qualname__)
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "Program", counting)
        first = by_chains(family[:1], problem.folds, seed=seed, progress=False)
        alone = len(made)
        results = by_chains(
            family, problem.folds, scores=("log", "crps"), seed=seed, progress=False
        )
        # another score needs another program of the folds; the other members need none
        assert len(made) == alone + 1
    return problem, family, results, first


def test_every_member_is_exact(found):
    problem, family, results, _ = found
    assert list(results) == ["1 0 0", "1 0 1", "1 1 0", "1 1 1"] == [m.name for m in family]
    for subset, result in zip(SUBSETS, results.values(), strict=True):
        truth = exact(problem, subset)
        for score in ("log", "crps"):
            one = result.score(score)
            assert abs(one.total - truth.exact_total(score)) < 4 * one.mcse
    assert len({result.info["seed"] for result in results.values()}) == 4
    assert len({result.info["fit_seed"] for result in results.values()}) == 4


def test_members_are_sampled_side_by_side(monkeypatch):
    """One block holds folds of all members, and each gets what it would get alone.

    Members get step sizes of their own, so that some wait while others go on.
    """
    problem, tuned = problems.five_fold(), sampler_module.Sampler._start_from

    def start_from(self, log_steps):
        tuned(self, log_steps - 0.3 * self.program.model.selection.sum())

    monkeypatch.setattr(sampler_module.Sampler, "_start_from", start_from)
    family, blocks = regression_family(problem), []
    original = sampler_module.run_block

    def watched(program, pieces, *arguments):
        blocks.append([sampler.program.model.name for sampler, _ in pieces])
        return original(program, pieces, *arguments)

    monkeypatch.setattr(sampler_module, "run_block", watched)
    arguments = {"scores": ("log", "crps"), "keep": "position", "progress": False}
    together = by_chains(family, problem.folds, seed=5, **arguments)
    assert blocks == [[member.name for member in family]]
    for member in (family[0], family[2]):
        result = together[member.name]
        alone = by_chains(member, problem.folds, seed=result.info["seed"], **arguments)
        assert alone.info["step_size"] == result.info["step_size"]
        np.testing.assert_allclose(alone.draws, result.draws, rtol=1e-9)
        for score in ("log", "crps"):
            assert alone.score(score).total == pytest.approx(result.score(score).total, rel=1e-9)
    assert len({result.info["step_size"] for result in together.values()}) == 3


@pytest.mark.parametrize("memory", ["draws", "online"])
def test_folds_far_from_the_full_data_climb_side_by_side(memory):
    """Rungs of all members: a shift of one group that its prior finds unlikely."""
    X, y, shift = np.ones(60), np.random.default_rng(4).normal(size=60), np.repeat([0, 0, 6], 20)
    group = np.repeat(np.arange(3), 20)

    def log_likelihood(q, selection):
        mean = q["mu"] + selection * q["z"][group]
        return -0.5 * (y + shift - X * mean) ** 2 - 0.5 * jnp.log(2 * jnp.pi)

    family = fw.model_family(
        lambda q, selection: -0.5 * (q["mu"] ** 2 + jnp.sum(q["z"] ** 2)),
        log_likelihood,
        {"mu": 0.0, "z": np.zeros(3)},
        60,
        [1.0, 0.5],
    )
    folds = fw.leave_group_out(group)
    together = by_chains(family, folds, memory=memory, seed=2, progress=False)
    assert all(climbed(result.run.evidence) for result in together.values())
    for member, scale in zip(family, (1.0, 0.5), strict=True):
        result = together[member.name]
        design = np.concatenate([np.ones((60, 1)), scale * np.eye(3)[group]], axis=1)
        truth = problems.LinearProblem(design, y + shift, 1.0, np.ones(4), folds, "far")
        errors = result.folds["elpd"] - truth.joint()
        assert np.all(np.abs(errors) < 4 * result.folds["mcse"])


def test_a_target_is_reached_by_every_member():
    problem = problems.five_fold()
    family = regression_family(problem, SUBSETS[:2])
    first = by_chains(family, problem.folds, seed=1, progress=False)
    target = 0.6 * max(result.mcse for result in first.values())
    results = by_chains(family, problem.folds, seed=1, target_mcse=target, progress=False)
    assert all(result.mcse <= target for result in results.values())
    assert {result.info["draws"] for result in results.values()} != {100}


def test_parameters_that_are_left_out_keep_their_prior(found):
    problem, _, results, _ = found
    fit = results["1 0 0"].run.fit
    sd = fit.flat.std(axis=0)
    np.testing.assert_allclose(sd[1:], problem.prior[1:3], rtol=0.1)
    assert sd[0] < 0.1 * problem.prior[0]


def test_comparison_of_all(found):
    problem, _, results, _ = found
    table = fw.compare(results).table
    truth = {
        name: exact(problem, s).exact_total("log") for name, s in zip(results, SUBSETS, strict=True)
    }
    order = sorted(truth, key=lambda name: -truth[name])
    assert table.index[0] == order[0] and set(table.index) == set(truth)
    assert table["elpd"].to_dict() == pytest.approx(truth, abs=1.0)


def test_members_are_extended_and_reloaded(found, tmp_path):
    _, family, results, first = found
    result = first["1 0 0"]
    result.save(tmp_path / "member.nc")
    longer = fw.load(tmp_path / "member.nc").extend(30, model=family[0], progress=False)
    assert longer.elpd == pytest.approx(result.extend(30, progress=False).elpd, rel=1e-12)
    with pytest.raises(ValueError, match="only be extended with its own model"):
        fw.load(tmp_path / "member.nc").extend(30, model=family[3], progress=False)


def test_refusals():
    problem = problems.five_fold()
    with pytest.raises(ValueError, match="at least one selection"):
        regression_family(problem, [])
    with pytest.raises(ValueError, match=r"same shape, but selection 0 has \(3,\) and selection 1"):
        regression_family(problem, [[1, 0, 0], [1, 0]])
    with pytest.raises(ValueError, match="finite numbers, but selection 1"):
        regression_family(problem, [[1, 0, 0], [1, np.nan, 0]])
    with pytest.raises(ValueError, match="1 names for 4 selections"):
        regression_family(problem, names=["one"])
    with pytest.raises(ValueError, match="names must be distinct, got a, a, b, c"):
        regression_family(problem, names=["a", "a", "b", "c"])
    family = regression_family(problem)
    with pytest.raises(ValueError, match="has a fit of its own"):
        by_chains(family, problem.folds, fit=1)
    assert "ModelFamily of 4 models: 1 0 0, 1 0 1" in repr(family)
