"""Cells found from derivatives: groups of rows that have parameters of their own, and no others."""

import time
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import foldwise as fw
from foldwise.models import structure
from foldwise.models.structure import cells_at_start, find_cells
from foldwise.sampling.globals import too_many

GROUPS, ROWS = 8, 4
GROUP = np.repeat(np.arange(GROUPS), ROWS)
X = np.tile(np.linspace(-1.0, 1.0, ROWS), GROUPS)
Y = np.random.default_rng(0).normal(size=GROUPS * ROWS)
SCALES = {"mu": 0.0, "log_sigma": 0.0, "log_tau": 0.0}


def normal(y, mean, log_sd):
    return -0.5 * ((y - mean) / jnp.exp(log_sd)) ** 2 - log_sd


def rows(p, mean):
    return normal(Y, mean, p["log_sigma"])


def shared(p):
    return -0.5 * sum(p[name] ** 2 for name in SCALES)


def model(prior, mean, **arrays):
    """A model of the scales and ``arrays``, with the log prior of these and the mean of rows."""
    return fw.Model(
        lambda p: shared(p) + jnp.sum(prior(p)),
        lambda p: rows(p, mean(p)),
        {**SCALES, **arrays},
        len(Y),
    )


def draws(of, seed=1):
    return np.random.default_rng(seed).normal(size=(4, of.dimension)) * 0.5


def cells_of(of, at=None):
    """The cells as sets of names, and the set of names of the globals."""
    found = find_cells(of, draws(of) if at is None else at)
    cells = [{found.names[k] for k in cell if k >= 0} for cell in found.coordinates]
    return found, cells, {found.names[k] for k in found.globals}


def check_groups(of, expected, globals_, at=None):
    """Each group of rows is a cell of the ``expected`` names, and nothing else is one."""
    found, cells, others = cells_of(of, at)
    assert len(found) == len(expected)
    assert others == set(globals_)
    for group, names in enumerate(expected):
        (cell,) = set(found.row_cell[GROUP == group].tolist())
        assert cells[cell] == set(names)


def check_nothing(of, at=None):
    found = find_cells(of, draws(of) if at is None else at)
    assert len(found) == 0
    assert (found.row_cell == -1).all()
    assert len(found.globals) == of.dimension
    assert "no parameter belongs to a group of rows alone" == str(found)


# ---------------------------------------------------------------- effects of groups

HIERARCHICAL = {
    "centred": (
        lambda p: normal(p["a"], p["mu"], p["log_tau"]),
        lambda p: p["a"][GROUP],
    ),
    "non-centred": (
        lambda p: -0.5 * p["a"] ** 2,
        lambda p: p["mu"] + jnp.exp(p["log_tau"]) * p["a"][GROUP],
    ),
    "Student-t effects": (
        lambda p: -2.0 * jnp.log1p((p["a"] / jnp.exp(p["log_tau"])) ** 2 / 3.0) - p["log_tau"],
        lambda p: p["mu"] + p["a"][GROUP],
    ),
    "a mixture of effects": (
        lambda p: jnp.logaddexp(normal(p["a"], 1.0, p["log_tau"]), normal(p["a"], -1.0, 0.0)),
        lambda p: p["mu"] + p["a"][GROUP],
    ),
}


@pytest.mark.parametrize("name", HIERARCHICAL)
def test_effects_of_groups(name):
    prior, mean = HIERARCHICAL[name]
    of = model(prior, mean, a=np.zeros(GROUPS))
    check_groups(of, [[f"a[{g}]"] for g in range(GROUPS)], SCALES)


