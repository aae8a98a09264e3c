"""The paper's Example 1: does a fourth group-level covariate improve prediction of new groups?

Grouped regression, y_ij ~ N(alpha_j + x_j' beta, sigma_y), alpha_j ~ N(mu_alpha, sigma_alpha),
with mu_alpha ~ N(0, 1), sigma_alpha and sigma_y ~ half-N(10), beta ~ N(0, 1); second arguments
are standard deviations. Data are simulated from the model: 50 groups of 5 rows, four covariates
with sd 10. Model A has all four, model B drops the last; each fold leaves a group out.

Run it with ``python -m foldwise.studies.toy``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

import foldwise as fw
from foldwise.studies import HALF_LOG_TWO_PI, Options, Outcome, Plan, conduct, normal_log_density

__all__ = ["COVARIATES", "GROUPS", "HALF_LOG_TWO_PI", "folds", "model", "models", "run", "simulate"]

GROUPS, ROWS, COVARIATES = 50, 5, 4
# chains of the folds warm up longer than usual, so that a demo needs no excuses
PLAN = Plan(draws=400, quick_folds=slice(0, 10), warmup=200, fit_draws=2000)


class Data(NamedTuple):
    """Group of each row, covariates of each group, outcome of each row."""

    group: Int[np.ndarray, " row"]
    x: Float[np.ndarray, "group covariate"]
    y: Float[np.ndarray, " row"]


def simulate(seed: int = 2024) -> Data:
    """Data from the model, its parameters drawn from their priors."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0.0, 10.0, (GROUPS, COVARIATES))
    mu_alpha, beta = rng.normal(), rng.normal(size=COVARIATES)
    sigma_alpha, sigma_y = np.abs(rng.normal(0.0, 10.0, 2))
    alpha = rng.normal(mu_alpha, sigma_alpha, GROUPS)
    group = np.repeat(np.arange(GROUPS), ROWS)
    y = rng.normal((alpha + x @ beta)[group], sigma_y)
    return Data(group, x, y)


def model(data: Data, covariates: int, name: str) -> fw.Model:
    """The regression on the first ``covariates`` covariates, non-centred, scales as logs."""
    group, x, y = data.group, data.x[:, :covariates], data.y

    # users' own functions, written as users would: without types
    def log_prior(q):
        normals = q["mu_alpha"] ** 2 + jnp.sum(q["beta"] ** 2) + jnp.sum(q["z"] ** 2)
        scales = 0.0
        for log_sigma in (q["log_sigma_alpha"], q["log_sigma_y"]):
            scales += -0.5 * (jnp.exp(log_sigma) / 10.0) ** 2 + log_sigma  # half-normal, Jacobian
        return -0.5 * normals + scales

    def mean(q):
        alpha = q["mu_alpha"] + jnp.exp(q["log_sigma_alpha"]) * q["z"]
        return (alpha + x @ q["beta"])[group]

    def row_log_density(q, y):
        return normal_log_density(y, mean(q), q["log_sigma_y"])

    def simulate(key, q):
        return mean(q) + jnp.exp(q["log_sigma_y"]) * jax.random.normal(key, y.shape)

    init = {
        "mu_alpha": 0.0,
        "log_sigma_alpha": 1.0,
        "log_sigma_y": 1.0,
        "beta": np.zeros(covariates),
        "z": np.zeros(GROUPS),
    }
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


def models(data: Data) -> dict[str, fw.Model]:
    """Both models."""
    return {"A": model(data, 4, "A, 4 covariates"), "B": model(data, 3, "B, 3 covariates")}


def folds(data: Data) -> fw.Folds:
    """Leave one group out."""
    return fw.leave_group_out(data.group)


def run(options: Options) -> Outcome:
    """Cross-validate both models and compare them."""
    data = simulate()
    return conduct("toy", models(data), folds(data), PLAN, options, "a new group")


if __name__ == "__main__":
    print(run(Options()))
