"""Which sites of a NumPyro model are its rows, and the log densities of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from foldwise.models.common import choose_observed, row_numbers, sum_by_row
from foldwise.models.numpyro_normal import is_normal

Site = dict[str, Any]
Sites = dict[str, Site]


@dataclass(frozen=True)
class Entries:
    """The entries of a site that are rows, or belong to some: those ``kept`` along an ``axis``.

    ``whole``: none of their numbers is masked out.
    """

    axis: int
    kept: Int[np.ndarray, " entry"]
    whole: bool = True

    def values(self, site: Site) -> np.ndarray:
        """What was observed of each."""
        return np.moveaxis(np.asarray(site["value"]), self.axis, 0)[self.kept]

    def log_density(self, site: Site, y: Any = None) -> Float[Array, " entry"]:
        """Log density of each, of ``y`` in place of what was observed."""
        if site["type"] == "deterministic":
            found = jnp.asarray(site["value"])
        elif y is None:
            found = log_prob({**site, "fn": opened(site["fn"])})
        else:
            placed = {"fn": opened(site["fn"]), "value": self._placed(site, y), "intermediates": []}
            found = log_prob({**site, **placed})
        found = jnp.moveaxis(found, self.axis, 0)
        return _taken(found.reshape(len(found), -1).sum(axis=1), self.kept)

    def _placed(self, site: Site, y: Any) -> Array:
        """A value of the site with ``y`` as its entries."""
        if len(self.kept) < np.shape(site["value"])[self.axis]:
            whole = jnp.moveaxis(jnp.asarray(site["value"], jnp.result_type(y)), self.axis, 0)
            y = whole.at[self.kept].set(y)
        return jnp.moveaxis(jnp.asarray(y), 0, self.axis)

    def draw(self, key: Array, site: Site) -> Array:
        """A replicate of each."""
        return _taken(jnp.moveaxis(site["fn"].sample(key), self.axis, 0), self.kept)


def _taken(values: Array, chosen: Int[np.ndarray, " entry"]) -> Array:
    """Values in the order of ``chosen``, as they are where that is their own."""
    return values if np.array_equal(chosen, np.arange(len(values))) else values[chosen]


@dataclass(frozen=True)
class Rows:
    """Where the rows of a model are.

    ``numbers`` has the row of each of a site's ``entries``. ``counted`` are the sites whose density
    is that of the rows, and so not in the prior; ``recorded`` those that are deterministic.
    ``joint``: the rows are entries of one event, not of a batch.
    """

    numbers: dict[str, np.ndarray]
    entries: dict[str, Entries]
    n_obs: int
    counted: tuple[str, ...]
    recorded: tuple[str, ...]
    joint: bool

    @property
    def order(self) -> Int[np.ndarray, " entry"]:
        """The rows of all entries, site after site."""
        return np.concatenate(list(self.numbers.values()))

    def log_likelihood(self, sites: Sites, y: Any = None) -> Float[Array, " row"]:
        """Log density of each row, of ``y`` in place of what was observed."""
        found = {
            name: part.log_density(
                sites[name], None if y is None else _taken(y, self.numbers[name])
            )
            for name, part in self.entries.items()
        }
        return sum_by_row(found, self.numbers, self.n_obs)

    def draw(self, key: Array, sites: Sites) -> Array:
        """A replicate of each row, where each is one entry."""
        keys = jax.random.split(key, len(self.entries)) if len(self.entries) > 1 else [key]
        drawn = [
            part.draw(own, sites[name])
            for own, (name, part) in zip(keys, self.entries.items(), strict=True)
        ]
        return _taken(jnp.concatenate(drawn), np.argsort(self.order))

    def observed(self, sites: Sites) -> np.ndarray | None:
        """Values of the rows, where each is one entry of an observed site, all of one kind."""
        if len(self.order) > self.n_obs or not all(is_data(sites[name]) for name in self.entries):
            return None
        parts = [part.values(sites[name]) for name, part in self.entries.items()]
        if len({(part.dtype.kind, part.shape[1:]) for part in parts}) > 1:
            return None
        if not all(part.whole for part in self.entries.values()):
            return None
        return np.concatenate(parts)[np.argsort(self.order)]


def find_rows(sites: Sites, observed: str | None, rows: Any, axis: int) -> Rows:
    """The rows that the user asked for, of the sites at one position."""
    if not isinstance(axis, (int, np.integer)):
        raise TypeError(f"row_axis must be the number of an axis, got {axis!r}")
    if rows is None:
        _check_factors(sites)
        rows = {
            choose_observed([n for n, s in sites.items() if is_data(s)], observed, "site"): None
        }
    elif observed is not None:
        raise ValueError(
            f"rows are of the observed site {observed!r} or of what rows= names, but both were "
            "given; leave observed out"
        )
    elif isinstance(rows, str):
        rows = {rows: None}
    elif not isinstance(rows, Mapping):
        raise TypeError(
            "rows must name a site, or be a dictionary of sites and their row numbers (None: rows "
            f"of their own), got {type(rows).__name__}; an argument of the model that has this "
            "name must be given by position"
        )
    _check_named(sites, rows)
    joint = len(rows) == 1 and _axis_of_event(sites[next(iter(rows))], axis)
    entries = {name: _entries(name, sites, axis, joint) for name in rows}
    n_obs, numbers = row_numbers(rows, {name: len(part.kept) for name, part in entries.items()})
    recorded = tuple(name for name in numbers if sites[name]["type"] == "deterministic")
    found = Rows(numbers, entries, n_obs, tuple(numbers), recorded, joint)
    if joint and not np.array_equal(found.order, np.arange(n_obs)):
        raise ValueError(
            "rows that depend on each other are numbered in their order, but others were given; "
            "leave the row numbers out, and let folds say what is left out together"
        )
    return found


def without_sums(found: Rows, places: Iterable[Sites]) -> Rows:
    """Rows whose densities a deterministic site has count once, not also in the factor of them.

    ``places`` are the model's sites at some positions: the factor is the one that is the sum.
    """
    if not found.recorded:
        return found
    totals = [
        {n: _total(s) for n, s in sites.items() if s["type"] == "sample" or n in found.recorded}
        for sites in places
    ]
    counted = [name for name in found.counted if name not in found.recorded]
    for name in found.recorded:
        same = [
            other
            for other in totals[0]
            if other not in found.numbers
            and np.allclose([at[other] for at in totals], [at[name] for at in totals])
        ]
        if len(same) != 1:
            raise ValueError(
                f"the deterministic site {name!r} must have the log densities of rows that the "
                f"model counts in a factor, but {len(same) or 'no'} factors or observed sites are "
                f'their sum; count them with numpyro.factor("total", {name}.sum()), or make them '
                f"the factor, numpyro.factor({name!r}, ...) without the sum"
            )
        counted += same
    return replace(found, counted=tuple(counted))


def _total(site: Site) -> float:
    """What a site adds to the log density of the model, or the sum of what it records."""
    if site["type"] == "deterministic":
        return float(jnp.sum(site["value"]))
    observed = site["type"] == "sample" and site["is_observed"]
    return float(jnp.sum(log_prob(site))) if observed else np.nan


def as_observed(site: Site) -> Site:
    """A site whose distribution has the batch axes of what is observed of it.

    NumPyro takes a distribution of one value, outside of plates, for each of many.
    """
    if not is_data(site):
        return site
    shape, own = np.shape(site["value"]), tuple(site["fn"].batch_shape)
    batch = shape[: max(len(shape) - site["fn"].event_dim, 0)]
    if own == batch or any(a not in (1, b) for a, b in zip(own[::-1], batch[::-1], strict=False)):
        return site
    return site if len(own) > len(batch) else {**site, "fn": site["fn"].expand(batch)}


def is_data(site: Site) -> bool:
    """Whether it is an observed site with a distribution of data, not a factor."""
    return site["type"] == "sample" and site["is_observed"] and not is_factor(site)


def is_factor(site: Site) -> bool:
    """Whether it is a factor that the user wrote."""
    import numpyro.distributions as dist

    own = site["type"] == "sample" and isinstance(_innermost(site["fn"]), dist.Unit)
    return own and not (site["name"].startswith("_") and site["name"].endswith("_log_jacobian"))


def is_censored(distribution: Any) -> bool:
    """Whether values are bounds: what it draws is not what is observed."""
    return "CensoredDistribution" in type(_innermost(distribution)).__name__


def has_atoms(distribution: Any) -> bool:
    """Whether it has densities at some values and probabilities at others."""
    inner = _innermost(distribution)
    hurdle = type(inner).__name__.startswith("Hurdle") and not inner.support.is_discrete
    return hurdle or is_censored(inner)


def _innermost(distribution: Any) -> Any:
    """What was expanded, masked, or joined to events."""
    import numpyro.distributions as dist

    wrapped = (dist.Independent, dist.MaskedDistribution, dist.ExpandedDistribution)
    while isinstance(distribution, wrapped):
        distribution = distribution.base_dist
    return distribution


def opened(distribution: Any) -> Any:
    """A distribution whose independent parts, joined by ``to_event``, are a batch again."""
    import numpyro.distributions as dist

    while isinstance(distribution, dist.Independent) or (
        isinstance(distribution, dist.MaskedDistribution) and distribution._mask is True
    ):
        distribution = distribution.base_dist
    return distribution


def log_prob(site: Site) -> Array:
    """Log density of a site, with its batch axes; zero for what is not a sample site."""
    if site["type"] != "sample":
        return jnp.zeros(())
    if site["intermediates"]:
        found = site["fn"].log_prob(site["value"], site["intermediates"])
    else:
        found = site["fn"].log_prob(site["value"])
    return found if site["scale"] is None else site["scale"] * found


def _axis_of_event(site: Site, axis: int) -> bool:
    """Whether the axis of rows is one of a joint density of all of them."""
    shape = np.shape(site["value"])
    if not is_data(site) or not -len(shape) <= axis < len(shape):
        return False
    return axis % len(shape) >= len(opened(site["fn"]).batch_shape)


def _entries(name: str, sites: Sites, axis: int, joint: bool) -> Entries:
    """The entries of a site along its axis of rows; raises where they cannot be rows."""
    site = sites[name]
    if not is_data(site):
        shape = np.shape(log_prob(site) if site["type"] == "sample" else site["value"])
        if not shape:
            raise ValueError(
                f"rows={name!r} must have one log density for each row, but it is one number, the "
                "sum of them all; hand numpyro.factor (or numpyro.deterministic) the log densities "
                "of the rows before they are summed"
            )
        axis = _checked_axis(name, shape, axis)
        return Entries(axis, np.arange(shape[axis]))
    y, inner = np.asarray(site["value"]), opened(site["fn"])
    _check_unscaled(name, site)
    axis = _checked_axis(name, y.shape or (1,), axis)
    if joint and not is_normal(inner):
        raise ValueError(
            f"the observed site {name!r} must have one independent row per observation, or be "
            f"normal, but it is a single {type(inner).__name__} over all of them; write the "
            "likelihood row by row, given latent variables, and put it in a plate"
        )
    if not joint and _batch_along(inner, y, axis) != y.shape[axis]:
        raise ValueError(
            f"the observed site {name!r} must have a distribution for each of its "
            f"{y.shape[axis]} rows, but its batch shape is {tuple(inner.batch_shape)}; put it in a "
            "plate of that size"
            + (
                ", or, as a joint density of all rows cannot be masked by row, give that of any of "
                "them, Model(..., joint_log_likelihood=f)"
                if len(inner.batch_shape) + len(inner.event_shape) > y.ndim
                else ""
            )
        )
    seen = np.ones((y.shape[axis], 1), bool) if joint else _seen(name, sites, axis)
    kept = np.flatnonzero(seen.any(axis=1))
    _check_present(name, np.moveaxis(y, axis, 0), kept)
    return Entries(axis, kept, bool(seen[kept].all()))


def _batch_along(distribution: Any, y: np.ndarray, axis: int) -> int | None:
    """Length of the distribution's batch along an axis of y, if it has that axis."""
    shape = (*distribution.batch_shape, *distribution.event_shape)
    return int(shape[axis]) if len(shape) == y.ndim else None


