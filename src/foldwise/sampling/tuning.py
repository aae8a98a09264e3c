"""What the folds take from the full-data fit: partner draws, starting points, metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import scipy
from jaxtyping import Array, Bool, Float, Int

from foldwise.folds.folds import Folds
from foldwise.models.evaluate import gradients, masked_log_density, rows_at
from foldwise.models.model import Model
from foldwise.models.structure import Structure, exchanged, find_cells
from foldwise.sampling.blocks import PILOTS, Pilots, Tuning
from foldwise.sampling.fit import Fit
from foldwise.sampling.metric import (
    DENSE_DIMENSION,
    FOLD_METRIC_DIMENSION,
    FoldMetric,
    LocalCoordinates,
    Metric,
    SharedMetric,
    far_metric,
    gradient_metric,
    near_metric,
    rung_curvature,
    shared_metric,
)
from foldwise.scores.dependent import given_training
from foldwise.scores.diagnostics import BATCH_TIMES, LEAST_BATCHES
from foldwise.scores.evidence import FullData
from foldwise.scores.marginal_model import MarginalModel
from foldwise.support.memory import most_values
from foldwise.support.runtime import compiled, lanes
from foldwise.support.seeds import Stream, generator

# Folds times full-data draws kept for the bridge (8 bytes each); beyond it, or the
# share of a limit of memory, draws are thinned.
FULL_VALUES, FULL_SHARE = 2**27, 0.1
# Folds times dimension^2 for a metric of each fold's own (8 bytes each, three arrays).
_METRIC_VALUES = 2**26
# Draws at which a coordinate must have no gradient to count as local.
_LOCAL_DRAWS = 3
# Draws at which priors are asked whether they are normal, and what rounding may leave.
_PRIOR_DRAWS, _PRIOR_ROUNDING = 16, 1e-7
# Points at which a fold's curvature is averaged; two in more dimensions.
POINTS, MANY_POINTS_DIMENSION = 4, 50
# Draws at which gradients are asked for the metric that folds share: twice DENSE_DIMENSION.
_GRADIENT_DRAWS = 1000
# Folds whose curvature is computed in one call.
_AT_ONCE = 32
# Coordinates of a fold that are watched, and full-data draws by which they are chosen.
WATCHED, _WATCH_DRAWS = 100, 500


def partner_draws(fit: Fit, folds: int) -> tuple[Float[np.ndarray, "chain draw d"], int]:
    """The full-data draws used by the folds, and the length of their batches.

    They are thinned if there are very many of both. Batches hold sqrt(draws) draws, and several
    autocorrelation times of the slowest parameter, as long as ``LEAST_BATCHES`` fit into a chain.
    Where chains are short ones laid end to end, a batch is a number of whole ones.
    """
    positions, piece = fit.end_to_end
    most = most_values(FULL_VALUES, FULL_SHARE)
    thin = max(1, -(-positions.shape[0] * positions.shape[1] * folds // most))
    positions, piece = positions[:, ::thin], max(piece // thin, 1)
    chains, draws, _ = positions.shape
    time = chains * draws / max(float(np.nanmin(fit.ess)), 1.0)
    length = max(int(np.sqrt(draws)), int(np.ceil(BATCH_TIMES * time)), piece)
    length = min(length, max(draws // LEAST_BATCHES, 1))
    return positions, max(length // piece, 1) * piece


@dataclass(frozen=True)
class FullDraws:
    """The full-data draws, and what they say of the folds.

    ``positions`` are the draws, chains one after another, ``held_out`` the log density of all rows
    outside each fold's training set at each draw, ``scores`` what they say of its test rows.
    """

    positions: Float[np.ndarray, "draw d"]
    held_out: Float[np.ndarray, "fold draw"]
    scores: FullData


def full_data(model: Model, folds: Folds, fit: Fit) -> FullDraws:
    """Evaluate every fold's left-out rows at the full-data draws."""
    by_chain, length = partner_draws(fit, len(folds))
    chains, positions = len(by_chain), by_chain.reshape(-1, model.dimension)
    if model.joint_log_likelihood is not None:
        found = given_training(model, folds, positions)
        unknown = np.full(len(folds.test_rows), np.nan)
        scores = FullData(found.tested, unknown, chains, length)
        return FullDraws(positions, found.left_out, scores)
    joint = np.empty((len(folds), len(positions)))
    complete = bool(np.all(folds.n_train + folds.n_test == folds.n))
    held_out = joint if complete else np.empty_like(joint)
    log_sum = np.full(model.n_obs, -np.inf)
    done = 0
    for _, rows in rows_at(model, positions):
        part = slice(done, done + len(rows))
        joint[:, part] = np.add.reduceat(rows[:, folds.test_rows], folds.test_start[:-1], axis=1).T
        if not complete:
            held_out[:, part] = _outside_training(rows, folds).T
        with np.errstate(invalid="ignore"):
            log_sum = np.logaddexp(log_sum, scipy.special.logsumexp(rows, axis=0))
        done += len(rows)
    log_mean = log_sum - np.log(len(positions))
    rows = log_mean[folds.test_rows]
    return FullDraws(positions, held_out, FullData(joint, rows, chains, length))


