"""The parameters that belong to no cell, sampled alone, and the cells drawn given them.

With the parameters of cells integrated out, the posterior of the globals g given the rows R is

    p(g | R) ~ p(g) prod_c Z_c(rows of c in R | g) prod_(rows of R in no cell) p(y_i | g),

with the integrals of ``scores/cells.py``: a density in a handful of dimensions, without funnels. A
mixture of t densities is fitted to it (``proposals.py``). For the full-data fit, chains of
independence Metropolis steps with that mixture draw from it: nearly independent draws where the
mixture fits, and repeated ones, which effective numbers show, where it does not. Where none fits,
as with the funnels of schools whose classes are cells, and most globals fall apart given a few, the
proposals of ``layers.py`` are tried. The coordinates of the cells are drawn from their conditional
at each draw.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

from foldwise.models.evaluate import joints_at, rows_at
from foldwise.models.model import Model
from foldwise.models.structure import (
    MOST_APART,
    Structure,
    cells_at_start,
    find_cells,
    without_cells,
)
from foldwise.sampling.layers import Layered, Layers, climbed
from foldwise.sampling.pooled import Draws
from foldwise.sampling.proposals import (
    MOST_GLOBALS,
    Mixture,
    Proposal,
    by_differences,
    climb,
    fitted,
    sharpened,
)
from foldwise.sampling.starts import near_init, normal_range, spread_out
from foldwise.scores.cells import NORMAL_STEPS, STEPS, Integrals
from foldwise.scores.integrals import (
    begin_to_compile_draws,
    conditional_draws,
    log_integrals,
    priors_bent,
)
from foldwise.scores.nodes import FEW, RULES, rule
from foldwise.support.progress import Progress
from foldwise.support.seeds import Stream, generator

# Up to this many globals that all hang together a mixture can fit their posterior where it is
# nearly normal, as that of a fit may be: folds are not refitted so.
_MOST_TOGETHER = 40
CHAINS, DRAWS = 4, 1000
# Metropolis steps of a draw, of models of so few rows that these cost nothing beside compiling: one
# in two or three is refused, and with three steps twice as many of 4,000 draws are effective
# (bench/fit.py).
_MOST_STEPS, _FEW_ROWS = 3, 1000
# Starts that are climbed from, those of many globals, whose gradients by differences take long, and
# how far to either side the prior's curvature there is looked at.
_STARTS, _FEW_STARTS, _PRIOR_STEP = 8, 4, 1e-2
# Points at which rules are compared, and to how many nats they must agree on differences of the
# log density there.
_LOOKED_AT, _TOLERANCE = 64, 5e-3
# Nats that one node may lack in an integral of a conditional that is normal, and nearly normal.
_NORMAL, _NEARLY = 1e-8, 0.02


def draw_globals(
    model: Model,
    seed: int,
    bar: Progress,
    draws: int = DRAWS,
    chains: int = CHAINS,
    longer: int = 1,
) -> Draws | None:
    """Draws of all parameters; None where there are no cells, or the globals cannot be had so.

    ``longer`` is how many times the usual number of Metropolis steps a draw takes.
    """
    structure = cells_at_start(model)
    if not len(structure) or not len(structure.globals) or too_many(structure, _MOST_TOGETHER):
        return None
    bar.start(f"full-data fit{model.label}")
    probes = model.probes()
    bent = priors_bent(model, structure, probes)
    nodes = FEW[0] if _many_together(structure) else FEW[1]  # climbs of many take long
    marginal = Marginal(model, structure, probes[:1], nodes=nodes, bent=bent)
    if _steps(marginal, probes):
        begin_to_compile_draws(model, structure, bent)
    chosen = structure.globals
    # before starts are looked for, which takes longer
    in_layers = len(chosen) > MOST_GLOBALS and structure.apart
    if in_layers and Layers.found(marginal, probes[1:, chosen]) is None:
        return None
    found = _drawn(marginal, _starts(marginal, seed), seed, draws, chains, longer)
    if found is None:
        return None
    placed = marginal.placed(found)
    steps = _steps(marginal, placed)
    drawn, failed = conditional_draws(model, structure, placed, seed, steps, marginal.bent)
    # what was found at the starting point must hold at the draws, or other parameters are coupled
    if failed.any() or find_cells(model, drawn).digest != structure.digest:
        return None
    return _of_chains(marginal, drawn, chains)


def too_many(structure: Structure, most: int = MOST_GLOBALS) -> bool:
    """Whether there are more globals than proposals can be had for: ``most``, more in layers."""
    count = len(structure.globals)
    return count > MOST_APART or (count > most and not structure.apart)


def _many_together(structure: Structure) -> bool:
    """Whether there are more globals than usual, which no layers tell apart."""
    return len(structure.globals) > MOST_GLOBALS and not structure.apart


def draw_small(
    model: Model, starts: Float[np.ndarray, "start d"], seed: int, bar: Progress
) -> Draws | None:
    """Draws of a model of a handful of parameters, climbing from ``starts``; None if it fails."""
    if model.dimension > MOST_GLOBALS:
        return None
    bar.start(f"full-data fit{model.label}")
    marginal = Marginal(model, without_cells(model), model.probes()[:1])
    found = _drawn(marginal, starts, seed, DRAWS, CHAINS)
    return None if found is None else _of_chains(marginal, found, CHAINS)


def _starts(marginal: Marginal, seed: int) -> Float[np.ndarray, "start g"]:
    """Starts of the globals: near ``init``, and all over their prior."""
    model, chosen = marginal.model, marginal.structure.globals
    count = _FEW_STARTS if _many_together(marginal.structure) else _STARTS
    near, init = (points[..., chosen] for points in near_init(model, count, seed))
    if callable(model.init):
        return near
    terms = model.n_obs + model.dimension
    return spread_out(near, init, marginal.slopes, _prior_range(marginal, init), terms, seed)[0]


def _prior_range(
    marginal: Marginal, init: Float[np.ndarray, " g"]
) -> tuple[Float[np.ndarray, " g"], Float[np.ndarray, " g"]]:
    """Centre and sd of the normal prior with the slope and curvature of the globals' at ``init``.

    From values of log p(g), which rounding leaves with eps |log p(g)|, at steps to either side.
    """
    none = np.zeros(marginal.model.n_obs, bool)
    prior = Marginal(
        marginal.model, marginal.structure, marginal.reference, none, bent=marginal.bent
    )
    step = _PRIOR_STEP * (1.0 + np.abs(init))
    values = prior(np.concatenate([init[None], init - np.diag(step), init + np.diag(step)]))
    here, (before, after) = values[0], np.split(values[1:], 2)
    with np.errstate(invalid="ignore"):
        curvature = (2.0 * here - before - after) / step**2
        noise = 100.0 * np.finfo(float).eps * (1.0 + np.abs(here)) / step**2
        return normal_range(init, (after - before) / (2.0 * step), curvature, noise)


def _drawn(
    marginal: Marginal,
    starts: Float[np.ndarray, "start g"],
    seed: int,
    draws: int,
    chains: int,
    longer: int = 1,
) -> Float[np.ndarray, "draw g"] | None:
    """Chains of draws of the globals, one after another; None where no mixture fits."""
    rng = generator(seed, Stream.GLOBALS)
    proposal = _mixture(marginal, starts, rng) or _layered(marginal, starts, rng)
    return None if proposal is None else _metropolis(marginal, proposal, draws, chains, rng, longer)


def _mixture(
    marginal: Marginal, starts: Float[np.ndarray, "start g"], rng: np.random.Generator
) -> Mixture | None:
    """A mixture around the modes of the globals; None where none fits."""
    if starts.shape[1] > MOST_GLOBALS and not _many_together(marginal.structure):
        return None
    modes = climb(marginal, starts)
    if modes is not None and _many_together(marginal.structure):
        modes = sharpened(marginal, modes)
    if modes is None or not marginal.settle(Mixture.of(modes), rng):
        return None
    return fitted(marginal, Mixture.of(modes), rng)


def _layered(
    marginal: Marginal, starts: Float[np.ndarray, "start g"], rng: np.random.Generator
) -> Layered | None:
    """Proposals in layers, with a rule that serves them; None where none fit."""
    found = climbed(marginal, starts, rng)
    return found if found is not None and marginal.settle(found, rng) else None


def _of_chains(marginal: Marginal, drawn: Float[np.ndarray, "draw d"], chains: int) -> Draws:
    positions = drawn.reshape(chains, -1, marginal.model.dimension)
    sampled = marginal.structure.globals if len(marginal.structure) else None
    unknown = np.full(chains, np.nan)
    return Draws(positions, unknown, 0, marginal.evaluations, sampled=sampled)


class Marginal:
    """Log posterior density of the globals given some rows, up to a constant, at many points.

    ``reference`` are positions whose cells integrals begin from; without ``keep`` all rows count;
    ``bent`` says that the conditional prior of cells is not normal.
    Without cells it is the density of all parameters.
    """

    def __init__(
        self,
        model: Model,
        structure: Structure,
        reference: Float[np.ndarray, "position d"],
        keep: Bool[np.ndarray, " row"] | None = None,
        nodes: int | None = None,
        bent: bool = False,
    ):
        self.model, self.structure, self.reference, self.bent = model, structure, reference, bent
        self.keep = np.ones(model.n_obs, bool) if keep is None else keep
        self.dimensions = int(structure.sizes.max(initial=1))
        # few until they are settled: climbs need no more
        self.nodes, self.evaluations = nodes or FEW[1], 0
        self.alone = (structure.row_cell < 0) & self.keep

    def placed(self, points: Float[np.ndarray, "point g"]) -> Float[np.ndarray, "point d"]:
        """Positions with these globals; the cells' coordinates are where integrals begin."""
        positions = np.resize(self.reference, (len(points), self.model.dimension))
        positions[:, self.structure.globals] = points
        return positions

    def __call__(self, points: Float[np.ndarray, "point g"]) -> Float[np.ndarray, " point"]:
        """Log densities; -inf where an integral has no mode or a value is no number."""
        positions, value = self.placed(points), np.zeros(len(points))
        self.evaluations += len(points)
        if self.model.joint_log_likelihood is not None:
            value = joints_at(self.model, positions, self.keep[None])[0]
            value = value + np.concatenate([prior for prior, _ in rows_at(self.model, positions)])
            return np.where(np.isfinite(value), value, -np.inf)
        if len(self.structure):
            value = self.integrals(positions, self.nodes).density()
        if self.alone.any() or not len(self.structure):
            parts = list(rows_at(self.model, positions))
            value = value + np.concatenate([rows[:, self.alone].sum(axis=1) for _, rows in parts])
            if not len(self.structure):
                value = value + np.concatenate([prior for prior, _ in parts])
        return np.where(np.isfinite(value), value, -np.inf)

    def integrals(self, positions: Float[np.ndarray, "position d"], nodes: int) -> Integrals:
        """Those of all cells, by a rule of so many nodes."""
        chosen = rule(nodes, self.dimensions)
        return log_integrals(
            self.model, self.structure, positions, self.keep, chosen, bent=self.bent
        )

    def slopes(
        self, points: Float[np.ndarray, "point g"]
    ) -> tuple[Float[np.ndarray, " point"], Float[np.ndarray, "point g"]]:
        """Log densities and their gradients, by central differences, in one call."""
        return by_differences(self, points, 1e-4)

    def settle(self, around: Proposal, rng: np.random.Generator) -> bool:
        """Choose the smallest rule that agrees with the next at some points; whether one does."""
        if not len(self.structure):
            return True
        points = around.draw(rng, _LOOKED_AT)
        sizes = (*FEW, *RULES[self.dimensions])
        before = None
        for number, size in enumerate(sizes):
            self.nodes = size
            values = self(points)
            good = np.isfinite(values)
            if before is not None and good.mean() > 0.8:
                off = (values - before)[good]
                if np.abs(off - np.median(off)).max() < _TOLERANCE:
                    self.nodes = sizes[number - 1]
                    return True
            before = values
        return False


