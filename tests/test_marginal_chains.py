"""Cross-validation by chains on the globals alone: closed forms, schemes, files, families."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from effects import Effects, Group
from hard import EightSchools
from problems import FarScale, far_groups

import foldwise as fw
from foldwise.results.extend import extend
from foldwise.scores.diagnostics import by_parameter
from foldwise.scores.rules import column

SETTINGS = {"method": "mcmc", "draws": 100, "progress": False}
SCHEMES = {
    "group": (lambda group: fw.leave_group_out(group), "log"),
    "by row": (lambda group: fw.k_fold(len(group), 4, seed=1), "log_pointwise"),
    "future": (lambda group: fw.leave_future_out(len(group), 12, horizon=2, step=2), "log"),
    "buffers": (lambda group: fw.h_block(len(group), 2)[1::3], "log"),
}


def z_of(result, exact):
    return (result.folds["elpd"].values - exact) / result.folds["mcse"].values


@pytest.mark.parametrize("scheme", SCHEMES)
def test_groups_of_normal_rows_have_exact_scores(scheme, seed):
    make, score = SCHEMES[scheme]
    problem = far_groups(0.5, rows=4, groups=6)
    problem = replace(problem, folds=make(np.repeat(np.arange(6), 4)))
    found = fw.cross_validate(
        problem.model(), problem.folds, scores=score, marginal=True, seed=seed, **SETTINGS
    )
    z = z_of(found, problem.exact(score))
    assert found.info["sampled"] == "sampled 1 parameter; 6 integrated out"
    assert found.run.model.rules.density == 2  # exact where all is normal
    assert found.info["parameters"] == 7
    assert np.abs(z).max() < 4
    assert (found.folds["status"].values == "fine").all()


@pytest.fixture(scope="module")
def schools():
    problem = EightSchools(centred=True)
    return problem, problem.model()


def test_centred_eight_schools_have_no_funnel(schools, seed):
    problem, model = schools
    exact = problem.exact()
    for k in range(10):
        found = fw.cross_validate(model, problem.folds, seed=seed + k, **SETTINGS)
        assert found.info["sampled"] == "sampled 2 parameters; 8 integrated out"
        assert (found.folds["status"].values == "fine").all()
        assert found.folds["divergences"].values.sum() == 0
        assert np.abs(z_of(found, exact)).max() < 4
        assert found.mcse < 0.1


def test_a_saved_result_goes_on_like_the_one_in_memory(schools, tmp_path, seed):
    problem, model = schools
    found = fw.cross_validate(model, problem.folds, seed=seed, **SETTINGS)
    found.save(tmp_path / "schools.nc")
    loaded = fw.load(tmp_path / "schools.nc")
    here, there = found.extend(50, progress=False), loaded.extend(50, model, progress=False)
    np.testing.assert_array_equal(here.folds["elpd"].values, there.folds["elpd"].values)
    other = replace(model, y=problem.y + 1.0, log_likelihood=None)
    with pytest.raises(ValueError, match="its own model"):
        fw.load(tmp_path / "schools.nc").extend(50, other, progress=False)


def test_a_far_group_needs_no_rungs(seed):
    problem = FarScale(6.0)
    found = fw.cross_validate(problem.model(), problem.folds, seed=seed, **SETTINGS)
    assert np.abs(z_of(found, problem.joint())).max() < 4
    assert (found.folds["status"].values == "fine").all()


def test_rungs_lead_to_folds_that_leave_out_half_of_the_groups(seed):
    """Half of them are 12 sds away from the others, and so is the mean without them."""
    problem = far_groups(12.0, groups=8, far=4)
    problem = replace(problem, folds=fw.leave_group_out(np.repeat([0, 1], 20)))
    found = fw.cross_validate(problem.model(), problem.folds, seed=seed, **SETTINGS)
    assert found.info["sampled"] == "sampled 1 parameter; 8 integrated out"
    assert found.run.evidence.ladder.rungs
    assert np.abs(z_of(found, problem.joint())).max() < 4


def test_members_of_a_family_are_sampled_side_by_side(seed):
    problem = far_groups(0.5, rows=3, groups=4)
    X, y, prior = problem.X, problem.y, problem.prior

    def log_likelihood(beta, scale):
        return -0.5 * ((y - X @ (scale * beta)) / 1.5) ** 2 - jnp.log(1.5 * jnp.sqrt(2 * jnp.pi))

    def simulate(key, beta, scale):
        return X @ (scale * beta) + 1.5 * jax.random.normal(key, (12,))

    family = fw.model_family(
        lambda beta, scale: -0.5 * jnp.sum((beta / prior) ** 2),
        log_likelihood,
        np.zeros(5),
        12,
        selections=[[1.0], [0.5]],
        names=["whole", "half"],
        simulate=simulate,
        y=y,
    )
    names = ("log", "dss")
    results = fw.cross_validate(family, problem.folds, scores=names, seed=seed, **SETTINGS)
    check_scores(results["whole"], problem, names)
    check_scores(results["half"], replace(problem, X=0.5 * X), names)


# ---------------------------------------------------------------- draws of all parameters


WHOLE = ("log", "hyvarinen", "dss", "crps", "energy", "mse")
KEEP = ("position", "predictive")


@pytest.fixture(scope="module")
def groups():
    problem = far_groups(0.5, rows=4, groups=6)
    return problem, problem.model()


@pytest.fixture(scope="module")
def kept(groups, seed):
    problem, model = groups
    return fw.cross_validate(model, problem.folds, scores=WHOLE, keep=KEEP, seed=seed, **SETTINGS)


def check_scores(found, problem, names):
    """Folds and totals of every score against closed forms, in Monte Carlo errors."""
    assert "integrated out" in found.info["sampled"]
    for name in names:
        score = found.score(name)
        z = (score.folds[column(name)].values - problem.exact(name)) / score.folds["mcse"].values
        assert np.abs(z).max() < 4, name
        assert abs(score.total - problem.exact_total(name)) < 4 * score.mcse, name


def test_scores_from_predictive_draws_and_derivatives_are_exact(groups, kept):
    check_scores(kept, groups[0], WHOLE)
    # the parameters of a group left out whole vary as their prior: what integrating them out saves
    assert kept.score("hyvarinen").mcse < 0.1


def test_kept_positions_are_draws_of_every_folds_posterior(groups, kept):
    problem, _ = groups
    positions = kept.to_datatree()["posterior"]["position"].values
    assert positions.shape == (6, 4, 100, 7)
    for (train, _), own in zip(problem.folds, positions, strict=True):
        X = problem.X[train]
        precision = X.T @ X / problem.noise**2 + np.diag(1 / problem.prior**2)
        covariance = np.linalg.inv(precision)
        mean = covariance @ (X.T @ problem.y[train]) / problem.noise**2
        sd, flat = np.sqrt(np.diag(covariance)), own.reshape(-1, 7)
        error = sd / np.sqrt(np.minimum(by_parameter("ess", own), 400))
        assert (np.abs(flat.mean(axis=0) - mean) < 4 * error).all()
        assert (np.abs(flat.std(axis=0) - sd) < 4 * error).all()
        # what is shared and what is of a group go together as they should
        together = np.corrcoef(flat.T) - covariance / np.outer(sd, sd)
        assert np.abs(together).max() < 0.25


def test_kept_predictive_draws_are_of_the_kept_positions(groups, kept):
    problem, _ = groups
    tree = kept.to_datatree()
    replicate = tree["posterior_predictive"]["y"].values  # chain, draw, test row
    positions = tree["posterior"]["position"].values
    for fold, (_, test) in enumerate(problem.folds):
        rows = np.isin(tree["posterior_predictive"]["row"].values, test)
        noise = replicate[..., rows] - positions[fold] @ problem.X[test].T
        assert abs(noise.std() - problem.noise) < 4 * problem.noise / np.sqrt(2 * noise.size)
        assert abs(noise.mean()) < 4 * problem.noise / np.sqrt(noise.size)


def test_a_run_with_kept_draws_goes_on_whole_or_by_parts(groups, kept, tmp_path):
    problem, model = groups
    kept.save(tmp_path / "kept.nc")
    longer = extend(kept.run, 50, progress=False)  # leaves what others look at as it is
    loaded = fw.load(tmp_path / "kept.nc").extend(50, model, progress=False)
    one, two = (found.run.evidence for found in (longer, loaded))
    np.testing.assert_array_equal(one.position, two.position)
    np.testing.assert_array_equal(one.outcomes.replicate, two.outcomes.replicate)
    assert longer.info["sampled"] == kept.info["sampled"]
    check_scores(longer, problem, WHOLE)


def test_workers_and_checkpoints_give_the_same_draws(groups, kept, seed, tmp_path):
    problem, model = groups
    options = {"scores": WHOLE, "keep": KEEP, "seed": seed, "checkpoint": tmp_path / "run"}
    with ThreadPoolExecutor(1) as executor:
        done = fw.cross_validate(model, problem.folds, executor=executor, **options, **SETTINGS)
    again = fw.cross_validate(model, problem.folds, **options, **SETTINGS)
    for found in (done, again):
        one, two = found.run.evidence, kept.run.evidence
        np.testing.assert_allclose(one.position, two.position, atol=1e-8)
        np.testing.assert_allclose(one.outcomes.replicate, two.outcomes.replicate, atol=1e-8)
        assert found.score("hyvarinen").total == pytest.approx(kept.score("hyvarinen").total)


def test_draws_do_not_depend_on_the_folds_beside(groups, kept, seed):
    problem, model = groups
    part = fw.cross_validate(
        model, problem.folds[2:3], scores=WHOLE, keep=KEEP, seed=seed, **SETTINGS
    )
    whole, own = kept.run.evidence, part.run.evidence
    np.testing.assert_allclose(own.position[0], whole.position[2], atol=1e-8)
    np.testing.assert_allclose(own.outcomes.replicate, whole.outcomes.replicate[8:12], atol=1e-8)


@pytest.mark.parametrize("memory", ["draws", "online"])
def test_scores_by_row_are_exact(groups, memory, seed):
    problem = replace(groups[0], folds=fw.leave_group_out(np.repeat(np.arange(6), 4)))
    names = ("hyvarinen_pointwise", "log_pointwise", "dss_pointwise", "mae")
    found = fw.cross_validate(
        groups[1], problem.folds, scores=names, memory=memory, seed=seed, **SETTINGS
    )
    check_scores(found, problem, names)


def test_hyvarinen_scores_of_the_future_are_exact(groups, seed):
    problem = replace(groups[0], folds=fw.leave_future_out(24, 12, horizon=2, step=2))
    names = ("hyvarinen", "dss")
    found = fw.cross_validate(groups[1], problem.folds, scores=names, seed=seed, **SETTINGS)
    assert (found.run.evidence.previous >= 0).any()
    check_scores(found, problem, names)


def test_what_cannot_be_integrated_is_said(schools, groups, seed):
    problem, model = schools
    names = ("log", "log_pointwise")
    either = "log and log_pointwise are integrated in different ways"
    with pytest.raises(ValueError, match=f"marginal=True cannot be: {either}"):
        fw.cross_validate(
            groups[1], groups[0].folds, marginal=True, scores=names, seed=seed, **SETTINGS
        )
    found = fw.cross_validate(groups[1], groups[0].folds, scores=names, seed=seed, **SETTINGS)
    assert found.info["sampled"] == f"sampled all parameters: {either}"
    assert either in " ".join(str(found).split())
    assert either in found.extend(20, progress=False).info["sampled"]
    plain = fw.Model(lambda m: -0.5 * m**2, lambda m: -0.5 * (problem.y - m) ** 2, 0.0, 8)
    with pytest.raises(ValueError, match="no parameters belong to a group"):
        fw.cross_validate(plain, problem.folds, marginal=True, seed=1, **SETTINGS)


def test_a_fit_agrees_with_nuts_on_all_parameters():
    """Means, squares, and shares below quantiles, of counts with effects of groups."""
    model = Effects([Group(1, "Poisson", rows=3) for _ in range(8)]).model
    ours = fw.fit(model, seed=1, progress=False)
    theirs = fw.fit(model, seed=2, marginal=False, draws=2000, progress=False)
    assert ours.sampled.tolist() == [0, 1] and theirs.sampled is None
    centre, cuts = theirs.flat.mean(axis=0), np.quantile(theirs.flat, [0.05, 0.5, 0.95], axis=0)
    features = [lambda x: x, lambda x: (x - centre) ** 2]
    features += [lambda x, cut=cut: (x < cut) * 1.0 for cut in cuts]
    for feature in features:
        one, two = (feature(fit.positions) for fit in (ours, theirs))
        error = [
            part.reshape(-1, part.shape[-1]).var(axis=0) / by_parameter("ess", part)
            for part in (one, two)
        ]
        z = (one.mean(axis=(0, 1)) - two.mean(axis=(0, 1))) / np.sqrt(sum(error))
        assert np.abs(z).max() < 4.5
