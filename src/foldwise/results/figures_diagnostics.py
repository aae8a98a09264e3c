"""The figure of a model's diagnostics: what its folds' scores rest on, and which are flagged."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from foldwise.results.axes import BLUE, GREY, RED, WIDTH, in_margin, plain_log, styled_figure, title
from foldwise.results.captions import model_name, over_which, short
from foldwise.results.drawable import check_results, main_score
from foldwise.results.result import CVResult, Score
from foldwise.results.verdict import flagged_folds
from foldwise.scores import diagnostics

# Flagged folds that are named.
_NAMED = 8
_K_WINDOW = (-1.0, 2.0)


class Panel(NamedTuple):
    """A number of each fold, the limit beyond which a fold is flagged, and how it is drawn."""

    label: str
    values: np.ndarray
    limit: float
    above: bool  # flagged above the limit
    log: bool


def plot_diagnostics(result: CVResult, score: str | None = None) -> Figure:
    """Can the folds be trusted? What each fold's score rests on, in the scheme's order.

    Of folds scored by weights of full-data draws or by plain means Pareto k, of bridged ones the
    overlap; of folds with chains R-hat; and effective draws of all. Dashed lines are the limits
    beyond which a fold is flagged. Flagged folds, for whatever reason, are red, and the first of
    them are named. Needs no stored draws.
    """
    check_results(result)
    chosen = result.score(main_score(result, score))
    flagged = flagged_folds(chosen.folds)
    panels = panels_of(result, chosen)
    if not panels:
        raise ValueError(
            f"no diagnostics are known for any fold of {chosen.name}; look at the folds' status"
        )
    with styled_figure(WIDTH + 0.7, 0.9 + 1.15 * len(panels)) as figure:
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for ax, panel in zip(axes, panels, strict=True):
            _draw(ax, panel, flagged)
        count = len(flagged)
        axes[-1].set_xlim(-0.5 - 0.01 * count, count - 0.5 + 0.01 * count)
        axes[-1].set_xlabel("fold, in the scheme's order")
        names = chosen.folds["fold"].values
        axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda at, _: _name_at(names, at)))
        axes[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
        _name(axes[0], panels[0], flagged, chosen.folds["fold"].values)
        title(
            figure,
            f"{model_name(result)}: {_flags(chosen)}{over_which(chosen.left_out, result)}",
            "dashed: limit; red: flagged",
        )
    return figure


def panels_of(result: CVResult, chosen: Score) -> list[Panel]:
    """What is known of the folds: how their scores were made decides what matters."""
    table = chosen.folds
    estimator = table["estimator"].values
    bridged = estimator == "bridge"
    tail = np.where(bridged, np.nan, _column(chosen, "pareto_k"))
    of = "weights" if (estimator[~bridged] == "weights").all() else "densities"
    overlap = np.where(bridged, _column(chosen, "overlap"), np.nan)
    found = [
        Panel(f"Pareto k\nof {of}", tail, diagnostics.PARETO_LIMIT, True, False),
        Panel("overlap,\ndraws", overlap, diagnostics.OVERLAP_LIMIT, False, True),
        Panel("R-hat", _column(chosen, "rhat"), result.mixing.limit, True, False),
        Panel("effective\ndraws", _column(chosen, "ess"), diagnostics.ESS_LIMIT, False, True),
    ]
    return [panel for panel in found if np.isfinite(panel.values).any()]


def _column(chosen: Score, name: str) -> np.ndarray:
    """A column of the table by fold; NaN in results that do not have it."""
    table = chosen.folds
    return table[name].values if name in table else np.full(table.sizes["fold"], np.nan)


def _draw(ax: Axes, panel: Panel, flagged: np.ndarray) -> None:
    fold, values = np.arange(len(flagged)), _shown(panel)
    size = float(np.clip(600.0 / len(fold), 4.0, 16.0))
    for some, colour in ((~flagged, BLUE), (flagged, RED)):
        ax.scatter(fold[some], values[some], s=size, color=colour, linewidths=0, zorder=3)
    if panel.log:
        known = values[np.isfinite(values) & (values > 0)]
        low, high = min(known.min(), panel.limit), max(known.max(), panel.limit)
        ax.set_ylim(low / 1.4, high * 1.4)
        plain_log(ax, "y")
    else:
        low, high = np.nanmin(values), np.nanmax(values)
        if np.isfinite(panel.limit):
            low, high = min(low, panel.limit), max(high, panel.limit)
        pad = 0.12 * (high - low) or 0.05
        ax.set_ylim(low - pad, high + pad)
    if np.isfinite(panel.limit):
        ax.axhline(panel.limit, color=GREY, linewidth=0.9, linestyle="--", zorder=0)
        text = f"{panel.limit:.3g}" if panel.label != "R-hat" else f"{panel.limit:.3f}"
        in_margin(ax, panel.limit, text, 7.5, GREY)
    ax.set_ylabel(panel.label)


def _shown(panel: Panel) -> np.ndarray:
    values = np.where(np.isfinite(panel.values), panel.values, np.nan)
    if panel.label.startswith("Pareto"):
        return np.clip(values, *_K_WINDOW)
    return np.where(values > 0, values, np.nan) if panel.log else values


def _name(ax: Axes, panel: Panel, flagged: np.ndarray, names: np.ndarray) -> None:
    """Names of the first flagged folds, above their marks or at the top of the panel."""
    high = ax.get_ylim()[1]
    for k in np.flatnonzero(flagged)[:_NAMED]:
        at = _shown(panel)[k]
        ax.annotate(
            short(names[k], 14),
            (k, at if np.isfinite(at) else high),
            xytext=(3, 4),
            textcoords="offset points",
            fontsize=7.0,
            color=RED,
            annotation_clip=False,
        )


def _name_at(names: np.ndarray, at: float) -> str:
    """Name of the fold at a place on the axis."""
    k = round(at)
    return short(names[k], 10) if abs(at - k) < 1e-6 and 0 <= k < len(names) else ""


def _flags(chosen: Score) -> str:
    """How many folds are flagged, and why."""
    status = chosen.folds["status"].values if "status" in chosen.folds else np.array([])
    count = Counter(str(kind) for kind in status if kind != "fine")
    total = chosen.folds.sizes["fold"]
    if not count:
        return f"no fold of {total} flagged"
    kinds = ", ".join(f"{kind} {number}" for kind, number in count.most_common())
    return f"{count.total()} of {total} folds flagged: {kinds}"
