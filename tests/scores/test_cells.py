"""Integrals over cells against closed forms and brute quadrature."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from effects import Effects, Group, columns

import foldwise as fw
from foldwise.models.evaluate import rows_at
from foldwise.models.structure import find_cells, without_cells
from foldwise.scores import cell_sets
from foldwise.scores.cell_sets import Values, needs_of
from foldwise.scores.cells import (
    NORMAL_STEPS,
    STEPS,
    Derived,
    by_known_owner,
)
from foldwise.scores.integrals import conditional_draws, log_integrals
from foldwise.scores.nodes import RULES, rule
from foldwise.support.runtime import alone

SMOOTH = ("normal", "Poisson", "binomial", "Bernoulli", "negative binomial", "Student-t")


@cache
def normal(sizes):
    return Effects([Group(size, rows=3 + k) for k, size in enumerate(sizes)])


@cache
def smooth(dimensions):
    return Effects([Group(dimensions, kind) for kind in SMOOTH])


def folds_of(of, one_by_one=True):
    """Each group out, each row out (or the first of each group), and each with a buffer."""
    rows = np.arange(len(of.group))
    single = rows if one_by_one else [group[0] for group in of.rows]
    pairs = [(np.setdiff1d(rows, test), test) for test in [*of.rows, *([i] for i in single)]]
    pairs += [(rows[np.abs(rows - i) > 1], [i]) for i in single[::2]]
    return fw.from_splits(pairs, len(rows))


def values_of(of, folds, by_row=False, draws=None):
    """Every integral that the folds need, at draws: cell, rows, values, whether settled."""
    draws = of.draws() if draws is None else draws
    needs = needs_of(of.structure, folds, by_row)
    values = Values(of.model, of.structure, needs, draws)
    found = np.concatenate([part for _, part, _ in values.at(draws)], axis=1)
    sets = columns(of.structure, needs)
    rows = np.concatenate([part for _, part in rows_at(of.model, draws)]).T
    return sets, found, ~values.unsettled[: len(sets)], rows


def brute(of, sets, draws, **grid):
    """The same integrals on a fine grid."""
    found = np.empty((len(sets), len(draws)))
    cells = np.array([cell for cell, _ in sets])
    for cell in np.unique(cells):
        these = np.flatnonzero(cells == cell)
        for k, draw in enumerate(draws):
            found[these, k] = of.brute(cell, draw, [sets[s][1] for s in these], **grid)
    return found


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (1, 3, 2, 3)], ids=str)
def test_normal_models_have_closed_forms(sizes):
    of = normal(sizes)
    draws, every = of.draws(3), np.arange(len(of.group))
    keeps = {"all": every >= 0, "none": every < 0, "some": every % 3 > 0, "one": every == 4}
    nodes = rule(RULES[max(sizes)][0], max(sizes))
    for keep in keeps.values():
        found = log_integrals(of.model, of.structure, draws, keep, nodes)
        assert not found.failed.any() and not found.bent.any()
        for cell in range(len(sizes)):
            rows = of.rows[of.group_of(cell)]
            kept = [of.exact(cell, draw, rows[keep[rows]]) for draw in draws]
            np.testing.assert_allclose(found.own[cell], kept, rtol=0, atol=1e-8)
            empty = [of.exact(cell, draw, rows[:0]) for draw in draws]
            np.testing.assert_allclose(found.empty[cell], empty, rtol=0, atol=1e-8)


def test_more_draws_than_a_call_has():
    of = normal((1, 1, 1))
    draws = of.draws(150)
    every = np.ones(len(of.group), bool)
    found = log_integrals(of.model, of.structure, draws, every, rule(7, 1)).own
    exact = [[of.exact(c, draw, of.rows[of.group_of(c)]) for draw in draws] for c in range(3)]
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-8)


def test_derived_sets_equal_passes_of_their_own():
    of = normal((1, 1, 1))
    draws = of.draws(3)
    rows = of.rows[1]
    cell = of.structure.row_cell[rows[0]]
    every = np.ones(len(of.group), bool)
    without = every.copy()
    without[rows[:2]] = False
    # all rows less two; the host's rows as they are
    derived = Derived(
        np.array([cell, cell], np.int32),
        rows[:2].astype(np.int32),
        np.zeros(2, np.int32),
        np.full(2, -1.0),
    )
    found = log_integrals(of.model, of.structure, draws, every, rule(31, 1), derived)
    own = log_integrals(of.model, of.structure, draws, without, rule(31, 1))
    np.testing.assert_allclose(found.derived[0], own.own[cell], rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.derived[1], found.own[cell], rtol=0, atol=1e-12)
    # the rows that are kept and two more
    more = derived._replace(sign=np.ones(2))
    back = log_integrals(of.model, of.structure, draws, without, rule(31, 1), more)
    np.testing.assert_allclose(back.derived[0], found.own[cell], rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps", [0, NORMAL_STEPS])
def test_coordinates_given_the_globals_are_normal_where_all_is(steps):
    of, count = normal((1, 3, 2, 3)), 4000
    draw = of.draws(1)
    drawn, failed = conditional_draws(of.model, of.structure, np.repeat(draw, count, 0), 1, steps)
    log_tau, mu = draw[0, :2]
    assert not failed.any() and (drawn[:, :2] == [log_tau, mu]).all()
    for effects, x, y in zip(of.effects, of.x, of.y, strict=True):
        size = len(effects)
        prior = (np.eye(size) + 0.4) * np.exp(-2 * log_tau)
        precision = prior + x.T @ x / 0.7**2
        mean = np.linalg.solve(precision, x.T @ (y - mu) / 0.7**2)
        found = (drawn[:, 2 + effects] - mean) @ np.linalg.cholesky(precision)
        assert (np.abs(found.mean(axis=0)) < 4.5 / np.sqrt(count)).all()
        off = found.T @ found / count - np.eye(size)
        assert (np.abs(off) < 4.5 * np.sqrt((1 + np.eye(size)) / count)).all()


@pytest.mark.parametrize("prior, steps", [("normal", STEPS), ("Student-t", STEPS)])
def test_coordinates_given_the_globals_are_those_of_a_grid(prior, steps):
    """Distribution functions, of conditionals that are not normal, as counts and answers make."""
    kinds, count = 2 * ["Poisson", "Bernoulli"], 4000
    of = Effects([Group(1, kind, prior, rows=3) for kind in kinds])
    draw, bent = of.draws(1), prior != "normal"
    given = np.repeat(draw, count, 0)
    drawn, failed = conditional_draws(of.model, of.structure, given, 1, steps, bent)
    assert not failed.any()
    grid = np.linspace(-12.0, 12.0, 4001)
    for (effect,) in of.effects:
        there = np.repeat(draw, len(grid), 0)
        there[:, 2 + effect] = grid
        with jax.enable_x64(True):
            rows = jax.vmap(of.model.flat_log_likelihood)(there).sum(axis=1)
            density = np.asarray(rows + jax.vmap(of.model.flat_log_prior)(there))
        below = np.cumsum(np.exp(density - density.max()))
        below /= below[-1]
        shares = np.sort(np.interp(drawn[:, 2 + effect], grid, below))
        # the distance of Kolmogorov and Smirnov: beyond 2.2 / sqrt(count) once in 10,000
        assert np.abs(shares - (np.arange(count) + 0.5) / count).max() < 2.2 / np.sqrt(count)


@pytest.mark.parametrize("steps", [0, NORMAL_STEPS])
def test_coordinates_are_the_same_whatever_runs_beside_them(steps):
    of = normal((1, 3, 2, 3))
    given = np.repeat(of.draws(1), 1500, 0)
    some, _ = conditional_draws(of.model, of.structure, given, 1, steps)
    with alone():
        others, _ = conditional_draws(of.model, of.structure, given, 1, steps)
    np.testing.assert_allclose(some, others, rtol=0, atol=1e-9)


@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 1, 1], [0, 1, 150, 2, 0, 7], [70, 70], []])
def test_sums_of_owners_that_are_known(sizes, rng):
    owner = rng.permutation(np.repeat(np.arange(len(sizes) + 1), [*sizes, 3]))
    values = rng.normal(size=(len(owner), 2, 5))
    values[np.flatnonzero(owner == len(sizes))[0]] = np.nan  # of nobody
    values[np.flatnonzero(owner == 1)[:1], :, 3] = -np.inf
    found = jax.jit(lambda some: by_known_owner(some, owner, len(sizes)))(values)
    expected = [values[owner == k].sum(axis=0) for k in range(len(sizes))]
    np.testing.assert_allclose(found, np.reshape(expected, (-1, 2, 5)), atol=1e-5)


# ---------------------------------------------------------------- brute quadrature


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_densities_of_all_kinds_at_the_rule_that_is_chosen(dimensions):
    of = smooth(dimensions)
    sets, found, settled, rows = values_of(of, folds_of(of, one_by_one=dimensions == 1))
    exact = brute(of, sets, of.draws())
    assert settled.mean() > (0.95 if dimensions < 3 else 0.8)
    np.testing.assert_allclose(found[settled], exact[settled], rtol=0, atol=1e-3)
    for k, draw in enumerate(of.draws()):
        with fw.models.model.precision_context("float64"):
            np.testing.assert_allclose(rows[:, k], of.model.flat_log_likelihood(draw), atol=1e-12)


def test_rows_one_by_one():
    of = smooth(1)
    folds = fw.k_fold(len(of.group), 3, seed=1)
    sets, found, settled, _ = values_of(of, folds, by_row=True)
    exact = brute(of, sets, of.draws())
    assert settled.mean() > 0.95
    np.testing.assert_allclose(found[settled], exact[settled], rtol=0, atol=1e-3)


def right_or_unsettled(of, draws, **grid):
    """Settled integrals are those on a fine grid; which are settled, by the prior or the rows."""
    sets, found, settled, _ = values_of(of, folds_of(of, one_by_one=False), draws=draws)
    exact = brute(of, sets, draws, **grid)
    np.testing.assert_allclose(found[settled], exact[settled], rtol=0, atol=1e-3)
    return settled, [of.groups[of.group_of(cell)] for cell, _ in sets]


def test_priors_that_are_not_normal():
    priors = ("Student-t", "mixture", "two peaks", "Laplace")
    of = Effects([Group(1, kind, prior) for prior in priors for kind in ("normal", "Bernoulli")])
    draws = of.draws(8)
    every = np.ones(len(of.group), bool)
    assert log_integrals(of.model, of.structure, draws, every, rule(7, 1)).bent.any(axis=1).all()
    settled, groups = right_or_unsettled(of, draws, half_width=100.0, points=20001)
    easy = np.array([g.prior in ("Student-t", "mixture") and g.kind == "normal" for g in groups])
    assert settled[easy].mean() > 0.5
    assert not settled[[g.prior in ("two peaks", "Laplace") for g in groups]].any()


def test_modes_of_heavy_tails_are_found_from_far_away():
    """Of a t density alone: steps over the top to the other tail, where it is flat, go nowhere."""
    of = Effects([Group(prior="Student-t") for _ in range(5)])
    rng, draws = np.random.default_rng(3), of.draws(100)
    z = rng.uniform(-40.0, 40.0, size=(100, 5)) * rng.uniform(size=(100, 1))
    draws[:, 2:] = z * np.exp(draws[:, :1])
    none = np.zeros(len(of.group), bool)
    found = log_integrals(of.model, of.structure, draws, none, rule(137, 1), bent=True)
    assert not found.failed.any()
    # integral of (1 + z^2 / 4)^(-5/2), relative to the density of the draw
    whole = 0.5 * np.log(4 * np.pi) - scipy.special.gammaln(2.5)
    group = [of.group_of(cell) for cell in range(5)]
    exact = whole + draws[:, 0] + 2.5 * np.log1p(z[:, group].T ** 2 / 4.0)
    np.testing.assert_allclose(found.own, exact, rtol=0, atol=1e-4)


def test_rough_densities():
    kinds = ("Laplace", "exponential", "Poisson")
    of = Effects([Group(1, kind, rows=rows) for kind in kinds for rows in (2, 4, 6)])
    settled, groups = right_or_unsettled(of, of.draws(8))
    rough = np.array([g.kind != "Poisson" for g in groups])
    assert settled[~rough].all()
    assert settled[rough].mean() < 0.5


def test_rows_of_density_zero_that_are_taken_away():
    """At nodes where such a row has no density nothing is known of the others: no wrong number."""
    of = Effects([Group(1, "exponential") for _ in range(3)])
    of.y[0][0] = 0.6  # the other rows of its group are far above
    of.y[0][1:] = 4.0
    draws = of.draws(4)
    cell, every = of.structure.row_cell[0], np.ones(len(of.group), bool)
    first = np.zeros(1, np.int32)
    derived = Derived(np.array([cell], np.int32), first, first, np.full(1, -1.0))
    found = log_integrals(of.model, of.structure, draws, every, rule(31, 1), derived)
    exact = brute(of, [(cell, of.rows[0][1:])], draws)[0]
    wrong = np.abs(found.derived[0] - exact) > 1e-3
    assert wrong.any()
    assert found.failed[cell][wrong].all()
    assert not found.failed[[c for c in range(3) if c != cell]].all()


def test_a_group_far_from_others_whose_rows_have_heavy_tails():
    """With few rows left it belongs with the others, and with all it does not: two modes."""
    of = Effects([Group(1, "narrow t", rows=4) for _ in range(6)])
    of.y[0] += 10.0
    draws = of.draws(8)
    draws[:, 2:] = [np.median(y) - 0.3 for y in of.y]
    right_or_unsettled(of, draws, half_width=20.0, points=40001)


def test_a_second_mode_that_mirrors_the_first_is_seen():
    """Rows of u^2: rules around one of the two modes agree with each other, and are log 2 short."""
    rng = np.random.default_rng(4)
    group = np.repeat(np.arange(4), 5)
    y = 4.0 + 2.0 * rng.normal(size=20)

    def log_likelihood(p):
        return -0.5 * ((y - p["u"][group] ** 2 - p["mu"]) / 2.0) ** 2

    start = {"mu": np.zeros(1), "u": np.full(4, 2.0)}
    model = fw.Model(
        lambda p: -0.5 * (jnp.sum(p["mu"] ** 2) + jnp.sum((p["u"] / 2.0) ** 2)),
        log_likelihood,
        start,
        20,
    )
    draws = np.concatenate([[0.0], np.full(4, 2.0)]) + 0.05 * rng.normal(size=(64, 5))
    structure = find_cells(model, draws)
    needs = needs_of(structure, fw.leave_group_out(group), by_row=False)
    values = Values(model, structure, needs, draws)
    found = np.concatenate([part for _, part, _ in values.at(draws)], axis=1)[:4]
    grid = np.linspace(-8, 8, 16001)
    rows = -0.5 * ((y[:, None, None] - grid**2 - draws[None, :, :1]) / 2.0) ** 2
    inside = rows.reshape(4, 5, len(draws), -1).sum(axis=1) - 0.5 * (grid / 2.0) ** 2
    exact = scipy.special.logsumexp(inside, axis=2) + np.log(grid[1] - grid[0])
    settled = ~values.unsettled[:4]
    np.testing.assert_allclose(found[settled], exact[settled], rtol=0, atol=1e-3)


def test_row_densities_are_evaluated_only_where_somebody_needs_them(monkeypatch):
    of, asked = normal((1, 2, 3, 2, 1)), []
    monkeypatch.setattr(cell_sets, "rows_at", lambda *given: asked.append(given) or iter(()))
    draws, folds = of.draws(), folds_of(of)
    for structure, rows in ((of.structure, 0), (without_cells(of.model), 1)):
        needs = needs_of(structure, folds, True)
        values = Values(of.model, structure, needs, draws)
        values.sums([needs.left_out, needs.by_row], draws)
        assert len(asked) == rows  # all rows are of cells, or none
        values.sums([needs.left_out], draws, look=print)
        assert len(asked) == rows + 1
        asked.clear()


def test_sums_of_integrals_and_rows_and_the_density_of_the_globals():
    """Groups of three normal rows with an effect each, and four rows of the mean alone."""
    rng = np.random.default_rng(6)
    group, y = np.repeat(np.arange(4), 3), rng.normal(size=16)
    member = np.eye(4)[group]

    def log_likelihood(p):
        eta = p["mu"] + jnp.concatenate([p["u"][group], jnp.zeros(4)])
        return -0.5 * (y - eta) ** 2

    def log_prior(p):
        scaled = p["u"] * jnp.exp(-p["log_tau"])
        return -0.5 * (p["mu"] ** 2 + p["log_tau"] ** 2 + jnp.sum(scaled**2)) - 4 * p["log_tau"]

    start = {"log_tau": 0.0, "mu": 0.0, "u": np.zeros(4)}
    model = fw.Model(log_prior, log_likelihood, start, 16)
    draws = 0.5 * rng.normal(size=(700, 6))
    structure, folds = find_cells(model, draws), fw.leave_one_out(16)
    assert (structure.row_cell < 0).sum() == 4
    exact = np.empty(len(draws))
    for k, (log_tau, mu) in enumerate(draws[:, :2]):
        covariance = np.exp(2 * log_tau) * member @ member.T + np.eye(12)
        inside = scipy.stats.multivariate_normal.logpdf(y[:12], np.full(12, mu), covariance)
        exact[k] = inside - 0.5 * (mu**2 + log_tau**2 + ((y[12:] - mu) ** 2).sum())
    for chosen in (structure, without_cells(model)):
        needs = needs_of(chosen, folds, True)
        values = Values(model, chosen, needs, draws)
        matrix = scipy.sparse.random_array((5, values.count + 16), density=0.3, rng=1, format="csr")
        parts = [part for _, part, _ in values.at(draws)]
        integrals = np.concatenate(parts, axis=1) if parts else np.empty((0, len(draws)))
        priors, rows = (np.concatenate(part) for part in zip(*rows_at(model, draws), strict=True))
        density = np.empty(len(draws))
        (found,) = values.sums([matrix], draws, density=density)
        np.testing.assert_allclose(found, matrix @ np.concatenate([integrals, rows.T]), rtol=1e-12)
        right = exact if len(chosen) else priors + rows.sum(axis=1)
        np.testing.assert_allclose(np.ptp(density - right), 0.0, atol=1e-9)
