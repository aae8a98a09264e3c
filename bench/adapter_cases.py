"""Cases of ``bench/adapters.py``: models of other packages on published data, with exact scores.

Each case is a title, a model, folds, and what has the exact score of each fold (``scores(folds)``):
a quadrature over the few parameters, written with NumPy and SciPy alone.
"""

import warnings
from pathlib import Path

import bambi
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pymc as pm
import scipy

import foldwise as fw


class Normal:
    """y ~ N(X b, V(t)) with b ~ N(0, P): exact scores by quadrature over the two parameters t.

    ``grid`` has pairs of parameters, ``log_prior`` the log prior of each, up to a constant.
    """

    def __init__(self, y, x, prior, covariance, grid, log_prior):
        self.y, self.whole = y, [x @ prior @ x.T + covariance(*pair) for pair in grid]
        self.log_prior = log_prior

    def log_evidence(self, rows):
        """log p(y[rows]), the integral over b and t."""
        y, found = self.y[rows], []
        for whole in self.whole:
            root = np.linalg.cholesky(whole[np.ix_(rows, rows)])
            white = scipy.linalg.solve_triangular(root, y, lower=True)
            found.append(-0.5 * white @ white - np.log(np.diagonal(root)).sum())
        constant = 0.5 * len(rows) * np.log(2 * np.pi)
        return scipy.special.logsumexp(np.array(found) + self.log_prior) - constant

    def scores(self, folds):
        return np.array(
            [
                self.log_evidence(np.union1d(train, test)) - self.log_evidence(train)
                for train, test in folds
            ]
        )


