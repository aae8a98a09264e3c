import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import by_chains

import foldwise as fw
from foldwise.models.evaluate import rows_at

pytestmark = pytest.mark.fast
Y = np.array([0.5, -1.0, 2.0, 0.1])


def normal_rows(mu):
    return -0.5 * (Y - mu) ** 2


def make(**changes):
    arguments = {
        "log_prior": lambda mu: -0.5 * mu**2,
        "log_likelihood": normal_rows,
        "init": 0.0,
        "n_obs": 4,
    }
    return fw.Model(**{**arguments, **changes})


def test_flatten_and_unflatten_are_inverse():
    position = {"a": np.arange(6.0).reshape(2, 3), "b": 7.0, "c": (np.ones(2),)}
    model = make(init=position)
    flat = np.arange(9.0)
    again = model.flatten(model.unflatten(flat))
    assert model.dimension == 9
    np.testing.assert_array_equal(again, flat)
    assert model.unflatten(flat)["a"].shape == (2, 3)


def test_log_likelihood_from_row_log_density():
    model = make(
        log_likelihood=None, row_log_density=lambda mu, y: -0.5 * (jnp.asarray(y) - mu) ** 2, y=Y
    )
    np.testing.assert_allclose(model.flat_log_likelihood(jnp.zeros(1)), normal_rows(0.0), rtol=1e-6)


def test_neither_likelihood_nor_row_density():
    with pytest.raises(TypeError, match="needs log_likelihood"):
        make(log_likelihood=None)


def test_scalar_likelihood_is_refused():
    with pytest.raises(
        ValueError, match=r"must have shape \(4,\), but has shape \(\).*not their sum"
    ):
        make(log_likelihood=lambda mu: normal_rows(mu).sum()).check()


def test_likelihood_of_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"must have shape \(5,\), but has shape \(4,\).*n_obs"):
        make(n_obs=5).check()


def test_likelihood_with_event_axis_is_refused():
    with pytest.raises(ValueError, match="sum over the event axes"):
        make(log_likelihood=lambda mu: jnp.ones((4, 2)) * mu).check()


@pytest.mark.parametrize(
    ("kind", "said"), [(bool, "bool"), (int, "int64"), (complex, "complex128")]
)
def test_likelihood_must_be_real_numbers(kind, said):
    with pytest.raises(TypeError, match=f"must give real numbers, .* but they are {said}"):
        make(log_likelihood=lambda mu: normal_rows(mu).astype(kind)).check()


def test_prior_must_be_scalar():
    with pytest.raises(ValueError, match=r"log_prior\(position\) must be a scalar.*\(1,\)"):
        make(log_prior=lambda mu: jnp.atleast_1d(mu)).check()


def test_prior_not_finite_at_start():
    with pytest.raises(ValueError, match="log_prior must be finite at the starting position"):
        make(log_prior=lambda mu: jnp.log(mu)).check()


def test_nan_in_the_data():
    y = np.array([0.5, np.nan, 2.0, 0.1])
    with pytest.raises(ValueError, match="1 of 4 rows are not.*first row 1.*missing values"):
        make(log_likelihood=lambda mu: -0.5 * (y - mu) ** 2).check()
    for values in (y, y.astype(object), np.array([0.5, None, 2.0, 0.1]), y.astype(complex)):
        with pytest.raises(ValueError, match="y must not hold NaN, but row 1 does"):
            make(y=values)


def test_gradient_not_finite_at_start():
    with pytest.raises(ValueError, match="gradient of the log density must be finite"):
        make(log_likelihood=lambda mu: -0.5 * (Y - jnp.sqrt(jnp.abs(mu))) ** 2).check()


def test_observed_of_wrong_length():
    with pytest.raises(ValueError, match=r"must have length n_obs=4, but y has shape \(3,\)"):
        make(y=Y[:3])


@pytest.mark.parametrize("n_obs", [0, 1, 2.5, "4"])
def test_number_of_rows(n_obs):
    with pytest.raises(ValueError, match="n_obs must be a whole number"):
        make(n_obs=n_obs)


def test_init_must_hold_numbers():
    with pytest.raises(TypeError, match="init must hold numbers only"):
        _ = make(init={"a": "x"}).dimension
    with pytest.raises(ValueError, match="at least one number"):
        _ = make(init={}).dimension


def test_functions_must_be_functions():
    with pytest.raises(TypeError, match="log_prior must be a function"):
        make(log_prior=1.0)
    with pytest.raises(TypeError, match="log_likelihood must be a function"):
        make(log_likelihood=Y)


def test_models_that_were_used_in_single_precision():
    """JAX remembers that it has seen an array in single precision."""
    x, y = (np.random.default_rng(k).normal(size=30) for k in range(2))
    group = np.arange(30) % 3

    def log_likelihood(q):
        return -0.5 * (y - x * q[group]) ** 2

    first = jax.jit(log_likelihood)
    with jax.enable_x64(False):
        assert first(jnp.ones(3)).dtype == jnp.float32
    model = fw.Model(lambda q: -0.5 * jnp.sum(q**2), log_likelihood, np.zeros(3), 30)
    result = by_chains(model, fw.leave_one_out(30)[:4], seed=1, progress=False)
    rows = next(rows_at(model, result.run.fit.flat[:1]))[1][0]
    exact = -0.5 * (y - x * result.run.fit.flat[0][group]) ** 2
    np.testing.assert_allclose(rows, exact, rtol=1e-12)
    with jax.enable_x64(False):
        np.testing.assert_allclose(first(jnp.ones(3)), -0.5 * (y - x) ** 2, rtol=1e-4, atol=1e-6)
