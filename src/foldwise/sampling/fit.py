"""The full-data fit: where the folds' starting points and tuning come from."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from foldwise.models.evaluate import rows_at
from foldwise.models.model import Model
from foldwise.sampling.metric import DENSE_DIMENSION, shrunk_covariance
from foldwise.sampling.pooled import MOST_ROWS, Chains, Draws, chosen
from foldwise.scores.diagnostics import DIVERGENT_LIMIT, by_parameter
from foldwise.support.runtime import precision_context
from foldwise.support.seeds import Stream, generator

# Vehtari et al. (2021): chains of one posterior should agree this well.
RHAT_LIMIT = 1.01
# Too few effective draws leave the covariance, and the full-data side of the bridge, to chance.
ESS_LIMIT = 400
# Share of checks that refuse draws of the right posterior by chance.
CHANCE = 1e-4
# Chains that check draws made elsewhere, what each draws for it, and how many of the draws of a
# chain made elsewhere these are compared with.
CHECK_CHAINS, CHECK_DRAWS, _COMPARED = 100, 25, 1000


# R-hat of ranks from which on chains are in different places, not slow: four chains of which one
# is alone in its place have 1.5.
HOPELESS_RHAT = 1.4
# R-hat at which no two chains agree: nothing can be learned from such draws.
FAILED_RHAT = 2.0


class FitError(RuntimeError):
    """There is no full-data fit to cross-validate from."""


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
        Step size of each chain, of NUTS or HMC.
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
        Number of gradients that the draws took, warm-up included; 0 where that is not known.
    thin
        Of how many draws one was kept: more than 1 where the chains had to go on.
    piece
        Draws of the short chains that a chain is made of, 0 where it is one. The first halves of a
        group of short chains, end to end, are one chain, their second halves the next.
    missed
        Number of short chains, of a try before, that stayed where these draws never are.
    made_elsewhere
        Whether anything but :func:`foldwise.fit` made the draws: they are then checked before folds
        start from them.
    sampled
        The parameters that chains have sampled, as places in the flat vector; None for all. The
        others, those of groups, were integrated out and drawn anew given these at every draw.
    """

    positions: Float[np.ndarray, "chain draw d"]
    fingerprint: tuple[float, float]
    step_size: Float[np.ndarray, " chain"]
    divergences: int
    seed: int
    seconds: float = 0.0
    name: str | None = field(default=None)
    gradients: int = 0
    thin: int = 1
    piece: int = 0
    missed: int = 0
    made_elsewhere: bool = True
    sampled: Int[np.ndarray, " sampled"] | None = None

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

    @property
    def end_to_end(self) -> tuple[Float[np.ndarray, "chain draw d"], int]:
        """The draws of each chain in the order they were made, short chains end to end.

        And the number of draws of each of these, 1 where there are none.
        """
        if not self.piece:
            return self.positions, 1
        half, d = self.piece // 2, self.positions.shape[2]
        halves = self.positions.reshape(len(self.positions) // 2, 2, -1, half, d)
        return halves.transpose(0, 2, 1, 3, 4).reshape(len(halves), -1, d), self.piece

    @cached_property
    def rhat(self) -> Float[np.ndarray, " sampled"]:
        """Rank-normalised split R-hat of each parameter that was sampled (arviz-stats)."""
        return by_parameter("rhat", chosen(self.positions, self.sampled))

    @cached_property
    def ess(self) -> Float[np.ndarray, " sampled"]:
        """Bulk effective sample size of each parameter that was sampled (arviz-stats)."""
        return by_parameter("ess", chosen(self.positions, self.sampled))

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
        now = fingerprint_of(model, self.positions[0, 0])
        if not np.allclose(now, self.fingerprint, rtol=1e-4, atol=1e-4):
            raise ValueError(
                "the fit must be of the model that is cross-validated, but at the fit's first "
                f"draw this model's log prior and log likelihood are {now[0]:.6g} and "
                f"{now[1]:.6g}, and were {self.fingerprint[0]:.6g} and {self.fingerprint[1]:.6g} "
                "when it was fitted; pass fit=foldwise.fit(model), or leave fit out"
            )

    @property
    def settled(self) -> bool:
        """Whether folds that start from these draws may be called fine.

        R-hat at most 1.01 and an ESS of at least 400 in every parameter, at most one transition in
        200 divergent, and no place missed that chains from other starts have found. A parameter
        that never changes has no R-hat, and is not settled.
        """
        return is_settled(self) and not self.missed

    def problems(self) -> list[str]:
        """What is wrong with the fit, in plain words; empty when it is fine."""
        found, rhat = [], largest(self.rhat)
        if not rhat <= RHAT_LIMIT:
            apart = ": chains from different starts disagree: several modes?"
            found.append(
                f"R-hat is up to {rhat:.3f} (should be below 1.01)"
                + (apart if rhat > HOPELESS_RHAT else "")
            )
        if np.nanmin(self.ess) < ESS_LIMIT:
            found.append(f"ESS is down to {np.nanmin(self.ess):.0f} (should be over {ESS_LIMIT})")
        if self.missed:
            found.append(
                f"{self.missed} chains from other starts stayed where these draws never are: "
                "chains from different starts disagree: several modes?"
            )
        if self.divergences:
            found.append(f"{self.divergences} divergent transitions")
        return found

    def failure(self) -> str | None:
        """Why no fold can start from these draws; None where folds can."""
        if np.ptp(self.positions, axis=1).min() == 0.0:
            return (
                "a chain did not move in one of its parameters: look at the scale of the "
                "parameters, at init, and for densities that are not finite"
            )
        if largest(self.rhat) > FAILED_RHAT:
            return (
                f"R-hat is {largest(self.rhat):.2f}, so that no two chains agree: the posterior "
                "is improper or nearly so, parameters cannot be told apart by the data, or there "
                "are many modes; give proper priors and fix what is not identified"
            )
        return None

    def warn(self, what: str = "full-data fit", stacklevel: int = 2) -> None:
        """Warn of what is wrong with the fit."""
        if found := self.problems():
            message = f"{what} of {self.name or 'model'}: {'; '.join(found)}"
            warnings.warn(message, FitWarning, stacklevel=stacklevel)

    def __repr__(self) -> str:
        chains, draws, d = self.positions.shape
        found = self.problems()
        return (
            f"Fit of {self.name or 'model'}: {chains} chains x {draws} draws, {d} parameters, "
            f"{self.seconds:.1f} s\n"
            f"  R-hat max {largest(self.rhat):.3f}, ESS min {np.nanmin(self.ess):.0f}, "
            f"{self.divergences} divergences, seed {self.seed}"
            + (f"\n  check the model first: {'; '.join(found)}" if found else "")
        )


def largest(rhat: Float[np.ndarray, " sampled"]) -> float:
    """Largest R-hat; infinite where a parameter never moves."""
    return float(np.nan_to_num(rhat, nan=np.inf).max())


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
        named = {name: np.asarray(draws[name], float) for name in names}
        positions = np.asarray(jax.jit(jax.vmap(jax.vmap(flatten)))(named))
    if not np.isfinite(positions).all():
        bad = int((~np.isfinite(positions)).any(axis=2).sum())
        raise ValueError(
            f"draws must lie inside the support of the model's parameters, but {bad} of "
            f"{chains * count} do not; pass draws of this model"
        )
    digest = hashlib.blake2b(positions.tobytes(), digest_size=7).digest()
    result = Fit(
        positions,
        fingerprint_of(model, positions[0, 0]),
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
    result.warn("draws", stacklevel=4)
    return result


def check_draws(model: Model, fit: Fit, seed: int) -> None:
    """Raise unless draws made elsewhere are of the model's posterior.

    Chains that start at such draws and sample the posterior keep the draws' distribution if it is
    the posterior, and leave it otherwise. Mean and spread of every parameter, of the log prior and
    of the log likelihood are compared before and after, each in standard errors of both sides.
    The largest of all these may be what chance exceeds in ``CHANCE`` of all checks.
    """
    thin = -(-fit.positions.shape[1] // _COMPARED)
    before = _with_densities(model, fit.positions[:, ::thin])
    impossible = int((~np.isfinite(before)).any(axis=2).sum())
    if impossible:
        raise ValueError(
            "the draws must be of this model's posterior given all its rows, but at "
            f"{impossible} of {before[..., 0].size} of them its density is zero or not a number; "
            "pass draws of this model with this data and these priors, or leave fit out"
        )
    start, after = _chains_from(model, fit, seed)
    start, after = _with_densities(model, start), _with_densities(model, after)
    names = [*(f"parameter {k}" for k in range(model.dimension)), "log prior", "log likelihood"]
    gaps = _gaps(before, after)
    climb = after[..., -2:].sum(axis=2).mean(axis=1) - start[..., -2:].sum(axis=2)[:, 0]
    z = np.append(gaps.ravel(), climb.mean() / (climb.std(ddof=1) / np.sqrt(len(climb))))
    worst = int(np.nanargmax(np.abs(z)))
    if np.abs(z[worst]) <= NormalDist().inv_cdf(1.0 - CHANCE / (2 * len(z))):
        return
    name = names[worst % len(names)] if worst < gaps.size else "log density"
    k = min(worst % len(names), len(names) - 1)
    raise ValueError(
        "the draws must be of this model's posterior given all its rows, but chains that start "
        f"at them go elsewhere: mean and sd of the {name} change from {before[..., k].mean():.4g} "
        f"and {before[..., k].std():.3g} to {after[..., k].mean():.4g} and "
        f"{after[..., k].std():.3g}, {abs(z[worst]):.0f} standard errors; pass draws of this "
        "model with this data and these priors, or leave fit out"
    )


def _with_densities(
    model: Model, positions: Float[np.ndarray, "chain draw d"]
) -> Float[np.ndarray, "chain draw quantity"]:
    """Positions, log prior and log likelihood."""
    flat = positions.reshape(-1, model.dimension)
    parts = [np.stack([prior, rows.sum(axis=1)], axis=1) for prior, rows in rows_at(model, flat)]
    return np.concatenate([flat, np.concatenate(parts)], axis=1).reshape(*positions.shape[:2], -1)


def _chains_from(
    model: Model, fit: Fit, seed: int
) -> tuple[Float[np.ndarray, "chain 1 d"], Float[np.ndarray, "chain draw d"]]:
    """Where chains start, at some of the fit's draws, and what they draw from the posterior."""
    rng = generator(seed, Stream.CHECK)
    chains = CHECK_CHAINS if model.n_obs <= MOST_ROWS else CHECK_CHAINS // 3
    start = fit.flat[rng.choice(len(fit.flat), chains, replace=False)]
    run = Chains(model, start, rng, fit.covariance)
    run.tune(10, rough=True)
    run.learn()
    run.tune(20)
    run.learn()
    run.tune(10)
    visited, _ = run.draw(CHECK_DRAWS)
    return start[:, None], visited.transpose(1, 0, 2)


def _gaps(
    before: Float[np.ndarray, "chain draw quantity"],
    after: Float[np.ndarray, "chain draw quantity"],
) -> Float[np.ndarray, "2 quantity"]:
    """Differences of means and of log variances, in their standard errors.

    Of the draws before by their effective number, of those after by the scatter over chains, of
    which there are many.
    """
    found = []
    centres = [values.mean(axis=(0, 1)) for values in (before, after)]
    for square in (False, True):
        one, two = (
            (v - c) ** 2 if square else v for v, c in zip((before, after), centres, strict=True)
        )
        error = [
            one.std(axis=(0, 1)) / np.sqrt(by_parameter("ess", one)),
            two.mean(axis=1).std(axis=0, ddof=1) / np.sqrt(len(two)),
        ]
        mean = [one.mean(axis=(0, 1)), two.mean(axis=(0, 1))]
        if square:
            error = [e / m for e, m in zip(error, mean, strict=True)]
            mean = [np.log(m) for m in mean]
        with np.errstate(invalid="ignore", divide="ignore"):
            found.append((mean[1] - mean[0]) / np.hypot(*error))
    return np.stack(found)


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


def is_settled(run: Draws | Fit) -> bool:
    """Whether R-hat, ESS and divergences are what they should be; not where one has no R-hat."""
    return bool(
        largest(run.rhat) <= RHAT_LIMIT
        and np.min(run.ess) >= ESS_LIMIT
        and divergent_share(run) <= DIVERGENT_LIMIT
    )


def divergent_share(run: Draws | Fit) -> float:
    """Share of transitions that diverged."""
    chains, draws = run.positions.shape[:2]
    return run.divergences / (run.thin * chains * draws)


def fingerprint_of(model: Model, flat: Float[np.ndarray, " d"]) -> tuple[float, float]:
    """Log prior and summed log likelihood at a position: another model has others."""
    ((prior, rows),) = rows_at(model, flat[None])
    return float(prior[0]), float(rows[0].sum())
