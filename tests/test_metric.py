"""Momenta and velocities belong together, and covariances are what they say."""

import numpy as np
import pytest

from foldwise.metric import (
    fold_metric,
    momentum,
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


def test_fold_metric_is_the_mean_of_draws_and_curvature(rng):
    S = random_covariance(rng, 4)
    curvature = np.stack([random_covariance(rng, 4) for _ in range(3)])
    metric = fold_metric(S, curvature)
    for fold in range(3):
        expected = 0.5 * (S + np.linalg.inv(curvature[fold]))
        inverse = inverse_mass_matrix(metric, fold, 3, 4)
        np.testing.assert_allclose(inverse, expected, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(mass_matrix(metric, fold, 3, 4) @ inverse, np.eye(4), atol=1e-8)


def test_a_fold_like_the_full_data_has_its_covariance(rng):
    S = random_covariance(rng, 4)
    metric = fold_metric(S, np.linalg.inv(S)[None])
    np.testing.assert_allclose(metric.covariance[0], S, rtol=1e-8)


def test_indefinite_curvature_enters_by_absolute_value(rng):
    vectors = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    curvature = vectors @ np.diag([2.0, -0.5, 1.0]) @ vectors.T
    metric = fold_metric(np.eye(3), curvature[None])
    expected = vectors @ np.diag([0.5, 2.0, 1.0]) @ vectors.T
    np.testing.assert_allclose(metric.covariance[0], 0.5 * (np.eye(3) + expected), atol=1e-8)


def test_a_direction_without_curvature_stays_bounded():
    metric = fold_metric(np.eye(2), np.diag([1.0, 1e-30])[None])
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