@pytest.mark.parametrize("unseen", [GROUPS, 5 * GROUPS])
def test_groups_without_rows(unseen):
    """Few are cells without rows; many are left aside, and hide no cells."""
    prior, mean = HIERARCHICAL["centred"]
    of = model(prior, mean, a=np.zeros(GROUPS + unseen))
    found, cells, others = cells_of(of)
    few = unseen == GROUPS
    assert len(found) == GROUPS + few * unseen and len(set(found.row_cell)) == GROUPS
    assert {frozenset(c) for c in cells} >= {frozenset({f"a[{g}]"}) for g in range(GROUPS)}
    assert len(others) == len(SCALES) + (not few) * unseen
    assert str(found).startswith(f"3 parameters shared by all rows; a[j] of {GROUPS} groups")
    words = (
        f"{unseen} groups without rows" if few else f"{unseen} parameters of groups without rows"
    )
    assert words in str(found)


def slopes(p):
    a, b = p["ab"].reshape(GROUPS, 2).T
    return a[GROUP] + b[GROUP] * X


@cache
def interleaved():
    """Intercept and slope of each group, one after another in one vector."""
    return model(lambda p: normal(p["ab"], p["mu"], p["log_tau"]), slopes, ab=np.zeros(2 * GROUPS))


def test_effects_interleaved_in_one_vector():
    expected = [[f"ab[{2 * g}]", f"ab[{2 * g + 1}]"] for g in range(GROUPS)]
    check_groups(interleaved(), expected, SCALES)


def test_three_effects_and_cells_of_different_sizes():
    few = GROUPS // 2  # the other groups have an intercept alone

    def mean(p):
        bend = jnp.concatenate([p["b"], jnp.zeros((GROUPS - few, 2))])[GROUP]
        return p["mu"] + p["a"][GROUP] + bend[:, 0] * X + bend[:, 1] * X**2

    def prior(p):
        return jnp.sum(normal(p["a"], 0.0, p["log_tau"])) - 0.5 * jnp.sum(p["b"] ** 2)

    of = model(prior, mean, a=np.zeros(GROUPS), b=np.zeros((few, 2)))
    three = [[f"a[{g}]", f"b[{g},0]", f"b[{g},1]"] for g in range(few)]
    check_groups(of, three + [[f"a[{g}]"] for g in range(few, GROUPS)], SCALES)
    found = cells_of(of)[0]
    assert sorted(found.sizes.tolist()) == [1] * (GROUPS - few) + [3] * few
    assert "a[j], b[j,0], b[j,1] of 4 groups; a[j] of 4 groups" in str(found)


def test_four_effects_are_too_many():
    def mean(p):
        return (p["b"][GROUP] * np.vander(X, 4)).sum(axis=1)

    check_nothing(model(lambda p: -0.5 * p["b"] ** 2, mean, b=np.zeros((GROUPS, 4))))


def in_numpyro():
    sd = numpyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
    chol = numpyro.sample("chol", dist.LKJCholesky(2, 2.0))
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    scale = sd[:, None] * chol
    with numpyro.plate("groups", GROUPS):
        ab = numpyro.sample("ab", dist.MultivariateNormal(mean, scale_tril=scale))
    with numpyro.plate("rows", len(Y)):
        numpyro.sample("y", dist.Normal(ab[GROUP, 0] + ab[GROUP, 1] * X, sigma), obs=Y)


def test_correlated_slopes_in_numpyro():
    expected = [[f"ab[{g},0]", f"ab[{g},1]"] for g in range(GROUPS)]
    shared = ["sd[0]", "sd[1]", "chol[0]", "mean[0]", "mean[1]", "sigma"]
    check_groups(fw.from_numpyro(in_numpyro), expected, shared)


# PyTensor, PyMC and arviz 0.23 warn of each other's coming changes, and of a BLAS that is not there
# what PyMC and PyTensor warn of at import and compile is theirs
@pytest.mark.filterwarnings("ignore:PyTensor could not link:UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_correlated_slopes_in_pymc():
    import pymc as pm

    with pm.Model() as made:
        chol, _, _ = pm.LKJCholeskyCov(
            "chol", n=2, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0, shape=2)
        )
        mean = pm.Normal("mean", 0.0, 1.0, shape=2)
        sigma = pm.HalfNormal("sigma", 1.0)
        ab = pm.MvNormal("ab", mean, chol=chol, shape=(GROUPS, 2))
        pm.Normal("y", ab[GROUP, 0] + ab[GROUP, 1] * X, sigma, observed=Y)
    of = fw.from_pymc(made)
    expected = [[f"ab[{g},0]", f"ab[{g},1]"] for g in range(GROUPS)]
    found, _, others = cells_of(of)
    assert len(found.globals) == 6
    check_groups(of, expected, others)


