"""Nodes and weights of the rules by which the parameters of cells are integrated out."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

# Numbers of nodes along each coordinate that are tried in turn, by number of coordinates: those of
# Gauss-Hermite rules, then of wide ones.
HERMITE = {1: (7, 11, 15, 21, 31, 45), 2: (7, 11, 15, 21), 3: (7, 9, 11, 15)}
WIDE = {1: (61, 91, 137), 2: (31, 45), 3: ()}
RULES = {size: HERMITE[size] + WIDE[size] for size in HERMITE}
# Before them, where a density is wanted at many points: right where conditionals are nearly normal.
FEW = (1, 3, 5)
# How far the wide rules reach, in sds: each farther than the one before, so that a tail that is cut
# off shows.
_REACH = {61: 30.0, 91: 60.0, 137: 120.0, 31: 20.0, 45: 40.0}


class Rule(NamedTuple):
    """Nodes and log weights of a product rule, padded to the largest, and how many are real."""

    nodes: Float[Any, "node D"]
    log_weight: Float[Any, " node"]
    real: Int[Any, ""]


@lru_cache
def rule(size: int, dimensions: int) -> Rule:
    """Product of rules of ``size`` nodes for the standard normal: Gauss-Hermite, or wide ones.

    Wide rules are trapezoids in asinh(x): right for tails that are those of an exponential or a t
    density, and for a second mode that is a few sds away. Neighbours are next to each other: every
    other line runs backwards.
    """
    x, log_w = _wide(size) if size in WIDE[dimensions] else _hermite(size)
    index = np.array(list(product(range(size), repeat=dimensions)))
    for a in range(1, dimensions):
        back = index[:, :a].sum(axis=1) % 2 == 1
        index[back, a] = size - 1 - index[back, a]
    nodes, weights = x[index], log_w[index].sum(axis=1)
    room = RULES[dimensions][-1] ** dimensions
    padded = np.zeros((room, dimensions)), np.zeros(room)
    padded[0][: len(nodes)], padded[1][: len(nodes)] = nodes, weights
    return Rule(padded[0], padded[1], np.int32(len(nodes)))


def _hermite(size: int) -> tuple[np.ndarray, np.ndarray]:
    x, w = np.polynomial.hermite_e.hermegauss(size)
    return x, np.log(w / w.sum())


def _wide(size: int) -> tuple[np.ndarray, np.ndarray]:
    t = np.linspace(-1.0, 1.0, size) * np.arcsinh(_REACH[size])
    x = np.sinh(t)
    return x, np.log(np.cosh(t) * (t[1] - t[0])) - 0.5 * x**2 - 0.5 * np.log(2 * np.pi)
