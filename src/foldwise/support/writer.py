"""Files and folders that appear at their place when they are complete, or not at all.

Both are made beside their place, under a name that nobody else has, and then moved there.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def beside(target: Path) -> Path:
    """A new name in the folder of ``target``, for what is not complete yet."""
    return target.with_name(f".foldwise-{secrets.token_hex(8)}.partial")


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A path to write to; the file takes its place at ``target`` if all goes well.

    An older file stays as it is until then, and for good where writing fails.
    """
    partial = beside(target)
    try:
        yield partial
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def move_folder(done: Path, target: Path) -> None:
    """Move the folder ``done`` to ``target``, in place of one that is there."""
    if not target.is_dir():
        os.rename(done, target)
        return
    old = done.with_suffix(".old")
    os.rename(target, old)
    try:
        os.rename(done, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old)
