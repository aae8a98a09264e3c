"""Results and comparisons as plain text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from foldwise.results.identity import folds_of_scheme
from foldwise.results.numbers import error_text, fixed, listed, places, probability_text, se_text
from foldwise.results.result import flags
from foldwise.results.verdict import (
    BETTER,
    RELIABLE,
    UNDECIDED,
    Verdict,
    standing,
    troubles_of,
)
from foldwise.scores.diagnostics import DIVERGENT_LIMIT
from foldwise.scores.rules import LOG_SCORES, RULES, column, find_rule
from foldwise.support.words import counted, duration

if TYPE_CHECKING:
    import xarray as xr

    from foldwise.results.compare import Comparison
    from foldwise.results.result import CVResult, Score

WIDTH = 80
_SIZES = {"n_obs": "row", "parameters": "parameter"}
# What the phases of a run are called.
PHASES = {
    "fit": "full-data fit",
    "prepare": "preparing",
    "compile": "compiling",
    "tune": "step size",
    "folds": "chains of the folds",
    "rungs": "posteriors between",
    "weights": "weights",
}
OPTIMISM = "gained if the same rows had been seen"


def result_text(result: CVResult) -> str:
    """Score with its errors, Monte Carlo diagnostics, time and flagged folds of one result."""
    verdict = standing(result)
    blocks = [
        _heading(result),
        _score_lines(result),
        [*verdict_lines(verdict), *_sampling_lines(result)],
        _flags(result),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def verdict_lines(verdict: Verdict) -> list[str]:
    """The verdict, why, and what to do."""
    lines = _wrap(verdict.sentence)
    if verdict.kind not in (BETTER, RELIABLE):
        told = [reason for reason in verdict.reasons if reason not in verdict.sentence]
        lines += _wrap(f"{told[0][0].upper()}{'; '.join(told)[1:]}." if told else "")
    return lines + _wrap(verdict.advice)


def score_text(score: Score) -> str:
    """One score on a line."""
    label, total, se, mcse, what = _score_row(score.name, score.name, score)
    return f"{label} {total} (se {se}, mcse {mcse}): {what}"


def comparison_text(comparison: Comparison) -> str:
    """The verdict, the table of the models, best first, and what it means."""
    models = len(comparison.table)
    head = (
        f"foldwise: {models} models compared by {comparison.score}, paired over "
        f"{_paired_over(comparison)}"
    )
    mixing = mixing_text(comparison.rhat_max, comparison.rhat_benchmark, comparison.share_above)
    mixing += _chained_text(comparison) if mixing else ""
    lines = [*_wrap(head), "", *verdict_lines(comparison.verdict), ""]
    lines += [*_model_table(comparison), *_legend(comparison), ""]
    lines += _wrap(_ess(comparison.ess, comparison.score)) + _wrap(mixing)
    for note in comparison.remarks:
        lines += _wrap(f"- {note}")
    return "\n".join(lines).rstrip()


# ---------------------------------------------------------------- one result


def _heading(result: CVResult) -> list[str]:
    info = result.info
    model = f"model {info['model']}" if info.get("model") else "unnamed model"
    title = ", ".join(str(part) for part in (model, info.get("scheme")) if part)
    held = result.folds.sizes["fold"]
    size = [_folds(held, folds_of_scheme(info, held))]
    size += [counted(info[key], word) for key, word in _SIZES.items() if info.get(key) is not None]
    text, lines = ", ".join(size), []
    if _with_chains(result) == held:
        text = "; ".join([text, *_chains_text(info)])
    else:
        lines = [line for way in ways(result) for line in _wrap(way)]
    return _wrap(f"foldwise: {title}") + _wrap(text) + _wrap(structure_text(result)) + lines


def structure_text(result: CVResult) -> str:
    """Which parameters all rows share and which groups have, and whether these are integrated out.

    Where chains sample all folds, what they sample is said beside their length.
    """
    structure = str(result.info.get("structure", ""))
    weighted = _with_chains(result) < result.folds.sizes["fold"]
    return structure + ", integrated out" * (weighted and "shared by all rows" in structure)


def _chains_text(info: Mapping[str, Any]) -> list[str]:
    """How long chains were, what they sampled and why, where folds have some."""
    parts = []
    if info.get("chains") is not None and info.get("draws") is not None:
        parts.append(f"{info['chains']} chains x {info['draws']} draws a fold")
        if info.get("warmup") is not None:
            parts[0] += f" after {info['warmup']} warm-up"
    if info.get("sampled"):
        parts.append(str(info["sampled"]))
    if info.get("why_chains"):
        parts.append(f"why chains: {info['why_chains']}")
    return parts


def ways(result: CVResult) -> list[str]:
    """How folds were scored: so many by weights, refits and chains."""
    draws = result.info.get("fit_draws")
    counts = {
        f"weights of {draws:,} full-data draws" if draws else "weights of full-data draws": (
            _made_by(result, "importance")
        ),
        "refitted, the weights being uneven": _made_by(result, "refit"),
        "; ".join(_chains_text(result.info)) or "chains": _with_chains(result),
    }
    return [f"{counted(count, 'fold')}: {words}" for words, count in counts.items() if count]


def _made_by(result: CVResult, method: str) -> int:
    """How many folds are scored by a method; none in files of before there were several."""
    table = result.folds
    return int((table["method"].values == method).sum()) if "method" in table else 0


def _with_chains(result: CVResult) -> int:
    """How many folds have chains."""
    table = result.folds
    return table.sizes["fold"] - _made_by(result, "importance") - _made_by(result, "refit")


def _score_lines(result: CVResult) -> list[str]:
    """Estimate, SE and MCSE of every score, with the optimism of the first."""
    scores = list(result.scores.items())
    (main_name, main), *others = scores
    rows = [_score_row("elpd" if main_name in LOG_SCORES else main_name, main_name, main)]
    if np.isfinite(main.optimism):
        rows.append(["optimism", fixed(main.optimism, places(main.mcse, 1)), "", "", OPTIMISM])
    rows += [_score_row(name, name, score) for name, score in others]
    lines = _columns(["", "estimate", "se", "mcse"], [row[:4] for row in rows])
    wide = max(map(len, lines))
    for k, row in enumerate(rows, start=1):
        lines[k] = lines[k].ljust(wide)
        if row[4] and len(lines[k]) + 3 + len(row[4]) <= WIDTH:
            lines[k] += "   " + row[4]
        lines[k] = lines[k].rstrip()
    for name, score in scores:
        lines += _left_out_lines(name, score, only=len(scores) == 1)
    return lines


def _score_row(label: str, name: str, score: Score) -> list[str]:
    what = f"{score_title(name, score)}; SE over {spread_over(score)}s"
    decimals = places(score.mcse, 1)
    return [
        label,
        fixed(score.total, decimals),
        se_text(score.se, decimals),
        error_text(score.mcse),
        what,
    ]


def score_title(name: str, score: Score) -> str:
    """What the score is."""
    if name == "dss" and score.rows is not None:
        return RULES["dss_pointwise"].title
    title = find_rule(name).title
    if not _single_rows(score):
        return title
    return title.removeprefix("joint ").removesuffix(", joint")


def spread_over(score: Score) -> str:
    """What a standard error is taken over: folds of a single row each are rows."""
    return "row" if _single_rows(score) else score.unit


def _single_rows(score: Score) -> bool:
    """Whether every fold tests one row, and no row twice."""
    table = score.folds
    return bool(((table["n_test"].values == 1) & (table["weight"].values == 1.0)).all())


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
    table, mixing = result.folds, result.mixing
    lines = _wrap(_ess(result.ess, next(iter(result.scores))))
    chained = _with_chains(result)
    if chained < table.sizes["fold"]:
        lines += _wrap(_weights_text(table))
    if chained:
        lines += _wrap(
            mixing_text(mixing.rhat_max, mixing.benchmark, mixing.share_above, mixing.limit)
        )
        lines += _wrap(_ran(result, chained))
    for text in (settings_text(result.info), _time_text(result.info.get("seconds"))):
        lines += _wrap(text)
    if result.info.get("fit_problems") and not troubles_of("", result):  # else it is said above
        lines += _wrap(f"check the full-data fit first: {result.info['fit_problems']}")
    return lines


def _weights_text(table: xr.Dataset) -> str:
    """How even the weights of full-data draws, and of those of refits, are."""
    tails = table["pareto_k"].values[table["method"].values != "mcmc"]
    largest = np.max(tails[np.isfinite(tails)], initial=-np.inf)
    known = fixed(largest, 2) if np.isfinite(largest) else "n/a"
    of_refits = ", those of refits too" * bool((table["method"].values == "refit").any())
    return f"importance weights{of_refits}: Pareto k up to {known} (limit 0.7)"


def divergences_text(result: CVResult) -> str:
    """How many transitions diverged, of how many, and the share from which on folds are flagged."""
    count, info = int(np.nansum(result.folds["divergences"].values)), result.info
    text = counted(count, "divergence")
    if not count or info.get("chains") is None or info.get("draws") is None:
        return text
    total = _with_chains(result) * info["chains"] * info["draws"]
    return (
        f"{text} in {total:,} transitions ({100 * count / total:.2g} %; a fold is flagged above "
        f"{100 * DIVERGENT_LIMIT:g} %)"
    )


def _ran(result: CVResult, chained: int) -> str:
    """How the chains of ``chained`` folds ran."""
    table = result.folds
    acceptance = table["acceptance"].values
    accepted = acceptance[np.isfinite(acceptance)]
    bridged = int((table["estimator"].values == "bridge").sum())
    how = "bridge sampling" if bridged == chained else "plain means over draws"
    if 0 < bridged < chained:
        how = f"bridge sampling in {counted(bridged, 'fold')}, plain means in {chained - bridged}"
    return (
        f"chains: {divergences_text(result)}, acceptance "
        f"{fixed(accepted.mean() if accepted.size else np.nan, 2)}; scores by {how}"
    )


def settings_text(info: Mapping[str, Any]) -> str:
    """Seeds, and what is not as usual."""
    parts = []
    if info.get("seed") is not None:
        given = info.get("given_seed")
        if given is None or _equal(given, info["seed"]):
            parts.append(f"seed {listed(info['seed'])}")
        else:  # several models share the seed that was given
            parts.append(f"seed {given} (this model's own: {listed(info['seed'])})")
    elsewhere = info.get("fit_made_elsewhere", False)
    if elsewhere:
        parts.append("full-data draws made elsewhere")
    elif info.get("fit_seed") is not None and not _equal(info["fit_seed"], info.get("seed")):
        parts.append(f"fit seed {listed(info['fit_seed'])}")
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
    parts = (f"{PHASES.get(phase, phase)} {duration(time)}" for phase, time in long.items())
    return "time: " + ", ".join(parts)


def _flags(result: CVResult) -> list[str]:
    """How many folds are flagged, and for each kind of trouble what to do."""
    count, advice = flags(result)
    if not advice:
        return []
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


def _legend(comparison: Comparison) -> list[str]:
    """What the table's columns are."""
    if comparison.left_out:
        parts = [f"differences to {comparison.names[0]}, over the folds that all models have"]
    else:
        parts = [
            "Pr(worse): probability that the model predicts worse than the first, by "
            f"{approximation(comparison)}; Monte Carlo error counts"
        ]
        if comparison.score in LOG_SCORES:
            parts.append("weight: in the mixture that predicts best (stacking); no probability")
            if not with_weights(comparison):
                parts[-1] += ", given with a verdict only"
    if find_rule(comparison.score).sign < 0:
        parts.append(f"{comparison.score} is an error, its difference is negated")
    return [line for part in parts for line in _wrap(part)]


