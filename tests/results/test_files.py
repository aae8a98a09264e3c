"""Saving, loading, extending what was loaded, merging, and arviz."""

import json
import os
import sys
from dataclasses import dataclass, fields, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import problems
import pytest
import xarray as xr

import foldwise as fw
from foldwise import crossval
from foldwise.results import export, identity, packing
from foldwise.results import files as storage
from foldwise.results.extend import extend
from foldwise.results.merge import merge
from foldwise.results.result import CVResult
from foldwise.sampling import tuning
from foldwise.sampling.metric import SharedMetric
from foldwise.scores import evidence

MORE = 30


# ---------------------------------------------------------------- runs that tests share


@dataclass(frozen=True)
class Case:
    """A problem, its model with the programs compiled for it, and a short full-data fit."""

    problem: problems.LinearProblem
    model: fw.Model
    fit: fw.Fit

    @classmethod
    def of(cls, problem, seed=1):
        model = problem.model()
        fit = fw.fit(model, draws=200, warmup=200, seed=seed, progress=False)
        return cls(problem, model, fit)

    def run(self, folds=None, **options) -> CVResult:
        options = {"fit": self.fit, "seed": 5, "draws": 60, "progress": False, **options}
        return fw.cross_validate(self.model, folds or self.problem.folds, **options)


@pytest.fixture(scope="session")
def regression() -> Case:
    return Case.of(problems.regression())


@pytest.fixture(scope="session")
def autoregression() -> Case:
    return Case.of(problems.autoregression())


@pytest.fixture(scope="session")
def loo(regression) -> CVResult:
    return regression.run()


@pytest.fixture(scope="session")
def by_row(regression) -> CVResult:
    return regression.run(problems.five_fold().folds, scores=("log_pointwise", "log"))


@pytest.fixture(scope="session")
def halves(regression) -> tuple[CVResult, CVResult]:
    folds = regression.problem.folds
    return regression.run(folds[:25], estimator="mean"), regression.run(
        folds[25:], estimator="mean"
    )


@pytest.fixture
def saved(loo, tmp_path) -> Path:
    return storage.save(loo, tmp_path / "loo.nc")


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    if a.dtype == object:
        assert a.tolist() == b.tolist()
        assert [type(x) for x in a.ravel()] == [type(x) for x in b.ravel()]
    else:
        assert a.tobytes() == b.tobytes()


def same_table(a, b):
    assert (a is None) == (b is None)
    if a is not None:
        assert list(a.variables) == list(b.variables)
        assert set(a.coords) == set(b.coords)
        for name in a.variables:
            assert a[name].dims == b[name].dims
            same_bits(a[name].values, b[name].values)


def same_result(a: CVResult, b: CVResult, times=True):
    """Assert that two results have the same numbers, bit for bit, in the same types."""
    assert list(a.scores) == list(b.scores)
    for name in a.scores:
        for f in fields(a.scores[name]):
            mine, theirs = (getattr(r.scores[name], f.name) for r in (a, b))
            if f.name in ("folds", "rows"):
                same_table(mine, theirs)
            elif f.name == "name":
                assert mine == theirs
            else:
                same_bits(mine, theirs)
    same_bits(a.mixing.rhat, b.mixing.rhat)
    same_bits(a.mixing.benchmark, b.mixing.benchmark)
    assert list(a.test) == list(b.test)
    for key in a.test:
        same_bits(a.test[key], b.test[key])
    apart = {"state"} if times else {"state", "seconds"}
    infos = [{k: v for k, v in r.info.items() if k not in apart} for r in (a, b)]
    assert infos[0] == infos[1]
    assert [type(v) for v in infos[0].values()] == [type(v) for v in infos[1].values()]
    assert (a.draws is None) == (b.draws is None)
    if a.draws is not None:
        assert (a.draws.dims, a.draws.name) == (b.draws.dims, b.draws.name)
        same_table(a.draws.to_dataset(), b.draws.to_dataset())


