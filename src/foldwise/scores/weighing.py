"""Scores other than the log score from the full-data draws, with the weights of each fold.

Where no parameters are integrated out, a full-data draw counts in a fold with its weight w' of
``importance.py``: means over draws become weighted means. The rest is as with chains
(``rules.py``): scores are functions of means, and a jackknife over batches of draws, weights and
all, gives their errors. Rules that weigh draws by the density of the test rows, or of one row, do
so on top of the fold's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Bool, Float, Int

from foldwise.folds.folds import Folds
from foldwise.folds.ragged import concatenated_ranges, in_pieces, owners
from foldwise.models.evaluate import (
    derivatives_at,
    joint_replicates_at,
    probabilities_at,
    replicates_at,
)
from foldwise.models.model import Model
from foldwise.scores.diagnostics import batch_means_variance, shared_variance
from foldwise.scores.estimate import below_observed
from foldwise.scores.needs import Emit, rule_of
from foldwise.scores.rule import Context, Contribution, Drawn, Finish, Sample, by_number
from foldwise.scores.rules import BELOW, LOG_SCORES

# Values of features that are worked on at once.
_FEATURES = 2**22


class FullSample(NamedTuple):
    """Full-data draws, ``chains`` chains one after another, in batches of ``length`` for errors.

    Draws of another density are ``proposed``: that is its log, up to a constant.
    """

    positions: Float[np.ndarray, "draw d"]
    chains: int
    length: int
    proposed: Float[np.ndarray, " draw"] | None = None

    def variance(self, influence: Float[np.ndarray, "... draw"]) -> Float[np.ndarray, " ..."]:
        """Monte Carlo variance of a mean over the draws."""
        return shared_variance(influence, self.chains, self.length)

    def by_chain(self, values: Float[np.ndarray, "unit draw ..."]) -> np.ndarray:
        """Values of the draws with an axis for chains before that for draws."""
        return values.reshape(len(values), self.chains, -1, *values.shape[2:])


@dataclass(frozen=True)
class Scored:
    """Scores from full-data draws, one for every fold or test row.

    ``variance`` is the Monte Carlo variance of each, ``spread`` that of its influence over draws.
    """

    value: Float[np.ndarray, " unit"]
    variance: Float[np.ndarray, " unit"]
    spread: Float[np.ndarray, " unit"]

    def of(self, chosen: Int[np.ndarray, " chosen"]) -> Scored:
        """Those of some folds or rows."""
        return Scored(self.value[chosen], self.variance[chosen], self.spread[chosen])


class Weights(NamedTuple):
    """Log weights of the draws for each fold, and log densities of its test rows, at every draw.

    ``tested`` is that of all test rows together, ``rows`` that of each (None: not evaluated).
    """

    log: Float[np.ndarray, "fold draw"]
    tested: Float[np.ndarray, "fold draw"]
    rows: Float[np.ndarray, "row draw"] | None


@dataclass(frozen=True)
class Predictions:
    """What scores other than log scores need of test rows at all draws, by name as in ``Drawn``."""

    observed: Float[np.ndarray, "row ..."]
    classes: Float[np.ndarray, " class"]
    recorded: dict[str, Float[np.ndarray, "row draw ..."]]

    def of(self, entries: Int[np.ndarray, " entry"] | slice) -> Predictions:
        """Those of some of the test rows."""
        recorded = {name: values[entries] for name, values in self.recorded.items()}
        return Predictions(self.observed[entries], self.classes, recorded)


class Weighed(NamedTuple):
    """A score of folds, of their rows where it is by row, and the total's influences."""

    folds: Scored
    rows: Scored | None
    influence: Float[np.ndarray, " draw"]


