"""The report: one HTML file that needs nothing else, and what notebooks show.

Templates are in ``templates/``; everything that comes from users is escaped. Figures are SVG inside
the file. ``report_parts.py`` and ``report_trust.py`` make what is in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foldwise.results import about, report_parts, report_trust
from foldwise.results.about import About
from foldwise.results.calibration import calibration_of
from foldwise.results.compare import Comparison
from foldwise.results.figures_calibration import plot_pit
from foldwise.results.figures_chains import plot_chains
from foldwise.results.figures_compare import plot_compare
from foldwise.results.figures_diagnostics import plot_diagnostics
from foldwise.results.figures_folds import plot_difference
from foldwise.results.figures_scheme import plot_scheme
from foldwise.results.report_parts import picture
from foldwise.results.result import CVResult
from foldwise.results.text import PHASES, settings_text, ways
from foldwise.results.verdict import Verdict, standing
from foldwise.results.weighted import chains_alone
from foldwise.support.words import duration
from foldwise.support.writer import write_whole

if TYPE_CHECKING:
    from jinja2 import Environment

# Folds whose chains are drawn, and rows of the table of folds in the file.
_CHAINS, _MOST_FOLDS = 3, 5000
_CSS = {"too noisy": "noisy", "not to be trusted": "untrusted"}


def write_report(
    path: str | os.PathLike[str],
    results: dict[str, CVResult],
    comparison: Comparison | None = None,
    extra: About | None = None,
) -> Path:
    """Write the report on results, and their comparison where there are several, to an HTML file.

    A path without a suffix gets ``.html``.
    """
    target = Path(path)
    target = target if target.suffix else target.with_name(f"{target.name}.html")
    content = report_html(results, comparison, extra or About())
    try:
        write_whole(target, content.encode())
    except OSError as error:
        raise OSError(
            f"the report could not be written to {target} ({error}); choose a folder that exists "
            "and in which files can be made"
        ) from error
    return target


def report_html(results: dict[str, CVResult], comparison: Comparison | None, extra: About) -> str:
    """The report as one HTML page."""
    first = next(iter(results.values()))
    verdict = comparison.verdict if comparison else standing(first)
    content = {
        "title": extra.title or _title(results),
        "version": about.versions().get("foldwise", ""),
        "verdict": _box(verdict),
        "banners": report_parts.banners(results, comparison),
        "why": report_parts.why(verdict, comparison, first),
        "question": report_parts.question(first),
        "scheme": picture(lambda: plot_scheme(first), report_parts.scheme_alt(first)),
        "models": report_parts.model_table(results),
        "source": extra.source,
        "scores": report_parts.score_table(results),
        "trust": report_trust.trust_table(results),
        "flagged": report_trust.flagged(results, extra.command),
        "draws": report_trust.draws_table(results, comparison),
        "draws_text": report_trust.draws_text(results, comparison),
        "run": _run(results, extra),
        "texts": list(extra.texts.items()),
        "glossary": report_parts.GLOSSARY,
        "citation": about.CITATION,
        "data": _data(results, comparison),
        **_figures(results, comparison),
    }
    if comparison is not None:
        content |= {
            "comparison": report_parts.comparison_table(comparison),
            "legend": report_parts.legend(comparison),
            "influence": report_parts.influence(comparison),
        }
    return _environment().get_template("report.html").render(content)


def comparison_html(comparison: Comparison) -> str:
    """What notebooks show of a comparison."""
    return _notebook(
        f"foldwise: {len(comparison.names)} models compared by {comparison.score}",
        comparison.verdict,
        [report_parts.comparison_table(comparison)],
    )


def result_html(result: CVResult) -> str:
    """What notebooks show of a result."""
    name = str(result.info.get("model") or "unnamed model")
    named = {name: result}
    tables = [report_parts.score_table(named), report_trust.trust_table(named)]
    return _notebook(f"foldwise: {report_parts.question(result)}", standing(result), tables)


def _notebook(title: str, verdict: Verdict, tables: list[Any]) -> str:
    content = {"title": title, "verdict": _box(verdict), "tables": tables, "figures": []}
    return _environment().get_template("notebook.html").render(content)


def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("foldwise.results", "templates")
    return Environment(loader=loader, autoescape=True, trim_blocks=True)


def _title(results: dict[str, CVResult]) -> str:
    names = list(results)
    return " against ".join(names) if len(names) <= 2 else f"{len(names)} models compared"


def _box(verdict: Verdict) -> dict[str, str]:
    return {
        "css": _CSS.get(verdict.kind, verdict.kind),
        "headline": verdict.headline,
        "sentence": verdict.sentence,
        "advice": verdict.advice,
    }


# ---------------------------------------------------------------- figures


def _figures(results: dict[str, CVResult], comparison: Comparison | None) -> dict[str, Any]:
    """Pictures by their places in the page."""
    found: dict[str, Any] = {"forest": [], "differences": [], "calibration": []}
    if comparison is not None:
        verdict = comparison.verdict
        alt = f"differences of the models' scores with their errors: {verdict.headline}"
        found["forest"] = [picture(lambda: plot_compare(comparison), alt)]
        one, two = (_named(comparison.results, name) for name in (verdict.leader, verdict.other))
        alt = f"difference of {verdict.leader} and {verdict.other} in each fold, sorted"
        found["differences"] = [picture(lambda: plot_difference(one, two, comparison.score), alt)]
    found["diagnostics"] = [
        picture(partial(plot_diagnostics, _named(results, name)), f"diagnostics of {name}")
        for name in results
    ]
    for name, result in results.items():
        if result.calibration is not None:
            draw = picture(partial(plot_pit, _named(results, name)), f"PIT of {name}")
            sentence = calibration_of(result).sentence
            found["calibration"].append({"name": name, "sentence": sentence, "picture": draw})
    found["chains"] = _worst([_named(results, name) for name in results])
    return found


def _named(results: dict[str, CVResult], name: str) -> CVResult:
    """A result whose model has the name that the comparison gives it."""
    result = results[name]
    return replace(result, info={**result.info, "model": name})


def _worst(results: Iterable[CVResult]) -> list[dict[str, str]]:
    """Chains of the folds of any model with the largest R-hats, where draws were kept."""
    found = []
    for result in results:
        if result.draws is None or not np.isfinite(result.mixing.rhat).any():
            continue
        part = chains_alone(result)
        rhat = np.where(np.isfinite(part.mixing.rhat), part.mixing.rhat, -np.inf)
        for k in np.argsort(-rhat, kind="stable")[:_CHAINS]:
            found.append((float(rhat[k]), result, part.folds["fold"].values[k]))
    found = sorted(found, key=lambda each: -each[0])[:_CHAINS]
    return [
        picture(
            partial(plot_chains, result, fold),
            f"chains of fold {fold} of {result.info['model']}, R-hat {rhat:.3f}",
        )
        for rhat, result, fold in found
    ]


# ---------------------------------------------------------------- the run, and all numbers


def _run(results: dict[str, CVResult], extra: About) -> list[tuple[str, str]]:
    """Command, settings, seeds, versions, machine and seconds."""
    found = [("command", extra.command)] if extra.command else []
    if extra.settings:
        found.append(("settings", _listing(extra.settings)))
    for name, result in results.items():
        said = [*ways(result), settings_text(result.info)]
        found.append((f"folds of {name}", "; ".join(part for part in said if part)))
        seconds = (result.info.get("seconds") or {}).items()
        times = ", ".join(f"{PHASES.get(p, p)} {duration(s)}" for p, s in seconds if s >= 0.05)
        found.append((f"time of {name}", times or "under a second"))
    found.append(("versions", _listing(extra.versions or about.versions())))
    found.append(("machine", _listing(extra.machine or about.machine())))
    return found


def _listing(values: dict[str, Any]) -> str:
    return "; ".join(f"{key}: {value}" for key, value in values.items() if value is not None)


def _data(results: dict[str, CVResult], comparison: Comparison | None) -> dict[str, Any]:
    """All numbers: the table of the folds of every model, scores, verdict and comparison."""
    first = next(iter(results.values())).folds
    known = [c for c in first.data_vars if c not in ("spread", "noise") and _known(results, c)]
    ahead = [c for c in (known[0], "mcse", "method", "status") if c in known]  # what is asked first
    shown = [*ahead, *(c for c in known if c not in ahead)]
    rows = []
    for name, result in results.items():
        found = result.folds
        columns = [found[c].values if c in found else None for c in shown]
        for k, fold in enumerate(found["fold"].values[:_MOST_FOLDS]):
            values = [None if column is None else _plain(column[k]) for column in columns]
            rows.append([name, _plain(fold), *values])
    data: dict[str, Any] = {
        "columns": ["model", "fold", *map(str, shown)],
        "folds": rows,
        "scores": {
            name: {
                score.name: {k: _plain(getattr(score, k)) for k in ("total", "se", "mcse", "ess")}
                for score in result.scores.values()
            }
            for name, result in results.items()
        },
    }
    if comparison is not None:
        verdict = comparison.verdict
        table = comparison.table.reset_index().to_dict("records")
        data["comparison"] = [{k: _plain(v) for k, v in row.items()} for row in table]
        data["verdict"] = {"kind": verdict.kind, "sentence": verdict.sentence}
    return json.loads(json.dumps(data, allow_nan=False))


def _known(results: dict[str, CVResult], column: Hashable) -> bool:
    """Whether any fold has a value there: R-hats, say, are of chains alone."""
    found = (result.folds[column] for result in results.values() if column in result.folds)
    return any(bool(values.notnull().any()) for values in found)


def _plain(value: Any) -> Any:
    """A value as JSON has it, with six digits; None where it is no number."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value if isinstance(value, bool | int | str | None) else str(value)
