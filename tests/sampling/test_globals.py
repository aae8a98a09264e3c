"""The globals sampled alone: their density, their draws, mixtures, and refits of folds."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from effects import Effects, Group
from hard import EightSchools, common_mean
from problems import FarScale, LinearProblem, far_groups

import foldwise as fw
from foldwise.models.structure import find_cells, without_cells
from foldwise.sampling import globals as globals_module
from foldwise.sampling import refits
from foldwise.sampling.full_data import full_data_fit
from foldwise.sampling.globals import Marginal, draw_globals
from foldwise.sampling.proposals import Mixture, climb, fitted, share_of
from foldwise.scores.cells import NORMAL_STEPS, STEPS
from foldwise.scores.diagnostics import by_parameter
from foldwise.scores.importance import by_importance
from foldwise.scores.integrals import conditional_draws
from foldwise.scores.weighing import FullSample
from foldwise.support.keeping import Finished, Keeper
from foldwise.support.progress import Progress

QUIET = Progress(False)
SCHOOLS = EightSchools()


def log_marginal(mu, log_tau, rows):
    """Log density of mu, log tau and the rows, the schools' effects integrated out."""
    variance = SCHOOLS.sigma[rows] ** 2 + np.exp(2 * log_tau)[:, None]
    prior = -0.5 * (mu / 5) ** 2 + log_tau - np.log1p((np.exp(log_tau) / 5) ** 2)
    away = SCHOOLS.y[rows] - mu[:, None]
    return prior - 0.5 * np.sum(away**2 / variance + np.log(variance), axis=1)


@pytest.mark.parametrize("left_out", [[], [0, 5]])
@pytest.mark.parametrize("centred", [True, False])
def test_density_of_the_globals(centred, left_out):
    model = EightSchools(centred).model()
    rng, keep = np.random.default_rng(1), ~np.isin(np.arange(8), left_out)
    structure = find_cells(model, model.probes())
    marginal = Marginal(model, structure, model.probes(), keep)
    # flat positions are sorted by name: log tau, mu, theta
    points = np.column_stack([rng.normal(1, 2, 50), rng.normal(4, 4, 50)])
    found = marginal(points)
    exact = log_marginal(points[:, 1], points[:, 0], keep)
    np.testing.assert_allclose(np.ptp(found - exact), 0.0, atol=1e-7)
    value, slope = marginal.slopes(points[:3])
    np.testing.assert_allclose(value, found[:3])
    ahead = [
        (log_marginal(*(points[:3] + 1e-5 * e).T[::-1], keep) - exact[:3]) / 1e-5 for e in np.eye(2)
    ]
    np.testing.assert_allclose(slope, np.transpose(ahead), rtol=1e-3, atol=1e-3)


def on_a_grid():
    """Moments of log tau, mu and theta_1 of the centred eight schools, without sampling.

    Given tau, mu is normal, and theta_1 given both.
    """
    log_tau = np.arange(-12.0, 8.0, 0.02)
    tau2, sigma2 = np.exp(2 * log_tau)[:, None], SCHOOLS.sigma**2
    prior = log_tau - np.log1p((np.exp(log_tau) / 5) ** 2)
    weight = scipy.special.softmax(prior + common_mean(SCHOOLS.y, sigma2 + tau2, 5.0))
    precision = (1 / (sigma2 + tau2)).sum(axis=1) + 1 / 25
    mu = (SCHOOLS.y / (sigma2 + tau2)).sum(axis=1) / precision
    # theta_1 = share y_1 + (1 - share) mu + noise
    share = (tau2 / (tau2 + sigma2))[:, 0]
    theta = share * SCHOOLS.y[0] + (1 - share) * mu
    within = (1 - share) ** 2 / precision + share * sigma2[0]
    means = [weight @ value for value in (log_tau, mu, theta)]
    extra = (0.0, 1 / precision, within)
    squares = [weight @ (v**2 + e) for v, e in zip((log_tau, mu, theta), extra, strict=True)]
    return np.array(means), np.sqrt(np.array(squares) - np.array(means) ** 2)


def test_draws_of_a_funnel_are_those_of_a_grid():
    mean, sd = on_a_grid()
    found = full_data_fit(SCHOOLS.model(), 3, QUIET, marginal=True)
    assert not found.problems() and np.nanmin(found.ess) > 1000
    assert found.rhat.shape == (2,) and (found.sampled == [0, 1]).all()  # log tau and mu
    draws = found.flat[:, :3]
    ess = by_parameter("ess", found.positions[..., :3])
    assert ess[2] > 1000 and (ess[:2] == found.ess).all()
    error = sd / np.sqrt(ess)
    assert (np.abs(draws.mean(axis=0) - mean) < 4 * error).all()
    # log tau has a long tail: the error of its sd is larger than that of a normal variable
    assert (np.abs(draws.std(axis=0) / sd - 1) < 4 * np.sqrt(2 / ess)).all()


