"""The figure of a comparison: how far models are behind the best, and how sure that is."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foldwise.results.axes import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    RED,
    SKY,
    WIDTH,
    in_margin,
    styled_figure,
    title,
)
from foldwise.results.captions import quantity, short
from foldwise.results.compare import Comparison, compare
from foldwise.results.numbers import probability_text
from foldwise.results.verdict import BETTER, NOISY, UNTRUSTED, numbers_text
from foldwise.scores.rules import column, find_rule

# Characters of a model's name on a line, and lines of it.
_NAME, _LINES = 24, 3
COLOURS = {BETTER: BLUE, NOISY: ORANGE, UNTRUSTED: RED}


def plot_compare(results: Any, score: str | None = None) -> Figure:
    """Which model predicts best? Differences to the best, with their errors around zero.

    ``results`` is a Comparison, or what :func:`foldwise.compare` takes. A thin line is two errors
    either side of a difference, those of the data and of the run, each counted once; inside it a
    thick one is two Monte Carlo errors, which more draws would shrink. The title is the verdict.
    """
    found = results if isinstance(results, Comparison) else compare(results, score)
    table, verdict = found.table, found.verdict
    names = [wrapped(name) for name in table.index]
    lines = sum(name.count("\n") + 1 for name in names)
    with styled_figure(WIDTH + 1.5, 1.25 + 0.17 * lines + 0.16 * len(names)) as figure:
        ax = figure.subplots()
        _draw_forest(ax, found, COLOURS.get(verdict.kind, GREY))
        ax.set_yticks(np.arange(len(names)), names)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel(_axis(found))
        title(
            figure,
            *_heads(found),
            "thin: ± 2 errors (SE and MCSE, each counted once); thick: ± 2 MCSE",
        )
    return figure


def _heads(found: Comparison) -> list[str]:
    """The verdict and its numbers, with long names cut."""
    verdict = found.verdict
    headline = verdict.headline
    for name in sorted(found.names, key=len, reverse=True):
        headline = headline.replace(name, short(name))
    heads = [headline + (f" (over {verdict.part} only)" if verdict.part else "")]
    if verdict.difference is not None:
        two = f"{short(verdict.leader)} ahead of {short(verdict.other)} by"
        by = "ahead by" if len(found.names) == 2 else two
        heads.append(f"{by} {numbers_text(verdict.difference)}")
    return heads


def _draw_forest(ax: Axes, found: Comparison, colour: str) -> None:
    """A line for each model, the first on top."""
    table, name = found.table, f"{column(found.score)}_diff"
    count = len(table)
    ax.axvline(0.0, color=INK, linewidth=1.0, zorder=0)
    for k, row in enumerate(table.to_dict("records")):
        diff, error, mcse = row[name], row["error_diff"], row["mcse_diff"]
        if k == 0:
            ax.plot([0.0], [k], "D", color=INK, markersize=4.5)
            continue
        ax.hlines(k, diff - 2 * error, diff + 2 * error, color=colour, linewidth=1.2)
        ax.hlines(k, diff - 2 * mcse, diff + 2 * mcse, color=SKY, linewidth=5.0, alpha=0.8)
        ax.plot([diff], [k], "o", color=colour, markersize=4.5)
        in_margin(ax, k, f"Pr(worse) {probability_text(row['prob_worse'])}")
    ax.set_ylim(count - 0.4, -0.6)
    low, high = ax.get_xlim()
    pad = 0.05 * (high - low)
    ax.set_xlim(min(low, -pad), max(high, pad))


def _axis(found: Comparison) -> str:
    less = find_rule(found.score).sign < 0
    what = f"{quantity(found.score)} {'saved' if less else 'difference'}"
    return f"{what} to the first model (left of zero: predicts worse)"


def wrapped(name: Any, width: int = _NAME, lines: int = _LINES) -> str:
    """A name on several short lines; cut where it is very long."""
    parts = textwrap.wrap(" ".join(str(name).split()), width) or [""]
    if len(parts) > lines:
        parts = [*parts[: lines - 1], parts[lines - 1][: width - 1] + "…"]
    return "\n".join(parts)
