"""All chains of all folds: their state, and how blocks of them take turns in the one program."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from foldwise.folds.folds import Folds
from foldwise.models.evaluate import values_held
from foldwise.sampling.kernel import TARGET_ACCEPTANCE, StepSize
from foldwise.sampling.metric import FoldMetric, LocalCoordinates, Metric
from foldwise.sampling.program import (
    SEGMENT,
    BlockSize,
    BlockState,
    FoldData,
    FoldProgram,
    Segment,
    Shared,
    block_size,
)
from foldwise.scores.marginal_model import MarginalModel
from foldwise.support.seeds import Stream, words

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
# The same at least, of the globals alone: in few dimensions steps of an acceptance of 0.8 are so
# long that one in a thousand meets the steep side of a scale's posterior with a divergence (eight
# schools, 5 seeds of 8 folds: 10 in all; none at 0.9, for as many gradients).
MARGINAL_ACCEPTANCE = 0.9
# Leapfrog steps of one iteration, as many as NUTS's deepest tree has: a step size a thousand times
# too small is a model in trouble, and a program that runs can not be interrupted.
MOST_STEPS = 1023


Members = Int[np.ndarray, " fold"]
# refine(members, positions): metrics of the folds ``members`` from where their chains are
Refine = Callable[[Int[np.ndarray, " fold"], Float[np.ndarray, "fold chain d"]], FoldMetric]


def leapfrog_counts(step_size: float, first: int, draws: int) -> Int[np.ndarray, " draw"]:
    """Leapfrog steps of iterations ``first`` to ``first + draws - 1``.

    Trajectories have the same lengths in every run, so that models side by side turn together.
    Lengths are spread evenly over any few iterations by multiples of the golden ratio; Hoffman,
    Radul and Sountsov (2021) use a Halton sequence to the same end.
    """
    uniform = np.arange(first + 1, first + draws + 1) * GOLDEN % 1.0
    length = TRAJECTORY * (1.0 + JITTER * (2.0 * uniform - 1.0))
    return np.clip(np.rint(length / step_size), 1, MOST_STEPS).astype(np.int32)


class Layout:
    """Where ``count`` folds lie in a block: the same number on each lane, its first places.

    The places that remain are filled with folds that are there already.
    """

    def __init__(self, count: int, size: BlockSize):
        of_lane, places = -(-count // size.lanes), size.chunk * size.chunks
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


class Pilots(NamedTuple):
    """Where chains of the full-data posterior start that tune the step size, and their metric."""

    metric: Metric
    position: Float[np.ndarray, "pilot chain d"]


class Tuning(NamedTuple):
    """What the chains of each fold are tuned by.

    ``refine(members, positions)`` gives metrics of the folds ``members`` from their chains'
    positions, asked half-way through warm-up for the folds marked ``far``, and once more when one
    of them is tried again; None: no fold gets one. ``watched`` are coordinates of each fold that
    are recorded besides, to see how slowly chains move. There are no ``pilots`` where the step size
    is known.
    """

    metric: Metric
    refine: Refine | None
    far: Bool[np.ndarray, " fold"]
    watched: Int[np.ndarray, "fold direction"]
    pilots: Pilots | None


class Sampler:
    """All chains of all folds: their positions and step sizes, and the program that moves them.

    Parameters
    ----------
    program
        What takes them further.
    folds
        Whose posteriors they sample.
    previous
        For each fold the position of the fold whose bridge partner it is, -1 for none; its
        test rows become the fold's second target.
    tuning
        Metrics, and what else the chains are tuned by.
    start
        Starting positions of the folds' chains.
    warmup, seed
        Iterations of warm-up, and where randomness comes from.

    ``step_size`` is the common starting point of the folds' own step sizes and sets the number of
    leapfrog steps. ``done`` counts the iterations of every chain, warm-up included, ``lived`` those
    of earlier tries of a fold that were thrown away, ``finer`` how many times its leapfrog steps
    have been doubled since trajectories diverged, and ``gradients`` the gradients of all chains but
    the pilots'. ``temper`` weighs the test rows of each fold, on the rung numbered ``rung``.
    """

    def __init__(
        self,
        program: FoldProgram,
        folds: Folds,
        previous: Int[np.ndarray, " fold"],
        tuning: Tuning,
        start: Float[np.ndarray, "fold chain d"],
        warmup: int,
        seed: int,
    ):
        self.program, self.folds, self.previous = program, folds, previous
        self.metric, self.refine, self.pilots = tuning.metric, tuning.refine, tuning.pilots
        self.far, self.watched = tuning.far.copy(), tuning.watched
        self.warmup, self.seed = warmup, seed
        self.position = np.array(start, program.precision)
        self.step_size = 1.0
        self.steps = StepSize(*np.zeros((4, len(start)), program.precision))
        self.lived, self.finer = np.zeros((2, len(start)), np.int64)
        self.done = self.gradients = 0
        self.temper, self.rung = np.zeros(len(start)), 0

    @property
    def precision(self) -> str:
        """Of the program's numbers."""
        return self.program.precision

    @property
    def _acceptance(self) -> Float[np.ndarray, " finer"]:
        """What step sizes adapt to, by how often leapfrog steps have been doubled."""
        alone = isinstance(self.program.model, MarginalModel)
        return np.maximum(FINER_ACCEPTANCE, MARGINAL_ACCEPTANCE if alone else 0.0)

    def copy(self) -> Sampler:
        """A sampler that goes on by itself from the same state and leaves this one as it is."""
        twin = copy(self)
        twin.position = self.position.copy()
        twin.steps = StepSize(*(part.copy() for part in self.steps))
        twin.lived, twin.far = self.lived.copy(), self.far.copy()
        twin.finer = self.finer.copy()
        twin.metric = jax.tree.map(np.copy, self.metric)
        # a model of a family goes on alone
        size = block_size(values_held(self.program.model), len(self.folds), self.program.chains)
        twin.program = replace(self.program, size=size)
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
        twin.program = replace(self.program, tempered=True)
        twin.lived, twin.watched = np.zeros(len(members), np.int64), self.watched[members]
        twin.finer = self.finer[members]
        twin.far = np.zeros(len(members), bool)
        twin.rung, twin.done, twin.gradients = rung, 0, 0
        twin.position = np.array(start, self.precision)
        steps = log_step.astype(self.precision)
        twin.steps = StepSize(steps, steps.copy(), np.zeros_like(steps), steps.copy())
        return twin

    def _start_from(self, log_steps: Float[np.ndarray, " pilot"]) -> None:
        """Set the folds' common starting step size: the median over the pilots."""
        step = float(np.exp(np.median(log_steps)))
        self.start_at(float(f"{step:.3g}"))  # rounded: the same bits in every grouping

    def start_at(self, step_size: float) -> None:
        """Set the folds' common starting step size."""
        self.step_size = step_size
        self.steps = _same_steps(self.step_size, len(self.position), self.precision)

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
        found = [
            words(self.seed, Stream.CHAINS, int(number), self.rung, count=size)
            for number in numbers
        ]
        return np.stack(found).astype(np.uint32).reshape(len(numbers), -1, 2)

    def _state(self, members: Int[np.ndarray, " fold"]) -> BlockState:
        return BlockState(self.position[members], StepSize(*(s[members] for s in self.steps)))

    def _data(self, members: Int[np.ndarray, " fold"]) -> FoldData:
        rows, valid = self.folds.padded_test(members, self.program.slots)
        targets = [(rows, valid)]
        if self.program.targets == 2:
            before = self.previous[members]
            rows, valid = self.folds.padded_test(np.maximum(before, 0), self.program.slots)
            targets.append((rows, valid & (before >= 0)[:, None]))
        return FoldData(
            self._keys(self.folds.index[members]),
            self.folds.train_mask(members),
            self.temper[members].astype(self.precision) if self.program.tempered else None,
            np.stack([t[0] for t in targets], axis=1).astype(np.int32),
            np.stack([t[1] for t in targets], axis=1),
            _metric_of(self.metric, members, self.precision),
            self._n_steps(len(members), 0, 0),
            self._acceptance[self.finer[members]].astype(self.precision),
            self.lived[members].astype(np.int32),
            self.watched[members].astype(np.int32),
            jax.tree.map(lambda a: np.stack([a] * len(members)), self.program.model.selection),
        )

    def _pilot_block(self, pilots: Pilots) -> tuple[BlockState, FoldData]:
        """Folds with an empty test set, which sample the full-data posterior."""
        members = np.arange(PILOTS)
        data = self._data(np.zeros(PILOTS, int))
        data = data._replace(
            keys=self._keys(2**40 + members),
            train=np.ones_like(data.train),
            temper=None if data.temper is None else np.zeros_like(data.temper),
            valid=np.zeros_like(data.valid),
            metric=_metric_of(pilots.metric, members, self.precision),
            n_steps=self._n_steps(PILOTS, 0, SEGMENT),
            target=np.full_like(data.target, self._acceptance[0]),
            lived=np.zeros_like(data.lived),
        )
        steps = _same_steps(self.step_size, PILOTS, self.precision)
        return BlockState(pilots.position[members].astype(self.precision), steps), data


