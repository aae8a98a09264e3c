"""Comparisons against hand calculation, closed forms and brute force; refusals."""

import math
import os
import tracemalloc
import warnings
from dataclasses import replace

import numpy as np
import problems
import pytest
from by_hand import A, B, by_row, flat, make, widest
from problems import by_chains
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax, stdtr

from foldwise.results import differences
from foldwise.results.compare import Pair, SeedWarning, compare
from foldwise.results.differences import REPLICATES, bayesian_bootstrap, probability
from foldwise.results.result import FoldWarning
from foldwise.results.weights import stacking_weights

SEED = int(os.environ.get("FOLDWISE_TEST_SEED", "0"))
# flags too, which the suite ignores elsewhere: comparisons must warn only where a test says so
pytestmark = pytest.mark.filterwarnings("error")


def t_cdf(z, freedom=3):
    return float(stdtr(freedom, z))


# ---------------------------------------------------------------- a pair


def test_pair_by_hand():
    found = compare({"a": make(A, mcse=[0.1, 0.2, 0.3, 0.4]), "b": make(B, mcse=0.5)})
    se = math.sqrt(4 * 4.75 / 3)
    assert found.diff == pytest.approx(3.0)
    assert found.se == pytest.approx(se)
    assert found.mcse == pytest.approx(math.sqrt(0.3 + 4 * 0.25))
    assert found.error == pytest.approx(se)  # folds' own noise is in their spread already
    assert found.prob == pytest.approx(t_cdf(3.0 / se))
    assert found.score == "log" and found.unit == "fold" and found.left_out == 0


def test_pair_follows_the_order_given_and_the_table_the_score():
    found = compare({"b": make(B), "a": make(A)})
    assert found.diff == pytest.approx(-3.0)
    assert found.prob == pytest.approx(1.0 - t_cdf(3.0 / math.sqrt(4 * 4.75 / 3)))
    assert list(found.table.index) == ["a", "b"]
    assert found.names == ["b", "a"]
    forward, back = found.pair("a", "b"), found.pair("b", "a")
    assert isinstance(forward, Pair)
    assert forward.diff == -back.diff == pytest.approx(3.0)
    assert forward.prob_bootstrap + back.prob_bootstrap == pytest.approx(1.0)
    assert back.prob_bootstrap == found.prob_bootstrap < 0.5


def test_two_line_table_by_hand():
    table = compare({"b": make(B, mcse=0.3, optimism=1.0), "a": make(A, mcse=0.2)}).table
    se = math.sqrt(4 * 4.75 / 3)
    assert list(table.columns) == [
        "rank",
        "elpd",
        "elpd_diff",
        "se_diff",
        "mcse_diff",
        "error_diff",
        "prob_worse",
        "prob_worse_bootstrap",
        "stacking",
        "pseudo_bma",
        "pseudo_bma_plus",
        "optimism",
        "se",
        "mcse",
    ]
    best, other = table.loc["a"], table.loc["b"]
    assert best[["rank", "elpd", "elpd_diff", "se_diff", "mcse_diff"]].tolist() == [1, -10, 0, 0, 0]
    assert np.isnan(best["prob_worse"]) and np.isnan(best["prob_worse_bootstrap"])
    assert other["rank"] == 2 and other["elpd"] == -13 and other["elpd_diff"] == pytest.approx(-3)
    assert other["se_diff"] == pytest.approx(se)
    assert other["mcse_diff"] == pytest.approx(math.sqrt(4 * 0.09 + 4 * 0.04))
    assert other["prob_worse"] == pytest.approx(t_cdf(3 / se))
    assert best["optimism"] == pytest.approx(1.0) and other["optimism"] == pytest.approx(4.0)
    assert best["se"] == pytest.approx(math.sqrt(4 * 5 / 3))
    assert best["mcse"] == pytest.approx(0.4) and other["mcse"] == pytest.approx(0.6)


