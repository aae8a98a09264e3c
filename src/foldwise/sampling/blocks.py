"""Blocks of folds, and the one function that takes their chains further.

A block is a value: the positions and step sizes of the chains of some folds. :func:`advance` runs
them some iterations further; nothing else samples the folds. Warm-up, sampling, pilot runs and
extensions are all calls of one compiled program. The folds of a block may belong to several
models of a family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from foldwise.folds.folds import Folds
from foldwise.models.evaluate import masked_log_density
from foldwise.models.model import Model
from foldwise.sampling.kernel import TARGET_ACCEPTANCE, ChainState, Density, StepSize, hmc_step
from foldwise.sampling.metric import FoldMetric, LocalCoordinates, Metric, SharedMetric
from foldwise.scores.needs import Emit
from foldwise.support.runtime import compiled, lanes

# Iterations per call of the compiled program: short enough for a lively progress bar and a quick
# answer to Ctrl-C, long enough that calls cost nothing.
SEGMENT = 50
# The folds of a block take turns, a chunk at a time. A gradient is fastest while the row values of
# a chunk's chains stay in the cache of a core: bench/engine.py prints its time in the chosen chunk
# and with all chains together. Small chunks also make it cheap to run a few folds again. Blocks
# are larger, so that calls are few.
CHUNK_BYTES, BLOCK_BYTES = 2**17, 2**20
# On an accelerator a block is as large as this much memory for one array of row values.
DEVICE_BYTES = 2**28
# Chains of the full-data posterior, in folds, that tune the common step size.
PILOTS = 8
# Mean length of HMC's trajectories, in units where the metric makes the posterior a standard
# normal, whose motion has period 2 pi, and by how much of it lengths vary either way so that no
# direction resonates. A quarter period would make the next draw uncorrelated with this one, and
# its square too, where the metric fits; a little longer is kinder to directions wider than that.
# bench/trajectory.py prints the gradients spent for an effective draw, here and elsewhere.
TRAJECTORY = 5.0 / 9.0 * np.pi
JITTER = 0.5
GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0
# Acceptance to which the step size of a fold adapts, by how many times its leapfrog steps have been
# doubled: not at first, and FINEST times at once where trajectories diverged. On funnels the step
# halves, roughly, from one to the next.
FINER_ACCEPTANCE = np.array([TARGET_ACCEPTANCE, 0.95, 0.99])
FINEST = len(FINER_ACCEPTANCE) - 1
# Leapfrog steps of one iteration, as many as NUTS's deepest tree has: a step size a thousand times
# too small is a model in trouble, and a program that runs can not be interrupted.
MOST_STEPS = 1023


Members = Int[np.ndarray, " fold"]
# refine(members, positions): metrics of the folds ``members`` from where their chains are
Refine = Callable[[Int[np.ndarray, " fold"], Float[np.ndarray, "fold chain d"]], FoldMetric]


class FoldData(NamedTuple):
    """What the density of each fold needs: its rows, its targets, its metric, its model.

    ``temper`` weighs the rows that do not train: 0 for the fold's posterior, between 0 and 1 for a
    rung between it and the full data's, where these rows are the fold's test rows.
    ``rows`` lists the test rows of each target, padded: target 0 is the fold's own test set,
    target 1, where there is one, the test set of the fold whose bridge partner this fold is.
    ``n_steps`` are the leapfrog steps of each iteration, ``target`` the acceptance to which step
    sizes adapt, ``lived`` the iterations of earlier tries that were thrown away, and ``watched``
    the coordinates that are recorded to see how slowly the chains move. ``selection`` says which
    model of a family the fold is of; it is empty for a model that is not of a family.
    """

    keys: UInt32[Any, "fold chain 2"]
    train: Bool[Any, "fold row"]
    temper: Float[Any, " fold"]
    rows: Int[Any, "fold target slot"]
    valid: Bool[Any, "fold target slot"]
    metric: FoldMetric | LocalCoordinates
    n_steps: Int[Any, "fold draw"]
    target: Float[Any, " fold"]
    lived: Int[Any, " fold"]
    watched: Int[Any, "fold direction"]
    selection: Any


class BlockState(NamedTuple):
    """All that is needed to take the chains of some folds further."""

    position: Float[Any, "fold chain d"]
    step_size: StepSize


class Segment(NamedTuple):
    """What one call of :func:`advance` recorded.

    ``watched`` holds the watched coordinates of each draw, and last the log density.
    ``extras`` holds, where asked for, ``first`` and ``second``, derivatives of the targets' rows
    (fold, chain, draw, target, slot), ``replicate`` (fold, chain, draw, slot), and ``probability``
    (fold, chain, draw, class, slot).
    """

    scores: Float[Any, "fold chain draw target ..."]
    extras: dict[str, Float[Any, "fold chain draw ..."]]
    watched: Float[Any, "fold chain draw direction"]
    acceptance: Float[Any, " fold"]
    divergences: Int[Any, " fold"]
    moves: Int[Any, "fold chain"]


class Shared(NamedTuple):
    """What all folds share in one call of :func:`advance`; ``chunks`` of a block are in use."""

    chunks: Int[Any, ""]
    first: Int[Any, ""]
    draws: Int[Any, ""]
    warmup: Int[Any, ""]
    half: Int[Any, ""]
    metric: tuple[Any, ...]


def fold_density(model: Model, data: FoldData, by_row: bool) -> Density:
    """Log density of each chain's fold posterior, its gradient, and the test rows' scores."""

    def of_chain(q: Array, fold: FoldData) -> tuple[Array, Array, Array]:
        def log_density(q: Array) -> tuple[Array, Array]:
            value, rows = masked_log_density(model, q, fold.train, fold.temper)
            targets = jnp.where(fold.valid, rows[fold.rows], 0.0)
            return value, targets if by_row else targets.sum(axis=-1)

        with model.selected(fold.selection):
            (value, scores), gradient = jax.value_and_grad(log_density, has_aux=True)(q)
        return value, gradient, scores

    all_folds = jax.vmap(jax.vmap(of_chain, in_axes=(0, None)))
    return lambda position: all_folds(position, data)


def fold_extras(
    model: Model, emit: Emit, data: FoldData, position: Array, iteration: Array
) -> dict[str, Array]:
    """Derivatives and replicates of each fold's test rows at its chains' positions."""

    def of_chain(q: Array, key: Array, fold: FoldData) -> dict[str, Array]:
        with model.selected(fold.selection):
            return of_member(q, key, fold)

    def of_member(q: Array, key: Array, fold: FoldData) -> dict[str, Array]:
        found = {}
        if emit.derivatives:
            for name, values in zip(("first", "second"), model.flat_derivatives(q), strict=True):
                found[name] = jnp.where(fold.valid, values[fold.rows], 0.0)
        if emit.replicate:
            # HMC's own randomness has the iteration's key; these are numbered apart from it
            number = jnp.uint32(2**31) + (iteration + fold.lived).astype(jnp.uint32)
            now = jax.random.fold_in(jax.random.wrap_key_data(key), number)
            rows = model.flat_simulate(now, q)[fold.rows[0]]
            found["replicate"] = jnp.where(fold.valid[0], rows, 0.0).astype(q.dtype)
        if emit.position:
            found["position"] = q
        if emit.classes:
            found["probability"] = model.flat_probabilities(q, emit.classes)[:, fold.rows[0]]
        return found

    return jax.vmap(jax.vmap(of_chain, in_axes=(0, 0, None)))(position, data.keys, data)


def advance(
    model: Model, emit: Emit, chunk: int, block: tuple[BlockState, FoldData], shared: Shared
) -> tuple[BlockState, Segment]:
    """Take the chains of a block ``shared.draws`` iterations further, at most ``SEGMENT``.

    ``chunk`` folds at a time, of the first ``shared.chunks`` chunks. Iterations are numbered from
    the start of warm-up; step sizes adapt while the number is below ``shared.warmup``, starting
    afresh at ``shared.half``, when metrics may have been refined.
    """
    record = _nothing_recorded(model, emit, block)
    if len(record.acceptance) == chunk:
        return _advance_chunk(model, emit, block, record, shared)

    def in_chunks(array: Array) -> Array:
        return array.reshape(len(array) // chunk, chunk, *array.shape[1:])

    def body(i: Array, done: tuple[BlockState, Segment]) -> tuple[BlockState, Segment]:
        (state, data), record = jax.tree.map(lambda a: a[i], (given, done[1]))
        new = _advance_chunk(model, emit, (state, data), record, shared)
        return jax.tree.map(lambda a, b: a.at[i].set(b), done, new)

    given, record = jax.tree.map(in_chunks, (block, record))
    done = jax.lax.fori_loop(0, shared.chunks, body, (given[0], record))
    return jax.tree.map(lambda a: a.reshape(a.shape[0] * chunk, *a.shape[2:]), done)


def _nothing_recorded(model: Model, emit: Emit, block: tuple[BlockState, FoldData]) -> Segment:
    """Room for what is recorded."""
    start, data = block
    folds, chains, _ = start.position.shape
    dtype = start.position.dtype
    shape = data.rows.shape[1:] if emit.by_row else data.rows.shape[1:2]
    one_draw = jax.eval_shape(
        lambda position: fold_extras(model, emit, data, position, jnp.int32(0)), start.position
    )
    return Segment(
        jnp.zeros((folds, chains, SEGMENT, *shape), dtype),
        {k: jnp.zeros((folds, chains, SEGMENT, *v.shape[2:]), dtype) for k, v in one_draw.items()},
        jnp.zeros((folds, chains, SEGMENT, data.watched.shape[1] + 1), dtype),
        jnp.zeros(folds, dtype),
        jnp.zeros(folds, int),
        jnp.zeros((folds, chains), int),
    )


def _advance_chunk(
    model: Model,
    emit: Emit,
    chunk: tuple[BlockState, FoldData],
    record: Segment,
    shared: Shared,
) -> tuple[BlockState, Segment]:
    """Take the chains of a chunk further, in lock-step."""
    start, data = chunk
    metric: Metric
    if isinstance(data.metric, FoldMetric):
        metric = data.metric
    else:
        scale, directions, stretch = shared.metric
        metric = SharedMetric(scale, directions, stretch, data.metric)
    density = fold_density(model, data, emit.by_row)

    def extras_at(position: Array, iteration: Array) -> dict[str, Array]:
        return fold_extras(model, emit, data, position, iteration)

    def with_extras(
        kept: dict[str, Array], position: Array, iteration: Array, slot: Array
    ) -> dict[str, Array]:
        def record(kept: dict[str, Array]) -> dict[str, Array]:
            new = extras_at(position, iteration)
            return {name: _put(kept[name], new[name], slot) for name in kept}

        if not kept:
            return kept
        return jax.lax.cond(iteration >= shared.warmup, record, lambda kept: kept, kept)

    def body(i: Array, carry: tuple[ChainState, Segment]) -> tuple[ChainState, Segment]:
        state, record = carry
        slot, iteration = jnp.maximum(i - 1, 0), shared.first + i - 1
        refresh = i == 0
        state, info = hmc_step(
            state,
            data.keys,
            iteration + data.lived,
            data.n_steps[:, slot],
            jnp.where(iteration < shared.half, iteration, iteration - shared.half),
            iteration < shared.warmup,
            data.target,
            refresh,
            density,
            metric,
        )
        return state, Segment(
            _put(record.scores, state.scores, slot),
            with_extras(record.extras, state.position, iteration, slot),
            _put(record.watched, _watch(state, data.watched), slot),
            record.acceptance + jnp.where(refresh, 0.0, info.acceptance.mean(axis=1)),
            record.divergences + jnp.where(refresh, 0, info.divergent.sum(axis=1, dtype=int)),
            record.moves + jnp.where(refresh, 0, info.moved.astype(int)),
        )

    scores = jnp.zeros_like(record.scores[:, :, 0])
    log_density = jnp.zeros_like(scores, shape=scores.shape[:2])
    gradient = jnp.zeros_like(start.position)
    state = ChainState(start.position, log_density, gradient, scores, start.step_size)
    # iteration 0 of the loop only evaluates the density at the start
    state, record = jax.lax.fori_loop(0, shared.draws + 1, body, (state, record))
    return BlockState(state.position, state.step_size), record


def _put(kept: Array, values: Array, slot: Array) -> Array:
    """``kept`` with the values of one draw in their place."""
    return jax.lax.dynamic_update_index_in_dim(kept, values.astype(kept.dtype), slot, axis=2)


def _watch(state: ChainState, watched: Array) -> Array:
    """The watched coordinates of every chain, and its log density."""
    chosen = jnp.take_along_axis(state.position, watched[:, None, :], axis=2)
    return jnp.concatenate([chosen, state.log_density[..., None]], axis=2)


def leapfrog_counts(step_size: float, first: int, draws: int) -> Int[np.ndarray, " draw"]:
    """Leapfrog steps of iterations ``first`` to ``first + draws - 1``.

    Trajectories have the same lengths in every run, so that models side by side turn together.
    Lengths are spread evenly over any few iterations by multiples of the golden ratio; Hoffman,
    Radul and Sountsov (2021) use a Halton sequence to the same end.
    """
    uniform = np.arange(first + 1, first + draws + 1) * GOLDEN % 1.0
    length = TRAJECTORY * (1.0 + JITTER * (2.0 * uniform - 1.0))
    return np.clip(np.rint(length / step_size), 1, MOST_STEPS).astype(np.int32)


class BlockSize(NamedTuple):
    """Folds of a chunk, which one lane runs in lock-step, and chunks of a lane in a block."""

    chunk: int
    chunks: int

    @property
    def folds(self) -> int:
        """Folds of a block."""
        return self.chunk * self.chunks * lanes()


def block_size(n_obs: int, folds: int, chains: int) -> BlockSize:
    """Chunks that fit the cache of every lane, folds spread evenly over blocks and chunks."""
    cpu = jax.default_backend() == "cpu"
    most, in_cache = (
        max(1, limit // (8 * n_obs * chains))
        for limit in ((BLOCK_BYTES, CHUNK_BYTES) if cpu else (DEVICE_BYTES, DEVICE_BYTES))
    )
    blocks = -(-folds // (most * lanes()))
    of_lane = -(-folds // (blocks * lanes()))
    chunks = -(-of_lane // in_cache)
    return BlockSize(-(-of_lane // chunks), chunks)


class Layout:
    """Where ``count`` folds lie in a block: the same number on each lane, its first places.

    The places that remain are filled with folds that are there already.
    """

    def __init__(self, count: int, size: BlockSize):
        of_lane, places = -(-count // lanes()), size.chunk * size.chunks
        lane, place = np.divmod(np.arange(size.folds), places)
        self.fold = np.minimum(lane * of_lane + place % of_lane, count - 1)
        lane, place = np.divmod(np.arange(count), of_lane)
        self.place = lane * places + place
        self.chunks = -(-of_lane // size.chunk)
        self.whole = count == size.folds

    def fill(self, tree: Any) -> Any:
        """The folds of ``tree`` in their places."""
        return tree if self.whole else jax.tree.map(lambda a: a[self.fold], tree)

    def pick(self, tree: Any) -> Any:
        """The folds in their order, from their places."""
        return tree if self.whole else jax.tree.map(lambda a: a[self.place], tree)


class Sampler:
    """All chains of all folds: their compiled program, positions and step sizes.

    Parameters
    ----------
    previous
        For each fold the position of the fold whose bridge partner it is, -1 for none; its
        test rows become the fold's second target.
    metric, pilot_metric
        Metric of every fold, and of the full data for ``PILOTS`` pilots.
    refine, far
        ``refine(members, positions)``: metrics of the folds ``members`` from their chains'
        positions, asked half-way through warm-up for the folds marked ``far``, and once more when
        one of them is tried again. None: no fold gets one.
    start, pilot_start
        Starting positions of the folds' chains, and draws of the full-data posterior.
    watched
        Coordinates of each fold that are recorded besides, to see how slowly chains move.
    emit
        What is recorded of each draw.

    ``step_size`` is the common starting point of the folds' own step sizes and sets the number of
    leapfrog steps. ``done`` counts the iterations of every chain, warm-up included, ``lived`` those
    of earlier tries of a fold that were thrown away, ``finer`` how many times its leapfrog steps
    have been doubled since trajectories diverged, and ``gradients`` the gradients of all chains but
    the pilots'.
    """

    def __init__(
        self,
        model: Model,
        folds: Folds,
        previous: Int[np.ndarray, " fold"],
        metric: Metric,
        pilot_metric: Metric,
        refine: Refine | None,
        far: Bool[np.ndarray, " fold"],
        start: Float[np.ndarray, "fold chain d"],
        pilot_start: Float[np.ndarray, "pilot chain d"],
        watched: Int[np.ndarray, "fold direction"],
        emit: Emit,
        warmup: int,
        seed: int,
        precision: str = "float64",
    ):
        self.model, self.folds, self.previous = model, folds, previous
        self.metric, self.pilot_metric, self.pilot_start = metric, pilot_metric, pilot_start
        self.refine, self.far, self.watched = refine, far.copy(), watched
        self.emit, self.warmup, self.seed, self.precision = emit, warmup, seed, precision
        self.position = np.array(start, precision)
        self.step_size = 1.0
        self.steps = StepSize(*np.zeros((4, len(folds)), precision))
        self.lived, self.finer = np.zeros((2, len(folds)), np.int64)
        self.done = self.gradients = 0
        self.temper, self.rung = np.zeros(len(folds)), 0
        self.block = block_size(model.n_obs, len(folds), start.shape[1])
        self.width, self.targets = int(folds.n_test.max()), 1 + int((previous >= 0).any())

    def copy(self) -> Sampler:
        """A sampler that goes on by itself from the same state and leaves this one as it is."""
        twin = copy(self)
        twin.position = self.position.copy()
        twin.steps = StepSize(*(part.copy() for part in self.steps))
        twin.lived, twin.far = self.lived.copy(), self.far.copy()
        twin.finer = self.finer.copy()
        twin.metric = jax.tree.map(np.copy, self.metric)
        share_blocks([twin])
        return twin

    def tempered(
        self,
        members: Int[np.ndarray, " member"],
        temper: Float[np.ndarray, " member"],
        metric: Metric,
        start: Float[np.ndarray, "member chain d"],
        log_step: Float[np.ndarray, " member"],
        rung: int,
    ) -> Sampler:
        """A sampler of the same program for rungs of some folds, with chains of their own."""
        twin = copy(self)
        twin.folds, twin.previous = self.folds[members], np.full(len(members), -1)
        twin.metric, twin.refine, twin.temper = metric, None, temper
        twin.lived, twin.watched = np.zeros(len(members), np.int64), self.watched[members]
        twin.finer = self.finer[members]
        twin.far = np.zeros(len(members), bool)
        twin.rung, twin.done, twin.gradients = rung, 0, 0
        twin.position = np.array(start, self.precision)
        steps = log_step.astype(self.precision)
        twin.steps = StepSize(steps, steps.copy(), np.zeros_like(steps), steps.copy())
        return twin

    def compile(self) -> Any:
        """The program, which is made on the first call and compiles in the background."""
        model, emit, chunk = self.model, self.emit, self.block.chunk

        def run(block: tuple[BlockState, FoldData], shared: Shared) -> object:
            return advance(model, emit, chunk, block, shared)

        block = Layout(PILOTS, self.block).fill(self._pilots())
        return compiled(model, run, block, self._shared(1, 0, 1), self.precision, emit, chunk)

    def _start_from(self, log_steps: Float[np.ndarray, " pilot"]) -> None:
        """Set the folds' common starting step size: the median over the pilots."""
        step = float(np.exp(np.median(log_steps)))
        self.step_size = float(f"{step:.3g}")  # rounded: the same bits in every grouping
        self.steps = _same_steps(self.step_size, len(self.folds), self.precision)

    def _store(self, members: Int[np.ndarray, " fold"], state: BlockState) -> None:
        self.position[members] = state.position
        for mine, theirs in zip(self.steps, state.step_size, strict=True):
            mine[members] = theirs

    def _refine(self, members: Members, position: Float[np.ndarray, "fold chain d"]) -> None:
        """Give new metrics to those of the folds that are to have one."""
        which = np.flatnonzero(self.far[members])
        if self.refine is None or not which.size:
            return
        assert isinstance(self.metric, FoldMetric)
        metric = self.refine(members[which], position[which])
        for mine, new in zip(self.metric, metric, strict=True):
            mine[members[which]] = new

    def begin_again(self, members: Members) -> None:
        """Prepare to warm up the folds ``members`` anew, from where their chains are."""
        self.lived[members] += self.done
        for mine, new in zip(self.steps, _restarted(self.steps), strict=True):
            mine[members] = new[members]
        self._refine(members, self.position[members])

    def _shared(self, chunks: int, first: int, draws: int) -> Shared:
        metric = () if isinstance(self.metric, FoldMetric) else self.metric[:3]
        parts = tuple(np.asarray(part, self.precision) for part in metric)
        chunks, first, draws, warmup, half = np.array(
            [chunks, first, draws, self.warmup, self.warmup // 2], np.int32
        )
        return Shared(chunks, first, draws, warmup, half, parts)

    def _n_steps(self, folds: int, first: int, draws: int) -> Int[np.ndarray, "fold draw"]:
        n_steps = np.ones((folds, SEGMENT), np.int32)
        n_steps[:, :draws] = leapfrog_counts(self.step_size, first, draws)
        return n_steps

    def _own_steps(self, members: Members, first: int, draws: int) -> Int[np.ndarray, "fold draw"]:
        """Leapfrog steps of the folds ``members``, more where trajectories diverged."""
        n_steps = self._n_steps(len(members), first, draws)
        n_steps[:, :draws] <<= self.finer[members, None]
        return np.minimum(n_steps, MOST_STEPS).astype(np.int32)

    def _keys(self, numbers: Int[np.ndarray, " fold"]) -> UInt32[np.ndarray, "fold chain 2"]:
        """A key for each chain, from the seed, the fold's number in its scheme and its rung."""
        size = 2 * self.position.shape[1]
        words = [
            np.random.SeedSequence([self.seed, 5, int(number), self.rung]).generate_state(size)
            for number in numbers
        ]
        return np.stack(words).astype(np.uint32).reshape(len(numbers), -1, 2)

    def _state(self, members: Int[np.ndarray, " fold"]) -> BlockState:
        return BlockState(self.position[members], StepSize(*(s[members] for s in self.steps)))

    def _data(self, members: Int[np.ndarray, " fold"]) -> FoldData:
        rows, valid = self.folds.padded_test(members, self.width)
        targets = [(rows, valid)]
        if self.targets == 2:
            before = self.previous[members]
            rows, valid = self.folds.padded_test(np.maximum(before, 0), self.width)
            targets.append((rows, valid & (before >= 0)[:, None]))
        return FoldData(
            self._keys(self.folds.index[members]),
            self.folds.train_mask(members),
            self.temper[members].astype(self.precision),
            np.stack([t[0] for t in targets], axis=1).astype(np.int32),
            np.stack([t[1] for t in targets], axis=1),
            _metric_of(self.metric, members, self.precision),
            self._n_steps(len(members), 0, 0),
            FINER_ACCEPTANCE[self.finer[members]].astype(self.precision),
            self.lived[members].astype(np.int32),
            self.watched[members].astype(np.int32),
            jax.tree.map(lambda a: np.stack([a] * len(members)), self.model.selection),
        )

    def _pilots(self) -> tuple[BlockState, FoldData]:
        """Folds with an empty test set, which sample the full-data posterior."""
        members = np.arange(PILOTS)
        data = self._data(np.zeros(PILOTS, int))
        data = data._replace(
            keys=self._keys(2**40 + members),
            train=np.ones_like(data.train),
            temper=np.zeros_like(data.temper),
            valid=np.zeros_like(data.valid),
            metric=_metric_of(self.pilot_metric, members, self.precision),
            n_steps=self._n_steps(PILOTS, 0, SEGMENT),
            target=np.full_like(data.target, TARGET_ACCEPTANCE),
            lived=np.zeros_like(data.lived),
        )
        steps = _same_steps(self.step_size, PILOTS, self.precision)
        return BlockState(self.pilot_start[members].astype(self.precision), steps), data


# ---------------------------------------------------------------- samplers side by side


def share_blocks(samplers: Sequence[Sampler]) -> None:
    """Let samplers of the same program and length fill blocks together.

    Folds with a metric of their own mix freely. Where folds share the metric of their model,
    beyond 100 parameters, the models take turns.
    """
    head = samplers[0]
    folds = sum(len(group.folds) for group in _groups(samplers)[0])
    block = block_size(head.model.n_obs, folds, head.position.shape[1])
    for sampler in samplers:
        sampler.block = block


def _groups(samplers: Sequence[Sampler]) -> list[list[Sampler]]:
    """Samplers whose folds may share a block."""
    if all(isinstance(sampler.metric, FoldMetric) for sampler in samplers):
        return [list(samplers)]
    return [[sampler] for sampler in samplers]


def tune_together(samplers: Sequence[Sampler], guess: float) -> None:
    """Set the starting step size of each sampler from its pilots.

    The number of pilots does not depend on the block size, so neither does the answer.
    """
    for sampler in samplers:
        sampler.step_size = guess
    for group in _groups(samplers):
        head, found = group[0], []
        program = head.compile()
        pilots = _joined([sampler._pilots() for sampler in group])
        for first in range(0, PILOTS * len(group), head.block.folds):
            chosen = np.arange(first, min(first + head.block.folds, PILOTS * len(group)))
            layout = Layout(len(chosen), head.block)
            block = layout.fill(jax.tree.map(lambda a, i=chosen: a[i], pilots))
            state, _ = program(block, head._shared(layout.chunks, 0, SEGMENT))
            found.append(layout.pick(state.step_size.log_step_average))
        steps = np.split(np.concatenate(found), len(group))
        for sampler, own in zip(group, steps, strict=True):
            sampler._start_from(own)


def run_together(
    samplers: Sequence[Sampler], draws: int, again: Sequence[Members] | None = None
) -> Iterator[tuple[Sampler, Members, Segment, int]]:
    """Take every chain ``draws`` iterations further, after warm-up if it has not been done.

    With ``again``, positions of folds for each sampler: only these, warm-up and all their draws
    anew, from where their chains are.

    Yields, for each sampler of each block and segment, the positions of its folds in the block,
    what was recorded of them, and the number of iterations, negative during warm-up.
    """
    first = samplers[0].done if again is None else 0
    last = max(first, samplers[0].warmup) + draws
    chosen = again or [np.arange(len(sampler.folds)) for sampler in samplers]
    members = {id(sampler): own for sampler, own in zip(samplers, chosen, strict=True)}
    if again is not None:
        for sampler, own in zip(samplers, again, strict=True):
            sampler.begin_again(own)
    for group in _groups(samplers):
        program = group[0].compile()
        for pieces in _blocks(group, [members[id(sampler)] for sampler in group]):
            yield from _run_block(program, pieces, first, last)
        for sampler in group:
            sampler.done = last


def _blocks(group: list[Sampler], chosen: list[Members]) -> Iterator[list[tuple[Sampler, Members]]]:
    """The chosen folds of all samplers, block by block."""
    owner = np.repeat(np.arange(len(group)), [len(members) for members in chosen])
    fold, size = np.concatenate(chosen), group[0].block.folds
    for start in range(0, len(fold), size):
        part = slice(start, start + size)
        yield [(group[who], fold[part][owner[part] == who]) for who in np.unique(owner[part])]


def _run_block(
    program: Callable[[Any, Any], Any],
    pieces: list[tuple[Sampler, Members]],
    first: int,
    last: int,
) -> Iterator[tuple[Sampler, Members, Segment, int]]:
    head = pieces[0][0]
    edges = np.cumsum([0, *(len(members) for _, members in pieces)])
    parts = [slice(*edge) for edge in pairwise(edges)]
    half, layout = head.warmup // 2, Layout(int(edges[-1]), head.block)
    state = layout.fill(_joined([sampler._state(members) for sampler, members in pieces]))
    data = layout.fill(_joined([sampler._data(members) for sampler, members in pieces]))
    while first < last:
        if first == half:
            state = state._replace(step_size=_restarted(state.step_size))
            position = layout.pick(state.position)
            for (sampler, members), part in zip(pieces, parts, strict=True):
                sampler._refine(members, position[part])
            metrics = [_metric_of(s.metric, members, s.precision) for s, members in pieces]
            data = data._replace(metric=layout.fill(_joined(metrics)))
        end = next(stop for stop in (half, head.warmup, last) if first < stop)
        count = min(SEGMENT, end - first)
        n_steps = [sampler._own_steps(members, first, count) for sampler, members in pieces]
        for (sampler, _), steps in zip(pieces, n_steps, strict=True):
            sampler.gradients += int(steps[:, :count].sum()) * sampler.position.shape[1]
        data = data._replace(n_steps=layout.fill(_joined(n_steps)))
        state, record = program((state, data), head._shared(layout.chunks, first, count))
        record = layout.pick(record)
        record = record._replace(
            scores=record.scores[:, :, :count],
            extras={name: values[:, :, :count] for name, values in record.extras.items()},
            watched=record.watched[:, :, :count],
        )
        for (sampler, members), part in zip(pieces, parts, strict=True):
            own = jax.tree.map(lambda a, part=part: a[part], record)
            yield sampler, members, own, count if first >= head.warmup else -count
        first += count
    state = layout.pick(state)
    for (sampler, members), part in zip(pieces, parts, strict=True):
        sampler._store(members, jax.tree.map(lambda a, part=part: a[part], state))


def _joined(trees: list[Any]) -> Any:
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *a: np.concatenate(a), *trees)


def _same_steps(step: float, folds: int, precision: str) -> StepSize:
    log_step = np.full(folds, np.log(step), precision)
    return StepSize(log_step, log_step.copy(), np.zeros(folds, precision), log_step.copy())


def _restarted(steps: StepSize) -> StepSize:
    """Dual averaging that starts afresh from the average so far, the transient forgotten."""
    start = steps.log_step_average
    return StepSize(start, start, np.zeros_like(start), start)


def _metric_of(
    metric: Metric, members: Int[np.ndarray, " fold"], precision: str
) -> FoldMetric | LocalCoordinates:
    parts = metric if isinstance(metric, FoldMetric) else metric.folds
    return jax.tree.map(
        lambda a: a[members].astype(precision) if a.dtype.kind == "f" else a[members], parts
    )
