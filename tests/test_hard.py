"""The hard problems: exact answers on finer grids and by another route, and the densities."""

import hard
import jax
import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import beta, halfcauchy, halfnorm, norm

import foldwise as fw

PROBLEMS = {
    "local level, future": lambda: hard.LocalLevel(n=30, first=20),
    "local level, one": lambda: hard.LocalLevel(scheme="one", n=20),
    "eight schools": hard.EightSchools,
    "near-unit-root": hard.NearUnitRoot,
    "funnel": hard.Funnel,
    "mixture": hard.Mixture,
}


def log_joint(problem, position) -> float:
    """Log prior plus log likelihood of the model, as the sampler sees them."""
    model = problem.model()
    with jax.enable_x64(True):
        return float(model.log_prior(position) + model.log_likelihood(position).sum())


def same_up_to_a_constant(found, expected):
    np.testing.assert_allclose(np.diff(found), np.diff(expected), rtol=1e-9)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_finer_grid_gives_the_same(name):
    problem = PROBLEMS[name]()
    np.testing.assert_allclose(problem.exact(), problem.exact(step=0.7), rtol=0, atol=1e-6)


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


def test_mixture_by_gauss_rules():
    """The share itself and the two means at the points of Gauss rules; a ratio of evidences."""
    problem = hard.Mixture()
    share, of_share = np.polynomial.legendre.leggauss(40)
    a, of_a = np.polynomial.legendre.leggauss(90)
    b, of_b = np.polynomial.legendre.leggauss(240)
    share, a, b = 0.5 + 0.5 * share[:, None, None], 6 * a[:, None], 1 + 18 * b
    prior = of_share[:, None, None] * of_a[:, None] * of_b * beta.pdf(share, 2, 2)
    log_prior = np.log(prior * norm.pdf(a) * norm.pdf(b, 1, 3))

    def row(y):
        return np.log(share * norm.pdf(y, a) + (1 - share) * norm.pdf(y, b))

    whole = log_prior + sum(row(y) for y in problem.y)
    chosen = [0, 3, 20]
    without = [logsumexp(whole - row(y)) for y in problem.y[chosen]]
    expected = logsumexp(whole) - np.array(without)
    np.testing.assert_allclose(problem.exact()[chosen], expected, rtol=0, atol=1e-6)


def test_near_unit_root_by_covariance_matrices_and_gauss_quadrature():
    """rho and sd themselves at the points of Gauss rules, y - rho before normal given them."""
    problem = hard.NearUnitRoot(n=31)
    points, weights = np.polynomial.legendre.leggauss(80)
    # rho = 1 - 2 v^3: points close together near 1, where the mean is lost
    v, sd = np.meshgrid(0.5 + 0.5 * points, 0.9 + 0.8 * points)
    rho = 1 - 2 * v**3
    log_prior = np.log(np.outer(weights, weights) * v**2) + halfnorm.logpdf(sd)
    shared = (200 * v**3)[..., None, None] ** 2
    covariance = shared + sd[..., None, None] ** 2 * np.eye(31)
    residual = (problem.y - rho[..., None] * problem.before)[..., None]

    def evidence(n):
        chosen, r = covariance[..., :n, :n], residual[..., :n, :]
        quadratic = np.sum(r * np.linalg.solve(chosen, r), axis=(-1, -2))
        return logsumexp(log_prior - 0.5 * (quadratic + np.linalg.slogdet(2 * np.pi * chosen)[1]))

    np.testing.assert_allclose(problem.exact(), evidence(31) - evidence(30), rtol=0, atol=1e-6)


def test_funnel_by_gauss_rules():
    """mu and log tau at the points of a Gauss rule, rows normal given them."""
    problem = hard.Funnel()
    points, weights = np.polynomial.legendre.leggauss(120)
    mu, log_tau = np.meshgrid(9 * points, 9 * points)
    log_weight = np.log(np.outer(weights, weights))
    log_weight += norm.logpdf(mu, 0, 2) + norm.logpdf(log_tau, 0, 1.5)

    def log_density(j):
        y = problem.y[problem.group == j]
        covariance = np.eye(len(y)) + np.exp(2 * log_tau)[..., None, None]
        residual = (y - mu[..., None])[..., None]
        quadratic = np.sum(residual * np.linalg.solve(covariance, residual), axis=(-1, -2))
        return -0.5 * (quadratic + np.linalg.slogdet(2 * np.pi * covariance)[1])

    groups = np.array([log_density(j) for j in range(10)])
    whole = logsumexp(log_weight + groups.sum(axis=0))
    without = [logsumexp(log_weight + groups.sum(axis=0) - one) for one in groups]
    np.testing.assert_allclose(problem.exact(), whole - np.array(without), rtol=0, atol=1e-6)


