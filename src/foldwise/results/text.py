"""Results and comparisons as plain text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from foldwise.results.identity import folds_of_scheme
from foldwise.results.result import flags
from foldwise.scores.rules import LOG_SCORES, RULES, column, find_rule
from foldwise.support.words import counted, duration

if TYPE_CHECKING:
    import xarray as xr

    from foldwise.results.compare import Comparison
    from foldwise.results.result import CVResult, Score

WIDTH = 80
# Log scores that differ by less say little: the normal approximation of the difference's error is
# too narrow there (Sivula et al. 2020).
SMALL_DIFFERENCE = 4.0
# A Monte Carlo error of a third of the standard error widens it by 5 %.
LARGE_MCSE = 1 / 3
_SIZES = {"n_obs": "row", "parameters": "parameter"}


def result_text(result: CVResult) -> str:
    """Score with its errors, Monte Carlo diagnostics, time and flagged folds of one result."""
    blocks = [_heading(result), _score_lines(result), _sampling_lines(result), _flags(result)]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def score_text(score: Score) -> str:
    """One score on a line."""
    label, total, se, mcse, what = _score_row(score.name, score.name, score)
    return f"{label} {total} (se {se}, mcse {mcse}): {what}"


def comparison_text(comparison: Comparison) -> str:
    """Table of the models, best first, and what it means."""
    models = len(comparison.table)
    head = (
        f"foldwise: {models} models compared by {comparison.score}, paired over "
        f"{_paired_over(comparison)}"
    )
    mixing = _mixing_text(comparison.rhat_max, comparison.rhat_benchmark, comparison.share_above)
    lines = [*_wrap(head), "", *_model_table(comparison), *_wrap(_legend(comparison)), ""]
    if comparison.left_out:
        lines += _wrap(_no_verdict(comparison))
    elif models == 2:
        lines += _wrap(_pair_sentence(comparison))
    ess = _ess(comparison.ess, comparison.score)
    lines += _wrap(f"Monte Carlo: {ess}{mixing}".rstrip(", "))
    for note in [*_notes(comparison), *comparison.remarks]:
        lines += _wrap(f"- {note}")
    return "\n".join(lines)


# ---------------------------------------------------------------- one result


def _heading(result: CVResult) -> list[str]:
    info = result.info
    model = f"model {info['model']}" if info.get("model") else "unnamed model"
    title = ", ".join(str(part) for part in (model, info.get("scheme")) if part)
    held = result.folds.sizes["fold"]
    size = [_folds(held, folds_of_scheme(info, held))]
    size += [counted(info[key], word) for key, word in _SIZES.items() if info.get(key) is not None]
    text = ", ".join(size)
    refitted = _made_by(result, "refit")
    weighted = _made_by(result, "importance") + refitted
    if weighted:
        rest = f"; {refitted} refitted" if refitted else ""
        rest += f"; chains for {counted(held - weighted, 'fold')}" if weighted < held else ""
        text += f"; {weighted - refitted} from {info['fit_draws']:,} full-data draws{rest}"
    if weighted < held and info.get("chains") is not None and info.get("draws") is not None:
        text += f"; {info['chains']} chains x {info['draws']} draws a fold"
        if info.get("warmup") is not None:
            text += f" after {info['warmup']} warm-up"
    return _wrap(f"foldwise: {title}") + _wrap(text) + _wrap(info.get("structure", ""))


def _made_by(result: CVResult, method: str) -> int:
    """How many folds are scored by a method; none in files of before there were several."""
    table = result.folds
    return int((table["method"].values == method).sum()) if "method" in table else 0


def _score_lines(result: CVResult) -> list[str]:
    """Estimate, SE and MCSE of every score, with the effective parameters of the first."""
    scores = list(result.scores.items())
    (main_name, main), *others = scores
    rows = [_score_row("elpd" if main_name in LOG_SCORES else main_name, main_name, main)]
    if np.isfinite(main.p):
        rows.append(["p", _fixed(main.p, _places(main.mcse, 1)), "", "", ""])
    rows += [_score_row(name, name, score) for name, score in others]
    lines = _columns(["", "estimate", "se", "mcse"], [row[:4] for row in rows])
    for k, row in enumerate(rows, start=1):
        if row[4] and len(lines[k]) + 3 + len(row[4]) <= WIDTH:
            lines[k] += "   " + row[4]
    for name, score in scores:
        lines += _left_out_lines(name, score, only=len(scores) == 1)
    return lines


def _score_row(label: str, name: str, score: Score) -> list[str]:
    over = "SE over rows" if score.rows is not None else "SE over folds"
    what = f"{_title(name, score)}; {over}"
    decimals = _places(score.mcse, 1)
    return [
        label,
        _fixed(score.total, decimals),
        _se(score.se, decimals),
        _error(score.mcse),
        what,
    ]


def _title(name: str, score: Score) -> str:
    """What the score is."""
    if name == "dss" and score.rows is not None:
        return RULES["dss_pointwise"].title
    return find_rule(name).title


def _left_out_lines(name: str, score: Score, only: bool) -> list[str]:
    if not score.left_out:
        return []
    folds = score.folds.sizes["fold"]
    of = "total" if only else f"total of {name}"
    left = counted(score.left_out, "fold")
    verb = "is" if score.left_out == 1 else "are"
    return _wrap(
        f"{of} over {folds - score.left_out} of {folds} folds: {left} whose score is not finite "
        f"{verb} left out"
    )


def _sampling_lines(result: CVResult) -> list[str]:
    """Monte Carlo diagnostics, how the folds ran, settings and time."""
    table, mixing, ess = result.folds, result.mixing, _ess(result.ess, next(iter(result.scores)))
    lines, folds = [], table.sizes["fold"]
    weighted = _made_by(result, "importance") + _made_by(result, "refit")
    if weighted:
        k = table["pareto_k"].values[table["method"].values != "mcmc"]
        lines += _wrap(f"importance weights: Pareto k up to {_fixed(np.nanmax(k), 2)}")
    if weighted == folds:
        lines += _wrap(f"Monte Carlo: {ess}".rstrip(", "))
    else:
        rhat = _mixing_text(mixing.rhat_max, mixing.benchmark, mixing.share_above, mixing.limit)
        lines += _wrap(f"Monte Carlo: {ess}{rhat}") + _wrap(_ran(table, folds - weighted))
    for text in (_settings_text(result.info), _time_text(result.info.get("seconds"))):
        lines += _wrap(text)
    if result.info.get("fit_problems"):
        lines += _wrap(f"check the full-data fit first: {result.info['fit_problems']}")
    return lines


def _ran(table: xr.Dataset, chained: int) -> str:
    """How the chains of ``chained`` folds ran."""
    acceptance = table["acceptance"].values
    accepted = acceptance[np.isfinite(acceptance)]
    bridged = int((table["estimator"].values == "bridge").sum())
    return (
        f"{counted(int(np.nansum(table['divergences'].values)), 'divergence')}, acceptance "
        f"{_fixed(accepted.mean() if accepted.size else np.nan, 2)}, bridge for "
        f"{counted(bridged, 'fold')}, mean for {chained - bridged}"
    )


def _settings_text(info: Mapping[str, Any]) -> str:
    """Seeds, and what is not as usual."""
    parts = []
    if info.get("seed") is not None:
        parts.append(f"seed {_listed(info['seed'])}")
    if info.get("fit_seed") is not None and not _equal(info["fit_seed"], info.get("seed")):
        parts.append(f"fit seed {_listed(info['fit_seed'])}")
    if info.get("memory") == "online":
        parts.append("online (running sums, no draws kept)")
    if info.get("precision") not in (None, "float64"):
        parts.append(str(info["precision"]))
    return ", ".join(parts)


def _time_text(seconds: Mapping[str, float] | None) -> str:
    """Time of every phase that took a tenth of a second or more, as shown."""
    long = {phase: time for phase, time in (seconds or {}).items() if not time < 0.05}
    if not long:
        return ""
    return "time: " + ", ".join(f"{phase} {duration(time)}" for phase, time in long.items())


def _flags(result: CVResult) -> list[str]:
    """How many folds are flagged, and for each kind of trouble what to do."""
    count, advice = flags(result)
    if not advice:
        return ["all folds fine"]
    lines = [f"{count} of {counted(result.folds.sizes['fold'], 'fold')} flagged:"]
    for line in advice:
        lines += _wrap(f"- {line}")
    return lines


# ---------------------------------------------------------------- a comparison


def _paired_over(comparison: Comparison) -> str:
    """Over how many units differences are paired, and of how many folds where some are missing."""
    used = comparison.folds.sizes["fold"] - comparison.left_out
    folds = _folds(used, comparison.scheme_folds)
    if comparison.unit == "fold":
        return folds
    rows = counted(len(comparison.units), comparison.unit)
    return f"{rows} of {folds}" if used < comparison.scheme_folds else rows


def _legend(comparison: Comparison) -> str:
    """What the table's columns are."""
    if comparison.left_out:
        parts = [f"differences to {comparison.names[0]}, over the folds that all models have"]
    else:
        parts = ["Pr(worse): probability that the best model is better"]
        parts += ["weight: by stacking"] * (comparison.score in LOG_SCORES)
    if find_rule(comparison.score).sign < 0:
        parts.append(f"{comparison.score} is an error, its difference is negated")
    return "; ".join(parts)


