"""The metric of each fold: how far its posterior stretches in each direction.

HMC is fast when its metric is the covariance of the posterior. Two forms, by dimension:

* up to ``FOLD_METRIC_DIMENSION`` parameters, and where folds are far from the full data up to
  ``DENSE_DIMENSION``, each fold has its own matrix;
* beyond, all folds share one, in essence the covariance of the full-data draws
  (:func:`shared_metric`).

In both, a fold's *local* coordinates, which none of its training rows inform, are set apart with
the scale of their prior (:func:`near_metric`). Folds that train on few rows, or whose local
coordinates are tied to each other, get theirs from the curvature of their log density where their
chains are (:func:`far_metric`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# A metric per fold costs dimension^2 numbers a fold and, for far folds, as many Hessian-vector
# products as there are parameters at each of a few points: at 100, a quarter of a default run.
FOLD_METRIC_DIMENSION = 100
# Beyond this a dense matrix times a vector costs more than most gradients.
DENSE_DIMENSION = 500
# Principal directions of the correlations enter the shared metric from this factor on, as in
# nutpie's low-rank metric.
LEAST_STRETCH = 2.0
# Curvatures of a fold relative to the full data's precision are kept in this range. A direction
# that the training rows leave free may be 1,000 times wider (in sd) than under the full data.
_RELATIVE_CURVATURE = (1e-6, 1e2)
# Added to the variances of draws and gradients, in units in which both are alike.
_RIDGE = 1e-5


class FoldMetric(NamedTuple):
    """A covariance per fold, and a factor of its inverse: factor factor' = covariance^-1."""

    covariance: Float[Any, "fold d d"]
    factor: Float[Any, "fold d d"]


class LocalCoordinates(NamedTuple):
    """The coordinates that no training row of a fold informs.

    ``local`` marks them, ``curvature`` is that of the log prior there (one elsewhere), ``listed``
    lists them, padded. ``regression`` is P[:, A] P[A, A]^-1 for P the inverse of the shared
    covariance and A the local coordinates, zero in the padding.
    """

    local: Bool[Any, "fold d"]
    curvature: Float[Any, "fold d"]
    listed: Int[Any, "fold a"]
    regression: Float[Any, "fold d a"]


class SharedMetric(NamedTuple):
    """One covariance for all folds, except in each fold's local coordinates.

    It is D (1 + V (L - 1) V') D: D diagonal (``scale``), V some orthonormal columns
    (``directions``, none of them in many dimensions), L diagonal (``stretch``).
    """

    scale: Float[Any, " d"]
    directions: Float[Any, "d r"]
    stretch: Float[Any, " r"]
    folds: LocalCoordinates


Metric = FoldMetric | SharedMetric


