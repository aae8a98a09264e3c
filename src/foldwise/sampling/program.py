"""The one program that takes the chains of folds further, and what it is compiled for.

A block is a value: the positions and step sizes of the chains of some folds. :func:`advance` runs
them some iterations further; nothing else samples the folds. Warm-up, sampling, pilot runs and
extensions are all calls of one compiled program, whose :class:`FoldProgram` can be made, and begin
to compile, before any fit. The folds of a block may belong to several models of a family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from foldwise.models.evaluate import masked_log_density
from foldwise.models.model import Model
from foldwise.sampling.kernel import ChainState, Density, Moment, StepSize, hmc_step
from foldwise.sampling.metric import FoldMetric, LocalCoordinates, Metric, MetricShape, SharedMetric
from foldwise.scores.marginal_model import MarginalModel, base_of
from foldwise.scores.needs import Emit
from foldwise.support.noise import random_words
from foldwise.support.runtime import compiled, lanes, precision_context

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


class FoldData(NamedTuple):
    """What the density of each fold needs: its rows, its targets, its metric, its model.

    ``temper`` weighs the rows that do not train: 0 for the fold's posterior, between 0 and 1 for a
    rung between it and the full data's, where these rows are the fold's test rows; None where the
    program knows no rungs.
    ``rows`` lists the test rows of each target, padded: target 0 is the fold's own test set,
    target 1, where there is one, the test set of the fold whose bridge partner this fold is.
    ``n_steps`` are the leapfrog steps of each iteration, ``target`` the acceptance to which step
    sizes adapt, ``lived`` the iterations of earlier tries that were thrown away, and ``watched``
    the coordinates that are recorded to see how slowly the chains move. ``selection`` says which
    model of a family the fold is of; it is empty for a model that is not of a family.
    """

    keys: UInt32[Any, "fold chain 2"]
    train: Bool[Any, "fold row"]
    temper: Float[Any, " fold"] | None
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
    (fold, chain, draw, target, slot), ``replicate`` (fold, chain, draw, slot, and number where
    a row has several), and ``probability``
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
    """Log density of each chain's fold posterior, its gradient, and the test rows' scores.

    Where rows depend on each other, scores are left to :func:`fold_scores`.
    """

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


def fold_scores(model: Model, data: FoldData, by_row: bool, position: Array) -> Array:
    """Log densities of the targets' rows at chains' positions, where rows depend on each other.

    Of target 0, the fold's own test rows, given its training rows; of target 1, which are training
    rows, given the other ones.
    """

    def of_chain(q: Array, fold: FoldData) -> Array:
        with model.selected(fold.selection):
            return jnp.stack([of_target(q, fold, t) for t in range(len(fold.rows))])

    def of_target(q: Array, fold: FoldData, target: int) -> Array:
        rows, valid = fold.rows[target], fold.valid[target]
        if by_row:
            return model.flat_rows_given(q, rows, valid, fold.train, trained=target > 0)
        return model.flat_given(q, jnp.zeros(model.n_obs, bool).at[rows].max(valid), fold.train)

    return jax.vmap(jax.vmap(of_chain, in_axes=(0, None)))(position, data)


def fold_extras(
    model: Model, emit: Emit, data: FoldData, position: Array, iteration: Array
) -> dict[str, Array]:
    """Derivatives and replicates of each fold's test rows at its chains' positions.

    Of chains on the globals alone, derivatives are those of the test rows' log density given the
    globals and the training rows; all else is of a position whose cells are drawn given these.
    """

    def of_chain(q: Array, key: Array, fold: FoldData) -> dict[str, Array]:
        with model.selected(fold.selection):
            return of_member(q, key, fold)

    def of_member(q: Array, key: Array, fold: FoldData) -> dict[str, Array]:
        found = {}
        # HMC's own randomness has the iteration's key; these are numbered apart from it
        number = jnp.uint32(2**31) + (iteration + fold.lived).astype(jnp.uint32)
        if emit.derivatives:
            for name, values in zip(("first", "second"), derivatives(q, fold), strict=True):
                found[name] = jnp.where(fold.valid, values, 0.0)
        if isinstance(model, MarginalModel) and (emit.replicate or emit.position or emit.classes):
            # one position of all parameters, for all that is recorded of this draw
            q = model.flat_drawn(q, random_words(key, number, 2), fold.train)
        if emit.replicate:
            now = jax.random.fold_in(jax.random.wrap_key_data(key), number)
            rows = whole.flat_simulate(now, q, fold.train)[fold.rows[0]]
            rows = rows if rows.ndim == 1 else rows.reshape(len(rows), -1)
            valid = fold.valid[0].reshape(-1, *[1] * (rows.ndim - 1))
            found["replicate"] = jnp.where(valid, rows, 0.0).astype(q.dtype)
        if emit.position:
            found["position"] = q
        if emit.classes:
            found["probability"] = whole.flat_probabilities(q, emit.classes)[:, fold.rows[0]]
        return found

    def derivatives(q: Array, fold: FoldData) -> Sequence[Array]:
        if not isinstance(model, MarginalModel):
            return [values[fold.rows] for values in model.flat_derivatives(q)]
        of_targets = [
            model.flat_derivatives_given(q, rows, valid, fold.train, emit.by_row)
            for rows, valid in zip(fold.rows, fold.valid, strict=True)
        ]
        return [jnp.stack(values) for values in zip(*of_targets, strict=True)]

    whole = base_of(model)
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
    metric = _metric(data, shared)
    density = fold_density(model, data, emit.by_row)

    def with_extras(
        kept: dict[str, Array], position: Array, iteration: Array, slot: Array
    ) -> dict[str, Array]:
        def record(kept: dict[str, Array]) -> dict[str, Array]:
            new = fold_extras(model, emit, data, position, iteration)
            return {name: _put(kept[name], new[name], slot) for name in kept}

        if not kept:
            return kept
        return jax.lax.cond(iteration >= shared.warmup, record, lambda kept: kept, kept)

    def scores_of(state: ChainState, iteration: Array) -> Array:
        if model.joint_log_likelihood is None:
            return state.scores
        # costly: not at every step of a trajectory, and not of what nobody will look at
        return jax.lax.cond(
            iteration >= shared.warmup,
            lambda: fold_scores(model, data, emit.by_row, state.position),
            lambda: state.scores,
        )

    def body(i: Array, carry: tuple[ChainState, Segment]) -> tuple[ChainState, Segment]:
        state, record = carry
        slot, iteration = jnp.maximum(i - 1, 0), shared.first + i - 1
        refresh = i == 0
        state, info = hmc_step(
            state,
            data.keys,
            iteration + data.lived,
            data.n_steps[:, slot],
            Moment(
                jnp.where(iteration < shared.half, iteration, iteration - shared.half),
                iteration < shared.warmup,
                data.target,
                refresh,
            ),
            density,
            metric,
        )
        return state, Segment(
            _put(record.scores, scores_of(state, iteration), slot),
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


def _metric(data: FoldData, shared: Shared) -> Metric:
    """The metric of the folds of a chunk, with what all folds share of it."""
    if isinstance(data.metric, FoldMetric):
        return data.metric
    scale, directions, stretch = shared.metric
    return SharedMetric(scale, directions, stretch, data.metric)


def _put(kept: Array, values: Array, slot: Array) -> Array:
    """``kept`` with the values of one draw in their place."""
    return jax.lax.dynamic_update_index_in_dim(kept, values.astype(kept.dtype), slot, axis=2)


def _watch(state: ChainState, watched: Array) -> Array:
    """The watched coordinates of every chain, and its log density."""
    chosen = jnp.take_along_axis(state.position, watched[:, None, :], axis=2)
    return jnp.concatenate([chosen, state.log_density[..., None]], axis=2)


class BlockSize(NamedTuple):
    """Folds of a chunk, which a lane runs in lock-step, chunks of a lane in a block, and lanes.

    ``folds`` is the product of the three: the folds of a block.
    """

    chunk: int
    chunks: int
    lanes: int
    folds: int


def block_size(values: int, folds: int, chains: int) -> BlockSize:
    """Chunks that fit the cache of every lane, folds spread evenly over blocks and chunks.

    ``values`` are those that a gradient holds (``values_held``).
    """
    cpu = jax.default_backend() == "cpu"
    most, in_cache = (
        max(1, limit // (8 * values * chains))
        for limit in ((BLOCK_BYTES, CHUNK_BYTES) if cpu else (DEVICE_BYTES, DEVICE_BYTES))
    )
    side_by_side = lanes()
    blocks = -(-folds // (most * side_by_side))
    of_lane = -(-folds // (blocks * side_by_side))
    chunks = -(-of_lane // in_cache)
    chunk = -(-of_lane // chunks)
    return BlockSize(chunk, chunks, side_by_side, chunk * chunks * side_by_side)


@dataclass(frozen=True, eq=False)
class FoldProgram:
    """What a program is compiled for: its model, what it records, and the shapes of its arguments.

    ``targets`` is 2 where draws of a fold also score the test rows of another, ``slots`` the most
    test rows of a target, ``watched`` the number of watched coordinates. ``tempered``: the program
    also samples rungs, which costs nothing but where rows depend on each other.
    """

    model: Model
    emit: Emit
    size: BlockSize
    chains: int
    targets: int
    slots: int
    watched: int
    metric: MetricShape
    precision: str = "float64"
    tempered: bool = True

    def compile(self) -> Any:
        """The program, which is made on the first call and compiles in the background."""
        model, emit, chunk = self.model, self.emit, self.size.chunk

        def run(block: tuple[BlockState, FoldData], shared: Shared) -> object:
            return advance(model, emit, chunk, block, shared)

        what = ("folds", emit, chunk)
        with precision_context(self.precision):
            block, shared = self._block(), self._shared()
        return compiled(model, what, run, block, shared, self.precision)

    def recorded(self, folds: int, draws: int) -> Segment:
        """Shapes of what is recorded of ``draws`` draws of so many folds."""
        whole = replace(self, size=BlockSize(folds, 1, 1, folds))
        with precision_context(self.precision):
            _, found = jax.eval_shape(
                lambda block, shared: advance(self.model, self.emit, folds, block, shared),
                whole._block(),
                whole._shared(),
            )

        def long(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*leaf.shape[:2], draws, *leaf.shape[3:]), leaf.dtype)

        extras = {name: long(leaf) for name, leaf in found.extras.items()}
        return found._replace(scores=long(found.scores), extras=extras, watched=long(found.watched))

    def _block(self) -> tuple[BlockState, FoldData]:
        folds, d, real = self.size.folds, self.model.dimension, self.precision

        def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((folds, *shape), dtype)

        steps = StepSize(*(array(real) for _ in range(4)))
        data = FoldData(
            keys=array(np.uint32, self.chains, 2),
            train=array(bool, self.model.n_obs),
            temper=array(real) if self.tempered else None,
            rows=array(np.int32, self.targets, self.slots),
            valid=array(bool, self.targets, self.slots),
            metric=self.metric.by_fold(folds, d, real),
            n_steps=array(np.int32, SEGMENT),
            target=array(real),
            lived=array(np.int32),
            watched=array(np.int32, self.watched),
            selection=jax.tree.map(lambda a: array(a.dtype, *a.shape), self.model.selection),
        )
        return BlockState(array(real, self.chains, d), steps), data

    def _shared(self) -> Shared:
        number = jax.ShapeDtypeStruct((), np.int32)
        metric = self.metric.shared(self.model.dimension, self.precision)
        return Shared(number, number, number, number, number, metric)
