"""What a result would be after fewer draws, from what its run recorded."""

from __future__ import annotations

import numpy as np

from foldwise.results.files import restore_evidence
from foldwise.results.result import CVResult
from foldwise.results.summary import score_table
from foldwise.scores import diagnostics
from foldwise.scores.estimate import estimate
from foldwise.scores.evidence import Evidence
from foldwise.scores.rules import LOG_SCORES, find_rule
from foldwise.support.checks import check_count


def recorded(result: CVResult) -> Evidence:
    """What the run behind ``result`` has recorded, whether the result is fresh or loaded."""
    if result.run is not None:
        return result.run.evidence
    if "state" not in result.info:
        raise ValueError(
            "estimates from fewer draws need what a run recorded, but this result was merged "
            "from several runs, which keeps their scores only; use the parts it was merged from"
        )

    return restore_evidence(result)


def first_draws(
    result: CVResult,
    draws: int,
    score: str | None = None,
    evidence: Evidence | None = None,
) -> CVResult:
    """What ``result`` would be had every chain stopped after its first ``draws`` draws.

    Only the one ``score`` (the first, unless named) is estimated again, by the same estimators
    from the same full-data draws and rungs, and R-hat by fold. What is counted over whole chains
    (acceptance, divergences, Pareto k, status) and the R-hat-max benchmark are left out. Needs
    stored draws. Scores by row and others than log scores are recorded in blocks of
    ``info["batch"]`` draws, so ``draws`` must be a multiple of it, or all of them; Hyvarinen scores
    keep the bridge constants that were chosen for the whole run.

    ``evidence`` is what ``recorded(result)`` gives, for callers that ask for several lengths.
    """
    name = result.score(score or result._main.name).name
    evidence = recorded(result) if evidence is None else evidence
    if evidence.draws is None:
        raise ValueError(
            'estimates from fewer draws need stored draws, but memory="online" keeps none; run '
            'cross_validate(..., memory="draws")'
        )
    check_count("draws", draws, 1)
    blocks, length = in_blocks(evidence, name), evidence.standing.length
    have = evidence.standing.draws
    if draws > have or (blocks and draws % length and draws < have):
        step = f"a multiple of {length}, " if blocks else ""
        raise ValueError(f"draws must be {step}at most the {have} of each chain, got {draws}")
    shorter = evidence.first(draws, blocks)
    by_fold = diagnostics.fold_rhat(shorter.sums)
    found = estimate(shorter, name, result.info["estimator"])
    return CVResult(
        {name: score_table(shorter.folds, shorter, found, find_rule(name), {"rhat": by_fold})},
        diagnostics.Mixing(by_fold, np.zeros(0), draws),
        result.test,
        {**result.info, "draws": draws, "batch": shorter.standing.length},
    )


def in_blocks(evidence: Evidence, name: str) -> bool:
    """Whether the score ``name`` comes from sums over blocks of draws, not from stored draws."""
    by_row = name == "log_pointwise" and evidence.sums.rows is not None
    return by_row or name not in LOG_SCORES
