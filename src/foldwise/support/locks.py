"""One process at a time in a folder: a lock that ends with the process that holds it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nothing is locked
    fcntl = None  # type: ignore[assignment]  # a module elsewhere, not on Windows

LOCK = ".foldwise-lock"


class Busy(OSError):
    """Another process is at work in a folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of ``folder``; raises ``Busy`` where another is in it.

    The lock belongs to the open file and goes with the process, however that ends.
    """
    file = folder / LOCK
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if fcntl is not None:
            _lock(descriptor, file, folder)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield
        finally:
            with suppress(OSError):
                file.unlink()
    finally:
        os.close(descriptor)


def _lock(descriptor: int, file: Path, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
        raise Busy(
            f"{folder} must be used by one process at a time, but {holder} is at work in it; wait "
            "until it has ended, or use another folder"
        ) from None
    except OSError:  # a file system without locks
        return
    held = os.fstat(descriptor).st_ino
    if not file.exists() or file.stat().st_ino != held:  # its holder has removed it meanwhile
        raise Busy(f"{folder} was used by another process just now; try again")
