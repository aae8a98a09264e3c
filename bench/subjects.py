"""What ``bench/compare.py`` is run on: models, folds, exact answers, the same models in PyMC.

Every subject has foldwise models and folds, the exact log predictive density of each fold where
there is one, its models in PyMC with the training rows as data, the paper's run lengths, the number
of folds that slow methods run (None: all), and the gradient of its first model as a plain loop.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

import foldwise as fw
from foldwise import datasets
from foldwise.studies import air, radon, rats

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import integrated  # noqa: E402

HALF_LOG_TWO_PI = 0.5 * np.log(2.0 * np.pi)


@dataclass
class Lengths:
    """Run lengths of the paper's tables C2 to C4."""

    chains: int
    fit_warmup: int
    fit_draws: int
    warmup: int
    draws: int


@dataclass
class Subject:
    name: str
    models: dict[str, fw.Model]
    folds: fw.Folds
    exact: Callable[[str], np.ndarray] | None
    in_pymc: Callable[[str], tuple]  # label -> PyMC model, rows(draws, test rows)
    paper: Lengths
    refits: int | None
    paper_folds: int | None
    loop: Callable[[], Callable[[], None]]  # what evaluates one gradient


def normal_rows(y, mean, sigma):
    return -0.5 * ((y - mean) / sigma) ** 2 - np.log(sigma) - HALF_LOG_TWO_PI


# ---------------------------------------------------------------- rats and radon


def rats_subject():
    table = datasets.load("rats")
    rat, y = table["rat"].to_numpy() - 1, table["weight"].to_numpy(float)
    time = table["day"].to_numpy() - 22.0

    def in_pymc(label):
        import pymc as pm

        own = label == "A"
        with pm.Model() as model:
            train = pm.Data("train", np.ones(len(y)))
            mu_alpha, mu_beta = pm.Normal("mu_alpha", 250, 20), pm.Normal("mu_beta", 6, 2)
            sigma_alpha = pm.Gamma("sigma_alpha", 25, 2)
            sigma_y = pm.Gamma("sigma_y", 1, 2)
            alpha = pm.Normal("alpha", mu_alpha, sigma_alpha, shape=30)
            slope = mu_beta
            if own:
                beta = pm.Normal("beta", mu_beta, pm.Gamma("sigma_beta", 5, 10), shape=30)
                slope = beta[rat]
            rows = pm.logp(pm.Normal.dist(alpha[rat] + slope * time, sigma_y), y)
            pm.Potential("rows", (train * rows).sum())

        def by_row(draws, test):
            slope = draws["beta"][:, rat[test]] if own else draws["mu_beta"][:, None]
            mean = draws["alpha"][:, rat[test]] + slope * time[test]
            return normal_rows(y[test], mean, draws["sigma_y"][:, None])

        return model, by_row

    return Subject(
        "rats",
        rats.models(table),
        rats.folds(table),
        lambda label: integrated.log_predictives(
            integrated.rats(table, label == "A"), range(30), 9
        ),
        in_pymc,
        Lengths(8, 7000, 2000, 1000, 500),
        None,
        None,
        lambda: group_loop(y, time, rat, rat),
    )


def radon_subject():
    table = datasets.load("radon_all")
    county, y = table["county_idx"].to_numpy() - 1, table["log_radon"].to_numpy(float)
    floor = table["floor_measure"].to_numpy(float)

    def in_pymc(label):
        import pymc as pm

        with_floor = label == "A"
        with pm.Model() as model:
            train = pm.Data("train", np.ones(len(y)))
            mu, sigma = pm.Normal("mu_alpha", 0, 4), pm.Gamma("sigma_alpha", 6, 9)
            sigma_y = pm.Gamma("sigma_y", 10, 10)
            z = pm.Normal("z", 0, 1, shape=386)
            mean = (mu + sigma * z)[county]
            if with_floor:
                mean = mean + pm.Normal("beta", 0, 1) * floor
            rows = pm.logp(pm.Normal.dist(mean, sigma_y), y)
            pm.Potential("rows", (train * rows).sum())

        def by_row(draws, test):
            alpha = draws["mu_alpha"][:, None] + draws["sigma_alpha"][:, None] * draws["z"]
            mean = alpha[:, county[test]]
            if with_floor:
                mean = mean + draws["beta"][:, None] * floor[test]
            return normal_rows(y[test], mean, draws["sigma_y"][:, None])

        return model, by_row

    return Subject(
        "radon",
        radon.models(table),
        radon.folds(table),
        lambda label: integrated.log_predictives(
            integrated.radon(table, label == "A"), range(386), 5
        ),
        in_pymc,
        Lengths(4, 7000, 5000, 2000, 2000),
        4,
        4,
        lambda: group_loop(y, floor, county, np.zeros(len(y), int)),
    )


