"""NumPyro models, as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from foldwise.models.common import need
from foldwise.models.model import Model
from foldwise.models.numpyro_normal import joint_draw, joint_log_density
from foldwise.models.numpyro_rows import (
    Rows,
    Sites,
    as_observed,
    find_rows,
    has_atoms,
    is_censored,
    log_prob,
    opened,
    without_sums,
)
from foldwise.support.runtime import forget_constants, precision_context


def from_numpyro(
    model: Callable[..., Any],
    *args: Any,
    observed: str | None = None,
    rows: str | Mapping[str, Any] | None = None,
    row_axis: int = 0,
    **kwargs: Any,
) -> Model:
    """A ``Model`` of a NumPyro model with continuous latent variables.

    Rows are the first axis of the observed site; further batch axes are summed, event axes belong
    to a row. Where all rows are one event, a ``MultivariateNormal`` (or ``LowRank...``, ``CAR``,
    ``GaussianRandomWalk``, ``GaussianStateSpace``, ``MatrixNormal``, ``CirculantNormal``), they
    depend on each other given the parameters, and the model has a ``joint_log_likelihood``. Other
    observed sites and factors stay in the training density of every fold. The parameters of
    ``constrain`` and ``unconstrain`` are the model's latent sites by name.

    The model is of the arguments as they are now: arrays are copied. If they are changed in place
    afterwards, ``fit`` and ``cross_validate`` say so and stop. ``scale`` and ``mask`` act on latent
    and other observed sites as they do in NumPyro. The rows that are cross-validated must not be
    scaled; where some are masked, rows are those that are not, in their order.

    Parameters
    ----------
    model
        The NumPyro model, a function.
    args
        What it is called with, data included.
    kwargs
        The same, by name.
    observed
        Name of the observed site to cross-validate; may be left out when there is one.
    rows
        Instead of ``observed``: the name of a factor or a deterministic site that has the log
        density of each row, or several sites as a dictionary. ``{"events": None, "censored":
        None}`` are all events, then all censored ones; with integer arrays, entry i of a site
        belongs to row ``numbers[i]``, and entries of a row add up.
    row_axis
        Which axis of the observed site has the rows.

    Examples
    --------
    ``from_numpyro(model, x, y=y)`` for ``def model(x, y=None)``.
    """
    need("numpyro")
    if not callable(model):
        raise TypeError(f"model must be a NumPyro model, a function, got {type(model).__name__}")
    return _model(model, args, kwargs, (observed, rows, row_axis))


def _model(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: tuple[str | None, Any, int],
) -> Model:
    given = args, kwargs
    _check_unmasked(given)

    def at(position: Mapping[str, Array]) -> Sites:
        _check_unchanged(given, (args, kwargs))
        return _trace(model, args, kwargs, position, None)

    forget_constants()  # arrays that the model closes over, of MCMC in single precision
    with precision_context("float64"):
        args, kwargs = jax.tree.map(_as_float64, (args, kwargs))
        sites = _trace(model, args, kwargs, {}, jax.random.key(0))
        _check_sites(sites)
        rows = find_rows(sites, *wanted)
        _check_unmasked([sites[name]["value"] for name in rows.numbers])
        init = _initial(model, args, kwargs)
        rows = without_sums(rows, (_trace(model, args, kwargs, q, None) for q in _probes(init)))
        functions = _row_functions(rows, sites, at)

    def log_prior(position: Mapping[str, Array]) -> Float[Array, ""]:
        found = at(position)
        return sum(
            (jnp.sum(log_prob(site)) for name, site in found.items() if name not in rows.counted),
            start=jnp.zeros(()),
        )

    return Model(
        log_prior,
        init=init,
        n_obs=rows.n_obs,
        constrain=partial(_constrain, model, args, kwargs),
        unconstrain=partial(_unconstrain, model, args, kwargs),
        name=getattr(model, "__name__", None),
        **functions,
    )


def _row_functions(rows: Rows, sites: Sites, at: Callable[[Any], Sites]) -> dict[str, Any]:
    """What a ``Model`` knows of its rows, by the names of its arguments."""
    y, kinds = rows.observed(sites), [sites[name].get("fn") for name in rows.numbers]
    if rows.joint:
        return _joint_functions(rows, sites, at)

    def log_likelihood(position: Mapping[str, Array]) -> Float[Array, " row"]:
        return rows.log_likelihood(at(position))

    def row_log_density(position: Mapping[str, Array], y: Any) -> Float[Array, " row"]:
        return rows.log_likelihood(at(position), jnp.asarray(y))

    def simulate(key: Array, position: Mapping[str, Array]) -> Array:
        return rows.draw(key, at(position))

    found: dict[str, Any] = {"log_likelihood": log_likelihood, "y": y}
    if y is not None and not any(is_censored(kind) for kind in kinds):
        found["simulate"] = simulate
    if y is not None and not any(has_atoms(kind) for kind in kinds):
        found |= {"log_likelihood": None, "row_log_density": row_log_density}
    return found


def _joint_functions(rows: Rows, sites: Sites, at: Callable[[Any], Sites]) -> dict[str, Any]:
    """The same where the rows are jointly normal."""
    ((name, entries),) = rows.entries.items()
    y, axis = np.asarray(sites[name]["value"]), entries.axis

    def joint(position: Mapping[str, Array], seen: Array) -> Float[Array, ""]:
        return joint_log_density(opened(at(position)[name]["fn"]), y, seen, axis)

    def joint_simulate(key: Array, position: Mapping[str, Array], seen: Array) -> Array:
        drawn = joint_draw(key, opened(at(position)[name]["fn"]), y, seen, axis)
        return jnp.moveaxis(drawn, axis, 0)

    density = {"log_likelihood": None, "joint_log_likelihood": joint}
    return {**density, "joint_simulate": joint_simulate, "y": np.moveaxis(y, axis, 0)}


def _probes(init: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """The starting position, and one near it."""
    rng = np.random.default_rng(0)
    return [init, {name: v + 0.1 * rng.normal(size=v.shape) for name, v in init.items()}]


def _as_float64(value: Any) -> Any:
    """Floating-point data in double precision: NumPyro computes in the precision of its data.

    All arrays are copied, because JAX remembers the precision it has seen an array in.
    """
    if not isinstance(value, (jax.Array, np.ndarray)) or value.dtype.kind not in "fiub":
        return value
    return np.array(value, np.float64 if value.dtype.kind == "f" else value.dtype)


def _trace(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    position: Mapping[str, Array],
    key: Array | None,
) -> Sites:
    """Sample sites of the model at an unconstrained position, log Jacobians among them."""
    from numpyro import handlers

    placed = handlers.substitute(model, substitute_fn=partial(_place, position))
    # with every latent in place the seed is not used; it is there for sites of auxiliary noise
    seeded = handlers.seed(placed, jax.random.key(0) if key is None else key)
    trace = handlers.trace(seeded).get_trace(*args, **kwargs)
    kinds = ("sample", "plate", "param", "deterministic")
    return {name: as_observed(site) for name, site in trace.items() if site["type"] in kinds}


def _place(position: Mapping[str, Array], site: dict[str, Any]) -> Array | None:
    """Value of a latent site at the position; its log Jacobian becomes a factor of the model."""
    import numpyro
    from numpyro.distributions import biject_to
    from numpyro.distributions.util import sum_rightmost

    name = site["name"]
    if site["type"] != "sample" or site["is_observed"] or name not in position:
        return None
    distribution, unconstrained = site["fn"], jnp.asarray(position[name])
    transform = biject_to(distribution.support)
    # inside a scan, the part of this step: its own value and its own Jacobian
    step, shift = site["infer"].get("_scan_current_index"), _event_shift(transform)
    if step is not None and unconstrained.ndim > len(distribution.shape()) - shift:
        unconstrained = unconstrained[step]
    value = transform(unconstrained)
    jacobian = transform.log_abs_det_jacobian(unconstrained, value)
    events = jnp.ndim(jacobian) - jnp.ndim(value) + len(distribution.event_shape)
    jacobian = sum_rightmost(jacobian, events)
    # the model's handlers (scale, mask) act on the factor as they do on the site
    numpyro.factor(f"_{name}_log_jacobian", jacobian)
    return value


def _event_shift(transform: Any) -> int:
    """How many more axes a constrained value has than the unconstrained one."""
    return int(transform.codomain.event_dim - transform.domain.event_dim)


def _initial(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, np.ndarray]:
    """An unconstrained position at which the model has a finite density and gradient."""
    from numpyro.infer.util import initialize_model

    try:
        info = initialize_model(
            jax.random.key(0), model, model_args=args, model_kwargs=kwargs
        ).param_info
    except RuntimeError as error:
        raise ValueError(
            "no starting position with a finite log density and gradient was found; check the "
            f"model and its data (NumPyro says: {error})"
        ) from error
    return {name: np.asarray(value, float) for name, value in info.z.items()}


def _constrain(
    model: Callable[..., Any], args: Any, kwargs: Any, position: Mapping[str, Array]
) -> dict[str, Array]:
    """Values of the latent sites at an unconstrained position."""
    sites = _trace(model, args, kwargs, position, None)
    return {name: sites[name]["value"] for name in position}


def _unconstrain(
    model: Callable[..., Any], args: Any, kwargs: Any, parameters: Mapping[str, Array]
) -> dict[str, Array]:
    """The unconstrained position of values of the latent sites."""
    from numpyro.infer.util import unconstrain_fn

    return dict(unconstrain_fn(model, args, kwargs, dict(parameters)))


# ---------------------------------------------------------------- checks


def _check_sites(sites: Sites) -> None:
    for name, site in sites.items():
        if site["type"] == "param":
            raise ValueError(
                f"every parameter must have a prior, but site {name!r} is a numpyro.param; make it "
                "a numpyro.sample site"
            )
        if site["type"] == "plate":
            size, used = site["args"]
            if used is not None and used != size:
                raise ValueError(
                    f"all rows must be in the model, but plate {name!r} takes a subsample of "
                    f"{used} of {size} rows; leave subsample_size out"
                )
        elif _is_latent(site) and site["fn"].support.is_discrete:
            raise ValueError(
                f"latent variables must be continuous, but site {name!r} is discrete "
                f"({type(site['fn']).__name__}); sum it out of the model, for example with a "
                "mixture distribution"
            )
    if not any(_is_latent(site) for site in sites.values()):
        raise ValueError("the model must have latent variables, but it has none")


def _is_latent(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and not site["is_observed"]


def _check_unmasked(data: Any) -> None:
    for leaf in jax.tree.leaves(data):
        if np.ma.is_masked(leaf):
            row = int(np.argwhere(np.ma.getmaskarray(leaf))[0][0])
            raise ValueError(
                f"data must not be masked, but row {row} of one of shape {leaf.shape} is, and JAX "
                "would use what is under the mask; drop or impute such rows"
            )


def _check_unchanged(given: Any, kept: Any) -> None:
    """Raise if the caller's data are no longer what was copied from them."""
    now, then = jax.tree.leaves(given), jax.tree.leaves(kept)
    same = len(now) == len(then) and all(
        np.array_equal(one, two, equal_nan=np.asarray(two).dtype.kind == "f")
        for one, two in zip(now, then, strict=True)
        if isinstance(one, (np.ndarray, float, int))
    )
    if not same:
        raise ValueError(
            "the model's arguments must stay what they were when from_numpyro was called, but they "
            "have been changed in place since; call from_numpyro again"
        )
