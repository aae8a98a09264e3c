"""NumPyro models, as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from foldwise.models.common import choose_observed, need
from foldwise.models.model import Model
from foldwise.support.runtime import forget_constants, precision_context

Sites = dict[str, dict[str, Any]]


def from_numpyro(
    model: Callable[..., Any], *args: Any, observed: str | None = None, **kwargs: Any
) -> Model:
    """A ``Model`` of a NumPyro model with continuous latent variables.

    Rows are the first axis of the observed site; further batch axes are summed, event axes belong
    to a row. Other observed sites and factors stay in the training density of every fold. The
    parameters of ``constrain`` and ``unconstrain`` are the model's latent sites by name.

    The model is of the arguments as they are now: arrays are copied. If they are changed in place
    afterwards, ``fit`` and ``cross_validate`` say so and stop. ``scale`` and ``mask`` act on latent
    and other observed sites as they do in NumPyro; the rows that are cross-validated must be
    neither scaled nor masked.

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

    Examples
    --------
    ``from_numpyro(model, x, y=y)`` for ``def model(x, y=None)``.
    """
    need("numpyro")
    if not callable(model):
        raise TypeError(f"model must be a NumPyro model, a function, got {type(model).__name__}")
    return _model(model, args, kwargs, observed)


def _model(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], observed: str | None
) -> Model:
    given = args, kwargs
    _check_unmasked(given)
    forget_constants()  # arrays that the model closes over, of MCMC in single precision
    with precision_context("float64"):
        args, kwargs = jax.tree.map(_as_float64, (args, kwargs))
        sites = _trace(model, args, kwargs, {}, jax.random.key(0))
        _check_sites(sites)
        chosen = choose_observed(_observed_names(sites), observed, "site")
        _check_unmasked(sites[chosen]["value"])
        y = np.asarray(sites[chosen]["value"])
        _check_rows(chosen, sites[chosen], y)
        _check_every_row_counts(chosen, sites[chosen])
        init = _initial(model, args, kwargs)

    def at(position: Mapping[str, Array]) -> Sites:
        _check_unchanged(given, (args, kwargs))
        return _trace(model, args, kwargs, position, None)

    def log_prior(position: Mapping[str, Array]) -> Float[Array, ""]:
        found = at(position)
        return sum(
            (jnp.sum(_log_prob(site)) for name, site in found.items() if name != chosen),
            start=jnp.zeros(()),
        )

    def row_log_density(position: Mapping[str, Array], y: Any) -> Float[Array, " row"]:
        by_row = _log_prob({**at(position)[chosen], "value": y, "intermediates": []})
        return by_row.reshape(len(by_row), -1).sum(axis=1)

    def simulate(key: Array, position: Mapping[str, Array]) -> Array:
        return at(position)[chosen]["fn"].sample(key)

    return Model(
        log_prior,
        None,
        init,
        n_obs=len(y),
        simulate=simulate,
        row_log_density=row_log_density,
        y=y,
        constrain=partial(_constrain, model, args, kwargs),
        unconstrain=partial(_unconstrain, model, args, kwargs),
        name=getattr(model, "__name__", None),
    )


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
    return {n: s for n, s in trace.items() if s["type"] in ("sample", "plate", "param")}


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


def _log_prob(site: dict[str, Any]) -> Array:
    if site["type"] != "sample":
        return jnp.zeros(())
    if site["intermediates"]:
        found = site["fn"].log_prob(site["value"], site["intermediates"])
    else:
        found = site["fn"].log_prob(site["value"])
    return found if site["scale"] is None else site["scale"] * found


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


def _observed_names(sites: Sites) -> list[str]:
    """Names of the observed sites that are distributions of data, not factors."""
    import numpyro.distributions as dist

    return [
        name
        for name, site in sites.items()
        if site["type"] == "sample"
        and site["is_observed"]
        and not isinstance(site["fn"], dist.Unit)
    ]


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
        elif not site["is_observed"] and site["fn"].support.is_discrete:
            raise ValueError(
                f"latent variables must be continuous, but site {name!r} is discrete "
                f"({type(site['fn']).__name__}); sum it out of the model, for example with a "
                "mixture distribution"
            )
    if not any(s["type"] == "sample" and not s["is_observed"] for s in sites.values()):
        raise ValueError("the model must have latent variables, but it has none")


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


def _check_every_row_counts(name: str, site: dict[str, Any]) -> None:
    """Raise where rows are weighted or left out: a test row's density would be another one's."""
    if site["scale"] is not None and not np.all(np.asarray(site["scale"]) == 1):
        raise ValueError(
            f"the rows of the observed site {name!r} must not be scaled, but their log density is "
            f"multiplied by {np.unique(site['scale'])}, which is not a predictive density; take "
            "handlers.scale off that site (it may stay on others), or repeat rows that stand for "
            "several"
        )
    inner = site["fn"]
    while inner is not None:
        mask = np.asarray(getattr(inner, "_mask", True))
        if not mask.all():
            raise ValueError(
                f"the rows of the observed site {name!r} must all be observed, but "
                f"{int((~mask).sum())} of {mask.size} are masked out; drop those rows from the data"
            )
        inner = getattr(inner, "base_dist", None)


def _check_rows(name: str, site: dict[str, Any], y: np.ndarray) -> None:
    shape = tuple(site["fn"].batch_shape)
    if not shape:
        raise ValueError(
            f"the observed site {name!r} must have one independent row per observation, but it is "
            f"a single {type(site['fn']).__name__} over all of them; write the likelihood row by "
            "row, given latent variables, and put it in a plate"
        )
    if y.shape[:1] != shape[:1]:
        raise ValueError(
            f"the observed site {name!r} must have a distribution for each of its {len(y)} rows, "
            f"but its batch shape is {shape}; put it in a plate of that size"
        )
    if y.dtype.kind == "f" and np.isnan(y).any():
        row = int(np.argwhere(np.isnan(y))[0][0])
        raise ValueError(
            f"the observed site {name!r} must have no missing values, but row {row} is NaN; drop "
            "such rows, or model them as latent variables of another site"
        )