def many_shared(slopes=20, groups=40, each=6):
    """A linear model with slopes that all rows share and an effect for every group."""
    rng = np.random.default_rng(8)
    x = rng.normal(size=(groups * each, slopes)) @ rng.normal(size=(slopes, slopes))
    effect = np.repeat(np.eye(groups), each, axis=0)
    y = rng.normal(size=len(x)) + 0.7 * effect @ rng.normal(size=groups)
    scale, folds = np.r_[np.ones(slopes), np.full(groups, 0.7)], fw.leave_one_out(len(y))
    return LinearProblem(np.column_stack([x, effect]), y, 1.0, scale, folds, "many shared")


def test_many_globals_that_hang_together_have_a_mixture():
    of = many_shared()
    fit = full_data_fit(of.model(), 2, QUIET, marginal=True)
    assert not fit.problems() and (fit.sampled == np.arange(20)).all()
    assert fit.ess.min() > 1000
    covariance = np.linalg.inv(of.X.T @ of.X + np.diag(1 / of.prior**2))
    mean, sd = covariance @ (of.X.T @ of.y), np.sqrt(np.diag(covariance))
    ess = by_parameter("ess", fit.positions)
    assert (np.abs(fit.flat.mean(axis=0) - mean) < 4.5 * sd / np.sqrt(ess)).all()
    assert (np.abs(fit.flat.std(axis=0) / sd - 1) < 4.5 * np.sqrt(0.5 / ess)).all()


@pytest.mark.parametrize(
    "kind, steps", [("normal", 0), ("binomial", NORMAL_STEPS), ("Bernoulli", STEPS)]
)
def test_cells_are_drawn_by_as_many_steps_as_their_conditionals_ask_for(kind, steps, monkeypatch):
    of, taken = Effects([Group(1, kind, rows=5) for _ in range(6)]), []

    def seen(*given):
        taken.append(given[4])
        return conditional_draws(*given)

    monkeypatch.setattr(globals_module, "conditional_draws", seen)
    assert draw_globals(of.model, 1, QUIET) is not None
    assert taken == [steps]


def test_effects_of_large_counts_are_not_taken_for_normal():
    """Three nodes see nothing of what one lacks there; modes are off by 1 / (2 sqrt(y)) sds."""
    y = np.round(np.exp(np.linspace(6.1, 10.0, 60)))

    def log_likelihood(p):
        return y * p["u"] - jnp.exp(p["u"])

    def log_prior(p):
        away = (p["u"] - p["mu"]) * jnp.exp(-p["log_tau"])
        shared = ((p["mu"] - 8.0) / 2.0) ** 2 + p["log_tau"] ** 2
        return -0.5 * (jnp.sum(away**2) + shared) - 60 * p["log_tau"]

    start = {"log_tau": 0.0, "mu": 8.0, "u": np.log(y)}
    drawn = draw_globals(fw.Model(log_prior, log_likelihood, start, 60), 1, QUIET)
    flat = drawn.positions.reshape(-1, 62)
    tau, mu, u = np.exp(flat[:, 0, None]), flat[:, 1, None], flat[:, 2:]
    grid = np.log(y) + np.linspace(-8, 8, 401)[:, None, None] / np.sqrt(y)
    density = y * grid - np.exp(grid) - 0.5 * ((grid - mu) / tau) ** 2
    weight = np.exp(density - density.max(axis=0))
    mean = (weight * grid).sum(axis=0) / weight.sum(axis=0)
    z = ((u - mean) * np.sqrt(y)).mean(axis=0) * np.sqrt(len(flat))
    assert np.abs(z).max() < 4.5 and abs(z.sum()) < 4.0 * np.sqrt(60)


