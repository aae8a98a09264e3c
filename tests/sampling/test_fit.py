import time
from dataclasses import replace
from unittest import mock

import jax.numpy as jnp
import numpy as np
import problems
import pytest
from problems import by_chains

import foldwise as fw
from foldwise.sampling import full_data
from foldwise.sampling.blocks import MOST_STEPS, leapfrog_counts
from foldwise.sampling.fit import FitError, FitWarning, check_draws
from foldwise.sampling.nuts import Nuts


def test_draws_have_the_posterior_mean_and_covariance(prepared):
    problem, _, fit = prepared("regression")
    precision = problem.X.T @ problem.X / problem.noise**2 + np.diag(1 / problem.prior**2)
    covariance = np.linalg.inv(precision)
    mean = covariance @ problem.X.T @ problem.y / problem.noise**2
    error = np.sqrt(np.diag(covariance) / fit.ess)
    assert np.all(np.abs(fit.flat.mean(axis=0) - mean) < 4 * error)
    np.testing.assert_allclose(fit.covariance, covariance, atol=0.15 * covariance.max())


def test_reports_diagnostics(prepared):
    _, _, fit = prepared("regression")
    assert fit.rhat.shape == fit.ess.shape == (4,)
    assert fit.rhat.max() < 1.02 and fit.ess.min() > 500 and fit.divergences == 0
    assert "R-hat max" in repr(fit) and "ESS min" in repr(fit)
    assert fit.positions.shape == (4, 1000, 4)


@pytest.mark.parametrize(
    "change, divergences, settled",
    [
        (lambda x: x, 0, True),
        (lambda x: x, 20, True),
        (lambda x: x, 21, False),
        (lambda x: x + 0.3 * np.arange(4)[:, None, None], 0, False),  # chains disagree
        (lambda x: np.repeat(x[:, :20], 50, axis=1), 0, False),  # few effective draws
        (lambda x: x * np.array([1.0, 0.0]), 0, False),  # a parameter never moves
    ],
)
def test_settled(rng, change, divergences, settled):
    positions = change(rng.normal(size=(4, 1000, 2)))
    assert fw.Fit(positions, (0.0, 0.0), np.ones(4), divergences, 1).settled is settled


def test_same_seed_same_draws(prepared):
    _, model, _ = prepared("normal_mean")
    a, b = (fw.fit(model, draws=100, warmup=200, seed=5, progress=False) for _ in range(2))
    c = fw.fit(model, draws=100, warmup=200, seed=6, progress=False)
    np.testing.assert_array_equal(a.positions, b.positions)
    assert not np.array_equal(a.positions, c.positions)


def test_seed_is_drawn_and_recorded(prepared):
    _, model, _ = prepared("normal_mean")
    a, b = (fw.fit(model, draws=100, warmup=100, progress=False) for _ in range(2))
    assert a.seed != b.seed


def test_three_chains(prepared):
    _, model, _ = prepared("normal_mean")
    fit = fw.fit(model, chains=3, draws=300, warmup=130, seed=1, progress=False)
    assert fit.positions.shape == (3, 300, 1)
    assert np.unique(fit.positions[:, 0]).size == 3


def test_trouble_is_said():
    """Two far modes: chains disagree."""

    def log_prior(x):
        import jax.numpy as jnp

        return jnp.logaddexp(-0.5 * (x - 40.0) ** 2, -0.5 * (x + 40.0) ** 2)

    import jax

    model = fw.Model(
        log_prior,
        lambda x: 0.0 * x * np.ones(3),
        init=lambda key: 40.0 * (2.0 * jax.random.bernoulli(key) - 1.0),
        n_obs=3,
        name="two modes",
    )
    with pytest.warns(FitWarning, match="two modes: R-hat is up to"):
        fit = fw.fit(model, draws=200, warmup=200, seed=1, progress=False)
    assert "check the model first" in repr(fit)


def test_fit_of_another_model_is_refused(prepared):
    _, _, fit = prepared("regression")
    other = problems.LinearProblem(**{**vars(problems.regression()), "noise": 1.1, "name": "other"})
    with pytest.raises(ValueError, match="must be of the model that is cross-validated"):
        by_chains(other.model(), other.folds, fit=fit, progress=False)
    smaller = problems.normal_mean()
    with pytest.raises(ValueError, match="4 parameters and the model 1"):
        by_chains(smaller.model(), smaller.folds, fit=fit, progress=False)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"chains": 1}, "chains must be a whole number of at least 2, got 1"),
        ({"draws": 10}, "draws must be a whole number of at least 100"),
        ({"warmup": 1.5}, "warmup must be a whole number"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
    ],
)
def test_bad_arguments(prepared, bad, message):
    _, model, _ = prepared("normal_mean")
    with pytest.raises(ValueError, match=message):
        fw.fit(model, progress=False, **bad)


