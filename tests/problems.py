"""Problems whose cross-validation scores are known in closed form.

All are linear in the parameters with normal noise of known sd and a normal prior,

    y = X beta + noise sd * e,    beta ~ N(0, prior sd^2),

so the predictive distribution of any test rows given any training rows is normal.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

import foldwise as fw


@dataclass(frozen=True)
class LinearProblem:
    """A linear model with known noise, and its exact predictive densities."""

    X: np.ndarray
    y: np.ndarray
    noise: float
    prior: np.ndarray
    folds: fw.Folds
    name: str

    def model(self, **arguments) -> fw.Model:
        X, y, noise, prior = self.X, self.y, self.noise, self.prior

        def log_likelihood(beta):
            z = (y - X @ beta) / noise
            return -0.5 * z**2 - jnp.log(noise) - 0.5 * jnp.log(2 * jnp.pi)

        return fw.Model(
            log_prior=lambda beta: -0.5 * jnp.sum((beta / prior) ** 2),
            log_likelihood=log_likelihood,
            init=np.zeros(X.shape[1]),
            n_obs=len(y),
            y=y,
            name=self.name,
            **arguments,
        )

    def predictive(self, train, test):
        """Mean and covariance of the test rows given the training rows."""
        X = self.X[train]
        precision = X.T @ X / self.noise**2 + np.diag(1 / self.prior**2)
        covariance = np.linalg.inv(precision)
        mean = covariance @ (X.T @ self.y[train]) / self.noise**2
        Z = self.X[test]
        return Z @ mean, Z @ covariance @ Z.T + self.noise**2 * np.eye(len(test))

    def joint(self) -> np.ndarray:
        """Exact log density of each fold's test rows, jointly."""
        return np.array([self._log_density(train, test) for train, test in self.folds])

    def pointwise(self) -> np.ndarray:
        """Exact log density of each fold's test rows, row by row, summed."""
        return np.array(
            [sum(self._log_density(train, [i]) for i in test) for train, test in self.folds]
        )

    def _log_density(self, train, test) -> float:
        mean, covariance = self.predictive(train, test)
        residual = self.y[test] - mean
        _, log_determinant = np.linalg.slogdet(covariance)
        quadratic = residual @ np.linalg.solve(covariance, residual)
        return -0.5 * (quadratic + log_determinant + len(test) * np.log(2 * np.pi))


def normal_mean() -> LinearProblem:
    """Mean of 30 normal observations, leave-one-out."""
    rng = np.random.default_rng(1)
    y = 0.7 + rng.normal(size=30)
    return LinearProblem(
        np.ones((30, 1)), y, 1.0, np.array([2.0]), fw.leave_one_out(30), "normal mean"
    )


def regression(folds: fw.Folds | None = None) -> LinearProblem:
    """Regression on three covariates, 40 rows; leave-one-out unless folds are given."""
    rng = np.random.default_rng(2)
    X = np.column_stack([np.ones(40), rng.normal(size=(40, 3))])
    y = X @ np.array([0.5, 1.0, -1.0, 0.0]) + 0.8 * rng.normal(size=40)
    return LinearProblem(X, y, 0.8, np.full(4, 3.0), folds or fw.leave_one_out(40), "regression")


def hierarchical() -> LinearProblem:
    """Group means with known variances, groups of 2 to 300 rows, leave-group-out.

    beta = (mu, z_1, ..., z_J), the mean of group j is mu + tau z_j.
    """
    rng = np.random.default_rng(3)
    sizes = np.array([2, 3, 5, 8, 12, 20, 40, 80, 150, 300])
    group = np.repeat(np.arange(len(sizes)), sizes)
    tau = 1.0
    X = np.column_stack([np.ones(len(group)), tau * (group[:, None] == np.arange(len(sizes)))])
    y = 0.3 + tau * rng.normal(size=len(sizes))[group] + 1.5 * rng.normal(size=len(group))
    prior = np.concatenate([[2.0], np.ones(len(sizes))])
    return LinearProblem(X, y, 1.5, prior, fw.leave_group_out(group), "hierarchical")


def autoregression(horizon: int = 1, step: int = 1) -> LinearProblem:
    """AR(1) of 40 values with a mean, leave-future-out from row 4 on."""
    rng = np.random.default_rng(4)
    y = np.zeros(41)
    for t in range(1, 41):
        y[t] = 0.2 + 0.6 * y[t - 1] + 0.5 * rng.normal()
    X = np.column_stack([np.ones(40), y[:-1]])
    folds = fw.leave_future_out(40, 4, horizon=horizon, step=step)
    return LinearProblem(X, y[1:], 0.5, np.full(2, 1.0), folds, "autoregression")


def blocked(h: int = 2) -> LinearProblem:
    """The regression with h rows dropped on either side of each test row."""
    return regression(fw.h_block(40, h))


def five_fold() -> LinearProblem:
    """The regression with random 5-fold cross-validation."""
    return regression(fw.k_fold(40, 5))


def long_horizon() -> LinearProblem:
    """The autoregression, three values ahead, so that a partner is three folds on."""
    return autoregression(horizon=3, step=1)


def many_groups() -> LinearProblem:
    """Group means of 120 groups: too many parameters for a metric of each fold's own."""
    rng = np.random.default_rng(5)
    sizes = np.concatenate([[60, 40, 25], rng.integers(1, 6, 117)])
    group = np.repeat(np.arange(120), sizes)
    X = np.column_stack([np.ones(len(group)), 1.0 * (group[:, None] == np.arange(120))])
    y = 0.3 + rng.normal(size=120)[group] + 0.7 * rng.normal(size=len(group))
    prior = np.concatenate([[2.0], np.ones(120)])
    folds = fw.leave_group_out(group)[:30]
    return LinearProblem(X, y, 0.7, prior, folds, "many groups")
