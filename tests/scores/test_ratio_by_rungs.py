"""Rungs from one posterior to another: the ratio, its error, and chains that are in trouble."""

import numpy as np

from foldwise.scores import rungs
from foldwise.scores.rungs import Level, Way, join


def normal_levels(rng, tempers, distance=6.0, precision=4.0, draws=200):
    """Draws of N(0, 1) times N(distance; z, 1 / precision)^t, up to a constant."""
    levels = []
    for t in tempers:
        p = 1.0 + precision * t
        z = precision * t * distance / p + rng.normal(size=(4, draws)) / np.sqrt(p)
        levels.append(Level(t, -0.5 * precision * (z - distance) ** 2))
    exact = -0.5 * np.log1p(precision) - 0.5 * precision * distance**2 / (1.0 + precision)
    return levels, exact


def way_through(levels):
    way = Way(0, levels[0], 10, True)
    for level in levels[1:-1]:
        way.take(join(way.level, level), level)
    return way.finish(levels[-1])


def test_independent_draws_give_the_ratio(rng):
    levels, exact = normal_levels(rng, [0.0, 0.05, 0.12, 0.25, 0.5, 1.0])
    found = way_through(levels)
    assert found.overlap > rungs.RUNG_OVERLAP and found.settled
    error = np.sqrt(found.rung_variance + found.own.var() / found.own.size)
    assert 0.02 < error < 0.5 and abs(found.log_r + found.correction - exact) < 4 * error


def test_chains_that_disagree_or_drift_are_noticed(rng):
    levels, _ = normal_levels(rng, [0.0, 0.05, 0.12, 0.25, 0.5, 1.0])
    assert way_through(levels).settled
    apart = levels[2].scores - 15.0 * (np.arange(4) == 1)[:, None]
    assert way_through([*levels[:2], Level(0.12, apart), *levels[3:]]).rhat > 1.1
    # no chain alone shows it, and R-hat is blind to it, but all rungs drift the same way
    on_their_way = [Level(w.temper, w.scores + np.linspace(-8, 8, 200)) for w in levels[1:-1]]
    found = way_through([levels[0], *on_their_way, levels[-1]])
    assert found.rhat < 1.1 and abs(found.drift) > rungs.MOST_DRIFT and not found.settled
    stuck = levels[2].scores.copy()
    stuck[3] = stuck[3, 0]
    assert way_through([*levels[:2], Level(0.12, stuck), *levels[3:]]).rhat == np.inf


def test_clusters_far_apart_do_not_overlap(rng):
    """Their terms hardly vary, so that many draws seem to carry the bridge."""
    low, high = (Level(t, rng.normal(m, 0.1, (4, 50))) for t, m in ((0.0, -5000.0), (1.0, -3.0)))
    found = join(low, high)
    assert np.isfinite(found.log_ratio) and np.isfinite(found.up).all()
    assert found.overlap < 1e-6


def test_what_a_full_data_draw_adds_is_the_score_without_it_less(rng):
    """A jackknife over full-data draws agrees with their influences, sign and size."""
    levels, _ = normal_levels(rng, [0.0, 0.05, 0.12, 0.25, 0.5, 1.0])
    full = levels[-1]
    influence = way_through(levels).full_influence(full.scores.ravel())
    some = np.arange(0, full.scores.size, 40)
    whole, without = way_through(levels), []
    for draw in some:
        rest = np.delete(full.scores.ravel(), draw)[None]
        without.append(way_through([*levels[:-1], Level(1.0, rest)]).log_r)
    removed = (full.scores.size - 1) * (whole.log_r - np.array(without))
    np.testing.assert_allclose(removed, influence[some], atol=0.15)
    assert np.ptp(influence[some]) > 1.0