def _outside_training(rows: Float[np.ndarray, "draw row"], folds: Folds) -> np.ndarray:
    def running(values: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros((len(values), 1)), values.cumsum(axis=1)], axis=1)

    upto, dropped = running(rows), running(rows[:, folds.dropped_rows])
    inside = upto[:, folds.train_stop] - upto[:, folds.train_start]
    gone = dropped[:, folds.dropped_start[1:]] - dropped[:, folds.dropped_start[:-1]]
    return upto[:, -1:] - inside + gone


def start_positions(
    positions: Float[np.ndarray, "draw d"],
    held_out: Float[np.ndarray, "fold draw"],
    folds: Folds,
    chains: int,
    seed: int,
    rung: int = 0,
) -> Float[np.ndarray, "fold chain d"]:
    """Distinct full-data draws near each fold's posterior.

    Drawn with weights exp(-held_out), ``held_out`` the log density of the rows left out, capped at
    1 / (5 chains), which keeps starts dispersed enough for R-hat to mean something. (Smoothing
    the weights' tail first would only change weights that the cap levels.)
    """
    chosen = np.empty((len(held_out), chains), np.int64)
    for k, (number, log_density) in enumerate(zip(folds.index, held_out, strict=True)):
        log_weight = -np.where(np.isfinite(log_density), log_density, np.inf)
        log_weight -= scipy.special.logsumexp(log_weight)
        log_weight = np.maximum(np.minimum(log_weight, -np.log(5 * chains)), -700.0)
        rng = generator(seed, Stream.STARTS, int(number), rung)
        ranked = log_weight + rng.gumbel(size=len(log_weight))
        chosen[k] = np.argpartition(-ranked, chains)[:chains]
    return positions[chosen]


def has_normal_priors(
    model: Model, structure: Structure, positions: Float[np.ndarray, "draw d"]
) -> bool:
    """Whether parameters of groups have a normal prior given what is shared: it has one mode.

    Its gradient is then linear: half-way between two places it is half of their sum.
    """
    if not len(structure):
        return True
    some = positions[np.linspace(0, len(positions) - 1, _PRIOR_DRAWS).astype(int)]
    moved = exchanged(structure, positions, some, np.random.default_rng(0))
    places = np.concatenate([some, moved, 0.5 * (some + moved)])
    none = np.zeros((1, model.n_obs), bool)
    inside = np.setdiff1d(np.arange(model.dimension), structure.globals)
    slopes = gradients(model, places, none).gradient[:, inside]
    one, two, between = slopes.reshape(3, len(some), -1)
    size = np.abs(one) + np.abs(two) + 1e-3
    return bool((np.abs(one + two - 2.0 * between) <= _PRIOR_ROUNDING * size).all())


