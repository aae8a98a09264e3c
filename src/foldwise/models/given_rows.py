"""Rows that depend on each other, given some of them: differences of joint log densities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class GivenRows:
    """What follows from ``flat_joint`` and ``flat_log_prior``."""

    n_obs: int

    def flat_joint(self, flat: Float[Array, " d"], rows: Bool[Array, " row"]) -> Float[Array, ""]:
        """Joint log density of the rows marked, at a flat position."""
        raise NotImplementedError

    def flat_log_prior(self, flat: Float[Array, " d"]) -> Float[Array, ""]:
        """Log prior of a flat position."""
        raise NotImplementedError

    def flat_posterior(
        self, flat: Float[Array, " d"], rows: Bool[Array, " row"]
    ) -> Float[Array, ""]:
        """The same with the log prior."""
        seen = self.flat_joint(flat, rows)
        return self.flat_log_prior(flat) + seen

    def flat_given(
        self, flat: Float[Array, " d"], rows: Bool[Array, " row"], train: Bool[Array, " row"]
    ) -> Float[Array, ""]:
        """Log density of rows that depend on others, given the training rows without them."""
        return self.flat_joint(flat, train | rows) - self.flat_joint(flat, train & ~rows)

    def flat_rows_given(
        self,
        flat: Float[Array, " d"],
        rows: Int[Array, " slot"],
        valid: Bool[Array, " slot"],
        train: Bool[Array, " row"],
        trained: bool,
    ) -> Float[Array, " slot"]:
        """The same of each of some rows by itself; ``trained`` says whether they train."""

        def of_row(given: tuple[Array, Array]) -> Array:
            marked = jnp.zeros(self.n_obs, bool).at[given[0]].max(given[1])
            return self.flat_given(flat, marked, train)

        return jnp.where(valid, jax.lax.map(of_row, (rows, valid)), 0.0)