def test_effects_with_heavy_tails_are_integrated_out_of_the_fit():
    """Against a grid over log tau, mu and the effects of four groups, one of them far away."""
    of = Effects([Group(1, "normal", "Student-t", rows=3) for _ in range(4)])
    of.y[0] += 4.0
    axes = np.linspace(-4.0, 4.0, 41), np.linspace(-4.0, 4.0, 41)
    log_tau, mu = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))
    z = np.sinh(np.linspace(-8.0, 8.0, 1601))
    width = np.log(np.cosh(np.arcsinh(z)) * 0.01) - 2.5 * np.log1p(z**2 / 4.0)
    value = -0.5 * (log_tau**2 + mu**2)
    for y in of.y:
        eta = mu[:, None] + np.exp(log_tau)[:, None] * z
        rows = sum(-0.5 * ((one - eta) / 0.7) ** 2 for one in y)
        value += scipy.special.logsumexp(rows + width, axis=1)
    model = of.model
    marginal = Marginal(model, find_cells(model, model.probes()), model.probes(), bent=True)
    marginal.nodes = 45
    some = np.flatnonzero(value > value.max() - 12.0)[::10]
    found = marginal(np.column_stack([log_tau, mu])[some])
    np.testing.assert_allclose(np.ptp(found - value[some]), 0.0, atol=1e-4)
    fit = full_data_fit(model, 3, QUIET, marginal=True)
    assert not fit.problems() and (fit.sampled == [0, 1]).all()
    weight = scipy.special.softmax(value)
    for k, exact in enumerate((log_tau, mu)):
        mean = weight @ exact
        sd = np.sqrt(weight @ (exact - mean) ** 2)
        assert abs(fit.flat[:, k].mean() - mean) < 4 * sd / np.sqrt(fit.ess[k])


def test_where_the_globals_are_not_sampled_alone():
    assert draw_globals(far_groups(1.0).model(), 0, QUIET) is not None
    no_cells = LinearProblem(np.ones((20, 1)), np.zeros(20), 1.0, np.ones(1), None, "mean")
    assert draw_globals(no_cells.model(), 0, QUIET) is None
    assert draw_globals(FarScale(1.0, spare=40).model(), 0, QUIET) is None


class TwoModes:
    """0.3 N((-6, 0), I) + 0.7 N((6, 0), I)."""

    def __call__(self, points):
        parts = [
            np.log(weight) - 0.5 * ((points - [at, 0.0]) ** 2).sum(axis=1)
            for weight, at in ((0.3, -6.0), (0.7, 6.0))
        ]
        return scipy.special.logsumexp(parts, axis=0)

    def slopes(self, points):
        step = 1e-5 * np.eye(2)
        ahead = [(self(points + s) - self(points - s)) / 2e-5 for s in step]
        return self(points), np.transpose(ahead)


def test_two_modes_are_found_and_weighed():
    rng = np.random.default_rng(2)
    modes = climb(TwoModes(), rng.normal(scale=5.0, size=(8, 2)))
    assert sorted(np.round(modes.points[:, 0])) == [-6, 6]
    proposal = fitted(TwoModes(), Mixture.of(modes), rng)
    points = proposal.draw(rng, 4000)
    log_ratio = TwoModes()(points) - proposal.log_density(points)
    assert share_of(log_ratio) > 0.6
    left = scipy.special.softmax(log_ratio) @ (points[:, 0] < 0)
    assert abs(left - 0.3) < 4 * np.sqrt(0.21 / (share_of(log_ratio) * 4000))


class Sheer:
    """A slope that turns by a right angle, but for rounding, at the first step, the last one up."""

    def __init__(self):
        self.value = 0.0

    def slopes(self, points):
        self.value = self.value + 1.0 if self.value < 2.0 else 0.0
        slope = [1.0, 0.0] if self.value == 1.0 else [1.0 - 2e-10, 5.0]
        return np.full(len(points), self.value), np.tile(slope, (len(points), 1))


def test_a_step_across_the_slope_tells_no_curvature():
    """With it the covariance of the mode was 1e20 in one direction, and none in the other."""
    modes = climb(Sheer(), np.zeros((1, 2)))
    assert np.linalg.cond(modes.covariance[0]) < 100
    assert np.isfinite(Mixture.of(modes).factor).all()


@pytest.mark.parametrize("distance", [6.0, 60.0])
def test_a_group_far_away_is_refitted(distance):
    """Exact however far it is, with errors that say how exact."""
    problem = FarScale(distance)
    model, exact, z, totals = problem.model(), problem.joint(), [], []
    for seed in range(6):
        result = fw.cross_validate(model, problem.folds, seed=seed, progress=False)
        assert result.folds["method"].values.tolist() == ["refit"] + 7 * ["importance"]
        assert (result.folds["status"] == "fine").all()
        z.append(((result.folds["elpd"] - exact) / result.folds["mcse"]).values)
        totals.append((result.elpd - exact.sum()) / result.mcse)
        own, shared = result.score("log").own_variance, result.score("log").full_variance
        assert own == pytest.approx(result.folds["mcse"].values[0] ** 2)
        assert result.mcse == pytest.approx(np.sqrt(own + shared))
    assert np.abs(z).max() < 4 and np.sqrt(np.mean(np.square(totals))) < 1.9
    assert "\n1 fold: refitted, the weights being uneven\n" in str(result)
    assert "importance weights, those of refits too: Pareto k up to" in str(result)


