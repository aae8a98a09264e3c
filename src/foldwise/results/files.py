"""Results as files.

A saved result is one netCDF-4 file, which xarray, R, Julia and ncdump read alike::

    /               attributes: format, versions, checksum, and the result's ``info``
    /scores/<name>  totals, full-data influences; groups ``folds`` and ``rows``, the tables
    /mixing         R-hat by fold and its benchmark
    /test           which rows each fold tests, and the observed values
    /draws          log score of every draw, where kept
    /calibration    predictive probabilities of each test row, where simulated
    /state          what ``extend`` needs to take the chains further
    /weighted       the result of the folds by importance sampling, where others have chains

Groups mirror the records they hold: one variable for each array or number, one group for each
record inside. A new field of a record is saved without a change here; a new kind of record is
added to the records of ``packing.py``. Changing the meaning of a field needs a new
``FORMAT_VERSION``.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from foldwise.folds.folds import Folds
from foldwise.models.evaluate import rows_at
from foldwise.models.model import Model
from foldwise.models.structure import Structure, without_cells
from foldwise.results.identity import different_values, model_values
from foldwise.results.packing import (
    FORMAT,
    FORMAT_VERSION,
    attributes_of,
    info_of,
    pack,
    plain_number,
    unpack,
)
from foldwise.results.ranges import OutOfRange, check_ranges
from foldwise.results.result import CVResult
from foldwise.results.sealing import SIGNATURE, beginning, declared, seal_holds, sealed
from foldwise.sampling.blocks import Sampler, Tuning
from foldwise.sampling.fit import Fit
from foldwise.sampling.metric import MetricShape
from foldwise.sampling.run import Run, fold_program
from foldwise.scores.evidence import Evidence, FullData, Ladder, Outcomes, Pace
from foldwise.scores.marginal_model import MarginalModel, Rules
from foldwise.support.memory import free_memory
from foldwise.support.writer import write_whole

# Arrays from this size on are compressed: blocks not yet reached and padding shrink to nothing.
_COMPRESS_BYTES = 2**16
# What texts take in memory, each, besides their letters.
_TEXT_BYTES = 100


@dataclass(frozen=True, repr=False)
class SavedState:
    """The ``state`` group of a file, kept until ``extend`` asks for it."""

    tree: xr.DataTree

    def __repr__(self) -> str:
        return "<state of the chains, as saved>"


# ---------------------------------------------------------------- save and load


def save(result: CVResult, path: str | os.PathLike[str]) -> Path:
    """Write ``result`` and the state of its chains to one netCDF-4 file; returns its path.

    A path without a suffix gets ``.nc``. The file is made in memory, written beside its place,
    flushed to disk and then moved there: whatever happens, an older file is there or the new one.
    """
    if not isinstance(result, CVResult):
        raise TypeError(f"only a CVResult can be saved, got {type(result).__name__}")
    target = _target(path)
    tree = _result_tree(result)
    _need_h5netcdf()
    # in memory: the HDF5 library does not survive a full disk
    content = tree.to_netcdf(None, engine="h5netcdf", encoding=_encodings(tree))
    whole = sealed(content)
    if isinstance(content, memoryview):  # of a buffer that cannot be closed while it is looked at
        content.release()
    try:
        write_whole(target, whole)
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
        result = _result(tree)
        check_ranges(result)
        return result
    except OutOfRange as error:
        raise ValueError(
            f"{file} must hold what a result can be, but {error}: it was changed by another "
            "program; restore it from a copy, or run again"
        ) from error
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
    begins = beginning(file)
    if begins != SIGNATURE:
        raise ValueError(
            f"{file} must be a result saved by foldwise, a netCDF-4 file, but it begins with "
            f"{begins!r}, as no such file does; pass the path that was given to result.save"
        )
    _need_h5netcdf()
    changed = ValueError(
        f"{file} must be as foldwise saved it, but its content does not match its checksum: "
        "it is damaged or was changed; restore it from a copy, or run again"
    )
    if seal_holds(file) is False:
        raise changed
    try:
        tree, intact = _open(file)
        version = int(tree.attrs.get("format_version", 0))
    except Exception as error:  # a damaged file raises almost anything
        if _lacks_memory(error):
            raise MemoryError(
                f"{file} must fit in memory, but there is too little; free some, or load it on a "
                "machine that has more"
            ) from error
        raise ValueError(
            f"{file} must be a result saved by foldwise, but it could not be read: it is "
            f"damaged, cut short, or another kind of file ({_reason(error)}); restore it from a "
            "copy, or run again"
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
        raise changed
    return tree


def _lacks_memory(error: BaseException) -> bool:
    """Whether an error of reading says that memory was lacking, as HDF5 says it in its own way."""
    text = str(error).lower()
    lacking = ("memory allocation failed", "cannot allocate memory")
    return isinstance(error, MemoryError) or any(words in text for words in lacking)


def _reason(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


def _open(file: Path) -> tuple[xr.DataTree, bool]:
    """The file's groups, read if they are foldwise's, and whether they match their checksum."""
    size, texts = declared(file)
    free = free_memory()
    if free is not None and size + _TEXT_BYTES * texts > free:
        raise MemoryError(f"{size / 1e9:.1f} GB of numbers do not fit into {free / 1e9:.1f} GB")
    with xr.open_datatree(
        file,
        engine="h5netcdf",
        mask_and_scale=False,
        decode_times=False,
        decode_timedelta=False,
    ) as tree:
        if tree.attrs.get("format") != FORMAT or tree.attrs.get("size", size) != size:
            return tree, False
        for node in tree.subtree:  # DataTree.load leaves out variables named like a group
            for variable in node.variables.values():
                variable.load()
        older = "size" not in tree.attrs
        return tree, _checksum(tree, variables=not older) == tree.attrs.get("checksum")


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


def _checksum(tree: xr.DataTree, variables: bool = True) -> str:
    """Digest of every group's attributes and values, whatever their order in the file.

    ``variables``: of the attributes of variables too, which older files left out.
    """
    digest = hashlib.blake2b(digest_size=16)
    for node in sorted(tree.subtree, key=lambda node: node.path):
        attributes = {k: plain_number(v) for k, v in node.attrs.items() if k != "checksum"}
        digest.update(json.dumps([node.path, attributes], sort_keys=True).encode())
        dataset = node.to_dataset(inherit=False)
        for name in sorted(map(str, dataset.variables)):
            values = dataset.variables[name].values
            text = values.dtype.kind in "UO"
            head: list[Any] = [name, "text" if text else values.dtype.str, values.shape]
            if variables:
                own = dataset.variables[name].attrs
                head.append({str(key): plain_number(value) for key, value in own.items()})
            digest.update(json.dumps(head, sort_keys=True).encode())
            content = json.dumps(values.tolist()).encode() if text else values.tobytes()
            digest.update(content)
    return digest.hexdigest()


def _size(tree: xr.DataTree) -> int:
    """Bytes of all numbers, which a file must declare."""
    return sum(
        variable.nbytes
        for node in tree.subtree
        for variable in node.to_dataset(inherit=False).variables.values()
        if variable.dtype.kind not in "UO"
    )


# ---------------------------------------------------------------- results and groups


def _result_tree(result: CVResult) -> xr.DataTree:
    """The file's content."""
    children = {
        "scores": pack(result.scores),
        "mixing": pack(result.mixing),
        "test": pack(result.test),
    }
    if result.draws is not None:
        children["draws"] = pack(result.draws.to_dataset(name="log_score"))
    if result.calibration is not None:
        children["calibration"] = pack(result.calibration)
    if result.run is not None:
        children["state"] = pack(_run_parts(result.run))
    elif "state" in result.info:
        children["state"] = result.info["state"].tree
    if result.weighted is not None:
        children["weighted"] = _result_tree(result.weighted)
    tree = xr.DataTree(xr.Dataset(attrs=attributes_of(result.info)), children=children)
    tree.attrs["size"] = _size(tree)
    tree.attrs["checksum"] = _checksum(tree)
    return tree


