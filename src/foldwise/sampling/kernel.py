"""The batched HMC step: the chains of several folds in lock-step. The hot loop is here.

Axis order is fold, chain, parameter. The chains of a model take the same number of leapfrog steps,
so that no lane idles. The number changes from iteration to iteration, so that no orbit is periodic;
it is not random but a fixed sequence (``leapfrog_counts`` in blocks.py). Step sizes and metrics
belong to the fold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from foldwise.sampling.metric import Metric, momentum, noise_size, velocity
from foldwise.support.noise import log_uniforms, normals, random_words, uniforms
from foldwise.support.verlet import leapfrog

TARGET_ACCEPTANCE = 0.8
# An energy error of this many nats is a divergence. Where steps fit the posterior there are none:
# at an acceptance of 0.8, errors are normal with a sd of about 0.7. Where there are, the posterior
# is too narrow for the steps and chains stay away, which biases them long before trajectories run
# away altogether (1,000 nats, which Stan counts).
DIVERGENCE_THRESHOLD = 10.0
# Where the metric fits, motion has period 2 pi. In few dimensions acceptance alone would let steps
# grow to the edge of stability (2), where they jump back and forth.
LARGEST_STEP = 1.0
# Dual averaging (Hoffman and Gelman 2014, section 3.2), with Stan's constants.
_GAMMA, _T0, _KAPPA = 0.05, 10.0, 0.75


class StepSize(NamedTuple):
    """Dual averaging of a fold's log step size, shrunk towards ``centre``."""

    log_step: Float[Any, " fold"]
    log_step_average: Float[Any, " fold"]
    error: Float[Any, " fold"]
    centre: Float[Any, " fold"]


class ChainState(NamedTuple):
    """What the next iteration of the chains of some folds needs."""

    position: Float[Any, "fold chain d"]
    log_density: Float[Any, "fold chain"]
    gradient: Float[Any, "fold chain d"]
    scores: Float[Any, "fold chain ..."]
    step_size: StepSize


class Moment(NamedTuple):
    """Where in warm-up an iteration is.

    ``adapted`` iterations have tuned the step size so far, towards the acceptance ``target``;
    ``adapting``: this one does too. With ``refresh`` no chain moves.
    """

    adapted: Int[Any, ""]
    adapting: Bool[Any, ""]
    target: Float[Any, " fold"]
    refresh: Bool[Any, ""]


class StepInfo(NamedTuple):
    """What diagnostics want from one iteration."""

    acceptance: Float[Any, "fold chain"]
    divergent: Bool[Any, "fold chain"]
    moved: Bool[Any, "fold chain"]


# density(position) -> log density, its gradient, and the scores of the test rows
Density = Callable[[Float[Array, "fold chain d"]], tuple[Array, Array, Array]]


def hmc_step(
    state: ChainState,
    keys: UInt32[Array, "fold chain 2"],
    counter: Int[Array, " fold"],
    n_steps: Int[Array, " fold"],
    moment: Moment,
    density: Density,
    metric: Metric,
) -> tuple[ChainState, StepInfo]:
    """One HMC iteration of every chain.

    Randomness derives from the chain's key and ``counter``, the number of the iteration in the
    life of the fold, so a chain does not depend on which others run beside it. With ``refresh`` no
    chain moves: one step of length zero, always accepted, recomputes the density at the present
    position, so that a program needs the compiled density only once and a saved state is no more
    than positions and step sizes.
    """
    adapted, adapting, target, refresh = moment
    noise, log_uniform = _randomness(keys, counter, noise_size(metric))
    log_step = jnp.where(adapting, state.step_size.log_step, state.step_size.log_step_average)
    step = jnp.where(refresh, 0.0, jnp.exp(log_step))

    start = momentum(metric, noise)
    end, position, log_density, gradient, scores = leapfrog(
        (start, state.position, state.log_density, state.gradient, state.scores),
        step,
        jnp.where(refresh, 1, n_steps),
        density,
        lambda p: velocity(metric, p),
    )
    energy_error = log_density - _kinetic(metric, end) - state.log_density + _kinetic(metric, start)
    energy_error = jnp.where(jnp.isnan(energy_error), -jnp.inf, energy_error)
    accepted = (log_uniform < energy_error) | refresh
    acceptance = jnp.exp(jnp.minimum(energy_error, 0.0))

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(accepted.reshape(accepted.shape + (1,) * (new.ndim - 2)), new, old)

    step_size = _adapt(state.step_size, acceptance.mean(axis=1), adapted, target)
    step_size = jax.tree.map(
        lambda new, old: jnp.where(adapting & ~refresh, new, old), step_size, state.step_size
    )
    moved = ChainState(
        choose(position, state.position),
        choose(log_density, state.log_density),
        choose(gradient, state.gradient),
        choose(scores, state.scores),
        step_size,
    )
    return moved, StepInfo(acceptance, energy_error < -DIVERGENCE_THRESHOLD, accepted)


def _randomness(
    keys: UInt32[Array, "fold chain 2"], counter: Int[Array, " fold"], size: int
) -> tuple[Float[Array, "fold chain size"], Float[Array, "fold chain"]]:
    """Standard normal noise and the log of a uniform number for each chain.

    They belong to the chain's key and the iteration.
    """

    def of_chain(key: Array, number: Array) -> Array:
        return random_words(key, number, size + 1)

    uniform = uniforms(jax.vmap(jax.vmap(of_chain, in_axes=(0, None)))(keys, counter))
    return normals(uniform[..., :-1]), log_uniforms(uniform[..., -1])


def _kinetic(metric: Metric, p: Array) -> Array:
    return 0.5 * jnp.sum(p * velocity(metric, p), axis=-1)


def _adapt(state: StepSize, acceptance: Array, adapted: Array, target: Array) -> StepSize:
    """Dual averaging of the log step size, towards the acceptance ``target``."""
    t = adapted.astype(acceptance.dtype) + 1.0
    error = state.error + (target - acceptance - state.error) / (t + _T0)
    log_step = jnp.minimum(state.centre - jnp.sqrt(t) / _GAMMA * error, jnp.log(LARGEST_STEP))
    weight = t**-_KAPPA
    average = weight * log_step + (1.0 - weight) * state.log_step_average
    return StepSize(log_step, average, error, state.centre)
