"""Runs that are killed at random moments, and what keeping them costs.

Starts cross-validation in processes of its own, with full-data fits, chains in several blocks and
rounds, rungs, importance weights, sums and saving, ends each with SIGKILL at a random moment and
starts it again, 50 times in all, until each is finished: results must be those of a run without
interruption, to the last bit. Before that, cross-validates the radon study's model A, all of its
counties or some, by chains on what counties share or on all parameters, with a checkpoint, which
may take 2 % of the run's time.

    python bench/checkpoints.py [--kills 50] [--no-cost] [--counties 386] [--all-parameters]
                                [--seed 0]
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

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


def cost(counties: int | None, marginal: bool | None) -> float:
    """What a checkpoint adds to a run of radon, as a share of its time on all processors.

    Counted inside one run, by the clocks of the threads that keep: beside other work, the times of
    runs with and without one differ by more than that.
    """
    import foldwise as fw
    from foldwise import datasets
    from foldwise.sampling.kept import BlockKeeper
    from foldwise.studies import radon
    from foldwise.support.keeping import FolderKeeper

    data = datasets.load("radon_all")
    model, folds = radon.models(data)["A"], radon.folds(data)[:counties]
    fit = fw.fit(model, draws=500, warmup=500, seed=1, progress=False)
    spent = {}

    def clocked(owner, name):
        real = getattr(owner, name)

        def timed(*arguments):
            began = time.thread_time()
            try:
                return real(*arguments)
            finally:
                spent[name] = spent.get(name, 0.0) + time.thread_time() - began

        setattr(owner, name, timed)

    for owner, name in ((FolderKeeper, "_write"), (FolderKeeper, "save"), (BlockKeeper, "_part")):
        clocked(owner, name)
    with tempfile.TemporaryDirectory() as place:
        began, used = time.perf_counter(), time.process_time()
        options = {"seed": 1, "progress": False, "method": "mcmc", "marginal": marginal}
        fw.cross_validate(model, folds, fit, checkpoint=Path(place) / "run", **options)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        files = list(Path(place).rglob("*.piece"))
        size = sum(file.stat().st_size for file in files) / 1e6
    share = sum(spent.values()) / (used - sum(spent.values()))
    parts = ", ".join(f"{name} {value:.2f} s" for name, value in spent.items())
    print(
        f"radon, {len(folds)} folds by chains: {seconds:.1f} s, {used:.1f} s on all processors, of "
        f"which {parts}: {100 * share:.2f} % ({len(files)} files, {size:.0f} MB)",
        flush=True,
    )
    return share


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--no-cost", dest="cost", action="store_false")
    parser.add_argument("--counties", type=int, default=None)
    parser.add_argument("--all-parameters", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    marginal = False if options.all_parameters else None
    share = cost(options.counties, marginal) if options.cost else 0.0
    failures = kill_all(options.kills, options.seed) if options.kills else 0
    print(f"failures {failures}, checkpoints cost {100 * share:.1f} %, at most 2")
    sys.exit(failures > 0 or share > MOST_COST)


if __name__ == "__main__":
    main()
