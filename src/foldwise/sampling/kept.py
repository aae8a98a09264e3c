"""Chains of folds that are kept as their blocks are finished, and taken up again.

What is kept of some folds is all that a block changes: the state of their chains, and what was
recorded of them. It replaces what is there, so that a block may be kept in the middle too, where
its chains have come to the end of a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int

from foldwise.sampling.blocks import Members, Sampler
from foldwise.sampling.metric import FoldMetric
from foldwise.sampling.run import Run
from foldwise.scores.evidence import PASSED
from foldwise.scores.sums import BlockSums
from foldwise.support.keeping import keeper

# Arrays, and which part of each belongs to some folds.
Places = Iterator[tuple[str, np.ndarray, Any]]
Block = list[tuple[Sampler, Members]]


class Recorder(Protocol):
    """Whose chains are sampled: what it records of folds."""

    sampler: Sampler

    def places(self, members: Members) -> Places:
        """What is recorded of folds, beside the state of their chains."""

    def more(self, members: Members) -> dict[str, Any]:
        """What else to keep of them."""

    def put_more(self, members: Members, kept: dict[str, Any]) -> None:
        """Take up what ``more`` gave."""


class BlockKeeper:
    """Keeps what the blocks of one call of ``run_together`` have done.

    ``skipped`` is called with the number of folds that need not be run again.
    """

    def __init__(self, name: str, recorders: Sequence[Recorder], skipped: Callable[[int], None]):
        self.keeper, self.stage = keeper(), keeper().stage(name)
        self.recorders, self.skipped = list(recorders), skipped
        self.number = {id(r.sampler): k for k, r in enumerate(self.recorders)}
        self.partial: dict[str, Any] | None = None
        self.pending: list[tuple[int, Members, int]] = []
        self.files = 0

    def restore(self, samplers: Sequence[Sampler], chosen: list[Members], last: int) -> list[Any]:
        """Take up what is kept; returns which of the folds ``chosen`` remain."""
        left = {self.number[id(s)]: own for s, own in zip(samplers, chosen, strict=True)}
        for tree in self.keeper.found(self.stage):
            self.files += 1
            if tree["first"] < last:
                self.partial = tree
                continue
            for part in tree["parts"]:
                self._put(part)
                k, members = part["sampler"], part["members"]
                left[k] = np.setdiff1d(left[k], members, assume_unique=True)
                self.skipped(len(members))
        return [left[self.number[id(s)]] for s in samplers]

    def begin(self, block: Block, first: int) -> tuple[int, list[int]]:
        """Where a block goes on: in the middle, where it was kept; gradients of it so far."""
        tree = self.partial
        spent = [0] * len(block)
        if tree is None or len(tree["parts"]) != len(block):
            return first, spent
        for part, (sampler, members) in zip(tree["parts"], block, strict=True):
            same = part["sampler"] == self.number[id(sampler)]
            if not same or not np.array_equal(part["members"], members):
                return first, spent
        self.partial = None
        for part in tree["parts"]:
            self._put({**part, "gradients": 0})
        return int(tree["first"]), [part["gradients"] for part in tree["parts"]]

    def due(self) -> bool:
        """Whether it is time to keep a block that is not finished."""
        return self.keeper.due()

    def segment(self, block: Block, spent: list[int], first: int) -> None:
        """Keep a block in the middle."""
        parts = [
            self._part(self.number[id(sampler)], members, gradients)
            for (sampler, members), gradients in zip(block, spent, strict=True)
        ]
        self.keeper.save(f"{self.stage}-part", {"first": first, "parts": parts})

    def end(self, block: Block, spent: list[int], last: int) -> None:
        """Note that a block is finished; several that are quick are kept together."""
        for (sampler, members), gradients in zip(block, spent, strict=True):
            self.pending.append((self.number[id(sampler)], members, gradients))
        if self.keeper.due():
            self.flush(last)

    def flush(self, last: int) -> None:
        """Keep all blocks that are finished."""
        if self.pending:
            parts = [self._part(*done) for done in self.pending]
            self.keeper.save(f"{self.stage}-{self.files}", {"first": last, "parts": parts})
            self.files, self.pending = self.files + 1, []

    def _part(self, k: int, members: Members, gradients: int) -> dict[str, Any]:
        """All that is known of some folds of a sampler, as copies."""
        recorder = self.recorders[k]
        sampler = recorder.sampler
        refined = members[sampler.far[members]] if sampler.refine is not None else members[:0]
        metric = sampler.metric if isinstance(sampler.metric, FoldMetric) else ()
        places = [*_chains(sampler, members), *recorder.places(members)]
        return {
            "sampler": k,
            "members": np.array(members),
            "gradients": gradients,
            "arrays": {name: array[index].copy() for name, array, index in places},
            "metric": [np.asarray(part)[refined].copy() for part in metric],
            "more": recorder.more(members),
        }

    def _put(self, part: dict[str, Any]) -> None:
        """Take up what ``_part`` gave."""
        recorder, members = self.recorders[part["sampler"]], part["members"]
        sampler = recorder.sampler
        for name, array, index in [*_chains(sampler, members), *recorder.places(members)]:
            array[index] = part["arrays"][name]
        refined = members[sampler.far[members]] if sampler.refine is not None else members[:0]
        for mine, kept in zip(
            sampler.metric if part["metric"] else (), part["metric"], strict=True
        ):
            mine[refined] = kept
        recorder.put_more(members, part["more"])
        sampler.gradients += part["gradients"]


def _chains(sampler: Sampler, members: Members) -> Places:
    """The state of the chains of folds."""
    yield "position", sampler.position, members
    for name, array in zip(sampler.steps._fields, sampler.steps, strict=True):
        yield name, array, members


class RunRecorder:
    """What a run records of folds; draws from ``begun`` on are those of the call at hand."""

    def __init__(self, run: Run, begun: int):
        self.run, self.sampler, self.begun = run, run.sampler, begun

    def places(self, members: Members) -> Places:
        """What is recorded of folds, beside the state of their chains."""
        run, evidence, new = self.run, self.run.evidence, slice(self.begun, None)
        sums, watch = evidence.sums, evidence.pace.watch
        for name in ("acceptance", "divergences", "moves"):
            yield name, getattr(run, name), members
        kept = ("draws", "centre", "log_sum", "log_square", "total", "square", "largest")
        for name in (*kept, "not_finite", "undefined"):
            yield f"sums.{name}", getattr(sums, name), members
        if sums.rows is not None:
            for name in ("log_sum", "log_square", "largest"):
                yield f"rows.{name}", getattr(sums.rows, name), sums.rows.of(members)
        if sums.grid is not None:
            for name in ("total", "square"):
                yield f"grid.{name}", getattr(sums.grid, name), members
        for name in ("draws", "centre", "total", "square"):
            yield f"watch.{name}", getattr(watch, name), members
        every = slice(None)
        if evidence.draws is not None:
            yield "log_scores", evidence.draws, (members, every, new)
        if evidence.position is not None:
            yield "positions", evidence.position, (members, every, new)
        if evidence.outcomes is not None and evidence.outcomes.replicate is not None:
            start = evidence.folds.test_start
            rows = np.concatenate([np.arange(start[k], start[k + 1]) for k in members])
            yield "replicates", evidence.outcomes.replicate, (rows, every, new)

    def more(self, members: Members) -> dict[str, Any]:
        """Contributions to other scores, which grow as they come."""
        found = {}
        for name, sums, own in self._contributions(members):
            units = sums.units(own)
            found[name] = [sums.total[units].copy(), sums.shift[units], sums.draws[own]]
        return found

    def put_more(self, members: Members, kept: dict[str, Any]) -> None:
        """Take up what ``more`` gave."""
        for name, sums, own in self._contributions(members):
            total, shift, draws = kept[name]
            units, (blocks, features) = sums.units(own), total.shape[2:]
            if blocks:
                sums._reach(blocks - 1, features)
            sums.total[units] = 0.0
            sums.total[units, :, :blocks, :features] = total
            sums.shift[units], sums.draws[own] = shift, draws

    def _contributions(
        self, members: Members
    ) -> Iterator[tuple[str, BlockSums, Int[np.ndarray, " fold"]]]:
        outcomes, served = self.run.evidence.outcomes, self.run.evidence.previous[members]
        for name, sums in outcomes.contributions.items() if outcomes else ():
            yield name, sums, served[served >= 0] if name == PASSED else members


def keeper_of_blocks(
    name: str, recorders: Sequence[Recorder], skipped: Callable[[int], None] = lambda folds: None
) -> BlockKeeper | None:
    """What keeps the blocks of a call of ``run_together``; None where nothing is kept."""
    return BlockKeeper(name, recorders, skipped) if keeper().keeps else None