def group_loop(y, x, group, slope):
    """Gradient of a normal likelihood with mean a[group] + b[slope] x, and of its prior."""
    from numba import njit

    @njit(fastmath=True)
    def gradient(y, x, group, slope, a, b, log_sigma, da, db):
        da[:] = -a
        db[:] = -b
        inverse, square = np.exp(-2.0 * log_sigma), 0.0
        for i in range(len(y)):
            residual = y[i] - a[group[i]] - b[slope[i]] * x[i]
            square += residual * residual
            da[group[i]] += inverse * residual
            db[slope[i]] += inverse * residual * x[i]
        return -0.5 * inverse * square - len(y) * log_sigma, inverse * square - len(y)

    a, b = np.zeros(group.max() + 1), np.zeros(slope.max() + 1)
    da, db = np.zeros_like(a), np.zeros_like(b)
    return lambda: gradient(y, x, group, slope, a, b, 0.1, da, db)


# ---------------------------------------------------------------- air


def air_subject():
    table = datasets.load("air_traffic")
    y, month = air.passengers(table), table["Month"].to_numpy() - 1
    shapes = {"A": (1, 12, month), "B": (12, 3, np.zeros(len(y), int))}

    def parts(label):
        span, lags, season = shapes[label]
        rates = air.growth(y, span)
        past = air.lagged(rates, lags)
        known = np.isfinite(past).all(axis=1)
        level = np.where(known, np.roll(y, span), 1.0)
        filled = np.where(known[:, None], past, 0.0), np.where(known, rates, 0.0)
        return *filled, known, level, season

    def in_pymc(label):
        import pymc as pm

        past, rates, known, level, season = parts(label)
        with pm.Model() as model:
            train = pm.Data("train", np.ones(len(y)))
            rho = 2.0 * pm.Beta("half", 5, 5, shape=past.shape[1]) - 1.0
            effect = pm.Normal("effect", 0, 1, shape=int(season.max()) + 1)
            sigma = pm.HalfNormal("sigma", 1)
            mean = pm.math.dot(past, rho) + effect[season]
            rows = pm.logp(pm.Normal.dist(mean, sigma), rates)
            pm.Potential("rows", (train * known * rows).sum())

        def by_row(draws, test):
            mean = (2.0 * draws["half"] - 1.0) @ past[test].T + draws["effect"][:, season[test]]
            return normal_rows(rates[test], mean, draws["sigma"][:, None]) - np.log(level[test])

        return model, by_row

    def loop():
        past, rates, known, _, season = parts("A")
        return linear_loop(past[known], rates[known], season[known])

    return Subject(
        "air",
        air.models(table),
        air.folds(table),
        lambda label: exact_series(*parts(label), air.folds(table)),
        in_pymc,
        Lengths(4, 10_000, 2000, 6000, 6000),
        10,
        40,
        loop,
    )


