"""Figures of calibration: the probability integral transform of held-out values."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foldwise.results.axes import BLUE, GREY, PALE, styled_figure, title
from foldwise.results.captions import model_name, not_drawn
from foldwise.results.drawable import check_results
from foldwise.results.result import CVResult

_BAND_SAMPLES = 4000


def plot_pit(result: CVResult, seed: int = 0) -> Figure:
    """Are predictions calibrated? Probability integral transform of the held-out values.

    Left, its histogram with the range of 95 % of counts in each bar if it were uniform. Right, its
    distribution function minus that of the uniform, with a band that holds all of it in 95 % of
    uniform samples (Saeilynoja et al. 2022). Both take rows as independent. A hump in the middle of
    the histogram says predictions are too wide, a trough too narrow, a slope that they are biased.
    Needs a run with predictive draws, such as scores=("log", "crps").
    """
    check_results(result)
    every, table = result.pit(seed).values, result._calibration()
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
        title(
            figure,
            f"{model_name(result)}: PIT of {rows:,} held-out rows; "
            f"grey: 95 % if calibrated{not_drawn(every, 'row')}",
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
