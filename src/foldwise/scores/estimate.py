"""Scores from what the chains recorded: by the rules of ``rules.py``, and the log score."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from foldwise.folds.ragged import concatenated_ranges
from foldwise.sampling.blocks import Emit
from foldwise.sampling.rungs import LEAST_OVERLAP
from foldwise.scores import logscore
from foldwise.scores.diagnostics import batch_means_variance
from foldwise.scores.evidence import PASSED, Estimate, Evidence, FullCurvature, fold_variance
from foldwise.scores.rules import (
    BELOW,
    CLASSES,
    CURVATURE,
    LOG_SCORES,
    MOST_CLASSES,
    MOST_JOINT_ROWS,
    RULES,
    Context,
    Contribution,
    Drawn,
    Rule,
    Sample,
    find_rule,
    jackknife,
)
from foldwise.scores.sums import BlockSums
from foldwise.support.checks import check_name
from foldwise.support.runtime import precision_context
from foldwise.support.special import expit, log_expit, logsumexp

if TYPE_CHECKING:
    from foldwise.folds.folds import Folds
    from foldwise.models.model import Model
    from foldwise.sampling.tuning import FullData

KEEP = ("position", "predictive")
# Values of stored predictive draws that are worked on at once: about 32 MB an array.
_CHUNK = 2**22
# Probability of classes not seen that a row may have before scores of classes are refused.
MOST_UNSEEN = 1e-3


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
    return Emit(
        by_row=rows and int(folds.n_test.max()) > 1,
        derivatives=any(c.needs == "row_log_density" for c in needed),
        replicate=simulated or "predictive" in keep or (CLASSES in needed and not by_density),
        classes=tuple(classes.tolist()) if by_density else (),
        position="position" in keep,
    )


# ---------------------------------------------------------------- what a rule needs


def check_scores(names: tuple[str, ...], model: Model, folds: Folds, memory: str) -> None:
    """Raise unless the model has what the scores ``names`` need."""
    for name in names:
        rule = find_rule(name)
        if rule.contribution is None:
            continue
        if rule.discrete:
            _check_classes(name, model)
        elif rule.contribution.needs == "simulate":
            _check_simulates(name, model)
        else:
            model.check_derivatives(name)
        if rule.contribution.stored and memory == "online":
            raise ValueError(
                f'{name} needs stored predictive draws, but memory="online" keeps none; use '
                'memory="draws", or a score that running sums suffice for: dss, mse, mae, r2'
            )
        if name == "r2" and np.ptp(np.asarray(model.y, float)) == 0.0:
            raise ValueError("r2 needs observations that vary, but all are equal; use mse")
    if "energy" in names and folds.largest_test == 1:
        raise ValueError(
            "energy scores test sets of several rows jointly, but every fold tests a single row; "
            "use crps, which is the same there"
        )


def check_keep(keep: tuple[str, ...], model: Model, memory: str) -> None:
    """Raise unless what is to be kept is known and can be."""
    for name in keep:
        check_name("keep", name, KEEP)
    if keep and memory == "online":
        raise ValueError(
            f'keep={keep} stores draws, but memory="online" keeps none; use memory="draws"'
        )
    if "predictive" in keep:
        _check_simulates("predictive", model)


def _check_simulates(name: str, model: Model) -> None:
    if model.simulate is None:
        raise ValueError(
            f"{name} needs predictive draws, but the model cannot simulate; give "
            "Model(..., simulate=f) with f(key, position) one replicate of each row"
        )
    if model.y is None:
        raise ValueError(f"{name} needs the observed values; give Model(..., y=y)")
    model.check_simulate()


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
    name = next((n for n in names if find_rule(n).discrete), None)
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


# ---------------------------------------------------------------- recording


def begin(
    evidence: Evidence,
    model: Model,
    names: tuple[str, ...],
    keep: tuple[str, ...],
    classes: Float[np.ndarray, " class"],
    chains: int,
    batch: int,
) -> None:
    """Prepare ``evidence`` for what the scores ``names`` need, and for what is kept."""
    folds = evidence.folds
    needed = contributions_of(names, folds)
    if "position" in keep:
        evidence.position = np.empty((len(folds), chains, 0, model.dimension))
    if "predictive" in keep:
        evidence.replicate = np.empty((len(folds.test_rows), chains, 0))
    if not needed and "predictive" not in keep:
        return
    evidence.observed = np.asarray(model.y)[folds.test_rows].astype(float)
    evidence.classes = classes
    for contribution in needed:
        if contribution.stored:
            if evidence.replicate is None:
                evidence.replicate = np.empty((len(folds.test_rows), chains, 0))
            continue
        start = folds.test_start if contribution.by_row else np.arange(len(folds) + 1)
        evidence.contributions[contribution.name] = BlockSums.empty(start, chains, batch)
    if CURVATURE in needed and (evidence.previous >= 0).any():
        evidence.contributions[PASSED] = BlockSums.empty(folds.test_start, chains, batch)


def make_room(evidence: Evidence, draws: int) -> None:
    """Room for ``draws`` more stored predictive draws and positions."""
    if evidence.position is not None:
        more = np.empty((*evidence.position.shape[:2], draws, evidence.position.shape[3]))
        evidence.position = np.concatenate([evidence.position, more], axis=2)
    if evidence.replicate is not None:
        room = np.empty((*evidence.replicate.shape[:2], draws))
        evidence.replicate = np.concatenate([evidence.replicate, room], axis=2)


def record(
    evidence: Evidence,
    members: Int[np.ndarray, " fold"],
    joint: Float[np.ndarray, "fold chain draw target"],
    rows: Float[np.ndarray, "row chain draw"] | None,
    extras: dict[str, Float[np.ndarray, "fold chain draw ..."]],
) -> None:
    """Add consecutive draws of the folds ``members`` to what the rules keep.

    Call it before the draws are added to ``evidence.sums``, whose count says where they go.
    """
    folds, first = evidence.folds, int(evidence.sums.draws[members[0]])
    part = slice(first, first + joint.shape[2])
    if evidence.position is not None:
        evidence.position[members, :, part] = extras["position"]
    extras = {name: values for name, values in extras.items() if name != "position"}
    if not extras:
        return
    entries = concatenated_ranges(folds.test_start, members)
    by_row = {name: _by_row(name, values, folds.n_test[members]) for name, values in extras.items()}
    drawn = _drawn(evidence, members, by_row)
    if evidence.replicate is not None:
        evidence.replicate[entries, :, part] = by_row["replicate"]
    for contribution in _online(evidence):
        log_weight = None
        if contribution.weights == "row":
            log_weight = joint[..., 0] if rows is None else rows  # one row is the test set
        elif contribution.weights == "joint":
            log_weight = np.repeat(
                _log_weight(evidence, members, joint[..., 0]), drawn.counts, axis=0
            )
        sums = evidence.contributions[contribution.name]
        sums.update(members, contribution.features(drawn), log_weight)
    if PASSED in evidence.contributions:
        _record_passed(evidence, members, joint, extras)


def _online(evidence: Evidence) -> list[Contribution]:
    """Contributions that are kept as running sums."""
    known = {r.contribution.name: r.contribution for r in RULES.values() if r.contribution}
    known[BELOW.name] = BELOW
    return [known[name] for name in evidence.contributions if name != PASSED]


def _drawn(
    evidence: Evidence, members: Int[np.ndarray, " fold"], by_row: dict[str, np.ndarray]
) -> Drawn:
    assert evidence.observed is not None and evidence.classes is not None
    entries = concatenated_ranges(evidence.folds.test_start, members)
    return Drawn(
        counts=evidence.folds.n_test[members],
        observed=evidence.observed[entries],
        replicate=by_row.get("replicate"),
        first=by_row.get("first"),
        second=by_row.get("second"),
        probability=by_row.get("probability"),
        width=int(evidence.folds.n_test.max()),
        classes=evidence.classes,
        batch=evidence.sums.length,
    )


def _by_row(name: str, values: np.ndarray, counts: Int[np.ndarray, " fold"]) -> np.ndarray:
    """What was recorded of each test row: of the fold's own rows, classes on the last axis."""
    if name == "probability":
        return np.stack([_unpadded(part, counts) for part in np.moveaxis(values, 3, 0)], axis=-1)
    return _unpadded(values if name == "replicate" else values[:, :, :, 0], counts)


