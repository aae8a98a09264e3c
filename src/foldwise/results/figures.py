"""Figures from results: how estimates settle, which folds decide, how well chains mixed.

Every function returns a matplotlib figure and touches no global state: nothing pops up, no display
is needed. ``figure.savefig("name.pdf")`` writes one, :func:`save_figures` several. "Against
iterations" means that estimates are made again from the first draws of every chain.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from foldwise.results.axes import png
from foldwise.results.figures_calibration import plot_pit
from foldwise.results.figures_chains import plot_chains, plot_rhat, plot_rhat_max
from foldwise.results.figures_compare import plot_compare
from foldwise.results.figures_diagnostics import plot_diagnostics
from foldwise.results.figures_folds import plot_difference, plot_ess, plot_pareto_k
from foldwise.results.figures_iterations import plot_errors, plot_probability, plot_progress
from foldwise.results.figures_scheme import plot_scheme
from foldwise.support.writer import whole_file

__all__ = [
    "plot_chains",
    "plot_compare",
    "plot_diagnostics",
    "plot_difference",
    "plot_errors",
    "plot_ess",
    "plot_pareto_k",
    "plot_pit",
    "plot_probability",
    "plot_progress",
    "plot_rhat",
    "plot_rhat_max",
    "plot_scheme",
    "save_figures",
]


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
    drawn = {name: png(f if isinstance(f, Figure) else f()) for name, f in figures.items()}
    target = Path(folder)
    paths = [target / f"{name}.png" for name in drawn]
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path, content in zip(paths, drawn.values(), strict=True):
            with whole_file(path) as partial:
                partial.write_bytes(content)
    except OSError as error:
        raise OSError(
            f"figures could not be written to {target} ({error}); choose a folder in which files "
            "can be made and that has room"
        ) from error
    return paths
