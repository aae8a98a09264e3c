"""How the full-data posterior is sampled: by many short chains, or NUTS, until it is settled."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from foldwise.models.evaluate import gradients
from foldwise.models.model import Model
from foldwise.models.structure import cells_at_start
from foldwise.sampling.fit import (
    ESS_LIMIT,
    HOPELESS_RHAT,
    RHAT_LIMIT,
    Fit,
    FitError,
    divergent_share,
    fingerprint_of,
    is_settled,
    largest,
)
from foldwise.sampling.globals import CHAINS, DRAWS, draw_globals, draw_small
from foldwise.sampling.improper import improper_direction
from foldwise.sampling.metric import DENSE_DIMENSION, shrunk_covariance
from foldwise.sampling.nuts import DENSE_WINDOWS, Nuts
from foldwise.sampling.nuts import begin_to_compile as begin_with_nuts
from foldwise.sampling.pooled import Draws, draw_pooled, suits
from foldwise.sampling.starts import far_apart, lost_chains, starting_points
from foldwise.scores.diagnostics import by_parameter
from foldwise.scores.integrals import begin_to_compile
from foldwise.support.checks import check_count, outside, resolve_seed
from foldwise.support.progress import Progress
from foldwise.support.runtime import import_for_tables, usual_errors

# Times the draws asked for that a fit goes on for by itself, a power of 2.
LONGEST = 8
# Share of divergent transitions from which on chains are worth running again with finer steps.
# Steps of an acceptance of 0.8 do not get into narrow parts of the posterior at all: of a latent
# Gaussian process (bench/gp.py) 0.4 % diverged, and with them went the upper tail of the amplitude,
# 0.000 of the draws where 0.007 should be; with finer steps 0.008.
FEW_DIVERGENT = 0.001
# Times the usual steps of a draw of the globals alone, where these do not do, and the number of
# effective draws below which more will not do either.
_LONGER, _HOPELESS_ESS = 4, 100
# Draws of each chain that tell how high its log density is.
_LEVEL_DRAWS = 50
# Ends of short chains from which modes are climbed.
_CLIMBERS = 8


@usual_errors()
def fit(
    model: Model,
    chains: int = 4,
    draws: int = 1000,
    warmup: int = 1000,
    seed: int | None = None,
    progress: bool = True,
    marginal: bool | None = None,
) -> Fit:
    """Draw from the posterior of ``model`` given all rows.

    Where parameters belong to groups of rows alone, and at most 15 do not, or 40 that have a nearly
    normal posterior, these are sampled with the others integrated out, by independence Metropolis
    steps from a mixture that is fitted to their posterior, and the others drawn given them. Else,
    or where that fails, by NUTS with Stan's window adaptation, its metric dense up to 20
    parameters, diagonal beyond, from starts all over the prior. Where up to 500 parameters are
    strongly correlated it is dense too, learned from the gradients of all chains. Beyond 20
    parameters warm-up takes half as long where correlations are learned so, or chains soon agree.
    While R-hat is over 1.01 or an ESS below 400 the chains go on, up to 8 times the draws asked
    for, of which as many are kept; with finer steps where more than 1 in 1,000 transitions diverge.
    Warns when that is not enough, or transitions diverge: cross-validation inherits the fit's
    problems. Raises ``FitError`` where the posterior is improper.

    Parameters
    ----------
    model
        What to fit.
    chains
        Number of chains.
    draws
        Draws kept from each chain; more where these are fewer than 800 in all and not enough.
    warmup
        Adaptation iterations before them, at most.
    seed
        Whole number; None draws one, which the result records.
    progress
        Whether to show a progress bar.
    marginal
        Whether parameters of groups are integrated out; None: wherever that can be. False: NUTS on
        all parameters. True: an error where it cannot be.
    """
    check_count("chains", chains, 2)
    check_count("draws", draws, 100)
    check_count("warmup", warmup, 100)
    seed = resolve_seed(seed)
    with Progress(progress, f"full-data fit{model.label}") as bar:
        model.check_shapes()
        model.check_values()
        began = time.perf_counter()
        if marginal is not False:
            begin_to_compile(model, cells_at_start(model))
        import_for_tables()
        alone = None if marginal is False else _of_globals(model, seed, bar, draws, chains)
        if alone is not None:
            return alone
        if marginal:
            raise ValueError(
                "marginal=True needs parameters that belong to groups of rows alone, at most 15 "
                "that do not (40 where their posterior is nearly normal), and integrals that can "
                "be relied on, but this model has not; leave marginal out"
            )
        begin_with_nuts(model, chains)
        model.check_gradient()
        starts, spent = starting_points(model, chains, seed)
        run = draw_nuts(model, starts, draws, warmup, seed, bar)
    result = _made(model, run, seed, _Before(began, spent))
    _refuse_improper(model, result)
    result.warn(stacklevel=3)
    return result


def full_data_fit(
    model: Model, seed: int, bar: Progress, marginal: bool = False, chained: bool = False
) -> Fit:
    """The fit of a checked model that cross-validation starts from, 4,000 draws.

    With ``marginal``, where parameters belong to groups, the others are sampled alone first. Small
    models are tried with many short chains next, which compile in no time; before that, where folds
    have chains of their own (``chained``), which only start from the fit, and most parameters
    belong to no group, so that sampling them alone takes longer. Where these do not converge, and
    parameters are few, a mixture is fitted to the modes that they have come to. NUTS is last, from
    where the short chains that are farthest apart have come to.
    """
    began, spent, starts, ends = time.perf_counter(), 0, None, None
    later = marginal and chained and suits(model) and cells_at_start(model).mostly_shared
    alone = _of_globals(model, seed, bar) if marginal and not later else None
    if alone is not None:
        return alone
    if not suits(model):
        begin_with_nuts(model, CHAINS)
    model.check_gradient()
    for run in draw_pooled(model, seed, bar) if suits(model) else ():
        result = _made(model, run, seed, _Before(began))
        stuck = np.ptp(run.positions, axis=(0, 1)).min() == 0
        spent, starts = run.gradients, None if stuck else far_apart(run.ends, 4)
        if not stuck and not run.apart and not result.problems():
            return result
        _refuse_improper(model, result)
        ends = run.ends
    before = _Before(began, spent, ends)
    if later and (alone := _of_globals(model, seed, bar, before=before)):
        return alone
    if ends is not None and (good := _of_modes(model, ends, seed, bar, before)):
        return good
    if starts is None:
        starts, more = starting_points(model, 4, seed)
        before = before._replace(spent=spent + more)
    run = draw_nuts(model, starts, 1000, 1000, seed, bar)
    result = _made(model, run, seed, before)
    if not suits(model):
        _refuse_improper(model, result)
    result.warn(stacklevel=outside())
    return result


class _Before(NamedTuple):
    """What came before a fit's draws: since when, how many gradients, and positions of chains."""

    began: float
    spent: int = 0
    ends: Float[np.ndarray, "chain draw d"] | None = None


