"""Parts of a scheme make the whole; parts of something else are refused."""

import json
from dataclasses import fields, replace

import numpy as np
import problems
import pytest
import xarray as xr
from problems import by_chains
from stored import MORE, Case, changed, same_bits, same_result

import foldwise as fw
from foldwise.results import files as storage
from foldwise.results import identity, packing
from foldwise.results.merge import merge
from foldwise.results.result import CVResult


def close(merged: CVResult, whole: CVResult):
    """Assert that a merged result is that of the whole run, but for the benchmark's chance."""
    low, high = sorted([merged.mixing.limit, whole.mixing.limit])
    judged_alike = (whole.mixing.rhat <= low) | ~(whole.mixing.rhat <= high)
    for name, score in whole.scores.items():
        other = merged.scores[name]
        same_to_rounding(other.folds, score.folds, {"status": judged_alike})
        assert (other.rows is None) == (score.rows is None)
        if score.rows is not None:
            same_to_rounding(other.rows, score.rows, {})
        for f in fields(score):
            if f.name not in ("name", "folds", "rows"):
                mine, theirs = getattr(other, f.name), getattr(score, f.name)
                np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9, err_msg=f.name)
    np.testing.assert_allclose(merged.mixing.rhat, whole.mixing.rhat, rtol=1e-9)
    assert list(merged.test) == list(whole.test)
    for key in whole.test:
        same_bits(merged.test[key], whole.test[key])
    assert (merged.draws is None) == (whole.draws is None)
    if whole.draws is not None:
        xr.testing.assert_allclose(merged.draws, whole.draws, rtol=1e-9)


def same_to_rounding(mine: xr.Dataset, theirs: xr.Dataset, where: dict[str, np.ndarray]):
    assert list(mine.variables) == list(theirs.variables)
    for name in mine.variables:
        chosen = where.get(name, slice(None))
        a, b = mine[name].values[chosen], theirs[name].values[chosen]
        if a.dtype.kind == "f":
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9, err_msg=name)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)


def test_halves_make_the_whole(halves, regression):
    whole = regression.run(estimator="mean")
    close(merge(halves), whole)
    close(merge(reversed(halves)), whole)


def test_interleaved_parts_by_row(regression, by_row):
    folds, names = problems.five_fold().folds, ("log_pointwise", "log")
    options = {"scores": names, "estimator": "mean"}
    parts = [regression.run(folds[part], **options) for part in ([3, 1], [4], [0, 2])]
    whole = regression.run(folds, **options)
    assert whole.rows is not None
    close(merge(parts), whole)


def test_a_part_whose_folds_test_one_row_each(regression):
    rows = np.arange(40)
    splits = [(np.delete(rows, test), test) for test in ([0], [7], [5, 6], [2, 30])]
    folds = fw.from_splits(splits, 40)
    options = {"scores": "log_pointwise", "estimator": "mean"}
    parts = [regression.run(folds[:2], **options), regression.run(folds[2:], **options)]
    assert parts[0].rows is None and parts[1].rows is not None
    close(merge(parts), regression.run(folds, **options))


@pytest.mark.parametrize("memory", ["draws", "online"])
def test_parts_that_share_a_fit_share_its_error(memory, regression):
    folds, whole = regression.problem.folds, regression.run(memory=memory)
    parts = [regression.run(part, memory=memory) for part in (folds[:11], folds[11:])]
    merged = merge(parts)
    assert (whole.folds["estimator"] == "bridge").all()
    assert whole.score("log").full_variance > 0
    close(merged, whole)
    apart = sum(part.score("log").full_variance for part in parts)
    assert abs(merged.score("log").full_variance / apart - 1) > 0.01


def test_parts_with_fits_of_their_own_are_independent(regression):
    folds = regression.problem.folds
    other = fw.fit(regression.model, draws=200, warmup=200, seed=2, progress=False)
    parts = [regression.run(folds[:20]), regression.run(folds[20:], fit=other)]
    merged = merge(parts).score("log")
    apart = [part.score("log").full_variance for part in parts]
    assert min(apart) > 0
    assert merged.full_variance == pytest.approx(sum(apart), rel=1e-12)
    assert merged.full_influence.size == 0
    own = sum(part.score("log").own_variance for part in parts)
    assert merged.mcse == pytest.approx(np.sqrt(own + sum(apart)), rel=1e-12)


