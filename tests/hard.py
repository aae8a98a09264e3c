"""Problems that are hard for MCMC, each with exact cross-validation scores made without it.

Slow chains, funnels and posteriors far from the full data's: here a run may be wrong, but it must
not be wrong and call itself fine (``bench/trust.py``, and small forms in the tests). Every problem
has a ``name``, ``folds``, a ``model()`` in plain JAX, and ``exact()``, the log score of each fold,
in NumPy: parameters that are normal given the others are integrated in closed form, the others on
a grid (``exact(step=0.5)`` halves its spacing: no score changes by 1e-6). Where integrands fall
off at both ends of an even grid, as all here do, a plain sum converges faster than any power of
the spacing.
``tests/test_hard.py`` makes the same numbers by another route.
"""

import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

import foldwise as fw

LOG_2PI = np.log(2 * np.pi)


def normal(x, mean, sd, array=jnp):
    """Log density of a normal variable, in JAX or (``array=np``) in NumPy."""
    return -0.5 * ((x - mean) / sd) ** 2 - array.log(sd) - 0.5 * LOG_2PI


def half_normal(log_scale, sd, array=jnp):
    """Log density, up to a constant, of the log of a half-normal scale, in JAX or in NumPy."""
    return log_scale - 0.5 * array.exp(2 * log_scale) / sd**2


# ---------------------------------------------------------------- local level

# fmt: off
NILE = np.array([
    1120, 1160, 963, 1210, 1160, 1160, 813, 1230, 1370, 1140, 995, 935, 1110, 994, 1020, 960,
    1180, 799, 958, 1140, 1100, 1210, 1150, 1250, 1260, 1220, 1030, 1100, 774, 840, 874, 694,
    940, 833, 701, 916, 692, 1020, 1050, 969, 831, 726, 456, 824, 702, 1120, 1100, 832, 764,
    821, 768, 845, 864, 862, 698, 845, 744, 796, 1040, 759, 781, 865, 845, 944, 984, 897, 822,
    1010, 771, 676, 649, 846, 812, 742, 801, 1040, 860, 874, 848, 890, 744, 749, 838, 1050, 918,
    986, 797, 923, 975, 815, 1020, 906, 901, 1170, 912, 746, 919, 718, 714, 740,
], float)
# fmt: on