def approximation(comparison: Comparison) -> str:
    """What probabilities are computed by."""
    return f"Student's t over {counted(len(comparison.units), comparison.unit)}"


def _chained_text(comparison: Comparison) -> str:
    """In how many folds chains ran, where that is not all."""
    chained = sum(_with_chains(result) for result in comparison.results.values())
    by_model = comparison.folds.sizes["fold"]
    total = by_model * len(comparison.results)
    return "" if chained == total else f"; chains in {chained} of {total} folds, {by_model} a model"


def with_weights(comparison: Comparison) -> bool:
    """Whether there is a verdict, without which weights are not shown."""
    return comparison.verdict.kind in (BETTER, UNDECIDED)


def _model_table(comparison: Comparison) -> list[str]:
    """The models, best first; a name too long for its column stands on a line of its own."""
    table, value = comparison.table, column(comparison.score)
    log = comparison.score in LOG_SCORES
    head = ["elpd" if log else comparison.score, "elpd_diff" if log else "diff"]
    head += ["se_diff", "mcse_diff", "Pr(worse)"] + ["weight"] * log
    decimals = max(places(mcse, 1) for mcse in table["mcse"])
    diff_decimals = max(places(mcse, 1) for mcse in table["mcse_diff"].iloc[1:])
    cells, weights = [], with_weights(comparison)
    for k, row in enumerate(table.to_dict("records")):
        best = k == 0
        cells.append(
            [
                fixed(row[value], decimals),
                fixed(row[f"{value}_diff"], diff_decimals),
                "-" if best else se_text(row["se_diff"], diff_decimals),
                "-" if best else error_text(row["mcse_diff"]),
                "-" if best else probability_text(row["prob_worse"]),
                *([fixed(row["stacking"], 2) if weights else "n/a"] if log else []),
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


# ---------------------------------------------------------------- words and numbers


def mixing_text(
    rhat_max: float,
    benchmark: Float[np.ndarray, " replicate"],
    share: float,
    limit: float = np.inf,
) -> str:
    """R-hat-max against what it would be if all chains had mixed, in one sentence.

    Folds are flagged above ``limit``, which is said where it is lower than the benchmark. Results
    without chains have neither.
    """
    if not benchmark.size and np.isnan(rhat_max):
        return ""
    if not np.isfinite(rhat_max) or not np.isfinite(benchmark).any():
        return f"R-hat-max {fixed(rhat_max, 3)}"
    quantile = float(np.nanquantile(benchmark, 0.99))
    if limit < quantile - 1e-6 and rhat_max > limit:  # more than rounding
        return f"R-hat-max {rhat_max:.3f} is over {limit:.3f}: some chains have not mixed"
    if share <= 0.01:
        return (
            f"R-hat-max {rhat_max:.3f} is more than mixed chains show (up to {quantile:.3f} in 99 "
            "runs of 100): some have not mixed"
        )
    return (
        f"R-hat-max {rhat_max:.3f} is what mixed chains show (up to {quantile:.3f} in 99 runs of "
        "100)"
    )


def _wrap(text: str) -> list[str]:
    """Lines of at most 80 columns, all but the first indented; none for an empty text."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _folds(held: int, total: int) -> str:
    """How many folds, and of how many where some of their scheme are missing."""
    return counted(held, "fold") if held == total else f"{held} of {counted(total, 'fold')}"


def _equal(one: Any, other: Any) -> bool:
    return bool(np.array_equal(np.asarray(one, dtype=object), np.asarray(other, dtype=object)))


def _ess(value: float, score: str) -> str:
    """Effective draws, which log scores alone have."""
    if score not in LOG_SCORES:
        return ""
    if not np.isfinite(value):
        return "ESS n/a"
    return f"ESS {value:.0f}: the score is known as well as from that many independent draws"


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
