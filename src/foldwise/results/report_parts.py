"""What is in a report: sentences, tables and pictures from results and comparisons."""

from __future__ import annotations

import base64
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from foldwise.results.axes import png
from foldwise.results.compare import Comparison
from foldwise.results.differences import difference
from foldwise.results.identity import folds_of_scheme
from foldwise.results.numbers import (
    error_text,
    fixed,
    places,
    probability_text,
    se_text,
)
from foldwise.results.result import CVResult, Score
from foldwise.results.text import (
    OPTIMISM,
    approximation,
    score_title,
    spread_over,
    structure_text,
    with_weights,
)
from foldwise.results.verdict import (
    BEYOND_NOISE,
    DECIDED,
    SMALL_DIFFERENCE,
    Verdict,
    numbers_text,
    part_of,
    troubles_of,
)
from foldwise.scores.rules import LOG_SCORES, column, find_rule
from foldwise.support.words import counted

_LARGE_SVG = 150_000
# What the heads of tables mean, shown where the pointer rests on them.
MEANINGS = {
    "elpd": "log predictive density of the rows left out, summed over folds; higher is better",
    "difference": "score minus that of the first model; negative: predicts worse",
    "SE": "standard error from the spread over folds or rows: more data would shrink it",
    "MCSE": "Monte Carlo standard error: more draws would shrink it",
    "error": "SE and MCSE together, each counted once",
    "Pr(worse)": "probability that the model predicts worse than the first one",
    "weight": "weight in the mixture of the models that predicts best (stacking)",
    "optimism": f"full-data score of the same rows minus the score: {OPTIMISM}",
    "ESS": "independent draws that would give the same Monte Carlo error",
    "per row": "total divided by the number of rows tested",
}
# What schemes ask.
QUESTIONS = {
    "leave_one_out": "How well is a row predicted from all others?",
    "k_fold": "How well are rows predicted from the others?",
    "stratified_k_fold": "How well are rows predicted from the others?",
    "leave_group_out": "How well is a new group predicted from the others?",
    "group_k_fold": "How well are new groups predicted from the others?",
    "leave_future_out": "How well is the future predicted from the past?",
    "spatial_block": "How well are other places predicted?",
}
GLOSSARY = [
    ("fold", "a set of training rows and a set of test rows"),
    ("elpd", "log predictive density of test rows; higher is better; its unit is the nat"),
    ("SE", "standard error of a total over data sets of this size"),
    ("MCSE", "Monte Carlo standard error, from finitely many draws"),
    ("ahead", "with the higher score, be it by chance"),
    (
        "better",
        f"ahead with a probability of at least {DECIDED:g}, and for log scores by 4 or more",
    ),
    ("optimism", "how much better rows are predicted by draws that have seen them"),
    ("R-hat", "spread of all chains relative to that within chains: one where they agree"),
    ("R-hat-max", "largest R-hat of any fold, which is large by chance where there are many"),
    ("weights", "of the full-data draws, as if the fold's test rows had not been there"),
    (
        "refit",
        "draws of a fold's own posterior from a density fitted to it, where weights are uneven",
    ),
    ("Pareto k", "weight of a tail: over 0.7 a mean over it is not to be trusted"),
    ("overlap", "draws that carry the bridge from a fold's posterior to that of the full data"),
    ("PIT", "share of predictive draws below the observed value: uniform if calibrated"),
    ("flagged", "of a fold: with a sign of trouble, so that its score is not to be trusted"),
]


def cell(text: Any, light: str = "", left: bool = False) -> dict[str, Any]:
    """An entry of a table."""
    return {"text": str(text), "light": light, "left": left}


