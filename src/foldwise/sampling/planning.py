"""What a run will hold in memory, by its sizes alone, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foldwise.folds.folds import Folds
from foldwise.models.model import Model
from foldwise.sampling.run import Settings
from foldwise.sampling.target import Goal
from foldwise.sampling.tuning import FULL_SHARE, FULL_VALUES, WATCHED, fold_metrics_fit
from foldwise.scores.importance import held_at_once
from foldwise.scores.needs import Emit, emitted
from foldwise.scores.sums import BLOCKS, GRID, TAIL, WATCH_BLOCKS
from foldwise.support.memory import limit_of, limited, most_values, used_memory

# Draws of a full-data fit that is made here.
_FIT_DRAWS = 4000
# What compiling takes, and what Python keeps of arrays that come and go: measured on models with
# few rows, beyond what the process has when it begins.
COMPILING = 400 * 10**6
# The same where chains have parameters of groups integrated out: a larger program.
COMPILING_INTEGRALS = 700 * 10**6
HELD = "what the process holds now, and compiling"


def check_memory(
    models: Sequence[Model],
    folds: Folds,
    settings: Settings,
    goal: Goal,
    weighted: bool,
    memory_limit: str | int | None,
    integrated: bool = False,
) -> None:
    """Raise unless a run fits into the memory that it may take; to a target, at its longest.

    ``integrated``: its chains have parameters of groups integrated out.
    """
    limit, draws = limit_of(memory_limit), goal.draws if goal.target is None else goal.most
    emit = emitted(settings.scores, settings.keep, folds, models[0], np.zeros(0))
    with limited(None if memory_limit is None else limit):
        plan = planned(models[0], folds, settings, draws, emit, weighted)
    if integrated:
        plan[HELD] += COMPILING_INTEGRALS - COMPILING
    of_all = {name: size * (1 if name == HELD else len(models)) for name, size in plan.items()}
    check_plan(of_all, limit, settings)


def planned(
    model: Model, folds: Folds, settings: Settings, draws: int, emit: Emit, weighted: bool
) -> dict[str, int]:
    """Bytes that a run holds at its peak, by what they are of, with ``draws`` draws of each chain.

    ``weighted``: folds are scored by weights first, and what these take is free again before chains
    begin. Chains are planned for all folds, since how many need some is not known.
    """
    k, rows, d, n = len(folds), len(folds.test_rows), model.dimension, settings.chains
    targets = 2 if ((folds.partner >= 0) & (folds.partner < k)).any() else 1
    watched = min(d, WATCHED) + 1
    numbers = {
        # at the test rows, at all rows that are left out, and one of them while it is made
        "full-data draws of the folds' scores": 3
        * min(k * _FIT_DRAWS, most_values(FULL_VALUES, FULL_SHARE)),
        "positions and metrics of the chains": k * n * d
        + (3 * k * d**2 if fold_metrics_fit(model, folds) else 0),
        "running sums": k * (n * (3 * BLOCKS + WATCH_BLOCKS * watched) + TAIL)
        + (rows * (n * BLOCKS + TAIL) if emit.by_row else 0),
    }
    if settings.memory == "draws":
        # by the peaks of bench/memory.py: what is stored, and as much twice while it is made
        numbers["log scores of every draw"] = 3 * k * n * draws * targets
    else:
        numbers["running sums"] += k * targets * n * BLOCKS * len(GRID)
    if emit.replicate:
        numbers["predictive draws"] = 2 * rows * n * draws * emit.replicate
    if "position" in settings.keep:
        numbers["every draw"] = 2 * k * n * draws * d
    if weighted:
        # what is left out and what is tested, at every draw, or one while the other is made
        held = (k + (rows if emit.by_row else 0)) * _FIT_DRAWS
        weights = 2 * min(held, held_at_once(_FIT_DRAWS, d))
        if weights > sum(numbers.values()):
            numbers = {"weights of the folds": weights}
    found = {name: 8 * int(count) for name, count in numbers.items()}
    return {**found, HELD: used_memory() + COMPILING}


def check_plan(plan: dict[str, int], limit: int | None, settings: Settings) -> None:
    """Raise where a plan does not fit, with what could be done instead."""
    total = sum(plan.values())
    if limit is None or total <= limit:
        return
    largest = sorted(plan, key=lambda name: -plan[name])[:3]
    parts = ", ".join(f"{name} {_words(plan[name])}" for name in largest)
    ways = []
    if settings.memory == "draws":
        ways.append('memory="online"')
    if settings.keep:
        ways.append("nothing in keep")
    ways += ["fewer draws", "part of the folds at a time, with merge", "a larger memory_limit"]
    raise MemoryError(
        f"the run must fit into {_words(limit)} of memory, but would take about {_words(total)}: "
        f"{parts}; use {', '.join(ways[:-1])} or {ways[-1]}"
    )


def _words(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