def test_an_outlier_of_a_regression_is_refitted():
    """No cells: all of a handful of parameters are sampled anew, rows one by one too."""
    rng = np.random.default_rng(4)
    X = np.column_stack([np.ones(30), rng.normal(size=(30, 2))])
    X[0, 1] = 12.0  # leverage
    y = X @ [1.0, 0.5, -0.5] + rng.normal(size=30)
    y[0] += 15.0
    folds = fw.k_fold(30, 10, seed=1)
    problem = LinearProblem(X, y, 1.0, np.full(3, 3.0), folds, "leverage")
    result = fw.cross_validate(
        problem.model(), folds, scores=("log", "log_pointwise"), seed=1, progress=False
    )
    assert sorted(set(result.folds["method"].values)) == ["importance", "refit"]
    for score, exact in (("log", problem.joint()), ("log_pointwise", problem.pointwise())):
        table = result.score(score).folds
        assert np.abs((table["elpd"] - exact) / table["mcse"]).max() < 4
    assert (result.folds["status"] == "fine").all()


@pytest.mark.parametrize("spare, method", [(0, "refit"), (15, "importance")])
def test_weights_worth_half_of_the_draws_serve_where_a_refit_is_not_cheap(spare, method):
    """A mean of 30 values, one of them 4.5 sds away, and 0 or 15 parameters of the prior alone."""
    X = np.column_stack([np.ones(30), np.zeros((30, spare))])
    y = np.random.default_rng(2).normal(size=30)
    y[0] = y.mean() + 4.5
    folds = fw.leave_one_out(30)
    problem = LinearProblem(X, y, 1.0, np.full(1 + spare, 3.0), folds, "outlier")
    # log w = a z + h z^2 / 2 of the outlier: its leverage h and a^2 = h r^2, r what is left of it
    h = 1.0 / (30 + 1 / 9)
    a2 = h * (y[0] - h * y.sum()) ** 2
    share = np.sqrt(1 - 2 * h) / (1 - h) * np.exp(a2 / (1 - h) - 2 * a2 / (1 - 2 * h))
    assert 0.45 < share < 0.6
    result = fw.cross_validate(problem.model(), folds, seed=1, progress=False)
    assert result.folds["method"].values.tolist() == [method] + 29 * ["importance"]
    z = (result.folds["elpd"] - problem.joint()) / result.folds["mcse"]
    assert np.abs(z).max() < 4 and (result.folds["status"] == "fine").all()


@pytest.mark.parametrize("serve, tried", [(set(), 4), ({3}, 10)])
def test_refits_that_serve_none_of_the_first_folds_are_given_up(monkeypatch, rng, serve, tried):
    X, y = np.column_stack([np.ones(30), rng.normal(size=30)]), rng.normal(size=30)
    folds = fw.k_fold(30, 10, seed=1)
    model = LinearProblem(X, y, 1.0, np.full(2, 3.0), folds, "plain").model()
    covariance = np.linalg.inv(X.T @ X + np.eye(2) / 9)
    positions = rng.multivariate_normal(covariance @ X.T @ y, covariance, 400)
    draws = FullSample(positions, 4, 10)
    found = by_importance(model, without_cells(model), folds, draws, ("log",), False)
    found = replace(found, used=np.zeros(10, bool))
    asked, refitted = [], refits._refitted

    def counted(full, around, fold, *rest):
        asked.append(int(fold.index[0]))
        return refitted(full, around, fold, *rest) if asked[-1] in serve else None

    monkeypatch.setattr(refits, "_refitted", counted)
    monkeypatch.setattr(refits, "_layers_of_draws", lambda full, rng: None)
    stages = [Finished(Keeper(), name) for name in ("refit", "layers")]
    found = refits.with_refits(model, folds, found, 1, QUIET, stages)
    assert asked == list(range(tried))
    assert set(np.flatnonzero(found.used)) == serve


def test_saved_merged_and_extended(tmp_path):
    problem = FarScale(6.0)
    model, folds = problem.model(), problem.folds
    whole = fw.cross_validate(model, folds, seed=1, progress=False)
    whole.save(tmp_path / "refits.nc")
    again = fw.load(tmp_path / "refits.nc")
    assert (again.elpd, again.mcse, str(again)) == (whole.elpd, whole.mcse, str(whole))
    parts = [
        fw.cross_validate(model, some, seed=1, progress=False) for some in (folds[:4], folds[4:])
    ]
    merged = fw.merge(parts)
    assert merged.elpd == pytest.approx(whole.elpd, abs=1e-9)
    assert merged.mcse == pytest.approx(whole.mcse, abs=1e-9)
    with pytest.raises(ValueError, match="pass a longer fit"):
        whole.extend(100)
