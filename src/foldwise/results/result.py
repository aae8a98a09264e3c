"""Results of cross-validation: scores with their errors and diagnostics; printed, saved, merged."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy

from foldwise.results import methods
from foldwise.scores import diagnostics
from foldwise.scores.rules import LOG_SCORES

if TYPE_CHECKING:
    import os
    from pathlib import Path

    import pandas as pd
    import xarray as xr

    from foldwise.models.model import Model
    from foldwise.sampling.run import Run


class FoldWarning(UserWarning):
    """Some folds' scores are not to be trusted."""


@dataclass(frozen=True, repr=False)
class Score:
    """A cross-validation score: total over folds, its errors, and the table by fold.

    ``total`` is the (weighted) sum over folds, higher is better; for ``accuracy``, ``brier`` and
    the errors ``mse``, ``rmse``, ``mae`` (lower is better) it is the mean over rows, for ``r2`` one
    minus the mean squared error over the variance of the observed values. ``se`` is its
    standard error over data, sqrt(K) times the standard deviation (ddof=1) over K units: ``unit``
    is "row" for a score by row of folds that leave out single rows or random ones (``pointwise``),
    "fold" where they leave out groups, blocks or times. ``mcse`` is its Monte Carlo standard error.
    ``error`` counts both, each once. For log scores,
    ``ess`` is the effective number of draws behind the total, and ``optimism`` how much better the
    same rows are predicted by draws that have seen them: their full-data score minus ``total``. It
    is the effective number of parameters only where rows are scored one by one. Folds whose score
    is not a number are left out and counted in ``left_out``.

    ``folds`` and, for a score by row, ``rows`` are the tables: ``elpd`` of log scores, ``score`` of
    others. By fold, rules whose total is a mean show the mean over the fold's rows; ``rmse`` and
    ``r2`` show mean squared errors there. The last three fields are parts of the Monte Carlo
    variance: of the folds' own draws, what each full-data draw adds, and the variance of these.
    """

    name: str
    total: float
    se: float
    mcse: float
    ess: float
    optimism: float
    left_out: int
    folds: xr.Dataset
    rows: xr.Dataset | None
    own_variance: float
    full_influence: np.ndarray
    full_variance: float
    pointwise: bool = True

    @classmethod
    def saved(cls, **fields: Any) -> Score:
        """The score that a file holds; older files call optimism ``p``, in tables too."""
        if "p" in fields:
            fields["optimism"] = fields.pop("p")
            for name in ("folds", "rows"):
                if fields[name] is not None and "p" in fields[name]:
                    fields[name] = fields[name].rename(p="optimism")
        return cls(**fields)

    @property
    def unit(self) -> str:
        """What ``se`` is taken over, "fold" or "row"."""
        return methods.unit(self)

    @property
    def error(self) -> float:
        """Error of ``total`` over data and random numbers, each counted once."""
        return methods.error(self)

    def __str__(self) -> str:
        return methods.score_text(self)

    __repr__ = __str__