class LocalLevel:
    """A random walk plus noise for the yearly flow of the Nile at Aswan, 1871 to 1970.

        se ~ half-N(1),  sn ~ half-N(0.5),  x_1 ~ N(0, 2),  x_t ~ N(x_t-1, sn),  y_t ~ N(x_t, se)

    with y standardised (Durbin and Koopman 2012, section 2). ``scheme`` is "future" (one step
    ahead from row ``first`` on) or "one" (leave-one-out); ``n`` takes the first rows only. Exact
    by the Kalman filter, a row left out being a missing one, with (log se, log sn) on a grid; the
    other route is the covariance matrix of y and adaptive quadrature.
    """

    def __init__(self, centred=True, scheme="future", n=100, first=40):
        self.y = ((NILE - NILE.mean()) / NILE.std())[:n]
        self.centred, self.scheme = centred, scheme
        self.folds = fw.leave_one_out(n) if scheme == "one" else fw.leave_future_out(n, first)
        form = "centred" if centred else "non-centred"
        self.name = f"local level, {form}, leave-{scheme}-out"

    def model(self) -> fw.Model:
        n, centred = len(self.y), self.centred

        def level(q):
            steps = jnp.concatenate([jnp.full(1, 2.0), jnp.full(n - 1, jnp.exp(q["log_sn"]))])
            return q["x"] if centred else jnp.cumsum(steps * q["x"])

        def log_prior(q):
            scales = half_normal(q["log_se"], 1.0) + half_normal(q["log_sn"], 0.5)
            if not centred:
                return scales - 0.5 * jnp.sum(q["x"] ** 2)
            walk = normal(q["x"][1:], q["x"][:-1], jnp.exp(q["log_sn"]))
            return scales + normal(q["x"][0], 0.0, 2.0) + jnp.sum(walk)

        return fw.Model(
            log_prior,
            None,
            {"log_se": -0.5, "log_sn": -1.0, "x": np.zeros(n)},
            n,
            row_log_density=lambda q, y: normal(y, level(q), jnp.exp(q["log_se"])),
            y=self.y,
            name=self.name,
        )

    def _filter(self, log_se, log_sn, missing=None):
        """Log density of each row given those before it, by row and grid point; 0 if missing."""
        noise, step = np.exp(2 * log_se), np.exp(2 * log_sn)
        mean, variance = np.zeros_like(noise), np.full_like(noise, 4.0)
        rows = np.zeros((len(self.y), *noise.shape))
        for t, y in enumerate(self.y):
            if t != missing:
                total = variance + noise
                rows[t] = normal(y, mean, np.sqrt(total), np)
                mean = mean + variance / total * (y - mean)
                variance = variance * noise / total
            variance = variance + step
        return rows

    def exact(self, step=1.0) -> np.ndarray:
        """From exp(-16), below which either scale has probability 1e-7, to exp(2)."""
        log_se, log_sn = np.meshgrid(
            np.arange(-16, 2, 0.06 * step), np.arange(-16, 2, 0.12 * step), indexing="ij"
        )
        prior = half_normal(log_se, 1.0, np) + half_normal(log_sn, 0.5, np)
        rows = self._filter(log_se, log_sn)
        if self.scheme == "one":
            whole = prior + rows.sum(axis=0)
            # e^60 below the mode: no one row makes up for that (keeping all changes nothing)
            keep = whole > whole.max() - 60
            se, sn, kept = log_se[keep], log_sn[keep], prior[keep]
            without = [
                logsumexp(kept + self._filter(se, sn, i).sum(axis=0)) for i in range(len(self.y))
            ]
            return logsumexp(whole[keep]) - np.array(without)
        evidence = [logsumexp(prior + rows[: len(train)].sum(axis=0)) for train, _ in self.folds]
        evidence.append(logsumexp(prior + rows.sum(axis=0)))
        return np.diff(evidence)


# ---------------------------------------------------------------- eight schools


class EightSchools:
    """Effects of coaching in eight schools (Rubin 1981), leave-one-out.

        mu ~ N(0, 5),  tau ~ half-Cauchy(5),  theta_j ~ N(mu, tau),  y_j ~ N(theta_j, sigma_j)

    Exact with theta and mu in closed form and log tau on a grid; the other route is importance
    sampling with draws of (mu, tau) from their prior.
    """

    def __init__(self, centred=True):
        self.y = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
        self.sigma = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
        self.centred, self.folds = centred, fw.leave_one_out(8)
        self.name = f"eight schools, {'centred' if centred else 'non-centred'}"

    def model(self) -> fw.Model:
        centred, sigma = self.centred, self.sigma

        def log_prior(q):
            tau = jnp.exp(q["log_tau"])
            top = normal(q["mu"], 0.0, 5.0) + q["log_tau"] - jnp.log1p((tau / 5.0) ** 2)
            if centred:
                return top + jnp.sum(normal(q["theta"], q["mu"], tau))
            return top - 0.5 * jnp.sum(q["theta"] ** 2)

        def row_log_density(q, y):
            effect = q["theta"] if centred else q["mu"] + jnp.exp(q["log_tau"]) * q["theta"]
            return normal(y, effect, sigma)

        return fw.Model(
            log_prior,
            None,
            {"mu": 0.0, "log_tau": 1.0, "theta": np.zeros(8)},
            8,
            row_log_density=row_log_density,
            y=self.y,
            name=self.name,
        )

    def exact(self, step=1.0) -> np.ndarray:
        log_tau = np.arange(-20, 15, 0.1 * step)
        prior = log_tau - np.log1p((np.exp(log_tau) / 5.0) ** 2)
        variance = self.sigma**2 + np.exp(2 * log_tau)[:, None]

        def evidence(rows):
            return logsumexp(prior + common_mean(self.y[rows], variance[:, rows], 5.0))

        return evidence(slice(None)) - np.array([evidence(train) for train, _ in self.folds])


