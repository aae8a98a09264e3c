"""Figures against iterations: how the estimate, its errors and the verdict settle."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import lcm

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from foldwise.results.axes import (
    BLUE,
    GREY,
    PALE,
    RED,
    SKY,
    end_labels,
    iterations_axis,
    lengths_up_to,
    plain_log,
    styled_figure,
    title,
    zero_if_near,
)
from foldwise.results.captions import (
    direction_of,
    measure_of,
    model_name,
    over_which,
    percent,
    quantity,
    short,
    total_text,
)
from foldwise.results.compare import compare
from foldwise.results.differences import paired_units
from foldwise.results.drawable import check_results, main_score, stored_evidence
from foldwise.results.numbers import error_text
from foldwise.results.replay import first_draws, in_blocks
from foldwise.results.result import CVResult
from foldwise.results.text import spread_over
from foldwise.results.verdict import DECIDED
from foldwise.results.weighted import chains_alone
from foldwise.scores.evidence import Evidence
from foldwise.scores.rules import column, find_rule


@dataclass(frozen=True)
class Course:
    """Estimates from the first ``draws`` draws of every chain: of a score, or of a difference.

    ``fixed`` is the part of ``mcse`` that comes from the full-data draws, all of which are used at
    every length; NaN where it is not known by itself. ``error`` counts ``se`` and ``mcse``, each
    once; ``prob`` is the probability that a difference is positive, NaN for a score.
    ``of`` names what is estimated, ``score`` what it is measured in, ``names`` the models.
    ``left_out`` counts the folds that are not finite; ``over`` says which are missing, if any;
    ``unit`` is what ``se`` is taken over, a fold or a row.
    """

    draws: Int[np.ndarray, " length"]
    estimate: Float[np.ndarray, " length"]
    se: Float[np.ndarray, " length"]
    mcse: Float[np.ndarray, " length"]
    error: Float[np.ndarray, " length"]
    prob: Float[np.ndarray, " length"]
    fixed: Float[np.ndarray, " length"]
    of: str
    score: str
    names: list[str]
    left_out: int
    over: str
    unit: str


def course(a: CVResult, b: CVResult | None = None, score: str | None = None) -> Course:
    """Score of ``a``, or its difference from that of ``b``, against iterations of the shorter."""
    check_results(a, b)
    alone = chains_alone(a)
    if b is not None and (alone is not a or chains_alone(b) is not b):
        raise ValueError(
            "a difference against iterations needs chains for every fold of both results, but some "
            'folds are scored from full-data draws; run cross_validate(..., method="mcmc")'
        )
    a = alone
    final = None if b is None else compare([a, b], score)
    name = final.score if final else main_score(a, score)
    results = [a] if b is None else [a, b]
    evidence = [stored_evidence(result) for result in results]
    steps = [e.standing.length if in_blocks(e, name) else e.sums.batch for e in evidence]
    # what is said to hold after so many iterations must hold for both models
    lengths = lengths_up_to(min(e.standing.draws for e in evidence), lcm(*steps))
    shorter = [
        _shorter(result, e, lengths, name) for result, e in zip(results, evidence, strict=True)
    ]
    points = [_point(list(each), name) for each in zip(*shorter, strict=True)]
    estimate, se, mcse, error, prob, fixed = np.array(points).T
    if not np.isfinite(estimate).any():
        raise ValueError(
            f"a figure needs a fold whose {name} is finite, but none is; look at the status"
        )
    left_out = final.left_out if final else a.score(name).left_out
    return Course(
        np.array(lengths),
        estimate,
        se,
        mcse,
        error,
        prob,
        fixed,
        direction_of(final) if final else model_name(a),
        measure_of(final) if final else quantity(name),
        final.names if final else [model_name(a)],
        left_out,
        over_which(left_out, a),
        final.unit if final else spread_over(a.score(name)),
    )


def _shorter(result: CVResult, evidence: Evidence, lengths: list[int], name: str) -> list[CVResult]:
    """The result from the first draws, for each length; kept, as several figures need them."""
    kept = vars(result).setdefault("_shorter", {})
    key = (name, *lengths)
    if key not in kept:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy works outside Python's lock
            kept[key] = list(
                pool.map(
                    lambda n: first_draws(result, n, name, evidence),
                    reversed(lengths),
                )
            )[::-1]
    return kept[key]


def _point(results: list[CVResult], name: str) -> tuple[float, ...]:
    """A score or a difference: estimate, its errors, probability, full-data part of MCSE."""
    scores = [result.score(name) for result in results]
    whole = find_rule(name).aggregate is None and not any(score.left_out for score in scores)
    fixed = float(np.sqrt(sum(score.full_variance for score in scores))) if whole else np.nan
    if len(scores) == 1:
        only = scores[0]
        return only.total, only.se, only.mcse, only.error, np.nan, fixed
    used = np.all([np.isfinite(score.folds[column(name)].values) for score in scores], axis=0)
    if not used.any():
        return (np.nan,) * 6
    both = paired_units(name, {"a": scores[0], "b": scores[1]}, used).against(0, 1)
    return both.diff, both.se, both.mcse, both.error, both.prob, fixed


def plot_progress(a: CVResult, b: CVResult | None = None, score: str | None = None) -> Figure:
    """Total score of ``a``, or its difference from that of ``b``, against iterations.

    The inner band is two Monte Carlo standard errors either side, the outer one two of the error
    that counts those of the data too. A difference is positive where ``a`` predicts better. Needs
    stored draws.
    """
    found = course(a, b, score)
    with styled_figure() as figure:
        ax = figure.subplots()
        for size, colour in ((found.error, PALE), (found.mcse, SKY)):
            low, high = found.estimate - 2 * size, found.estimate + 2 * size
            ax.fill_between(found.draws, low, high, color=colour, linewidth=0)
        ax.plot(found.draws, found.estimate, "o-", color=BLUE)
        iterations_axis(ax, found.draws)
        ax.set_ylabel(found.score)
        if b is not None:
            zero_if_near(ax)
        total = total_text(found.estimate[-1], found.se[-1], found.mcse[-1], found.unit)
        title(
            figure,
            f"{found.of}: {total}{found.over}",
            f"blue band: ± 2 MCSE, {error_text(found.mcse[-1])} after {found.draws[-1]:,} "
            "iterations; grey: ± 2 SE, MCSE counted",
        )
    return figure


def plot_errors(a: CVResult, b: CVResult | None = None, score: str | None = None) -> Figure:
    """Monte Carlo error and standard error over data against iterations, of a score or difference.

    More iterations shrink the first only; where it is small beside the second, they tell nothing
    new. The part that comes from the full-data draws needs a longer fit to shrink. Needs stored
    draws.
    """
    found = course(a, b, score)
    lines = [
        (f"over {found.unit}s (SE)", found.se, RED, "o-"),
        ("Monte Carlo (MCSE)", found.mcse, BLUE, "o-"),
        ("of which full-data\ndraws", found.fixed, SKY, ":"),
    ]
    with styled_figure() as figure:
        ax = figure.subplots()
        ends = []
        for text, values, colour, style in lines:
            if np.isfinite(values).any() and np.nanmax(values) > 0:
                ax.plot(found.draws, values, style, color=colour)
                ends.append((float(values[-1]), text, colour))
        iterations_axis(ax, found.draws)
        plain_log(ax, "y")
        ax.set_ylabel("standard error")
        end_labels(ax, ends)
        share = found.mcse[-1] / found.se[-1] if found.se[-1] > 0 else np.nan
        title(
            figure,
            f"{found.of}: errors of the {found.score}{found.over}",
            f"MCSE is {share:.2g} of SE after {found.draws[-1]:,} iterations",
        )
    return figure


def plot_probability(a: CVResult, b: CVResult, score: str | None = None) -> Figure:
    """Probability that ``a`` predicts better than ``b`` against iterations.

    By Student's t, with an error that counts those of the data and of the run, each once. The
    dashed line is where a model is called better. Needs stored draws, and a finite score of every
    fold.
    """
    found = course(a, b, score)
    if found.left_out:
        raise ValueError(
            "a probability needs every fold's score of both models to be finite, but "
            f"{found.left_out} of {a.folds.sizes['fold']} folds are left out; mend them first, see "
            "their status"
        )
    value = found.prob
    with styled_figure() as figure:
        ax = figure.subplots()
        ax.axhline(0.5, color=GREY, linewidth=0.8, linestyle=":")
        for decided in (DECIDED, 1.0 - DECIDED):
            ax.axhline(decided, color=GREY, linewidth=0.8, linestyle="--")
        ax.plot(found.draws, value, "o-", color=BLUE, clip_on=False)
        iterations_axis(ax, found.draws)
        ax.set_ylim(0.0, 1.0)
        ax.set_ylabel("probability")
        first, second = (short(name) for name in found.names)
        title(
            figure,
            f"Pr({first} predicts better than {second}): {percent(value[-1])}{found.over}",
            f"by Student's t over {found.unit}s; Monte Carlo error counts; after "
            f"{found.draws[-1]:,} iterations; dashed: "
            f"{DECIDED:g} and {1 - DECIDED:.2g}",
        )
    return figure
