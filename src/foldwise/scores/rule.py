"""What a scoring rule is made of: contributions of draws, and values of their means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from foldwise.scores.diagnostics import batch_means_variance

Features = Float[np.ndarray, "unit chain draw feature"]
Means = Float[np.ndarray, "unit ... feature"]
# finish(sample, context): scores of the units, and the influence of each block on them
Finish = Callable[..., tuple[np.ndarray, np.ndarray]]


class Drawn(NamedTuple):
    """Consecutive draws of some folds: what was recorded of their test rows, fold after fold.

    ``counts`` are the folds' numbers of test rows, ``width`` the largest of any fold (where rows
    have several numbers, each of these counts as a row), ``classes``
    the values that discrete observations take, ``batch`` the draws of a batch. ``recorded`` holds
    by name what the scores asked for need, by row, chain and draw: ``replicate``, a simulated
    value; ``first`` and ``second``, derivatives of the log density by the observed value;
    ``probability``, that of each class. ``weight`` is that of each draw of the folds or rows that
    are looked at; None: all draws count alike.
    """

    counts: Int[np.ndarray, " fold"]
    observed: Float[np.ndarray, " row"]
    recorded: Mapping[str, Float[np.ndarray, "row chain draw ..."]]
    width: int
    classes: np.ndarray
    batch: int
    weight: Float[np.ndarray, "unit chain draw"] | None = None


def by_number(drawn: Drawn) -> Drawn:
    """The same with each number of a row as a row of its own, where rows have several."""
    if drawn.observed.ndim == 1:
        return drawn
    several = drawn.observed.shape[1]
    recorded = {
        name: np.moveaxis(values, -1, 1).reshape(-1, *values.shape[1:-1])
        for name, values in drawn.recorded.items()
    }
    return drawn._replace(
        counts=drawn.counts * several,
        observed=drawn.observed.ravel(),
        recorded=recorded,
        width=drawn.width * several,
    )


@dataclass(frozen=True)
class Contribution:
    """What each draw contributes to a score, for every test row or for every fold.

    ``features`` gives it for the draws at hand. Those that compare draws with each other need all
    of them at once, so predictive draws are ``stored``; for the others running sums suffice.
    ``weights`` names what each draw is weighed by, if anything: the density of the fold's test
    rows (``joint``) or of the row itself (``row``).
    """

    name: str
    needs: str
    features: Callable[[Drawn], Features]
    by_row: bool = True
    stored: bool = False
    weights: str = ""


@dataclass(frozen=True)
class Aggregate:
    """A total that is a function of the mean score of all test rows, and its derivatives.

    ``of_mean(m, v)`` with m the mean over rows and v the variance of their observed values;
    ``slope`` and ``slope_v`` are its derivatives by m and v. ``share``: it is a share explained, of
    which more is better although rows are errors.
    """

    of_mean: Callable[[Any, float], Any] = lambda m, v: m
    slope: Callable[[Any, float], Any] = lambda m, v: np.ones_like(m)
    slope_v: Callable[[Any, float], Any] = lambda m, v: 0.0
    share: bool = False


@dataclass(frozen=True)
class Rule:
    """A scoring rule.

    ``value(means, context)`` is the score of each unit from the means of its contributions;
    ``context`` are the units' observed values. ``finish``, where given, replaces the jackknife.
    ``aggregate`` says how rows become a total that is not their sum; ``error`` that rows are
    errors, of which less is better; ``discrete`` that observations must be discrete. ``column`` is
    what tables call the values of the score.
    """

    title: str
    contribution: Contribution | None = None
    value: Callable[[Means, Context], np.ndarray] | None = None
    finish: Finish | None = None
    aggregate: Aggregate | None = None
    error: bool = False
    discrete: bool = False
    column: str = "score"

    def parts(self) -> tuple[Contribution, Finish]:
        """What draws contribute, and how its sums become scores and influences of blocks."""
        contribution, value = self.contribution, self.value
        if contribution is not None and self.finish is not None:
            return contribution, self.finish
        if contribution is None or value is None:
            raise ValueError(f"a rule needs a contribution and a value, but {self.title} has none")
        return contribution, lambda sample, context: jackknife(
            sample, lambda means: value(means, context)
        )

    @property
    def sign(self) -> float:
        """1 where a higher total is better, -1 where it is an error."""
        share = self.aggregate is not None and self.aggregate.share
        return -1.0 if self.error and not share else 1.0


class Context(NamedTuple):
    """What the values of units depend on besides their means.

    Observed values and numbers of rows of the units, and the classes that observations may take.
    """

    observed: np.ndarray
    counts: Int[np.ndarray, " unit"]
    classes: np.ndarray


@dataclass(frozen=True)
class Sample:
    """Block sums of one sampler's draws: what the jackknife leaves out in turn.

    ``joined`` is the number of blocks in a batch of each unit; None: one. Where draws have weights,
    sums are of values times weights, and ``weight`` has those of the weights themselves.
    """

    total: Float[np.ndarray, "unit chain block feature"]
    length: int
    draws: int
    full_blocks: int
    joined: Int[np.ndarray, " unit"] | None = None
    weight: Float[np.ndarray, "unit chain block 1"] | None = None

    def variance(
        self, influence: Float[np.ndarray, "unit chain block"]
    ) -> Float[np.ndarray, " unit"]:
        """Monte Carlo variance of values on which the blocks have this influence."""
        return batch_means_variance(influence, self.length, self.draws, self.joined)

    @property
    def count(self) -> int:
        """Draws of all chains."""
        return self.total.shape[1] * self.draws

    @property
    def mean(self) -> Float[np.ndarray, "unit feature"]:
        """Means over all draws."""
        count = self.count if self.weight is None else self.weight.sum(axis=(1, 2))
        return self.total.sum(axis=(1, 2)) / count

    @property
    def without(self) -> Float[np.ndarray, "unit chain block feature"]:
        """Means over the draws outside each full block in turn."""
        count: Any = self.count - self.length
        if self.weight is not None:
            count = self._rest(self.weight)
        return self._rest(self.total) / count

    def _rest(self, sums: np.ndarray) -> np.ndarray:
        return sums.sum(axis=(1, 2))[:, None, None] - sums[:, :, : self.full_blocks]

    def influence(
        self, value: Float[np.ndarray, " unit"], left_out: Float[np.ndarray, "unit chain block"]
    ) -> Float[np.ndarray, "unit chain block"]:
        """Influence of each block on a value, from the values without it.

        (N - b) / b times (value - value without the block), for N draws and blocks of b; for a
        mean it is the block's mean minus the mean. The variance of the value is that of a mean of
        these; adding their average removes the bias of order 1 / N.
        """
        return (value[:, None, None] - left_out) * ((self.count - self.length) / self.length)


def jackknife(
    sample: Sample, value: Callable[[Means], np.ndarray]
) -> tuple[Float[np.ndarray, " unit"], Float[np.ndarray, "unit chain block"]]:
    """Value at the means, its second-order bias removed, and the influence of each block."""
    found = value(sample.mean)
    influence = sample.influence(found, value(sample.without))
    return found + influence.mean(axis=(1, 2)), influence
