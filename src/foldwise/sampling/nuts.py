"""NUTS with Stan's window adaptation, from BlackJAX.

Warm-up and sampling are one compiled program that runs the chains side by side on all cores, a
segment of iterations at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from foldwise.models.evaluate import gradients, masked_log_density
from foldwise.models.model import Model
from foldwise.sampling.metric import DENSE_DIMENSION, correlated, gradient_metric
from foldwise.scores.diagnostics import rhat
from foldwise.support.progress import Progress
from foldwise.support.runtime import compiled, lanes, precision_context
from foldwise.support.seeds import Stream, words

_SEGMENT = 100
_NO_DRAWS = np.zeros((0, 2), int)
# A dense mass matrix helps correlated parameters, but BlackJAX factorises it in every iteration,
# which costs more than it saves beyond a few parameters.
DENSE_WINDOWS = 20
# Doublings of NUTS's deepest tree, and those of so many iterations before anything is known of a
# metric of many parameters, where steps are short: 31 leapfrog steps reach as far as need
# be.
_DOUBLINGS, _EARLY_DOUBLINGS, _EARLY = 10, 5, 100
# Iterations of warm-up after which correlations are looked for, in more than DENSE_WINDOWS
# parameters, and by how much they must stretch the posterior for chains to go on in coordinates
# without them: less would not make up for compiling that.
_LOOKS, _CORRELATED = (50, 100, 200, 400), 4.0
# An energy error that counts as a divergence, as in Stan.
_DIVERGENCE = 1000
# Iterations in which the step size alone is tuned: once coordinates have been changed, and after
# the last window, as in Stan.
_RETUNE, _LAST = 150, 50
# Of a warm-up of 1,000, the window after which it may be over, and R-hat up to which chains agree
# about it. The next and last window would have 500 iterations. Who asks for more gets more.
_USUAL, _LATE_WINDOW, _AGREE = 1000, (250, 450), 1.1
# By how much the acceptance to which step sizes adapt is over 0.8: at first, in coordinates without
# correlations, and where transitions diverge. Correlations are those of the posterior's middle: in
# its tails they are others, and steps that are long in the middle do not get there or stay for
# long, as in the tail of the groups' scale in FarScale(6, spare=14) of tests/problems.py.
_CAUTION = (0.0, 0.15, 0.19)
_CAREFUL = 1


class _Chain(NamedTuple):
    """One NUTS chain and its adaptation."""

    key: UInt32[Any, " 2"]
    nuts: Any
    step_size: Any
    mass: Any


class _Schedule(NamedTuple):
    """What the iterations of one segment do.

    ``caution`` is what acceptance must have beyond 0.8, ``doublings`` how often trees may double.
    ``root`` is empty, or a matrix: chains then move in coordinates z, the position is root z.
    """

    slow: Bool[Any, " draw"]
    window_end: Bool[Any, " draw"]
    adapting: Bool[Any, " draw"]
    first: Int[Any, ""]
    draws: Int[Any, ""]
    caution: Float[Any, ""]
    doublings: Int[Any, ""]
    root: tuple[Float[Any, "d d"], ...]


class _Transition(NamedTuple):
    """Mean acceptance over a trajectory, whether it diverged, and its leapfrog steps."""

    acceptance: Float[Any, ""]
    divergent: Bool[Any, ""]
    steps: Int[Any, ""]


class Nuts:
    """NUTS chains of the full-data posterior that can be taken further.

    ``positions`` and ``divergent`` hold all draws after the first warm-up, ``gradients`` counts
    what everything took.
    """

    def __init__(
        self,
        model: Model,
        seed: int,
        starts: Float[np.ndarray, "chain d"],
        bar: Progress,
    ):
        self.model, self.chains, self.bar = model, len(starts), bar
        copies = np.resize(np.arange(self.chains), -(-self.chains // lanes()) * lanes())
        self._states = _first_states(model, starts[copies], seed)
        self._root: tuple[np.ndarray, ...] = ()
        self.caution = 0
        self._done = self.gradients = 0
        self.positions = np.zeros((self.chains, 0, model.dimension))
        self.divergent = np.zeros((self.chains, 0), bool)

    def warm_up(self, iterations: int) -> None:
        """Stan's windows; fewer iterations where the step size collapses, which is hopeless.

        Where correlations are seen, chains go on in coordinates without them. These are learned
        anew at every look in the place of windows, and soon known. Else, of many parameters, whose
        variances alone are learned, the last window of a usual warm-up is left out where chains
        agree in the one before it and nothing diverges at its end.
        """
        from blackjax.adaptation.window_adaptation import build_schedule

        title = f"warm-up of the full-data fit{self.model.label}"
        self._compile()
        self.bar.start(title, iterations)
        table = np.array(build_schedule(iterations))
        many = self.model.dimension > DENSE_WINDOWS and iterations >= 2 * _LOOKS[-1]
        looks = _LOOKS if many and self._looks else ()
        late = tuple(np.flatnonzero(table[:, 1])[-3:-1] + 1) == _LATE_WINDOW
        pauses = (*looks, *(_LATE_WINDOW if many and late and iterations <= _USUAL else ()))
        first, found = 0, []
        while first < iterations and not (first > iterations // 2 and self.collapsed):
            stop = min(first + _SEGMENT, iterations, *(k for k in pauses if k > first))
            doublings = _EARLY_DOUBLINGS if many and stop <= _EARLY else _DOUBLINGS
            found.append(self._run(table[first:stop], True, doublings))
            first = stop
            if first in pauses and (end := self._end_of_windows(found, looks)):
                table[first:] = 0
                iterations = min(iterations, end)
                self.bar.start(title, iterations - first)

    def _end_of_windows(
        self, found: list[tuple[np.ndarray, np.ndarray]], looks: tuple[int, ...]
    ) -> int:
        """How many iterations warm-up shall have, if only the step size is tuned from here on.

        Else 0. ``found`` are positions of all iterations so far and which of them diverged.
        """
        positions, divergent = (np.concatenate(part, axis=1) for part in zip(*found, strict=True))
        here = positions.shape[1]
        if here in looks:
            before = max((k for k in looks if k < here), default=0)
            return _LOOKS[-1] + _RETUNE if self._uncorrelate(positions[:, before:]) else 0
        window = slice(*_LATE_WINDOW)
        # steps are too long at the beginning of a window, where their size is sought anew
        if here != window.stop or self._root or divergent[:, sum(_LATE_WINDOW) // 2 :].any():
            return 0
        late = positions[:, window]
        agree = rhat(late.sum(axis=1).T, (late**2).sum(axis=1).T, late.shape[1]) <= _AGREE
        return here + _LAST if agree.all() else 0

    def draw(self, count: int) -> None:
        """``count`` more draws of every chain."""
        self._compile()
        self.bar.start(f"full-data fit{self.model.label}", count)
        found = [
            self._run(np.zeros((min(_SEGMENT, count - first), 2), int), adapting=False)
            for first in range(0, count, _SEGMENT)
        ]
        positions, divergent = (np.concatenate(part, axis=1) for part in zip(*found, strict=True))
        self.positions = np.concatenate([self.positions, positions], axis=1)
        self.divergent = np.concatenate([self.divergent, divergent], axis=1)

    def retune(
        self,
        covariance: Float[np.ndarray, "d d"] | None,
        starts: Float[np.ndarray, "chain d"],
        caution: int,
    ) -> None:
        """Go on from ``starts`` in coordinates in which ``covariance`` is the identity.

        A matrix of all correlations, where Stan's windows learn variances only; BlackJAX would
        factorise it in every iteration. None: the metric remains. ``caution`` counts how many times
        the steps are to be finer than at first.
        """
        if covariance is not None:
            self._move_to(covariance, starts)
        else:
            copies = np.resize(np.arange(self.chains), len(self._states.key))
            fresh = _first_states(self.model, starts[copies], 0, self._root)
            self._states = self._states._replace(nuts=fresh.nuts)
            if caution == self.caution:
                return
            self._states = self._states._replace(step_size=fresh.step_size)
        self.caution = min(max(caution, self.caution), len(_CAUTION) - 1)
        self._compile()
        self.bar.start(f"tuning the full-data fit{self.model.label} anew", _RETUNE)
        for first in range(0, _RETUNE, _SEGMENT):
            part = min(_SEGMENT, _RETUNE - first)
            self._run(np.zeros((part, 2), int), adapting=True)

    @property
    def _looks(self) -> bool:
        """Whether correlations are looked for: windows do it for few, none could for many."""
        return DENSE_WINDOWS < self.model.dimension <= DENSE_DIMENSION

    def _uncorrelate(self, positions: Float[np.ndarray, "chain draw d"]) -> bool:
        """Go on in coordinates without correlations, where that is worth it.

        They are those of the second half of the draws since the last look, of all chains.
        """
        flat = positions[:, positions.shape[1] // 2 :].reshape(-1, self.model.dimension)
        here = gradients(self.model, flat)
        self.gradients += len(flat)
        fine = np.isfinite(here.log_density) & np.isfinite(here.gradient).all(axis=1)
        if fine.sum() <= len(flat) // 2:
            return False
        covariance = gradient_metric(flat[fine], here.gradient[fine])
        if not self._root and correlated(covariance) < _CORRELATED:
            return False
        first = not self._root
        self._move_to(covariance, positions[:, -1])
        if first:
            self._compile()
        return True

    def _move_to(
        self, covariance: Float[np.ndarray, "d d"], starts: Float[np.ndarray, "chain d"]
    ) -> None:
        """Take chains to ``starts``, in coordinates in which ``covariance`` is the identity."""
        self._root = (np.linalg.cholesky(covariance),)
        self.caution = max(self.caution, _CAREFUL)
        copies = np.resize(np.arange(self.chains), len(self._states.key))
        fresh = _first_states(self.model, starts[copies], 0, self._root)
        self._states = fresh._replace(key=self._states.key)

    @property
    def drawn(self) -> int:
        """Draws of each chain so far."""
        return self.positions.shape[1]

    @property
    def step_size(self) -> Float[np.ndarray, " chain"]:
        """Step size of each chain."""
        return np.exp(self._states.step_size.log_step_size_avg[: self.chains])

    @property
    def uncorrelated(self) -> bool:
        """Whether chains are in coordinates without correlations."""
        return bool(self._root)

    @property
    def finest(self) -> bool:
        """Whether steps are as fine as they get."""
        return self.caution == len(_CAUTION) - 1

    @property
    def collapsed(self) -> bool:
        """Whether the deepest tree of the median chain spans less than a posterior sd."""
        return bool(np.median(self.step_size) * (2**_DOUBLINGS - 1) < 1.0)

    def _compile(self) -> None:
        self.bar.start(f"compiling the full-data fit{self.model.label}")
        _program(self.model, self._states, _schedule(root=self._root)).ready()

    def _run(
        self, table: np.ndarray, adapting: bool, doublings: int = _DOUBLINGS
    ) -> tuple[np.ndarray, np.ndarray]:
        """One segment: positions and which transitions diverged."""
        given = self._done, _CAUTION[self.caution], doublings, self._root
        schedule = _schedule(table, adapting, *given)
        program = _program(self.model, self._states, schedule)
        self._states, positions, divergent, steps = program(self._states, schedule)
        self._done += len(table)
        self.gradients += int(steps[: self.chains].sum())
        self.bar.advance(len(table))
        return positions[: self.chains, : len(table)], divergent[: self.chains, : len(table)]


def begin_to_compile(model: Model, chains: int) -> None:
    """Let the program of so many chains compile meanwhile."""
    from blackjax.mcmc.hmc import HMCState

    count = -(-chains // lanes()) * lanes()
    nothing = np.zeros((count, model.dimension))
    _program(model, _begun(model, HMCState(nothing, np.zeros(count), nothing), 0), _schedule())


def _program(model: Model, states: _Chain, schedule: _Schedule) -> Any:
    def segment(states: Any, schedule: Any) -> Any:
        return _nuts_segment(model, states, schedule)

    return compiled(model, "nuts", segment, states, schedule)


def _schedule(
    table: Int[np.ndarray, "draw 2"] = _NO_DRAWS,
    adapting: bool = False,
    first: int = 0,
    caution: float = 0.0,
    doublings: int = _DOUBLINGS,
    root: tuple[Float[np.ndarray, "d d"], ...] = (),
) -> _Schedule:
    """The schedule of a segment, from the part of BlackJAX's table that is of its iterations."""
    part = np.zeros((_SEGMENT, 2), int)
    part[: len(table)] = table
    numbers = np.int32(first), np.int32(len(table)), np.float64(caution), np.int32(doublings)
    every = np.full(_SEGMENT, adapting)
    return _Schedule(part[:, 0] == 1, part[:, 1] == 1, every, *numbers, root)