def common_mean(y, variance, prior_sd):
    """Log density of y_j ~ N(mu, variance_j) with mu ~ N(0, prior_sd), over the last axis."""
    precision = np.sum(1 / variance, axis=-1) + 1 / prior_sd**2
    pull = np.sum(y / variance, axis=-1)
    rows = -0.5 * np.sum(y**2 / variance + np.log(variance) + LOG_2PI, axis=-1)
    return rows + 0.5 * pull**2 / precision - 0.5 * np.log(precision * prior_sd**2)


# ---------------------------------------------------------------- near-unit-root autoregression


class NearUnitRoot:
    """An autoregression close to a random walk, whose mean the data hardly know.

        y_t ~ N(mean + rho (y_t-1 - mean), sd),  rho ~ U(-1, 1),  mean ~ N(0, 100),  sd ~ half-N(1)

    60 values made with rho 0.98, given the one before them; one step ahead from row 30 on. As rho
    goes to 1 the mean goes back to its vague prior. Exact with the mean in closed form and
    (atanh rho, log sd) on a grid; the other route is a Gauss rule for all three.
    """

    name = "near-unit-root autoregression"

    def __init__(self, n=60, first=30):
        rng = np.random.default_rng(21)
        y = np.zeros(61)
        for t in range(1, 61):
            y[t] = 0.98 * y[t - 1] + 0.5 * rng.normal()
        self.before, self.y = y[:n], y[1 : n + 1]
        self.folds = fw.leave_future_out(n, first)

    def model(self) -> fw.Model:
        before = self.before

        def row_log_density(q, y):
            rho = jnp.tanh(q["atanh_rho"])
            return normal(y, q["mean"] + rho * (before - q["mean"]), jnp.exp(q["log_sd"]))

        return fw.Model(
            # the Jacobian: 1 - tanh(u)^2 = 4 / (e^u + e^-u)^2
            lambda q: (
                -2 * jnp.logaddexp(q["atanh_rho"], -q["atanh_rho"])
                + normal(q["mean"], 0.0, 100.0)
                + half_normal(q["log_sd"], 1.0)
            ),
            None,
            {"atanh_rho": 1.0, "mean": 0.0, "log_sd": -0.5},
            len(self.y),
            row_log_density=row_log_density,
            y=self.y,
            name=self.name,
        )

    def exact(self, step=1.0) -> np.ndarray:
        u, log_sd = np.meshgrid(np.arange(-6, 14, 0.06 * step), np.arange(-6, 3, 0.06 * step))
        rho, sd = np.tanh(u), np.exp(log_sd)
        prior = -2 * np.logaddexp(u, -u) + half_normal(log_sd, 1.0, np)
        apart = 2 / (1 + np.exp(2 * u))  # 1 - rho, without loss of digits

        def evidence(n):
            """Of the first n rows: y - rho before is normal with mean ``apart`` times ours."""
            one, two = self.y[:n], self.before[:n]
            square = one @ one - 2 * rho * (one @ two) + rho**2 * (two @ two)
            pull = apart * (one.sum() - rho * two.sum()) / sd**2
            precision = n * apart**2 / sd**2 + 1e-4  # of a prior with sd 100
            rows = -0.5 * square / sd**2 - n * (log_sd + 0.5 * LOG_2PI)
            return logsumexp(prior + rows + 0.5 * pull**2 / precision - 0.5 * np.log(precision))

        n_train = [len(train) for train, _ in self.folds]
        return np.diff([evidence(n) for n in [*n_train, len(self.y)]])


# ---------------------------------------------------------------- funnel


