"""What can be drawn: results of cross_validate, with the draws and values a figure needs."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from foldwise.results.replay import recorded
from foldwise.results.result import CVResult, Score
from foldwise.scores.rules import LOG_SCORES

_ONLINE = 'memory="online" keeps none; run cross_validate(..., memory="draws")'


def check_results(*results: CVResult | None) -> None:
    """Raise unless all are results; None stands for a result that is not given."""
    for result in results:
        if result is not None and not isinstance(result, CVResult):
            raise TypeError(
                f"figures are of what cross_validate returns, a CVResult, got "
                f"{type(result).__name__}"
            )


def main_score(result: CVResult, score: str | None) -> str:
    """Name of the score asked for, or of the result's first."""
    return result.score(next(iter(result.scores)) if score is None else score).name


def stored_evidence(result: CVResult) -> Any:
    """What the run behind a result recorded, which must include its draws."""
    stored_draws(result)
    return recorded(result)


def stored_draws(result: CVResult) -> Float[np.ndarray, "fold chain draw"]:
    """Log scores of every draw, which must have been kept."""
    if result.draws is None:
        raise ValueError(f"this figure needs stored draws, but {_ONLINE}")
    return result.draws.values


def need_values(values: np.ndarray, score: Score, what: str) -> None:
    """Raise unless a fold has a value to draw."""
    if np.isfinite(values).any():
        return
    hint = "look at the folds' status"
    if score.name not in LOG_SCORES:
        hint = "of scores other than log scores they are not; choose score= among log scores"
    raise ValueError(f"{what} not known for any fold of {score.name}; {hint}")
