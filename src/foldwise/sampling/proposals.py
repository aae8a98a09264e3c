"""Mixtures of t densities that are fitted to a density of a handful of parameters.

The density is climbed from several starts (:func:`climb`), and a mixture of t densities is fitted
to it by importance sampling, in rounds (:func:`fitted`). Draws of the mixture, weighted by the
ratio of the two densities or taken by independence Metropolis steps, are then draws of the density.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import scipy
from jaxtyping import Float

# Steps of each climb, and the cosine of a step and the change of slope along it below which it says
# nothing of the curvature: the update would multiply by the inverse of its square, and lose all
# digits of the directions that it leaves alone.
_CLIMB, _LEAST_COSINE = 60, 1e-4
# Sds to either side at which the curvature of a mode is looked at.
_BEND_STEP = 0.3
# Nats below the highest mode at which another is forgotten, and sds within which two are one.
_NEGLIGIBLE, _SAME_MODE = 20.0, 1.0
# Draws of each round in which a mixture is fitted, the share of them that weights must be worth
# and the largest weight that there may be for it to be good enough, and the share below which there
# is none.
_ROUNDS, _GOOD, _MOST_RATIO, _LEAST = (400, 800, 1600, 1600, 1600), 0.6, 12.0, 0.15
# Rounds after which the mixture has many parts, how many, and their width in sds.
_PLAIN_ROUNDS, _PARTS, _WIDTH = 2, 60, 0.5
# In a round whose weights are worth fewer points than this many for each parameter, they are
# flattened until they are.
_POINTS_EACH = 10
# Weight and scale of the wider copy that keeps tails, and its weight in many dimensions, where it
# is far from everything.
_TAILS, _WIDER, _TAILS_OF_MANY = 0.15, 2.5, 0.02
# Weight of a part below which it is dropped.
_LEAST_PART = 1e-3
# Up to this many parameters a mixture can fit their posterior, whatever its shape.
MOST_GLOBALS = 15
# Degrees of freedom of t densities. Their draws are all too far away, or all too close, in all
# directions at once, so that in many dimensions few are where they should be: beyond those of
# ``MOST_GLOBALS``, degrees are added, two for each: for the 31 globals of the Rasch model of
# bench/fit.py, 5 degrees would waste half of the draws.
_FREEDOM = 5.0
# Effective points for each parameter without which moments of many parameters are not learned, and
# a share below which a mixture in many dimensions is hopeless.
_MOMENTS_EACH, _HOPELESS = 40, 0.02


class LogDensity(Protocol):
    """A log density at many points at once."""

    def __call__(self, points: Float[np.ndarray, "point g"]) -> Float[np.ndarray, " point"]:
        """Log densities; -inf where there is none."""

    def slopes(
        self, points: Float[np.ndarray, "point g"]
    ) -> tuple[Float[np.ndarray, " point"], Float[np.ndarray, "point g"]]:
        """Log densities and their gradients."""


def by_differences(
    density: LogDensity, points: Float[np.ndarray, "point g"], step: float
) -> tuple[Float[np.ndarray, " point"], Float[np.ndarray, "point g"]]:
    """Log densities and their gradients, by central differences, in one call.

    ``step`` is in units of 1 + |x|. A gradient that is no number is zero.
    """
    count, g = points.shape
    size = step * (1.0 + np.abs(points))
    moved = size[:, None] * np.eye(g)
    around = np.concatenate([points[:, None], points[:, None] - moved, points[:, None] + moved], 1)
    values = density(around.reshape(-1, g)).reshape(count, 2 * g + 1)
    with np.errstate(invalid="ignore"):
        slope = (values[:, g + 1 :] - values[:, 1 : g + 1]) / (2.0 * size)
    return values[:, 0], np.where(np.isfinite(slope), slope, 0.0)


def curvature(
    density: LogDensity, point: Float[np.ndarray, " g"], size: Float[np.ndarray, " g"]
) -> Float[np.ndarray, "g g"]:
    """Matrix of second derivatives, by differences over steps of these sizes."""
    step, (one, two) = np.diag(size), np.triu_indices(len(point))
    signs = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
    values = [density(point + a * step[one] + b * step[two]) for a, b in signs]
    with np.errstate(invalid="ignore"):
        found = (values[0] - values[1] - values[2] + values[3]) / (4.0 * size[one] * size[two])
    matrix = np.zeros_like(step)
    matrix[one, two] = matrix[two, one] = found
    return matrix


class Proposal(Protocol):
    """A density that can be drawn from."""

    def draw(self, rng: np.random.Generator, count: int) -> Float[np.ndarray, "draw g"]:
        """Independent draws."""

    def log_density(self, points: Float[np.ndarray, "point g"]) -> Float[np.ndarray, " point"]:
        """Up to a constant."""


@dataclass(frozen=True)
class Modes:
    """Where climbs ended that are worth having: points, log densities, covariances."""

    points: Float[np.ndarray, "mode g"]
    height: Float[np.ndarray, " mode"]
    covariance: Float[np.ndarray, "mode g g"]


def climb(density: LogDensity, starts: Float[np.ndarray, "start g"]) -> Modes | None:
    """Distinct modes by quasi-Newton steps (BFGS) from all starts side by side."""
    x, (value, slope) = starts, density.slopes(starts)
    if not np.isfinite(value).any():
        return None
    x, value, slope = (part[np.isfinite(value)] for part in (x, value, slope))
    g = x.shape[1]
    inverse = np.tile(np.eye(g), (len(x), 1, 1))
    inverse /= np.maximum(1.0, np.linalg.norm(slope, axis=1))[:, None, None]
    share, idle = np.ones(len(x)), np.zeros(len(x), int)
    for _ in range(_CLIMB):
        step = np.einsum("sij,sj->si", inverse, slope)
        gain = (step * slope).sum(axis=1)
        if ((gain < 1e-3) | (idle > 12)).all():
            break
        there = x + share[:, None] * step
        new_value, new_slope = density.slopes(there)
        better = new_value > value + 1e-4 * share * gain
        moved, turned = there - x, slope - new_slope
        curved = (moved * turned).sum(axis=1)
        with np.errstate(over="ignore"):  # of a slope that has exploded nothing is learned
            lengths = np.linalg.norm(moved, axis=1) * np.linalg.norm(turned, axis=1)
        for s in np.flatnonzero(better & (curved > np.maximum(1e-10, _LEAST_COSINE * lengths))):
            inverse[s] = _updated(inverse[s], moved[s], turned[s], curved[s])
        x = np.where(better[:, None], there, x)
        slope = np.where(better[:, None], new_slope, slope)
        value = np.where(better, new_value, value)
        share = np.where(better, np.minimum(1.0, 2.0 * share), 0.25 * share)
        idle = np.where(better, 0, idle + 1)
    return _distinct(x, value, inverse)


def sharpened(density: LogDensity, modes: Modes) -> Modes:
    """The same modes with the covariances of their curvatures, where these are those of a top.

    What climbs tell of many directions is rough: 30 steps do not see all of them.
    """
    covariance = modes.covariance.copy()
    for k, (point, rough) in enumerate(zip(modes.points, modes.covariance, strict=True)):
        bend = -curvature(density, point, _BEND_STEP * np.sqrt(np.diag(rough)))
        if np.isfinite(bend).all() and np.linalg.eigvalsh(bend)[0] > 0.0:
            covariance[k] = np.linalg.inv(bend)
    return Modes(modes.points, modes.height, covariance)


def _updated(
    inverse: Float[np.ndarray, "g g"],
    moved: Float[np.ndarray, " g"],
    turned: Float[np.ndarray, " g"],
    curved: float,
) -> Float[np.ndarray, "g g"]:
    """The inverse curvature after a step and the change of slope along it (BFGS)."""
    aside = np.eye(len(moved)) - np.outer(moved, turned) / curved
    return aside @ inverse @ aside.T + np.outer(moved, moved) / curved


def _distinct(
    x: Float[np.ndarray, "start g"],
    value: Float[np.ndarray, " start"],
    inverse: Float[np.ndarray, "start g g"],
) -> Modes:
    """The ends of climbs without those that are too low, or near a higher one."""
    chosen: list[int] = []
    for s in np.argsort(-value):
        if value[s] < value.max() - _NEGLIGIBLE:
            break
        apart = [x[s] - x[c] for c in chosen]
        far = [a @ np.linalg.solve(inverse[c], a) for a, c in zip(apart, chosen, strict=True)]
        if all(distance > _SAME_MODE**2 for distance in far):
            chosen.append(int(s))
    return Modes(x[chosen], value[chosen], inverse[chosen])


@dataclass(frozen=True)
class Mixture:
    """A mixture of t densities; the weights of its parts sum to one."""

    centre: Float[np.ndarray, "part g"]
    factor: Float[np.ndarray, "part g g"]
    weight: Float[np.ndarray, " part"]

    @classmethod
    def of(cls, modes: Modes) -> Mixture:
        """A part for each mode, as large as a normal density of its height and curvature."""
        factor = np.linalg.cholesky(modes.covariance)
        volume = np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(axis=1)
        return cls(modes.points, factor, scipy.special.softmax(modes.height + volume))

    @property
    def freedom(self) -> float:
        """Degrees of freedom of all parts."""
        return _FREEDOM + 2.0 * max(0, self.centre.shape[1] - MOST_GLOBALS)

    def beside(self, other: Mixture) -> Mixture:
        """Half of this and half of another."""
        return Mixture(
            np.concatenate([self.centre, other.centre]),
            np.concatenate([self.factor, other.factor]),
            0.5 * np.concatenate([self.weight, other.weight]),
        )

    def with_tails(self) -> Mixture:
        """This, and a little of the same that is wider: a scale's log has a long tail."""
        share = _TAILS if self.centre.shape[1] <= MOST_GLOBALS else _TAILS_OF_MANY
        return Mixture(
            np.concatenate([self.centre, self.centre]),
            np.concatenate([self.factor, _WIDER * self.factor]),
            np.concatenate([(1.0 - share) * self.weight, share * self.weight]),
        )

    def draw(self, rng: np.random.Generator, count: int) -> Float[np.ndarray, "draw g"]:
        """Independent draws."""
        part = rng.choice(len(self.weight), count, p=self.weight)
        normal, freedom = rng.normal(size=(count, self.centre.shape[1])), self.freedom
        scale = np.sqrt(freedom / rng.chisquare(freedom, count))
        away = np.einsum("dij,dj->di", self.factor[part], normal)
        return self.centre[part] + scale[:, None] * away

    def log_density(self, points: Float[np.ndarray, "point g"]) -> Float[np.ndarray, " point"]:
        """Up to a constant that depends on the dimension alone."""
        return scipy.special.logsumexp(self.by_part(points), axis=0)

    def by_part(self, points: Float[np.ndarray, "point g"]) -> Float[np.ndarray, "part point"]:
        """Log density of each part, its weight included, up to the same constant."""
        g, found = points.shape[1], []
        for centre, factor, weight in zip(self.centre, self.factor, self.weight, strict=True):
            x = scipy.linalg.solve_triangular(factor, (points - centre).T, lower=True)
            tails = -0.5 * (self.freedom + g) * np.log1p((x**2).sum(axis=0) / self.freedom)
            found.append(np.log(weight) + tails - np.log(np.diagonal(factor)).sum())
        return np.array(found)


