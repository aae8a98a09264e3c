"""How results and comparisons print."""

from dataclasses import replace

import numpy as np
import pytest
from by_hand import A, B, by_row, flat, make, widest

from foldwise.results.compare import compare

# flags too, which the suite ignores elsewhere: printing must warn only where a test says so
pytestmark = pytest.mark.filterwarnings("error")


def test_result_text():
    result = make(
        [-231.0, -231.3, -231.3],
        test=[range(50), range(50, 100), range(100, 250)],
        mcse=[0.4, 0.4, 0.28],
        optimism=23.7,
        model="A",
        scheme="leave_group_out, 3 groups",
        n_obs=250,
        parameters=57,
        warmup=50,
        seed=3,
        fit_seed=4,
        memory="online",
        precision="float32",
        seconds={"fit": 5.84, "compile": 1.8, "tune": 0.01, "folds": 240.0},
        more_scores=("log_pointwise",),
    )
    lines = str(result).splitlines()
    assert lines[0] == "foldwise: model A, leave_group_out, 3 groups"
    assert lines[1] == (
        "3 folds, 250 rows, 57 parameters; 4 chains x 100 draws a fold after 50 warm-up"
    )
    assert lines[4].split()[:4] == ["elpd", "-693.6", "0.30", "0.63"]
    assert lines[4].endswith("joint log density; SE over folds")
    assert lines[5].split()[:2] == ["optimism", "71.1"]
    assert lines[5].endswith("gained if the same rows had been seen")
    assert lines[6].split()[:2] == ["log_pointwise", "-693.6"]
    text = flat(result)
    assert "ESS 200: the score is known as well as from that many independent draws" in text
    assert "R-hat-max 1.010 is what mixed chains show (up to 1.059 in 99 runs of 100)" in text
    assert "chains: 0 divergences, acceptance 0.84; scores by bridge sampling" in text
    assert "seed 3, fit seed 4, online (running sums, no draws kept), float32" in text
    assert "time: full-data fit 5.8 s, compiling 1.8 s, chains of the folds 4.0 min" in text
    assert "Too noisy: the Monte Carlo error is 2.1 of the standard error" in text
    assert "flagged" not in text and "Reliable" not in text
    assert "left out" not in text and widest(result) <= 80


def test_result_text_of_flagged_and_left_out_folds():
    status = ["fine", "not finite", "few effective draws", "few effective draws"]
    result = make([-1.0, np.nan, -3.0, -4.0], status=status, names=list("wxyz"))
    text = flat(result)
    assert "total over 3 of 4 folds: 1 fold whose score is not finite is left out" in text
    assert "3 of 4 folds flagged: - not finite: 1 of 4 folds (x); log densities were" in text
    assert "- few effective draws: 2 of 4 folds (y, z); fewer than 50 effective draws" in text
    assert (
        "Not to be trusted: 3 of 4 folds flagged (x, y, z)" in text
        and "unnamed model, by hand" in text
    )
    assert widest(result) <= 80
    two = make([np.nan, np.nan, -3.0, -4.0], more_scores=("log_pointwise",))
    assert "total of log over 2 of 4 folds: 2 folds whose score is not finite are" in flat(two)


def test_a_limit_below_the_benchmark_is_said():
    slow = flat(make(A, rhat=1.2, benchmark=[1.3] * 10))
    assert "R-hat-max 1.200 is over 1.100: some chains have not mixed" in slow
    assert "1.100" not in flat(make(A, rhat=1.2, benchmark=[1.05] * 10))


def test_divergences_are_said_with_their_share_and_its_limit():
    result = make(A)
    result.folds["divergences"][1:3] = 1
    assert (
        "chains: 2 divergences in 1,600 transitions (0.12 %; a fold is flagged above 0.5 %), "
        "acceptance 0.84" in flat(result)
    )


def test_scores_by_row_say_so():
    single = flat(make(A))
    assert "log density; SE over rows" in single and "joint" not in single
    assert "joint log density; SE over folds" in flat(make(A, weight=0.5))
    assert "log density by row; SE over rows" in flat(by_row([-1.0, -2.0, -3.0, -1.0, -1.0]))


@pytest.mark.parametrize(
    "benchmark, reach",
    [
        ([1.0] * 10, "R-hat-max 1.010 is more than mixed chains show (up to 1.000 in 99 runs"),
        ([1.02] * 10, "R-hat-max 1.010 is what mixed chains show (up to 1.020 in 99 runs"),
    ],
)
def test_share_of_the_benchmark_in_words(benchmark, reach):
    assert reach in flat(make(A, benchmark=benchmark))


@pytest.mark.parametrize(
    "mcse, digits",
    [
        (0.004, ["-10.000", "2.58", "0.0040"]),
        (0.05, ["-10.00", "2.58", "0.050"]),
        (0.63, ["-10.0", "2.6", "0.63"]),
        (6.3, ["-10", "2.6", "6.3"]),
        (63.0, ["-10", "2.6", "63"]),
        (np.nan, ["-10.0", "2.6", "n/a"]),
        (1e-9, ["-10.000", "2.58", "1.0e-09"]),
    ],
)
def test_digits_follow_the_monte_carlo_error(mcse, digits):
    lines = str(make(A, mcse=mcse / 2)).splitlines()
    (line,) = [line for line in lines if line.startswith("elpd")]
    assert line.split()[1:4] == digits


