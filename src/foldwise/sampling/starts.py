"""Where the chains of the full-data fit start: near ``init``, and all over the prior.

Chains that all start at one place find one mode, and then agree about it.
"""

from __future__ import annotations

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from foldwise.models.evaluate import gradients
from foldwise.models.model import Model
from foldwise.models.structure import Structure
from foldwise.support.runtime import precision_context
from foldwise.support.seeds import Stream, generator, words

# Starts are uniform in this many prior sds on either side, as Stan's are in its coordinates, and
# every other pair of them in ``_WIDER`` times as many: the prior's curvature at ``init`` may be
# that of one of its modes. A coordinate whose prior has no curvature counts as having an sd of one.
_REACH, _WIDER = 2.0, 5.0
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


def starting_points(
    model: Model, count: int, seed: int, structure: Structure | None = None
) -> tuple[Float[np.ndarray, "start d"], int]:
    """``count`` distinct starts, and the number of gradients that finding them took.

    Where ``init`` is a function it gives them all. Else one in four is near ``init``; the others
    are spread over the prior, in pairs on opposite sides of its centre, brought uphill until
    they are as high as ``init``, and nearer to it where they cannot be. Where a ``structure`` is
    given, the prior is looked at along all its cells at once: thousands of them take no longer.
    """
    of_starts = [words(seed, Stream.FIT_CHAINS, k, count=4)[:2] for k in range(count)]
    with precision_context("float64"):
        keys = [jax.random.wrap_key_data(key) for key in np.stack(of_starts).astype(np.uint32)]
        near = np.stack([np.asarray(model.initial(key), float) for key in keys])
        init = np.asarray(model.flatten(model._template), float)
    if callable(model.init):
        return near, 0
    starts, far = near.copy(), np.flatnonzero(np.arange(count) % _NEAR)
    level = float(gradients(model, init[None]).log_density[0])
    lowest = level - _MOST_LOST * (model.n_obs + model.dimension)
    sets = _moved_together(model, structure)
    centre, scale = _prior_range(model, init, sets)
    side = generator(seed, Stream.SPREAD).uniform(-_REACH, _REACH, (count, model.dimension))
    starts[far] = (
        centre + scale * np.stack([side, -side], axis=1).reshape(2 * count, -1)[: len(far)]
    )
    spent = 1 + 2 * len(sets)
    for _ in range(_TRIES):
        starts[far], reached, steps = _uphill(model, starts[far], scale, level)
        spent += steps
        far = far[~(reached >= lowest)]
        starts[far] = init + _NEARER * (starts[far] - init)
    starts[far] = near[far]
    return starts, spent


def _moved_together(
    model: Model, structure: Structure | None
) -> list[Int[np.ndarray, " coordinate"]]:
    """Sets of coordinates that the prior does not couple with others of their set: most, each."""
    if structure is None:
        return [*np.arange(model.dimension)[:, None]]
    of_cells = [column[column >= 0] for column in structure.coordinates.T]
    return [*structure.globals[:, None], *(column for column in of_cells if column.size)]


def _prior_range(
    model: Model, init: Float[np.ndarray, " d"], sets: list[Int[np.ndarray, " coordinate"]]
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
    """Centre and sd of the normal prior that has this one's slope and curvature at ``init``.

    Slopes by central differences, along the coordinates of each of the ``sets`` at once. The centre
    is at most ``_REACH`` sds from ``init``: far from its mode a prior may be anything but normal.
    """
    step = 1e-3 * (1.0 + np.abs(init))
    moved = np.tile(init, (2, len(sets), 1))
    for k, members in enumerate(sets):
        moved[:, k, members] += np.outer([-1.0, 1.0], step[members])
    none = np.zeros((1, model.n_obs), bool)
    slopes = gradients(model, moved.reshape(-1, model.dimension), none).gradient.reshape(
        moved.shape
    )
    before, after = np.empty((2, model.dimension))
    for k, members in enumerate(sets):
        before[members], after[members] = slopes[:, k, members]
    with np.errstate(invalid="ignore", over="ignore"):
        curvature = (before - after) / (2.0 * step)
        slope = 0.5 * (before + after)
        noise = 1e-10 * (np.abs(before) + np.abs(after)) / step
        curved = np.isfinite(curvature) & np.isfinite(slope) & (curvature > noise)
    curvature, slope = np.where(curved, curvature, 1.0), np.where(curved, slope, 0.0)
    scale = curvature**-0.5
    return init + np.clip(slope / curvature, -_REACH * scale, _REACH * scale), scale


def _uphill(
    model: Model,
    position: Float[np.ndarray, "start d"],
    scale: Float[np.ndarray, " d"],
    level: float,
) -> tuple[Float[np.ndarray, "start d"], Float[np.ndarray, " start"], int]:
    """Take starts along the gradient to where the log density is ``level``.

    Returns positions, log densities and the number of gradients.

    Steps have a length in prior sds, half of one at first, which each start adapts for itself:
    near or far from anything, whatever the density's own scale.
    """
    if not len(position):
        return position, np.zeros(0), 0
    length, here = np.full(len(position), 0.5), gradients(model, position)
    density, gradient = here.log_density, here.gradient
    position, spent = position.copy(), len(position)
    for _ in range(_CLIMB):
        low = np.flatnonzero(~(density >= level))
        if not low.size:
            break
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            uphill = scale * gradient[low]
            uphill /= np.linalg.norm(uphill, axis=1, keepdims=True)
        uphill = np.where(np.isfinite(uphill), uphill, 0.0)
        proposed = position[low] + length[low, None] * scale * uphill
        there = gradients(model, proposed)
        better = there.log_density > density[low]
        length[low] *= np.where(better, _GROW, _SHRINK)
        found = low[better]
        spent += len(low)
        position[found], density[found] = proposed[better], there.log_density[better]
        gradient[found] = there.gradient[better]
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