def _steps(marginal: Marginal, placed: Float[np.ndarray, "draw d"]) -> int:
    """Metropolis steps by which cells are drawn: few where one node has their integrals nearly.

    None where it has them, as of normal conditionals. Counts with a rate of 4 lack 0.02 nats, and
    the M of ``conditional_draws`` is 1.35 for them. Three nodes would not show it: of what one node
    lacks with such counts, 1 / (12 y) nats, they see nothing.
    """
    some = placed[np.unique(np.linspace(0, len(placed) - 1, _LOOKED_AT).astype(int))]
    one, all_nodes = (marginal.integrals(some, n).own for n in (1, max(marginal.nodes, FEW[-1])))
    with np.errstate(invalid="ignore"):  # no numbers where integrals failed
        off = np.abs(one - all_nodes).max()
    return 0 if off <= _NORMAL else NORMAL_STEPS if off <= _NEARLY else STEPS


def _metropolis(
    marginal: Marginal,
    proposal: Proposal,
    draws: int,
    chains: int,
    rng: np.random.Generator,
    longer: int,
) -> Float[np.ndarray, "draw g"]:
    """Chains of independence Metropolis steps, one after another, each after a few steps."""
    each = longer * int(np.clip(_FEW_ROWS // marginal.model.n_obs, 1, _MOST_STEPS))
    warm = draws // 10
    points = proposal.draw(rng, chains * (warm + each * draws))
    ratio = (marginal(points) - proposal.log_density(points)).reshape(chains, -1)
    uniform = np.log(rng.uniform(size=ratio.shape))
    chosen: Int[np.ndarray, "chain step"] = np.zeros(ratio.shape, int)
    for chain in range(chains):
        here = int(np.argmax(np.isfinite(ratio[chain])))
        for step in range(ratio.shape[1]):
            if uniform[chain, step] < ratio[chain, step] - ratio[chain, here]:
                here = step
            chosen[chain, step] = here
    flat = chosen + np.arange(chains)[:, None] * ratio.shape[1]
    return points[flat[:, warm::each].ravel()]
