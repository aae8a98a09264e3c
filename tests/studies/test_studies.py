"""The studies: scores against independent exact answers, and what an outcome says.

Real data are used where FOLDWISE_DATA names their folder, simulated look-alikes elsewhere.
"""

import os
from pathlib import Path

import integrated
import jax
import numpy as np
import pandas as pd
import pytest
from by_hand import make
from scipy import stats

import foldwise as fw
from foldwise import datasets, studies
from foldwise.studies import air, radon, rats

REAL = (Path(os.environ.get("FOLDWISE_DATA", "")) / "rats.csv").is_file()


@pytest.fixture(scope="module")
def rats_table():
    if REAL:
        return datasets.load("rats")
    rng = np.random.default_rng(1)
    day = np.tile([8, 15, 22, 29, 36], 30)
    rat = np.repeat(np.arange(1, 31), 5)
    alpha, beta = rng.normal(243.0, 14.0, 31), rng.normal(6.2, 0.5, 31)
    weight = alpha[rat] + beta[rat] * (day - 22) + rng.normal(0.0, 6.0, 150)
    return pd.DataFrame({"rat": rat, "day": day, "weight": weight.round()})


@pytest.fixture(scope="module")
def radon_table():
    if REAL:
        return datasets.load("radon_all")
    rng = np.random.default_rng(2)
    sizes = np.minimum(1 + (8 * rng.pareto(1.0, 80)).astype(int), 300)
    county = rng.permutation(np.repeat(np.arange(1, 81), sizes))
    floor = rng.choice([0.0, 1.0, 9.0], len(county), p=[0.7, 0.28, 0.02])
    alpha = rng.normal(1.0, 0.6, 81)
    radon = alpha[county] - 0.1 * floor + rng.normal(0.0, 0.9, len(county))
    return pd.DataFrame({"county_idx": county, "floor_measure": floor, "log_radon": radon})


