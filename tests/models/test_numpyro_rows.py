"""Rows of NumPyro models in factors, in several sites, of many families and either axis."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy
from numpyro import handlers
from scipy import stats

import foldwise as fw
from foldwise.models.numpyro_rows import find_rows, has_atoms, is_censored

RNG = np.random.default_rng(7)
N = 6
Y = RNG.normal(size=N)
MASK = np.array([True, False, True, True, False, True])


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def sites_of(model, *args, **values):
    """The sites of a model at values of its latent ones."""
    placed = handlers.substitute(handlers.seed(model, 0), values)
    return dict(handlers.trace(placed).get_trace(*args))


# ---------------------------------------------------------------- factors and several sites

TIMES = RNG.exponential(size=8)
SEEN = np.array([True, True, False, True, False, True, True, False])


def in_two_sites(times, seen):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("seen", int(seen.sum())):
        numpyro.sample("events", dist.Exponential(rate), obs=times[seen])
    with numpyro.plate("unseen", int((~seen).sum())):
        numpyro.factor("censored", -rate * times[~seen])


def as_factor(times, seen, total=False, also=None):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    rows = jnp.where(seen, jnp.log(rate), 0.0) - rate * times
    if also:
        rows = numpyro.deterministic(also, rows)
    numpyro.factor("rows", rows.sum() if total else rows)


def summed(times, seen):
    as_factor(times, seen, total=True)


def heavy(times, seen):
    s = numpyro.sample("s", dist.LogNormal())
    numpyro.sample("y", dist.MultivariateStudentT(4.0, jnp.zeros(N), s * jnp.eye(N)), obs=Y)


def walk(times, seen):
    numpyro.sample("y", dist.GaussianRandomWalk(numpyro.sample("s", dist.LogNormal()), N), obs=Y)


def masked_vector(times, seen):
    s = numpyro.sample("s", dist.LogNormal())
    with handlers.mask(mask=MASK):
        numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(N), s * jnp.eye(N)), obs=Y)


def exact_rows(rate):
    return np.where(SEEN, np.log(rate), 0.0) - rate * TIMES


@pytest.mark.parametrize(
    "model, wanted, order",
    [
        (as_factor, "rows", np.arange(8)),
        (
            in_two_sites,
            {"events": None, "censored": None},
            np.r_[np.flatnonzero(SEEN), np.flatnonzero(~SEEN)],
        ),
        (
            in_two_sites,
            {"censored": np.flatnonzero(~SEEN), "events": np.flatnonzero(SEEN)},
            np.arange(8),
        ),
    ],
)
def test_rows_of_factors_and_several_sites(model, wanted, order):
    sites = sites_of(model, TIMES, SEEN, rate=1.5)
    found = find_rows(sites, None, wanted, 0)
    np.testing.assert_allclose(found.log_likelihood(sites), exact_rows(1.5)[order], atol=1e-12)
    assert set(found.counted) == set(sites) - {"rate", "seen", "unseen"}


def test_entries_of_one_row_add_up():
    sites, pair = sites_of(as_factor, TIMES, SEEN, rate=0.8), np.arange(8) // 2
    found = find_rows(sites, None, {"rows": pair}, 0)
    exact = np.bincount(pair, exact_rows(0.8))
    assert found.n_obs == 4 and found.observed(sites) is None
    np.testing.assert_allclose(found.log_likelihood(sites), exact, atol=1e-12)


def test_values_of_two_sites_are_in_the_order_of_the_rows():
    def model():
        numpyro.sample("b", dist.Normal(0.0, jnp.ones(2)), obs=np.array([3.0, 1.0]))
        numpyro.sample("a", dist.Normal(0.0, jnp.ones(3)), obs=np.array([0.0, 2.0, 4.0]))

    sites = sites_of(model)
    found = find_rows(sites, None, {"b": [3, 1], "a": [0, 2, 4]}, 0)
    np.testing.assert_array_equal(found.observed(sites), np.arange(5.0))
    np.testing.assert_allclose(found.log_likelihood(sites), stats.norm.logpdf(np.arange(5.0)))
    moved = np.arange(5.0) ** 2
    np.testing.assert_allclose(found.log_likelihood(sites, moved), stats.norm.logpdf(moved))
    drawn = np.asarray(found.draw(jax.random.key(0), sites))
    one, two = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(drawn[[3, 1]], sites["b"]["fn"].sample(one))
    np.testing.assert_array_equal(drawn[[0, 2, 4]], sites["a"]["fn"].sample(two))


@pytest.mark.parametrize("total", [True, False])
def test_rows_of_a_deterministic_site_count_once(total):
    found = fw.from_numpyro(as_factor, TIMES, SEEN, total=total, also="by_row", rows="by_row")
    prior, rows = jax.jit(lambda q: (found.log_prior(q), found.log_likelihood(q)))({"rate": 0.4})
    np.testing.assert_allclose(rows, exact_rows(np.exp(0.4)), atol=1e-12)
    assert float(prior) == pytest.approx(stats.gamma(2.0).logpdf(np.exp(0.4)) + 0.4, abs=1e-10)


def test_scores_of_a_factor(seed):
    """Exponential times with a gamma rate: the log predictive densities are known."""
    found = fw.from_numpyro(as_factor, TIMES, SEEN, rows="rows")
    result = fw.cross_validate(found, fw.leave_one_out(8), seed=seed, progress=False)
    shape, rate = 2 + SEEN.sum() - SEEN, 1 + TIMES.sum() - TIMES
    exact = shape * np.log(rate / (rate + TIMES)) + SEEN * np.log(shape / (rate + TIMES))
    z = (result.folds["elpd"].values - exact) / result.folds["mcse"].values
    assert np.abs(z).max() < 4 and result.mcse < 0.2


@pytest.mark.parametrize(
    "model, wanted, match",
    [
        (as_factor, {}, r'only factors, rows; say which .* rows="rows"'),
        (summed, {"rows": "rows"}, "'rows' must .* but it is one number, the sum"),
        (as_factor, {"rows": "odd"}, "observed sites, factors .* rows; got 'odd'"),
        (in_two_sites, {"observed": "events", "rows": "censored"}, "both were given"),
        (in_two_sites, {"axis": 1}, r"axis of 'events', which has the shape \(5,\); got 1"),
        (heavy, {}, "or be normal, but it is a single MultivariateStudentT"),
        (walk, {"rows": {"y": np.arange(N) // 2}}, "numbered in their order"),
        (masked_vector, {}, "cannot be masked by row, .* joint_log_likelihood=f"),
    ],
)
def test_what_is_refused(model, wanted, match):
    sites = sites_of(model, TIMES, SEEN)
    with pytest.raises(ValueError, match=match):
        find_rows(sites, **{"observed": None, "rows": None, "axis": 0, **wanted})


def test_rows_that_are_data_of_the_model():
    with pytest.raises(TypeError, match="given by position"):
        find_rows(sites_of(as_factor, TIMES, SEEN), None, TIMES, 0)


def test_a_deterministic_site_that_no_factor_counts():
    def uncounted(times):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
        numpyro.deterministic("by_row", -rate * times)
        numpyro.factor("half", -0.5 * rate * times.sum())

    with pytest.raises(ValueError, match="'by_row' must .* but no factors .* are their sum"):
        fw.from_numpyro(uncounted, TIMES, rows="by_row")


# ---------------------------------------------------------------- families


def inflated(m):
    return 0.2 * (COUNTS == 0) + 0.8 * stats.poisson.pmf(COUNTS, np.exp(m))


COUNTS, POSITIVE = RNG.poisson(1.5, N), RNG.exponential(size=N) + 0.1
POSITIVE_OR_ZERO = np.where(MASK, POSITIVE, 0.0)
LIMITS = np.column_stack([POSITIVE, POSITIVE + 1.0])
BOTH = dist.Categorical(jnp.array([0.3, 0.7]))
FAMILIES = {
    "truncated": (
        lambda m: dist.TruncatedNormal(m, 1.0, low=0.0),
        POSITIVE,
        lambda m: stats.norm.logpdf(POSITIVE - m) - stats.norm.logsf(-m),
    ),
    "truncated, of any kind": (
        lambda m: dist.TruncatedDistribution(dist.Laplace(m, 1.0), low=0.0, high=9.0),
        POSITIVE,
        lambda m: (
            stats.laplace.logpdf(POSITIVE - m) - np.log(np.diff(stats.laplace.cdf([-m, 9 - m])))
        ),
    ),
    "mixture": (
        lambda m: dist.MixtureSameFamily(BOTH, dist.Normal(jnp.array([0.0, 1.0]) + m, 1.0)),
        Y,
        lambda m: np.log(0.3 * stats.norm.pdf(Y - m) + 0.7 * stats.norm.pdf(Y - m - 1)),
    ),
    "mixture of others": (
        lambda m: dist.MixtureGeneral(
            BOTH,
            [dist.Normal(m, 1.0), dist.Laplace(m, 1.0)],
            support=dist.constraints.real,
        ),
        Y,
        lambda m: np.log(0.3 * stats.norm.pdf(Y - m) + 0.7 * stats.laplace.pdf(Y - m)),
    ),
    "zero-inflated": (
        lambda m: dist.ZeroInflatedPoisson(0.2, jnp.exp(m)),
        COUNTS,
        lambda m: np.log(inflated(m)),
    ),
    "right-censored": (
        lambda m: dist.RightCensoredDistribution(dist.Exponential(jnp.exp(m)), ~MASK),
        POSITIVE,
        lambda m: np.where(MASK, m, 0.0) - np.exp(m) * POSITIVE,
    ),
    "left-censored": (
        lambda m: dist.LeftCensoredDistribution(dist.Normal(m, 1.0), ~MASK),
        Y,
        lambda m: np.where(MASK, stats.norm.logpdf(Y - m), stats.norm.logcdf(Y - m)),
    ),
    "interval-censored": (
        lambda m: dist.IntervalCensoredDistribution(
            dist.Normal(m, 1.0), np.zeros(N, bool), np.zeros(N, bool)
        ),
        LIMITS,
        lambda m: np.log(np.diff(stats.norm.cdf(LIMITS - m), axis=1)[:, 0]),
    ),
    "hurdle": (
        lambda m: dist.HurdleLogNormal(0.4, m, 1.0),
        POSITIVE_OR_ZERO,
        lambda m: np.where(
            MASK, np.log(0.6) + stats.lognorm.logpdf(POSITIVE, 1.0, scale=np.exp(m)), np.log(0.4)
        ),
    ),
    "multinomial": (
        lambda m: dist.Multinomial(3, jax.nn.softmax(jnp.stack([m, 0.0, 0.0]))),
        np.array([[3, 0, 0], [1, 1, 1], [0, 2, 1], [0, 0, 3], [2, 0, 1], [1, 2, 0]]),
        lambda m: stats.multinomial.logpmf(
            FAMILIES["multinomial"][1], 3, scipy.special.softmax([m, 0.0, 0.0])
        ),
    ),
    "to_event": (
        lambda m: dist.Normal(m * jnp.ones(N), 1.0).to_event(1),
        Y,
        lambda m: stats.norm.logpdf(Y - m),
    ),
}
if not hasattr(dist, "HurdleLogNormal"):  # NumPyro 0.20.0
    del FAMILIES["hurdle"]


@pytest.fixture(scope="module")
def families():
    """One model with a site of each family."""

    def model():
        m = numpyro.sample("m", dist.Normal())
        for name, (make, y, _) in FAMILIES.items():
            if name == "to_event":
                numpyro.sample(name, make(m), obs=y)
            else:
                with numpyro.plate(f"rows of {name}", N):
                    numpyro.sample(name, make(m), obs=y)

    with jax.enable_x64(True):
        return sites_of(model, m=0.3)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(families, name):
    _, y, exact = FAMILIES[name]
    found = find_rows(families, name, None, 0)
    np.testing.assert_allclose(found.log_likelihood(families), exact(0.3), atol=1e-9)
    np.testing.assert_allclose(found.log_likelihood(families, y), exact(0.3), atol=1e-9)
    np.testing.assert_array_equal(found.observed(families), y)
    # what is drawn from a censored distribution is not censored
    assert is_censored(families[name]["fn"]) == ("censored" in name)
    assert has_atoms(families[name]["fn"]) == ("censored" in name or name == "hurdle")


def test_censored_rows_have_no_predictive_draws():
    def model(times, censored):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
        with numpyro.plate("rows", len(times)):
            right = dist.RightCensoredDistribution(dist.Exponential(rate), censored)
            numpyro.sample("y", right, obs=times)

    found = fw.from_numpyro(model, TIMES, ~SEEN)
    assert found.simulate is None and found.row_log_density is None
    rows = jax.jit(found.log_likelihood)({"rate": 0.4})
    np.testing.assert_allclose(rows, exact_rows(np.exp(0.4)), atol=1e-12)


# ---------------------------------------------------------------- rows of several numbers


def test_matrix_outcomes_by_either_axis():
    y = RNG.normal(size=(3, 4))

    def model(y=None):
        m = numpyro.sample("m", dist.Normal().expand([4]).to_event(1))
        numpyro.sample("y", dist.Normal(m, 1.0).expand([3, 4]), obs=y)

    m = np.arange(4) / 4
    density, sites = stats.norm.logpdf(y - m), sites_of(model, y, m=m)
    for axis in (0, 1, -1):
        rows = find_rows(sites, None, None, axis)
        assert rows.n_obs == y.shape[axis]
        np.testing.assert_allclose(rows.log_likelihood(sites), density.sum(axis=1 - axis % 2))
        np.testing.assert_array_equal(rows.observed(sites), np.moveaxis(y, axis, 0))
    found = fw.from_numpyro(model, y=y, row_axis=1)
    at = {"m": m}
    rows, drawn = jax.jit(
        lambda key: (found.row_log_density(at, found.y + 1.0), found.simulate(key, at))
    )(jax.random.key(0))
    np.testing.assert_allclose(rows, stats.norm.logpdf(y + 1.0 - m).sum(axis=0))
    assert drawn.shape == found.y.shape == (4, 3)
    found.check_simulate(several=True)
    with pytest.raises(ValueError, match="use energy or dss"):
        found.check_simulate()


# ---------------------------------------------------------------- missing rows


def test_masked_rows_are_not_rows():
    hidden = np.where(MASK, Y, np.nan)

    def model(y=None):
        m = numpyro.sample("m", dist.Normal())
        with numpyro.plate("rows", N), handlers.mask(mask=MASK):
            numpyro.sample("y", dist.Normal(m + jnp.arange(N), 1.0), obs=y)

    found = fw.from_numpyro(model, y=hidden)
    assert found.n_obs == 4
    np.testing.assert_array_equal(found.y, Y[MASK])
    mean, q = 0.3 + np.arange(N)[MASK], {"m": 0.3}

    @jax.jit
    def everything(key):
        other = found.row_log_density(q, found.y + 1.0)
        gradient = jax.grad(lambda m: found.log_likelihood({"m": m}).sum())(0.3)
        return found.log_likelihood(q), other, gradient, found.simulate(key, q), found.log_prior(q)

    rows, other, gradient, drawn, prior = everything(jax.random.key(0))
    np.testing.assert_allclose(rows, stats.norm.logpdf(Y[MASK] - mean), atol=1e-12)
    np.testing.assert_allclose(other, stats.norm.logpdf(Y[MASK] + 1.0 - mean), atol=1e-12)
    assert float(gradient) == pytest.approx((Y[MASK] - mean).sum())
    assert drawn.shape == (4,) and np.abs(drawn - mean).max() < 5
    assert float(prior) == pytest.approx(stats.norm.logpdf(0.3))


def test_numbers_of_rows_that_are_masked():
    y, seen = RNG.normal(size=(3, 2)), np.array([[True, True], [False, False], [True, False]])

    def model(seen, latent=False):
        normal = dist.Normal(0.0, jnp.ones((3, 2)))
        if latent:
            numpyro.sample("y", normal, obs=y, obs_mask=seen)
        else:
            numpyro.sample("y", normal.mask(seen), obs=y)

    sites = sites_of(model, seen)
    rows = find_rows(sites, None, None, 0)
    density = stats.norm.logpdf(y)
    exact = [density[0].sum(), density[2, 0]]
    np.testing.assert_allclose(rows.log_likelihood(sites), exact, atol=1e-12)
    assert rows.n_obs == 2 and rows.observed(sites) is None
    with pytest.raises(ValueError, match="but all are masked out"):
        find_rows(sites_of(model, np.zeros((3, 2), bool)), None, None, 0)
    with pytest.raises(ValueError, match="but they are with obs_mask"):
        find_rows(sites_of(model, seen, True), None, None, 0)
