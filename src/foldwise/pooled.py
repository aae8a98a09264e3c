"""Full-data draws from many short chains that are tuned together.

A small model is cross-validated in less time than NUTS takes to compile. So its full-data
posterior is first tried with HMC whose trajectories are the only compiled part: ``STARTS``
starting points, ``COPIES`` chains from each, one metric and one step size for all of them, learned
from all of them. The chains from one start, one after another, count as one long chain: starts
that lead to different places are seen as chains that disagree, which is the nested R-hat of
Margossian et al. (2024). So do the first and the second half of their draws, which differ while
chains are still on their way.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Float

from foldwise.evaluate import Ends, Motion, gradients, trajectories
from foldwise.kernel import DIVERGENCE_THRESHOLD, LARGEST_STEP, TARGET_ACCEPTANCE
from foldwise.metric import FOLD_METRIC_DIMENSION, shrunk_covariance
from foldwise.model import Model
from foldwise.progress import Progress
from foldwise.runtime import precision_context
from foldwise.sampler import leapfrog_counts

STARTS, COPIES, DRAWS = 4, 25, 40
# Iterations after which the metric is learned anew, those of a second and third try, and those in
# which only the step size is tuned, before drawing.
WINDOWS, MORE_WINDOWS, LAST_WINDOW = (10, 10, 20, 30, 50), ((80,), (160,)), 30
# In the first windows the metric does not fit yet, and steps may be of any length.
_ROUGH_WINDOWS = 2
_MOST_STEPS, _LEAST_STEP = 50, 1e-8
# Far beyond this 100 chains cost more than compiling NUTS.
_MOST_ROWS = 5000

Draws = tuple[Float[np.ndarray, "chain draw d"], Float[np.ndarray, " chain"], int, int]


def suits(model: Model) -> bool:
    """Whether the model is small enough for this to be quicker than NUTS."""
    return model.dimension <= FOLD_METRIC_DIMENSION and model.n_obs <= _MOST_ROWS


def draw_pooled(model: Model, seed: int, bar: Progress) -> Iterator[Draws]:
    """Tries, each after a longer warm-up: positions, step size by chain, divergences, gradients."""
    chains = _Chains(model, seed)
    for windows in (WINDOWS, *MORE_WINDOWS):
        bar.start(f"full-data fit{model.label}", sum(windows) + LAST_WINDOW + DRAWS)
        for number, window in enumerate(windows):
            chains.tune(window, rough=windows is WINDOWS and number < _ROUGH_WINDOWS)
            chains.learn()
            bar.advance(window)
        chains.tune(LAST_WINDOW)
        positions, divergences = chains.draw()
        bar.advance(LAST_WINDOW + DRAWS)
        yield positions, np.full(len(positions), chains.step), divergences, chains.gradients


class _Chains:
    """All chains, side by side, and what they have learned."""

    def __init__(self, model: Model, seed: int):
        self.model, self.rng = model, np.random.default_rng([seed, 8])
        with precision_context("float64"):
            keys = [jax.random.wrap_key_data(key) for key in _keys(seed)]
            starts = np.stack([np.asarray(model.initial(key), float) for key in keys])
        self.position = np.repeat(starts, COPIES, axis=0)
        self.train = np.ones((len(self.position), model.n_obs), bool)
        here = gradients(model, self.position, self.train)
        self.log_density, self.gradient = here.log_density, here.gradient
        self.covariance = self.factor = np.eye(model.dimension)
        self.visited = [self.position]
        self.step, self.done, self.gradients = 1.0, 0, 0

    def tune(self, window: int, rough: bool = False) -> None:
        """Run for ``window`` iterations and adapt the step size.

        Robbins and Monro's recursion on the log of the step, log step += (a - 0.8) / sqrt(t) for
        a the mean acceptance of iteration t; the mean over the second half is what remains.
        """
        most, steps = np.inf if rough else LARGEST_STEP, []
        self.step, self.visited = self._first_step(most), []
        for t in range(1, window + 1):
            acceptance, _ = self._iterate()
            if t > window // 2:
                self.visited.append(self.position)
                steps.append(self.step)
            change = np.exp((acceptance - TARGET_ACCEPTANCE) / np.sqrt(t))
            self.step = float(np.clip(self.step * change, _LEAST_STEP, most))
        self.step = float(np.exp(np.mean(np.log(steps))))

    def learn(self) -> None:
        """Take the covariance of the positions in the second half of the last window as metric."""
        visited = np.concatenate(self.visited)
        if np.ptp(visited, axis=0).min() == 0.0:
            return  # stuck: nothing to learn from
        self.covariance = shrunk_covariance(visited, len(self.position))
        self.factor = np.linalg.cholesky(np.linalg.inv(self.covariance))

    def draw(self) -> tuple[Float[np.ndarray, "chain draw d"], int]:
        """Draws with what has been learned, and how many transitions diverged.

        The first halves of the chains from one start make one long chain, the second another.
        """
        divergences, found = 0, []
        for _ in range(DRAWS):
            divergences += self._iterate()[1]
            found.append(self.position)
        shape = (2, DRAWS // 2, STARTS, COPIES, self.position.shape[1])
        long = np.stack(found).reshape(shape).transpose(2, 0, 3, 1, 4)
        return long.reshape(2 * STARTS, COPIES * DRAWS // 2, shape[-1]), divergences

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
        divergences = int((error < -DIVERGENCE_THRESHOLD).sum())
        return float(np.exp(np.minimum(error, 0.0)).mean()), divergences

    def _propose(self, step: float, n_steps: int) -> tuple[Ends, Float[np.ndarray, " chain"]]:
        """Ends of a trajectory from every chain's position, and the energy it gained or lost."""
        start = self.rng.normal(size=self.position.shape) @ self.factor.T
        motion = Motion(np.float64(step), np.int32(n_steps), self.covariance)
        ends = trajectories(self.model, self.position, start, self.gradient, self.train, motion)
        self.gradients += n_steps * len(start)
        with np.errstate(invalid="ignore", over="ignore"):
            change = ends.log_density - self.log_density
            error = change - self._kinetic(ends.momentum) + self._kinetic(start)
        return ends, np.where(np.isnan(error), -np.inf, error)

    def _kinetic(self, p: Float[np.ndarray, "chain d"]) -> Float[np.ndarray, " chain"]:
        return 0.5 * np.sum(p * (p @ self.covariance), axis=1)


def _keys(seed: int) -> np.ndarray:
    words = [np.random.SeedSequence([seed, 7, k]).generate_state(2) for k in range(STARTS)]
    return np.stack(words).astype(np.uint32)