def _unpadded(
    values: Float[np.ndarray, "fold chain draw slot"], counts: Int[np.ndarray, " fold"]
) -> Float[np.ndarray, "row chain draw"]:
    """Rows of all folds one after the other, without the slots that pad them."""
    valid = np.arange(values.shape[-1]) < counts[:, None]
    return np.moveaxis(values, -1, 1)[valid]


def _log_weight(
    evidence: Evidence,
    members: Int[np.ndarray, " fold"],
    joint: Float[np.ndarray, "fold chain draw"],
) -> Float[np.ndarray, "fold chain draw"]:
    """Log weight of each draw: log l, or with a partner log of l / (exp(node) + l)."""
    assert evidence.full_curvature is not None
    node = evidence.full_curvature.node[members][:, None, None]
    bridged = (evidence.partner[members] >= 0)[:, None, None]
    return np.where(bridged, log_expit(joint - node), joint)


def _record_passed(
    evidence: Evidence,
    members: Int[np.ndarray, " fold"],
    joint: Float[np.ndarray, "fold chain draw target"],
    extras: dict[str, Float[np.ndarray, "fold chain draw target slot"]],
) -> None:
    """What these folds' draws say of the test rows of the folds whose partner they are."""
    assert evidence.full_curvature is not None
    serving = np.flatnonzero(evidence.previous[members] >= 0)
    if not serving.size:
        return
    served = evidence.previous[members[serving]]
    counts = evidence.folds.n_test[served]
    d, dd = (_unpadded(extras[name][serving, :, :, 1], counts) for name in ("first", "second"))
    node = evidence.full_curvature.node[served][:, None, None]
    away = np.repeat(expit(node - joint[serving, ..., 1]), counts, axis=0)
    values = partner_features(away, d, dd)
    evidence.contributions[PASSED].update(served, values)


