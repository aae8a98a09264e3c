"""Work that other processes do: of this machine, or of a cluster.

Work is done in pieces: of folds, or of draws. A worker keeps the models it was sent, with the
programs that it compiled for them, and what all pieces of a job share; a piece that needs what a
worker does not have comes back at once, and goes out again with it.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from jaxtyping import Int

from foldwise.support.keeping import Finished
from foldwise.support.runtime import alone

P = TypeVar("P")
Members = Int[np.ndarray, " member"]
# Times that a piece is tried before it is given up.
MOST_TRIES = 3
# Pieces for each worker: enough that the last to finish is not waited for long.
PIECES_EACH = 3
# Pieces that are under way for each worker: the next must be there when one is finished.
_UNDER_WAY = 2
# Seconds after which it is looked whether the executor has gone.
_LOOK_SECONDS = 1.0
# Words by which XLA and the system say that memory is lacking.
_NO_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "bad_alloc")


class LostExecutor(RuntimeError):
    """What was to do the work has gone."""


# ---------------------------------------------------------------- workers


@dataclass
class Workers:
    """An executor, how many pieces it does at once, and the models of the run."""

    executor: Executor
    count: int
    models: Sequence[Any]
    packs: dict[int, tuple[Any, str, bytes]] = field(default_factory=dict)

    @classmethod
    def of(cls, executor: Any, models: Sequence[Any]) -> Workers:
        """Workers of an executor of ``concurrent.futures``, or of a Dask client."""
        if hasattr(executor, "get_executor") and hasattr(executor, "nthreads"):
            count = sum(executor.nthreads().values())
            return cls(executor.get_executor(pure=False), max(count, 1), models)
        if not isinstance(executor, Executor):
            raise TypeError(
                "executor must be an executor of concurrent.futures or a dask.distributed.Client, "
                f"got {type(executor).__name__}"
            )
        _check_not_forked(executor)
        return cls(executor, int(getattr(executor, "_max_workers", None) or 4), models)

    @cached_property
    def packed(self) -> tuple[str, bytes]:
        """The models as bytes, and their digest; all of a family, which share their programs."""
        dumps = _cloudpickle().dumps
        try:
            content = dumps(list(self.models))
        except Exception as error:
            raise TypeError(
                "executor= sends models to other processes, so that all they use must be such as "
                f"pickle can store, but there is what cannot be: {error}; leave open files, locks "
                "and generators out of what the model's functions use"
            ) from error
        return _digest(content), content

    def packed_with(self, model: Any) -> tuple[str, bytes]:
        """A model made of one of the run, as bytes, and its digest: the same whenever asked."""
        if id(model) not in self.packs:
            content = _dumped([model], self.places())
            self.packs[id(model)] = model, _digest(content), content
        return self.packs[id(model)][1:]

    def places(self) -> dict[int, tuple[str, int]]:
        """Where workers find each model: in which list, and at which place of it."""
        return {id(model): (self.packed[0], k) for k, model in enumerate(self.models)}

    def size(self, members: int) -> int:
        """Members of a piece, such that there are enough pieces for all workers."""
        return max(1, -(-members // (PIECES_EACH * self.count)))


def _check_not_forked(executor: Any) -> None:
    """Raise where processes would be forked from this one, in which JAX has threads.

    A ``ProcessPoolExecutor`` starts them when work is sent, after the full-data fit; before Python
    3.14 it forks unless it is told otherwise.
    """
    context = getattr(executor, "_mp_context", None)
    method = "" if context is None else context.get_start_method()
    if method == "fork" and not getattr(executor, "_processes", None):
        raise ValueError(
            "executor must start its processes anew, but would fork this one, of which JAX does "
            'not allow a copy; give it mp_context=multiprocessing.get_context("spawn")'
        )


_WORKERS: ContextVar[Workers | None] = ContextVar("workers", default=None)


def workers() -> Workers | None:
    """Who does the work of the run at hand; None: this process."""
    return _WORKERS.get()


@contextmanager
def working(executor: Any, models: Sequence[Any]) -> Iterator[None]:
    """Within this, pieces of work on ``models`` are done by an executor, where one is given."""
    chosen = None if executor is None else Workers.of(executor, models)
    if chosen is not None:
        _ = chosen.packed  # what cannot travel is refused before any work
    token = _WORKERS.set(chosen)
    try:
        yield
    finally:
        _WORKERS.reset(token)


# ---------------------------------------------------------------- in a worker


# What this worker was sent, by digest: lists of models, what jobs share; the last used last.
_KNOWN: dict[str, Any] = {}
_MOST_KNOWN = 16
_LOCK = threading.Lock()


def work(needed: dict[str, bytes | None], do: Callable[..., Any], parcel: Any) -> tuple[str, Any]:
    """Do a piece: "done" and what came of it, or why not.

    ``needed`` are models and, last, what the job shares, by digest, None where this worker should
    have them.
    """
    try:
        with _LOCK:
            # first of all: what jobs share cannot be read without its models, which a worker that
            # has taken another's place may lack
            missing = [key for key, sent in needed.items() if sent is None and key not in _KNOWN]
            if missing:
                return "missing", missing
            for digest, content in needed.items():
                if content is not None and digest not in _KNOWN:
                    _KNOWN[digest] = _Loader(io.BytesIO(content)).load()
            for digest in needed:  # models are needed for longer than what came after them
                shared = _KNOWN[digest] = _KNOWN.pop(digest)
            while len(_KNOWN) > _MOST_KNOWN:
                del _KNOWN[next(iter(_KNOWN))]
        with alone():
            return "done", do(shared, parcel)
    except MemoryError as error:
        return "memory", str(error)
    except Exception as error:  # sent back as text: whatever it is may not travel
        said = "".join(traceback.format_exception_only(error)).strip()
        lacking = any(words in said for words in _NO_MEMORY)
        return ("memory" if lacking else "failed"), said


class _Loader(pickle.Unpickler):
    """What jobs share, with models that came before."""

    def persistent_load(self, pid: Any) -> Any:
        digest, number = pid
        return _KNOWN[digest][number]


# ---------------------------------------------------------------- here


@dataclass(frozen=True)
class Job(Generic[P]):
    """What is done with pieces: ``do(shared, parcel(piece))``.

    ``do`` must be a function of a module. ``shared`` travels once to each worker, a parcel with
    each piece. ``halves`` gives two smaller pieces in place of one, none where it is the smallest;
    ``name`` says of a piece what it is of. ``models`` are used that may not be the run's own.
    """

    do: Callable[[Any, Any], Any]
    shared: Any
    parcel: Callable[[P], Any]
    halves: Callable[[P], Sequence[P]]
    name: Callable[[P], str]
    models: Sequence[Any] = ()


@dataclass
class _UnderWay(Generic[P]):
    piece: P
    tries: int = 0
    lacks: tuple[str, ...] = ()  # what its worker did not have


class _Sender(Generic[P]):
    """Sends pieces of a job to workers; models, and what pieces share, travel apart."""

    def __init__(self, job: Job[P], by: Workers):
        self.job, self.by, places = job, by, by.places()
        needed = [by.packed]
        for model in job.models:
            if id(model) not in places:
                needed.append(by.packed_with(model))
                places[id(model)] = needed[-1][0], 0
        shared = _dumped(job.shared, places)
        self.needed = {digest: content for digest, content in (*needed, (_digest(shared), shared))}

    def send(self, sent: _UnderWay[P]) -> Future[Any]:
        """Let a worker do a piece."""
        needed = {
            key: content if key in sent.lacks else None for key, content in self.needed.items()
        }
        try:
            with warnings.catch_warnings():  # Dask's, of models that close over many rows
                warnings.filterwarnings("ignore", "Sending large graph")
                parcel = self.job.parcel(sent.piece)
                return self.by.executor.submit(work, needed, self.job.do, parcel)
        except Exception as error:
            raise LostExecutor(f"the executor takes no more work: {error!r}") from error


def _dumped(value: Any, places: dict[int, tuple[str, int]]) -> bytes:
    """``value`` as bytes, in which models are named by where workers find them."""

    class Pickler(_cloudpickle().Pickler):  # type: ignore[misc]  # a base of type Any
        def persistent_id(self, part: Any) -> Any:
            return places.get(id(part))

    stream = io.BytesIO()
    Pickler(stream).dump(value)
    return stream.getvalue()


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


def spread(job: Job[P], pieces: Iterable[P], by: Workers) -> Iterator[tuple[P, Any]]:
    """What workers found, piece by piece as they come back; None of those that were given up."""
    left, sender = deque(_UnderWay(piece) for piece in pieces), _Sender(job, by)
    under_way = dict[Future[Any], _UnderWay[P]]()
    try:
        while left or under_way:
            while left and len(under_way) < _UNDER_WAY * by.count:
                sent = left.popleft()
                under_way[sender.send(sent)] = sent
            for future in _ended(under_way):
                sent = under_way.pop(future)
                how, found = _answer(future)
                if how == "done":
                    yield sent.piece, found
                    continue
                again = _again(job, sent, how, found)
                left.extendleft(again)
                if not again:
                    warnings.warn(
                        f"{job.name(sent.piece)} could not be done by the executor, and are "
                        f"flagged: {found}",
                        stacklevel=2,
                    )
                    yield sent.piece, None
    finally:
        for future in under_way:
            future.cancel()


def _ended(under_way: Iterable[Future[Any]]) -> list[Future[Any]]:
    """Those that have ended, of which there is at least one; what is finished comes first.

    What an executor cancels as it shuts down ends without notice: it is looked at every second.
    """
    while True:
        done = wait(under_way, _LOOK_SECONDS, FIRST_COMPLETED).done
        done |= {future for future in under_way if future.cancelled()}
        if done:
            return sorted(done, key=lambda one: one.cancelled() or one.exception() is not None)


def _answer(future: Future[Any]) -> tuple[str, Any]:
    """What a worker says of its piece."""
    try:
        how, found = future.result()
        return how, found
    except (CancelledError, BrokenExecutor) as error:
        raise LostExecutor(
            f"the executor has ended ({error!r}) while pieces of work were under way; start "
            "another, and pass checkpoint= for the same call to go on with what is finished"
        ) from error
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"


def _again(job: Job[P], sent: _UnderWay[P], how: str, found: Any) -> list[_UnderWay[P]]:
    """What is to be done instead of a piece: the same again, its halves, or nothing more."""
    if how == "missing":
        sent.lacks = tuple({*sent.lacks, *found})
        return [sent]
    if how == "memory":
        return [_UnderWay(half, sent.tries, sent.lacks) for half in job.halves(sent.piece)]
    sent.tries += 1
    return [sent] if sent.tries < MOST_TRIES else []


# ---------------------------------------------------------------- pieces of numbered members


def halved(members: Members) -> list[Members]:
    """Two halves; none of a single one."""
    middle = len(members) // 2
    return [members[:middle], members[middle:]] if middle else []


def chunks(members: Members, size: int) -> list[Members]:
    """Members in pieces of ``size``."""
    return [members[first : first + size] for first in range(0, len(members), size)]


def in_turn(
    job: Job[Members],
    members: Members,
    cut: Callable[[Members, Workers | None], list[Members]],
    finished: Finished,
) -> Iterator[tuple[Members, Any]]:
    """What a job finds of ``members`` in pieces: kept by an earlier run, by workers, or here.

    ``cut`` makes pieces for workers, or for this process. ``finished`` keeps them, but one that is
    all there is.
    """
    by, left = workers(), members
    for some, found in finished.earlier():
        left = np.setdiff1d(left, some)
        yield some, found
    pieces = cut(left, by) if len(left) else []
    try:
        for some, found in _found_here(job, pieces) if by is None else spread(job, pieces, by):
            if found is not None and len(some) < len(members):
                finished.add(some, found)
            yield some, found
    finally:
        finished.flush()


def _found_here(job: Job[P], pieces: Iterable[P]) -> Iterator[tuple[P, Any]]:
    for piece in pieces:
        yield piece, job.do(job.shared, job.parcel(piece))
