"""Scoring rules against closed forms, numerical integration and another library's answers."""

import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import scoringrules
from problems import by_chains
from scipy import stats

import foldwise as fw
from foldwise.results.result import FoldWarning
from foldwise.results.totals import total_units
from foldwise.scores import hyvarinen, rules
from foldwise.scores.rules import Context, Drawn, Sample, column, jackknife

BY_DRAWS = ("hyvarinen", "dss", "dss_pointwise", "mse", "rmse", "mae", "r2")
SINGLE = (*BY_DRAWS, "crps", "scrps", "interval", "interval_0.5")
SEVERAL = (*SINGLE, "hyvarinen_pointwise", "energy")
# heavy weights of whole groups, row by row, are flagged and not tested for their value
GROUPS = tuple(name for name in SEVERAL if name != "hyvarinen_pointwise")
CASES = {
    "normal_mean": SINGLE,
    "five_fold": SEVERAL,
    "blocked": SINGLE,
    "autoregression": SINGLE,
    "long_horizon": SEVERAL,
    "hierarchical": GROUPS,
}


@pytest.fixture(scope="module")
def results(prepared, seed):
    """results(name, scores, memory), each made once."""
    done = {}

    def get(name, scores, memory="draws"):
        if (name, scores, memory) not in done:
            problem, model, fit = prepared(name)
            done[name, scores, memory] = by_chains(
                model, problem.folds, fit, scores, memory=memory, seed=seed, progress=False
            )
        return done[name, scores, memory]

    return get


# ---------------------------------------------------------------- exact answers


@pytest.mark.parametrize("name, score", [(n, s) for n, scores in CASES.items() for s in scores])
def test_within_four_errors_of_the_truth(prepared, results, name, score):
    problem, found = prepared(name)[0], results(name, CASES[name]).score(score)
    large = score == "dss" and problem.folds.n_test.max() > rules.MOST_JOINT_ROWS
    exact = "dss_pointwise" if large else score
    z = (found.folds["score"].values - problem.exact(exact)) / found.folds["mcse"].values
    assert np.abs(z).max() < 4
    assert abs(found.total - problem.exact_total(exact)) < 4 * found.mcse
    assert 0 < found.mcse < 0.5 * abs(found.total) and found.se > 0


@pytest.mark.parametrize("name", CASES)
def test_online_equals_stored(results, name):
    names = tuple(s for s in CASES[name] if s not in problems.STORED)
    stored, online = results(name, CASES[name]), results(name, names, "online")
    assert online.run.evidence.outcomes.replicate is None and online.draws is None
    for score in names:
        one, two = stored.score(score), online.score(score)
        np.testing.assert_allclose(one.folds["score"], two.folds["score"], rtol=1e-9)
        assert one.mcse == pytest.approx(two.mcse, rel=1e-9)
    np.testing.assert_array_equal(stored.pit(), online.pit())


def test_hyvarinen_of_the_method_note():
    # y | theta ~ N(theta, 1), theta ~ N(0.3, 0.8^2), y = 1.5: 2 / v - (y - m)^2 / v^2 = 0.68412
    rng = np.random.default_rng(1)
    d = rng.normal(0.3, 0.8, (1, 4, 200_000)) - 1.5
    weight = np.exp(-0.5 * d**2)[..., None]
    features = hyvarinen._curvature(
        _drawn(np.zeros(d.shape), [1.5], first=d, second=-np.ones(d.shape))
    )
    means = (weight * features).mean(axis=(1, 2))
    nothing = Context(np.zeros(1), np.ones(1, int), np.zeros(0))
    assert hyvarinen.hyvarinen(means, nothing) == pytest.approx(0.68412, abs=0.01)
    unweighted = features.mean(axis=(1, 2))
    assert hyvarinen.hyvarinen(unweighted, nothing) == pytest.approx(-0.72, abs=0.02)


def test_single_rows_make_joint_and_row_scores_alike(results):
    found = results("normal_mean", ("dss", "dss_pointwise", "hyvarinen", "hyvarinen_pointwise"))
    for score in ("dss", "hyvarinen"):
        one, two = found.score(score), found.score(f"{score}_pointwise")
        np.testing.assert_allclose(one.folds["score"], two.folds["score"], rtol=1e-9)
        assert one.mcse == pytest.approx(two.mcse, rel=1e-9)


def test_bridge_partners_lower_the_error_of_hyvarinen(prepared, results, seed):
    problem, model, fit = prepared("five_fold")
    plain = by_chains(
        model, problem.folds, fit, ("hyvarinen",), estimator="mean", seed=seed, progress=False
    ).score("hyvarinen")
    z = (plain.folds["score"].values - problem.exact("hyvarinen")) / plain.folds["mcse"].values
    assert np.abs(z).max() < 4
    assert results("five_fold", SEVERAL).score("hyvarinen").mcse < 0.8 * plain.mcse


# ---------------------------------------------------------------- other models, by integration


