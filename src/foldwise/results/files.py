"""Results as files, and joined.

A saved result is one netCDF-4 file, which xarray, R, Julia and ncdump read alike::

    /               attributes: format, versions, checksum, and the result's ``info``
    /scores/<name>  totals, full-data influences; groups ``folds`` and ``rows``, the tables
    /mixing         R-hat by fold and its benchmark
    /test           which rows each fold tests, and the observed values
    /draws          log score of every draw, where kept
    /calibration    predictive probabilities of each test row, where simulated
    /state          what ``extend`` needs to take the chains further

Groups mirror the records they hold: one variable for each array or number, one group for each
record inside. A new field of a record is saved without a change here; a new kind of record is
added to ``_RECORDS``. Changing the meaning of a field needs a new ``FORMAT_VERSION``.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from foldwise.crossval import Run, Settings
from foldwise.folds.folds import Folds
from foldwise.folds.ragged import concatenated_ranges, starts
from foldwise.models.evaluate import rows_at
from foldwise.models.model import Model
from foldwise.results.identity import check_one_identity
from foldwise.results.result import CVResult, Score, finish_score
from foldwise.sampling.blocks import PILOTS, Emit, Sampler
from foldwise.sampling.fit import Fit
from foldwise.sampling.kernel import StepSize
from foldwise.sampling.metric import FoldMetric, LocalCoordinates, Metric, SharedMetric
from foldwise.sampling.rungs import Climbed, Rung
from foldwise.sampling.tuning import Locals
from foldwise.scores.diagnostics import Mixing, fold_status, series_variance
from foldwise.scores.evidence import Evidence, FullCurvature
from foldwise.scores.rules import LOG_SCORES
from foldwise.scores.sums import BlockSums, RunningSums, Watch
from foldwise.support.writer import whole_file

FORMAT = "foldwise-result"
FORMAT_VERSION = 1
# Attributes of the root group that are not ``info``.
_RESERVED = ("format", "format_version", "foldwise_version", "json_keys", "checksum")
_RECORDS: dict[str, Any] = {
    record.__name__: record
    for record in (
        BlockSums,
        Climbed,
        Emit,
        Fit,
        FoldMetric,
        Folds,
        FullCurvature,
        LocalCoordinates,
        Locals,
        Mixing,
        Rung,
        RunningSums,
        Score,
        Settings,
        SharedMetric,
        StepSize,
        Watch,
    )
}
# Arrays from this size on are compressed: blocks not yet reached and padding shrink to nothing.
_COMPRESS_BYTES = 2**16
# Labels that JSON keeps as they are.
_PlainLabel = bool | int | float | str | None
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
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


@dataclass(frozen=True, repr=False)
class SavedState:
    """The ``state`` group of a file, kept until ``extend`` asks for it."""

    tree: xr.DataTree

    def __repr__(self) -> str:
        return "<state of the chains, as saved>"


# ---------------------------------------------------------------- save and load


def save(result: CVResult, path: str | os.PathLike[str]) -> Path:
    """Write ``result`` and the state of its chains to one netCDF-4 file; returns its path.

    A path without a suffix gets ``.nc``. The file is written beside its place and moved there
    when complete, so that an interrupted save leaves an older file as it was.
    """
    if not isinstance(result, CVResult):
        raise TypeError(f"only a CVResult can be saved, got {type(result).__name__}")
    target = _target(path)
    tree = _result_tree(result)
    _need_h5netcdf()
    try:
        with whole_file(target) as partial:
            tree.to_netcdf(partial, engine="h5netcdf", encoding=_encodings(tree))
    except OSError as error:
        raise OSError(
            f"{target} could not be written ({error}); choose a folder in which files can be "
            "made and that has room"
        ) from error
    return target


def load(path: str | os.PathLike[str]) -> CVResult:
    """The result that ``save`` wrote to ``path``, all in memory; the file is closed.

    Every number comes back bit for bit. To run its chains further, pass the model again:
    ``result.extend(draws, model=model)``.
    """
    file = _existing(path)
    tree = _read(file)
    version = tree.attrs.get("foldwise_version", "unknown")
    try:
        return _result(tree)
    except Exception as error:
        raise ValueError(
            f"{file} is a foldwise result, but not one that this version can read; it was saved "
            f"by foldwise {version}: load it with that version"
        ) from error


def _target(path: str | os.PathLike[str]) -> Path:
    """Where to write: links followed, suffix added, the folder there."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(
            f"path must name a file, but {target} is a folder; add a file name, for example "
            f"{target / 'result.nc'}"
        )
    named = target if target.suffix else target.with_name(f"{target.name}.nc")
    target = Path(os.path.realpath(named))
    if target.is_dir():
        raise IsADirectoryError(f"path must name a file, but {target} is a folder")
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"the folder of the file must exist, but {target.parent} does not; make it first, "
            "with Path.mkdir(parents=True)"
        )
    return target


