"""Cross-validation by chains on the globals alone: closed forms, schemes, files, families."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hard import EightSchools
from problems import FarScale, far_groups

import foldwise as fw

SETTINGS = {"method": "mcmc", "draws": 100, "progress": False}
SCHEMES = {
    "group": (lambda group: fw.leave_group_out(group), "log"),
    "by row": (lambda group: fw.k_fold(len(group), 4, seed=1), "log_pointwise"),
    "future": (lambda group: fw.leave_future_out(len(group), 12, horizon=2, step=2), "log"),
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
    for k in range(2):
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


def test_members_of_a_family_are_sampled_side_by_side(seed):
    problem = far_groups(0.5, rows=3, groups=4)
    X, y, prior = problem.X, problem.y, problem.prior

    def log_likelihood(beta, scale):
        return -0.5 * ((y - X @ (scale * beta)) / 1.5) ** 2 - jnp.log(1.5 * jnp.sqrt(2 * jnp.pi))

    family = fw.model_family(
        lambda beta, scale: -0.5 * jnp.sum((beta / prior) ** 2),
        log_likelihood,
        np.zeros(5),
        12,
        selections=[[1.0], [0.5]],
        names=["whole", "half"],
    )
    results = fw.cross_validate(family, problem.folds, seed=seed, **SETTINGS)
    halved = replace(problem, X=0.5 * X)
    for name, exact in (("whole", problem.joint()), ("half", halved.joint())):
        assert "integrated out" in results[name].info["sampled"]
        assert np.abs(z_of(results[name], exact)).max() < 4


def test_what_cannot_be_integrated_is_said(schools):
    problem, model = schools
    with pytest.raises(ValueError, match=r"marginal=True cannot be: keep"):
        fw.cross_validate(model, problem.folds, marginal=True, keep="position", **SETTINGS)
    plain = fw.Model(lambda m: -0.5 * m**2, lambda m: -0.5 * (problem.y - m) ** 2, 0.0, 8)
    with pytest.raises(ValueError, match="no parameters belong to a group"):
        fw.cross_validate(plain, problem.folds, marginal=True, seed=1, **SETTINGS)
