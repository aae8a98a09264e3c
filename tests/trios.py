"""The same models three times: as plain JAX functions, in NumPyro and in PyMC.

Positions of the JAX models are unconstrained values by the names of the variables, with logs of
positive ones, as both packages have them.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pymc as pm
import pytensor.tensor as pt
from jax.scipy.stats import norm

import foldwise as fw

N = 30
_rng = np.random.default_rng(11)
X = _rng.normal(size=(N, 2))
GROUP = np.repeat(np.arange(6), 5)
OFFSET = _rng.normal(size=N) * 0.3
TIME = np.linspace(0.0, 1.0, N)
CONTINUOUS = X @ np.array([1.0, -0.5]) + 0.7 * _rng.normal(size=N) + _rng.normal(size=6)[GROUP]
BINARY = (_rng.random(N) < 1 / (1 + np.exp(-X[:, 0]))).astype(int)
COUNTS = _rng.poisson(np.exp(0.5 + 0.4 * X[:, 0] + OFFSET))
ORDERED = np.digitize(X[:, 0] + _rng.logistic(size=N), [-1.0, 1.0])
SERIES = np.zeros(N + 1)
for _t in range(1, N + 1):
    SERIES[_t] = 0.3 + 0.6 * SERIES[_t - 1] + 0.5 * _rng.normal()
DISTANCE = (TIME[:, None] - TIME) ** 2


@dataclass(frozen=True)
class Trio:
    """One model in three forms, as foldwise models."""

    jax: fw.Model
    numpyro: fw.Model
    pymc: fw.Model
    pymc_model: Any


def half_normal(log_x):
    """Log density of a half-normal at exp(log_x), with the Jacobian."""
    return norm.logpdf(jnp.exp(log_x)) + jnp.log(2.0) + log_x


def plain(log_prior, rows, init, y):
    return fw.Model(log_prior, lambda q: rows(q, y), init, len(y), y=y)


def linear():
    def log_prior(q):
        return norm.logpdf(q["a"]) + norm.logpdf(q["b"]).sum() + half_normal(q["s"])

    def rows(q, y):
        return norm.logpdf(y, q["a"] + X @ q["b"], jnp.exp(q["s"]))

    def in_numpyro(y=None):
        a, b = numpyro.sample("a", dist.Normal()), numpyro.sample("b", dist.Normal().expand([2]))
        s = numpyro.sample("s", dist.HalfNormal())
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(a + X @ b, s), obs=y)

    with pm.Model() as model:
        a, b, s = pm.Normal("a"), pm.Normal("b", shape=2), pm.HalfNormal("s")
        pm.Normal("y", a + pt.dot(X, b), s, observed=CONTINUOUS)
    init = {"a": 0.0, "b": np.zeros(2), "s": 0.0}
    return _trio(plain(log_prior, rows, init, CONTINUOUS), in_numpyro, model, CONTINUOUS)


def logistic():
    def rows(q, y):
        eta = q["a"] + X @ q["b"]
        return y * jax.nn.log_sigmoid(eta) + (1 - y) * jax.nn.log_sigmoid(-eta)

    def in_numpyro(y=None):
        a, b = numpyro.sample("a", dist.Normal()), numpyro.sample("b", dist.Normal().expand([2]))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.BernoulliLogits(a + X @ b), obs=y)

    with pm.Model() as model:
        a, b = pm.Normal("a"), pm.Normal("b", shape=2)
        pm.Bernoulli("y", logit_p=a + pt.dot(X, b), observed=BINARY)
    init = {"a": 0.0, "b": np.zeros(2)}
    prior = _normals("a", "b")
    return _trio(plain(prior, rows, init, BINARY), in_numpyro, model, BINARY)


def poisson():
    def rows(q, y):
        log_rate = q["a"] + X @ q["b"] + OFFSET
        return y * log_rate - jnp.exp(log_rate) - jax.scipy.special.gammaln(y + 1.0)

    def in_numpyro(y=None):
        a, b = numpyro.sample("a", dist.Normal()), numpyro.sample("b", dist.Normal().expand([2]))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(a + X @ b + OFFSET)), obs=y)

    with pm.Model() as model:
        a, b = pm.Normal("a"), pm.Normal("b", shape=2)
        pm.Poisson("y", pt.exp(a + pt.dot(X, b) + OFFSET), observed=COUNTS)
    init = {"a": 0.0, "b": np.zeros(2)}
    return _trio(plain(_normals("a", "b"), rows, init, COUNTS), in_numpyro, model, COUNTS)


def hierarchical(centred):
    def log_prior(q):
        scale = jnp.exp(q["tau"]) if centred else 1.0
        mean = q["mu"] if centred else 0.0
        groups = norm.logpdf(q["z"], mean, scale).sum()
        return norm.logpdf(q["mu"]) + half_normal(q["tau"]) + half_normal(q["s"]) + groups

    def rows(q, y):
        alpha = q["z"] if centred else q["mu"] + jnp.exp(q["tau"]) * q["z"]
        return norm.logpdf(y, alpha[GROUP], jnp.exp(q["s"]))

    def in_numpyro(y=None):
        mu, tau = numpyro.sample("mu", dist.Normal()), numpyro.sample("tau", dist.HalfNormal())
        s = numpyro.sample("s", dist.HalfNormal())
        with numpyro.plate("groups", 6):
            z = numpyro.sample("z", dist.Normal(mu, tau) if centred else dist.Normal())
        alpha = numpyro.deterministic("alpha", z if centred else mu + tau * z)
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(alpha[GROUP], s), obs=y)

    with pm.Model() as model:
        mu, tau, s = pm.Normal("mu"), pm.HalfNormal("tau"), pm.HalfNormal("s")
        z = pm.Normal("z", mu, tau, shape=6) if centred else pm.Normal("z", shape=6)
        alpha = pm.Deterministic("alpha", z if centred else mu + tau * z)
        pm.Normal("y", alpha[GROUP], s, observed=CONTINUOUS)
    init = {"mu": 0.0, "tau": 0.0, "s": 0.0, "z": np.zeros(6)}
    return _trio(plain(log_prior, rows, init, CONTINUOUS), in_numpyro, model, CONTINUOUS)


def student_t():
    def log_prior(q):
        return norm.logpdf(q["a"]) + norm.logpdf(q["b"]).sum() + half_normal(q["s"])

    def rows(q, y):
        return jax.scipy.stats.t.logpdf(y, 4.0, q["a"] + X @ q["b"], jnp.exp(q["s"]))

    def in_numpyro(y=None):
        a, b = numpyro.sample("a", dist.Normal()), numpyro.sample("b", dist.Normal().expand([2]))
        s = numpyro.sample("s", dist.HalfNormal())
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.StudentT(4.0, a + X @ b, s), obs=y)

    with pm.Model() as model:
        a, b, s = pm.Normal("a"), pm.Normal("b", shape=2), pm.HalfNormal("s")
        pm.StudentT("y", 4.0, a + pt.dot(X, b), sigma=s, observed=CONTINUOUS)
    init = {"a": 0.0, "b": np.zeros(2), "s": 0.0}
    return _trio(plain(log_prior, rows, init, CONTINUOUS), in_numpyro, model, CONTINUOUS)


def categorical():
    def logits(b, xp=jnp):
        return xp.concatenate([xp.zeros((N, 1)), X @ b], axis=1)

    def rows(q, y):
        return jax.nn.log_softmax(logits(q["b"]))[jnp.arange(N), y]

    def in_numpyro(y=None):
        b = numpyro.sample("b", dist.Normal().expand([2, 2]).to_event(2))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Categorical(logits=logits(b)), obs=y)

    with pm.Model() as model:
        b = pm.Normal("b", shape=(2, 2))
        eta = pt.concatenate([pt.zeros((N, 1)), pt.dot(X, b)], axis=1)
        pm.Categorical("y", logit_p=eta, observed=ORDERED)
    init = {"b": np.zeros((2, 2))}
    return _trio(plain(_normals("b"), rows, init, ORDERED), in_numpyro, model, ORDERED)


def autoregression():
    before, now = SERIES[:-1], SERIES[1:]

    def log_prior(q):
        return norm.logpdf(q["a"]) + norm.logpdf(q["rho"]) + half_normal(q["s"])

    def rows(q, y):
        return norm.logpdf(y, q["a"] + q["rho"] * before, jnp.exp(q["s"]))

    def in_numpyro(y=None):
        a, rho = numpyro.sample("a", dist.Normal()), numpyro.sample("rho", dist.Normal())
        s = numpyro.sample("s", dist.HalfNormal())
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(a + rho * before, s), obs=y)

    with pm.Model() as model:
        a, rho, s = pm.Normal("a"), pm.Normal("rho"), pm.HalfNormal("s")
        pm.Normal("y", a + rho * before, s, observed=now)
    init = {"a": 0.0, "rho": 0.0, "s": 0.0}
    return _trio(plain(log_prior, rows, init, now), in_numpyro, model, now)


def gaussian_process():
    def kernel(scale, length, xp):
        return scale**2 * xp.exp(-0.5 * DISTANCE / length**2) + 1e-6 * xp.eye(N)

    def log_prior(q):
        return (
            half_normal(q["scale"])
            + half_normal(q["length"])
            + half_normal(q["s"])
            + norm.logpdf(q["z"]).sum()
        )

    def rows(q, y):
        root = jnp.linalg.cholesky(kernel(jnp.exp(q["scale"]), jnp.exp(q["length"]), jnp))
        return norm.logpdf(y, root @ q["z"], jnp.exp(q["s"]))

    def in_numpyro(y=None):
        scale, length = (numpyro.sample(name, dist.HalfNormal()) for name in ("scale", "length"))
        s = numpyro.sample("s", dist.HalfNormal())
        z = numpyro.sample("z", dist.Normal().expand([N]).to_event(1))
        root = jnp.linalg.cholesky(kernel(scale, length, jnp))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(root @ z, s), obs=y)

    with pm.Model() as model:
        scale, length, s = (pm.HalfNormal(name) for name in ("scale", "length", "s"))
        z = pm.Normal("z", shape=N)
        root = pt.linalg.cholesky(kernel(scale, length, pt))
        pm.Normal("y", pt.dot(root, z), s, observed=CONTINUOUS)
    init = {"scale": 0.0, "length": 0.0, "s": 0.0, "z": np.zeros(N)}
    return _trio(plain(log_prior, rows, init, CONTINUOUS), in_numpyro, model, CONTINUOUS)


def _normals(*names):
    return lambda q: sum(jnp.sum(norm.logpdf(q[name])) for name in names)


def _trio(model, in_numpyro, in_pymc, y):
    return Trio(model, fw.from_numpyro(in_numpyro, y=y), fw.from_pymc(in_pymc), in_pymc)


TRIOS = {
    "linear": linear,
    "logistic": logistic,
    "poisson with offset": poisson,
    "hierarchical, centred": lambda: hierarchical(True),
    "hierarchical, non-centred": lambda: hierarchical(False),
    "student t": student_t,
    "categorical": categorical,
    "autoregression": autoregression,
    "gaussian process": gaussian_process,
}
