"""Figures of chains: R-hat of every fold, R-hat-max against its benchmark, draws of one fold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from foldwise.results.axes import (
    BLUE,
    CHAIN_COLOURS,
    GREY,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    WIDTH,
    end_labels,
    iterations_axis,
    lengths_up_to,
    styled_figure,
    title,
)
from foldwise.results.captions import model_name, not_drawn, short
from foldwise.results.drawable import check_results, stored_draws
from foldwise.results.result import CVResult
from foldwise.results.weighted import chains_alone
from foldwise.scores import diagnostics
from foldwise.scores.sums import RunningSums

# Folds whose R-hats are drawn as lines; of more, as ranges.
MOST_LINES = 100
_RHAT_FLOOR = 1e-3
_RHAT_TICKS = (1.001, 1.002, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 6, 11, 51, 101, 1001)


def _with_chains(result: CVResult) -> CVResult:
    """The part of a result whose folds have chains."""
    check_results(result)
    return chains_alone(result)


def plot_rhat(result: CVResult) -> Figure:
    """R-hat of every fold's log score against iterations; the largest at the end are named.

    Of many folds the others are shown as ranges that hold 50, 90 and 100 % of them. The dashed
    line is the limit above which chains are said to disagree after all draws. The scale
    is that of log(R-hat - 1); values below 1.001 are drawn at 1.001. Needs stored draws.
    """
    result = _with_chains(result)
    draws = stored_draws(result)
    names = result.folds["fold"].values
    lengths = lengths_up_to(draws.shape[2], int(result.info["batch"]), 40)
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
        iterations_axis(ax, lengths)
        _rhat_axis(ax, values)
        ax.set_ylabel("R-hat of the log score")
        ends = [(float(values[k, -1]), short(names[k], 18), colours[k]) for k in worst]
        if np.isfinite(limit):
            ends_at = ax.get_xlim()[1]
            ax.hlines(limit, lengths[-1] / 2, ends_at, color=INK, linewidth=0.8, linestyle="--")
            ends.append((limit, f"limit {limit:.3g}", INK))
        end_labels(ax, ends)
        over = int((result.mixing.rhat > limit).sum())
        title(
            figure,
            f"{model_name(result)}: {over} of {len(values)} folds above the limit after "
            f"{lengths[-1]:,} iterations{not_drawn(values[:, -1])}",
        )
    return figure


def plot_rhat_max(result: CVResult) -> Figure:
    """R-hat-max against its shuffled benchmark, at several lengths.

    Grey: histograms of what the largest R-hat of all folds would be if all chains had mixed, from
    500 replicates with shuffled blocks. A mark above its histogram says that some fold has not
    mixed. Of results without stored draws only the whole run is shown.
    """
    result = _with_chains(result)
    found = [result.mixing]
    if result.draws is not None:
        draws = stored_draws(result)
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
        title(
            figure,
            f"{model_name(result)}: R-hat-max (mark) against what it would be if all chains had "
            "mixed (grey)",
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


# ---------------------------------------------------------------- one fold


def plot_chains(result: CVResult, fold: Any) -> Figure:
    """Log score of each chain of one fold, draw by draw, and the chains' running means.

    A stuck chain is a flat line, a shifted one runs beside the others. ``fold`` is the fold's name.
    Needs stored draws.
    """
    result = _with_chains(result)
    draws = stored_draws(result)
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
        bottom.set_ylabel("running mean\nof the log score")
        bottom.set_xlabel("iteration, after warm-up")
        bottom.set_xlim(1, max(count, 2))
        end_labels(
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
        title(
            figure,
            f"{model_name(result)}: log score by chain in fold {short(names[k], 30)}",
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


# ---------------------------------------------------------------- the scale of R-hat


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


def _rhat_forward(value: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(np.asarray(value, float) - 1.0, _RHAT_FLOOR))


def _rhat_inverse(value: np.ndarray) -> np.ndarray:
    return 1.0 + np.exp(value)
