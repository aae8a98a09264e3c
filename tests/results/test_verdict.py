"""The verdict: its rule, its words, and that stated probabilities are calibrated."""

import math

import numpy as np
import pytest
from by_hand import A, B, flat, make, widest
from scipy.special import stdtrit

import foldwise as fw
from foldwise.results import totals
from foldwise.results.compare import compare
from foldwise.results.differences import difference
from foldwise.results.verdict import Length, draws_needed, standing

pytestmark = pytest.mark.filterwarnings("error")
RNG = np.random.default_rng(0)
NOISE = RNG.normal(size=40)
NOISE -= NOISE.mean()


def pair(diff, se, mcse=0.0, status="fine", **info):
    """Two results of 40 folds with this difference, its standard and its Monte Carlo error."""
    delta = diff / 40 + se / math.sqrt(40) * NOISE / NOISE.std(ddof=1)
    base = np.full(40, -3.0)
    one = make(base + delta, mcse=mcse / math.sqrt(40), status=status, seed=1, **info)
    return compare({"A": one, "B": make(base, mcse=0.0, seed=2)})


# ---------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    "numbers, kind, words",
    [
        ((30, 8, 0.5), "better", "A predicts better than B: by 30.0 (SE 8.0, MCSE 0.50), prob"),
        ((-30, 8, 0.5), "better", "B predicts better than A: by 30.0 (SE 8.0, MCSE 0.50), prob"),
        ((12, 9, 0.5), "undecided", "Undecided: A is ahead of B by 12.0 (SE 9.0, MCSE 0.50)"),
        ((3, 1, 0.1), "undecided", "The difference is below 4, where its error is not to be"),
        ((8, 4.1, 9.1), "too noisy", "Too noisy to say: A is ahead of B by 8 (SE 4.1, MCSE 9.1)"),
        ((16, 8, 4), "too noisy", "Too noisy to say: A is ahead of B by 16 (SE 8.0, MCSE 4.0)"),
        ((90, 8, 4), "better", "A predicts better than B: by 90 (SE 8.0, MCSE 4.0)"),
        ((0, 0, 0), "undecided", "A and B have the same score"),
    ],
)
def test_the_verdict_follows_the_numbers(numbers, kind, words):
    found = pair(*numbers)
    assert found.verdict.kind == kind
    assert words in flat(found) and widest(found) <= 80
    assert ("predicts better" in flat(found)) == (kind == "better")


def test_small_is_said_only_where_the_whole_interval_is():
    assert pair(1.0, 1.0).verdict.small and "small whichever is better" in flat(pair(1.0, 1.0))
    assert not pair(0.8, 7.9).verdict.small and "small" not in flat(pair(0.8, 7.9))


def test_a_fit_that_failed_is_not_to_be_trusted():
    found = pair(30, 8, 0.5, fit_problems="R-hat is up to 1.057 (should be below 1.01)")
    assert found.verdict.kind == "not to be trusted"
    assert "the full-data fit of A has not converged (R-hat is up to 1.057" in flat(found)
    alone = standing(found.results["A"])
    assert alone.kind == "not to be trusted" and "fine" not in flat(found.results["A"])
    few = pair(30, 8, 0.5, fit_problems="3 divergent transitions")
    assert few.verdict.kind == "better"


def test_flagged_folds_count_where_they_could_turn_it():
    one = np.where(np.arange(40) == 7, "heavy tail", "fine")
    clear, close = pair(60, 8, 0.5, status=one), pair(14, 8, 0.5, status=one)
    assert clear.verdict.kind == "better"
    assert close.verdict.kind == "not to be trusted"
    assert "flagged folds of A could turn it (7)" in flat(close)
    assert pair(14, 8, 0.5).verdict.kind == "better"
    all_of_them = pair(300, 8, 0.5, status="fit not settled")
    assert all_of_them.verdict.kind == "not to be trusted"


def test_a_part_of_the_scheme_is_said_to_be_a_part():
    whole = {"identity": {"scheme": "x", "folds": 99, "model": []}}
    other = make(np.full(40, -3.0), seed=2, **whole)
    first = make(np.full(40, -3.0) + 1 + 0.1 * NOISE, seed=1, **whole)
    found = compare({"A": first, "B": other})
    assert found.verdict.part == "40 of 99 folds"
    assert "Over 40 of 99 folds only: A predicts better than B" in flat(found)
    assert "Over 40 of 99 folds only." in flat(first)


def test_many_models_are_judged_by_the_closest():
    top, near, far = np.full(40, -1.0), -1.0 + NOISE - 0.05, -3.0 + 0.1 * NOISE
    models = {"far": make(far), "near": make(near), "top": make(top)}
    found = compare(models).verdict
    assert (found.kind, found.leader, found.other) == ("undecided", "top", "near")
    both = {"far": make(far), "other": make(far - 1.0 + 0.1 * NOISE[::-1]), "top": make(top)}
    assert "top predicts better than 2 others (far, other): than far by" in flat(compare(both))


