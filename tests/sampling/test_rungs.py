"""Folds far from the full data: rungs take them there, or their error is infinite and says so."""

from functools import cache

import numpy as np
import problems
import pytest
from problems import by_chains

from foldwise.results.result import FoldWarning
from foldwise.sampling import rungs as ladder
from foldwise.scores import rungs
from foldwise.scores.logscore import climbed


@cache
def prepared(kind: str, *arguments):
    problem = getattr(problems, kind)(*arguments)
    return problem, problem.model()


def run(kind, *arguments, folds=None, **options):
    problem, model = prepared(kind, *arguments)
    chosen = problem.folds if folds is None else problem.folds[folds]
    return by_chains(model, chosen, progress=False, **options)


def errors(result, exact):
    return (result.folds["elpd"].values - exact) / result.folds["mcse"].values


@pytest.mark.parametrize("memory", ["draws", "online"])
@pytest.mark.parametrize("distance, rows, far", [(30, 5, 1), (60, 5, 1), (20, 100, 2)])
def test_far_groups_have_the_exact_score(seed, distance, rows, far, memory):
    """Once 10 rungs were all: 60 sds away the score was not a number and left the total."""
    result = run("far_groups", distance, rows, 4, far, seed=seed, memory=memory)
    exact = prepared("far_groups", distance, rows, 4, far)[0].joint()
    assert np.abs(errors(result, exact)).max() < 4
    assert abs(result.elpd - exact.sum()) < 4 * result.mcse < 0.02 * abs(exact.sum())
    assert np.all(result.folds["status"] == "fine")
    assert np.all(result.folds["overlap"] > rungs.LEAST_OVERLAP)


def test_a_longer_run_comes_closer(seed):
    exact = prepared("far_groups", 30, 5, 4, 1)[0].joint()
    result = run("far_groups", 30, 5, 4, 1, seed=seed)
    short = result.folds["mcse"].values[0]
    result.extend(300, progress=False)
    assert result.folds["mcse"].values[0] < 0.7 * short
    assert abs(errors(result, exact)[0]) < 4


def test_errors_are_calibrated(seed):
    """Root mean square z of one far fold; of 16 seeds it lies within these bounds 99.8 % of times.

    bench/rungs.py has more seeds and tighter ones.
    """
    problem, model = prepared("far_groups", 30, 5, 4, 1)
    z = [
        errors(
            by_chains(model, problem.folds[[0]], seed=16 * seed + k, progress=False),
            problem.joint()[0],
        )[0]
        for k in range(16)
    ]
    assert 0.5 < np.sqrt(np.mean(np.square(z))) < 1.55


def test_counts_with_a_far_rate(seed):
    problem, _ = prepared("FarPoisson", 6)
    result = run("FarPoisson", 6, seed=seed, draws=200)
    assert np.abs(errors(result, problem.joint())).max() < 4
    assert len(climbed(result.run.evidence)) > 0


def test_an_unknown_scale_is_right_or_flagged(seed, monkeypatch):
    """The scale of the groups has two regimes on the way up, between which chains hardly move."""
    monkeypatch.setattr(ladder, "MOST_TRIES", 1)
    with pytest.warns(FoldWarning, match="rungs not settled|chains disagree|too slow"):
        result = run("FarScale", 60, folds=[0], seed=seed)
    assert result.folds["mcse"].values[0] == np.inf
    near = prepared("FarScale", 5)[0]
    close = run("FarScale", 5, folds=[0], seed=seed)
    assert abs(errors(close, near.joint()[0])[0]) < 4


def test_too_far_is_no_number_to_trust(seed, monkeypatch):
    monkeypatch.setattr(ladder, "MOST_RUNGS", 12)
    with pytest.warns(FoldWarning, match="too far from its partner: 1 of 4 folds"):
        result = run("far_groups", 60, 5, 4, 1, seed=seed)
    assert result.folds["status"].values[0] == "too far from its partner"
    assert np.isfinite(result.folds["elpd"].values).all()
    assert result.folds["mcse"].values[0] == np.inf and result.mcse == np.inf
    assert result.elpd == pytest.approx(float(result.folds["elpd"].sum()))
    assert np.isfinite(result.folds["mcse"].values[1:]).all()
    assert "too far from its partner" in str(result)


@pytest.mark.parametrize("scores", ["log_pointwise", "hyvarinen", ("hyvarinen", "log_pointwise")])
def test_rungs_only_for_scores_that_use_them(seed, scores):
    plain = run("far_groups", 30, 5, 4, 1, seed=seed, scores="log", estimator="mean")
    result = run("far_groups", 30, 5, 4, 1, seed=seed, scores=scores)
    assert result.info["gradients"] == plain.info["gradients"]
    with_rungs = run("far_groups", 30, 5, 4, 1, seed=seed, scores="log")
    assert with_rungs.info["gradients"] > 2 * plain.info["gradients"]


def test_curvature_scores_of_far_folds_come_from_the_full_data(seed):
    problem, _ = prepared("far_groups", 30, 5, 4, 1)
    alone = run("far_groups", 30, 5, 4, 1, seed=seed, scores="hyvarinen").score("hyvarinen")
    both = run("far_groups", 30, 5, 4, 1, seed=seed, scores=("hyvarinen", "log"))
    beside = both.score("hyvarinen")
    assert alone.total == pytest.approx(beside.total)
    z = (alone.folds["score"].values - problem.exact("hyvarinen")) / alone.folds["mcse"].values
    assert np.abs(z).max() < 4
    assert alone.folds["status"].values[0] == "fine" and np.isnan(alone.folds["overlap"].values[0])


def test_online_keeps_no_draws_of_rungs(seed):
    result = run("far_groups", 30, 5, 4, 1, seed=seed, memory="online")
    ladder = result.run.evidence.ladder
    assert ladder.rungs == [] and len(ladder.climbed) > 0
    assert all(way.own is None for way in ladder.climbed)
