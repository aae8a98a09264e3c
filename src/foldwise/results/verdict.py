"""The verdict: which model predicts better, and whether that can be said.

One function, :func:`judge`, for print-outs, the command line, figures, notebooks and the report.
With d the difference of the leading model to another, SE its standard error, MCSE its Monte Carlo
error and s the error that counts both once (``totals.combined_error``):

- *not to be trusted*: a score is missing, a full-data fit has failed, or flagged folds could turn
  the verdict;
- *too noisy*: MCSE is more than a third of SE, and d less than four times s; with the number of
  draws that would do;
- *better*: the probability is at least 0.95, and for log scores d at least 4;
- *undecided*: otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from foldwise.results.differences import Difference, difference
from foldwise.results.identity import folds_of_scheme
from foldwise.results.numbers import (
    error_text,
    fixed,
    listed,
    places,
    probability_text,
    rounded_up,
    se_text,
)
from foldwise.results.result import CVResult, Score
from foldwise.support.words import counted

BETTER, UNDECIDED, NOISY, UNTRUSTED = "better", "undecided", "too noisy", "not to be trusted"
RELIABLE = "reliable"  # of a single result
# The probability from which on a model is called better.
DECIDED = 0.95
# Log scores that differ by less say little: the normal approximation of the difference's error is
# too narrow there (Sivula et al. 2020).
SMALL_DIFFERENCE = 4.0
# A Monte Carlo error of a third of the standard error widens it by 5 %.
LARGE_MCSE = 1 / 3
# A difference of so many errors is not turned by more draws.
BEYOND_NOISE = 4.0
# No more than this many times the draws is advised: a Monte Carlo error that is far larger than
# the spread it hides says little about how small that is.
_MOST = 100.0


@dataclass(frozen=True)
class Verdict:
    """What a comparison, or a single result, says.

    ``kind`` is "better", "undecided", "too noisy" or "not to be trusted"; of a single result
    "reliable" or one of the last two. ``headline`` says it in one line, ``sentence`` with the
    numbers, ``reasons`` why. ``leader`` and ``other`` are the models it is about, ``part`` says of
    which part of the scheme's folds it speaks, where that is not all, and ``advice`` what to do.
    ``small``: the whole 95 % interval of the difference is within 4 nats of zero.
    """

    kind: str
    headline: str
    sentence: str
    reasons: list[str] = field(default_factory=list)
    advice: str = ""
    leader: str = ""
    other: str = ""
    difference: Difference | None = None
    part: str = ""
    small: bool = False

    def __str__(self) -> str:
        return " ".join(filter(None, (self.sentence, self.advice)))


class Length(NamedTuple):
    """How long a model was run: parts of the Monte Carlo variance of its total, and draws.

    ``own`` is the chains', ``full`` the full-data draws', ``fixed`` that of refits, whose number of
    draws nobody chooses.
    """

    own: float
    full: float
    draws: int
    fit_draws: int
    fixed: float = 0.0

    @classmethod
    def of(cls, result: CVResult, score: str) -> Length:
        """The parts of the score's variance; draws that are not known count as one."""
        found, info = result.score(score), result.info
        scale = found.own_variance + found.full_variance
        ratio = found.mcse**2 / scale if scale > 0 else 0.0
        fixed = _of_refits(found)
        return cls(
            ratio * (found.own_variance - fixed),
            ratio * found.full_variance,
            int(info.get("draws") or 1),
            int(info.get("fit_draws") or 1),
            ratio * fixed,
        )


def _of_refits(score: Score) -> float:
    """The part of a total's own variance that folds with refits have, not those with chains."""
    table = score.folds
    if "method" not in table:
        return 0.0
    method, variance = table["method"].values, (table["weight"] * table["mcse"]).values ** 2
    if not (method == "mcmc").any():
        return score.own_variance
    return min(float(np.nansum(variance[method == "refit"])), score.own_variance)


class Lead(NamedTuple):
    """The leading model against another: differences by unit, and which of them are flagged."""

    leader: str
    other: str
    delta: Float[np.ndarray, " unit"]
    flagged: Bool[np.ndarray, " unit"]
    mcse: float
    noise: float
    repeats: float
    lengths: tuple[Length, ...]
    log: bool

    def of(self, delta: Float[np.ndarray, " unit"]) -> Difference:
        """The difference if the units were these."""
        return difference(delta, self.mcse, self.noise, self.repeats)

    @property
    def found(self) -> Difference:
        """The difference as it is."""
        return self.of(self.delta)


# ---------------------------------------------------------------- the rule


def decided(found: Difference, log: bool) -> bool:
    """Whether the leader is better: by its probability, and for log scores by 4 at least."""
    return bool(found.prob >= DECIDED and (found.diff >= SMALL_DIFFERENCE or not log))


def too_noisy(found: Difference) -> bool:
    """Whether more draws may change the verdict."""
    large = found.mcse > LARGE_MCSE * found.se
    return bool(large and not abs(found.diff) > BEYOND_NOISE * found.error)


