"""Records as groups of a netCDF file, and back.

One variable for each array or number, one group for each record inside.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from datetime import date, datetime
from importlib import metadata
from typing import Any

import numpy as np
import xarray as xr

from foldwise.folds.folds import Folds
from foldwise.results.result import Score
from foldwise.sampling.fit import Fit
from foldwise.sampling.kernel import StepSize
from foldwise.sampling.metric import FoldMetric, LocalCoordinates, SharedMetric
from foldwise.sampling.run import Settings
from foldwise.sampling.tuning import Locals
from foldwise.scores.diagnostics import Mixing
from foldwise.scores.evidence import FullCurvature, FullData, Ladder, Outcomes, Pace
from foldwise.scores.needs import Emit
from foldwise.scores.rungs import Climbed, Rung
from foldwise.scores.sums import BlockSums, BridgeGrid, RowSums, RunningSums, Watch

FORMAT = "foldwise-result"
FORMAT_VERSION = 1
# Attributes of the root group that are not ``info``.
RESERVED = ("format", "format_version", "foldwise_version", "json_keys", "size", "checksum")
_RECORDS: dict[str, Any] = {
    record.__name__: record
    for record in (
        BlockSums,
        BridgeGrid,
        Climbed,
        Emit,
        Fit,
        FoldMetric,
        Folds,
        FullCurvature,
        FullData,
        Ladder,
        LocalCoordinates,
        Locals,
        Mixing,
        Outcomes,
        Pace,
        RowSums,
        Rung,
        RunningSums,
        Score,
        Settings,
        SharedMetric,
        StepSize,
        Watch,
    )
}
# Records that older files hold in another form.
_MADE = {"RunningSums": RunningSums.saved, "Score": Score.saved}
# Units of time for which netCDF conventions have a name; others are stored as bare numbers.
_TIME_UNITS = {
    "D": "days",
    "h": "hours",
    "m": "minutes",
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}


# Text is padded to the width of its type, if no more bytes than these come of it.
_MOST_PADDING = 2**26
# Labels that JSON keeps as they are.
_PlainLabel = bool | int | float | str | None


def attributes_of(info: dict[str, Any]) -> dict[str, Any]:
    """``info`` as attributes: text and numbers as they are, everything else as JSON."""
    attributes: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION}
    try:
        attributes["foldwise_version"] = metadata.version("foldwise")
    except metadata.PackageNotFoundError:
        attributes["foldwise_version"] = "unknown"
    as_json = []
    for key, value in info.items():
        value = plain_number(value)
        small = isinstance(value, int) and abs(value) < 2**63
        if key == "state":
            continue
        if isinstance(value, bool) or not (small or isinstance(value, str | float)):
            as_json.append(key)
            value = json.dumps(value, default=_json_default)
        attributes[key] = value
    return {**attributes, "json_keys": json.dumps(as_json)}


def _json_default(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def info_of(attributes: dict[Any, Any]) -> dict[str, Any]:
    """What :func:`attributes_of` made attributes of."""
    as_json = json.loads(attributes["json_keys"])
    return {
        key: json.loads(value) if key in as_json else plain_number(value)
        for key, value in attributes.items()
        if key not in RESERVED
    }


def pack(value: Any) -> xr.DataTree:
    """A record, table, dict or list as a group; what is None is named in ``keys`` only."""
    if isinstance(value, xr.Dataset):
        return xr.DataTree(_stored_table(value))
    kind, parts = _parts(value)
    variables, children = {}, {}
    for name, part in parts.items():
        if is_dataclass(part) or isinstance(part, dict | list | tuple | xr.Dataset):
            children[name] = pack(part)
        elif part is not None:
            variables[name] = _stored(np.asarray(part))
    attributes = {"kind": kind, "keys": json.dumps(list(parts))}
    return xr.DataTree(xr.Dataset(variables, attrs=attributes), children=children)


def _parts(value: Any) -> tuple[str, dict[str, Any]]:
    if is_dataclass(value):
        return type(value).__name__, {f.name: getattr(value, f.name) for f in fields(value)}
    if hasattr(value, "_asdict"):
        return type(value).__name__, value._asdict()
    if isinstance(value, dict):
        return "dict", value
    return type(value).__name__, {str(k): part for k, part in enumerate(value)}


def unpack(node: xr.DataTree) -> Any:
    """The record, table, dict or list that ``pack`` made a group of."""
    kind = node.attrs["kind"]
    if kind == "table":
        return _table(node.to_dataset(inherit=False))
    found: dict[str, Any] = {name: unpack(child) for name, child in node.children.items()}
    for name, variable in node.to_dataset(inherit=False).variables.items():
        values = _restored(variable)
        found[str(name)] = values if values.ndim else values.item()
    parts = {name: found.get(name) for name in json.loads(node.attrs["keys"])}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(parts.values())
    if kind == "dict":
        return parts
    try:
        return _MADE.get(kind, _RECORDS[kind])(**parts)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the file's {kind} has the fields {', '.join(parts)}, which this version of foldwise "
            "does not know in this form; use the version that saved it"
        ) from error


def _stored_table(table: xr.Dataset) -> xr.Dataset:
    def stored(names: Iterable[Any]) -> dict[Any, xr.Variable]:
        return {name: _stored(table[name].values, table[name].dims) for name in names}

    attributes = {"kind": "table", "keys": json.dumps(list(map(str, table.data_vars)))}
    return xr.Dataset(stored(table.data_vars), stored(table.coords), attributes)


def _table(stored: xr.Dataset) -> xr.Dataset:
    def restored(names: Iterable[Any]) -> dict[Any, tuple[Any, np.ndarray]]:
        return {name: (stored[name].dims, _restored(stored[name].variable)) for name in names}

    return xr.Dataset(restored(json.loads(stored.attrs["keys"])), restored(stored.coords))


def _stored(values: np.ndarray, dims: tuple[Any, ...] = ()) -> xr.Variable:
    """An array in a type that netCDF has, with what leads back to its own.

    Dimensions without a name are named by their size, so that groups never disagree about them.
    """
    kind, attributes = values.dtype.kind, {"numpy_dtype": values.dtype.str}
    if values.dtype.isnative and (kind in "iu" or values.dtype in (np.float32, np.float64)):
        attributes = {}
    elif kind in "iu" or values.dtype.str[1:] in ("f4", "f8"):
        values = values.astype(values.dtype.newbyteorder("="))
    elif kind == "b":
        values = values.astype(np.int8)
    elif kind in "mM":
        values, attributes["units"] = values.view(np.int64), _units(values.dtype)
    elif kind in "OT":
        values, attributes = _texts(values.astype(object))
    elif kind != "U":  # complex numbers, half and extended precision: bytes
        values = np.ascontiguousarray(values).reshape(*values.shape, 1).view(np.uint8)
    names = list(dims)
    for size in values.shape[len(names) :]:
        same = sum(name.startswith(f"size_{size}_") for name in names)
        names.append(f"size_{size}_{'abcdefgh'[same]}")
    return xr.Variable(names, values, attributes)


def _units(dtype: np.dtype) -> str:
    """Units of dates or durations by the netCDF conventions, where these have a name for them."""
    unit, step = np.datetime_data(dtype)
    if unit not in _TIME_UNITS or step != 1:
        return f"{step} {unit}"
    return _TIME_UNITS[unit] + (" since 1970-01-01" if dtype.kind == "M" else "")


def _restored(variable: xr.Variable) -> np.ndarray:
    """The array that ``_stored`` took, as a copy of its own."""
    values, dtype = np.array(variable.values), variable.attrs.get("numpy_dtype")
    if dtype is None:
        return values
    if dtype == "object" and values.dtype.kind in "UO":
        read = json.loads if "labels" in variable.attrs else str
        objects = np.empty(values.size, object)
        objects[:] = [_label(read(text)) for text in values.ravel()]
        return objects.reshape(values.shape)
    target = np.dtype(dtype)
    if not _comes_from(target, values):
        raise ValueError(f"{values.dtype} of shape {values.shape} cannot have been {dtype}")
    if target.kind in "mM":
        return values.view(target)
    if target.kind in "biuU" or dtype[1:] in ("f4", "f8"):
        return values.astype(target)
    return values.view(target)[..., 0]


def _comes_from(target: np.dtype, values: np.ndarray) -> bool:
    """Whether ``_stored`` makes such values of an array of the type ``target``."""
    stored = values.dtype
    if target.kind == "b":
        return stored == np.int8 and bool(np.isin(values, (0, 1)).all())
    if target.kind in "mM":
        return stored == np.int64
    if target.kind in "iu" or target.str[1:] in ("f4", "f8"):
        return bool(stored == target.newbyteorder("="))
    if target.kind == "U":
        longest = max((len(str(text)) for text in values.ravel()), default=0)
        few = target.itemsize * values.size <= _MOST_PADDING or target.itemsize <= 4 * longest
        return stored.kind in "UO" and few and longest <= max(target.itemsize // 4, 1)
    sized = target.kind in "SVfc" and values.ndim > 0
    return sized and stored == np.uint8 and values.shape[-1] == target.itemsize


def _texts(values: np.ndarray) -> tuple[np.ndarray, dict[str, str]]:
    """Objects as text: as they are if all are text, else JSON; what JSON lacks as its own text."""
    labels = [plain_number(value) for value in values.ravel()]
    attributes = {"numpy_dtype": "object"}
    other = [label for label in labels if not isinstance(label, date | _PlainLabel)]
    if other:
        warnings.warn(
            "labels must be text, numbers or dates to be saved as they are, but "
            f"{len(other)} are not, such as the {type(other[0]).__name__} {other[0]!r}; their "
            "text is saved",
            stacklevel=2,
        )
    if not all(isinstance(label, str) for label in labels):
        labels, attributes["labels"] = [json.dumps(_json_label(v)) for v in labels], "json"
    return np.array(labels, dtype=str).reshape(values.shape), attributes


def _json_label(value: Any) -> Any:
    if isinstance(value, date):
        kind = "datetime" if isinstance(value, datetime) else "date"
        return {kind: value.isoformat()}
    return value if isinstance(value, _PlainLabel) else str(value)


def _label(value: Any) -> Any:
    if isinstance(value, dict):
        ((kind, iso),) = value.items()
        return (datetime if kind == "datetime" else date).fromisoformat(iso)
    return value


def plain_number(value: Any) -> Any:
    """A number of NumPy's as one of Python's; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value
