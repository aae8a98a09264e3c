"""Posteriors that have no normalising constant: directions in which the density never falls."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from foldwise.evaluate import gradients
from foldwise.model import Model

# How far to go, in spreads of the draws: the draws of an improper posterior have been anywhere, and
# those of a proper one may have seen only a part of a prior a billion times as wide.
_DISTANCES = (1e3, 1e6, 1e9)
# Nats: rounding at such distances. A normal density falls by it within a seventh of an sd.
_NO_FALL = 0.01
# Gradients that are this small a part of the largest may be nothing but rounding.
_NO_SLOPE = 1e-6
# Points at which slopes are taken for each parameter, and from which directions are followed.
_POINTS, _FOLLOWED = 2, 2


def improper_direction(
    model: Model, positions: Float[np.ndarray, "chain draw d"]
) -> Float[np.ndarray, " d"] | None:
    """A direction along which the full-data posterior never falls; None where none is found.

    Candidates are what changes no gradient at some of the draws, the coordinates, and the way
    that the chains have drifted. The first along which the log density, up to a billion times the
    draws' spread away, is nowhere lower than at the draw, is it: there is no posterior then.
    """
    flat = positions.reshape(-1, positions.shape[-1])
    spread = np.maximum(flat.std(axis=0), 1e-3 * (1.0 + np.abs(flat).max(axis=0)))
    count = _POINTS * model.dimension + 2
    points = flat[np.linspace(0, len(flat) - 1, count).astype(int)]
    half = positions.shape[1] // 2
    drift = positions[:, half:].mean(axis=(0, 1)) - positions[:, :half].mean(axis=(0, 1))
    tried = [*_without_slope(model, points, spread), *np.diag(spread), drift, -drift]
    for direction in tried:
        if np.any(direction) and _never_falls(model, points[:_FOLLOWED], direction):
            return direction / np.abs(direction).max()
    return None


def _without_slope(
    model: Model, points: Float[np.ndarray, "point d"], spread: Float[np.ndarray, " d"]
) -> Float[np.ndarray, "direction d"]:
    """Directions in which all gradients at ``points`` vanish."""
    slopes = gradients(model, points).gradient * spread
    slopes = slopes[np.isfinite(slopes).all(axis=1)]
    if not len(slopes):
        return np.zeros((0, points.shape[1]))
    size = np.linalg.norm(slopes, axis=1, keepdims=True)
    _, values, directions = np.linalg.svd(slopes / np.maximum(size, np.finfo(float).tiny))
    kept = np.zeros(len(directions))
    kept[: len(values)] = values
    return directions[kept <= _NO_SLOPE * max(kept.max(), np.finfo(float).tiny)] * spread


def _never_falls(
    model: Model, points: Float[np.ndarray, "point d"], direction: Float[np.ndarray, " d"]
) -> bool:
    away = np.array(_DISTANCES)[:, None, None] * direction
    reached = gradients(model, (points + away).reshape(-1, points.shape[1])).log_density
    change = reached.reshape(len(_DISTANCES), -1) - gradients(model, points).log_density
    return bool(np.all(change >= -_NO_FALL))
