"""Are the Monte Carlo errors calibrated?

Repeats each closed-form problem of the tests over many seeds, each with a full-data fit of its
own, made as ``cross_validate`` makes it, and prints the root mean square of
(estimate - truth) / MCSE over folds and for the total, and the mean error of the total. A
calibrated error gives about 1; each must lie in 0.8 to 1.25.
Where the plain mean cannot (joint densities of whole groups have heavy tails), its folds must be
flagged. Other scores than the log score come from one run with stored draws (tests show that
running sums give the same), those by row that weigh draws from a run of their own. Chains are on
what groups share, their parameters integrated out, where there are any, or with ``--all`` on all
parameters. The last columns show the share of folds with heavy tails, the share
of runs whose R-hat-max is beyond 95 % of its benchmark (5 % are expected), and the share with a
fold whose chains are said to disagree; neither may be over 10 %.

    python bench/calibration.py [--seeds 100] [--problems hierarchical,regression] [--scores log]
"""

import argparse
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import problems  # noqa: E402

import foldwise as fw  # noqa: E402
from foldwise.sampling.full_data import full_data_fit  # noqa: E402
from foldwise.scores.rules import column  # noqa: E402
from foldwise.support.progress import Progress  # noqa: E402

LOW, HIGH = 0.8, 1.25
PROBLEMS = {
    "normal mean, LOO": problems.normal_mean,
    "regression, LOO": problems.regression,
    "regression, 5-fold": problems.five_fold,
    "regression, h-block": problems.blocked,
    "hierarchical, leave-group-out": problems.hierarchical,
    "AR(1), leave-future-out": problems.autoregression,
    "two classes, LOO": problems.Classes,
    "three classes, LOO": partial(problems.Classes, 3),
}


# Other scores; those of test sets need folds of several rows.
BY_ROW = ("mse", "rmse", "mae", "r2", "crps", "scrps", "interval", "interval_0.5")
JOINT = ("hyvarinen", "dss")
SEVERAL = ("dss_pointwise", "energy")


def variants(problem):
    """(scores, estimator, memory) of each run; the scores of a run share its draws."""
    pairs = [("log", "mean")]
    if (problem.folds.partner >= 0).all():
        pairs.append(("log", "bridge"))
    several = problem.folds.n_test.max() > 1
    if several and problem.folds.pointwise:
        pairs.append(("log_pointwise", "mean"))
    for score, estimator in pairs:
        for memory in ("draws", "online"):
            yield (score,), estimator, memory
    if isinstance(problem, problems.Classes):
        yield ("brier", "accuracy"), "auto", "draws"
    else:
        yield (*JOINT, *BY_ROW, *(SEVERAL if several else ())), "auto", "draws"
        if several:
            # where cells are integrated out, test sets and rows take runs of their own
            yield ("hyvarinen_pointwise",), "auto", "draws"


def run(problem, model, seed, scores, estimator, memory, fit, marginal):
    """What is wanted of each score of one run."""
    result = fw.cross_validate(
        model,
        problem.folds,
        fit=fit,
        scores=scores,
        estimator=estimator,
        memory=memory,
        seed=seed,
        progress=False,
        method="mcmc",
        marginal=marginal,
    )
    for name in scores:
        score = result.score(name)
        # the exact answer to what was computed: large test sets have the diagonal form
        exact = "dss_pointwise" if name == "dss" and score.rows is not None else name
        error = score.folds[column(name)].values - problem.exact(exact)
        total = score.total - problem.exact_total(exact)
        status = score.folds["status"].values
        yield {
            "fold_error": error,
            "fold_mcse": score.folds["mcse"].values,
            "total_z": total / score.mcse if score.mcse > 0 else 0.0,
            "error": total,
            "mcse": score.mcse,
            "heavy": status == "heavy tail",
            "unusual": result.mixing.share_above < 0.05,
            "disagree": (status == "chains disagree").any(),
        }


def zs(records):
    """Errors over Monte Carlo errors; of a step (accuracy), most of whose errors are zero, the
    root of the mean squared error over that of the mean squared Monte Carlo error.
    """
    error = np.array([r["fold_error"] for r in records])
    mcse = np.array([r["fold_mcse"] for r in records])
    if (mcse > 0).all():
        return error / mcse
    return error / np.sqrt(np.mean(mcse**2))


def summarise(records):
    def rms(values):
        return float(np.sqrt(np.mean(np.square(values))))

    fold_z = zs(records)
    heavy = np.array([r["heavy"] for r in records])
    total_z = np.array([r["total_z"] for r in records])
    return {
        "fold": rms(fold_z),
        "total": rms(total_z),
        "error": np.mean([r["error"] for r in records]),
        "error_se": np.std([r["error"] for r in records]) / np.sqrt(len(records)),
        "mcse": np.mean([r["mcse"] for r in records]),
        "largest": max(np.abs(r["fold_error"]).max() for r in records),
        "heavy": heavy.mean(),
        "heavy_runs": heavy.any(axis=1).mean(),
        "unusual": np.mean([r["unusual"] for r in records]),
        "disagree": np.mean([r["disagree"] for r in records]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--problems", default="")
    parser.add_argument("--scores", default="", help="only runs that have one of these")
    parser.add_argument("--all", action="store_true", help="chains on all parameters")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    wanted = set(filter(None, arguments.scores.split(",")))
    marginal = False if arguments.all else None
    head = f"{'problem':30}{'score':>20}{'estimator':>10}{'memory':>8}{'rms z':>7}{'total':>7}"
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
            fit = full_data_fit(model, 10_000 + seed, Progress(False), not arguments.all)
            for scores, estimator, memory in variants(problem):
                if wanted and not wanted & set(scores):
                    continue
                found = run(problem, model, seed, scores, estimator, memory, fit, marginal)
                for score, record in zip(scores, found, strict=True):
                    records.setdefault((score, estimator, memory), []).append(record)
        for (score, estimator, memory), found in records.items():
            s = summarise(found)
            ok = (
                LOW <= s["fold"] <= HIGH
                and LOW <= s["total"] <= HIGH
                and max(s["unusual"], s["disagree"]) <= 0.1
            )
            verdict = "ok" if ok else "FAILED"
            if s["largest"] == 0.0 and not s["unusual"] > 0.1:
                verdict = "exact"  # a step, right in every fold of every run
            if not ok and estimator != "bridge" and s["heavy_runs"] == 1.0:
                verdict = "flagged"
            failed |= verdict == "FAILED"
            print(
                f"{name:30}{score:>20}{estimator:>10}{memory:>8}{s['fold']:7.2f}{s['total']:7.2f}"
                f"{s['error']:10.4f} ({s['error_se']:.3f}){s['mcse']:8.3f}{s['heavy']:7.2f}"
                f"{s['unusual']:7.2f}{s['disagree']:6.2f}{verdict:>14}",
                flush=True,
            )
        print(f"  {time.perf_counter() - began:.0f} s, {arguments.seeds} seeds", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