def air_traffic(folder):
    """Growth of passengers over a year, month by month from 2012 on, with AR(1) errors."""
    data = pd.read_csv(Path(folder) / "air_traffic.csv")
    level = data["Outbound"].to_numpy(float)
    y = 100 * np.log(level[12:] / level[:-12])[-96:]
    n = len(y)
    lag = np.abs(np.arange(n)[:, None] - np.arange(n))

    def growth(y=None):
        mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
        rho = numpyro.sample("rho", dist.Uniform(-1.0, 1.0))
        sd = numpyro.sample("sd", dist.LogNormal(1.0, 1.0))
        numpyro.sample("y", dist.MultivariateNormal(mean, sd**2 * rho**lag), obs=y)

    u, z = np.meshgrid(np.linspace(-0.3, 0.995, 40), np.linspace(-1.5, 1.5, 60))
    grid = np.column_stack([u.ravel(), np.exp(1.0 + z.ravel())])
    exact = Normal(y, np.ones((n, 1)), np.diag([100.0]), lambda rho, sd: sd**2 * rho**lag, grid,
                   -0.5 * z.ravel() ** 2)  # fmt: skip
    model = fw.from_numpyro(growth, y=y)
    schemes = {
        "next month": fw.leave_future_out(n, start=72),
        "year left out": fw.leave_group_out(np.arange(n) // 12),
        "h-block": fw.h_block(n, 3)[::6],
    }
    return [("air traffic, " + name, model, folds, exact) for name, folds in schemes.items()]


def radon(folder):
    """Radon in thirteen counties of Minnesota, their effects integrated out: low rank."""
    data = pd.read_csv(Path(folder) / "radon_mn.csv")
    data = data[data["county_idx"].between(3, 15)]
    y, county = data["log_radon"].to_numpy(), np.unique(data["county_idx"], return_inverse=True)[1]
    x = np.column_stack([np.ones(len(y)), data["floor_measure"].to_numpy(float)])
    member = np.eye(county.max() + 1)[county]

    def counties(x, member, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        tau = numpyro.sample("tau", dist.LogNormal(-1.0, 1.0))
        sigma = numpyro.sample("sigma", dist.LogNormal(0.0, 1.0))
        rows = dist.LowRankMultivariateNormal(x @ b, tau * member, sigma**2 * jnp.ones(len(x)))
        numpyro.sample("y", rows, obs=y)

    t, s = np.meshgrid(np.linspace(-5.0, 3.0, 48), np.linspace(-1.2, 0.8, 32))
    grid = np.column_stack([np.exp(-1.0 + t.ravel()), np.exp(s.ravel())])
    noise, shared = np.eye(len(y)), member @ member.T
    exact = Normal(y, x, 4.0 * np.eye(2), lambda tau, sd: tau**2 * shared + sd**2 * noise, grid,
                   -0.5 * (t.ravel() ** 2 + s.ravel() ** 2))  # fmt: skip
    model = fw.from_numpyro(counties, x, member, y=y)
    schemes = {
        "one house": fw.leave_one_out(len(y))[::3],
        "one county": fw.leave_group_out(county),
    }
    return [("radon, " + name, model, folds, exact) for name, folds in schemes.items()]


class Quadrature:
    """Rows that are independent given three parameters: exact scores by the trapezoid rule."""

    def __init__(self, axes, log_prior, rows):
        nodes = [grid.ravel() for grid in np.meshgrid(*axes)]
        self.prior, self.rows = log_prior(*nodes), rows(*(node[:, None] for node in nodes))
        self.total = self.prior + self.rows.sum(axis=1)

    def scores(self, folds):
        found = []
        for train, test in folds:
            left_out = np.setdiff1d(np.arange(self.rows.shape[1]), train)
            known = self.total - self.rows[:, left_out].sum(axis=1)
            both = known + self.rows[:, test].sum(axis=1)
            found.append(scipy.special.logsumexp(both) - scipy.special.logsumexp(known))
        return np.array(found)


def regression(a, b, x, s):
    """Normal errors around a line, of parameters on a grid."""
    return scipy.stats.norm(a + b * x, s)


def bounded_kidiq(folder):
    """Children's scores by their mothers', those above 110 known to be so; or with outliers."""
    data = pd.read_csv(Path(folder) / "kidiq.csv")
    whole = data["kid_score"].to_numpy(float)
    x = scipy.stats.zscore(data["mom_iq"].to_numpy(float))
    high, y = whole >= 110, np.minimum(whole, 110.0)

    def priors():
        a, b = pm.Normal("a", 87.0, 50.0), pm.Normal("b", 0.0, 20.0)
        return a + b * x, pm.Exponential("s", 1 / 20)

    with pm.Model() as capped:  # formulae would take a variable called censored for its own
        mu, s = priors()
        pm.Censored("y", pm.Normal.dist(mu, s), None, 110.0, observed=y)
    with pm.Model() as apart:
        mu, s = priors()
        pm.Normal("seen", mu[~high], s, observed=y[~high])
        pm.Potential("high", pm.logcdf(pm.Normal.dist(-mu[high], s), -110.0))
    with pm.Model() as outliers:
        mu, s = priors()
        parts = [pm.Normal.dist(mu, s), pm.Normal.dist(mu, 3 * s)]
        pm.Mixture("y", [0.9, 0.1], parts, observed=whole)

    def in_numpyro():
        a = numpyro.sample("a", dist.Normal(87.0, 50.0))
        line = a + numpyro.sample("b", dist.Normal(0.0, 20.0)) * x
        s = numpyro.sample("s", dist.Exponential(1 / 20))
        numpyro.sample("seen", dist.Normal(line[~high], s), obs=y[~high])
        numpyro.factor("high", jax.scipy.stats.norm.logsf(110.0, line[high], s))

    own = {
        "Intercept": bambi.Prior("Normal", mu=87.0, sigma=50.0),
        "x": bambi.Prior("Normal", mu=0.0, sigma=20.0),
        "sigma": bambi.Prior("Exponential", lam=1 / 20),
    }
    table = pd.DataFrame({"y": y, "x": x, "status": np.where(high, "right", "none")})
    in_bambi = bambi.Model("censored(y, status) ~ x", table, priors=own)
    axes = np.linspace(81, 93, 30), np.linspace(3, 16, 30), np.linspace(2.3, 3.3, 40)

    def log_prior(a, b, t):
        normal = scipy.stats.norm.logpdf
        return normal(a, 87, 50) + normal(b, 0, 20) - np.exp(t) / 20 + t

    def censored_rows(a, b, t):
        line = regression(a, b, x, np.exp(t))
        return np.where(high, line.logsf(110.0), line.logpdf(y))

    def mixed_rows(a, b, t):
        one, two = (regression(a, b, x, k * np.exp(t)).pdf(whole) for k in (1, 3))
        return np.log(0.9 * one + 0.1 * two)

    exact = Quadrature(axes, log_prior, censored_rows)
    folds, rows = fw.leave_one_out(len(y)), {"seen": np.flatnonzero(~high)}
    return [
        ("kidiq, censored", fw.from_pymc(capped), folds, exact),
        ("kidiq, censored, Bambi", fw.from_bambi(in_bambi), folds, exact),
        ("kidiq, two variables", fw.from_pymc(apart, rows={**rows, "high": np.flatnonzero(high)}),
         folds, exact),
        ("kidiq, a factor, NumPyro",
         fw.from_numpyro(in_numpyro, rows={**rows, "high": np.flatnonzero(high)}), folds, exact),
        ("kidiq, mixture", fw.from_pymc(outliers), folds, Quadrature(axes, log_prior, mixed_rows)),
    ]  # fmt: skip


def truncated_radon(folder):
    """Radon above one picocurie a litre, where nothing below it was kept."""
    data = pd.read_csv(Path(folder) / "radon_mn.csv")
    data = data[(data["log_radon"] > 0) & data["county_idx"].between(3, 15)]
    y, x = data["log_radon"].to_numpy(), data["floor_measure"].to_numpy(float)
    with pm.Model() as model:
        a, b = pm.Normal("a", 0.0, 1.0), pm.Normal("b", 0.0, 1.0)
        s = pm.LogNormal("s", 0.0, 0.5)
        pm.Truncated("y", pm.Normal.dist(a + b * x, s), lower=0.0, observed=y)
    axes = np.linspace(-4, 4, 60), np.linspace(-5, 4, 50), np.linspace(-1.2, 1.5, 40)

    def log_prior(a, b, t):
        return -0.5 * (a**2 + b**2 + (t / 0.5) ** 2)

    def rows(a, b, t):
        line = regression(a, b, x, np.exp(t))
        return line.logpdf(y) - line.logsf(0.0)

    exact = Quadrature(axes, log_prior, rows)
    return [("radon, truncated", fw.from_pymc(model), fw.leave_one_out(len(y)), exact)]


def incomplete(folder):
    """Children's scores of which every fifth is missing; rats as columns of five weights each."""
    data = pd.read_csv(Path(folder) / "kidiq.csv")
    whole = data["kid_score"].to_numpy(float)
    x = scipy.stats.zscore(data["mom_iq"].to_numpy(float))
    missing = np.arange(len(whole)) % 5 == 0
    with pm.Model() as imputed, warnings.catch_warnings():
        warnings.simplefilter("ignore", pm.exceptions.ImputationWarning)
        a, b, s = pm.Normal("a", 87.0, 50.0), pm.Normal("b", 0.0, 20.0), pm.Exponential("s", 1 / 20)
        pm.Normal("y", a + b * x, s, observed=np.where(missing, np.nan, whole))
    weights = pd.read_csv(Path(folder) / "rats.csv").pivot(
        index="day", columns="rat", values="weight"
    )
    days = weights.index.to_numpy(float)[:, None] - 22.0
    weights = weights.to_numpy(float)
    with pm.Model() as columns:
        a, b, s = pm.Normal("a", 240.0, 50.0), pm.Normal("b", 6.0, 5.0), pm.Exponential("s", 1 / 20)
        pm.Normal("y", a + b * days, s, observed=weights)

    def log_prior(place, spread, slope, wide):
        def found(a, b, t):
            normal = scipy.stats.norm.logpdf
            return normal(a, place, spread) + normal(b, slope, wide) - np.exp(t) / 20 + t

        return found

    def children(a, b, t):
        return regression(a, b, x[~missing], np.exp(t)).logpdf(whole[~missing])

    def rats(a, b, t):
        return sum(
            regression(a, b, day, np.exp(t)).logpdf(row)
            for day, row in zip(days[:, 0], weights, strict=True)
        )

    one = np.linspace(81, 93, 30), np.linspace(3, 16, 30), np.linspace(2.5, 3.3, 40)
    two = np.linspace(234, 251, 34), np.linspace(5.3, 7.1, 34), np.linspace(2.3, 3.3, 40)
    of_children = Quadrature(one, log_prior(87, 50, 0, 20), children)
    of_rats = Quadrature(two, log_prior(240, 50, 6, 5), rats)
    return [
        ("kidiq, missing", fw.from_pymc(imputed), fw.leave_one_out((~missing).sum()), of_children),
        ("rats, five weights a row", fw.from_pymc(columns, row_axis=1), fw.leave_one_out(30),
         of_rats),
    ]  # fmt: skip


def series(folder):
    """Growth of passengers as an autoregression, a random walk and a process, all observed."""
    level = pd.read_csv(Path(folder) / "air_traffic.csv")["Outbound"].to_numpy(float)
    y = 100 * np.log(level[12:] / level[:-12])[-96:]
    n = len(y)
    step, nothing = np.arange(n), (np.zeros((n, 1)), np.eye(1))
    lag, both = np.abs(step[:, None] - step), np.minimum(step[:, None], step)
    with pm.Model() as autoregression:
        rho = pm.math.stack([pm.Normal("level", 0.0, 5.0), pm.Uniform("rho", -1.0, 1.0)])
        pm.AR("y", rho, pm.LogNormal("s", 1.0, 1.0), init_dist=pm.Normal.dist(0.0, 10.0),
              constant=True, observed=y)  # fmt: skip
    with pm.Model() as walk:
        pm.GaussianRandomWalk("y", pm.Normal("drift"), pm.LogNormal("s", 1.0, 1.0),
                              init_dist=pm.Normal.dist(0.0, 10.0), observed=y)  # fmt: skip
    with pm.Model() as process:
        height, reach = pm.LogNormal("height", 1.0, 1.0), pm.LogNormal("reach", 1.0, 0.5)
        kernel = height**2 * pm.gp.cov.Exponential(1, ls=reach)
        pm.gp.Marginal(cov_func=kernel).marginal_likelihood(
            "y", X=step[:, None] / 1.0, y=y, sigma=3.0, jitter=0.0
        )

    def of_autoregression(rho, s):
        back = np.linalg.inv(np.eye(n) - rho * np.eye(n, k=-1))
        shift = back @ (step > 0)
        return back @ np.diag(np.where(step > 0, s**2, 100.0)) @ back.T + 25 * np.outer(
            shift, shift
        )

    def of_walk(_, s):
        return 100.0 + s**2 * both + np.outer(step, step)

    def of_process(reach, height):
        # PyMC's exponential kernel halves the distance
        return height**2 * np.exp(-0.5 * lag / reach) + 9.0 * np.eye(n)

    one, two = np.meshgrid(np.linspace(-0.6, 0.999, 40), np.linspace(-1.5, 1.5, 60))
    z, t = np.meshgrid(np.linspace(-5, 5, 40), np.linspace(-4.0, 4.0, 40))
    scale, single = np.exp(1 + two.ravel()), np.linspace(-2.0, 3.0, 80)
    schemes = {
        "next month": fw.leave_future_out(n, start=72),
        "year left out": fw.leave_group_out(step // 12),
    }
    cases = {
        "AR": (autoregression, of_autoregression, np.column_stack([one.ravel(), scale]),
               -0.5 * two.ravel() ** 2),
        "walk": (walk, of_walk, np.column_stack([single, np.exp(1 + single)]), -0.5 * single**2),
        "gp": (process, of_process, np.exp(1 + np.column_stack([0.5 * z.ravel(), t.ravel()])),
               -0.5 * (z.ravel() ** 2 + t.ravel() ** 2)),
    }  # fmt: skip
    found = []
    for name, (model, covariance, grid, log_prior) in cases.items():
        exact, adapted = Normal(y, *nothing, covariance, grid, log_prior), fw.from_pymc(model)
        found += [(f"air traffic, {name}, {k}", adapted, v, exact) for k, v in schemes.items()]
    return found


def dependent(folder):
    return [*air_traffic(folder), *radon(folder)]


def in_pymc(folder):
    return [
        *bounded_kidiq(folder),
        *truncated_radon(folder),
        *incomplete(folder),
        *series(folder),
    ]