def partner_features(away: np.ndarray, d: np.ndarray, dd: np.ndarray) -> np.ndarray:
    """v, w d and w (d^2 + dd), with v = exp(node) / (exp(node) + l) and w = 1 - v."""
    return np.stack([away, (1.0 - away) * d, (1.0 - away) * (d**2 + dd)], axis=-1)


def full_curvature(
    evidence: Evidence, model: Model, full: FullData, own_draws: int
) -> FullCurvature:
    """The full-data draws' side of the Hyvarinen score."""
    from foldwise.models.evaluate import derivatives_at

    folds, count = evidence.folds, full.joint.shape[1]
    node = bridge_guess(full.joint, evidence.partner, own_draws)
    draws, length = count // full.chains, full.length
    blocks = -(-draws // length)
    served = np.flatnonzero(evidence.partner == len(folds))
    total = np.zeros((len(folds.test_rows), full.chains, blocks, 5))
    if not served.size:
        return FullCurvature(node, total[:, :, :0], length, draws)
    entries = concatenated_ranges(folds.test_start, served)
    rows, counts = folds.test_rows[entries], folds.n_test[served]
    done = 0
    for d, dd in derivatives_at(model, full.positions):
        away = expit(node[served, None] - full.joint[served, done : done + len(d)])
        d, dd = d[:, rows].T, dd[:, rows].T
        values = partner_features(np.repeat(away, counts, axis=0), d, dd)
        values = np.concatenate([values, np.stack([d, d**2 + dd], axis=-1)], axis=-1)
        chain, draw = np.divmod(np.arange(done, done + values.shape[1]), draws)
        place = chain * blocks + draw // length
        first = np.flatnonzero(np.diff(place, prepend=-1))
        parts = np.add.reduceat(values, first, axis=1)
        total[entries[:, None], chain[first], place[first] % blocks] += parts
        done += values.shape[1]
    return FullCurvature(node, total, length, draws)


def bridge_guess(
    joint: Float[np.ndarray, "fold draw"], partner: Int[np.ndarray, " fold"], own_draws: int
) -> Float[np.ndarray, " fold"]:
    """The full-data draws' guess of the optimal bridge constant of each fold.

    Importance sampling gives log r as -log mean(1 / l) over full-data draws; the constant is
    log r plus the log of the draws of the fold over those of the partner.
    """
    count = joint.shape[1]
    guess = np.log(count) - logsumexp(-joint, axis=1)
    guess = np.where(np.isfinite(guess), guess, 0.0)
    return guess + np.where(partner == len(partner), np.log(own_draws / count), 0.0)


# ---------------------------------------------------------------- estimates


def estimate(evidence: Evidence, name: str, estimator: str) -> Estimate:
    """Score ``name`` of every fold."""
    if name in LOG_SCORES:
        return logscore.estimate(evidence, name, estimator)
    rule = rule_of(name, evidence.folds)
    contribution = rule.contribution
    assert contribution is not None and evidence.observed is not None
    if contribution is CURVATURE:
        return _bridged_curvature(evidence, name, rule)
    assert evidence.classes is not None
    counts = np.ones(len(evidence.observed), int) if contribution.by_row else evidence.folds.n_test
    context = Context(evidence.observed, counts, evidence.classes)
    sample = _sample(evidence, contribution)
    if rule.finish is not None:
        value, influence = rule.finish(sample, context)
    else:
        value_of = rule.value
        assert value_of is not None
        value, influence = jackknife(sample, lambda means: value_of(means, context))
    found = _assembled(evidence, name, value, influence, contribution.by_row)
    if contribution.weights == "row":
        found = replace(found, weighted=True, row_spread=found.row_variance)
    return found


def _sample(evidence: Evidence, contribution: Contribution) -> Sample:
    """Block sums of a contribution over all draws so far."""
    sums = evidence.sums
    total = (
        _stored_total(evidence, contribution)
        if contribution.stored
        else evidence.contributions[contribution.name].total
    )
    sizes = evidence.folds.n_test if contribution.by_row else 1
    joined = np.repeat(evidence.joined, sizes)
    return Sample(total, sums.length, evidence.n_draws, sums.full_blocks, joined)


def _stored_total(
    evidence: Evidence, contribution: Contribution
) -> Float[np.ndarray, "unit chain block feature"]:
    """Block sums from stored predictive draws, some folds at a time."""
    folds, found = evidence.folds, []
    assert evidence.replicate is not None
    draws, length = evidence.n_draws, evidence.sums.length
    step = max(1, _CHUNK // (evidence.chains * draws))
    edges = np.arange(0, draws, length)
    first = 0
    while first < len(folds):
        last = int(np.searchsorted(folds.test_start, folds.test_start[first] + step, "right")) - 1
        members = np.arange(first, max(last, first + 1))
        entries = concatenated_ranges(folds.test_start, members)
        by_row = {"replicate": evidence.replicate[entries]}
        features = contribution.features(_drawn(evidence, members, by_row))
        found.append(np.add.reduceat(features, edges, axis=2))
        first = int(members[-1]) + 1
    return np.concatenate(found)


def _bridged_curvature(evidence: Evidence, name: str, rule: Rule) -> Estimate:
    """Hyvarinen score of each fold's test rows, pooled with the draws of its bridge partner.

    The predictive density of the test rows is q = E[l] over the fold's posterior. Derivatives of
    log q by an observed value are averages of d and d^2 + dd over the fold's draws weighed by l,
    and over those of the partner as they are. With w = l / (exp(node) + l) and v = 1 - w,

        E[g] = mean_partner(v) mean_fold(w g) / mean_fold(w) + mean_partner(w g)

    holds for any node; without a partner w = l and v = 1. Where the two posteriors hardly overlap,
    the partner's draws alone serve: v = 0 and w = 1.
    """
    folds, sums, full = evidence.folds, evidence.sums, evidence.full_curvature
    score = rule.value
    assert full is not None and score is not None
    own = _sample(evidence, CURVATURE)
    partner = np.repeat(evidence.partner, folds.n_test)
    with_full, with_fold = partner == len(folds), (partner >= 0) & (partner < len(folds))
    other = np.tile([1.0, 0.0, 0.0], (len(partner), 1))
    # rungs have no part in this, whether the log score needed them or not
    alone = replace(evidence, rungs=[], climbed=[], stranded=[])
    overlap = logscore.estimate(alone, "log", "auto").overlap
    far = ~(overlap >= LEAST_OVERLAP) & (evidence.partner == len(folds))
    theirs = Sample(
        _full_side(evidence, far)[with_full],
        full.length,
        full.draws,
        full.draws // full.length,
    )
    passed = Sample(np.zeros((0, 1, 1, 3)), 1, 1, 1)
    if with_full.any():
        other[with_full] = theirs.mean
    if with_fold.any():
        kept = evidence.contributions[PASSED].total[with_fold]
        passed = Sample(kept, sums.length, evidence.n_draws, sums.full_blocks)
        other[with_fold] = passed.mean

    def pooled(own_means: np.ndarray, other_means: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = own_means[..., 1:] / own_means[..., :1]
        own_part = np.where(other_means[..., :1] > 0, other_means[..., :1] * ratio, 0.0)
        average = own_part + other_means[..., 1:]
        means = np.concatenate([np.ones_like(average[..., :1]), average], axis=-1)
        return score(means, Context(np.zeros(0), np.zeros(0, int), np.zeros(0)))

    mean = own.mean
    value = pooled(mean, other)
    influence = own.influence(value, pooled(own.without, other[:, None, None]))
    corrected = value + influence.mean(axis=(1, 2))
    from_full = np.zeros((len(partner), theirs.total.shape[1], theirs.full_blocks))
    from_folds = np.zeros_like(influence)
    for sample, where, target in ((theirs, with_full, from_full), (passed, with_fold, from_folds)):
        if where.any():
            left_out = pooled(mean[where][:, None, None], sample.without)
            target[where] = sample.influence(value[where], left_out)
            corrected[where] += target[where].mean(axis=(1, 2))
    weight = np.repeat(folds.fold_weight, folds.n_test)
    found = _assembled(evidence, name, corrected, influence, True, from_folds, from_full, weight)
    overlap = np.where(far, np.nan, overlap)
    found = replace(found, overlap=overlap, bridged=evidence.partner >= 0)
    if name == "hyvarinen_pointwise":
        return found
    # the score is of whole test sets, so its units are folds
    return replace(found, rows=None, row_variance=None)


def _full_side(
    evidence: Evidence, far: Bool[np.ndarray, " fold"]
) -> Float[np.ndarray, "row chain block feature"]:
    """Sums over full-data draws; unweighted for folds that overlap little."""
    full = evidence.full_curvature
    assert full is not None
    alone = np.repeat(far, evidence.folds.n_test)[:, None, None, None]
    unweighted = np.concatenate([np.zeros_like(full.total[..., :1]), full.total[..., 3:]], axis=-1)
    return np.where(alone, unweighted, full.total[..., :3])


def _assembled(
    evidence: Evidence,
    name: str,
    value: Float[np.ndarray, " unit"],
    influence: Float[np.ndarray, "unit chain block"],
    by_row: bool,
    from_folds: Float[np.ndarray, "row chain block"] | None = None,
    from_full: Float[np.ndarray, "row chain block"] | None = None,
    unit_weight: Float[np.ndarray, " unit"] | None = None,
) -> Estimate:
    """Scores by fold and their variances, from those of their rows or their own.

    ``from_folds`` and ``from_full`` are influences of the draws of the folds' partners;
    ``unit_weight`` the weights in the total, if not those of the rows or folds.
    """
    folds = evidence.folds
    k = len(folds)
    sizes = folds.n_test if by_row else np.ones(k, int)
    start = folds.test_start[:-1] if by_row else np.arange(k)
    finite = np.isfinite(np.add.reduceat(value, start)) & ~evidence.undefined
    score = np.where(finite, np.add.reduceat(value, start), np.nan)
    if unit_weight is None:
        unit_weight = folds.test_weight if by_row else folds.fold_weight
    unit_weight = np.where(np.repeat(finite, sizes), unit_weight, 0.0)

    def of_fold(blocks: np.ndarray, weight: np.ndarray | float = 1.0) -> np.ndarray:
        blocks = np.where(np.isfinite(blocks), blocks, 0.0)
        return np.add.reduceat(np.reshape(weight, (-1, 1, 1)) * blocks, start)

    passed = np.zeros((k, *influence.shape[1:]))
    fold, other = np.arange(k), _other_fold(evidence)
    variance = evidence.variance_of(of_fold(influence))
    row_variance = evidence.variance_of(influence, np.repeat(fold, sizes))
    if from_folds is not None:
        variance += evidence.variance_of(of_fold(from_folds), other)
        row_variance += evidence.variance_of(from_folds, np.repeat(other, sizes))
        passed = _moved(evidence, -of_fold(from_folds, unit_weight))
    shared, full_part = np.zeros(0), 0.0
    if from_full is not None and (evidence.partner == k).any():
        full = evidence.full_curvature
        assert full is not None
        by_fold = of_fold(from_full, unit_weight)
        variance += batch_means_variance(of_fold(from_full), full.length, full.draws)
        row_variance += batch_means_variance(from_full, full.length, full.draws)
        full_part = float(batch_means_variance(by_fold.sum(axis=0), full.length, full.draws))
        shared = np.zeros((from_full.shape[1], full.draws))
        whole = from_full.shape[2] * full.length
        shared[:, :whole] = np.repeat(by_fold.sum(axis=0), full.length, axis=1)
        shared = shared.ravel()
    nothing = np.full(k, np.nan)
    weighted = of_fold(influence, unit_weight)
    # weights are in the influences already; a fold whose score is left out still serves another
    one = np.ones(k)
    return Estimate(
        name=name,
        score=score,
        variance=variance,
        own_variance=fold_variance(evidence, one, weighted, passed),
        full_influence=shared,
        full_variance=full_part,
        spread=nothing,
        noise=nothing,
        overlap=nothing,
        bridged=np.zeros(k, bool),
        full_score=nothing,
        weight=np.where(finite, folds.fold_weight, 0.0),
        rows=value if by_row else None,
        row_variance=row_variance if by_row else None,
        weighted=from_folds is not None,
    )


def _other_fold(evidence: Evidence) -> Int[np.ndarray, " fold"]:
    """The fold that is each fold's partner; the fold itself where its partner is no fold."""
    other = evidence.partner
    from_fold = (other >= 0) & (other < len(other))
    return np.where(from_fold, other, np.arange(len(other)))


def _moved(
    evidence: Evidence, influence: Float[np.ndarray, "fold chain block"]
) -> Float[np.ndarray, "fold chain block"]:
    """Influences on each fold's score, moved to the folds whose draws they are of."""
    moved = np.zeros_like(influence)
    serves = evidence.previous >= 0
    moved[serves] = influence[evidence.previous[serves]]
    return moved


def calibration(evidence: Evidence) -> dict[str, np.ndarray] | None:
    """Of each test row, the predictive probability of a value below the observed one, and of that.

    ``mcse`` is the Monte Carlo error of ``below`` plus half of ``equal``, at least 1 / n: where
    none of n draws fell on the other side, that is the sd of the probability that one does, which
    is uniform a priori (Laplace's rule of succession). None without predictive draws.
    """
    if BELOW.name not in evidence.contributions:
        return None
    sample = _sample(evidence, BELOW)
    _, influence = jackknife(sample, lambda means: means[..., 0] + 0.5 * means[..., 1])
    error = np.sqrt(sample.variance(influence))
    error = np.maximum(error, 1.0 / (evidence.chains * sample.draws))
    return {"below": sample.mean[:, 0], "equal": sample.mean[:, 1], "mcse": error}


def total_slope(evidence: Evidence, found: Estimate) -> float:
    """Slope of a score's total by the weighted sum of its rows or folds: 1 where it is that sum."""
    aggregate = find_rule(found.name).aggregate
    if aggregate is None or not np.isfinite(found.score).any():
        return 1.0
    assert found.rows is not None and evidence.observed is not None
    used = np.repeat(np.isfinite(found.score), evidence.folds.n_test)
    weight, y = evidence.folds.test_weight[used], evidence.observed[used]
    mean = float(np.average(found.rows[used], weights=weight))
    variance = float(np.average((y - np.average(y, weights=weight)) ** 2, weights=weight))
    return float(aggregate.slope(mean, variance)) / float(weight.sum())
