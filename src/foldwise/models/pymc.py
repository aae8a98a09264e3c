"""PyMC models, through PyMC's own conversion to JAX; and Bambi's, which are PyMC models."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from foldwise.models.common import choose_observed, need
from foldwise.models.model import Model


def from_pymc(model: Any, observed: str | None = None) -> Model:
    """A ``Model`` of a PyMC model with continuous free variables.

    Rows are the first axis of the observed variable; further axes that are not part of a
    multivariate density are summed. Other observed variables and potentials stay in the training
    density of every fold. The parameters of ``constrain`` and ``unconstrain`` are the model's free
    variables by name.

    The ``Model`` is of the data as they are now. If they are changed afterwards, by ``pm.set_data``
    say, ``fit`` and ``cross_validate`` say so and stop: call ``from_pymc`` again.

    Parameters
    ----------
    model
        The PyMC model.
    observed
        Name of the observed variable to cross-validate; may be left out when there is one.
    """
    if not isinstance(model, need("pymc").Model):
        raise TypeError(f"model must be a pymc.Model, got {type(model).__name__}")
    _check_free(model)
    names = [rv.name for rv in model.observed_RVs]
    chosen = choose_observed(names, observed, "variable")
    _check_missing(model, chosen)
    rv = model.observed_RVs[names.index(chosen)]
    data = model.rvs_to_values[rv]
    y = np.asarray(data.eval())
    values, value = list(model.value_vars), data.type()
    prior_graph, rows_graph = _log_prior(model, rv), _row_log_density(model, rv, value)
    prior = _jaxified(model, values, [prior_graph])
    rows = _jaxified(model, [*values, value], [rows_graph])
    shared = _shared_values([prior_graph, rows_graph, data])
    _check_rows(chosen, rows, model, y)
    order = [v.name for v in values]

    def ordered(position: Mapping[str, Array]) -> list[Array]:
        return [position[name] for name in order]

    def log_prior(position: Mapping[str, Array]) -> Float[Array, ""]:
        _check_unchanged(shared)
        return prior(*ordered(position))[0]

    def row_log_density(position: Mapping[str, Array], y: Any) -> Float[Array, " row"]:
        by_row = rows(*ordered(position), y)[0]
        return by_row.reshape(len(by_row), -1).sum(axis=1)

    start = model.initial_point()
    constrain, unconstrain = _maps(model, order)
    return Model(
        log_prior,
        None,
        {name: np.asarray(start[name], float) for name in order},
        n_obs=len(y),
        simulate=_simulate(model, rv, values, ordered),
        row_log_density=row_log_density,
        y=y,
        constrain=constrain,
        unconstrain=unconstrain,
        name=model.name or None,
    )


def from_bambi(model: Any) -> Model:
    """A ``Model`` of a Bambi model, built if it has not been.

    Parameters
    ----------
    model
        The Bambi model.
    """
    if not isinstance(model, need("bambi").Model):
        raise TypeError(f"model must be a bambi.Model, got {type(model).__name__}")
    if not model.built:
        model.build()
    return from_pymc(model.backend.model)


# ---------------------------------------------------------------- graphs as JAX functions


def _jaxified(model: Any, inputs: list[Any], outputs: list[Any]) -> Callable[..., Any]:
    try:
        return _pymc_jax().get_jaxified_graph(inputs=inputs, outputs=outputs)
    except NotImplementedError as error:
        raise ValueError(
            f"the PyMC model {model.name!r} must be one that PyMC can convert to JAX, but a part "
            f"of it has no JAX version: {str(error).splitlines()[0]}; replace that operation"
        ) from error


def _pymc_jax() -> Any:
    """The module pymc.sampling.jax, without the 100 CPU devices that importing it asks XLA for."""
    flags = os.environ.get("XLA_FLAGS")
    module = import_module("pymc.sampling.jax")
    if flags is None:
        os.environ.pop("XLA_FLAGS", None)
    else:
        os.environ["XLA_FLAGS"] = flags
    return module


def _log_prior(model: Any, rv: Any) -> Any:
    """Everything but the chosen variable: priors, Jacobians, potentials, other observations."""
    rest = [v for v in (*model.basic_RVs, *model.potentials) if v is not rv]
    return model.logp(vars=rest, jacobian=True, sum=True)


def _row_log_density(model: Any, rv: Any, value: Any) -> Any:
    import pymc

    (density,) = model.replace_rvs_by_values([pymc.logp(rv, value)])
    return density


def _simulate(
    model: Any, rv: Any, values: list[Any], ordered: Callable[[Mapping[str, Array]], list[Array]]
) -> Callable[[Array, Mapping[str, Array]], Array] | None:
    """One replicate of the chosen variable; None where JAX cannot draw from its distribution."""
    from pytensor.tensor.random.type import RandomGeneratorType, random_generator_type

    node, rng = rv.owner, random_generator_type("rng")
    random = [isinstance(v.type, RandomGeneratorType) for v in node.inputs]
    placed = iter(
        model.replace_rvs_by_values([v for v, r in zip(node.inputs, random, strict=True) if not r])
    )
    inputs = [rng if r else next(placed) for r in random]
    output = node.outputs.index(rv)
    try:
        draw = _jaxified(model, [rng, *values], [node.op.make_node(*inputs).outputs[output]])
        jax.eval_shape(
            lambda key: draw({"jax_state": key}, *(model.initial_point()[v.name] for v in values)),
            jax.random.key(0),
        )
    except (ValueError, TypeError, KeyError, NotImplementedError):
        return None

    def simulate(key: Array, position: Mapping[str, Array]) -> Array:
        return draw({"jax_state": key}, *ordered(position))[0]

    return simulate


def _maps(model: Any, order: list[str]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """From unconstrained values to the free variables, and back."""
    from pytensor.graph.replace import graph_replace

    free = list(model.free_RVs)
    names = [rv.name for rv in free]
    to_variables = _jaxified(
        model, list(model.value_vars), model.replace_rvs_by_values([rv.copy() for rv in free])
    )
    given = [rv.type(rv.name) for rv in free]
    placed = []
    for rv, value in zip(free, given, strict=True):
        transform = model.rvs_to_transforms[rv]
        placed.append(value if transform is None else transform.forward(value, *rv.owner.inputs))
    placed = graph_replace(placed, dict(zip(free, given, strict=True)), strict=False)
    to_values = _jaxified(model, given, placed)
    by_variable = [model.rvs_to_values[rv].name for rv in free]

    def constrain(position: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(names, to_variables(*(position[n] for n in order)), strict=True))

    def unconstrain(parameters: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(by_variable, to_values(*(parameters[n] for n in names)), strict=True))

    return constrain, unconstrain


def _shared_values(graphs: list[Any]) -> list[tuple[Any, np.ndarray]]:
    """Variables of the graphs whose values may be set, and these values, which JAX will use."""
    module = _pymc_jax()
    return [
        (variable, np.array(variable.get_value(borrow=True)))
        for variable in module.graph_inputs(graphs)
        if isinstance(variable, module.SharedVariable) and hasattr(variable.type, "dtype")
    ]


# ---------------------------------------------------------------- checks


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
                f"free variables must be continuous, but {rv.name!r} is discrete; sum it out of "
                "the model, for example with pm.Mixture or marginalisation"
            )
    if not model.free_RVs:
        raise ValueError("the model must have free variables, but it has none")


def _check_missing(model: Any, chosen: str) -> None:
    free = {rv.name for rv in model.free_RVs}
    base = chosen.removesuffix("_observed")
    if chosen.endswith("_observed") and f"{base}_unobserved" in free:
        raise ValueError(
            f"the observed variable {base!r} must have no missing values, but some of its rows are "
            "missing and PyMC imputes them; drop those rows"
        )


def _check_rows(chosen: str, rows: Callable[..., Any], model: Any, y: np.ndarray) -> None:
    start = model.initial_point()
    shape = jax.eval_shape(rows, *(start[v.name] for v in model.value_vars), y)[0].shape
    if not shape or shape[0] != len(y):
        raise ValueError(
            f"the observed variable {chosen!r} must have one independent row per observation, but "
            f"its log density has shape {shape} for data of shape {y.shape}; write the likelihood "
            "row by row, given free variables"
        )