@pytest.mark.parametrize("chains", [2, 3])
def test_merge_takes_the_chains_of_the_fit(chains, regression, tmp_path):
    fit = fw.fit(regression.model, chains=chains, draws=200, warmup=200, seed=1, progress=False)
    folds = regression.problem.folds
    parts = [regression.run(folds[:20], fit=fit), regression.run(folds[20:], fit=fit)]
    paths = [storage.save(part, tmp_path / f"{k}.nc") for k, part in enumerate(parts)]
    merged, loaded = merge(parts), merge(map(storage.load, paths))
    score = merged.score("log")
    expected = parts[0].run.evidence.full.variance(score.full_influence)
    assert score.full_variance == pytest.approx(expected, rel=1e-12)
    assert merged.info["fit_chains"] == chains
    same_result(merged, loaded)


def test_benchmark_is_the_maximum_over_the_parts(halves):
    merged = merge(halves)
    both = np.stack([part.mixing.benchmark for part in halves])
    np.testing.assert_array_equal(merged.mixing.benchmark, both.max(axis=0))
    assert merged.rhat_max == max(part.rhat_max for part in halves)
    blind = replace(halves[0], mixing=replace(halves[0].mixing, benchmark=np.full(500, np.nan)))
    np.testing.assert_array_equal(merge([blind, halves[1]]).mixing.benchmark, both[1])


def test_status_is_judged_by_the_merged_benchmark(halves):
    first, second = halves
    table = first.folds.copy(deep=True)
    table["status"].values[:4] = ["chains disagree", "stuck chain", "chains disagree", "not finite"]
    table["acceptance"].values[2] = 0.1
    table["rhat"].values[3:5] = 9.0
    flagged = {"log": replace(first.score("log"), folds=table)}
    merged = merge([replace(first, scores=flagged), second])
    expected = ["fine", "stuck chain", "low acceptance", "not finite", "chains disagree"]
    assert merged.folds["status"].values[:5].tolist() == expected


def test_merged_info(halves):
    merged = merge(halves)
    assert merged.info["merged"] == 2
    assert merged.info["memory"] == "draws"
    for phase in halves[0].info["seconds"]:
        spent = sum(part.info["seconds"][phase] for part in halves)
        assert merged.info["seconds"][phase] == pytest.approx(spent)
    assert merged.info["gradients"] == sum(part.info["gradients"] for part in halves)
    apart = {"seconds", "gradients", "merged"}
    expected = {k: v for k, v in halves[0].info.items() if k not in apart}
    assert {k: v for k, v in merged.info.items() if k not in apart} == expected


def test_draws_are_kept_only_if_all_parts_have_them(halves):
    merged = merge([halves[0], replace(halves[1], draws=None)])
    assert merged.draws is None
    assert merged.info["memory"] == "online"


def test_merged_result_is_saved_and_cannot_be_extended(halves, tmp_path):
    merged = merge(halves)
    found = storage.load(storage.save(merged, tmp_path / "r.nc"))
    same_result(merged, found)
    assert "state" not in found.info and len(str(found)) > 100
    with pytest.raises(ValueError, match="extend its parts and merge them again"):
        found.extend(MORE)


def test_merging_loaded_parts(halves, tmp_path):
    paths = [storage.save(part, tmp_path / f"{k}.nc") for k, part in enumerate(halves)]
    found = merge(storage.load(path) for path in paths)
    same_result(merge(halves), found)
    assert "state" not in found.info


def test_merge_in_steps(regression):
    folds = regression.problem.folds
    parts = [regression.run(folds[part], estimator="mean") for part in np.split(np.arange(40), 4)]
    steps = merge([merge(parts[:2]), merge(parts[2:])])
    close(steps, merge(parts))


