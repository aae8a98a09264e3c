"""The workflow: arguments, targets, trouble in folds, interruption."""

import jax.numpy as jnp
import numpy as np
import problems
import pytest
from problems import by_chains

import foldwise as fw
from foldwise.results.result import FoldWarning
from foldwise.sampling import blocks as sampler_module


def run(prepared, name="regression", **arguments):
    problem, model, fit = prepared(name)
    settings = {"folds": problem.folds, "fit": fit, "seed": 1, "progress": False, **arguments}
    return by_chains(model, **settings)


@pytest.mark.parametrize(
    "bad, kind, message",
    [
        ({"folds": fw.leave_one_out(30)}, ValueError, "folds have n=30 and the model n_obs=40"),
        ({"folds": [(0, 1)]}, TypeError, "folds must be Folds, for example"),
        ({"scores": "briar"}, ValueError, 'scores must be among "log", "log_pointwise", .*; got'),
        ({"scores": ()}, ValueError, "at least one score"),
        ({"estimator": "median"}, ValueError, 'estimator must be one of "auto", "mean", "bridge"'),
        ({"memory": "disk"}, ValueError, 'memory must be one of "draws", "online"; got .disk.'),
        ({"precision": "float16"}, ValueError, 'precision must be one of "float64", "float32"'),
        ({"draws": 40, "batch": 10}, ValueError, "at least 20 batches.*give 16; use more draws"),
        ({"chains": 1}, ValueError, "chains must be a whole number of at least 2"),
        ({"batch": 0}, ValueError, "batch must be a whole number of at least 1"),
        ({"warmup": 3}, ValueError, "warmup must be a whole number of at least 10"),
        ({"target_mcse": 0.0}, ValueError, "target_mcse must be a positive number"),
        ({"target_mcse": "0.1"}, ValueError, "target_mcse must be a positive number"),
        ({"fit": 3}, TypeError, r"fit must be what foldwise\.fit\(model\) returns, got int"),
        ({"max_draws": 10, "target_mcse": 1.0}, ValueError, "max_draws=10 must be at least draws"),
        ({"seed": 1.5}, ValueError, "seed must be a whole number"),
        (
            {"folds": fw.h_block(40, 2), "estimator": "bridge"},
            ValueError,
            "needs a partner for every fold, but 40 of 40 have none",
        ),
        (
            {"folds": fw.k_fold(40, 5), "estimator": "bridge"},
            ValueError,
            "needs joint scores, but log_pointwise was asked",
        ),
    ],
)
def test_bad_arguments(prepared, bad, kind, message):
    with pytest.raises(kind, match=message):
        run(prepared, **bad)


def test_model_must_be_a_model(prepared):
    problem, _, _ = prepared("regression")
    with pytest.raises(TypeError, match=r"model must be a foldwise\.Model, got function"):
        by_chains(lambda x: x, problem.folds)


def test_default_scores(prepared):
    assert list(run(prepared, folds=fw.k_fold(40, 5)).scores) == ["log_pointwise"]
    labels = np.arange(40) % 2
    assert list(run(prepared, folds=fw.stratified_k_fold(labels, 5)).scores) == ["log_pointwise"]
    assert list(run(prepared).scores) == ["log"]
    assert list(run(prepared, folds=fw.group_k_fold(labels, 2)).scores) == ["log"]


def test_both_scores_from_one_pass(prepared):
    both = run(prepared, "five_fold", scores=("log", "log_pointwise"))
    joint = run(prepared, "five_fold", scores="log")
    rows = run(prepared, "five_fold", scores="log_pointwise")
    assert both.elpd == pytest.approx(joint.elpd, abs=1e-6)
    assert both.score("log_pointwise").total == pytest.approx(rows.elpd, abs=1e-6)
    assert both.rows is None and both.score("log_pointwise").rows is not None
    with pytest.raises(ValueError, match="has the scores log, but 'log_pointwise' was asked"):
        joint.score("log_pointwise")


def test_pointwise_equals_joint_for_single_rows(prepared):
    joint, rows = (run(prepared, scores=s) for s in ("log", "log_pointwise"))
    assert rows.elpd == joint.elpd
    assert (rows.folds["estimator"] == "bridge").all()


def test_target_is_reached(prepared):
    first = run(prepared, estimator="mean")
    result = run(prepared, estimator="mean", target_mcse=0.6 * first.mcse)
    assert result.mcse <= 0.6 * first.mcse
    assert 200 < result.info["draws"] < 700


