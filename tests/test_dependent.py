"""Rows that depend on each other given the parameters: scores against closed forms."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import foldwise as fw

N = 24
LOG_2PI = np.log(2 * np.pi)


def masked_normal(y, mean, covariance, rows):
    """Joint log density of the rows marked of a normal vector: others become standard normal."""
    away = jnp.where(rows, y - mean, 0.0)
    both = rows[:, None] & rows
    covariance = jnp.where(both, covariance, jnp.eye(len(y)))
    root = jnp.linalg.cholesky(covariance)
    white = jnp.linalg.solve(root, away)
    size = jnp.sum(jnp.log(jnp.diagonal(root)))
    return -0.5 * jnp.sum(white**2) - size - 0.5 * LOG_2PI * rows.sum()


class Correlated:
    """y ~ N(X beta, V) with V known, beta ~ N(0, 9): all sets of rows are jointly normal."""

    def __init__(self, covariance, seed=0):
        rng = np.random.default_rng(seed)
        self.X = np.column_stack([np.ones(N), np.linspace(-1, 1, N)])
        self.V = covariance
        self.y = self.X @ [0.5, 1.0] + np.linalg.cholesky(covariance) @ rng.normal(size=N)
        self.whole = self.X @ self.X.T * 9.0 + covariance

    def model(self):
        X, y, V = self.X, self.y, self.V
        return fw.Model(
            log_prior=lambda beta: -0.5 * jnp.sum(beta**2) / 9.0,
            log_likelihood=None,
            init=np.zeros(2),
            n_obs=N,
            joint_log_likelihood=lambda beta, rows: masked_normal(y, X @ beta, V, rows),
            name="correlated",
        )

    def log_evidence(self, rows):
        covariance = self.whole[np.ix_(rows, rows)]
        return scipy.stats.multivariate_normal.logpdf(self.y[rows], None, covariance)

    def joint(self, folds):
        found = [
            self.log_evidence(np.union1d(train, test)) - self.log_evidence(train)
            for train, test in folds
        ]
        return np.array(found)

    def pointwise(self, folds):
        return np.array(
            [
                sum(self.log_evidence(np.append(train, i)) - self.log_evidence(train) for i in test)
                for train, test in folds
            ]
        )


def autoregressive(rho=0.8, sd=0.7):
    """Errors of an AR(1) process."""
    lag = np.abs(np.arange(N)[:, None] - np.arange(N))
    return sd**2 * rho**lag


def smooth(length=0.3, sd=1.0, noise=0.3):
    """A Gaussian process with its latent function integrated out."""
    x = np.linspace(-1, 1, N)
    return sd**2 * np.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + noise**2 * np.eye(N)


SCHEMES = {
    "one": fw.leave_one_out(N),
    "blocks": fw.leave_group_out(np.arange(N) // 4),
    "h-block": fw.h_block(N, 2),
    "future": fw.leave_future_out(N, start=N - 6),
}


def check(result, exact):
    z = (result.folds["elpd"].values - exact) / result.folds["mcse"].values
    assert np.abs(z).max() < 4 and np.sqrt(np.mean(z**2)) < 1.8
    assert abs(result.elpd - exact.sum()) < 4 * result.mcse < 1.0
    assert (result.folds["status"] == "fine").all()


@pytest.mark.parametrize(
    ("covariance", "scheme"),
    [*((autoregressive, name) for name in SCHEMES), (smooth, "one"), (smooth, "blocks")],
)
def test_exact_scores(covariance, scheme):
    problem, folds = Correlated(covariance()), SCHEMES[scheme]
    result = fw.cross_validate(problem.model(), folds, scores="log", seed=1, progress=False)
    check(result, problem.joint(folds))


@pytest.mark.parametrize("scheme", ["blocks", "h-block"])
def test_chains_agree(scheme):
    problem, folds = Correlated(autoregressive()), SCHEMES[scheme]
    result = fw.cross_validate(
        problem.model(), folds, scores="log", method="mcmc", draws=200, seed=2, progress=False
    )
    check(result, problem.joint(folds))


@pytest.mark.parametrize("method", ["auto", "mcmc"])
def test_rows_one_by_one(method):
    problem, folds = Correlated(smooth()), SCHEMES["blocks"]
    result = fw.cross_validate(
        problem.model(), folds, scores="log_pointwise", method=method, seed=3, progress=False
    )
    check(result, problem.pointwise(folds))


def test_what_is_left_out_is_really_gone():
    """With rows as if independent, neighbours tell of a test row what h-block should hide."""
    problem, folds = Correlated(smooth()), SCHEMES["h-block"]
    near, far = problem.joint(SCHEMES["one"]).sum(), problem.joint(folds).sum()
    assert near - far > 5.0
    result = fw.cross_validate(problem.model(), folds, seed=4, progress=False)
    assert abs(result.elpd - far) < 4 * result.mcse


def test_what_is_refused():
    model, folds = Correlated(smooth()).model(), SCHEMES["blocks"]
    with pytest.raises(ValueError, match="but crps was asked for"):
        fw.cross_validate(model, folds, scores="crps", progress=False)
    with pytest.raises(ValueError, match="once for each"):
        fw.cross_validate(model, folds, scores=("log", "log_pointwise"), progress=False)
    with pytest.raises(TypeError, match="both were given"):
        fw.Model(lambda x: x, lambda x: x, 0.0, 3, joint_log_likelihood=lambda x, rows: x)
    with pytest.raises(TypeError, match="give joint_simulate"):
        fw.Model(
            lambda x: x,
            None,
            0.0,
            3,
            simulate=lambda key, x: x,
            joint_log_likelihood=lambda x, rows: x,
        )
    with pytest.raises(TypeError, match="there is no joint_log_likelihood"):
        fw.Model(lambda x: x, lambda x: x, 0.0, 3, joint_simulate=lambda key, x, rows: x)
    by_row = fw.Model(
        lambda x: -0.5 * x**2, None, 0.0, 3, joint_log_likelihood=lambda x, rows: x * rows
    )
    with pytest.raises(ValueError, match="must be a scalar"):
        fw.cross_validate(by_row, fw.leave_one_out(3), progress=False)
