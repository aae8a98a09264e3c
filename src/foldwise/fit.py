"""The full-data fit: where the folds' starting points and tuning come from.

NUTS with Stan's window adaptation, from BlackJAX. Warm-up and sampling are one compiled program
that runs the chains side by side on all cores, a segment of iterations at a time.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from foldwise.checks import check_count, resolve_seed
from foldwise.metric import DENSE_DIMENSION, shrunk_covariance
from foldwise.model import Model
from foldwise.progress import Progress
from foldwise.runtime import compiled, import_meanwhile, lanes, precision_context

_SEGMENT = 100
# A dense mass matrix helps correlated parameters, but BlackJAX factorises it in every iteration,
# which costs more than it saves beyond a few parameters.
_DENSE_DIMENSION = 20
# Vehtari et al. (2021): chains of one posterior should agree this well.
RHAT_LIMIT = 1.01
# Too few effective draws leave the covariance, and the full-data side of the bridge, to chance.
ESS_LIMIT = 400
# Standard errors that the log density of draws made elsewhere may be off the posterior's.
MOST_DRIFT = 8.0


class FitWarning(UserWarning):
    """The full-data fit has not converged well."""


@dataclass(frozen=True, eq=False)
class Fit:
    """Draws of a model's full-data posterior and their diagnostics.

    Attributes
    ----------
    positions
        Unconstrained draws as flat vectors, shape ``(chain, draw, d)``.
    step_size
        NUTS step size of each chain.
    divergences
        Number of divergent transitions after warm-up.
    fingerprint
        Log prior and summed log likelihood at the first draw; a model that gives other values
        there is another model.
    seed
        Seed of the run; for draws from elsewhere, a number made from them.
    seconds
        How long it took.
    name
        Name of the model.
    gradients
        Number of gradients that the draws took, warm-up included; 0 for draws made elsewhere.
    """

    positions: Float[np.ndarray, "chain draw d"]
    fingerprint: tuple[float, float]
    step_size: Float[np.ndarray, " chain"]
    divergences: int
    seed: int
    seconds: float = 0.0
    name: str | None = field(default=None)
    gradients: int = 0

    @classmethod
    def from_arviz(cls, model: Model, idata: Any) -> Fit:
        """A fit from draws made elsewhere: PyMC, nutpie, NumPyro, Stan, ... in ArviZ's form.

        Parameters
        ----------
        model
            The model they are of.
        idata
            What holds a ``posterior`` group with a variable for every parameter of the model
            (``model.constrain`` names them): a DataTree, an InferenceData, or that group itself.
        """
        posterior = _posterior(idata)
        divergences = 0
        if hasattr(idata, "sample_stats") and "diverging" in idata.sample_stats:
            divergences = int(np.asarray(idata.sample_stats["diverging"]).sum())
        draws = {
            str(name): np.asarray(posterior[name].transpose("chain", "draw", ...))
            for name in posterior.data_vars
        }
        return _fit_from_draws(model, draws, divergences)

    @classmethod
    def from_numpyro(cls, model: Model, mcmc: Any) -> Fit:
        """A fit from a finished ``numpyro.infer.MCMC``.

        Parameters
        ----------
        model
            What ``from_numpyro`` made of the NumPyro model.
        mcmc
            The finished run, at least two chains of 100 draws.
        """
        samples = mcmc.get_samples(group_by_chain=True)
        diverging = mcmc.get_extra_fields().get("diverging", 0)
        draws = {name: np.asarray(values) for name, values in samples.items()}
        return _fit_from_draws(model, draws, int(np.sum(diverging)))

    @property
    def flat(self) -> Float[np.ndarray, "draw d"]:
        """Draws of all chains, chain by chain."""
        return self.positions.reshape(-1, self.positions.shape[-1])

    @cached_property
    def rhat(self) -> Float[np.ndarray, " d"]:
        """Rank-normalised split R-hat of each parameter (arviz-stats)."""
        return _by_parameter("rhat", self.positions)

    @cached_property
    def ess(self) -> Float[np.ndarray, " d"]:
        """Bulk effective sample size of each parameter (arviz-stats)."""
        return _by_parameter("ess", self.positions)

    @cached_property
    def covariance(self) -> Float[np.ndarray, "d d"] | Float[np.ndarray, " d"]:
        """Posterior covariance, shrunk; only its diagonal beyond 500 parameters."""
        if self.positions.shape[-1] > DENSE_DIMENSION:
            return np.maximum(self.flat.var(axis=0, ddof=1), np.finfo(float).tiny ** 0.5)
        return shrunk_covariance(self.flat, max(float(np.median(self.ess)), 10.0))

    def central_draws(self, count: int) -> Float[np.ndarray, "count d"]:
        """The draws nearest to the posterior mean, in units of the posterior sds."""
        scale = np.maximum(self.flat.std(axis=0), np.finfo(float).tiny ** 0.5)
        distance = (((self.flat - self.flat.mean(axis=0)) / scale) ** 2).sum(axis=1)
        return self.flat[np.argsort(distance, kind="stable")[:count]]

    def check(self, model: Model) -> None:
        """Raise if the draws are not of this model's posterior."""
        if self.positions.shape[-1] != model.dimension:
            raise ValueError(
                f"the fit must be of the model that is cross-validated, but its draws have "
                f"{self.positions.shape[-1]} parameters and the model {model.dimension}; "
                "pass fit=foldwise.fit(model), or leave fit out"
            )
        now = _fingerprint(model, self.positions[0, 0])
        if not np.allclose(now, self.fingerprint, rtol=1e-4, atol=1e-4):
            raise ValueError(
                "the fit must be of the model that is cross-validated, but at the fit's first "
                f"draw this model's log prior and log likelihood are {now[0]:.6g} and "
                f"{now[1]:.6g}, and were {self.fingerprint[0]:.6g} and {self.fingerprint[1]:.6g} "
                "when it was fitted; pass fit=foldwise.fit(model), or leave fit out"
            )

    def problems(self) -> list[str]:
        """What is wrong with the fit, in plain words; empty when it is fine."""
        found = []
        if np.nanmax(self.rhat) > RHAT_LIMIT:
            found.append(f"R-hat is up to {np.nanmax(self.rhat):.3f} (should be below 1.01)")
        if np.nanmin(self.ess) < ESS_LIMIT:
            found.append(f"ESS is down to {np.nanmin(self.ess):.0f} (should be over {ESS_LIMIT})")
        if self.divergences:
            found.append(f"{self.divergences} divergent transitions")
        return found

    def __repr__(self) -> str:
        chains, draws, d = self.positions.shape
        found = self.problems()
        return (
            f"Fit of {self.name or 'model'}: {chains} chains x {draws} draws, {d} parameters, "
            f"{self.seconds:.1f} s\n"
            f"  R-hat max {np.nanmax(self.rhat):.3f}, ESS min {np.nanmin(self.ess):.0f}, "
            f"{self.divergences} divergences, seed {self.seed}"
            + (f"\n  check the model first: {'; '.join(found)}" if found else "")
        )


