"""The paper's Example 2: does a new rat's growth need a slope of its own?

Weights of 30 young rats on five days (Gelfand et al. 1990). Model A,

    weight ~ N(alpha_j + beta_j (day - 22), sigma_y),
    alpha_j ~ N(mu_alpha, sigma_alpha), beta_j ~ N(mu_beta, sigma_beta),

with mu_alpha ~ N(250, 20), mu_beta ~ N(6, 2), sigma_alpha ~ Gamma(25, 2), sigma_beta ~
Gamma(5, 10), sigma_y ~ Gamma(1, 2); model B has one slope beta ~ N(6, 2) for all rats. Second
arguments of N are standard deviations, those of Gamma rates. Each fold leaves a rat out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

import foldwise as fw
from foldwise import datasets
from foldwise.studies import Options, Outcome, Plan, conduct, log_gamma_prior, normal_log_density

if TYPE_CHECKING:
    import pandas as pd

PLAN = Plan(draws=400, quick_folds=slice(0, 8), fit_draws=2000, scores=("log", "dss", "crps"))


def model(data: pd.DataFrame, own_slopes: bool, name: str) -> fw.Model:
    """Growth curves with a slope for each rat, or one for all.

    Centred: five weights tell more of a rat than the other rats do. Effects and means are in
    units of the prior: q = (alpha - 250) / 20 and (beta - 6) / 2.
    """
    rat, y = data["rat"].to_numpy() - 1, data["weight"].to_numpy(float)
    time, rats = data["day"].to_numpy() - 22.0, int(rat.max()) + 1

    # users' own functions, written as users would: without types
    def log_prior(q):
        total = -0.5 * (q["mu_alpha"] ** 2 + q["mu_beta"] ** 2)
        total += log_gamma_prior(q["log_sigma_alpha"], 25.0, 2.0)
        total += log_gamma_prior(q["log_sigma_y"], 1.0, 2.0)
        log_scale = q["log_sigma_alpha"] - np.log(20.0)
        total += normal_log_density(q["alpha"], q["mu_alpha"], log_scale).sum()
        if own_slopes:
            total += log_gamma_prior(q["log_sigma_beta"], 5.0, 10.0)
            log_scale = q["log_sigma_beta"] - np.log(2.0)
            total += normal_log_density(q["beta"], q["mu_beta"], log_scale).sum()
        return total

    def mean(q):
        slope = q["beta"][rat] if own_slopes else q["mu_beta"]
        return 250.0 + 20.0 * q["alpha"][rat] + (6.0 + 2.0 * slope) * time

    def row_log_density(q, y):
        return normal_log_density(y, mean(q), q["log_sigma_y"])

    def simulate(key, q):
        return mean(q) + jnp.exp(q["log_sigma_y"]) * jax.random.normal(key, y.shape)

    init = {
        "mu_alpha": 0.0,
        "mu_beta": 0.0,
        "log_sigma_alpha": np.log(12.0),
        "log_sigma_y": np.log(6.0),
        "alpha": np.zeros(rats),
    }
    if own_slopes:
        init |= {"log_sigma_beta": np.log(0.5), "beta": np.zeros(rats)}
    return fw.Model(
        log_prior,
        None,
        init,
        n_obs=len(y),
        simulate=simulate,
        row_log_density=row_log_density,
        y=y,
        name=name,
    )


def models(data: pd.DataFrame) -> dict[str, fw.Model]:
    """Both models."""
    return {
        "A": model(data, True, "A, a slope for each rat"),
        "B": model(data, False, "B, one slope"),
    }


def folds(data: pd.DataFrame) -> fw.Folds:
    """Leave one rat out, named by its number."""
    return fw.leave_group_out(data["rat"].to_numpy())


def run(options: Options) -> Outcome:
    """Cross-validate both models and compare them."""
    data = datasets.load("rats")
    return conduct("rats", models(data), folds(data), PLAN, options, "the growth of a new rat")