def table(head: list[str], rows: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """A table, its heads with what they mean; without the columns in which nothing stands."""
    kept = [k for k in range(len(head)) if not rows or any(row[k]["text"] for row in rows)]
    return {
        "head": [
            {
                "text": head[k],
                "title": MEANINGS.get(head[k], ""),
                "left": bool(rows) and all(row[k]["left"] for row in rows),
            }
            for k in kept
        ],
        "rows": [[row[k] for k in kept] for row in rows],
    }


def picture(draw: Callable[[], Figure], alt: str, caption: str = "") -> dict[str, str]:
    """A figure as SVG inside the page; where it can not be drawn, a line that says so."""
    try:
        figure, stream = draw(), BytesIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
        content, kind = stream.getvalue(), "svg+xml"
        if len(content) > _LARGE_SVG:  # thousands of draws, say
            content, kind = png(figure), "png"
    except (ValueError, TypeError) as error:
        return {"source": "data:,", "alt": f"{alt} (not drawn: {error})", "caption": caption}
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return {"source": source, "alt": alt, "caption": caption}


# ---------------------------------------------------------------- sentences


def banners(results: dict[str, CVResult], comparison: Comparison | None) -> list[str]:
    """What failed, and that only a part was run."""
    lines = []
    first = next(iter(results.values()))
    if part := part_of(first):
        lines.append(f"Only {part} were run: everything here is about these.")
    for name, result in results.items():
        lines += [f"{line[0].upper()}{line[1:]}." for line in troubles_of(name, result)]
        left = next(iter(result.scores.values())).left_out
        if left:
            lines.append(f"{name}: {counted(left, 'fold')} left out, without a finite score.")
    if comparison is not None:
        lines += [f"{line}." for line in comparison.remarks if "schemes differ" in line]
    return lines


def why(verdict: Verdict, comparison: Comparison | None, result: CVResult) -> list[str]:
    """The numbers behind the verdict, and the rule."""
    lines = []
    if verdict.reasons:
        lines.append(f"{verdict.reasons[0][0].upper()}{'; '.join(verdict.reasons)[1:]}.")
    found = verdict.difference
    if comparison is None or found is None:
        return [*lines, "A Monte Carlo error below a third of the standard error hardly matters."]
    low, high = found.interval
    decimals = max(places(found.error, 1), 1)
    lines.append(
        f"{verdict.leader} minus {verdict.other}: {fixed(found.diff, decimals)}; standard error "
        f"{se_text(found.se, decimals)} over {counted(len(comparison.units), comparison.unit)}, "
        f"Monte Carlo error {error_text(found.mcse)}; 95 % interval by Student's t "
        f"{fixed(low, decimals)} to {fixed(high, decimals)}."
    )
    small = f", and for log scores the difference at least {SMALL_DIFFERENCE:g}"
    lines.append(
        f'The rule: "better" is said when the probability is at least {DECIDED:g}{small}; "too '
        'noisy" when the Monte Carlo error is more than a third of the standard error and the '
        f"difference less than {BEYOND_NOISE:g} of its errors, both counted; "
        '"not to be trusted" when a fit has not converged, a score is missing or flagged folds '
        'could turn the verdict; "undecided" otherwise.'
    )
    return lines


def question(result: CVResult) -> str:
    """The scheme in words."""
    table, info = result.folds, result.info
    held = table.sizes["fold"]
    total = folds_of_scheme(info, held)
    sizes = table["n_test"].values
    least, most = int(sizes.min()), int(sizes.max())
    rows = f"{least} row{'s' * (least != 1)}" if least == most else f"{least} to {most} rows"
    folds = counted(held, "fold") if held == total else f"{held} of {counted(total, 'fold')}"
    rows_in_all = f"; {info['n_obs']:,} rows in all" if info.get("n_obs") else ""
    scheme = str(info.get("scheme", "cross-validation"))
    asked = QUESTIONS.get(scheme.partition(",")[0], "")
    asked += " " * bool(asked)
    return f"{asked}{scheme}: {folds} that test {rows} each{rows_in_all}"


def scheme_alt(result: CVResult) -> str:
    """What the drawing of the scheme shows."""
    return f"which rows train and which are tested in some folds of {result.info.get('scheme', '')}"


def legend(comparison: Comparison) -> list[str]:
    """What is to be known of the comparison's table."""
    lines = [
        "Pr(worse) is the probability that the model predicts worse than the first one, by "
        f"{approximation(comparison)}, Monte Carlo error included."
    ]
    if comparison.score in LOG_SCORES:
        what = "Weights are those of the mixture that predicts best, no probabilities"
        lines.append(what + ("." if with_weights(comparison) else "; given with a verdict only."))
    return lines


def influence(comparison: Comparison) -> list[str]:
    """The folds that decide the difference of the verdict's two models, and it without them."""
    verdict, names = comparison.verdict, comparison.names
    first, second = names.index(verdict.leader), names.index(verdict.other)
    paired = comparison.paired
    delta, fold = paired.delta(first, second), comparison.folds["fold"].values
    by_fold = np.bincount(paired.fold, weights=delta, minlength=len(fold))
    largest = np.argsort(-np.abs(by_fold))[: min(2, len(fold))]
    named = " and ".join(f"{fold[k]} ({by_fold[k]:+.3g})" for k in largest)
    lines = [
        f"{verdict.leader} is ahead in {int((by_fold > 0).sum())} of {len(fold)} folds. The "
        f"largest differences are those of folds {named}."
    ]
    rest = delta[~np.isin(paired.fold, largest)]
    if len(rest) > 1:
        without = difference(rest, *paired.noise_of(first, second), paired.repeats)
        ahead = verdict.leader if without.diff >= 0 else verdict.other
        sure = probability_text(max(without.prob, 1.0 - without.prob))
        lines.append(
            f"Without these two, {ahead} is ahead by {numbers_text(without)}, probability {sure}."
        )
    return lines


# ---------------------------------------------------------------- tables


def comparison_table(comparison: Comparison) -> dict[str, Any]:
    """The models, best first."""
    name, log = column(comparison.score), comparison.score in LOG_SCORES
    head = ["model", "elpd" if log else comparison.score, "difference", "SE", "MCSE", "error"]
    head += ["Pr(worse)"] + ["weight"] * log
    decimals = max(places(mcse, 1) for mcse in comparison.table["mcse"])
    weights, rows = with_weights(comparison), []
    for k, (model, row) in enumerate(
        zip(comparison.table.index, comparison.table.to_dict("records"), strict=True)
    ):
        texts = [
            fixed(row[name], decimals),
            fixed(row[f"{name}_diff"], decimals),
            se_text(row["se_diff"], decimals) if k else "-",
            error_text(row["mcse_diff"]) if k else "-",
            se_text(row["error_diff"], decimals) if k else "-",
            probability_text(row["prob_worse"]) if k else "-",
        ]
        if log:
            texts.append(fixed(row["stacking"], 2) if weights else "n/a")
        rows.append([cell(model, left=True), *map(cell, texts)])
    return table(head, rows)


def model_table(results: dict[str, CVResult]) -> dict[str, Any]:
    """What the models are, and how they were run."""
    rows = []
    for name, result in results.items():
        info, method = result.info, _methods(result)
        rows.append(
            [
                cell(name, left=True),
                cell("" if info.get("model") in (None, name) else info["model"], left=True),
                cell(info.get("parameters", "")),
                cell(structure_text(result), left=True),
                cell(method, left=True),
            ]
        )
    return table(["model", "full name", "parameters", "which of them", "folds scored by"], rows)


def _methods(result: CVResult) -> str:
    words = {"importance": "weights of full-data draws", "refit": "refits", "mcmc": "chains"}
    if "method" not in result.folds:
        return words["mcmc"]
    method = result.folds["method"].values
    counts = {word: int((method == kind).sum()) for kind, word in words.items()}
    return ", ".join(f"{word} ({count})" for word, count in counts.items() if count)


def score_table(results: dict[str, CVResult]) -> dict[str, Any]:
    """Every score of every model: total, per row, its errors, and which way is better."""
    rows = []
    for name, result in results.items():
        for score in result.scores.values():
            rows.append([cell(name, left=True), *_score_cells(score)])
    head = ["model", "score", "total", "per row", "SE", "MCSE", "optimism", "better", "what it is"]
    return table(head, rows)


def _score_cells(score: Score) -> list[dict[str, Any]]:
    rule, decimals = find_rule(score.name), places(score.mcse, 1)
    tested = float((score.folds["weight"] * score.folds["n_test"]).sum())
    mean = score.total if rule.aggregate is not None else score.total / tested
    unit = "nats" if score.name in LOG_SCORES else "in the units of the score"
    return [
        cell(score.name, left=True),
        cell(fixed(score.total, decimals)),
        cell(f"{mean:,.0f}" if abs(mean) >= 1000 else f"{mean:.3g}"),
        cell(se_text(score.se, decimals)),
        cell(error_text(score.mcse)),
        cell(fixed(score.optimism, decimals) if np.isfinite(score.optimism) else ""),
        cell("higher" if rule.sign > 0 else "lower", left=True),
        cell(f"{score_title(score.name, score)}, {unit}; SE over {spread_over(score)}s", left=True),
    ]