def local_level(rows=100):
    """A random walk plus noise, the walk centred: its scale mixes slowly."""
    rng = np.random.default_rng(0)
    walk = 2.0 * rng.normal() + np.cumsum(np.append(0.0, 0.3 * rng.normal(size=rows - 1)))
    y = walk + 0.8 * rng.normal(size=rows)

    def log_prior(q):
        noise, step, x = jnp.exp(q["noise"]), jnp.exp(q["step"]), q["x"]
        scales = q["noise"] - 0.5 * noise**2 + q["step"] - 0.5 * (step / 0.5) ** 2
        walk = -0.5 * jnp.sum((jnp.diff(x) / step) ** 2) - (rows - 1) * q["step"]
        return scales + walk - 0.5 * (x[0] / 2.0) ** 2

    def log_likelihood(q):
        return -0.5 * ((y - q["x"]) / jnp.exp(q["noise"])) ** 2 - q["noise"]

    init = {"noise": 0.0, "step": -1.0, "x": np.zeros(rows)}
    return fw.Model(log_prior, log_likelihood, init, rows, name="local level")


def test_a_slow_fit_goes_on_by_itself(seed):
    fit = fw.fit(local_level(), seed=seed, progress=False)
    assert fit.settled and fit.positions.shape[::2] == (4, 102)
    assert 1000 <= fit.positions.shape[1] < 2000


def test_a_healthy_fit_does_not_go_on(prepared):
    _, model, fit = prepared("regression")
    with mock.patch.object(Nuts, "draw", autospec=True, side_effect=Nuts.draw) as draw:
        again = fw.fit(model, seed=fit.seed, progress=False)
    assert draw.call_count == 1 and again.thin == 1 and again.settled


class DivergesAtFirst:
    """Chains that are settled from the start, of which some transitions diverge until finer."""

    collapsed = finest = uncorrelated = False
    gradients, step_size = 0, np.ones(4)

    def __init__(self, *_):
        self.caution, self.positions = 0, np.zeros((4, 0, 2))
        self.divergent = np.zeros((4, 0), bool)
        self.rng = np.random.default_rng(0)

    def warm_up(self, iterations):
        pass

    @property
    def drawn(self):
        return self.positions.shape[1]

    def draw(self, count):
        new = self.rng.normal(size=(4, count, 2))
        diverged = np.arange(count) < (3 if self.caution == 0 else 0)
        self.positions = np.concatenate([self.positions, new + 10.0 * self.caution], axis=1)
        self.divergent = np.concatenate([self.divergent, np.tile(diverged, (4, 1))], axis=1)

    def retune(self, covariance, starts, caution):
        self.caution = caution


def test_a_few_divergences_in_a_thousand_call_for_finer_steps():
    """Although chains agree; draws of the longer steps, which miss something, are not kept."""
    with mock.patch.object(full_data, "Nuts", DivergesAtFirst):
        run = full_data.draw_nuts(flat_sum(1.0), np.zeros((4, 2)), 1000, 1000, 1, None)
    assert run.divergences == 0 and run.positions.shape == (4, 1000, 2)
    assert abs(run.positions.mean() - 10.0) < 0.1


def test_folds_of_a_fit_that_diverged_begin_with_finer_steps(prepared):
    problem, model, fit = prepared("regression")
    accepted = [
        by_chains(model, problem.folds, fit=one, seed=1, progress=False).folds["acceptance"].mean()
        for one in (fit, replace(fit, divergences=1))
    ]
    assert accepted[0] < 0.92 < 0.93 < accepted[1]


def test_divergences_of_a_thinned_fit_are_a_share_of_all_transitions(rng):
    positions = rng.normal(size=(4, 1000, 1))
    assert fw.Fit(positions, (0.0, 0.0), np.ones(4), 60, 1, thin=4).settled
    assert not fw.Fit(positions, (0.0, 0.0), np.ones(4), 60, 1, thin=2).settled


def flat_sum(prior_sd=np.inf):
    y = np.random.default_rng(0).normal(1.0, 1.0, 20)
    return fw.Model(
        lambda q: -0.5 * jnp.sum((q / prior_sd) ** 2),
        lambda q: -0.5 * (y - q[0] - q[1]) ** 2,
        np.zeros(2),
        20,
        name="sum",
    )


def flat_unused():
    return fw.Model(lambda q: -0.5 * q[0] ** 2, lambda q: q[0] * np.ones(3), np.zeros(2), 3)


