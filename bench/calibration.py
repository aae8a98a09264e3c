"""Are the Monte Carlo errors calibrated?

Repeats each closed-form problem of the tests over many seeds, each with a full-data fit of its
own, and prints the root mean square of (estimate - truth) / MCSE over folds and for the total,
and the mean error of the total. A calibrated error gives about 1; each must lie in 0.8 to 1.25.
Where the plain mean cannot (joint densities of whole groups have heavy tails), its folds must be
flagged. The last columns show the share of folds with heavy tails, the share of runs whose
R-hat-max is beyond 95 % of its benchmark (5 % are expected), and the share with a fold whose
chains are said to disagree; neither may be over 10 %.

    python bench/calibration.py [--seeds 100] [--problems hierarchical,regression]
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import problems  # noqa: E402

import foldwise as fw  # noqa: E402

LOW, HIGH = 0.8, 1.25
PROBLEMS = {
    "normal mean, LOO": problems.normal_mean,
    "regression, LOO": problems.regression,
    "regression, 5-fold": problems.five_fold,
    "regression, h-block": problems.blocked,
    "hierarchical, leave-group-out": problems.hierarchical,
    "AR(1), leave-future-out": problems.autoregression,
}


def variants(problem):
    """(score, estimator) pairs that apply."""
    yield "log", "mean"
    if (problem.folds.partner >= 0).all():
        yield "log", "bridge"
    if problem.folds.n_test.max() > 1 and problem.folds.pointwise:
        yield "log_pointwise", "mean"


def run(problem, model, seed, score, estimator, memory, fit):
    result = fw.cross_validate(
        model,
        problem.folds,
        fit=fit,
        scores=score,
        estimator=estimator,
        memory=memory,
        seed=seed,
        progress=False,
    )
    truth = problem.joint() if score == "log" else problem.pointwise()
    error = result.folds["elpd"].values - truth
    return {
        "fold_z": error / result.folds["mcse"].values,
        "total_z": error.sum() / result.mcse,
        "error": error.sum(),
        "mcse": result.mcse,
        "heavy": result.folds["status"].values == "heavy tail",
        "unusual": result.mixing.share_above < 0.05,
        "disagree": (result.folds["status"].values == "chains disagree").any(),
        "flagged": (result.folds["status"].values != "fine").any(),
    }


def summarise(records):
    def rms(values):
        return float(np.sqrt(np.mean(np.square(values))))

    fold_z = np.array([r["fold_z"] for r in records])
    heavy = np.array([r["heavy"] for r in records])
    total_z = np.array([r["total_z"] for r in records])
    # folds that are never flagged must be calibrated even where others are heavy-tailed
    sound = heavy.mean(axis=0) == 0
    return {
        "fold": rms(fold_z),
        "total": rms(total_z),
        "sound": rms(fold_z[:, sound]) if sound.any() else np.nan,
        "error": np.mean([r["error"] for r in records]),
        "error_se": np.std([r["error"] for r in records]) / np.sqrt(len(records)),
        "mcse": np.mean([r["mcse"] for r in records]),
        "heavy": heavy.mean(),
        "heavy_runs": heavy.any(axis=1).mean(),
        "unusual": np.mean([r["unusual"] for r in records]),
        "disagree": np.mean([r["disagree"] for r in records]),
        "flagged": np.mean([r["flagged"] for r in records]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--problems", default="")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    head = f"{'problem':30}{'score':>15}{'estimator':>10}{'memory':>8}{'rms z':>7}{'total':>7}"
    print(
        head + f"{'mean error':>18}{'mcse':>8}{'heavy':>7}{'R-hat':>7}{'flag':>6}{'verdict':>14}",
        flush=True,
    )
    failed = False
    for name, make in PROBLEMS.items():
        if arguments.problems and not any(p in name for p in arguments.problems.split(",")):
            continue
        problem, began = make(), time.perf_counter()
        model = problem.model()
        records = {}
        for seed in range(arguments.seeds):
            fit = fw.fit(model, seed=10_000 + seed, progress=False)
            for score, estimator in variants(problem):
                for memory in ("draws", "online"):
                    record = run(problem, model, seed, score, estimator, memory, fit)
                    records.setdefault((score, estimator, memory), []).append(record)
        for (score, estimator, memory), found in records.items():
            s = summarise(found)
            ok = (
                LOW <= s["fold"] <= HIGH
                and LOW <= s["total"] <= HIGH
                and max(s["unusual"], s["disagree"]) <= 0.1
            )
            verdict = "ok" if ok else "FAILED"
            if not ok and estimator == "mean" and s["heavy_runs"] == 1.0:
                verdict = "flagged"
            failed |= verdict == "FAILED"
            print(
                f"{name:30}{score:>15}{estimator:>10}{memory:>8}{s['fold']:7.2f}{s['total']:7.2f}"
                f"{s['error']:10.4f} ({s['error_se']:.3f}){s['mcse']:8.3f}{s['heavy']:7.2f}"
                f"{s['unusual']:7.2f}{s['disagree']:6.2f}{verdict:>14}",
                flush=True,
            )
        print(f"  {time.perf_counter() - began:.0f} s, {arguments.seeds} seeds", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
