"""Proposals for many globals of which most fall apart given a few.

Where classes in schools are cells, the effects of the schools are globals, and the log of their
scale makes them a funnel, to which no mixture of few t densities fits. But given the few others,
the top t, they fall apart into pieces x that are nearly normal each, with mode m(t) and covariance
V(t). So a mixture q is fitted to Laplace's approximation of the top's density,

    log p(t) ~ log p(t, m(t)) + 1/2 sum over pieces of log det V(t),

and proposals are draws of q(t) prod over pieces of t densities around m(t) with V(t). The ratio of
the two densities corrects what is not normal, as it does for any other proposal: pieces that are in
truth coupled cost acceptance, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Float, Int

from foldwise.models.structure import MOST_COORDINATES, taken_apart
from foldwise.sampling.proposals import (
    LogDensity,
    Mixture,
    by_differences,
    climb,
    curvature,
    fitted,
    share_of,
)

# Globals that are the top, at most.
MOST_TOP = 15
# Points at which couplings are looked for, and the correlation that counts as one.
_LOOKED_AT, _COUPLED = 3, 1e-4
# Newton steps to the modes of pieces, and the error of the log density predicted by a step that
# shows that it was the last.
_STEPS, _ARRIVED = 8, 1e-3
# Steps of differences: at first, in units of 1 + |x|, and then in sds.
_FIRST_STEP, _STEP = 1e-2, 1e-2
# Degrees of freedom of the pieces: nearly normal, since there are many of them.
_FREEDOM = 20.0
# Draws that are tried, and the share of them that weights must be worth.
_TRIED, _LEAST = 800, 0.15


class Pieces(NamedTuple):
    """Modes of pieces at some tops, factors of their covariances, and Laplace's log density."""

    mode: Float[np.ndarray, "point middle"]
    factor: Float[np.ndarray, "point piece 3 3"]
    log_density: Float[np.ndarray, " point"]