def flat_ray():
    """Separated classes: the likelihood rises for ever."""
    x = np.array([-2.0, -1.0, 0.5, 1.5])
    return fw.Model(
        lambda b: 0.0 * b, lambda b: -jnp.logaddexp(0.0, -b * np.abs(x)), 0.1, 4, name="ray"
    )


@pytest.mark.parametrize("build", [flat_sum, flat_unused, flat_ray])
def test_an_improper_posterior_is_refused_soon(build, seed):
    model, began = build(), time.perf_counter()
    with pytest.raises(FitError, match="improper: no answer exists"):
        by_chains(model, fw.leave_one_out(model.n_obs), seed=seed, progress=False)
    assert time.perf_counter() - began < 60.0


def test_wide_priors_are_not_improper(seed):
    fit = fw.fit(flat_sum(1e3), seed=seed, progress=False)
    assert np.all(fit.flat.std(axis=0) > 400.0) and fit.settled


def test_folds_do_not_start_from_a_failed_fit(prepared, rng):
    problem, model, fit = prepared("regression")
    apart = 100.0 * np.arange(4)[:, None, None]
    for positions, reason in ((fit.positions + apart, "R-hat is"), (0 * fit.positions, "not move")):
        bad = fw.Fit(positions, fit.fingerprint, fit.step_size, 0, 1, made_elsewhere=False)
        with (
            mock.patch.object(fw.Fit, "check"),
            pytest.raises(FitError, match=f"fit of regression has failed: .*{reason}"),
        ):
            by_chains(model, problem.folds, fit=bad, progress=False)


def test_leapfrog_steps_have_a_limit():
    assert leapfrog_counts(9e-9, 0, 50).max() == MOST_STEPS


def made_elsewhere(problem, rng, rows=slice(None), noise=1.0, prior=1.0, shift=0.0, scale=1.0):
    """Draws of the closed-form posterior of a problem, or of another."""
    X, y, sd = problem.X[rows], problem.y[rows], noise * problem.noise
    covariance = np.linalg.inv(X.T @ X / sd**2 + np.diag((prior * problem.prior) ** -2.0))
    mean, root = covariance @ X.T @ y / sd**2, np.linalg.cholesky(covariance)
    mean = mean + shift * np.sqrt(np.diag(covariance))
    positions = mean + scale * rng.normal(size=(4, 1000, len(mean))) @ root.T
    return fw.Fit(positions, (0.0, 0.0), np.full(4, np.nan), 0, 1)


WRONG = {
    "prior": {"rows": slice(0)},
    "half of the rows": {"rows": slice(0, None, 2)},
    "another prior": {"prior": 0.25},
    "another noise": {"noise": 1.2},
    "shifted": {"shift": 0.5},
    "one parameter wrong": {"shift": np.array([0.0, 0.0, 0.0, 1.0])},
    "too wide": {"scale": 1.3},
    "too narrow": {"scale": 0.7},
    # as far from the mean on average, so that the log density tells nothing
    "wide in one direction, narrow in another": {"scale": np.sqrt([1.7, 0.3, 1.0, 1.0])},
}


@pytest.mark.parametrize("case", WRONG)
def test_draws_of_another_posterior_are_refused(prepared, rng, case):
    problem, model, _ = prepared("regression")
    with pytest.raises(ValueError, match="chains that start at them go elsewhere"):
        check_draws(model, made_elsewhere(problem, rng, **WRONG[case]), 1)


def test_draws_of_the_posterior_pass(prepared, rng):
    problem, model, _ = prepared("regression")
    for k in range(10):
        check_draws(model, made_elsewhere(problem, rng), k)


def test_wide_draws_of_a_mean_are_refused(rng):
    """Thirty rows of N(mu, 1) with draws of the prior."""
    problem = problems.normal_mean()
    fit = made_elsewhere(problem, rng, rows=slice(0))
    model = problem.model()
    with mock.patch.object(fw.Fit, "check"), pytest.raises(ValueError, match="must be of this mod"):
        by_chains(model, problem.folds, fit=fit, progress=False)


def test_draws_of_no_density_are_refused(rng):
    model = fw.Model(
        lambda x: -0.5 * x**2,
        lambda x: jnp.where(x > 0, -x, -jnp.inf) * np.ones(3),
        1.0,
        3,
    )
    fit = fw.Fit(rng.normal(size=(4, 100, 1)), (0.0, 0.0), np.full(4, np.nan), 0, 1)
    with pytest.raises(ValueError, match="its density is zero or not a number"):
        check_draws(model, fit, 1)
