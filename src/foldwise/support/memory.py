"""How much memory a run may take: sizes in words, and what is held at once within a limit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from foldwise.support.checks import is_integer
from foldwise.support.runtime import free_memory

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
_LIMIT: ContextVar[int | None] = ContextVar("memory_limit", default=None)


def parse_size(size: str | int) -> int:
    """Bytes of a size such as "4GB", "512 MiB" or a whole number of bytes."""
    if not isinstance(size, str):
        if not is_integer(size) or size < 1:
            raise ValueError(f'memory_limit must be a size such as "4GB", or bytes, got {size!r}')
        return int(size)
    found = _SIZE.fullmatch(size)
    if found is None or not float(found[1]):
        raise ValueError(f'memory_limit must be a size such as "4GB" or "512 MiB", got {size!r}')
    unit = found[2].upper()
    base = 1024 ** " KMGT".index(unit) if found[3] and unit else _UNITS[unit]
    return int(float(found[1]) * base)


def used_memory() -> int:
    """Bytes that this process holds; 0 where that is not known."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def limit_of(size: str | int | None) -> int | None:
    """Bytes that this process may hold: as asked for, or what is free; None: that is not known."""
    if size is not None:
        return parse_size(size)
    free = free_memory()
    return None if free is None else used_memory() + free


@contextmanager
def limited(limit: int | None) -> Iterator[None]:
    """Within this, what is held at once follows ``limit``; None: as it is by default."""
    token = _LIMIT.set(limit)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def most_values(usual: int, share: float) -> int:
    """How many numbers of 8 bytes to hold at once: as usual, or a share of the limit if less."""
    limit = _LIMIT.get()
    return usual if limit is None else max(min(usual, int(share * limit) // 8), 2**16)