def test_folds_of_a_pair():
    folds = compare({"a": make(A, mcse=0.3), "b": make(B, mcse=0.4)}).folds
    np.testing.assert_allclose(folds["elpd"].sel(model="b"), B)
    np.testing.assert_allclose(folds["diff"], [0.5, 0.5, -0.5, 2.5])
    np.testing.assert_allclose(folds["mcse"], 0.5)
    assert folds["elpd"].dims == ("model", "fold")


def test_fold_weights_count():
    half = np.array([0.5, 0.5, 1.0, 1.0])
    found = compare({"a": make(A, weight=half), "b": make(B, weight=half)})
    assert found.diff == pytest.approx(0.25 + 0.25 - 0.5 + 2.5)


def test_models_that_never_differ():
    found = compare({"a": make(A, seed=1), "b": make(A, seed=2)})
    assert (found.diff, found.se, found.prob, found.prob_bootstrap) == (0.0, 0.0, 0.5, 0.5)
    assert "a and b have the same score" in str(found)


def test_a_constant_difference_is_certain():
    assert probability(2.0, 0.0, 3) == 1.0 and probability(-2.0, 0.0, 3) == 0.0
    assert math.isnan(probability(2.0, math.nan, 3))


def test_one_fold_has_a_difference_but_no_error():
    found = compare({"a": make([-1.0]), "b": make([-2.0])})
    assert found.diff == 1.0 and math.isnan(found.se) and math.isnan(found.prob)
    assert "n/a" in str(found)


# ---------------------------------------------------------------- Bayesian bootstrap


def test_bootstrap_of_two_units_in_closed_form():
    # w 3 - (1 - w) 1 > 0 where w > 1/4, and w is uniform
    found = compare({"a": make([2.0, -2.0]), "b": make([-1.0, -1.0])})
    error = math.sqrt(0.75 * 0.25 / REPLICATES)
    assert found.prob_bootstrap == pytest.approx(0.75, abs=4 * error)
    assert found.table["prob_worse_bootstrap"]["b"] == found.prob_bootstrap


def test_bootstrap_against_brute_force():
    delta = np.array([0.5, 0.5, -0.5, 2.5, -3.0])
    weight = np.random.default_rng(SEED + 1).dirichlet(np.ones(5), size=200_000)
    exact = np.mean(weight @ delta > 0)
    found = compare({"a": make(delta), "b": make(np.zeros(5))})
    assert found.prob_bootstrap == pytest.approx(exact, abs=4 * math.sqrt(0.25 / REPLICATES))
    means = bayesian_bootstrap(delta[:, None])[:, 0]
    assert means.shape == (REPLICATES,)
    sd = np.sqrt(delta.var() / 6)  # of a Dirichlet-weighted mean of five
    assert means.mean() == pytest.approx(delta.mean(), abs=4 * sd / math.sqrt(REPLICATES))
    assert means.std() == pytest.approx(sd, rel=0.06)


def test_bootstrap_is_the_same_every_time_and_for_any_chunk(monkeypatch):
    values = np.random.default_rng(SEED).normal(size=(7, 2))
    whole = bayesian_bootstrap(values)
    np.testing.assert_array_equal(whole, bayesian_bootstrap(values))
    monkeypatch.setattr(differences, "_CHUNK", 50)
    np.testing.assert_allclose(bayesian_bootstrap(values), whole, rtol=1e-12, atol=1e-14)


def test_bootstrap_of_many_units_takes_little_memory(monkeypatch):
    monkeypatch.setattr(differences, "REPLICATES", 400)  # 64 MB at once
    values = np.zeros((20_000, 1))
    tracemalloc.start()
    bayesian_bootstrap(values)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


# ---------------------------------------------------------------- weights


def by_slsqp(log_density):
    """Stacking weights by a general optimiser."""
    models = log_density.shape[1]
    best = minimize(
        lambda w: -logsumexp(log_density, axis=1, b=np.abs(w)).mean(),
        np.full(models, 1 / models),
        bounds=[(0, 1)] * models,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-13, "maxiter": 500},
    )
    return best.x


