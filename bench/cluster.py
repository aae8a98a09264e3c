"""Workers beside one process: what sending pieces of folds costs, and how far it would go.

Cross-validates the radon study's model A by chains, all compiled: in one process with a device for
each core, and by as many workers with one device each, which may take 1.15 times as long. Then
times pieces of different sizes in one worker: seconds of a piece against its folds give a fixed
part and a part by fold. With these, and with the time that the process at the centre spends on a
piece (pickling, recording), a simulation of a queue says how long a million folds would take by so
many workers: pieces go to the first worker that is free, through one centre that serves them one
after another. It knows nothing of networks: their part is the bytes of a fold, as printed.

    python bench/cluster.py [--workers 2] [--repeats 3] [--folds 1000000]
"""

import argparse
import heapq
import multiprocessing
import os
import pickle
import time
import warnings
from concurrent.futures import ProcessPoolExecutor

import numpy as np

MOST_RATIO = 1.15


def set_up():
    import foldwise as fw
    from foldwise import datasets
    from foldwise.studies import radon

    data = datasets.load("radon_all")
    model, folds = radon.models(data)["A"], radon.folds(data)
    return fw, model, folds, fw.fit(model, draws=500, warmup=500, seed=1, progress=False)


def compare(fw, model, folds, fit, executor, repeats):
    """Median seconds in this process, and by the workers."""
    settings = {"method": "mcmc", "seed": 1, "progress": False}
    times = np.zeros((2, repeats))
    for chosen in (None, executor):  # compiles
        fw.cross_validate(model, folds, fit, executor=chosen, **settings)
    for k in range(repeats):
        for which in (0, 1) if k % 2 else (1, 0):
            began = time.perf_counter()
            fw.cross_validate(model, folds, fit, executor=(None, executor)[which], **settings)
            times[which, k] = time.perf_counter() - began
    return np.median(times, axis=1)


def by_size(fw, model, folds, fit, executor):
    """Folds, seconds in a worker, and seconds at the centre of pieces; bytes of a fold."""
    from foldwise.sampling import elsewhere

    rows = []
    for size in (4, 16, 64, 128):
        some = folds[:size]
        elsewhere.PIECES_EACH = 1
        kept = elsewhere.Workers.of
        elsewhere.Workers.of = classmethod(lambda cls, e: cls(e, 1))
        for _ in range(2):  # the first compiles
            used = time.process_time()
            result = fw.cross_validate(
                model, some, fit, executor=executor, method="mcmc", seed=1, progress=False
            )
        seconds = result.info["seconds"]["folds"]
        rows.append((size, seconds, time.process_time() - used))
        elsewhere.Workers.of, elsewhere.PIECES_EACH = kept, 3
        print(
            f"  a piece of {size:4d} folds: {seconds:.2f} s, centre {rows[-1][2]:.2f} s", flush=True
        )
    run = result.run
    watched = run.evidence.pace.watch.centre.shape[1]
    record = np.zeros((1, run.settings.chains, 100, 1 + watched))
    return np.array(rows), len(pickle.dumps(record))


def simulated(folds, workers, of_piece, fixed, each, centre):
    """Seconds of ``folds`` folds in pieces of ``of_piece``: one centre, then the first free worker.

    ``centre`` is the time of a fold at the centre, which does one piece after another.
    """
    pieces = -(-folds // of_piece)
    free, clock = [0.0] * workers, 0.0
    heapq.heapify(free)
    for _ in range(pieces):
        clock = max(clock + of_piece * centre, 0.0)
        start = max(heapq.heappop(free), clock)
        heapq.heappush(free, start + fixed + of_piece * each)
    return max(free)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folds", type=int, default=1_000_000)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    parts = set_up()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawn) as executor:
        here, there = compare(*parts, executor, options.repeats)
        print(
            f"radon, {len(parts[2])} folds: one process {here:.2f} s, {options.workers} workers "
            f"{there:.2f} s, ratio {there / here:.2f} (at most {MOST_RATIO})",
            flush=True,
        )
        rows, size = by_size(*parts, executor)
    slope, fixed = np.polyfit(rows[:, 0], rows[:, 1], 1)
    centre = max(np.polyfit(rows[:, 0], rows[:, 2], 1)[0], 0.0)
    print(
        f"a piece takes {fixed:.2f} s and {slope * 1e3:.1f} ms a fold; the centre "
        f"{centre * 1e3:.2f} ms a fold; {size / 1e3:.0f} kB come back of each"
    )
    for workers in (10, 100, 1000):
        for of_piece in (64, 512):
            seconds = simulated(options.folds, workers, of_piece, max(fixed, 0.0), slope, centre)
            alone = options.folds * slope
            print(
                f"  {workers:5d} workers, pieces of {of_piece}: {seconds / 3600:.2f} h, "
                f"{alone / seconds:.0f} times one worker; at the centre "
                f"{options.folds * centre / 3600:.2f} h, {options.folds * size / 1e9:.0f} GB"
            )


if __name__ == "__main__":
    main()
