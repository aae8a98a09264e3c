"""An outcome as a folder: results, a report for people and one for programs, figures.

::

    <model>.nc      each model's result, as ``result.save`` writes it
    report.txt      what the command line prints
    report.json     the same for programs; numbers that are not finite are null
    report.html     the report to mail: one file, with figures
    figures/*.png
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foldwise.results import about
from foldwise.results.compare import Comparison, compare
from foldwise.results.files import load
from foldwise.results.result import CVResult, flags
from foldwise.results.verdict import Verdict, standing
from foldwise.scores.rules import LOG_SCORES, find_rule
from foldwise.studies.outcome import Outcome
from foldwise.support.locks import LOCK, Busy, locked
from foldwise.support.writer import free_name, move_folder, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT, PAGE = "report.json", "report.html"
# All that is ever written into an output folder; one with anything else is not replaced.
_OURS = re.compile(rf"report\.(txt|json|html)|figures|.*\.(nc|png)|{re.escape(LOCK)}")


# ---------------------------------------------------------------- reports


def record(outcome: Outcome, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The report for programs, as plain JSON values; ``settings`` are what the user chose."""
    files = file_stems(outcome.results)
    seconds: dict[str, float] = {}
    for result in outcome.results.values():
        for phase, time in result.info.get("seconds", {}).items():
            seconds[phase] = seconds.get(phase, 0.0) + time
    whole = {
        "name": outcome.name,
        "seed": settings.get("seed"),
        "settings": settings,
        "command": settings.get("command", ""),
        "versions": about.versions(),
        "machine": about.machine(),
        "seconds": seconds,
        "models": {
            name: {"file": f"{files[name]}.nc", **_model_record(result)}
            for name, result in outcome.results.items()
        },
        "comparison": outcome.comparison and _comparison_record(outcome.comparison),
        "conclusion": outcome.conclusion,
        "tables": outcome.tables,
        "source": outcome.source,
        "title": outcome.title,
    }
    return _plain(whole)


def _model_record(result: CVResult) -> dict[str, Any]:
    main = next(iter(result.scores))
    totals = ("total", "se", "mcse", "ess", "optimism", "left_out")
    flagged, advice = result.flagged, flags(result)[1]
    info = {key: value for key, value in result.info.items() if key not in ("state", "seconds")}
    return {
        "verdict": _verdict_record(standing(result)),
        "score": main,
        "elpd": result.elpd if main in LOG_SCORES else None,
        "se": result.se,
        "mcse": result.mcse,
        "ess": result.ess,
        "optimism": result.optimism,
        "rhat_max": result.rhat_max,
        "rhat_benchmark": _benchmark(result.rhat_benchmark),
        "divergences": result.divergences,
        "flagged": dict(
            zip(map(str, flagged["fold"].values), flagged["status"].values, strict=True)
        ),
        "advice": advice,
        "scores": {
            name: {key: getattr(score, key) for key in totals}
            for name, score in result.scores.items()
        },
        "settings": info,
        "seconds": result.info.get("seconds", {}),
        "folds": {
            str(name): column.values
            for name, column in result.folds.reset_coords().variables.items()
        },
    }


def _comparison_record(comparison: Comparison) -> dict[str, Any]:
    return {
        "verdict": _verdict_record(comparison.verdict),
        "score": comparison.score,
        "over": comparison.unit,
        "folds": comparison.folds.sizes["fold"],
        "scheme_folds": comparison.scheme_folds,
        "left_out": comparison.left_out,
        "missing": comparison.missing,
        "remarks": comparison.remarks,
        "table": [
            {"model": name, **row}
            for name, row in zip(
                comparison.table.index, comparison.table.to_dict("records"), strict=True
            )
        ],
        "ess": comparison.ess,
        "rhat_max": comparison.rhat_max,
        "rhat_benchmark": _benchmark(comparison.rhat_benchmark),
    }


def _verdict_record(verdict: Verdict) -> dict[str, Any]:
    """The verdict for programs."""
    keys = ("kind", "sentence", "reasons", "advice", "leader", "other", "part", "small")
    return {key: getattr(verdict, key) for key in keys}


def _benchmark(replicates: np.ndarray) -> float:
    """The 99 % quantile, which R-hat-max is compared with."""
    return float(np.nanquantile(replicates, 0.99)) if np.isfinite(replicates).any() else np.nan