def _no_verdict(comparison: Comparison) -> str:
    """Which folds are missing in which model, and what to do."""
    where = "; ".join(f"{_listed(names)} in {model}" for model, names in comparison.missing.items())
    verb = "has" if comparison.left_out == 1 else "have"
    return (
        f"No verdict: {comparison.left_out} of {counted(comparison.folds.sizes['fold'], 'fold')} "
        f"{verb} no finite score ({where}), and a fold fails most easily where a model predicts "
        "badly. Print that model's result for what to do about these folds, and compare again."
    )


def _model_table(comparison: Comparison) -> list[str]:
    """The models, best first; a name too long for its column stands on a line of its own."""
    table, value = comparison.table, column(comparison.score)
    log = comparison.score in LOG_SCORES
    head = ["elpd" if log else comparison.score, "elpd_diff" if log else "diff"]
    head += ["se_diff", "mcse_diff", "Pr(worse)"] + ["weight"] * log
    decimals = max(_places(mcse, 1) for mcse in table["mcse"])
    diff_decimals = max(_places(mcse, 1) for mcse in table["mcse_diff"].iloc[1:])
    cells = []
    for k, row in enumerate(table.to_dict("records")):
        best = k == 0
        cells.append(
            [
                _fixed(row[value], decimals),
                _fixed(row[f"{value}_diff"], diff_decimals),
                "-" if best else _se(row["se_diff"], diff_decimals),
                "-" if best else _error(row["mcse_diff"]),
                "-" if best else _probability(row["prob_worse"]),
                *([_fixed(row["stacking"], 2)] if log else []),
            ]
        )
    widths = _widths([head, *cells])
    room = WIDTH - sum(widths)
    names = [" ".join(str(name).split()) for name in table.index]
    left = max(len(name) for name in ["model", *names] if len(name) <= room)
    lines = [_line("model".ljust(left), head, widths)]
    for name, row in zip(names, cells, strict=True):
        if len(name) > room:
            lines += _wrap(name)
        lines.append(_line((name if len(name) <= room else "").ljust(left), row, widths))
    return lines