def _posterior(idata: Any) -> Any:
    """The posterior group of what ArviZ made, as a Dataset."""
    import xarray as xr

    if isinstance(idata, xr.Dataset):
        return idata
    group = getattr(idata, "posterior", None)
    if group is None:
        raise TypeError(
            "idata must hold a posterior group, as a DataTree or InferenceData does; got "
            f"{type(idata).__name__}"
        )
    return group.to_dataset() if isinstance(group, xr.DataTree) else group


def _fit_from_draws(model: Model, draws: dict[str, np.ndarray], divergences: int) -> Fit:
    """A fit from draws (chain, draw, ...) of the model's parameters by name."""
    names = _parameter_shapes(model)
    missing = [name for name in names if name not in draws]
    if missing:
        raise ValueError(
            f"draws must have every parameter of the model, but {', '.join(missing)} are missing; "
            f"they have {', '.join(draws)}"
        )
    for name, shape in names.items():
        if draws[name].shape[2:] != shape:
            raise ValueError(
                f"draws of {name!r} must have shape (chain, draw, *{shape}), but have "
                f"{draws[name].shape}; pass draws of this model"
            )
    chains, count = draws[next(iter(names))].shape[:2]
    if chains < 2 or count < 100:
        raise ValueError(
            f"a fit needs at least 2 chains of 100 draws, but these are {chains} of {count}"
        )

    def flatten(parameters: dict[str, Array]) -> Array:
        position = parameters if model.unconstrain is None else model.unconstrain(parameters)
        # ``unconstrain`` may give the parts of a position in another order than ``init``
        return model.flatten(position)

    with precision_context("float64"):
        chosen = {name: np.asarray(draws[name], float) for name in names}
        positions = np.asarray(jax.jit(jax.vmap(jax.vmap(flatten)))(chosen))
    if not np.isfinite(positions).all():
        bad = int((~np.isfinite(positions)).any(axis=2).sum())
        raise ValueError(
            f"draws must lie inside the support of the model's parameters, but {bad} of "
            f"{chains * count} do not; pass draws of this model"
        )
    digest = hashlib.blake2b(positions.tobytes(), digest_size=7).digest()
    result = Fit(
        positions,
        _fingerprint(model, positions[0, 0]),
        np.full(chains, np.nan),
        divergences,
        int.from_bytes(digest, "big"),  # the same draws have the same seed
        0.0,
        model.name,
    )
    if not np.isfinite(result.fingerprint[0]):
        raise ValueError(
            "the model's log prior must be finite at the draws, but at the first it is "
            f"{result.fingerprint[0]}; pass draws of this model"
        )
    if result.problems():
        message = f"draws of {model.name or 'model'}: {'; '.join(result.problems())}"
        warnings.warn(message, FitWarning, stacklevel=3)
    return result


