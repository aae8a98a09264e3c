"""Slow chains: errors that see them, warm-up that goes on, and names for what is left."""

import warnings
from dataclasses import replace

import hard
import numpy as np
import pytest
from problems import by_chains
from scipy.stats import binom

import foldwise as fw
from foldwise.results.summary import summarise
from foldwise.sampling.metric import FoldMetric
from foldwise.sampling.tuning import first_tuning, local_coordinates
from foldwise.scores import diagnostics, evidence
from foldwise.scores.sums import RunningSums, Watch


def autoregressions(rng, rho, *shape):
    """Series of AR(1) processes with variance one, the last axis being time, stationary."""
    noise = rng.normal(size=shape)
    series = noise.copy()
    for t in range(1, shape[-1]):
        series[..., t] = rho * series[..., t - 1] + np.sqrt(1 - rho**2) * noise[..., t]
    return series


def block_means(series, length):
    return diagnostics.block_means(series, length)


# ---------------------------------------------------------------- how slow chains are


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_autocorrelation_time_of_an_autoregression(rng, rho):
    series = autoregressions(rng, rho, 200, 4, 1000)
    time = diagnostics.autocorrelation_time(block_means(series, 10), series.var(axis=(1, 2)), 10)
    exact = (1 + rho) / (1 - rho)
    assert abs(time.mean() / exact - 1) < 0.1 + 4 * time.std() / np.sqrt(200) / exact


def test_chains_that_stay_apart_or_drift_are_slow(rng):
    """Neither is seen by batch means within chains, or by the chains' own autocorrelation."""
    fast = rng.normal(size=(3, 4, 100))
    apart = fast[0] + 2 * np.arange(4)[:, None]
    together = fast[1] + np.linspace(0, 5, 100)
    series = np.stack([apart, together, fast[2]])
    time = diagnostics.autocorrelation_time(block_means(series, 10), series.var(axis=(1, 2)), 10)
    assert time[0] > 40 and time[1] > 20 and time[2] < 5


def test_nothing_that_varies_has_no_time():
    time = diagnostics.autocorrelation_time(np.ones((1, 4, 10)), np.zeros(1), 10)
    assert time[0] == 0.0


