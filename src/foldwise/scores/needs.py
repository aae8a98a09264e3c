"""What scores need of a model, and of each draw."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from foldwise.folds.folds import Folds
from foldwise.models.model import Model
from foldwise.scores.rule import (
    Contribution,
    Rule,
)
from foldwise.scores.rules import (
    BELOW,
    CLASSES,
    LOG_SCORES,
    MOST_CLASSES,
    MOST_JOINT_ROWS,
    RULES,
    find_rule,
)
from foldwise.support.checks import check_name
from foldwise.support.runtime import precision_context

KEEP = ("position", "predictive")
# Scores from predictive draws that take rows of several numbers.
WHOLE_ROWS = ("energy", "dss")
# Probability of classes not seen that a row may have before scores of classes are refused.
MOST_UNSEEN = 1e-3


class Emit(NamedTuple):
    """What the program records of each draw besides the joint log density of the test rows.

    ``by_row``: their log densities row by row. ``derivatives``: the first and second derivative of
    each row's log density by its observed value. ``replicate``: simulated numbers of each row, one
    for each that is observed; 0: none. ``classes``: values of which the probability of each row is
    wanted. ``position``: the position.
    """

    by_row: bool = False
    derivatives: bool = False
    replicate: int = 0
    classes: tuple[float, ...] = ()
    position: bool = False


def rule_of(name: str, folds: Folds) -> Rule:
    """The rule called ``name`` as it applies to ``folds``, the same in every subset of a scheme.

    Folds of a single row have one Hyvarinen score, which bridges. Where a fold has more than
    ``MOST_JOINT_ROWS`` test rows, ``dss`` takes all of them as uncorrelated, row by row.
    """
    if name == "hyvarinen_pointwise" and folds.largest_test == 1:
        return RULES["hyvarinen"]
    if name == "dss" and folds.largest_test > MOST_JOINT_ROWS:
        return RULES["dss_pointwise"]
    return find_rule(name)


def rules_of(names: Iterable[str]) -> dict[str, Rule]:
    """The rules called ``names``; raises where there is none of that name."""
    return {name: find_rule(name) for name in names}


def contributions_of(names: Iterable[str], folds: Folds) -> list[Contribution]:
    """What the draws contribute to the scores ``names``; predictive draws always to the PIT."""
    rules = [rule_of(name, folds) for name in names]
    found = {r.contribution.name: r.contribution for r in rules if r.contribution is not None}
    if any(contribution.needs == "simulate" for contribution in found.values()):
        found[BELOW.name] = BELOW
    return list(found.values())


def emitted(
    names: tuple[str, ...],
    keep: tuple[str, ...],
    folds: Folds,
    model: Model,
    classes: Float[np.ndarray, " class"],
) -> Emit:
    """What the program must record of each draw for the scores ``names`` and for ``keep``.

    Probabilities of classes come from ``row_log_density`` where there is one: they have less noise
    than counts of predictive draws.
    """
    needed = contributions_of(names, folds)
    by_density = CLASSES in needed and model.row_log_density is not None
    simulated = any(c.needs == "simulate" for c in needed)
    rows = "log_pointwise" in names or any(c.weights == "row" for c in needed)
    replicates = simulated or "predictive" in keep or (CLASSES in needed and not by_density)
    return Emit(
        by_row=rows and int(folds.n_test.max()) > 1,
        derivatives=any(c.needs == "row_log_density" for c in needed),
        replicate=model.numbers_in_row if replicates else 0,
        classes=tuple(classes.tolist()) if by_density else (),
        position="position" in keep,
    )


def observed_of(model: Model, folds: Folds) -> Float[np.ndarray, "row ..."]:
    """Observed values of the test rows; where a row has several numbers, on a second axis."""
    y = np.asarray(model.y)[folds.test_rows].astype(float)
    return y if y.ndim == 1 else y.reshape(len(y), -1)


def check(
    names: tuple[str, ...], keep: tuple[str, ...], model: Model, folds: Folds, memory: str
) -> None:
    """Raise unless the model has what the scores ``names`` need, and ``keep`` can be kept."""
    if model.joint_log_likelihood is not None:
        _check_dependent(names, folds, keep, model)
    for name, rule in rules_of(names).items():
        if rule.contribution is None:
            continue
        if rule.discrete:
            _check_classes(name, model)
        elif rule.contribution.needs == "simulate":
            _check_simulates(name, model, several=name in WHOLE_ROWS)
        else:
            model.check_derivatives(name)
        if rule.contribution.stored and memory == "online":
            raise ValueError(
                f'{name} needs stored predictive draws, but memory="online" keeps none; use '
                'memory="draws", or a score that running sums suffice for: dss, mse, mae, r2'
            )
        if name == "r2" and np.ptp(np.asarray(model.y, float)) == 0.0:
            raise ValueError("r2 needs observations that vary, but all are equal; use mse")
    if "dss" in names and model.numbers_in_row > 1:
        _check_joint_size(model.numbers_in_row * folds.largest_test)
    if "energy" in names and folds.largest_test == 1 and np.ndim(model.y) == 1:
        raise ValueError(
            "energy scores test sets of several rows jointly, but every fold tests a single row; "
            "use crps, which is the same there"
        )
    _check_keep(keep, model, memory)


def _check_joint_size(numbers: int) -> None:
    if numbers > MOST_JOINT_ROWS:
        raise ValueError(
            f"dss of rows of several numbers is for at most {MOST_JOINT_ROWS} numbers that a fold "
            f"tests together, but there are {numbers}; use energy, or folds of fewer rows"
        )


def _check_dependent(
    names: tuple[str, ...], folds: Folds, keep: tuple[str, ...], model: Model
) -> None:
    """Raise where scores need more of rows that depend on each other than the model has."""
    others = [
        name
        for name, rule in rules_of(names).items()
        if rule.contribution is not None
        and (rule.contribution.needs != "simulate" or model.joint_simulate is None)
    ]
    if others:
        raise ValueError(
            "rows that depend on each other (joint_log_likelihood) have log scores and, with "
            "joint_simulate(key, position, rows), those from predictive draws, but "
            f"{', '.join(others)} was asked for"
        )
    if len(set(names) & set(LOG_SCORES)) > 1 and folds.largest_test > 1:
        raise ValueError(
            "rows that depend on each other have one log score in a run, but "
            f"{' and '.join(LOG_SCORES)} were asked for; run cross_validate once for each"
        )


def _check_keep(keep: tuple[str, ...], model: Model, memory: str) -> None:
    """Raise unless what is to be kept is known and can be."""
    for name in keep:
        check_name("keep", name, KEEP)
    if keep and memory == "online":
        raise ValueError(
            f'keep={keep} stores draws, but memory="online" keeps none; use memory="draws"'
        )
    if "predictive" in keep:
        _check_simulates("predictive", model, several=True)


def _check_simulates(name: str, model: Model, several: bool = False) -> None:
    if not model.simulates:
        joint = model.joint_log_likelihood is not None
        function = (
            "joint_simulate=f) with f(key, position, rows)"
            if joint
            else "simulate=f) with f(key, position)"
        )
        raise ValueError(
            f"{name} needs predictive draws, but the model cannot simulate (JAX may have no draws "
            "of its distribution, where it comes from PyMC or NumPyro); use log scores, or give "
            f"Model(..., {function} one replicate of each row"
        )
    if model.y is None:
        raise ValueError(f"{name} needs the observed values; give Model(..., y=y)")
    model.check_simulate(several)


def _check_classes(name: str, model: Model) -> None:
    if model.row_log_density is None or model.y is None:
        _check_simulates(name, model)
    y = np.asarray(model.y)
    if y.dtype.kind not in "iub" and not np.array_equal(y, np.round(y)):
        raise ValueError(
            f"{name} needs observations that are classes (whole numbers or booleans), but y holds "
            f"{y.dtype} values such as {y[y != np.round(y)][0]}; use mse or crps"
        )


def classes_of(
    model: Model, names: tuple[str, ...], positions: Float[np.ndarray, "draw d"]
) -> Float[np.ndarray, " class"]:
    """Classes that the observations of ``model`` may take, where a score needs them.

    Those that are observed, and those that the model simulates at full-data draws. Raises where
    they are too many, or where their probabilities do not add up to one.
    """
    name = next((name for name, rule in rules_of(names).items() if rule.discrete), None)
    if name is None:
        return np.zeros(0)
    classes = np.unique(np.asarray(model.y)).astype(float)
    some = positions[:: max(1, len(positions) // 200)]
    with precision_context("float64"):
        if model.simulate is not None:
            keys = jax.random.split(jax.random.key(0), len(some))
            simulated = np.asarray(jax.jit(jax.vmap(model.flat_simulate))(keys, some))
            classes = np.union1d(classes, simulated.astype(float))
        if len(classes) > MOST_CLASSES:
            raise ValueError(
                f"{name} is for at most {MOST_CLASSES} classes, but there are {len(classes)}; use "
                "crps for counts"
            )
        if model.row_log_density is not None:
            of_draw = jax.vmap(lambda q: model.flat_probabilities(q, tuple(classes.tolist())))
            least = float(np.asarray(jax.jit(of_draw)(some)).sum(axis=1).mean(axis=0).min())
            if least < 1.0 - MOST_UNSEEN:
                raise ValueError(
                    f"{name} needs every class that the model allows, but the probabilities of "
                    f"those seen ({', '.join(f'{c:g}' for c in classes)}) add up to only "
                    f"{least:.3g} in some row; give the model simulate=, by which the others are "
                    "found, or use crps for counts"
                )
    if len(classes) < 2:
        raise ValueError(f"{name} needs at least two classes, but only {classes[0]:g} occurs")
    return classes