def could_turn(lead: Lead) -> bool:
    """Whether flagged folds could turn the verdict.

    They could if it would be another one without them, or with their differences as low, or as
    high, as the most extreme of those that are fine.
    """
    if not lead.flagged.any():
        return False
    fine = lead.delta[~lead.flagged]
    if len(fine) < 2:
        return True
    now = decided(lead.found, lead.log)
    others = [fine]
    others += [np.where(lead.flagged, end, lead.delta) for end in (fine.min(), fine.max())]
    return any(decided(lead.of(delta), lead.log) != now for delta in others)


def kind_of(lead: Lead) -> str:
    """The verdict on a pair."""
    found = lead.found
    if np.isinf(found.mcse) or could_turn(lead):
        return UNTRUSTED
    if too_noisy(found):
        return NOISY
    return BETTER if decided(found, lead.log) else UNDECIDED


def judge(
    leads: Sequence[Lead], troubles: Sequence[str], flagged: Sequence[str], part: str
) -> Verdict:
    """The verdict on the best of several models against each of the others.

    ``troubles`` are what makes any verdict worthless, ``flagged`` lines that name flagged folds.
    The lead that stands for all is the first of the worst kind, in the order given: the closest.
    """
    kinds = [kind_of(lead) for lead in leads]
    first = next(k for kind in (UNTRUSTED, NOISY, UNDECIDED, BETTER) for k in _at(kinds, kind))
    kind, lead = (UNTRUSTED if troubles else kinds[first]), leads[first]
    others = [leads[k].other for k in _at(kinds, kinds[first])]
    by = _by(lead)
    over = f"Over {part} only: " if part else ""
    advice, reasons = "", list(troubles)
    if kind == UNTRUSTED:
        reasons += flagged if UNTRUSTED in kinds else []
        if np.isinf(lead.found.mcse):
            reasons.append("a Monte Carlo error is not known")
        headline = "Not to be trusted"
        sentence = f"Not to be trusted: {'; '.join(reasons)}. As it stands, {by}."
        advice = "Print each model's result for what to do about its folds."
    elif kind == NOISY:
        headline = "Too noisy to say: run on"
        sentence = f"Too noisy to say: {by}."
        reasons.append(_noise_reason(lead.found))
        advice = run_on(leads)
    elif kind == BETTER:
        headline = f"{lead.leader} predicts better than {_names(others)}"
        closest = f" than {lead.other}" if len(others) > 1 else ""
        sure = f"probability {probability_text(lead.found.prob)}"
        sentence = f"{headline}:{closest} by {numbers_text(lead.found)}, {sure}."
    else:
        headline = f"Undecided: {lead.leader} is ahead of {_names(others)}"
        sentence = f"Undecided: {by}."
        reasons.append(_undecided_reason(lead))
    if over:
        sentence = over + sentence[0].lower() + sentence[1:] if kind != BETTER else over + sentence
    small = lead.log and _all_small(lead.found)
    if small and kind == UNDECIDED:
        reasons.append(f"small whichever is better: {_interval(lead.found)} is within 4 of zero")
    return Verdict(
        kind,
        headline,
        sentence,
        reasons,
        advice,
        lead.leader,
        lead.other,
        lead.found,
        part,
        small,
    )


def _at(kinds: list[str], kind: str) -> list[int]:
    return [k for k, each in enumerate(kinds) if each == kind]


# ---------------------------------------------------------------- words


def _names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} others ({listed(names)})"


def _by(lead: Lead) -> str:
    """Who is ahead, by how much, and how sure that is."""
    found, leader, other = lead.found, lead.leader, lead.other
    if found.diff == 0.0:
        return f"{leader} and {other} have the same score"
    numbers = f"{numbers_text(found)}"
    prob = probability_text(found.prob)
    return f"{leader} is ahead of {other} by {numbers}, probability {prob}"


def numbers_text(found: Difference) -> str:
    """A difference with its errors."""
    decimals = places(found.mcse, 1)
    return (
        f"{fixed(abs(found.diff), decimals)} (SE {se_text(found.se, decimals)}, "
        f"MCSE {error_text(found.mcse)})"
    )


def _interval(found: Difference) -> str:
    low, high = found.interval
    decimals = max(places(found.error, 1), 1)
    return f"the 95 % interval, {fixed(low, decimals)} to {fixed(high, decimals)},"


def _all_small(found: Difference) -> bool:
    return bool(np.abs(found.interval).max() < SMALL_DIFFERENCE)


def _undecided_reason(lead: Lead) -> str:
    found = lead.found
    if not np.isfinite(found.prob):
        return "one fold gives no standard error"
    if found.prob < DECIDED:
        return f"the probability is below {DECIDED:g}"
    return "the difference is below 4, where its error is not to be relied on (Sivula et al. 2020)"


