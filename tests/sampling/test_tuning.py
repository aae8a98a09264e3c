"""What folds take from the full-data fit: starts, watched coordinates, partner draws, curvature."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import problems
import pytest

import foldwise as fw
from foldwise.models.structure import Structure, find_cells
from foldwise.sampling import tuning
from foldwise.sampling.tuning import (
    FullData,
    FullDraws,
    at_others,
    curvatures,
    has_normal_priors,
    local_coordinates,
    partner_draws,
    pilot_positions,
    start_positions,
    watched_coordinates,
)

FOLDS = fw.leave_one_out(6)


def starts(held_out, folds=FOLDS, seed=1, rung=0, chains=4):
    """Numbers of the draws from which chains start."""
    positions = np.arange(held_out.shape[1], dtype=float)[:, None]
    return start_positions(positions, held_out, folds, chains, seed, rung)[..., 0].astype(int)


def test_starts_are_distinct_and_belong_to_the_fold(rng):
    held_out = rng.normal(size=(6, 50))
    found = starts(held_out)
    assert all(len(set(own)) == 4 for own in found)
    np.testing.assert_array_equal(starts(held_out[[3, 5]], FOLDS[[3, 5]]), found[[3, 5]])
    assert not np.array_equal(starts(held_out, seed=2), found)
    assert not np.array_equal(starts(held_out, rung=1), found)


def test_starts_are_where_the_rows_left_out_are_improbable():
    """All but 40 of 200 draws have hardly any weight, or none because they are not finite."""
    held_out = np.full((6, 200), 30.0)
    held_out[:, 20:60] = -30.0
    held_out[:, 60:100] = np.nan
    for seed in range(20):
        found = starts(held_out, seed=seed)
        assert np.all((found >= 20) & (found < 60))


def test_weights_of_starts_are_capped():
    """Weights 1/2, 1/4, 1/8, ...: the first four are above 1 / (5 chains), and then equal."""
    held_out = np.log(2.0) * np.broadcast_to(np.arange(60), (6, 60))
    found = np.concatenate([starts(held_out, seed=seed) for seed in range(60)])
    share = [np.mean((found == draw).any(axis=1)) for draw in (0, 3, 9)]
    assert abs(share[0] - share[1]) < 0.15 and share[1] > share[2] + 0.3


def test_starts_of_a_group_that_is_left_out_are_where_other_groups_are():
    """Groups of one coordinate at 0, 1, ..., 7: chains of fold 3 begin at other groups, spread."""
    groups, chains = 8, 4
    coordinates = np.full((groups, 3), -1)
    coordinates[:, 0] = np.arange(groups)
    row_cell = np.repeat(np.arange(groups), 2)
    structure = Structure(coordinates, row_cell, tuple(f"z[{k}]" for k in range(groups)))
    start = np.broadcast_to(np.arange(groups, dtype=float), (groups, chains, groups))
    folds = fw.leave_group_out(row_cell)
    found = at_others(start, structure, folds, seed=1)
    own = found[3, :, 3]
    assert 3.0 not in own and own.min() < 3.0 < own.max()
    others = np.delete(np.arange(groups), 3)
    np.testing.assert_array_equal(found[3][:, others], start[3][:, others])
    # a group of which a row stays is where that row has put it
    one = fw.leave_one_out(len(row_cell))
    twice = np.repeat(start, 2, axis=0)
    np.testing.assert_array_equal(at_others(twice, structure, one, seed=1), twice)


@pytest.mark.parametrize("peaks", [1, 2])
def test_priors_of_groups_that_are_not_normal_are_seen(peaks, rng):
    row_cell = np.repeat(np.arange(6), 3)

    def log_prior(p):
        parts = [-0.5 * (p["z"] - at * jnp.exp(p["mu"])) ** 2 for at in (-2.0, 2.0)[:peaks]]
        return -0.5 * p["mu"] ** 2 + jnp.sum(sum(map(jnp.exp, parts)) if peaks > 1 else parts[0])

    def log_likelihood(p):
        return -0.5 * (p["z"][row_cell] - p["mu"]) ** 2

    model = fw.Model(log_prior, log_likelihood, {"mu": 0.0, "z": np.zeros(6)}, len(row_cell))
    positions = rng.normal(size=(50, 7))
    structure = find_cells(model, positions)
    assert len(structure) == 6
    assert has_normal_priors(model, structure, positions) == (peaks == 1)


def full_of(positions, joint):
    return FullDraws(positions, joint, FullData(joint, np.zeros(0), 4, 10))


def test_slow_coordinates_and_those_of_the_score_are_watched(rng):
    positions = rng.normal(size=(1000, 30))
    joint = positions[:, [11, 22]].T + positions[:, 5] + 0.1 * rng.normal(size=(2, 1000))
    ess = np.full(30, 900.0)
    ess[[5, 17]] = 50.0
    fit = SimpleNamespace(positions=positions.reshape(4, 250, 30), ess=ess, sampled=None)
    found = watched_coordinates(fit, full_of(positions, joint), most=4)
    assert found.shape == (2, 4) and all(len(set(own)) == 4 for own in found)
    for own, of_score in zip(found, (11, 22), strict=True):
        assert {5, 17, of_score} <= set(own)
    whole = watched_coordinates(fit, full_of(positions, joint), most=30)
    np.testing.assert_array_equal(whole, [np.arange(30)] * 2)
    # of a fit whose chains are of one parameter, that one and those that go with the score
    fit = SimpleNamespace(positions=fit.positions, ess=ess[:1], sampled=np.array([17]))
    found = watched_coordinates(fit, full_of(positions, joint), most=4)
    assert found.shape == (2, 4) and (found[:, 0] == 17).all()
    assert all({5, score} <= set(own) for own, score in zip(found, (11, 22), strict=True))


def test_pilots_are_full_data_draws(rng):
    full = full_of(rng.normal(size=(1000, 2)), np.zeros((1, 1000)))
    found = pilot_positions(full, 8, 4, seed=3)
    assert found.shape == (8, 4, 2) and np.isin(found, full.positions).all()
    np.testing.assert_array_equal(found, pilot_positions(full, 8, 4, seed=3))
    assert not np.array_equal(found, pilot_positions(full, 8, 4, seed=4))


def fit_of(draws, ess, piece=1):
    positions = np.arange(4 * draws, dtype=float).reshape(4, draws, 1)
    return SimpleNamespace(end_to_end=(positions, piece), ess=np.array([ess]))


@pytest.mark.parametrize(
    "draws, ess, piece, length",
    [
        (400, 1600.0, 1, 20),  # the square root of 400
        (400, 100.0, 1, 64),  # four times the autocorrelation time, 16
        (400, 10.0, 1, 100),  # four batches in a chain at least
        (400, 1600.0, 30, 30),  # whole short chains
        (400, 100.0, 30, 60),
    ],
)
def test_length_of_batches_of_partner_draws(draws, ess, piece, length):
    positions, found = partner_draws(fit_of(draws, ess, piece), 10)
    assert found == length and positions.shape == (4, draws, 1)


def test_many_partner_draws_are_thinned(monkeypatch):
    monkeypatch.setattr(tuning, "FULL_VALUES", 4000)
    positions, _ = partner_draws(fit_of(400, 1600.0), 10)
    np.testing.assert_array_equal(positions[0, :, 0], np.arange(0, 400, 4))


def test_curvature_of_folds_of_a_regression(rng):
    """X'X / noise^2 + 1 / prior^2 over the training rows, whatever the positions."""
    problem = problems.regression()
    folds = problem.folds[:35]  # more than one call takes
    found = curvatures(problem.model(), folds, rng.normal(size=(35, 2, 4)))
    for k, (train, _) in enumerate(folds):
        X = problem.X[train] / problem.noise
        np.testing.assert_allclose(found[k], X.T @ X + np.diag(problem.prior**-2.0), rtol=1e-9)


def test_curvature_of_the_prior_in_every_coordinate(rng):
    """More coordinates than are worked on at once; a flat and a linear log prior have none."""
    d = 75
    scale = np.geomspace(0.1, 100.0, d)

    def log_prior(q):
        bent = (jnp.arange(d) != 3) & (jnp.arange(d) != 4)
        return -0.5 * jnp.sum(jnp.where(bent, (q / scale) ** 2, 0.0)) + 2.0 * q[4]

    model = fw.Model(log_prior, lambda q: -0.5 * q[:5] ** 2, np.zeros(d), 5)
    draws = rng.normal(size=(2, 100, d)) * scale
    found = local_coordinates(
        model, fw.leave_one_out(5), fw.Fit(draws, (0.0, 0.0), np.ones(2), 0, 1)
    )
    informed = np.arange(d) < 5
    expected = np.where(np.isin(np.arange(d), [3, 4]), 1.0, scale**-2.0)
    np.testing.assert_allclose(found.curvature, expected, rtol=1e-5)
    for fold in range(5):
        own = np.arange(d) == fold
        bent = ~np.isin(np.arange(d), [3, 4])
        np.testing.assert_array_equal(found.local[fold], (~informed | own) & bent)
