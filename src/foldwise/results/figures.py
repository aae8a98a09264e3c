"""Figures from results: how estimates settle, which folds decide, how well chains mixed.

Every function returns a matplotlib figure and touches no global state: nothing pops up, no display
is needed. ``figure.savefig("name.pdf")`` writes one, :func:`save_figures` several. "Against
iterations" means that estimates are made again from the first draws of every chain.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from math import lcm
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from foldwise.results.compare import Comparison, compare
from foldwise.results.differences import paired_difference, paired_units, probability
from foldwise.results.identity import folds_of_scheme
from foldwise.results.result import CVResult, Score, first_draws, in_blocks, recorded
from foldwise.scores import diagnostics
from foldwise.scores.evidence import Evidence
from foldwise.scores.rules import LOG_SCORES, column, find_rule
from foldwise.scores.sums import RunningSums
from foldwise.support.special import normal_cdf

# Okabe and Ito's palette, which colour-blind readers tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
)
CHAIN_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
INK, GREY, PALE = "#222222", "#777777", "#D9D9D9"
# Text of 9 points in a figure 4.5 inches wide is 7 points in a journal column of 3.5 inches.
WIDTH, HEIGHT = 4.5, 3.0
STYLE: dict[str, Any] = {
    "font.size": 9.0,
    "font.family": "sans-serif",
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": False,
    "text.color": INK,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}
DPI = 150
LENGTHS = 12
# Folds that are all named; of more, only those at the ends.
MOST_NAMED = 30
# Folds whose R-hats are drawn as lines; of more, as ranges.
MOST_LINES = 100
END, BOTH_ENDS = 15, 12
_NAME = 26
# Values of Pareto k beyond these are drawn at the edge: all below are harmless, all above hopeless.
_K_WINDOW = (-1.0, 2.0)
_ROW = 0.165  # inches for a named fold
_BAND_SAMPLES = 4000
_ONLINE = 'memory="online" keeps none; run cross_validate(..., memory="draws")'


class Picture(Figure):
    """A figure that notebooks show even if pyplot was never imported."""

    def _repr_png_(self) -> bytes:
        return _png(self)


@contextmanager
def styled_figure(width: float = WIDTH, height: float = HEIGHT) -> Iterator[Picture]:
    """An empty figure; what is drawn inside the context has the style of all figures."""
    with matplotlib.rc_context(STYLE):
        yield Picture(figsize=(width, height), layout="constrained")


# ---------------------------------------------------------------- against iterations


@dataclass(frozen=True)
class Course:
    """Estimates from the first ``draws`` draws of every chain: of a score, or of a difference.

    ``fixed`` is the part of ``mcse`` that comes from the full-data draws, all of which are used at
    every length; NaN where it is not known by itself. ``of`` names what is estimated, ``score``
    what it is measured in, ``names`` the models. ``left_out`` counts the folds that are not finite;
    ``over`` says which folds are missing, if any.
    """

    draws: Int[np.ndarray, " length"]
    estimate: Float[np.ndarray, " length"]
    se: Float[np.ndarray, " length"]
    mcse: Float[np.ndarray, " length"]
    fixed: Float[np.ndarray, " length"]
    of: str
    score: str
    names: list[str]
    left_out: int
    over: str


def course(a: CVResult, b: CVResult | None = None, score: str | None = None) -> Course:
    """Score of ``a``, or its difference from that of ``b``, against iterations."""
    _check_results(a, b)
    final = None if b is None else compare([a, b], score)
    name = final.score if final else _main_score(a, score)
    results = [a] if b is None else [a, b]
    evidence = [_stored(result) for result in results]
    steps = [e.sums.length if in_blocks(e, name) else e.sums.batch for e in evidence]
    lengths = _lengths(max(e.n_draws for e in evidence), lcm(*steps))
    shorter = [
        _shorter(result, e, lengths, name) for result, e in zip(results, evidence, strict=True)
    ]
    points = [_point(list(each), name) for each in zip(*shorter, strict=True)]
    estimate, se, mcse, fixed = np.array(points).T
    if not np.isfinite(estimate).any():
        raise ValueError(
            f"a figure needs a fold whose {name} is finite, but none is; look at the status"
        )
    left_out = final.left_out if final else a.score(name).left_out
    return Course(
        np.array(lengths),
        estimate,
        se,
        mcse,
        fixed,
        _of(final) if final else _model_name(a),
        _measure(final) if final else _quantity(name),
        final.names if final else [_model_name(a)],
        left_out,
        _over(left_out, a),
    )


def _shorter(result: CVResult, evidence: Evidence, lengths: list[int], name: str) -> list[CVResult]:
    """The result from the first draws, for each length; kept, as several figures need them."""
    kept = vars(result).setdefault("_shorter", {})
    key = (name, *lengths)
    if key not in kept:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy works outside Python's lock
            kept[key] = list(
                pool.map(
                    lambda n: first_draws(result, min(n, evidence.n_draws), name, evidence),
                    reversed(lengths),
                )
            )[::-1]
    return kept[key]


def _point(results: list[CVResult], name: str) -> tuple[float, float, float, float]:
    """Estimate, SE, MCSE and the full-data part of the latter, of a score or a difference."""
    scores = [result.score(name) for result in results]
    whole = find_rule(name).aggregate is None and not any(score.left_out for score in scores)
    fixed = float(np.sqrt(sum(score.full_variance for score in scores))) if whole else np.nan
    if len(scores) == 1:
        return scores[0].total, scores[0].se, scores[0].mcse, fixed
    used = np.all([np.isfinite(score.folds[column(name)].values) for score in scores], axis=0)
    if not used.any():
        return np.nan, np.nan, np.nan, np.nan
    units, mcse, repeats = paired_units(name, {"a": scores[0], "b": scores[1]}, used)
    diff, se = paired_difference(units[:, 0] - units[:, 1], repeats)
    return diff, se, float(np.hypot(*mcse)), fixed


def _lengths(draws: int, step: int, count: int = LENGTHS) -> list[int]:
    """About ``count`` lengths up to ``draws``, evenly spaced on a log scale, ending blocks."""
    first = 2 * step
    if draws <= first:
        return [draws]
    inner = np.geomspace(first, draws, count)
    whole = np.unique(np.round(inner / step).astype(int) * step)
    return [int(n) for n in whole if n < draws] + [draws]


def _iterations_axis(ax: Axes, lengths: Sequence[int] | np.ndarray) -> None:
    """A log scale with plain numbers."""
    low, high = lengths[0] / 1.08, lengths[-1] * 1.08
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ticks = [m * 10.0**e for e in range(0, 8) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    ax.xaxis.set_major_locator(FixedLocator(ticks if len(ticks) > 1 else [lengths[-1]]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("iterations per chain, after warm-up")


def plot_progress(a: CVResult, b: CVResult | None = None, score: str | None = None) -> Figure:
    """Total score of ``a``, or its difference from that of ``b``, against iterations.

    The band is two Monte Carlo standard errors either side. A difference is positive where ``a``
    predicts better. Needs stored draws.
    """
    found = course(a, b, score)
    with styled_figure() as figure:
        ax = figure.subplots()
        low, high = found.estimate - 2 * found.mcse, found.estimate + 2 * found.mcse
        ax.fill_between(found.draws, low, high, color=BLUE, alpha=0.2, linewidth=0)
        ax.plot(found.draws, found.estimate, "o-", color=BLUE)
        _iterations_axis(ax, found.draws)
        ax.set_ylabel(found.score)
        if b is not None:
            _zero_if_near(ax)
        _title(
            figure,
            f"{found.of}: {_number(found.estimate[-1], found.mcse[-1])}, "
            f"epistemic SE {_error(found.se[-1])}{found.over}",
            f"band: ± 2 MCSE; MCSE {_error(found.mcse[-1])} after {found.draws[-1]:,} iterations",
        )
    return figure


def plot_errors(a: CVResult, b: CVResult | None = None, score: str | None = None) -> Figure:
    """Monte Carlo and epistemic standard errors against iterations, of a score or a difference.

    More iterations shrink the first only; where it is small beside the second, they tell nothing
    new. The part that comes from the full-data draws needs a longer fit to shrink. Needs stored
    draws.
    """
    found = course(a, b, score)
    lines = [
        ("epistemic (SE)", found.se, RED, "o-"),
        ("Monte Carlo (MCSE)", found.mcse, BLUE, "o-"),
        ("of which full-data\ndraws", found.fixed, SKY, ":"),
    ]
    with styled_figure() as figure:
        ax = figure.subplots()
        ends = []
        for text, values, colour, style in lines:
            if np.isfinite(values).any() and np.nanmax(values) > 0:
                ax.plot(found.draws, values, style, color=colour)
                ends.append((float(values[-1]), text, colour))
        _iterations_axis(ax, found.draws)
        _plain_log(ax, "y")
        ax.set_ylabel("standard error")
        _end_labels(ax, ends)
        share = found.mcse[-1] / found.se[-1] if found.se[-1] > 0 else np.nan
        _title(
            figure,
            f"{found.of}: errors of the {found.score}{found.over}",
            f"MCSE is {share:.2g} of SE after {found.draws[-1]:,} iterations",
        )
    return figure


def plot_probability(a: CVResult, b: CVResult, score: str | None = None) -> Figure:
    """Probability that ``a`` predicts better than ``b`` against iterations.

    By the normal approximation, Phi(difference / SE); the band moves the difference by two Monte
    Carlo standard errors either way. Needs stored draws, and a finite score of every fold.
    """
    found = course(a, b, score)
    if found.left_out:
        raise ValueError(
            "a probability needs every fold's score of both models to be finite, but "
            f"{found.left_out} of {a.folds.sizes['fold']} folds are left out; mend them first, see "
            "their status"
        )
    value = np.array([probability(d, s) for d, s in zip(found.estimate, found.se, strict=True)])
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = (normal_cdf((found.estimate + k * found.mcse) / found.se) for k in (-2.0, 2.0))
    with styled_figure() as figure:
        ax = figure.subplots()
        ax.axhline(0.5, color=GREY, linewidth=0.8, linestyle=":")
        ax.fill_between(found.draws, low, high, color=BLUE, alpha=0.2, linewidth=0)
        ax.plot(found.draws, value, "o-", color=BLUE, clip_on=False)
        _iterations_axis(ax, found.draws)
        ax.set_ylim(0.0, 1.0)
        ax.set_ylabel("probability")
        first, second = (_short(name) for name in found.names)
        _title(
            figure,
            f"Pr({first} predicts better than {second}): {_percent(value[-1])}{found.over}",
            f"band: ± 2 MCSE; after {found.draws[-1]:,} iterations",
        )
    return figure


# ---------------------------------------------------------------- by fold


def plot_difference(a: CVResult, b: CVResult, score: str | None = None) -> Figure:
    """Difference of two models' scores in each fold, sorted and named, with two MCSE either side.

    Positive where ``a`` predicts better. Of many folds the extremes at both ends are named, and a
    panel above shows all. Folds whose score is not finite in both models are left out.
    """
    _check_results(a, b)
    found = compare([a, b], score)
    table = found.folds
    values, errors = table["diff"].values, 2.0 * table["mcse"].values
    names = table["fold"].values
    colours = np.where(values >= 0, BLUE, RED)
    parts = None
    if find_rule(found.score).aggregate is None:
        parts = values * a.score(found.score).folds["weight"].values
    with styled_figure() as figure:
        axes = _fold_panels(figure, values, names, errors, colours, both_ends=True, parts=parts)
        for ax in axes:
            ax.axvline(0.0, color=GREY, linewidth=0.8, zorder=0)
        axes[-1].set_xlabel(_measure(found))
        _sides(axes[-1], found.names)
        total = _number(found.diff, found.mcse)
        _title(
            figure,
            f"{_of(found)}: {total}, epistemic SE {_error(found.se)}{_over(found.left_out, a)}",
            f"bars: ± 2 MCSE of the fold; MCSE of the total {_error(found.mcse)}",
        )
    return figure


def plot_ess(result: CVResult, score: str | None = None) -> Figure:
    """Effective number of draws behind each fold's log score, fewest first.

    The line is the number under which a fold is flagged. Of many folds those with the fewest are
    named, and a panel above shows all.
    """
    _check_results(result)
    chosen = result.score(_main_score(result, score))
    values = chosen.folds["ess"].values
    _need_values(values, chosen, "effective draws are")
    limit, drawn = diagnostics.ESS_LIMIT, result.info["chains"] * result.info["draws"]
    few = int((values < limit).sum())
    with styled_figure() as figure:
        colours = np.where(values < limit, RED, BLUE)
        axes = _fold_panels(figure, values, chosen.folds["fold"].values, None, colours)
        low = min(0.7 * limit, 0.8 * float(np.nanmin(values)))
        axes[-1].set_xlim(max(low, 0.5), 1.3 * max(drawn, float(np.nanmax(values))))
        _plain_log(axes[-1], "x")
        for ax in axes:
            ax.axvline(limit, color=RED, linewidth=0.8, linestyle="--", zorder=0)
            ax.axvline(drawn, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
        axes[-1].set_xlabel("effective draws")
        _title(
            figure,
            f"{few} of {len(values)} folds have fewer than {limit:.0f} effective draws (dashed)"
            f"{_unknown(values)}",
            f"dotted: the {drawn:,} draws of a fold",
        )
    return figure


def plot_pareto_k(result: CVResult, score: str | None = None) -> Figure:
    """Shape k of the Pareto tail of each fold's predictive density, heaviest first.

    Above 0.7 the plain mean over draws and its error are not to be trusted (filled marks); the
    bridge (hollow marks) does not depend on the tail.
    """
    _check_results(result)
    chosen = result.score(_main_score(result, score))
    table, values = chosen.folds, chosen.folds["pareto_k"].values
    _need_values(values, chosen, "Pareto k is")
    bridged = table["estimator"].values != "mean"
    limit = diagnostics.PARETO_LIMIT
    heavy = values > limit
    with styled_figure() as figure:
        colours = np.where(heavy & ~bridged, RED, np.where(bridged, GREY, BLUE))
        axes = _fold_panels(
            figure,
            values,
            table["fold"].values,
            None,
            colours,
            largest=True,
            hollow=bridged,
            window=_K_WINDOW,
        )
        for ax in axes:
            ax.axvline(limit, color=RED, linewidth=0.8, linestyle="--", zorder=0)
        axes[-1].set_xlabel("Pareto k")
        lines = []
        if not bridged.all():
            lines.append(
                f"k over {limit:g} (dashed) in {int((heavy & ~bridged).sum())} of "
                f"{int((~bridged).sum())} folds scored by the plain mean"
            )
        if bridged.any():
            lines.append(
                f"k over {limit:g} in {int((heavy & bridged).sum())} of {int(bridged.sum())} "
                "bridged folds (hollow), where it does not matter"
            )
        lines[-1] += _unknown(values)
        _title(figure, *lines)
    return figure


def _fold_panels(
    figure: Figure,
    values: Float[np.ndarray, " fold"],
    names: np.ndarray,
    errors: Float[np.ndarray, " fold"] | None,
    colours: np.ndarray,
    both_ends: bool = False,
    largest: bool = False,
    hollow: Bool[np.ndarray, " fold"] | None = None,
    parts: Float[np.ndarray, " fold"] | None = None,
    window: tuple[float, float] | None = None,
) -> list[Axes]:
    """Folds as marks along a value axis, named; of many, the ends, below a panel of all.

    The smallest come first, or the ``largest``; folds that are not a number are not drawn. Values
    beyond the ``window`` are drawn as arrows at its edge. ``parts`` add up to the total.
    """
    shown = values if window is None else np.clip(values, *window)
    known = np.flatnonzero(np.isfinite(values))
    order = known[np.argsort(values[known], kind="stable")]
    if both_ends or largest:
        order = order[::-1]
    face = colours if hollow is None else np.where(hollow, "none", colours)

    def marks(ax: Axes, members: np.ndarray, at: np.ndarray, size: float) -> None:
        if errors is not None:
            low, high = shown[members] - errors[members], shown[members] + errors[members]
            ax.hlines(at, low, high, color=colours[members], linewidth=1.0, alpha=0.6)
        for marker, of in (("o", shown == values), ("<", shown > values), (">", shown < values)):
            some = of[members]
            ax.scatter(
                shown[members][some],
                at[some],
                s=size,
                marker=marker,
                facecolors=face[members][some],
                edgecolors=colours[members][some],
                linewidths=0.8,
                zorder=3,
            )

    rows, chosen = _rows_of_ends(len(order), both_ends)
    everything = len(chosen) == len(order)
    bottom, above = rows.max() + (not everything and not both_ends), 0.0 if everything else 1.3
    longest = max(len(_short(names[k])) for k in order[chosen])
    figure.set_size_inches(WIDTH + (1.0 if longest > 14 else 0.0), 1.1 + above + _ROW * bottom)
    if everything:
        axes = [figure.subplots()]
    else:
        ratio = [above, _ROW * (bottom + 1)]
        axes = list(figure.subplots(2, 1, sharex=True, height_ratios=ratio))
        marks(axes[0], order, np.arange(1, len(order) + 1), 4.0)
        axes[0].set_ylim(len(order) + 1 + 0.03 * len(order), -0.03 * len(order))
        axes[0].set_yticks([1, len(order)], ["1", f"{len(order):,}"])
        axes[0].set_ylabel(f"all {len(order):,} folds")
        axes[0].tick_params(axis="x", labelbottom=False)
    last = axes[-1]
    marks(last, order[chosen], rows, 14.0)
    last.set_yticks(rows, [_short(names[k]) for k in order[chosen]])
    last.tick_params(axis="y", length=0)
    last.set_ylim(bottom + 0.8, 0.2)
    for row, k in zip(rows, order[chosen], strict=True):
        if shown[k] < values[k]:
            last.annotate(
                f"{values[k]:.3g} ",
                (shown[k], row),
                xytext=(-4, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=7.0,
                color=GREY,
            )
    if not everything:
        text = f"… {len(order) - len(chosen):,} folds not named"
        if parts is not None:
            text += f", together {parts[np.delete(order, chosen)].sum():.2f}"
        last.text(
            0.5,
            BOTH_ENDS + 1 if both_ends else bottom,
            f"{text} …",
            transform=last.get_yaxis_transform(),
            ha="center",
            va="center",
            color=GREY,
            fontsize=8.0,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )
    return axes


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


# ---------------------------------------------------------------- mixing


def plot_rhat(result: CVResult) -> Figure:
    """R-hat of every fold's log score against iterations; the largest at the end are named.

    Of many folds the others are shown as ranges that hold 50, 90 and 100 % of them. The dashed
    line is the limit above which chains are said to disagree after all draws. The scale
    is that of log(R-hat - 1); values below 1.001 are drawn at 1.001. Needs stored draws.
    """
    _check_results(result)
    draws = _draws(result)
    names = result.folds["fold"].values
    lengths = _lengths(draws.shape[2], int(result.info["batch"]), 40)
    values = _rhat_against(draws, lengths)
    last = np.where(np.isfinite(values[:, -1]), values[:, -1], -np.inf)
    worst = [k for k in np.argsort(-last, kind="stable")[:3] if np.isfinite(last[k])]
    limit = result.mixing.limit
    with styled_figure() as figure:
        ax = figure.subplots()
        colours = dict(zip(worst, (RED, ORANGE, PURPLE), strict=False))
        others = np.delete(values, worst, axis=0)
        others = others[np.isfinite(others).any(axis=1)]
        if len(others) > MOST_LINES:
            for low, high in ((0.0, 100.0), (5.0, 95.0), (25.0, 75.0)):
                edges = np.nanpercentile(others, (low, high), axis=0)
                ax.fill_between(lengths, *edges, color=GREY, alpha=0.25, linewidth=0)
        else:
            ax.plot(lengths, others.T, color=GREY, linewidth=0.7, alpha=0.6)
        for k in reversed(worst):
            ax.plot(lengths, values[k], color=colours[k])
        _iterations_axis(ax, lengths)
        _rhat_axis(ax, values)
        ax.set_ylabel("R-hat of the log score")
        ends = [(float(values[k, -1]), _short(names[k], 18), colours[k]) for k in worst]
        if np.isfinite(limit):
            ends_at = ax.get_xlim()[1]
            ax.hlines(limit, lengths[-1] / 2, ends_at, color=INK, linewidth=0.8, linestyle="--")
            ends.append((limit, f"limit {limit:.3g}", INK))
        _end_labels(ax, ends)
        over = int((result.mixing.rhat > limit).sum())
        _title(
            figure,
            f"{over} of {len(values)} folds above the limit after {lengths[-1]:,} iterations"
            f"{_unknown(values[:, -1])}",
        )
    return figure


def plot_rhat_max(result: CVResult) -> Figure:
    """R-hat-max against its shuffled benchmark, at several lengths.

    Grey: histograms of what the largest R-hat of all folds would be if all chains had mixed, from
    500 replicates with shuffled blocks. A mark above its histogram says that some fold has not
    mixed. Of results without stored draws only the whole run is shown.
    """
    _check_results(result)
    found = [result.mixing]
    if result.draws is not None:
        draws = _draws(result)
        lengths = [draws.shape[2] // 2**k for k in (4, 3, 2, 1)]
        found = [
            _mixing_of(draws[:, :, :n], int(result.info["seed"])) for n in lengths if n >= 20
        ] + found
    if not any(np.isfinite(mixing.rhat_max) for mixing in found):
        raise ValueError(
            "R-hat-max needs a fold whose chains move and are finite, but there is none; look at "
            "the folds' status"
        )
    with styled_figure() as figure:
        ax = figure.subplots()
        ends = [np.append(mixing.benchmark, mixing.rhat_max) for mixing in found]
        for k, mixing in enumerate(found):
            _draw_benchmark(ax, k, mixing)
        _rhat_axis(ax, np.concatenate(ends))
        for k, mixing in enumerate(found):
            share = mixing.share_above
            ax.text(
                k,
                1.0,
                f"{share:.0%}" if np.isfinite(share) else "-",
                transform=ax.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize=8.0,
                color=RED if share <= 0.01 else INK,
            )
        ax.set_xticks(range(len(found)), [f"{mixing.draws:,}" for mixing in found])
        ax.set_xlim(-0.6, len(found) - 0.4)
        ax.set_xlabel("iterations per chain, after warm-up")
        ax.set_ylabel("R-hat-max over folds")
        _title(
            figure,
            "mark: R-hat-max; grey: what it would be if all chains had mixed",
            "above: share of the grey at or over the mark",
        )
    return figure


def _draw_benchmark(ax: Axes, at: int, mixing: diagnostics.Mixing) -> None:
    """A histogram lying on its side, of R-hat - 1 on a log scale, and the mark."""
    sample = mixing.benchmark[np.isfinite(mixing.benchmark)]
    if len(sample):
        logs = _rhat_forward(sample)
        edges = np.histogram_bin_edges(logs, 20)
        height, _ = np.histogram(logs, edges)
        half = np.repeat(0.38 * height / height.max(), 2)
        along = np.repeat(_rhat_inverse(edges), 2)[1:-1]
        ax.fill_betweenx(along, at - half, at + half, color=PALE, linewidth=0)
    high = mixing.share_above <= 0.01
    ax.plot([at], [mixing.rhat_max], "D", markersize=6, color=RED if high else BLUE)


def _mixing_of(draws: Float[np.ndarray, "fold chain draw"], seed: int) -> diagnostics.Mixing:
    """R-hat by fold and its benchmark; in blocks so fine that the five shuffled parts are equal."""
    folds, chains, count = draws.shape
    sums = RunningSums.empty(folds, chains, max(count // 50, 1))
    sums.update(np.arange(folds), draws[..., None])
    return diagnostics.mixing(sums, seed)


def _rhat_against(
    draws: Float[np.ndarray, "fold chain draw"], lengths: Sequence[int]
) -> Float[np.ndarray, "fold length"]:
    with np.errstate(invalid="ignore"):
        centred = draws - draws.mean(axis=(1, 2), keepdims=True)
        total, square = centred.cumsum(axis=2), (centred**2).cumsum(axis=2)
        found = [diagnostics.rhat(total[..., n - 1], square[..., n - 1], n) for n in lengths]
    return np.stack(found, axis=1)


def plot_chains(result: CVResult, fold: Any) -> Figure:
    """Log score of each chain of one fold, draw by draw, and the chains' running means.

    A stuck chain is a flat line, a shifted one runs beside the others. ``fold`` is the fold's name.
    Needs stored draws.
    """
    _check_results(result)
    draws = _draws(result)
    names = result.folds["fold"].values
    k = _position(names, fold)
    series = np.where(np.isfinite(draws[k]), draws[k], np.nan)
    chains, count = series.shape
    status = str(result.folds["status"].values[k])
    if not np.isfinite(series).any():
        raise ValueError(
            f"the chains of fold {names[k]} have no finite log score to draw; its status is "
            f"{status!r}"
        )
    x = np.arange(1, count + 1)
    known = np.isfinite(series).cumsum(axis=1)
    running = np.nancumsum(series, axis=1) / np.where(known > 0, known, np.nan)
    bad = int(np.isnan(series).sum())
    with styled_figure(WIDTH, 1.6 + 0.5 * chains + 1.3) as figure:
        axes = figure.subplots(chains + 1, 1, sharex=True, height_ratios=[1.0] * chains + [2.2])
        low, high = np.nanmin(series), np.nanmax(series)
        pad = 0.05 * (high - low) or 0.5
        for ax in axes[:-1]:
            ax.set_ylim(low - pad, high + pad)
        for chain, ax in enumerate(axes[:-1]):
            ax.plot(x, series[chain], color=_chain_colour(chain), linewidth=0.7)
            ax.set_ylabel(f"chain {chain + 1}", rotation=0, ha="right", va="center")
            ax.tick_params(labelbottom=False, length=2)
        bottom = axes[-1]
        for chain in range(chains):
            bottom.plot(x, running[chain], color=_chain_colour(chain))
        settled = running[:, min(count // 10, count - 1) :]
        if np.isfinite(settled).any():  # the first few draws would set the scale
            low, high = np.nanmin(settled), np.nanmax(settled)
            pad = 0.1 * (high - low) or 0.5
            bottom.set_ylim(low - pad, high + pad)
        bottom.set_ylabel("running mean")
        bottom.set_xlabel("iteration, after warm-up")
        bottom.set_xlim(1, max(count, 2))
        _end_labels(
            bottom,
            [
                (float(running[chain, -1]), f"{chain + 1}", _chain_colour(chain))
                for chain in range(chains)
                if np.isfinite(running[chain, -1])
            ],
            inches=1.0,
        )
        rhat = result.mixing.rhat[k]
        note = f"; {bad:,} of {series.size:,} draws not finite" if bad else ""
        _title(
            figure,
            f"log score by chain in fold {_short(names[k], 30)}",
            f"R-hat {rhat:.3f} (limit {result.mixing.limit:.3f}); status: {status}{note}",
        )
    return figure


def _chain_colour(chain: int) -> str:
    return CHAIN_COLOURS[chain % len(CHAIN_COLOURS)]


def _position(names: np.ndarray, fold: Any) -> int:
    """Where the fold called ``fold`` is."""
    texts = [str(name) for name in names]
    if str(fold) in texts:
        return texts.index(str(fold))
    some = ", ".join(texts[:5]) + (", ..." if len(texts) > 5 else "")
    raise ValueError(
        f"fold must be the name of one of the {len(texts)} folds ({some}), got {fold!r}; "
        'result.folds["fold"] has them all'
    )


# ---------------------------------------------------------------- calibration


def plot_pit(result: CVResult, seed: int = 0) -> Figure:
    """Are predictions calibrated? Probability integral transform of the held-out values.

    Left, its histogram with the range of 95 % of counts in each bar if it were uniform. Right, its
    distribution function minus that of the uniform, with a band that holds all of it in 95 % of
    uniform samples (Saeilynoja et al. 2022). Both take rows as independent. A hump in the middle of
    the histogram says predictions are too wide, a trough too narrow, a slope that they are biased.
    Needs a run with predictive draws, such as scores=("log", "crps").
    """
    _check_results(result)
    every = result.pit(seed).values
    table = result.calibration
    assert table is not None
    known = np.isfinite(every)
    rows = len(np.unique(table["row"].values[known]))
    if not rows:
        raise ValueError("a PIT plot needs finite predictions, but no row has any")
    weight = table["weight"].values[known] / table["weight"].values[known].sum()
    pit = every[known]
    with styled_figure(6.5, 2.9) as figure:
        left, right = figure.subplots(1, 2)
        _pit_histogram(left, pit, weight, rows)
        _pit_difference(right, pit, weight, rows)
        _title(
            figure,
            f"{_model_name(result)}: PIT of {rows:,} held-out rows; "
            f"grey: 95 % if calibrated{_unknown(every, 'row')}",
        )
    return figure


def _pit_histogram(ax: Axes, pit: np.ndarray, weight: np.ndarray, rows: int) -> None:
    from scipy.stats import binom

    bars = int(np.clip(rows // 10, 5, 20))
    density, edges = np.histogram(pit, bars, (0.0, 1.0), weights=weight * bars)
    low, high = (binom.ppf(q, rows, 1.0 / bars) * bars / rows for q in (0.025, 0.975))
    ax.axhspan(low, high, color=PALE, linewidth=0)
    ax.axhline(1.0, color=GREY, linewidth=0.8)
    ax.stairs(density, edges, color=BLUE, linewidth=1.2, fill=False, baseline=0.0)
    ax.set_xlim(0.0, 1.0)
    ax.set_ylim(0.0, 1.08 * max(float(density.max()), high))
    ax.set_xlabel("PIT of held-out value")
    ax.set_ylabel("density")


def _pit_difference(ax: Axes, pit: np.ndarray, weight: np.ndarray, rows: int) -> None:
    grid = np.linspace(0.0, 1.0, 101)
    order = np.argsort(pit)
    cumulated = np.append(0.0, weight[order].cumsum())
    inside = cumulated[np.searchsorted(pit[order], grid, side="right")]
    low, high = uniform_band(rows, grid)
    ax.fill_between(grid, low - grid, high - grid, color=PALE, linewidth=0)
    ax.axhline(0.0, color=GREY, linewidth=0.8)
    ax.plot(grid, inside - grid, color=BLUE)
    ax.set_xlim(0.0, 1.0)
    ax.set_xlabel("PIT of held-out value")
    ax.set_ylabel("ECDF minus uniform")


def uniform_band(
    rows: int, grid: Float[np.ndarray, " point"], level: float = 0.95
) -> tuple[Float[np.ndarray, " point"], Float[np.ndarray, " point"]]:
    """Bounds that hold the distribution function of ``rows`` uniform values everywhere on ``grid``.

    Binomial intervals at each point, all at the level that makes the share of simulated samples
    which stay inside all of them equal to ``level``.
    """
    from scipy.special import bdtr, bdtrc
    from scipy.stats import binom

    rng = np.random.default_rng(0)
    steps = np.diff(grid)
    count = rng.multinomial(rows, steps / steps.sum(), _BAND_SAMPLES).cumsum(axis=1)[:, :-1]
    inner = grid[1:-1]
    # P(X <= count) and P(X >= count); bdtrc is NaN at -1
    below, above = bdtr(count, rows, inner), np.ones(count.shape)
    np.copyto(above, bdtrc(np.maximum(count - 1, 0), rows, inner), where=count > 0)
    tail = float(np.quantile(2.0 * np.minimum(below, above).min(axis=1), 1.0 - level)) / 2.0
    low, high = binom.ppf(tail, rows, inner) / rows, binom.isf(tail, rows, inner) / rows
    return np.concatenate([[0.0], low, [1.0]]), np.concatenate([[0.0], high, [1.0]])


# ---------------------------------------------------------------- files


def save_figures(
    figures: Mapping[str, Figure | Callable[[], Figure]], folder: str | os.PathLike[str]
) -> list[Path]:
    """Write figures as ``<name>.png`` into ``folder``, which is made if need be; their paths.

    A figure may be given as a function that makes it. All are drawn before the first is written,
    and each file appears when it is complete.
    """
    for name in figures:
        if not name or name != Path(name).name:
            raise ValueError(f"figures must have plain file names as keys, got {name!r}")
    drawn = {name: _png(f if isinstance(f, Figure) else f()) for name, f in figures.items()}
    target = Path(folder)
    paths = []
    partial = target / f".foldwise-{secrets.token_hex(8)}.partial"
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in drawn.items():
            paths.append(target / f"{name}.png")
            partial.write_bytes(content)
            os.replace(partial, paths[-1])
    except OSError as error:
        raise OSError(
            f"figures could not be written to {target} ({error}); choose a folder in which files "
            "can be made and that has room"
        ) from error
    finally:
        if target.is_dir():
            partial.unlink(missing_ok=True)
    return paths


def _png(figure: Figure) -> bytes:
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=DPI)
    return stream.getvalue()


# ---------------------------------------------------------------- what can be drawn


def _check_results(*results: CVResult | None) -> None:
    for result in results:
        if result is not None and not isinstance(result, CVResult):
            raise TypeError(
                f"figures are of what cross_validate returns, a CVResult, got "
                f"{type(result).__name__}"
            )


def _main_score(result: CVResult, score: str | None) -> str:
    return result.score(next(iter(result.scores)) if score is None else score).name


def _stored(result: CVResult) -> Any:
    """What the run behind a result recorded, which must include its draws."""
    _draws(result)
    return recorded(result)


def _draws(result: CVResult) -> Float[np.ndarray, "fold chain draw"]:
    if result.draws is None:
        raise ValueError(f"this figure needs stored draws, but {_ONLINE}")
    return result.draws.values


def _need_values(values: np.ndarray, score: Score, what: str) -> None:
    if np.isfinite(values).any():
        return
    hint = "look at the folds' status"
    if score.name not in LOG_SCORES:
        hint = "of scores other than log scores they are not; choose score= among log scores"
    raise ValueError(f"{what} not known for any fold of {score.name}; {hint}")


# ---------------------------------------------------------------- words and axes


def _title(figure: Figure, *lines: str) -> None:
    """Text above the axes, from the figure's left edge, wrapped to its width."""
    room = 72.0 * 0.98 * figure.get_figwidth()
    wrapped = [part for line in lines for part in _wrap(line, room)]
    figure.suptitle("\n".join(wrapped), x=0.01, ha="left", fontsize=STYLE["axes.titlesize"])