def _adaptation(model: Model) -> tuple[Any, Any]:
    """Adaptation of the step size, and of a mass matrix that is dense in few dimensions."""
    from blackjax.adaptation.mass_matrix import mass_matrix_adaptation
    from blackjax.adaptation.step_size import dual_averaging_adaptation

    diagonal = model.dimension > DENSE_WINDOWS
    return dual_averaging_adaptation(0.8), mass_matrix_adaptation(diagonal)


def _first_states(
    model: Model,
    position: Float[np.ndarray, "chain d"],
    seed: int,
    root: tuple[Float[np.ndarray, "d d"], ...] = (),
) -> _Chain:
    """Every chain at its start."""
    from blackjax.mcmc.hmc import HMCState

    here = gradients(model, position)
    gradient = here.gradient
    if root:
        position, gradient = np.linalg.solve(root[0], position.T).T, gradient @ root[0]
    return _begun(model, HMCState(position, here.log_density, gradient), seed)


def _begun(model: Model, state: Any, seed: int) -> _Chain:
    """Chains that have a state and nothing else; what is compiled for it is no more than this."""
    step, mass = _adaptation(model)
    chains = len(state.position)
    moves = [words(seed, Stream.FIT_CHAINS, k, count=4)[2:] for k in range(chains)]
    keys = np.stack(moves).astype(np.uint32)
    with precision_context("float64"):
        # BlackJAX starts from weakly typed numbers; a state that is saved and restored is not
        typed = jax.jit(
            lambda: jax.tree.map(jnp.asarray, (step[0](1.0), mass[0](model.dimension)))
        )()
    adaptation = jax.tree.map(lambda a: np.stack([np.asarray(a)] * chains), typed)
    return _Chain(keys, state, *adaptation)