def _plain(value: Any) -> Any:
    """``value`` as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        value = value[()]
    if isinstance(value, np.generic) and not isinstance(value, (np.datetime64, np.timedelta64)):
        value = value.item()
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


# ---------------------------------------------------------------- figures


def figures(results: Mapping[str, CVResult]) -> dict[str, Callable[[], Figure]]:
    """What makes each figure of the results, by file stem; of many models, the best against each.

    The comparison comes first. Figures of what results do not have (stored draws, chains,
    predictive draws) are left out.
    """
    stems = file_stems(results)
    found: dict[str, Callable[[], Figure]] = {}
    if len(results) > 1:
        found["compare"] = partial(_plot, "plot_compare", dict(results))
    for label, pair in _pairs(results, stems):
        chains = all(r.draws is not None for r in pair)
        plots = ["difference"] * (len(pair) == 2)
        if chains and (len(pair) == 1 or all(_chains_alone(r) for r in pair)):
            plots += ["progress", "errors"] + ["probability"] * (len(pair) == 2)
        for plot in plots:
            found[f"{plot}{label}"] = partial(_plot, f"plot_{plot}", *pair)
    for name, result in results.items():
        plots = ["diagnostics"]
        if result.draws is not None:
            plots.append("rhat_max")
        if result.calibration is not None:
            plots.append("pit")
        for plot in plots:
            found[f"{plot}_{stems[name]}"] = partial(_plot, f"plot_{plot}", result)
        if result.draws is not None and np.isfinite(result.folds["rhat"].values).any():
            worst = result.folds["fold"].values[int(np.nanargmax(result.folds["rhat"].values))]
            found[f"chains_{stems[name]}"] = partial(_plot, "plot_chains", result, worst)
    return found


def _chains_alone(result: CVResult) -> bool:
    """Whether every fold has chains of its own."""
    table = result.folds
    return "method" not in table or bool((table["method"].values == "mcmc").all())


def _pairs(
    results: Mapping[str, CVResult], stems: Mapping[str, str]
) -> Iterator[tuple[str, tuple[CVResult, ...]]]:
    if len(results) <= 2:
        yield "", tuple(results.values())
        return

    def merit(name: str) -> float:
        score = next(iter(results[name].scores.values()))
        return find_rule(score.name).sign * score.total

    best = max(results, key=merit)
    for name in results:
        if name != best:
            yield f"_{stems[best]}_{stems[name]}", (results[best], results[name])


def _plot(name: str, *arguments: Any) -> Figure:
    from foldwise.results import figures as plots

    figure: Figure = getattr(plots, name)(*arguments)
    return figure


def draw(figures: Mapping[str, Callable[[], Figure]], folder: Path) -> list[str]:
    """Write the figures into a folder, without a display; returns the stems of those written.

    One that cannot be drawn is left out with a warning: the results of a long run are worth more.
    """
    from foldwise.results.figures import save_figures

    written = []
    for stem, figure in figures.items():
        try:
            save_figures({stem: figure}, folder)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"figure {stem} is not drawn: {reason}", stacklevel=2)
        else:
            written.append(stem)
    return written


# ---------------------------------------------------------------- folders


def file_stems(names: Mapping[str, Any]) -> dict[str, str]:
    """A file name without suffix for each model: letters that any file system takes, distinct."""
    stems: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^\w.+-]+", "_", name).strip("._")[:80] or "model"
        stem, count = plain, 1
        while stem.lower() in {taken.lower() for taken in stems.values()}:
            count += 1
            stem = f"{plain}_{count}"
        stems[name] = stem
    return stems


@contextmanager
def new_folder(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into, which is at ``path`` when all has gone well.

    It is at ``path`` from the beginning, or in place of one that ``overwrite`` replaces, beside it
    until the end. What was written stays if something goes wrong, and the error has a note that
    says where. Refuses before any work: a file or a folder that is not empty at ``path`` (unless
    ``overwrite`` and it holds only what foldwise writes), a place where no folder can be made, and
    a folder in which another process is at work.
    """
    target = Path(path).expanduser().resolve()
    held = _check_target(target, overwrite)
    missing = [folder for folder in (target, *target.parents) if not folder.exists()]
    place = free_name(target, "new") if held else target
    try:
        place.mkdir(parents=True, exist_ok=not held)
    except OSError as error:
        raise OSError(
            f"the output folder {target} cannot be made ({error}); choose a place where you may "
            "write"
        ) from error
    try:
        with locked(place):
            yield place
    except Busy:
        raise
    except BaseException as error:
        if any(place.iterdir()):
            error.add_note(f"what was finished is in {place}")
        for folder in [place, *missing]:
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()
        raise
    if place != target:
        _put_in_place(place, target, overwrite)


