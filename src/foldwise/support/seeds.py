"""Where randomness comes from: one stream of a run's seed for each purpose.

A chain's numbers depend on the seed, the purpose and what they are for (a fold's number in its
scheme, a rung), never on what runs beside it. Numbers of streams are part of what a seed means:
changing one changes draws.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from jaxtyping import UInt32


class Stream(IntEnum):
    """What random numbers are for."""

    PILOTS = 2  # which full-data draws the pilots start from
    SHUFFLES = 3  # permutations behind the benchmark of R-hat-max
    STARTS = 4  # which full-data draws a fold's chains start from
    CHAINS = 5  # keys of a fold's chains, and of those of its rungs
    FIT_CHAINS = 7  # chains of the full-data fit: two words for their start, two for their moves
    SHORT_CHAINS = 8  # moves of the many short chains of a fit
    SPREAD = 9  # starts of a fit all over the prior
    CHECK = 10  # chains that check draws made elsewhere
    GLOBALS = 11  # draws of the globals of models with cells
    CELLS = 12  # draws of the cells given the globals


def generator(seed: int, stream: Stream, *numbers: int) -> np.random.Generator:
    """NumPy's generator for one purpose."""
    return np.random.default_rng([seed, int(stream), *numbers])


def words(seed: int, stream: Stream, *numbers: int, count: int) -> UInt32[np.ndarray, " count"]:
    """Random words for one purpose, from which keys are made."""
    return np.random.SeedSequence([seed, int(stream), *numbers]).generate_state(count)