def _noise_reason(found: Difference) -> str:
    share = f"{found.mcse / found.se:.2g} of" if found.se > 0 else "more than"
    return f"the Monte Carlo error is {share} the standard error; a third at most is wanted"


# ---------------------------------------------------------------- how many draws


def run_on(leads: Sequence[Lead]) -> str:
    """How many draws would bring the Monte Carlo errors of the noisy leads to a third of SE."""
    noisy = [lead for lead in leads if too_noisy(lead.found)]
    return _advice([(lead.found, lead.lengths) for lead in noisy])


def _advice(cases: Sequence[tuple[Difference, tuple[Length, ...]]]) -> str:
    chains = fit = 0
    for found, lengths in cases:
        needed = draws_needed(found, lengths)
        chains, fit = max(chains, needed[0]), max(fit, needed[1])
    parts = []
    if chains:
        now = max(length.draws for _, lengths in cases for length in lengths)
        parts.append(f"{_about(chains, now)} draws a chain (now {now:,}; result.extend)")
    if fit:
        now = max(length.fit_draws for _, lengths in cases for length in lengths)
        parts.append(f"{_about(fit, now)} full-data draws (now {now:,}; a longer foldwise.fit)")
    return f"Run on: {' and '.join(parts)} would do." if parts else "Run on, with more draws."


def _about(draws: int, now: int) -> str:
    return f"{'at least' if draws >= _MOST * now else 'about'} {draws:,}"


def draws_needed(found: Difference, lengths: tuple[Length, ...]) -> tuple[int, int]:
    """Draws of each chain, and full-data draws, for MCSE to be 0.3 of the noise-free SE.

    Variances fall as one over the number of draws. Where the full-data draws leave room, only the
    chains get longer; where the chains do, only the fit; else both. Zero: as many as now.
    """
    spread = max(found.error**2 - found.mcse**2, found.mcse**2 / _MOST)
    own, full = sum(length.own for length in lengths), sum(length.full for length in lengths)
    fixed = sum(length.fixed for length in lengths)
    target = 0.09 * spread
    target = max(target - fixed, 0.1 * target)
    if own + full <= target:
        return 0, 0
    if full <= 0.5 * target:
        more = (own / (target - full), 0.0)
    elif own <= 0.5 * target:
        more = (0.0, full / (target - own))
    else:
        more = ((own + full) / target,) * 2
    now = max(length.draws for length in lengths), max(length.fit_draws for length in lengths)
    chains, fit = (
        rounded_up(min(times, _MOST) * have) if times else 0
        for times, have in zip(more, now, strict=True)
    )
    return chains, fit


# ---------------------------------------------------------------- one result


def troubles_of(name: str, result: CVResult) -> list[str]:
    """What makes any verdict on a result worthless: a full-data fit that has failed."""
    problems = [
        problem
        for problem in str(result.info.get("fit_problems") or "").split("; ")
        if problem and not problem.endswith("divergent transitions")  # a few; many are flagged
    ]
    of = f" of {name}" if name else ""
    return [f"the full-data fit{of} has not converged ({'; '.join(problems)})"] if problems else []


def part_of(result: CVResult) -> str:
    """Which part of its scheme's folds a result has; empty where that is all."""
    held = result.folds.sizes["fold"]
    total = folds_of_scheme(result.info, held)
    return f"{held} of {counted(total, 'fold')}" if held < total else ""


def standing(result: CVResult, score: str | None = None) -> Verdict:
    """Whether the score of one model can be relied on."""
    main = result.score(score or next(iter(result.scores)))
    table, part = main.folds, part_of(result)
    reasons = troubles_of("", result)
    flagged = table["fold"].values[flagged_folds(table)]
    if flagged.size:
        reasons.append(f"{flagged.size} of {len(table['fold'])} folds flagged ({listed(flagged)})")
    elif main.left_out:
        reasons.append(f"{counted(main.left_out, 'fold')} without a finite score")
    over = f"Over {part} only. " if part else ""
    noise = Difference(main.total, main.se, main.mcse, main.error, np.nan, np.nan)
    if reasons:
        sentence = f"{over}Not to be trusted: {'; '.join(reasons)}."
        return Verdict(UNTRUSTED, "Not to be trusted", sentence, reasons, part=part)
    if main.mcse > LARGE_MCSE * main.se:
        reasons = [_noise_reason(noise)]
        advice = _advice([(noise, (Length.of(result, main.name),))])
        sentence = f"{over}Too noisy: {reasons[0]}."
        return Verdict(NOISY, "Too noisy: run on", sentence, reasons, advice, part=part)
    what = "the Monte Carlo error is small beside the standard error, and no fold is flagged"
    sentence = f"{over}Reliable: {what}."
    return Verdict(RELIABLE, "Reliable", sentence, [what], part=part)


def flagged_folds(table: Any) -> Bool[np.ndarray, " fold"]:
    """Which folds of a table are not fine."""
    if "status" not in table:
        return np.zeros(table.sizes["fold"], bool)
    return np.asarray(table["status"].values != "fine")