def _seen(name: str, sites: Sites, axis: int) -> Bool[np.ndarray, "entry part"]:
    """Which parts of each entry are not masked out."""
    inner = opened(sites[name]["fn"])
    seen = np.ones(inner.batch_shape, bool)
    while inner is not None:
        seen = seen & np.asarray(getattr(inner, "_mask", True))
        inner = getattr(inner, "base_dist", None)
    if not seen.all() and f"{name.removesuffix('_observed')}_unobserved" in sites:
        raise ValueError(
            f"the rows of {name!r} must be masked with handlers.mask, but they are with obs_mask, "
            "which makes parameters without a prior of the values that are observed; put the site "
            "into numpyro.handlers.mask(mask=obs_mask) instead"
        )
    if not seen.any():
        raise ValueError(f"some rows of {name!r} must be observed, but all are masked out")
    seen = np.moveaxis(seen, axis, 0)
    return seen.reshape(len(seen), -1)


# ---------------------------------------------------------------- checks


def _check_factors(sites: Sites) -> None:
    """Raise where there are factors alone: which of them are rows has to be said."""
    factors = [name for name, site in sites.items() if is_factor(site)]
    if factors and not any(is_data(site) for site in sites.values()):
        raise ValueError(
            "the model must have an observed site, but it has only factors, "
            f"{', '.join(factors)}; say which has the log density of each row, "
            f'rows="{factors[0]}"'
        )


