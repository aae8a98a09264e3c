"""The studies at full size: time, memory and results, checked against independent answers.

Each study runs in a process of its own, nothing compiled before; its wall time includes full-data
fits and compiling. Then rats and radon are checked against exact predictive densities
(tests/integrated.py), air against 10 random folds refitted alone by long NUTS runs: totals and
single folds must lie within 4 combined Monte Carlo errors. Needs FOLDWISE_DATA.

    FOLDWISE_DATA=... python bench/studies.py [--study rats ...] [--seeds 1 2] [--figures FOLDER]
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BEGAN = time.perf_counter()
NAMES = ("toy", "rats", "poisson", "air", "radon")
# on two idle cores
MOST_SECONDS = {"toy": 45.0, "rats": 40.0, "air": 180.0, "radon": 360.0}
LARGEST, REFITS, NODES = 12, 10, {"rats": 9, "radon": 5}


def deviations(outcome, seed):
    """Differences to independent answers in combined Monte Carlo errors, by what was checked."""
    import numpy as np

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import integrated

    from foldwise import datasets
    from foldwise.studies import air

    found = {}
    if outcome.name in ("rats", "radon"):
        table = datasets.load({"rats": "rats", "radon": "radon_all"}[outcome.name])
        for label, result in outcome.results.items():
            problem = getattr(integrated, outcome.name)(table, label == "A")
            exact = integrated.log_predictives(problem, range(problem.groups), NODES[outcome.name])
            error = (result.folds["elpd"].values - exact) / result.folds["mcse"].values
            largest = np.argsort(-result.folds["n_test"].values, kind="stable")[:LARGEST]
            total = (result.elpd - exact.sum()) / result.mcse
            found[f"{label}, total, exact {exact.sum():.2f}"] = total
            found[f"{label}, worst of the {LARGEST} largest folds"] = np.abs(error[largest]).max()
    if outcome.name == "air":
        table = datasets.load("air_traffic")
        chosen = np.sort(np.random.default_rng(seed).choice(394, REFITS, replace=False))
        for label, result in outcome.results.items():
            for k in chosen:
                row = result.folds.isel(fold=int(k))
                score, error = integrated.refit_air(table, label, air.FIRST_TEST + int(k), seed)
                gap = float(row["elpd"]) - score
                found[f"{label}, {row['fold'].item()}, refit {score:.3f}"] = gap / np.hypot(
                    float(row["mcse"]), error
                )
    return found


def one(name, seed, figures):
    """Run a study in this process, print it, and check it."""
    from foldwise import studies

    outcome = studies.run(name, studies.Options(seed=seed, progress=False))
    seconds = time.perf_counter() - BEGAN
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(outcome, flush=True)
    if figures:
        from foldwise.results.figures import save_figures

        save_figures(outcome.figures, Path(figures) / name)
    limit = MOST_SECONDS.get(name, float("inf"))
    print(
        f"\n{name}, seed {seed}: wall time {seconds:.1f} s (at most {limit:g}), CPU time of "
        f"both cores {used.ru_utime + used.ru_stime:.1f} s, peak memory "
        f"{used.ru_maxrss / 1024:.0f} MB"
    )
    failed = seconds > limit
    for what, z in deviations(outcome, seed).items():
        print(
            f"  {what:45}{z:7.2f} Monte Carlo errors{'' if abs(z) < 4 else '  MISSED'}", flush=True
        )
        failed |= not abs(z) < 4
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--study", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--figures", help="folder to write the figures to")
    parser.add_argument("--here", action="store_true", help="in this process, one study and seed")
    arguments = parser.parse_args()
    if arguments.here:
        sys.exit(one(arguments.study[0], arguments.seeds[0], arguments.figures))
    failed = False
    for name in arguments.study:
        for seed in arguments.seeds:
            command = [sys.executable, __file__, "--here", "--study", name, "--seeds", str(seed)]
            if arguments.figures and seed == arguments.seeds[0]:
                command += ["--figures", arguments.figures]
            with tempfile.TemporaryDirectory() as cache:
                environment = {**os.environ, "FOLDWISE_CACHE": cache}
                failed |= subprocess.run(command, env=environment).returncode != 0
            print(flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