Points = tuple[Float[np.ndarray, "point g"], Float[np.ndarray, " point"]]


def first_round(density: LogDensity, start: Mixture, rng: np.random.Generator) -> Points:
    """Points from a mixture with tails, and their log densities: ``fitted`` begins with them."""
    points = start.with_tails().draw(rng, _ROUNDS[0])
    return points, density(points)


def fitted(
    density: LogDensity, start: Mixture, rng: np.random.Generator, begun: Points | None = None
) -> Mixture | None:
    """A mixture that weights hardly have to correct; None where none was found.

    ``begun`` is the first round, where it has been made. In each round the moments of its parts,
    later many parts, come from the weighted draws of the rounds before, whose proposals count as
    one mixture. In many dimensions they come from many draws only, and many parts would be of no
    use.
    """
    core: Mixture | None = start
    points, values, used = [], [], []
    best, share, g = None, 0.0, start.centre.shape[1]
    for number, count in enumerate(_ROUNDS):
        if core is None:
            return None
        proposal = core.with_tails()
        if number:
            some = proposal.draw(rng, count)
            found = density(some)
        else:
            some, found = begun or first_round(density, start, rng)
        points.append(some)
        values.append(found)
        used.append((count, proposal))
        ratio = found - proposal.log_density(some)
        share = share_of(ratio)
        # a first round may miss a tail
        if number and share >= _GOOD and _largest(ratio) <= _MOST_RATIO:
            return proposal
        if g > MOST_GLOBALS and share < _HOPELESS:
            return None
        every, value = np.concatenate(points), np.concatenate(values)
        proposed = scipy.special.logsumexp(
            [np.log(n) + mixture.log_density(every) for n, mixture in used], axis=0
        )
        weight = _flattened(np.where(np.isfinite(value), value - proposed, -np.inf), g)
        best, many = proposal, number >= _PLAIN_ROUNDS
        if g <= MOST_GLOBALS:
            core = many_parts(every, weight, rng) if many else learned(every, weight, core)
        elif 1.0 / (weight**2).sum() >= _MOMENTS_EACH * g:
            core = learned(every, weight, core)
    return best if share >= _LEAST else None


