"""Figures of calibration: the probability integral transform of held-out values."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foldwise.results.axes import BLUE, GREY, PALE, RED, styled_figure, title
from foldwise.results.calibration import Calibration, calibration_of
from foldwise.results.captions import model_name, not_drawn
from foldwise.results.drawable import check_results
from foldwise.results.result import CVResult


def plot_pit(result: CVResult, seed: int = 0) -> Figure:
    """Are predictions calibrated? Probability integral transform of the held-out values.

    Left, its histogram with the range of 95 % of counts in each bar if it were uniform. Right, its
    distribution function minus that of the uniform, with a band that holds all of it in 95 % of
    uniform samples (Saeilynoja et al. 2022): the title's judgement is by this one, since of the
    histogram's bars one in 20 leaves its range by chance. Both take rows as independent, which
    rows of one group are not. What leaves them is red. A hump in the middle of
    the histogram says predictions are too wide, a trough too narrow, a slope that they are biased.
    Needs a run with predictive draws, such as scores=("log", "crps").
    """
    check_results(result)
    found = calibration_of(result, seed)
    with styled_figure(6.5, 3.0) as figure:
        left, right = figure.subplots(1, 2)
        _pit_histogram(left, found)
        _pit_difference(right, found)
        every = result.pit(seed).values
        title(
            figure,
            f"{model_name(result)}: {found.sentence}",
            f"PIT of {found.rows:,} held-out rows{not_drawn(every, 'row')}; grey: 95 % if "
            "calibrated, for each bar by itself (left: one bar in 20 is outside by chance) and for "
            f"the whole curve (right); red: outside{_dependence(result)}",
        )
    return figure


def _dependence(result: CVResult) -> str:
    """That rows of a fold belong together, where folds leave out groups, blocks or times."""
    chosen = result.scores[next(iter(result.scores))]
    together = chosen.unit == "fold" and (chosen.folds["n_test"].values > 1).any()
    return "; rows left out together are not independent, the band is too narrow" * bool(together)


def _pit_histogram(ax: Axes, found: Calibration) -> None:
    from scipy.stats import binom

    bars = int(np.clip(found.rows // 10, 5, 20))
    density, edges = np.histogram(found.pit, bars, (0.0, 1.0), weights=found.weight * bars)
    low, high = (binom.ppf(q, found.rows, 1.0 / bars) * bars / found.rows for q in (0.025, 0.975))
    ax.axhspan(low, high, color=PALE, linewidth=0)
    ax.axhline(1.0, color=GREY, linewidth=0.8)
    ax.stairs(density, edges, color=BLUE, linewidth=1.2, fill=False, baseline=0.0)
    for k in np.flatnonzero((density < low) | (density > high)):
        ax.hlines(density[k], edges[k], edges[k + 1], color=RED, linewidth=2.5)
    ax.set_xlim(0.0, 1.0)
    ax.set_ylim(0.0, 1.08 * max(float(density.max()), high))
    ax.set_xlabel("PIT of held-out value")
    ax.set_ylabel("density")


def _pit_difference(ax: Axes, found: Calibration) -> None:
    ax.fill_between(found.grid, found.low, found.high, color=PALE, linewidth=0)
    ax.axhline(0.0, color=GREY, linewidth=0.8)
    ax.plot(found.grid, found.difference, color=BLUE)
    ax.plot(
        found.grid, np.where(found.outside, found.difference, np.nan), ".", color=RED, markersize=5
    )
    ax.set_xlim(0.0, 1.0)
    ax.set_xlabel("PIT of held-out value")
    ax.set_ylabel("ECDF minus uniform")
