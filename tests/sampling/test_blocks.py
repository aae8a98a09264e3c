"""Chains belong to their fold: neither grouping, nor lanes, nor stopping changes them."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import problems
import pytest
from problems import by_chains

import foldwise as fw
from foldwise.sampling import blocks as sampler_module
from foldwise.sampling import program
from foldwise.sampling.blocks import leapfrog_counts


def run(problem, model, fit, folds, **arguments):
    return by_chains(model, folds, fit=fit, seed=3, progress=False, **arguments)


@pytest.mark.parametrize("name", ["regression", "hierarchical", "many_groups"])
def test_a_fold_alone_equals_the_fold_among_all(prepared, name):
    problem, model, fit = prepared(name)
    together = run(problem, model, fit, problem.folds)
    for k in (0, len(problem.folds) // 2):
        alone = run(problem, model, fit, problem.folds[k])
        np.testing.assert_allclose(alone.draws[0], together.draws[k], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(alone.folds["elpd"][0], together.folds["elpd"][k], rtol=1e-6)


def test_grouping_of_folds_does_not_matter(prepared, monkeypatch):
    problem, model, fit = prepared("regression")
    whole = run(problem, model, fit, problem.folds)
    monkeypatch.setattr(program, "CHUNK_BYTES", 3 * 8 * 40 * 4)
    pieces = run(problem, model, fit, problem.folds)
    smaller, larger = (result.run.sampler.program.size for result in (pieces, whole))
    assert smaller.chunk < larger.chunk
    np.testing.assert_allclose(pieces.draws, whole.draws, rtol=1e-6, atol=1e-6)
    assert pieces.elpd == pytest.approx(whole.elpd, abs=1e-6)


def test_stopping_and_going_on_is_the_same_as_going_on(prepared):
    problem, model, fit = prepared("regression")
    once = run(problem, model, fit, problem.folds, draws=130)
    twice = run(problem, model, fit, problem.folds, draws=60)
    before = twice.draws.copy()
    assert twice.extend(70, progress=False) is twice
    np.testing.assert_array_equal(twice.draws, once.draws)
    np.testing.assert_array_equal(twice.draws[:, :, :60], before)
    assert twice.elpd == once.elpd and twice.mcse == once.mcse
    np.testing.assert_allclose(twice.folds["acceptance"], once.folds["acceptance"], rtol=1e-12)


def test_online_runs_can_be_extended(prepared):
    problem, model, fit = prepared("five_fold")
    arguments = {"memory": "online", "scores": ("log_pointwise", "log")}
    once = run(problem, model, fit, problem.folds, draws=130, **arguments)
    twice = run(problem, model, fit, problem.folds, draws=60, **arguments).extend(
        70, progress=False
    )
    for score in arguments["scores"]:
        assert twice.score(score).total == pytest.approx(once.score(score).total, abs=0.02)
        np.testing.assert_allclose(
            twice.score(score).folds["rhat"], once.score(score).folds["rhat"]
        )
    np.testing.assert_allclose(twice.rows["elpd"], once.rows["elpd"], rtol=1e-9)


def test_seeds_decide(prepared):
    problem, model, fit = prepared("normal_mean")
    a, b, c = (by_chains(model, problem.folds, fit=fit, seed=s, progress=False) for s in (1, 1, 2))
    np.testing.assert_array_equal(a.draws, b.draws)
    assert not np.any(a.draws.values == c.draws.values)


def test_chains_and_folds_have_randomness_of_their_own(prepared):
    problem, model, fit = prepared("normal_mean")
    draws = run(problem, model, fit, problem.folds).draws.values
    flat = draws.reshape(-1, draws.shape[-1])
    correlation = np.corrcoef(np.diff(flat))
    off = correlation[~np.eye(len(flat), dtype=bool)]
    assert np.abs(off).max() < 6 / np.sqrt(100)


def test_the_density_is_traced_a_fixed_number_of_times():
    """However many folds: everything is compiled once."""
    counts = Counter()

    def traced(folds):
        problem = problems.regression()

        def log_likelihood(beta):
            counts[len(folds)] += 1
            return -0.5 * ((problem.y - problem.X @ beta) / 0.8) ** 2

        model = fw.Model(
            lambda beta: -0.5 * jnp.sum(beta**2) / 9, log_likelihood, np.zeros(4), n_obs=40
        )
        fit = fw.fit(model, draws=200, warmup=200, seed=1, progress=False)
        by_chains(model, folds, fit=fit, seed=1, progress=False)

    traced(fw.leave_one_out(40)[:4])
    traced(fw.leave_one_out(40))
    assert counts[4] == counts[40] > 0


def test_leapfrog_counts_are_shared_and_vary():
    counts = leapfrog_counts(0.3, 0, 1000)
    assert counts.min() >= 1 and len(np.unique(counts)) > 3
    assert counts.mean() * 0.3 == pytest.approx(sampler_module.TRAJECTORY, rel=0.05)
    np.testing.assert_array_equal(leapfrog_counts(0.3, 400, 100), counts[400:500])


def test_float32_is_close(prepared):
    problem, model, fit = prepared("regression")
    single = run(problem, model, fit, problem.folds, precision="float32")
    assert abs(single.elpd - problem.joint().sum()) < 4 * single.mcse


LANES = """
import sys
sys.path.insert(0, {tests!r})
import jax
import problems
import foldwise as fw
from foldwise.support.runtime import lanes
problem = problems.regression()
model = problem.model()
fit = fw.fit(model, draws=200, warmup=200, seed=1, progress=False)
result = problems.by_chains(model, problem.folds, fit=fit, seed=3, progress=False)
print(jax.local_device_count(), lanes(), repr(result.elpd))
"""


@pytest.fixture(scope="module")
def lanes_output():
    script = LANES.format(tests=str(Path(__file__).parents[1]))

    def outcome(devices, cores):
        environment = {**os.environ, "FOLDWISE_DEVICES": str(devices)}
        code = f"import os; os.sched_setaffinity(0, {cores})\n" + script
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        count, lanes, elpd = done.stdout.split()
        return int(count), int(lanes), float(elpd)

    return outcome


def test_devices_threads_and_one_core_agree(lanes_output):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    devices = lanes_output(2, set(cores[:2]))
    threads = lanes_output(1, set(cores[:2]))
    single = lanes_output(1, {cores[0]})
    assert devices[:2] == (2, 2) and threads[:2] == (1, 2) and single[:2] == (1, 1)
    assert threads[2] == pytest.approx(devices[2], abs=1e-6)
    assert single[2] == pytest.approx(devices[2], abs=1e-6)


CHOLESKY = """
{before}
import faulthandler
faulthandler.dump_traceback_later(100, exit=True)
import jax, jax.numpy as jnp, numpy as np
import foldwise as fw
near = np.exp(-0.5 * (np.arange(12)[:, None] - np.arange(12)) ** 2)
y = np.linspace(-1, 1, 12)