def test_target_within_reach_stops_at_once(prepared):
    assert run(prepared, target_mcse=100.0).info["draws"] == 100


def test_most_draws_end_a_run_short_of_its_target(prepared):
    with pytest.warns(UserWarning, match="target_mcse=0.0001 was not reached.*max_draws=150"):
        result = run(prepared, estimator="mean", target_mcse=1e-4, max_draws=150)
    assert result.info["draws"] == 150


def test_full_data_draws_limit_the_target(prepared):
    with pytest.warns(UserWarning, match="the full-data draws alone contribute.*longer fit"):
        result = run(prepared, estimator="bridge", target_mcse=1e-4)
    assert result.info["draws"] < 2000


def test_subset_of_folds(prepared):
    problem, _, _ = prepared("regression")
    result = run(prepared, folds=problem.folds[5:9])
    np.testing.assert_array_equal(result.folds["fold"], [5, 6, 7, 8])
    z = (result.folds["elpd"].values - problem.joint()[5:9]) / result.folds["mcse"].values
    assert np.abs(z).max() < 4


def test_repeated_k_fold_weighs_rows(prepared):
    """The same 5 folds twice: each row weighs 1/2, and the total is that of once."""
    problem, _, _ = prepared("five_fold")
    pairs = list(problem.folds)
    twice = fw.from_splits(pairs + pairs, 40)
    joint = run(prepared, "five_fold", folds=twice, scores=("log", "log_pointwise"))
    assert abs(joint.elpd - problem.joint().sum()) < 4 * joint.mcse
    rows = joint.score("log_pointwise")
    assert abs(rows.total - problem.pointwise().sum()) < 4 * rows.mcse
    once = run(prepared, "five_fold", scores="log_pointwise")
    assert rows.se == pytest.approx(once.se, rel=0.05)
    assert rows.mcse < once.mcse
    assert joint.se == pytest.approx(run(prepared, "five_fold", scores="log").se, rel=0.1)


# ---------------------------------------------------------------- trouble in folds


@pytest.fixture
def tamper(monkeypatch):
    """tamper(fold, chain, draw, value): change what is recorded of one fold.

    With ``still``, the chain's position does not move either.
    """

    def patch(fold, chain, draw, value, still=False):
        original = sampler_module.run_block

        def run_block(*arguments):
            for sampler, members, record, count in original(*arguments):
                scores, watched = record.scores.copy(), record.watched.copy()
                if fold in members:
                    here = list(members).index(fold)
                    scores[here, chain, draw] = value
                    watched[here, chain] = 0.5 if still else watched[here, chain]
                record = record._replace(scores=scores, watched=watched)
                yield sampler, members, record, count

        monkeypatch.setattr(sampler_module, "run_block", run_block)

    return patch


