"""The bridge finds the ratio of normalising constants, with the error it says."""

import numpy as np
import pytest
from scipy.special import expit

from foldwise.scores import bridge


def samples(rng, folds, n0, n1, shift=1.5):
    """Fold draws ~ N(0, 1), partner draws ~ N(shift, 1); l = r exp(shift x - shift^2 / 2)."""
    log_r = np.linspace(-200.0, 3.0, folds)
    x0, x1 = rng.normal(size=(folds, n0)), rng.normal(shift, 1.0, size=(folds, n1))
    log_l = [log_r[:, None] + shift * x - 0.5 * shift**2 for x in (x0, x1)]
    return log_r, *log_l


def estimate(own, partner, eta):
    a = np.log(expit(own - eta[:, None]).mean(axis=1))
    b = np.log(expit(eta[:, None] - partner).mean(axis=1))
    return eta + a - b, a, b


@pytest.mark.parametrize("odds", [-2.0, 0.0, 3.0])
def test_solves_its_equation(rng, odds):
    _, own, partner = samples(rng, 20, 200, 300)
    eta = bridge.solve(own, partner, odds)
    _, a, b = estimate(own, partner, eta)
    np.testing.assert_allclose(a + odds, b, atol=1e-8)


def test_ratio_and_error(rng):
    log_r, own, partner = samples(rng, 400, 300, 500)
    eta = bridge.solve(own, partner, float(np.log(300 / 500)))
    found, _, _ = estimate(own, partner, eta)
    f0, f1 = expit(own - eta[:, None]), expit(eta[:, None] - partner)
    variance = (
        f0.var(axis=1) / f0.mean(axis=1) ** 2 / 300 + f1.var(axis=1) / f1.mean(axis=1) ** 2 / 500
    )
    z = (found - log_r) / np.sqrt(variance)
    assert 0.85 < np.sqrt(np.mean(z**2)) < 1.15
    assert abs(np.mean(z)) < 4 / np.sqrt(400)


def test_far_apart_samples_do_not_overflow(rng):
    own, partner = rng.normal(-900.0, 5.0, (2, 50)), rng.normal(-3.0, 1.0, (2, 60))
    eta = bridge.solve(own, partner, 0.0)
    found, a, b = estimate(own, partner, eta)
    assert np.isfinite(found).all()
    assert ((eta > -900) & (eta < 0)).all()


def test_overlap_counts_draws_that_matter():
    even = np.zeros((1, 40))
    one = np.full((1, 40), -1000.0)
    one[0, 7] = 0.0
    assert bridge.overlap(even)[0] == pytest.approx(40)
    assert bridge.overlap(one)[0] == pytest.approx(1)
