"""Folds that other processes sample: the same numbers, whoever does the work and whatever fails."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import kills
import numpy as np
import problems
import pytest
from test_checkpoints import family

import foldwise as fw
from foldwise.sampling import elsewhere

QUICK = {"seed": 7, "progress": False, "method": "mcmc", "draws": 60}


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


def agree(one, two):
    """Numbers are those of one machine to 1e-9."""
    for name in one.scores:
        np.testing.assert_allclose(one.score(name).total, two.score(name).total, rtol=1e-9)
        table, other = one.score(name).folds, two.score(name).folds
        for column in {"elpd", "score", "mcse", "ess", "rhat", "pareto_k"} & set(table):
            np.testing.assert_allclose(table[column], other[column], rtol=1e-6, err_msg=column)
        assert table["status"].values.tolist() == other["status"].values.tolist()
    assert one.info["gradients"] == two.info["gradients"]


CASES = {
    "chains and rungs": (problems.hierarchical, {}),
    "online": (problems.five_fold, {"memory": "online", "scores": ("log_pointwise", "log")}),
    "future": (problems.autoregression, {"scores": ("log", "hyvarinen", "crps")}),
    "weights and chains": (lambda: kills.problem("outliers"), {"method": "auto"}),
}


@pytest.mark.parametrize("case", CASES)
def test_processes_give_the_numbers_of_one(case, pool):
    problem, options = CASES[case][0](), {**QUICK, **CASES[case][1]}
    here = fw.cross_validate(problem.model(), problem.folds, **options)
    there = fw.cross_validate(problem.model(), problem.folds, executor=pool, **options)
    agree(here, there)


def test_families_travel_too(pool):
    folds = fw.k_fold(30, 6)
    here = fw.cross_validate(family(), folds, **QUICK)
    there = fw.cross_validate(family(), folds, executor=pool, **QUICK)
    for name in here:
        agree(here[name], there[name])


# ---------------------------------------------------------------- what can go wrong


@pytest.fixture(scope="module")
def five():
    problem = problems.regression()
    model = problem.model()
    return problem, model, fw.cross_validate(model, problem.folds, **QUICK)


@pytest.fixture
def thread():
    """One worker, in this process, where it can be watched."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_models_travel_once_for_each_worker(five, thread, monkeypatch):
    problem, model, here = five
    sent, work = [], elsewhere.work

    def watched(needed, piece):
        sent.append(sum(content is not None for content in needed.values()))
        return work(needed, piece)

    monkeypatch.setattr(elsewhere, "work", watched)
    elsewhere._KNOWN.clear()
    agree(here, fw.cross_validate(model, problem.folds, executor=thread, **QUICK))
    assert sum(sent) <= 4 and len(sent) > 4  # two that were under way when the first came back
    agree(here, fw.cross_validate(model, problem.folds, executor=thread, **QUICK))


def test_a_worker_without_memory_gets_half_of_its_piece(five, thread, monkeypatch):
    problem, model, here = five
    sizes, done = [], elsewhere._done

    def scarce(sampler, piece):
        sizes.append(len(piece["members"]))
        if len(piece["members"]) > 4:
            raise MemoryError("no room")
        return done(sampler, piece)

    monkeypatch.setattr(elsewhere, "_done", scarce)
    agree(here, fw.cross_validate(model, problem.folds, executor=thread, **QUICK))
    assert max(sizes) > 4 and min(sizes) <= 4


def test_a_piece_that_always_fails_gives_flagged_folds_and_the_reason(five, thread, monkeypatch):
    problem, model, here = five
    tries, done = [], elsewhere._done

    def broken(sampler, piece):
        if 3 in piece["members"]:
            tries.append(piece["members"])
            raise OSError("the disk of this worker is gone")
        return done(sampler, piece)

    monkeypatch.setattr(elsewhere, "_done", broken)
    with pytest.warns(UserWarning, match=r"are flagged: OSError: the disk of this worker is gone"):
        there = fw.cross_validate(model, problem.folds, executor=thread, **QUICK)
    assert len(tries) == 3
    status = there.folds["status"].values
    assert all(status[tries[0]] == "not finite")
    fine = np.setdiff1d(np.arange(40), tries[0])
    np.testing.assert_allclose(there.folds["elpd"][fine], here.folds["elpd"][fine], rtol=1e-9)


def test_what_is_no_executor_is_refused(five):
    problem, model, _ = five
    with pytest.raises(TypeError, match=r"executor must be an executor .* got int"):
        fw.cross_validate(model, problem.folds, executor=2, **QUICK)


def test_an_executor_that_ends_costs_nothing_that_is_kept(five, tmp_path, monkeypatch):
    problem, model, here = five
    options = {**QUICK, "checkpoint": tmp_path / "run"}
    calls, lost, work = [], [], elsewhere.work

    def fragile(needed, piece):
        calls.append(piece["members"])
        if len(calls) == 2 and not lost:
            lost.append(executor.shutdown(wait=False, cancel_futures=True))
        return work(needed, piece)

    monkeypatch.setattr(elsewhere, "work", fragile)
    executor = ThreadPoolExecutor(1)
    with pytest.raises(elsewhere.LostExecutor, match=r"the executor") as caught:
        fw.cross_validate(model, problem.folds, executor=executor, **options)
    assert "goes on from there" in caught.value.__notes__[0]
    calls.clear()
    with ThreadPoolExecutor(1) as executor:
        agree(here, fw.cross_validate(model, problem.folds, executor=executor, **options))
    again = np.unique(np.concatenate(calls))
    assert 0 < len(again) < 40  # others were kept
    calls.clear()
    agree(here, fw.cross_validate(model, problem.folds, **options))  # all are, for anybody
    assert not calls


# ---------------------------------------------------------------- Dask


def test_dask_workers_that_are_killed_cost_their_piece_alone():
    distributed = pytest.importorskip("distributed", reason="needs foldwise[cluster]")
    problem = problems.hierarchical()
    options = {**QUICK, "draws": 400}
    here = fw.cross_validate(problem.model(), problem.folds, **options)
    quiet = {"dashboard_address": None, "silence_logs": 50}
    with (
        distributed.LocalCluster(2, threads_per_worker=1, processes=True, **quiet) as cluster,
        distributed.Client(cluster) as client,
    ):
        ended = threading.Event()

        def kill_twice():
            for _ in range(2):
                while not ended.wait(0.05):
                    busy = [worker for worker, keys in client.processing().items() if keys]
                    if busy:
                        os.kill(client.run(os.getpid, workers=busy[:1])[busy[0]], signal.SIGKILL)
                        killed.append(busy[0])
                        break
                time.sleep(0.5)

        killed: list[str] = []
        killer = threading.Thread(target=kill_twice)
        killer.start()
        there = fw.cross_validate(problem.model(), problem.folds, executor=client, **options)
        ended.set()
        killer.join()
    assert len(killed) == 2
    agree(here, there)