def test_stacking_against_slsqp():
    log_density = np.random.default_rng(SEED + 3).normal(size=(60, 3))
    found = stacking_weights(log_density)
    np.testing.assert_allclose(found, by_slsqp(log_density), atol=5e-4)
    assert found.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("scale", [1e-4, 0.01, 1.0, 100.0])
@pytest.mark.parametrize("models", [2, 20])
def test_stacking_reaches_its_gap(scale, models):
    log_density = scale * np.random.default_rng(SEED + 4).normal(size=(200, models))
    weight = stacking_weights(log_density)
    log_mixture = logsumexp(log_density, axis=1, b=weight)
    gain = np.exp(log_density - log_mixture[:, None]).mean(axis=0)
    assert gain.max() - 1 <= 1.1e-6
    assert weight.min() >= 0 and weight.sum() == pytest.approx(1.0)


def test_stacking_weighs_exclusive_models_by_their_share():
    log_density = np.full((10, 2), -2000.0)
    log_density[:3, 0] += 1000.0
    log_density[3:, 1] += 1000.0
    np.testing.assert_allclose(stacking_weights(log_density), [0.3, 0.7], atol=1e-5)


def test_stacking_gives_a_hopeless_model_nothing():
    log_density = np.random.default_rng(SEED + 3).normal(size=(60, 3))
    log_density[:, 1] = -1000.0
    found = stacking_weights(log_density)
    assert found[1] < 1e-12
    np.testing.assert_allclose(found[[0, 2]], stacking_weights(log_density[:, [0, 2]]), atol=5e-4)


def test_weights_do_not_underflow():
    rng = np.random.default_rng(SEED + 5)
    one, two = rng.normal(size=(2, 12))
    level = -2000.0 + 100.0 * rng.normal(size=12)
    low = compare({"a": make(one + level), "b": make(two + level)}).table
    plain = compare({"a": make(one), "b": make(two)}).table
    weights = ["stacking", "pseudo_bma", "pseudo_bma_plus"]
    np.testing.assert_allclose(
        low.loc[["a", "b"], weights], plain.loc[["a", "b"], weights], atol=1e-4
    )
    assert plain["stacking"].min() > 0.01
    assert np.exp(-2000.0) == 0.0


def test_pseudo_bma_by_hand():
    table = compare({"a": make([-1.0, -1.0]), "b": make([-1.0, -1.0 - math.log(3)])}).table
    assert table["pseudo_bma"].to_dict() == pytest.approx({"a": 0.75, "b": 0.25})


def test_pseudo_bma_plus_against_brute_force():
    rng = np.random.default_rng(SEED + 6)
    parts = np.array([[-1, -3, -5], [-5, -2, -4], [-1, -4, -2], [-7, -4, -9]], float)
    weight = rng.dirichlet(np.ones(4), size=200_000)
    exact = softmax(4 * weight @ parts, axis=1)
    table = compare({name: make(parts[:, m]) for m, name in enumerate("abc")}).table
    error = exact.std(axis=0) / math.sqrt(REPLICATES)
    found = table.loc[list("abc"), "pseudo_bma_plus"].to_numpy()
    assert np.all(np.abs(found - exact.mean(axis=0)) < 4 * error)
    assert found.sum() == pytest.approx(1.0)
    assert np.abs(found - table.loc[list("abc"), "pseudo_bma"].to_numpy()).max() > 0.02


# ---------------------------------------------------------------- many models, rows, folds left out


