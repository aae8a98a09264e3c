"""Pieces of work that are kept in a folder as they are finished, and found there by the next run.

A run is a sequence of pieces that always comes in the same order, since all randomness follows from
the seed. A piece is known by its name and by how many of that name came before. Its file holds the
identity of the run, a checksum and the piece; what is damaged or of another run is done again, with
a warning. Files are written by a thread of their own while work goes on.

Work asks :func:`keeper` where to keep what it has done; without a folder nothing is kept.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from foldwise.support.records import decode, encode
from foldwise.support.writer import remove_stale, write_whole

T = TypeVar("T")
SUFFIX = ".piece"
_MARK, _DIGEST_BYTES = b"foldwise-piece\n", 16
# What is not finished is kept from time to time: not more often than this, in seconds, and not
# while that would take more than this share of the time.
LEAST_SECONDS, MOST_SHARE = 5.0, 0.01


class KeepingWarning(UserWarning):
    """A piece could not be read or written; the run goes on."""


class Keeper:
    """Where pieces are kept; this one keeps nothing."""

    keeps = False

    def made(self, name: str, make: Callable[[], T]) -> T:
        """What ``make`` gives, or gave in an earlier run."""
        return make()

    def stage(self, name: str) -> str:
        """A name for the pieces of the next stage of work called ``name``."""
        return name

    def found(self, stage: str) -> Iterator[Any]:
        """Pieces of a stage that an earlier run has finished."""
        return iter(())

    def save(self, name: str, tree: Any) -> None:
        """Keep ``tree`` under ``name``, in place of what is there."""

    def forget(self, stage: str) -> None:
        """Remove the pieces of a stage, when what they were for is kept."""

    def due(self) -> bool:
        """Whether it is time to keep what is not finished."""
        return False


class FolderKeeper(Keeper):
    """Keeps pieces in a folder, for the run called ``identity``."""

    keeps = True

    def __init__(self, folder: Path, identity: str):
        self.folder, self.identity = folder, identity.encode()
        self.restored, self.written = 0, 0
        self._names: Counter[str] = Counter()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="foldwise-keeper")
        self._writing: Future[None] | None = None
        self._last, self._cost = time.monotonic(), 0.0
        self._failed = False
        remove_stale(folder)

    def made(self, name: str, make: Callable[[], T]) -> T:
        """What ``make`` gives, or gave in an earlier run."""
        file = self.stage(name)
        for done in self.found(file):
            kept: T = done
            return kept
        done = make()
        self.save(f"{file}-0", done)
        return done

    def stage(self, name: str) -> str:
        """A name for the pieces of the next stage of work called ``name``."""
        self._names[name] += 1
        return f"{name}-{self._names[name]}"

    def found(self, stage: str) -> Iterator[Any]:
        """Pieces of a stage that an earlier run has finished, in the order of their names."""
        files = self.folder.glob(f"{stage}-*{SUFFIX}")
        for file in sorted(files, key=lambda file: (len(file.name), file.name)):
            tree = self._read(file)
            if tree is not None:
                self.restored += 1
                yield tree

    def _read(self, file: Path) -> Any:
        try:
            content = file.read_bytes()
            mark, identity, digest, rest = _split(content, len(self.identity))
            if mark == _MARK and identity != self.identity:
                raise ValueError("it belongs to another run")
            if mark != _MARK or digest != _digest(rest):
                raise ValueError("it is damaged")
            return decode(rest)
        except Exception as error:  # whatever is wrong with it, it can be done again
            said = f"{file} is done again: {error}"
            warnings.warn(said, KeepingWarning, stacklevel=2)
            with suppress(OSError):
                file.unlink()
            return None

    def save(self, name: str, tree: Any) -> None:
        """Keep ``tree`` under ``name``, in place of what is there; its arrays must not change."""
        self._wait()
        self._last = time.monotonic()
        self._writing = self._writer.submit(self._write, self.folder / f"{name}{SUFFIX}", tree)

    def _write(self, file: Path, tree: Any) -> None:
        began, content = time.monotonic(), encode(tree)
        head = [_MARK, self.identity, _digest(content)]
        write_whole(file, b"".join([*head, content]))
        self.written += 1
        self._cost = time.monotonic() - began

    def forget(self, stage: str) -> None:
        """Remove the pieces of a stage, when what they were for is kept."""
        self._wait()
        if not self._failed:
            for file in self.folder.glob(f"{stage}-*{SUFFIX}"):
                with suppress(OSError):
                    file.unlink()

    def due(self) -> bool:
        """Whether it is time to keep what is not finished."""
        free = self._writing is None or self._writing.done()
        waited = time.monotonic() - self._last
        return free and waited > max(LEAST_SECONDS, self._cost / MOST_SHARE)

    def _wait(self) -> None:
        """Let what is being written reach the disk; where it does not, say so once."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except OSError as error:
            if not self._failed:
                self._failed = True
                warnings.warn(
                    f"what is finished could not be kept in {self.folder} ({error}); the run goes "
                    "on, but what is lost of it will have to be done again",
                    KeepingWarning,
                    stacklevel=3,
                )

    def close(self) -> None:
        """Wait for what is being written."""
        try:
            self._wait()
        finally:
            self._writer.shutdown()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _split(content: bytes, identity: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Mark, identity, checksum and the piece itself."""
    edges = [0, len(_MARK), len(_MARK) + identity, len(_MARK) + identity + _DIGEST_BYTES]
    first, second, third = (content[a:b] for a, b in pairwise(edges))
    return first, second, third, content[edges[-1] :]


_NOTHING_KEPT = Keeper()
_CURRENT: ContextVar[Keeper] = ContextVar("keeper", default=_NOTHING_KEPT)


def keeper() -> Keeper:
    """Where the run at hand keeps what is finished."""
    return _CURRENT.get()


class Finished:
    """What was found of some members, such as folds, at the next stage ``name``: kept as it comes.

    Until it is forgotten, when all of it together is kept.
    """

    def __init__(self, keeps: Keeper, name: str):
        self.keeper, self.stage = keeps, keeps.stage(name)
        self.pending: list[tuple[np.ndarray, Any]] = []

    def earlier(self) -> Iterator[tuple[np.ndarray, Any]]:
        """What an earlier run has kept."""
        for pieces in self.keeper.found(self.stage):
            yield from pieces

    def add(self, members: np.ndarray, found: Any) -> None:
        """Note what was found; several pieces that are quick are kept together."""
        if self.keeper.keeps:
            self.pending.append((members, found))
            if self.keeper.due():
                self.flush()

    def flush(self) -> None:
        """Keep all that was found."""
        if self.pending:
            name, pieces = f"{self.stage}-{self.pending[0][0][0]}", self.pending
            self.pending = []
            self.keeper.save(name, pieces)

    def forget(self) -> None:
        """Remove what was kept."""
        self.keeper.forget(self.stage)


@contextmanager
def keeping(in_folder: FolderKeeper) -> Iterator[FolderKeeper]:
    """Within this, what is finished is kept in a folder."""
    token = _CURRENT.set(in_folder)
    try:
        yield in_folder
    finally:
        _CURRENT.reset(token)
        in_folder.close()
