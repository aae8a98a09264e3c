"""Cases of ``bench/adapters.py``: models of other packages on published data, with exact scores.

Each case is a title, a model, folds, and what has the exact score of each fold (``scores(folds)``):
a quadrature over the few parameters, written with NumPy and SciPy alone. Data are those of
FOLDWISE_DATA, of ``tests/hard.py``, or inside the packages statsmodels and libpysal (``pip install
foldwise[bench]``), which are imported by what needs them.
"""

import json
import sys
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import hard  # noqa: E402

import foldwise as fw  # noqa: E402


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
    """Rows that are independent given a few parameters: exact scores by the trapezoid rule."""

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


def visits():
    """Visits to a doctor in a year by chronic diseases: one in sixty of the RAND experiment.

    111 of the 337 saw none. The zeros are those of a Poisson variable and more, or apart from it;
    the counts without a slope have a third parameter, their dispersion.
    """
    from statsmodels.datasets import randhie

    data = randhie.load_pandas().data.iloc[::60]
    y, x = data["mdvis"].to_numpy(int), scipy.stats.zscore(data["disea"].to_numpy(float))

    def seen():
        mu = pm.math.exp(pm.Normal("a", 1.0, 1.0) + pm.Normal("b", 0.0, 0.5) * x)
        return pm.Beta("psi", 2.0, 2.0), mu

    def spread():
        return pm.math.exp(pm.Normal("a", 1.0, 1.0)), pm.LogNormal("alpha", 0.0, 1.0)

    with pm.Model() as inflated:
        pm.ZeroInflatedPoisson("y", *seen(), observed=y)
    with pm.Model() as hurdle:
        pm.HurdlePoisson("y", *seen(), observed=y)
    with pm.Model() as dispersed:
        pm.ZeroInflatedNegativeBinomial("y", pm.Beta("psi", 2.0, 2.0), *spread(), observed=y)
    with pm.Model() as apart:
        pm.HurdleNegativeBinomial("y", pm.Beta("psi", 2.0, 2.0), *spread(), observed=y)

    def in_numpyro(family):
        def model(x, y=None):
            a = numpyro.sample("a", dist.Normal(1.0, 1.0))
            b = numpyro.sample("b", dist.Normal(0.0, 0.5))
            gate = 1.0 - numpyro.sample("psi", dist.Beta(2.0, 2.0))
            numpyro.sample("y", family(gate, jnp.exp(a + b * x)), obs=y)

        return fw.from_numpyro(model, x, y=y)

    def in_bambi(family):
        own = {
            "Intercept": bambi.Prior("Normal", mu=1.0, sigma=1.0),
            "x": bambi.Prior("Normal", mu=0.0, sigma=0.5),
            "psi": bambi.Prior("Beta", alpha=2.0, beta=2.0),
        }
        table = pd.DataFrame({"y": y, "x": x})
        return fw.from_bambi(bambi.Model("y ~ x", table, family=family, priors=own))

    log_share = scipy.special.log_expit  # psi = expit(l): its prior with the Jacobian

    def of_share(logit):
        return 2.0 * (log_share(logit) + log_share(-logit))

    def log_prior(a, b, logit):
        return -0.5 * ((a - 1.0) ** 2 + (b / 0.5) ** 2) + of_share(logit)

    def log_prior_spread(a, log_alpha, logit):
        return -0.5 * ((a - 1.0) ** 2 + log_alpha**2) + of_share(logit)

    def poisson(a, b, _):
        return scipy.stats.poisson(np.exp(a + b * x))

    def negative_binomial(a, log_alpha, _):
        mu, alpha = np.exp(a), np.exp(log_alpha)
        return scipy.stats.nbinom(alpha, alpha / (alpha + mu))

    def with_more_zeros(family):
        def rows(*nodes):
            inside = log_share(nodes[2]) + family(*nodes).logpmf(y)
            return np.where(y == 0, np.logaddexp(inside, log_share(-nodes[2])), inside)

        return rows

    def behind_a_hurdle(family):
        def rows(*nodes):
            counts = family(*nodes)
            above = log_share(nodes[2]) + counts.logpmf(y) - np.log1p(-counts.pmf(0))
            return np.where(y == 0, log_share(-nodes[2]), above)

        return rows

    one = np.linspace(1.1, 1.7, 30), np.linspace(-0.1, 0.5, 30), np.linspace(-0.4, 1.8, 30)
    two = np.linspace(-0.6, 1.9, 34), np.linspace(-3.2, 1.5, 34)
    wide, narrow = np.linspace(-0.4, 9.0, 40), np.linspace(-0.4, 1.8, 30)
    inflated_exact = Quadrature(one, log_prior, with_more_zeros(poisson))
    hurdle_exact = Quadrature(one, log_prior, behind_a_hurdle(poisson))
    folds = fw.leave_one_out(len(y))
    return [
        ("visits, zero-inflated", fw.from_pymc(inflated), folds, inflated_exact),
        ("visits, zero-inflated, Bambi", in_bambi("zero_inflated_poisson"), folds, inflated_exact),
        ("visits, zero-inflated, NumPyro", in_numpyro(dist.ZeroInflatedPoisson), folds,
         inflated_exact),
        ("visits, hurdle", fw.from_pymc(hurdle), folds, hurdle_exact),
        ("visits, hurdle, Bambi", in_bambi("hurdle_poisson"), folds, hurdle_exact),
        ("visits, hurdle, NumPyro", in_numpyro(dist.HurdlePoisson), folds, hurdle_exact),
        ("visits, inflated, dispersed", fw.from_pymc(dispersed), folds,
         Quadrature((*two, wide), log_prior_spread, with_more_zeros(negative_binomial))),
        ("visits, hurdle, dispersed", fw.from_pymc(apart), folds,
         Quadrature((*two, narrow), log_prior_spread, behind_a_hurdle(negative_binomial))),
    ]  # fmt: skip