def _nuts_segment(
    model: Model, chains: _Chain, schedule: _Schedule
) -> tuple[_Chain, Array, Array, Array]:
    """Run each chain of a lane in turn: NUTS in lock-step would wait for the longest tree."""
    step, mass = _adaptation(model)

    def position_of(z: Array) -> Array:
        return schedule.root[0] @ z if schedule.root else z

    def density(z: Array) -> Array:
        return masked_log_density(model, position_of(z))[0]

    def iterate(i: Array, carry: tuple[_Chain, Array, Array, Array]) -> tuple[Any, ...]:
        chain, positions, divergent, steps = carry
        now = jax.random.fold_in(jax.random.wrap_key_data(chain.key), schedule.first + i)
        adapting = schedule.adapting[i]
        log_step = jnp.where(
            adapting, chain.step_size.log_step_size, chain.step_size.log_step_size_avg
        )
        inverse_mass = chain.mass.inverse_mass_matrix
        limits = jnp.exp(log_step), schedule.doublings
        state, info = _transition(now, chain.nuts, density, inverse_mass, *limits)
        adapted = _adapt_chain(chain, state, info, schedule, i, step, mass)
        chain = chain._replace(nuts=state, step_size=adapted[0], mass=adapted[1])
        positions = positions.at[i].set(position_of(state.position))
        divergent = divergent.at[i].set(info.divergent)
        return chain, positions, divergent, steps + info.steps

    def run(chain: _Chain) -> tuple[Any, ...]:
        positions = jnp.zeros((_SEGMENT, model.dimension))
        divergent = jnp.zeros(_SEGMENT, bool)
        start = (chain, positions, divergent, jnp.int32(0))
        return jax.lax.fori_loop(0, schedule.draws, iterate, start)

    return jax.lax.map(run, chains)


