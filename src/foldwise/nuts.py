"""NUTS with Stan's window adaptation, from BlackJAX.

Warm-up and sampling are one compiled program that runs the chains side by side on all cores, a
segment of iterations at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from foldwise.evaluate import gradients
from foldwise.model import Model
from foldwise.progress import Progress
from foldwise.runtime import compiled, lanes, precision_context

_SEGMENT = 100
# A dense mass matrix helps correlated parameters, but BlackJAX factorises it in every iteration,
# which costs more than it saves beyond a few parameters.
_DENSE_DIMENSION = 20


class _Chain(NamedTuple):
    """One NUTS chain and its adaptation."""

    key: UInt32[Any, " 2"]
    nuts: Any
    step_size: Any
    mass: Any


class _Schedule(NamedTuple):
    """What the iterations of one segment do."""

    slow: Bool[Any, " draw"]
    window_end: Bool[Any, " draw"]
    adapting: Bool[Any, " draw"]
    first: Int[Any, ""]
    draws: Int[Any, ""]


def draw_nuts(
    model: Model,
    chains: int,
    draws: int,
    warmup: int,
    seed: int,
    bar: Progress,
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Positions (chain, draw, d), step size by chain, divergences after warm-up, gradients."""
    from blackjax.adaptation.window_adaptation import build_schedule

    bar.start(f"compiling the full-data fit{model.label}")

    def segment(states: Any, schedule: Any) -> Any:
        return _nuts_segment(model, states, schedule)

    states = _first_states(model, -(-chains // lanes()) * lanes(), seed)
    table = np.zeros((warmup + draws, 2), int)
    table[:warmup] = np.asarray(build_schedule(warmup))
    program = compiled(model, segment, states, _schedule(table, 0, warmup))
    program.ready()

    bar.start(f"full-data fit{model.label}", warmup + draws)
    kept, divergences, spent = [], 0, 0
    for first in range(0, warmup + draws, _SEGMENT):
        states, positions, divergent, steps = program(states, _schedule(table, first, warmup))
        sampled = np.arange(first, min(first + _SEGMENT, warmup + draws)) >= warmup
        kept.append(positions[:chains, : len(sampled)][:, sampled])
        divergences += int(divergent[:chains, : len(sampled)][:, sampled].sum())
        spent += int(steps[:chains].sum())
        bar.advance(len(sampled))
    step_size = np.exp(states.step_size.log_step_size_avg[:chains])
    return np.concatenate(kept, axis=1), step_size, divergences, spent


def _schedule(table: np.ndarray, first: int, warmup: int) -> _Schedule:
    part = np.zeros((_SEGMENT, 2), int)
    rows = table[first : first + _SEGMENT]
    part[: len(rows)] = rows
    adapting = np.arange(first, first + _SEGMENT) < warmup
    numbers = np.int32(first), np.int32(len(rows))
    return _Schedule(part[:, 0] == 1, part[:, 1] == 1, adapting, *numbers)


def _adaptation(model: Model) -> tuple[Any, Any]:
    """Adaptation of the step size, and of a mass matrix that is dense in few dimensions."""
    from blackjax.adaptation.mass_matrix import mass_matrix_adaptation
    from blackjax.adaptation.step_size import dual_averaging_adaptation

    diagonal = model.dimension > _DENSE_DIMENSION
    return dual_averaging_adaptation(0.8), mass_matrix_adaptation(diagonal)


def _log_density(model: Model) -> Callable[[Array], Array]:
    return lambda q: model.flat_log_prior(q) + model.flat_log_likelihood(q).sum()


def _first_states(model: Model, chains: int, seed: int) -> _Chain:
    """Every chain at its start, from what is compiled already: JAX would compile for it."""
    from blackjax.mcmc.hmc import HMCState

    step, mass = _adaptation(model)
    words = [np.random.SeedSequence([seed, 7, k]).generate_state(4) for k in range(chains)]
    keys = np.stack(words).astype(np.uint32)
    with precision_context("float64"):
        starts = [model.initial(jax.random.wrap_key_data(key)) for key in keys[:, :2]]
        # BlackJAX starts from weakly typed numbers; a state that is saved and restored is not
        typed = jax.jit(
            lambda: jax.tree.map(jnp.asarray, (step[0](1.0), mass[0](model.dimension)))
        )()
    position = np.stack([np.asarray(start, float) for start in starts])
    here = gradients(model, position)
    adaptation = jax.tree.map(lambda a: np.stack([np.asarray(a)] * chains), typed)
    state = HMCState(position, here.log_density, here.gradient)
    return _Chain(keys[:, 2:], state, *adaptation)


def _nuts_segment(
    model: Model, chains: _Chain, schedule: _Schedule
) -> tuple[_Chain, Array, Array, Array]:
    """Run each chain of a lane in turn: NUTS in lock-step would wait for the longest tree."""
    from blackjax.mcmc import nuts

    kernel = nuts.build_kernel()
    density = _log_density(model)
    step, mass = _adaptation(model)

    def iterate(i: Array, carry: tuple[_Chain, Array, Array, Array]) -> tuple[Any, ...]:
        chain, positions, divergent, steps = carry
        now = jax.random.fold_in(jax.random.wrap_key_data(chain.key), schedule.first + i)
        adapting = schedule.adapting[i]
        log_step = jnp.where(
            adapting, chain.step_size.log_step_size, chain.step_size.log_step_size_avg
        )
        state, info = kernel(
            now, chain.nuts, density, jnp.exp(log_step), chain.mass.inverse_mass_matrix
        )
        adapted = _adapt_chain(chain, state, info, schedule, i, step, mass)
        chain = chain._replace(nuts=state, step_size=adapted[0], mass=adapted[1])
        positions = positions.at[i].set(state.position)
        divergent = divergent.at[i].set(info.is_divergent)
        return chain, positions, divergent, steps + info.num_integration_steps

    def run(chain: _Chain) -> tuple[Any, ...]:
        positions = jnp.zeros((_SEGMENT, model.dimension))
        divergent = jnp.zeros(_SEGMENT, bool)
        start = (chain, positions, divergent, jnp.int32(0))
        return jax.lax.fori_loop(0, schedule.draws, iterate, start)

    return jax.lax.map(run, chains)


def _adapt_chain(
    chain: _Chain, state: Any, info: Any, schedule: _Schedule, i: Array, step: Any, mass: Any
) -> tuple[Any, Any]:
    """Stan's windows: the step size always adapts, the mass matrix in slow windows."""

    def where(condition: Array, new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)

    new_step = where(
        schedule.adapting[i], step[1](chain.step_size, info.acceptance_rate), chain.step_size
    )
    new_mass = where(schedule.slow[i], mass[1](chain.mass, state.position), chain.mass)
    end = schedule.window_end[i]
    return where(end, step[0](step[2](new_step)), new_step), where(end, mass[2](new_mass), new_mass)
