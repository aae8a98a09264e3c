"""Functions of PyMC's densities that have no gradient in JAX, none everywhere, or a wrong one."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.scipy.special import log_ndtr
from jaxtyping import Array


def with_safe_functions(graph: Any) -> Any:
    """The graph with special functions of our own, which have gradients in JAX.

    PyMC's normal distribution functions choose between two forms, each of which overflows where
    the other holds; in JAX, zero times the derivative of what was not chosen must not be NaN. The
    incomplete beta function, of distribution functions of Student's t and negative binomial
    variables, has no derivative by its parameters in JAX. Distances between the points of a
    Gaussian process are clipped at zero (:func:`_clipped_distances`).
    """
    from pytensor.graph.replace import graph_replace

    while replacements := _innermost(graph):
        (graph,) = graph_replace([graph], replacements, strict=False)
    return graph


def _innermost(graph: Any) -> dict[Any, Any]:
    """What is to be replaced in a graph, with what, and is made of nothing that is."""
    from pytensor.graph.traversal import ancestors

    found: dict[Any, Any] = {}
    for variable in ancestors([graph]):
        if (safe := _safe(variable)) is not None:
            found[variable] = safe
    return {
        variable: safe
        for variable, safe in found.items()
        if not any(other in found for other in ancestors(variable.owner.inputs))
    }


def _safe(variable: Any) -> Any:
    """What a variable is replaced with, None where it is not."""
    from pytensor.scalar.math import BetaInc, Erfc, Erfcx
    from pytensor.tensor.elemwise import Elemwise

    kind = _elementwise(variable)
    if kind in (BetaInc, Erfc, Erfcx):
        return Elemwise(_safe_operations()[kind.__name__])(*variable.owner.inputs)
    pair = _clipped_distances(variable)
    return None if pair is None else _distances(*pair)


def _elementwise(variable: Any) -> Any:
    """The scalar operation that a variable is by element, if it is one."""
    from pytensor.tensor.elemwise import Elemwise

    op = getattr(variable.owner, "op", None)
    return type(op.scalar_op) if isinstance(op, Elemwise) else None


def _clipped_distances(variable: Any) -> tuple[Any, Any] | None:
    """Points X and Z whose squared distances a variable is as max(-2 X Z' + |X|^2 + |Z|^2, 0).

    So PyMC's covariance functions have them. Between a point and itself that is zero up to
    rounding, and XLA rounds otherwise wherever it evaluates it anew: where the derivative by X is
    cut off at zero in one place and not in another, large terms that should cancel do not, and
    compiled gradients are off by far more than they are.
    """
    from pytensor.graph.basic import equal_computations
    from pytensor.scalar.basic import Add, Clip, Mul
    from pytensor.tensor.math import Dot

    if _elementwise(variable) is not Clip:
        return None
    squared, *bounds = variable.owner.inputs
    if not all(map(_is, bounds, (0.0, np.inf))):
        return None
    pair, factor, norms = (), None, []
    for term in _terms(squared, Add):
        factors = [_unshaped(part) for part in _terms(term, Mul)]
        dots = [part for part in factors if part.owner and isinstance(part.owner.op, Dot)]
        if len(dots) == 1 and len(factors) == 2:
            pair, factor = dots[0].owner.inputs, next(f for f in factors if f is not dots[0])
        else:
            norms.append(_summed_squares(term))
    if not pair or not _is(factor, -2.0) or len(norms) != 2 or None in norms:
        return None
    points = [_unshaped(one) for one in pair]
    same = equal_computations(norms, points) or equal_computations(norms[::-1], points)
    return (pair[0], pair[1].T) if same else None


def _summed_squares(variable: Any) -> Any:
    """The points that a variable has the squared lengths of; None if it has not."""
    from pytensor.scalar.basic import Sqr
    from pytensor.tensor.math import Sum

    squares = _unshaped(variable)
    if squares.owner is not None and isinstance(squares.owner.op, Sum):
        (squares,) = squares.owner.inputs  # which PyTensor leaves out for points on a line
    return _unshaped(squares.owner.inputs[0]) if _elementwise(squares) is Sqr else None


def _is(variable: Any, number: float) -> bool:
    """Whether a variable is this number."""
    return bool(np.all(getattr(_unshaped(variable), "data", np.nan) == number))


def _unshaped(variable: Any) -> Any:
    """What a variable was before it was reshaped, transposed or given axes."""
    from pytensor.tensor.elemwise import DimShuffle
    from pytensor.tensor.shape import Reshape

    while variable.owner is not None and isinstance(variable.owner.op, (DimShuffle, Reshape)):
        variable = variable.owner.inputs[0]
    return variable


def _terms(variable: Any, kind: Any) -> list[Any]:
    """What is added, or multiplied, by element to make a variable."""
    if _elementwise(variable) is not kind:
        return [variable]
    return [term for part in variable.owner.inputs for term in _terms(part, kind)]


def _distances(one: Any, two: Any) -> Any:
    """Squared distances from each point to each other."""
    import pytensor.tensor as pt

    return pt.sum(pt.sqr(one[:, None, :] - two[None, :, :]), axis=2)


@cache
def _safe_operations() -> dict[str, Any]:
    """Scalar operations of PyTensor's names, with JAX versions of our own."""
    from pytensor.link.jax.dispatch.basic import jax_funcify
    from pytensor.scalar.basic import upgrade_to_float
    from pytensor.scalar.math import BetaInc, Erfc, Erfcx

    class SafeBetaInc(BetaInc):
        """betainc with derivatives by all arguments."""

    class SafeErfc(Erfc):
        """erfc below two."""

    class SafeErfcx(Erfcx):
        """erfcx without overflow."""

    kinds: dict[Any, Any] = {SafeBetaInc: _betainc, SafeErfc: _erfc, SafeErfcx: _erfcx}
    for kind, function in kinds.items():
        jax_funcify.register(kind)(lambda op, function=function, **_: function)
    names = ("BetaInc", "Erfc", "Erfcx")
    return {
        name: kind(upgrade_to_float, name=f"safe_{name.lower()}")
        for name, kind in zip(names, kinds, strict=True)
    }


def _erfc(x: Array) -> Array:
    """The complementary error function, nowhere as large as 2: log1p(-erfc(x) / 2) is finite."""
    return jnp.minimum(jax.scipy.special.erfc(x), 2.0 * (1.0 - 2.0**-53))


def _erfcx(x: Array) -> Array:
    """exp(x**2) * erfc(x); below -26, where it is next to overflow, what it is there."""
    x = jnp.maximum(x, -26.0)
    return 2.0 * jnp.exp(jax.scipy.special.log_ndtr(-jnp.sqrt(2.0) * x) + x**2)


@jax.custom_jvp
def _betainc(a: Array, b: Array, x: Array) -> Array:
    """The regularised incomplete beta function."""
    return jax.scipy.special.betainc(a, b, x)


@_betainc.defjvp
def _betainc_jvp(
    arguments: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    """By central differences in a and b, which err by 1e-9; HMC asks no more of a gradient."""
    a, b, x = (jnp.asarray(v, float) for v in arguments)
    whole = _betainc  # so that there is a second derivative too
    near_a, near_b = 1e-5 * a, 1e-5 * b
    by_a = (whole(a + near_a, b, x) - whole(a - near_a, b, x)) / (2 * near_a)
    by_b = (whole(a, b + near_b, x) - whole(a, b - near_b, x)) / (2 * near_b)
    density = jax.scipy.stats.beta.pdf(x, a, b)
    da, db, dx = tangents
    return whole(a, b, x), by_a * da + by_b * db + density * dx


# ---------------------------------------------------------------- truncated normal variables


def truncated_normal(node: Any, value: Any) -> Any:
    """Graph of the log density of a truncated normal variable.

    PyMC's has no gradient where a bound is infinite or many standard deviations away.
    """
    import pymc
    import pytensor.tensor as pt
    from pytensor.tensor.elemwise import Elemwise

    mean, sd, lower, upper = node.op.dist_params(node)
    inside = pymc.logp(pymc.Normal.dist(mean, sd), value)
    mass = Elemwise(_normal_mass())(mean, sd, lower, upper)
    return pt.switch(pt.lt(value, lower) | pt.gt(value, upper), -np.inf, inside - mass)


@cache
def _normal_mass() -> Any:
    from pytensor.link.jax.dispatch.basic import jax_funcify
    from pytensor.scalar.basic import ScalarOp, upgrade_to_float

    class NormalMass(ScalarOp):
        """Log probability of an interval."""

        nin, nout = 4, 1

        def impl(self, mean: float, sd: float, lower: float, upper: float) -> float:
            normal = scipy.stats.norm(mean, sd)
            return float(np.log(normal.cdf(upper) - normal.cdf(lower)))

    jax_funcify.register(NormalMass)(lambda op, **_: normal_mass)
    kind: Any = NormalMass
    return kind(upgrade_to_float, name="normal_mass")


def normal_mass(mean: Array, sd: Array, lower: Array, upper: Array) -> Array:
    """Log probability of a normal variable to lie between bounds, either of which may be infinite.

    With a and b the bounds in standard deviations, mirrored where most of the interval is above
    the mean: log(Phi(b) - Phi(a)) = log Phi(b) + log(1 - Phi(a) / Phi(b)).
    """
    no_lower, no_upper = jnp.isneginf(lower), jnp.isposinf(upper)
    # numbers in place of infinite bounds: what is not chosen must have a gradient too
    a = (jnp.where(no_lower, mean - sd, lower) - mean) / sd
    b = (jnp.where(no_upper, mean + sd, upper) - mean) / sd
    mirrored = a + b > 0
    left, right = jnp.where(mirrored, -b, a), jnp.where(mirrored, -a, b)
    apart = log_ndtr(right) - log_ndtr(left)
    near = apart < jnp.log(2.0)
    share = jnp.where(
        near,
        jnp.log(-jnp.expm1(-jnp.where(near, apart, 1.0))),
        jnp.log1p(-jnp.exp(-jnp.where(near, 1.0, apart))),
    )
    both = log_ndtr(right) + share
    one = jnp.where(no_lower, jnp.where(no_upper, 0.0, log_ndtr(b)), log_ndtr(-a))
    return jnp.where(no_lower | no_upper, one, both)
