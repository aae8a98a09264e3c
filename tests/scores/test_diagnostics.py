"""Errors, R-hat and its benchmark, tails and status, against formulas and other libraries."""

import numpy as np
import pytest
from arviz_stats.base import array_stats

from foldwise.scores import diagnostics
from foldwise.scores.sums import RunningSums, Watch


def chains(rng, folds, length, draws=100, correlation=0.3):
    """Stationary AR(1) log scores of ``length`` chains per fold, each fold with its own level."""
    noise = rng.normal(size=(folds, length, draws)) * np.sqrt(1 - correlation**2)
    scores = np.empty_like(noise)
    scores[..., 0] = rng.normal(size=(folds, length))
    for t in range(1, draws):
        scores[..., t] = correlation * scores[..., t - 1] + noise[..., t]
    return scores + rng.normal(0.0, 5.0, size=(folds, 1, 1))


def sums_of(scores, batch=10):
    sums = RunningSums.empty(*scores.shape[:2], batch)
    sums.update(np.arange(len(scores)), scores[..., None])
    return sums


def test_batch_means_variance_is_the_formula(rng):
    x = rng.normal(size=(4, 120))
    means = x.reshape(4, 12, 10).mean(axis=2)
    a, b, L, N = 12, 10, 4, 120
    sigma2 = b / (L * a - 1) * ((means - x.mean()) ** 2).sum()
    found = diagnostics.batch_means_variance(means, 10, 120)
    assert found == pytest.approx(sigma2 / (L * N))


def test_batch_means_variance_of_an_autocorrelated_mean(rng):
    """AR(1) with correlation 0.5 has (1 + 0.5) / (1 - 0.5) = 3 times the independent variance."""
    scores = chains(rng, 200, 4, 2000, 0.5)
    means = scores.reshape(200, 4, 40, 50).mean(axis=3)
    found = diagnostics.batch_means_variance(means, 50, 2000).mean()
    assert found == pytest.approx(3 / 8000, rel=0.1)


@pytest.mark.fast
def test_rhat_agrees_with_arviz(rng):
    scores = chains(rng, 20, 4)
    sums = sums_of(scores)
    found = diagnostics.mixing(sums, seed=1).rhat
    expected = [array_stats.rhat(fold, method="identity") for fold in scores]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_rhat_does_not_depend_on_online_blocks(rng):
    """A long run, whose blocks have merged, has the same R-hat as its stored draws."""
    scores = chains(rng, 5, 4, draws=3000)
    found = diagnostics.mixing(sums_of(scores), seed=1).rhat
    expected = [array_stats.rhat(fold, method="identity") for fold in scores]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("folds, correlation", [(50, 0.0), (50, 0.5), (10, 0.3)])
def test_healthy_runs_are_seldom_flagged(rng, folds, correlation):
    """At most 10 % of runs have R-hat-max beyond 95 % of the benchmark (binomial slack of 2 sd)."""
    flagged, disagree, runs = 0, 0, 60
    for run in range(runs):
        mixing = diagnostics.mixing(sums_of(chains(rng, folds, 4, 100, correlation)), seed=run)
        flagged += mixing.share_above < 0.05
        disagree += (mixing.rhat > mixing.limit).any()
    assert flagged / runs <= 0.1 + 2 * np.sqrt(0.1 * 0.9 / runs)
    assert disagree / runs <= 0.1 + 2 * np.sqrt(0.1 * 0.9 / runs)


@pytest.mark.parametrize("draws", [100, 1000])
def test_shifted_chain_is_caught(rng, draws):
    scores = chains(rng, 50, 4, draws)
    scores[17, 2] += 5.0
    mixing = diagnostics.mixing(sums_of(scores), seed=1)
    assert mixing.share_above < 0.05
    assert np.flatnonzero(mixing.rhat > mixing.limit).tolist() == [17]


@pytest.mark.parametrize("draws", [100, 1000])
def test_stuck_chain_is_caught(rng, draws):
    positions = rng.normal(size=(50, 4, draws, 2))
    positions[17, 2] = positions[17, 2, 0]
    positions[21, 1, :, 0] = 0.3  # one direction stands still, the other does not
    watch = Watch.empty(50, 4, 2, 10)
    for part in np.split(positions, 2, axis=2):
        watch.update(np.arange(50), part)
    moves = np.ones((50, 4))
    assert np.flatnonzero(diagnostics.chain_stuck(watch, moves)).tolist() == [17]
    moves[3, 0] = 0
    assert np.flatnonzero(diagnostics.chain_stuck(watch, moves)).tolist() == [3, 17]


