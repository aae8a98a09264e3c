"""Folds whose posterior is far from the full data's: what is shared is sampled anew, by weights.

With the parameters of cells integrated out (or none, in a model of a handful of parameters), the
score of a fold is a ratio of two integrals over the globals g,

    p(test rows | training rows) = Z(training and test rows) / Z(training rows),
    Z(R) = integral of p(g) p(R | g) dg.

Both are means over the same independent draws of a mixture q, half of which is fitted to the one
posterior and half to the other: at every draw one of the two halves is as dense as it should be, so
weights p / q are bounded where the fits are good, however far the posteriors are from each other.
Weights of such draws are p(g | training rows) / q(g); ``importance.py`` does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from foldwise.folds.folds import Folds
from foldwise.models.model import Model
from foldwise.models.structure import Structure
from foldwise.sampling.globals import Marginal, too_many
from foldwise.sampling.layers import Layered, Layers, layered
from foldwise.sampling.proposals import (
    MOST_GLOBALS,
    Mixture,
    climb,
    first_round,
    fitted,
    learned,
    many_parts,
    share_of,
)
from foldwise.scores.importance import Importance, by_importance
from foldwise.scores.integrals import priors_bent
from foldwise.scores.smoothing import EVEN, EVEN_WHERE_CHEAP
from foldwise.scores.weighing import FullSample, Scored, others
from foldwise.support.keeping import Finished
from foldwise.support.progress import Progress
from foldwise.support.seeds import Stream, generator
from foldwise.support.workers import Job, Members, Workers, chunks, halved, in_turn

Proposals = Mixture | Layered
# Independent draws of each fold.
DRAWS = 2000
# Draws at which the mixture that the full-data draws have is tried, and what it must be worth.
_TRIED, _GOOD = 400, 0.3
# What it must be worth for a fold for its mixture to begin with it, else climbs do, from so many.
_NEAR, _CLIMBERS = 0.02, 4
# Pareto k, share of the draws that weights must be worth, and relative variance of the score's
# terms, within which a fold's score is taken. Weights that are worth half of the draws have no
# heavy tail: of k, which is known to 0.13 from 2,000 of them, more is taken.
_MOST_K, _LEAST_SHARE, _MOST_SPREAD = 0.5, 0.2, 8.0
_EVEN_K, _EVEN_SHARE = 0.7, 0.5
# Folds that a worker refits before it sends them back: a few seconds of work.
_MOST_TOGETHER = 16
# Where none of the first so many folds can be refitted, the others are not tried.
_FIRST = 4


def least_share(structure: Structure, scores: tuple[str, ...]) -> float:
    """The share of the draws that weights must be worth for a fold not to be refitted.

    Without integrals a refit takes little time, and with few globals it hardly ever fails. Of other
    scores than log scores none is taken.
    """
    cheap = not len(structure) and len(structure.globals) <= MOST_GLOBALS and not others(scores)
    return EVEN_WHERE_CHEAP if cheap else EVEN


def with_refits(
    model: Model,
    folds: Folds,
    found: Importance,
    seed: int,
    bar: Progress,
    stages: Sequence[Finished],
) -> Importance:
    """Scores of folds whose weights cannot be relied on, by draws of their own, where they can.

    By mixtures, and where these fail, as they may do for a fold although they fit the full data, in
    layers; ``stages`` keep the folds that are done, of either kind.
    """
    if not _in_need(found).size or too_many(found.structure):
        return found
    rng = generator(seed, Stream.GLOBALS, 1)
    draws = found.draws.positions
    bent = priors_bent(model, found.structure, draws[::100])
    full = Marginal(model, found.structure, draws, bent=bent)
    for proposals, finished in zip((_around_draws, _layers_of_draws), stages, strict=True):
        around = proposals(full, rng) if _in_need(found).size else None
        if around is not None:
            shared = _Shared(full, around, folds, tuple(found.folds), seed)
            found = _with_draws_of_their_own(found, shared, bar, finished)
    return found


def _in_need(found: Importance) -> Int[np.ndarray, " fold"]:
    """Folds that are not scored and might be by draws of their own."""
    return np.flatnonzero(~found.used & ~found.cut_off & ~found.unsettled)


def _with_draws_of_their_own(
    found: Importance, shared: _Shared, bar: Progress, finished: Finished
) -> Importance:
    """``found`` with the scores of all folds that can be refitted with these proposals.

    Where these serve none of the first folds, they are given up: failing takes seconds a fold.
    """
    rest = _in_need(found)
    bar.start("refits where weights are uneven", len(rest))
    job = Job(
        _refit, shared, lambda some: some, halved, lambda some: f"refits of {len(some)} folds"
    )
    refitted: dict[int, _Refit | None] = {}
    for part in np.split(rest, [_FIRST]):
        for some, new in in_turn(job, part, _cut, finished):
            before = len(refitted)
            refitted |= zip(some.tolist(), new or [None] * len(some), strict=True)
            bar.advance(len(refitted) - before)
        if not any(refitted.values()):
            break
    for fold in rest.tolist():  # in this order, whoever came first
        refit = refitted.get(fold)
        if refit is not None:
            found = _replaced(found, shared.folds, fold, refit)
    return found


def _cut(left: Members, by: Workers | None) -> list[Members]:
    return chunks(left, 1 if by is None else min(by.size(len(left)), _MOST_TOGETHER))


class _Shared(NamedTuple):
    """What all refits need."""

    full: Marginal
    around: Proposals
    folds: Folds
    scores: tuple[str, ...]
    seed: int


def _refit(shared: _Shared, some: Members) -> list[_Refit | None]:
    """Scores of some folds from draws of their own; None where they cannot be relied on."""
    full, around, folds, scores, seed = shared
    found = []
    for fold in some:
        rng = generator(seed, Stream.GLOBALS, 2, int(folds.index[fold]))
        found.append(_refitted(full, around, folds[[fold]], scores, seed, rng))
    return found


class _Refit(NamedTuple):
    """Scores of a fold, without its draws, and by score the variance that they leave."""

    found: Importance
    variance: dict[str, float]


def _around_draws(full: Marginal, rng: np.random.Generator) -> Mixture | None:
    """A mixture with the moments of the full-data draws, or with many parts; None if none fits.

    Also chooses the rule of the integrals.
    """
    points = full.reference[:, full.structure.globals]
    if points.shape[1] > MOST_GLOBALS:
        return None
    weight = np.full(len(points), 1.0 / len(points))
    for mixture in (learned(points, weight), many_parts(points, weight, rng)):
        if mixture is None or not full.settle(mixture, rng):
            return None
        if _fits(full, mixture, rng) >= _GOOD:
            return mixture
    return None


def _layers_of_draws(full: Marginal, rng: np.random.Generator) -> Layered | None:
    """Layers, with a mixture of tops that has the moments of draws to begin with; the same."""
    points = full.reference[:, full.structure.globals]
    layers = Layers.found(full, rng.permutation(points))
    if layers is None:
        return None
    start = learned(points[:, layers.top], np.full(len(points), 1.0 / len(points)))
    found = None if start is None else layered(layers, start, rng)
    good = found is not None and full.settle(found, rng) and _fits(full, found, rng) >= _GOOD
    return found if good else None


def _fits(density: Marginal, proposal: Proposals, rng: np.random.Generator) -> float:
    """The share of draws of a proposal that weights are worth."""
    some = proposal.draw(rng, _TRIED)
    return share_of(density(some) - proposal.log_density(some))


def _refitted(
    full: Marginal,
    around: Proposals,
    fold: Folds,
    scores: tuple[str, ...],
    seed: int,
    rng: np.random.Generator,
) -> _Refit | None:
    """Scores of one fold from draws of its own; None where they cannot be relied on."""
    train = fold.train_mask(np.array([0]))[0]
    proposal = _proposal(full, train, around, rng)
    if proposal is None:
        return None
    both = train.copy()
    both[fold.test_rows] = True
    upper = around if both.all() else _proposal(full, both, around, rng)
    if upper is None:
        return None
    proposal = _beside(proposal, upper)
    points = proposal.draw(rng, DRAWS)
    draws = FullSample(full.placed(points), 1, 1, proposal.log_density(points))
    new = by_importance(full.model, full.structure, fold, draws, scores, True, seed)
    spread = float(np.max([score.spread[0] for score in new.folds.values()]))
    share = new.weight_ess[0] / DRAWS
    most_k = _EVEN_K if share >= _EVEN_SHARE else _MOST_K
    good = new.pareto_k[0] <= most_k and share >= _LEAST_SHARE
    # the spread of other scores than log scores is not known, and is no number
    if not (good and spread <= _MOST_SPREAD) or new.unsettled[0]:
        return None
    variance = {name: float(draws.variance(each)) for name, each in new.influence.items()}
    return _Refit(replace(new, draws=draws._replace(positions=points[:0], proposed=None)), variance)


def _proposal(
    full: Marginal, keep: np.ndarray, around: Proposals, rng: np.random.Generator
) -> Proposals | None:
    """Proposals for the posterior given the rows ``keep``, of the kind that the full data have."""
    marginal = Marginal(full.model, full.structure, full.reference, keep, full.nodes, full.bent)
    if isinstance(around, Layered):
        return layered(around.layers.of(marginal), around.mixture, rng)
    begun = first_round(marginal, around, rng)
    log_ratio = begun[1] - around.with_tails().log_density(begun[0])
    if share_of(log_ratio) >= _NEAR:
        return fitted(marginal, around, rng, begun)
    modes = climb(marginal, begun[0][np.argsort(-log_ratio)[:_CLIMBERS]])
    return None if modes is None else fitted(marginal, Mixture.of(modes), rng)


def _beside(one: Proposals, two: Proposals) -> Proposals:
    """Half of the one and half of the other, which are of one kind."""
    if isinstance(one, Layered):
        assert isinstance(two, Layered)
        return one.beside(two)
    assert isinstance(two, Mixture)
    return one.beside(two)


def _replaced(found: Importance, folds: Folds, fold: int, refit: _Refit) -> Importance:
    """``found`` with the scores of one fold from its own draws."""
    new = refit.found
    entries = np.arange(folds.test_start[fold], folds.test_start[fold + 1])
    pareto_k, weight_ess, used, own = (
        _put(getattr(found, name), [fold], value)
        for name, value in (
            ("pareto_k", new.pareto_k),
            ("weight_ess", new.weight_ess),
            ("used", True),
            ("own", True),
        )
    )
    return replace(
        found,
        pareto_k=pareto_k,
        weight_ess=weight_ess,
        used=used,
        own=own,
        folds=_put_scores(found.folds, [fold], new.folds),
        rows=_put_scores(found.rows, entries, new.rows),
        own_variance={name: old + refit.variance[name] for name, old in found.own_variance.items()},
    )


Places = Sequence[int] | Int[np.ndarray, " place"]


def _put(old: np.ndarray, where: Places, new: object) -> np.ndarray:
    found = old.copy()
    found[where] = new
    return found


def _put_scores(old: dict[str, Scored], where: Places, new: dict[str, Scored]) -> dict[str, Scored]:
    """Scores of the folds or rows at ``where``, replaced."""
    names = ("value", "variance", "spread")
    return {
        score: Scored(*(_put(getattr(old[score], n), where, getattr(new[score], n)) for n in names))
        for score in old
    }
