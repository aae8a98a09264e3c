"""Whether functions are the same whenever they are traced: no random numbers, no changing data.

Programs are compiled once and kept with the model, each from a trace of its own. They agree with
each other, and with the user's data, only if every trace gives the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Where objects are in memory, which tells nothing about what a program computes.
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# JAX's names of operations on matrices whose time is in proportion to the cube of their size.
_FACTORISATIONS = ("cholesky", "triangular_solve", "lu", "eigh", "qr", "geqrf", "svd")


class Trace(NamedTuple):
    """What JAX makes of a function: what it returns, whether from 32-bit data, and a digest.

    ``factorised`` are the entries of the largest matrix that it factorises, or solves with.
    """

    shape: Any
    single: bool
    digest: bytes
    unused: tuple[bool, ...]
    factorised: int


def trace(function: Callable[..., Any], *arguments: Any) -> Trace:
    """Trace a function anew; the digest is of its operations and of the values of its constants.

    Constants are the arrays that it closes over, as they are now: JAX copies them only when it
    compiles.
    """

    # a new object, because JAX keeps the traces of functions that it has seen
    def anew(*arguments: Any) -> Any:
        return function(*arguments)

    closed, shape = jax.make_jaxpr(anew, return_shape=True)(*arguments)
    constants = [*closed.consts, *_inner_constants(closed.jaxpr)]
    digest = hashlib.blake2b(_ADDRESS.sub("", str(closed.jaxpr)).encode())
    for constant in constants:
        if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
            constant = jax.random.key_data(constant)
        digest.update(np.ascontiguousarray(constant).data)
    single = any(constant.dtype in (np.float32, np.int32) for constant in closed.consts)
    used = {id(v) for equation in closed.jaxpr.eqns for v in equation.invars}
    unused = tuple(id(v) not in used for v in closed.jaxpr.invars)
    factorised = max(_factorised(closed.jaxpr), default=0)
    return Trace(shape, single, digest.digest(), unused, factorised)


def unjitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The Python function inside ``jax.jit``, which would keep its first trace."""
    while hasattr(function, "lower") and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _inner_constants(jaxpr: Any) -> Iterator[Any]:
    """Arrays that the functions inside a traced function close over: of jit, scan, cond."""
    for equation in jaxpr.eqns:
        yield from (v.val for v in equation.invars if np.ndim(getattr(v, "val", 0.0)))
        for inner in _inner(equation):
            yield from getattr(inner, "consts", ())
            if hasattr(inner, "eqns"):
                yield from _inner_constants(inner)


def _factorised(jaxpr: Any) -> Iterator[int]:
    """Entries of the matrices that are factorised or solved with."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in _FACTORISATIONS:
            yield int(np.prod(equation.invars[0].aval.shape[-2:]))
        for inner in _inner(equation):
            if hasattr(inner, "eqns"):
                yield from _factorised(inner)


def _inner(equation: Any) -> Iterator[Any]:
    """What may be functions among the parameters of a traced operation."""
    for parameter in equation.params.values():
        yield from parameter if isinstance(parameter, (list, tuple)) else (parameter,)
