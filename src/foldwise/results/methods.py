"""Where methods of results reach up to the modules that print, save, export and extend them.

These modules know results, so results can not import them; this is the only place that does, when
a method is called. What reads and joins files waits here too: it needs xarray, which is slow to
import.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    import xarray as xr

    from foldwise.models.model import Model
    from foldwise.results.compare import Comparison
    from foldwise.results.result import CVResult, Score


def extend(result: CVResult, draws: int, model: Model | None, progress: bool) -> CVResult:
    """What ``CVResult.extend`` does."""
    from foldwise.results import extend

    return extend.extended(result, draws, model, progress)


def save(result: CVResult, path: str | os.PathLike[str]) -> None:
    """What ``CVResult.save`` does."""
    from foldwise.results import files

    files.save(result, path)


def state(result: CVResult) -> dict[str, Any]:
    """What a pickle of a result holds."""
    from foldwise.results import files

    return files.without_run(result)


def to_arviz(result: CVResult) -> Any:
    """What ``CVResult.to_arviz`` does."""
    from foldwise.results import export

    return export.to_arviz(result)


def to_datatree(result: CVResult, model: Model | None) -> xr.DataTree:
    """What ``CVResult.to_datatree`` does."""
    from foldwise.results import export

    return export.to_datatree(result, model)


def result_text(result: CVResult) -> str:
    """A result as it is printed."""
    from foldwise.results import text

    return text.result_text(result)


def score_text(score: Score) -> str:
    """A score as it is printed."""
    from foldwise.results import text

    return text.score_text(score)


def coloured(text: str) -> Any:
    """A print-out in colour, for rich."""
    from foldwise.results import colour

    return colour.coloured(text)


def comparison_text(comparison: Comparison) -> str:
    """A comparison as it is printed."""
    from foldwise.results import text

    return text.comparison_text(comparison)


def unit(score: Score) -> str:
    """What ``Score.unit`` says."""
    from foldwise.results import totals

    return totals.unit_of(score.folds, score.rows, score.pointwise)


def error(score: Score) -> float:
    """What ``Score.error`` says."""
    from foldwise.results import totals

    return totals.score_error(score)


def comparison_report(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """What ``Comparison.report`` does."""
    from foldwise.results import report

    return report.write_report(path, comparison.results, comparison)


def result_report(result: CVResult, path: str | os.PathLike[str]) -> Path:
    """What ``CVResult.report`` does."""
    from foldwise.results import report

    name = str(result.info.get("model") or "model")
    return report.write_report(path, {name: result})


def comparison_html(comparison: Comparison) -> str:
    """A comparison as notebooks show it."""
    from foldwise.results import report

    return report.comparison_html(comparison)


def result_html(result: CVResult) -> str:
    """A result as notebooks show it."""
    from foldwise.results import report

    return report.result_html(result)


def load(path: str | Path) -> CVResult:
    """Read a result that ``CVResult.save`` wrote."""
    from foldwise.results import files

    return files.load(path)


def merge(results: Iterable[CVResult]) -> CVResult:
    """Join results of disjoint folds of one scheme, run apart, into that of all their folds.

    They must be of one model and its data, one scheme and one run length, with the same scores and
    estimator; the joined result says how many folds of the scheme it has. It cannot be extended;
    extend its parts and merge them again.
    """
    from foldwise.results import merge

    return merge.merge(results)
