"""Many models in one program: a model with a selection vector, and a list of selections.

Members of a family differ in one array of numbers, the selection, which their functions take as
an argument. Every program, of full-data fits and of folds, is compiled once with the selection as
data. Full-data fits run one after the other; the folds of all members are sampled side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from foldwise.models.model import Model, Position
from foldwise.models.purity import unjitted
from foldwise.support.runtime import Programs

# What members take instead of their own selection, by their id.
_SELECTED: ContextVar[dict[int, Any]] = ContextVar("selected", default={})  # noqa: B039, never changed


class Member(Model):
    """A model of a family, with a selection of its own."""

    @contextmanager
    def selected(self, selection: Any) -> Iterator[None]:
        """Within this, the model's functions take ``selection`` instead of their own.

        In this thread alone: another may be tracing the same functions.
        """
        token = _SELECTED.set({**_SELECTED.get(), id(self): selection})
        try:
            yield
        finally:
            _SELECTED.reset(token)

    @property
    def chosen(self) -> Any:
        """The selection that the model's functions take."""
        return _SELECTED.get().get(id(self), self.__dict__["selection"])


class ModelFamily(Sequence[Model]):
    """Models that differ in a selection; see ``model_family``."""

    def __init__(self, members: list[Model]):
        self.members = members

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, key: Any) -> Any:
        return ModelFamily(self.members[key]) if isinstance(key, slice) else self.members[key]

    def __repr__(self) -> str:
        return f"ModelFamily of {len(self)} models: {', '.join(str(m.name) for m in self.members)}"


def model_family(
    log_prior: Callable[[Position, Array], Float[Array, ""]],
    log_likelihood: Callable[[Position, Array], Float[Array, " row"]] | None,
    init: Position | Callable[[jax.Array], Position],
    n_obs: int,
    selections: Sequence[ArrayLike],
    names: Sequence[str] | None = None,
    simulate: Callable[[jax.Array, Position, Array], Array] | None = None,
    row_log_density: Callable[[Position, ArrayLike, Array], Float[Array, " row"]] | None = None,
    y: Any = None,
) -> ModelFamily:
    """Models that share their functions and differ in a selection vector.

    The functions are those of ``Model`` with the selection as a last argument. All
    members have all parameters; those that a selection leaves out of the likelihood keep their
    prior. ``cross_validate(family, folds)`` fits every member, samples the folds of all of them
    side by side in one program, and gives their results by name, ready for ``compare``. Beyond 100
    parameters, where the folds of a model share a metric, models take turns in that program.

    Parameters
    ----------
    log_prior
        ``log_prior(position, selection)``.
    log_likelihood
        ``log_likelihood(position, selection)``; may be left out as in ``Model``.
    init
        As in ``Model``, the same for all.
    n_obs
        Number of rows.
    selections
        One array of numbers for each model, all of the same shape: for example which covariates
        it has, as zeros and ones.
    names
        Names of the models; None writes their selections.
    simulate
        ``simulate(key, position, selection)``.
    row_log_density
        ``row_log_density(position, y, selection)``.
    y
        Observed values, the same for all.

    Examples
    --------
    All subsets of two covariates:

    >>> import jax.numpy as jnp, numpy as np
    >>> X, y = np.eye(4)[:, :2], np.array([0.3, -1.2, 0.8, 0.1])
    >>> model_family(
    ...     lambda q, s: -0.5 * jnp.sum(q["beta"] ** 2),
    ...     lambda q, s: -0.5 * (y - X @ (s * q["beta"])) ** 2,
    ...     {"beta": np.zeros(2)}, n_obs=4, selections=[[0, 0], [0, 1], [1, 0], [1, 1]], y=y,
    ... )
    ModelFamily of 4 models: 0 0, 0 1, 1 0, 1 1
    """
    arrays, labels = _named(selections, names)
    functions = (log_prior, log_likelihood, simulate, row_log_density)
    return ModelFamily(_members(functions, init, n_obs, y, arrays, labels))


def _members(
    functions: tuple[Any, ...],
    init: Any,
    n_obs: int,
    y: Any,
    arrays: list[np.ndarray],
    labels: list[str],
) -> list[Model]:
    """The models of a family, which share their programs."""
    programs, members = Programs(), list[Model]()
    for array, label in zip(arrays, labels, strict=True):
        own = members[0].y if members else y  # one copy of the values for all
        members.append(_member(functions, init, n_obs, own, array, label, programs))
        members[-1].__dict__["_given_y"] = members[0].__dict__.get("_given_y")
    return members


def _named(
    selections: Sequence[ArrayLike], names: Sequence[str] | None
) -> tuple[list[np.ndarray], list[str]]:
    """Selections as arrays, and a name for each; raises where they cannot be those of a family."""
    arrays = [np.asarray(selection, float) for selection in selections]
    if not arrays:
        raise ValueError("a family needs at least one selection, got none")
    for k, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise ValueError(
                f"all selections must have the same shape, but selection 0 has {arrays[0].shape} "
                f"and selection {k} has {array.shape}"
            )
        if not np.isfinite(array).all():
            raise ValueError(f"selections must be finite numbers, but selection {k} is {array}")
    labels = [_label(array) for array in arrays] if names is None else [str(n) for n in names]
    if len(labels) != len(arrays):
        raise ValueError(
            f"there must be a name for each selection, but {len(labels)} names for {len(arrays)} "
            "selections were given"
        )
    if len(set(labels)) < len(labels):
        raise ValueError(f"names must be distinct, got {', '.join(labels)}; give names=")
    return arrays, labels


def _label(selection: np.ndarray) -> str:
    return " ".join(f"{value:g}" for value in selection.ravel())


def _member(
    functions: tuple[Any, ...],
    init: Any,
    n_obs: int,
    y: Any,
    selection: np.ndarray,
    name: str,
    programs: Programs,
) -> Model:
    box: list[Any] = []

    def selecting(function: Callable[..., Any] | None) -> Any:
        if function is None:
            return None
        inner = unjitted(function)
        return lambda *arguments: inner(*arguments, box[0].chosen)

    log_prior, log_likelihood, simulate, row_log_density = map(selecting, functions)
    member = Member(
        log_prior,
        log_likelihood,
        init,
        n_obs,
        simulate=simulate,
        row_log_density=row_log_density,
        y=y,
        name=name,
    )
    box.append(member)
    member.__dict__["selection"], member.__dict__["_programs"] = selection, programs
    return member