def _existing(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    if not file.exists() and not file.suffix:
        file = file.with_name(file.name + ".nc")
    if file.is_dir():
        raise IsADirectoryError(f"path must name a file, but {file} is a folder; add a file name")
    if not file.exists():
        raise FileNotFoundError(
            f"path must name a file that result.save wrote, but {file} does not exist; the "
            f"working folder is {Path.cwd()}"
        )
    return file


def _read(file: Path) -> xr.DataTree:
    """The file's groups, in memory, as stored; raises unless they are a result's, and whole."""
    with file.open("rb") as stream:
        begins = stream.read(len(_SIGNATURE))
    if begins != _SIGNATURE:
        raise ValueError(
            f"{file} must be a result saved by foldwise, a netCDF-4 file, but it begins with "
            f"{begins!r}, as no such file does; pass the path that was given to result.save"
        )
    _need_h5netcdf()
    try:
        tree, intact = _open(file)
        version = int(tree.attrs.get("format_version", 0))
    except Exception as error:  # a damaged file raises almost anything
        raise ValueError(
            f"{file} must be a result saved by foldwise, but it could not be read: it is "
            "damaged, cut short, or another kind of file; restore it from a copy, or run again"
        ) from error
    if tree.attrs.get("format") != FORMAT:
        raise ValueError(
            f"{file} must be a result saved by foldwise, with the attribute format="
            f'"{FORMAT}", but it is another netCDF file; pass the path given to result.save'
        )
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{file} has format version {version}, but this foldwise reads versions up to "
            f"{FORMAT_VERSION}; upgrade foldwise"
        )
    if not intact:
        raise ValueError(
            f"{file} must be as foldwise saved it, but its content does not match its checksum: "
            "it is damaged or was changed; restore it from a copy, or run again"
        )
    return tree


def _open(file: Path) -> tuple[xr.DataTree, bool]:
    """The file's groups, read if they are foldwise's, and whether they match their checksum."""
    import h5py

    h5py.File(file, "r").close()  # h5netcdf does not clean up after a file that does not open
    with xr.open_datatree(
        file,
        engine="h5netcdf",
        mask_and_scale=False,
        decode_times=False,
        decode_timedelta=False,
    ) as tree:
        if tree.attrs.get("format") != FORMAT:
            return tree, False
        for node in tree.subtree:  # DataTree.load leaves out variables named like a group
            for variable in node.variables.values():
                variable.load()
        return tree, _checksum(tree) == tree.attrs.get("checksum")


def _need_h5netcdf() -> None:
    try:
        import h5netcdf  # noqa: F401, only whether it is there
        import h5py  # noqa: F401, likewise
    except ImportError as error:
        raise ImportError(
            f"results are stored with h5netcdf and h5py, but {error.name} is not installed; "
            "pip install h5netcdf h5py"
        ) from error


