"""Posteriors that have no normalising constant: directions in which the density never falls."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from foldwise.models.evaluate import gradients
from foldwise.models.model import Model

# How far to go, in spreads of the starts.
_DISTANCES = (1e3, 1e6, 1e9)
# Nats: rounding at such distances. A normal density falls by it within a seventh of an sd.
_NO_FALL = 0.01
# Gradients that are this small a part of the largest may be nothing but rounding.
_NO_SLOPE = 1e-6
# Starts from which directions are followed.
_FOLLOWED = 2


def improper_direction(
    model: Model,
    positions: Float[np.ndarray, "chain draw d"],
    starts: Float[np.ndarray, "start d"],
) -> Float[np.ndarray, " d"] | None:
    """A direction along which the full-data posterior never falls; None where none is found.

    Candidates are what changes no gradient at ``starts`` (draws may have run away so far that
    rounding is all there is), the coordinates, and the way that the chains have drifted. The first
    along which the log density, up to a billion times the spread of the starts away, is nowhere
    lower than at a start, is it: there is no posterior then.
    """
    spread = np.maximum(starts.std(axis=0), 1e-3 * (1.0 + np.abs(starts).max(axis=0)))
    half = positions.shape[1] // 2
    drift = positions[:, half:].mean(axis=(0, 1)) - positions[:, :half].mean(axis=(0, 1))
    drift = drift / max(np.abs(drift / spread).max(), np.finfo(float).tiny)
    tried = [*_without_slope(model, starts, spread), *np.diag(spread), drift, -drift]
    for direction in tried:
        if np.any(direction) and _never_falls(model, starts[:_FOLLOWED], direction):
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
