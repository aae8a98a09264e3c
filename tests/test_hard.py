"""The hard problems: exact answers on finer grids and by another route, and the densities."""

import hard
import jax
import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import halfcauchy, halfnorm, norm

PROBLEMS = {
    "local level, future": lambda: hard.LocalLevel(n=30, first=20),
    "local level, one": lambda: hard.LocalLevel(scheme="one", n=20),
    "eight schools": hard.EightSchools,
}


def log_joint(problem, position) -> float:
    """Log prior plus log likelihood of the model, as the sampler sees them."""
    model = problem.model()
    with jax.enable_x64(True):
        return float(model.log_prior(position) + model.log_likelihood(position).sum())


def same_up_to_a_constant(found, expected):
    np.testing.assert_allclose(np.diff(found), np.diff(expected), rtol=1e-9)


@pytest.mark.parametrize("name", PROBLEMS)
def test_half_the_spacing_gives_the_same(name):
    problem = PROBLEMS[name]()
    np.testing.assert_allclose(problem.exact(), problem.exact(step=0.5), rtol=0, atol=1e-6)


def test_local_level_by_covariance_matrices_and_gauss_quadrature():
    """se and sn themselves at the points of a Gauss rule, y normal given them."""
    n = 12
    future, one = hard.LocalLevel(n=n, first=n - 1), hard.LocalLevel(scheme="one", n=n)
    points, weights = np.polynomial.legendre.leggauss(120)
    se, sn = np.meshgrid(3 * (points + 1), 2 * (points + 1))
    log_prior = np.log(np.outer(weights, weights)) + halfnorm.logpdf(se)
    log_prior += halfnorm.logpdf(sn, scale=0.5)
    steps = np.minimum.outer(np.arange(n), np.arange(n))
    covariance = 4.0 + sn[..., None, None] ** 2 * steps + se[..., None, None] ** 2 * np.eye(n)

    def evidence(rows):
        chosen, y = covariance[..., rows[:, None], rows], one.y[rows]
        quadratic = np.linalg.solve(chosen, y[:, None])[..., 0] @ y
        log_density = -0.5 * (quadratic + np.linalg.slogdet(2 * np.pi * chosen)[1])
        return logsumexp(log_prior + log_density)

    whole = evidence(np.arange(n))
    last, third = (evidence(np.delete(np.arange(n), i)) for i in (n - 1, 2))
    np.testing.assert_allclose(future.exact(), whole - last, rtol=0, atol=1e-6)
    expected = whole - np.array([last, third])
    np.testing.assert_allclose(one.exact()[[n - 1, 2]], expected, rtol=0, atol=1e-6)


def test_eight_schools_by_importance_sampling_from_the_prior():
    problem, rng = hard.EightSchools(), np.random.default_rng(0)
    mu, tau = 5 * rng.normal(size=(400_000, 1)), 5 * np.abs(rng.standard_cauchy((400_000, 1)))
    rows = norm.logpdf(problem.y, mu, np.hypot(tau, problem.sigma))
    weight = np.exp(rows.sum(axis=1, keepdims=True) - rows)
    density = np.exp(rows)
    found = (weight * density).sum(axis=0) / weight.sum(axis=0)
    error = np.sqrt(((weight * (density - found)) ** 2).sum(axis=0)) / weight.sum(axis=0) / found
    assert error.max() < 0.005
    assert (np.abs(np.log(found) - problem.exact()) < 4 * error).all()


@pytest.mark.parametrize("centred", [True, False])
def test_density_of_the_local_level(centred):
    problem, rng = hard.LocalLevel(centred, n=10, first=5), np.random.default_rng(1)
    found, expected = [], []
    for _ in range(3):
        log_se, log_sn, z = rng.normal(), rng.normal(), rng.normal(size=10)
        se, sn = np.exp([log_se, log_sn])
        x = np.cumsum(z * np.r_[2.0, np.full(9, sn)])
        found.append(
            log_joint(problem, {"log_se": log_se, "log_sn": log_sn, "x": x if centred else z})
        )
        scales = halfnorm.logpdf(se) + log_se + halfnorm.logpdf(sn, scale=0.5) + log_sn
        walk = norm.logpdf(x, np.r_[0.0, x[:-1]], np.r_[2.0, np.full(9, sn)])
        latent = walk if centred else norm.logpdf(z)
        expected.append(scales + latent.sum() + norm.logpdf(problem.y, x, se).sum())
    same_up_to_a_constant(found, expected)


@pytest.mark.parametrize("centred", [True, False])
def test_density_of_eight_schools(centred):
    problem, rng = hard.EightSchools(centred), np.random.default_rng(1)
    found, expected = [], []
    for _ in range(3):
        mu, log_tau, z = 5 * rng.normal(), rng.normal(), rng.normal(size=8)
        tau = np.exp(log_tau)
        theta = mu + tau * z
        found.append(
            log_joint(problem, {"mu": mu, "log_tau": log_tau, "theta": theta if centred else z})
        )
        top = norm.logpdf(mu, 0, 5) + halfcauchy.logpdf(tau, scale=5) + log_tau
        latent = norm.logpdf(theta, mu, tau) if centred else norm.logpdf(z)
        rows = norm.logpdf(problem.y, theta, problem.sigma)
        expected.append(top + latent.sum() + rows.sum())
    same_up_to_a_constant(found, expected)