def _result(tree: xr.DataTree) -> CVResult:
    groups = tree.children
    draws = unpack(groups["draws"])["log_score"] if "draws" in groups else None
    calibration = unpack(groups["calibration"]) if "calibration" in groups else None
    info = info_of(tree.attrs)
    if "state" in groups:
        info["state"] = SavedState(groups["state"].copy())
    scores, mixing, test = (unpack(groups[name]) for name in ("scores", "mixing", "test"))
    weighted = _result(groups["weighted"]) if "weighted" in groups else None
    return CVResult(scores, mixing, test, info, draws, calibration, weighted=weighted)


# ---------------------------------------------------------------- the state of a run


def _run_parts(run: Run) -> dict[str, Any]:
    """All of a run but its model's functions and what only tuning needs.

    The first target of the stored draws is the result's ``draws``, and not saved twice.
    """
    apart = ("model", "sampler", "evidence")
    parts = {f.name: getattr(run, f.name) for f in fields(run) if f.name not in apart}
    evidence = {f.name: getattr(run.evidence, f.name) for f in fields(run.evidence) if f.init}
    del evidence["folds"]
    if run.evidence.draws is not None:
        evidence["draws"] = run.evidence.draws[..., 1:]
    tuned = ("steps", "step_size", "metric", "watched")
    names = ("position", "done", "lived", "finer", "gradients", *tuned)
    sampler = {name: getattr(run.sampler, name) for name in names}
    sampler["emit"] = run.sampler.program.emit
    if isinstance(run.model, MarginalModel):
        structure = run.model.structure
        sampler["marginal"] = (structure.coordinates, structure.row_cell, *run.model.rules)
    return {**parts, "evidence": evidence, "sampler": sampler}