def check_draws(model: Model, fit: Fit, ends: Float[np.ndarray, "chain d"]) -> None:
    """Raise unless draws made elsewhere are of the model's posterior.

    ``ends`` are the ends of chains that started at such draws and sampled the posterior: if that
    is what the draws are of, their log densities have the same mean. The difference may be
    ``MOST_DRIFT`` of its standard errors, for as many effective draws as there are chains.
    """
    some = fit.flat[np.linspace(0, len(fit.flat) - 1, 400).astype(int)]
    before, after = (
        np.concatenate([prior + rows.sum(axis=1) for prior, rows in evaluate_rows(model, part)])
        for part in (some, ends)
    )
    drift = (after.mean() - before.mean()) / (before.std() * np.sqrt(2.0 / len(ends)))
    if abs(drift) > MOST_DRIFT:
        raise ValueError(
            "the draws must be of this model's posterior given all its rows, but chains that start "
            f"at them go elsewhere: the log density changes from {before.mean():.1f} (sd "
            f"{before.std():.1f}) to {after.mean():.1f} on average; pass draws of this model with "
            "this data and these priors, or leave fit out"
        )


def _parameter_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by name."""
    with precision_context("float64"):
        template = model.unflatten(model.initial(jax.random.key(0)))
        shapes = template if model.constrain is None else jax.eval_shape(model.constrain, template)
    if not isinstance(shapes, dict):
        raise TypeError(
            "draws are matched to parameters by name, but the model's position is a "
            f"{type(shapes).__name__}; give Model an init that is a dict, or constrain and "
            "unconstrain"
        )
    return {str(name): tuple(np.shape(part)) for name, part in shapes.items()}


class _Chain(NamedTuple):
    """One NUTS chain and its adaptation."""

    key: UInt32[Any, " 2"]
    nuts: Any
    step_size: Any
    mass: Any


class _Schedule(NamedTuple):
    """What the iterations of one segment do."""

    slow: Bool[Any, " draw"]
    window_end: Bool[Any, " draw"]
    adapting: Bool[Any, " draw"]
    first: Int[Any, ""]
    draws: Int[Any, ""]


def fit(
    model: Model,
    chains: int = 4,
    draws: int = 1000,
    warmup: int = 1000,
    seed: int | None = None,
    progress: bool = True,
) -> Fit:
    """Draw from the posterior of ``model`` given all rows.

    NUTS with Stan's window adaptation, its metric dense up to 20 parameters, diagonal beyond.
    Warns when R-hat is over 1.01, an ESS below 400, or transitions diverge: cross-validation
    inherits the fit's problems.

    Parameters
    ----------
    model
        What to fit.
    chains
        Number of chains.
    draws
        Draws kept from each chain.
    warmup
        Adaptation iterations before them.
    seed
        Whole number; None draws one, which the result records.
    progress
        Whether to show a progress bar.
    """
    return full_data_fit(model, chains, draws, warmup, seed, progress)


def full_data_fit(
    model: Model,
    chains: int,
    draws: int,
    warmup: int,
    seed: int | None,
    progress: bool,
    meanwhile: Callable[[], None] = lambda: None,
) -> Fit:
    """What :func:`fit` does; its warning points at the caller of the function that calls it.

    ``meanwhile()`` is called while the fit's program compiles.
    """
    import_meanwhile("arviz_stats.base", "xarray")
    check_count("chains", chains, 2)
    check_count("draws", draws, 100)
    check_count("warmup", warmup, 100)
    model.check()
    seed = resolve_seed(seed)
    began = time.perf_counter()
    with Progress(progress) as bar:
        run = _run_nuts(model, chains, draws, warmup, seed, bar, meanwhile)
    positions, step_size, divergences, gradients = run
    if not np.isfinite(positions).all():
        raise FloatingPointError(
            "the full-data fit gave draws that are not finite; check the model's log density "
            "for overflow, and its init"
        )
    result = Fit(
        positions,
        _fingerprint(model, positions[0, 0]),
        step_size,
        divergences,
        seed,
        time.perf_counter() - began,
        model.name,
        gradients,
    )
    if result.problems():
        message = f"full-data fit of {model.name or 'model'}: {'; '.join(result.problems())}"
        warnings.warn(message, FitWarning, stacklevel=3)
    return result


def _run_nuts(
    model: Model,
    chains: int,
    draws: int,
    warmup: int,
    seed: int,
    bar: Progress,
    meanwhile: Callable[[], None],
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Positions (chain, draw, d), step size by chain, divergences after warm-up, gradients."""
    from blackjax.adaptation.window_adaptation import build_schedule

    bar.start(f"compiling the full-data fit{_of(model)}")

    def segment(states: Any, schedule: Any) -> Any:
        return _nuts_segment(model, states, schedule)

    states = _first_states(model, -(-chains // lanes()) * lanes(), seed)
    table = np.zeros((warmup + draws, 2), int)
    table[:warmup] = np.asarray(build_schedule(warmup))
    program = compiled(model, segment, states, _schedule(table, 0, warmup))
    meanwhile()
    program.ready()

    bar.start(f"full-data fit{_of(model)}", warmup + draws)
    kept, divergences, gradients = [], 0, 0
    for first in range(0, warmup + draws, _SEGMENT):
        states, positions, divergent, steps = program(states, _schedule(table, first, warmup))
        sampled = np.arange(first, min(first + _SEGMENT, warmup + draws)) >= warmup
        kept.append(positions[:chains, : len(sampled)][:, sampled])
        divergences += int(divergent[:chains, : len(sampled)][:, sampled].sum())
        gradients += int(steps[:chains].sum())
        bar.advance(len(sampled))
    step_size = np.exp(states.step_size.log_step_size_avg[:chains])
    return np.concatenate(kept, axis=1), step_size, divergences, gradients


def _of(model: Model) -> str:
    return f" of {model.name}" if model.name else ""


def _schedule(table: np.ndarray, first: int, warmup: int) -> _Schedule:
    part = np.zeros((_SEGMENT, 2), int)
    rows = table[first : first + _SEGMENT]
    part[: len(rows)] = rows
    adapting = np.arange(first, first + _SEGMENT) < warmup
    numbers = np.int32(first), np.int32(len(rows))
    return _Schedule(part[:, 0] == 1, part[:, 1] == 1, adapting, *numbers)


def _adaptation(model: Model) -> tuple[Any, Any]:
    """Adaptation of the step size, and of a mass matrix that is dense in few dimensions."""
    from blackjax.adaptation.mass_matrix import mass_matrix_adaptation
    from blackjax.adaptation.step_size import dual_averaging_adaptation

    diagonal = model.dimension > _DENSE_DIMENSION
    return dual_averaging_adaptation(0.8), mass_matrix_adaptation(diagonal)


def _log_density(model: Model) -> Callable[[Array], Array]:
    return lambda q: model.flat_log_prior(q) + model.flat_log_likelihood(q).sum()


def _first_states(model: Model, chains: int, seed: int) -> _Chain:
    """Every chain at its start, from what is compiled already: JAX would compile for it."""
    from blackjax.mcmc.hmc import HMCState

    step, mass = _adaptation(model)
    words = [np.random.SeedSequence([seed, 7, k]).generate_state(4) for k in range(chains)]
    keys = np.stack(words).astype(np.uint32)
    with precision_context("float64"):
        starts = [model.initial(jax.random.wrap_key_data(key)) for key in keys[:, :2]]
        # BlackJAX starts from weakly typed numbers; a state that is saved and restored is not
        typed = jax.jit(
            lambda: jax.tree.map(jnp.asarray, (step[0](1.0), mass[0](model.dimension)))
        )()
    position = np.stack([np.asarray(start, float) for start in starts])
    prior, rows, gradient = model.evaluate(position)
    adaptation = jax.tree.map(lambda a: np.stack([np.asarray(a)] * chains), typed)
    state = HMCState(position, prior + rows.sum(axis=1), gradient)
    return _Chain(keys[:, 2:], state, *adaptation)


def _nuts_segment(
    model: Model, chains: _Chain, schedule: _Schedule
) -> tuple[_Chain, Array, Array, Array]:
    """Run each chain of a lane in turn: NUTS in lock-step would wait for the longest tree."""
    from blackjax.mcmc import nuts

    kernel = nuts.build_kernel()
    density = _log_density(model)
    step, mass = _adaptation(model)

    def iterate(i: Array, carry: tuple[_Chain, Array, Array, Array]) -> tuple[Any, ...]:
        chain, positions, divergent, steps = carry
        now = jax.random.fold_in(jax.random.wrap_key_data(chain.key), schedule.first + i)
        adapting = schedule.adapting[i]
        log_step = jnp.where(
            adapting, chain.step_size.log_step_size, chain.step_size.log_step_size_avg
        )
        state, info = kernel(
            now, chain.nuts, density, jnp.exp(log_step), chain.mass.inverse_mass_matrix
        )
        adapted = _adapt_chain(chain, state, info, schedule, i, step, mass)
        chain = chain._replace(nuts=state, step_size=adapted[0], mass=adapted[1])
        positions = positions.at[i].set(state.position)
        divergent = divergent.at[i].set(info.is_divergent)
        return chain, positions, divergent, steps + info.num_integration_steps

    def run(chain: _Chain) -> tuple[Any, ...]:
        positions = jnp.zeros((_SEGMENT, model.dimension))
        divergent = jnp.zeros(_SEGMENT, bool)
        start = (chain, positions, divergent, jnp.int32(0))
        return jax.lax.fori_loop(0, schedule.draws, iterate, start)

    return jax.lax.map(run, chains)


def _adapt_chain(
    chain: _Chain, state: Any, info: Any, schedule: _Schedule, i: Array, step: Any, mass: Any
) -> tuple[Any, Any]:
    """Stan's windows: the step size always adapts, the mass matrix in slow windows."""

    def where(condition: Array, new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)

    new_step = where(
        schedule.adapting[i], step[1](chain.step_size, info.acceptance_rate), chain.step_size
    )
    new_mass = where(schedule.slow[i], mass[1](chain.mass, state.position), chain.mass)
    end = schedule.window_end[i]
    return where(end, step[0](step[2](new_step)), new_step), where(end, mass[2](new_mass), new_mass)


def _fingerprint(model: Model, flat: Float[np.ndarray, " d"]) -> tuple[float, float]:
    prior, rows, _ = model.evaluate(flat[None])
    return float(prior[0]), float(rows[0].sum())


def evaluate_rows(
    model: Model, flat: Float[np.ndarray, "draw d"]
) -> Iterator[tuple[Float[np.ndarray, " draw"], Float[np.ndarray, "draw row"]]]:
    """Log prior and row log likelihoods at flat positions, a batch of them at a time."""
    return _in_batches(*rows_program(model), flat)


def rows_program(model: Model) -> tuple[Any, int]:
    """The program of :func:`evaluate_rows`, and the size of its batches."""

    def prior_and_rows(q: Array) -> tuple[Array, Array]:
        return model.flat_log_prior(q), model.flat_log_likelihood(q)

    return _batch_program(model, prior_and_rows)


def evaluate_derivatives(
    model: Model, flat: Float[np.ndarray, "draw d"]
) -> Iterator[tuple[Float[np.ndarray, "draw row"], Float[np.ndarray, "draw row"]]]:
    """First and second derivatives of row log densities by the observed values, likewise."""
    return _in_batches(*_batch_program(model, model.flat_derivatives), flat)


def _batch_program(
    model: Model, function: Callable[[Array], tuple[Array, Array]]
) -> tuple[Any, int]:
    """``function`` at flat positions, in batches of about 32 MB of row values a lane."""

    def evaluate(draws: Array, _: tuple[()]) -> tuple[Array, Array]:
        return jax.lax.map(function, draws, batch_size=8)

    batch = max(1, min(256, 2**22 // model.n_obs)) * lanes()
    shape = np.zeros((batch, model.dimension))
    return compiled(model, evaluate, shape, (), "float64", function.__name__), batch


def _in_batches(
    program: Any, batch: int, flat: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for first in range(0, len(flat), batch):
        part = flat[first : first + batch]
        padded = np.resize(part, (batch, part.shape[1]))
        one, two = program(padded, ())
        yield one[: len(part)], two[: len(part)]


def _by_parameter(name: str, positions: np.ndarray) -> np.ndarray:
    from arviz_stats.base import array_stats

    function = getattr(array_stats, name)
    return np.asarray(function(positions, chain_axis=0, draw_axis=1))
