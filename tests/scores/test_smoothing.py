"""Weights of full-data draws: smoothed tails and what they are worth, against closed forms.

A row that is left out of a linear model with leverage h and residual r (in sds of the noise) has
log weights f^2 / 2 with f ~ N(r, h) at full-data draws, whose Pareto k is h. The mean of the
weights is exp(r^2 / (2 (1 - h))) / sqrt(1 - h).
"""

import numpy as np
import pytest
from arviz_stats.base import array_stats
from scipy.special import logsumexp

from foldwise.scores.importance import _ratio
from foldwise.scores.smoothing import (
    _expected_share,
    _quadratic,
    k_limit,
    smoothed,
    tail_length,
    uneven,
    worth,
)
from foldwise.scores.weighing import FullSample

DRAWS = 4000


def log_ratios(h, r, folds, seed=0, draws=DRAWS):
    """Log densities of the row at so many draws of each of some folds, up to a constant."""
    f = r + np.sqrt(h) * np.random.default_rng(seed).normal(size=(folds, draws))
    return -0.5 * f**2


def log_score(h, r):
    return -0.5 * r**2 / (1.0 - h) + 0.5 * np.log1p(-h)


@pytest.mark.parametrize(("h", "r"), [(0.2, 1.0), (0.35, 0.5), (0.45, 0.0)])
def test_scores_and_their_errors(h, r):
    """Means of 300 folds within four errors of the mean; smoothing by quantiles is 5 to 9 off."""
    m = log_ratios(h, r, 300)
    found, _ = _ratio(smoothed(m)[0], m, FullSample(np.zeros((DRAWS, 1)), 4, 60))
    z = (found.value - log_score(h, r)) / np.sqrt(found.variance)
    assert abs(z.mean()) < 4 / np.sqrt(len(z))
    assert 0.87 < np.sqrt(np.mean(z**2)) < 1.13