@pytest.mark.parametrize("estimator", ["mean", "auto"])
@pytest.mark.parametrize("memory", ["draws", "online"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_fold_that_is_not_a_number_is_left_out_aloud(prepared, tamper, value, memory, estimator):
    problem, _, _ = prepared("regression")
    tamper(3, 1, 5, value)
    with pytest.warns(FoldWarning, match=r"1 of 40 folds flagged: not finite: 1 of 40 folds \(3\)"):
        result = run(prepared, estimator=estimator, memory=memory)
    assert np.isnan(result.folds["elpd"].values[3])
    assert result.folds["status"].values[3] == "not finite"
    assert np.isfinite([result.elpd, result.se, result.mcse, result.ess, result.optimism]).all()
    assert np.isfinite([result.rhat_max, *result.rhat_benchmark]).all()
    exact = np.delete(problem.joint(), 3)
    assert abs(result.elpd - exact.sum()) < 4 * result.mcse
    assert result.score("log").left_out == 1
    assert "39 of 40 folds" in str(result)


def test_rows_that_are_not_a_number_are_left_out_aloud(prepared, tamper):
    tamper(2, 0, 7, np.nan)
    with pytest.warns(FoldWarning, match="not finite: 1 of 5 folds"):
        result = run(prepared, "five_fold")
    assert np.isnan(result.folds["elpd"].values[2])
    assert np.isfinite([result.elpd, result.se, result.mcse, result.optimism]).all()


def test_zero_density_is_a_number():
    """A test row that is impossible for half of the fold's posterior: averaged as zero."""
    problem = problems.regression()
    first = np.arange(40) == 0
    y = problem.y
    limit = y[1:].mean()

    def log_likelihood(mu):
        rows = -0.5 * (y - mu) ** 2 - 0.5 * jnp.log(2 * jnp.pi)
        return jnp.where(first, jnp.where(mu < limit, 0.0, -jnp.inf), rows)

    model = fw.Model(lambda mu: -0.5 * mu**2 / 9, log_likelihood, limit - 1.0, n_obs=40)
    folds = fw.leave_one_out(40)[:1]
    with pytest.warns(FoldWarning, match="not finite"):
        result = by_chains(
            model, folds, estimator="mean", seed=1, progress=False, draws=1000, batch=20
        )
    # the score is log Pr(mu < limit) under N(mean, 1 / precision)
    from scipy.stats import norm

    precision = 39 + 1 / 9
    exact = norm.logcdf(limit, y[1:].sum() / precision, 1 / np.sqrt(precision))
    assert -3 < exact < -0.2
    assert abs(result.folds["elpd"].values[0] - exact) < 4 * result.folds["mcse"].values[0]
    assert result.folds["status"].values[0] == "not finite"


@pytest.mark.parametrize("memory", ["draws", "online"])
def test_an_impossible_row_does_not_stop_the_others(memory):
    """Uniform(0, e^q): without the largest value, most draws give it no density at all."""
    y = np.append(np.linspace(0.1, 1.0, 14), 30.0)
    model = fw.Model(
        lambda q: -0.5 * q**2 / 25,
        lambda q: jnp.where(y < jnp.exp(q), -q, -jnp.inf),
        3.6,
        n_obs=15,
    )
    with pytest.warns(FoldWarning, match="not finite"):
        result = by_chains(model, fw.leave_one_out(15), memory=memory, seed=1, progress=False)
    assert result.folds["status"].values[14] == "not finite"
    assert np.isfinite(result.folds["elpd"].values[:14]).all() and np.isfinite(result.elpd)


def test_a_poor_fit_is_said_in_the_result(prepared):
    from dataclasses import replace

    problem, model, fit = prepared("regression")
    poor = replace(fit, divergences=7)
    result = by_chains(model, problem.folds, fit=poor, seed=1, progress=False)
    assert "check the full-data fit first: 7 divergent transitions" in str(result)


def test_a_stuck_chain_is_flagged(prepared, tamper):
    tamper(7, 2, slice(None), -1.0, still=True)
    with pytest.warns(FoldWarning, match=r"stuck chain: 1 of 40 folds \(7\)"):
        result = run(prepared)
    assert np.flatnonzero(result.folds["status"] != "fine").tolist() == [7]
    assert result.flagged.sizes["fold"] == 1
    assert np.isfinite(result.elpd)


def test_a_fold_is_flagged_when_the_draws_it_borrows_are_bad(prepared, tamper):
    """In leave-future-out the bridge of a fold uses the draws of the next."""
    problem, model, fit = prepared("autoregression")
    tamper(7, 2, slice(None), -1.0, still=True)
    with pytest.warns(FoldWarning, match=r"partner in trouble: 1 of 36 folds \(10\)"):
        result = by_chains(model, problem.folds, fit=fit, seed=1, progress=False)
    names = result.flagged["fold"].values.tolist()
    status = dict(zip(names, result.flagged["status"].values.tolist(), strict=True))
    assert status == {names[0]: "partner in trouble", names[1]: "stuck chain"}


def test_interrupting_a_run_leaves_nothing_behind(prepared, monkeypatch):
    result = run(prepared)
    before, elpd = result.draws.copy(), result.elpd
    original, calls = sampler_module.run_block, []

    def interrupted(*arguments):
        for item in original(*arguments):
            calls.append(item)
            yield item
            raise KeyboardInterrupt

    monkeypatch.setattr(sampler_module, "run_block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        result.extend(100)
    with pytest.raises(KeyboardInterrupt):
        run(prepared)
    assert len(calls) == 2
    monkeypatch.undo()
    np.testing.assert_array_equal(result.draws, before)
    assert result.elpd == elpd
    longer = result.extend(50, progress=False)
    assert longer.info["draws"] == 150 and longer.draws.shape[2] == 150


def test_progress_says_what_is_going_on(prepared, capsys):
    run(prepared, progress=True)
    captured = capsys.readouterr()
    assert captured.err.startswith("foldwise:   0 s  cross-validation") and captured.out == ""


def test_leave_one_out_of_many_rows_is_small():
    folds = fw.leave_one_out(20_000)
    arrays = [value for value in vars(folds).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) < 10e6