@pytest.fixture(scope="module")
def air_table():
    if REAL:
        return datasets.load("air_traffic")
    rng = np.random.default_rng(3)
    month = np.arange(420)
    season = 0.15 * np.sin(2.0 * np.pi * month / 12.0) + 0.05 * np.cos(4.0 * np.pi * month / 12.0)
    level = 2e5 * np.exp(0.005 * month + season + 0.04 * rng.normal(size=420))
    return pd.DataFrame(
        {"Year": 1985 + month // 12, "Month": 1 + month % 12, "Outbound": level.round()}
    )


# ---------------------------------------------------------------- the exact answers


@pytest.mark.parametrize("own_slopes", [True, False])
def test_integrated_rats_are_multivariate_normal(rats_table, own_slopes):
    problem = integrated.rats(rats_table, own_slopes)
    theta = problem.start + np.array([3.0, -0.5, 0.3, -0.2, 0.4])[: len(problem.start)]
    time = np.array([-14.0, -7.0, 0.0, 7.0, 14.0])
    cov = np.exp(2 * theta[3]) * np.eye(5) + np.exp(2 * theta[2])
    if own_slopes:
        cov += np.exp(2 * theta[4]) * np.outer(time, time)
    normal = stats.multivariate_normal(theta[0] + theta[1] * time, cov)
    exact = [normal.logpdf(y) for _, y in rats_table.groupby("rat")["weight"]]
    with jax.enable_x64(True):
        np.testing.assert_allclose(problem.log_groups(theta), exact, rtol=1e-10)


@pytest.mark.parametrize("with_floor", [True, False])
def test_integrated_radon_is_multivariate_normal(radon_table, with_floor):
    problem = integrated.radon(radon_table, with_floor)
    theta = problem.start + np.array([0.2, 0.3, -0.2, -0.1])[: len(problem.start)]
    beta = theta[3] if with_floor else 0.0
    with jax.enable_x64(True):
        found = np.asarray(problem.log_groups(theta))
    for k, (_, rows) in list(enumerate(radon_table.groupby("county_idx")))[:20]:
        n = len(rows)
        cov = np.exp(2 * theta[2]) * np.eye(n) + np.exp(2 * theta[1])
        mean = theta[0] + beta * rows["floor_measure"]
        exact = stats.multivariate_normal(mean, cov).logpdf(rows["log_radon"])
        np.testing.assert_allclose(found[k], exact, rtol=1e-9)


def test_quadrature_has_converged(rats_table):
    problem = integrated.rats(rats_table, True)
    coarse, fine = (integrated.log_predictives(problem, range(3), n) for n in (7, 9))
    np.testing.assert_allclose(coarse, fine, atol=1e-3)


def check_against(exact, result):
    """The total, and every fold, within 4 Monte Carlo errors."""
    assert abs(result.elpd - exact.sum()) < 4.0 * result.mcse
    error = np.abs(result.folds["elpd"].values - exact) / result.folds["mcse"].values
    assert error.max() < 4.5  # the largest of up to 30


@pytest.mark.parametrize("name", ["A", "B"])
def test_rats_agree_with_the_exact_answer(rats_table, name, seed):
    exact = integrated.log_predictives(integrated.rats(rats_table, name == "A"), range(30), 7)
    model, folds = rats.models(rats_table)[name], rats.folds(rats_table)
    for k in range(3):
        fit = fw.fit(model, warmup=500, seed=10 * seed + k, progress=False)
        result = fw.cross_validate(
            model, folds, fit=fit, seed=10 * seed + k + 100, draws=400, progress=False
        )
        check_against(exact, result)


@pytest.mark.parametrize("name", ["A"])  # bench/studies.py checks both, and all counties
def test_largest_radon_counties_agree_with_the_exact_answer(radon_table, name, seed):
    sizes = radon_table["county_idx"].value_counts().sort_index().to_numpy()
    chosen = np.sort(np.argsort(-sizes, kind="stable")[:12])
    exact = integrated.log_predictives(integrated.radon(radon_table, name == "A"), chosen, 5)
    model, folds = radon.models(radon_table)[name], radon.folds(radon_table)[chosen]
    fit = fw.fit(model, draws=500, warmup=400, seed=seed, progress=False)
    result = fw.cross_validate(model, folds, fit=fit, seed=seed + 1, draws=60, progress=False)
    check_against(exact, result)


# ---------------------------------------------------------------- air passengers


def test_growth_and_lags():
    level = np.array([100.0, 110.0, 99.0, 99.0])
    rates = air.growth(level, 1)
    np.testing.assert_allclose(rates, [np.nan, 0.1, -0.1, 0.0])
    np.testing.assert_allclose(
        air.lagged(rates, 2), [[np.nan, np.nan], [np.nan, np.nan], [0.1, np.nan], [-0.1, 0.1]]
    )


@pytest.mark.skipif(not REAL, reason="a fact about the real series; needs FOLDWISE_DATA")
def test_growth_gives_the_published_autoregression():
    rates = air.growth(air.passengers(datasets.load("air_traffic")), 12)
    past = air.lagged(rates, 14)[:, [0, 2, 11, 12, 13]]
    used = np.isfinite(past).all(axis=1)
    x, y = np.column_stack([np.ones(used.sum()), past[used]]), rates[used]
    rest = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
    log_likelihood = -0.5 * len(y) * (np.log(2.0 * np.pi * np.mean(rest**2)) + 1.0)
    np.testing.assert_allclose(log_likelihood, 686.881, atol=5e-4)


@pytest.mark.parametrize(("name", "span", "lags"), [("A", 1, 12), ("B", 12, 3)])
def test_air_density_is_that_of_passengers(air_table, name, span, lags, rng):
    """Written out month by month; the prior by scipy, up to one constant."""
    model, y = air.models(air_table)[name], air.passengers(air_table)
    seasons = 12 if name == "A" else 1
    priors = []
    for _ in range(2):
        q = {"logit_rho": rng.normal(size=lags), "z": rng.normal(size=seasons)}
        q["log_sigma"] = rng.normal(-2.0, 0.5)
        with jax.enable_x64(True):
            rows, prior = np.asarray(model.row_log_density(q, y)), float(model.log_prior(q))
        rho, sigma = 2.0 / (1.0 + np.exp(-q["logit_rho"])) - 1.0, np.exp(q["log_sigma"])
        first = {}  # growth less lags of the first month of each season
        rest = np.full(len(y), np.nan)
        for t in range(span + lags, len(y)):
            rest[t] = growth_at(y, t, span) - sum(
                rho[i - 1] * growth_at(y, t - i, span) for i in range(1, lags + 1)
            )
            first.setdefault((air_table["Month"][t] - 1) % seasons, rest[t])
        start = np.array([first[s] for s in range(seasons)])
        scale = sigma / np.sqrt(1.0 + sigma**2)
        effect = start / (1.0 + sigma**2) + q["z"] * scale
        mean = effect[(air_table["Month"].to_numpy() - 1) % seasons]
        level = np.roll(y, span)
        expected = stats.norm(mean, sigma).logpdf(rest) - np.log(level)
        np.testing.assert_allclose(rows, np.where(np.isnan(rest), 0.0, expected), rtol=1e-9)
        exact = stats.beta(5, 5).logpdf((rho + 1) / 2).sum() + np.log((1 - rho**2) / 4).sum()
        exact += stats.norm.logpdf(effect).sum() + seasons * np.log(scale)
        exact += stats.norm.logpdf(sigma) + np.log(sigma)
        priors.append(prior - exact)
    np.testing.assert_allclose(*priors, rtol=1e-9)


def growth_at(y, t, span):
    return y[t] / y[t - span] - 1.0


def test_air_folds_agree_with_refits(air_table, seed):
    """Two folds, the first and a later one, fitted alone to their own months."""
    model, folds = air.models(air_table)["A"], air.folds(air_table)
    assert len(folds) == 394 and list(folds.names[[0, -1]]) == ["1987-03", "2019-12"]
    chosen = np.array([0, 1, 200, 201])  # neighbours, which bridge
    result = fw.cross_validate(
        model, folds[chosen], draws=400, warmup=100, seed=seed, progress=False
    )
    for k in (0, 2):
        test = air.FIRST_TEST + int(chosen[k])
        score, error = integrated.refit_air(air_table, "A", test, seed, draws=1000, warmup=600)
        row = result.folds.isel(fold=k)
        assert abs(float(row["elpd"]) - score) < 4.0 * np.hypot(float(row["mcse"]), error)


def test_spectrum_finds_the_season():
    month = np.arange(240)
    frequency, power = air.spectrum(np.sin(2.0 * np.pi * month / 12.0))
    assert abs(frequency[np.argmax(power)] - 1.0) < 1e-9


def test_air_figures(air_table):
    # the spectrum of n values has n // 2 + 1 frequencies, of which zero is not shown
    lines = {"plot_series": [420], "plot_growth": [420, 420], "plot_spectrum": [209, 204]}
    for name, lengths in lines.items():
        figure = getattr(air, name)(air_table)
        figure.canvas.draw()
        assert [len(axes.lines[0].get_xdata()) for axes in figure.axes] == lengths


# ---------------------------------------------------------------- what an outcome says


@pytest.mark.parametrize(
    ("a", "words"),
    [
        (np.arange(9.0), "Which model predicts rain better? A predicts better than B: by 36.0 (SE"),
        (np.zeros(9) - 0.01, "Which model predicts rain better? Undecided: B is ahead of A by 0.1"),
    ],
)
def test_conclusion_is_the_verdict(a, words):
    results = {"A": make(a, seed=1, mcse=0.0), "B": make(np.zeros(9), seed=2, mcse=0.0)}
    comparison = fw.compare(results)
    found = studies.conclusion(results, comparison, "rain")
    assert words in found and found.endswith(str(comparison.verdict))


def test_unknown_study():
    with pytest.raises(ValueError, match="the studies are toy, rats, radon, air, poisson; got 'x'"):
        studies.run("x")


def test_quick_toy_has_all_parts():
    options = studies.Options(quick=True, progress=False, draws=80, seed=3)
    outcome = studies.run("toy", options)
    assert list(outcome.results) == ["A", "B"] and outcome.name == "toy"
    a, b = outcome.results.values()
    assert a.folds.sizes["fold"] == 10 and a.info["draws"] == 80
    assert (a.info["seed"], b.info["seed"]) == (3, 1_000_003)
    np.testing.assert_allclose(outcome.comparison.diff, a.elpd - b.elpd)
    assert "10 of 50 folds" in outcome.tables["A quick run"]
    text = outcome.tables["How it was run"]
    lines = {line[:12].strip(): line[12:].split() for line in text.splitlines()}
    assert lines["full data, A"][:3] == ["4", "300", "300"]
    assert lines["chains, B"][:4] == ["10", "40", "30", "80"]
    assert "Refitting every fold" in text
    assert (
        outcome.conclusion in " ".join(str(outcome).split()) and "a new group" in outcome.conclusion
    )
    assert {"compare", "progress", "difference", "rhat_max_A", "diagnostics_B"} <= set(
        outcome.figures
    )


def test_table_of_a_run_without_chains_has_none():
    """Weights and refits have lines of their own without warm-up, and no time is negative."""
    found = make(np.arange(4.0))
    found.folds["method"] = ("fold", ["importance", "refit", "importance", "refit"])
    found.info["seconds"] = {"fit": 6.0, "weights": 0.5, "refits": 0.3}
    fit = fw.Fit(np.zeros((4, 50, 2)), (0.0, 0.0), np.full(4, np.nan), 0, 1, seconds=6.0)
    compiled = {"A": 6.5}  # some before the fit's own clock began
    text = studies.run_table({"A": found}, {"A": fit}, studies.Plan(80, slice(10)), compiled)
    lines = {line.split("  ")[0]: line.split()[2:] for line in text.splitlines()}
    assert lines["full data, A"][1:] == ["4", "-", "50", "6.0", "0.0", "6.0"]
    assert lines["weights, A"] == ["2", "-", "-", "-", "0.5"]
    assert lines["refits, A"] == ["2", "-", "-", "-", "0.3"]
    assert "chains, A" not in lines and "In all 6.8 s." in text
    assert "prepare" not in text  # a column without entries
    assert "independence Metropolis" in text and "Refitting" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_quick_poisson_is_online():
    outcome = studies.run("poisson", studies.Options(quick=True, progress=False))
    (result,) = outcome.results.values()
    assert outcome.comparison is None and result.draws is None
    assert result.info["memory"] == "online" and result.pit().sizes["test_row"] == 10
    assert outcome.conclusion.startswith(
        "The model predicts a count left out with a mean log score"
    )


def test_quick_air_shows_the_papers_difference(air_table, monkeypatch):
    monkeypatch.setattr(datasets, "load", lambda name: air_table)
    outcome = studies.run("air", studies.Options(quick=True, progress=False))
    ours, theirs = (
        float(line.split()[-2])
        for line in outcome.tables["Densities of growth rates instead of passengers"].splitlines()[
            1:
        ]
    )
    y = air.passengers(air_table)
    moved = sum(np.log(y[t - 1] / y[t - 12]) for t in range(408, 420))
    np.testing.assert_allclose(ours, outcome.comparison.diff, atol=0.006)
    np.testing.assert_allclose(theirs - ours, moved, atol=0.011)
    assert outcome.results["A"].pit().sizes["test_row"] == 12
    assert {"series", "growth", "spectrum"} <= set(outcome.figures)
