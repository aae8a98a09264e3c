"""Taking all chains of all folds further, and what follows: chains tried again, rungs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

import numpy as np
from jaxtyping import Int

from foldwise.sampling.elsewhere import run_chains
from foldwise.sampling.kept import RunRecorder, keeper_of_blocks
from foldwise.sampling.run import Run
from foldwise.sampling.rungs import climb
from foldwise.scores.recording import make_room
from foldwise.support.progress import Progress

# Times that the chains of a fold warm up again that are too slow for their length, or diverge.
MOST_TRIES = 2


def sample(runs: Sequence[Run], draws: int, bar: Progress) -> None:
    """Take all chains of all runs ``draws`` further, recording every draw after warm-up."""
    began, first = time.perf_counter(), runs[0].evidence.standing.draws == 0
    for run in runs:
        make_room(run.evidence, draws)
    _advance(runs, draws, bar, f"folds of {_title(runs)}")
    if first:
        _settle(runs, draws, bar)
    add_seconds(runs, "folds", began)
    began = time.perf_counter()
    climb([(run, run.far_folds()) for run in runs], bar)
    add_seconds(runs, "rungs", began)


def _settle(runs: Sequence[Run], draws: int, bar: Progress) -> None:
    """Let chains warm up again that have not arrived, or whose metric or steps do not fit.

    At most ``MOST_TRIES`` times; what is then still wrong becomes the fold's status.
    """
    for _ in range(MOST_TRIES):
        again = [run.try_again() for run in runs]
        folds = sum(len(members) for members in again)
        if not folds:
            break
        _advance(runs, draws, bar, f"longer warm-up of {folds} folds", again)
    for run in runs:
        run.evidence.pace.watch.earlier = None


def _advance(
    runs: Sequence[Run],
    draws: int,
    bar: Progress,
    title: str,
    again: Sequence[Int[np.ndarray, " fold"]] | None = None,
) -> None:
    """Run all chains, or those of the folds ``again`` anew, and record their draws."""
    head = runs[0]
    owner = {id(run.sampler): run for run in runs}
    chosen = again or [run.folds.index for run in runs]
    warmup = head.settings.warmup if again else max(head.settings.warmup - head.sampler.done, 0)
    bar.start(title, sum(len(members) for members in chosen) * (warmup + draws))
    samplers, begun = [run.sampler for run in runs], 0 if again else head.evidence.standing.draws
    recorders = [RunRecorder(run, begun) for run in runs]
    keeps = keeper_of_blocks("folds", recorders, lambda n: bar.advance(n * (warmup + draws)))
    with closing(run_chains(samplers, draws, again, keeps)) as segments:
        for sampler, members, record, count in segments:
            if count > 0:
                owner[id(sampler)].record(members, record)
            bar.advance(len(members) * abs(count))
    for run in runs:
        run.evidence.measure()


def _title(runs: Sequence[Run]) -> str:
    return runs[0].model.name or "model" if len(runs) == 1 else f"{len(runs)} models"


def add_seconds(runs: Sequence[Run], phase: str, began: float) -> None:
    """Note how long a phase took, each run an equal share."""
    share = (time.perf_counter() - began) / len(runs)
    for run in runs:
        run.seconds[phase] = run.seconds.get(phase, 0.0) + share