def rows(q):
    root = jnp.linalg.cholesky(jnp.exp(q[0]) * near + 0.1 * jnp.eye(12))
    return -0.5 * (y - root @ q[1:]) ** 2

model = fw.Model(lambda q: -0.5 * jnp.sum(q**2), rows, np.zeros(13), 12)
fit = fw.fit(model, draws=100, warmup=100, seed=1, progress=False)
found = fw.cross_validate(model, fw.k_fold(12, 4), fit, method="mcmc", seed=1, progress=False)
print(jax.local_device_count(), found.elpd)
"""


def test_batched_factorisations_do_not_block():
    # with as many lanes as XLA has threads, LAPACK calls in all of them wait for each other
    started = "import jax; jax.devices()"
    several = "import jax; jax.config.update('jax_num_cpu_devices', 2); jax.devices()"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["FOLDWISE_DEVICES"] = "2"
    out = {}
    for before in ("", started, several):
        code = CHOLESKY.format(before=before)
        out[before] = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            env=environment,
        )
    found = [run.stdout.split() for run in out.values()]
    assert [devices for devices, _ in found] == ["2", "1", "2"]
    elpd = [float(value) for _, value in found]
    assert elpd == pytest.approx([elpd[0]] * 3, abs=1e-6)


def test_gradients_are_counted(prepared):
    problem, model, fit = prepared("regression")
    result = run(problem, model, fit, problem.folds)
    for draws in (100, 110):
        steps = leapfrog_counts(result.info["step_size"], 0, 50 + draws).sum()
        assert result.info["gradients"] == steps * 40 * 4
        result.extend(10, progress=False)
    # NUTS takes at least one step an iteration
    assert fit.gradients >= fit.positions.shape[0] * fit.positions.shape[1]
