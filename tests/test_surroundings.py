"""What others have set in the process, or the system lacks: foldwise works or says what to do."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import foldwise as fw
from foldwise.support import runtime

pytestmark = pytest.mark.fast
Y = np.random.default_rng(0).normal(1.0, 1.0, 12)


def mean_model():
    return fw.Model(
        lambda mu: -0.5 * mu**2,
        None,
        0.0,
        12,
        lambda key, mu: mu + jax.random.normal(key, (12,)),
        lambda mu, y: -0.5 * (y - mu) ** 2 - 0.919,
        Y,
    )


def run(**options):
    settings = {"draws": 60, "seed": 3, "progress": False, "scores": ("log", "crps"), **options}
    return fw.cross_validate(mean_model(), fw.k_fold(12, 4), method="mcmc", **settings)


@pytest.fixture(scope="module")
def usual():
    return run().elpd


def test_other_random_keys(usual):
    with jax.default_prng_impl("rbg"):
        assert run().elpd == usual


def test_without_compilation(usual):
    with jax.disable_jit():
        assert run().elpd == usual


def test_floating_point_errors_that_raise(usual):
    with np.errstate(all="raise"):
        assert run().elpd == usual
        fit = fw.fit(mean_model(), draws=200, warmup=200, seed=1, progress=False)
    assert fit.positions.std() > 0


def test_one_family_in_two_threads():
    def family():
        return fw.model_family(
            lambda q, s: -0.5 * jnp.sum(q**2),
            lambda q, s: -0.5 * (Y - q[0] - s[0] * q[1]) ** 2 - 0.919,
            np.zeros(2), 12, selections=[[0.0], [1.0], [2.0]],
        )  # fmt: skip

    def total(models, seed):
        settings = {"draws": 60, "seed": seed, "progress": False, "method": "mcmc"}
        found = fw.cross_validate(models, fw.k_fold(12, 4), **settings)
        return [result.elpd for result in found.values()]

    shared = family()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda seed: total(shared, seed), (1, 2)))
    assert found == [total(family(), 1), total(family(), 2)]


def python(program, **changes):
    """A program in a process of its own, with changes to the environment, None: without it."""
    environment = {**os.environ, **changes}
    environment = {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def test_a_user_without_a_home():
    program = """
import pwd
def nobody(*_):
    raise KeyError("nobody")
pwd.getpwuid = pwd.getpwnam = nobody
import foldwise
assert foldwise.support.runtime.cache_dir() is None
"""
    done = python(program, HOME=None, XDG_CACHE_HOME=None, FOLDWISE_CACHE=None)
    assert done.returncode == 0, done.stderr


def test_too_many_devices_are_refused_at_once(monkeypatch):
    monkeypatch.setenv("FOLDWISE_DEVICES", "99999")
    with pytest.raises(ValueError, match=r"FOLDWISE_DEVICES must be at most \d+ .* got 99999"):
        runtime._requested_devices()


FORKS = """
import multiprocessing, warnings
warnings.simplefilter("ignore")
import numpy as np, jax
import foldwise as fw
model = fw.Model(lambda q: -0.5 * q**2, lambda q: -0.5 * (q - np.arange(4.0)) ** 2, 0.0, 4)
jax.devices()
def child(queue):
    try:
        fw.fit(model, progress=False)
    except RuntimeError as error:
        queue.put(str(error))
context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=child, args=(queue,), daemon=True)
process.start()
print(queue.get(timeout=30))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked")
def test_a_process_forked_after_jax_has_started_says_what_to_do():
    done = python(FORKS)
    assert done.returncode == 0, done.stderr
    assert "JAX must not have started before a process is forked" in done.stdout
    assert 'get_context("spawn")' in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="folders have no such permissions")
def test_nobody_else_reads_the_compiled_programs(tmp_path):
    folder = tmp_path / "programs"
    folder.mkdir(mode=0o755)
    done = python("import foldwise", FOLDWISE_CACHE=str(folder), JAX_COMPILATION_CACHE_DIR=None)
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_programs_that_were_cut_short_are_removed(tmp_path, monkeypatch):
    from jax._src.compilation_cache import compress_executable

    monkeypatch.setenv("FOLDWISE_CACHE", str(tmp_path))
    whole = compress_executable(os.urandom(5000))
    for name, content in {"whole": whole, "short": whole[:2000], "empty": b""}.items():
        (tmp_path / f"{name}-cache").write_bytes(content)
        os.utime(tmp_path / f"{name}-cache", (1.0, 1.0))
    (tmp_path / "new-cache").write_bytes(whole[:2000])  # perhaps being written
    runtime._drop_short_entries.cache_clear()
    runtime._drop_short_entries()
    runtime._drop_short_entries.cache_clear()
    assert {file.name for file in tmp_path.glob("*-cache")} == {"whole-cache", "new-cache"}