def _check_named(sites: Sites, rows: Mapping[str, Any]) -> None:
    usable = [
        name
        for name, site in sites.items()
        if is_data(site) or is_factor(site) or site["type"] == "deterministic"
    ]
    for name in rows:
        if name not in usable:
            raise ValueError(
                "rows must name observed sites, factors or deterministic sites, "
                f"{', '.join(usable)}; got {name!r}"
            )


def _checked_axis(name: str, shape: tuple[int, ...], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"row_axis must be an axis of {name!r}, which has the shape {shape}; got {axis}"
        )
    return axis % len(shape)


def _check_present(name: str, y: np.ndarray, kept: np.ndarray) -> None:
    missing = np.isnan(y[kept]) if y.dtype.kind == "f" else np.zeros(1, bool)
    if missing.any():
        row = int(kept[np.argwhere(missing)[0][0]])
        raise ValueError(
            f"the observed site {name!r} must have no missing values, but row {row} is NaN; drop "
            "such rows, mask them with numpyro.handlers.mask, or model them as latent variables of "
            "another site"
        )


def _check_unscaled(name: str, site: Site) -> None:
    """Raise where rows are weighted: a test row's density would be another one's."""
    if site["scale"] is not None and not np.all(np.asarray(site["scale"]) == 1):
        raise ValueError(
            f"the rows of the observed site {name!r} must not be scaled, but their log density is "
            f"multiplied by {np.unique(site['scale'])}, which is not a predictive density; take "
            "handlers.scale off that site (it may stay on others), or repeat rows that stand for "
            "several"
        )
