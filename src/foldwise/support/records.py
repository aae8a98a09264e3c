"""Records of arrays as bytes and back, without pickle: nothing but records is ever made of them.

A tree of dicts, lists, tuples, numbers, text, None, arrays and foldwise's own records (dataclasses
and named tuples) becomes a line of JSON, with a place for each array, and the arrays one after
another. What a record has found out and keeps (cached properties) goes along.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import numpy as np

_PACKAGE = "foldwise."
_KINDS = "biufcmMSU"


def encode(tree: Any) -> bytes:
    """``tree`` as bytes."""
    arrays: list[np.ndarray] = []
    head = json.dumps(_plain(tree, arrays)).encode()
    parts = [len(head).to_bytes(8, "little"), head]
    parts += [np.ascontiguousarray(array).tobytes() for array in arrays]
    return b"".join(parts)


def decode(content: bytes) -> Any:
    """The tree that ``encode`` took; its arrays are copies of their own."""
    size = int.from_bytes(content[:8], "little")
    return _restored(json.loads(content[8 : 8 + size]), memoryview(content)[8 + size :])


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """``value`` as JSON has it, its arrays put aside."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in _KINDS:
            raise TypeError(f"arrays of {array.dtype} are not kept")
        start = sum(kept.nbytes for kept in arrays)
        arrays.append(array)
        alone = isinstance(value, np.generic)
        return {"array": [array.dtype.str, list(array.shape), start, alone]}
    if isinstance(value, dict):
        items = [[_plain(k, arrays), _plain(item, arrays)] for k, item in value.items()]
        return {"dict": items}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_plain(item, arrays) for item in value]}
    kind = type(value)
    if not kind.__module__.startswith(_PACKAGE):
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__} is not kept")
    parts = value._asdict() if hasattr(value, "_asdict") else vars(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    return {"record": [name, {key: _plain(part, arrays) for key, part in parts.items()}]}


def _restored(value: Any, arrays: memoryview) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        dtype, shape, start, alone = content
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(arrays, dtype, count, start) if count else np.empty(0, dtype)
        array = array.reshape(shape).copy()
        return array[()] if alone else array
    if kind == "dict":
        return {_restored(key, arrays): _restored(item, arrays) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_restored(item, arrays) for item in content]
        return items if kind == "list" else tuple(items)
    return _record(content[0], {key: _restored(part, arrays) for key, part in content[1].items()})


def _record(name: str, parts: dict[str, Any]) -> Any:
    """A record of ours from its parts."""
    module, _, qualified = name.partition(":")
    if not module.startswith(_PACKAGE):
        raise ValueError(f"{name} is no record of foldwise")
    kind = getattr(import_module(module), qualified)
    if hasattr(kind, "_fields"):
        return kind(**parts)
    if not is_dataclass(kind):
        raise ValueError(f"{name} is no record of foldwise")
    given = {field.name for field in fields(kind) if field.init}
    # a dataclass of any kind: what its fields are, the file tells
    made = kind(**{key: part for key, part in parts.items() if key in given})  # type: ignore
    vars(made).update({key: part for key, part in parts.items() if key not in given})
    return made