@pytest.mark.parametrize("level", [0.0, -1.3, -1e4])
def test_a_constant_score_has_no_say_in_the_benchmark(rng, level):
    scores = chains(rng, 20, 4, 100)
    before = diagnostics.mixing(sums_of(scores[1:]), seed=1)
    scores[0] = level
    sums = sums_of(scores)
    assert np.flatnonzero(diagnostics.score_constant(sums)).tolist() == [0]
    mixing = diagnostics.mixing(sums, seed=1)
    assert mixing.rhat[0] == 1.0 and np.array_equal(mixing.rhat[1:], before.rhat)
    np.testing.assert_array_equal(mixing.benchmark, before.benchmark)
    scores[0] += 1e-4 * max(abs(level), 1.0) * rng.normal(size=scores[0].shape)
    assert not diagnostics.score_constant(sums_of(scores)).any()


def test_effective_draws():
    found = diagnostics.effective_draws(np.array([2.0, 0.0, 1.0]), np.array([0.1, 0.0, 0.0]), 50)
    np.testing.assert_array_equal(found, [20.0, 50.0, np.nan])


def test_slowly_mixing_folds_are_caught_although_they_raise_the_benchmark(rng):
    scores = chains(rng, 50, 4, 100)
    slow = chains(rng, 20, 4, 100, correlation=0.99)
    scores[:20] = slow
    mixing = diagnostics.mixing(sums_of(scores), seed=1)
    assert mixing.limit <= 1.11
    assert (mixing.rhat[:20] > mixing.limit).mean() > 0.5
    assert not (mixing.rhat[20:] > mixing.limit).any()


def test_benchmark_permutes_without_replacement(rng):
    """Two chains, one block position: every permutation is the same pair, so is its R-hat."""
    scores = chains(rng, 1, 2, 20)
    mixing = diagnostics.mixing(sums_of(scores, batch=20), seed=1)
    np.testing.assert_allclose(mixing.benchmark, mixing.rhat_max)


def test_pareto_k_of_known_tails(rng):
    """exp(s) with s exponential of rate 1 / k has a Pareto tail of shape k."""
    for shape in (0.3, 0.9):
        scores = rng.exponential(shape, size=(30, 4, 1000))
        k = diagnostics.pareto_k(sums_of(scores).largest, 4000)
        assert np.mean(k) == pytest.approx(shape, abs=0.08)


@pytest.mark.fast
def test_pareto_k_is_that_of_arviz(rng):
    scores = rng.normal(size=(3, 4, 100))
    found = diagnostics.pareto_k(sums_of(scores).largest, 400)
    expected = [array_stats.pareto_khat(np.exp(fold), r_eff=1.0, tail="right") for fold in scores]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_pareto_k_of_a_constant_is_undefined():
    assert np.isnan(diagnostics.pareto_k(np.zeros((1, 200)), 400)[0])


def test_status_is_the_worst_that_holds():
    """Of each pair of neighbours in ``ADVICE`` the first; every status has its line of advice."""
    kinds = list(diagnostics.ADVICE)
    both = np.eye(len(kinds), dtype=bool) | np.eye(len(kinds), k=-1, dtype=bool)
    conditions = {kind: np.append(both[:, k], False) for k, kind in enumerate(kinds)}
    status = diagnostics.fold_status(conditions)
    assert status.tolist() == [kinds[0], *kinds[:-1], "fine"]
    lines = diagnostics.advice(status, np.arange(len(status)))
    assert len(lines) == len(kinds) - 1
    assert lines[0].startswith(f"improper: 2 of {len(kinds) + 1} folds (0, 1)")


def test_numbers_that_are_in_doubt():
    """Overlap matters to bridges, a heavy tail to plain means, the rest to both."""
    bridged = np.array([True, False])
    fine = {"overlap": 100.0, "tail": 0.1, "ess": 200.0, "acceptance": 0.8}
    cases = {
        "poor overlap": ({"overlap": 2.0}, [True, False]),
        "heavy tail": ({"tail": 2.0}, [False, True]),
        "few effective draws": ({"ess": 10.0}, [True, True]),
        "low acceptance": ({"acceptance": 0.4}, [True, True]),
    }
    for kind, (change, expected) in cases.items():
        numbers = {name: np.full(2, value) for name, value in {**fine, **change}.items()}
        found = diagnostics.doubtful(bridged, **numbers)
        assert found.pop(kind).tolist() == expected
        assert not any(other.any() for other in found.values())


def test_advice_says_how_many_draws_slow_chains_need():
    (line,) = diagnostics.advice(np.array(["fine", "too slow"]), np.arange(2), 300)
    assert "or run about 300 draws" in line