@cache
def persons():
    """Forty persons answer five items each, out of six; persons and items both have effects."""
    rng = np.random.default_rng(2)
    person, item = np.divmod(np.arange(240), 6)
    asked = np.flatnonzero(item != person % 6)
    person, item = person[asked], item[asked]
    y = rng.integers(0, 2, len(person))

    def log_prior(p):
        ability = normal(p["ability"], 0.0, p["log_tau"])
        return jnp.sum(ability) - 0.5 * jnp.sum(p["easy"] ** 2) - 0.5 * p["log_tau"] ** 2

    def log_likelihood(p):
        eta = p["ability"][person] + p["easy"][item]
        return y * eta - jax.nn.softplus(eta)

    start = {"ability": np.zeros(40), "easy": np.zeros(6), "log_tau": 0.0}
    return fw.Model(log_prior, log_likelihood, start, len(y)), person


def test_persons_are_cells_and_the_few_items_are_not():
    of, person = persons()
    found, cells, others = cells_of(of)
    assert others == {"log_tau", *(f"easy[{k}]" for k in range(6))}
    assert [cells[c] for c in found.row_cell] == [{f"ability[{k}]"} for k in person]


def test_an_effect_for_every_row():
    of = model(
        lambda p: -0.5 * p["e"] ** 2,
        lambda p: p["mu"] + jnp.exp(p["log_tau"]) * p["e"],
        e=np.zeros(len(Y)),
    )
    found, cells, others = cells_of(of)
    assert others == set(SCALES)
    assert [cells[c] for c in found.row_cell] == [{f"e[{k}]"} for k in range(len(Y))]


def test_effects_of_rows_within_those_of_groups():
    """Rows' effects are the cells; groups' effects, which they share, are taken out."""
    of = model(
        lambda p: jnp.sum(p["e"] ** 2) * -0.5 - 0.5 * jnp.sum(p["a"] ** 2),
        lambda p: p["mu"] + p["a"][GROUP] + jnp.exp(p["log_tau"]) * p["e"],
        e=np.zeros(len(Y)),
        a=np.zeros(GROUPS),
    )
    found, cells, others = cells_of(of)
    assert others == {*SCALES, *(f"a[{g}]" for g in range(GROUPS))}
    assert [cells[c] for c in found.row_cell] == [{f"e[{k}]"} for k in range(len(Y))]


# ---------------------------------------------------------------- nothing to find

N = len(Y)
KERNEL = np.linalg.inv(
    np.exp(-0.5 * ((np.arange(N)[:, None] - np.arange(N)) / 3.0) ** 2) + 0.1 * np.eye(N)
)


def intrinsic(f):
    """Differences of neighbours on a grid of 4 x 8."""
    grid = f.reshape(4, 8)
    apart = jnp.sum(jnp.diff(grid, axis=0) ** 2) + jnp.sum(jnp.diff(grid, axis=1) ** 2)
    return -0.5 * apart - 0.5 * (jnp.sum(f) / 0.03) ** 2


