"""Results handed to ArviZ: scores for its comparison, draws for its plots."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import xarray as xr

from foldwise.models.model import Model
from foldwise.results.result import CVResult
from foldwise.results.totals import units
from foldwise.scores.diagnostics import PARETO_LIMIT
from foldwise.scores.marginal_model import base_of
from foldwise.scores.rules import LOG_SCORES
from foldwise.support.runtime import precision_context


def to_arviz(result: CVResult) -> Any:
    """The result's log score as arviz-stats' ELPDData, for ``arviz_stats.compare``.

    Its units are folds for a joint score, test rows for a score by row; a row's Pareto k is the
    largest of the folds that test it. Folds whose score is not a number are left out. ``p`` is
    given for scores by row only: a joint score's optimism is no number of parameters. ``se`` is
    ours, over folds where these leave out groups; ArviZ's own of a difference takes rows as
    independent.
    """
    import arviz_stats.utils

    score = next((s for name, s in result.scores.items() if name in LOG_SCORES), None)
    if score is None:
        have = ", ".join(result.scores)
        raise ValueError(
            f"arviz takes log scores, but this result has {have}; run cross_validate with "
            '"log" or "log_pointwise" among its scores'
        )
    table = score.folds
    used = np.isfinite(table["elpd"].values)
    tail = table["pareto_k"].values[used]
    names = {"fold": table["fold"].values[used]}
    if score.rows is not None:
        keep = np.repeat(used, table["n_test"].values)
        rows, inverse = np.unique(score.rows["row"].values[keep], return_inverse=True)
        by_entry = np.repeat(tail, table["n_test"].values[used])
        tail = np.full(len(rows), np.nan)
        np.fmax.at(tail, inverse, by_entry)
        names = {"row": rows}
    values = units(table, score.rows, used)
    (dim,) = names
    by_row = score.rows is not None or bool((table["n_test"].values == 1).all())
    content = {
        "elpd": score.total,
        "se": score.se,
        "p": score.optimism if by_row else np.nan,
        "n_samples": result.info["chains"] * result.info["draws"],
        "n_data_points": len(values),
        "scale": "log",
        "warning": bool((table["status"].values != "fine").any()),
        "good_k": PARETO_LIMIT,
        "elpd_i": xr.DataArray(values, names, (dim,), name="elpd_i"),
        "pareto_k": xr.DataArray(tail, names, (dim,), name="pareto_k"),
        "n_folds": int(used.sum()),
    }
    if hasattr(arviz_stats.utils, "ELPDDataLOOKFold"):
        return arviz_stats.utils.ELPDDataLOOKFold(**content)
    return arviz_stats.utils.ELPDData(kind="loo_kfold", **content)


def to_datatree(result: CVResult, model: Model | None) -> xr.DataTree:
    """The draws that a run was asked to keep, with named dimensions.

    Group ``posterior`` has every parameter by fold, chain and draw; ``posterior_predictive`` the
    predictive draws of the held-out rows, ``y`` by chain, draw and test_row, each from the fold
    that tests it; ``observed_data`` their observed values.
    """
    if result.run is None:
        if "state" not in result.info or model is None:
            raise ValueError(
                "the folds' draws of a result loaded from a file need its model again, "
                "result.to_datatree(model=model); a merged result has none"
            )
        from foldwise.results.files import restore_run

        result.run = restore_run(result, model)
    run, evidence = result.run, result.run.evidence
    groups: dict[str, xr.Dataset] = {}
    if evidence.position is not None:
        groups["posterior"] = _posterior(base_of(run.model), evidence.position, run.folds.names)
    rows = {
        "row": ("test_row", run.folds.test_rows),
        "fold": ("test_row", np.repeat(run.folds.names, run.folds.n_test)),
    }
    outcomes = evidence.outcomes
    if outcomes is not None and outcomes.replicate is not None:
        draws = np.moveaxis(outcomes.replicate, 0, 2)
        dims = ("chain", "draw", "test_row", "number")[: draws.ndim]
        groups["posterior_predictive"] = xr.Dataset({"y": (dims, draws)}, rows)
        groups["observed_data"] = xr.Dataset({"y": (dims[2:], outcomes.observed)}, rows)
    if not groups:
        raise ValueError(
            "this run kept no draws of its folds; run "
            'cross_validate(..., keep=("position", "predictive"))'
        )
    return xr.DataTree.from_dict(groups)


def _posterior(model: Model, position: np.ndarray, names: np.ndarray) -> xr.Dataset:
    """Parameters by name; where the model has no names for them, the position itself."""

    def parameters(flat: Any) -> dict[str, Any]:
        found = model.unflatten(flat)
        found = found if model.constrain is None else model.constrain(found)
        return found if isinstance(found, dict) else {"position": flat}

    with precision_context("float64"):
        found = jax.jit(jax.vmap(jax.vmap(jax.vmap(parameters))))(position)
    columns = {}
    for name, values in found.items():
        own = [f"{name}_dim_{k}" for k in range(values.ndim - 3)]
        columns[str(name)] = (("fold", "chain", "draw", *own), np.asarray(values))
    return xr.Dataset(columns, coords={"fold": names})