def test_joined_blocks_are_longer_batches(rng):
    series = autoregressions(rng, 0.8, 3, 4, 96)
    joined = np.array([1, 4, 2])
    found = diagnostics.batch_means_variance(block_means(series, 6), 6, 96, joined)
    expected = [
        diagnostics.batch_means_variance(block_means(series[k], 6 * n), 6 * n, 96)
        for k, n in enumerate(joined)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_batches_follow_the_slowest_direction_while_enough_are_left():
    time = np.array([1.0, 2.6, 10.0, 1000.0])
    assert diagnostics.joined_blocks(time, 10, 64).tolist() == [1, 2, 4, 16]
    assert diagnostics.joined_blocks(time, 10, 10).tolist() == [1, 2, 2, 2]
    assert diagnostics.joined_blocks(time, 10, 3).tolist() == [1, 1, 1, 1]


def test_errors_see_a_slow_part_behind_fast_noise(rng):
    """A score of noise and a tenth of a slow direction, which is watched: honest errors."""
    slow = autoregressions(rng, 0.98, 300, 4, 2000)
    score = rng.normal(size=slow.shape) + 0.3 * slow
    length = 20
    time = diagnostics.autocorrelation_time(
        block_means(slow, length), slow.var(axis=(1, 2)), length
    )
    joined = diagnostics.joined_blocks(time, length, 100)
    blocks = block_means(score, length)
    z = {}
    for name, n in (("before", None), ("now", joined)):
        error = np.sqrt(diagnostics.batch_means_variance(blocks, length, 2000, n))
        z[name] = np.sqrt(np.mean((score.mean(axis=(1, 2)) / error) ** 2))
    assert z["before"] > 1.4 and 0.85 < z["now"] < 1.25


def test_watch_is_the_same_in_pieces_and_at_once(rng):
    """Block means and variances of what was added draw by draw, merged as the run grows."""
    values = rng.normal(size=(2, 3, 90, 5)) + 7
    watch, members = Watch.empty(2, 3, 5, batch=4), np.arange(2)
    for first in (0, 13, 50, 77):
        last = {0: 13, 13: 50, 50: 77, 77: 90}[first]
        watch.update(members, values[:, :, first:last])
    assert watch.length == 8
    expected = values[:, :, :88].reshape(2, 3, 11, 8, 5).mean(axis=3)
    np.testing.assert_allclose(watch.means + watch.centre[:, None, None], expected, rtol=1e-12)
    np.testing.assert_allclose(watch.variance, values.var(axis=(1, 2)), rtol=1e-10)
    watch.forget(np.array([1]))
    watch.update(np.array([1]), values[1:])
    np.testing.assert_allclose(watch.means + watch.centre[:, None, None], expected, rtol=1e-12)


def test_longer_runs_need_more_of_their_slowest_direction():
    assert [diagnostics.slow_limit(n) for n in (100, 400, 10_000)] == [20.0, 20.0, 100.0]
    # a time of 100 draws needs 100^2 in all, of 4 chains here, and half as many again to be sure
    assert diagnostics.draws_needed(np.array([100.0, np.nan]), 4, 2500) == 1.5 * 2500
    assert diagnostics.draws_needed(np.array([40.0]), 4, 100) == 1.5 * 50


def test_a_try_that_differs_from_the_one_before_is_slow(rng):
    """Chains that look well by themselves, but are elsewhere than in the try before."""
    watch, members = Watch.empty(3, 4, 1, batch=10), np.arange(3)
    watch.update(members, rng.normal(size=(3, 4, 100, 1)))
    sums = RunningSums.empty(3, 4, 10)
    sums.update(members, rng.normal(size=(3, 4, 100, 1)))
    alone = diagnostics.slowest_time(sums, watch)
    watch.forget(members[1:])
    shift = np.array([0.0, 2.0])[:, None, None, None]
    watch.update(members[1:], shift + rng.normal(size=(2, 4, 100, 1)))
    time = diagnostics.slowest_time(sums, watch)
    assert time[0] == alone[0] and time[1] < 5 and time[2] > 50


# ---------------------------------------------------------------- chains that are tried again


@pytest.fixture
def never_settled(monkeypatch):
    """Every fold is tried again as often as there is."""
    monkeypatch.setattr(evidence, "slow_limit", lambda draws: 1e6)


def test_a_fold_tried_again_alone_equals_the_fold_among_all(prepared, never_settled):
    problem, model, fit = prepared("autoregression")
    settings = {"fit": fit, "seed": 3, "progress": False, "scores": ("log", "crps")}
    every = by_chains(model, problem.folds[:8], **settings)
    part = by_chains(model, problem.folds[3:6], **settings)
    assert (every.run.tries == 2).all() and (every.run.sampler.lived == 2 * 150).all()
    assert every.run.evidence.pace.watch.earlier is None  # a longer run is judged by itself
    np.testing.assert_allclose(part.draws, every.draws[3:6], rtol=1e-9)
    both = (result.score("crps").folds["score"].values for result in (part, every))
    np.testing.assert_allclose(next(both), next(both)[3:6], rtol=1e-9)


@pytest.mark.parametrize("slow", [7, 8])
def test_no_fold_is_fine_where_most_are_too_slow(prepared, slow):
    problem, model, fit = prepared("autoregression")
    run = by_chains(model, problem.folds[:16], fit=fit, seed=3, progress=False).run
    marked = np.arange(16) < slow
    run.evidence.standing = replace(run.evidence.standing, slow=marked)
    status = summarise(run).folds["status"].values
    assert (status[:slow] == "too slow").all()
    assert (status[slow:] == ("others in trouble" if slow == 8 else "fine")).all()


@pytest.mark.parametrize("score", ["log", "log_pointwise"])
def test_nothing_is_left_of_draws_that_were_thrown_away(prepared, monkeypatch, score):
    """Some folds are tried again: online sums and stored draws agree, and hold new draws only."""
    problem, model, fit = prepared("five_fold")
    settings = {"fit": fit, "seed": 3, "progress": False, "scores": score, "estimator": "mean"}
    plain = by_chains(model, problem.folds, **settings)
    slow = np.array([False, True, False, True, True])
    monkeypatch.setattr(evidence, "slow_limit", lambda draws: np.where(slow, np.inf, 0.0))
    stored, online = (
        by_chains(model, problem.folds, memory=memory, **settings) for memory in ("draws", "online")
    )
    assert stored.run.tries.tolist() == [0, 2, 0, 2, 2]
    same = (stored.draws.values == plain.draws.values).all(axis=(1, 2))
    assert same.tolist() == (~slow).tolist()
    for column in ("elpd", "mcse", "rhat", "slowest_ess", "acceptance"):
        np.testing.assert_allclose(stored.folds[column], online.folds[column], rtol=1e-9)


def test_tried_again_results_extend_after_saving(prepared, never_settled, tmp_path):
    problem, model, fit = prepared("autoregression")
    result = by_chains(model, problem.folds[:4], fit=fit, seed=3, progress=False)
    result.save(tmp_path / "slow.nc")
    loaded = fw.load(tmp_path / "slow.nc").extend(50, model=model, progress=False)
    result.extend(50, progress=False)
    np.testing.assert_array_equal(loaded.draws, result.draws)
    np.testing.assert_array_equal(loaded.folds["slowest_ess"], result.folds["slowest_ess"])


def test_a_target_is_not_reached_by_chains_that_are_too_slow(prepared, never_settled):
    problem, model, fit = prepared("autoregression")
    with pytest.warns(UserWarning, match="too slow for their length; they need about"):
        result = by_chains(
            model,
            problem.folds[:4],
            fit=fit,
            target_mcse=100.0,
            max_draws=150,
            seed=3,
            progress=False,
        )
    assert result.info["draws"] == 150


# ---------------------------------------------------------------- hard problems, small


def trusted(problem, seeds, statuses=("fine",), **settings):
    """Errors over Monte Carlo errors of the folds with these statuses, and the number of folds."""
    model, exact, z, folds = problem.model(), problem.exact(), [], 0
    for seed in range(seeds):
        result = by_chains(model, problem.folds, seed=seed, progress=False, **settings)
        fine = np.isin(result.folds["status"].values, statuses)
        error = (result.folds["elpd"].values - exact) / result.folds["mcse"].values
        z.append(error[fine])
        folds += len(fine)
    return np.concatenate(z), folds


def assert_trusted(z):
    """Folds called fine are, roughly: few beyond 4 errors, most within theirs.

    A few seeds of small problems are one draw of many, another one on another machine, since slow
    chains amplify rounding. ``bench/trust.py`` has the limits themselves, 1 % and an rms of 1.25.
    """
    assert np.sum(np.abs(z) > 4) <= binom.ppf(0.999, len(z), 0.03)
    # median of |z| of a normal variable, 1.25 wide, and three of its standard errors
    assert len(z) == 0 or np.median(np.abs(z)) <= 0.6745 * 1.25 * (1 + 3 * 1.17 / np.sqrt(len(z)))


@pytest.mark.parametrize("settings", [{}, {"warmup": 20, "draws": 50, "batch": 5}])
def test_a_centred_random_walk(settings):
    """Leave-future-out, whose future no training row informs: slow scales, tied coordinates."""
    z, _ = trusted(hard.LocalLevel(n=40, first=20), 3, **settings)
    assert_trusted(z)


@pytest.mark.parametrize("centred", [True, False])
def test_the_future_of_a_random_walk_is_known_for_what_it_is(centred):
    """Levels that follow each other are tied by the prior, innovations are not."""
    problem = hard.LocalLevel(n=40, first=20, centred=centred)
    short = {"warmup": 20, "draws": 50, "batch": 5, "seed": 1, "progress": False}
    folds = problem.folds[:12]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = by_chains(problem.model(), folds, **short)
    assert result.info["tied_future"] == (1.0 if centred else 0.0)
    said = " ".join(str(warning.message) for warning in caught)
    hampered = np.isin(result.folds["status"].values, diagnostics.HAMPERED)
    assert hampered.all() or not centred
    # the one sentence that says why, before what each fold has
    assert ("folds flagged: most folds leave out the future" in said) == centred
    assert ("(the non-centred form), or integrate the walk out" in said) == centred


def test_long_chains_of_a_centred_random_walk():
    """Much of it is a funnel for HMC, however long; what is called fine is."""
    long = {"warmup": 300, "draws": 1000}
    z, _ = trusted(hard.LocalLevel(n=40, first=20), 1, ("fine", "fit not settled"), **long)
    assert_trusted(z)


@pytest.mark.parametrize("centred", [True, False])
def test_eight_schools(centred):
    """The fit of the funnel may not settle; what the folds say of themselves is tried too."""
    z, folds = trusted(hard.EightSchools(centred), 4, ("fine", "fit not settled"))
    assert centred or len(z) >= 0.9 * folds
    assert_trusted(z)


def test_an_autoregression_near_a_unit_root():
    z, folds = trusted(hard.NearUnitRoot(), 2, ("fine", "fit not settled"))
    assert len(z) >= 0.1 * folds
    assert_trusted(z)


def test_the_future_of_a_random_walk_is_tied_and_gets_a_metric_of_its_own():
    """Above 100 parameters too: sds of the future's levels grow as the walk's do."""
    problem = hard.LocalLevel()
    model, folds = problem.model(), problem.folds[[25, 50]]
    rng = np.random.default_rng(0)
    x = np.cumsum(0.4 * rng.normal(size=(2, 500, 100)), axis=2)
    scales = -0.7 + 0.1 * rng.normal(size=(2, 500, 2))
    fit = fw.Fit(np.concatenate([scales, x], axis=2), (0.0, 0.0), np.ones(2), 0, 0)
    found = local_coordinates(model, folds, fit)
    assert found.local.sum(axis=1).tolist() == [36, 11] and found.tied.all()
    start = np.stack([fit.flat[:4], fit.flat[4:8]])
    watched = np.zeros((2, 1), int)
    tuning = first_tuning(model, folds, fit, found, start, start, watched)
    assert isinstance(tuning.metric, FoldMetric) and tuning.far.all()
    sd = np.sqrt(tuning.metric.covariance[0].diagonal())[2:]
    # by curvature where the chains are; of each level by itself, the prior's is exp(-0.7) / 1.4
    assert sd[99] > 3 * np.exp(-0.7) / np.sqrt(2)


def test_independent_local_coordinates_are_not_tied(prepared):
    problem, model, fit = prepared("hierarchical")
    found = local_coordinates(model, problem.folds[:3], fit)
    assert found.local.sum() == 3 and not found.tied.any() and not found.improper.any()


# ---------------------------------------------------------------- no posterior


def test_a_level_left_out_under_a_flat_prior_has_no_answer():
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(4), 5)
    y = rng.normal(size=20) + group
    model = fw.Model(
        lambda a: 0.0 * a.sum(),
        lambda a: -0.5 * (y - a[group]) ** 2,
        np.zeros(4),
        n_obs=20,
        name="flat",
    )
    result = by_chains(model, fw.leave_group_out(group), seed=1, progress=False)
    assert (result.folds["status"] == "improper").all() and np.isnan(result.elpd)
    folds = fw.leave_one_out(20)
    result = by_chains(model, folds, seed=1, progress=False)
    assert (result.folds["status"] == "fine").all() and np.isfinite(result.elpd)
