"""Momenta and velocities belong together, and covariances are what they say."""

import numpy as np
import pytest

from foldwise.metric import (
    far_metric,
    momentum,
    near_metric,
    noise_size,
    shared_metric,
    shrunk_covariance,
    tempered_metric,
    velocity,
)
from foldwise.runtime import precision_context


def random_covariance(rng, d):
    a = rng.normal(size=(d, 2 * d))
    return a @ a.T / d


def mass_matrix(metric, fold, folds, d):
    """Covariance of the momenta: momentum is linear in its noise, so A A' of its matrix A."""
    size = noise_size(metric)
    noise = np.broadcast_to(np.eye(size), (folds, size, size))
    with precision_context("float64"):
        columns = np.asarray(momentum(metric, noise))[fold]
    assert columns.shape == (size, d)
    return columns.T @ columns


def inverse_mass_matrix(metric, fold, folds, d):
    with precision_context("float64"):
        return np.asarray(velocity(metric, np.broadcast_to(np.eye(d), (folds, d, d))))[fold].T


LOCAL = np.array([[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 1, 0]], bool)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("fold", [0, 1, 2])
def test_shared_metric_momenta_fit_velocities(rng, dense, fold):
    S = random_covariance(rng, 5)
    curvature = np.array([0.5, 2.0, 1.0, 3.0, 1.0])
    metric = shared_metric(S if dense else np.diag(S), LOCAL, curvature)
    inverse = inverse_mass_matrix(metric, fold, 3, 5)
    np.testing.assert_allclose(mass_matrix(metric, fold, 3, 5) @ inverse, np.eye(5), atol=1e-9)
    expected = S.copy() if dense else np.diag(np.diag(S))
    own = LOCAL[fold]
    expected[own], expected[:, own] = 0.0, 0.0
    expected[own, own] = 1.0 / curvature[own]
    np.testing.assert_allclose(inverse, expected, atol=1e-9)


def test_local_coordinates_without_prior_curvature_are_shared(rng):
    S = random_covariance(rng, 5)
    metric = shared_metric(S, LOCAL, np.array([0.0, -1.0, 1.0, 0.0, 1.0]))
    for fold in range(3):
        np.testing.assert_allclose(inverse_mass_matrix(metric, fold, 3, 5), S, atol=1e-9)


def check_momenta(metric, folds, d):
    for fold in range(folds):
        mass, inverse = (f(metric, fold, folds, d) for f in (mass_matrix, inverse_mass_matrix))
        np.testing.assert_allclose(mass @ inverse, np.eye(d), atol=1e-7)


def test_far_metric_is_the_mean_of_draws_and_curvature(rng):
    S = random_covariance(rng, 4)
    curvature = np.stack([random_covariance(rng, 4) for _ in range(3)])
    metric = far_metric(S, curvature)
    for fold in range(3):
        expected = 0.5 * (S + np.linalg.inv(curvature[fold]))
        np.testing.assert_allclose(metric.covariance[fold], expected, rtol=1e-6, atol=1e-9)
    check_momenta(metric, 3, 4)


def test_near_metric_of_a_normal_posterior_is_the_inverse_curvature(rng):
    """S = H0^-1: then the fold's covariance is H^-1, whatever S is."""
    full = random_covariance(rng, 4)
    left_out = np.stack([np.outer(x, x) for x in 0.2 * rng.normal(size=(3, 4))])
    metric = near_metric(np.linalg.inv(full), full, full - left_out)
    np.testing.assert_allclose(metric.covariance, np.linalg.inv(full - left_out), rtol=1e-6)
    check_momenta(metric, 3, 4)


def test_near_metric_of_the_full_data_is_its_covariance(rng):
    """Also where the curvature at one point is not the inverse of the covariance."""
    S, curvature = random_covariance(rng, 4), random_covariance(rng, 4)
    metric = near_metric(S, curvature, curvature[None])
    np.testing.assert_allclose(metric.covariance[0], S, rtol=1e-6, atol=1e-9)


def test_near_metric_frees_what_is_left_out():
    """The second coordinate is known by the test rows only: it falls back to its prior, 1."""
    S, full = np.diag([0.1, 0.01]), np.diag([10.0, 100.0])
    metric = near_metric(S, full, np.diag([10.0, 1.0])[None])
    np.testing.assert_allclose(metric.covariance[0], np.diag([0.1, 1.0]), atol=1e-9)


def test_indefinite_curvature_enters_by_absolute_value(rng):
    vectors = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    curvature = vectors @ np.diag([2.0, -0.5, 1.0]) @ vectors.T
    metric = far_metric(np.eye(3), curvature[None])
    expected = vectors @ np.diag([0.5, 2.0, 1.0]) @ vectors.T
    np.testing.assert_allclose(metric.covariance[0], 0.5 * (np.eye(3) + expected), atol=1e-8)


def test_a_direction_without_curvature_stays_bounded():
    metric = far_metric(np.eye(2), np.diag([1.0, 1e-30])[None])
    assert metric.covariance[0, 1, 1] == pytest.approx(0.5e6, rel=1e-3)


def test_rung_metric_goes_from_prior_to_full_data(rng):
    S = random_covariance(rng, 5)
    curvature = np.array([0.5, 2.0, 1.0, 3.0, 1.0])
    metric = shared_metric(S, LOCAL, curvature)
    precision = np.diag(np.linalg.inv(S))
    low = tempered_metric(metric, np.array([1]), np.array([0.0]))
    high = tempered_metric(metric, np.array([1]), np.array([1.0]))
    assert low.folds.curvature[0, 1] == pytest.approx(2.0)
    assert high.folds.curvature[0, 1] == pytest.approx(precision[1])


def test_shrunk_covariance_with_few_draws_is_positive_definite(rng):
    draws = rng.normal(size=(20, 50)) * np.arange(1, 51)
    found = shrunk_covariance(draws, 20)
    assert np.linalg.eigvalsh(found).min() > 0
    np.testing.assert_allclose(np.diag(found), draws.var(axis=0, ddof=1))


def test_shrunk_covariance_with_many_draws_is_the_covariance(rng):
    S = random_covariance(rng, 4)
    draws = rng.multivariate_normal(np.zeros(4), S, size=20_000)
    np.testing.assert_allclose(shrunk_covariance(draws, 20_000), np.cov(draws.T), atol=0.01)
