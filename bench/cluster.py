"""Workers beside one process: what sending pieces of folds costs, and how far it would go.

Cross-validates some counties of the radon study's model A by chains, all compiled: in one process
with a device for each core, and by as many workers with one device each, by turns (A B, B A, ...);
the workers may take 1.15 times as long.

Then single pieces of different sizes go to one worker. Seconds from sending a piece to its return
against its folds give a fixed part and a part by fold; the processor time of this process for a
quarter of the folds and for all gives what the centre spends on one (full-data scores, metrics,
recording, estimates);
pickled parcels and records give the bytes of a fold; empty pieces, through the process pool and
through Dask where it is installed, give what a scheduler spends on a piece.

With these numbers a queue is simulated, event by event: every worker has one piece at work and one
waiting; the centre serves one returned piece after another (a scheduler's time for the piece, the
centre's for its folds, its bytes at 10 Gbit/s) and then sends the next. What is not measured is the
network, and schedulers with more than two workers.

Parts can be run one at a time, each of which wants a quiet machine for two or three minutes; costs
that were measured are kept in ``bench/out/cluster.json``, where the simulation finds them.

    python bench/cluster.py [--parts ratio,centre,sizes,schedulers,simulation] [--counties 48]
                            [--draws 60] [--repeats 3] [--folds 1000000]
"""

import argparse
import heapq
import json
import multiprocessing
import os
import pickle
import time
import warnings
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np

MOST_RATIO = 1.15
SIZES = (1, 2, 4, 8, 16)
PARTS = ("ratio", "centre", "sizes", "schedulers", "simulation")
KEPT = Path(__file__).parent / "out" / "cluster.json"
# Bytes that a network of 10 Gbit/s brings in a second.
NETWORK = 1.25e9


class Watched(Executor):
    """One worker of a pool, with notes of every piece: its folds, seconds, bytes out and back."""

    _max_workers = 1

    def __init__(self, pool):
        self.pool, self.notes = pool, []

    def submit(self, work, needed, do, parcel):
        began = time.perf_counter()
        future = self.pool.submit(work, needed, do, parcel)

        def note(done):
            how, found = done.result()
            if how == "done":
                seconds = time.perf_counter() - began
                folds = len(parcel["members"])
                sizes = len(pickle.dumps(parcel)), len(pickle.dumps(found))
                self.notes.append((folds, seconds, *sizes))

        future.add_done_callback(note)
        return future


