"""The paper's Example 4: forecast air passengers from month-on-month or year-on-year growth?

Outbound international passengers P_t of all Australian airports, 1985 to 2019, one month ahead:
a fold trains on the months before and tests the next, from March 1987 on. Model A is an
autoregression of the growth g_t = P_t / P_(t-1) - 1 on its 12 last values with an effect for each
month of the year, model B one of g_t = P_t / P_(t-12) - 1 on its 3 last values with a constant:

    g_t ~ N(sum_i rho_i g_(t-i) + effect, sigma),  (rho_i + 1) / 2 ~ Beta(5, 5),

effects ~ N(0, 1), sigma ~ half-N(1); second arguments of N are standard deviations. Months without
enough history are never tested and add nothing to the likelihood.

The two growth rates are different quantities, so their densities cannot be compared as they are.
Both are turned into densities of the month's passengers, p(P_t) = p(g_t) / level, with the level
that the growth is relative to; the paper compares p(g_t), which is shown beside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import foldwise as fw
from foldwise import datasets
from foldwise.studies import Options, Outcome, Plan, conduct, normal_log_density

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# March 1987, the 27th month: both models have a year of growth rates and their lags by then.
FIRST_TEST = 26
PLAN = Plan(draws=400, quick_folds=slice(-12, None), warmup=100, scores=("log", "crps"))


def passengers(data: pd.DataFrame) -> Float[np.ndarray, " month"]:
    """Outbound passengers of each month."""
    return data["Outbound"].to_numpy(float)


def months(data: pd.DataFrame) -> list[str]:
    """Name of each month, such as 1987-03."""
    pairs = zip(data["Year"], data["Month"], strict=True)
    return [f"{year}-{month:02d}" for year, month in pairs]


def growth(level: Float[np.ndarray, " month"], span: int) -> Float[np.ndarray, " month"]:
    """Growth over ``span`` months; not a number in the first months."""
    return np.concatenate([np.full(span, np.nan), level[span:] / level[:-span] - 1.0])


def lagged(values: Float[np.ndarray, " month"], lags: int) -> Float[np.ndarray, "month lag"]:
    """The ``lags`` last values before each month, the latest first."""
    padded = np.concatenate([np.full(lags, np.nan), values])
    return np.column_stack([padded[lags - i : len(padded) - i] for i in range(1, lags + 1)])


def model(data: pd.DataFrame, span: int, lags: int, seasonal: bool, name: str) -> fw.Model:
    """Autoregression of growth over ``span`` months, as a density of the month's passengers.

    The first folds train on one year, so that each month's effect has one observation and is tied
    to it the closer, the smaller sigma is: a funnel, in which chains with effects as parameters
    get scores wrong by several of their Monte Carlo errors. The parameters z are therefore the
    effects standardised by their conditional posterior given that first observation g, which
    every fold trains on, and its lags:

        effect = (g - sum_i rho_i g_(-i)) / (1 + sigma^2) + z sigma / sqrt(1 + sigma^2).
    """
    y = passengers(data)
    rates = growth(y, span)
    past = lagged(rates, lags)
    known = np.isfinite(past).all(axis=1)
    past = np.where(known[:, None], past, 0.0)
    level = np.where(known, np.roll(y, span), 1.0)
    season = data["Month"].to_numpy() - 1 if seasonal else np.zeros(len(y), int)
    first = np.array([np.flatnonzero(known & (season == s))[0] for s in range(season.max() + 1)])

    # users' own functions, written as users would: without types
    def rho_and_effect(q):
        rho, sigma = jnp.tanh(0.5 * q["logit_rho"]), jnp.exp(q["log_sigma"])
        centre = (rates[first] - past[first] @ rho) / (1.0 + sigma**2)
        return rho, centre + q["z"] * sigma / jnp.sqrt(1.0 + sigma**2)

    def log_prior(q):
        # Beta(5, 5) of the logistic of q, whose Jacobian adds one to each exponent
        rho = -5.0 * jnp.sum(jax.nn.softplus(q["logit_rho"]) + jax.nn.softplus(-q["logit_rho"]))
        variance = jnp.exp(2.0 * q["log_sigma"])
        jacobian = len(first) * (q["log_sigma"] - 0.5 * jnp.log1p(variance))
        effect = -0.5 * jnp.sum(rho_and_effect(q)[1] ** 2) + jacobian
        return rho + effect - 0.5 * variance + q["log_sigma"]

    def mean(q):
        rho, effect = rho_and_effect(q)
        return past @ rho + effect[season]

    def row_log_density(q, y):
        density = normal_log_density(y / level - 1.0, mean(q), q["log_sigma"]) - np.log(level)
        return jnp.where(known, density, 0.0)

    def simulate(key, q):
        rates = mean(q) + jnp.exp(q["log_sigma"]) * jax.random.normal(key, y.shape)
        return level * (1.0 + rates)

    init = {"logit_rho": np.zeros(lags), "z": np.zeros(len(first)), "log_sigma": np.log(0.1)}
    return fw.Model(
        log_prior,
        None,
        init,
        n_obs=len(y),
        simulate=simulate,
        row_log_density=row_log_density,
        y=y,
        name=name,
    )


def models(data: pd.DataFrame) -> dict[str, fw.Model]:
    """Both models."""
    return {
        "A": model(data, 1, 12, True, "A, month-on-month growth"),
        "B": model(data, 12, 3, False, "B, year-on-year growth"),
    }


def folds(data: pd.DataFrame) -> fw.Folds:
    """One month ahead, named by the month that is tested."""
    return fw.leave_future_out(months(data), start=FIRST_TEST)


def run(options: Options) -> Outcome:
    """Cross-validate both models and compare them; add the paper's difference and figures."""
    data = datasets.load("air_traffic")
    outcome = conduct("air", models(data), folds(data), PLAN, options, "next month's passengers")
    outcome.tables["Densities of growth rates instead of passengers"] = growth_table(data, outcome)
    outcome.figures |= {
        "series": lambda: plot_series(data),
        "growth": lambda: plot_growth(data),
        "spectrum": lambda: plot_spectrum(data),
    }
    return outcome


