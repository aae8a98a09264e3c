"""Why chains that move slowly looked healthy: each cause by itself.

The centred local level of ``tests/hard.py``, leave-future-out, over some seeds. Every line leaves
one mending away, the last line all of them: batches of draws whose length follows the slowest
direction; warm-up that goes on for folds that are too slow; metrics of the folds' own above 100
parameters; the status of folds too slow for their length; a full-data fit that goes on until it has
converged. z is (estimate - exact) / MCSE; "bias" the mean error of the total, in nats, and "error"
its mean MCSE.

    fine     share of folds called fine, rms z and worst |z| of these
    all      rms z of all folds, and the share beyond 4 errors

Then, with all mendings in place, the folds by what is slow: themselves, or the partner whose draws
their bridge uses.

    python bench/slow.py [--seeds 5] [--draws 100] [--warmup 50]
"""

import argparse
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import PropertyMock, patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import hard  # noqa: E402

import foldwise as fw  # noqa: E402
from foldwise.sampling import sample, tuning  # noqa: E402
from foldwise.scores import evidence  # noqa: E402
from foldwise.scores.diagnostics import slow_limit  # noqa: E402


def fixed_batches():
    return patch.object(evidence, "joined_blocks", lambda time, *_: np.ones(len(time), np.int64))


def one_warmup():
    return patch.object(sample, "MOST_TRIES", 0)


def shared_metric():
    return patch.object(tuning, "_matrices_fit", lambda model, folds: model.dimension <= 100)


def unnamed():
    """No fold is too slow; then none is tried again either."""
    return patch.object(evidence, "slow_limit", lambda draws: 0.0)


def any_fit():
    return patch.object(fw.Fit, "settled", PropertyMock(return_value=True))


CASES = {
    "all mendings": (),
    "batches of 10 draws": (fixed_batches,),
    "one warm-up": (one_warmup,),
    "one metric for all folds": (shared_metric,),
    "slow folds not named, one warm-up": (unnamed,),
    "a short full-data fit": (any_fit,),
    "none": (fixed_batches, one_warmup, shared_metric, unnamed, any_fit),
}


def rms(z):
    return float(np.sqrt(np.mean(np.square(z)))) if len(z) else np.nan


def runs(problem, model, fit, seeds, patches, **settings):
    """Errors, Monte Carlo errors, statuses and slowest ESS by seed and fold, and of the total."""
    exact, found = problem.exact(), []
    with ExitStack() as stack:
        for mending in patches:
            stack.enter_context(mending())
        for seed in range(seeds):
            result = fw.cross_validate(
                model,
                problem.folds,
                fit=fit,
                seed=seed,
                progress=False,
                **settings,
                method="mcmc",
                marginal=False,
            )
            table = result.folds
            found.append(
                {
                    "error": table["elpd"].values - exact,
                    "mcse": table["mcse"].values,
                    "fine": table["status"].values == "fine",
                    "slowest": table["slowest_ess"].values,
                    "total": result.elpd - exact.sum(),
                    "total_mcse": result.mcse,
                }
            )
    return {name: np.array([record[name] for record in found]) for name in found[0]}


def line(name, found):
    z, fine = found["error"] / found["mcse"], found["fine"]
    worst = np.abs(z[fine]).max() if fine.any() else np.nan
    print(
        f"{name:36}{fine.mean():6.2f}{rms(z[fine]):7.2f}{worst:7.1f}{rms(z):9.2f}"
        f"{np.mean(np.abs(z) > 4):7.3f}{found['total'].mean():8.2f}"
        f"{found['total_mcse'].mean():7.2f}{rms(found['total'] / found['total_mcse']):7.2f}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=50)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    problem = hard.LocalLevel()
    model = problem.model()
    settled = fw.fit(model, seed=1, progress=False)
    with patch("foldwise.sampling.fit.LONGEST", 1):
        short = fw.fit(model, draws=250, warmup=250, seed=1, progress=False)
    print(settled, short, sep="\n")
    print(
        f"{'left away':36}{'fine':>6}{'rms z':>7}{'worst':>7}{'all':>9}{'> 4':>7}{'bias':>8}"
        f"{'error':>7}{'z':>7}",
        flush=True,
    )
    settings = {"draws": arguments.draws, "warmup": arguments.warmup}
    for name, patches in CASES.items():
        fit = short if any_fit in patches else settled
        found = runs(problem, model, fit, arguments.seeds, patches, **settings)
        line(name, found)
        if name == "all mendings":
            mended = found
    z = mended["error"] / mended["mcse"]
    slow = mended["slowest"] < slow_limit(4 * arguments.draws)
    partner = np.roll(slow, -1, axis=1)
    partner[:, -1] = False  # the last fold's is the full data
    for text, where in (
        ("neither slow", ~slow & ~partner),
        ("partner slow", ~slow & partner),
        ("slow itself", slow),
    ):
        print(f"{text:36}{where.mean():6.2f} of folds, rms z {rms(z[where]):.2f}")


if __name__ == "__main__":
    main()
