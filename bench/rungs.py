"""Are scores of folds far from the full data right?

Leaves out a group whose effect is up to 100 prior sds away, and prints the score of that fold, its
exact value, the mean Monte Carlo error, the root mean square of (estimate - exact) / MCSE over
seeds, rungs and gradients, and what the runs were flagged as. Normal groups have a closed form, an
unknown sd of the groups and Poisson counts an exact answer by quadrature. Runs with an infinite
error count as flagged, not as z. For normal groups z must lie in 0.8 to 1.25 with 20 seeds or more,
and at most 10 % of runs may be flagged. Online, rungs are not kept and not counted. Takes about 20
minutes on two cores.

    python bench/rungs.py [--seeds 20] [--problems normal]
"""

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import problems  # noqa: E402

import foldwise as fw  # noqa: E402

LOW, HIGH = 0.8, 1.25


def cases():
    """Name, problem and memory of each case; the first fold is the far one."""
    for rows in (5, 100):
        for distance in (5, 10, 20, 30, 60, 100):
            name = f"normal, {distance} sd, {rows} rows"
            yield name, problems.far_groups(distance, rows, 8), "draws"
    yield "normal, 30 sd, 5 rows, online", problems.far_groups(30, 5, 8), "online"
    yield "normal, 30 sd, 5 rows, 3 far", problems.far_groups(30, 5, 8, 3), "draws"
    for distance in (5, 20, 60):
        yield f"unknown scale, {distance} sd", problems.FarScale(distance), "draws"
    for distance in (4, 8):
        yield f"counts, {distance} sd", problems.FarPoisson(distance), "draws"


def repeat(problem, memory, seeds):
    """Estimates, errors, gradients, status and rungs of the far fold over seeds."""
    model = problem.model()
    for seed in range(seeds):
        result = fw.cross_validate(
            model,
            problem.folds[[0]],
            memory=memory,
            seed=seed,
            progress=False,
            method="mcmc",
            marginal=False,
        )
        fold = {name: result.folds[name].values[0] for name in ("elpd", "mcse", "status")}
        rungs = len(result.run.evidence.ladder.rungs) if memory == "draws" else np.nan
        yield fold["elpd"], fold["mcse"], fold["status"], result.info["gradients"], rungs


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--problems", default="", help="only cases whose name contains this")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    head = f"{'exact':>10}{'error':>8}{'MCSE':>7}{'rms z':>7}{'rungs':>7}{'gradients':>11}"
    print(f"{'case':32}{head}  status")
    failed = False
    for name, problem, memory in cases():
        if arguments.problems not in name:
            continue
        exact = problem.joint()[0]
        elpd, mcse, status, gradients, rungs = zip(
            *repeat(problem, memory, arguments.seeds), strict=True
        )
        error, known = np.array(elpd) - exact, np.isfinite(mcse)
        z = error[known] / np.array(mcse)[known]
        rms = np.sqrt(np.mean(z**2)) if z.size else np.nan
        off = np.sqrt(np.mean(error**2))
        spent = f"{np.mean(mcse):7.2f}{rms:7.2f}{np.mean(rungs):7.1f}{np.mean(gradients):11.0f}"
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(status).items())
        print(f"{name:32}{exact:10.2f}{off:8.2f}{spent}  {kinds}", flush=True)
        if name.startswith("normal"):
            flagged = np.mean([kind != "fine" for kind in status])
            failed |= arguments.seeds >= 20 and not (LOW < rms < HIGH and flagged <= 0.1)
    sys.exit(failed)


if __name__ == "__main__":
    main()
