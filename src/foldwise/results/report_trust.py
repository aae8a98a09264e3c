"""What a report says about trust: a light for each model, flagged folds, what draws would bring."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from foldwise.results.compare import Comparison
from foldwise.results.numbers import error_text
from foldwise.results.report_parts import cell, table
from foldwise.results.result import CVResult, flags
from foldwise.results.text import divergences_text, mixing_text
from foldwise.results.verdict import LARGE_MCSE, Length, troubles_of
from foldwise.scores import diagnostics
from foldwise.scores.rules import LOG_SCORES

GOOD, WATCH, BAD = "good", "watch", "bad"
# What to run about each kind of trouble; {draws}, {warmup} and {more} are filled in.
_RUN_ANEW = "foldwise.cross_validate(model, folds, warmup={warmup}, draws={draws})"
COMMANDS = {
    "stuck chain": _RUN_ANEW,
    "chains disagree": _RUN_ANEW,
    "not settled": _RUN_ANEW,
    "rungs not settled": _RUN_ANEW,
    "low acceptance": _RUN_ANEW,
    "too slow": "# better: reparameterise the model, as with non-centred group effects\n"
    "result.extend({more})",
    "poor overlap": "result.extend({more})",
    "heavy tail": "# first: bridge joint scores where folds have a partner, else score by row\n"
    "result.extend({more})",
    "few effective draws": "result.extend({more})",
    "cut off": 'foldwise.cross_validate(model, folds, method="auto")',
    "integrals not settled": 'foldwise.cross_validate(model, folds, method="auto")',
    "uneven weights": 'foldwise.cross_validate(model, folds, method="auto")',
    "fit not settled": "fit = foldwise.fit(model, warmup=4000, draws=4000)\n"
    "foldwise.cross_validate(model, folds, fit=fit)",
}


class Light(NamedTuple):
    """A light and what it says."""

    level: str
    text: str


def trust_table(results: dict[str, CVResult]) -> dict[str, Any]:
    """A light for each thing that could be wrong with each model."""
    head = ["model", "full-data fit", "folds", "chains", "weights and bridges", "draws", "noise"]
    rows = []
    for name, result in results.items():
        lights = lights_of(result)
        rows.append(
            [cell(name, left=True), *(cell(light.text, light.level, True) for light in lights)]
        )
    return table(head, rows)


def lights_of(result: CVResult) -> list[Light]:
    """The lights of one model: fit, folds, chains, weights and bridges, draws, noise."""
    main = next(iter(result.scores.values()))
    problems = troubles_of("", result)
    noted = str(result.info.get("fit_problems") or "")
    fit = Light(BAD, problems[0]) if problems else Light(WATCH if noted else GOOD, noted or "fine")
    count, _ = flags(result)
    total = main.folds.sizes["fold"]
    level = GOOD if not count else (WATCH if count <= 0.05 * total else BAD)
    folds = Light(level, f"{count} of {total} flagged" if count else "none flagged")
    share = main.mcse / main.se if main.se > 0 else np.nan
    noise = Light(
        GOOD if share <= LARGE_MCSE else WATCH,
        f"MCSE is {share:.2g} of SE" if np.isfinite(share) else "not known",
    )
    return [fit, folds, _chains(result), _carried(result), _effective(result), noise]


def _chains(result: CVResult) -> Light:
    mixing = result.mixing
    text = mixing_text(mixing.rhat_max, mixing.benchmark, mixing.share_above, mixing.limit)
    if not text:
        return Light("", "no chains")
    text += f"; {divergences_text(result)}" if "divergences" in result.folds else ""
    return Light(BAD if mixing.rhat_max > mixing.limit else GOOD, text)


def _carried(result: CVResult) -> Light:
    """What scores rest on: Pareto k of weights and means, overlap of bridges."""
    found = result.folds
    bridged = found["estimator"].values == "bridge"
    parts, bad = [], False
    tails = _column(result, "pareto_k")[~bridged]
    if np.isfinite(tails).any():
        parts.append(f"Pareto k up to {np.nanmax(tails):.2f} (limit {diagnostics.PARETO_LIMIT:g})")
        bad |= bool(np.nanmax(tails) > diagnostics.PARETO_LIMIT)
    overlap = _column(result, "overlap")[bridged]
    if np.isfinite(overlap).any():
        least = float(np.nanmin(overlap))
        parts.append(f"overlap at least {least:.0f} draws (limit {diagnostics.OVERLAP_LIMIT:.0f})")
        bad |= least < diagnostics.OVERLAP_LIMIT
    return Light(BAD if bad else GOOD, "; ".join(parts)) if parts else Light("", "not known")


def _effective(result: CVResult) -> Light:
    values = _column(result, "ess")
    if not np.isfinite(values).any():
        return Light("", "not known")
    least = float(np.nanmin(values))
    text = f"at least {least:,.0f} effective draws a fold (limit {diagnostics.ESS_LIMIT:.0f})"
    return Light(GOOD if least >= diagnostics.ESS_LIMIT else WATCH, text)


def _column(result: CVResult, name: str) -> np.ndarray:
    found = result.folds
    return found[name].values if name in found else np.full(found.sizes["fold"], np.nan)


# ---------------------------------------------------------------- flagged folds


def flagged(results: dict[str, CVResult], command: str = "") -> list[dict[str, Any]]:
    """For each model with flagged folds: which, why, and what to run."""
    found = []
    for name, result in results.items():
        _, lines = flags(result)
        if lines:
            found.append({"model": name, "lines": lines, "commands": commands(result, command)})
    return found


def commands(result: CVResult, command: str = "") -> list[str]:
    """What to paste, for each kind of trouble; on the command line where it was run there."""
    info = result.info
    draws, warmup = int(info.get("draws") or 100), int(info.get("warmup") or 50)
    more = draws
    if "slowest_ess" in result.folds and np.isfinite(result.folds["slowest_ess"].values).any():
        slowest = result.folds["slowest_ess"].values
        needed = diagnostics.draws_needed(slowest, int(info["chains"]), draws)
        more = max(min(needed, 100 * draws) - draws, draws)
    numbers = {"draws": 2 * draws, "warmup": max(4 * warmup, 200), "more": more}
    kinds = set(map(str, result.folds["status"].values)) if "status" in result.folds else set()
    texts = [text.format(**numbers) for kind, text in COMMANDS.items() if kind in kinds]
    if command and any(kind in kinds for kind, text in COMMANDS.items() if "{draws}" in text):
        texts.append(f"{command} --warmup {numbers['warmup']} --draws {numbers['draws']}")
    return list(dict.fromkeys(texts))


# ---------------------------------------------------------------- more draws


def draws_table(results: dict[str, CVResult], comparison: Comparison | None) -> dict[str, Any]:
    """Monte Carlo error now and with more draws, beside the standard error."""
    lengths, se, _ = _lengths(results, comparison)
    own, full = sum(length.own for length in lengths), sum(length.full for length in lengths)
    fixed, rows = sum(length.fixed for length in lengths), []
    for times in (1, 2, 4, 10):
        chains, both = own / times + full + fixed, (own + full) / times + fixed
        both = float(np.sqrt(both))
        texts = [
            "as now" if times == 1 else f"{times} times as many",
            error_text(float(np.sqrt(chains))) if own > 0 else "",
            error_text(both),
            f"{both / se:.2g}" if se > 0 else "n/a",
        ]
        rows.append([cell(texts[0], left=True), *map(cell, texts[1:])])
    head = ["draws", "MCSE, chains alone", "MCSE, fit too" if own > 0 else "MCSE", "MCSE / SE"]
    return table(head, rows)


def draws_text(results: dict[str, CVResult], comparison: Comparison | None) -> str:
    """What the table of draws is about."""
    lengths, _, what = _lengths(results, comparison)
    draws, fit = (max(getattr(length, key) for length in lengths) for key in ("draws", "fit_draws"))
    has_chains = any(length.own > 0 for length in lengths)
    now = f"{draws:,} draws a chain and " if has_chains else ""
    fall = (
        "of all draws, more slowly where only the chains get longer" if has_chains else "of these"
    )
    refits = " The part of refitted folds stays." * any(length.fixed > 0 for length in lengths)
    how = "fit=foldwise.fit(model, draws=...)" + ", draws=..." * has_chains
    return (
        f"Monte Carlo error of {what}, now from {now}{fit:,} full-data draws. It falls with the "
        f"root of the number {fall}; the standard error does not.{refits} More draws are had with "
        f"foldwise.cross_validate(..., {how})."
    )


def _lengths(
    results: dict[str, CVResult], comparison: Comparison | None
) -> tuple[list[Length], float, str]:
    """Parts of the Monte Carlo variance of what the verdict is about, its SE, and its name."""
    if comparison is not None and comparison.verdict.difference is not None:
        verdict = comparison.verdict
        names = (verdict.leader, verdict.other)
        lengths = [Length.of(comparison.results[name], comparison.score) for name in names]
        return lengths, comparison.verdict.difference.se, f"{names[0]} minus {names[1]}"
    result = next(iter(results.values()))
    main = next(iter(result.scores.values()))
    what = "elpd" if main.name in LOG_SCORES else main.name
    return [Length.of(result, main.name)], main.se, what