def test_three_models_are_sorted_and_paired_with_the_best():
    c = [-0.5, -2.0, -2.5, -3.0]
    found = compare({"a": make(A), "b": make(B), "c": make(c, mcse=0.3)})
    table = found.table
    assert list(table.index) == ["c", "a", "b"] and table["rank"].tolist() == [1, 2, 3]
    assert table["elpd_diff"].tolist() == pytest.approx([0.0, -2.0, -5.0])
    delta = np.subtract(B, c)
    assert table["se_diff"]["b"] == pytest.approx(2 * delta.std(ddof=1))
    assert table["mcse_diff"]["b"] == pytest.approx(math.hypot(0.6, 0.2))
    assert table["stacking"].sum() == pytest.approx(1.0)
    pair = found.pair("a", "b")
    assert pair.diff == pytest.approx(3.0) and pair.mcse == pytest.approx(math.hypot(0.2, 0.2))
    assert "diff" not in found.folds and found.folds.sizes == {"model": 3, "fold": 4}
    with pytest.raises(AttributeError, match=r'3 models were compared; use .table or .pair\("a"'):
        _ = found.diff
    for name in ("se", "mcse", "prob", "prob_bootstrap"):
        assert not hasattr(found, name)
    with pytest.raises(ValueError, match=r"two of the compared models, a, b, c; got 'd'"):
        found.pair("a", "d")


def test_rows_are_the_units_of_a_score_by_row():
    a, b = by_row([-1.0, -2.0, -3.0, -1.0, -1.0]), by_row([-2.0, -2.5, -2.5, -3.0, -1.5])
    found = compare({"a": a, "b": b})
    delta = np.array([1.0, 0.5 * 0.5 - 0.5 * 0.5, 2.0, 0.5])  # rows 0 to 3
    assert found.unit == "row" and found.units.shape == (4, 2)
    assert found.diff == pytest.approx(delta.sum())
    assert found.se == pytest.approx(2 * delta.std(ddof=1))
    assert "paired over 4 rows" in str(found)


def test_folds_not_finite_in_one_model_are_left_out_of_all():
    with pytest.warns(FoldWarning, match=r"1 of 5 folds left out of the comparison, \[x\]") as seen:
        found = compare(
            {
                "a": make([*A, -9.0], mcse=[0.1, 0.1, 0.1, 0.1, 3.0], names=list("pqrsx")),
                "b": make([*B, np.nan], mcse=[0.1, 0.1, 0.1, 0.1, np.nan], names=list("pqrsx")),
            }
        )
    assert "(1 in b)" in str(seen[0].message)
    assert found.left_out == 1
    assert found.diff == pytest.approx(3.0)
    assert found.se == pytest.approx(math.sqrt(4 * 4.75 / 3))
    assert found.mcse == pytest.approx(math.hypot(0.2, 0.2))
    assert found.table["elpd"].tolist() == pytest.approx([-10, -13])
    assert found.table["optimism"].tolist() == pytest.approx([1.0, 1.0])
    assert found.ess == pytest.approx(200.0)
    assert "paired over 4 of 5 folds" in str(found)
    assert np.isnan(found.folds["diff"].values[4]) and found.folds.sizes["fold"] == 5


def test_no_verdict_while_an_error_is_infinite():
    lost = make([*A, -9.0], mcse=[0.1, 0.1, 0.1, 0.1, np.inf], names=list("pqrsx"), seed=1)
    good = make([*B, -8.0], names=list("pqrsx"), seed=2)
    with pytest.warns(FoldWarning, match="a score or its error is not finite there .1 in lost"):
        found = compare({"lost": lost, "good": good})
    assert found.missing == {"lost": ["x"]} and math.isnan(found.prob)
    assert found.verdict.kind == "not to be trusted" and "Not to be trusted" in flat(found)


VERDICT = ["rank", "prob_worse", "prob_worse_bootstrap", "stacking", "pseudo_bma"]
VERDICT += ["pseudo_bma_plus"]


