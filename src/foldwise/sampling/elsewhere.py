"""Chains of folds that run in other processes: of this machine, or of a cluster.

A piece is some folds of a sampler, with the state of their chains; a worker takes them further and
sends back what was recorded and where the chains are.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from foldwise.models.evaluate import values_held
from foldwise.sampling.blocks import Keeps, Members, Sampler, run_block, run_together
from foldwise.sampling.kernel import StepSize
from foldwise.sampling.metric import FoldMetric
from foldwise.sampling.program import BlockSize, Segment, block_size
from foldwise.support.runtime import alone
from foldwise.support.workers import PIECES_EACH, Job, Workers, spread, workers

# Folds of a piece where a block has fewer, while a piece is that small a share of a worker's: the
# last to finish is not waited for long. A fold takes as long in either (bench/cluster.py).
_MOST_FOLDS, _SMALL_SHARE = 16, 20

# ---------------------------------------------------------------- in a worker


class _Shared(NamedTuple):
    """Samplers without what is of folds, and the iterations that they run."""

    samplers: list[Sampler]
    first: int
    last: int


def _further(shared: _Shared, piece: dict[str, Any]) -> dict[str, Any]:
    """Take the folds of a piece further."""
    sampler, members = copy(shared.samplers[piece["sampler"]]), piece["members"]
    _fill(sampler, piece)
    sampler.program = replace(sampler.program, size=piece["size"])
    program = sampler.program.compile()
    block = [(sampler, members)]
    segments = run_block(program, block, shared.first, shared.last, None)
    records = [(record, count) for _, _, record, count in segments]
    return {
        "records": [(record if count > 0 else None, count) for record, count in records],
        "position": sampler.position[members],
        "steps": [part[members] for part in sampler.steps],
        "metric": _metric(sampler, members) if sampler.refine is not None else None,
        "gradients": sampler.gradients,
    }


def _metric(sampler: Sampler, members: Members) -> list[np.ndarray] | None:
    """Metrics of folds, where each has its own."""
    if not isinstance(sampler.metric, FoldMetric):
        return None
    return [np.asarray(part)[members] for part in sampler.metric]


_BY_FOLD = ("position", "lived", "finer", "far", "watched", "temper")


def _fill(sampler: Sampler, piece: dict[str, Any]) -> None:
    """Give a sampler without arrays those of the piece; of other folds there is nothing in them."""
    members, folds = piece["members"], len(sampler.folds)

    def roomy(values: np.ndarray) -> np.ndarray:
        room = np.zeros((folds, *values.shape[1:]), values.dtype)
        room[members] = values
        return room

    for name in _BY_FOLD:
        setattr(sampler, name, roomy(piece[name]))
    sampler.steps = StepSize(*map(roomy, piece["steps"]))
    if piece["metric"] is not None:
        sampler.metric = FoldMetric(*map(roomy, piece["metric"]))
    sampler.gradients = 0


# ---------------------------------------------------------------- here


@dataclass(frozen=True)
class _Piece:
    sampler: Sampler
    members: Members
    size: BlockSize

    def parcel(self, number: dict[int, int]) -> dict[str, Any]:
        """What a worker needs of it."""
        sampler, members = self.sampler, self.members
        parts: dict[str, Any] = {name: getattr(sampler, name)[members] for name in _BY_FOLD}
        parts |= {"sampler": number[id(sampler)], "members": members, "size": self.size}
        parts |= {"steps": [part[members] for part in sampler.steps]}
        return parts | {"metric": _metric(sampler, members)}

    def halves(self) -> list[_Piece]:
        """Parts of half the size; none of a single fold."""
        if len(self.members) == 1:
            return []
        size = _half(self.size)
        return [
            _Piece(self.sampler, self.members[start : start + size.folds], size)
            for start in range(0, len(self.members), size.folds)
        ]


def _bare(sampler: Sampler) -> Sampler:
    """A sampler without what there is of every fold, and without pilots."""
    bare = copy(sampler)
    bare.pilots = None
    for name in (*_BY_FOLD, "steps"):
        setattr(bare, name, None)
    if isinstance(sampler.metric, FoldMetric):
        bare.metric = None  # type: ignore[assignment]  # what travels has none
    return bare


def piece_size(sampler: Sampler, folds: int, count: int) -> BlockSize:
    """Size of the pieces of ``folds`` folds for ``count`` workers, each of which has one lane.

    A block, or where there are many, several: a scheduler then has fewer pieces to see to.
    """
    program = sampler.program
    values, chains = values_held(program.model), program.chains
    with alone():
        several = min(_MOST_FOLDS, folds // (_SMALL_SHARE * count))
        most = max(block_size(values, folds, chains).folds, several)
        of_piece = min(max(1, -(-folds // (PIECES_EACH * count))), most)
        size = block_size(values, of_piece, chains)
        chunks = max(size.chunks, -(-of_piece // size.chunk))
        return BlockSize(size.chunk, chunks, 1, size.chunk * chunks)


def run_elsewhere(
    samplers: Sequence[Sampler],
    chosen: Sequence[Members],
    first: int,
    last: int,
    keeps: Keeps | None,
    by: Workers,
) -> Generator[tuple[Sampler, Members, Segment, int], None, None]:
    """What ``run_together`` yields, from pieces that ``by`` does, as they come back."""
    size = piece_size(samplers[0], sum(map(len, chosen)), by.count)
    pieces = [
        _Piece(sampler, members[start : start + size.folds], size)
        for sampler, members in zip(samplers, chosen, strict=True)
        for start in range(0, len(members), size.folds)
    ]
    number = {id(sampler): k for k, sampler in enumerate(samplers)}
    job = Job(
        _further,
        _Shared([_bare(sampler) for sampler in samplers], first, last),
        lambda piece: piece.parcel(number),
        _Piece.halves,
        lambda piece: f"{len(piece.members)} folds",
        list({id(sampler): sampler.program.model for sampler in samplers}.values()),
    )
    for piece, found in spread(job, pieces, by):
        if found is None:
            yield from _segments(piece, _nothing(piece, last - max(first, samplers[0].warmup)))
            continue
        yield from _segments(piece, found)
        if keeps is not None:
            keeps.end([(piece.sampler, piece.members)], [found["gradients"]], last)


def _half(size: BlockSize) -> BlockSize:
    """A block of half as many folds."""
    if size.chunks > 1:
        chunks = size.chunks // 2
        return BlockSize(size.chunk, chunks, 1, size.chunk * chunks)
    chunk = max(1, size.chunk // 2)
    return BlockSize(chunk, 1, 1, chunk)


def _nothing(piece: _Piece, draws: int) -> dict[str, Any]:
    """What a piece gives that could not be done: no numbers, from which its folds are flagged."""
    sampler, members = piece.sampler, piece.members
    shapes = sampler.program.recorded(len(members), draws)
    record = jax.tree.map(
        lambda leaf: np.full(leaf.shape, np.nan if leaf.dtype.kind == "f" else 0, leaf.dtype),
        shapes,
    )
    return {
        "records": [(record, draws)],
        "position": sampler.position[members],
        "steps": [part[members] for part in sampler.steps],
        "metric": None,
        "gradients": 0,
    }


def _segments(
    piece: _Piece, found: dict[str, Any]
) -> Iterator[tuple[Sampler, Members, Segment, int]]:
    """Take over what a worker found, segment by segment."""
    sampler, members = piece.sampler, piece.members
    for record, count in found["records"]:
        yield sampler, members, record, count
    sampler.position[members] = found["position"]
    for mine, theirs in zip(sampler.steps, found["steps"], strict=True):
        mine[members] = theirs
    if found["metric"] is not None:
        for mine, theirs in zip(sampler.metric, found["metric"], strict=True):
            mine[members] = theirs
    sampler.gradients += found["gradients"]


def run_chains(
    samplers: Sequence[Sampler],
    draws: int,
    again: Sequence[Members] | None = None,
    keeps: Keeps | None = None,
) -> Generator[tuple[Sampler, Members, Segment, int], None, None]:
    """``run_together``, here or by the workers of the run at hand."""
    by = workers()
    elsewhere = None if by is None else partial(run_elsewhere, by=by)
    return run_together(samplers, draws, again, keeps, elsewhere)