class MetricShape(NamedTuple):
    """What a program must know of a metric: whether each fold has a matrix of its own.

    Else the number of local coordinates that are listed for each fold, and of the directions of the
    shared metric.
    """

    own: bool
    local: int = 0
    directions: int = 0

    @classmethod
    def of(cls, metric: Metric) -> MetricShape:
        """That of ``metric``."""
        if isinstance(metric, FoldMetric):
            return cls(True)
        return cls(False, metric.folds.listed.shape[1], len(metric.stretch))

    def by_fold(self, folds: int, d: int, precision: str) -> FoldMetric | LocalCoordinates:
        """Shapes and types of what each fold has."""
        if self.own:
            matrix = jax.ShapeDtypeStruct((folds, d, d), precision)
            return FoldMetric(matrix, matrix)
        return LocalCoordinates(
            jax.ShapeDtypeStruct((folds, d), bool),
            jax.ShapeDtypeStruct((folds, d), precision),
            jax.ShapeDtypeStruct((folds, self.local), np.int32),
            jax.ShapeDtypeStruct((folds, d, self.local), precision),
        )

    def shared(self, d: int, precision: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and types of what all folds share."""
        if self.own:
            return ()
        shapes = ((d,), (d, self.directions), (self.directions,))
        return tuple(jax.ShapeDtypeStruct(shape, precision) for shape in shapes)


def velocity(metric: Metric, p: Float[Array, "fold chain d"]) -> Float[Array, "fold chain d"]:
    """Inverse mass matrix times momentum."""
    if isinstance(metric, FoldMetric):
        return jnp.einsum("kde,kle->kld", metric.covariance, p)
    local = metric.folds.local[:, None, :]
    rest = metric.scale * jnp.where(local, 0.0, p)
    rest = metric.scale * _stretched(metric.directions, metric.stretch, rest)
    return jnp.where(local, p / metric.folds.curvature[:, None, :], rest)


def momentum(metric: Metric, noise: Float[Array, "fold chain m"]) -> Float[Array, "fold chain d"]:
    """Momenta with covariance equal to the mass matrix, from standard normal noise.

    With local coordinates A: draw N(0, P) with P = S^-1, condition it on p_A = 0, which leaves
    the rest with the inverse of its marginal covariance, then draw p_A from N(0, curvature).
    """
    if isinstance(metric, FoldMetric):
        return jnp.einsum("kde,kle->kld", metric.factor, noise)
    local, curvature, listed, regression = metric.folds
    d = local.shape[-1]
    p = _stretched(metric.directions, metric.stretch**-0.5, noise[..., :d]) / metric.scale
    p_local = jnp.take_along_axis(p, listed[:, None, :], axis=-1)
    p = p - jnp.einsum("kda,kla->kld", regression, p_local)
    own = jnp.sqrt(curvature)[:, None, :] * noise[..., -d:]
    return jnp.where(local[:, None, :], own, p)


def noise_size(metric: Metric) -> int:
    """How many standard normals :func:`momentum` needs for each chain.

    Local coordinates need their own where the shared metric mixes coordinates.
    """
    if isinstance(metric, FoldMetric):
        return metric.covariance.shape[-1]
    d, listed = metric.folds.regression.shape[1:]
    return 2 * d if listed else d


def _stretched(directions: Array, stretch: Array, vectors: Array) -> Array:
    """Vectors times 1 + V (L - 1) V'."""
    return vectors + ((vectors @ directions) * (stretch - 1.0)) @ directions.T


def _times(matrix: Array, vectors: Array) -> Array:
    return vectors * matrix if matrix.ndim == 1 else vectors @ matrix.T


def shrunk_covariance(
    draws: Float[np.ndarray, "draw d"], effective: float
) -> Float[np.ndarray, "d d"]:
    """Covariance of the draws, correlations shrunk towards zero as far as their noise demands.

    S_ij = (1 - shrinkage) r_ij s_i s_j for i != j, with the intensity of Schafer and Strimmer
    (2005): shrinkage = sum var(r_ij) / sum r_ij^2 over i != j, var(r) = (1 - r^2)^2 / effective,
    where ``effective`` is the effective number of draws. Always positive definite.
    """
    centred = draws - draws.mean(axis=0)
    scale = np.maximum(centred.std(axis=0, ddof=1), np.finfo(float).tiny ** 0.5)
    correlation = (centred / scale).T @ (centred / scale) / (len(draws) - 1)
    off = ~np.eye(len(scale), dtype=bool)
    noise = np.sum((1.0 - correlation[off] ** 2) ** 2) / effective
    signal = np.sum(correlation[off] ** 2)
    shrinkage = float(np.clip(noise / signal, 1e-6, 1.0)) if signal > 0 else 1.0
    correlation[off] *= 1.0 - shrinkage
    return correlation * np.outer(scale, scale)


def gradient_metric(
    draws: Float[np.ndarray, "draw d"], gradients: Float[np.ndarray, "draw d"]
) -> Float[np.ndarray, "d d"]:
    """The covariance of the normal density whose gradients are most like those at some draws.

    M with M cov(gradients) M = cov(draws), the geometric mean of cov(draws) and of the inverse of
    cov(gradients): it makes the expected squared difference of the two densities' gradients
    smallest (the Fisher divergence, Seyboldt, Carlson and Carpenter 2026). Where the density is
    normal with precision P, gradients are -P (q - mean) and M is its inverse, whatever the
    distribution of the draws: chains need not have arrived, and draws may be few more than
    parameters. Coordinates are scaled first, and ``_RIDGE`` keeps both matrices positive.
    """
    centred, slopes = (part - part.mean(axis=0) for part in (draws, gradients))
    least = np.finfo(float).tiny ** 0.25
    scale = np.sqrt(np.maximum(centred.std(axis=0), least) / np.maximum(slopes.std(axis=0), least))
    ridge = _RIDGE * np.eye(len(scale))
    spread = np.cov((centred / scale).T) + ridge
    steepness = np.cov((slopes * scale).T) + ridge
    root = np.linalg.cholesky(spread)
    values, directions = np.linalg.eigh(root.T @ steepness @ root)
    wide = scale[:, None] * (root @ (directions / np.maximum(values, least) ** 0.25))
    return wide @ wide.T


def correlated(covariance: Float[np.ndarray, "d d"]) -> float:
    """By how much more the widest direction stretches than the narrowest, coordinates scaled.

    With a diagonal metric HMC needs as many times the steps that it would need with this one.
    """
    scale = np.sqrt(np.diag(covariance))
    values = np.linalg.eigvalsh(covariance / np.outer(scale, scale))
    return float(np.sqrt(values[-1] / max(values[0], np.finfo(float).tiny)))


def near_metric(
    covariance: Float[np.ndarray, "d d"],
    local: Bool[np.ndarray, "fold d"],
    curvature: Float[np.ndarray, "fold d"],
) -> FoldMetric:
    """The full-data covariance, except in each fold's local coordinates.

    These are cut off from the rest and have the variance 1 / curvature of their prior, for all
    that the full data knew of them came from the rows left out.
    """
    inside = ~local[:, :, None] & ~local[:, None, :]
    own = np.where(local, 1.0 / np.where(local, curvature, 1.0), 0.0)
    return _metric(np.where(inside, covariance, 0.0) + own[:, :, None] * np.eye(local.shape[1]))


def _is_positive(matrix: Float[np.ndarray, "d d"]) -> bool:
    try:
        np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return False
    return True


def far_metric(
    covariance: Float[np.ndarray, "d d"], curvature: Float[np.ndarray, "fold d d"]
) -> FoldMetric:
    """The mean of the full-data covariance and of the inverse of each fold's curvature.

    For folds that train on few rows, whose curvature is taken where their own chains are. The
    full-data covariance keeps directions from becoming too narrow where the curvature at a few
    points misleads.
    """
    inverse = np.stack([_inverse(covariance, matrix) for matrix in curvature])
    return _metric(0.5 * (covariance + inverse))


def _metric(covariance: Float[np.ndarray, "fold d d"]) -> FoldMetric:
    covariance = 0.5 * (covariance + np.swapaxes(covariance, 1, 2))
    return FoldMetric(covariance, np.linalg.cholesky(np.linalg.inv(covariance)))


def _inverse(
    covariance: Float[np.ndarray, "d d"], curvature: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, "d d"]:
    """Inverse of a curvature, mended first if need be."""
    if _is_positive(curvature):
        inverse = np.linalg.inv(curvature)
        if np.all(np.diag(inverse) * _RELATIVE_CURVATURE[0] < np.diag(covariance)):
            return inverse
    return _mended_inverse(covariance, curvature)


def _mended_inverse(
    covariance: Float[np.ndarray, "d d"], curvature: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, "d d"]:
    """Inverse of a curvature that is not positive definite, or nearly singular.

    In coordinates in which the full-data covariance is the identity, eigenvalues enter by their
    absolute value, as in SoftAbs (Betancourt 2013), and within ``_RELATIVE_CURVATURE``.
    """
    root = np.linalg.cholesky(covariance)
    values, directions = np.linalg.eigh(root.T @ curvature @ root)
    wide = root @ (directions / np.sqrt(np.clip(np.abs(values), *_RELATIVE_CURVATURE)))
    return wide @ wide.T


def shared_metric(
    covariance: Float[np.ndarray, "d d"] | Float[np.ndarray, " d"],
    local: Bool[np.ndarray, "fold d"],
    prior_curvature: Float[np.ndarray, " d"],
    least_stretch: float = LEAST_STRETCH,
) -> SharedMetric:
    """The full-data covariance for every fold, except in each fold's local coordinates.

    Of the correlations only what stretches or squeezes by ``least_stretch`` is kept: the principal
    directions of a hierarchical posterior that do so are few, and the rest is mostly noise of the
    draws. A matrix of all correlations would be read from memory in every step.
    """
    folds, d = local.shape
    if covariance.ndim == 1:
        scale, directions, stretch = np.sqrt(covariance), np.zeros((d, 0)), np.zeros(0)
    else:
        scale = np.sqrt(np.diag(covariance))
        stretch, directions = np.linalg.eigh(covariance / np.outer(scale, scale))
        kept = np.abs(np.log(stretch)) >= np.log(least_stretch)
        stretch, directions = stretch[kept], directions[:, kept]
    width = int(local.sum(axis=1).max()) if stretch.size else 0
    listed, regression = np.zeros((folds, width), np.int32), np.zeros((folds, d, width))
    if width:
        correlation = np.eye(d) + directions * (1.0 / stretch - 1.0) @ directions.T
        precision = correlation / np.outer(scale, scale)
        for k in np.flatnonzero(local.any(axis=1)):
            own = np.flatnonzero(local[k])
            listed[k, : len(own)] = own
            inner = precision[np.ix_(own, own)]
            regression[k, :, : len(own)] = np.linalg.solve(inner, precision[own]).T
    curvature = np.where(local, prior_curvature, 1.0)
    parts = LocalCoordinates(local, curvature, listed, regression)
    return SharedMetric(scale, directions, stretch, parts)


def rung_curvature(
    covariance: Float[np.ndarray, "d d"] | Float[np.ndarray, " d"],
    prior_curvature: Float[np.ndarray, "fold d"],
    temper: Float[np.ndarray, " fold"],
) -> Float[np.ndarray, "fold d"]:
    """Curvature of local coordinates on rungs, where test rows weigh ``temper``.

    All that the full data know of a local coordinate comes from the test rows, so it is
    (1 - temper) that of the prior plus temper times the full-data precision.
    """
    dense = covariance.ndim == 2
    precision = np.diag(np.linalg.inv(covariance)) if dense else 1.0 / covariance
    t = temper[:, None]
    return (1.0 - t) * prior_curvature + t * precision
