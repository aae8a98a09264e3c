"""Whether the globals of a model are sampled alone, and the model and fit of them.

Chains on the globals have no funnels and few dimensions, and the scores of their draws are those of
the test rows given the globals, exact, instead of given one value of each cell. But a gradient of
their density is worth many of the model's. It is used where there are cells with normal conditional
priors and all integrals of the folds can be had, unless most parameters would still be sampled and
no group loses all its rows (``_pays``). Where draws are kept, or scores need predictive draws, the
cells are drawn from their conditional at every draw that is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float

from foldwise.folds.folds import Folds
from foldwise.models.model import Model
from foldwise.models.structure import Structure, find_cells
from foldwise.sampling.fit import Fit
from foldwise.sampling.run import Settings
from foldwise.scores.cell_sets import TOLERANCE, TOTAL_TOLERANCE, Values, needs_of
from foldwise.scores.integrals import log_integrals
from foldwise.scores.marginal_model import MarginalModel, Rules
from foldwise.scores.needs import rule_of
from foldwise.scores.nodes import RULES, rule
from foldwise.scores.rules import LOG_SCORES

NO_GROUPS = "no parameters belong to a group of rows alone"
# Nodes along each coordinate that are tried for densities, before those of the integrals. Never
# one, although it has the integral of a normal conditional: gradients and derivatives by the rows'
# values are means over the nodes, of functions of second degree.
_FEW_NODES = (2, 3, 5)
# Draws at which rules are compared, and to how many nats they must agree on differences of the log
# density there: what HMC targets may be off by.
_LOOKED_AT, _TOLERANCE = 64, 5e-3
# Nodes of a cell beyond which chains on all parameters are better. With few, Monte Carlo variances
# of totals are 70 to 400 times smaller (counts 73, rats A 100, groups of 2 to 300 rows 100 left out
# whole and 420 row by row) in 2 to 6 times the time: a gradient with 4 nodes costs 13 of the
# model's, and each node more about as much as one. Scores are evaluated once a draw.
_MOST_NODES, _MOST_SCORE_NODES = 125, 1000
# Folds whose rows rules are compared on.
_FOLDS = 6


def all_parameters(settings: Settings, model: Model, folds: Folds) -> str | None:
    """Why chains are on all parameters, whatever the structure; None where they need not be."""
    weighed = {name: _weighed_by(name, folds) for name in settings.scores}
    of_sets, of_rows = (
        [name for name, by in weighed.items() if by == unit] for unit in ("joint", "row")
    )
    if of_sets and of_rows and folds.largest_test > 1:
        return f"{' and '.join(of_sets + of_rows)} are integrated in different ways"
    if settings.precision != "float64":
        return "integrals need double precision"
    if model.joint_log_likelihood is not None:
        return "rows depend on each other"
    return None


def _weighed_by(name: str, folds: Folds) -> str:
    """Whose density a score needs at every draw: that of test sets, of rows, or of neither."""
    if name in LOG_SCORES:
        return "joint" if name == "log" else "row"
    contribution = rule_of(name, folds).contribution
    return "" if contribution is None else contribution.weights


def marginal_models(
    models: Sequence[Model],
    fits: Sequence[Fit],
    folds: Folds,
    by_row: bool,
    wanted: bool = False,
) -> tuple[list[MarginalModel], str]:
    """Models of the globals alone, for chains of ``folds``; none where that is not to be had.

    And in words, why not. The models are of one family: they must have the same cells. ``wanted``:
    whether it pays or not.
    """
    structures = [find_cells(model, fit.flat) for model, fit in zip(models, fits, strict=True)]
    if not len(structures[0]):
        return [], NO_GROUPS
    if not len(structures[0].globals):
        return [], "all parameters belong to groups of rows alone: none are left to sample"
    if len({structure.digest for structure in structures}) > 1:
        return [], "the models of the family differ in what belongs to groups"
    structure, rules = structures[0], Rules(0, 0)
    if not wanted and not pays(structure, folds):
        return [], "most are shared, and no group loses all its rows"
    for model, fit in zip(models, fits, strict=True):
        some = np.unique(np.linspace(0, len(fit.flat) - 1, _LOOKED_AT).astype(int))
        draws = fit.flat[some]
        values = Values(model, structure, needs_of(structure, folds, by_row), draws)
        if values.bent:
            return [], "the priors of groups given the other parameters are not normal"
        if values.unsettled.any():
            return [], "integrals over the parameters of groups cannot be relied on"
        most = max(_FEW_NODES[0], *(step.nodes for step in values.passes))
        own = _rules(model, structure, draws, _masks(folds), most, len(folds))
        # the nodes of training rows serve single test rows too: these rules were chosen for that
        rules = Rules(
            max(rules.density, own.density), max(rules.scores, most if by_row else own.scores)
        )
    nodes = [size ** _dimensions(structure) for size in rules]
    if nodes[0] > _MOST_NODES or nodes[1] > _MOST_SCORE_NODES:
        return [], f"integrals over the parameters of groups take {max(nodes)} nodes each"
    return [MarginalModel.of(model, structure, rules) for model in models], ""


def pays(structure: Structure, folds: Folds) -> bool:
    """Whether chains on the globals are worth what they cost.

    They are where at most half of the parameters are left, or groups lose all their rows, whose
    effects then scatter as their prior does. Months of air travel (bench/compare.py: 12 effects
    beside 13 globals, the future left out) make the total's Monte Carlo variance 2.3 times
    smaller, and take 4 times as long.
    """
    if not structure.mostly_shared:
        return True
    needs = needs_of(structure, folds, by_row=False)
    rows_of = np.bincount(structure.row_cell[structure.row_cell >= 0], minlength=len(structure))
    return bool((np.diff(needs.start) == rows_of[needs.cell]).any())


def _masks(folds: Folds) -> Bool[np.ndarray, "pair set row"]:
    """Training rows of some folds, and these with the test rows."""
    members = np.unique(np.linspace(0, len(folds) - 1, _FOLDS).astype(int))
    train = folds.train_mask(members)
    both = train.copy()
    for k, member in enumerate(members):
        both[k, folds.test_rows[folds.test_start[member] : folds.test_start[member + 1]]] = True
    return np.stack([train, both], axis=1)


def _rules(
    model: Model,
    structure: Structure,
    draws: Float[np.ndarray, "draw d"],
    masks: Bool[np.ndarray, "pair set row"],
    most: int,
    folds: int,
) -> Rules:
    """The smallest rules that agree with the one of ``most`` nodes, on densities and on scores."""
    truth = _totals(model, structure, draws, masks, most)
    exact = min(TOLERANCE, TOTAL_TOLERANCE / folds)
    density = scores = most
    for size in reversed(
        [size for size in (*_FEW_NODES, *RULES[_dimensions(structure)]) if size < most]
    ):
        off = _totals(model, structure, draws, masks, size) - truth
        if density > size and np.ptp(off, axis=-1).max() <= 2 * _TOLERANCE:
            density = size
        if np.abs(off[:, 1] - off[:, 0]).max() <= exact:
            scores = size
    return Rules(density, scores)


def _totals(
    model: Model,
    structure: Structure,
    draws: Float[np.ndarray, "draw d"],
    masks: Bool[np.ndarray, "pair set row"],
    size: int,
) -> Float[np.ndarray, "pair set draw"]:
    """Sums over cells of log Z of the rows marked."""
    nodes = rule(size, _dimensions(structure))
    flat = masks.reshape(-1, masks.shape[-1])
    found = [log_integrals(model, structure, draws, keep, nodes).own.sum(axis=0) for keep in flat]
    return np.stack(found).reshape(*masks.shape[:2], len(draws))


def _dimensions(structure: Structure) -> int:
    return int(structure.sizes.max())


def marginal_fit(model: MarginalModel, fit: Fit) -> Fit:
    """The draws of the globals of a fit of all parameters."""
    chosen = model.structure.globals
    positions = np.ascontiguousarray(fit.positions[:, :, chosen])
    return replace(fit, positions=positions, sampled=None)
