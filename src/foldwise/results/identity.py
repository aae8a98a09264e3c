"""Which model, data and scheme a result is of: kept in its ``info``, checked on merging.

A scheme is known by a digest of its rows. A model and its data are known by log densities at fixed
positions, compared to a tolerance: between machines their last digits differ, and a digest of them
would too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float

from foldwise.models.evaluate import rows_at

if TYPE_CHECKING:
    from foldwise.folds.folds import Folds
    from foldwise.models.model import Model

# How far the positions are from the initial one. There, densities are known to be finite; a prior
# without its constants may be zero there, and a weak one shows only at a distance.
_DISTANCES = np.array([0.0, 0.1, 1.0])
# Fractional parts of the multiples of an irrational number are all different and evenly spread.
_OF_PARAMETERS, _OF_ROWS = np.sqrt(5.0), np.sqrt([2.0, 3.0])
# Takes the place of log densities that are not finite, so that it counts which rows' they are.
_NOT_FINITE = -1e4
# Rounding between machines is 1e-12 or so, and 1e-7 in models that work in single precision; the
# smallest number that matters is that of a weak prior: without constants, N(0, 1000) and
# N(0, 2000) differ by 1e-7 a parameter, or more, at a distance of 1 (3 / 8 x^2 1e-6, x >= 0.5).
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9


def identity(model: Model, folds: Folds) -> dict[str, Any]:
    """What a result's ``info`` keeps: digest and number of folds of its scheme, and the model's."""
    return {
        "scheme": folds.digest,
        "folds": folds.total,
        "model": model_values(model).tolist(),
    }


def model_values(model: Model) -> Float[np.ndarray, "position value"]:
    """Numbers by which a model and its data are known, the same for any seed and any fit.

    At each of three positions, which depend on ``init`` and the number of parameters alone: the log
    prior, two weighted sums of the rows' log likelihoods, and the root of their sum of squares. No
    two rows have the same weights, so that rows in another order are other data.
    """
    start = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model._template)])
    along = _even(model.dimension, _OF_PARAMETERS)
    found = zip(*rows_at(model, start + _DISTANCES[:, None] * along), strict=True)
    priors, rows = (_finite(np.concatenate(batches)) for batches in found)
    weights = np.stack([_even(model.n_obs, ratio) for ratio in _OF_ROWS], axis=1)
    return np.column_stack([priors, rows @ weights, np.linalg.norm(rows, axis=1)])


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < 1e100, values, _NOT_FINITE)  # squares stay finite


def _even(count: int, ratio: float) -> Float[np.ndarray, " count"]:
    """Numbers of size 0.5 to 1 and either sign, all different, the same on every machine."""
    share = ratio * np.arange(1, count + 1) % 1.0
    return np.where(share < 0.5, -0.5 - share, share)


def folds_of_scheme(info: Mapping[str, Any], held: int) -> int:
    """Number of folds of the scheme, of which a result holds ``held``; these if it is not known."""
    return max(int((info.get("identity") or {}).get("folds", 0)), held)


def same_scheme(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool | None:
    """Whether two results' ``info`` are of one scheme; None where one does not know its own."""
    digests = [(info.get("identity") or {}).get("scheme") for info in (one, other)]
    return digests[0] == digests[1] if all(digests) else None


def check_one_identity(infos: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless the ``info`` of all parts tell of one model, the same data and one scheme."""
    for k, info in enumerate(infos):
        if not (info.get("identity") or {}).get("scheme"):
            raise ValueError(
                "merged results must know which model and scheme they are parts of, but result "
                f"{k} does not: it was saved before results kept this, or its Folds were put "
                "together by hand; run that part again, with folds of a scheme function"
            )
    for k, info in enumerate(infos[1:], start=1):
        if not same_scheme(infos[0], info):
            raise ValueError(
                "merged results must be of one scheme, but results 0 and "
                f"{k} are not: both are {info['scheme']!r}, with other rows in the folds (other "
                "labels or groups, another order of the rows); run every part with folds of one "
                "scheme, such as folds[:25] and folds[25:]"
            )
        _check_one_model(infos[0], info, k)


def different_values(one: np.ndarray, two: np.ndarray) -> tuple[str, float, float] | None:
    """What differs first between two models' values, and the two values; None where nothing does.

    To a tolerance: between machines the last digits differ.
    """
    scale = np.maximum(np.abs(one), np.abs(two))
    scale[:, 1:] = scale[:, 3:]  # sums of rows may cancel: by the size of the rows
    differ = np.abs(one - two) > _RELATIVE * scale + _ABSOLUTE
    if not differ.any():
        return None
    position, value = np.argwhere(differ)[0]
    what = "log prior" if value == 0 else "log likelihood of the rows"
    return what, float(one[position, value]), float(two[position, value])


def _check_one_model(first: Mapping[str, Any], info: Mapping[str, Any], k: int) -> None:
    differ = different_values(*(np.asarray(each["identity"]["model"]) for each in (first, info)))
    if differ is None:
        return
    what, was, now = differ
    raise ValueError(
        "merged results must be of one model with the same data, but results 0 and "
        f"{k} are not: the {what} differs at the same position ({was:.6g} and {now:.6g}); run "
        "every part with the same prior, likelihood, data in the same order and init"
    )
