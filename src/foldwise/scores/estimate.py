"""Scores from what the chains recorded: by the rules of ``rules.py``, and the log score."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from foldwise.scores import logscore
from foldwise.scores.evidence import Estimate, Evidence
from foldwise.scores.hyvarinen import CURVATURE, bridged_curvature
from foldwise.scores.needs import rule_of
from foldwise.scores.rule import Context, Sample, jackknife
from foldwise.scores.rules import (
    BELOW,
    LOG_SCORES,
    find_rule,
)
from foldwise.scores.units import assembled, sample_of


def estimate(evidence: Evidence, name: str, estimator: str) -> Estimate:
    """Score ``name`` of every fold."""
    if name in LOG_SCORES:
        return logscore.estimate(evidence, name, estimator)
    contribution, finish = rule_of(name, evidence.folds).parts()
    outcomes = evidence.outcomes_for(name)
    if contribution is CURVATURE:
        return bridged_curvature(evidence, outcomes, name)
    counts = np.ones(len(outcomes.observed), int)
    if not contribution.by_row:
        counts = evidence.folds.n_test * outcomes.numbers_in_row
    context = Context(outcomes.observed, counts, outcomes.classes)
    value, influence = finish(sample_of(evidence, outcomes, contribution), context)
    found = assembled(evidence, name, value, influence, contribution.by_row)
    return replace(found, weighted=True) if contribution.weights == "row" else found


def calibration(evidence: Evidence) -> dict[str, np.ndarray] | None:
    """Of each test row, the predictive probability of a value below the observed one, and of that.

    ``mcse`` is the Monte Carlo error of ``below`` plus half of ``equal``, at least 1 / n: where
    none of n draws fell on the other side, that is the sd of the probability that one does, which
    is uniform a priori (Laplace's rule of succession). With the ``observed`` value; None without
    predictive draws.
    """
    outcomes = evidence.outcomes
    if outcomes is None or BELOW.name not in outcomes.contributions:
        return None
    sample = sample_of(evidence, outcomes, BELOW)
    return below_observed(sample, outcomes.observed, sample.count)


def below_observed(
    sample: Sample, observed: Float[np.ndarray, " row"], draws: np.ndarray | int
) -> dict[str, np.ndarray]:
    """What :func:`calibration` gives, from sums of ``BELOW`` over as many equal draws."""
    _, influence = jackknife(sample, lambda means: means[..., 0] + 0.5 * means[..., 1])
    return {
        "below": sample.mean[:, 0],
        "equal": sample.mean[:, 1],
        "mcse": np.maximum(np.sqrt(sample.variance(influence)), 1.0 / draws),
        "observed": observed,
    }


def total_slope(evidence: Evidence, found: Estimate) -> float:
    """Slope of a score's total by the weighted sum of its rows or folds: 1 where it is that sum."""
    aggregate = find_rule(found.name).aggregate
    if aggregate is None or found.rows is None or not np.isfinite(found.score).any():
        return 1.0
    used = np.repeat(np.isfinite(found.score), evidence.folds.n_test)
    weight, y = evidence.folds.test_weight[used], evidence.outcomes_for(found.name).observed[used]
    mean = float(np.average(found.rows.score[used], weights=weight))
    variance = float(np.average((y - np.average(y, weights=weight)) ** 2, weights=weight))
    return float(aggregate.slope(mean, variance)) / float(weight.sum())