def test_text_survives_what_is_missing():
    alone = make(
        [-1.0], optimism=np.nan, mcse=np.nan, noise=0.0, rhat=np.nan, benchmark=[np.nan] * 3
    )
    alone.info.clear()
    text = str(alone)
    assert "1 fold\n" in text and "n/a" in text and "seed" not in text and "time" not in text
    assert not any(line.startswith("optimism") for line in text.splitlines())
    nothing = make([np.nan] * 2, optimism=np.nan, mcse=np.nan, status="not finite")
    nothing.folds["acceptance"][:] = np.nan
    assert "total over 0 of 2 folds" in flat(nothing) and "acceptance n/a" in flat(nothing)
    merged = make(A, seed=[1, 2], fit_seed=[1, 2], seconds={"fit": np.nan})
    assert "seed 1, 2" in flat(merged) and "fit seed" not in flat(merged)
    assert "full-data fit n/a" in flat(merged)
    assert "seed 7 (this model's own: 8)" in flat(make(A, seed=8, given_seed=7))
    assert "this model's own" not in flat(make(A, seed=8, given_seed=8))


def test_wide_things_are_wrapped():
    wide = make(
        [-1.5e9, -2.5e9],
        names=["x" * 70, "y" * 200],
        status="stuck chain",
        model="m" * 200,
        scheme=", ".join(["scheme"] * 40),
        score="hyvarinen_pointwise",
        mcse=0.001,
        seed=list(range(10**9, 10**9 + 20)),
        seconds={f"phase {i}": 1.0 for i in range(20)},
    )
    assert widest(wide) <= 80
    assert "hyvarinen_pointwise  -4000000000.000" in str(wide)
    assert "and 15 more" in str(wide)
    other = replace(wide, info={**wide.info, "seed": 1})
    assert widest(compare({"m " * 60: wide, "n" * 200: other})) <= 80
    text = str(compare({"first": wide, "a name that is too long for its column": other}))
    assert "\na name that is too long for its column\n     " in text and widest(text) <= 80


def test_comparison_text():
    a, b = np.linspace(-2.0, -3.0, 40), np.linspace(-2.0, -3.0, 40) - 0.3
    b[::2] -= 0.7
    found = compare({"B": make(b, mcse=0.05), "A": make(a, mcse=0.05)})
    lines = str(found).splitlines()
    assert lines[0] == "foldwise: 2 models compared by log, paired over 40 folds"
    assert lines[4].split() == [
        "model",
        "elpd",
        "elpd_diff",
        "se_diff",
        "mcse_diff",
        "Pr(worse)",
        "weight",
    ]
    assert lines[5].split() == ["A", "-100.0", "0.0", "-", "-", "-", "1.00"]
    assert lines[6].split() == ["B", "-126.0", "-26.0", "2.2", "0.45", ">0.999", "0.00"]
    text = flat(found)
    assert (
        "paired over 40 folds A predicts better than B: by 26.0 (SE 2.2, MCSE 0.45), probability "
        ">0.999." in text
    )
    assert "R-hat-max 1.010 is what mixed chains show (up to 1.059 in 99 runs of 100)" in text
    assert (
        "Pr(worse): probability that the model predicts worse than the first, by Student's t over "
        "40 folds; Monte Carlo error counts weight: in the mixture that predicts best (stacking); "
        "no probability" in text
    )
    assert "chains in" not in text
    found.results["A"].folds["method"] = ("fold", np.repeat(["mcmc", "importance"], [3, 37]))
    assert "in 99 runs of 100); chains in 43 of 80 folds, 40 a model" in flat(found)
    assert "below 4" not in text and "third" not in text and "left out" not in text
    assert widest(found) <= 80 and repr(found) == str(found)


def test_comparison_text_of_small_and_noisy_differences():
    found = compare({"a": make(A, mcse=0.5), "b": make(B, mcse=0.5)})
    text = flat(found)
    assert "Too noisy to say: a is ahead of b by 3 (SE 2.5, MCSE 1.4), probability 0.841." in text
    assert "The Monte Carlo error is 0.56 of the standard error; a third at most" in text
    assert "Run on: about 520 draws a chain (now 100; result.extend) would do." in text
    rows = [line.split() for line in str(found).splitlines() if line.startswith(("a ", "b "))]
    assert [row[-1] for row in rows] == ["n/a", "n/a"]  # no weights without a verdict
    assert "given with a verdict only" in text and "predicts better" not in text


def test_comparison_text_of_three_models():
    far = np.subtract(A, [10.0, 9.0, 11.0, 12.0])
    found = compare({"far": make(far), "near": make(B), "top": make(A)})
    text = flat(found)
    assert "3 models" in text and "Undecided: top is ahead of near by 3.0" in text
    assert "The probability is below 0.95." in text and "predicts better" not in text
    order = [line.split()[0] for line in str(found).splitlines()[6:9]]
    assert order == ["top", "near", "far"] and widest(found) <= 80
