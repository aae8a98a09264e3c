"""Saving, loading, and extending what was loaded."""

import gzip
import json
import os
import sys
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import problems
import pytest
import xarray as xr
from stored import MORE, Case, changed, content, same_bits, same_result

import foldwise as fw
from foldwise import crossval
from foldwise.results import files as storage
from foldwise.results import packing
from foldwise.results.extend import extend
from foldwise.sampling import tuning
from foldwise.sampling.metric import SharedMetric

# ---------------------------------------------------------------- save and load


@pytest.mark.fast
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


@pytest.mark.fast
@pytest.mark.parametrize("kind", NAMES)
def test_fold_names_keep_their_kind(kind, by_row, regression, tmp_path):
    folds = replace(problems.five_fold().folds, names=NAMES[kind])
    run = replace(by_row.run, folds=folds, evidence=replace(by_row.run.evidence, folds=folds))
    result = crossval.summarise(run)
    found = storage.load(storage.save(result, tmp_path / "r.nc"))
    same_result(result, found)
    same_bits(storage.restore_run(found, regression.model).folds.names, NAMES[kind])


def test_labels_of_another_kind_are_saved_as_text(loo, tmp_path):
    y = np.array(["b"] * loo.info["n_obs"], object)
    y[0], y[1] = 1j, (1, 2)
    odd = replace(loo, test={**loo.test, "y": y})
    with pytest.warns(UserWarning, match=r"2 are not, such as the complex 1j; their text"):
        path = storage.save(odd, tmp_path / "r.nc")
    assert storage.load(path).test["y"][:3].tolist() == ["1j", "(1, 2)", "b"]


@pytest.mark.fast
@pytest.mark.parametrize("dtype", ["f2", "f4", ">f8", "c16", "i1", "u8", "?", "m8[s]", "S3"])
def test_observations_keep_their_type(dtype, loo, tmp_path):
    y = np.arange(2 * loo.info["n_obs"]).astype(dtype).reshape(-1, 2)
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


@pytest.mark.fast
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


@pytest.mark.fast
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

    def fail(descriptor):
        raise stop

    monkeypatch.setattr(os, "fsync", fail)
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


@pytest.mark.fast
def test_load_notices_a_changed_number(saved, loo):
    raw, number = saved.read_bytes(), np.float64(loo.elpd).tobytes()
    assert raw.count(number) == 1
    saved.write_bytes(raw.replace(number, np.float64(loo.elpd + 1e-12).tobytes()))
    with pytest.raises(ValueError, match=r"loo\.nc must be as foldwise saved it.*checksum"):
        storage.load(saved)


@pytest.mark.fast
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
    assert len(result.run.evidence.ladder.rungs) > 0
    found = storage.load(storage.save(result, tmp_path / "r.nc"))
    run = storage.restore_run(found, case.model)
    for mine, theirs in zip(
        run.evidence.ladder.rungs, result.run.evidence.ladder.rungs, strict=True
    ):
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


# ---------------------------------------------------------------- files of older versions


@pytest.mark.fast
def test_a_file_from_before_sums_had_parts_goes_on(tmp_path):
    """Written when sums by row and bridges' grids were fields of the running sums."""
    y = np.array([0.3, -1.2, 0.8, 0.1, 1.4, -0.6])

    def row_log_density(mu, y):
        return -0.5 * (y - mu) ** 2

    model = fw.Model(lambda mu: -0.5 * mu**2, None, 0.0, 6, None, row_log_density, y, name="mean")
    kept, file = Path(__file__).with_name("saved_before_rooms.nc.gz"), tmp_path / "saved.nc"
    file.write_bytes(gzip.decompress(kept.read_bytes()))
    result = fw.load(file)
    longer = result.extend(20, model=model, progress=False)
    # what the version that wrote it gave
    assert longer.elpd == pytest.approx(-2.52108469296671, rel=1e-9)
    mcse = [0.010114931818827257, 0.023551672038713497, 0.026224278186179707]
    np.testing.assert_allclose(longer.folds["mcse"], mcse, rtol=1e-9)


def test_evidence_of_older_files_comes_in_records(autoregression):
    """Those had the fields of full data, pace, ladder and outcomes side by side."""
    run = autoregression.run(scores=("log", "crps", "hyvarinen")).run
    now = storage._run_parts(run)["evidence"]
    flat = {name: part for name, part in now.items() if not is_dataclass(part)}
    for name in ("pace", "ladder", "outcomes"):
        flat |= vars(now[name])
    full = now["full"]
    flat |= {"sums": now["sums"], "full": full.joint, "full_rows": full.rows}
    flat |= {"full_chains": full.chains, "full_length": full.length}
    found, expected = (packing.pack(parts) for parts in (storage._in_records(flat), now))
    assert storage._in_records(now) is now
    same = {name: storage._checksum(child) for name, child in expected.children.items()}
    assert {"full", "sums", "pace", "ladder", "outcomes"} <= set(same)
    assert {name: storage._checksum(child) for name, child in found.children.items()} == same
