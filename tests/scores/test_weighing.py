"""Scores other than the log score from weighted full-data draws."""

from dataclasses import replace
from functools import cache

import numpy as np
import problems
import pytest

import foldwise as fw
from foldwise.models.structure import without_cells
from foldwise.scores.importance import by_importance
from foldwise.scores.rule import Drawn, Sample
from foldwise.scores.rules import RULES, find_rule
from foldwise.scores.weighing import FullSample

BY_ROW = ("mse", "mae", "crps", "scrps", "interval", "dss_pointwise", "hyvarinen_pointwise")
JOINT = {
    "leave-one-out": (),
    "20-fold": ("hyvarinen", "dss", "energy"),
    "hv-block": ("dss",),
}
CHAINS, DRAWS, SEEDS = 4, 2000, 8
FOLDS = {
    "leave-one-out": lambda n: fw.leave_one_out(n),
    "20-fold": lambda n: fw.k_fold(n, 20, seed=3),
    "hv-block": lambda n: fw.hv_block(n, 1, 1),
}


@cache
def problem(scheme):
    plain = problems.regression()
    return replace(plain, folds=FOLDS[scheme](len(plain.y)))


@cache
def model():
    return problems.regression().model()


def scored(scheme, seed, names):
    """Scores from exact draws of the full-data posterior."""
    of = problem(scheme)
    precision = of.X.T @ of.X / of.noise**2 + np.diag(1 / of.prior**2)
    covariance = np.linalg.inv(precision)
    mean = covariance @ of.X.T @ of.y / of.noise**2
    positions = np.random.default_rng([seed, 7]).multivariate_normal(mean, covariance, DRAWS)
    draws = FullSample(positions, CHAINS, 5)
    return by_importance(model(), without_cells(model()), of.folds, draws, names, False, seed)


@pytest.mark.parametrize("scheme", FOLDS)
def test_errors_are_calibrated(scheme):
    of = problem(scheme)
    names = (*BY_ROW, *JOINT[scheme])
    totals, folds = {name: [] for name in names}, {name: [] for name in names}
    used = []
    for seed in range(SEEDS):
        found = scored(scheme, seed, names)
        for name in names:
            size = of.folds.n_test if find_rule(name).aggregate is not None else 1.0
            error = found.folds[name].value - of.exact(name) * size
            z = error / np.sqrt(found.folds[name].variance)
            folds[name].append(np.where(found.used, z, 0.0))
            variance = found.draws.variance(found.influence[name])
            weight = np.where(found.used, of.folds.fold_weight, 0.0)
            totals[name].append(weight @ error / np.sqrt(variance))
        used.append(found.used)
    for name in names:
        # replicates of different rows are independent, so totals and folds are many numbers
        rms = np.sqrt(np.sum(np.square(folds[name])) / np.sum(used))
        assert 0.75 < rms < 1.3, (name, rms)
        total = np.sqrt(np.mean(np.square(totals[name])))
        assert total < 2.0, (name, total)  # 99.99 % of sqrt(chi2_8 / 8) is 2.0
        assert abs(np.mean(totals[name])) < 1.5, name  # 4.2 errors of a mean of 8


def test_equal_weights_are_none(rng):
    """A rule with weights that are all 3 is the rule without."""
    x, y = rng.normal(size=(4, 2, 60)), rng.normal(size=4)
    counts = np.array([2, 2])
    recorded = {"replicate": x, "first": x, "second": 0.5 * x}
    plain = Drawn(counts, y, recorded, 2, np.zeros(0), 5)
    for name, rule in {**RULES, "interval": find_rule("interval")}.items():
        contribution = rule.contribution
        if contribution is None or rule.discrete:
            continue
        units = 4 if contribution.by_row else 2
        weight = np.full((units, 2, 60), 3.0)
        one, two = (
            contribution.features(plain),
            contribution.features(plain._replace(weight=weight)),
        )
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-12, err_msg=name)
        sums = np.add.reduceat(one, np.arange(0, 60, 5), axis=2)
        without = Sample(sums, 5, 60, 12)
        weighted = Sample(3.0 * sums, 5, 60, 12, weight=np.full((units, 2, 12, 1), 15.0))
        np.testing.assert_allclose(weighted.mean, without.mean, rtol=0, atol=1e-12)
        np.testing.assert_allclose(weighted.without, without.without, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["crps", "interval", "dss_pointwise", "energy", "dss"])
