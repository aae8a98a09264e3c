"""Graphs of PyMC models as JAX functions: densities, replicates, and maps of parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from foldwise.models.pymc_special import truncated_normal, with_safe_functions

Values = Callable[[Mapping[str, Array]], list[Array]]


def jaxified(model: Any, inputs: list[Any], outputs: list[Any]) -> Callable[..., Any]:
    """The outputs as a JAX function of the inputs."""
    outputs = [with_safe_functions(_without_shapes_of_draws(output)) for output in outputs]
    try:
        return pymc_jax().get_jaxified_graph(inputs=inputs, outputs=outputs)
    except NotImplementedError as error:
        raise ValueError(
            f"the PyMC model {model.name!r} must be one that PyMC can convert to JAX, but a part "
            f"of it has no JAX version: {str(error).splitlines()[0]}; replace that operation"
        ) from error


def pymc_jax() -> Any:
    """The module pymc.sampling.jax, without the 100 CPU devices that importing it asks XLA for."""
    flags = os.environ.get("XLA_FLAGS")
    module = import_module("pymc.sampling.jax")
    if flags is None:
        os.environ.pop("XLA_FLAGS", None)
    else:
        os.environ["XLA_FLAGS"] = flags
    return module


def given_values(model: Any, rv: Any) -> Any:
    """The variable with its parents at their values, its components (of a mixture, say) random.

    Densities and replicates are derived from it: PyMC copies components when it derives a density,
    after which values can no longer take the place of parents.
    """
    node = rv.owner
    inputs = model.replace_rvs_by_values(list(node.inputs))
    return node.op.make_node(*inputs).outputs[node.outputs.index(rv)]


def log_density(model: Any, rv: Any, value: Any) -> Any:
    """Graph of the log density of a variable at ``value``, given the values of its parents."""
    import pymc

    given = given_values(model, rv)
    if type(given.owner.op).__name__ == "TruncatedNormalRV":
        return truncated_normal(given.owner, value)
    try:
        found = pymc.logp(given, value, warn_rvs=False)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"the observed variable {rv.name!r} must have a log density, but PyMC derives none for "
            f"it ({str(error).splitlines()[0]}); write the log densities of its rows as a "
            'pm.Potential and name it, rows="name"'
        ) from error
    return _check_not_random(rv, found)


def simulator(model: Any, rv: Any, values: Values) -> Callable[..., Array] | None:
    """One replicate of the variable; None where JAX cannot draw from its distribution."""
    from pytensor.graph.replace import graph_replace
    from pytensor.tensor.random.type import random_generator_type

    given = given_values(model, rv)
    generators = _generators(given)
    if not generators:
        return None
    fresh = [random_generator_type(f"rng_{k}") for k in range(len(generators))]
    (replicate,) = graph_replace([given], dict(zip(generators, fresh, strict=True)), strict=False)
    start = [np.asarray(model.initial_point()[v.name], float) for v in model.value_vars]

    def states(key: Array) -> list[dict[str, Array]]:
        keys = [key] if len(fresh) == 1 else list(jax.random.split(key, len(fresh)))
        return [{"jax_state": k} for k in keys]

    try:
        draw = _jaxified_draws([*fresh, *model.value_vars], replicate)
        # as arguments: JAX's arrays can do what NumPy's cannot
        jax.eval_shape(lambda key, *q: draw(*states(key), *q), jax.random.key(0), *start)
    except (ValueError, TypeError, KeyError, NotImplementedError):
        return None
    return lambda key, position: draw(*states(key), *values(position))[0]


def _jaxified_draws(inputs: list[Any], output: Any) -> Callable[..., Any]:
    """A random variable as a JAX function; NotImplementedError where JAX cannot draw it."""
    import pytensor.tensor as pt
    from pytensor.graph.fg import FunctionGraph
    from pytensor.graph.replace import clone_replace

    module, own = pymc_jax(), _own_draws()
    data = {variable: pt.constant(value) for variable, value in shared_values([output])}
    graph = FunctionGraph(inputs, clone_replace([output], replace=data), clone=True)
    module.mode.JAX.optimizer.rewrite(graph)
    for node in list(graph.apply_nodes):
        if type(node.op) in own:
            right = own[type(node.op)](dtype=node.op.dtype, inplace=node.op.inplace)
            outputs = right.make_node(*node.inputs).outputs
            graph.replace_all(list(zip(node.outputs, outputs, strict=True)))
        inside = getattr(getattr(node.op, "fgraph", None), "apply_nodes", ())
        if any(type(inner.op) in own for inner in inside):
            raise NotImplementedError("draws inside of another operation")
    return module.jax_funcify(graph)


@cache
def _own_draws() -> dict[Any, Any]:
    """Random operations with JAX versions of our own, by PyTensor's, which are wrong or missing.

    PyTensor 2.38 draws categories by their odds in place of their probabilities.
    """
    from pymc.distributions.continuous import TruncatedNormalRV
    from pytensor.link.jax.dispatch.random import jax_sample_fn
    from pytensor.tensor.random.basic import CategoricalRV, WeibullRV

    def categorical(key: Array, size: Any, dtype: Any, p: Array) -> Array:
        return jax.random.categorical(key, jnp.log(p), shape=size)

    def truncated(key: Array, size: Any, dtype: Any, *parameters: Array) -> Array:
        mean, sd, *bounds = jnp.broadcast_arrays(*parameters)
        lower, upper = ((bound - mean) / sd for bound in bounds)
        return mean + sd * jax.random.truncated_normal(key, lower, upper, shape=size)

    def weibull(key: Array, size: Any, dtype: Any, shape: Array) -> Array:
        return jax.random.weibull_min(key, 1.0, shape, shape=size)

    found = {}
    samplers = {CategoricalRV: categorical, TruncatedNormalRV: truncated, WeibullRV: weibull}
    for kind, sampler in samplers.items():
        found[kind] = type(f"Right{kind.__name__}", (kind,), {})
        jax_sample_fn.register(found[kind])(lambda op, node, sampler=sampler: sampler)
    return found


def maps(model: Any, order: list[str]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """From unconstrained values to the free variables, and back."""
    from pytensor.graph.replace import graph_replace

    free = list(model.free_RVs)
    names = [rv.name for rv in free]
    to_variables = jaxified(
        model, list(model.value_vars), model.replace_rvs_by_values([rv.copy() for rv in free])
    )
    given = [rv.type(rv.name) for rv in free]
    placed = []
    for rv, value in zip(free, given, strict=True):
        transform = model.rvs_to_transforms[rv]
        placed.append(value if transform is None else transform.forward(value, *rv.owner.inputs))
    placed = graph_replace(placed, dict(zip(free, given, strict=True)), strict=False)
    to_values = jaxified(model, given, placed)
    by_variable = [model.rvs_to_values[rv].name for rv in free]

    def constrain(position: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(names, to_variables(*(position[n] for n in order)), strict=True))

    def unconstrain(parameters: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(by_variable, to_values(*(parameters[n] for n in names)), strict=True))

    return constrain, unconstrain


def has_atoms(variable: Any) -> bool:
    """Whether a continuous variable has single values of positive probability.

    Censored values and the zeros of hurdle families: there a density has no derivative by the
    observed value.
    """
    from pymc.distributions.distribution import SymbolicRandomVariable
    from pytensor.tensor.random.op import RandomVariable

    node = variable.owner
    if node is None or not variable.type.dtype.startswith("float"):
        return False
    op, kind = node.op, type(node.op).__name__
    if kind in ("CensoredRV", "DiracDeltaRV"):
        return True
    if isinstance(op, RandomVariable):
        return False
    if isinstance(op, SymbolicRandomVariable):
        random = (RandomVariable, SymbolicRandomVariable)
        parts = [v for v in node.inputs if v.owner and isinstance(v.owner.op, random)]
        custom = any(c.__name__ == "CustomSymbolicDistRV" for c in type(op).__mro__)
        own = op.inner_outputs if custom else []
        return any(has_atoms(v) for v in (*parts, *own) if hasattr(v.type, "dtype"))
    # an operation of a variable that the user defined, on values drawn
    step = type(getattr(op, "scalar_op", op)).__name__
    return step in _STEPS or any(has_atoms(v) for v in node.inputs if hasattr(v.type, "dtype"))


_STEPS = {
    *("Clip", "Floor", "Ceil", "RoundHalfToEven", "RoundHalfAwayFromZero", "Switch"),
    *("ScalarMaximum", "ScalarMinimum", "Maximum", "Minimum"),
}


def shared_values(graphs: list[Any]) -> list[tuple[Any, np.ndarray]]:
    """Variables of the graphs whose values may be set, and these values, which JAX will use."""
    module = pymc_jax()
    return [
        (variable, np.array(variable.get_value(borrow=True)))
        for variable in module.graph_inputs(graphs)
        if isinstance(variable, module.SharedVariable) and hasattr(variable.type, "dtype")
    ]


# ---------------------------------------------------------------- what stands in the way of JAX


def _generators(graph: Any) -> list[Any]:
    """Random generators that the graph draws with."""
    from pytensor.tensor.random.type import RandomGeneratorType

    module = pymc_jax()
    return [
        variable
        for variable in module.graph_inputs([graph])
        if isinstance(variable, module.SharedVariable)
        and isinstance(variable.type, RandomGeneratorType)
    ]


def _without_shapes_of_draws(graph: Any) -> Any:
    """The graph without random variables of which it uses the shape only."""
    from pytensor.graph.replace import clone_replace
    from pytensor.graph.rewriting.utils import rewrite_graph

    if not _generators(graph):
        return graph
    # a copy that keeps the inputs: the model's own graph stays as it is
    return rewrite_graph(clone_replace(graph), include=("canonicalize", "ShapeOpt"), clone=False)


def _check_not_random(rv: Any, graph: Any) -> Any:
    found = _without_shapes_of_draws(graph)
    if _generators(found):
        raise ValueError(
            f"the log density of the observed variable {rv.name!r} must be a function of the free "
            "variables, but PyMC leaves random draws in it; write the log densities of its rows as "
            'a pm.Potential and name it, rows="name"'
        )
    return found
