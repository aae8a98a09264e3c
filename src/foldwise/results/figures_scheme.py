"""The figure of a scheme: which rows each fold tests."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from foldwise.results.axes import ORANGE, PALE, WIDTH, styled_figure, title
from foldwise.results.drawable import check_results
from foldwise.results.result import CVResult

# Folds that are all drawn, how many of more are, and rows that are drawn one by one.
_FOLDS, _DRAWN, _CELLS = 24, 14, 240
TRAINS = "#A9D3EA"


def plot_scheme(result: CVResult) -> Figure:
    """Which rows train and test? Some folds of the result's scheme, a line each.

    Rows are from left to right, blue where they train, orange where they are tested, grey where
    they do neither, or where a result without its folds does not know. Of many folds some are
    drawn; of many rows neighbours share a cell, which is orange where one of them is tested.
    """
    check_results(result)
    chosen = drawn_folds(result.folds.sizes["fold"])
    cells = scheme_cells(result, chosen)
    names = result.folds["fold"].values
    with styled_figure(WIDTH + 1.5, 0.9 + 0.16 * len(chosen)) as figure:
        ax = figure.subplots()
        colours = ListedColormap([PALE, TRAINS, ORANGE])
        ax.imshow(cells, aspect="auto", cmap=colours, vmin=0, vmax=2, interpolation="nearest")
        ax.set_yticks(range(len(chosen)), [str(names[k])[:18] for k in chosen])
        ax.set_ylabel("fold")
        ax.set_xticks([])
        ax.set_xlabel(f"{result.info.get('n_obs', cells.shape[1]):,} rows")
        for side in ("left", "bottom"):
            ax.spines[side].set_visible(False)
        ax.tick_params(length=0)
        count = len(names)
        some = "" if len(chosen) == count else f"; {len(chosen)} of {count:,} folds drawn"
        words = ((1.0, "blue: trains"), (2.0, "orange: tested"), (0.0, "grey: neither"))
        title(figure, "; ".join(word for value, word in words if (cells == value).any()) + some)
    return figure


def drawn_folds(count: int) -> np.ndarray:
    """Positions of the folds that are drawn: all of a few, evenly spaced ones of many."""
    if count <= _FOLDS:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, _DRAWN).round().astype(int))


def scheme_cells(result: CVResult, chosen: np.ndarray) -> Float[np.ndarray, "fold cell"]:
    """0 where rows do neither, 1 where they train, 2 where they are tested; by fold."""
    start, rows = result.test["start"], result.test["rows"]
    total = max(int(result.info.get("n_obs") or 0), int(rows.max()) + 1)
    width = min(total, _CELLS)
    found = np.zeros((len(chosen), width))
    table = result.folds
    trains = table["n_train"].values if "n_train" in table else total - table["n_test"].values
    for line, k in enumerate(chosen):
        test = rows[start[k] : start[k + 1]]
        known = np.zeros(total)
        if result.run is not None and len(result.run.folds) == table.sizes["fold"]:
            known[result.run.folds.train(int(k))] = 1.0
        elif trains[k] + len(test) == total:
            known[:] = 1.0
        elif trains[k] <= test.min():  # the rows before, as in leave-future-out
            known[test.min() - int(trains[k]) : test.min()] = 1.0
        known[test] = 2.0
        np.maximum.at(found[line], np.arange(total) * width // total, known)
    return found
