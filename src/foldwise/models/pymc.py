"""PyMC models, through PyMC's own conversion to JAX; and Bambi's, which are PyMC models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from foldwise.models.common import choose_observed, need
from foldwise.models.model import Model
from foldwise.models.pymc_graphs import Values, jaxified, maps, shared_values
from foldwise.models.pymc_rows import Likelihood, observed_variables, of_named, of_one, of_several

Rows = str | Mapping[str, Any]


def from_pymc(
    model: Any, observed: str | None = None, *, rows: Rows | None = None, row_axis: int = 0
) -> Model:
    """A ``Model`` of a PyMC model with continuous free variables.

    Rows are an axis of the observed variable, the first one unless ``row_axis`` says another;
    further axes that are not part of a multivariate density are summed. Other observed variables
    and potentials stay in the training density of every fold. The parameters of ``constrain`` and
    ``unconstrain`` are the model's free variables by name.

    Where one ``MvNormal`` (``gp.Marginal``, ``CAR``), ``GaussianRandomWalk`` or ``AR`` is the
    density of all rows, it becomes a ``joint_log_likelihood``: what a fold leaves out is integrated
    out of it. Where the observed variable has missing values, which PyMC imputes, rows are those
    that are observed, in their order.

    The ``Model`` is of the data as they are now. If they are changed afterwards, by ``pm.set_data``
    say, ``fit`` and ``cross_validate`` say so and stop: call ``from_pymc`` again.

    Parameters
    ----------
    model
        The PyMC model.
    observed
        Name of the observed variable to cross-validate; may be left out when there is one.
    rows
        What the rows are, where they are not those of one observed variable. The name of a
        ``Potential`` whose values are log densities by row; or of a ``Deterministic`` such, in
        place of the potential or observed variable that has their sum. Or a dict of observed
        variables and potentials: with None for each, their rows are put end to end; with the row
        number of each of its entries, 0 to n - 1, entries of the same row belong together and their
        log densities add.
    row_axis
        Axis of the observed variable along which its rows are.
    """
    if not isinstance(model, need("pymc").Model):
        raise TypeError(f"model must be a pymc.Model, got {type(model).__name__}")
    _check_free(model)
    order = [v.name for v in model.value_vars]

    def values(position: Mapping[str, Array]) -> list[Array]:
        return [position[name] for name in order]

    likelihood = _likelihood(model, values, observed, rows, row_axis)
    prior_graph = _log_prior(model, likelihood.variables)
    prior = jaxified(model, list(model.value_vars), [prior_graph])
    shared = shared_values([prior_graph, *likelihood.graphs])

    def log_prior(position: Mapping[str, Array]) -> Float[Array, ""]:
        _check_unchanged(shared)
        return prior(*values(position))[0]

    start = model.initial_point()
    constrain, unconstrain = maps(model, order)
    return Model(
        log_prior,
        init={name: np.asarray(start[name], float) for name in order},
        n_obs=likelihood.n_obs,
        constrain=constrain,
        unconstrain=unconstrain,
        name=model.name or None,
        **likelihood.functions,
    )


def from_bambi(
    model: Any, observed: str | None = None, *, rows: Rows | None = None, row_axis: int = 0
) -> Model:
    """A ``Model`` of a Bambi model, built if it has not been.

    Parameters
    ----------
    model
        The Bambi model.
    observed, rows, row_axis
        As ``from_pymc`` has them.
    """
    if not isinstance(model, need("bambi").Model):
        raise TypeError(f"model must be a bambi.Model, got {type(model).__name__}")
    if not model.built:
        model.build()
    if getattr(model.response_component.term, "is_weighted", False):
        raise ValueError(
            "rows must not be weighted, but the response is weighted(), and a log density times a "
            "weight is not a predictive density; leave the weights out, or repeat rows that stand "
            "for several"
        )
    return from_pymc(model.backend.model, observed, rows=rows, row_axis=row_axis)


def _likelihood(
    model: Any, values: Values, observed: str | None, rows: Rows | None, row_axis: int
) -> Likelihood:
    if rows is None:
        chosen = _choose(model, observed)
        return of_one(model, values, chosen, row_axis)
    if observed is not None:
        raise ValueError(
            "the rows are those of one observed variable, observed=..., or what rows=... says; "
            f"got both, {observed!r} and {rows!r}: leave one out"
        )
    if isinstance(rows, str):
        return of_named(model, values, rows)
    if isinstance(rows, Mapping):
        return of_several(model, values, rows, row_axis)
    raise TypeError(
        "rows must be the name of a potential or deterministic variable, or a dict by the names of "
        f"observed variables; got {type(rows).__name__}"
    )


def _log_prior(model: Any, variables: list[Any]) -> Any:
    """Everything but the rows: priors, Jacobians, potentials, other observations."""
    rest = [v for v in (*model.basic_RVs, *model.potentials) if all(v is not u for u in variables)]
    return model.logp(vars=rest, jacobian=True, sum=True)


# ---------------------------------------------------------------- checks


def _choose(model: Any, observed: str | None) -> str:
    names = observed_variables(model)
    if not names and model.potentials:
        raise ValueError(
            "the model must have an observed variable, or rows must name what has the log "
            f'densities of its rows, rows="{model.potentials[0].name}" for example; it has '
            "potentials only"
        )
    if observed is not None and observed.removesuffix("_observed") in names:
        observed = observed.removesuffix("_observed")
    return choose_observed(list(names), observed, "variable")


def _check_unchanged(shared: list[tuple[Any, np.ndarray]]) -> None:
    """Raise if variables no longer have the values that the model was made with."""
    for variable, then in shared:
        now = variable.get_value(borrow=True)
        if not np.array_equal(now, then, equal_nan=then.dtype.kind == "f"):
            raise ValueError(
                f"the data {variable.name!r} must stay what they were when from_pymc was called, "
                "but they have been changed since (pm.set_data); call from_pymc again"
            )


def _check_free(model: Any) -> None:
    for rv in model.free_RVs:
        if rv.type.dtype not in ("float32", "float64"):
            raise ValueError(
                f"free variables must be continuous, but {rv.name!r} is discrete; "
                + (
                    "drop the rows whose values are missing"
                    if rv.name.endswith("_unobserved")
                    else "sum it out of the model, for example with pm.Mixture or marginalisation"
                )
            )
    if not model.free_RVs:
        raise ValueError("the model must have free variables, but it has none")