def parties():
    """Democrats, independents and Republicans by income: the American election study of 1996."""
    from statsmodels.datasets import anes96

    data = anes96.load_pandas().data
    party = np.digitize(data["PID"], [2, 5])  # strong or weak; all in between; weak or strong
    counts = pd.crosstab(data["income"], party).to_numpy()
    x, size = scipy.stats.zscore(np.arange(len(counts), dtype=float)), counts.sum(axis=1)
    with pm.Model() as model:
        a, b = pm.Normal("a", 0.0, 1.0, shape=2), pm.Normal("b", 0.0, 0.5, shape=2)
        eta = pm.math.concatenate([np.zeros((len(x), 1)), a + b * x[:, None]], axis=1)
        pm.Multinomial("y", size, pm.math.softmax(eta, axis=1), observed=counts)

    def in_numpyro(x, y=None):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 0.5).expand([2]).to_event(1))
        eta = jnp.concatenate([jnp.zeros((len(x), 1)), a + b * x[:, None]], axis=1)
        numpyro.sample("y", dist.Multinomial(size, logits=eta), obs=y)

    def log_prior(a, b, c, d):
        return -0.5 * (a**2 + c**2 + (b**2 + d**2) / 0.25)

    def rows(a, b, c, d):
        one, two = a + b * x, c + d * x
        total = np.logaddexp(0.0, np.logaddexp(one, two))
        ways = scipy.special.gammaln(size + 1) - scipy.special.gammaln(counts + 1).sum(axis=1)
        return ways + counts[:, 1] * one + counts[:, 2] * two - size * total

    place, slope = np.linspace(-1.2, 0.7, 24), np.linspace(-0.7, 1.0, 23)
    exact, folds = Quadrature((place, slope, place, slope), log_prior, rows), fw.leave_one_out(24)
    return [
        ("parties, multinomial", fw.from_pymc(model), folds, exact),
        ("parties, multinomial, NumPyro", fw.from_numpyro(in_numpyro, x, y=counts), folds, exact),
    ]