# ---------------------------------------------------------------- samplers side by side


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
        head, found, size = group[0], [], group[0].program.size
        program = head.program.compile()
        blocks = [s._pilot_block(s.pilots) for s in group if s.pilots is not None]
        pilots = _joined(blocks)
        for first in range(0, PILOTS * len(blocks), size.folds):
            chosen = np.arange(first, min(first + size.folds, PILOTS * len(blocks)))
            layout = Layout(len(chosen), size)
            block = layout.fill(jax.tree.map(lambda a, i=chosen: a[i], pilots))
            state, _ = program(block, head._shared(layout.chunks, 0, SEGMENT))
            found.append(layout.pick(state.step_size.log_step_average))
        steps = np.split(np.concatenate(found), len(group))
        for sampler, own in zip(group, steps, strict=True):
            sampler._start_from(own)


class Keeps(Protocol):
    """Where blocks that are finished, or have come to the end of a segment, are kept."""

    def restore(self, samplers: Sequence[Sampler], chosen: list[Members], last: int) -> list[Any]:
        """Take up what is kept; returns which of the folds ``chosen`` remain."""

    def begin(self, block: list[Any], first: int) -> tuple[int, list[int]]:
        """Where a block goes on, and gradients of it so far."""

    def due(self) -> bool:
        """Whether it is time to keep a block that is not finished."""

    def segment(self, block: list[Any], spent: list[int], first: int) -> None:
        """Keep a block in the middle."""

    def end(self, block: list[Any], spent: list[int], last: int) -> None:
        """Note that a block is finished."""

    def flush(self, last: int) -> None:
        """Keep all blocks that are finished."""


