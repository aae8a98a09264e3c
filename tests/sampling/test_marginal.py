"""When chains are on the globals alone, and with which rules."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from effects import Effects, Group
from problems import far_groups, regression

import foldwise as fw
from foldwise import crossval
from foldwise.sampling import full_data
from foldwise.sampling.fit import Fit
from foldwise.sampling.full_data import full_data_fit
from foldwise.sampling.marginal import all_parameters, marginal_fit, marginal_models
from foldwise.sampling.pooled import draw_pooled
from foldwise.sampling.run import Settings
from foldwise.support.progress import Progress


def fit_of(model, seed=0):
    """Draws that are as good as any for looking at a model."""
    positions = 0.3 * np.random.default_rng(seed).normal(size=(4, 50, model.dimension))
    return Fit(positions, (0.0, 0.0), np.ones(4), 0, 1)


def settings(**changes):
    given = {"scores": ("log",), "keep": (), "precision": "float64"} | changes
    return Settings(
        estimator="auto", memory="draws", chains=4, warmup=50, batch=10, seed=1, **given
    )


def test_counts_need_more_nodes_than_two():
    model = Effects([Group(1, "Poisson") for _ in range(3)]).model
    folds, fit = fw.leave_one_out(model.n_obs), fit_of(model)
    (found,), _ = marginal_models([model], [fit], folds, by_row=False)
    assert 3 <= found.rules.density <= found.rules.scores <= 11
    assert found.sentence == "sampled 2 parameters; 3 integrated out"
    np.testing.assert_array_equal(marginal_fit(found, fit).positions, fit.positions[..., :2])


def test_priors_that_are_not_normal_stay():
    model = Effects([Group(prior="Student-t")] * 3).model
    found, why = marginal_models([model], [fit_of(model)], fw.leave_one_out(model.n_obs), False)
    assert not found
    assert "not normal" in why


def test_a_regression_has_nothing_to_integrate_out():
    model = regression().model()
    found, why = marginal_models([model], [fit_of(model)], fw.leave_one_out(40), False)
    assert not found
    assert "no parameters belong to a group" in why


GROUP = np.arange(60) % 3


def few_effects():
    """A regression on six columns with effects of three groups."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(60, 6)), rng.normal(size=60)

    def log_likelihood(p):
        mean = jnp.asarray(x) @ p["b"] + p["z"][GROUP]
        return -0.5 * (jnp.asarray(y) - mean) ** 2

    def log_prior(p):
        return -0.5 * (jnp.sum(p["b"] ** 2) + jnp.sum(p["z"] ** 2))

    init = {"b": np.zeros(6), "z": np.zeros(3)}
    return fw.Model(log_prior, log_likelihood, init, len(y))


def test_few_effects_beside_many_shared_parameters_stay_where_no_group_is_lost():
    model = few_effects()
    future, fit = fw.leave_future_out(60, start=30), fit_of(model)
    found, why = marginal_models([model], [fit], future, by_row=False)
    assert not found
    assert "no group loses all its rows" in why
    for folds, wanted in ((future, True), (fw.leave_group_out(GROUP), False)):
        (found,), _ = marginal_models([model], [fit], folds, False, wanted)
        assert found.sentence == "sampled 6 parameters; 3 integrated out"


def test_the_fit_for_chains_samples_few_effects_too():
    model = few_effects()
    alone = full_data_fit(model, 1, Progress(False), marginal=True)
    np.testing.assert_array_equal(alone.sampled, np.arange(6))
    every = full_data_fit(model, 1, Progress(False), marginal=True, chained=True)
    assert every.sampled is None and every.settled


def test_a_late_fit_counts_what_came_before(monkeypatch):
    before = []

    def apart(*given):
        for run in draw_pooled(*given):
            before.append(replace(run, apart=True))
            yield before[-1]

    monkeypatch.setattr(full_data, "draw_pooled", apart)
    fit = full_data_fit(few_effects(), 1, Progress(False), marginal=True, chained=True)
    np.testing.assert_array_equal(fit.sampled, np.arange(6))
    assert fit.gradients > before[-1].gradients > 0


@pytest.mark.parametrize("marginal, chained", [(None, True), (True, False)])
def test_what_is_asked_for_holds_for_the_fit_too(marginal, chained, monkeypatch):
    asked = []

    def fitted(*given):
        asked.append(given[-1])
        return full_data_fit(*given)

    monkeypatch.setattr(crossval, "full_data_fit", fitted)
    folds = fw.leave_future_out(60, start=54)
    fw.cross_validate(
        few_effects(), folds, method="mcmc", marginal=marginal, seed=1, progress=False
    )
    assert asked == [chained]


def test_what_needs_draws_of_all_parameters():
    model, folds = far_groups(0.5).model(), fw.k_fold(20, 4)
    assert all_parameters(settings(), model, folds) is None
    assert all_parameters(settings(scores=("log", "crps", "hyvarinen")), model, folds) is None
    assert all_parameters(settings(keep=("position",)), model, folds) is None
    assert "double" in all_parameters(settings(precision="float32"), model, folds)
    for names in (("log", "log_pointwise"), ("hyvarinen", "hyvarinen_pointwise")):
        both = settings(scores=(*names, "crps"))
        assert f"{' and '.join(names)} are" in all_parameters(both, model, folds)
        assert all_parameters(both, model, fw.leave_one_out(20)) is None
