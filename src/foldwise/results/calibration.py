"""Whether predictions are calibrated: the probability integral transform against its band."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float

from foldwise.results.result import CVResult

_BAND_SAMPLES = 4000
_GRID = 101


@dataclass(frozen=True)
class Calibration:
    """The distribution function of the PIT of held-out rows, less that of the uniform.

    ``low`` and ``high`` hold all of it in 95 % of uniform samples of as many rows; ``outside`` is
    where it leaves them. ``sentence`` says what that means.
    """

    grid: Float[np.ndarray, " point"]
    difference: Float[np.ndarray, " point"]
    low: Float[np.ndarray, " point"]
    high: Float[np.ndarray, " point"]
    rows: int
    pit: Float[np.ndarray, " row"]
    weight: Float[np.ndarray, " row"]

    @property
    def outside(self) -> Bool[np.ndarray, " point"]:
        """Where the curve is beyond its band."""
        tiny = 1e-9
        return (self.difference < self.low - tiny) | (self.difference > self.high + tiny)

    @property
    def sentence(self) -> str:
        """What the PIT says, in one sentence."""
        if not self.outside.any():
            return "PIT curve stays inside its 95 % band: no sign of miscalibration"
        mean = float(self.weight @ self.pit)
        spread = float(self.weight @ (self.pit - 0.5) ** 2)
        error = np.sqrt(1.0 / 12.0 / self.rows)
        what = []
        if abs(mean - 0.5) > 2.0 * error:
            what.append(f"predictions are too {'low' if mean > 0.5 else 'high'}")
        if abs(spread - 1.0 / 12.0) > 2.0 * np.sqrt(1.0 / 180.0 / self.rows):
            what.append(f"predictions are too {'narrow' if spread > 1 / 12 else 'wide'}")
        found = " and ".join(what) or "their shape is not that of the data"
        return f"PIT curve leaves its 95 % band: {found}"


def calibration_of(result: CVResult, seed: int = 0) -> Calibration:
    """The PIT of a result's held-out rows against its band; rows are taken as independent."""
    every, table = result.pit(seed).values, result._calibration()
    known = np.isfinite(every)
    rows = len(np.unique(table["row"].values[known]))
    if not rows:
        raise ValueError("a PIT plot needs finite predictions, but no row has any")
    weight = table["weight"].values[known] / table["weight"].values[known].sum()
    pit, grid = every[known], np.linspace(0.0, 1.0, _GRID)
    order = np.argsort(pit)
    cumulated = np.append(0.0, weight[order].cumsum())
    inside = cumulated[np.searchsorted(pit[order], grid, side="right")]
    low, high = _usual_band(rows)
    return Calibration(grid, inside - grid, low - grid, high - grid, rows, pit, weight)


@lru_cache(maxsize=32)
def _usual_band(rows: int) -> tuple[np.ndarray, np.ndarray]:
    return uniform_band(rows, np.linspace(0.0, 1.0, _GRID))


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