def run_together(
    samplers: Sequence[Sampler],
    draws: int,
    again: Sequence[Members] | None = None,
    keeps: Keeps | None = None,
    elsewhere: Callable[..., Iterator[tuple[Sampler, Members, Segment, int]]] | None = None,
) -> Generator[tuple[Sampler, Members, Segment, int], None, None]:
    """Take every chain ``draws`` iterations further, after warm-up if it has not been done.

    With ``again``, positions of folds for each sampler: only these, warm-up and all their draws
    anew, from where their chains are.

    Yields, for each sampler of each block and segment, the positions of its folds in the block,
    what was recorded of them, and the number of iterations, negative during warm-up. ``keeps`` is
    where blocks are kept; what it has already is not run again. ``elsewhere`` runs them in place of
    this process.
    """
    first = samplers[0].done if again is None else 0
    last = max(first, samplers[0].warmup) + draws
    chosen = again or [np.arange(len(sampler.position)) for sampler in samplers]
    members = {id(sampler): own for sampler, own in zip(samplers, chosen, strict=True)}
    if again is not None:
        for sampler, own in zip(samplers, again, strict=True):
            sampler.begin_again(own)
    if keeps is not None:
        left = keeps.restore(samplers, list(chosen), last)
        members = {id(sampler): own for sampler, own in zip(samplers, left, strict=True)}
    try:
        if elsewhere is not None:
            left = [members[id(sampler)] for sampler in samplers]
            yield from elsewhere(samplers, left, first, last, keeps)
        for group in _groups(samplers) if elsewhere is None else ():
            program = group[0].program.compile()
            for pieces in _blocks(group, [members[id(sampler)] for sampler in group]):
                yield from run_block(program, pieces, first, last, keeps)
        for sampler in samplers:
            sampler.done = last
    finally:
        if keeps is not None:
            keeps.flush(last)


def _blocks(group: list[Sampler], chosen: list[Members]) -> Iterator[list[tuple[Sampler, Members]]]:
    """The chosen folds of all samplers, block by block."""
    owner = np.repeat(np.arange(len(group)), [len(members) for members in chosen])
    fold, size = np.concatenate(chosen), group[0].program.size.folds
    for start in range(0, len(fold), size):
        part = slice(start, start + size)
        yield [(group[who], fold[part][owner[part] == who]) for who in np.unique(owner[part])]


def run_block(
    program: Callable[[Any, Any], Any],
    pieces: list[tuple[Sampler, Members]],
    first: int,
    last: int,
    keeps: Keeps | None,
) -> Iterator[tuple[Sampler, Members, Segment, int]]:
    """Take the folds of one block from iteration ``first`` to ``last``, segment by segment."""
    head, spent = pieces[0][0], [0] * len(pieces)
    if keeps is not None:
        first, spent = keeps.begin(pieces, first)
    edges = np.cumsum([0, *(len(members) for _, members in pieces)])
    parts = [slice(*edge) for edge in pairwise(edges)]
    half, layout = head.warmup // 2, Layout(int(edges[-1]), head.program.size)
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
        for k, ((sampler, _), steps) in enumerate(zip(pieces, n_steps, strict=True)):
            spent[k] += int(steps[:, :count].sum()) * sampler.position.shape[1]
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
        if keeps is not None and first < last and keeps.due():
            _store_all(pieces, layout.pick(state))
            keeps.segment(pieces, spent, first)
    _store_all(pieces, layout.pick(state))
    for (sampler, _), gradients in zip(pieces, spent, strict=True):
        sampler.gradients += gradients
    if keeps is not None:
        keeps.end(pieces, spent, last)


def _store_all(pieces: list[tuple[Sampler, Members]], state: BlockState) -> None:
    """Give every sampler the state of its folds of a block."""
    start = 0
    for sampler, members in pieces:
        part = slice(start, start + len(members))
        sampler._store(members, jax.tree.map(lambda a, part=part: a[part], state))
        start += len(members)


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