def check(model, scores, exact, seed, also=()):
    """Every fold of each score within 4.5 errors of ``exact``; returns the result."""
    folds = fw.leave_one_out(model.n_obs)
    fit = fw.fit(model, seed=seed + 5, progress=False)
    names = (*scores, *also)
    found = by_chains(model, folds, fit, names, draws=200, seed=seed, progress=False)
    for score in scores:
        table = found.score(score).folds
        error = table[column(score)].values - exact[score]
        assert (np.abs(error) < 4.5 * table["mcse"].values + 1e-12).all(), score
    return found


def test_student_t(seed):
    nu, y = 10.0, np.array([0.3, -1.2, 2.5, 0.8, 0.1, -0.4, 1.9, -2.2, 0.6, 1.1, -0.3, 3.5])
    grid = np.linspace(-4, 5, 1801)

    def row_log_density(mu, y):
        return jax.scipy.stats.t.logpdf(y, nu, loc=mu)

    model = fw.Model(
        lambda mu: -0.5 * (mu / 2.0) ** 2,
        None,
        0.0,
        len(y),
        simulate=lambda key, mu: mu + jax.random.t(key, nu, (len(y),)),
        row_log_density=row_log_density,
        y=y,
    )
    weight = problems.grid_posterior(
        lambda mu: -0.5 * (mu / 2) ** 2, lambda mu: stats.t.logpdf(y, nu, mu), grid
    )
    z = y[:, None] - grid
    density = (weight * stats.t.pdf(z, nu)).sum(axis=1)
    slope = -(nu + 1) * z / (nu + z**2)
    curve = -(nu + 1) * (nu - z**2) / (nu + z**2) ** 2
    first = (weight * stats.t.pdf(z, nu) * slope).sum(axis=1) / density
    second = (weight * stats.t.pdf(z, nu) * (curve + slope**2)).sum(axis=1) / density
    mean = weight @ grid
    variance = weight @ grid**2 - mean**2 + nu / (nu - 2)
    x = np.linspace(-40, 40, 16001)
    at = stats.t.cdf(x[:, None] - grid[::10], nu)
    below = np.stack([at @ (w / w.sum()) for w in weight[:, ::10]])
    ends = np.stack([np.interp([0.05, 0.95], f, x) for f in below])
    outside = np.maximum(ends[:, 0] - y, 0) + np.maximum(y - ends[:, 1], 0)
    exact = {
        "log": np.log(density),
        "hyvarinen": first**2 - 2 * second,
        "dss": -np.log(variance) - (y - mean) ** 2 / variance,
        "mse": (y - mean) ** 2,
        "crps": -np.trapezoid((below - (x >= y[:, None])) ** 2, x, axis=1),
        "interval": -(ends[:, 1] - ends[:, 0]) - 20 * outside,
    }
    found = check(model, tuple(exact), exact, seed)
    expected = np.array([np.interp(v, x, f) for v, f in zip(y, below, strict=True)])
    error, draws = found.pit().values - expected, found.info["chains"] * found.info["draws"]
    # beyond an outlier there may be no draw at all: its error is that of a rare event
    rare = np.sqrt(expected * (1.0 - expected) / draws)
    mcse = found.calibration["mcse"].values
    assert (mcse >= 1.0 / draws).all()
    assert (np.abs(error) < 4.5 * np.maximum(mcse, rare) + 1e-3).all()


def poisson(dtype=int):
    y = np.array([3, 0, 5, 2, 2, 7, 1, 4, 3, 2]).astype(dtype)
    return fw.Model(
        lambda a: -0.5 * (a - 1.0) ** 2,
        None,
        1.0,
        len(y),
        simulate=lambda key, a: jax.random.poisson(key, jnp.exp(a), (len(y),)),
        row_log_density=lambda a, y: y * a - jnp.exp(a) - jax.scipy.special.gammaln(y + 1.0),
        y=y,
        name="poisson",
    )


def test_poisson(seed):
    model = poisson()
    y, grid = model.y, np.linspace(-1, 3, 1601)
    weight = problems.grid_posterior(
        lambda a: -0.5 * (a - 1) ** 2, lambda a: stats.poisson.logpmf(y, np.exp(a)), grid
    )
    counts = np.arange(80)
    mass = weight @ stats.poisson.pmf(counts, np.exp(grid)[:, None])
    below = mass.cumsum(axis=1)
    mean = mass @ counts
    away = (mass * np.abs(counts - y[:, None])).sum(axis=1)
    apart = np.einsum("ri,rj,ij->r", mass, mass, np.abs(counts[:, None] - counts))
    own = mass[np.arange(len(y)), y]
    exact = {
        "log": np.log(own),
        "mse": (y - mean) ** 2,
        "mae": np.abs(y - mean),
        "crps": 0.5 * apart - away,
        "scrps": -away / apart - 0.5 * np.log(apart),
    }
    assert exact["crps"] == pytest.approx(-((below - (counts >= y[:, None])) ** 2).sum(axis=1))
    found = check(model, tuple(exact), exact, seed)
    table = found.calibration
    error = table["below"] + 0.5 * table["equal"] - (below[np.arange(len(y)), y] - 0.5 * own)
    assert (np.abs(error.values) < 4.5 * table["mcse"].values).all()
    # randomised between the two ends of the step
    pit = np.stack([found.pit(seed=s) for s in range(200)])
    low, step = table["below"].values, table["equal"].values
    assert (pit >= low).all() and (pit <= low + step).all()
    np.testing.assert_allclose(pit.mean(axis=0), low + step / 2, atol=0.15 * step.max())