def test_no_verdict_while_a_fold_is_missing():
    # b is far worse, but where that shows its score is not finite
    failed = make([-0.5, -1.5, -2.0, -4.0, np.nan], names=list("pqrsx"), seed=1)
    good = make([*A, -50.0], names=list("pqrsx"), seed=2)
    with pytest.warns(FoldWarning, match="there is no verdict while they are missing"):
        found = compare({"good": good, "failed": failed})
    assert found.missing == {"failed": ["x"]}
    assert math.isnan(found.prob) and math.isnan(found.prob_bootstrap)
    assert found.diff == pytest.approx(-2.0)
    assert list(found.table.index) == ["good", "failed"]
    assert found.table[VERDICT].isna().all(axis=None)
    assert found.table["elpd_diff"].tolist() == pytest.approx([0.0, 2.0])
    text = flat(found)
    assert "Not to be trusted: 1 of 5 folds has no finite score (x in failed)" in text
    assert "differences to good, over the folds that all models have" in text
    assert "Print each model's result for what to do about its folds" in text
    for word in ("predicts better", "weight: in", "below 4", "0.999"):
        assert word not in text
    failed_row = next(line for line in str(found).splitlines() if line.startswith("failed"))
    assert failed_row.split()[-2:] == ["n/a", "n/a"] and widest(found) <= 80


def test_folds_missing_in_several_of_three_models():
    a, b, c = [np.nan, *A[1:], -1.0], [*B[:2], np.nan, -np.inf, -2.0], [*A, -1.0]
    with pytest.warns(FoldWarning):
        found = compare({k: make(v, score="crps") for k, v in (("a", a), ("b", b), ("c", c))})
    assert found.missing == {"a": [0], "b": [2, 3]}
    pair = found.pair("c", "b")
    assert pair.diff == pytest.approx(1.5) and pair.se > 0
    assert math.isnan(pair.prob) and math.isnan(pair.prob_bootstrap)
    assert found.table[VERDICT[:3]].isna().all(axis=None)
    text = flat(found)
    assert "Not to be trusted: 3 of 5 folds have no finite score (0 in a; 2, 3 in b)" in text
    assert "paired over 2 of 5 folds" in text


def part(values, total=30, scheme="x", **arguments):
    """A result that knows its scheme."""
    return make(values, identity={"scheme": scheme, "folds": total, "model": []}, **arguments)


def test_the_same_part_of_a_scheme_is_compared_and_said():
    found = compare({"a": part(A), "b": part(B)})
    assert found.prob == compare({"a": make(A), "b": make(B)}).prob
    assert (found.scheme_folds, found.left_out, found.missing) == (30, 0, {})
    assert str(found).startswith("foldwise: 2 models compared by log, paired over 4 of 30 folds\n")
    assert "\n4 of 30 folds, 50 rows;" in str(part(A))
    whole = compare({"a": part(A, 4), "b": part(B, 4)})
    assert "paired over 4 folds\n" in str(whole) and "\n4 folds, 50 rows;" in str(part(A, 4))
    rows = [-1.0, -2.0, -3.0, -1.0, -1.0]
    known = {"identity": {"scheme": "x", "folds": 9, "model": []}}
    found = compare({"a": by_row(rows, **known), "b": by_row(rows, **known)})
    assert "paired over 4 rows of 3 of 9 folds" in str(found)


def test_folds_that_one_model_lacks_are_named():
    whole = part(A, 4, names=list("wxyz"))
    two = {"names": ["y", "z"], "test": [[2], [3]], "index": np.array([2, 3])}
    with pytest.raises(ValueError, match=r"of their scheme, but b lacks \[w, x\]; cross-validate"):
        compare({"a": whole, "b": part(A[2:], 4, **two)})
    first = {"names": ["w", "y"], "test": [[0], [2]], "index": np.array([0, 2])}
    with pytest.raises(ValueError, match=r"but b lacks \[z\] and a lacks \[w\]; cross-validate"):
        compare({"a": part(A[2:], 4, **two), "b": part(A[:2], 4, **first)})


def test_schemes_may_differ_in_training_rows_and_that_is_said():
    one, two = part(A, 4, scheme="x"), part(B, 4, scheme="y")
    assert compare({"a": one, "b": two}).diff == pytest.approx(3.0)
    assert "a and b test the same rows, but their schemes differ" in flat(
        compare({"a": one, "b": two})
    )
    assert "schemes differ" not in flat(compare({"a": one, "b": part(B, 4)}))
    assert "schemes differ" not in flat(compare({"a": one, "b": make(B)}))


