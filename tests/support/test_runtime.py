"""Devices, precision, the compilation cache, and programs that run on all lanes."""

import gc
import time
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from foldwise.support import runtime
from foldwise.support.runtime import cache_dir, compiled, lanes, precision_context


@pytest.mark.parametrize("word", ["off", "OFF", "0", "none"])
def test_the_cache_can_be_switched_off(monkeypatch, word):
    monkeypatch.setenv("FOLDWISE_CACHE", word)
    assert cache_dir() is None


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FOLDWISE_CACHE", "~/programs")
    assert cache_dir() == Path.home() / "programs"
    monkeypatch.delenv("FOLDWISE_CACHE")
    monkeypatch.setattr(runtime.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "foldwise" / "jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "foldwise" / "jax"


@pytest.mark.parametrize("setting", ["0", "-1", "two", "1.5", ""])
def test_numbers_of_devices_that_make_no_sense(monkeypatch, setting):
    monkeypatch.setenv("FOLDWISE_DEVICES", setting)
    with pytest.raises(ValueError, match=r"FOLDWISE_DEVICES must be a whole number of at least 1"):
        runtime._requested_devices()


def test_devices_are_those_asked_for_or_one_for_each_core(monkeypatch):
    monkeypatch.setenv("FOLDWISE_DEVICES", "3")
    assert runtime._requested_devices() == 3
    monkeypatch.delenv("FOLDWISE_DEVICES")
    assert runtime._requested_devices() == runtime.cores()


def test_precision_is_that_of_the_context():
    with precision_context("float64"):
        assert jnp.zeros(1).dtype == np.float64
        with precision_context("float32"):
            assert jnp.zeros(1).dtype == np.float32
    with pytest.raises(ValueError, match="float16"):
        precision_context("float16")


def scaled(sharded, shared):
    return {"twice": 2.0 * sharded["a"] + shared, "sum": sharded["b"].sum(axis=1)}


def test_lanes_together_are_the_whole(rng):
    owner, size = SimpleNamespace(), 3 * lanes()
    data = {"a": rng.normal(size=(size, 2)), "b": rng.normal(size=(size, 4))}
    shared = np.array([1.0, -1.0])
    found = compiled(owner, "scaled", scaled, data, shared)(data, shared)
    np.testing.assert_allclose(found["twice"], 2.0 * data["a"] + shared, rtol=1e-15)
    np.testing.assert_allclose(found["sum"], data["b"].sum(axis=1), rtol=1e-12)


def test_factorisations_on_all_lanes(rng):
    def factor(sharded, shared):
        return jnp.linalg.cholesky(sharded + shared)

    half = rng.normal(size=(4 * lanes(), 3, 3))
    matrices = half @ np.swapaxes(half, 1, 2)
    found = compiled(SimpleNamespace(), "factor", factor, matrices, np.eye(3))(matrices, np.eye(3))
    np.testing.assert_allclose(found, np.linalg.cholesky(matrices + np.eye(3)), rtol=1e-10)


def test_a_program_is_made_once_for_each_name_shape_and_precision():
    owner = SimpleNamespace()
    data = {"a": np.zeros((lanes(), 2)), "b": np.zeros((lanes(), 4))}
    first = compiled(owner, "scaled", scaled, data, np.zeros(2))
    assert (
        compiled(owner, "scaled", scaled, {k: v + 1.0 for k, v in data.items()}, np.ones(2))
        is first
    )
    others = [
        compiled(owner, "scaled", scaled, {**data, "b": np.zeros((lanes(), 5))}, np.zeros(2)),
        compiled(owner, "scaled", scaled, data, np.zeros(2), "float32"),
        compiled(owner, "another", scaled, data, np.zeros(2)),
        compiled(SimpleNamespace(), "scaled", scaled, data, np.zeros(2)),
    ]
    assert len({id(program) for program in (first, *others)}) == 5


def test_waits_of_several_threads_count_once():
    """Or more time would be spent compiling than there was."""
    waiting, together = runtime._Waiting(), Barrier(4)

    def wait():
        with waiting:
            together.wait()
            time.sleep(0.1)

    began = time.perf_counter()
    threads = [Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.1 <= waiting.seconds <= time.perf_counter() - began
    with waiting:
        pass
    assert waiting.seconds <= time.perf_counter() - began


def test_programs_are_compiled_quickly_where_the_options_are_known(monkeypatch):
    asked = []

    class Lowered:
        def compile(self, compiler_options=None):
            asked.append(compiler_options)
            if compiler_options == {"unknown": True}:
                raise runtime.jax.errors.JaxRuntimeError("No such compile option")

    runtime._compiled(Lowered(), quick=True)
    runtime._compiled(Lowered(), quick=False)
    assert asked == [runtime._QUICK, None]
    # an option that this jaxlib does not know is no reason to fail
    monkeypatch.setattr(runtime, "_QUICK", {"unknown": True})
    runtime._compiled(Lowered(), quick=True)
    assert asked[2:] == [{"unknown": True}, None]


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_a_program_is_traced(enabled):
    seen = []

    def double(x, _):
        seen.append(gc.isenabled())
        return 2.0 * x

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        program = compiled(SimpleNamespace(), "double", double, np.zeros(2 * lanes()), ())
        assert gc.isenabled() is enabled and not any(seen) and seen
    finally:
        (gc.enable if before else gc.disable)()
    np.testing.assert_array_equal(program(np.ones(2 * lanes()), ()), 2.0)