@pytest.mark.parametrize("classes", [2, 3])
def test_classes(seed, classes):
    problem = problems.Classes(classes)
    if classes == 2:
        at_y = problem.probability[np.arange(24), problem.y]
        assert problem.exact("brier") == pytest.approx(-((1 - at_y) ** 2))
    exact = {name: problem.exact(name) for name in ("brier", "log")}
    found = check(problem.model(), ("brier", "log"), exact, seed, also=("accuracy",))
    accuracy, brier = found.score("accuracy"), found.score("brier")
    # without a density, from predictive draws: the same, with more noise
    counted = replace(
        problem.model(),
        log_likelihood=problem.model().log_likelihood,
        row_log_density=None,
    )
    rough = run(counted, ("brier", "accuracy"), fit=None, seed=seed).score("brier")
    assert abs(rough.total - problem.exact_total("brier")) < 4 * rough.mcse
    assert brier.mcse < 0.5 * rough.mcse
    assert abs(accuracy.total - problem.exact_total("accuracy")) <= 4 * accuracy.mcse + 1e-12
    assert accuracy.total == pytest.approx(accuracy.folds["score"].mean().item())
    assert brier.total == pytest.approx(brier.folds["score"].mean().item())


# ---------------------------------------------------------------- against another library


def _drawn(replicate, observed, batch=1, counts=None, first=None, second=None, classes=()):
    replicate, observed = np.asarray(replicate, float), np.asarray(observed, float)
    counts = np.ones(len(observed), int) if counts is None else np.asarray(counts)
    return Drawn(
        counts,
        observed,
        {"replicate": replicate, "first": first, "second": second},
        int(counts.max()),
        np.asarray(classes),
        batch,
    )


def context(y, counts=None):
    counts = np.ones(len(y), int) if counts is None else np.asarray(counts)
    return Context(np.asarray(y), counts, np.zeros(0))


def test_crps_is_the_fair_estimator(rng):
    x, y = rng.gamma(2.0, size=(5, 4, 25)), rng.normal(size=5)
    means = rules._absolute_differences(_drawn(x, y)).mean(axis=(1, 2))
    found = rules._ranked_probability(means, context(y))
    fair = scoringrules.crps_ensemble(y, x.reshape(5, -1), estimator="fair")
    np.testing.assert_allclose(found, -fair, rtol=1e-12)


def test_energy_is_the_fair_estimator(rng):
    x, y = rng.normal(size=(7, 4, 15)), rng.normal(size=7)
    means = rules._norms(_drawn(x, y, counts=[3, 4])).mean(axis=(1, 2))
    found = rules._ranked_probability(means, context(y))
    for k, rows in enumerate((slice(0, 3), slice(3, 7))):
        points = x[rows].reshape(rows.stop - rows.start, -1).T
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            fair = scoringrules.energy_score(y[rows], points, estimator="fair")
        assert found[k] == pytest.approx(-fair, rel=1e-9)


