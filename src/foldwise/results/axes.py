"""How every figure looks: palette, style, titles, scales and labels of lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

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


class Picture(Figure):
    """A figure that notebooks show even if pyplot was never imported."""

    def _repr_png_(self) -> bytes:
        return png(self)


def png(figure: Figure) -> bytes:
    """The figure as the content of a PNG file."""
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=DPI)
    return stream.getvalue()


@contextmanager
def styled_figure(width: float = WIDTH, height: float = HEIGHT) -> Iterator[Picture]:
    """An empty figure; what is drawn inside the context has the style of all figures."""
    with matplotlib.rc_context(STYLE):
        yield Picture(figsize=(width, height), layout="constrained")


# ---------------------------------------------------------------- titles


def title(figure: Figure, *lines: str) -> None:
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


# ---------------------------------------------------------------- scales


def lengths_up_to(draws: int, step: int, count: int = LENGTHS) -> list[int]:
    """About ``count`` lengths up to ``draws``, evenly spaced on a log scale, ending blocks."""
    first = 2 * step
    if draws <= first:
        return [draws]
    inner = np.geomspace(first, draws, count)
    whole = np.unique(np.round(inner / step).astype(int) * step)
    return [int(n) for n in whole if n < draws] + [draws]


def iterations_axis(ax: Axes, lengths: Sequence[int] | np.ndarray) -> None:
    """A log scale with plain numbers."""
    low, high = lengths[0] / 1.08, lengths[-1] * 1.08
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ticks = [m * 10.0**e for e in range(0, 8) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    ax.xaxis.set_major_locator(FixedLocator(ticks if len(ticks) > 1 else [lengths[-1]]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("iterations per chain, after warm-up")


def zero_if_near(ax: Axes) -> None:
    """A line at zero where it is in sight, or near."""
    low, high = ax.get_ylim()
    if low - 0.5 * (high - low) <= 0.0 <= high + 0.5 * (high - low):
        ax.axhline(0.0, color=GREY, linewidth=0.8, zorder=0)


def plain_log(ax: Axes, which: str) -> None:
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


# ---------------------------------------------------------------- labels of lines


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


def in_margin(ax: Axes, at: float, text: str, size: float = 8.0, colour: str = INK) -> None:
    """A text to the right of the axes, at the height of the value ``at``."""
    ax.annotate(
        text,
        (1.0, at),
        xytext=(5, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        color=colour,
        fontsize=size,
        annotation_clip=False,
    )


def end_labels(
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
