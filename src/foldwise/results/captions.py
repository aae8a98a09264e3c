"""What figures say: names of models and of what is measured, numbers, folds left out."""

from __future__ import annotations

from typing import Any

import numpy as np

from foldwise.results.compare import Comparison
from foldwise.results.identity import folds_of_scheme
from foldwise.results.numbers import fixed, places, se_text
from foldwise.results.result import CVResult
from foldwise.scores.rules import LOG_SCORES, find_rule
from foldwise.support.words import counted

# Characters of a name; longer ones are cut.
_NAME = 26


def quantity(name: str) -> str:
    """What a score is called on an axis."""
    return "elpd" if name in LOG_SCORES else name


def model_name(result: CVResult) -> str:
    """Name of the model, cut where it is long."""
    return short(result.info.get("model") or "model")


def measure_of(found: Comparison) -> str:
    """What a difference, positive where the first model is better, is measured in."""
    less = find_rule(found.score).sign < 0
    return f"{quantity(found.score)} {'saved' if less else 'difference'}"


def direction_of(found: Comparison) -> str:
    """Which models a difference is of, and its direction."""
    first, second = (short(name) for name in found.names)
    joined = "against" if find_rule(found.score).sign < 0 else "minus"
    return f"{first} {joined} {second}"


def over_which(left_out: int, result: CVResult) -> str:
    """Which folds are missing: those that are not finite, and those of the scheme not run."""
    held = result.folds.sizes["fold"]
    total = folds_of_scheme(result.info, held)
    missing = f"; {left_out} of {held} folds left out" if left_out else ""
    return missing + (f"; {held} of {total} folds of the scheme" if held < total else "")


def not_drawn(values: np.ndarray, what: str = "fold") -> str:
    """How many values are not a number, for the end of a title."""
    count = int((~np.isfinite(values)).sum())
    return f"; {counted(count, what)} not a number, not drawn" if count else ""


def short(name: Any, most: int = _NAME) -> str:
    """A name of at most ``most`` characters, cut in the middle."""
    text = str(name)
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail].rstrip()}…{text[-tail:].lstrip()}"


def total_text(total: float, se: float, mcse: float, unit: str) -> str:
    """A total with its standard error, with as many digits as print-outs and the verdict give."""
    decimals = places(mcse, 1)
    return f"{fixed(total, decimals)}, SE over {unit}s {se_text(se, decimals)}"


def percent(value: float) -> str:
    """A probability as a percentage."""
    if not np.isfinite(value):
        return "unknown"
    if value > 0.999:  # a normal probability is never quite one
        return "over 99.9 %"
    if value < 0.001:
        return "under 0.1 %"
    return f"{100 * value:.1f} %"