def test_horseshoe_by_short_runs_of_both_routes():
    problem = hard.Horseshoe()
    for route, draws in ((problem.by_fold, 100), (problem.by_full_data, 400)):
        found, error = route(draws, chains=8, seed=5)
        assert (error < 0.04).all()
        gap = np.abs(found - problem.exact())
        # 5, not 4: errors from eight chains
        assert (gap < 5 * np.hypot(error, hard.HORSESHOE_ERROR)).all()


# the flags are what is tested
@pytest.mark.filterwarnings("ignore::foldwise.results.result.FoldWarning")
@pytest.mark.filterwarnings("ignore::foldwise.sampling.fit.FitWarning")
def test_the_horseshoe_keeps_its_warnings(seed):
    """Chains on all parameters are slow and diverge: a run may not call all of itself fine."""
    problem = hard.Horseshoe()
    model = problem.model()
    fit = fw.fit(model, marginal=False, seed=seed, progress=False)
    settings = {"method": "mcmc", "marginal": False, "seed": seed, "progress": False}
    found = fw.cross_validate(model, problem.folds, fit, **settings)
    assert any("divergent" in one for one in fit.problems())
    assert (found.folds["status"] != "fine").any()


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


def test_density_of_the_autoregression():
    problem, rng = hard.NearUnitRoot(), np.random.default_rng(1)
    found, expected = [], []
    for _ in range(3):
        u, mean, log_sd = rng.normal(size=3)
        found.append(log_joint(problem, {"atanh_rho": u, "mean": mean, "log_sd": log_sd}))
        rho, sd = np.tanh(u), np.exp(log_sd)
        prior = np.log(1 - rho**2) + norm.logpdf(mean, 0, 100) + halfnorm.logpdf(sd) + log_sd
        fitted = (1 - rho) * mean + rho * problem.before
        expected.append(prior + norm.logpdf(problem.y, fitted, sd).sum())
    same_up_to_a_constant(found, expected)


def test_density_of_the_funnel():
    problem, rng = hard.Funnel(), np.random.default_rng(1)
    found, expected = [], []
    for _ in range(3):
        mu, log_tau, theta = rng.normal(), rng.normal(), rng.normal(size=10)
        found.append(log_joint(problem, {"mu": mu, "log_tau": log_tau, "theta": theta}))
        prior = norm.logpdf(mu, 0, 2) + norm.logpdf(log_tau, 0, 1.5)
        prior += norm.logpdf(theta, mu, np.exp(log_tau)).sum()
        expected.append(prior + norm.logpdf(problem.y, theta[problem.group]).sum())
    same_up_to_a_constant(found, expected)


def test_density_of_the_mixture():
    problem, rng = hard.Mixture(), np.random.default_rng(1)
    found, expected = [], []
    for _ in range(3):
        logit, a, b = rng.normal(size=3)
        found.append(log_joint(problem, {"logit": logit, "a": a, "b": b}))
        share = 1 / (1 + np.exp(-logit))
        prior = beta.logpdf(share, 2, 2) + np.log(share * (1 - share))
        prior += norm.logpdf(a) + norm.logpdf(b, 1, 3)
        density = share * norm.pdf(problem.y, a) + (1 - share) * norm.pdf(problem.y, b)
        expected.append(prior + np.log(density).sum())
    same_up_to_a_constant(found, expected)


def test_density_of_the_horseshoe():
    problem, rng = hard.Horseshoe(), np.random.default_rng(1)
    found, expected = [], []
    for _ in range(3):
        log_tau, log_sd, log_lambda, z = (rng.normal(size=k) for k in (1, 1, 20, 20))
        q = {"log_tau": log_tau[0], "log_sd": log_sd[0], "log_lambda": log_lambda, "z": z}
        found.append(log_joint(problem, q))
        logs = np.concatenate([log_tau, log_sd, log_lambda])
        prior = np.sum(halfcauchy.logpdf(np.exp(logs)) + logs) + norm.logpdf(z).sum()
        fitted = problem.X @ (z * np.exp(log_tau + log_lambda))
        expected.append(prior + norm.logpdf(problem.y, fitted, np.exp(log_sd)).sum())
    same_up_to_a_constant(found, expected)