def _encodings(tree: xr.DataTree) -> dict[str, dict[str, dict[str, Any]]]:
    """How each variable is stored: no fill values, large arrays compressed."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for node in tree.subtree:
        found[node.path] = {}
        for name, variable in node.to_dataset(inherit=False).variables.items():
            how: dict[str, Any] = {}
            if variable.dtype.kind == "f":
                how["_FillValue"] = None
            if variable.dtype.kind in "iuf" and variable.nbytes >= _COMPRESS_BYTES:
                how.update(zlib=True, complevel=1, shuffle=True)
            found[node.path][str(name)] = how
    return found


def _checksum(tree: xr.DataTree) -> str:
    """Digest of every group's attributes and values, whatever their order in the file."""
    digest = hashlib.blake2b(digest_size=16)
    for node in sorted(tree.subtree, key=lambda node: node.path):
        attributes = {k: _plain_number(v) for k, v in node.attrs.items() if k != "checksum"}
        digest.update(json.dumps([node.path, attributes], sort_keys=True).encode())
        dataset = node.to_dataset(inherit=False)
        for name in sorted(map(str, dataset.variables)):
            values = dataset.variables[name].values
            text = values.dtype.kind in "UO"
            head = [name, "text" if text else values.dtype.str, values.shape]
            digest.update(json.dumps(head).encode())
            content = json.dumps(values.tolist()).encode() if text else values.tobytes()
            digest.update(content)
    return digest.hexdigest()


def _plain_number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


# ---------------------------------------------------------------- results and groups


def _result_tree(result: CVResult) -> xr.DataTree:
    """The file's content."""
    children = {
        "scores": _pack(result.scores),
        "mixing": _pack(result.mixing),
        "test": _pack(result.test),
    }
    if result.draws is not None:
        children["draws"] = _pack(result.draws.to_dataset(name="log_score"))
    if result.calibration is not None:
        children["calibration"] = _pack(result.calibration)
    if result.run is not None:
        children["state"] = _pack(_run_parts(result.run))
    elif "state" in result.info:
        children["state"] = result.info["state"].tree
    tree = xr.DataTree(xr.Dataset(attrs=_attributes(result.info)), children=children)
    tree.attrs["checksum"] = _checksum(tree)
    return tree


def _result(tree: xr.DataTree) -> CVResult:
    groups = tree.children
    draws = _unpack(groups["draws"])["log_score"] if "draws" in groups else None
    calibration = _unpack(groups["calibration"]) if "calibration" in groups else None
    info = _info(tree.attrs)
    if "state" in groups:
        info["state"] = SavedState(groups["state"].copy())
    scores, mixing, test = (_unpack(groups[name]) for name in ("scores", "mixing", "test"))
    return CVResult(scores, mixing, test, info, draws, calibration)


def _attributes(info: dict[str, Any]) -> dict[str, Any]:
    """``info`` as attributes: text and numbers as they are, everything else as JSON."""
    attributes: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION}
    try:
        attributes["foldwise_version"] = metadata.version("foldwise")
    except metadata.PackageNotFoundError:
        attributes["foldwise_version"] = "unknown"
    as_json = []
    for key, value in info.items():
        value = _plain_number(value)
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


def _info(attributes: dict[Any, Any]) -> dict[str, Any]:
    as_json = json.loads(attributes["json_keys"])
    return {
        key: json.loads(value) if key in as_json else _plain_number(value)
        for key, value in attributes.items()
        if key not in _RESERVED
    }


def _pack(value: Any) -> xr.DataTree:
    """A record, table, dict or list as a group; what is None is named in ``keys`` only."""
    if isinstance(value, xr.Dataset):
        return xr.DataTree(_stored_table(value))
    kind, parts = _parts(value)
    variables, children = {}, {}
    for name, part in parts.items():
        if is_dataclass(part) or isinstance(part, dict | list | tuple | xr.Dataset):
            children[name] = _pack(part)
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