def _transition(
    key: Array, state: Any, density: Any, inverse_mass: Array, step_size: Array, doublings: Array
) -> tuple[Any, Any]:
    """One step of BlackJAX's NUTS whose trees double at most ``doublings`` times.

    BlackJAX has that number when it compiles only. Returns the state, and of the transition what
    adaptation wants.
    """
    from blackjax.mcmc import integrators, metrics, proposal, termination, trajectory
    from blackjax.mcmc.hmc import HMCState

    metric = metrics.default_metric(inverse_mass)
    integrator = integrators.velocity_verlet(density, metric.kinetic_energy)
    new, update, is_met = termination.iterative_uturn_numpyro(metric.check_turning)
    integrate = trajectory.dynamic_progressive_integration(
        integrator, metric.kinetic_energy, update, is_met, _DIVERGENCE
    )
    expand = trajectory.dynamic_multiplicative_expansion(integrate, metric.check_turning, doublings)
    of_momentum, of_trajectory = jax.random.split(key, 2)
    momentum = metric.sample_momentum(of_momentum, state.position)
    start = integrators.IntegratorState(state.position, momentum, *state[1:])
    energy = -start.logdensity + metric.kinetic_energy(start.momentum)
    tree = trajectory.DynamicExpansionState(
        0,
        proposal.Proposal(start, energy, 0.0, -np.inf),
        trajectory.Trajectory(start, start, start.momentum, 0),
        new(start, _DOUBLINGS),
    )
    (_, chosen, whole, _), (divergent, _) = expand(of_trajectory, tree, energy, step_size)
    end = chosen.state
    acceptance = jnp.exp(chosen.sum_log_p_accept) / whole.num_states
    found = HMCState(end.position, end.logdensity, end.logdensity_grad)
    return found, _Transition(acceptance, divergent, whole.num_states)


def _adapt_chain(
    chain: _Chain, state: Any, info: Any, schedule: _Schedule, i: Array, step: Any, mass: Any
) -> tuple[Any, Any]:
    """Stan's windows: the step size always adapts, the mass matrix in slow windows."""

    def where(condition: Array, new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)

    new_step = where(
        schedule.adapting[i],
        step[1](chain.step_size, info.acceptance - schedule.caution),
        chain.step_size,
    )
    new_mass = where(schedule.slow[i], mass[1](chain.mass, state.position), chain.mass)
    end = schedule.window_end[i]
    return where(end, step[0](step[2](new_step)), new_step), where(end, mass[2](new_mass), new_mass)