def test_a_whole_weight_is_as_many_draws(rng, name):
    """Means over weighted draws are those over draws that are repeated."""
    contribution = find_rule(name).contribution
    x, y = rng.normal(size=(2, 1, 400)), rng.normal(size=2)
    times = rng.integers(0, 4, 400)
    units = 2 if contribution.by_row else 1
    weight = np.broadcast_to(times.astype(float), (units, 1, 400))
    drawn = Drawn(np.array([2]), y, {"replicate": x}, 2, np.zeros(0), 1, weight)
    features = contribution.features(drawn)
    mean = (features * weight[..., None]).sum(axis=(1, 2)) / times.sum()
    again = np.repeat(x, times, axis=2)
    repeated = contribution.features(drawn._replace(recorded={"replicate": again}, weight=None))
    # a draw's distance to its own copies counts for those that are repeated: about 1 / n
    np.testing.assert_allclose(mean, repeated.mean(axis=(1, 2)), rtol=0.02)


@pytest.mark.parametrize("scheme", ["leave-one-out", "20-fold"])
def test_cross_validation_without_chains(scheme):
    of = problem(scheme)
    names = ("log", "crps", "mse", "dss", "r2")
    found = fw.cross_validate(of.model(), of.folds, scores=names, seed=3, progress=False)
    assert np.mean(found.folds["method"].values == "importance") >= 0.9
    for name in names:
        score = found.score(name)
        assert abs(score.total - of.exact_total(name)) < 4 * score.mcse, name
        assert score.mcse > 0 and np.isfinite(score.se)
        z = (score.folds[find_rule(name).column] - of.exact(name)) / score.folds["mcse"]
        assert np.abs(z).max() < 4.5, name
    chains = problems.by_chains(of.model(), of.folds, scores=names, seed=4, progress=False)
    error = np.hypot(found.calibration["mcse"], chains.calibration["mcse"])
    gap = (found.calibration["below"] - chains.calibration["below"]) / error
    assert np.abs(gap).max() < 4.5
    assert found.pit().shape == chains.pit().shape
    both = fw.compare({"weights": found, "chains": chains}, score="crps")
    assert "crps" in str(both)


def test_other_scores_where_groups_are_integrated_out_have_chains():
    of = problems.hierarchical()
    arguments = {"scores": ("log", "crps"), "draws": 50, "seed": 1, "progress": False}
    some = of.folds[:4]
    found = fw.cross_validate(of.model(), some, **arguments)
    assert set(found.folds["method"].values) == {"mcmc"}
    with pytest.raises(ValueError, match="crps was asked for"):
        fw.cross_validate(of.model(), some, method="importance", **arguments)


def test_classes_without_chains():
    of = problems.Classes()
    found = fw.cross_validate(
        of.model(), of.folds, scores=("brier", "accuracy"), seed=2, progress=False
    )
    assert set(found.folds["method"].values) == {"importance"}
    for name in ("brier", "accuracy"):
        score = found.score(name)
        assert abs(score.total - of.exact_total(name)) < 4 * max(score.mcse, 1e-9), name


def test_chains_and_weights_in_one_result(tmp_path):
    """An outlier's fold has chains; its scores stand beside those by weights."""
    plain = problems.regression()
    y = plain.y.copy()
    X = plain.X.copy()
    y[0], X[0] = y[0] + 25.0, 6.0 * X[0]
    of = replace(plain, X=X, y=y)
    names = ("crps", "log")
    found = fw.cross_validate(of.model(), of.folds, scores=names, seed=3, progress=False)
    assert set(found.folds["method"].values) == {"importance", "mcmc"}
    for name in names:
        score = found.score(name)
        assert abs(score.total - of.exact_total(name)) < 4 * score.mcse, name
    assert found.calibration.sizes["test_row"] == len(y)
    found.save(tmp_path / "both.nc")
    again = fw.load(tmp_path / "both.nc")
    assert again.score("crps").total == found.score("crps").total
    np.testing.assert_array_equal(again.calibration["below"], found.calibration["below"])
