"""Full-data draws from many short chains that are tuned together.

A small model is cross-validated in less time than NUTS takes to compile. So its full-data
posterior is first tried with HMC whose trajectories are the only compiled part: ``STARTS``
starting points far apart, ``COPIES`` chains from each, one metric and one step size for all of
them, learned from all of them. The chains of ``STARTS / GROUPS`` starts, one after another, count
as one long chain: starts that lead to different places are seen as chains that disagree, which is
the nested R-hat of Margossian et al. (2024). So do the first and the second half of their draws,
which differ while chains are still on their way. A place that few starts lead to is seen by the
R-hat of the chains themselves (``_disagreement``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from foldwise.models.evaluate import DENSE_MOTION, Ends, Motion, gradients, trajectories
from foldwise.models.model import Model
from foldwise.sampling.blocks import leapfrog_counts
from foldwise.sampling.kernel import LARGEST_STEP, TARGET_ACCEPTANCE
from foldwise.sampling.metric import shrunk_covariance
from foldwise.sampling.starts import lost_chains, starting_points
from foldwise.scores.diagnostics import by_parameter
from foldwise.support.progress import Progress
from foldwise.support.seeds import Stream, generator

STARTS, COPIES, GROUPS, DRAWS = 20, 5, 4, 40
# Iterations of which the last is a draw: they cost less than what folds do with one. Totals of
# wells, leave-one-out (bench/compare.py), have errors of 0.05; of 0.06 when every draw is kept.
THIN = 3
# Iterations after which the metric is learned anew, those of a second and third try, and those in
# which only the step size is tuned, before drawing.
WINDOWS, MORE_WINDOWS, LAST_WINDOW = (10, 10, 20, 30, 50), ((80,), (160,)), 30
# In the first windows the metric does not fit yet, and steps may be of any length.
_ROUGH_WINDOWS = 2
_MOST_STEPS, _LEAST_STEP = 50, 1e-8
# An energy error beyond this is a divergence, as in Stan and BlackJAX, which do the next tries.
_DIVERGENCE = 1000.0
# Far beyond this 100 chains cost more than compiling NUTS.
MOST_ROWS = 5000
# R-hat over the chains themselves, DRAWS draws each, from which on they are in different places:
# where one draw in ten counts, as few as a settled fit may have, it is sqrt(1 + 10 / DRAWS) = 1.12.
_APART = 1.2


@dataclass(frozen=True, eq=False)
class Draws:
    """A try at the full-data posterior.

    ``thin``: of how many draws one was kept. ``piece``: draws of each short chain. ``apart``:
    whether chains are in different places, and ``ends`` where each was in its last draws.
    ``sampled``: the parameters that the chains are of, None for all. Others were drawn anew, given
    these, at every draw: they cannot be slower, and have no R-hat and ESS of their own.
    """

    positions: Float[np.ndarray, "chain draw d"]
    step_size: Float[np.ndarray, " chain"]
    divergences: int
    gradients: int
    thin: int = 1
    piece: int = 0
    apart: bool = False
    ends: Float[np.ndarray, "chain draw d"] = field(default_factory=lambda: np.zeros((0, 0, 0)))
    sampled: Int[np.ndarray, " sampled"] | None = None

    @cached_property
    def rhat(self) -> Float[np.ndarray, " sampled"]:
        """Rank-normalised split R-hat of each parameter that was sampled (arviz-stats)."""
        return by_parameter("rhat", chosen(self.positions, self.sampled))

    @cached_property
    def ess(self) -> Float[np.ndarray, " sampled"]:
        """Bulk effective sample size of each parameter that was sampled (arviz-stats)."""
        return by_parameter("ess", chosen(self.positions, self.sampled))


def chosen(
    positions: Float[np.ndarray, "chain draw d"], sampled: Int[np.ndarray, " sampled"] | None
) -> Float[np.ndarray, "chain draw sampled"]:
    """The parameters that chains are of."""
    return positions if sampled is None else positions[..., sampled]


def suits(model: Model) -> bool:
    """Whether the model is small enough for this to be quicker than NUTS."""
    return model.dimension <= DENSE_MOTION and model.n_obs <= MOST_ROWS


def draw_pooled(model: Model, seed: int, bar: Progress) -> Iterator[Draws]:
    """Tries, each after a longer warm-up."""
    starts, spent = starting_points(model, STARTS, seed)
    chains = Chains(model, np.repeat(starts, COPIES, axis=0), generator(seed, Stream.SHORT_CHAINS))
    chains.gradients += spent
    for windows in (WINDOWS, *MORE_WINDOWS):
        bar.start(f"full-data fit{model.label}", sum(windows) + LAST_WINDOW + THIN * DRAWS)
        for number, window in enumerate(windows):
            rough = windows is WINDOWS and number < _ROUGH_WINDOWS
            chains.tune(window, rough)
            if not rough:
                chains.bring_back()
            chains.learn()
            bar.advance(window)
        chains.tune(LAST_WINDOW)
        visited, divergences = chains.draw(DRAWS, THIN)
        bar.advance(LAST_WINDOW + THIN * DRAWS)
        positions = _long_chains(visited)
        steps = np.full(len(positions), chains.step)
        apart = _disagreement(visited) > _APART
        ends = visited.transpose(1, 0, 2)
        yield Draws(positions, steps, divergences, chains.gradients, THIN, DRAWS, apart, ends)


def _long_chains(visited: Float[np.ndarray, "draw chain d"]) -> Float[np.ndarray, "long draw d"]:
    """The first halves of the chains of a group of starts as one long chain, the second another."""
    draws, chains, d = visited.shape
    shape = (2, draws // 2, GROUPS, chains // GROUPS, d)
    long = visited.reshape(shape).transpose(2, 0, 3, 1, 4)
    return long.reshape(2 * GROUPS, chains // GROUPS * draws // 2, d)


def _disagreement(visited: Float[np.ndarray, "draw chain d"]) -> float:
    """Largest R-hat of any parameter over all chains, sqrt(1 + B / W).

    Of the values themselves, not of ranks: the few chains that are in another mode may be far.
    """
    within = visited.var(axis=0, ddof=1).mean(axis=0)
    between = visited.mean(axis=0).var(axis=0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.sqrt(1.0 + np.max(between / within)))


class Chains:
    """HMC chains side by side, and what they have learned."""

    def __init__(
        self,
        model: Model,
        position: Float[np.ndarray, "chain d"],
        rng: np.random.Generator,
        covariance: Float[np.ndarray, "d d"] | Float[np.ndarray, " d"] | None = None,
    ):
        self.model, self.rng, self.position = model, rng, position
        self.train = np.ones((len(position), model.n_obs), bool)
        here = gradients(model, position, self.train)
        self.log_density, self.gradient = here.log_density, here.gradient
        self.use(np.eye(model.dimension) if covariance is None else covariance)
        self.visited, self.densities = [position], [here.log_density]
        self.step, self.done, self.gradients = 1.0, 0, 0

    def use(self, covariance: Float[np.ndarray, "d d"] | Float[np.ndarray, " d"]) -> None:
        """Take ``covariance``, or its diagonal in many dimensions, as the metric."""
        if self.model.dimension > DENSE_MOTION:
            self.covariance = covariance if covariance.ndim == 1 else np.diag(covariance).copy()
            self.factor = self.covariance**-0.5
        else:
            self.covariance = covariance
            self.factor = np.linalg.cholesky(np.linalg.inv(covariance))

    def tune(self, window: int, rough: bool = False) -> None:
        """Run for ``window`` iterations and adapt the step size.

        Robbins and Monro's recursion on the log of the step, log step += (a - 0.8) / sqrt(t) for
        a the mean acceptance of iteration t; the mean over the second half is what remains.
        """
        most, steps = np.inf if rough else LARGEST_STEP, []
        self.step, self.visited, self.densities = self._first_step(most), [], []
        for t in range(1, window + 1):
            acceptance, _ = self._iterate()
            if t > window // 2:
                self.visited.append(self.position)
                self.densities.append(self.log_density)
                steps.append(self.step)
            change = np.exp((acceptance - TARGET_ACCEPTANCE) / np.sqrt(t))
            self.step = float(np.clip(self.step * change, _LEAST_STEP, most))
        self.step = float(np.exp(np.mean(np.log(steps))))

    def learn(self) -> None:
        """Take the covariance of the positions in the second half of the last window as metric."""
        visited = np.concatenate(self.visited)
        if np.ptp(visited, axis=0).min() == 0.0:
            return  # stuck: nothing to learn from
        self.use(shrunk_covariance(visited, len(self.position)))

    def bring_back(self) -> None:
        """Take chains that are lost to where others are."""
        visited, densities = np.stack(self.visited, axis=1), np.stack(self.densities, axis=1)
        lost = lost_chains(visited, densities)
        if not lost.any():
            return
        other = np.arange(len(lost))
        other[lost] = self.rng.choice(np.flatnonzero(~lost), lost.sum())
        self.position, self.gradient = self.position[other], self.gradient[other]
        self.log_density = self.log_density[other]
        self.visited = [position[other] for position in self.visited]

    def draw(self, count: int, thin: int = 1) -> tuple[Float[np.ndarray, "draw chain d"], int]:
        """Every ``thin``-th draw with what has been learned, and how many transitions diverged."""
        divergences, found = 0, []
        for _ in range(count):
            divergences += sum(self._iterate()[1] for _ in range(thin))
            found.append(self.position)
        return np.stack(found), divergences

    def _first_step(self, most: float) -> float:
        """Where one step is accepted as often as it should be, to a factor of two."""
        step, factor = 1.0, 0.0
        while _LEAST_STEP < step < 1.0 / _LEAST_STEP:
            _, error = self._propose(step, 1)
            better = 2.0 if np.exp(np.minimum(error, 0.0)).mean() > TARGET_ACCEPTANCE else 0.5
            if better * factor == 1.0 or step * better > most:
                break
            step, factor = step * better, better
        return step

    def _iterate(self) -> tuple[float, int]:
        """One HMC iteration of every chain: mean acceptance, number of divergences."""
        n_steps = min(int(leapfrog_counts(self.step, self.done, 1)[0]), _MOST_STEPS)
        ends, error = self._propose(self.step, n_steps)
        accepted = np.log(self.rng.uniform(size=len(error))) < error
        self.position = np.where(accepted[:, None], ends.position, self.position)
        self.gradient = np.where(accepted[:, None], ends.gradient, self.gradient)
        self.log_density = np.where(accepted, ends.log_density, self.log_density)
        self.done += 1
        divergences = int((error < -_DIVERGENCE).sum())
        return float(np.exp(np.minimum(error, 0.0)).mean()), divergences

    def _propose(self, step: float, n_steps: int) -> tuple[Ends, Float[np.ndarray, " chain"]]:
        """Ends of a trajectory from every chain's position, and the energy it gained or lost."""
        noise = self.rng.normal(size=self.position.shape)
        start = noise @ self.factor.T if self.factor.ndim == 2 else noise * self.factor
        motion = Motion(np.float64(step), np.int32(n_steps), self.covariance)
        ends = trajectories(self.model, self.position, start, self.gradient, self.train, motion)
        self.gradients += n_steps * len(start)
        with np.errstate(invalid="ignore", over="ignore"):
            change = ends.log_density - self.log_density
            error = change - self._kinetic(ends.momentum) + self._kinetic(start)
        return ends, np.where(np.isnan(error), -np.inf, error)

    def _kinetic(self, p: Float[np.ndarray, "chain d"]) -> Float[np.ndarray, " chain"]:
        dense = self.covariance.ndim == 2
        return 0.5 * np.sum(p * (p @ self.covariance if dense else p * self.covariance), axis=1)