def others(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the scores ``names`` that are not log scores."""
    return tuple(name for name in names if name not in LOG_SCORES)


def arrays_held(emit: Emit) -> int:
    """How many values of each test row and draw are held for other scores."""
    return emit.replicate + 2 * emit.derivatives + len(emit.classes)


def recorded_at(
    model: Model,
    emit: Emit,
    folds: Folds,
    positions: Float[np.ndarray, "draw d"],
    numbers: Int[np.ndarray, " draw"],
    seed: int,
) -> dict[str, Float[np.ndarray, "row draw ..."]]:
    """What ``emit`` says of the folds' test rows at draws; ``seed`` is of simulated values."""
    recorded: dict[str, np.ndarray] = {}

    def keep(names: tuple[str, ...], batches: Iterator[tuple[np.ndarray, ...]]) -> None:
        done = 0
        for found in batches:
            for name, values in zip(names, found, strict=True):
                rows = np.moveaxis(values, -1, 0)[folds.test_rows]
                room = (len(rows), len(positions), *rows.shape[2:])
                recorded.setdefault(name, np.empty(room))[:, done : done + len(values)] = rows
            done += len(values)

    if emit.replicate and model.joint_log_likelihood is not None:
        recorded["replicate"] = _given_training(model, folds, positions, numbers, seed)
    elif emit.replicate:
        keep(("replicate",), replicates_at(model, positions, seed, numbers))
    if emit.derivatives:
        keep(("first", "second"), derivatives_at(model, positions))
    if emit.classes:
        keep(("probability",), probabilities_at(model, positions, emit.classes))
    return recorded


def _given_training(
    model: Model,
    folds: Folds,
    positions: Float[np.ndarray, "draw d"],
    numbers: Int[np.ndarray, " draw"],
    seed: int,
) -> Float[np.ndarray, "row draw ..."]:
    """Replicates of test rows given the training rows, where rows depend on each other."""
    found = []
    for fold in range(len(folds)):
        train = folds.train_mask(np.array([fold]))[0]
        own = folds.test_rows[folds.test_start[fold] : folds.test_start[fold + 1]]
        batches = joint_replicates_at(model, positions, seed, numbers, train)
        drawn = np.concatenate([values[..., own] for (values,) in batches])
        found.append(np.moveaxis(drawn, -1, 0))
    return np.concatenate(found)


def weighed(
    name: str,
    given: Predictions,
    folds: Folds,
    draws: FullSample,
    weights: Weights,
    used: Bool[np.ndarray, " fold"],
) -> Weighed:
    """The score ``name`` of the folds; those in ``used`` count in the total."""
    contribution, finish = rule_of(name, folds).parts()
    value, influence = _units(contribution, finish, given, folds, draws, weights)
    by_row, sizes = contribution.by_row, np.ones(len(folds), int)
    start, unit_weight = np.arange(len(folds)), folds.fold_weight
    if by_row:
        sizes, start = folds.n_test, folds.test_start[:-1]
        joint = contribution.weights == "joint"
        unit_weight = np.repeat(folds.fold_weight, sizes) if joint else folds.test_weight
    of_fold = np.add.reduceat(value, start)
    counts = np.repeat(used & np.isfinite(of_fold), sizes)
    moved = np.where(np.isfinite(influence), influence, 0.0)
    length, count = draws.length, len(draws.positions) // draws.chains
    unknown = np.full(len(folds), np.nan)
    variance = batch_means_variance(np.add.reduceat(moved, start), length, count)
    of_rows = None
    # the joint Hyvarinen score is a sum over rows, but of whole test sets
    if by_row and name != "hyvarinen":
        nothing = np.full(len(value), np.nan)
        of_rows = Scored(value, batch_means_variance(moved, length, count), nothing)
    total = np.tensordot(np.where(counts, unit_weight, 0.0), moved, axes=1)
    by_draw = np.zeros((draws.chains, count))
    by_draw[:, : total.shape[1] * length] = np.repeat(total, length, axis=1)
    return Weighed(Scored(of_fold, variance, unknown), of_rows, by_draw.ravel())


def calibration(
    given: Predictions, folds: Folds, draws: FullSample, weights: Weights
) -> dict[str, np.ndarray] | None:
    """Of each test row, the predictive probability of a value below the observed one, and of that.

    As ``estimate.calibration``; None without predictive draws.
    """
    if "replicate" not in given.recorded or given.observed.ndim > 1:
        return None
    effective = np.exp(-scipy.special.logsumexp(2.0 * weights.log, axis=1))
    sample = _sample(BELOW, given, folds, draws, weights)
    return below_observed(sample, given.observed, np.repeat(effective, folds.n_test))


def _units(
    contribution: Contribution,
    finish: Finish,
    given: Predictions,
    folds: Folds,
    draws: FullSample,
    weights: Weights,
) -> tuple[Float[np.ndarray, " unit"], Float[np.ndarray, "unit chain block"]]:
    """Values of rows or folds, and the influence of each batch of draws on them."""
    several = int(np.prod(given.observed.shape[1:]))
    width = int(folds.n_test.max()) * several
    sizes = folds.n_test if contribution.by_row else np.full(len(folds), width * (width + 3) // 2)
    found = []
    for members in in_pieces(sizes, _FEATURES // len(draws.positions)):
        entries = concatenated_ranges(folds.test_start, members)
        part, of_part = folds[members], given.of(entries)
        rows = None if weights.rows is None else weights.rows[entries]
        own = Weights(weights.log[members], weights.tested[members], rows)
        sample = _sample(contribution, of_part, part, draws, own)
        counts = np.ones(len(entries), int) if contribution.by_row else part.n_test * several
        found.append(finish(sample, Context(of_part.observed, counts, given.classes)))
    value, influence = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return value, influence


def _sample(
    contribution: Contribution, given: Predictions, folds: Folds, draws: FullSample, own: Weights
) -> Sample:
    """Sums over batches of draws of what they contribute, times their weights, and of these."""
    weight = draws.by_chain(_weight(contribution, folds, own))
    recorded = {name: draws.by_chain(values) for name, values in given.recorded.items()}
    width = int(folds.n_test.max())
    drawn = Drawn(
        folds.n_test, given.observed, recorded, width, given.classes, draws.length, weight
    )
    edges = np.arange(0, weight.shape[2], draws.length)
    features = contribution.features(by_number(drawn)) * weight[..., None]
    return Sample(
        np.add.reduceat(features, edges, axis=2),
        draws.length,
        weight.shape[2],
        weight.shape[2] // draws.length,
        weight=np.add.reduceat(weight, edges, axis=2)[..., None],
    )


def _weight(
    contribution: Contribution, folds: Folds, own: Weights
) -> Float[np.ndarray, "unit draw"]:
    """Weight of each draw in each row or fold, one on average."""
    log = own.log
    if contribution.weights == "joint" or (contribution.weights == "row" and own.rows is None):
        log = log + own.tested
    log = log[owners(folds.test_start)] if contribution.by_row else log
    if contribution.weights == "row" and own.rows is not None:
        log = log + own.rows
    log = log - scipy.special.logsumexp(log, axis=1, keepdims=True)
    return np.exp(log) * log.shape[1]