@dataclass(frozen=True)
class Layers:
    """A density of globals, its top, and its pieces, as places among the globals.

    ``pieces`` are -1 beyond the coordinates that a piece has. ``start`` is where modes of the
    pieces are looked for from.
    """

    density: LogDensity
    top: Int[np.ndarray, " top"]
    pieces: Int[np.ndarray, "piece 3"]
    start: Float[np.ndarray, " g"]

    @classmethod
    def found(cls, density: LogDensity, points: Float[np.ndarray, "point g"]) -> Layers | None:
        """The layers of a density, from its second derivatives at some points; None without."""
        g = points.shape[1]
        coupled = np.zeros((g, g), bool)
        for point in points[:_LOOKED_AT]:
            bend = curvature(density, point, _FIRST_STEP * (1.0 + np.abs(point)))
            scale = np.sqrt(np.abs(np.diag(bend))) + np.finfo(float).tiny
            coupled |= ~(np.abs(bend) <= _COUPLED * np.outer(scale, scale))
            # what hangs together at one point does so, whatever the next ones say
            parts = taken_apart(scipy.sparse.csr_array(coupled.astype(np.int32)))
            top = np.setdiff1d(np.arange(g), np.concatenate([*parts, np.zeros(0, int)]))
            if len(parts) < 2 or len(top) > MOST_TOP:
                return None
        if not len(top):
            return None
        pieces = np.full((len(parts), MOST_COORDINATES), -1)
        for piece, part in zip(pieces, parts, strict=True):
            piece[: len(part)] = part
        return cls(density, top, pieces, points[0])

    @property
    def middle(self) -> Int[np.ndarray, " middle"]:
        """The coordinates of all pieces."""
        return self.pieces[self.pieces >= 0]

    def of(self, density: LogDensity) -> Layers:
        """The same of another density."""
        return replace(self, density=density)

    def __call__(self, points: Float[np.ndarray, "point top"]) -> Float[np.ndarray, " point"]:
        """Laplace's log density of the top."""
        return self.at(points).log_density

    def slopes(
        self, points: Float[np.ndarray, "point top"]
    ) -> tuple[Float[np.ndarray, " point"], Float[np.ndarray, "point top"]]:
        """Its values and gradients, by central differences."""
        return by_differences(self, points, 1e-3)

    def at(self, tops: Float[np.ndarray, "point top"]) -> Pieces:
        """Modes of the pieces by Newton steps of all side by side."""
        points = np.tile(self.start, (len(tops), 1))
        points[:, self.top] = tops
        value, share = self.density(points), np.ones(len(points))
        factor = np.tile(np.eye(MOST_COORDINATES), (len(points), len(self.pieces), 1, 1))
        step, left = _FIRST_STEP * (1.0 + np.abs(points)), np.flatnonzero(np.isfinite(value))
        moves = np.zeros_like(points)
        gain = np.zeros(len(points))
        fresh = np.ones(len(points), bool)
        for _ in range(_STEPS):
            if not len(left):
                break
            new = left[fresh[left]]
            if len(new):
                found = self._newton(points[new], value[new], step[new])
                moves[new], factor[new], gain[new] = found
                self._put(step, new, _STEP * np.linalg.norm(factor[new], axis=-1))
            there = points[left] + share[left, None] * moves[left]
            reached = self.density(there)
            predicted = (share[left] - 0.5 * share[left] ** 2) * gain[left]
            rise = reached - value[left]
            better = rise >= 0.1 * predicted - 1e-9 * (1.0 + np.abs(value[left]))
            arrived = better & (np.abs(rise - predicted) < _ARRIVED) & (share[left] == 1.0)
            moved = left[better]
            points[moved], value[moved] = there[better], reached[better]
            fresh[left] = better
            share[left] = np.where(better, 1.0, 0.3 * share[left])
            left = left[~arrived]
        wide = np.log(np.abs(np.diagonal(factor, axis1=2, axis2=3))).sum(axis=(1, 2))
        return Pieces(points[:, self.middle], factor, value + wide)

    def _put(
        self,
        into: Float[np.ndarray, "point g"],
        where: Int[np.ndarray, " chosen"],
        values: Float[np.ndarray, "chosen piece 3"],
    ) -> None:
        """Put values of the pieces' coordinates where they belong."""
        into[where[:, None], self.middle] = values[:, self.pieces >= 0]

    def _newton(
        self,
        points: Float[np.ndarray, "point g"],
        value: Float[np.ndarray, " point"],
        step: Float[np.ndarray, "point g"],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Newton steps of the pieces, factors of their covariances, and twice the gain expected."""
        moved, names = [], []
        for piece in self.pieces:
            own = piece[piece >= 0]
            for i, k in enumerate(own):
                names += [(k, k), (-1 - k, -1 - k)] + [(k, other) for other in own[:i]]
        for one, two in names:
            there = points.copy()
            for k in {int(one), int(two)}:
                place, sign = (k, 1.0) if k >= 0 else (-1 - k, -1.0)
                there[:, place] += sign * step[:, place]
            moved.append(there)
        values = self.density(np.concatenate(moved)).reshape(len(names), len(points))
        at = dict(zip([(int(a), int(b)) for a, b in names], values, strict=True))
        count, shape = len(points), self.pieces.shape
        slope = np.zeros((count, *shape))
        curvature = np.tile(np.eye(MOST_COORDINATES), (count, len(self.pieces), 1, 1))
        with np.errstate(invalid="ignore"):
            for p, piece in enumerate(self.pieces):
                own = [int(k) for k in piece[piece >= 0]]
                for i, k in enumerate(own):
                    up, down, h = at[k, k], at[-1 - k, -1 - k], step[:, k]
                    slope[:, p, i] = (up - down) / (2.0 * h)
                    curvature[:, p, i, i] = (2.0 * value - up - down) / h**2
                    for j, other in enumerate(own[:i]):
                        mixed = at[k, other] - up - at[other, other] + value
                        curvature[:, p, i, j] = curvature[:, p, j, i] = -mixed / (
                            h * step[:, other]
                        )
        factor = _factor_of_inverse(curvature)
        along = np.einsum("npji,npj->npi", factor, np.nan_to_num(slope))
        moves = np.zeros_like(points)
        self._put(moves, np.arange(count), np.einsum("npij,npj->npi", factor, along))
        return moves, factor, (along**2).sum(axis=(1, 2))


@dataclass(frozen=True)
class Layered:
    """Proposals: a mixture of tops, and pieces given them; or half of one and half of another."""

    layers: Layers
    mixture: Mixture
    other: Layered | None = None

    def beside(self, other: Layered) -> Layered:
        """Half of this and half of another."""
        return replace(self, other=other)

    def draw(self, rng: np.random.Generator, count: int) -> Float[np.ndarray, "draw g"]:
        """Independent draws."""
        if self.other is not None:
            first = rng.binomial(count, 0.5)
            alone = replace(self, other=None)
            both = [alone.draw(rng, first), self.other.draw(rng, count - first)]
            return np.concatenate(both)[rng.permutation(count)]
        layers, tops = self.layers, self.mixture.draw(rng, count)
        pieces = layers.at(tops)
        normal = rng.normal(size=(count, *layers.pieces.shape))
        scale = np.sqrt(_FREEDOM / rng.chisquare(_FREEDOM, size=normal.shape[:2]))
        away = np.einsum("npij,npj->npi", pieces.factor, normal) * scale[..., None]
        points = np.zeros((count, len(layers.start)))
        points[:, layers.top] = tops
        points[:, layers.middle] = pieces.mode + away[:, layers.pieces >= 0]
        return points

    def log_density(self, points: Float[np.ndarray, "point g"]) -> Float[np.ndarray, " point"]:
        """Up to a constant that depends on the layers alone."""
        layers = self.layers
        tops = points[:, layers.top]
        pieces = layers.at(tops)
        away = np.zeros((len(points), *layers.pieces.shape))
        away[:, layers.pieces >= 0] = points[:, layers.middle] - pieces.mode
        x = np.linalg.solve(pieces.factor, away[..., None])[..., 0]
        size = (layers.pieces >= 0).sum(axis=1)
        tails = -0.5 * (_FREEDOM + size) * np.log1p((x**2).sum(axis=2) / _FREEDOM)
        wide = np.log(np.abs(np.diagonal(pieces.factor, axis1=2, axis2=3))).sum(axis=(1, 2))
        own = self.mixture.log_density(tops) + tails.sum(axis=1) - wide
        return own if self.other is None else np.logaddexp(own, self.other.log_density(points))


def layered(layers: Layers, start: Mixture, rng: np.random.Generator) -> Layered | None:
    """Proposals for a density, beginning with a mixture of its tops; None where they do not fit."""
    mixture = fitted(layers, start, rng)
    if mixture is None:
        return None
    proposal = Layered(layers, mixture)
    some = proposal.draw(rng, _TRIED)
    good = share_of(layers.density(some) - proposal.log_density(some)) >= _LEAST
    return proposal if good else None


def climbed(
    density: LogDensity, starts: Float[np.ndarray, "start g"], rng: np.random.Generator
) -> Layered | None:
    """Proposals for a density from nothing but starts; None where it has no layers, or none fit."""
    layers = Layers.found(density, starts)
    if layers is None:
        return None
    modes = climb(layers, starts[:, layers.top])
    return None if modes is None else layered(layers, Mixture.of(modes), rng)


def _factor_of_inverse(curvature: Float[np.ndarray, "... 3 3"]) -> Float[np.ndarray, "... 3 3"]:
    """F with F F' = C^-1, triangular; directions without curvature count by its size."""
    finite = np.isfinite(curvature).all(axis=(-2, -1), keepdims=True)
    values, vectors = np.linalg.eigh(np.where(finite, curvature, np.eye(curvature.shape[-1])))
    values = np.maximum(np.abs(values), 1e-8 * np.abs(values).max(axis=-1, keepdims=True) + 1e-12)
    inverse = (vectors / values[..., None, :]) @ np.swapaxes(vectors, -1, -2)
    return np.linalg.cholesky(inverse)
