"""Runs that are ended and taken up again: the same result to the last bit, whatever happens."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import kills
import numpy as np
import problems
import pytest
from stored import same_result

import foldwise as fw
from foldwise.results import files as storage
from foldwise.sampling import program
from foldwise.sampling.kept import BlockKeeper, RunRecorder
from foldwise.support import keeping
from foldwise.support.keeping import FolderKeeper, KeepingWarning
from foldwise.support.progress import Progress
from foldwise.support.records import decode, encode

QUICK = {"seed": 7, "progress": False}


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Keep all there is at every segment, of several blocks."""
    monkeypatch.setattr(keeping, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(keeping, "MOST_SHARE", 1e9)
    monkeypatch.setattr(program, "BLOCK_BYTES", 8 * 60 * 4 * 6)


def family():
    x, rng = np.linspace(-1, 1, 30), np.random.default_rng(2)
    y = 2 * x + rng.normal(size=30)
    import jax.numpy as jnp

    return fw.model_family(
        lambda q, s: -0.5 * jnp.sum(q**2),
        lambda q, s: -0.5 * (y - q[0] - s[0] * q[1] * x) ** 2 - 0.919,
        np.zeros(2), 30, selections=[[1.0], [0.0]], names=["x", "none"], y=y,
    )  # fmt: skip


CASES = {
    "chains and rungs": (problems.hierarchical, kills.SCENARIOS["chains"][1]),
    "online to a target": (problems.hierarchical, kills.SCENARIOS["online"][1]),
    "globals": (problems.hierarchical, kills.SCENARIOS["globals"][1]),
    "future, other scores": (
        problems.autoregression,
        {"draws": 60, "scores": ("log", "hyvarinen", "crps"), "keep": ("position", "predictive")},
    ),
    "rows": (problems.five_fold, {"method": "mcmc", "draws": 60, "scores": ("log_pointwise",)}),
    "weights": (lambda: kills.problem("outliers"), {"scores": ("log", "crps")}),
    "cells": (lambda: kills.problem("far scale"), {}),
    "family": (None, {"method": "mcmc", "draws": 60}),
}


class Stopped(BaseException):
    """As if the process had ended."""


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_ends_anywhere_goes_on_to_the_same_bits(case, tmp_path, monkeypatch):
    make, options = CASES[case]
    every = 1 if case == "future, other scores" else 3
    if make is None:
        model, folds = family(), fw.k_fold(30, 6)
    else:
        problem = make()
        model, folds = problem.model(), problem.folds
    expected = fw.cross_validate(model, folds, **QUICK, **options)
    save, saved = FolderKeeper.save, []

    def noted(keeper, name, tree):
        saved.append(name)
        save(keeper, name, tree)

    def stopping(do, ended=set()):  # noqa: B006, one set for both
        def done(*arguments):
            if len(saved) % every == every - 1 and len(saved) not in ended:
                ended.add(len(saved))
                raise Stopped
            do(*arguments)

        return done

    monkeypatch.setattr(FolderKeeper, "save", noted)
    monkeypatch.setattr(Progress, "advance", stopping(Progress.advance))
    monkeypatch.setattr(Progress, "start", stopping(Progress.start))
    ends = 0
    while True:
        try:
            found = fw.cross_validate(model, folds, checkpoint=tmp_path / "run", **QUICK, **options)
            break
        except Stopped as stop:
            ends += 1
            assert "the same call again goes on from there" in stop.__notes__[0]
    # nothing was done twice but what was under way
    whole = [name for name in saved if not name.endswith("-part")]
    assert len(set(whole)) == len(whole) and ends >= 1
    if make is None:
        assert list(found) == list(expected)
        for name in found:
            same_result(expected[name], found[name], times=False)
    else:
        same_result(expected, found, times=False)


@pytest.fixture
def five():
    problem = problems.five_fold()
    return problem, problem.model(), {**QUICK, "method": "mcmc", "draws": 60}


@pytest.fixture
def kept(five, tmp_path):
    """A folder with a whole run in it, and its result."""
    problem, model, options = five
    result = fw.cross_validate(model, problem.folds, checkpoint=tmp_path / "run", **options)
    return tmp_path / "run", result


DAMAGE = {
    "cut": lambda raw: raw[: len(raw) // 2],
    "flipped": lambda raw: raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:],
    "empty": lambda raw: b"",
    "other": lambda raw: b"another file",
    "of another run": lambda raw: raw[:20] + b"0000" + raw[24:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_done_again_and_said(damage, five, kept):
    (problem, model, options), (folder, expected) = five, kept
    piece = folder / "folds-1-0.piece"
    whole = piece.read_bytes()
    piece.write_bytes(DAMAGE[damage](whole))
    why = "belongs to another run" if damage == "of another run" else "is damaged"
    with pytest.warns(KeepingWarning, match=rf"folds-1-0\.piece is done again: it {why}"):
        found = fw.cross_validate(model, problem.folds, checkpoint=folder, **options)
    same_result(expected, found, times=False)
    found = fw.cross_validate(model, problem.folds, checkpoint=folder, **options)
    same_result(expected, found, times=False)


def test_a_damaged_identity_is_said(five, kept):
    (problem, model, options), (folder, expected) = five, kept
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('"chains": 4', '"chains": 5'))
    with pytest.warns(KeepingWarning, match=r"run\.json is damaged; all that was kept"):
        found = fw.cross_validate(model, problem.folds, checkpoint=folder, **options)
    same_result(expected, found, times=False)


def test_another_run_is_refused_and_the_difference_named(five, kept):
    (problem, model, options), (folder, _) = five, kept

    def refused(says, model=model, folds=problem.folds, **other):
        with pytest.raises(ValueError, match=rf"holds another: .*{says}.*use another folder"):
            fw.cross_validate(model, folds, checkpoint=folder, **{**options, **other})

    refused("draws is 60 there and 70 here", draws=70)
    refused("seed is 7 there and 8 here", seed=8)
    refused("memory is 'draws' there and 'online' here", memory="online")
    refused("target_mcse is None there", target_mcse=0.1)
    refused("other rows of the folds", folds=fw.k_fold(problem.folds.n, 5, seed=9))
    refused("other folds .4 of 5 there|other folds .5 of 5 there", folds=problem.folds[:4])
    refused("another full-data fit", fit=fw.fit(model, draws=100, warmup=100, progress=False))
    y = problem.y.copy()
    y[2] += 1e-3
    refused("other observations; other model or data: the log likelihood",
            model=replace(problem, y=y).model())  # fmt: skip
    other = replace(problem, prior=problem.prior * 1.001).model()
    refused("other model or data: the log prior at a point is", model=other)


def test_without_a_seed_the_run_keeps_its_own(five, tmp_path):
    problem, model, options = five
    options = {**options, "seed": None}
    one, two = (
        fw.cross_validate(model, problem.folds, checkpoint=tmp_path / "run", **options)
        for _ in range(2)
    )
    assert one.info["seed"] == two.info["seed"]
    same_result(one, two, times=False)


def test_folders_that_are_refused_before_any_work(five, tmp_path, monkeypatch):
    problem, model, options = five
    monkeypatch.setattr(fw.crossval, "_fit", None)

    def refused(folder, error, says):
        with pytest.raises(error, match=says):
            fw.cross_validate(model, problem.folds, checkpoint=folder, **options)

    (tmp_path / "thesis.tex").write_text("mine")
    refused(tmp_path, FileExistsError, r"new or empty folder.*holds thesis\.tex")
    refused(tmp_path / "thesis.tex", OSError, "folder in which files can be made")
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.skipif(sys.platform == "win32", reason="folders have no such permissions")
def test_a_read_only_folder_is_refused(five, tmp_path, monkeypatch):
    problem, model, options = five
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o500)
    if os.geteuid() == 0:  # may write anywhere

        def refuse(*_):
            raise PermissionError("read-only")

        monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=r"run is not one .*; choose another"):
        fw.cross_validate(model, problem.folds, checkpoint=tmp_path / "run", **options)