def _pair_sentence(comparison: Comparison) -> str:
    table, name = comparison.table, f"{column(comparison.score)}_diff"
    better, worse = table.index
    row = table.loc[worse]
    if row[name] == 0.0:
        return f"{better} and {worse} have the same score."
    decimals = _places(row["mcse_diff"], 1)
    return (
        f"{better} is better than {worse} by {_fixed(-row[name], decimals)} "
        f"(SE {_se(row['se_diff'], decimals)}, MCSE {_error(row['mcse_diff'])}) with probability "
        f"{_probability(row['prob_worse'])} (Bayesian bootstrap "
        f"{_probability(row['prob_worse_bootstrap'])})."
    )


def _notes(comparison: Comparison) -> list[str]:
    """What the reader of the table should beware of."""
    notes = []
    others = comparison.table.iloc[1:]
    diff = others[f"{column(comparison.score)}_diff"]
    small = others.index[diff.abs() < SMALL_DIFFERENCE]
    if len(small) and comparison.score in LOG_SCORES and not comparison.left_out:
        notes.append(
            f"The difference to {_listed(small)} is below {SMALL_DIFFERENCE:g}: too small to "
            "matter, and its probability is not to be relied on (Sivula et al. 2020)."
        )
    noisy = others.index[others["mcse_diff"] > LARGE_MCSE * others["se_diff"]]
    if len(noisy):
        notes.append(
            f"The Monte Carlo error of the difference to {_listed(noisy)} is more than a third "
            "of its standard error: extend the runs, result.extend(draws)."
        )
    return notes