@pytest.mark.parametrize("count", [0, 1])
def test_merge_needs_two(count, halves):
    with pytest.raises(ValueError, match=f"at least two results, got {count}"):
        merge(halves[:count])


def test_merge_refuses_what_is_not_a_result(halves):
    with pytest.raises(TypeError, match="list of CVResult, but it holds a str"):
        merge({"a": halves[0], "b": halves[1]})


def test_merge_names_folds_in_common(halves, regression):
    overlap = regression.run(regression.problem.folds[[23, 24, 25]], estimator="mean")
    with pytest.raises(ValueError, match=r"but 2 are in several: 23, 24; leave one"):
        merge([halves[0], overlap])
    with pytest.raises(ValueError, match=r"25 are in several: 0, 1, 2, 3, 4 and 20 more"):
        merge([halves[0], halves[0]])


OTHER_INFO = {
    "scheme": ("k_fold, n=40, k=5", "give every run folds of one scheme"),
    "n_obs": (41, "run them on the same data"),
    "estimator": ("bridge", "the same estimator"),
    "chains": (8, "the same number of chains"),
    "draws": (61, "extend the shorter ones first"),
    "model": ("another", "use compare for several"),
}


@pytest.mark.parametrize("key", OTHER_INFO)
def test_merge_refuses_parts_that_differ(key, halves):
    value, advice = OTHER_INFO[key]
    odd = replace(halves[1], info={**halves[1].info, key: value})
    with pytest.raises(ValueError, match=rf"have the same {key}, but .*{value}.*{advice}"):
        merge([halves[0], odd])


def test_merge_takes_parts_without_a_model_name(halves):
    unnamed = replace(halves[1], info={**halves[1].info, "model": ""})
    assert merge([halves[0], unnamed]).info["model"] == "regression"


def test_merge_refuses_other_scores(halves):
    renamed = replace(halves[1], scores={"log_pointwise": halves[1].score("log")})
    with pytest.raises(ValueError, match=r"same scores, but they have 'log' and 'log_pointwise'"):
        merge([halves[0], renamed])


def test_merge_refuses_other_observations(halves):
    odd = replace(halves[1], test={**halves[1].test, "y": halves[1].test["y"] + 1.0})
    with pytest.raises(ValueError, match="their y differ"):
        merge([halves[0], odd])
    without = {k: v for k, v in halves[0].test.items() if k != "y"}
    merged = merge([replace(halves[0], test=without), halves[1]])
    same_bits(merged.test["y"], halves[1].test["y"])


# ---------------------------------------------------------------- identity of the parts


def with_identity(result: CVResult, **parts) -> CVResult:
    return replace(result, info={**result.info, "identity": {**result.info["identity"], **parts}})


def test_identity_is_the_same_for_every_part_of_one_model(regression, halves, by_row, tmp_path):
    folds = regression.problem.folds
    rebuilt = regression.problem.model()
    alone = by_chains(rebuilt, folds[3:5], seed=8, draws=60, progress=False)
    assert alone.info["fit_seed"] != halves[0].info["fit_seed"]
    loaded = storage.load(storage.save(halves[1], tmp_path / "r.nc"))
    for part in (halves[1], alone, regression.run(folds[0], memory="online", draws=80), loaded):
        assert part.info["identity"] == halves[0].info["identity"]
    longer = loaded.extend(MORE, model=rebuilt, progress=False)
    assert longer.info["identity"] == halves[0].info["identity"]
    assert longer.run.folds.total == 40 and len(longer.run.folds) == 15
    assert by_row.info["identity"]["model"] == halves[0].info["identity"]["model"]
    assert by_row.info["identity"]["scheme"] != halves[0].info["identity"]["scheme"]


def test_merge_refuses_another_model_of_the_same_name(regression, halves):
    other = Case.of(replace(regression.problem, prior=np.full(4, 1.0)))
    part = other.run(regression.problem.folds[25:], estimator="mean")
    assert part.info["model"] == halves[0].info["model"]
    with pytest.raises(
        ValueError, match=r"one model.*results 0 and 1 .*log prior differs .*run ev"
    ):
        merge([halves[0], part])


