"""Figures by fold: which folds decide a difference, and which estimates are weak."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foldwise.results.axes import BLUE, GREY, RED, WIDTH, plain_log, styled_figure, title
from foldwise.results.captions import (
    direction_of,
    measure_of,
    model_name,
    not_drawn,
    over_which,
    short,
    total_text,
)
from foldwise.results.compare import compare
from foldwise.results.drawable import check_results, main_score, need_values
from foldwise.results.numbers import error_text
from foldwise.results.result import CVResult
from foldwise.scores import diagnostics
from foldwise.scores.rules import find_rule

# Folds that are all named; of more, only those at the ends.
MOST_NAMED = 30
END, BOTH_ENDS = 15, 12
# Values of Pareto k beyond these are drawn at the edge: all below are harmless, all above hopeless.
_K_WINDOW = (-1.0, 2.0)
_ROW = 0.165  # inches for a named fold


def plot_difference(a: CVResult, b: CVResult, score: str | None = None) -> Figure:
    """Difference of two models' scores in each fold, sorted and named, with two MCSE either side.

    Positive where ``a`` predicts better. Of many folds the extremes at both ends are named, and a
    panel above shows all. Folds whose score is not finite in both models are left out.
    """
    check_results(a, b)
    found = compare([a, b], score)
    table = found.folds
    values, errors = table["diff"].values, 2.0 * table["mcse"].values
    names = table["fold"].values
    colours = np.where(values >= 0, BLUE, RED)
    parts = None
    if find_rule(found.score).aggregate is None:
        parts = values * a.score(found.score).folds["weight"].values
    marks = Marks(values, names, colours, errors=errors, parts=parts)
    with styled_figure() as figure:
        axes = _fold_panels(figure, marks, both_ends=True)
        for ax in axes:
            ax.axvline(0.0, color=GREY, linewidth=0.8, zorder=0)
        axes[-1].set_xlabel(measure_of(found))
        _sides(axes[-1], found.names)
        total = total_text(found.diff, found.se, found.mcse, found.unit)
        title(
            figure,
            f"{direction_of(found)}: {total}{over_which(found.left_out, a)}",
            f"bars: ± 2 MCSE of the fold; MCSE of the total {error_text(found.mcse)}",
        )
    return figure


def _sides(ax: Axes, names: list[str]) -> None:
    """Which side of zero favours whom."""
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, -0.02 * high), max(high, -0.02 * low))
    for at, align, text, colour in (
        (0.0, "left", f"← {short(names[1], 22)} ahead", RED),
        (1.0, "right", f"{short(names[0], 22)} ahead →", BLUE),
    ):
        ax.text(
            at,
            1.0,
            text,
            transform=ax.transAxes,
            ha=align,
            va="bottom",
            color=colour,
            fontsize=8.0,
        )


def plot_ess(result: CVResult, score: str | None = None) -> Figure:
    """Effective number of draws behind each fold's log score, fewest first.

    The line is the number under which a fold is flagged. Of many folds those with the fewest are
    named, and a panel above shows all.
    """
    check_results(result)
    chosen = result.score(main_score(result, score))
    values = chosen.folds["ess"].values
    need_values(values, chosen, "effective draws are")
    limit, info = diagnostics.ESS_LIMIT, result.info
    drawn, whose = info["chains"] * info["draws"], "draws of a fold"
    if (chosen.folds["estimator"].values == "weights").all():
        drawn, whose = info["fit_draws"], "full-data draws"
    few = int((values < limit).sum())
    with styled_figure() as figure:
        colours = np.where(values < limit, RED, BLUE)
        axes = _fold_panels(figure, Marks(values, chosen.folds["fold"].values, colours))
        low = min(0.7 * limit, 0.8 * float(np.nanmin(values)))
        axes[-1].set_xlim(max(low, 0.5), 1.3 * max(drawn, float(np.nanmax(values))))
        plain_log(axes[-1], "x")
        for ax in axes:
            ax.axvline(limit, color=RED, linewidth=0.8, linestyle="--", zorder=0)
            ax.axvline(drawn, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
        axes[-1].set_xlabel("effective draws")
        title(
            figure,
            f"{model_name(result)}: {few} of {len(values)} folds have fewer than {limit:.0f} "
            f"effective draws (dashed){not_drawn(values)}",
            f"dotted: the {drawn:,} {whose}",
        )
    return figure


def plot_pareto_k(result: CVResult, score: str | None = None) -> Figure:
    """Shape k of the Pareto tail of each fold's predictive density or weights, heaviest first.

    Above 0.7 the plain mean over draws, or over weighted full-data draws, and its error are not to
    be trusted (filled marks); the bridge (hollow marks) does not depend on the tail.
    """
    check_results(result)
    chosen = result.score(main_score(result, score))
    table, values = chosen.folds, chosen.folds["pareto_k"].values
    need_values(values, chosen, "Pareto k is")
    bridged = table["estimator"].values == "bridge"
    weighted = int((table["estimator"].values == "weights").sum())
    limit = diagnostics.PARETO_LIMIT
    heavy = values > limit
    with styled_figure() as figure:
        colours = np.where(heavy & ~bridged, RED, np.where(bridged, GREY, BLUE))
        names = table["fold"].values
        marks = Marks(values, names, colours, hollow=bridged, window=_K_WINDOW)
        axes = _fold_panels(figure, marks, largest=True)
        for ax in axes:
            ax.axvline(limit, color=RED, linewidth=0.8, linestyle="--", zorder=0)
        axes[-1].set_xlabel("Pareto k")
        lines = []
        if not bridged.all():
            others = int((~bridged).sum())
            by = "weights" if weighted == others else "the plain mean"
            by += f" or, {weighted} of them, weights" if 0 < weighted < others else ""
            lines.append(
                f"k over {limit:g} (dashed) in {int((heavy & ~bridged).sum())} of "
                f"{others} folds scored by {by}"
            )
        if bridged.any():
            lines.append(
                f"k over {limit:g} in {int((heavy & bridged).sum())} of {int(bridged.sum())} "
                "bridged folds (hollow), where it does not matter"
            )
        lines[0] = f"{model_name(result)}: {lines[0]}"
        lines[-1] += not_drawn(values)
        title(figure, *lines)
    return figure


# ---------------------------------------------------------------- folds as marks


@dataclass(frozen=True)
class Marks:
    """A mark for each fold along a value axis, in its colour; ``errors`` are bars either side.

    Values beyond the ``window`` are drawn as arrows at its edge. ``parts`` add up to the total.
    """

    values: Float[np.ndarray, " fold"]
    names: np.ndarray
    colours: np.ndarray
    errors: Float[np.ndarray, " fold"] | None = None
    hollow: Bool[np.ndarray, " fold"] | None = None
    parts: Float[np.ndarray, " fold"] | None = None
    window: tuple[float, float] | None = None

    @cached_property
    def shown(self) -> Float[np.ndarray, " fold"]:
        """Where the marks are: the values, but for those beyond the window."""
        return self.values if self.window is None else np.clip(self.values, *self.window)

    def draw(
        self, ax: Axes, members: Int[np.ndarray, " mark"], at: np.ndarray, size: float
    ) -> None:
        """The marks of the folds ``members``, at the heights ``at``."""
        values, shown, colours = self.values[members], self.shown[members], self.colours[members]
        face = colours if self.hollow is None else np.where(self.hollow[members], "none", colours)
        if self.errors is not None:
            low, high = shown - self.errors[members], shown + self.errors[members]
            ax.hlines(at, low, high, color=colours, linewidth=1.0, alpha=0.6)
        for marker, some in (("o", shown == values), ("<", shown > values), (">", shown < values)):
            ax.scatter(
                shown[some],
                at[some],
                s=size,
                marker=marker,
                facecolors=face[some],
                edgecolors=colours[some],
                linewidths=0.8,
                zorder=3,
            )


def _fold_panels(
    figure: Figure, marks: Marks, both_ends: bool = False, largest: bool = False
) -> list[Axes]:
    """Folds as marks along a value axis, named; of many, the ends, below a panel of all.

    The smallest come first, or the ``largest``; folds that are not a number are not drawn.
    """
    known = np.flatnonzero(np.isfinite(marks.values))
    order = known[np.argsort(marks.values[known], kind="stable")]
    if both_ends or largest:
        order = order[::-1]
    rows, chosen = _rows_of_ends(len(order), both_ends)
    everything = len(chosen) == len(order)
    bottom, above = rows.max() + (not everything and not both_ends), 0.0 if everything else 1.3
    longest = max(len(short(marks.names[k])) for k in order[chosen])
    figure.set_size_inches(WIDTH + (1.0 if longest > 14 else 0.0), 1.1 + above + _ROW * bottom)
    if everything:
        axes = [figure.subplots()]
    else:
        ratio = [above, _ROW * (bottom + 1)]
        axes = list(figure.subplots(2, 1, sharex=True, height_ratios=ratio))
        _draw_all(axes[0], marks, order)
    _draw_named(axes[-1], marks, order[chosen], rows)
    axes[-1].set_ylim(bottom + 0.8, 0.2)
    if not everything:
        at = BOTH_ENDS + 1 if both_ends else bottom
        _say_the_rest(axes[-1], marks, np.delete(order, chosen), at)
    return axes


def _draw_all(ax: Axes, marks: Marks, order: Int[np.ndarray, " mark"]) -> None:
    """The panel of all folds, small and without names."""
    count = len(order)
    marks.draw(ax, order, np.arange(1, count + 1), 4.0)
    ax.set_ylim(count + 1 + 0.03 * count, -0.03 * count)
    ax.set_yticks([1, count], ["1", f"{count:,}"])
    ax.set_ylabel(f"all {count:,} folds")
    ax.tick_params(axis="x", labelbottom=False)


def _draw_named(
    ax: Axes, marks: Marks, members: Int[np.ndarray, " mark"], rows: Int[np.ndarray, " mark"]
) -> None:
    """The folds ``members`` with their names, and the values of those beyond the window."""
    marks.draw(ax, members, rows, 14.0)
    ax.set_yticks(rows, [short(marks.names[k]) for k in members])
    ax.set_ylabel("fold")
    ax.tick_params(axis="y", length=0)
    for row, k in zip(rows, members, strict=True):
        if marks.shown[k] < marks.values[k]:
            ax.annotate(
                f"{marks.values[k]:.3g} ",
                (marks.shown[k], row),
                xytext=(-4, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=7.0,
                color=GREY,
            )


def _say_the_rest(ax: Axes, marks: Marks, rest: Int[np.ndarray, " mark"], at: float) -> None:
    """How many folds are not named, and what they add up to."""
    text = f"… {len(rest):,} folds not named"
    if marks.parts is not None:
        text += f", together {marks.parts[rest].sum():.2f}"
    ax.text(
        0.5,
        at,
        f"{text} …",
        transform=ax.get_yaxis_transform(),
        ha="center",
        va="center",
        color=GREY,
        fontsize=8.0,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
    )


def _rows_of_ends(
    count: int, both_ends: bool
) -> tuple[Int[np.ndarray, " row"], Int[np.ndarray, " row"]]:
    """Where to draw which of ``count`` sorted folds: all of a few, else those at the ends."""
    if count <= MOST_NAMED:
        return np.arange(1, count + 1), np.arange(count)
    if both_ends:
        rows = np.concatenate([np.arange(1, BOTH_ENDS + 1), np.arange(BOTH_ENDS) + BOTH_ENDS + 2])
        return rows, np.concatenate([np.arange(BOTH_ENDS), np.arange(count - BOTH_ENDS, count)])
    return np.arange(1, END + 1), np.arange(END)