@dataclass
class CVResult:
    """Cross-validation of one model.

    The attributes ``elpd``, ``se``, ``mcse``, ``ess``, ``optimism``, ``folds`` and ``rows`` are
    those of the first score asked for; ``score(name)`` gives any of them.

    Attributes
    ----------
    scores
        Every score asked for, by name.
    mixing
        R-hat by fold and the benchmark of its maximum.
    test
        Which rows each fold tests, and the observed values where the model has them.
    info
        Name of the model, scheme, settings, seeds, the seconds of each phase, and what tells
        whether two results are of one model, data and scheme.
    draws
        Log score of every draw, by fold, chain and draw; None with ``memory="online"``.
    calibration
        Predictive probabilities behind ``pit`` and ``coverage``; None if nothing was simulated.
    run
        What ``extend`` goes on from; None if the result was loaded or merged.
    weighted
        Result of the folds by importance sampling, where others have chains; else None.
    """

    scores: dict[str, Score]
    mixing: diagnostics.Mixing
    test: dict[str, np.ndarray]
    info: dict[str, Any]
    draws: xr.DataArray | None = None
    calibration: xr.Dataset | None = None
    run: Run | None = field(default=None, repr=False)
    weighted: CVResult | None = field(default=None, repr=False)

    def score(self, name: str) -> Score:
        """The score called ``name``."""
        if name not in self.scores:
            have = ", ".join(self.scores)
            raise ValueError(
                f"this result has the scores {have}, but {name!r} was asked for; run "
                f'cross_validate(..., scores=("{name}",))'
            )
        return self.scores[name]

    @property
    def _main(self) -> Score:
        return next(iter(self.scores.values()))

    @property
    def elpd(self) -> float:
        """Total log score over folds."""
        if self._main.name not in LOG_SCORES:
            have = ", ".join(self.scores)
            raise AttributeError(
                f"elpd is a log score, but the first score of this result is {self._main.name}; "
                f"use .score(name).total with one of {have}"
            )
        return self._main.total

    @property
    def se(self) -> float:
        """Standard error, over data, of the total."""
        return self._main.se

    @property
    def mcse(self) -> float:
        """Monte Carlo standard error of the total."""
        return self._main.mcse

    @property
    def ess(self) -> float:
        """Effective number of draws behind the total."""
        return self._main.ess

    @property
    def optimism(self) -> float:
        """How much better the same rows are predicted by draws that have seen them."""
        return self._main.optimism

    @property
    def folds(self) -> xr.Dataset:
        """Table by fold."""
        return self._main.folds

    @property
    def rows(self) -> xr.Dataset | None:
        """Table by test row, for scores by row."""
        return self._main.rows

    @property
    def rhat_max(self) -> float:
        """Largest R-hat of any fold's log score."""
        return self.mixing.rhat_max

    @property
    def rhat_benchmark(self) -> np.ndarray:
        """R-hat-max of 500 shuffled replicates: what it would be if all chains had mixed."""
        return self.mixing.benchmark

    @property
    def divergences(self) -> int:
        """Divergent transitions over all folds."""
        return int(self.folds["divergences"].sum())

    @property
    def flagged(self) -> xr.Dataset:
        """Table of the folds whose status is not fine."""
        return self.folds.isel(fold=np.flatnonzero(self.folds["status"].values != "fine"))

    def pit(self, seed: int = 0) -> xr.DataArray:
        """Probability integral transform of each held-out value under its fold's predictive.

        P(x < y) + u P(x = y), x a predictive draw, with u uniform (which matters for discrete
        data only). Uniform over rows if predictions are calibrated.
        """
        table = self._calibration()
        uniform = np.random.default_rng(seed).random(table.sizes["test_row"])
        return (table["below"] + uniform * table["equal"]).rename("pit")

    def coverage(self, levels: tuple[float, ...] = (0.5, 0.8, 0.9, 0.95)) -> pd.DataFrame:
        """Share of held-out values inside the central predictive interval of each level.

        ``se`` is its standard error over rows, sqrt(c (1 - c) / n), or over folds where these leave
        out groups, blocks or times. ``mcse`` is its Monte Carlo
        error: Phi(-|distance to the interval's end| / error) is the chance that more draws would
        move a value across, and such chances add up.
        """
        import pandas as pd

        table = self._calibration()
        for level in levels:
            if not 0.0 < level < 1.0:
                raise ValueError(f"levels must lie between 0 and 1, got {level!r}")
        pit, error = self.pit().values, table["mcse"].values
        _, row = np.unique(table["row"].values, return_inverse=True)
        weight = table["weight"].values / table["weight"].values.sum()
        lines = []
        for level in levels:
            inside = 0.5 * level - np.abs(pit - 0.5)
            covered = min(float(weight @ (inside >= 0)), 1.0)
            with np.errstate(divide="ignore", invalid="ignore"):
                wrong = np.where(error > 0, scipy.special.ndtr(-np.abs(inside) / error), 0.0)
            se = np.sqrt(covered * (1.0 - covered) / (row.max() + 1))
            if not self._main.pointwise:
                _, fold = np.unique(table["fold"].values, return_inverse=True)
                parts = np.bincount(fold, weight * ((inside >= 0) - covered))
                se = np.sqrt((parts**2).sum() * len(parts) / max(len(parts) - 1, 1))
            lines.append((covered, se, float(np.sqrt(weight**2 @ wrong))))
        index = pd.Index(levels, name="level")
        return pd.DataFrame(lines, index=index, columns=["covered", "se", "mcse"])

    def _calibration(self) -> xr.Dataset:
        if self.calibration is None:
            raise ValueError(
                "PIT and coverage need predictive draws, but this run made none; ask for a score "
                'that needs them, such as cross_validate(..., scores=("log", "crps"))'
            )
        return self.calibration

    def extend(self, draws: int, model: Model | None = None, progress: bool = True) -> CVResult:
        """Run every chain ``draws`` further; this result is updated, and returned.

        A result that was loaded from a file needs the ``model`` again. If the run is interrupted
        the result stays as it was.
        """
        longer = methods.extend(self, draws, model, progress)
        self.__dict__.update(longer.__dict__)
        return self

    def to_arviz(self) -> Any:
        """This result as arviz-stats' ELPDData, for ``arviz_stats.compare`` and its plots."""
        return methods.to_arviz(self)

    def to_datatree(self, model: Model | None = None) -> xr.DataTree:
        """The folds' draws that were kept, as a DataTree that ArviZ plots.

        Needs ``cross_validate(..., keep=...)``: ``"position"`` gives the group ``posterior``, every
        parameter by fold, chain and draw; ``"predictive"`` gives ``posterior_predictive`` and
        ``observed_data``, by test row. A result loaded from a file needs its ``model`` again.
        """
        return methods.to_datatree(self, model)

    def save(self, path: str | Path) -> None:
        """Write the result, and the state of its chains, to a netCDF file."""
        methods.save(self, path)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write a report on the result, one HTML file that needs no other."""
        return methods.result_report(self, path)

    def _repr_html_(self) -> str:
        return methods.result_html(self)

    def __getstate__(self) -> dict[str, Any]:
        # as a file holds it: with the state of the chains, without the model's functions
        return methods.state(self)

    def __str__(self) -> str:
        return methods.result_text(self)

    __repr__ = __str__

    def __rich__(self) -> Any:
        return methods.coloured(str(self))


def flags(result: CVResult) -> tuple[int, list[str]]:
    """How many folds are flagged, and a line for each kind of trouble: what it is, what to do.

    Of scores after the first, trouble that the first does not share is named with the score.
    """
    main, *others = result.scores.values()
    status, names = main.folds["status"].values, main.folds["fold"].values
    draws = None
    if "slowest_ess" in main.folds:
        slowest, info = main.folds["slowest_ess"].values, result.info
        draws = diagnostics.draws_needed(slowest, info["chains"], info["draws"])
    flagged, lines = status != "fine", diagnostics.advice(status, names, draws)
    for score in others:
        more = np.where(flagged, "fine", score.folds["status"].values)
        lines += [f"{score.name}, {line}" for line in diagnostics.advice(more, names)]
        flagged = flagged | (more != "fine")
    hampered = np.isin(status, diagnostics.HAMPERED).mean()
    if min(hampered, result.info.get("tied_future", 0.0)) >= diagnostics.MOST_IN_TROUBLE:
        lines.insert(0, diagnostics.RANDOM_WALK)  # what the others come from
    return int(flagged.sum()), lines


def warn_of_flags(result: CVResult, stacklevel: int = 3) -> None:
    """Say once how many folds are flagged and why."""
    count, lines = flags(result)
    if lines:
        head = f"{count} of {result.folds.sizes['fold']} folds flagged: "
        warnings.warn(head + "\n  ".join(lines), FoldWarning, stacklevel=stacklevel)
