"""A Bayesian model as pure JAX functions of an unconstrained position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, Bool, Float

from foldwise.models.evaluate import gradients, rows_at
from foldwise.models.given_rows import GivenRows
from foldwise.models.observed import observed, own_copy, same
from foldwise.models.purity import Trace, trace, unjitted
from foldwise.support.runtime import forget_constants, precision_context

Position = Any  # any pytree of arrays
# What two programs of one function may differ by, relative to the largest term: roundings of a
# program are 1e-16, and condition numbers up to 1e7 leave 1e-9 of them.
_ROUNDING = 1e-9
# The same for programs that are compared at every run, also those of ill-conditioned models.
_PROGRAMS = 1e-6


@dataclass(frozen=True, eq=False)
class Model(GivenRows):
    """A Bayesian model: a log prior and a log likelihood by row, of an unconstrained position.

    The posterior given a set of training rows is proportional to
    ``exp(log_prior(position) + sum(log_likelihood(position)[train]))``.

    The functions are pure, and of the data as they are: ``fit`` and ``cross_validate`` trace them
    anew and refuse a model that draws random numbers, counts calls, or whose data have changed in
    place since it was first used. For other data, make another model.

    Parameters
    ----------
    log_prior
        ``log_prior(position)``: scalar log density of the prior in the unconstrained space, so
        with the log Jacobian of every transform.
    log_likelihood
        ``log_likelihood(position)``: array of shape ``(n_obs,)``, the log density of each row.
        Rows are independent given the position, or depend on earlier rows only (autoregressions).
        None when ``row_log_density`` and ``y`` are given, or ``joint_log_likelihood``.
    init
        A position (any pytree of floating-point arrays) or a function of a JAX key that gives one.
    n_obs
        Number of rows.
    simulate
        ``simulate(key, position)``: one replicate of each row, shape ``(n_obs,)`` or more axes.
    row_log_density
        ``row_log_density(position, y)``: log density of each row as a function of the observed
        values, for scores that differentiate by them.
    y
        Observed values, first axis of length ``n_obs``, copied. Comparisons check that models share
        it.
    constrain
        ``constrain(position)``: the parameters the user thinks in, a dict by name.
    unconstrain
        ``unconstrain(parameters)``: the position, the inverse of ``constrain``.
    name
        Printed in tables.
    joint_log_likelihood
        ``joint_log_likelihood(position, rows)``: scalar joint log density of the rows that the
        boolean array ``rows`` marks, the others unseen (integrated out), for rows that depend on
        each other given the position: errors correlated in time or space, Gaussian processes,
        Kalman filters. Instead of ``log_likelihood``. A fold's posterior is that of
        ``log_prior + joint_log_likelihood(position, train)``, and its log score is the log density
        of the test rows given the training rows and the position, the difference of two such.
    joint_simulate
        ``joint_simulate(key, position, rows)``: one replicate of each row given the observed values
        of the rows that are marked, for scores of such rows from predictive draws.

    Examples
    --------
    >>> import jax.numpy as jnp, numpy as np
    >>> y = np.array([0.3, -1.2, 0.8])
    >>> model = Model(
    ...     log_prior=lambda mu: -0.5 * mu**2,
    ...     log_likelihood=lambda mu: -0.5 * (y - mu) ** 2 - 0.5 * jnp.log(2 * jnp.pi),
    ...     init=0.0,
    ...     n_obs=3,
    ... )
    >>> model.dimension
    1
    """

    log_prior: Callable[[Position], Float[Array, ""]]
    log_likelihood: Callable[[Position], Float[Array, " row"]] | None
    init: Position | Callable[[jax.Array], Position]
    n_obs: int
    simulate: Callable[[jax.Array, Position], Array] | None = None
    row_log_density: Callable[[Position, ArrayLike], Float[Array, " row"]] | None = None
    y: Any = None
    constrain: Callable[[Position], Any] | None = None
    unconstrain: Callable[[Any], Position] | None = None
    name: str | None = None
    joint_log_likelihood: Callable[[Position, Bool[Array, " row"]], Float[Array, ""]] | None = None
    joint_simulate: Callable[[jax.Array, Position, Bool[Array, " row"]], Array] | None = None

    # which model of a family it is: nothing for a model that is not of a family
    selection: ClassVar[Any] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.n_obs, (int, np.integer)) or self.n_obs < 2:
            raise ValueError(
                f"n_obs must be a whole number of rows, at least 2; got {self.n_obs!r}"
            )
        if not callable(self.log_prior):
            raise TypeError(f"log_prior must be a function of a position, got {self.log_prior!r}")
        if self.y is not None:
            self.__dict__["_given_y"] = observed(self.y, self.n_obs)
            object.__setattr__(self, "y", own_copy(self.__dict__["_given_y"]))
        if self.joint_log_likelihood is not None:
            self._take_joint()
        elif self.joint_simulate is not None:
            raise TypeError(
                "joint_simulate is of rows that depend on each other, but there is no "
                "joint_log_likelihood; give it, or simulate(key, position) for independent rows"
            )
        elif self.log_likelihood is None:
            if self.row_log_density is None or self.y is None:
                raise TypeError(
                    "a model needs log_likelihood(position), or row_log_density(position, y) "
                    "together with y; neither was given"
                )
            density, y = unjitted(self.row_log_density), self.y
            object.__setattr__(self, "log_likelihood", lambda position: density(position, y))
        elif not callable(self.log_likelihood):
            raise TypeError(
                f"log_likelihood must be a function of a position, got {self.log_likelihood!r}"
            )

    def _take_joint(self) -> None:
        """Let the first row stand for all, where their density is known jointly."""
        if self.log_likelihood is not None:
            raise TypeError(
                "rows are independent, with log_likelihood(position), or not, with "
                "joint_log_likelihood(position, rows); both were given: leave log_likelihood out"
            )
        if not callable(self.joint_log_likelihood):
            raise TypeError(
                "joint_log_likelihood must be a function of a position and of a boolean array of "
                f"rows, got {self.joint_log_likelihood!r}"
            )
        if self.simulate is not None:
            raise TypeError(
                "replicates of rows that depend on each other are given the rows that are seen, "
                "but simulate(key, position) knows of none; give joint_simulate(key, position, "
                "rows) instead"
            )
        joint, n = unjitted(self.joint_log_likelihood), self.n_obs

        def log_likelihood(position: Position) -> Array:
            whole = jnp.asarray(joint(position, jnp.ones(n, bool)))
            if whole.shape != ():
                raise ValueError(
                    "joint_log_likelihood(position, rows) must be a scalar, the joint log density "
                    f"of the rows marked, but has shape {whole.shape}; sum the log densities"
                )
            return jnp.zeros(n, whole.dtype).at[0].set(whole)

        object.__setattr__(self, "log_likelihood", log_likelihood)

    @property
    def label(self) -> str:
        """What follows "fit" or "folds" in messages: " of " and the name, if there is one."""
        return f" of {self.name}" if self.name else ""

    @contextmanager
    def selected(self, selection: Any) -> Iterator[None]:
        """Within this, the functions of a member of a family take ``selection``."""
        yield

    @cached_property
    def _template(self) -> Position:
        """One position, its leaves as NumPy float arrays: the structure that flattening undoes."""
        init = self.init
        with precision_context("float64"):
            position = init(jax.random.key(0)) if callable(init) else init
            leaves, tree = jax.tree.flatten(position)
            if not leaves:
                raise ValueError("init must hold at least one number, but its pytree is empty")
            for leaf in leaves:
                if not np.issubdtype(np.asarray(leaf).dtype, np.number):
                    raise TypeError(f"init must hold numbers only, but it has {leaf!r}")
            arrays = [np.asarray(leaf, float) for leaf in leaves]
        return jax.tree.unflatten(tree, arrays)

    @cached_property
    def dimension(self) -> int:
        """Number of unconstrained parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self._template))

    def unflatten(self, flat: Float[Array, " d"]) -> Position:
        """Position with the structure of ``init`` from a flat vector."""
        return self.of_leaves(self.leaves(flat))

    def leaves(self, flat: Float[Array, " d"]) -> list[Array]:
        """The arrays of a position, in the order in which a flat vector has them."""
        leaves = jax.tree.leaves(self._template)
        ends = np.cumsum([leaf.size for leaf in leaves])
        return [
            flat[end - leaf.size : end].reshape(leaf.shape)
            for end, leaf in zip(ends, leaves, strict=True)
        ]

    def of_leaves(self, leaves: list[Array]) -> Position:
        """Position with the structure of ``init`` from its arrays."""
        return jax.tree.unflatten(jax.tree.structure(self._template), leaves)

    def flatten(self, position: Position) -> Float[Array, " d"]:
        """Flat vector from a position."""
        return ravel_pytree(jax.tree.map(lambda leaf: jnp.asarray(leaf, float), position))[0]

    def initial(self, key: jax.Array) -> Float[Array, " d"]:
        """A flat starting position; jittered when ``init`` is one fixed position."""
        if callable(self.init):
            return self.flatten(self.init(key))
        # on the host: JAX would compile for it
        words = np.asarray(jax.random.key_data(key))
        noise = np.random.default_rng(words).normal(size=self.start.shape)
        return jnp.asarray(self.start + 0.1 * noise)

    @cached_property
    def start(self) -> Float[np.ndarray, " d"]:
        """The flat position that ``init`` is, or that it gives for the first key."""
        leaves = jax.tree.leaves(self._template)
        return np.concatenate([leaf.ravel() for leaf in leaves])

    def _function(self, name: str) -> Callable[..., Array]:
        """The function called ``name``; raises where the model has none."""
        function: Callable[..., Array] | None = getattr(self, name)
        if function is None:
            raise ValueError(
                f"this needs {name}, which the model has not; give Model(..., {name}=f)"
            )
        return function

    def flat_log_prior(self, flat: Float[Array, " d"]) -> Float[Array, ""]:
        """Log prior of a flat position."""
        return self.log_prior_at(self.unflatten(flat))

    def flat_log_likelihood(self, flat: Float[Array, " d"]) -> Float[Array, " row"]:
        """Log likelihood of each row at a flat position."""
        return self.log_likelihood_at(self.unflatten(flat))

    def log_prior_at(self, position: Position) -> Float[Array, ""]:
        """Log prior of a position, as an array."""
        return jnp.asarray(unjitted(self.log_prior)(position))

    def log_likelihood_at(self, position: Position) -> Float[Array, " row"]:
        """Log likelihood of each row at a position, as an array."""
        return jnp.asarray(unjitted(self._function("log_likelihood"))(position))

    def flat_joint(self, flat: Float[Array, " d"], rows: Bool[Array, " row"]) -> Float[Array, ""]:
        """Joint log density of the rows marked, of a model whose rows depend on each other."""
        return jnp.asarray(
            unjitted(self._function("joint_log_likelihood"))(self.unflatten(flat), rows)
        )

    def flat_simulate(
        self, key: jax.Array, flat: Float[Array, " d"], train: Bool[Array, " row"] | None = None
    ) -> Float[Array, "row ..."]:
        """One replicate of each row at a flat position.

        Where rows depend on each other, given the rows ``train``; None: given none.
        """
        position = self.unflatten(flat)
        if self.joint_log_likelihood is None:
            return jnp.asarray(unjitted(self._function("simulate"))(key, position))
        train = jnp.zeros(self.n_obs, bool) if train is None else train
        return jnp.asarray(unjitted(self._function("joint_simulate"))(key, position, train))

    @property
    def simulates(self) -> bool:
        """Whether there are replicates of rows."""
        return self.simulate is not None or self.joint_simulate is not None

    @property
    def numbers_in_row(self) -> int:
        """How many numbers the observed value of a row has."""
        return int(np.prod(np.shape(self.y)[1:]))

    def flat_probabilities(
        self, flat: Float[Array, " d"], classes: tuple[float, ...]
    ) -> Float[Array, "class row"]:
        """Probability of each of the ``classes`` for every row, of a model of discrete values."""
        density, position = self._function("row_log_density"), self.unflatten(flat)
        y = np.asarray(self.y)
        values = [np.full_like(y, value) for value in classes]
        return jnp.exp(jnp.stack([density(position, value) for value in values]))

    def flat_derivatives(
        self, flat: Float[Array, " d"]
    ) -> tuple[Float[Array, " row"], Float[Array, " row"]]:
        """First and second derivative of each row's log density by its own observed value.

        Each row's density depends on its own value alone (``check_derivatives``), so derivatives
        of all rows along one direction, that of all ones, are those of each row.
        """
        y = jnp.asarray(self.y, flat.dtype)
        along = jnp.ones_like(y)
        density, position = self._function("row_log_density"), self.unflatten(flat)

        def first(y: Array) -> Array:
            return jax.jvp(lambda y: density(position, y), (y,), (along,))[1]

        return jax.jvp(first, (y,), (along,))

    def check(self) -> None:
        """Evaluate the model at its starting point; raise an error that says what is wrong."""
        self.check_shapes()
        self.check_values()
        self.check_gradient()

    def check_shapes(self) -> None:
        """Raise unless the log prior is a number and the log likelihood one for each row.

        And unless both are, traced anew, what they were when the model was first used.
        """
        try:
            found = self._trace()
        except (TypeError, ValueError):  # mixed precision, or what the checks will say
            found = None
        if found is None or found.single:  # arrays that others may have used in single precision
            forget_constants()
            found = self._trace()
        prior, rows = found.shape
        if prior.shape != ():
            raise ValueError(
                f"log_prior(position) must be a scalar, but has shape {prior.shape}; "
                "sum the log densities of its terms"
            )
        if rows.shape != (self.n_obs,):
            raise ValueError(_row_shape_message(rows.shape, self.n_obs))
        if rows.dtype.kind != "f":
            raise TypeError(
                "log_likelihood(position) must give real numbers, one log density for each row, "
                f"but they are {rows.dtype}; return floating-point log densities"
            )
        self._check_same(found)

    def check_same(self) -> None:
        """Raise unless the densities, traced anew, are what they were at first.

        Every program of the model has a trace of its own, so that random numbers, counters and
        data that change differ between them. Where the traces differ, numbers decide.
        """
        self._check_same(self._trace())

    def _trace(self) -> Trace:
        with precision_context("float64"):
            flat = jnp.asarray(self.flatten(self._template))
            return trace(self._densities, flat)

    def _densities(self, flat: Float[Array, " d"]) -> tuple[Array, Array]:
        return self.flat_log_prior(flat), self.flat_log_likelihood(flat)

    def _check_same(self, found: Trace) -> None:
        if self.y is not None and not same(self.__dict__["_given_y"], self.y):
            raise ValueError(
                "y must stay what it was when the model was made, but it has been changed in place "
                "since; make a new Model of the new data"
            )
        self.__dict__["_factorised"] = found.factorised
        if found.digest == self.__dict__.setdefault("_first_digest", found.digest):
            return
        # A program of the first trace is kept once the model has been evaluated. Before that, what
        # was traced may be of either state, unless no two traces are alike, of objects' names, say.
        if not self.__dict__.get("_evaluated") and self._trace().digest == found.digest:
            raise ValueError(_changed("traced again they are others"))
        self._check_same_numbers()

    def _check_same_numbers(self) -> None:
        """Raise unless a new program of the densities agrees with the one that is kept."""
        points = self.probes()
        with precision_context("float64"):
            again = jax.jit(lambda flat: self._densities(flat))
            now = [np.hstack([np.asarray(part) for part in again(point)]) for point in points]
        kept = [np.hstack(pair) for pair in self._kept_densities(points)]
        for one, two in zip(kept, now, strict=True):
            largest = np.abs(one[np.isfinite(one)]).max(initial=1.0)
            _check_equal(one, two, _ROUNDING * largest)

    def probes(self) -> Float[np.ndarray, "2 d"]:
        """The starting point, and one near it where no coefficient is zero."""
        start = self.start
        return np.stack([start, start + 0.1 * np.random.default_rng(0).normal(size=start.shape)])

    def _kept_densities(
        self, points: Float[np.ndarray, "point d"]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Log prior and rows at each point, by the program that is kept."""
        batches = list(rows_at(self, points))
        return [pair for batch in batches for pair in zip(*batch, strict=True)]

    def check_simulate(self, several: bool = False) -> None:
        """Raise unless ``simulate`` gives what ``y`` has of every row, from its key.

        That is one number, or ``several``.
        """
        with precision_context("float64"):
            flat = jnp.asarray(self.flatten(self._template))
            found, again = (trace(self.flat_simulate, jax.random.key(0), flat) for _ in range(2))
        if found.shape.shape != np.shape(self.y):
            raise ValueError(
                "simulate(key, position) must give a replicate of each row of y, but they have "
                f"the shapes {found.shape.shape} and {np.shape(self.y)}; return y's shape"
            )
        if np.ndim(self.y) > 1 and not several:
            raise ValueError(
                "this score needs one number per row, but y and its replicates have shape "
                f"{np.shape(self.y)}; use energy or dss, which take the numbers of all test rows "
                "together"
            )
        if found.unused[0] or found.digest != again.digest:
            raise ValueError(
                "simulate(key, position) must draw with its key and nothing else, but "
                + ("it does not use the key" if found.unused[0] else "traced again it is another")
                + "; use jax.random with that key, not numpy.random"
            )

    def check_derivatives(self, score: str) -> None:
        """Raise unless row log densities can be differentiated by the observed values.

        Two things are found out by evaluating: whether the model is discrete, by what it
        simulates, and whether each row's density depends on its own value alone.
        """
        if self.row_log_density is None or self.y is None:
            raise ValueError(
                f"{score} differentiates row log densities by the observed values, but the model "
                "has none to differentiate; give Model(..., row_log_density=f, y=y) with "
                "f(position, y) the log density of each row"
            )
        values = np.asarray(self.y)
        if values.ndim != 1:
            raise ValueError(f"{score} needs one value per row, but y has shape {values.shape}")
        with precision_context("float64"):
            self._check_continuous(score, values)
            flat = jnp.asarray(self.flatten(self._template))
            self._check_own_value(score, flat, jnp.asarray(values, float))

    def _check_continuous(self, score: str, y: np.ndarray) -> None:
        discrete = y.dtype.kind in "iub"
        if not discrete and self.simulates:
            flat = jnp.asarray(self.flatten(self._template))
            replicate = np.asarray(jax.jit(self.flat_simulate)(jax.random.key(0), flat))
            discrete = replicate.dtype.kind in "iub" or np.array_equal(
                replicate, np.round(replicate)
            )
        if not discrete and not self.simulates and np.array_equal(y, np.round(y)):
            raise ValueError(
                f"{score} needs a density with derivatives by the observed value; all of y are "
                "whole numbers, and without simulate one cannot tell whether the model is "
                "discrete; give Model(..., simulate=f), or use log"
            )
        if discrete:
            raise ValueError(
                f"{score} needs a density with derivatives by the observed value, but "
                f"observations are discrete ({y.dtype}); use log, or crps for counts (values of a "
                "continuous model that happen to be whole numbers must be floats)"
            )

    def _check_own_value(
        self, score: str, flat: Float[Array, " d"], y: Float[Array, " row"]
    ) -> None:
        density, position = self._function("row_log_density"), self.unflatten(flat)
        along = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, y.shape))

        def both(y: Array) -> tuple[Array, Array, Array, Array]:
            rows, change = jax.jvp(lambda y: density(position, y), (y,), (along,))
            return rows, change, *self.flat_derivatives(flat)

        rows, change, first, second = (np.asarray(a) for a in jax.jit(both)(y))
        expected = np.asarray(self.flat_log_likelihood(flat))
        if not np.allclose(rows, expected, rtol=1e-6, atol=1e-8, equal_nan=True):
            raise ValueError(
                "row_log_density(position, y) must equal log_likelihood(position) at the observed "
                f"y, but they differ by up to {np.nanmax(np.abs(rows - expected)):.3g}; leave "
                "log_likelihood out, it follows from row_log_density"
            )
        if not np.allclose(change, first * np.asarray(along), rtol=1e-6, atol=1e-8):
            row = int(np.argmax(np.abs(change - first * np.asarray(along))))
            raise ValueError(
                f"{score} needs each row's density to depend on its own value of y alone, but row "
                f"{row}'s changes with others'; let lagged values enter as data, not through y"
            )
        if not (np.isfinite(first).all() and np.isfinite(second).all()):
            bad = int(np.flatnonzero(~(np.isfinite(first) & np.isfinite(second)))[0])
            raise ValueError(
                f"{score} needs finite derivatives by the observed values, but row {bad}'s are "
                f"{first[bad]} and {second[bad]} at the starting position; look for where branches "
                "in row_log_density"
            )

    def check_values(self) -> None:
        """Raise unless densities at the starting point are numbers, whenever they are evaluated."""
        self.check_same()
        points = self.probes()
        kept = self._kept_densities(np.concatenate([points, points]))
        prior, rows = kept[0]
        if not np.isfinite(prior):
            raise ValueError(
                f"log_prior must be finite at the starting position, but is {prior}; choose "
                "another init, and check transforms and their Jacobians"
            )
        bad = np.flatnonzero(np.isnan(rows) | (rows == np.inf))
        if bad.size:
            raise ValueError(
                f"log_likelihood must be a number for every row, but {bad.size} of {self.n_obs} "
                f"rows are not at the starting position, first row {bad[0]} ({rows[bad[0]]}); "
                "look for missing values (NaN) in the data and drop or impute those rows"
            )
        for k in range(len(points)):
            once, twice = (np.hstack(pair) for pair in (kept[k], kept[k + len(points)]))
            _check_equal(once, twice, _ROUNDING * _total_size(once))
        self.__dict__["_evaluated"] = True

    def check_gradient(self) -> None:
        """Raise unless the gradient at the starting point is what HMC can work with.

        And unless its program agrees with that of the densities. Looked at once.
        """
        if self.__dict__.get("_has_gradient"):
            return
        points = self.probes()
        kept, ends = self._kept_densities(points), gradients(self, points)
        wrong = ~np.isfinite(np.asarray(ends.gradient[0]))
        if wrong.any():
            raise ValueError(
                "the gradient of the log density must be finite at the starting position, but "
                f"{wrong.sum()} of {wrong.size} entries are not; choose another init, or guard "
                "jnp.where branches that divide by or take logs of zero"
            )
        for pair, total in zip(kept, ends.log_density, strict=True):
            once = np.hstack(pair)
            with np.errstate(invalid="ignore"):  # infinities of either sign, away from the start
                whole = once.sum(keepdims=True)
            _check_equal(whole, np.array([total]), _PROGRAMS * _total_size(once))
        self.__dict__["_has_gradient"] = True


def _total_size(values: np.ndarray) -> float:
    return float(np.abs(values[np.isfinite(values)]).sum())


def _check_equal(one: np.ndarray, two: np.ndarray, tolerance: float) -> None:
    """Raise unless what a model's functions gave at one position is what they gave before."""
    if not np.allclose(one, two, rtol=0.0, atol=tolerance, equal_nan=True):
        k = int(np.argmin(np.isclose(one, two, rtol=0.0, atol=tolerance, equal_nan=True)))
        message = f"one that was {one[k]:.10g} is {two[k]:.10g} when evaluated again"
        raise ValueError(_changed(message))


def _changed(how: str) -> str:
    return (
        "log_prior and log_likelihood must give the same numbers whenever they are evaluated, but "
        f"{how}; if data have changed since the model was first used, make a new Model of them; if "
        "the functions draw random numbers (numpy.random, a key made of the time) or keep other "
        "state, take it out"
    )


def _row_shape_message(shape: tuple[int, ...], n_obs: int) -> str:
    if shape == ():
        hint = "return one log density per row, not their sum"
    elif len(shape) == 1:
        hint = "set n_obs to the number of rows of the likelihood, or mend the likelihood"
    else:
        hint = "sum over the event axes so that one value per row remains"
    return f"log_likelihood(position) must have shape ({n_obs},), but has shape {shape}; {hint}"
