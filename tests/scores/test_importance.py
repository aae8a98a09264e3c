"""Scores of folds from full-data draws alone, against closed forms.

Means of groups with known variances: the full-data posterior is normal, so its draws are exact and
no chain is needed, and so are the predictive densities of all folds. Cells integrate the groups'
effects out; what importance sampling still has to do is the mean.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from problems import LinearProblem, regression
from scipy.special import logsumexp

import foldwise as fw
from foldwise.models.structure import find_cells
from foldwise.scores import importance
from foldwise.scores.importance import by_importance
from foldwise.scores.smoothing import k_limit, smoothed
from foldwise.scores.weighing import FullSample
from foldwise.support.memory import limited

SIZES = np.array([2, 3, 4, 6, 8])
GROUP = np.repeat(np.arange(len(SIZES)), SIZES)
N = len(GROUP)
CHAINS, DRAWS = 4, 1000
BOTH = ("log", "log_pointwise")
FOLDS = {
    "leave-group-out": lambda: fw.leave_group_out(GROUP),
    "leave-one-out": lambda: fw.leave_one_out(N),
    "10-fold": lambda: fw.k_fold(N, 10, seed=3),
    "h-block": lambda: fw.h_block(N, 2),
    "hv-block": lambda: fw.hv_block(N, 2, 1),
}


@cache
def groups() -> LinearProblem:
    rng = np.random.default_rng(3)
    X = np.column_stack([np.ones(N), 1.0 * (GROUP[:, None] == np.arange(len(SIZES)))])
    y = 0.3 + rng.normal(size=len(SIZES))[GROUP] + 1.5 * rng.normal(size=N)
    prior = np.concatenate([[2.0], np.ones(len(SIZES))])
    return LinearProblem(X, y, 1.5, prior, fw.leave_group_out(GROUP), "groups")


@cache
def plain() -> LinearProblem:
    return regression()


@cache
def model_of(problem):
    model = problem().model()
    return model, find_cells(model, posterior(problem, 0).positions)


def posterior(problem, seed, draws=DRAWS) -> FullSample:
    """Exact draws of the full-data posterior."""
    of = problem()
    precision = of.X.T @ of.X / of.noise**2 + np.diag(1 / of.prior**2)
    covariance = np.linalg.inv(precision)
    mean = covariance @ of.X.T @ of.y / of.noise**2
    positions = np.random.default_rng([seed, 7]).multivariate_normal(mean, covariance, draws)
    return FullSample(positions, CHAINS, 10)


def scores(name, seed, scores=BOTH, everything=True):
    model, structure = model_of(groups)
    folds = FOLDS[name]()
    return by_importance(model, structure, folds, posterior(groups, seed), scores, everything)


@cache
def exact(name, score):
    of = replace(groups(), folds=FOLDS[name]())
    return of.joint() if score == "log" else of.pointwise()


def total_z(found, name, score):
    """Error of the total in its Monte Carlo errors."""
    weight = FOLDS[name]().fold_weight
    error = np.sqrt(found.draws.variance(found.influence[score]))
    return weight @ (found.folds[score].value - exact(name, score)) / error, error


# ---------------------------------------------------------------- closed forms


def test_groups_are_cells():
    _, structure = model_of(groups)
    assert len(structure) == len(SIZES)
    assert structure.globals.tolist() == [0]


@pytest.mark.parametrize("name", FOLDS)
def test_scores_of_folds_and_totals(name):
    found = scores(name, 0)
    assert found.used.all() and not found.unsettled.any()
    assert (found.pareto_k < k_limit(DRAWS)).all()
    for score in BOTH:
        of_folds = found.folds[score]
        off = of_folds.value - exact(name, score)
        error = np.sqrt(of_folds.variance)
        assert np.abs(off / error).max() < 5
        assert error.max() < 0.1
        z, total_error = total_z(found, name, score)
        assert abs(z) < 4
        # the effects are integrated out: what is left is the mean, 1 of 6 parameters
        assert total_error < 0.2


def test_the_folds_of_full_data():
    """Full-data scores of folds and rows are plain means over draws."""
    found = scores("10-fold", 0)
    of, folds = groups(), FOLDS["10-fold"]()
    q = found.draws.positions
    rows = -0.5 * ((of.y - q @ of.X.T) / of.noise) ** 2 - np.log(of.noise * np.sqrt(2 * np.pi))
    joint = [np.log(np.exp(rows[:, test].sum(axis=1)).mean()) for _, test in folds]
    np.testing.assert_allclose(found.full_folds, joint, rtol=0, atol=1e-10)
    single = np.log(np.exp(rows).mean(axis=0))[folds.test_rows]
    np.testing.assert_allclose(found.full_rows, single, rtol=0, atol=1e-10)


def test_rows_add_up_to_folds():
    found, folds = scores("10-fold", 0), FOLDS["10-fold"]()
    summed = np.add.reduceat(found.rows["log_pointwise"].value, folds.test_start[:-1])
    np.testing.assert_allclose(found.folds["log_pointwise"].value, summed, rtol=0, atol=1e-12)
    of = groups()
    single = [of._log_density(train, [i]) for train, test in folds for i in test]
    z = (found.rows["log_pointwise"].value - single) / np.sqrt(found.rows["log_pointwise"].variance)
    assert np.abs(z).max() < 5


@pytest.mark.parametrize("name", FOLDS)
def test_errors_of_totals_over_seeds(name):
    found = [scores(name, seed) for seed in range(20)]
    for score in BOTH:
        z = np.array([total_z(each, name, score)[0] for each in found])
        assert 0.6 < np.sqrt((z**2).mean()) < 1.5
        assert abs(z.mean()) < 4 / np.sqrt(20)


# ---------------------------------------------------------------- no cells: plain PSIS


def log_likelihood(of, positions):
    z = (of.y - positions @ of.X.T) / of.noise
    return -0.5 * z**2 - np.log(of.noise * np.sqrt(2 * np.pi))


def test_without_cells_it_is_pareto_smoothed_importance_sampling():
    from arviz_base import from_dict
    from arviz_stats import loo

    model, structure = model_of(plain)
    assert len(structure) == 0
    draws = posterior(plain, 1)._replace(length=1)
    found = by_importance(model, structure, plain().folds, draws, ("log",), True)
    rows = log_likelihood(plain(), draws.positions)
    by_chain = rows.reshape(CHAINS, -1, rows.shape[1])
    data = from_dict({"posterior": {"b": by_chain[..., 0]}, "log_likelihood": {"y": by_chain}})
    theirs = loo(data, pointwise=True, reff=1.0)
    np.testing.assert_allclose(found.pareto_k, theirs.pareto_k, rtol=0, atol=1e-8)
    # half of the relative variances of the two means, of draws that are independent
    log_weight = smoothed(rows.T)[0]
    plain_value = logsumexp(log_weight + rows.T, axis=1)
    weight = np.exp(log_weight) * DRAWS
    above = weight * np.exp(rows.T - plain_value[:, None])
    correction = 0.5 * (above.var(axis=1, ddof=1) - weight.var(axis=1, ddof=1)) / DRAWS
    value = found.folds["log"].value
    np.testing.assert_allclose(value - correction, plain_value, rtol=0, atol=1e-8)
    # theirs differ by how the tail of the weights is smoothed alone
    gap = (plain_value - theirs.elpd_i.values) / np.sqrt(found.folds["log"].variance)
    assert np.abs(gap).max() < 0.3
    np.testing.assert_allclose(
        found.folds["log"].variance, (above - weight).var(axis=1, ddof=1) / DRAWS, atol=1e-12
    )


def test_folds_that_cannot_be_relied_on_are_left_to_chains():
    """Half of the rows of a regression out: the weights of few draws have a heavy tail."""
    model, structure = model_of(plain)
    rows = np.arange(40)
    folds = fw.from_splits([(rows[1:], [0]), (rows[rows % 4 == 0], rows[rows % 4 > 0])], 40)
    draws = posterior(plain, 2)
    some = by_importance(model, structure, folds, draws, BOTH, everything=False)
    assert some.used.tolist() == [True, False]
    assert some.pareto_k[1] > k_limit(DRAWS)
    every = by_importance(model, structure, folds, draws, BOTH, everything=True)
    assert every.used.all()
    for score in BOTH:
        np.testing.assert_array_equal(some.folds[score].value, every.folds[score].value)
        first = by_importance(model, structure, folds[[0]], draws, ("log",), True).influence["log"]
        np.testing.assert_allclose(some.influence[score], first, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- in pieces


@pytest.mark.parametrize("name", ["leave-one-out", "10-fold"])
def test_pieces_give_what_one_piece_gives(monkeypatch, name):
    whole = scores(name, 0)
    monkeypatch.setattr(importance, "VALUES", 16 * DRAWS)
    calls = []
    inner = importance.evaluated
    monkeypatch.setattr(importance, "evaluated", lambda *given: calls.append(1) or inner(*given))
    pieces = scores(name, 0)
    assert len(calls) > 1
    assert pieces.used.tolist() == whole.used.tolist()
    np.testing.assert_allclose(pieces.pareto_k, whole.pareto_k, rtol=0, atol=1e-3)
    np.testing.assert_allclose(pieces.full_folds, whole.full_folds, rtol=0, atol=1e-12)
    np.testing.assert_allclose(pieces.full_rows, whole.full_rows, rtol=0, atol=1e-12)
    assert list(pieces.rows) == (["log_pointwise"] if name == "10-fold" else [])
    for score, found in pieces.rows.items():
        np.testing.assert_allclose(found.value, whole.rows[score].value, rtol=0, atol=1e-4)
    for score in BOTH:
        for part in ("value", "variance", "spread"):
            ours, theirs = (getattr(each.folds[score], part) for each in (pieces, whole))
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(
            pieces.influence[score], whole.influence[score], rtol=1e-3, atol=1e-3
        )


def test_as_many_numbers_at_once_as_the_draws_have(monkeypatch):
    monkeypatch.setattr(importance, "VALUES", 500)
    assert importance.held_at_once(100, 3) == 500
    assert importance.held_at_once(100, 2000) == 200_000
    with limited(10**7):
        assert importance.held_at_once(100, 2000) == 75_000


def test_blocks_give_what_one_block_gives(monkeypatch):
    whole = scores("10-fold", 0)
    monkeypatch.setattr(importance, "_BLOCK_VALUES", 3 * DRAWS)
    blocks = scores("10-fold", 0)
    np.testing.assert_array_equal(blocks.pareto_k, whole.pareto_k)
    for score in BOTH:
        np.testing.assert_array_equal(blocks.folds[score].value, whole.folds[score].value)
        np.testing.assert_allclose(blocks.influence[score], whole.influence[score], atol=1e-12)
    np.testing.assert_array_equal(
        blocks.rows["log_pointwise"].variance, whole.rows["log_pointwise"].variance
    )