def _unpack(node: xr.DataTree) -> Any:
    """The record, table, dict or list that ``_pack`` made a group of."""
    kind = node.attrs["kind"]
    if kind == "table":
        return _table(node.to_dataset(inherit=False))
    found: dict[str, Any] = {name: _unpack(child) for name, child in node.children.items()}
    for name, variable in node.to_dataset(inherit=False).variables.items():
        values = _restored(variable)
        found[str(name)] = values if values.ndim else values.item()
    parts = {name: found.get(name) for name in json.loads(node.attrs["keys"])}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(parts.values())
    if kind == "dict":
        return parts
    try:
        return _RECORDS[kind](**parts)
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


# ---------------------------------------------------------------- arrays and netCDF's types


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
    if dtype == "object":
        read = json.loads if "labels" in variable.attrs else str
        objects = np.empty(values.size, object)
        objects[:] = [_label(read(text)) for text in values.ravel()]
        return objects.reshape(values.shape)
    target = np.dtype(dtype)
    if target.kind in "mM":
        return values.view(target)
    if target.kind in "biuU" or dtype[1:] in ("f4", "f8"):
        return values.astype(target)
    return values.view(target)[..., 0]


def _texts(values: np.ndarray) -> tuple[np.ndarray, dict[str, str]]:
    """Objects as text: as they are if all are text, else JSON; what JSON lacks as its own text."""
    labels = [_plain_number(value) for value in values.ravel()]
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


# ---------------------------------------------------------------- the state of a run


def _run_parts(run: Run) -> dict[str, Any]:
    """All of a run but its model's functions and what only tuning needs.

    The first target of the stored draws is the result's ``draws``, and not saved twice.
    """
    apart = ("model", "sampler", "evidence")
    parts = {f.name: getattr(run, f.name) for f in fields(run) if f.name not in apart}
    evidence = {f.name: getattr(run.evidence, f.name) for f in fields(run.evidence)}
    del evidence["folds"]
    if run.evidence.draws is not None:
        evidence["draws"] = run.evidence.draws[..., 1:]
    tuned = ("steps", "step_size", "metric", "emit", "watched")
    names = ("position", "done", "lived", "finer", "gradients", *tuned)
    sampler = {name: getattr(run.sampler, name) for name in names}
    return {**parts, "evidence": evidence, "sampler": sampler}


def restore_evidence(result: CVResult) -> Evidence:
    """What the run behind a loaded ``result`` has recorded."""
    groups = _state(result).tree.children
    return _evidence(result, _unpack(groups["folds"]), _unpack(groups["evidence"]))


def _evidence(result: CVResult, folds: Folds, saved: dict[str, Any]) -> Evidence:
    """The evidence that was saved, with the draws that the result holds."""
    if saved["draws"] is not None:
        assert result.draws is not None
        both = [result.draws.values[..., None], saved["draws"]]
        saved["draws"] = np.ascontiguousarray(np.concatenate(both, axis=3))
    return Evidence(folds=folds, **saved)


def _state(result: CVResult) -> SavedState:
    state = result.info.get("state")
    if not isinstance(state, SavedState):
        raise ValueError(
            "only a result loaded from a file, with the state of its chains, can be taken up "
            "again, but this one has no such state; extend its parts and merge them"
        )
    return state