def _wrap(line: str, room: float) -> list[str]:
    """Words of ``line`` in as many lines as it takes for each to fit into ``room`` points."""
    found = [""]
    for word in line.split():
        longer = f"{found[-1]} {word}".strip()
        path = TextPath((0.0, 0.0), longer, size=STYLE["axes.titlesize"])
        if found[-1] and path.vertices[:, 0].max() > room:
            found.append(word)
        else:
            found[-1] = longer
    return found


def _quantity(name: str) -> str:
    return "elpd" if name in LOG_SCORES else name


def _model_name(result: CVResult) -> str:
    return _short(result.info.get("model") or "model")


def _measure(found: Comparison) -> str:
    """What a difference, positive where the first model is better, is measured in."""
    less = find_rule(found.score).sign < 0
    return f"{_quantity(found.score)} {'saved' if less else 'difference'}"


def _of(found: Comparison) -> str:
    """Which models a difference is of, and its direction."""
    first, second = (_short(name) for name in found.names)
    joined = "against" if find_rule(found.score).sign < 0 else "minus"
    return f"{first} {joined} {second}"


def _over(left_out: int, result: CVResult) -> str:
    """Which folds are missing: those that are not finite, and those of the scheme not run."""
    held = result.folds.sizes["fold"]
    total = folds_of_scheme(result.info, held)
    missing = f"; {left_out} of {held} folds left out" if left_out else ""
    return missing + (f"; {held} of {total} folds of the scheme" if held < total else "")


