"""Running sums of the chains' log scores, whose memory does not grow with the run.

The draws of a chain are cut into at most ``BLOCKS`` consecutive blocks of equal length. When all
blocks are full, neighbours are merged and the length doubles, so a run can go on without knowing
how long it will be. The block sums serve the estimate, batch means, R-hat and its shuffled
benchmark alike; ``memory="draws"`` keeps every draw besides and changes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from jaxtyping import Float, Int

from foldwise.folds.ragged import concatenated_ranges

BLOCKS = 64
# Blocks of what is watched, which has many directions: enough to see correlation between them.
WATCH_BLOCKS = 16
# Largest values kept per fold for the Pareto tail fit: its tail has 3 sqrt(draws) of them, so 200
# serve 4,444 draws; longer runs use the 200 largest.
TAIL = 200
# Bridge constants at which online sums are kept, in nats around the full-data guess.
GRID = np.array([-6.0, -4.0, -2.5, -1.25, 0.0, 1.25, 2.5, 4.0, 6.0])


def block_length(draws: int, batch: int, blocks: int = BLOCKS) -> int:
    """Length of the blocks of a chain of ``draws``: batch times the power of two that it takes."""
    length = batch
    while draws > blocks * length:
        length *= 2
    return length


@dataclass
class RowSums:
    """Sums over the draws for each test row, in the blocks of :class:`RunningSums`.

    With s the log density of a row at a draw: ``log_sum`` is the log of the sum of exp(s) in each
    block, ``log_square`` that of exp(2 s) over the chain, ``largest`` the largest s. Rows of a fold
    begin at ``start``.
    """

    start: Int[np.ndarray, " fold1"]
    log_sum: Float[np.ndarray, "row chain block"]
    log_square: Float[np.ndarray, "row chain"]
    largest: Float[np.ndarray, "row tail"]

    @classmethod
    def empty(cls, start: Int[np.ndarray, " fold1"], chains: int) -> RowSums:
        """Sums before the first draw."""
        rows = int(start[-1])
        shapes = ((rows, chains, BLOCKS), (rows, chains), (rows, TAIL))
        return cls(start, *(np.full(shape, -np.inf) for shape in shapes))

    def of(self, members: Int[np.ndarray, " fold"]) -> Int[np.ndarray, " row"]:
        """Test rows of the folds ``members``, one fold after the other."""
        return concatenated_ranges(self.start, members)

    def forget(self, members: Int[np.ndarray, " fold"]) -> None:
        """Forget all draws of the folds ``members``."""
        rows = self.of(members)
        for lines in (self.log_sum, self.log_square, self.largest):
            lines[rows] = -np.inf

    def add(
        self,
        members: Int[np.ndarray, " fold"],
        block: int,
        values: Float[np.ndarray, "row chain draw"],
    ) -> None:
        """Add draws that belong to one block."""
        rows = self.of(members)
        _log_add(self.log_sum, (rows, slice(None), block), values)
        _log_add(self.log_square, rows, 2.0 * values)

    def first(self, blocks: int) -> RowSums:
        """What the first ``blocks`` blocks hold; what is kept over whole chains becomes unknown."""
        rows, chains = self.log_square.shape
        unknown, none = np.full((rows, chains), np.nan), np.full((rows, 1), -np.inf)
        return RowSums(self.start, self.log_sum[..., :blocks], unknown, none)


@dataclass
class BridgeGrid:
    """The folds' side of their bridges at a grid of constants, for runs that keep no draws.

    ``total`` sums expit(sign (s - node)) in each block for each target and node, ``square`` its
    squares over the chain; sign is 1 for the fold's own test rows, -1 for another's.
    """

    nodes: Float[np.ndarray, "fold target node"]
    total: Float[np.ndarray, "fold target chain block node"]
    square: Float[np.ndarray, "fold target chain node"]

    @classmethod
    def empty(cls, nodes: Float[np.ndarray, "fold target node"], chains: int) -> BridgeGrid:
        """Sums before the first draw."""
        folds, targets, size = nodes.shape
        total = np.zeros((folds, targets, chains, BLOCKS, size))
        return cls(nodes, total, np.zeros((folds, targets, chains, size)))

    def forget(self, members: Int[np.ndarray, " fold"]) -> None:
        """Forget all draws of the folds ``members``."""
        self.total[members] = self.square[members] = 0.0

    def add(
        self,
        members: Int[np.ndarray, " fold"],
        block: int,
        scores: Float[np.ndarray, "fold chain draw target"],
    ) -> None:
        """Add draws that belong to one block."""
        for target in range(scores.shape[3]):
            sign = 1.0 if target == 0 else -1.0
            nodes = self.nodes[members, target][:, None, None, :]
            values = scipy.special.expit(sign * (scores[..., target, None] - nodes))
            self.total[members, target, :, block] += values.sum(axis=2)
            self.square[members, target] += (values**2).sum(axis=2)


@dataclass
class RunningSums:
    """Sums over the draws of every fold and chain, in blocks of consecutive draws.

    With s the log score of a draw (joint log density of the fold's test rows):

    ``log_sum``     log of the sum of exp(s) in each block
    ``log_square``  log of the sum of exp(2 s) over the chain
    ``total``       sum of s - centre in each block
    ``square``      sum of (s - centre)^2 in each block
    ``largest``     the largest s of the fold
    ``rows``        the same for each test row, where recorded
    ``grid``        the bridge's fold side, where draws are not kept
    """

    batch: int
    draws: Int[np.ndarray, " fold"]
    centre: Float[np.ndarray, " fold"]
    log_sum: Float[np.ndarray, "fold chain block"]
    log_square: Float[np.ndarray, "fold chain"]
    total: Float[np.ndarray, "fold chain block"]
    square: Float[np.ndarray, "fold chain block"]
    largest: Float[np.ndarray, "fold tail"]
    not_finite: Int[np.ndarray, " fold"]
    undefined: Int[np.ndarray, " fold"]
    rows: RowSums | None = None
    grid: BridgeGrid | None = None

    @classmethod
    def saved(cls, **fields: Any) -> RunningSums:
        """From the fields of a file; older ones had those of rows and grid among them."""
        if "row_start" not in fields:
            return cls(**fields)
        names = ("row_start", "row_log_sum", "row_log_square", "row_largest")
        rows = [fields.pop(name) for name in names]
        grid = [fields.pop(name) for name in ("nodes", "grid", "grid_square")]
        return cls(
            **fields,
            rows=None if rows[0] is None else RowSums(*rows),
            grid=None if grid[0] is None else BridgeGrid(*grid),
        )

    @classmethod
    def empty(
        cls,
        folds: int,
        chains: int,
        batch: int,
        row_start: Int[np.ndarray, " fold1"] | None = None,
        nodes: Float[np.ndarray, "fold target node"] | None = None,
    ) -> RunningSums:
        """Sums before the first draw."""
        blocks = (folds, chains, BLOCKS)
        return cls(
            batch=batch,
            draws=np.zeros(folds, np.int64),
            centre=np.zeros(folds),
            log_sum=np.full(blocks, -np.inf),
            log_square=np.full((folds, chains), -np.inf),
            total=np.zeros(blocks),
            square=np.zeros(blocks),
            largest=np.full((folds, TAIL), -np.inf),
            not_finite=np.zeros(folds, np.int64),
            undefined=np.zeros(folds, np.int64),
            rows=None if row_start is None else RowSums.empty(row_start, chains),
            grid=None if nodes is None else BridgeGrid.empty(nodes, chains),
        )

    def forget(self, members: Int[np.ndarray, " fold"]) -> None:
        """Forget all draws of the folds ``members``."""
        self.draws[members] = self.not_finite[members] = self.undefined[members] = 0
        for array in (self.centre, self.total, self.square):
            array[members] = 0.0
        for array in (self.log_sum, self.log_square, self.largest):
            array[members] = -np.inf
        for part in (self.rows, self.grid):
            if part is not None:
                part.forget(members)

    def update(
        self,
        members: Int[np.ndarray, " fold"],
        scores: Float[np.ndarray, "fold chain draw target"],
        rows: Float[np.ndarray, "row chain draw"] | None = None,
    ) -> None:
        """Add consecutive draws of the folds ``members``, all of which have as many so far."""
        first, last = int(self.draws[members[0]]), int(self.draws[members[0]]) + scores.shape[2]
        self._update_tail(members, scores[..., 0])
        if rows is not None and self.rows is not None:
            _keep_largest(self.rows.largest, self.rows.of(members), rows)
        if first == 0:
            with np.errstate(invalid="ignore"):
                finite = np.where(np.isfinite(scores[..., 0]), scores[..., 0], np.nan)
            counted = np.maximum(np.isfinite(finite).sum(axis=(1, 2)), 1)
            self.centre[members] = np.nansum(finite, axis=(1, 2)) / counted
        begin = first
        while begin < last:
            length = block_length(begin + 1, self.batch)
            if begin and length > block_length(begin, self.batch):
                self._merge_neighbours(members)
            end = min(last, (begin // length + 1) * length)
            part = slice(begin - first, end - first)
            row_part = None if rows is None else rows[:, :, part]
            self._add(members, begin // length, scores[:, :, part], row_part)
            begin = end
        self.draws[members] = last

    def _update_tail(
        self, members: Int[np.ndarray, " fold"], scores: Float[np.ndarray, "fold chain draw"]
    ) -> None:
        flat = scores.reshape(len(members), -1)
        self.not_finite[members] += (~np.isfinite(flat)).sum(axis=1)
        self.undefined[members] += (np.isnan(flat) | (flat == np.inf)).sum(axis=1)
        _keep_largest(self.largest, members, scores)

    def _add(
        self,
        members: Int[np.ndarray, " fold"],
        block: int,
        scores: Float[np.ndarray, "fold chain draw target"],
        rows: Float[np.ndarray, "row chain draw"] | None,
    ) -> None:
        own = scores[..., 0]
        with np.errstate(invalid="ignore", over="ignore"):
            centred = own - self.centre[members][:, None, None]
            self.total[members, :, block] += centred.sum(axis=2)
            self.square[members, :, block] += (centred**2).sum(axis=2)
        _log_add(self.log_sum, (members, slice(None), block), own)
        _log_add(self.log_square, members, 2.0 * own)
        if rows is not None and self.rows is not None:
            self.rows.add(members, block, rows)
        if self.grid is not None:
            self.grid.add(members, block, scores)

    def _merge_neighbours(self, members: Int[np.ndarray, " fold"]) -> None:
        half = BLOCKS // 2

        def merge(array: np.ndarray, index: Any, log: bool, axis: int = 2) -> None:
            old = np.moveaxis(array[index], axis, 0)
            new = np.full_like(old, -np.inf) if log else np.zeros_like(old)
            new[:half] = np.logaddexp(old[::2], old[1::2]) if log else old[::2] + old[1::2]
            array[index] = np.moveaxis(new, 0, axis)

        merge(self.log_sum, members, log=True)
        merge(self.total, members, log=False)
        merge(self.square, members, log=False)
        if self.rows is not None:
            merge(self.rows.log_sum, self.rows.of(members), log=True)
        if self.grid is not None:
            merge(self.grid.total, members, log=False, axis=3)

    @property
    def length(self) -> int:
        """Draws in a full block (the batch length of batch means); all folds have it in common."""
        return block_length(int(self.draws[0]), self.batch)

    @property
    def full_blocks(self) -> int:
        """Number of full blocks in each chain."""
        return int(self.draws[0]) // self.length

    @property
    def block_draws(self) -> Int[np.ndarray, " block"]:
        """Number of draws in each block, the last of which may be shorter."""
        draws = int(self.draws[0])
        ends = np.minimum(np.arange(1, BLOCKS + 1) * self.length, draws)
        starts = np.minimum(np.arange(BLOCKS) * self.length, draws)
        counts = ends - starts
        return counts[counts > 0]


@dataclass
class BlockSums:
    """Sums of what each draw contributes to a score, in the blocks of :class:`RunningSums`.

    A unit is a fold or a test row; ``start`` is the first unit of each fold. Where contributions
    carry weights, ``total`` sums exp(log weight - ``shift``) times them, ``shift`` being the unit's
    largest log weight so far.
    """

    batch: int
    start: Int[np.ndarray, " fold1"]
    draws: Int[np.ndarray, " fold"]
    total: Float[np.ndarray, "unit chain block feature"]
    shift: Float[np.ndarray, " unit"]

    @classmethod
    def empty(cls, start: Int[np.ndarray, " fold1"], chains: int, batch: int) -> BlockSums:
        """Sums before the first draw; features and blocks are added as they come."""
        units = int(start[-1])
        draws = np.zeros(len(start) - 1, np.int64)
        shift = np.full(units, -np.inf)
        return cls(batch, start, draws, np.zeros((units, chains, 0, 0)), shift)

    def units(self, members: Int[np.ndarray, " fold"]) -> Int[np.ndarray, " unit"]:
        """Units of the folds ``members``, one fold after the other."""
        return concatenated_ranges(self.start, members)

    def forget(self, members: Int[np.ndarray, " fold"]) -> None:
        """Forget all draws of the folds ``members``."""
        units = self.units(members)
        self.total[units], self.shift[units], self.draws[members] = 0.0, -np.inf, 0

    def update(
        self,
        members: Int[np.ndarray, " fold"],
        values: Float[np.ndarray, "unit chain draw feature"],
        log_weight: Float[np.ndarray, "unit chain draw"] | None = None,
    ) -> None:
        """Add consecutive draws of the folds ``members``, all of which have as many so far."""
        units = self.units(members)
        if log_weight is not None:
            values = values * self._weights(units, log_weight)[..., None]
        begin, done = int(self.draws[members[0]]), 0
        while done < values.shape[2]:
            length = block_length(begin + 1, self.batch)
            if begin and length > block_length(begin, self.batch):
                self.total[units] = _merged_pairs(self.total[units])
            block = begin // length
            self._reach(block, values.shape[3])
            count = min(values.shape[2] - done, (block + 1) * length - begin)
            self.total[units, :, block] += values[:, :, done : done + count].sum(axis=2)
            begin, done = begin + count, done + count
        self.draws[members] = begin

    def _reach(self, block: int, features: int) -> None:
        """Make room for a block, and for the features when they first come."""
        have = self.total.shape
        missing = max(block + 1 - have[2], 0)
        if missing or features > have[3]:
            room = ((0, 0), (0, 0), (0, missing), (0, features - have[3]))
            self.total = np.pad(self.total, room)

    def _weights(
        self, units: Int[np.ndarray, " unit"], log_weight: Float[np.ndarray, "unit chain draw"]
    ) -> Float[np.ndarray, "unit chain draw"]:
        """Weights of new draws relative to the largest so far, to which older sums are scaled."""
        old = self.shift[units]
        new = np.fmax(old, np.where(np.isnan(log_weight), -np.inf, log_weight).max(axis=(1, 2)))
        finite = np.isfinite(new)
        with np.errstate(invalid="ignore"):
            scale = np.where(finite, np.exp(old - np.where(finite, new, 0.0)), 1.0)
            self.total[units] *= scale[:, None, None, None]
            self.shift[units] = new
            return np.exp(log_weight - np.where(finite, new, 0.0)[:, None, None])


@dataclass
class Watch:
    """How slowly the chains move: sums of some directions over blocks of consecutive draws.

    A direction is a coordinate of the position, or the log density. ``total`` sums the distance
    from ``centre``, the fold's first draw, over each of at most ``WATCH_BLOCKS`` blocks; ``square``
    sums its square over all draws. ``earlier`` is what was seen of folds that are tried again, in
    the try before, NaN of others; None while no fold is.
    """

    batch: int
    draws: Int[np.ndarray, " fold"]
    centre: Float[np.ndarray, "fold direction"]
    total: Float[np.ndarray, "fold chain block direction"]
    square: Float[np.ndarray, "fold direction"]
    earlier: Float[np.ndarray, "fold chain block direction"] | None = None

    @classmethod
    def empty(cls, folds: int, chains: int, directions: int, batch: int) -> Watch:
        """Sums before the first draw."""
        total = np.zeros((folds, chains, WATCH_BLOCKS, directions))
        nothing = np.zeros((folds, directions))
        return cls(batch, np.zeros(folds, np.int64), nothing, total, nothing.copy())

    def forget(self, members: Int[np.ndarray, " fold"]) -> None:
        """Forget all draws of the folds ``members`` but their block means."""
        means = self.means + self.centre[:, None, None]
        if self.earlier is None:
            self.earlier = np.full_like(means, np.nan)
        self.earlier[members] = means[members]
        self.draws[members] = 0
        self.total[members] = self.square[members] = 0.0

    def update(
        self,
        members: Int[np.ndarray, " fold"],
        values: Float[np.ndarray, "fold chain draw direction"],
    ) -> None:
        """Add consecutive draws of the folds ``members``, all of which have as many so far."""
        begin, done = int(self.draws[members[0]]), 0
        if begin == 0:
            self.centre[members] = np.nan_to_num(values[:, 0, 0])
        values = values - self.centre[members][:, None, None]
        self.square[members] += (values**2).sum(axis=(1, 2))
        while done < values.shape[2]:
            length = block_length(begin + 1, self.batch, WATCH_BLOCKS)
            if begin and length > block_length(begin, self.batch, WATCH_BLOCKS):
                self.total[members] = _merged_pairs(self.total[members])
            block = begin // length
            count = min(values.shape[2] - done, (block + 1) * length - begin)
            self.total[members, :, block] += values[:, :, done : done + count].sum(axis=2)
            begin, done = begin + count, done + count
        self.draws[members] = begin

    @property
    def length(self) -> int:
        """Draws in a full block."""
        return block_length(int(self.draws[0]), self.batch, WATCH_BLOCKS)

    @property
    def means(self) -> Float[np.ndarray, "fold chain block direction"]:
        """Means of the full blocks."""
        return self.total[:, :, : int(self.draws[0]) // self.length] / self.length

    @property
    def variance(self) -> Float[np.ndarray, "fold direction"]:
        """Variance of each direction over all draws of a fold."""
        count = int(self.draws[0]) * self.total.shape[1]
        mean = self.total.sum(axis=(1, 2)) / count
        return np.maximum(self.square / count - mean**2, 0.0)


def _merged_pairs(total: Float[np.ndarray, "unit chain block feature"]) -> np.ndarray:
    """Blocks merged in pairs, the other half empty."""
    merged = np.zeros_like(total)
    merged[:, :, : total.shape[2] // 2] = total[:, :, ::2] + total[:, :, 1::2]
    return merged


def _log_add(array: Any, index: object, scores: np.ndarray) -> None:
    """Add the sum of exp(scores) over their last axis (draws) to exp(array[index]), in logs."""
    with np.errstate(invalid="ignore", divide="ignore"):
        array[index] = np.logaddexp(array[index], scipy.special.logsumexp(scores, axis=2))


def _keep_largest(largest: Any, index: Any, scores: np.ndarray) -> None:
    """Merge the scores of each line into the largest kept for it."""
    flat = scores.reshape(len(scores), -1)
    flat = np.where(np.isnan(flat), -np.inf, flat)
    both = np.concatenate([largest[index], flat], axis=1)
    largest[index] = np.partition(both, -TAIL, axis=1)[:, -TAIL:]
