"""A model as a function of the arrays that hold parameters of cells, the others held still."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from foldwise.models.model import Model


class Moving:
    """The arrays of a position that hold coordinates of cells; the others stay as they are.

    So that derivatives by the globals are not even traced. ``coordinates`` says where those of the
    cells are in these arrays, end to end, and ``along`` are directions in which one coordinate of
    all cells moves.
    """

    def __init__(self, model: Model, coordinates: np.ndarray, real: np.ndarray):
        self.model = model
        along = np.zeros((real.shape[1], model.dimension))
        for a in range(real.shape[1]):
            along[a, coordinates[real[:, a], a]] = 1.0
        leaves = [model.leaves(jnp.asarray(one)) for one in along]
        sizes = [leaf.size for leaf in leaves[0]]
        inside = np.split(along.any(axis=0), np.cumsum(sizes)[:-1])
        self.which = [bool(leaf.any()) for leaf in inside]
        self.coordinates = (np.cumsum(np.repeat(self.which, sizes)) - 1)[coordinates]
        self.along = [jnp.stack(leaf) for leaf in self._chosen(list(zip(*leaves, strict=True)))]

    def _chosen(self, leaves: list[Any]) -> list[Any]:
        return [leaf for leaf, moves in zip(leaves, self.which, strict=True) if moves]

    def of(
        self, function: Callable[[Any], Array], flat: Float[Array, " d"]
    ) -> tuple[Callable[[list[Array]], Array], list[Array]]:
        """``function`` of a position as one of the arrays that move, and these arrays."""
        leaves = self.model.leaves(flat)

        def of_moving(moving: list[Array]) -> Array:
            own = iter(moving)
            parts = [
                next(own) if moves else leaf for leaf, moves in zip(leaves, self.which, strict=True)
            ]
            return function(self.model.of_leaves(parts))

        return of_moving, self._chosen(leaves)

    @staticmethod
    def taken(moving: list[Array]) -> Float[Array, " moving"]:
        """These arrays end to end."""
        return jnp.concatenate([leaf.ravel() for leaf in moving])
