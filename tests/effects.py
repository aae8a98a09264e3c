"""Models with effects of groups, and the integrals over a group's effects by brute force.

Row i of group j has the linear predictor mu + x_i . u_j, with x_i the first powers of a covariate
and as many effects u_j as the group has. The groups may differ in the number of effects, in the
density of their rows and in the prior of their effects, so that one model, compiled once, has all
that a test asks for.
"""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import gammaln, logsumexp

import foldwise as fw
from foldwise.models.structure import Structure, find_cells
from foldwise.scores.cell_sets import Needs

LOG_2PI = np.log(2 * np.pi)


def _chosen(y, size):
    """Log binomial coefficient; of data alone, so that JAX need not compile it."""
    return gammaln(size) - gammaln(y + 1.0) - gammaln(size - y)


# Log density of rows y with linear predictor eta.
ROWS = {
    "normal": lambda y, eta: -0.5 * ((y - eta) / 0.7) ** 2 - np.log(0.7) - 0.5 * LOG_2PI,
    "Poisson": lambda y, eta: y * eta - jnp.exp(eta) - gammaln(y + 1.0),
    "binomial": lambda y, eta: _chosen(y, 8.0) + y * eta - 7.0 * jax.nn.softplus(eta),
    "Bernoulli": lambda y, eta: y * eta - jax.nn.softplus(eta),
    "negative binomial": lambda y, eta: (
        y * eta - (y + 2.0) * jnp.log(2.0 + jnp.exp(eta)) + np.log(4.0 * (y + 1.0))
    ),
    "Student-t": lambda y, eta: -2.5 * jnp.log1p((y - eta) ** 2 / 2.0),
    "narrow t": lambda y, eta: -2.0 * jnp.log1p(((y - eta) / 0.1) ** 2 / 3.0),
    "Laplace": lambda y, eta: -jnp.abs(y - eta) / 0.5,
    "exponential": lambda y, eta: jnp.where(y > eta, eta - y, -jnp.inf),
}
# Log prior of effects divided by their scale, summed over the last axis.
PRIORS = {
    "normal": lambda z: -0.5 * (jnp.sum(z**2, -1) + 0.4 * jnp.sum(z, -1) ** 2),
    "Student-t": lambda z: jnp.sum(-2.5 * jnp.log1p(z**2 / 4.0), -1),
    "mixture": lambda z: jnp.sum(
        jnp.logaddexp(-0.5 * (z - 1) ** 2, -2.0 * (z + 1) ** 2 + np.log(2.0)), -1
    ),
    "two peaks": lambda z: jnp.sum(
        jnp.logaddexp(-50.0 * (z - 1.5) ** 2, -50.0 * (z + 1.5) ** 2), -1
    ),
    "Laplace": lambda z: -jnp.sum(jnp.abs(z), -1),
}


@dataclass(frozen=True)
class Group:
    """Effects and rows of a group: number of effects, density of rows, prior, number of rows."""

    effects: int = 1
    kind: str = "normal"
    prior: str = "normal"
    rows: int = 4


