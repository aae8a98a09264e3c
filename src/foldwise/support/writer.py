"""Files and folders that appear at their place when they are complete, or not at all.

A file is made beside its place, under a name that nobody else has, flushed to disk and then moved
there. While it is being made its writer holds a lock on it, which ends with the writer: what is
left of one that was killed is known by having no lock, and is removed by the next.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: what is left of a writer that was killed stays
    fcntl = None  # type: ignore[assignment]  # a module elsewhere, not on Windows

_NAME = ".foldwise-{}.partial"


def beside(target: Path) -> Path:
    """A new name in the folder of ``target``, for what is not complete yet."""
    return target.with_name(_NAME.format(secrets.token_hex(8)))


def write_whole(target: Path, content: bytes | memoryview) -> None:
    """Write ``content`` to ``target``: whatever happens, there is the older file or this one."""
    with whole_file(target) as partial, partial.open("r+b") as stream:
        stream.write(content)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A path to write to; the file takes its place at ``target`` if all goes well.

    An older file stays as it is until then, and for good where writing fails.
    """
    remove_stale(target.parent)
    partial, lock = _locked(target)
    try:
        yield partial
        _flush(partial)
        os.replace(partial, target)
        _flush(target.parent)
    finally:
        os.close(lock)
        partial.unlink(missing_ok=True)


def remove_stale(folder: Path) -> None:
    """Remove what writers that were killed have left in ``folder``."""
    if fcntl is None:
        return
    with suppress(OSError):
        for left in folder.glob(_NAME.format("*")):
            if left.is_file() and not left.is_symlink():
                _remove_unless_locked(left)


def _remove_unless_locked(left: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(left, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
        finally:
            os.close(descriptor)


def _locked(target: Path) -> tuple[Path, int]:
    """A new empty file beside ``target``, and the descriptor that holds its lock."""
    while True:
        partial = beside(target)
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        if fcntl is None:
            return partial, descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if partial.exists():  # nobody has taken it for stale before it was locked
                return partial, descriptor
        except BlockingIOError:
            pass
        except OSError:  # a file system without locks
            return partial, descriptor
        os.close(descriptor)


def _flush(path: Path) -> None:
    """Let what was written reach the disk; folders, where the system can."""
    is_folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    except OSError:
        if is_folder:
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError:
        if not is_folder:
            raise
    finally:
        os.close(descriptor)


def move_folder(done: Path, target: Path) -> None:
    """Move the folder ``done`` to ``target``, in place of one that is there.

    The older one is called ``target``.old meanwhile, in plain sight, should this be its end.
    """
    if not target.is_dir():
        os.rename(done, target)
        return
    old = free_name(target, "old")
    os.rename(target, old)
    try:
        os.rename(done, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old)


def free_name(target: Path, what: str) -> Path:
    """A name beside ``target`` that says ``what`` it is, and is not taken."""
    found, count = target.with_name(f"{target.name}.{what}"), 1
    while os.path.lexists(found):
        count += 1
        found = target.with_name(f"{target.name}.{what}{count}")
    return found