def at_others(
    start: Float[np.ndarray, "fold chain d"], structure: Structure, folds: Folds, seed: int
) -> Float[np.ndarray, "fold chain d"]:
    """Starts with the parameters of groups that are left out where those of other groups are.

    Full-data draws have them where the group's own rows have put them. Where the prior has several
    modes, all chains would begin, and stay, in one of them, and agree. Chains begin at other groups
    from the lowest to the highest.
    """
    sizes, row_cell, start = structure.sizes, structure.row_cell, start.copy()
    rows_of = np.bincount(row_cell[row_cell >= 0], minlength=len(structure))
    first, rows = folds.left_out
    chains = start.shape[1]
    for k, number in enumerate(folds.index):
        cell = row_cell[rows[first[k] : first[k + 1]]]
        gone, lost = np.unique(cell[cell >= 0], return_counts=True)
        rng = generator(seed, Stream.STARTS, int(number), 1_000_000)
        for c in gone[lost == rows_of[gone]]:
            donors = np.setdiff1d(np.flatnonzero((sizes == sizes[c]) & (rows_of > 0)), gone)
            if len(donors) < 2:
                continue
            own, theirs = (structure.coordinates[which][..., : sizes[c]] for which in (c, donors))
            place = (rng.permutation(chains) + rng.random(chains)) / chains * len(donors)
            for chain, at in enumerate(place.astype(int)):
                values = start[k, chain][theirs]
                start[k, chain, own] = values[np.argsort(values[:, 0])[at]]
    return start