def content(path) -> str:
    with h5py.File(path) as file:
        return file.attrs["checksum"]


# ---------------------------------------------------------------- save and load


@pytest.mark.parametrize("which", ["loo", "by_row", "online"])
def test_round_trip_keeps_every_bit(which, regression, loo, by_row, tmp_path):
    result = {"loo": loo, "by_row": by_row}.get(which) or regression.run(memory="online")
    found = storage.load(storage.save(result, tmp_path / "r.nc"))
    same_result(result, found)
    assert found.run is None
    assert (result.draws is None) == (which == "online")
    assert (result.rows is None) == (which != "by_row")
    assert all(type(status) is str for status in found.folds["status"].values)


def test_scores_keep_their_order(by_row, tmp_path):
    found = storage.load(storage.save(by_row, tmp_path / "r.nc"))
    assert list(found.scores) == ["log_pointwise", "log"]
    assert found.elpd == by_row.scores["log_pointwise"].total != by_row.scores["log"].total


def test_printing_a_loaded_result(loo, saved):
    found = storage.load(saved)
    assert str(found) == str(loo)
    assert len(repr(found.info)) < 2000


def test_saving_a_loaded_result_writes_the_same_content(by_row, regression, tmp_path):
    first = storage.save(by_row, tmp_path / "first.nc")
    found = storage.load(first)
    second = storage.save(found, tmp_path / "second.nc")
    assert content(first) == content(second)
    longer = storage.load(second).extend(MORE, model=regression.model, progress=False)
    same_result(extend(by_row.run, MORE, False), longer, times=False)


def test_an_extended_loaded_result_can_be_saved(loo, regression, saved, tmp_path):
    found = storage.load(saved).extend(MORE, model=regression.model, progress=False)
    again = storage.load(storage.save(found, tmp_path / "longer.nc"))
    same_result(found, again)
    assert again.info["draws"] == 60 + MORE


def test_numbers_that_are_not_finite(loo, tmp_path):
    score = loo.scores["log"]
    table = score.folds.copy(deep=True)
    table["elpd"].values[:3] = [np.nan, np.inf, -np.inf]
    odd = replace(loo, scores={"log": replace(score, folds=table, se=np.nan, mcse=np.inf)})
    same_result(odd, storage.load(storage.save(odd, tmp_path / "r.nc")))


NAMES = {
    "integers": np.arange(5) * 10,
    "small integers": np.arange(5, dtype=np.uint8),
    "text": np.array(["Ærø", "b c", "d/e", "", "ff"], dtype="<U9"),
    "days": np.array(
        ["2020-01-01", "1969-12-31", "1800-05-05", "2020-01-02", "2020-01-03"], "M8[D]"
    ),
    "instants": np.array([1, 2, 3, 4, 5], "M8[ns]"),
    "years": np.array(["1990", "1991", "1992", "1993", "1994"], "M8[Y]"),
    "numbers": np.array([0.1, 0.2, -0.0, 1e300, 5e-324]),
    "truths": np.array([True, False, True, False, True]),
    "dates": np.array([date(2020, 1, day) for day in range(1, 6)], object),
    "a mixture": np.array([1, "1", 2.5, True, datetime(2020, 1, 1, 12)], object),
}


@pytest.mark.parametrize("kind", NAMES)
def test_fold_names_keep_their_kind(kind, by_row, regression, tmp_path):
    folds = replace(problems.five_fold().folds, names=NAMES[kind])
    run = replace(by_row.run, folds=folds, evidence=replace(by_row.run.evidence, folds=folds))
    result = crossval.summarise(run)
    found = storage.load(storage.save(result, tmp_path / "r.nc"))
    same_result(result, found)
    same_bits(storage.restore_run(found, regression.model).folds.names, NAMES[kind])


def test_labels_of_another_kind_are_saved_as_text(loo, tmp_path):
    odd = replace(loo, test={**loo.test, "y": np.array([1j, (1, 2), "b"], object)})
    with pytest.warns(UserWarning, match=r"2 are not, such as the complex 1j; their text"):
        path = storage.save(odd, tmp_path / "r.nc")
    assert storage.load(path).test["y"].tolist() == ["1j", "(1, 2)", "b"]