def exact_series(past, rates, known, level, season, folds, nodes=40, draws=2000):
    """Log predictive density of each value given those before, from ratios of evidences.

    p(y_t | before) = Z_t / Z_(t-1), Z_t the integral of prior and likelihood of the first t rows.
    With a normal prior N(0, 1/11) in place of that of rho, 2 Beta(5, 5) - 1, coefficients would be
    normal given sigma; the mean ratio of the two priors over their draws corrects for it, and
    sigma is integrated on a grid. One set of standard normals serves all t and sigma.
    """
    lags = past.shape[1]
    design = np.column_stack([past, np.eye(season.max() + 1)[season]])
    scale = np.where(np.arange(design.shape[1]) < lags, np.sqrt(1.0 / 11.0), 1.0)
    noise = np.random.default_rng(1).normal(size=(draws // 2, design.shape[1]))
    noise = np.concatenate([noise, -noise])

    def log_ratio(rho):
        inside = np.abs(rho) < 1.0
        one = 4.0 * np.log1p(-(np.where(inside, rho, 0.0) ** 2)) + 5.5 * rho**2
        one += np.log(630.0 / 512.0) + 0.5 * np.log(2.0 * np.pi / 11.0)
        return np.where(inside, one, -np.inf).sum(axis=-1)

    def log_evidence(stop):
        rows = np.flatnonzero(known[:stop])
        x, y = design[rows] * scale, rates[rows]
        values, basis = np.linalg.eigh(x.T @ x)
        values, along = np.maximum(values, 0.0), (x @ basis).T @ y

        def given(log_sigma):
            """Log evidence and means in the eigenbasis with the normal prior, by sigma."""
            square = np.exp(2.0 * log_sigma)[:, None]
            precision = 1.0 + values / square
            mean = along / square / precision
            quadratic = y @ y / square[:, 0] - (mean**2 * precision).sum(axis=1)
            prior = log_sigma - 0.5 * square[:, 0]
            normal = -0.5 * (quadratic + np.log(precision).sum(axis=1)) - len(y) * log_sigma
            return prior + normal - len(y) * HALF_LOG_TWO_PI, mean, precision

        grid = np.linspace(-9.0, 2.0, 2000)
        rough = given(grid)[0]
        likely = grid[rough > rough.max() - 25.0]
        grid = np.linspace(likely[0], likely[-1], nodes)
        normal, mean, precision = given(grid)
        drawn = mean[:, None] + noise / np.sqrt(precision)[:, None]
        ratio = log_ratio(drawn @ (basis * scale[:, None])[:lags].T)
        mass = normal + logsumexp(ratio, axis=1) - np.log(draws)
        return logsumexp(mass) + np.log(grid[1] - grid[0])

    first = int(folds.test(0)[0])
    evidence = [log_evidence(stop) for stop in range(first, first + len(folds) + 1)]
    return np.diff(evidence) - np.log(level[first : first + len(folds)])


def linear_loop(x, y, season):
    """Gradient of a normal regression with effects of seasons, and of its prior."""
    from numba import njit

    @njit(fastmath=True)
    def gradient(x, y, season, b, e, log_sigma, db, de):
        db[:] = -b
        de[:] = -e
        inverse, square = np.exp(-2.0 * log_sigma), 0.0
        for i in range(len(y)):
            residual = y[i] - e[season[i]]
            for j in range(x.shape[1]):
                residual -= x[i, j] * b[j]
            square += residual * residual
            de[season[i]] += inverse * residual
            for j in range(x.shape[1]):
                db[j] += inverse * residual * x[i, j]
        return -0.5 * inverse * square - len(y) * log_sigma, inverse * square - len(y)

    x = np.ascontiguousarray(x)
    b, e = np.zeros(x.shape[1]), np.zeros(season.max() + 1)
    db, de = np.zeros_like(b), np.zeros_like(e)
    return lambda: gradient(x, y, season, b, e, -3.0, db, de)


# ---------------------------------------------------------------- wells


def wells_subject():
    table = datasets.load("wells")
    y = table["switched"].to_numpy()
    covariates = {
        "A": np.log(table["arsenic"].to_numpy()),
        "B": table["arsenic"].to_numpy(float),
    }

    def design(label):
        ones = np.ones(len(y))
        return np.column_stack([ones, table["dist"].to_numpy() / 100.0, covariates[label]])

    def model(label, name):
        x, sign = design(label), 2.0 * y - 1.0

        def log_likelihood(b):
            return -jnp.logaddexp(0.0, -sign * (x @ b))

        return fw.Model(
            lambda b: -0.5 * jnp.sum(b**2), log_likelihood, np.zeros(3), len(y), y=y, name=name
        )

    def in_pymc(label):
        import pymc as pm

        x = design(label)
        with pm.Model() as program:
            train = pm.Data("train", np.ones(len(y)))
            b = pm.Normal("b", 0, 1, shape=3)
            rows = pm.logp(pm.Bernoulli.dist(logit_p=pm.math.dot(x, b)), y)
            pm.Potential("rows", (train * rows).sum())

        def by_row(draws, test):
            eta = draws["b"] @ x[test].T
            return -np.logaddexp(0.0, np.where(y[test] == 1, -eta, eta))

        return program, by_row

    return Subject(
        "wells",
        {"A": model("A", "log arsenic"), "B": model("B", "arsenic")},
        fw.leave_one_out(len(y)),
        lambda label: exact_logistic(design(label), y),
        in_pymc,
        Lengths(4, 1000, 1000, 1000, 1000),
        4,
        40,
        lambda: logistic_loop(design("A"), y.astype(float)),
    )


def exact_logistic(x, y, nodes=25):
    """Leave-one-out log predictive densities of a logistic regression, by quadrature.

    With weights of the full posterior on a grid of Gauss-Hermite nodes around its mode,
    p(y_i | others) = 1 / E[1 / p(y_i | b)].
    """
    sign = 2.0 * y - 1.0
    b = np.zeros(x.shape[1])
    for _ in range(30):
        p = 1.0 / (1.0 + np.exp(sign * (x @ b)))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.eye(len(b))
        b = b + np.linalg.solve(hessian, x.T @ (sign * p) - b)
    half = np.linalg.cholesky(np.linalg.inv(hessian))
    one, weight = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.stack(np.meshgrid(*[one] * len(b), indexing="ij"), axis=-1).reshape(-1, len(b))
    log_weight = sum(np.meshgrid(*[np.log(weight) + 0.5 * one**2] * len(b), indexing="ij")).ravel()
    points = b + grid @ half.T
    log_rows = -np.logaddexp(0.0, -sign * (points @ x.T))
    log_weight = log_weight + log_rows.sum(axis=1) - 0.5 * (points**2).sum(axis=1)
    posterior = np.exp(log_weight - log_weight.max())
    return -np.log(posterior @ np.exp(-log_rows) / posterior.sum())


def logistic_loop(x, y):
    """Gradient of a logistic regression and its prior."""
    from numba import njit

    @njit(fastmath=True)
    def gradient(x, y, b, db):
        db[:] = -b
        total = 0.0
        for i in range(len(y)):
            eta = 0.0
            for j in range(x.shape[1]):
                eta += x[i, j] * b[j]
            tail = np.exp(-abs(eta))
            total += y[i] * eta - max(eta, 0.0) - np.log1p(tail)
            p = 1.0 / (1.0 + tail) if eta > 0.0 else tail / (1.0 + tail)
            for j in range(x.shape[1]):
                db[j] += (y[i] - p) * x[i, j]
        return total

    b, db = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    return lambda: gradient(x, y, b, db)


SUBJECTS = {
    "rats": rats_subject,
    "radon": radon_subject,
    "air": air_subject,
    "wells": wells_subject,
}


# ---------------------------------------------------------------- growth


def growth_model(groups, rows=3):
    """Normal groups with effects, non-centred, and which group each row is of."""
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(groups), rows)
    y = rng.normal(size=groups)[group] + rng.normal(size=len(group))

    def log_prior(q):
        scales = -0.5 * (q["log_tau"] ** 2 + q["log_sigma"] ** 2)
        return scales - 0.5 * (q["mu"] ** 2 + jnp.sum(q["z"] ** 2))

    def log_likelihood(q):
        mean = q["mu"] + jnp.exp(q["log_tau"]) * q["z"][group]
        return -0.5 * ((y - mean) * jnp.exp(-q["log_sigma"])) ** 2 - q["log_sigma"]

    init = {"mu": 0.0, "log_tau": 0.0, "log_sigma": 0.0, "z": np.zeros(groups)}
    return fw.Model(log_prior, log_likelihood, init, len(y), y=y, name=f"{groups} groups"), group
