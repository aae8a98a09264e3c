"""A run made ready: starting points, metrics, step sizes of all chains, room for records."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from foldwise.folds.folds import Folds
from foldwise.models.model import Model
from foldwise.sampling.blocks import Sampler, tune_together
from foldwise.sampling.fit import Fit
from foldwise.sampling.metric import MetricShape
from foldwise.sampling.run import Run, Settings, fold_program
from foldwise.sampling.sample import add_seconds
from foldwise.sampling.tuning import FullDraws, full_data, tuned
from foldwise.scores import bridge, needs, recording
from foldwise.scores.evidence import Evidence, FullData, Pace
from foldwise.scores.marginal_model import base_of
from foldwise.scores.sums import GRID, RunningSums, Watch
from foldwise.support.keeping import keeper
from foldwise.support.progress import Progress


def prepared(
    model: Model,
    folds: Folds,
    fit: Fit,
    settings: Settings,
    draws: int,
    bar: Progress,
    together: int,
    seen: FullDraws | None = None,
) -> Run:
    """Starting points, metrics, and room for what will be recorded.

    ``together``: how many models of a family are sampled side by side. ``seen`` are full-data
    draws of all parameters and what they say of the test rows, where the model is that of some of
    them.
    """
    began, k = time.perf_counter(), len(folds)
    bar.start("full-data draws of the test rows")
    full = full_data(model, folds, fit)
    whole, positions = base_of(model), full.positions
    if seen is not None:
        said = seen.scores
        scores = replace(full.scores, rows=said.rows, given_all=said.score)
        full, positions = replace(full, scores=scores), seen.positions
    classes = needs.classes_of(whole, settings.scores, positions)
    emit = needs.emitted(settings.scores, settings.keep, folds, whole, classes)
    partner, previous = _partners(folds, settings.estimator)
    bar.start("metrics of the folds")
    start, found, tuning = tuned(model, folds, fit, full, settings.chains, settings.seed)
    shape = MetricShape.of(tuning.metric)
    program = fold_program(model, folds, settings, emit, shape, together if shape.own else 1)
    sampler = Sampler(program, folds, previous, tuning, start, settings.warmup, settings.seed)
    if fit.divergences:  # the folds' posteriors are as narrow somewhere: no steps as for a normal
        sampler.finer[:] = 1
    directions = tuning.watched.shape[1] + 1  # the log density is watched too
    pace = Pace(Watch.empty(k, settings.chains, directions, settings.batch), np.zeros(k))
    sums, stored = _no_sums(folds, partner, previous, full.scores, settings, emit, draws)
    evidence = Evidence(
        folds, partner, previous, found.improper, full.scores, sums, pace, draws=stored
    )
    recording.begin(evidence, whole, positions, settings.scores, settings.keep, classes, draws)
    return Run(
        model,
        folds,
        fit,
        settings,
        full.positions,
        found,
        sampler,
        evidence,
        np.zeros(k),
        np.zeros(k, np.int64),
        np.zeros((k, settings.chains), np.int64),
        np.zeros(k, np.int64),
        {"prepare": time.perf_counter() - began},
    )


def tune(runs: Sequence[Run], bar: Progress) -> None:
    """The compiled program of all runs, and the step size that each starts from."""
    began, samplers = time.perf_counter(), [run.sampler for run in runs]
    bar.start("compiling the folds' program")
    samplers[0].program.compile().ready()
    add_seconds(runs, "compile", began)
    began = time.perf_counter()
    bar.start("step size")
    # Leapfrog steps of length e turn a standard normal's q by an angle T with an energy error of
    # e^2 (q_T^2 - q_0^2) / 8, whose variance in d dimensions is d e^4 sin^2(T) / 16. Acceptance is
    # 2 Phi(-sd / 2), so 0.8 at e = 1.5 d^-1/4 for trajectories of our lengths; a little less,
    # since no metric fits quite. The pilots correct it.
    guess = min(1.0, 1.3 * runs[0].model.dimension ** -0.25)

    def step_sizes() -> list[float]:
        tune_together(samplers, guess)
        return [sampler.step_size for sampler in samplers]

    for sampler, step_size in zip(samplers, keeper().made("step-size", step_sizes), strict=True):
        sampler.start_at(step_size)
    add_seconds(runs, "tune", began)


def _partners(
    folds: Folds, estimator: str
) -> tuple[Int[np.ndarray, " fold"], Int[np.ndarray, " fold"]]:
    """Whose draws bridge each fold's score, and whose score each fold's draws bridge."""
    k = len(folds.partner)
    partner = np.full(k, -1) if estimator == "mean" else folds.partner
    previous = np.full(k, -1)
    serves = (partner >= 0) & (partner < k)
    previous[partner[serves]] = np.flatnonzero(serves)
    return partner, previous


def _no_sums(
    folds: Folds,
    partner: Int[np.ndarray, " fold"],
    previous: Int[np.ndarray, " fold"],
    full: FullData,
    settings: Settings,
    emit: needs.Emit,
    draws: int,
) -> tuple[RunningSums, Float[np.ndarray, "fold chain draw target"] | None]:
    """Running sums before the first draw, and room for stored draws where they are kept."""
    targets, k = (2 if (previous >= 0).any() else 1), len(partner)
    nodes = stored = None
    if settings.memory == "draws":
        stored = np.empty((k, settings.chains, 0, targets))
    elif (partner >= 0).any():
        nodes = _bridge_nodes(partner, previous, full, settings.chains * draws)
    row_start = folds.test_start if emit.by_row else None
    sums = RunningSums.empty(k, settings.chains, settings.batch, row_start, nodes)
    return sums, stored


def _bridge_nodes(
    partner: Int[np.ndarray, " fold"],
    previous: Int[np.ndarray, " fold"],
    full: FullData,
    own_draws: int,
) -> Float[np.ndarray, "fold target node"]:
    """Bridge constants for online sums, around the full-data draws' guess of the optimum."""
    own = bridge.guess(full.joint, partner, own_draws)[:, None] + GRID
    if not (previous >= 0).any():
        return own[:, None]
    return np.stack([own, own[np.maximum(previous, 0)]], axis=1)