def without_run(result: CVResult) -> dict[str, Any]:
    """The fields of a result, with the state of its chains as a file holds it, not its run.

    So results go to other processes, where the functions of a model may not; like one loaded from a
    file, such a result needs its model again to be extended.
    """
    fields_of = dict(vars(result))
    if result.run is not None:
        saved = SavedState(pack(_run_parts(result.run)))
        fields_of |= {"run": None, "info": {**result.info, "state": saved}}
    return fields_of


def restore_evidence(result: CVResult) -> Evidence:
    """What the run behind a loaded ``result`` has recorded."""
    groups = _state(result).tree.children
    return _evidence(result, unpack(groups["folds"]), unpack(groups["evidence"]))


def _evidence(result: CVResult, folds: Folds, saved: dict[str, Any]) -> Evidence:
    """The evidence that was saved, with the draws that the result holds."""
    if saved["draws"] is not None:
        if result.draws is None:
            raise ValueError("the result's draws must be those of its run, but it has none")
        both = [result.draws.values[..., None], saved["draws"]]
        saved["draws"] = np.ascontiguousarray(np.concatenate(both, axis=3))
    return Evidence(folds=folds, **_in_records(saved))


def _in_records(saved: dict[str, Any]) -> dict[str, Any]:
    """The fields of evidence as records; older files had all of their fields side by side."""
    if "pace" in saved:
        return saved
    names = ("partner", "previous", "improper", "sums", "draws", "position")
    full = (saved[name] for name in ("full", "full_rows", "full_chains", "full_length"))
    outcomes = ("observed", "classes", "contributions", "replicate", "full_curvature")
    return {
        **{name: saved[name] for name in names},
        "full": FullData(*full),
        "pace": Pace(saved["watch"], saved["time"]),
        "ladder": Ladder(*(saved[name] for name in ("rungs", "climbed", "stranded"))),
        "outcomes": None
        if saved["observed"] is None
        else Outcomes(**{name: saved[name] for name in outcomes}),
    }


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
    parts = unpack(_state(result).tree)
    evidence, saved = parts.pop("evidence"), parts.pop("sampler")
    folds, fit, settings = parts["folds"], parts["fit"], parts["settings"]
    recorded = _evidence(result, folds, evidence)
    if "marginal" in saved:
        model = _of_globals(result, model, *saved["marginal"])
    else:
        _check_model(model, fit, folds, recorded.full.joint, result.test.get("y"))
    start = saved["position"]
    # warm-up and tuning are done: there are no pilots, and nothing is refined
    tuning = Tuning(saved["metric"], None, np.zeros(len(folds), bool), saved["watched"], None)
    shape = MetricShape.of(tuning.metric)
    program = fold_program(model, folds, settings, saved["emit"], shape)
    sampler = Sampler(
        program, folds, recorded.previous, tuning, start, settings.warmup, settings.seed
    )
    sampler.steps, sampler.step_size = saved["steps"], saved["step_size"]
    sampler.done, sampler.gradients = saved["done"], saved["gradients"]
    sampler.lived, sampler.finer = saved["lived"], saved["finer"]
    return Run(model=model, sampler=sampler, evidence=recorded, **parts)


def _of_globals(
    result: CVResult, model: Model, coordinates: np.ndarray, row_cell: np.ndarray, *rules: int
) -> MarginalModel:
    """The model of the globals that was sampled; raises where ``model`` is another one."""
    if not isinstance(model, Model):
        raise TypeError(f"model must be a foldwise.Model, got {type(model).__name__}")
    shape = result.info["n_obs"], result.info["parameters"]
    was = np.asarray(result.info["identity"]["model"])
    if shape != (model.n_obs, model.dimension) or different_values(was, model_values(model)):
        raise ValueError(
            "a saved result can only be extended with its own model, but this is another one, or "
            "its rows are in another order; pass the model that was cross-validated, built from "
            "the same data in the same order"
        )
    structure = Structure(coordinates, row_cell, without_cells(model).names)
    return MarginalModel.of(model, structure, Rules(*rules))


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
