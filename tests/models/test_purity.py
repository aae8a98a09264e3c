"""Models that are not the same whenever they are evaluated: random numbers, state, changed data."""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from jax.scipy.special import gammaln
from problems import by_chains

import foldwise as fw
from foldwise.models.evaluate import rows_at

N = 12
Y = np.random.default_rng(0).normal(size=N)
QUICK = {"seed": 1, "progress": False}
REFUSED = "must give the same numbers whenever they are evaluated"


def make(rows, prior=lambda mu: -0.5 * mu**2, **more):
    return fw.Model(prior, rows, 0.0, N, **more)


def normal_rows(mu):
    return -0.5 * (Y - mu) ** 2


def random_rows(mu):
    return normal_rows(mu) + 0.1 * np.random.default_rng().normal(size=N)


def counting():
    count = itertools.count()
    return lambda mu: normal_rows(mu) * (1 + 1e-3 * next(count))


def timed(mu):
    key = jax.random.key(time.perf_counter_ns() % 2**31)
    return normal_rows(mu) + 0.1 * jax.random.normal(key, (N,))


def called_back(argument):
    """Noise that every run of a program draws anew, for all points together or for each."""
    generator, shape = np.random.default_rng(), jax.ShapeDtypeStruct((N,), np.float32)

    def noise(*_):
        return generator.normal(size=N).astype(np.float32)

    def rows(mu):
        arguments = (jax.lax.stop_gradient(mu).astype(np.float32),) if argument else ()
        found = jax.pure_callback(noise, shape, *arguments, vmap_method="sequential")
        return normal_rows(mu) + 0.1 * found

    return rows


IMPURE = {
    "numpy.random": lambda: make(random_rows),
    "numpy.random under jit": lambda: make(jax.jit(random_rows)),
    "a generator in the prior": lambda: make(
        normal_rows, lambda mu: -0.5 * (mu - np.random.default_rng().normal()) ** 2
    ),
    "a counter": lambda: make(counting()),
    "a key made of the time": lambda: make(timed),
    "a callback": lambda: make(called_back(False)),
    "a callback for each point": lambda: make(called_back(True)),
    "numpy.random in row_log_density": lambda: make(
        None, row_log_density=jax.jit(lambda mu, y: random_rows(mu) + 0.0 * y), y=Y
    ),
}


@pytest.mark.parametrize("kind", IMPURE)
def test_random_numbers_and_state_are_refused(kind):
    with pytest.raises(ValueError, match=REFUSED):
        IMPURE[kind]().check()


def test_cross_validate_and_fit_refuse_them():
    model = make(random_rows)
    with pytest.raises(ValueError, match=REFUSED):
        fw.fit(model, **QUICK)
    with pytest.raises(ValueError, match=r"numpy.random, a key made of the time.* take it out"):
        by_chains(make(random_rows), fw.leave_one_out(N), **QUICK)


@pytest.mark.parametrize("calls", [1, 2, 3, 4, 5])
def test_state_that_changes_once_is_refused(calls):
    """Whichever of the programs is the first to be traced with the new state."""
    count = itertools.count()

    def rows(mu):
        return normal_rows(mu) - (next(count) >= calls)

    with pytest.raises(ValueError, match=REFUSED):
        by_chains(make(rows), fw.leave_one_out(N), **QUICK)
    assert next(count) > calls


def test_traces_that_differ_in_names_alone_are_accepted():
    count = itertools.count()

    def rows(mu):
        def step(mu):
            return normal_rows(mu)

        step.__name__ = f"step{next(count)}"
        return jax.jit(step)(mu)

    model = make(rows)
    model.check()
    model.check()
    assert next(count) > 6


# ---------------------------------------------------------------- data that change


@pytest.fixture(scope="module")
def used():
    """A model that has been cross-validated, its covariate, and the result."""
    x = np.random.default_rng(1).normal(size=N)
    model = fw.Model(lambda b: -0.5 * b**2, lambda b: -0.5 * (Y - b * x) ** 2, 0.0, N)
    return model, x, by_chains(model, fw.leave_one_out(N), **QUICK)


