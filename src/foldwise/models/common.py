"""What the adapters share."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_EXTRA = {"numpyro": "numpyro", "pymc": "pymc", "bambi": "bambi"}


def need(package: str) -> Any:
    """Import an optional package, or say how to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(
            f"{package} is needed for this, but it cannot be imported ({error}); "
            f'pip install "foldwise[{_EXTRA[package]}]"'
        ) from error


def choose_observed(names: list[str], wanted: str | None, what: str) -> str:
    """The observed variable to cross-validate: the one named, or the only one."""
    if not names:
        raise ValueError(f"the model must have an observed {what}, but it has none; pass the data")
    if wanted is None:
        if len(names) > 1:
            raise ValueError(
                f"the model has {len(names)} observed {what}s, {', '.join(names)}; name the one to "
                f'cross-validate, observed="{names[0]}" (the others stay in the training data)'
            )
        return names[0]
    if wanted not in names:
        raise ValueError(f"observed must be one of {', '.join(names)}; got {wanted!r}")
    return wanted


def row_numbers(
    rows: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[int, dict[str, np.ndarray]]:
    """Number of rows, and the row of each entry of several observed variables.

    ``rows`` has for each variable the row numbers of its entries, or None for all of them: entries
    are then rows of their own, one variable after the other in the order of ``rows``. ``sizes`` has
    the number of entries of every variable that may be named.
    """
    if not rows:
        raise ValueError("rows must name at least one observed variable, but it is empty")
    for name in rows:
        if name not in sizes:
            raise ValueError(f"rows must name observed variables, {', '.join(sizes)}; got {name!r}")
    stacked = [name for name, numbers in rows.items() if numbers is None]
    if stacked and len(stacked) < len(rows):
        raise ValueError(
            "rows must have row numbers for every variable, or None for all (rows end to end), but "
            f"{stacked[0]!r} has none and others have; give the row number of each of its entries"
        )
    if stacked:
        ends = np.cumsum([sizes[name] for name in rows])
        found = {n: np.arange(e - sizes[n], e) for n, e in zip(rows, ends, strict=True)}
    else:
        found = {name: _checked_numbers(name, rows[name], sizes[name]) for name in rows}
    present = np.unique(np.concatenate(list(found.values())))
    absent = np.flatnonzero(present != np.arange(len(present)))
    if len(absent):
        raise ValueError(
            "row numbers must be 0 to n - 1, and each must occur in one of the variables, but "
            f"{int(absent[0])} does not; number the rows anew, numpy.unique(..., "
            "return_inverse=True) of all labels together does"
        )
    return len(present), found


def _checked_numbers(name: str, numbers: Any, size: int) -> np.ndarray:
    array = np.asarray(numbers)
    if array.shape != (size,):
        raise ValueError(
            f"rows[{name!r}] must have the row number of each of the {size} entries of {name!r}, "
            f"shape ({size},); got shape {array.shape}"
        )
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"rows[{name!r}] must be whole numbers, the row of each entry; got {array.dtype}"
        )
    if size and array.min() < 0:
        raise ValueError(f"rows[{name!r}] must be at least 0; got {array.min()}")
    return array.astype(np.int64)


def sum_by_row(
    entries: Mapping[str, Float[Array, " entry"]], numbers: Mapping[str, np.ndarray], n_obs: int
) -> Float[Array, " row"]:
    """Log density of each row: the sum over its entries in all variables."""
    values = jnp.concatenate([entries[name] for name in numbers])
    order = np.concatenate(list(numbers.values()))
    if np.array_equal(order, np.arange(n_obs)):
        return values
    return jax.ops.segment_sum(values, order, num_segments=n_obs)