NOTHING = {
    "regression": (lambda p: -0.5 * p["b"] ** 2, lambda p: np.vander(X, 3) @ p["b"], 3),
    "Gaussian process": (lambda p: -0.5 * p["b"] @ KERNEL @ p["b"], lambda p: p["b"], N),
    "random walk": (lambda p: normal(jnp.diff(p["b"]), 0.0, p["log_tau"]), lambda p: p["b"], N),
    "intrinsic autoregression": (lambda p: intrinsic(p["b"]), lambda p: p["b"], N),
    "effects less their mean": (
        lambda p: -0.5 * p["b"] ** 2,
        lambda p: p["mu"] + (p["b"] - p["b"].mean())[GROUP],
        GROUPS,
    ),
    "effects that nearly sum to zero": (
        lambda p: -0.5 * jnp.sum(p["b"] ** 2) - 0.5 * (jnp.sum(p["b"]) / 0.01) ** 2,
        lambda p: p["mu"] + p["b"][GROUP],
        GROUPS,
    ),
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_find(name):
    prior, mean, size = NOTHING[name]
    check_nothing(model(prior, mean, b=np.zeros(size)))


# ---------------------------------------------------------------- what could hide a coupling


@cache
def hidden():
    """The effects of two groups meet in the prior, by a product with a shared coordinate."""
    return model(
        lambda p: -0.5 * jnp.sum(p["a"] ** 2) - p["log_tau"] * p["a"][0] * p["a"][1],
        lambda p: p["mu"] + p["a"][GROUP] + p["log_tau"] * p["a"][2] * (GROUP == 3),
        a=np.zeros(GROUPS),
    )


@pytest.mark.parametrize("zero", [0, -1])
def test_a_zero_by_accident_hides_nothing(zero):
    of = hidden()
    at = draws(of)
    at[zero, find_cells(of, at).names.index("log_tau")] = 0.0
    found, cells, _ = cells_of(of, at)
    assert {"a[0]", "a[1]"} in cells
    assert {"a[2]", "a[3]"} in cells
    assert len(found) == GROUPS - 2


def means_of_a_mixture():
    """Means so far apart that each row's derivative by the others is zero at all draws."""
    y = Y + 20.0 * (np.arange(N) % 3 - 1.0)

    def log_likelihood(p):
        part = normal(y[:, None], p["mean"], p["log_sigma"]) + jax.nn.log_softmax(p["weight"])
        return jax.scipy.special.logsumexp(part, axis=1)

    def log_prior(p):
        return -0.5 * (jnp.sum((p["mean"] / 20.0) ** 2) + jnp.sum(p["weight"] ** 2))

    start = {"log_sigma": 0.0, "mean": 20.0 * np.arange(-1.0, 2.0), "weight": np.zeros(3)}
    return fw.Model(log_prior, log_likelihood, start, N)


def test_parameters_that_meet_away_from_the_draws_are_no_cells():
    of = means_of_a_mixture()
    check_nothing(of, draws(of) + np.concatenate([[0.0], 20.0 * np.arange(-1.0, 2.0), np.zeros(3)]))


def test_priors_that_couple_away_from_the_draws_are_no_cells():
    def prior(p):
        near = jax.nn.relu(0.5 - jnp.abs(p["a"][:-1] - p["a"][1:]))
        return -0.5 * jnp.sum(p["a"] ** 2) - jnp.sum(near**2)

    of = model(prior, lambda p: p["mu"] + p["a"][GROUP], a=np.zeros(GROUPS))
    check_nothing(of, draws(of) + np.concatenate([3.0 * np.arange(GROUPS), np.zeros(3)]))


@pytest.mark.parametrize("budget", [0, 10**3, 10**4])
@pytest.mark.parametrize("of", ["slopes", "persons", "hidden"])
def test_what_is_not_told_apart_within_the_budget_is_no_cell(monkeypatch, budget, of):
    made = {"slopes": interleaved, "persons": lambda: persons()[0], "hidden": hidden}[of]()
    monkeypatch.setattr(structure, "MOST_PROBED", budget)
    monkeypatch.setattr(structure, "_stands", lambda *given: True)
    check_apart(made, find_cells(made, draws(made)))


def check_apart(of, found):
    """No row depends on two cells, and the prior couples no two, by all derivatives one by one."""
    (point,) = draws(of, seed=5)[:1]
    with jax.enable_x64(True):
        rows = np.asarray(jax.jit(jax.jacfwd(of.flat_log_likelihood))(point)) != 0
        prior = np.asarray(jax.jit(jax.hessian(of.flat_log_prior))(point)) != 0
    cell_of = np.full(of.dimension, -1)
    for cell, members in enumerate(found.coordinates):
        cell_of[members[members >= 0]] = cell
    row, coordinate = np.nonzero(rows & (cell_of >= 0))
    np.testing.assert_array_equal(found.row_cell[row], cell_of[coordinate])
    assert np.isin(np.flatnonzero(found.row_cell >= 0), row).all()
    one, two = np.nonzero(prior & (cell_of >= 0) & (cell_of >= 0)[:, None])
    np.testing.assert_array_equal(cell_of[one], cell_of[two])


# ---------------------------------------------------------------- words and time


def test_words():
    group = np.repeat(np.arange(30), 5)
    x = np.tile(np.arange(5.0), 30)
    y = np.random.default_rng(3).normal(size=150)

    def log_prior(p):
        a, b = normal(p["alpha"], p["mu"][0], p["log_tau"][0]), normal(p["beta"], p["mu"][1], 0.0)
        return (
            jnp.sum(a) + jnp.sum(b) - 0.5 * jnp.sum(p["mu"] ** 2) - 0.5 * jnp.sum(p["log_tau"] ** 2)
        )

    def log_likelihood(p):
        return normal(y, p["alpha"][group] + p["beta"][group] * x, p["log_tau"][2])

    start = {"alpha": np.zeros(30), "beta": np.zeros(30), "mu": np.zeros(2), "log_tau": np.zeros(3)}
    of = fw.Model(log_prior, log_likelihood, start, 150)
    found = find_cells(of, draws(of))
    assert str(found) == "5 parameters shared by all rows; alpha[j], beta[j] of 30 groups"
    assert repr(found) == str(found)


def test_thousands_of_groups_take_seconds():
    group = np.repeat(np.arange(3000), 5)
    y = np.random.default_rng(4).normal(size=len(group))
    of = fw.Model(
        lambda p: jnp.sum(normal(p["a"], 0.0, p["log_tau"])) - 0.5 * p["log_tau"] ** 2,
        lambda p: normal(y, p["mu"] + p["a"][group], 0.0),
        {"a": np.zeros(3000), "mu": 0.0, "log_tau": 0.0},
        len(y),
    )
    began = time.perf_counter()
    found = find_cells(of, draws(of))
    assert time.perf_counter() - began < 20.0
    assert len(found) == 3000
    assert (np.bincount(found.row_cell) == 5).all()


def test_what_is_found_at_the_start_is_found_once(monkeypatch):
    of = interleaved()
    found = cells_at_start(of)
    monkeypatch.setattr(structure, "find_cells", lambda *given: pytest.fail("again"))
    assert cells_at_start(of) is found and len(found)


@pytest.mark.parametrize("answers", ["all items", "items of a school"])
def test_globals_may_fall_apart_only_where_no_cell_meets_them_all(answers):
    """Persons of eight schools who answer the same 16 items, or two that their school has."""
    persons, items = 64, 16
    person, item = (part.ravel() for part in np.indices((persons, items)))
    if answers == "items of a school":
        own = item // 2 == person % 8
        person, item = person[own], item[own]
    y = np.random.default_rng(3).integers(0, 2, len(person))

    def log_likelihood(p):
        eta = jnp.exp(p["log_tau"]) * p["ability"][person] - p["difficulty"][item]
        return y * eta - jnp.logaddexp(0.0, eta)

    def log_prior(p):
        return -0.5 * (
            jnp.sum(p["ability"] ** 2) + jnp.sum(p["difficulty"] ** 2) + p["log_tau"] ** 2
        )

    start = {"ability": np.zeros(persons), "difficulty": np.zeros(items), "log_tau": 0.0}
    of = fw.Model(log_prior, log_likelihood, start, len(y))
    found = find_cells(of, draws(of))
    assert len(found) == persons and len(found.globals) == items + 1
    assert found.apart is (answers == "items of a school")
    assert too_many(found) is (answers == "all items")