class Funnel:
    """Ten groups of one to three rows, centred, with a wide prior of their spread.

        mu ~ N(0, 2),  log tau ~ N(0, 1.5),  theta_j ~ N(mu, tau),  y_i ~ N(theta_j(i), 1)

    Leave-group-out, scored jointly. The data cannot tell tau from nothing: a funnel down to where
    the prior ends it. Exact with theta and mu in closed form and log tau on a grid; the other route
    is a Gauss rule for mu and log tau.
    """

    name = "funnel, leave-group-out"

    def __init__(self):
        rng = np.random.default_rng(22)
        self.sizes = np.array([1, 2, 3, 1, 2, 3, 1, 2, 3, 2])
        self.group = np.repeat(np.arange(10), self.sizes)
        self.y = 1.0 + 0.3 * rng.normal(size=10)[self.group] + rng.normal(size=len(self.group))
        self.folds = fw.leave_group_out(self.group)

    def model(self) -> fw.Model:
        group = self.group

        def log_prior(q):
            effects = normal(q["theta"], q["mu"], jnp.exp(q["log_tau"]))
            return normal(q["mu"], 0.0, 2.0) + normal(q["log_tau"], 0.0, 1.5) + jnp.sum(effects)

        return fw.Model(
            log_prior,
            None,
            {"mu": 0.0, "log_tau": 0.0, "theta": np.zeros(10)},
            len(self.y),
            row_log_density=lambda q, y: normal(y, q["theta"][group], 1.0),
            y=self.y,
            name=self.name,
        )

    def exact(self, step=1.0) -> np.ndarray:
        log_tau = np.arange(-12, 12, 0.1 * step)
        prior = -0.5 * (log_tau / 1.5) ** 2
        mean = np.bincount(self.group, self.y) / self.sizes
        variance = 1 / self.sizes + np.exp(2 * log_tau)[:, None]
        # what rows have beyond their group's mean: the same whatever tau and mu
        square = np.bincount(self.group, (self.y - mean[self.group]) ** 2)
        within = -0.5 * (square + (self.sizes - 1) * LOG_2PI + np.log(self.sizes))

        def evidence(groups):
            return logsumexp(prior + common_mean(mean[groups], variance[:, groups], 2.0))

        without = [evidence(np.delete(np.arange(10), j)) for j in range(10)]
        return evidence(np.arange(10)) - np.array(without) + within


# ---------------------------------------------------------------- mixture


class Mixture:
    """Two normals that overlap, of unknown weight and means: 40 rows, leave-one-out.

        share ~ Beta(2, 2),  a ~ N(0, 1),  b ~ N(1, 3),  y ~ share N(a, 1) + (1 - share) N(b, 1)

    Their labels differ by their priors alone, so a and b are either way round, and as the share
    goes to 1, b goes back to its prior. Exact with (logit share, a, b) on a grid; the other route
    is a Gauss rule for (share, a, b).
    """

    name = "weakly identified mixture"

    def __init__(self):
        rng = np.random.default_rng(23)
        self.y = rng.normal(size=40) + np.where(rng.random(40) < 0.3, 2.0, 0.0)
        self.folds = fw.leave_one_out(40)

    def model(self) -> fw.Model:
        def row_log_density(q, y):
            first = -jnp.logaddexp(0.0, -q["logit"]) + normal(y, q["a"], 1.0)
            return jnp.logaddexp(first, -jnp.logaddexp(0.0, q["logit"]) + normal(y, q["b"], 1.0))

        return fw.Model(
            lambda q: (
                # Beta(2, 2) with the Jacobian of the logit
                -2 * (jnp.logaddexp(0.0, q["logit"]) + jnp.logaddexp(0.0, -q["logit"]))
                + normal(q["a"], 0.0, 1.0)
                + normal(q["b"], 1.0, 3.0)
            ),
            None,
            {"logit": 0.0, "a": 0.0, "b": 1.0},
            40,
            row_log_density=row_log_density,
            y=self.y,
            name=self.name,
        )

    def exact(self, step=1.0) -> np.ndarray:
        logit = np.arange(-10, 10, 0.4 * step)[:, None, None]
        a = np.arange(-6, 6, 0.2 * step)[:, None]
        b = np.arange(-17, 19, 0.2 * step)
        share = 1 / (1 + np.exp(-logit))
        log = (
            np.log(share**2 * (1 - share) ** 2) + normal(a, 0.0, 1.0, np) + normal(b, 1.0, 3.0, np)
        )

        def row(y):
            one, two = np.exp(-0.5 * (y - a) ** 2), np.exp(-0.5 * (y - b) ** 2)
            return (share * one + (1 - share) * two) / np.sqrt(2 * np.pi)

        for y in self.y:
            log = log + np.log(row(y))
        posterior = np.exp(log - log.max())
        # p(y_i | others) is the harmonic mean of the row's density: exact on a grid
        return np.log(posterior.sum()) - np.log([np.sum(posterior / row(y)) for y in self.y])