def test_flags_and_problems_of_fits_are_repeated():
    status = ["heavy tail", "fine", "poor overlap", "poor overlap"]
    slow = make(A, status=status, fit_problems="R-hat is up to 1.034 (should be below 1.01)")
    found = compare({"A": slow, "B": make(B), "C": make(B, status="of another version")})
    assert found.remarks == [
        "A: 3 of 4 folds flagged: poor overlap 2, heavy tail 1",
        "C: 4 of 4 folds flagged: of another version 4",
        "A: check the full-data fit first: R-hat is up to 1.034 (should be below 1.01)",
    ]
    for remark in found.remarks:
        assert f"- {remark}" in flat(found)
    assert compare({"a": make(A), "b": make(B)}).remarks == []
    long = compare({"m" * 90: slow, "n" * 90: slow})
    assert len(long.remarks) == 4 and widest(long) <= 80


def test_flags_are_those_of_the_score_compared():
    both = make(A, more_scores=("log_pointwise",))
    table = both.folds.copy(deep=True)
    table["status"].values[0] = "heavy tail"
    scores = {**both.scores, "log_pointwise": replace(both.score("log_pointwise"), folds=table)}
    results = {"a": replace(both, scores=scores), "b": make(B, more_scores=("log_pointwise",))}
    assert compare(results).remarks == []
    assert compare(results, "log_pointwise").remarks == ["a: 1 of 4 folds flagged: heavy tail 1"]


def test_minus_infinity_is_left_out_too():
    low = [-np.inf, *B[1:]]
    with pytest.warns(FoldWarning, match="1 in a, 1 in b"):
        found = compare({"a": make(low, seed=1), "b": make(low, seed=2)})
    assert found.left_out == 1 and found.table["elpd"].tolist() == pytest.approx([-11.5, -11.5])


def test_a_fold_left_out_leaves_its_rows_out():
    nothing = [-1.0, -2.0, -3.0, -1.0, np.nan]
    with pytest.warns(FoldWarning):
        found = compare({"a": by_row([-1.0] * 5), "b": by_row(nothing)})
    assert found.units.shape == (3, 2)
    assert found.diff == pytest.approx(0.0 + 0.5 + 1.0 + 0.0)


# ---------------------------------------------------------------- diagnostics over all models


def test_diagnostics_over_all_models():
    a = make(A, spread=[1, 2, 3, 4], noise=8.0, rhat=1.05, benchmark=[1.0, 1.05, 1.02, 1.03])
    b = make(B, spread=5.0, noise=2.0, draws=50, rhat=1.01, benchmark=[1.04, 1.0, 1.06, 1.01])
    found = compare({"a": a, "b": b})
    assert found.ess == pytest.approx((10 + 20) / (32 / 400 + 8 / 200))
    assert found.rhat_max == 1.05
    np.testing.assert_array_equal(found.rhat_benchmark, [1.04, 1.05, 1.06, 1.03])
    assert found.share_above == 0.5


def test_diagnostics_that_are_missing():
    nothing = make(A, rhat=np.nan, benchmark=[np.nan] * 4)
    found = compare({"a": nothing, "b": make(B)})
    assert found.rhat_max == 1.01 and np.isfinite(found.rhat_benchmark).all()
    found = compare({"a": nothing, "b": nothing})
    assert math.isnan(found.rhat_max) and math.isnan(found.share_above)
    assert "R-hat-max n/a" in str(found)
    bare = make(A)
    del bare.info["draws"], bare.info["chains"]
    found = compare({"a": bare, "b": make(B)})
    assert math.isnan(found.ess) and "ESS n/a" in str(found)


# ---------------------------------------------------------------- names, scores, refusals


