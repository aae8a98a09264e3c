"""The paper's Example 3: does the floor help to predict radon in homes of a new county?

Log radon of 12,573 homes in 386 US counties (Gelman and Hill 2006). Model A,

    log_radon ~ N(alpha_j + beta floor_measure, sigma_y), alpha_j ~ N(mu_alpha, sigma_alpha),

with mu_alpha ~ N(0, 4), beta ~ N(0, 1), sigma_alpha ~ Gamma(6, 9), sigma_y ~ Gamma(10, 10); model
B leaves the floor out. Second arguments of N are standard deviations, those of Gamma rates. As in
the paper, ``floor_measure`` is used as a number, also where it is 9. Each fold leaves a county out.
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

PLAN = Plan(draws=100, quick_folds=slice(0, None, 32), fit_draws=2000)


def model(data: pd.DataFrame, with_floor: bool, name: str) -> fw.Model:
    """County effects, non-centred, with or without the floor."""
    county = data["county_idx"].to_numpy() - 1
    floor, y = data["floor_measure"].to_numpy(float), data["log_radon"].to_numpy(float)

    # users' own functions, written as users would: without types
    def log_prior(q):
        total = -0.5 * (q["mu_alpha"] / 4.0) ** 2 - 0.5 * jnp.sum(q["z"] ** 2)
        total += log_gamma_prior(q["log_sigma_alpha"], 6.0, 9.0)
        total += log_gamma_prior(q["log_sigma_y"], 10.0, 10.0)
        return total - 0.5 * q["beta"] ** 2 if with_floor else total

    def effects(q):
        alpha = q["mu_alpha"] + jnp.exp(q["log_sigma_alpha"]) * q["z"]
        return alpha[county], q["beta"] * floor if with_floor else 0.0

    def row_log_density(q, y):
        of_county, of_floor = effects(q)
        # in this order XLA fuses the look-up of effects with what follows, which is faster
        return normal_log_density(y - of_county, of_floor, q["log_sigma_y"])

    def simulate(key, q):
        return sum(effects(q)) + jnp.exp(q["log_sigma_y"]) * jax.random.normal(key, y.shape)

    init = {
        "mu_alpha": 1.0,
        "log_sigma_alpha": -0.5,
        "log_sigma_y": 0.0,
        "z": np.zeros(county.max() + 1),
    }
    if with_floor:
        init["beta"] = 0.0
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
    return {"A": model(data, True, "A, floor"), "B": model(data, False, "B, no floor")}


def folds(data: pd.DataFrame) -> fw.Folds:
    """Leave one county out, named by its index."""
    return fw.leave_group_out(data["county_idx"].to_numpy())


def run(options: Options) -> Outcome:
    """Cross-validate both models and compare them."""
    data = datasets.load("radon_all")
    return conduct("radon", models(data), folds(data), PLAN, options, "homes of a new county")
