"""Runs that are killed at random moments, and what keeping them costs.

Starts cross-validation in processes of its own, with full-data fits, chains in several blocks and
rounds, rungs, importance weights, sums and saving, ends each with SIGKILL at a random moment and
starts it again, 50 times in all, until each is finished: results must be those of a run without
interruption, to the last bit. Then times the radon study's model with and without a checkpoint, in
turns, all compiled; the checkpoint may cost 2 %.

    python bench/checkpoints.py [--kills 50] [--repeats 5] [--seed 0]
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import kills

MOST_COST = 0.02


def kill_all(count: int, seed: int) -> int:
    """Kills of all scenarios in turn; returns the number of results that were not the same."""
    from stored import same_result

    import foldwise as fw

    rng, failures, each = random.Random(seed), 0, -(-count // len(kills.SCENARIOS))
    for scenario in kills.SCENARIOS:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            seconds = kills.finish(kills.start(scenario, "", folder / "expected.nc"))
            killed = rounds = 0
            while killed < each:
                process = kills.start(scenario, folder / "run", folder / "found.nc")
                killed += kills.kill(process, rng, 0.6 * seconds)
                rounds += 1
                whole = len(list((folder / "run").glob("*.piece"))) if killed else 0
                if killed % 4 == 0 and killed < each:  # whole again: begin anew
                    failures += not _finished(scenario, folder, fw, same_result)
                    shutil.rmtree(folder / "run")
            failures += not _finished(scenario, folder, fw, same_result)
            print(
                f"{scenario}: {killed} of {rounds} processes killed, {whole} pieces, "
                f"{seconds:.1f} s without, failures so far {failures}",
                flush=True,
            )
    return failures


def _finished(scenario, folder, fw, same_result) -> bool:
    kills.finish(kills.start(scenario, folder / "run", folder / "found.nc"))
    expected, found = (fw.load(folder / f"{name}.nc") for name in ("expected", "found"))
    try:
        same_result(expected, found, times=False)
    except AssertionError as error:
        print(f"{scenario}: {error}")
        return False
    return True


def cost(repeats: int) -> float:
    """What a checkpoint adds to a run of radon, as a share of its time on all processors."""
    import foldwise as fw
    from foldwise import datasets
    from foldwise.studies import radon

    data = datasets.load("radon_all")
    model, folds = radon.models(data)["A"], radon.folds(data)
    fit = fw.fit(model, draws=500, warmup=500, seed=1, progress=False)
    shares = []
    for options in ({"method": "mcmc"}, {"method": "mcmc", "memory": "online"}):
        times = np.zeros((2, 2, repeats))
        fw.cross_validate(model, folds, fit, seed=1, progress=False, **options)  # compiles
        for k in range(repeats):
            for kept in (0, 1) if k % 2 else (1, 0):
                times[kept, :, k], size = _timed(fw, (model, folds, fit), options, kept)
        (without, used), (with_it, used_with) = np.median(times, axis=2)
        shares.append(used_with / used - 1.0)
        print(
            f"radon {options}: {without:.2f} s without, {with_it:.2f} s with a checkpoint; on all "
            f"processors {used:.2f} s and {used_with:.2f} s, {100 * shares[-1]:+.1f} % "
            f"({size:.0f} MB)",
            flush=True,
        )
    return max(shares)


def _timed(fw, parts, options, kept):
    """Seconds, and seconds on all processors, of a run; and what it kept, in MB."""
    with tempfile.TemporaryDirectory() as place:
        checkpoint = {"checkpoint": Path(place) / "run"} if kept else {}
        began, used = time.perf_counter(), time.process_time()
        fw.cross_validate(*parts, seed=1, progress=False, **options, **checkpoint)
        spent = time.perf_counter() - began, time.process_time() - used
        return spent, sum(f.stat().st_size for f in Path(place).rglob("*")) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    share = cost(options.repeats) if options.repeats else 0.0
    failures = kill_all(options.kills, options.seed) if options.kills else 0
    print(f"failures {failures}, checkpoints cost {100 * share:.1f} %, at most 2")
    sys.exit(failures > 0 or share > MOST_COST)


if __name__ == "__main__":
    main()