@pytest.mark.parametrize(
    "models, names",
    [
        (["x", "y"], ["x", "y"]),
        (["x", ""], ["x", "B"]),
        (["x", "x", "y"], ["A", "B", "y"]),
        (["", None], ["A", "B"]),
        (["B", ""], ["A", "B"]),
    ],
)
def test_names_of_a_list(models, names):
    results = [make(A, model=model) for model in models]
    assert compare(results).names == names
    assert compare(tuple(results)).names == names


def test_many_results_in_a_list():
    assert compare([make(A) for _ in range(28)]).names[24:] == ["Y", "Z", "model 27", "model 28"]


def test_score_is_the_first_of_the_first_unless_named():
    both = make(A, score="log_pointwise", more_scores=("log",))
    assert compare({"a": both, "b": make(B, more_scores=("log_pointwise",))}).score == (
        "log_pointwise"
    )
    assert compare({"a": both, "b": make(B)}, score="log").score == "log"
    with pytest.raises(ValueError, match="score 'log_pointwise', but b has log; all have log;"):
        compare({"a": both, "b": make(B)})
    with pytest.raises(ValueError, match=r"score 'crps', but a has log; choose score"):
        compare({"a": make(A), "b": make(B, score="log_pointwise")}, score="crps")


@pytest.mark.parametrize(
    "results, error, message",
    [
        ({"a": make(A)}, ValueError, "at least two results, got 1; add another"),
        ([], ValueError, "at least two results, got 0"),
        (make(A), TypeError, "must be a dict of names to CVResult, .* got CVResult; use compare"),
        ({"a": make(A), "b": 3.0}, TypeError, "must be a CVResult, got float; pass what"),
        ({1: make(A), "1": make(B)}, ValueError, "names must be distinct, got 1, 1; rename"),
    ],
)
def test_what_is_no_set_of_results_is_refused(results, error, message):
    with pytest.raises(error, match=message):
        compare(results)


