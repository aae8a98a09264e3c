"""What the rows of a PyMC model are: of observed variables, of a potential, one or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from foldwise.models.common import row_numbers, sum_by_row
from foldwise.models.pymc_graphs import Values, has_atoms, jaxified, log_density, simulator
from foldwise.models.pymc_joint import joint_rows
from foldwise.support.runtime import precision_context


class Likelihood(NamedTuple):
    """The rows of a model, and which of its variables they are of."""

    n_obs: int
    functions: dict[str, Any]  # arguments of Model
    variables: list[Any]
    graphs: list[Any]


class Entries(NamedTuple):
    """One variable: log densities of its entries at values of the model and observed ones."""

    variable: Any
    size: int
    density: Callable[[list[Array], Any], Float[Array, " entry"]]
    y: np.ndarray | None
    graphs: list[Any]
    axis: int = 0  # of the variable, along which its entries are


def observed_variables(model: Any) -> dict[str, Any]:
    """Observed variables by the names users gave them: those with missing values have another."""
    unobserved = {rv.name.removesuffix("_unobserved") for rv in model.free_RVs}
    found = {}
    for rv in model.observed_RVs:
        name = rv.name.removesuffix("_observed")
        found[name if name != rv.name and name in unobserved else rv.name] = rv
    return found


def of_one(model: Any, values: Values, name: str, axis: int) -> Likelihood:
    """Rows of one observed variable, along an axis of it; or jointly, where rows are dependent."""
    rv = observed_variables(model)[name]
    data = model.rvs_to_values[rv]
    y = np.asarray(data.eval())
    joint = joint_rows(model, rv, y, values)
    if joint is None:
        numbers = _imputed_numbers(model, name, rv, axis)
        return of_several(model, values, {name: numbers}, axis if numbers is None else 0)
    functions = {
        "log_likelihood": None,
        "y": y,
        "joint_log_likelihood": joint.log_likelihood,
        "joint_simulate": joint.simulate,
    }
    return Likelihood(len(y), functions, [rv], [data, *joint.graphs])


def of_several(model: Any, values: Values, rows: Mapping[str, Any], axis: int) -> Likelihood:
    """Rows of observed variables and potentials, end to end or joined by row numbers."""
    observed = observed_variables(model)
    potentials = {v.name: v for v in model.potentials}
    known = {**observed, **potentials}
    for name in rows:
        if name not in known:
            raise ValueError(
                "rows must name observed variables or potentials of the model, "
                f"{', '.join(known)}; got {name!r}"
            )
    parts = {
        name: _of_observed(model, observed[name], name, axis)
        if name in observed
        else _of_potential(model, potentials[name])
        for name in rows
    }
    n_obs, numbers = row_numbers(rows, {name: part.size for name, part in parts.items()})
    graphs = [graph for part in parts.values() for graph in part.graphs]
    functions = _functions(model, values, parts, numbers, n_obs)
    return Likelihood(n_obs, functions, [part.variable for part in parts.values()], graphs)


def of_named(model: Any, values: Values, name: str) -> Likelihood:
    """Rows whose log densities are a potential of the model, or a deterministic variable."""
    if name in {v.name for v in model.potentials}:
        return of_several(model, values, {name: None}, 0)
    if name not in {v.name for v in model.deterministics}:
        known = [v.name for v in (*model.potentials, *model.deterministics)]
        raise ValueError(
            "rows must name a potential or deterministic variable whose values are log densities "
            f"by row, one of {', '.join(known) or '(there are none)'}; got {name!r} (observed "
            f'variables are chosen by observed="{name}" or rows={{"{name}": None}})'
        )
    part = _of_potential(model, model[name])
    stands_for = _term_with_this_sum(model, name, part)
    return Likelihood(
        part.size,
        {"log_likelihood": lambda position: part.density(values(position), None)},
        [stands_for],
        part.graphs,
    )


# ---------------------------------------------------------------- one variable


def _of_observed(model: Any, rv: Any, name: str, axis: int) -> Entries:
    data = model.rvs_to_values[rv]
    y, value = np.asarray(data.eval()), data.type()
    if not -y.ndim <= axis < y.ndim:
        raise ValueError(
            f"the observed variable {name!r} must have an axis row_axis={axis}, but its shape is "
            f"{y.shape}"
        )
    axis %= y.ndim
    if type(rv.owner.op).__name__ == "PartialObservedRV":
        raise ValueError(
            f"the observed variable {name!r} must have no missing values unless PyMC can impute "
            "them one by one, but its distribution is not that simple; drop those rows, or, where "
            "rows depend on each other, so that dropping some makes another model, give the joint "
            "log density of any of them, Model(..., joint_log_likelihood=f)"
        )
    if type(rv.owner.op).__name__ == "MinibatchRandomVariable":
        raise ValueError(
            f"the rows of the observed variable {name!r} must not be weighted, but it has a "
            "total_size, and a log density times a weight is not a predictive density; leave "
            "total_size out"
        )
    graph = log_density(model, rv, value)
    function = jaxified(model, [*model.value_vars, value], [graph])
    _check_shape(model, name, function, y, axis)

    def density(values: list[Array], y: Any) -> Float[Array, " entry"]:
        found = function(*values, y if axis == 0 else jnp.moveaxis(jnp.asarray(y), 0, axis))[0]
        found = found if axis == 0 else jnp.moveaxis(found, axis, 0)
        return found.reshape(len(found), -1).sum(axis=1)

    return Entries(rv, y.shape[axis], density, np.moveaxis(y, axis, 0), [graph, data], axis)


def _of_potential(model: Any, variable: Any) -> Entries:
    (graph,) = model.replace_rvs_by_values([variable])
    function = jaxified(model, list(model.value_vars), [graph])
    shape = jax.eval_shape(function, *_start(model))[0].shape
    if len(shape) != 1:
        way_out = (
            "leave out its sum: a potential of many terms counts as their sum (what cannot be "
            "taken apart into rows, as that of gp.MarginalApprox, needs the joint log density of "
            "any of them, Model(..., joint_log_likelihood=f))"
            if shape == ()
            else "sum over the axes that belong to a row"
        )
        raise ValueError(
            f"{variable.name!r} must be a vector, the log density of each row, to be used for "
            f"rows, but its shape is {shape}; {way_out}"
        )
    return Entries(variable, shape[0], lambda values, _: function(*values)[0], None, [graph])


def _start(model: Any) -> list[np.ndarray]:
    start = model.initial_point()
    return [np.asarray(start[v.name]) for v in model.value_vars]


def _check_shape(
    model: Any, name: str, function: Callable[..., Any], y: np.ndarray, axis: int
) -> None:
    shape = jax.eval_shape(function, *_start(model), y)[0].shape
    if len(shape) <= axis or shape[axis] != y.shape[axis]:
        raise ValueError(
            f"the observed variable {name!r} must have one independent row per observation, but "
            f"its log density has shape {shape} for data of shape {y.shape} (row_axis={axis}); "
            "write the likelihood row by row, given free variables, or the joint log density of "
            "any of the rows as Model(..., joint_log_likelihood=f); a normal vector of all rows is "
            "taken as it is where rows= is left out"
        )


def _imputed_numbers(model: Any, name: str, rv: Any, axis: int) -> np.ndarray | None:
    """Rows of the observed entries of a matrix with missing ones; rows without any are left out."""
    if rv.name == name:
        return None
    mask = _missing(model, name, rv)
    if mask.ndim == 1 or rv.type.ndim > 1:
        return None
    rows = np.nonzero(~mask)[axis]
    numbers: np.ndarray = np.unique(rows, return_inverse=True)[1]
    return numbers


def _missing(model: Any, name: str, rv: Any) -> np.ndarray:
    """Which entries of the variable with missing values are missing."""
    import pytensor.tensor as pt
    from pytensor.graph.replace import graph_replace

    free = next(v for v in model.free_RVs if v.name == f"{name}_unobserved")
    shape = np.shape(model.initial_point()[model.rvs_to_values[free].name])
    marks = {
        rv: pt.zeros_like(model.rvs_to_values[rv]),
        free: pt.constant(np.full(shape, np.nan)),
    }
    (marked,) = graph_replace([model[name]], marks, strict=False)
    return np.isnan(np.asarray(marked.eval(mode="FAST_COMPILE")))


# ---------------------------------------------------------------- rows of variables


def _functions(
    model: Any,
    values: Values,
    parts: Mapping[str, Entries],
    numbers: Mapping[str, np.ndarray],
    n_obs: int,
) -> dict[str, Any]:
    """The arguments of ``Model`` for rows made of the entries of variables."""
    order = np.concatenate(list(numbers.values()))
    in_order = np.array_equal(order, np.arange(n_obs))
    y = _joined_values(parts, order, n_obs)

    def density(position: Mapping[str, Array], given: Any) -> Float[Array, " row"]:
        at = values(position)
        found = {
            name: part.density(
                at, given[numbers[name]] if len(parts) > 1 or not in_order else given
            )
            for name, part in parts.items()
        }
        return sum_by_row(found, numbers, n_obs)

    if y is None:
        own = {name: part.y for name, part in parts.items()}

        def log_likelihood(position: Mapping[str, Array]) -> Float[Array, " row"]:
            at = values(position)
            found = {name: part.density(at, own[name]) for name, part in parts.items()}
            return sum_by_row(found, numbers, n_obs)

        return {"log_likelihood": log_likelihood}
    found = {"y": y, "simulate": _simulate(model, values, parts, order)}
    if any(has_atoms(part.variable) for part in parts.values()):
        return {**found, "log_likelihood": lambda position: density(position, y)}
    return {**found, "log_likelihood": None, "row_log_density": density}


def _joined_values(
    parts: Mapping[str, Entries], order: np.ndarray, n_obs: int
) -> np.ndarray | None:
    """Observed values by row, where each row is one entry of variables of one kind."""
    each = [part.y for part in parts.values() if part.y is not None]
    if len(each) < len(parts) or len(order) > n_obs:
        return None
    if len({(y.dtype.kind, y.shape[1:]) for y in each}) > 1:
        return None
    return np.concatenate(each)[np.argsort(order)]


def _simulate(
    model: Any, values: Values, parts: Mapping[str, Entries], order: np.ndarray
) -> Callable[..., Array] | None:
    """One replicate of each row, where JAX can draw from all the variables."""
    axes = [part.axis for part in parts.values()]
    draws = []
    for part in parts.values():
        draw = simulator(model, part.variable, values)
        if draw is None:
            return None
        draws.append(draw)
    if len(draws) == 1 and axes == [0] and np.array_equal(order, np.arange(len(order))):
        return draws[0]
    place = np.argsort(order)

    def simulate(key: Array, position: Mapping[str, Array]) -> Array:
        keys = jax.random.split(key, len(draws))
        found = [draw(k, position) for draw, k in zip(draws, keys, strict=True)]
        found = [jnp.moveaxis(draw, axis, 0) for draw, axis in zip(found, axes, strict=True)]
        return jnp.concatenate(found)[place]

    return simulate


def _term_with_this_sum(model: Any, name: str, part: Entries) -> Any:
    """The one term of the model's log density that is the sum of a deterministic variable's rows.

    Rows take its place. Without one, the rows would not be in the posterior of the full data, or
    be in it twice.
    """
    terms = [*model.observed_RVs, *model.potentials]
    sums = [model.logp(vars=[term], sum=True) for term in terms]
    function = jaxified(model, list(model.value_vars), [part.graphs[0].sum(), *sums])
    rng = np.random.default_rng(0)
    with precision_context("float64"):
        points = [[v + 0.1 * rng.normal(size=v.shape) for v in _start(model)] for _ in range(3)]
        found = np.array([[float(value) for value in function(*point)] for point in points])
    same = [
        term
        for term, other in zip(terms, found.T[1:], strict=True)
        if np.allclose(found[:, 0], other, rtol=1e-8, atol=1e-8)
    ]
    if len(same) != 1:
        raise ValueError(
            f"the sum of {name!r} must be one of the terms of the model's log density, which its "
            f"rows then stand for, but it is {len(same)} of them ("
            f"{', '.join(term.name for term in terms) or 'there are none'}); make it a "
            f'pm.Potential("{name}", ...) in place of what it repeats'
        )
    return same[0]