def _of_globals(
    model: Model,
    seed: int,
    bar: Progress,
    draws: int = DRAWS,
    chains: int = CHAINS,
    before: _Before | None = None,
) -> Fit | None:
    """A fit of the globals alone, the cells drawn given them, if it is a good one.

    At least 1,600 draws: steps that stay count as draws, and 400 effective ones are needed.
    """
    before = before or _Before(time.perf_counter())
    size = max(draws, -(-4 * ESS_LIMIT // chains))
    for longer in (1, _LONGER):  # where draws are correlated still, that is less than NUTS takes
        run = draw_globals(model, seed, bar, size, chains, longer)
        if run is None:
            return None
        result = _made(model, run, seed, before)
        if not result.problems():
            return result
        if np.nanmin(result.ess) < _HOPELESS_ESS:
            return None
    return None


def _of_modes(
    model: Model,
    ends: Float[np.ndarray, "chain draw d"],
    seed: int,
    bar: Progress,
    before: _Before,
) -> Fit | None:
    """A fit by a mixture around the modes in which short chains have ended, if it is a good one."""
    run = draw_small(model, far_apart(ends, _CLIMBERS), seed, bar)
    if run is None:
        return None
    result = _made(model, run, seed, before)
    return None if result.problems() else result


def longer_fit(model: Model, before: Fit, draws: int, bar: Progress, marginal: bool = True) -> Fit:
    """A fit with ``draws`` draws of each of four chains.

    The globals alone where that can be and is wanted, else by NUTS from some of ``before``.
    """
    earlier = _Before(time.perf_counter(), before.gradients)
    alone = draw_globals(model, before.seed, bar, draws) if marginal else None
    if alone is not None:
        result = _made(model, alone, before.seed, earlier)
        if not result.problems():
            return replace(result, seconds=result.seconds + before.seconds)
    starts = before.flat[np.linspace(0, len(before.flat) - 1, 4).astype(int)]
    run = draw_nuts(model, starts, draws, 1000, before.seed, bar)
    result = _made(model, run, before.seed, earlier)
    return replace(result, seconds=result.seconds + before.seconds)


def _missed(ends: Float[np.ndarray, "chain draw d"], flat: Float[np.ndarray, "draw d"]) -> int:
    """How many chains have their mean outside the range of the draws, in some parameter.

    NUTS may leave a mode during warm-up and never come back: its chains then agree, but not with
    those that are still there.
    """
    means = ends.mean(axis=1)
    outside = (means < flat.min(axis=0)) | (means > flat.max(axis=0))
    return int(outside.any(axis=1).sum())


def draw_nuts(
    model: Model,
    starts: Float[np.ndarray, "chain d"],
    draws: int,
    warmup: int,
    seed: int,
    bar: Progress,
) -> Draws:
    """Draws by NUTS, which goes on by itself until they are settled, or ``LONGEST`` times as long.

    Each round doubles the length, with finer steps where more than a few transitions diverge. Where
    draws of the second half are settled and all draws are not, or diverged, the first half was
    warm-up. What is kept is thinned to the ``draws`` asked for, or to what can be ``ESS_LIMIT``
    effective draws.
    """
    run, size = Nuts(model, seed, starts, bar), max(draws, -(-2 * ESS_LIMIT // len(starts)))
    run.warm_up(warmup)
    run.draw(draws if not run.collapsed else 100)
    while True:
        halves = [0, run.drawn // 2] if run.drawn > draws else [0]
        best = min((_kept(run, first, size) for first in halves), key=_disorder)
        rhat, ess = largest(best.rhat), float(np.nan_to_num(best.ess).min())
        # what the first round, with a new metric, has not brought together stays apart
        hopeless = run.collapsed or (run.drawn > draws and rhat > HOPELESS_RHAT)
        good = is_settled(best) and (run.finest or not _diverges(best))
        if good or hopeless or run.drawn >= LONGEST * draws:
            return best
        caution = run.caution + _diverges(_kept(run, halves[-1], size))  # the last round
        if rhat > RHAT_LIMIT or ess < ESS_LIMIT / 2:
            run.retune(*_learned(model, run), caution)
        elif caution > run.caution:  # else as many draws again will do
            run.retune(None, run.positions[:, -1], caution)
        run.draw(run.drawn)


def _kept(run: Nuts, first: int, size: int) -> Draws:
    """The draws from ``first`` on, thinned to about ``size`` of each chain."""
    thin = max(1, (run.drawn - first) // size)
    divergences = int(run.divergent[:, first:].sum())
    return Draws(run.positions[:, first::thin], run.step_size, divergences, run.gradients, thin)


def _diverges(run: Draws) -> bool:
    return divergent_share(run) > FEW_DIVERGENT


def _disorder(run: Draws) -> tuple[bool, bool, float]:
    """Settled draws first, few of which diverged, the more of them the better; then by R-hat."""
    settled = is_settled(run)
    return not settled, _diverges(run), -float(run.thin) if settled else largest(run.rhat)


def _learned(
    model: Model, run: Nuts
) -> tuple[Float[np.ndarray, "d d"] | None, Float[np.ndarray, "chain d"]]:
    """A metric from the draws at hand, and where chains go on: those that are lost, elsewhere.

    None where warm-up has found a better one, from gradients: more draws are what is needed.
    """
    late = run.positions[:, run.drawn // 2 :]
    some = late[:, np.linspace(0, late.shape[1] - 1, _LEVEL_DRAWS).astype(int)]
    level = gradients(model, some.reshape(-1, model.dimension)).log_density
    lost = lost_chains(some, level.reshape(some.shape[:2]))
    found, starts = np.flatnonzero(~lost), late[:, -1].copy()
    # a draw of its own for each, from the middle of the others' draws on
    starts[lost] = late[np.resize(found, lost.sum()), -1 - np.arange(1, lost.sum() + 1) * 10]
    if run.uncorrelated or not DENSE_WINDOWS < model.dimension <= DENSE_DIMENSION:
        return None, starts  # few parameters have had a dense metric from the windows
    kept = run.positions[found]
    effective = max(float(np.median(by_parameter("ess", kept))), 10.0)
    return shrunk_covariance(kept.reshape(-1, model.dimension), effective), starts


def _refuse_improper(model: Model, fit: Fit) -> None:
    """Raise where the fit is in trouble because there is no posterior."""
    if fit.settled:
        return
    starts, _ = starting_points(model, 2 * model.dimension + 2, fit.seed)
    direction = improper_direction(model, fit.positions, starts)
    if direction is None:
        return
    names = ", ".join(str(k) for k in np.flatnonzero(np.abs(direction) > 1e-3)[:5])
    raise FitError(
        f"the full-data posterior{model.label} is improper: no answer exists. Its density does not "
        f"fall along a direction of the unconstrained parameters {names} (counted from 0), up to a "
        "billion times their scale away; give these parameters a proper prior, or leave out what "
        "the data do not tell apart"
    )


def _made(model: Model, run: Draws, seed: int, before: _Before) -> Fit:
    """The fit of what was drawn."""
    if not np.isfinite(run.positions).all():
        raise FitError(
            "the full-data fit gave draws that are not finite; check the model's log density "
            "for overflow, and its init"
        )
    flat = run.positions.reshape(-1, model.dimension)
    result = Fit(
        run.positions,
        fingerprint_of(model, run.positions[0, 0]),
        run.step_size,
        run.divergences,
        seed,
        time.perf_counter() - before.began,
        model.name,
        run.gradients + before.spent,
        run.thin,
        run.piece,
        0 if before.ends is None else _missed(before.ends, flat),
        made_elsewhere=False,
        sampled=run.sampled,
    )
    vars(result).update(rhat=run.rhat, ess=run.ess)  # known already, and slow to find
    return result
