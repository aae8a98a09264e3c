"""Folds of models whose rows depend on each other given the position.

With f(R) the joint log density of the rows R, the others unseen, and T the training rows of a fold,

    left out:  f(all) - f(T),
    tested:    f(T and test rows) - f(T), the log density of the test rows given the training rows,
    a row:     f(T and the row) - f(T),

as functions of the position. The posterior of the fold has the weights exp(-left out) at full-data
draws.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from foldwise.folds.folds import Folds
from foldwise.folds.ragged import owners
from foldwise.models.evaluate import joints_at
from foldwise.models.model import Model
from foldwise.scores.cell_sets import Values, needs_of
from foldwise.scores.marginal_model import MarginalModel


class GivenTraining(NamedTuple):
    """Log densities of what a fold leaves out and tests, given its training rows, at draws.

    ``every_row`` is that of all rows together, where it was needed.
    """

    left_out: Float[np.ndarray, "fold draw"]
    tested: Float[np.ndarray, "fold draw"]
    rows: Float[np.ndarray, "row draw"] | None
    every_row: Float[np.ndarray, " draw"] | None = None


def given_training(
    model: Model, folds: Folds, positions: Float[np.ndarray, "draw d"], by_row: bool = False
) -> GivenTraining:
    """Log densities of the rows of each fold at all draws; ``by_row``: of each test row too."""
    if isinstance(model, MarginalModel):
        return _given_cells(model, folds, positions)
    every = np.arange(len(folds))
    train = folds.train_mask(every)
    fold = owners(folds.test_start)
    both = train.copy()
    both[fold, folds.test_rows] = True
    whole = np.ones((1, folds.n), bool)
    known = joints_at(model, positions, np.concatenate([whole, train]))
    seen, left_out = known[1:], known[0] - known[1:]
    tested = left_out.copy()
    buffered = np.flatnonzero(~both.all(axis=1))
    if len(buffered):
        tested[buffered] = joints_at(model, positions, both[buffered]) - seen[buffered]
    rows = None
    if by_row:
        one = train[fold]
        one[np.arange(len(fold)), folds.test_rows] = True
        rows = joints_at(model, positions, one) - seen[fold]
    return GivenTraining(left_out, tested, rows, known[0])


def _given_cells(
    model: MarginalModel, folds: Folds, positions: Float[np.ndarray, "draw g"]
) -> GivenTraining:
    """The same where what depends on each other are rows of one cell."""
    needs = needs_of(model.structure, folds, by_row=False)
    placed = model.placed(positions)
    values = Values(model.base, model.structure, needs, placed)
    left_out, tested = values.sums([needs.left_out, needs.tested], placed)
    return GivenTraining(left_out, tested, None)