def share_of(log_ratio: Float[np.ndarray, " draw"]) -> float:
    """How many equal weights these are worth, as a share of their number."""
    if not np.isfinite(log_ratio).any():
        return 0.0
    weight = scipy.special.softmax(log_ratio)
    return float(1.0 / (weight**2).sum() / len(weight))


def _largest(log_ratio: Float[np.ndarray, " draw"]) -> float:
    """The largest weight over their mean: about as many steps a chain would stay there."""
    return float(scipy.special.softmax(log_ratio).max() * len(log_ratio))


def _flattened(log_ratio: Float[np.ndarray, " draw"], g: int) -> Float[np.ndarray, " draw"]:
    """Weights that sum to one, flattened by a power until they are worth enough points."""
    needed = min(_POINTS_EACH * (g + 1), len(log_ratio) // 4)
    finite = np.isfinite(log_ratio)
    power = 1.0
    while power > 1e-6 and share_of(power * log_ratio[finite]) * finite.sum() < needed:
        power *= 0.7
    return scipy.special.softmax(np.where(finite, power * log_ratio, -np.inf))


def learned(
    points: Float[np.ndarray, "point g"],
    weight: Float[np.ndarray, " point"],
    before: Mixture | None = None,
) -> Mixture | None:
    """A mixture with the moments of weighted points: of each part's share of them.

    Points belong to the parts of ``before`` as its densities there say (a step of population Monte
    Carlo, Cappe et al. 2008); without it there is one part. None where points span too little.
    """
    belongs = np.ones((1, len(points)))
    if before is not None:
        by_part = before.by_part(points)
        belongs = np.exp(by_part - scipy.special.logsumexp(by_part, axis=0))
    parts = [_moments(points, weight * share) for share in belongs]
    found = [part for part in parts if part is not None]
    if not found:
        return None
    centre, factor, size = (np.array(values) for values in zip(*found, strict=True))
    return Mixture(centre, factor, size / size.sum())


def _moments(
    points: Float[np.ndarray, "point g"], weight: Float[np.ndarray, " point"]
) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Mean, factor of the covariance, and total of weighted points; None where they are too few."""
    total, g = float(weight.sum()), points.shape[1]
    if total < _LEAST_PART or total**2 / (weight**2).sum() < g + 1:
        return None
    mean = weight @ points / total
    away = points - mean
    covariance = (weight[:, None] * away).T @ away / total
    covariance += 1e-6 * np.diag(np.diag(covariance)) + 1e-12 * np.eye(g)
    try:
        return mean, np.linalg.cholesky(covariance), total
    except np.linalg.LinAlgError:
        return None


def many_parts(
    points: Float[np.ndarray, "point g"],
    weight: Float[np.ndarray, " point"],
    rng: np.random.Generator,
) -> Mixture | None:
    """A mixture with parts around some of the weighted points."""
    one = learned(points, weight)
    if one is None:
        return None
    chosen = points[rng.choice(len(points), _PARTS, p=weight)]
    centre = np.concatenate([one.centre, chosen])
    factors = np.concatenate([one.factor, np.tile(_WIDTH * one.factor, (_PARTS, 1, 1))])
    share = np.full(_PARTS + 1, 0.8 / _PARTS)
    share[0] = 0.2
    return Mixture(centre, factors, share)