# ---------------------------------------------------------------- words and numbers


def _mixing_text(
    rhat_max: float,
    benchmark: Float[np.ndarray, " replicate"],
    share: float,
    limit: float = np.inf,
) -> str:
    """R-hat-max against what it would be if all chains had mixed.

    Folds are flagged above ``limit``, which is said where it is lower than the benchmark. Results
    without chains have neither.
    """
    if not benchmark.size and np.isnan(rhat_max):
        return ""
    if not np.isfinite(rhat_max) or not np.isfinite(benchmark).any():
        return f"R-hat-max {_fixed(rhat_max, 3)}"
    if share == 0:
        reach = "no shuffled run reaches it"
    else:
        percent = "under 1" if share < 0.01 else f"{100 * share:.0f}"
        reach = f"{percent} % of shuffled runs reach it"
    quantile = np.nanquantile(benchmark, 0.99)
    if limit < quantile - 1e-6:  # more than rounding
        reach += f"; limit {limit:.3f}"
    return f"R-hat-max {rhat_max:.3f} (benchmark {quantile:.3f} at 99 %; {reach})"


def _wrap(text: str) -> list[str]:
    """Lines of at most 80 columns, all but the first indented; none for an empty text."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _folds(held: int, total: int) -> str:
    """How many folds, and of how many where some of their scheme are missing."""
    return counted(held, "fold") if held == total else f"{held} of {counted(total, 'fold')}"


def _listed(values: Any) -> str:
    """Values in a row; at most five of them."""
    items = [str(value) for value in np.atleast_1d(np.asarray(values, dtype=object)).ravel()]
    more = f" and {len(items) - 5} more" if len(items) > 5 else ""
    return ", ".join(items[:5]) + more


def _equal(one: Any, other: Any) -> bool:
    return bool(np.array_equal(np.asarray(one, dtype=object), np.asarray(other, dtype=object)))


def _places(value: float, significant: int) -> int:
    """Decimals that show ``significant`` digits of a positive value; one if there is no value."""
    if not np.isfinite(value) or value <= 0:
        return 1
    return max(significant - 1 - int(np.floor(np.log10(value))), 0)


def _fixed(value: float, decimals: int) -> str:
    """A number with ``decimals`` decimals, but no more than three."""
    if not np.isfinite(value):
        return "n/a" if np.isnan(value) else str(value)
    text = f"{value:.{min(decimals, 3)}f}"
    return text.lstrip("-") if float(text) == 0 else text


def _ess(value: float, score: str) -> str:
    """Effective draws, which log scores alone have."""
    if score not in LOG_SCORES:
        return ""
    return f"ESS {value:.0f}, " if np.isfinite(value) else "ESS n/a, "


def _error(value: float) -> str:
    """A Monte Carlo error with two digits."""
    if not np.isfinite(value):
        return "n/a"
    decimals = _places(value, 2)
    return f"{value:.{decimals}f}" if decimals <= 5 else f"{value:.1e}"


def _se(value: float, decimals: int) -> str:
    """A standard error: as exact as its estimate, but with two digits at least, three at most."""
    return _fixed(value, min(max(decimals, _places(value, 2)), _places(value, 3)))


def _probability(value: float) -> str:
    if not np.isfinite(value):
        return "n/a"
    if value > 0.9995:
        return ">0.999"
    return f"{value:.3f}" if value >= 0.0005 else "<0.001"


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(cell) for cell in column) + 2 for column in zip(*rows, strict=True)]


def _line(name: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    text = name + "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return text.rstrip()


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table: names to the left, numbers to the right."""
    left = max(len(row[0]) for row in rows)
    widths = _widths([row[1:] for row in (head, *rows)])
    return [_line(row[0].ljust(left), row[1:], widths) for row in (head, *rows)]
