"""How long to run: so many draws, or until the Monte Carlo error of the total is small enough."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from foldwise.sampling.fit import Fit
from foldwise.sampling.run import Run
from foldwise.sampling.sample import sample
from foldwise.scores.diagnostics import draws_needed
from foldwise.scores.estimate import estimate, total_slope
from foldwise.support.progress import Progress


class Goal(NamedTuple):
    """How long to run: draws of each chain, or until the error is at most ``target``.

    ``beside`` is what each full-data draw adds to the scores of folds that have no chains, whose
    error counts too.
    """

    draws: int
    target: float | None
    most: int
    beside: Float[np.ndarray, " draw"] | None = None


def run_to_target(runs: Sequence[Run], goal: Goal, target: float, bar: Progress) -> None:
    """Run on in rounds until every total's Monte Carlo error is at most ``target``.

    An error counts only when no fold's chains are too slow for their length.
    """
    more = {id(run): _draws_to_target(run, goal, target) for run in runs}
    while pending := [run for run in runs if more[id(run)]]:
        sample(pending, max(more.values()), bar)
        more |= {id(run): _draws_to_target(run, goal, target) for run in pending}
    for run in runs:
        own, fixed = _main_variances(run, goal)
        now = run.evidence.standing
        if not own + fixed <= target**2 or now.slow.any():
            message = _why_missed(run, target, goal.most, own, fixed)
            warnings.warn(message, stacklevel=4)


def _draws_to_target(run: Run, goal: Goal, target: float) -> int:
    """How many draws to add in the next round; 0 when the target is reached or out of reach."""
    own, fixed = _main_variances(run, goal)
    now = run.evidence.standing
    have, slow = now.draws, bool(now.slow.any())
    reached = own + fixed <= target**2 and not slow
    if reached or not own + fixed < np.inf or fixed >= target**2:
        return 0
    needed = int(np.ceil(have * own / (target**2 - fixed) * 1.1))
    if slow:
        needed = max(needed, draws_needed(now.slowest_ess, now.chains, now.draws))
    # at most three times as long at once: the error is itself an estimate
    more = min(needed, 3 * have, goal.most) - have
    return min(max(more, run.settings.batch), goal.most - have)


def _why_missed(run: Run, target: float, max_draws: int, own: float, fixed: float) -> str:
    now = run.evidence.standing
    if not np.isfinite(own + fixed):
        return (
            f"target_mcse={target:g} cannot be reached: the Monte Carlo error of "
            f"{run.settings.scores[0]} is not a number; look at the folds' status"
        )
    if fixed >= target**2:
        reason = longer_fit_needed(run.fit, target, fixed)
    elif now.slow.any():
        needed = draws_needed(now.slowest_ess, now.chains, now.draws)
        reason = (
            f"max_draws={max_draws} was reached, and the error is not to be trusted while "
            f"chains of {int(now.slow.sum())} folds are too slow for their length; they "
            f"need about {needed} draws, or another parameterisation"
        )
    else:
        reason = f"max_draws={max_draws} was reached"
    return not_reached(target, own + fixed, reason)


def not_reached(target: float, variance: float, reason: str) -> str:
    """That an error was not reached, and why."""
    return (
        f"target_mcse={target:g} was not reached: the Monte Carlo error is "
        f"{np.sqrt(variance):.3g}; {reason}"
    )


def longer_fit_needed(fit: Fit, target: float, fixed: float) -> str:
    """That the full-data draws are too few, and how many would do."""
    longer = int(np.ceil(1.5 * fit.positions.shape[1] * fixed / target**2))
    return (
        f"the full-data draws alone contribute {np.sqrt(fixed):.3g}; pass a "
        f"longer fit, fit=foldwise.fit(model, draws={longer})"
    )


def _main_variances(run: Run, goal: Goal) -> tuple[float, float]:
    """Monte Carlo variances of the first score's total: from fold draws, from full-data draws."""
    found = estimate(run.evidence, run.settings.scores[0], run.settings.estimator)
    if not np.isfinite(found.score).any():
        return np.nan, np.nan
    slope = total_slope(run.evidence, found)
    fixed = found.full_variance
    if goal.beside is not None:
        shared = found.full_influence.size == goal.beside.size
        influence = goal.beside + (found.full_influence if shared else 0.0)
        fixed = float(run.evidence.full.variance(influence)) + (0.0 if shared else fixed)
    return slope**2 * found.own_variance, slope**2 * fixed
