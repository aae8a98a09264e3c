"""How much memory a run may take: sizes in words, and what is held at once within a limit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from foldwise.support.checks import is_integer

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
# Linux's groups of processes, to which Slurm and containers give their limits, and which of them
# this process is in.
_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
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


class _Version(NamedTuple):
    """A version of Linux's groups: where they are, and its files in each.

    ``copies`` are those of files, which are in use but make room when room is needed.
    """

    place: str
    limit: str
    used: str
    copies: str


_VERSIONS = {
    "": _Version("", "memory.max", "memory.current", "inactive_file"),
    "memory": _Version(
        "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
}


def free_memory() -> int | None:
    """Bytes of memory that are free, by the machine or the container's limit; None: not known."""
    found = []
    available = _count(Path("/proc/meminfo"), "MemAvailable:")
    if available is not None:
        found.append(1024 * available)
    for folder, version in _groups():
        try:
            limit, used = (
                int((folder / name).read_text()) for name in (version.limit, version.used)
            )
        except (OSError, ValueError):  # "max": there is no limit
            continue
        copies = _count(folder / "memory.stat", version.copies) or 0
        found.append(max(limit - max(used - copies, 0), 0))
    return min(found) if found else None


def _count(file: Path, name: str) -> int | None:
    """The number beside ``name`` in a file of one a line; None where there is none."""
    try:
        for line in file.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _groups() -> Iterator[tuple[Path, _Version]]:
    """Folders of the groups that this process is in and of those around them.

    A container may see its own group as the outermost, whatever it is called outside.
    """
    own = dict.fromkeys(_VERSIONS, "/")
    with suppress(OSError, ValueError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            own |= dict.fromkeys(kinds.split(","), path)
    for kind, version in _VERSIONS.items():
        inner = Path(own[kind].lstrip("/"))
        for group in (inner, *inner.parents):
            yield _GROUPS / version.place / group, version


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
