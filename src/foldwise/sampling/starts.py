"""Where the chains of the full-data fit start: near ``init``, and all over the prior.

Chains that all start at one place find one mode, and then agree about it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Bool, Float

from foldwise.models.evaluate import gradients
from foldwise.models.model import Model
from foldwise.support.runtime import precision_context
from foldwise.support.seeds import Stream, generator, words

# Starts are uniform in this many prior sds on either side, as Stan's are in its coordinates. A
# coordinate whose prior has no curvature counts as having an sd of one.
_REACH = 2.0
# One start in this many is near ``init``.
_NEAR = 4
# Steps uphill for starts whose density is lower than at ``init``, and by how much steps grow when
# they succeed and shrink when they do not.
_CLIMB, _GROW, _SHRINK = 12, 1.5, 0.3
# Nats a row or parameter may have lost: a row ten sds out. A start that is lower is taken nearer,
# by this factor, so many times, before it is given up for ``init`` itself.
_MOST_LOST, _NEARER, _TRIES = 50.0, 0.25, 4
# A chain is lost in a place whose posterior mass is exp(-20) of what others found.
_NEGLIGIBLE = 20.0

Points = Float[np.ndarray, "point d"]
# Log densities at points, and their gradients.
Slopes = Callable[[Points], tuple[Float[np.ndarray, " point"], Points]]


def starting_points(model: Model, count: int, seed: int) -> tuple[Points, int]:
    """``count`` distinct starts, and the number of gradients that finding them took.

    Where ``init`` is a function it gives them all. Else one in four is near ``init``; the others
    are spread over the prior, in pairs on opposite sides of its centre, brought uphill until
    they are as high as ``init``, and nearer to it where they cannot be.
    """
    near, init = near_init(model, count, seed)
    if callable(model.init):
        return near, 0

    def slopes(points: Points) -> tuple[np.ndarray, np.ndarray]:
        ends = gradients(model, points)
        return ends.log_density, ends.gradient

    terms = model.n_obs + model.dimension
    starts, spent = spread_out(near, init, slopes, _prior_range(model, init), terms, seed)
    return starts, spent + 2 * model.dimension


def near_init(model: Model, count: int, seed: int) -> tuple[Points, Float[np.ndarray, " d"]]:
    """``count`` positions near ``init``, or that it gives where it is a function, and one of it."""
    of_starts = [words(seed, Stream.FIT_CHAINS, k, count=4)[:2] for k in range(count)]
    with precision_context("float64"):
        keys = [jax.random.wrap_key_data(key) for key in np.stack(of_starts).astype(np.uint32)]
        near = np.stack([np.asarray(model.initial(key), float) for key in keys])
    return near, model.start


def spread_out(
    near: Points,
    init: Float[np.ndarray, " d"],
    slopes: Slopes,
    prior: tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]],
    terms: int,
    seed: int,
) -> tuple[Points, int]:
    """Starts all over the ``prior``, its centre and sds, of a density; one in four stays ``near``.

    And the number of points at which ``slopes`` were needed. ``terms`` are the rows and parameters
    of the density, each of which may lose so much beside ``init`` and no more.
    """
    (centre, scale), (count, d) = prior, near.shape
    starts, far = near.copy(), np.flatnonzero(np.arange(count) % _NEAR)
    level = float(slopes(init[None])[0][0])
    side = generator(seed, Stream.SPREAD).uniform(-_REACH, _REACH, (count, d))
    pairs = np.stack([side, -side], axis=1).reshape(2 * count, -1)[: len(far)]
    starts[far], spent = centre + scale * pairs, 1
    for _ in range(_TRIES):
        starts[far], reached, steps = _uphill(slopes, starts[far], scale, level)
        spent += steps
        far = far[~(reached >= level - _MOST_LOST * terms)]
        starts[far] = init + _NEARER * (starts[far] - init)
    starts[far] = near[far]
    return starts, spent


def _prior_range(
    model: Model, init: Float[np.ndarray, " d"]
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
    """Centre and sd of the normal prior that has this one's slope and curvature at ``init``.

    Slopes by central differences.
    """
    d, step = model.dimension, 1e-3 * (1.0 + np.abs(init))
    moved = np.concatenate([init - np.diag(step), init + np.diag(step)])
    slopes = gradients(model, moved, np.zeros((1, model.n_obs), bool)).gradient
    before, after = slopes[:d].diagonal(), slopes[d:].diagonal()
    with np.errstate(invalid="ignore", over="ignore"):
        curvature = (before - after) / (2.0 * step)
        noise = 1e-10 * (np.abs(before) + np.abs(after)) / step
        return normal_range(init, 0.5 * (before + after), curvature, noise)


def normal_range(
    init: Float[np.ndarray, " d"],
    slope: Float[np.ndarray, " d"],
    curvature: Float[np.ndarray, " d"],
    noise: Float[np.ndarray, " d"],
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
    """Centre and sd of the normal density that has this slope and curvature at ``init``.

    A curvature that is no more than ``noise`` is none. The centre is at most ``_REACH`` sds from
    ``init``: far from its mode a prior may be anything but normal.
    """
    curved = np.isfinite(curvature) & np.isfinite(slope) & (curvature > noise)
    curvature, slope = np.where(curved, curvature, 1.0), np.where(curved, slope, 0.0)
    scale = curvature**-0.5
    return init + np.clip(slope / curvature, -_REACH * scale, _REACH * scale), scale


def _uphill(
    slopes: Slopes,
    position: Points,
    scale: Float[np.ndarray, " d"],
    level: float,
) -> tuple[Points, Float[np.ndarray, " start"], int]:
    """Take starts along the gradient to where the log density is ``level``.

    Returns positions, log densities and the number of gradients.

    Steps have a length in prior sds, half of one at first, which each start adapts for itself:
    near or far from anything, whatever the density's own scale.
    """
    if not len(position):
        return position, np.zeros(0), 0
    length, (density, gradient) = np.full(len(position), 0.5), slopes(position)
    density, gradient, position = density.copy(), gradient.copy(), position.copy()
    spent = len(position)
    for _ in range(_CLIMB):
        low = np.flatnonzero(~(density >= level))
        if not low.size:
            break
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            uphill = scale * gradient[low]
            uphill /= np.linalg.norm(uphill, axis=1, keepdims=True)
        uphill = np.where(np.isfinite(uphill), uphill, 0.0)
        proposed = position[low] + length[low, None] * scale * uphill
        there, slope = slopes(proposed)
        better = there > density[low]
        length[low] *= np.where(better, _GROW, _SHRINK)
        found = low[better]
        spent += len(low)
        position[found], density[found] = proposed[better], there[better]
        gradient[found] = slope[better]
    return position, density, spent


def lost_chains(
    positions: Float[np.ndarray, "chain draw d"], log_density: Float[np.ndarray, "chain draw"]
) -> Bool[np.ndarray, " chain"]:
    """Chains caught where there is hardly any posterior mass, compared with the others.

    The mass around a chain is about exp(mean log density) times the volume that it covers, the
    product of its sds. A chain is lost if both its density and its mass are ``_NEGLIGIBLE`` nats
    and the noise of such a sum below those of the chain with the largest mass: a region that is
    low but wide is not lost, nor one that is narrow but high.
    """
    margin = _NEGLIGIBLE + np.sqrt(positions.shape[-1])
    with np.errstate(divide="ignore", invalid="ignore"):
        level = np.where(np.isfinite(log_density), log_density, -np.inf).mean(axis=1)
        mass = level + np.log(positions.std(axis=1)).sum(axis=1)
        best = np.argmax(np.where(np.isnan(mass), -np.inf, mass))
        if not np.isfinite(mass[best]):
            return np.zeros(len(level), bool)
        return (level < level[best] - margin) & ~(mass >= mass[best] - margin)


def far_apart(
    positions: Float[np.ndarray, "chain draw d"], count: int
) -> Float[np.ndarray, "count d"]:
    """Last positions of chains that are as far from each other as possible.

    One after another, each the farthest from those before it, in units of the sds within chains,
    so that every mode that some chain is in has a start.
    """
    within = np.sqrt(np.maximum(positions.var(axis=1).mean(axis=0), np.finfo(float).tiny))
    means = positions.mean(axis=1) / within
    chosen = [int(np.argmax(((means - np.median(means, axis=0)) ** 2).sum(axis=1)))]
    nearest = np.full(len(means), np.inf)
    for _ in range(count - 1):
        nearest = np.minimum(nearest, ((means - means[chosen[-1]]) ** 2).sum(axis=1))
        chosen.append(int(np.argmax(nearest)))
    return positions[chosen, -1]