def test_only_the_tail_is_smoothed_and_has_the_mean_of_its_density():
    m = log_ratios(0.4, 0.5, 6)
    weights, k = smoothed(m)
    theirs, their_k = array_stats.psislw(m)
    np.testing.assert_allclose(k, their_k, rtol=1e-12)
    order, tail = np.argsort(-m, axis=1), tail_length(DRAWS)
    body, top = order[:, :-tail], order[:, -tail:]
    for change in (weights + m, theirs + m):
        assert np.ptp(np.take_along_axis(change, body, axis=1), axis=1).max() < 1e-10
    one, two = (np.exp(np.take_along_axis(w, top, axis=1)) for w in (weights, theirs))
    assert (np.diff(one, axis=1) > 0).all()
    # quantiles in the middle, where they are not cut off, tell the density
    c = np.exp(np.take_along_axis(theirs, order[:, -tail - 1 : -tail], axis=1))
    p = (np.arange(tail) + 0.5) / tail
    scale = (two - c) / (((1 - p) ** -k[:, None] - 1) / k[:, None])
    np.testing.assert_allclose(scale[:, 5 : tail // 2], scale[:, [9]].repeat(tail // 2 - 5, 1))
    constant = np.exp((weights - theirs)[np.arange(6), body[:, 0]])
    # the scale of quantiles with the shape that is shown is that of the density with its own
    shape = ((tail + 10) * k - 5) / tail
    mean = (c[:, 0] + scale[:, 9] / (1 - shape)) * constant
    np.testing.assert_allclose(one.mean(axis=1), mean, rtol=1e-9)


def test_light_tails_are_left_with_the_mean_they_have():
    """Of log-normal weights, whose mean has no bias; errors of one sign add up over folds."""
    m = 0.8 * np.random.default_rng(4).normal(size=(300, DRAWS))
    plain = np.log(DRAWS) - logsumexp(-m, axis=1)
    score = logsumexp(smoothed(m)[0] + m, axis=1)
    assert abs((score - plain).mean()) < 0.05 * plain.std()


def test_a_tail_without_a_usable_mean_is_as_arviz_has_it():
    m = log_ratios(0.95, 1.0, 3)
    weights, k = smoothed(m)
    assert (k > k_limit(DRAWS)).all()
    np.testing.assert_allclose(weights, array_stats.psislw(m)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("h", "r"), [(0.05, 2.0), (0.2, 0.0), (0.3, 0.7), (0.4, 0.2)])
def test_what_weights_are_expected_to_be_worth(h, r):
    """E[w]^2 / E[w^2] for w = exp(f^2 / 2), f ~ N(r, h)."""
    square = r**2 / (1.0 - 2.0 * h) - 0.5 * np.log(1.0 - 2.0 * h)
    share = np.exp(-2.0 * log_score(h, r) - square)
    found = _expected_share(log_ratios(h, r, 50, draws=10 * DRAWS))
    assert found.mean() == pytest.approx(share, rel=0.03)
    assert _expected_share(log_ratios(h, r, 50)).std() < 0.1
    m = log_ratios(h, r, 50)
    as_expected = worth(smoothed(m)[0], m) == DRAWS * _expected_share(m)
    assert as_expected.mean() > 0.9


@pytest.mark.parametrize(("a", "h"), [(1.0, 0.0), (0.8, 0.3), (0.3, 0.3), (0.0, 0.2), (0.5, -0.2)])
def test_the_quadratic_that_log_weights_are(a, h):
    """Half of them at least within the standard errors of quantiles of 40,000 draws."""
    z = np.random.default_rng(2).normal(size=(20, 40_000))
    found = _quadratic(-(a * z + 0.5 * h * z**2))
    np.testing.assert_allclose(np.median(found, axis=1), (a, h), rtol=0.03, atol=0.03)


def test_what_is_used_on_the_border_is_hardly_too_high():
    """Folds whose weights are worth the least that is used: errors of those used, over their sd.

    0.5 where moments of the logs decide, which the largest weights move as they move the score.
    """
    h, a = 0.2, np.sqrt(0.424)
    m = -(a * (z := np.random.default_rng(3).normal(size=(600, DRAWS))) + 0.5 * h * z**2)
    weights, k = smoothed(m)
    used = ~uneven(k, worth(weights, m), DRAWS)
    score = logsumexp(weights + m, axis=1)
    assert 0.35 < used.mean() < 0.65
    assert (score[used].mean() - score.mean()) / score.std() < 0.3


def test_tails_that_are_heavier_than_those_of_a_quadratic():
    """log w rises with the third power in the tail: quantiles alone expect what is not there."""
    z = np.random.default_rng(5).normal(size=(40, DRAWS))
    bulk = np.exp(-(0.6**2))
    np.testing.assert_allclose(_expected_share(-0.6 * z), bulk, rtol=0.1)
    found = _expected_share(-0.6 * np.where(z > 1.5, z + 2.0 * (z - 1.5) ** 3, z))
    assert np.mean(found < 0.75 * bulk) > 0.8


def test_what_weights_are_worth_where_little_can_be_expected():
    m = log_ratios(0.6, 0.5, 3)
    assert (worth(smoothed(m)[0], m) == 0).all()
    assert (worth(smoothed(m)[0], None) > 0.05 * DRAWS).all()
    # one draw that is worth more than all others: no moment of the logs sees it
    m = 0.01 * np.random.default_rng(1).normal(size=(1, DRAWS))
    m[0, 7] = -9.0
    weights = -m - np.log(np.exp(-m).sum())
    found = 1.0 / np.exp(2.0 * weights).sum()
    assert found < 0.3 * DRAWS
    assert worth(weights, m)[0] == pytest.approx(found)


def test_weights_that_are_equal_or_no_numbers():
    m = np.random.default_rng(0).normal(size=(4, 200))
    m[1], m[2, 3], m[3, 5] = 2.5, np.nan, -np.inf
    weight, k = smoothed(m)
    assert np.isfinite(weight[0]).all() and np.isfinite(k[0])
    np.testing.assert_allclose(weight[1], -np.log(200.0))
    assert k[1] == -np.inf
    assert np.isnan(weight[2:]).all() and np.isnan(k[2:]).all()
    np.testing.assert_allclose(np.exp(weight[:2]).sum(axis=1), 1.0, rtol=1e-12)


def test_the_limit_of_pareto_k():
    assert k_limit(100) == pytest.approx(0.5)
    assert k_limit(10**6) == 0.7


def test_uneven_weights():
    k = np.array([0.3, 0.3, 0.65, 0.75, np.nan])
    ess = np.array([1500.0, 1700.0, 1700.0, 3000.0, 3000.0])
    assert uneven(k, ess, 4000).tolist() == [True, False, False, True, True]


def test_the_fit_of_tails_is_that_of_arviz_and_a_flat_one_has_none():
    m = np.concatenate([log_ratios(h, 0.7, 3) for h in (0.1, 0.5, 0.9)])
    m = np.concatenate([m, np.where(np.arange(DRAWS) < DRAWS // 2, 0.0, 1.0)[None]])
    weights, k = smoothed(m)
    theirs, their_k = array_stats.psislw(m[:-1])
    np.testing.assert_allclose(k[:-1], their_k, rtol=1e-12)
    beyond = np.flatnonzero(their_k > k_limit(DRAWS))
    assert 0 < len(beyond) < len(their_k)
    np.testing.assert_allclose(weights[beyond], theirs[beyond], atol=1e-10)
    assert np.isnan(k[-1])  # half of the weights are the largest
    np.testing.assert_allclose(np.exp(weights).sum(axis=1), 1.0)