def _check_target(target: Path, overwrite: bool) -> list[str]:
    """What the folder holds; raises where it is not one that may be written or replaced."""
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"the output must be a folder, but {target} is a file")
    if target == Path.cwd() or target in Path.cwd().parents:
        raise ValueError(
            f"the output must be a folder of its own, but {target} is the one you are in, or above "
            "it; name a new one"
        )
    entries = target.iterdir() if target.is_dir() else ()
    held = sorted(entry.name for entry in entries if entry.name != LOCK)
    if held and not overwrite:
        raise FileExistsError(
            f"the output folder must be new or empty, but {target} is not; choose another, or "
            "--overwrite to replace it"
        )
    foreign = [name for name in held if not _OURS.fullmatch(name)]
    if foreign:
        raise FileExistsError(
            f"only a folder that foldwise wrote is replaced, but {target} also holds "
            f"{', '.join(foreign[:3])}; choose another folder"
        )
    return held


def _put_in_place(done: Path, target: Path, overwrite: bool) -> None:
    try:
        _check_target(target, overwrite)
        move_folder(done, target)
    except OSError as error:
        where = done if done.exists() else target
        raise OSError(f"{error}; what was found is in {where}") from error


def keep(results: Mapping[str, CVResult], folder: Path) -> None:
    """Write those of the results that are not in the folder yet, each as soon as it is there.

    The name of a file depends on the models before it only.
    """
    for name, stem in file_stems(results).items():
        file = folder / f"{stem}.nc"
        if not file.exists():
            results[name].save(file)


def write(outcome: Outcome, settings: Mapping[str, Any], folder: Path) -> None:
    """Results and reports into a folder that holds nothing but results of the same run."""
    keep(outcome.results, folder)
    report = as_json(record(outcome, settings))
    write_whole(folder / "report.txt", f"{outcome}\n".encode())
    write_whole(folder / REPORT, f"{report}\n".encode())


def write_page(outcome: Outcome, report: Mapping[str, Any], file: Path) -> None:
    """The report to mail; ``report`` is that for programs."""
    from foldwise.results.report import write_report

    extra = about.About(
        title=outcome.title or outcome.name,
        command=str(report.get("command") or ""),
        settings={k: v for k, v in (report.get("settings") or {}).items() if k != "command"},
        versions=dict(report.get("versions") or {}),
        machine=dict(report.get("machine") or {}),
        source=outcome.source,
        texts=outcome.tables,
    )
    write_report(file, outcome.results, outcome.comparison, extra)


def read_record(path: str | Path) -> dict[str, Any]:
    """The report for programs of a folder; empty where there is none."""
    file = Path(path).expanduser() / REPORT
    return _read_report(file) if file.is_file() else {}


def as_json(report: Mapping[str, Any]) -> str:
    """One JSON object."""
    return json.dumps(report, indent=1, allow_nan=False, ensure_ascii=False)


def read(path: str | Path) -> Outcome:
    """The outcome in a folder that was written before, or in one saved result."""
    place = Path(path).expanduser()
    if not place.exists():
        raise FileNotFoundError(
            f"{place} does not exist; name a folder that --out wrote, or a file of result.save"
        )
    report = _read_report(place / REPORT) if (place / REPORT).is_file() else {}
    if not place.is_dir():
        files = {place.stem: place}
    elif report:
        files = {name: place / Path(m["file"]).name for name, m in report["models"].items()}
    else:
        files = {file.stem: file for file in sorted(place.glob("*.nc"))}
    if not files:
        raise FileNotFoundError(
            f"{place} must hold results that foldwise saved (*.nc), but there are none"
        )
    results = {name: load(file) for name, file in files.items()}
    return Outcome(
        report.get("name", place.stem),
        results,
        _compared(results),
        report.get("conclusion", ""),
        report.get("tables", {}),
        figures(results),
        report.get("source", ""),
        report.get("title", ""),
    )


def _read_report(file: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _ = [model["file"] for model in report["models"].values()]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} must be a report that foldwise wrote, but it cannot be read "
            f"({type(error).__name__}: {error}); delete it to go by the *.nc files alone"
        ) from error
    return report


def _compared(results: Mapping[str, CVResult]) -> Comparison | None:
    """The comparison, or a warning why there is none."""
    if len(results) < 2:
        return None
    try:
        return compare(dict(results))
    except ValueError as error:
        warnings.warn(f"the results are not compared: {error}", stacklevel=3)
        return None
