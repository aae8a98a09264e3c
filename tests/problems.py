"""Problems whose cross-validation scores are known in closed form.

All are linear in the parameters with normal noise of known sd and a normal prior,

    y = X beta + noise sd * e,    beta ~ N(0, prior sd^2),

so the predictive distribution of any test rows given any training rows is normal.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from scipy.integrate import quad
from scipy.special import logsumexp
from scipy.stats import norm, poisson

import foldwise as fw

# Chains for every fold, for what is told of chains.
# chains on all parameters
by_chains = partial(fw.cross_validate, method="mcmc", marginal=False)


def _joint_dss(y, mean, covariance):
    residual = y - mean
    return -np.linalg.slogdet(covariance)[1] - residual @ np.linalg.solve(covariance, residual)


def _joint_hyvarinen(y, mean, covariance):
    precision = np.linalg.inv(covariance)
    return np.sum(2 * np.diag(precision) - (precision @ (y - mean)) ** 2)


def _energy(y, mean, covariance):
    apart = mean_norm(np.zeros_like(y), 2 * covariance)
    return 0.5 * apart - mean_norm(mean - y, covariance)


def mean_norm(mean, covariance) -> float:
    """E|z| of a normal vector z, by quadrature.

    E sqrt(q) = integral over t > 0 of (1 - E exp(-t q)) t^(-3/2) / (2 sqrt(pi)), and q = |z|^2 has
    E exp(-t q) = prod (1 + 2 t v_i)^(-1/2) exp(-t m_i^2 / (1 + 2 t v_i)) in the eigenbasis, with
    variances v_i and means m_i; t = exp(u).
    """
    variance, vectors = np.linalg.eigh(covariance)
    square = (vectors.T @ mean) ** 2

    def integrand(u):
        t = np.exp(u)
        damp = 1 + 2 * t * variance
        log_transform = -0.5 * np.log(damp).sum() - (t * square / damp).sum()
        return -np.expm1(log_transform) * np.exp(-0.5 * u) / (2 * np.sqrt(np.pi))

    return quad(integrand, -60, 60, limit=500, points=[-10, 0, 10])[0]


def _crps(y, mean, sd):
    z = (y - mean) / sd
    return -sd * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))


def _scrps(y, mean, sd):
    z = (y - mean) / sd
    apart = 2 * sd / np.sqrt(np.pi)
    away = sd * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z))
    return -away / apart - 0.5 * np.log(apart)


def _interval(y, mean, sd, level=0.9):
    half = sd * norm.ppf(0.5 + level / 2)
    return -2 * half - 2 / (1 - level) * np.maximum(np.abs(y - mean) - half, 0)


# Scores of test sets under a normal predictive, and of single rows.
JOINT = {"hyvarinen": _joint_hyvarinen, "dss": _joint_dss, "energy": _energy}
BY_ROW = {
    "hyvarinen_pointwise": lambda y, mean, sd: 2 / sd**2 - ((y - mean) / sd**2) ** 2,
    "dss_pointwise": lambda y, mean, sd: -2 * np.log(sd) - ((y - mean) / sd) ** 2,
    "mse": lambda y, mean, sd: (y - mean) ** 2,
    "rmse": lambda y, mean, sd: (y - mean) ** 2,
    "r2": lambda y, mean, sd: (y - mean) ** 2,
    "mae": lambda y, mean, sd: np.abs(y - mean),
    "crps": _crps,
    "scrps": _scrps,
    "interval": _interval,
    "interval_0.5": lambda y, mean, sd: _interval(y, mean, sd, 0.5),
}
MEANS = ("mse", "rmse", "r2", "mae")
STORED = ("crps", "scrps", "interval", "interval_0.5", "energy")


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
        X, noise, prior = self.X, self.noise, self.prior

        def row_log_density(beta, y):
            z = (y - X @ beta) / noise
            return -0.5 * z**2 - jnp.log(noise) - 0.5 * jnp.log(2 * jnp.pi)

        return fw.Model(
            log_prior=lambda beta: -0.5 * jnp.sum((beta / prior) ** 2),
            log_likelihood=None,
            init=np.zeros(X.shape[1]),
            n_obs=len(self.y),
            simulate=lambda key, beta: X @ beta + noise * jax.random.normal(key, (len(X),)),
            row_log_density=row_log_density,
            y=self.y,
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

    def exact(self, name: str) -> np.ndarray:
        """Exact score ``name`` of each fold: of its test set, or the sum (mean) over its rows."""
        if name == "log":
            return self.joint()
        if name == "log_pointwise":
            return self.pointwise()
        found = []
        for train, test in self.folds:
            mean, covariance = self.predictive(train, test)
            if name in JOINT:
                found.append(JOINT[name](self.y[test], mean, covariance))
                continue
            rows = BY_ROW[name](self.y[test], mean, np.sqrt(np.diag(covariance)))
            found.append(rows.mean() if name in MEANS else rows.sum())
        return np.array(found)

    def exact_total(self, name: str) -> float:
        """Exact total of the score ``name``."""
        by_fold = self.exact(name)
        if name not in MEANS:
            return float(by_fold.sum())
        mean = float(by_fold @ self.folds.n_test / self.folds.n_test.sum())
        return {"rmse": np.sqrt(mean), "r2": 1 - mean / self.y[self.folds.test_rows].var()}.get(
            name, mean
        )

    def _log_density(self, train, test) -> float:
        mean, covariance = self.predictive(train, test)
        residual = self.y[test] - mean
        _, log_determinant = np.linalg.slogdet(covariance)
        quadratic = residual @ np.linalg.solve(covariance, residual)
        return -0.5 * (quadratic + log_determinant + len(test) * np.log(2 * np.pi))


def grid_posterior(log_prior, log_density, grid) -> np.ndarray:
    """Leave-one-out posterior weights of a single parameter on a grid: row x grid."""
    rows = np.stack([log_density(theta) for theta in grid], axis=1)
    log = log_prior(grid) + rows.sum(axis=0) - rows
    weight = np.exp(log - log.max(axis=1, keepdims=True))
    return weight / weight.sum(axis=1, keepdims=True)


class Classes:
    """Two or three classes, log odds b x, 24 rows, leave-one-out; exact by integrating over b."""

    def __init__(self, classes: int = 2):
        rng = np.random.default_rng(7)
        self.x = rng.normal(size=24)
        self.towards = np.array([0.0, 1.0, -0.7])[:classes]
        p = self._probabilities(1.5)
        self.y = (rng.random((24, 1)) > p.cumsum(axis=1)).sum(axis=1)
        self.folds = fw.leave_one_out(24)
        grid = np.linspace(-4, 8, 1201)
        weight = grid_posterior(
            lambda b: -0.125 * b**2,
            lambda b: np.log(self._probabilities(b)[np.arange(24), self.y]),
            grid,
        )
        every = np.stack([self._probabilities(b) for b in grid])
        self.probability = np.einsum("rg,grc->rc", weight, every)

    def _probabilities(self, b):
        odds = np.exp(b * self.x[:, None] * self.towards)
        return odds / odds.sum(axis=1, keepdims=True)

    def model(self) -> fw.Model:
        def logits(b):
            return b * self.x[:, None] * self.towards

        return fw.Model(
            lambda b: -0.125 * b**2,
            None,
            0.0,
            24,
            simulate=lambda key, b: jax.random.categorical(key, logits(b)),
            row_log_density=lambda b, y: jax.nn.log_softmax(logits(b))[jnp.arange(24), y],
            y=self.y,
            name="classes",
        )

    def exact(self, name: str) -> np.ndarray:
        p = self.probability
        if name == "brier":
            gap = ((p - np.eye(p.shape[1])[self.y]) ** 2).sum(axis=1)
            return -gap / 2 if p.shape[1] == 2 else -gap
        if name == "accuracy":
            return (p.argmax(axis=1) == self.y).astype(float)
        return np.log(p[np.arange(24), self.y])

    def exact_total(self, name: str) -> float:
        by_row = self.exact(name)
        return float(by_row.sum() if name == "log" else by_row.mean())


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


def many_effects() -> LinearProblem:
    """Twelve groups of 7 rows with four effects each, too many for cells, leave-one-out.

    Leverages are 0.14 to 0.91: half of the folds are scored by weights, half by chains.
    """
    rng = np.random.default_rng(4)
    group = np.repeat(np.arange(12), 7)
    x = np.column_stack([np.ones(84), rng.normal(size=(84, 3))])
    own = (group[:, None] == np.arange(12))[:, :, None] * x[:, None]
    X = np.column_stack([x, own.reshape(84, 48)])
    y = X @ np.concatenate([[0.5, 1.0, -1.0, 0.0], rng.normal(size=48)])
    y += 0.8 * rng.normal(size=84)
    prior = np.concatenate([np.full(4, 2.0), np.ones(48)])
    return LinearProblem(X, y, 0.8, prior, fw.leave_one_out(84), "four effects")


def far_groups(
    distance: float, rows: int = 5, groups: int = 4, far: int = 1, tau: float = 1.0
) -> LinearProblem:
    """Group means with known variances, ``far`` of them ``distance`` prior sds from the mean."""
    rng = np.random.default_rng(3)
    group = np.repeat(np.arange(groups), rows)
    X = np.column_stack([np.ones(len(group)), tau * (group[:, None] == np.arange(groups))])
    effect = np.where(np.arange(groups) < far, distance, rng.normal(size=groups))
    y = 0.3 + tau * effect[group] + 1.5 * rng.normal(size=len(group))
    prior = np.concatenate([[2.0], np.ones(groups)])
    return LinearProblem(X, y, 1.5, prior, fw.leave_group_out(group), "far groups")


class FarScale:
    """The far group with an unknown sd of the groups, log tau ~ N(0, 1); exact on a grid of tau.

    Positions are (log tau, mu, z_1, ..., z_J), and ``spare`` parameters that add to mu, whose prior
    they share: with 14 of them too many are shared for the globals to be sampled alone.
    """

    def __init__(self, distance: float, rows: int = 5, groups: int = 8, spare: int = 0):
        problem = far_groups(distance, rows, groups)
        self.y, self.folds, self.spare = problem.y, problem.folds, spare
        self.group = np.repeat(np.arange(groups), rows)

    def model(self) -> fw.Model:
        y, group, end = self.y, self.group, 2 + len(self.folds)
        sd = 2.0 / np.sqrt(1 + self.spare)

        def log_likelihood(q):
            mean = q[1] + q[end:].sum() + jnp.exp(q[0]) * q[2:end][group]
            return -0.5 * ((y - mean) / 1.5) ** 2 - jnp.log(1.5) - 0.5 * jnp.log(2 * jnp.pi)

        def log_prior(q):
            shared = (q[1] / sd) ** 2 + jnp.sum((q[end:] / sd) ** 2)
            return -0.5 * (q[0] ** 2 + shared + jnp.sum(q[2:end] ** 2))

        start = np.zeros(2 + len(self.folds) + self.spare)
        return fw.Model(log_prior, log_likelihood, start, len(y), name="far scale")

    def joint(self) -> np.ndarray:
        """Exact log density of each fold's test rows."""
        grid = np.linspace(-6, 8, 1401)
        every = self._evidence(np.arange(len(self.y)), grid)
        return np.array([every - self._evidence(train, grid) for train, _ in self.folds])

    def _evidence(self, rows, grid) -> float:
        """log of the integral over log tau of N(rows; 0, V(tau)) N(log tau; 0, 1)."""
        same = self.group[rows][:, None] == self.group[rows]
        found = []
        for log_tau in grid:
            V = 4.0 + np.exp(2 * log_tau) * same + 1.5**2 * np.eye(len(rows))
            quadratic = self.y[rows] @ np.linalg.solve(V, self.y[rows])
            found.append(-0.5 * (quadratic + np.linalg.slogdet(2 * np.pi * V)[1] + log_tau**2))
        return float(logsumexp(found) + np.log((grid[1] - grid[0]) / np.sqrt(2 * np.pi)))


