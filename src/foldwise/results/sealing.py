"""Whether a file may be read at all: its seal, and what it declares before anything is read.

A saved file ends in a seal, the digest of all bytes before it, which other readers of HDF5 do not
look at. A file that does not match its seal is refused before the HDF5 library sees it. One without
a seal was saved by an older version, or written anew by another program: what it declares is
looked at, as it is in any file, and its content has a checksum.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import h5py

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MARK, _DIGEST_BYTES = b"\nfoldwise-seal ", 24
_SEAL_BYTES = len(_MARK) + 2 * _DIGEST_BYTES + 1
_PIECE = 2**20
# Deflate, the one compression that results are stored with, makes nothing smaller than 1/1032.
_MOST_DEFLATED = 1040
# HDF5 keeps attributes in the heads of objects; results have short ones and a few tables of JSON.
_MOST_ATTRIBUTE_BYTES = 2**26
_MOST_TEXT_BYTES = 2**12
# Groups within groups: a record within a record, at most eight deep in what foldwise writes.
_MOST_DEPTH = 32
_DIMENSION_ALONE = b"This is a netCDF dimension but not a netCDF variable"


class Declared(NamedTuple):
    """What a file says that it holds: numbers in bytes, and texts."""

    size: int
    texts: int


class NotPlain(ValueError):
    """A file declares what no saved result has."""


# ---------------------------------------------------------------- seals


def sealed(content: bytes | memoryview) -> bytes:
    """``content`` with its seal."""
    digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()
    return b"".join([content, _MARK, digest.encode(), b"\n"])


def beginning(file: Path) -> bytes:
    """The first bytes of a regular file; raises where it is a pipe, a device or a socket."""
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise ValueError(
            f"{file} must be a file that result.save wrote, but it is a pipe, a device or a socket"
        )
    with file.open("rb") as stream:
        return stream.read(len(SIGNATURE))


def seal_holds(file: Path) -> bool | None:
    """Whether the bytes of a file are those that were sealed; None where it has no seal."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with file.open("rb") as stream:
        left = os.fstat(stream.fileno()).st_size - _SEAL_BYTES
        if left < 0:
            return None
        while left > 0 and (piece := stream.read(min(_PIECE, left))):
            digest.update(piece)
            left -= len(piece)
        seal = stream.read(_SEAL_BYTES)
    if not seal.startswith(_MARK):
        return None
    return seal == _MARK + digest.hexdigest().encode() + b"\n"


# ---------------------------------------------------------------- what a file declares


def declared(file: Path) -> Declared:
    """What ``file`` declares; raises ``NotPlain`` where that is not what a saved result has.

    Nothing of its content is read: no links but those of a tree, no data that are elsewhere, no
    types but numbers and text, and no more numbers than the stored bytes can hold.
    """
    import h5py

    with h5py.File(file, "r") as root:
        kept = list(_datasets(root, {_address(root)}, 0))
        return Declared(
            sum(data.dtype.itemsize * data.size for data in kept if data.dtype.kind != "O"),
            sum(data.size for data in kept if data.dtype.kind == "O"),
        )


def _address(item: h5py.Group | h5py.Dataset) -> Any:
    import h5py

    return h5py.h5o.get_info(item.id).addr


def _datasets(group: h5py.Group, seen: set[Any], depth: int) -> Iterator[h5py.Dataset]:
    """Datasets of a group and those inside, each of which may be linked once."""
    import h5py

    if depth > _MOST_DEPTH:
        raise NotPlain(f"groups are more than {_MOST_DEPTH} deep, at {group.name}")
    _check_attributes(group)
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise NotPlain(f"{group.name}/{name} is a link to elsewhere")
        item = group[name]
        if not isinstance(item, h5py.Group | h5py.Dataset):
            raise NotPlain(f"{group.name}/{name} is neither a group nor an array")
        address = _address(item)
        if address in seen:
            raise NotPlain(f"{group.name}/{name} is linked a second time")
        seen.add(address)
        if isinstance(item, h5py.Group):
            yield from _datasets(item, seen, depth + 1)
            continue
        _check_attributes(item)
        if not _is_dimension_alone(item):
            _check_dataset(item)
            yield item


def _check_attributes(item: h5py.Group | h5py.Dataset) -> None:
    import h5py

    for k in range(h5py.h5a.get_num_attrs(item.id)):
        attribute = h5py.h5a.open(item.id, index=k)
        if attribute.get_storage_size() > _MOST_ATTRIBUTE_BYTES:
            raise NotPlain(f"an attribute of {item.name} has {attribute.get_storage_size()} bytes")


def _is_dimension_alone(data: h5py.Dataset) -> bool:
    """Whether it is only the length of a dimension, which has no content."""
    return (
        data.ndim == 1
        and data.id.get_storage_size() == 0
        and bytes(data.attrs.get("NAME", b"")).startswith(_DIMENSION_ALONE)
    )


def _check_dataset(data: h5py.Dataset) -> None:
    import h5py

    create, stored = data.id.get_create_plist(), data.id.get_storage_size()
    if create.get_external_count() or create.get_layout() == h5py.h5d.VIRTUAL:
        raise NotPlain(f"the content of {data.name} is in other files")
    text = h5py.check_string_dtype(data.dtype)
    if not (data.dtype.kind in "iufS" or text) or data.dtype.itemsize > _MOST_TEXT_BYTES:
        raise NotPlain(f"{data.name} is of the type {data.dtype}")
    size = data.dtype.itemsize * data.size
    if not data.chunks:
        possible = stored
    else:
        chunk = data.dtype.itemsize
        for length in data.chunks:
            chunk *= length
        filters = {create.get_filter(k)[0] for k in range(create.get_nfilters())}
        usual = {h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_FLETCHER32}
        if not filters <= usual or chunk > max(2 * size, 2**20):
            raise NotPlain(f"{data.name} is stored in another way than results are")
        deflated = h5py.h5z.FILTER_DEFLATE in filters
        possible = min(data.id.get_num_chunks() * chunk, stored * (_MOST_DEFLATED**deflated))
    if size > possible:
        raise NotPlain(f"{data.name} declares {size} bytes, of which {stored} are stored")