def test_a_full_disk_costs_what_is_kept_and_not_the_run(five, tmp_path, monkeypatch):
    problem, model, options = five
    expected = fw.cross_validate(model, problem.folds, **options)

    def full(file, content):
        if file.name.startswith("folds"):
            raise OSError(28, "No space left on device")
        write(file, content)

    write = keeping.write_whole
    monkeypatch.setattr(keeping, "write_whole", full)
    with pytest.warns(KeepingWarning, match=r"could not be kept in .*No space left") as caught:
        found = fw.cross_validate(model, problem.folds, checkpoint=tmp_path / "run", **options)
    assert len([w for w in caught if w.category is KeepingWarning]) == 1
    same_result(expected, found, times=False)
    monkeypatch.setattr(keeping, "write_whole", write)
    found = fw.cross_validate(model, problem.folds, checkpoint=tmp_path / "run", **options)
    same_result(expected, found, times=False)


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize(("scenario", "count"), [("chains", 4), ("weights", 2)])
def test_killed_processes_lose_nothing(scenario, count, tmp_path, seed):
    rng, folder = random.Random(seed), tmp_path / "run"
    seconds = kills.finish(kills.start(scenario, "", tmp_path / "expected.nc"))
    for _ in range(count):
        kills.kill(kills.start(scenario, folder, tmp_path / "found.nc"), rng, 0.7 * seconds)
    before = kills.pieces(folder)
    kills.finish(kills.start(scenario, folder, tmp_path / "found.nc"))
    after = kills.pieces(folder)
    # parts of a piece, and single refits, are dropped when all of it together is kept
    whole = [name for name in before if "part" not in name and not name.startswith("refit-")]
    assert {name: after[name] for name in whole} == {name: before[name] for name in whole}
    expected, found = (storage.load(tmp_path / f"{name}.nc") for name in ("expected", "found"))
    same_result(expected, found, times=False)