CHANGED = {
    "a weak prior": ({"prior": np.array([3.0, 3.0, 3.0, 3.001])}, "log prior"),
    "noise": ({"noise": 0.801}, "log likelihood"),
    "a covariate": ({"X": lambda X: X + 0.01 * (X == X[7, 2])}, "log likelihood"),
    "two rows exchanged": ({"order": [1, 0, *range(2, 40)]}, "log likelihood"),
    "rows moved on": ({"order": np.roll(np.arange(40), 1)}, "log likelihood"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_merge_refuses_other_densities(what, regression, halves):
    parts, message = CHANGED[what]
    problem = regression.problem
    if "order" in parts:
        parts = {name: getattr(problem, name)[parts["order"]] for name in ("X", "y")}
    if callable(parts.get("X")):
        parts = {"X": parts["X"](problem.X)}
    values = identity.model_values(changed(problem, **parts)).tolist()
    with pytest.raises(ValueError, match=f"one model with the same data.*{message}"):
        merge([halves[0], with_identity(halves[1], model=values)])


def test_merge_bears_the_rounding_of_other_machines(halves):
    values = np.array(halves[1].info["identity"]["model"])
    close(
        merge([halves[0], with_identity(halves[1], model=(values * (1 + 1e-8)).tolist())]),
        merge(halves),
    )
    with pytest.raises(ValueError, match="one model"):
        merge([halves[0], with_identity(halves[1], model=(values * (1 + 1e-5)).tolist())])


def test_densities_that_are_not_finite_are_told_apart():
    def model(impossible):
        rows = np.where(np.arange(6) == impossible, -np.inf, -1.0)
        return fw.Model(lambda q: -0.5 * q**2, lambda q: rows + 0.0 * q, 0.0, 6)

    one, same, other = (identity.model_values(model(k)) for k in (2, 2, 3))
    assert np.isfinite(one).all()
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other, rtol=1e-3)


def test_merge_refuses_another_grouping_of_the_same_name(regression):
    label = np.arange(40) % 8
    folds, other = fw.leave_group_out(label), fw.leave_group_out(np.sort(label))
    assert folds.scheme == other.scheme
    parts = [regression.run(folds[:4]), regression.run(other[4:])]
    with pytest.raises(
        ValueError, match=r"of one scheme, but results 0 and 1 .* other rows in the"
    ):
        merge(parts)
    parts[1] = regression.run(folds[4:6])
    merged = merge(parts)
    assert "\n6 of 8 folds, 40 rows, " in str(merged) and "\n4 of 8 folds, " in str(parts[0])
    assert "\n8 folds, 40 rows, " in str(merge([merged, regression.run(folds[6:])]))


def test_merge_refuses_parts_that_do_not_know_what_they_are_of(halves, tmp_path):
    info = {key: value for key, value in halves[1].info.items() if key != "identity"}
    before = storage.load(storage.save(replace(halves[1], info=info, run=None), tmp_path / "r.nc"))
    assert "\n15 folds, 40 rows, " in str(before)
    with pytest.raises(ValueError, match=r"result 1 does not: it was saved before .*; run that pa"):
        merge([halves[0], before])


def test_folds_saved_before_do_not_know_their_scheme(regression):
    packed = packing.pack(regression.problem.folds[:5]).to_dataset()
    keys = [key for key in json.loads(packed.attrs["keys"]) if key not in ("total", "digest")]
    packed = packed.drop_vars(["total", "digest"]).assign_attrs(keys=json.dumps(keys))
    folds = packing.unpack(xr.DataTree(packed))
    assert (len(folds), folds.total, folds.digest) == (5, 0, "")


def test_problems_of_all_fits_are_kept(halves):
    first, second = (
        replace(part, info={**part.info, "fit_problems": text})
        for part, text in zip(halves, ("", "R-hat is up to 1.05"), strict=True)
    )
    assert merge([first, second]).info["fit_problems"] == "R-hat is up to 1.05"
    again = replace(first, info=second.info)
    assert merge([again, second]).info["fit_problems"] == "R-hat is up to 1.05"