class FarPoisson:
    """Counts with log rates 1 + z_j, z_j ~ N(0, 1), the first group's z ``distance``; exact."""

    def __init__(self, distance: float, rows: int = 5, groups: int = 4):
        rng = np.random.default_rng(3)
        self.group = np.repeat(np.arange(groups), rows)
        z = np.concatenate([[distance], rng.normal(size=groups - 1)])
        self.y = rng.poisson(np.exp(1.0 + z[self.group]))
        self.folds = fw.leave_group_out(self.group)

    def model(self) -> fw.Model:
        y, group = self.y, self.group

        def log_likelihood(z):
            log_rate = 1.0 + z[group]
            return y * log_rate - jnp.exp(log_rate) - jax.scipy.special.gammaln(y + 1.0)

        start = np.zeros(len(self.folds))
        return fw.Model(
            lambda z: -0.5 * jnp.sum(z**2), log_likelihood, start, len(y), name="far counts"
        )

    def joint(self) -> np.ndarray:
        """Exact log density of each fold's test rows: groups know nothing of each other."""
        z = np.linspace(-10, 15, 250001)
        found = []
        for _, test in self.folds:
            rows = poisson.logpmf(self.y[test][:, None], np.exp(1.0 + z)).sum(axis=0)
            found.append(logsumexp(rows + norm.logpdf(z)) + np.log(z[1] - z[0]))
        return np.array(found)


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