SLOW = """
import signal, sys, time, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)  # not so in a job in the background
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import kills
from foldwise.support import keeping
written = keeping.FolderKeeper._write
def slow(keeper, file, tree):
    written(keeper, file, tree)
    print(file.name, flush=True)
    time.sleep(0.5)
keeping.FolderKeeper._write = slow
kills.run("chains", sys.argv[2])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGTERM")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_process_is_refused_and_signals_say_how_to_go_on(number, tmp_path, five):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", SLOW, str(Path(__file__).parent), str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "fit-1-0.piece\n"
        problem, model, options = five
        busy = rf"one process at a time, but process {process.pid} on .* is at work in it"
        with pytest.raises(OSError, match=busy):
            fw.cross_validate(model, problem.folds, checkpoint=folder, **options)
        process.send_signal(number)
        began = time.monotonic()
        _, said = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert process.returncode != 0
    assert f"what is finished is kept in {folder}; the same call again goes on" in said
    assert "fit-1-0.piece" in os.listdir(folder)
    assert "run.json" in os.listdir(folder) and ".foldwise-lock" not in os.listdir(folder)


# ---------------------------------------------------------------- pieces


def test_metrics_that_were_refined_are_kept(tmp_path):
    problem = problems.autoregression()
    run = fw.cross_validate(problem.model(), problem.folds, draws=60, **QUICK).run
    members = np.flatnonzero(run.sampler.far)[:3]
    whitening = run.sampler.metric[0]
    refined = whitening[members] * 1.5
    with keeping.keeping(FolderKeeper(tmp_path, "run")):
        blocks = BlockKeeper("folds", [RunRecorder(run, 0)], lambda folds: None)
        whitening[members] = refined
        part = blocks._part(0, members, 0)
        whitening[members] = 0.0
        blocks._put(part)
    np.testing.assert_array_equal(whitening[members], refined)


def test_records_come_back_bit_for_bit(five):
    _, model, _ = five
    fit = fw.fit(model, draws=100, warmup=100, seed=1, progress=False)
    _ = fit.rhat
    tree = {
        "fit": fit,
        "list": [1, 2.5, None, True, "text", float("nan"), float("-inf")],
        3: (np.float32(1.5), np.arange(6).reshape(2, 3)[:, ::2], np.zeros((2, 0))),
        "text": np.array(["a", "bc"]),
    }
    found = decode(encode(tree))
    np.testing.assert_array_equal(found["fit"].positions, fit.positions)
    assert vars(found["fit"])["rhat"].tobytes() == fit.rhat.tobytes()
    assert found["fit"].seconds == fit.seconds and found["fit"].fingerprint == fit.fingerprint
    assert repr(found["list"]) == repr(tree["list"])
    assert type(found[3][0]) is np.float32 and found[3][1].tolist() == [[0, 2], [3, 5]]
    assert found[3][2].shape == (2, 0) and found["text"].tolist() == ["a", "bc"]


@pytest.mark.parametrize("name", ["os:system", "foldwise.crossval:cross_validate"])
def test_nothing_but_records_is_made_of_a_file(name):
    head = json.dumps({"record": [name, {}]}).encode()
    with pytest.raises(ValueError, match="is no record of foldwise"):
        decode(len(head).to_bytes(8, "little") + head)
    with pytest.raises(TypeError, match="is not kept"):
        encode({"function": Path})
