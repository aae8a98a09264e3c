"""Results written by hand, for tests of comparisons and of printed text."""

import numpy as np
import xarray as xr

from foldwise.results.result import CVResult
from foldwise.results.totals import finish_score
from foldwise.scores.diagnostics import Mixing
from foldwise.scores.rules import column

# Paired differences 0.5, 0.5, -0.5, 2.5: sum 3, sample variance 4.75 / 3.
A = [-1.0, -2.0, -3.0, -4.0]
B = [-1.5, -2.5, -2.5, -6.5]


def make(
    elpd,
    *,
    mcse=0.1,
    optimism=0.25,
    weight=None,
    names=None,
    test=None,
    row_elpd=None,
    row_weight=None,
    y=None,
    index=None,
    spread=1.0,
    noise=2.0,
    status="fine",
    rhat=1.01,
    benchmark=(1.0, 1.02, 1.04, 1.06),
    score="log",
    more_scores=(),
    **info,
) -> CVResult:
    """A result by hand. ``test`` lists each fold's test rows; ``row_elpd`` makes it by row."""
    k = len(elpd)
    test = [[i] for i in range(k)] if test is None else test
    start = np.concatenate([[0], np.cumsum([len(rows) for rows in test])])
    flat = np.concatenate(test).astype(int)
    names = np.arange(k) if names is None else np.asarray(names)

    def full(value, dtype=float):
        return ("fold", np.array(np.broadcast_to(value, k), dtype=dtype))

    table = xr.Dataset(
        {
            column(score): full(elpd),
            "mcse": full(mcse),
            "optimism": full(optimism),
            "weight": full(1.0 if weight is None else weight),
            "n_test": ("fold", np.diff(start)),
            "spread": full(spread),
            "noise": full(noise),
            "acceptance": full(0.84),
            "divergences": full(0, int),
            "estimator": full("bridge", object),
            "status": full(status, object),
        },
        coords={"fold": names},
    )
    rows = None
    if row_elpd is not None:
        weights = np.ones(len(flat)) if row_weight is None else np.asarray(row_weight)
        rows = xr.Dataset(
            {
                column(score): ("test_row", np.asarray(row_elpd)),
                "mcse": ("test_row", np.repeat(table["mcse"].values, np.diff(start))),
                "optimism": ("test_row", 0.1 * np.ones(len(flat))),
                "weight": ("test_row", weights),
            },
            coords={"row": ("test_row", flat)},
        )
    used = np.isfinite(table[column(score)].values)
    variance = float(((table["weight"] * table["mcse"]).values[used] ** 2).sum())
    settings = {"model": "", "scheme": "by hand", "n_obs": 50, "chains": 4, "draws": 100, **info}
    count = settings["chains"] * settings["draws"]
    scores = {
        name: finish_score(name, table, rows, count, variance, np.zeros(0), 0.0)
        for name in (score, *more_scores)
    }
    by_fold = np.broadcast_to(np.asarray(rhat, float), k)
    mixing = Mixing(by_fold, np.asarray(benchmark, float), draws=settings["draws"])
    found = {"start": start, "rows": flat, "index": np.arange(k) if index is None else index}
    if y is not None:
        found["y"] = np.asarray(y)
    return CVResult(scores, mixing, found, settings)


def by_row(row_elpd, **arguments):
    """Three folds that test rows 0 and 1, 1 and 2, and 3; row 1 twice, with weight one half."""
    test, weight = [[0, 1], [1, 2], [3]], [1.0, 0.5, 0.5, 1.0, 1.0]
    elpd = np.add.reduceat(np.asarray(row_elpd), [0, 2, 4])
    return make(
        elpd,
        test=test,
        weight=[0.75, 0.75, 1.0],
        row_elpd=row_elpd,
        row_weight=weight,
        score="log_pointwise",
        **arguments,
    )


def flat(text):
    return " ".join(str(text).split())


def widest(text):
    return max(len(line) for line in str(text).splitlines())