def restore_run(result: CVResult, model: Model) -> Run:
    """The run behind a loaded ``result``, ready to go on, with the functions of ``model``."""
    parts = _unpack(_state(result).tree)
    evidence, saved = parts.pop("evidence"), parts.pop("sampler")
    folds, fit, settings = parts["folds"], parts["fit"], parts["settings"]
    _check_model(model, fit, folds, evidence["full"], result.test.get("y"))
    recorded = _evidence(result, folds, evidence)
    start = saved["position"]
    # warm-up and tuning are done: pilots lend the program their shapes, and nothing is refined
    sampler = Sampler(
        model=model,
        folds=folds,
        previous=recorded.previous,
        metric=saved["metric"],
        pilot_metric=_pilot_metric(saved["metric"]),
        refine=None,
        far=np.zeros(len(folds), bool),
        start=start,
        pilot_start=np.zeros((PILOTS, *start.shape[1:])),
        watched=saved["watched"],
        emit=saved["emit"],
        warmup=settings.warmup,
        seed=settings.seed,
        precision=settings.precision,
    )
    sampler.steps, sampler.step_size = saved["steps"], saved["step_size"]
    sampler.done, sampler.gradients = saved["done"], saved["gradients"]
    sampler.lived, sampler.finer = saved["lived"], saved["finer"]
    return Run(model=model, sampler=sampler, evidence=recorded, **parts)


def _pilot_metric(metric: Metric) -> Metric:
    """A metric with the shapes of the pilots'."""
    first = np.zeros(PILOTS, int)
    if isinstance(metric, FoldMetric):
        return FoldMetric(*(part[first] for part in metric))
    return metric._replace(folds=LocalCoordinates(*(part[first] for part in metric.folds)))


def _check_model(
    model: Model, fit: Fit, folds: Folds, full: Float[np.ndarray, "fold draw"], y: np.ndarray | None
) -> None:
    """Raise unless ``model`` is the one that was cross-validated, on the same rows in order."""
    if not isinstance(model, Model):
        raise TypeError(f"model must be a foldwise.Model, got {type(model).__name__}")
    advice = "pass the model that was cross-validated, built from the same data in the same order"
    if model.n_obs != folds.n:
        raise ValueError(
            f"the model must have the rows that were cross-validated, but it has "
            f"n_obs={model.n_obs} and the saved result n_obs={folds.n}; {advice}"
        )
    try:
        fit.check(model)
    except ValueError as error:
        raise ValueError(
            "a saved result can only be extended with its own model, but this is another one: "
            f"{str(error).split(';')[0]}; {advice}"
        ) from error
    rows = next(rows_at(model, fit.positions[0, :1]))[1][0]
    now = np.add.reduceat(rows[folds.test_rows], folds.test_start[:-1])
    same_y = y is None or model.y is None or np.array_equal(np.asarray(model.y), y)
    if not same_y or not np.allclose(now, full[:, 0], rtol=1e-4, atol=1e-4):
        raise ValueError(
            "a saved result can only be extended with its own model, but this model's "
            f"observations differ, or their rows are in another order; {advice}"
        )


# ---------------------------------------------------------------- merge


def merge(results: Iterable[CVResult]) -> CVResult:
    """The result of several runs of one model over disjoint folds of one scheme.

    Runs over ``folds[:25]`` and ``folds[25:]``, perhaps on two machines, become one result, its
    folds in the scheme's order. Scores add up, and so do Monte Carlo variances, except that runs
    which share a full-data fit share its error: their influences are added draw by draw before
    taking the variance. The R-hat-max benchmark is the maximum over the parts, replicate by
    replicate. Merge all parts at once: what is still missing of the scheme is said in the printed
    result ("20 of 30 folds"). In leave-future-out the last fold of each part has no
    partner there, so its score is a plain mean. A merged result cannot be extended; its parts can.
    """
    parts = list(results)
    _check_parts(parts)
    order = np.argsort(np.concatenate([part.test["index"] for part in parts]), kind="stable")
    counts = np.concatenate([np.diff(part.test["start"]) for part in parts])
    entries = concatenated_ranges(starts(counts), order)
    mixing = replace(
        parts[0].mixing,
        rhat=np.concatenate([part.mixing.rhat for part in parts])[order],
        benchmark=np.fmax.reduce([part.mixing.benchmark for part in parts]),
    )
    names = list(parts[0].scores)
    scores = {name: _merge_score(parts, name, order, entries, mixing.limit) for name in names}
    test = {
        "start": starts(counts[order]),
        "rows": np.concatenate([part.test["rows"] for part in parts])[entries],
        "index": np.concatenate([part.test["index"] for part in parts])[order],
    }
    observed = [part.test["y"] for part in parts if "y" in part.test]
    if observed:
        test["y"] = observed[0]
    fold_names = scores[names[0]].folds["fold"].values
    calibration = None
    tables = [part.calibration for part in parts if part.calibration is not None]
    if len(tables) == len(parts):
        calibration = _join(tables, "test_row", entries)
    draws = _merge_draws(parts, order, fold_names)
    return CVResult(scores, mixing, test, _merge_info(parts), draws, calibration)