def test_data_changed_in_place(used):
    model, x, result = used
    x[3] += 0.01  # at the starting point, b = 0, this changes nothing
    try:
        for use in (
            lambda: by_chains(model, fw.leave_one_out(N), **QUICK),
            lambda: fw.fit(model, **QUICK),
            lambda: result.extend(20),
        ):
            with pytest.raises(ValueError, match=r"if data have changed .* make a new Model"):
                use()
    finally:
        x[3] -= 0.01


def test_data_that_are_as_they_were(used):
    model, x, result = used
    x[3] += 1.0
    x[3] = np.random.default_rng(1).normal(size=N)[3]
    again = by_chains(model, fw.leave_one_out(N), result.run.fit, **QUICK)
    assert again.elpd == pytest.approx(result.elpd, abs=1e-9)


def test_data_changed_after_draws_were_taken():
    """The programs that evaluated the draws are of the old data, and nothing else is."""
    x = np.random.default_rng(1).normal(size=N)
    model = fw.Model(
        lambda q: -0.5 * q["b"] ** 2, lambda q: -0.5 * (Y - q["b"] * x) ** 2, {"b": 0.0}, N
    )
    draws = np.random.default_rng(2).normal(0.1, 0.3, size=(2, 500))
    fw.Fit.from_arviz(model, xr.Dataset({"b": (("chain", "draw"), draws)}))
    x[2] = 5.0
    with pytest.raises(ValueError, match=REFUSED):
        model.check()


def density(mu, y):
    return -0.5 * (y - mu) ** 2


def test_observed_values_are_the_models_own():
    y = Y.copy()
    model = make(None, row_log_density=density, y=y)
    y[0] += 1.0
    np.testing.assert_array_equal(model.y, Y)
    with pytest.raises(ValueError, match="y must stay what it was .* make a new Model"):
        model.check()
    with pytest.raises(ValueError, match="read-only"):
        model.y[0] = 0.0


def test_observed_values_of_a_family():
    y = Y.copy()
    family = fw.model_family(
        lambda mu, s: -0.5 * mu**2,
        None,
        0.0,
        N,
        [[0.0], [1.0]],
        row_log_density=lambda mu, y, s: density(s[0] * mu, y),
        y=y,
    )
    assert family[0].y is family[1].y
    y[0] += 1.0
    for member in family:
        with pytest.raises(ValueError, match="y must stay what it was"):
            member.check_shapes()


def test_a_family_with_random_numbers():
    family = fw.model_family(
        lambda mu, s: -0.5 * mu**2,
        jax.jit(lambda mu, s: random_rows(s[0] * mu)),
        0.0,
        N,
        [[0.0], [1.0]],
    )
    with pytest.raises(ValueError, match=REFUSED):
        by_chains(family, fw.leave_one_out(N), **QUICK)


# ---------------------------------------------------------------- values and what simulates them


def test_masked_values_are_refused():
    with pytest.raises(ValueError, match="y must not be masked, but row 4 is"):
        make(normal_rows, y=np.ma.masked_array(Y, np.arange(N) == 4))
    make(normal_rows, y=np.ma.masked_array(Y, False))


def test_narrow_counts_do_not_overflow():
    model = make(None, row_log_density=lambda a, y: a - gammaln(y + 1), y=np.full(N, 255, np.uint8))
    rows = next(rows_at(model, np.zeros((1, 1))))[1][0]
    np.testing.assert_allclose(rows, -1161.7121, rtol=1e-6)  # log of 255!


@pytest.mark.parametrize(
    ("simulate", "message"),
    [
        (lambda key, mu: mu + np.random.default_rng().normal(size=N), "does not use the key"),
        (
            lambda key, mu: mu + random_rows(mu) + jax.random.normal(key, (N,)),
            "traced again it is another",
        ),
        (lambda key, mu: jnp.full(N, mu), "does not use the key"),
    ],
)
def test_simulate_draws_with_its_key_alone(simulate, message):
    model = make(None, row_log_density=density, y=Y, simulate=simulate)
    with pytest.raises(ValueError, match=f"must draw with its key .*{message}"):
        by_chains(model, fw.leave_one_out(N), scores="crps", **QUICK)