def test_draws_that_would_do():
    """MCSE of 0.3 of the spread without noise, by chains, by the fit, or by both."""
    found = difference(np.array([10.0, 0.0, 5.0, 3.0]), 6.0, 0.0)
    spread = found.error**2 - 36.0
    chains = draws_needed(found, (Length(36.0, 0.0, 100, 1000),))
    assert chains == (pytest.approx(100 * 36 / (0.09 * spread), rel=0.1), 0)
    fit = draws_needed(found, (Length(0.0, 36.0, 100, 1000),))
    assert fit == (0, pytest.approx(1000 * 36 / (0.09 * spread), rel=0.1))
    both = draws_needed(found, (Length(18.0, 18.0, 100, 1000),))
    assert both[0] > 100 and both[1] > 1000
    assert draws_needed(found, (Length(0.01, 0.01, 100, 1000),)) == (0, 0)


def test_a_fit_that_is_too_short_is_what_to_extend():
    result = make(A, mcse=2.0, seed=1, fit_draws=1000)
    score = result.score("log")
    object.__setattr__(score, "full_variance", score.own_variance)
    object.__setattr__(score, "own_variance", 0.0)
    text = flat(compare({"a": result, "b": make(B, mcse=0.0, seed=2)}))
    assert "full-data draws (now 1,000; a longer foldwise.fit) would do" in text
    assert "draws a chain" not in text


def test_refits_are_no_chains_to_extend():
    """Nobody chooses how many draws they have: what is asked for are full-data draws."""
    result = make(A, mcse=2.0, seed=1, fit_draws=4000)
    score = result.score("log")
    score.folds["method"] = ("fold", ["refit", "importance", "importance", "importance"])
    vars(score).update(own_variance=0.01 * score.mcse**2, full_variance=0.99 * score.mcse**2)
    length = Length.of(result, "log")
    assert length.own == 0.0 and length.fixed == pytest.approx(0.01 * score.mcse**2)
    advice = standing(result).advice
    assert "full-data draws (now 4,000" in advice and "extend" not in advice
    score.folds["method"][1] = "mcmc"  # then what is not the refit's is the chains'
    score.folds["mcse"][0] = 0.05 * score.mcse
    length = Length.of(result, "log")
    assert length.fixed == pytest.approx(0.0025 * score.mcse**2)
    assert length.own == pytest.approx(0.0075 * score.mcse**2)


# ---------------------------------------------------------------- errors


def test_monte_carlo_noise_is_counted_once():
    """Errors of folds that are independent are in the spread; one that is shared is not."""
    assert totals.combined_error(5.0, 3.0, 9.0, 40) == pytest.approx(5.0)
    shared = totals.combined_error(5.0, 3.0, 9.0 / 40, 40)
    assert shared == pytest.approx(math.sqrt(25 + 9))
    assert totals.combined_error(1.0, 3.0, 9.0, 40) == pytest.approx(3.0)
    assert math.isnan(totals.combined_error(1.0, 3.0, 9.0, 1))


def test_interval_is_students():
    found = difference(np.array([1.0, 2.0, 4.0]), 0.0, 0.0)
    half = stdtrit(2, 0.975) * math.sqrt(3) * np.std([1.0, 2.0, 4.0], ddof=1)
    assert found.interval == pytest.approx((7.0 - half, 7.0 + half))


def test_rows_of_a_group_are_no_units_of_their_own():
    """Four groups of five equal rows: the error is that of four groups, not of twenty rows."""
    group = np.array([1.0, -2.0, 0.5, 3.0])
    rows = np.repeat(group, 5)
    test = np.arange(20).reshape(4, 5)
    arguments = {"test": test, "row_elpd": rows, "score": "log_pointwise"}
    by_rows = make(5 * group, **arguments)
    score = by_rows.score("log_pointwise")
    clustered = totals.finish_score(
        "log_pointwise", score.folds, score.rows, 400, 0.1, np.zeros(0), 0.0, pointwise=False
    )
    assert (score.unit, clustered.unit) == ("row", "fold")
    assert score.se == pytest.approx(math.sqrt(20) * rows.std(ddof=1))
    assert clustered.se == pytest.approx(2 * 5 * group.std(ddof=1))
    assert clustered.total == score.total