def set_up(counties):
    import foldwise as fw
    from foldwise import datasets
    from foldwise.studies import radon

    data = datasets.load("radon_all")
    model, folds = radon.models(data)["A"], radon.folds(data)
    began = time.perf_counter()
    fit = fw.fit(model, draws=500, warmup=500, seed=1, progress=False)
    print(
        f"radon A: {model.n_obs} rows, {model.dimension} parameters, {counties} of {len(folds)} "
        f"counties; full-data fit with compiling {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return fw, model, folds[:counties], fit


def compare(run, executor, repeats):
    """Seconds in this process, and by the workers, by turns."""
    times = np.zeros((2, repeats))
    for chosen in (None, executor):  # compiles
        run(chosen)
    for k in range(repeats):
        for which in (0, 1) if k % 2 == 0 else (1, 0):
            began = time.perf_counter()
            run((None, executor)[which])
            times[which, k] = time.perf_counter() - began
        print(f"  one process {times[0, k]:.1f} s, workers {times[1, k]:.1f} s", flush=True)
    return times


def by_size(run, folds, pool):
    """Costs of pieces in a worker, fixed and by fold, and bytes by fold."""
    from foldwise.sampling import elsewhere, program

    usual = elsewhere.PIECES_EACH, program.BLOCK_BYTES
    elsewhere.PIECES_EACH, program.BLOCK_BYTES = 1, 2**40  # all folds are one piece
    rows = []
    for size in SIZES:
        for _ in range(2):  # the first compiles
            watched = Watched(pool)
            run(watched, folds[:size])
        rows.append(next(note for note in watched.notes if note[0] == size))
        _, seconds, out, back = rows[-1]
        print(
            f"  a piece of {size:2d} folds: {seconds:.2f} s, {seconds / size:.2f} s a fold; "
            f"{out / size / 1e3:.1f} kB a fold out, {back / size / 1e3:.1f} kB back",
            flush=True,
        )
    elsewhere.PIECES_EACH, program.BLOCK_BYTES = usual
    table = np.array(rows)
    each, fixed = np.polyfit(table[:, 0], table[:, 1], 1)
    size = float((table[-1, 2] + table[-1, 3]) / table[-1, 0])
    return max(fixed, 0.0), each, size


def at_the_centre(run, folds, executor):
    """Processor seconds that this process spends on a fold which others sample."""
    few = len(folds) // 4
    used = []
    for some in (folds[:few], folds):
        run(executor, some)  # compiles
        began = time.process_time()
        run(executor, some)
        used.append(time.process_time() - began)
    print(f"  this process: {used[0]:.2f} s for {few} folds, {used[1]:.2f} s for {len(folds)}")
    return max((used[1] - used[0]) / (len(folds) - few), 0.0)


def nothing(shared, parcel):
    """An empty piece."""
    return parcel


def seconds_of_a_piece(executor, pieces=400):
    """Seconds that an executor and this process spend on an empty piece."""
    from foldwise.support.workers import Job, Workers, spread

    job = Job(nothing, None, lambda piece: piece, lambda piece: [], str)
    by = Workers.of(executor, [])
    list(spread(job, range(8), by))
    began = time.perf_counter()
    assert len(list(spread(job, range(pieces), by))) == pieces
    return (time.perf_counter() - began) / pieces


def of_dask(workers):
    """The same of Dask's scheduler; None where it is not installed."""
    try:
        from dask.distributed import Client, LocalCluster
    except ImportError:
        return None
    quiet = {"dashboard_address": None, "silence_logs": 50}
    with LocalCluster(workers, threads_per_worker=1, **quiet) as cluster, Client(cluster) as client:
        return seconds_of_a_piece(client)


def simulated(folds, workers, of_piece, costs):
    """Seconds of ``folds`` folds in pieces of ``of_piece``, and the share of them at work."""
    pieces, number = -(-folds // of_piece), count()
    duration = costs["fixed"] + of_piece * costs["each"]
    served = costs["piece"] + of_piece * (costs["centre"] + costs["bytes"] / NETWORK)
    sent = costs["piece"] + of_piece * costs["bytes"] / NETWORK
    events: list[tuple[float, int, str, int]] = []
    waiting, busy = [0] * workers, [False] * workers
    left, centre, last = pieces, 0.0, 0.0

    def send(worker, when):
        nonlocal left
        left -= 1
        heapq.heappush(events, (when, next(number), "arrives", worker))

    for worker in [*range(workers), *range(workers)]:
        if left:
            centre += sent
            send(worker, centre)
    while events:
        now, _, what, worker = heapq.heappop(events)
        if what == "arrives":
            waiting[worker] += 1
        else:
            busy[worker] = False
            centre = last = max(centre, now) + served
            if left:
                send(worker, centre)
        if waiting[worker] and not busy[worker]:
            waiting[worker], busy[worker] = waiting[worker] - 1, True
            heapq.heappush(events, (now + duration, next(number), "ends", worker))
    return last, folds * costs["each"] / (last * workers)


def measured(parts, options) -> dict[str, float]:
    """Costs by name, of the parts that are to be run on the radon study."""
    fw, model, folds, fit = set_up(options.counties)
    costs = {"fit": fit.seconds}

    def run(executor, some=folds):
        settings = {"method": "mcmc", "draws": options.draws, "seed": 1, "progress": False}
        return fw.cross_validate(model, some, fit, executor=executor, **settings)

    def pool(workers):
        return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))

    if "ratio" in parts:
        with pool(options.workers) as executor:
            here, there = np.median(compare(run, executor, options.repeats), axis=1)
        print(
            f"one process {here:.1f} s, {options.workers} workers {there:.1f} s, ratio "
            f"{there / here:.2f} (at most {MOST_RATIO})",
            flush=True,
        )
    if "centre" in parts:
        with pool(options.workers) as executor:
            costs["centre"] = at_the_centre(run, folds, executor)
        print(f"the centre spends {costs['centre'] * 1e3:.1f} ms on a fold", flush=True)
    if "sizes" in parts:
        with pool(1) as executor:
            costs["fixed"], costs["each"], costs["bytes"] = by_size(run, folds, executor)
        print(
            f"a piece takes {costs['fixed']:.2f} s and {costs['each'] * 1e3:.0f} ms a fold, of "
            f"which {costs['bytes'] / 1e3:.1f} kB travel",
            flush=True,
        )
    return costs


def schedulers(workers) -> dict[str, float]:
    """What an empty piece costs: by Dask, or without it by a pool of processes."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as executor:
        of_pool = seconds_of_a_piece(executor)
    dask = of_dask(workers)
    print(
        f"an empty piece takes {of_pool * 1e3:.1f} ms by processes"
        + ("" if dask is None else f", {dask * 1e3:.1f} ms by Dask"),
        flush=True,
    )
    return {"piece": of_pool if dask is None else dask}


def simulation(folds, costs) -> None:
    """Hours of many folds by many workers, and what each part of them takes by itself."""
    print(f"{folds} folds, by simulation; the full-data fit takes {costs['fit']:.0f} s more")
    for workers in (10, 100, 1000, 10_000):
        for of_piece in (2, 16):
            seconds, share = simulated(folds, workers, of_piece, costs)
            parts = {
                "workers": folds * (costs["each"] + costs["fixed"] / of_piece) / workers,
                "scheduler": folds / of_piece * costs["piece"],
                "centre": folds * costs["centre"],
                "network": folds * costs["bytes"] / NETWORK,
            }
            said = ", ".join(f"{name} {part:.0f} s" for name, part in parts.items())
            print(
                f"  {workers:6d} workers, pieces of {of_piece}: {seconds / 3600:.2f} h, workers "
                f"busy {share:.0%}; by itself {said}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--counties", type=int, default=48)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folds", type=int, default=1_000_000)
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"parts must be among {', '.join(PARTS)}, got {', '.join(unknown)}")
    warnings.simplefilter("ignore")
    costs = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if {"ratio", "centre", "sizes"} & set(parts):
        costs |= measured(parts, options)
    if "schedulers" in parts:
        costs |= schedulers(options.workers)
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(costs))
    if "simulation" in parts:
        simulation(options.folds, costs)


if __name__ == "__main__":
    main()