class Effects:
    """A model of such groups; positions are (log tau, mu, u_1, u_2, ...)."""

    def __init__(self, groups: list[Group], seed: int = 0):
        rng = np.random.default_rng(seed)
        self.groups = groups
        self.rows = np.split(
            np.arange(sum(g.rows for g in groups)), np.cumsum([g.rows for g in groups])
        )[:-1]
        self.group = np.repeat(np.arange(len(groups)), [g.rows for g in groups])
        ends = np.cumsum([g.effects for g in groups])
        self.effects = [np.arange(e - g.effects, e) for e, g in zip(ends, groups, strict=True)]
        self.x = [np.vander(np.linspace(-1, 1, g.rows), g.effects, True) for g in groups]
        self.y = [self._data(rng, g, x) for g, x in zip(groups, self.x, strict=True)]

    @staticmethod
    def _data(rng, group, x):
        eta = 0.3 + x @ (0.8 * rng.normal(size=group.effects))
        draw = {
            "Poisson": lambda: rng.poisson(np.exp(eta)),
            "negative binomial": lambda: rng.poisson(np.exp(eta) * rng.gamma(2, 0.5, len(eta))),
            "binomial": lambda: rng.binomial(7, 1 / (1 + np.exp(-eta))),
            "Bernoulli": lambda: rng.binomial(1, 1 / (1 + np.exp(-eta))),
            "narrow t": lambda: eta + 0.1 * rng.normal(size=len(eta)),
            "exponential": lambda: eta + 0.5 + rng.exponential(size=len(eta)),
        }
        normal = eta + 0.7 * rng.normal(size=len(eta))
        return np.asarray(draw.get(group.kind, lambda: normal)(), float)

    @cached_property
    def model(self) -> fw.Model:
        most = max(g.effects for g in self.groups)
        index = np.zeros((len(self.groups), most), int)
        x = np.zeros((len(self.group), most))
        for j, effects in enumerate(self.effects):
            index[j, : len(effects)] = effects
            x[self.rows[j], : len(effects)] = self.x[j]
        index, y = index[self.group], np.concatenate(self.y)
        kinds = np.array([g.kind for g in self.groups])[self.group]
        of_kind = {kind: np.flatnonzero(kinds == kind) for kind in dict.fromkeys(kinds.tolist())}
        order = np.argsort(np.concatenate(list(of_kind.values())))

        def log_likelihood(p):
            eta = p["mu"] + (x * p["u"][index]).sum(axis=1)
            parts = [ROWS[kind](y[rows], eta[rows]) for kind, rows in of_kind.items()]
            return jnp.concatenate(parts)[order]

        alike = dict.fromkeys((g.prior, g.effects) for g in self.groups)
        of_prior = {
            key: np.stack([e for e, g in self._pairs() if (g.prior, g.effects) == key])
            for key in alike
        }

        def log_prior(p):
            z = p["u"] / jnp.exp(p["log_tau"])
            parts = [jnp.sum(PRIORS[name](z[at])) for (name, _), at in of_prior.items()]
            shared = p["mu"] ** 2 + p["log_tau"] ** 2
            return sum(parts) - len(p["u"]) * p["log_tau"] - 0.5 * shared

        start = {"log_tau": 0.0, "mu": 0.0, "u": np.zeros(sum(g.effects for g in self.groups))}
        return fw.Model(log_prior, log_likelihood, start, len(self.group))

    def _pairs(self):
        return zip(self.effects, self.groups, strict=True)

    def draws(self, count: int = 2, seed: int = 1) -> np.ndarray:
        """Positions somewhere near the posterior."""
        return 0.3 * np.random.default_rng(seed).normal(size=(count, self.model.dimension))

    @cached_property
    def structure(self) -> Structure:
        return find_cells(self.model, self.draws(8))

    def group_of(self, cell: int) -> int:
        return int(self.group[np.flatnonzero(self.structure.row_cell == cell)[0]])

    def constant(self, cell: int) -> float:
        """What foldwise adds for effects that a cell lacks and others have: a normal integral."""
        sizes = self.structure.sizes
        return 0.5 * LOG_2PI * float(sizes.max() - sizes[cell])

    def brute(self, cell: int, draw, sets, half_width: float = 8.0, points=None) -> np.ndarray:
        """log Z of the row sets ``sets`` (arrays of row numbers), less the prior at one place.

        That is the prior's mode where all priors are normal, else the draw's.
        """
        j = self.group_of(cell)
        group, size = self.groups[j], self.groups[j].effects
        points = points or {1: 20001, 2: 501, 3: 91}[size]
        axis = np.linspace(-half_width, half_width, points)
        grid = np.stack(np.meshgrid(*[axis] * size, indexing="ij"), -1).reshape(-1, size)
        tau = np.exp(draw[0])
        with jax.enable_x64(True):
            prior = np.asarray(PRIORS[group.prior](grid / tau))
            bent = any(g.prior != "normal" for g in self.groups)
            here = float(PRIORS[group.prior](bent * draw[2:][self.effects[j]] / tau))
            rows = np.asarray(ROWS[group.kind](self.y[j], draw[1] + grid @ self.x[j].T))
        volume = size * np.log(axis[1] - axis[0]) + self.constant(cell)
        first = self.rows[j][0]
        return np.array(
            [logsumexp(prior + rows[:, s - first].sum(axis=1)) + volume - here for s in sets]
        )

    def exact(self, cell: int, draw, rows) -> float:
        """The same in closed form, for normal rows and effects."""
        j = self.group_of(cell)
        size, tau = self.groups[j].effects, np.exp(draw[0])
        scale = tau**2 * np.linalg.inv(np.eye(size) + 0.4)
        x = self.x[j][rows - self.rows[j][0]]
        away = self.y[j][rows - self.rows[j][0]] - draw[1]
        covariance = x @ scale @ x.T + 0.7**2 * np.eye(len(rows))
        at_mode = log_normal(np.zeros(size), scale)
        return log_normal(away, covariance) - at_mode + self.constant(cell)


def log_normal(x, covariance) -> float:
    """Log density of a normal vector of mean zero."""
    quadratic = x @ np.linalg.solve(covariance, x)
    return -0.5 * (quadratic + np.linalg.slogdet(2 * np.pi * covariance)[1])


def columns(structure: Structure, needs: Needs) -> list[tuple[int, np.ndarray]]:
    """Cell and rows of every integral of ``needs``: whole cells, sets, added sets."""
    every = [np.flatnonzero(structure.row_cell == cell) for cell in range(len(structure))]
    found = list(enumerate(every))
    for k, cell in enumerate(needs.cell):
        removed = needs.removed[needs.start[k] : needs.start[k + 1]]
        found.append((int(cell), np.setdiff1d(every[cell], removed)))
    for host, row in zip(needs.host, needs.row, strict=True):
        cell, rows = found[len(structure) + host]
        found.append((cell, np.union1d(rows, row)))
    return found