@pytest.mark.parametrize("dtype", ["f2", "f4", ">f8", "c16", "i1", "u8", "?", "m8[s]", "S3"])
def test_observations_keep_their_type(dtype, loo, tmp_path):
    y = np.arange(6).astype(dtype).reshape(3, 2)
    odd = replace(loo, test={**loo.test, "y": y})
    same_bits(storage.load(storage.save(odd, tmp_path / "r.nc")).test["y"], y)


def test_info_keeps_its_types(loo, tmp_path):
    extra = {
        "empty": "",
        "flag": True,
        "none": None,
        "big": 2**80,
        "nan": np.float64("nan"),
        "list": [1, "a"],
        "array": np.arange(2),
        "with space": [1],
        "nested": {"a": {"b": 0.1}},
    }
    result = replace(loo, info={**loo.info, **extra})
    found = storage.load(storage.save(result, tmp_path / "r.nc")).info
    assert np.isnan(found.pop("nan")) and type(found["flag"]) is bool
    expected = {**loo.info, **extra, "array": [0, 1]}
    del expected["nan"], found["state"]
    assert found == expected


def test_a_score_group_is_readable_without_foldwise(by_row, tmp_path):
    path = storage.save(by_row, tmp_path / "r.nc")
    with xr.open_dataset(path, group="scores/log/folds", engine="h5netcdf") as table:
        np.testing.assert_array_equal(table["elpd"], by_row.score("log").folds["elpd"])
        assert table["elpd"].dims == ("fold",)
        assert table["status"].values.tolist() == by_row.folds["status"].values.tolist()
    with h5py.File(path) as file:
        assert file.attrs["format"] == "foldwise-result"
        assert file.attrs["format_version"] == 1
        assert file.attrs["scheme"] == by_row.info["scheme"]
        assert json.loads(file.attrs["seconds"]) == by_row.info["seconds"]
        assert file["scores/log/total"][()] == by_row.score("log").total
        assert file["test/index"][:].tolist() == [0, 1, 2, 3, 4]
        assert set(file) == {"scores", "mixing", "test", "draws", "state"}


def test_dates_are_dates_for_other_readers(by_row, tmp_path):
    folds = replace(problems.five_fold().folds, names=NAMES["days"])
    path = storage.save(crossval.summarise(replace(by_row.run, folds=folds)), tmp_path / "r.nc")
    with xr.open_dataset(path, group="scores/log/folds", engine="h5netcdf") as table:
        assert table["fold"].dtype.kind == "M"
        assert (table["fold"].values == NAMES["days"]).all()


def test_suffix_is_added_where_there_is_none(loo, tmp_path):
    assert storage.save(loo, tmp_path / "run") == tmp_path / "run.nc"
    assert storage.save(loo, str(tmp_path / "run.h5")) == tmp_path / "run.h5"
    loo.save(tmp_path / "method")
    assert {p.name for p in tmp_path.iterdir()} == {"run.nc", "run.h5", "method.nc"}
    same_result(loo, storage.load(tmp_path / "run"))


