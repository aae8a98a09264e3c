"""Blocks of folds that run in other processes: of this machine, or of a cluster.

A piece is some folds of a sampler, with the state of their chains; a worker takes them further and
sends back what was recorded and where the chains are. It keeps the models it was sent, and the
programs that it compiled for them; a piece that needs a model which a worker does not have comes
back at once, and goes out again with the model.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import traceback
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    wait,
)
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from foldwise.models.model import Model
from foldwise.sampling.blocks import Keeps, Members, Sampler, run_block, run_together
from foldwise.sampling.kernel import StepSize
from foldwise.sampling.metric import FoldMetric
from foldwise.sampling.program import BlockSize, Segment, block_size
from foldwise.support.runtime import alone

# Times that a piece is tried before its folds are given up.
MOST_TRIES = 3
# Pieces for each worker: enough that the last to finish is not waited for long.
PIECES_EACH = 3
# Pieces that are under way for each worker: the next must be there when one is finished.
_UNDER_WAY = 2
# Words by which XLA and the system say that memory is lacking.
_NO_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "bad_alloc")


class LostExecutor(RuntimeError):
    """What was to do the work has gone."""


# ---------------------------------------------------------------- workers


@dataclass
class Workers:
    """An executor, and how many pieces it does at once."""

    executor: Executor
    count: int

    @classmethod
    def of(cls, executor: Any) -> Workers:
        """Workers of an executor of ``concurrent.futures``, or of a Dask client."""
        if hasattr(executor, "get_executor") and hasattr(executor, "nthreads"):
            count = sum(executor.nthreads().values())
            return cls(executor.get_executor(pure=False), max(count, 1))
        if not isinstance(executor, Executor):
            raise TypeError(
                "executor must be an executor of concurrent.futures or a dask.distributed.Client, "
                f"got {type(executor).__name__}"
            )
        return cls(executor, int(getattr(executor, "_max_workers", None) or 4))


_WORKERS: ContextVar[Workers | None] = ContextVar("workers", default=None)


def workers() -> Workers | None:
    """Who does the work of the run at hand; None: this process."""
    return _WORKERS.get()


@contextmanager
def working(executor: Any) -> Iterator[None]:
    """Within this, blocks of folds run in other processes."""
    token = _WORKERS.set(None if executor is None else Workers.of(executor))
    try:
        yield
    finally:
        _WORKERS.reset(token)


# ---------------------------------------------------------------- in a worker


# What this worker was sent, by digest: lists of models, lists of samplers; the newest last.
_KNOWN: dict[str, Any] = {}
_MOST_KNOWN = 16


def work(needed: dict[str, bytes | None], piece: dict[str, Any]) -> tuple[str, Any]:
    """Do a piece: "done" and what came of it, or why not.

    ``needed`` are models and the samplers of them, by digest, None where this worker should have
    them.
    """
    try:
        for digest, content in needed.items():
            if content is not None and digest not in _KNOWN:
                _KNOWN[digest] = _Loader(io.BytesIO(content)).load()
        missing = [digest for digest in needed if digest not in _KNOWN]
        if missing:
            return "missing", missing
        while len(_KNOWN) > _MOST_KNOWN:
            del _KNOWN[next(iter(_KNOWN))]
        *_, samplers = (_KNOWN[digest] for digest in needed)
        return "done", _done(copy(samplers[piece["sampler"]]), piece)
    except MemoryError as error:
        return "memory", str(error)
    except Exception as error:  # sent back as text: whatever it is may not travel
        said = "".join(traceback.format_exception_only(error)).strip()
        lacking = any(words in said for words in _NO_MEMORY)
        return ("memory" if lacking else "failed"), said


class _Loader(pickle.Unpickler):
    """Samplers, with models that came before."""

    def persistent_load(self, pid: Any) -> Any:
        digest, number = pid
        return _KNOWN[digest][number]


def _done(sampler: Sampler, piece: dict[str, Any]) -> dict[str, Any]:
    """Take the folds of a piece further."""
    members, size = piece["members"], piece["size"]
    _fill(sampler, piece)
    with alone():
        sampler.program = replace(sampler.program, size=size)
        program = sampler.program.compile()
        block = [(sampler, members)]
        segments = run_block(program, block, piece["first"], piece["last"], None)
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


@dataclass
class _Piece:
    sampler: Sampler
    members: Members
    size: BlockSize
    tries: int = 0
    lacks: tuple[str, ...] = ()  # what its worker did not have
    why: str = ""


class _Sender:
    """Sends pieces to workers; models, and samplers without what is of folds, travel apart."""

    def __init__(self, samplers: Sequence[Sampler], first: int, last: int):
        cloudpickle = _cloudpickle()
        self.times = {"first": first, "last": last}
        self.number = {id(sampler): k for k, sampler in enumerate(samplers)}
        models = {id(sampler.program.model): sampler.program.model for sampler in samplers}
        number = {key: k for k, key in enumerate(models)}
        content = cloudpickle.dumps(list(models.values()))
        digest = _digest(content)

        class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined]
            def persistent_id(self, value: Any) -> Any:
                known = isinstance(value, Model) and id(value) in number
                return (digest, number[id(value)]) if known else None

        stream = io.BytesIO()
        Pickler(stream).dump([_bare(sampler) for sampler in samplers])
        apart = stream.getvalue()
        self.needed = {digest: content, _digest(apart): apart}

    def send(self, executor: Executor, piece: _Piece) -> Future[Any]:
        """Let a worker do a piece."""
        sampler, members = piece.sampler, piece.members
        parts: dict[str, Any] = {name: getattr(sampler, name)[members] for name in _BY_FOLD}
        parts |= {"sampler": self.number[id(sampler)], "members": members, "size": piece.size}
        parts |= {"steps": [part[members] for part in sampler.steps], **self.times}
        parts |= {"metric": _metric(sampler, members)}
        needed = {
            key: content if key in piece.lacks else None for key, content in self.needed.items()
        }
        try:
            return executor.submit(work, needed, parts)
        except Exception as error:
            raise LostExecutor(f"the executor takes no more work: {error!r}") from error


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError(
            "executor= sends models to other processes with cloudpickle, which is not installed; "
            "pip install cloudpickle, or foldwise[cluster]"
        ) from error
    return cloudpickle


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _bare(sampler: Sampler) -> Sampler:
    """A sampler without what there is of every fold, and without pilots."""
    bare = copy(sampler)
    bare.pilots = None
    for name in (*_BY_FOLD, "steps"):
        setattr(bare, name, None)
    if isinstance(sampler.metric, FoldMetric):
        bare.metric = None  # type: ignore[assignment]
    return bare


def piece_size(sampler: Sampler, folds: int, count: int) -> BlockSize:
    """Size of the pieces of ``folds`` folds for ``count`` workers, each of which has one lane."""
    program = sampler.program
    with alone():
        of_piece = max(1, -(-folds // (PIECES_EACH * count)))
        most = block_size(program.model.n_obs, folds, program.chains).folds
        return block_size(program.model.n_obs, min(of_piece, most), program.chains)


def run_elsewhere(
    samplers: Sequence[Sampler],
    chosen: Sequence[Members],
    first: int,
    last: int,
    keeps: Keeps | None,
    by: Workers,
) -> Generator[tuple[Sampler, Members, Segment, int], None, None]:
    """What ``run_together`` yields, from pieces that ``by`` does, as they come back."""
    sizes = [piece_size(samplers[0], sum(map(len, chosen)), by.count)] * len(samplers)
    left = deque(
        _Piece(sampler, members[start : start + size.folds], size)
        for sampler, members, size in zip(samplers, chosen, sizes, strict=True)
        for start in range(0, len(members), size.folds)
    )
    sender, under_way = _Sender(samplers, first, last), dict[Future[Any], _Piece]()
    try:
        while left or under_way:
            while left and len(under_way) < _UNDER_WAY * by.count:
                piece = left.popleft()
                under_way[sender.send(by.executor, piece)] = piece
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                piece = under_way.pop(future)
                found = _outcome(future, piece, last - max(first, samplers[0].warmup))
                if found is None:
                    left.extendleft(_again(piece))
                    continue
                yield from _segments(piece, found)
                if keeps is not None:
                    keeps.end([(piece.sampler, piece.members)], [found["gradients"]], last)
    finally:
        for future in under_way:
            future.cancel()


def _outcome(future: Future[Any], piece: _Piece, draws: int) -> dict[str, Any] | None:
    """What came of a piece; None where it is to be done again, or in halves."""
    try:
        how, found = future.result()
    except (CancelledError, BrokenExecutor) as error:
        raise LostExecutor(
            f"the executor has ended ({error!r}) while pieces of folds were under way; start "
            "another, and pass checkpoint= for the same call to go on with what is finished"
        ) from error
    except Exception as error:
        how, found = "failed", f"{type(error).__name__}: {error}"
    if how == "done":
        done: dict[str, Any] = found
        return done
    piece.why = str(found)
    if how == "missing":
        piece.lacks = tuple({*piece.lacks, *found})
    elif how == "failed":
        piece.tries += 1
    elif len(piece.members) == 1:  # memory is lacking for a single fold
        piece.tries = MOST_TRIES
    if piece.tries < MOST_TRIES:
        if how == "memory":
            piece.size = _half(piece.size)
        return None
    names = len(piece.members)
    warnings.warn(
        f"{names} folds could not be done by the executor, and are flagged: {piece.why}",
        stacklevel=2,
    )
    return _nothing(piece, draws)


def _half(size: BlockSize) -> BlockSize:
    """A block of half as many folds."""
    if size.chunks > 1:
        chunks = size.chunks // 2
        return BlockSize(size.chunk, chunks, 1, size.chunk * chunks)
    chunk = max(1, size.chunk // 2)
    return BlockSize(chunk, 1, 1, chunk)


def _again(piece: _Piece) -> list[_Piece]:
    """What is to be done instead of a piece: the same, or parts that are not too large."""
    size = piece.size.folds
    return [
        replace(piece, members=piece.members[start : start + size])
        for start in range(0, len(piece.members), size)
    ]


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