@pytest.mark.parametrize("draws", [20, 23])
def test_mean_distances_are_over_pairs_of_different_batches(rng, draws):
    x = rng.normal(size=(2, 3, draws))
    found = rules._absolute_differences(_drawn(x, [0.0, 1.0], batch=5))[..., 1].mean(axis=(1, 2))
    batch = np.stack([np.arange(draws) // 5 + 100 * chain for chain in range(3)]).ravel()
    apart = batch[:, None] != batch
    for row in range(2):
        flat = x[row].ravel()
        expected = np.abs(flat[:, None] - flat)[apart].mean()
        assert found[row] == pytest.approx(expected, rel=1e-12)
    vectors = rules._norms(_drawn(x, [0.0, 1.0], batch=5, counts=[1, 1]))[..., 1].mean(axis=(1, 2))
    np.testing.assert_allclose(vectors, found, rtol=1e-9)


def test_interval_score(rng):
    x, y = rng.normal(size=(6, 4, 100)), np.array([-3.0, -1.0, 0.0, 0.5, 2.0, 4.0])
    rule = rules.find_rule("interval_0.8")
    total = rule.contribution.features(_drawn(x, y)).reshape(6, 4, 10, 10, 2).sum(axis=3)
    value, _ = rule.finish(Sample(total, 10, 100, 10), context(y))
    low, high = np.quantile(x.reshape(6, -1), [0.1, 0.9], axis=1, method="normal_unbiased")
    exact = -scoringrules.interval_score(y, low, high, 0.2)
    far = np.minimum(np.abs(y - low), np.abs(y - high)) > 0.5
    np.testing.assert_allclose(value[far], exact[far], rtol=1e-6)
    # near an end, less the expected excess of the kink
    assert (value >= exact - 1e-9).all() and (value - exact < 0.5).all() and far.sum() == 5


def test_joint_dawid_sebastiani_is_that_of_the_sample(rng):
    x, y = rng.normal(size=(7, 4, 50)), rng.normal(size=7)
    means = rules._joint_moments(_drawn(x, y, counts=[3, 4])).mean(axis=(1, 2))
    found = rules._dawid_sebastiani(means, context(y, [3, 4]))
    for k, rows in enumerate((slice(0, 3), slice(3, 7))):
        points = x[rows].reshape(rows.stop - rows.start, -1)
        covariance, gap = np.cov(points, ddof=0), y[rows] - points.mean(axis=1)
        expected = -np.linalg.slogdet(covariance)[1] - gap @ np.linalg.solve(covariance, gap)
        assert found[k] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rho, scale", [(0.8, 1.0), (0.9, 1e8), (0.0, 1e-10), (0.5, 1e12)])
def test_joint_dawid_sebastiani_of_correlated_rows_of_any_scale(rho, scale):
    covariance = scale**2 * (rho + (1 - rho) * np.eye(20))
    residual = scale * np.linspace(-1, 1, 20)
    i, j = np.tril_indices(20)
    second = covariance + np.outer(residual, residual)
    means = np.concatenate([residual, second[i, j]])[None]
    expected = -np.linalg.slogdet(covariance / scale**2)[1] - 40 * np.log(scale)
    expected -= residual @ np.linalg.solve(covariance, residual)
    found = rules._dawid_sebastiani(means, context([0.0], [20]))
    assert found[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("offset", [0.0, 0.1])
def test_a_row_that_is_always_predicted_alike_is_no_padding(rng, offset):
    x = np.stack([rng.normal(size=(4, 50)), np.full((4, 50), 3.0)])
    means = rules._joint_moments(_drawn(x, [0.0, 3.0 + offset], counts=[2])).mean(axis=(1, 2))
    assert np.isnan(rules._dawid_sebastiani(means, context([0.0], [2]))).all()
    rows = rules._residual_moments(_drawn(x, [0.0, 3.0 + offset])).mean(axis=(1, 2))
    found = rules._dawid_sebastiani_row(rows, context([0.0, 3.0]))
    assert np.isfinite(found[0]) and np.isnan(found[1])


def test_kinks_do_not_add_up_over_rows(rng):
    # 3,000 rows with independent draws: a bias of a tenth of a row's error would show
    rows, y = 3000, rng.normal(size=3000)
    x = rng.normal(size=(rows, 4, 100))
    total = rules._residual_moments(_drawn(x, y)).reshape(rows, 4, 10, 10, 2).sum(axis=3)
    sample = Sample(total, 10, 100, 10)
    value, influence = rules.RULES["mae"].finish(sample, context(y))
    error = np.sqrt((influence.reshape(rows, -1).var(axis=1, ddof=1) / 40).sum())
    assert abs(value.sum() - np.abs(y).sum()) < 4 * error
    for level in (0.5, 0.9):
        rule = rules.find_rule(f"interval_{level}")
        ends = rule.contribution.features(_drawn(x, y)).reshape(rows, 4, 10, 10, 2).sum(axis=3)
        value, influence = rule.finish(Sample(ends, 10, 100, 10), context(y))
        error = np.sqrt((influence.reshape(rows, -1).var(axis=1, ddof=1) / 40).sum())
        exact = problems._interval(y, 0.0, 1.0, level)
        assert abs(value.sum() - exact.sum()) < 4 * error


# ---------------------------------------------------------------- the frame


def test_jackknife_of_a_mean_is_batch_means(rng):
    draws = rng.normal(size=(3, 4, 105))
    total = np.add.reduceat(draws, np.arange(0, 105, 10), axis=2)[..., None]
    sample = Sample(total, 10, 105, 10)
    value, influence = jackknife(sample, lambda means: means[..., 0])
    np.testing.assert_allclose(value, draws.mean(axis=(1, 2)) + influence.mean(axis=(1, 2)))
    blocks = draws[:, :, :100].reshape(3, 4, 10, 10).mean(axis=3)
    np.testing.assert_allclose(
        influence, blocks - draws.mean(axis=(1, 2))[:, None, None], atol=1e-12
    )


def test_jackknife_removes_the_bias_of_a_square(rng):
    draws = 0.5 + rng.normal(size=(4000, 4, 10))
    sample = Sample(draws[..., None], 1, 10, 10)
    plain = draws.mean(axis=(1, 2)) ** 2
    value, _ = jackknife(sample, lambda means: means[..., 0] ** 2)
    error = value.std() / np.sqrt(len(value))
    assert abs(value.mean() - 0.25) < 4 * error < 0.25 * (plain.mean() - 0.25) * 4
    assert plain.mean() - 0.25 == pytest.approx(1 / 40, rel=0.2)


def test_extended_and_whole_runs_agree(prepared, seed):
    problem, model, fit = prepared("five_fold")
    settings = {"scores": SEVERAL, "seed": seed, "progress": False}
    whole = by_chains(model, problem.folds, fit, draws=130, **settings)
    pieces = by_chains(model, problem.folds, fit, draws=60, **settings)
    pieces.extend(70, progress=False)
    # the bridge constant of hyvarinen is chosen for the length first asked for
    for score in SEVERAL:
        loose = score == "hyvarinen"
        one, two = whole.score(score), pieces.score(score)
        np.testing.assert_allclose(
            one.folds["score"], two.folds["score"], rtol=1e-2 if loose else 1e-9
        )
        assert one.mcse == pytest.approx(two.mcse, rel=1e-1 if loose else 1e-9)


def test_a_fold_alone_scores_as_among_all(prepared, results, seed):
    problem, model, fit = prepared("blocked")
    every = results("blocked", SINGLE)
    alone = by_chains(model, problem.folds[7:8], fit, SINGLE, seed=seed, progress=False)
    for score in set(SINGLE) - {"r2", "rmse"}:
        a, b = (r.score(score).folds["score"].values for r in (alone, every))
        assert a[0] == pytest.approx(b[7], rel=1e-8)


def test_saved_merged_and_loaded(prepared, results, seed, tmp_path):
    problem, model, fit = prepared("five_fold")
    whole = results("five_fold", SEVERAL)
    folds = problem.folds
    parts = [
        by_chains(model, part, fit, SEVERAL, seed=seed, progress=False)
        for part in (folds[3:], folds[:3])
    ]
    merged = fw.merge(parts)
    merged.save(tmp_path / "merged.nc")
    loaded = fw.load(tmp_path / "merged.nc")
    for found in (merged, loaded):
        for score in SEVERAL:
            one, two = whole.score(score), found.score(score)
            assert two.total == pytest.approx(one.total, rel=1e-8)
            assert two.se == pytest.approx(one.se, rel=1e-8)
            assert two.mcse == pytest.approx(one.mcse, rel=1e-6)
        np.testing.assert_allclose(found.pit(), whole.pit(), rtol=1e-12)
    whole.save(tmp_path / "whole.nc")
    longer = fw.load(tmp_path / "whole.nc").extend(30, model=model, progress=False)
    again = by_chains(model, folds, fit, SEVERAL, seed=seed, progress=False).extend(
        30, progress=False
    )
    for score in SEVERAL:
        assert longer.score(score).total == pytest.approx(again.score(score).total, rel=1e-12)


# ---------------------------------------------------------------- totals, comparison, calibration


def test_totals_of_means(results):
    found, y = results("five_fold", SEVERAL), problems.five_fold().y
    rows = found.score("mse").rows
    error = rows["score"].values
    assert found.score("mse").total == pytest.approx(error.mean())
    assert found.score("rmse").total == pytest.approx(np.sqrt(error.mean()))
    assert found.score("r2").total == pytest.approx(1 - error.mean() / y.var())
    np.testing.assert_array_equal(rows["observed"], y[rows["row"].values])
    n, mse, rmse, r2 = len(y), *(found.score(s) for s in ("mse", "rmse", "r2"))
    assert mse.se == pytest.approx(error.std(ddof=1) / np.sqrt(n))
    assert rmse.se == pytest.approx(mse.se / (2 * rmse.total))
    assert rmse.mcse == pytest.approx(mse.mcse / (2 * rmse.total))
    assert r2.mcse == pytest.approx(mse.mcse / y.var())
    # contributions are the slopes of the total by the weights of the rows
    for score in (rmse, r2):
        parts, _ = total_units(score.name, score.folds, score.rows, np.ones(5, bool))
        assert score.se == pytest.approx(np.sqrt(n) * parts.std(ddof=1))
        by_row = np.argsort(rows["row"].values)
        for i in (0, 7, 31):
            weight = np.ones(n)
            weight[i] += 1e-6
            slope = (_weighted_total(score.name, error[by_row], y, weight) - score.total) / 1e-6
            assert parts[i] - score.total / n == pytest.approx(slope, rel=1e-3)


def _weighted_total(name, error, y, weight):
    mse = np.average(error, weights=weight)
    centre = np.average(y, weights=weight)
    variance = np.average((y - centre) ** 2, weights=weight)
    return {"rmse": np.sqrt(mse), "r2": 1 - mse / variance}[name]


def test_comparison_by_other_scores(prepared, results, seed):
    problem, model, fit = prepared("five_fold")
    names = ("log", "crps", "rmse", "r2")
    # the same regression without its second covariate predicts worse
    poor = replace(problem, X=problem.X[:, [0, 2, 3]], prior=problem.prior[:3])
    worse = poor.model()
    results_by_name = {
        "full": by_chains(model, problem.folds, fit, names, seed=seed, progress=False),
        "poor": by_chains(worse, problem.folds, scores=names, seed=seed + 1, progress=False),
    }
    for score in names[1:]:
        found = fw.compare(results_by_name, score=score)
        table = found.table
        assert list(table.index) == ["full", "poor"] and table["score_diff"]["poor"] < 0
        assert found.diff > 0 and found.prob > 0.9
        assert "stacking" not in table and "optimism" not in table
        total = {k: r.score(score).total for k, r in results_by_name.items()}
        assert table["score"].to_dict() == pytest.approx(total)
        sign = -1 if score == "rmse" else 1
        assert found.diff == pytest.approx(sign * (total["full"] - total["poor"]))
        exact = problem.exact_total(score) - poor.exact_total(score)
        assert abs(found.diff - sign * exact) < 4 * found.mcse
        assert max(map(len, str(found).splitlines())) <= 80
        text = " ".join(str(found).split())
        assert f"compared by {score}" in text
        assert ("rmse is an error, its difference is negated" in text) == (score == "rmse")
        assert (found.folds["diff"] > 0).sum() >= 4
    text = str(results_by_name["full"])
    assert "root mean squared error; SE over rows" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_result_without_log_score_says_so(results):
    found = results("blocked", SINGLE)
    with pytest.raises(
        AttributeError, match=r"first score of this result is hyvarinen; use .score"
    ):
        _ = found.elpd
    with pytest.raises(ValueError, match="arviz takes log scores, but this result has hyvarinen"):
        found.to_arviz()
    text = str(found)
    assert "ESS" not in text and "Hyvarinen score; SE over rows" in text  # folds of single rows


def test_pit_and_coverage(prepared, results):
    problem, found = prepared("five_fold")[0], results("five_fold", SEVERAL)
    exact = []
    for train, test in problem.folds:
        mean, covariance = problem.predictive(train, test)
        exact.append(stats.norm.cdf((problem.y[test] - mean) / np.sqrt(np.diag(covariance))))
    exact = np.concatenate(exact)
    error = found.pit().values - exact
    assert (np.abs(error) < 4.5 * found.calibration["mcse"].values + 1e-3).all()
    table = found.coverage(levels=(0.5, 0.9))
    for level in (0.5, 0.9):
        line = table.loc[level]
        truth = np.mean(np.abs(exact - 0.5) <= level / 2)
        assert abs(line["covered"] - truth) <= 4 * line["mcse"] + 1e-12
        assert line["se"] == pytest.approx(np.sqrt(line["covered"] * (1 - line["covered"]) / 40))
    with pytest.raises(ValueError, match=r"levels must lie between 0 and 1, got 90"):
        found.coverage(levels=(90,))


@pytest.mark.parametrize("score, target", [("rmse", 0.004), ("crps", 0.1), ("r2", 0.004)])
def test_runs_to_a_target_error_of_any_score(prepared, seed, score, target):
    problem, model, fit = prepared("five_fold")
    found = by_chains(
        model, problem.folds, fit, score, target_mcse=target, seed=seed, progress=False
    )
    assert 100 < found.info["draws"] < 1000
    assert 0.6 * target < found.score(score).mcse <= target
    assert abs(found.score(score).total - problem.exact_total(score)) < 4 * target


# ---------------------------------------------------------------- bad input


def run(model, scores, folds=None, **arguments):
    folds = folds or fw.leave_one_out(model.n_obs)
    return by_chains(model, folds, scores=scores, progress=False, **arguments)


def test_rules_that_need_what_the_model_lacks():
    bare = replace(poisson(), simulate=None)
    with pytest.raises(
        ValueError, match=r"crps needs predictive draws.*give Model\(..., simulate=f"
    ):
        run(bare, "crps")
    unobserved = fw.Model(
        lambda a: -(a**2), lambda a: -((a - np.arange(3.0)) ** 2), 0.0, 3, simulate=lambda k, a: a
    )
    with pytest.raises(ValueError, match=r"mse needs the observed values; give Model\(..., y=y"):
        run(unobserved, "mse")
    with pytest.raises(ValueError, match=r"hyvarinen differentiates.*row_log_density=f, y=y"):
        run(unobserved, "hyvarinen")
    scalar = replace(poisson(), simulate=lambda key, a: jax.random.poisson(key, jnp.exp(a)))
    with pytest.raises(ValueError, match=r"replicate of each row of y, .* shapes \(\) and \(10,\)"):
        run(scalar, "mse")


@pytest.mark.parametrize("dtype", [int, float])
def test_hyvarinen_of_a_discrete_model(dtype):
    with pytest.raises(ValueError, match="hyvarinen needs a density with derivatives.*discrete"):
        run(poisson(dtype), "hyvarinen")
    with pytest.raises(ValueError, match=r"hyvarinen needs a density.*discrete"):
        run(replace(poisson(dtype), simulate=None), "hyvarinen")


def test_hyvarinen_refuses_lags_through_y():
    def row_log_density(rho, y):
        before = jnp.concatenate([jnp.zeros(1), y[:-1]])
        return -0.5 * (y - rho * before) ** 2

    model = fw.Model(
        lambda rho: -(rho**2), None, 0.5, 4, row_log_density=row_log_density, y=np.arange(4) + 0.5
    )
    with pytest.raises(ValueError, match="on its own value of y alone, but row .* lagged values"):
        run(model, "hyvarinen")


def test_hyvarinen_refuses_another_likelihood():
    model = problems.regression().model()
    odd = replace(model, log_likelihood=lambda beta: model.row_log_density(beta, model.y) + 1.0)
    with pytest.raises(ValueError, match=r"must equal log_likelihood\(position\).*up to 1;"):
        run(odd, "hyvarinen")


@pytest.mark.parametrize(
    "score, match",
    [
        ("crpz", 'scores must be among "log", .*"interval"; got \'crpz\''),
        ("interval_90", "level of an interval score must lie between 0 and 1.*got 'interval_90'"),
        ("interval_wide", "level of an interval score"),
        ("energy", "energy scores test sets of several rows.*use crps"),
        ("accuracy", "accuracy needs observations that are classes.*use mse or crps"),
    ],
)
def test_wrong_names_and_rules(score, match):
    with pytest.raises(ValueError, match=match):
        run(problems.regression().model(), score)


def three_classes(y, simulate=True):
    """Fixed probabilities .2, .2 and .6 of three classes, whatever the parameter."""
    log_p = jnp.log(jnp.array([0.2, 0.2, 0.6]))
    return fw.Model(
        lambda q: -0.5 * q**2,
        None,
        0.0,
        len(y),
        simulate=(lambda key, q: jax.random.categorical(key, log_p, shape=(len(y),)))
        if simulate
        else None,
        row_log_density=lambda q, y: log_p[y] + 0.0 * q,
        y=np.asarray(y),
    )


def test_classes_that_are_not_observed_count(seed):
    found = run(three_classes([0, 1] * 5), ("brier", "accuracy"), seed=seed)
    assert found.score("brier").total == pytest.approx(-(0.8**2 + 0.2**2 + 0.6**2), rel=1e-6)
    assert found.score("accuracy").total == 0.0
    with pytest.raises(ValueError, match=r"seen \(0, 1\) add up to only 0.4 .* give .* simulate="):
        run(three_classes([0, 1] * 5, simulate=False), "brier")


def test_numbers_of_classes():
    def counts(y, high):
        return fw.Model(
            lambda q: -0.5 * q**2,
            lambda q: -0.5 * (q - np.zeros(len(y))) ** 2,
            0.0,
            len(y),
            simulate=lambda key, q: jax.random.randint(key, (len(y),), 0, high),
            y=np.asarray(y),
        )

    with pytest.raises(ValueError, match="brier is for at most 50 classes, but there are 80"):
        run(counts(np.arange(80), 80), "brier")
    with pytest.raises(ValueError, match="accuracy needs at least two classes, but only 0 occurs"):
        run(counts(np.zeros(10, int), 1), "accuracy")


def test_r2_of_equal_observations():
    same = fw.Model(
        lambda q: -0.5 * q**2,
        lambda q: -0.5 * (q - np.ones(5)) ** 2,
        0.0,
        5,
        simulate=lambda key, q: q + jax.random.normal(key, (5,)),
        y=np.ones(5),
    )
    with pytest.raises(ValueError, match="r2 needs observations that vary"):
        run(same, "r2")


def test_names_must_be_text_and_y_may_be_a_list(prepared, seed):
    problem, model, fit = prepared("normal_mean")
    with pytest.raises(TypeError, match='scores must be names such as "log", but one is 1'):
        run(model, ("log", 1))
    listed = replace(model, y=problem.y.tolist(), log_likelihood=None)
    found = by_chains(listed, problem.folds, fit, "mse", seed=seed, progress=False)
    assert abs(found.score("mse").total - problem.exact_total("mse")) < 4 * found.score("mse").mcse


def test_pointwise_scores_leave_the_bridge_of_others_alone(prepared, seed):
    problem, model, fit = prepared("long_horizon")
    with pytest.raises(ValueError, match="needs joint scores, but hyvarinen_pointwise was asked"):
        run(model, ("log", "hyvarinen_pointwise"), problem.folds, estimator="bridge")
    settings = {"fit": fit, "seed": seed}
    alone = run(model, ("log", "hyvarinen"), problem.folds, **settings)
    beside = run(model, ("log", "hyvarinen", "log_pointwise"), problem.folds, **settings)
    for score in ("log", "hyvarinen"):
        name = column(score)
        np.testing.assert_allclose(
            alone.score(score).folds[name], beside.score(score).folds[name], rtol=1e-8
        )


def test_weights_of_overlapping_test_sets(prepared, seed):
    problem, model, fit = prepared("regression")
    rng = np.random.default_rng(3)
    tests = [np.sort(rng.choice(40, 3, replace=False)) for _ in range(6)]
    pairs = [(np.setdiff1d(np.arange(40), test), test) for test in tests]
    folds = fw.from_splits(pairs, 40)
    found = run(model, ("hyvarinen", "dss"), folds, estimator="mean", fit=fit, seed=seed)
    for name in ("hyvarinen", "dss"):
        table = found.score(name).folds
        apart = np.sqrt(((table["weight"] * table["mcse"]) ** 2).sum().item())
        assert found.score(name).mcse == pytest.approx(apart, rel=1e-9)


def test_parts_of_a_scheme_are_scored_alike(prepared, seed):
    problem, model, fit = prepared("regression")
    folds = fw.from_labels(np.repeat([0, 1, 2, 3], [1, 3, 11, 25]))
    names = ("hyvarinen_pointwise", "dss", "energy", "mse")
    whole = run(model, names, folds, fit=fit, seed=seed)
    merged = fw.merge(
        [run(model, names, part, fit=fit, seed=seed) for part in (folds[:1], folds[1:])]
    )
    for name in names:
        assert merged.score(name).total == pytest.approx(whole.score(name).total, rel=1e-8)
        assert merged.score(name).mcse == pytest.approx(whole.score(name).mcse, rel=1e-6)
    assert whole.score("dss").rows is not None


def test_comparison_over_the_folds_that_all_have(prepared, results):
    found = results("five_fold", SEVERAL)
    for score in ("mse", "crps"):
        whole = found.score(score)
        table = whole.folds.copy(deep=True)
        table["score"][3:] = np.nan
        # two of five folds are missing in the other model: errors of the three that are left
        scores = found.scores | {score: replace(whole, folds=table)}
        other = replace(found, scores=scores, info=found.info | {"seed": -1, "fit_seed": -1})
        with pytest.warns(FoldWarning, match="2 of 5 folds left out"):
            pair = fw.compare({"a": found, "b": other}, score=score)
        size = whole.folds["n_test"].values[:3] if score == "mse" else np.ones(3)
        error = np.sqrt(((size * whole.folds["mcse"].values[:3]) ** 2).sum()) / size.sum()
        error = error if score == "mse" else 3 * error
        assert pair.paired.mcse[0] == pytest.approx(error, rel=1e-6)


# the flag is what is tested, by pytest.warns or in the table
# short runs may have flags: numbers are what is tested
@pytest.mark.filterwarnings("ignore::foldwise.results.result.FoldWarning")
def test_a_target_that_has_no_error(seed):
    flat = replace(poisson(), simulate=lambda key, a: 2 + 0 * jax.random.poisson(key, a**2, (10,)))
    with pytest.warns(UserWarning, match=r"target_mcse=0.1 cannot be reached: .* of scrps is not"):
        found = run(flat, ("scrps",), target_mcse=0.1, seed=seed)
    score = found.score("scrps")
    assert np.isnan(score.total) and np.isnan(score.mcse)
    assert (score.folds["status"] == "no spread").all()


@pytest.mark.parametrize("score", ["crps", "scrps", "interval"])
def test_stored_rules_are_refused_online(score):
    with pytest.raises(ValueError, match=f'{score} needs stored predictive draws, but memory="onl'):
        run(problems.regression().model(), score, memory="online")


# the flag is what is tested, by pytest.warns or in the table
# short runs may have flags: numbers are what is tested
@pytest.mark.filterwarnings("ignore::foldwise.results.result.FoldWarning")
def test_a_singular_predictive_covariance_is_flagged(prepared, seed):
    problem, model, fit = prepared("five_fold")

    def twins(key, beta):
        draw = model.simulate(key, beta)
        return draw.at[test[1]].set(draw[test[0]])

    test = problem.folds.test_rows[problem.folds.test_start[2] : problem.folds.test_start[3]]
    same = fw.Model(
        model.log_prior,
        None,
        model.init,
        model.n_obs,
        simulate=twins,
        row_log_density=model.row_log_density,
        y=model.y,
    )
    with pytest.warns(FoldWarning, match=r"dss, singular covariance.*use dss_pointwise"):
        found = run(same, ("log", "dss", "dss_pointwise"), problem.folds, seed=seed)
    table = found.score("dss").folds
    assert table["status"].values.tolist() == [
        "fine",
        "fine",
        "singular covariance",
        "fine",
        "fine",
    ]
    assert found.score("dss").left_out == 1 and np.isfinite(found.score("dss").total)
    assert np.isfinite(found.score("dss_pointwise").folds["score"]).all()
    assert (found.folds["status"] == "fine").all() and "singular covariance" in str(found)
