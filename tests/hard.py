"""Problems that are hard for MCMC, each with exact cross-validation scores made without it.

Slow chains, funnels and posteriors far from the full data's: here a run may be wrong, but it must
not be wrong and call itself fine (``bench/trust.py``, and small forms in the tests). Every problem
has a ``name``, ``folds``, a ``model()`` in plain JAX, and ``exact()``, the log score of each fold,
in NumPy: parameters that are normal given the others are integrated in closed form, the others on
a grid (``exact(step=0.5)`` halves its spacing). Where integrands fall off at both ends of an even
grid, as all here do, a plain sum converges faster than any power of the spacing.
``tests/test_hard.py`` halves the spacing, and makes the same numbers by another route.
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