Y = np.arange(8.0).reshape(4, 2)
REFUSED = {
    "n_obs": (make(A, n_obs=49), "same rows of data, but a has n_obs=50 and b has n_obs=49; fit"),
    "folds": (make(A[:3]), "must have the same folds, but a has 4 and b has 3; cross-validate"),
    "rows": (
        make(A, test=[[0], [1], [7], [3]]),
        r"fold number 2 tests rows \[2\] in a and \[7\] in b; cross-validate both with the same",
    ),
    "sizes": (
        make(A, test=[[0], [1, 2, 3, 4, 5, 6], [7], [8]]),
        r"fold number 1 tests rows \[1\] in a and \[1, 2, 3, 4, 5, ...\] in b",
    ),
    "index": (
        make(A, index=np.array([0, 1, 5, 3])),
        "fold number 2 is its fold 2 in a and 5 in b; cross-validate",
    ),
    "names": (make(A, names=list("0x23")), "fold number 1 is '1' in a and 'x' in b; cross"),
    "weight": (make(A, weight=[1, 1, 0.5, 1]), "fold 2 weighs 1 in a and 0.5 in b; cross"),
    "shape": (make(A, y=Y[:, 0]), r"y has shape \(4, 2\) in a and \(4,\) in b; fit both"),
    "values": (make(A, y=Y + (Y == 5)), r"row 2 of y is 5.0 in a and 6.0 in b; densities"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused(case):
    other, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        compare({"a": make(A, y=Y), "b": other})


def test_a_later_result_is_checked_too():
    with pytest.raises(ValueError, match="a has 4 and c has 3"):
        compare({"a": make(A), "b": make(B), "c": make(A[:3])})


def test_what_may_differ():
    y = np.array([0.1, np.nan, 3.0, 4.0])
    a = make(A, y=y)
    compare({"a": a, "b": make(B, y=y.astype(np.float32))})
    compare({"a": a, "b": make(B)})
    compare({"a": make(A, y=[1, 2, 3, 4]), "b": make(B, y=[1.0, 2.0, 3.0, 4.0])})
    compare({"a": make(A, y=list("abcd")), "b": make(B, y=list("abcd"))})
    compare({"a": make(A, names=list("0123")), "b": make(B, names=np.arange(4))})
    with pytest.raises(ValueError, match=r"row 0 of y is 0.1 in a and 0.1"):
        compare({"a": a, "b": make(B, y=y + [1e-12, 0, 0, 0])})


def test_no_fold_finite_in_all_is_refused():
    with pytest.raises(ValueError, match="2 folds none is .not finite: 1 in a, 1 in b.; look"):
        compare({"a": make([np.nan, -1.0]), "b": make([-1.0, np.nan])})


@pytest.mark.parametrize("key", ["seed", "fit_seed"])
def test_equal_seeds_are_warned_of(key):
    with pytest.warns(SeedWarning, match=f"a and c share {key} 7: their Monte Carlo") as seen:
        compare({"a": make(A, **{key: 7}), "b": make(A, **{key: 8}), "c": make(B, **{key: 7})})
    assert seen[0].filename == __file__
    with pytest.warns(SeedWarning, match=f"a and b share {key} 5"):
        compare({"a": make(A, **{key: [5, 6]}), "b": make(B, **{key: [4, 5]})})


def test_other_seeds_are_not_warned_of():
    compare({"a": make(A, seed=1, fit_seed=2), "b": make(B, seed=2, fit_seed=3)})
    compare({"a": make(A, seed=None), "b": make(B, seed=None)})
    compare({"a": make(A, seed=[1, 2]), "b": make(B, seed=3)})


# ---------------------------------------------------------------- end to end


@pytest.fixture(scope="session")
def regressions():
    """A regression and the same without its first covariate, with their results."""
    whole = problems.regression()
    keep = [0, 2, 3]
    short = replace(whole, X=whole.X[:, keep], prior=whole.prior[keep], name="without x1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [
            by_chains(problem.model(), problem.folds, seed=10 * SEED + i, progress=False)
            for i, problem in enumerate((whole, short))
        ]
    return (whole, short), results


def test_a_pair_against_its_exact_difference(regressions):
    (whole, short), (first, second) = regressions
    found = compare([first, second])
    exact = whole.joint() - short.joint()
    assert found.names == ["regression", "without x1"]
    assert found.diff == pytest.approx(exact.sum(), abs=4 * found.mcse)
    assert found.diff == pytest.approx(first.elpd - second.elpd)
    assert found.mcse == pytest.approx(math.hypot(first.mcse, second.mcse)) and found.mcse < 0.5
    assert found.se == pytest.approx(math.sqrt(40) * exact.std(ddof=1), rel=0.05)
    assert found.prob == pytest.approx(t_cdf(exact.sum() / found.error, 39), abs=0.01)
    assert found.rhat_max == max(first.rhat_max, second.rhat_max)
    assert min(first.ess, second.ess) <= found.ess <= max(first.ess, second.ess)
    for printed in (first, second, found):
        assert widest(printed) <= 80
    assert "regression predicts better than without x1: " in flat(found)


def test_repeated_folds_do_not_pretend_to_be_new_information():
    """Four repeats of the same folds, each weighing a quarter: the same errors, to K / (K - 1)."""
    rng = np.random.default_rng(3)
    once = rng.normal(-10.0, 3.0, 40)
    other = once - rng.normal(0.5, 1.0, 40)
    single = compare({"a": make(once, seed=1), "b": make(other, seed=2)})
    four = compare(
        {
            name: make(np.tile(values, 4), weight=0.25, seed=seed)
            for name, values, seed in (("a", once, 1), ("b", other, 2))
        }
    )
    assert four.diff == pytest.approx(single.diff)
    assert four.se == pytest.approx(single.se, rel=0.02)
    np.testing.assert_allclose(four.table["se"], single.table["se"], rtol=0.02)
    assert four.prob_bootstrap == pytest.approx(single.prob_bootstrap, abs=0.03)
    assert make(np.tile(once, 4), weight=0.25).se == pytest.approx(make(once).se, rel=0.02)