def neighbourhoods():
    """Crime in 49 neighbourhoods of Columbus, Ohio, by income and house values (Anselin 1988).

    What the regression leaves is a conditional autoregression on the graph of who borders on whom.
    """
    from libpysal import examples

    areas = json.loads(Path(examples.get_path("columbus.json")).read_text())["features"]
    data = pd.DataFrame([area["properties"] for area in areas])
    words = iter(Path(examples.get_path("columbus.gal")).read_text().split())
    n = int(next(words))
    borders = np.zeros((n, n))
    for _ in range(n):
        area, count = int(next(words)), int(next(words))
        borders[area - 1, [int(next(words)) - 1 for _ in range(count)]] = 1.0
    y = data["CRIME"].to_numpy()
    x = np.column_stack([np.ones(n), scipy.stats.zscore(data[["INC", "HOVAL"]].to_numpy())])
    wide = np.array([50.0, 20.0, 20.0])
    with pm.Model() as model:
        alpha, sd = pm.Beta("alpha", 2.0, 1.0), pm.LogNormal("sd", 3.0, 1.0)
        mu = pm.math.dot(x, pm.Normal("b", 0.0, wide, shape=3))
        pm.CAR("y", mu, borders, alpha, 1.0 / sd**2, observed=y)

    def in_numpyro(x, y=None):
        alpha = numpyro.sample("alpha", dist.Beta(2.0, 1.0))
        sd = numpyro.sample("sd", dist.LogNormal(3.0, 1.0))
        b = numpyro.sample("b", dist.Normal(0.0, wide).to_event(1))
        numpyro.sample("y", dist.CAR(x @ b, alpha, 1.0 / sd**2, borders), obs=y)

    def covariance(alpha, sd):
        return sd**2 * np.linalg.inv(np.diag(borders.sum(axis=0)) - alpha * borders)

    u, z = np.meshgrid(np.linspace(-8.0, 14.0, 40), np.linspace(-0.9, 1.5, 30))
    # alpha = expit(u): its prior, Beta(2, 1), with the Jacobian
    log_prior = 2 * scipy.special.log_expit(u) + scipy.special.log_expit(-u) - 0.5 * z**2
    grid = np.column_stack([scipy.special.expit(u.ravel()), np.exp(3.0 + z.ravel())])
    exact = Normal(y, x, np.diag(wide**2), covariance, grid, log_prior.ravel())
    around = [(np.flatnonzero(~near), [i]) for i, near in enumerate((borders + np.eye(n)) > 0)]
    schemes = {
        "one area": fw.leave_one_out(n)[::3],
        "without neighbours": fw.from_splits(around[::6], n),
        "blocks": fw.spatial_block(data[["X", "Y"]].to_numpy(), 6, seed=1),
    }
    both = {"": fw.from_pymc(model), ", NumPyro": fw.from_numpyro(in_numpyro, x, y=y)}
    return [
        (f"neighbourhoods, {name}{package}", adapted, folds, exact)
        for package, adapted in both.items()
        for name, folds in schemes.items()
    ]


def nile():
    """Flow of the Nile, 1871 to 1970: a level that walks, seen with noise; or seen, and returning.

    The level is integrated out, and the quadrature has its covariance. What is seen itself, as the
    states of a linear system, begins at the mean of the series, as NumPyro has it.
    """
    y = (hard.NILE - hard.NILE.mean()) / hard.NILE.std()
    n = len(y)
    step = np.arange(n)
    before, lag = np.minimum(step[:, None], step), step[:, None] - step

    def level(y=None):
        noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.5))
        walk = numpyro.sample("walk", dist.LogNormal(-1.5, 1.0))
        # the first level has the prior N(0, 2)
        covariance = 4.0 + walk**2 * before + noise**2 * jnp.eye(n)
        numpyro.sample("y", dist.MultivariateNormal(0.0, covariance), obs=y)

    def states(y=None):
        rho = numpyro.sample("rho", dist.Beta(2.0, 2.0))
        sd = numpyro.sample("sd", dist.LogNormal(0.0, 0.5))
        system = dist.GaussianStateSpace(n, rho * jnp.eye(1), scale_tril=sd * jnp.eye(1))
        numpyro.sample("y", system, obs=y)

    def of_level(noise, walk):
        return 4.0 + walk**2 * before + noise**2 * np.eye(n)

    def of_states(rho, sd):
        shocks = np.tril(rho ** np.maximum(lag, 0))
        return sd**2 * shocks @ shocks.T

    nothing = np.zeros((n, 1)), np.eye(1)
    s, t = np.meshgrid(np.linspace(-1.2, 0.6, 36), np.linspace(-7.0, 1.5, 60))
    grid = np.exp(np.column_stack([s.ravel(), t.ravel()]))
    log_prior = -0.5 * ((s + 0.5) / 0.5) ** 2 - 0.5 * (t + 1.5) ** 2
    of_levels = Normal(y, *nothing, of_level, grid, log_prior.ravel())
    u, t = np.meshgrid(np.linspace(-4.0, 4.0, 40), np.linspace(-0.6, 0.5, 30))
    grid = np.column_stack([scipy.special.expit(u.ravel()), np.exp(t.ravel())])
    log_share = scipy.special.log_expit
    log_prior = 2 * (log_share(u) + log_share(-u)) - 0.5 * (t / 0.5) ** 2
    of_system = Normal(y, *nothing, of_states, grid, log_prior.ravel())
    schemes = {
        "next year": fw.leave_future_out(n, start=70),
        "block": fw.leave_group_out(step // 10),
        "one year": fw.leave_one_out(n)[::4],
    }
    walking, returning = fw.from_numpyro(level, y=y), fw.from_numpyro(states, y=y[:, None])
    cases = {"level": (walking, of_levels), "states": (returning, of_system)}
    return [
        (f"Nile, {name}, {scheme}", model, folds, exact)
        for name, (model, exact) in cases.items()
        for scheme, folds in schemes.items()
    ]


def special():
    return [*visits(), *parties(), *neighbourhoods(), *nile()]