def test_a_link_is_followed(loo, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.nc").symlink_to(tmp_path / "real" / "r.nc")
    storage.save(loo, tmp_path / "link.nc")
    assert (tmp_path / "link.nc").is_symlink()
    assert [p.name for p in (tmp_path / "real").iterdir()] == ["r.nc"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_load_closes_the_file(saved):
    storage.load(saved)
    for number in os.listdir("/proc/self/fd"):
        link = Path("/proc/self/fd") / number
        assert not (link.exists() and link.resolve() == saved.resolve())


def test_large_arrays_are_compressed(saved, loo):
    with h5py.File(saved) as file:
        large, small = file["state/evidence/sums/log_sum"], file["state/evidence/sums/centre"]
        assert large.nbytes >= 2**16 > small.nbytes
        assert (large.compression, small.compression) == ("gzip", None)


# ---------------------------------------------------------------- what cannot be saved or loaded


def test_save_refuses_what_is_not_a_result(tmp_path):
    with pytest.raises(TypeError, match="only a CVResult can be saved, got dict"):
        storage.save({}, tmp_path / "r.nc")


def test_save_needs_an_existing_folder(loo, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none does not; make it first"):
        storage.save(loo, tmp_path / "none" / "r.nc")


def test_save_refuses_a_folder(loo, tmp_path):
    with pytest.raises(IsADirectoryError, match=r"is a folder; add a file name, .*result\.nc"):
        storage.save(loo, tmp_path)
    (tmp_path / "r.nc").mkdir()
    with pytest.raises(IsADirectoryError, match=r"r\.nc is a folder"):
        storage.save(loo, tmp_path / "r")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("no space left")])
def test_an_interrupted_save_leaves_the_older_file(stop, loo, saved, monkeypatch):
    before = saved.read_bytes()

    def half(tree, path, **_):
        Path(path).write_bytes(before[:100])
        raise stop

    monkeypatch.setattr(xr.DataTree, "to_netcdf", half)
    with pytest.raises((KeyboardInterrupt, OSError)) as caught:
        storage.save(loo, saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
    if caught.type is OSError:
        assert "loo.nc could not be written (no space left); choose a folder" in str(caught.value)


def test_save_where_nothing_may_be_written(loo, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("not allowed")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match=r"r\.nc could not be written \(not allowed\)"):
        storage.save(loo, tmp_path / "r.nc")
    assert list(tmp_path.iterdir()) == []


def test_load_needs_a_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.nc does not exist; the working folder is"):
        storage.load(tmp_path / "none")
    with pytest.raises(IsADirectoryError, match="is a folder; add a file name"):
        storage.load(tmp_path)


@pytest.mark.parametrize("begins", [b"", b"elpd,se\n1,2\n", b"CDF\x01" + bytes(100)])
def test_load_refuses_other_kinds_of_file(begins, tmp_path):
    (tmp_path / "other.nc").write_bytes(begins)
    with pytest.raises(ValueError, match=r"other\.nc must be a result saved by foldwise.*begins"):
        storage.load(tmp_path / "other.nc")


def test_load_refuses_another_netcdf_file(tmp_path):
    xr.Dataset({"x": ("t", np.arange(3.0))}).to_netcdf(tmp_path / "x.nc", engine="h5netcdf")
    with pytest.raises(ValueError, match=r"x\.nc must be .* but it is another netCDF file"):
        storage.load(tmp_path / "x.nc")


@pytest.mark.parametrize("share", [0.0005, 0.1, 0.5, 0.9])
def test_load_refuses_a_file_cut_short(share, saved):
    raw = saved.read_bytes()
    saved.write_bytes(raw[: int(share * len(raw))])
    with pytest.raises(ValueError, match=r"loo\.nc .*damaged") as caught:
        storage.load(saved)
    assert caught.value.__cause__ is not None


def test_load_notices_a_changed_number(saved, loo):
    raw, number = saved.read_bytes(), np.float64(loo.elpd).tobytes()
    assert raw.count(number) == 1
    saved.write_bytes(raw.replace(number, np.float64(loo.elpd + 1e-12).tobytes()))
    with pytest.raises(ValueError, match=r"loo\.nc must be as foldwise saved it.*checksum"):
        storage.load(saved)


def test_load_notices_a_missing_group(saved):
    with h5py.File(saved, "r+") as file:
        del file["mixing"]
    with pytest.raises(ValueError, match=r"loo\.nc must be as foldwise saved it"):
        storage.load(saved)


def test_load_refuses_a_newer_format(saved):
    with h5py.File(saved, "r+") as file:
        file.attrs["format_version"] = 2
    with pytest.raises(ValueError, match=r"loo\.nc has format version 2, .* up to 1; upgrade"):
        storage.load(saved)


def test_load_names_the_version_of_records_it_does_not_know(saved, monkeypatch):
    monkeypatch.delitem(packing._RECORDS, "Score")
    with pytest.raises(ValueError, match=r"loo\.nc is a foldwise result.*saved by foldwise") as e:
        storage.load(saved)
    assert "the file's Score has the fields name, total" in str(e.value.__cause__)


def test_missing_package_is_named(loo, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match="h5py is not installed; pip install h5netcdf h5py"):
        storage.save(loo, tmp_path / "r.nc")


# ---------------------------------------------------------------- records of any shape


@dataclass
class Record:
    numbers: Any = None
    parts: Any = None


def test_new_fields_of_records_need_no_new_code(monkeypatch, tmp_path):
    monkeypatch.setitem(packing._RECORDS, "Record", Record)
    inner = Record(np.zeros((3, 0, 3), np.float32), [])
    value = Record(
        np.arange(4.0).reshape(2, 2),
        [np.arange(3), None, inner, ("a", 2.5, True, 2**70), {"k": None, "l": [np.ones(2)]}],
    )
    packing.pack(value).to_netcdf(tmp_path / "r.nc", engine="h5netcdf")
    with xr.open_datatree(tmp_path / "r.nc", engine="h5netcdf", mask_and_scale=False) as tree:
        found = packing.unpack(tree.load())
    same_bits(found.numbers, value.numbers)
    same_bits(found.parts[0], value.parts[0])
    assert found.parts[1] is None
    same_bits(found.parts[2].numbers, inner.numbers)
    assert found.parts[2].parts == []
    assert found.parts[3] == value.parts[3] and type(found.parts[3]) is tuple
    assert found.parts[4]["k"] is None
    same_bits(found.parts[4]["l"][0], np.ones(2))


# ---------------------------------------------------------------- extending what was loaded


RUNS = {
    "loo": ("regression", {}),
    "loo online": ("regression", {"memory": "online"}),
    "single precision": ("regression", {"precision": "float32"}),
    "k-fold": ("regression", {"folds": problems.five_fold().folds}),
    "k-fold online": ("regression", {"folds": problems.five_fold().folds, "memory": "online"}),
    "future": ("autoregression", {}),
    "future online": ("autoregression", {"memory": "online"}),
}


@pytest.mark.parametrize("which", RUNS)
def test_loaded_result_goes_on_as_the_original(which, request, tmp_path):
    case, options = request.getfixturevalue(RUNS[which][0]), RUNS[which][1]
    result = case.run(**options)
    if "future" in which:
        assert (result.run.evidence.previous >= 0).any()
    if "k-fold" in which:
        assert result.rows is not None
    path = storage.save(result, tmp_path / "r.nc")
    expected = extend(result.run, MORE, progress=False)
    found = storage.load(path).extend(MORE, model=case.model, progress=False)
    assert found.info["draws"] == 60 + MORE
    assert found.elpd != result.elpd
    same_result(expected, found, times=False)
    assert set(found.info["seconds"]) == set(expected.info["seconds"])


def test_rungs_survive(tmp_path):
    case = Case.of(problems.hierarchical())
    result = case.run()
    assert len(result.run.evidence.rungs) > 0
    found = storage.load(storage.save(result, tmp_path / "r.nc"))
    run = storage.restore_run(found, case.model)
    for mine, theirs in zip(run.evidence.rungs, result.run.evidence.rungs, strict=True):
        for f in fields(mine):
            same_bits(getattr(mine, f.name), getattr(theirs, f.name))
    same_result(crossval.summarise(run), result)
    expected = extend(result.run, MORE, progress=False)
    same_result(expected, found.extend(MORE, case.model, progress=False), times=False)


def test_a_metric_that_folds_share_survives(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "fold_metrics_fit", lambda model, folds: False)
    case = Case.of(problems.hierarchical())
    result = case.run()
    assert isinstance(result.run.sampler.metric, SharedMetric)
    assert result.run.sampler.metric.folds.local.any()
    found = storage.load(storage.save(result, tmp_path / "r.nc"))
    expected = extend(result.run, MORE, progress=False)
    same_result(expected, found.extend(MORE, case.model, progress=False), times=False)


def test_extending_leaves_the_saved_state_alone(regression, saved):
    found = storage.load(saved)
    before = storage._checksum(found.info["state"].tree)
    storage.restore_run(found, regression.model).evidence.sums.total[...] = 0.0
    assert storage._checksum(found.info["state"].tree) == before


def test_extend_needs_the_model(saved):
    with pytest.raises(ValueError, match="pass result.extend"):
        storage.load(saved).extend(MORE)
    with pytest.raises(TypeError, match="model must be a foldwise.Model, got str"):
        storage.load(saved).extend(MORE, model="regression")


def changed(problem, **parts):
    return replace(problem, **parts).model()


def test_extend_refuses_another_model(saved, regression):
    problem, found = regression.problem, storage.load(saved)
    with pytest.raises(ValueError, match=r"only be extended with its own model.*log prior"):
        found.extend(MORE, model=changed(problem, noise=0.5))
    fewer = changed(problem, X=problem.X[:, :3], prior=problem.prior[:3])
    with pytest.raises(ValueError, match=r"its own model.*have 4 parameters and the model 3"):
        found.extend(MORE, model=fewer)
    shorter = changed(problem, X=problem.X[1:], y=problem.y[1:])
    with pytest.raises(ValueError, match=r"n_obs=39 and the saved result n_obs=40; pass the model"):
        found.extend(MORE, model=shorter)
    assert found.run is None


def test_extend_refuses_rows_in_another_order(saved, regression):
    problem, found = regression.problem, storage.load(saved)
    order = np.roll(np.arange(40), 1)
    moved = changed(problem, X=problem.X[order], y=problem.y[order])
    with pytest.raises(ValueError, match="rows are in another order"):
        found.extend(MORE, model=moved)
    with pytest.raises(ValueError, match="rows are in another order"):
        found.extend(MORE, model=replace(moved, y=None))
    with pytest.raises(ValueError, match="observations differ"):
        found.extend(MORE, model=replace(regression.model, y=problem.y[order]))


def test_restore_needs_a_state(loo, regression):
    with pytest.raises(ValueError, match="this one has no such state"):
        storage.restore_run(replace(loo, run=None), regression.model)


# ---------------------------------------------------------------- merge


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
    expected = evidence.full_variance(parts[0].run.evidence, score.full_influence)
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
    alone = fw.cross_validate(rebuilt, folds[3:5], seed=8, draws=60, progress=False)
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


# ---------------------------------------------------------------- arviz


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # arviz-stats 0.8 with pandas 3.1
def test_arviz_compares_two_results(regression, loo):
    import arviz_stats

    problem = regression.problem
    smaller = Case.of(replace(problem, X=problem.X[:, :2], prior=problem.prior[:2], name="small"))
    other = smaller.run(seed=6)
    table = arviz_stats.compare({"a": loo.to_arviz(), "b": other.to_arviz()})
    assert list(table.index) == ["a", "b"]
    assert table.loc["b", "elpd_diff"] == pytest.approx(loo.elpd - other.elpd, rel=1e-12)
    assert loo.elpd - other.elpd > 5
    np.testing.assert_allclose(table["elpd"], [loo.elpd, other.elpd], rtol=1e-12)
    np.testing.assert_allclose(table["se"], [loo.se, other.se], rtol=1e-12)
    np.testing.assert_allclose(table["p"], [loo.p, other.p], rtol=1e-12)


def test_arviz_takes_folds_of_a_joint_score(loo):
    found = export.to_arviz(loo)
    assert found.kind == "loo_kfold"
    assert (found.n_samples, found.n_data_points, found.n_folds) == (240, 40, 40)
    assert (found.scale, found.good_k, found.warning) == ("log", 0.7, False)
    assert found.elpd_i.dims == found.pareto_k.dims == ("fold",)
    np.testing.assert_array_equal(found.elpd_i, loo.folds["elpd"])
    np.testing.assert_array_equal(found.elpd_i["fold"], loo.folds["fold"])
    np.testing.assert_array_equal(found.pareto_k, loo.folds["pareto_k"])
    assert "40-fold" in str(found)


def test_arviz_takes_rows_of_a_score_by_row(by_row):
    found = export.to_arviz(by_row)
    assert (found.n_data_points, found.n_folds) == (40, 5)
    assert found.elpd_i.dims == found.pareto_k.dims == ("row",)
    np.testing.assert_array_equal(found.elpd_i["row"], np.arange(40))
    order = np.argsort(by_row.rows["row"].values)
    np.testing.assert_array_equal(found.elpd_i, by_row.rows["elpd"].values[order])
    tail = np.repeat(by_row.folds["pareto_k"].values, by_row.folds["n_test"].values)[order]
    np.testing.assert_array_equal(found.pareto_k, tail)
    assert float(found.elpd_i.sum()) == pytest.approx(found.elpd, rel=1e-12)


def test_arviz_leaves_out_folds_that_are_not_numbers(loo):
    table = loo.folds.copy(deep=True)
    table["elpd"].values[2] = np.nan
    found = export.to_arviz(replace(loo, scores={"log": replace(loo.score("log"), folds=table)}))
    assert found.elpd_i["fold"].values.tolist() == [0, 1, *range(3, 40)]
    np.testing.assert_array_equal(found.elpd_i, np.delete(loo.folds["elpd"].values, 2))
    np.testing.assert_array_equal(found.pareto_k, np.delete(loo.folds["pareto_k"].values, 2))
    assert (found.n_data_points, found.n_folds) == (39, 39)


def test_arviz_leaves_out_rows_of_folds_that_are_not_numbers(by_row):
    score = by_row.score("log_pointwise")
    table = score.folds.copy(deep=True)
    table["elpd"].values[1] = np.nan
    table["status"].values[1] = "not finite"
    odd = replace(by_row, scores={"log_pointwise": replace(score, folds=table)})
    found = export.to_arviz(odd)
    left = np.setdiff1d(np.arange(40), problems.five_fold().folds.test(1))
    np.testing.assert_array_equal(found.elpd_i["row"], left)
    assert np.isfinite(found.elpd_i).all() and found.pareto_k.shape == found.elpd_i.shape
    assert (found.n_data_points, found.n_folds, found.warning) == (len(left), 4, True)


def test_arviz_counts_a_row_tested_twice_once(regression):
    rows = np.arange(40)
    splits = [(np.delete(rows, test), test) for test in ([0, 1], [1, 2])]
    result = regression.run(fw.from_splits(splits, 40), scores="log_pointwise")
    found, entries = export.to_arviz(result), result.rows["elpd"].values
    assert found.elpd_i["row"].values.tolist() == [0, 1, 2]
    expected = [entries[0], 0.5 * (entries[1] + entries[2]), entries[3]]
    np.testing.assert_allclose(found.elpd_i, expected, rtol=1e-12)
    tail = result.folds["pareto_k"].values
    np.testing.assert_array_equal(found.pareto_k, [tail[0], np.nanmax(tail), tail[1]])


def test_newer_arviz_has_a_class_for_folds(loo, monkeypatch):
    import arviz_stats.utils

    class ForFolds:
        def __init__(
            self,
            *,
            elpd,
            se,
            p,
            n_samples,
            n_data_points,
            scale,
            warning,
            good_k,
            elpd_i,
            pareto_k,
            n_folds,
        ):
            self.elpd, self.n_folds = elpd, n_folds

    monkeypatch.setattr(arviz_stats.utils, "ELPDDataLOOKFold", ForFolds, raising=False)
    found = export.to_arviz(loo)
    assert isinstance(found, ForFolds)
    assert (found.elpd, found.n_folds) == (loo.elpd, 40)