def _check_parts(parts: list[CVResult]) -> None:
    for part in parts:
        if not isinstance(part, CVResult):
            raise TypeError(
                f"results must be a list of CVResult, but it holds a {type(part).__name__}"
            )
    if len(parts) < 2:
        raise ValueError(f"merging needs at least two results, got {len(parts)}")
    advice = {
        "scheme": "give every run folds of one scheme, such as folds[:25] and folds[25:]",
        "n_obs": "run them on the same data",
        "estimator": "run them with the same estimator",
        "chains": "run them with the same number of chains",
        "draws": "extend the shorter ones first",
    }
    for key, what in advice.items():
        _check_same([part.info[key] for part in parts], key, what)
    run_alike = "run them with the same scores"
    _check_same([", ".join(sorted(part.scores)) for part in parts], "scores", run_alike)
    named = [part.info["model"] for part in parts if part.info["model"]]
    if named:
        _check_same(named, "model", "merge the results of one model; use compare for several")
    observed = [part.test["y"] for part in parts if "y" in part.test]
    if any(not np.array_equal(observed[0], y) for y in observed[1:]):
        raise ValueError(
            "merged results must have the same observations, but their y differ; run them on "
            "the same data in the same order"
        )
    check_one_identity([part.info for part in parts])
    _check_disjoint(parts)


def _check_same(values: list[Any], what: str, advice: str) -> None:
    for value in values[1:]:
        if value != values[0]:
            raise ValueError(
                f"merged results must have the same {what}, but they have {values[0]!r} and "
                f"{value!r}; {advice}"
            )


def _check_disjoint(parts: list[CVResult]) -> None:
    index = np.concatenate([part.test["index"] for part in parts])
    names = np.concatenate([part.folds["fold"].values for part in parts])
    _, first, times = np.unique(index, return_index=True, return_counts=True)
    twice = first[times > 1]
    if twice.size:
        shown = ", ".join(str(names[k]) for k in twice[:5])
        more = f" and {twice.size - 5} more" if twice.size > 5 else ""
        raise ValueError(
            f"merged results must have no fold in common, but {twice.size} are in several: "
            f"{shown}{more}; leave one of the results out, or run other folds"
        )


def _merge_score(
    parts: list[CVResult], name: str, order: np.ndarray, entries: np.ndarray, limit: float
) -> Score:
    scores = [part.score(name) for part in parts]
    table = _join([score.folds for score in scores], "fold", order)
    table["status"] = ("fold", _status(table, limit))
    rows, by_row = None, [score.rows for score in scores if score.rows is not None]
    if 0 < len(by_row) < len(parts) and name not in LOG_SCORES:
        raise ValueError(
            f"merged results must score their folds alike, but {name} is joint in some parts and "
            f"by row in others, whose test sets are large; run them with {name}_pointwise"
        )
    if by_row:
        each = [_rows(part, part.score(name), list(by_row[0].data_vars)) for part in parts]
        rows = _join(each, "test_row", entries)
    draws = parts[0].info["chains"] * parts[0].info["draws"]
    own = float(sum(score.own_variance for score in scores))
    return finish_score(name, table, rows, draws, own, *_merge_full(parts, scores))


