"""Factorisations written in JAX against LAPACK's, with their derivatives."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax.linalg import triangular_solve

from foldwise.support import factorise
from foldwise.support.runtime import precision_context

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def double():
    with precision_context("float64"):
        yield


def in_jax(function, *arguments):
    """What ``function`` gives without LAPACK."""
    lowered = jax.jit(function).trace(*arguments).lower(_private_parameters=factorise.lowering())
    assert "lapack_" not in lowered.as_text()
    return lowered.compile()(*arguments)


def kernel(places, length):
    return jnp.exp(-0.5 * ((places[:, None] - places) / length) ** 2)


@pytest.mark.parametrize("n", [1, 66])
def test_factors_and_solutions_are_those_of_lapack(rng, n):
    half = rng.normal(size=(2, 3, n, n))
    matrix = half @ np.swapaxes(half, -1, -2) + np.eye(n)
    root = np.linalg.cholesky(matrix)
    np.testing.assert_allclose(in_jax(jnp.linalg.cholesky, matrix), root, rtol=1e-11, atol=1e-11)
    b = rng.normal(size=(2, 3, n, 2))
    hows = list(itertools.product((True, False), repeat=4))
    for left, lower, transposed, unit in hows if n == 1 else hows[1:16:5]:
        a, right = (root, np.swapaxes(root, -1, -2))[not lower], (np.swapaxes(b, -1, -2), b)[left]

        def solve(a, b, how=(left, lower, transposed, unit)):
            left, lower, transposed, unit = how
            return triangular_solve(
                a,
                b,
                left_side=left,
                lower=lower,
                transpose_a=transposed,
                unit_diagonal=unit,
            )

        expected = jax.jit(solve)(a, right)
        np.testing.assert_allclose(
            in_jax(solve, a, right), expected, rtol=1e-9, atol=1e-11 * np.abs(expected).max()
        )


def test_derivatives_are_those_of_lapack():
    """Gradient and Hessian of a log density, of close places: a badly conditioned matrix."""
    places = np.linspace(0.0, 5.0, 66)
    y = np.sin(places)

    def density(q):
        covariance = jnp.exp(q[0]) * kernel(places, jnp.exp(q[1])) + 1e-6 * jnp.eye(66)
        root = jnp.linalg.cholesky(covariance)
        white = jax.scipy.linalg.solve_triangular(root, y, lower=True)
        return -0.5 * jnp.sum(white**2) - jnp.log(jnp.diagonal(root)).sum() + (root @ q[2:]).sum()

    q = jnp.concatenate([jnp.array([0.1, 0.3]), jnp.linspace(-1.0, 1.0, 66)])
    scales = jax.hessian(lambda h: density(jnp.concatenate([h, q[2:]])))
    for function in (density, jax.grad(density), lambda q: scales(q[:2])):
        expected = np.asarray(jax.jit(function)(q))
        size = np.abs(expected).max()
        np.testing.assert_allclose(in_jax(function, q), expected, rtol=1e-6, atol=1e-6 * size)


def test_what_is_not_positive_definite_is_not_a_number(rng):
    good = np.eye(3)
    bad = np.diag([1.0, -1.0, 1.0])
    singular = np.ones((3, 3))
    found = in_jax(jnp.linalg.cholesky, np.stack([good, bad, singular]))
    np.testing.assert_array_equal(found[0], good)
    assert np.isnan(found[1]).any() and np.isnan(found[2]).any()
    assert np.isnan(np.tril(jnp.linalg.cholesky(bad))).sum() == np.isnan(found[1]).sum()


def test_large_and_complex_matrices_stay_with_lapack():
    big = jax.ShapeDtypeStruct((factorise.LARGEST + 1,) * 2, "float64")
    for shape in (big, jax.ShapeDtypeStruct((3, 3), "complex128")):
        traced = jax.jit(jnp.linalg.cholesky).trace(shape)
        assert "lapack_" in traced.lower(_private_parameters=factorise.lowering()).as_text()
