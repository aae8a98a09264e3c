"""The authors' minimal online example: a Poisson regression, leave-one-out, in constant memory.

y_i ~ Poisson(exp(x_i' beta)), beta ~ N(0, 1): 50 simulated counts, a constant and four standard
normal covariates, of which the last two have no effect. One model, no selection: the score
measures how well it predicts. By default only running sums are kept (``memory="online"``).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

import foldwise as fw
from foldwise.studies import Options, Outcome, Plan, conduct

ROWS = 50
BETA = np.array([1.0, 1.0, 1.0, 0.0, 0.0])
PLAN = Plan(draws=1000, quick_folds=slice(0, 10), scores=("log", "dss"), memory="online")


class Data(NamedTuple):
    """Covariates, the constant first, and counts."""

    x: Float[np.ndarray, "row coefficient"]
    y: Int[np.ndarray, " row"]


def simulate(seed: int = 42) -> Data:
    """Data from the model with coefficients ``BETA``."""
    rng = np.random.default_rng(seed)
    x = np.column_stack([np.ones(ROWS), rng.normal(size=(ROWS, len(BETA) - 1))])
    return Data(x, rng.poisson(np.exp(x @ BETA)))


def models(data: Data) -> dict[str, fw.Model]:
    """The one model."""
    x, y = data

    # users' own functions, written as users would: without types
    def log_prior(beta):
        return -0.5 * jnp.sum(beta**2)

    def row_log_density(beta, y):
        eta = x @ beta
        return y * eta - jnp.exp(eta) - jax.lax.lgamma(y + 1.0)

    def replicate(key, beta):
        return jax.random.poisson(key, jnp.exp(x @ beta))

    model = fw.Model(
        log_prior,
        None,
        np.zeros(len(BETA)),
        n_obs=len(y),
        simulate=replicate,
        row_log_density=row_log_density,
        y=y,
        name="Poisson regression",
    )
    return {"A": model}


def folds(data: Data) -> fw.Folds:
    """Leave one count out."""
    return fw.leave_one_out(len(data.y))


def run(options: Options) -> Outcome:
    """Cross-validate the model, keeping running sums only."""
    data = simulate()
    return conduct("poisson", models(data), folds(data), PLAN, options, "a count left out")