def _join(tables: list[xr.Dataset], dim: str, order: np.ndarray) -> xr.Dataset:
    def joined(names: Iterable[Any]) -> dict[Any, tuple[str, np.ndarray]]:
        return {
            name: (dim, np.concatenate([table[name].values for table in tables])[order])
            for name in names
        }

    return xr.Dataset(joined(tables[0].data_vars), joined(tables[0].coords))


def _rows(part: CVResult, score: Score, columns: list[Any]) -> xr.Dataset:
    """Table by row; where all folds of a part test one row, that is its table by fold."""
    if score.rows is not None:
        return score.rows
    values = {name: ("test_row", score.folds[name].values) for name in columns}
    return xr.Dataset(values, {"row": ("test_row", part.test["rows"])})


def _status(table: xr.Dataset, limit: float) -> np.ndarray:
    """Status of each fold by the merged R-hat limit, which is never below that of its part."""
    was = table["status"].values
    return fold_status(
        improper=was == "improper",
        not_finite=was == "not finite",
        singular=was == "singular covariance",
        flat=was == "no spread",
        stranded=was == "too far from its partner",
        stuck=was == "stuck chain",
        disagree=table["rhat"].values > limit,
        drifting=was == "not settled",
        slow=np.isin(was, ("too slow", "not settled")),
        divergent=was == "divergent",
        partner=was == "partner in trouble",
        others=was == "others in trouble",
        unsettled=was == "rungs not settled",
        overlap=table["overlap"].values,
        tail=table["pareto_k"].values,
        bridged=table["estimator"].values != "mean",
        ess=table["ess"].values,
        acceptance=table["acceptance"].values,
        fit=was == "fit not settled",
    ).astype(object)


def _merge_full(parts: list[CVResult], scores: list[Score]) -> tuple[np.ndarray, float]:
    """Influences of the full-data draws on the total, and the variance they bring.

    Parts that share a fit add draw by draw; different fits are independent. With several fits
    there is no common vector of influences, and an empty one is returned.
    """
    shared: dict[tuple[Any, ...], list[int]] = {}
    for k, (part, score) in enumerate(zip(parts, scores, strict=True)):
        size = len(score.full_influence)
        fit = (part.info["fit_seed"], part.info["model"], size) if size else (k,)
        shared.setdefault(fit, []).append(k)
    variance, influence = 0.0, np.zeros(0)
    for members in shared.values():
        if len(members) == 1:
            variance += scores[members[0]].full_variance
            continue
        influence = np.sum([scores[k].full_influence for k in members], axis=0)
        by_chain = influence.reshape(parts[members[0]].info["fit_chains"], -1)
        variance += float(series_variance(by_chain, parts[members[0]].info.get("fit_batch")))
    return (influence if len(shared) == 1 else np.zeros(0)), variance


def _merge_info(parts: list[CVResult]) -> dict[str, Any]:
    info = {key: value for key, value in parts[0].info.items() if key != "state"}
    seconds: dict[str, float] = {}
    for part in parts:
        for phase, spent in part.info["seconds"].items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
    stored = all(part.draws is not None for part in parts)
    problems = [part.info.get("fit_problems", "") for part in parts]
    return {
        **info,
        "memory": "draws" if stored else "online",
        "seconds": seconds,
        "gradients": sum(part.info["gradients"] for part in parts),
        "fit_problems": "; ".join(dict.fromkeys(filter(None, problems))),
        "merged": len(parts),
    }


def _merge_draws(
    parts: list[CVResult], order: np.ndarray, names: np.ndarray
) -> xr.DataArray | None:
    kept = [part.draws.values for part in parts if part.draws is not None]
    if len(kept) < len(parts):
        return None
    dims = ("fold", "chain", "draw")
    return xr.DataArray(np.concatenate(kept)[order], {"fold": names}, dims, name="log_score")
