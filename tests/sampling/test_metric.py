"""Momenta and velocities belong together, and covariances are what they say."""

import numpy as np
import pytest

from foldwise.sampling.metric import (
    correlated,
    far_metric,
    gradient_metric,
    momentum,
    near_metric,
    noise_size,
    rung_curvature,
    shared_metric,
    shrunk_covariance,
    velocity,
)
from foldwise.support.runtime import precision_context


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
    metric = shared_metric(S if dense else np.diag(S), LOCAL, curvature, least_stretch=1.0)
    inverse = inverse_mass_matrix(metric, fold, 3, 5)
    np.testing.assert_allclose(mass_matrix(metric, fold, 3, 5) @ inverse, np.eye(5), atol=1e-9)
    expected = S.copy() if dense else np.diag(np.diag(S))
    own = LOCAL[fold]
    expected[own], expected[:, own] = 0.0, 0.0
    expected[own, own] = 1.0 / curvature[own]
    np.testing.assert_allclose(inverse, expected, atol=1e-9)


def test_shared_metric_keeps_what_stretches(rng):
    """Correlations of one direction, and noise around it: the direction remains, and all scales."""
    d = 40
    direction = rng.choice([-1.0, 1.0], d) / np.sqrt(d)
    noise = rng.normal(size=(d, d)) * 0.01
    S = np.eye(d) + 9.0 * np.outer(direction, direction) + noise + noise.T
    metric = shared_metric(S, np.zeros((1, d), bool), np.ones(d))
    assert metric.directions.shape == (d, 1) and 5.0 < metric.stretch[0] < 15.0
    inverse = inverse_mass_matrix(metric, 0, 1, d)
    np.testing.assert_allclose(mass_matrix(metric, 0, 1, d) @ inverse, np.eye(d), atol=1e-9)
    relative = np.linalg.eigvals(np.linalg.solve(S, inverse)).real
    assert relative.min() > 0.6 and relative.max() < 1.6
    np.testing.assert_allclose(np.diag(inverse), np.diag(S), rtol=0.35)


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


def test_near_metric_sets_local_coordinates_apart(rng):
    S = random_covariance(rng, 5)
    curvature = np.broadcast_to(np.array([0.5, 2.0, 1.0, 3.0, 1.0]), (3, 5))
    metric = near_metric(S, LOCAL, curvature)
    shared = shared_metric(S, LOCAL, curvature[0], least_stretch=1.0)
    for fold in range(3):
        np.testing.assert_allclose(
            metric.covariance[fold], inverse_mass_matrix(shared, fold, 3, 5), atol=1e-9
        )
    check_momenta(metric, 3, 5)


def test_indefinite_curvature_enters_by_absolute_value(rng):
    vectors = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    curvature = vectors @ np.diag([2.0, -0.5, 1.0]) @ vectors.T
    metric = far_metric(np.eye(3), curvature[None])
    expected = vectors @ np.diag([0.5, 2.0, 1.0]) @ vectors.T
    np.testing.assert_allclose(metric.covariance[0], 0.5 * (np.eye(3) + expected), atol=1e-8)


def test_a_direction_without_curvature_stays_bounded():
    metric = far_metric(np.eye(2), np.diag([1.0, 1e-30])[None])
    assert metric.covariance[0, 1, 1] == pytest.approx(0.5e6, rel=1e-3)


@pytest.mark.parametrize("dense", [True, False])
def test_rungs_go_from_prior_to_full_data(rng, dense):
    S = random_covariance(rng, 5)
    S = S if dense else np.diag(S)
    prior = np.broadcast_to(np.array([0.5, 2.0, 1.0, 3.0, 1.0]), (3, 5))
    found = rung_curvature(S, prior, np.array([0.0, 0.5, 1.0]))
    precision = np.diag(np.linalg.inv(S)) if dense else 1.0 / S
    np.testing.assert_allclose(found, [prior[0], 0.5 * (prior[0] + precision), precision])


def test_shrunk_covariance_with_few_draws_is_positive_definite(rng):
    draws = rng.normal(size=(20, 50)) * np.arange(1, 51)
    found = shrunk_covariance(draws, 20)
    assert np.linalg.eigvalsh(found).min() > 0
    np.testing.assert_allclose(np.diag(found), draws.var(axis=0, ddof=1))


def test_shrunk_covariance_with_many_draws_is_the_covariance(rng):
    S = random_covariance(rng, 4)
    draws = rng.multivariate_normal(np.zeros(4), S, size=20_000)
    np.testing.assert_allclose(shrunk_covariance(draws, 20_000), np.cov(draws.T), atol=0.01)


def test_gradient_metric_of_a_normal_density_needs_few_draws_from_anywhere(rng):
    """Its inverse precision, from draws that are hardly more than parameters, and not of it."""
    scale = np.exp(rng.normal(size=30))
    S = random_covariance(rng, 30) * np.outer(scale, scale)
    draws = 3.0 + rng.normal(size=(45, 30)) * scale
    found = gradient_metric(draws, -np.linalg.solve(S, draws.T).T)
    ratio = np.linalg.eigvals(np.linalg.solve(S, found)).real
    assert 0.98 < ratio.min() and ratio.max() < 1.02
    np.testing.assert_allclose(correlated(found), correlated(S), rtol=0.02)


def test_gradient_metric_with_fewer_draws_than_parameters_stays_within_bounds(rng):
    """Directions that no draw is of keep the scale of their coordinates."""
    scale = 10.0 ** np.arange(-2, 2).repeat(10)
    draws = rng.normal(size=(20, 40)) * scale
    found = gradient_metric(draws, -draws / scale**2)
    np.testing.assert_allclose(np.sqrt(np.diag(found)), scale, rtol=0.01)
    assert correlated(found) < 1.01


def test_gradient_metric_where_a_parameter_never_moves(rng):
    draws = rng.normal(size=(50, 3)) * [1.0, 0.0, 2.0]
    found = gradient_metric(draws, -draws / [1.0, 1.0, 4.0])
    assert np.isfinite(found).all() and np.linalg.eigvalsh(found).min() > 0


def test_correlated_counts_no_scales():
    assert correlated(np.diag([1e-6, 1.0, 1e6])) == pytest.approx(1.0)
    assert correlated(np.array([[1.0, 0.6], [0.6, 1.0]])) == pytest.approx(2.0)