@pytest.mark.parametrize("score", ["log_pointwise", "crps", "rmse"])
def test_errors_of_every_score_cluster_by_group(prepared, seed, score):
    problem, model, fit = prepared("regression")
    groups = np.arange(40) // 5
    run = {"fit": fit, "scores": (score,), "progress": False, "seed": seed}
    result = fw.cross_validate(model, fw.leave_group_out(groups), **run)
    found = result.score(score)
    assert found.unit == "fold" and "SE over folds" in flat(found)
    used = np.ones(8, bool)
    parts, _ = totals.total_units(score, found.folds, found.rows, used, "fold")
    assert len(parts) == 8 and parts.sum() == pytest.approx(found.total)
    assert found.se == pytest.approx(math.sqrt(8) * parts.std(ddof=1))
    assert fw.cross_validate(model, fw.k_fold(40, 8), **run).score(score).unit == "row"
    if result.calibration is not None:
        pit = result.pit().values
        inside = (np.abs(pit - 0.5) <= 0.25).astype(float)
        parts = (inside - inside.mean()).reshape(8, 5).sum(axis=1) / 40
        table = result.coverage((0.5,))
        assert table["se"].iloc[0] == pytest.approx(math.sqrt(8 / 7 * (parts**2).sum()))


def test_stacking_of_rows_whatever_the_error_is_taken_over():
    a, b = (
        make(
            np.add.reduceat(values, [0, 2, 4]),
            test=[[0, 1], [2, 3], [4]],
            row_elpd=values,
            score="log_pointwise",
        )
        for values in ([-1.0, -2.0, -3.0, -1.0, -1.0], [-2.0, -2.5, -2.5, -3.0, -1.5])
    )
    want = compare({"a": a, "b": b}).table["stacking"]
    for result in (a, b):
        object.__setattr__(result.score("log_pointwise"), "pointwise", False)
    found = compare({"a": a, "b": b})
    assert found.unit == "fold"
    np.testing.assert_allclose(found.table["stacking"], want)


def test_arviz_gets_no_number_of_parameters_of_joint_scores(prepared, seed):
    problem, model, fit = prepared("regression")
    groups = fw.leave_group_out(np.arange(40) // 5)
    run = {"fit": fit, "progress": False, "seed": seed}
    joint = fw.cross_validate(model, groups, **run)
    assert np.isfinite(joint.optimism) and np.isnan(joint.to_arviz().p)
    rows = fw.cross_validate(model, groups, scores="log_pointwise", **run)
    assert rows.to_arviz().p == pytest.approx(rows.optimism)


# ---------------------------------------------------------------- calibration


def simulated(rng, folds, own, shared):
    """A difference whose truth is known: folds' differences, their noise, and a common error."""
    size = math.sqrt(folds * (1.0 + own**2) + shared**2)
    truth = rng.uniform(-8.0, 8.0) * size
    delta = truth / folds + rng.normal(size=folds)
    delta += own * rng.normal(size=folds) + shared * rng.normal() / folds
    mcse = math.sqrt(folds * own**2 + shared**2)
    noise = folds * own**2 + shared**2 / folds
    return truth, difference(delta, mcse, noise)


@pytest.mark.parametrize(
    "folds, own, shared",
    [(8, 0.0, 0.0), (8, 2.0, 0.0), (40, 0.0, 6.0), (40, 3.0, 15.0), (8, 1.0, 6.0), (40, 1.0, 0.0)],
)
def test_intervals_and_probabilities_are_calibrated(folds, own, shared):
    """Short runs: Monte Carlo errors of up to several standard errors, truths known.

    Of 6000 differences the 95 % interval holds the truth in 95 % (98 % at most, where the folds'
    own noise is far larger than what it hides), and signs stated with a probability are right
    about as often.
    """
    rng = np.random.default_rng(folds + int(shared))
    found = [simulated(rng, folds, own, shared) for _ in range(6000)]
    inside = np.mean([f.interval[0] <= truth <= f.interval[1] for truth, f in found])
    assert 0.94 < inside < (0.98 if own > 1.0 else 0.96)
    sure = np.array([max(f.prob, 1 - f.prob) for _, f in found])
    right = np.array([(f.prob > 0.5) == (truth > 0) for truth, f in found])
    for low, high in ((0.5, 0.8), (0.8, 0.95), (0.95, 0.99)):
        some = (low <= sure) & (sure < high)
        error = math.sqrt(0.25 / some.sum()) if high < 0.9 else 0.025
        stated = sure[some].mean()
        assert right[some].mean() > stated - 3.5 * min(error, 0.025)
        assert right[some].mean() < stated + 0.06


def test_without_monte_carlo_error_probabilities_would_be_wrong():
    """What this replaces: Phi(diff / SE) of a run whose error is shared by all folds."""
    rng = np.random.default_rng(1)
    found = [simulated(rng, 40, 0.0, 12.0) for _ in range(4000)]
    z = np.array([(f.diff - truth) / f.se for truth, f in found])
    assert np.mean(np.abs(z) < 1.96) < 0.75