def watched_coordinates(
    fit: Fit, full: FullDraws, most: int = WATCHED
) -> Int[np.ndarray, "fold direction"]:
    """The coordinates of each fold that are recorded to see how slowly its chains move.

    All of them where there are no more than ``most``; else half as many that are slowest in the
    full-data fit, and half as many with which, over the full-data draws, the fold's score goes
    together most.
    """
    folds, d = len(full.held_out), fit.positions.shape[-1]
    if d <= most:
        return np.broadcast_to(np.arange(d), (folds, d))
    sampled = np.arange(d) if fit.sampled is None else fit.sampled
    slowest = sampled[np.argsort(fit.ess, kind="stable")[: most // 2]]
    some = np.linspace(0, len(full.positions) - 1, _WATCH_DRAWS).astype(int)
    positions = full.positions[some] - full.positions[some].mean(axis=0)
    positions /= np.maximum(positions.std(axis=0), np.finfo(float).tiny ** 0.5)
    score = full.scores.joint[:, some]
    together = np.abs(np.nan_to_num(score - score.mean(axis=1, keepdims=True)) @ positions)
    together[:, slowest] = -1.0
    rest = most - len(slowest)
    closest = np.argpartition(-together, rest, axis=1)[:, :rest]
    return np.concatenate([np.broadcast_to(slowest, (folds, len(slowest))), closest], axis=1)


def pilot_positions(
    full: FullDraws, pilots: int, chains: int, seed: int
) -> Float[np.ndarray, "pilot chain d"]:
    """Full-data draws for the pilots."""
    rng = generator(seed, Stream.PILOTS)
    return full.positions[rng.choice(len(full.positions), (pilots, chains))]


@dataclass(frozen=True)
class Locals:
    """Which coordinates are local to each fold, and the curvature of their prior.

    ``tied`` marks folds some of whose local coordinates the prior ties to each other, like the
    future of a random walk: their scale is not that of each coordinate by itself. ``improper``
    marks folds without a posterior: some coordinate changes neither their training rows' log
    likelihood nor the log prior.
    """

    local: Bool[np.ndarray, "fold d"]
    curvature: Float[np.ndarray, " d"]
    tied: Bool[np.ndarray, " fold"]
    improper: Bool[np.ndarray, " fold"]


def tuned(
    model: Model, folds: Folds, fit: Fit, full: FullDraws, chains: int, seed: int
) -> tuple[Float[np.ndarray, "fold chain d"], Locals, Tuning]:
    """Where the chains of every fold start, which coordinates are local to it, and its tuning."""
    start = start_positions(full.positions, full.held_out, folds, chains, seed)
    if isinstance(model, MarginalModel):
        found = _nothing_but_improper(model, folds, fit)
    else:
        structure = find_cells(model, full.positions)
        if not has_normal_priors(model, structure, full.positions):
            start = at_others(start, structure, folds, seed)
        found = local_coordinates(model, folds, fit)
    pilots = pilot_positions(full, PILOTS, chains, seed)
    watched = watched_coordinates(fit, full)
    return start, found, first_tuning(model, folds, fit, found, start, pilots, watched)


def first_tuning(
    model: Model,
    folds: Folds,
    fit: Fit,
    found: Locals,
    start: Float[np.ndarray, "fold chain d"],
    pilots: Float[np.ndarray, "pilot chain d"],
    watched: Int[np.ndarray, "fold direction"],
) -> Tuning:
    """Metric of every fold, that of the full data for the pilots, how to refine the first, where.

    Folds far from the full data get theirs from where their chains are, refined during warm-up.
    """
    S, far = fit.covariance, _far(folds) | found.tied
    if not (fold_metrics_fit(model, folds) or (far.any() and _matrices_fit(model, folds))):
        S = _by_gradients(model, fit) if S.ndim == 2 else S
        shared = shared_metric(S, found.local, found.curvature)
        theirs = Pilots(nothing_local(shared, len(pilots)), pilots)
        return Tuning(shared, None, np.zeros(len(folds), bool), watched, theirs)
    own = near_metric(S, found.local, np.broadcast_to(found.curvature, found.local.shape))
    nothing = np.zeros((len(pilots), model.dimension), bool)
    full = near_metric(S, nothing, np.ones(nothing.shape))

    def refine(
        members: Int[np.ndarray, " member"], positions: Float[np.ndarray, "member chain d"]
    ) -> FoldMetric:
        return far_metric(S, curvatures(model, folds[members], positions))

    if far.any():
        for part, new in zip(own, refine(np.flatnonzero(far), start[far]), strict=True):
            part[far] = new
    return Tuning(own, refine, far, watched, Pilots(full, pilots))


def _by_gradients(model: Model, fit: Fit) -> Float[np.ndarray, "d d"]:
    """The full-data covariance that gradients at some of its draws tell of.

    The covariance of a few thousand draws is noise in most of thousands of correlations; shrunk, it
    is too wide in the narrow directions, which is where steps have to be short.
    """
    some = fit.flat[np.linspace(0, len(fit.flat) - 1, _GRADIENT_DRAWS).astype(int)]
    slopes = gradients(model, some).gradient
    fine = np.isfinite(slopes).all(axis=1)
    return gradient_metric(some[fine], slopes[fine]) if fine.mean() > 0.9 else fit.covariance


def rung_metric(
    fit: Fit,
    found: Locals,
    metric: Metric,
    members: Int[np.ndarray, " member"],
    temper: Float[np.ndarray, " member"],
) -> Metric:
    """Metric of rungs of the folds ``members``, whose test rows weigh ``temper``."""
    local = found.local[members]
    curvature = rung_curvature(
        fit.covariance, np.broadcast_to(found.curvature, local.shape), temper
    )
    if isinstance(metric, FoldMetric):
        return near_metric(fit.covariance, local, curvature)
    parts = LocalCoordinates(*(part[members] for part in metric.folds))
    return metric._replace(folds=parts._replace(curvature=np.where(local, curvature, 1.0)))


def _points(model: Model) -> int:
    return POINTS if model.dimension <= MANY_POINTS_DIMENSION else 2


def _far(folds: Folds) -> Bool[np.ndarray, " fold"]:
    """Folds that train on less than half of the rows, as early leave-future-out folds do.

    With sds in proportion to 1 / sqrt(rows), these are over 1.4 times those of the full data.
    """
    return folds.n_train < 0.5 * folds.n


def fold_metrics_fit(model: Model, folds: Folds) -> bool:
    """Whether each fold gets its own metric: few parameters, and memory for all of them."""
    return model.dimension <= FOLD_METRIC_DIMENSION and _matrices_fit(model, folds)


def _matrices_fit(model: Model, folds: Folds) -> bool:
    """Whether a matrix for each fold is worth its time and memory where folds are far."""
    d = model.dimension
    return d <= DENSE_DIMENSION and len(folds) * d * d <= _METRIC_VALUES


def curvatures(
    model: Model, folds: Folds, positions: Float[np.ndarray, "fold chain d"]
) -> Float[np.ndarray, "fold d d"]:
    """Mean curvature (minus the Hessian) of each fold's log density at some of its positions.

    Where it is not finite, it is that of a standard normal in every parameter.
    """
    positions = positions[:, np.arange(_points(model)) % positions.shape[1]]
    if isinstance(model, MarginalModel):
        return _usable(_by_differences(model, folds, positions))
    found = []
    for first in range(0, len(positions), _AT_ONCE):
        members = np.arange(first, min(first + _AT_ONCE, len(positions)))
        sharded = (folds.train_mask(members), positions[members])
        found.append(_batched(model, sharded))
    return _usable(np.concatenate(found))


def _usable(curvature: Float[np.ndarray, "fold d d"]) -> Float[np.ndarray, "fold d d"]:
    curvature = 0.5 * (curvature + np.swapaxes(curvature, 1, 2))
    finite = np.isfinite(curvature).all(axis=(1, 2))
    return np.where(finite[:, None, None], curvature, np.eye(curvature.shape[1]))


def _by_differences(
    model: Model, folds: Folds, positions: Float[np.ndarray, "fold point d"]
) -> Float[np.ndarray, "fold d d"]:
    """The same by differences of gradients, where nodes are held while one differentiates."""
    count, points, d = positions.shape
    step = 1e-4 * np.maximum(positions.std(axis=1, keepdims=True), 1e-4)[:, :, None]
    move = step * np.eye(d)
    around = np.stack([positions[:, :, None] - move, positions[:, :, None] + move], axis=2)
    train = np.repeat(folds.train_mask(np.arange(count)), points * 2 * d, axis=0)
    slope = gradients(model, around.reshape(-1, d), train).gradient
    before, after = np.moveaxis(slope.reshape(count, points, 2, d, d), 2, 0)
    return ((before - after) / (2.0 * np.swapaxes(step, -1, -2))).mean(axis=1)


def _curvature(model: Model) -> Any:
    def curvature(folds: tuple[Array, Array], _: tuple[()]) -> Array:
        def of_fold(fold: tuple[Array, Array]) -> Array:
            train, points = fold

            def log_density(q: Array) -> Array:
                return masked_log_density(model, q, train)[0]

            return -jax.lax.map(jax.hessian(log_density), points).mean(axis=0)

        return jax.lax.map(of_fold, folds)

    return curvature


def nothing_local(metric: SharedMetric, copies: int) -> SharedMetric:
    """The shared metric for ``copies`` of the full-data posterior."""
    d, width = metric.folds.regression.shape[1:]
    nothing = LocalCoordinates(
        np.zeros((copies, d), bool),
        np.ones((copies, d)),
        np.zeros((copies, width), np.int32),
        np.zeros((copies, d, width)),
    )
    return metric._replace(folds=nothing)


def local_coordinates(model: Model, folds: Folds, fit: Fit) -> Locals:
    """Coordinates without training information by fold, and the curvature of the log prior.

    A coordinate is local to a fold if the training rows change nothing, not a bit, about the
    gradient of the log density in it, at a few draws.
    """
    flat = fit.flat
    points = flat[np.linspace(0, len(flat) - 1, _LOCAL_DRAWS).astype(int)]
    uninformed, of_prior = _uninformed(model, folds, points)
    curvature = _prior_curvature(model, fit.central_draws(1)[0], flat.std(axis=0))
    positive = np.isfinite(curvature) & (curvature > 0)
    # a prior without curvature (flat, or not log concave) gives no scale: shared it stays
    local, curvature = uninformed & positive, np.where(positive, curvature, 1.0)
    improper = (uninformed & (of_prior == 0.0).all(axis=0)).any(axis=1)
    # parameters of the prior, which no row informs of itself, are tied to what they are of
    of_rows = (gradients(model, points).gradient != of_prior).any(axis=0)
    tied = _tied(model, fit, local & of_rows, curvature)
    return Locals(local, curvature, tied, improper)


def _uninformed(
    model: Model, folds: Folds, points: Float[np.ndarray, "point d"]
) -> tuple[Bool[np.ndarray, "fold d"], Float[np.ndarray, "point d"]]:
    """Coordinates of which no training row of each fold knows, and the gradient of the prior."""
    of_prior, found = gradients(model, points, _no_rows(model)).gradient, []
    for first in range(0, len(folds), _AT_ONCE):
        members = np.arange(first, min(first + _AT_ONCE, len(folds)))
        train = np.repeat(folds.train_mask(members), len(points), axis=0)
        gradient = gradients(model, np.tile(points, (len(members), 1)), train).gradient
        by_fold = gradient.reshape(len(members), *points.shape)
        found.append(np.all(by_fold == of_prior, axis=1))
    return np.concatenate(found), of_prior


def _nothing_but_improper(model: MarginalModel, folds: Folds, fit: Fit) -> Locals:
    """No coordinates count as local where cells are integrated out: what is local is in cells.

    Folds are improper where the model of all parameters says so, whose program is there already.
    """
    points = fit.flat[np.linspace(0, len(fit.flat) - 1, _LOCAL_DRAWS).astype(int)]
    uninformed, of_prior = _uninformed(model.base, folds, model.placed(points))
    flat = uninformed & (of_prior == 0.0).all(axis=0)
    improper = flat[:, model.structure.globals].any(axis=1)
    nothing = np.zeros((len(folds), model.dimension), bool)
    return Locals(nothing, np.ones(model.dimension), np.zeros(len(folds), bool), improper)


def _tied(
    model: Model, fit: Fit, local: Bool[np.ndarray, "fold d"], curvature: Float[np.ndarray, " d"]
) -> Bool[np.ndarray, " fold"]:
    """Folds whose local coordinates are tied to each other by the prior.

    Moving all of them at once, by v with random signs, changes the gradient of the log prior by
    minus its curvature times v; where coordinates are not tied that is the curvature of each times
    its own v. A difference of a tenth of the curvature counts.
    """
    several = np.flatnonzero(local.sum(axis=1) > 1)
    tied = np.zeros(len(local), bool)
    if not several.size:
        return tied
    point, spread = fit.central_draws(1)[0], 1e-3 / np.sqrt(curvature)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=local.shape[1])
    for first in range(0, len(several), _AT_ONCE):
        members = several[first : first + _AT_ONCE]
        move = np.where(local[members], signs * spread, 0.0)
        either = np.concatenate([point - move, point + move])
        before, after = np.split(gradients(model, either, _no_rows(model)).gradient, 2)
        alone = curvature * move
        excess = np.abs(0.5 * (before - after) - alone) > 0.1 * np.abs(alone)
        tied[members] = (excess & local[members]).any(axis=1)
    return tied


def _no_rows(model: Model) -> Bool[np.ndarray, "1 row"]:
    return np.zeros((1, model.n_obs), bool)


def _prior_curvature(
    model: Model, point: Float[np.ndarray, " d"], sd: Float[np.ndarray, " d"]
) -> Float[np.ndarray, " d"]:
    """Curvature of the log prior in every coordinate, at a point near the posterior mean.

    Central differences of its gradient, (g_i(q - h e_i) - g_i(q + h e_i)) / (2 h) with h a
    thousandth of the posterior ``sd``: a scale for HMC, which needs no more digits. Zero where the
    difference is no more than rounding.
    """
    d, spread = model.dimension, np.maximum(1e-3 * sd, 1e-10 * np.abs(point))
    before, after = np.empty(d), np.empty(d)
    for first in range(0, d, _AT_ONCE):
        chosen = np.arange(first, min(first + _AT_ONCE, d))
        moved = np.zeros((len(chosen), d))
        moved[np.arange(len(chosen)), chosen] = spread[chosen]
        either = np.concatenate([point - moved, point + moved])
        slope = gradients(model, either, _no_rows(model)).gradient
        own = slope[np.arange(len(either)), np.tile(chosen, 2)]
        before[chosen], after[chosen] = own[: len(chosen)], own[len(chosen) :]
    change = before - after
    noise = 1e-10 * (np.abs(before) + np.abs(after))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.abs(change) > noise, change / (2.0 * spread), 0.0)


def _batched(model: Model, folds: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Curvatures of up to ``_AT_ONCE`` folds, padded so that one program serves all calls."""
    count = len(folds[0])
    size = -(-_AT_ONCE // lanes()) * lanes()
    padded = jax.tree.map(lambda a: np.resize(a, (size, *a.shape[1:])), folds)
    program = compiled(model, "curvature", _curvature(model), padded, ())
    found: np.ndarray = program(padded, ())[:count]
    return found
