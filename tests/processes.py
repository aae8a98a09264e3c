"""A Gaussian process seen with normal noise, its function a parameter or integrated out."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.scipy.stats import norm

import foldwise as fw
from foldwise.support.factorise import lowering

JITTER = 1e-6


class Process:
    """Normal observations of a Gaussian process with a squared exponential kernel.

    The position has the logs of length scale, amplitude and noise, each normal a priori.
    """

    names = ("log_length", "log_amplitude", "log_noise")
    sd = np.array([0.7, 1.0, 1.0])

    def __init__(self, distance, y, folds, mean):
        self.distance, self.y, self.folds, self.mean = distance, y, folds, np.array(mean)

    def covariance(self, log_length, log_amplitude):
        """That of the latent function at the observed places."""
        close = jnp.exp(-0.5 * (self.distance * jnp.exp(-log_length)) ** 2)
        return jnp.exp(2 * log_amplitude) * (close + JITTER * jnp.eye(len(self.y)))

    def log_prior(self, q):
        """Of the hyperparameters."""
        h = jnp.stack([q[name] for name in self.names])
        return norm.logpdf(h, self.mean, self.sd).sum()

    def latent(self):
        """The model whose parameters are the hyperparameters and the whitened function."""

        def rows(q):
            root = jnp.linalg.cholesky(self.covariance(q["log_length"], q["log_amplitude"]))
            return norm.logpdf(self.y, root @ q["z"], jnp.exp(q["log_noise"]))

        def prior(q):
            return self.log_prior(q) + norm.logpdf(q["z"]).sum()

        init = {name: float(m) for name, m in zip(self.names, self.mean, strict=True)}
        init["z"] = np.zeros(len(self.y))
        return fw.Model(prior, rows, init, len(self.y), name="latent process")

    def integrated(self):
        """The model whose parameters are the hyperparameters alone."""

        def joint(q, rows):
            own = jnp.exp(2 * q["log_noise"]) * jnp.eye(len(self.y))
            whole = self.covariance(q["log_length"], q["log_amplitude"]) + own
            whole = jnp.where(rows[:, None] & rows, whole, jnp.eye(len(self.y)))
            root = jnp.linalg.cholesky(whole)
            away = jnp.where(rows, self.y, 0.0)
            white = jax.scipy.linalg.solve_triangular(root, away, lower=True)
            size = jnp.log(jnp.diagonal(root)).sum() + 0.5 * np.log(2 * np.pi) * rows.sum()
            return -0.5 * jnp.sum(white**2) - size

        init = {name: float(m) for name, m in zip(self.names, self.mean, strict=True)}
        n = len(self.y)
        return fw.Model(
            self.log_prior, None, init, n, joint_log_likelihood=joint, name="integrated process"
        )

    def exact(self, step=0.75, reach=6.0):
        """Log density of each fold's test rows given its training rows.

        By a grid over the hyperparameters, along the principal axes of their posterior; errors of
        such a sum of a smooth function fall faster than any power of ``step``. With Q the inverse
        of the covariance of all rows at given hyperparameters, the test rows given the others have
        precision Q_tt, and are Q_tt^-1 (Q y)_t from their mean.
        """
        with jax.enable_x64(True):
            one = _program(lambda h: self._at(h)[0], self.mean)
            slope = _program(jax.grad(lambda h: self._at(h)[0]), self.mean)
            best = scipy.optimize.minimize(
                lambda h: -float(one(h)), self.mean, jac=lambda h: -np.asarray(slope(h))
            ).x
            curvature = -np.asarray(_program(jax.hessian(lambda h: self._at(h)[0]), best)(best))
            axes = np.linalg.cholesky(np.linalg.inv(curvature))
            line = np.arange(-reach, reach + step / 2, step)
            grid = best + np.array(list(itertools.product(line, repeat=3))) @ axes.T
            some = _program(jax.vmap(self._at), grid[: len(line)])
            found = []
            for points in np.split(grid, len(line) ** 2):
                density, inverse, times_y = (np.asarray(part) for part in some(points))
                found.append([density, *(_left_out(k, inverse, times_y) for k in self.tests)])
        log_joint, *left_out = np.concatenate(found, axis=1)
        both = scipy.special.logsumexp(log_joint)
        return both - scipy.special.logsumexp(log_joint - np.array(left_out), axis=1)

    def _at(self, h):
        """Log posterior of the hyperparameters, the rows' inverse covariance, and it times y."""
        whole = self.covariance(h[0], h[1]) + jnp.exp(2 * h[2]) * jnp.eye(len(self.y))
        root = jnp.linalg.cholesky(whole)
        white = jax.scipy.linalg.solve_triangular(root, self.y, lower=True)
        inverse = jax.scipy.linalg.cho_solve((root, True), jnp.eye(len(self.y)))
        density = -0.5 * jnp.sum(white**2) - jnp.log(jnp.diagonal(root)).sum()
        return density + norm.logpdf(h, self.mean, self.sd).sum(), inverse, inverse @ self.y

    @property
    def tests(self):
        """The test rows of each fold."""
        return np.split(self.folds.test_rows, self.folds.test_start[1:-1])


def _program(function, example):
    """Compiled without LAPACK, whose threads get in each other's way on a busy machine."""
    return jax.jit(function).trace(example).lower(_private_parameters=lowering()).compile()


def _left_out(rows, inverse, times_y):
    precision, away = inverse[:, rows][:, :, rows], times_y[:, rows]
    size = np.linalg.slogdet(precision)[1] - len(rows) * np.log(2 * np.pi)
    solved = np.linalg.solve(precision, away[..., None])[..., 0]
    return 0.5 * (size - (away * solved).sum(axis=1))