def growth_table(data: pd.DataFrame, outcome: Outcome) -> str:
    """The difference in densities of growth rates, which the paper compares, beside ours."""
    tested = np.asarray(outcome.results["A"].test["rows"])
    units, y = outcome.compared().units, passengers(data)
    ours = units[:, 0] - units[:, 1]
    theirs = ours + np.log(y[tested - 1]) - np.log(y[tested - 12])
    lines = [f"{'A minus B':<28}{'difference':>12}{'se':>8}"]
    for label, delta in (("passengers (comparable)", ours), ("growth rates (the paper's)", theirs)):
        se = np.sqrt(len(delta)) * delta.std(ddof=1)
        lines.append(f"{label:<28}{delta.sum():>12.2f}{se:>8.2f}")
    return "\n".join(lines)


# ---------------------------------------------------------------- figures of the data


def _years(data: pd.DataFrame) -> Float[np.ndarray, " month"]:
    return data["Year"].to_numpy() + (data["Month"].to_numpy() - 1) / 12.0


def plot_series(data: pd.DataFrame) -> Figure:
    """Outbound passengers by month."""
    from foldwise.results.axes import styled_figure

    with styled_figure() as figure:
        axes = figure.add_subplot()
        axes.plot(_years(data), passengers(data) / 1e6, lw=1.0)
        axes.set(xlabel="year", ylabel="outbound passengers a month, millions")
    return figure


SPANS = {"month-on-month": 1, "year-on-year": 12}


def plot_growth(data: pd.DataFrame) -> Figure:
    """Both growth rates by month."""
    from foldwise.results.axes import styled_figure

    with styled_figure() as figure:
        panels = figure.subplots(2, 1, sharex=True)
        for axes, (label, span) in zip(panels, SPANS.items(), strict=True):
            axes.plot(_years(data), 100.0 * growth(passengers(data), span), lw=0.8)
            axes.axhline(0.0, color="grey", lw=0.5)
            axes.set_ylabel(f"{label}\ngrowth, %")
        panels[-1].set_xlabel("year")
    return figure


def spectrum(
    values: Float[np.ndarray, " month"],
) -> tuple[Float[np.ndarray, " frequency"], Float[np.ndarray, " frequency"]]:
    """Periodogram of the values less their mean: cycles a year, and power."""
    from scipy.signal import periodogram

    return periodogram(values[np.isfinite(values)], fs=12.0, window="hann")


def plot_spectrum(data: pd.DataFrame) -> Figure:
    """Power spectra of both growth rates: seasons are peaks at whole cycles a year."""
    from foldwise.results.axes import styled_figure

    with styled_figure() as figure:
        panels = figure.subplots(2, 1, sharex=True)
        for axes, (label, span) in zip(panels, SPANS.items(), strict=True):
            frequency, power = spectrum(growth(passengers(data), span))
            axes.semilogy(frequency[1:], power[1:], lw=0.8)
            axes.set_ylabel(f"{label}\npower")
            axes.set_xticks(range(7))
        panels[-1].set_xlabel("cycles a year")
    return figure