def _unknown(values: np.ndarray, what: str = "fold") -> str:
    count = int((~np.isfinite(values)).sum())
    plural = "" if count == 1 else "s"
    return f"; {count} {what}{plural} not a number, not drawn" if count else ""


def _short(name: Any, most: int = _NAME) -> str:
    """A name of at most ``most`` characters, cut in the middle."""
    text = str(name)
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail].rstrip()}…{text[-tail:].lstrip()}"


def _number(value: float, error: float) -> str:
    """A number to the first digit of its error."""
    if not np.isfinite(value):
        return "not finite"
    places = 1
    if np.isfinite(error) and error > 0:
        places = int(np.clip(1 - np.floor(np.log10(error)), 0, 6))
    return f"{value:,.{places}f}"


def _error(value: float) -> str:
    return f"{value:.2g}" if np.isfinite(value) else "unknown"


def _percent(value: float) -> str:
    if not np.isfinite(value):
        return "unknown"
    if value > 0.999:  # a normal probability is never quite one
        return "over 99.9 %"
    if value < 0.001:
        return "under 0.1 %"
    return f"{100 * value:.1f} %"


def _sides(ax: Axes, names: list[str]) -> None:
    """Which side of zero favours whom."""
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, -0.02 * high), max(high, -0.02 * low))
    for at, align, text, colour in (
        (0.0, "left", f"← {_short(names[1], 22)} better", RED),
        (1.0, "right", f"{_short(names[0], 22)} better →", BLUE),
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


def _zero_if_near(ax: Axes) -> None:
    """A line at zero where it is in sight, or near."""
    low, high = ax.get_ylim()
    if low - 0.5 * (high - low) <= 0.0 <= high + 0.5 * (high - low):
        ax.axhline(0.0, color=GREY, linewidth=0.8, zorder=0)


def _plain_log(ax: Axes, which: str) -> None:
    """A log scale whose ticks are plain numbers: 1, 2 or 5 times a power of ten."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    low, high = sorted(axis.get_view_interval())
    if high / low < 3.0:  # room for two ticks at least
        middle = np.sqrt(low * high)
        low, high = middle / 1.8, middle * 1.8
        (ax.set_xlim if which == "x" else ax.set_ylim)(low, high)
    ends = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    multiples = (1, 2, 5) if high / low < 1e3 else (1,)
    ticks = [m * 10.0**e for e in range(ends[0], ends[1] + 1) for m in multiples]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


_RHAT_FLOOR = 1e-3
_RHAT_TICKS = (1.001, 1.002, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 6, 11, 51, 101, 1001)


def _rhat_forward(value: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(np.asarray(value, float) - 1.0, _RHAT_FLOOR))


def _rhat_inverse(value: np.ndarray) -> np.ndarray:
    return 1.0 + np.exp(value)


def _rhat_axis(ax: Axes, values: np.ndarray) -> None:
    """R-hat on a log scale of its distance from one; below 1.001 it is drawn at 1.001."""
    known = values[np.isfinite(values)]
    low, high = (known.min(), known.max()) if len(known) else (1.0, 1.1)
    ax.set_yscale("function", functions=(_rhat_forward, _rhat_inverse))
    bottom, top = _rhat_forward(np.array([low, high]))
    pad = max(0.06 * (top - bottom), 0.1)
    ax.set_ylim(*_rhat_inverse(np.array([max(bottom - pad, np.log(_RHAT_FLOOR)), top + pad])))
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(FixedLocator([t for t in _RHAT_TICKS if low <= t <= high]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def _apart(at: Float[np.ndarray, " label"], size: Float[np.ndarray, " label"]) -> np.ndarray:
    """Places near ``at`` for labels of the given sizes, so that neighbours do not overlap."""
    order = np.argsort(at, kind="stable")
    found, half = at[order], size[order] / 2
    least = half[1:] + half[:-1]
    for _ in range(200):
        missing = np.maximum(least - np.diff(found), 0.0) / 2
        if not (missing > 1e-4).any():
            break
        found[:-1] -= missing
        found[1:] += missing
    moved = np.empty_like(at)
    moved[order] = found
    return moved


def _end_labels(
    ax: Axes, items: Sequence[tuple[float, str, str]], inches: float = 0.7 * HEIGHT
) -> None:
    """Names of lines at their right ends, moved apart where they would overlap.

    ``inches`` is about the height of the axes.
    """
    scale = ax.transScale + ax.transLimits
    x = ax.get_xlim()[1]
    at = np.array([scale.transform((x, value))[1] for value, _, _ in items])
    moved = _apart(at, np.array([0.15 / inches * (1 + text.count("\n")) for _, text, _ in items]))
    for (_, text, colour), place in zip(items, moved, strict=True):
        ax.annotate(
            text,
            (1.0, place),
            xytext=(5, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=8.0,
            annotation_clip=False,
        )