# ---------------------------------------------------------------- horseshoe regression

# Log scores of the ten folds of Horseshoe, and their standard errors, as `python tests/hard.py`
# prints them "by full data" (ten minutes or more).
# fmt: off
HORSESHOE = np.array([
    -2.2324, -1.2014, -1.4526, -0.9905, -2.1622, -0.8752, -1.4253, -1.4539, -0.9149, -1.8993,
])
HORSESHOE_ERROR = np.array([
    0.0005, 0.0002, 0.0003, 0.0002, 0.0007, 0.0002, 0.0004, 0.0004, 0.0002, 0.0005,
])
# fmt: on


class Horseshoe:
    """A sparse regression, 40 rows on 20 covariates; leave-one-out of every fourth row.

        y ~ N(X beta, sd),  beta_j ~ N(0, tau lambda_j),  lambda_j, tau, sd ~ half-Cauchy(1)

    written with beta_j / (tau lambda_j) and log scales as parameters. The scores are not quite
    exact, but far closer than a run's: from the Gibbs sampler of Makalic and Schmidt (2016), long,
    with beta integrated out of the density of the test row. ``by_full_data`` takes the harmonic
    mean of that density in the full-data posterior; the other route, ``by_fold``, its mean in the
    fold's own.
    """

    name = "horseshoe regression"

    def __init__(self):
        rng = np.random.default_rng(24)
        self.X = rng.normal(size=(40, 20))
        beta = np.concatenate([[2.0, -1.0, 0.5, 0.3], np.zeros(16)])
        self.y = self.X @ beta + rng.normal(size=40)
        self.folds = fw.leave_one_out(40)[::4]

    def model(self) -> fw.Model:
        X = self.X

        def half_cauchy(log_scale):
            return log_scale - jnp.log1p(jnp.exp(2 * log_scale))

        def log_prior(q):
            scales = half_cauchy(q["log_tau"]) + half_cauchy(q["log_sd"])
            return scales + jnp.sum(half_cauchy(q["log_lambda"])) - 0.5 * jnp.sum(q["z"] ** 2)

        def row_log_density(q, y):
            beta = q["z"] * jnp.exp(q["log_lambda"] + q["log_tau"])
            return normal(y, X @ beta, jnp.exp(q["log_sd"]))

        return fw.Model(
            log_prior,
            None,
            {"log_tau": -1.0, "log_sd": 0.0, "log_lambda": np.zeros(20), "z": np.zeros(20)},
            40,
            row_log_density=row_log_density,
            y=self.y,
            name=self.name,
        )

    def exact(self) -> np.ndarray:
        return HORSESHOE

    def by_fold(self, draws, chains=50, seed=0):
        """Log score of each fold, and its standard error, from chains of the fold's posterior."""
        rows = np.concatenate([test for _, test in self.folds])
        train = np.ones((len(rows), 40))
        train[np.arange(len(rows)), rows] = 0.0
        density = np.zeros((len(rows), chains))
        for mean, factor, variance in self._gibbs(train, draws, chains, seed):
            spread = (factor @ self.X[rows][:, None, :, None])[..., 0]
            sd = np.sqrt(variance + np.sum(spread**2, axis=-1))
            fitted = np.sum(mean * self.X[rows][:, None], axis=-1)
            density += np.exp(normal(self.y[rows][:, None], fitted, sd, np))
        return log_of_mean(density / draws)

    def by_full_data(self, draws, chains=50, seed=0):
        """The same from chains of the full-data posterior: 1 / E[1 / p(y_i | scales, others)].

        Given the scales, a row's residual and variance without it follow from its leverage.
        """
        rows = np.concatenate([test for _, test in self.folds])
        inverse = np.zeros((len(rows), chains))
        for mean, factor, variance in self._gibbs(np.ones((1, 40)), draws, chains, seed):
            spread = factor[0] @ self.X[rows].T
            rest = 1 - np.sum(spread**2, axis=-2).T / variance[0]
            residual = (self.y[rows][:, None] - self.X[rows] @ mean[0].T) / rest
            inverse += np.exp(-normal(residual, 0.0, np.sqrt(variance[0] / rest), np))
        log, error = log_of_mean(inverse / draws)
        return -log, error

    def _gibbs(self, train, draws, chains, seed, warmup=500):
        """Yield at each draw what beta is given the scales, and sd^2; all by posterior and chain.

        ``train`` weighs the rows, one line for each posterior. Beta's conditional is normal, with
        its ``mean`` and the covariance factor' factor. A half-Cauchy(1) scale has a square that is
        inverse gamma(1/2, 1/a) given a ~ inverse gamma(1/2, 1), which makes all steps conjugate.
        """
        rng = np.random.default_rng(seed)
        square = np.einsum("fn,np,nq->fpq", train, self.X, self.X)[:, None]
        product = ((train * self.y) @ self.X)[:, None]
        shape = (len(train), chains)
        local, of_local = np.ones((*shape, 20)), np.ones((*shape, 20))
        tau, of_tau, variance, of_variance = np.ones((4, *shape))
        half = (train.sum(axis=1)[:, None] + 1) / 2
        for i in range(warmup + draws):  # local, tau and variance are squares of the scales
            precision = square / variance[..., None, None]
            precision += np.eye(20) / (local * tau[..., None])[..., None]
            factor = np.linalg.inv(np.linalg.cholesky(precision))
            transpose = np.swapaxes(factor, -1, -2)
            mean = transpose @ (factor @ (product / variance[..., None])[..., None])
            if i >= warmup:
                yield mean[..., 0], factor, variance
            beta = (mean + transpose @ rng.normal(size=mean.shape))[..., 0]
            error = np.sum(train[:, None] * (self.y - beta @ self.X.T) ** 2, axis=-1)
            local = inverse_gamma(rng, 1.0, 1 / of_local + beta**2 / (2 * tau[..., None]))
            of_local = inverse_gamma(rng, 1.0, 1 + 1 / local)
            tau = inverse_gamma(rng, 10.5, 1 / of_tau + np.sum(beta**2 / (2 * local), axis=-1))
            of_tau = inverse_gamma(rng, 1.0, 1 + 1 / tau)
            variance = inverse_gamma(rng, half, 1 / of_variance + error / 2)
            of_variance = inverse_gamma(rng, 1.0, 1 + 1 / variance)


def inverse_gamma(rng, shape, rate):
    """Draws of inverse gamma variables, as many as there are rates."""
    return rate / rng.gamma(shape, size=np.shape(rate))


def log_of_mean(by_chain):
    """Log of the mean over independent chains, the last axis, and its standard error."""
    mean = by_chain.mean(axis=-1)
    return np.log(mean), by_chain.std(axis=-1, ddof=1) / np.sqrt(by_chain.shape[-1]) / mean


if __name__ == "__main__":
    horseshoe = Horseshoe()
    folds, folds_error = horseshoe.by_fold(10_000)
    full, full_error = horseshoe.by_full_data(40_000, seed=1)
    print("by fold", np.round(folds, 4).tolist(), "errors", np.round(folds_error, 4).tolist())
    print("by full data", np.round(full, 4).tolist(), "errors", np.round(full_error, 4).tolist())
    print("apart, in errors", np.round((folds - full) / np.hypot(folds_error, full_error), 1))
