"""Exact predictive densities of left-out groups, where group effects integrate out.

The models are normal, with effects of groups. Given the few hyperparameters theta, the rows of a
group are jointly normal and groups are independent, so the evidence of any set of groups is an
integral over theta alone,

    Z(S) = integral of p(theta) prod_{g in S} p(y_g | theta),

and the joint log predictive density of group g given all others is log Z(all) - log Z(all but g).
The integrals are Gauss-Hermite sums around the mode of each integrand, scaled by its curvature:
no sampling, and more nodes show how far they are from exact. This shares no code with foldwise.

:func:`refit_air` is for the study that has no such answer: one fold fitted alone by NUTS.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from arviz_stats.base import array_stats

import foldwise as fw
from foldwise.studies import air


@dataclass(frozen=True)
class Integrated:
    """Prior of theta, log density of each group given theta, and where to look for the mode."""

    log_prior: Callable
    log_groups: Callable
    start: np.ndarray
    groups: int


def log_gamma(log_x, shape, rate):
    """Log density of log x, x ~ Gamma(shape, rate), up to a constant."""
    return shape * log_x - rate * jnp.exp(log_x)


def radon(data, with_floor):
    """theta: mu_alpha, log sigma_alpha, log sigma_y and, with the floor, beta."""
    by_county = data.groupby("county_idx")
    x, y, key = data["floor_measure"].astype(float), data["log_radon"], data["county_idx"]
    n = by_county.size().to_numpy(float)
    x_mean, y_mean = (v.groupby(key).mean().to_numpy() for v in (x, y))
    dx, dy = x - x.groupby(key).transform("mean"), y - y.groupby(key).transform("mean")
    xx, xy, yy = ((a * b).groupby(key).sum().to_numpy() for a, b in ((dx, dx), (dx, dy), (dy, dy)))

    def log_prior(theta):
        total = -0.5 * (theta[0] / 4.0) ** 2
        total += log_gamma(theta[1], 6.0, 9.0) + log_gamma(theta[2], 10.0, 10.0)
        return total - 0.5 * theta[3] ** 2 if with_floor else total

    def log_groups(theta):
        beta = theta[3] if with_floor else 0.0
        noise = jnp.exp(2.0 * theta[2])
        whole = noise + n * jnp.exp(2.0 * theta[1])
        within = yy - 2.0 * beta * xy + beta**2 * xx
        between = n * (y_mean - beta * x_mean - theta[0]) ** 2
        log_det = 2.0 * (n - 1.0) * theta[2] + jnp.log(whole)
        return -0.5 * (n * np.log(2.0 * np.pi) + log_det + within / noise + between / whole)

    return Integrated(
        log_prior, log_groups, np.array([1.0, -0.5, 0.0, 0.0][: 3 + with_floor]), len(n)
    )


def rats(data, own_slopes):
    """theta: mu_alpha, mu_beta, log sigma_alpha, log sigma_y and, with slopes, log sigma_beta."""
    weight = data.pivot(index="rat", columns="day", values="weight")
    time = weight.columns.to_numpy() - 22.0
    y, n, t = weight.to_numpy(float), len(time), float(time @ time)
    assert time.sum() == 0.0  # so that intercept and slope of a rat are independent
    intercept, slope = y.mean(axis=1), y @ time / t
    rest = ((y - intercept[:, None] - slope[:, None] * time) ** 2).sum(axis=1)

    def log_prior(theta):
        total = -0.5 * ((theta[0] - 250.0) / 20.0) ** 2 - 0.5 * ((theta[1] - 6.0) / 2.0) ** 2
        total += log_gamma(theta[2], 25.0, 2.0) + log_gamma(theta[3], 1.0, 2.0)
        return total + log_gamma(theta[4], 5.0, 10.0) if own_slopes else total

    def log_groups(theta):
        noise = jnp.exp(2.0 * theta[3])
        level = noise + n * jnp.exp(2.0 * theta[2])
        tilt = noise + t * jnp.exp(2.0 * theta[4]) if own_slopes else noise
        log_det = 2.0 * (n - 2.0) * theta[3] + jnp.log(level) + jnp.log(tilt)
        square = rest / noise + n * (intercept - theta[0]) ** 2 / level
        square += t * (slope - theta[1]) ** 2 / tilt
        return -0.5 * (n * np.log(2.0 * np.pi) + log_det + square)

    start = np.array([250.0, 6.0, np.log(12.0), np.log(6.0), np.log(0.5)][: 4 + own_slopes])
    return Integrated(log_prior, log_groups, start, len(y))


def log_predictives(problem, groups, nodes):
    """Joint log predictive density of each of ``groups`` given all other groups."""
    d = len(problem.start)
    one, weight = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.stack(np.meshgrid(*[one] * d, indexing="ij"), axis=-1).reshape(-1, d)
    log_weight = np.log(weight) + 0.5 * one**2
    log_weight = sum(np.meshgrid(*[log_weight] * d, indexing="ij")).ravel()

    def log_joint(theta, out):
        rows = problem.log_groups(theta)
        return problem.log_prior(theta) + jnp.sum(
            jnp.where(jnp.arange(len(rows)) == out, 0.0, rows)
        )

    def log_evidence(out, start):
        mode = newton(partial(log_joint, out=out), start, 30)
        half = jnp.linalg.cholesky(jnp.linalg.inv(-jax.hessian(log_joint)(mode, out)))
        values = jax.vmap(lambda x: log_joint(mode + half @ x, out))(grid) + log_weight
        return jax.nn.logsumexp(values) + jnp.sum(jnp.log(jnp.diagonal(half)))

    def log_evidences(outs):
        centre = newton(partial(log_joint, out=-1), jnp.asarray(problem.start), 50)
        return jax.lax.map(lambda out: log_evidence(out, centre), outs)

    with jax.enable_x64(True):
        evidence = np.asarray(jax.jit(log_evidences)(jnp.asarray([-1, *groups])))
    return evidence[0] - evidence[1:]


def newton(function, start, steps):
    """Maximum of a function by Newton's method, its steps at most one long in every coordinate."""

    def step(_, theta):
        hessian = jax.hessian(function)(theta)
        values, vectors = jnp.linalg.eigh(hessian)
        # uphill also where the function is not concave
        move = vectors @ (
            (vectors.T @ jax.grad(function)(theta)) / jnp.maximum(jnp.abs(values), 1e-8)
        )
        return theta + move / jnp.maximum(jnp.max(jnp.abs(move)), 1.0)

    return jax.lax.fori_loop(0, steps, step, start)


def refit_air(table, name, test, seed, draws=2000, warmup=1000):
    """Log predictive density of month ``test`` from NUTS draws given the months before it alone."""
    alone, whole = (air.models(part)[name] for part in (table.iloc[:test], table))
    fit = fw.fit(alone, draws=draws, warmup=warmup, seed=seed, progress=False)
    with jax.enable_x64(True):
        rows = jax.jit(jax.vmap(lambda q: whole.flat_log_likelihood(q)[test]))(fit.flat)
        rows = np.asarray(rows)
    density = np.exp(rows - rows.max())
    ess = array_stats.ess(density.reshape(fit.positions.shape[:2]), method="mean")
    error = density.std() / density.mean() / np.sqrt(ess)
    return float(np.log(density.mean()) + rows.max()), float(error)
