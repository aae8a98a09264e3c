"""What foldwise shares with the caller's JAX: devices, precision, compilation cache.

The number of CPU devices and the compilation cache belong to the whole process and are fixed once
JAX's backend has started. :func:`configure`, called when foldwise is imported, sets them only if
nobody else has and it is not too late; the environment variables ``FOLDWISE_DEVICES`` (a number of
CPU devices) and ``FOLDWISE_CACHE`` (a folder, or ``off``) override it. Compiled programs hold the
data that models close over, so the cache is a folder that only its user may read. If the backend
already runs with one device, work is spread over threads instead, which is slower
(``bench/engine.py``).
"""

from __future__ import annotations

import gc
import os
import stat
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import numpy as np

from foldwise.support.factorise import lowering

# JAX does not cache programs that compile in less than a second; the fold programs of small
# models compile in one to three, their helpers in less, and a user waits for the sum.
_CACHE_MIN_COMPILE_SECONDS = 0.2

# Options of CPUs for programs that are compiled quickly: without XLA's newer emitters of fused
# loops, and with less of LLVM's. The integrals of rats' growth compile in half of the time and run
# in 1.7 times theirs (bench/compiling.py).
_QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 1}
# CPU devices that any machine may have, for tests; more only where there are cores for them.
_MOST_DEVICES = 64
# Seconds within which a program of the cache may still be being written by another process.
_BEING_WRITTEN = 60.0
# Whether programs have one lane.
_ALONE: ContextVar[bool] = ContextVar("alone", default=False)
# Whether this process was forked after JAX had started.
_FORKED = False


def cores() -> int:
    """Number of CPU cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _note_fork() -> None:
    global _FORKED
    _FORKED = _FORKED or backend_started()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def backend_started() -> bool:
    """Whether JAX's devices have been created, after which their number is fixed."""
    from jax._src import xla_bridge  # no public way to ask without starting the backend

    return bool(xla_bridge.backends_are_initialized())


def cache_dir() -> Path | None:
    """Folder of the compilation cache; None: switched off by ``FOLDWISE_CACHE=off``, or no home."""
    setting = os.environ.get("FOLDWISE_CACHE", "")
    if setting.lower() in ("off", "0", "none"):
        return None
    try:
        return _chosen_cache(setting)
    except RuntimeError:  # a user whom the system does not know, and no HOME
        return None


def _chosen_cache(setting: str) -> Path:
    if setting:
        return Path(setting).expanduser()
    if sys.platform == "win32":
        home = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        home = Path.home() / "Library" / "Caches"
    else:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "foldwise" / "jax"


def configure() -> None:
    """Ask JAX for one CPU device per core and a compilation cache, unless the user has chosen."""
    flags = os.environ.get("XLA_FLAGS", "")
    chosen = jax.config.values["jax_num_cpu_devices"] >= 0 or "host_platform_device_count" in flags
    if not chosen and not backend_started():
        jax.config.update("jax_num_cpu_devices", _requested_devices())
    folder = cache_dir()
    if folder is not None and jax.config.values["jax_compilation_cache_dir"] is None:
        _make_private(folder)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _CACHE_MIN_COMPILE_SECONDS)


def _make_private(folder: Path) -> None:
    """Let nobody else read the programs: they hold the data that models close over."""
    with suppress(OSError):  # JAX says what is wrong with it
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(folder.stat().st_mode) != 0o700:
            folder.chmod(0o700)


@lru_cache(maxsize=1)
def _drop_short_entries() -> None:
    """Remove programs of the cache that were cut short, which JAX would warn about for ever.

    It does not write them as a whole, so a process that was killed leaves part of one. Only those
    are looked at that are newer than the last look.
    """
    from jax._src.compilation_cache import decompress_executable  # what JAX reads them with

    folder = cache_dir()
    if folder is None or not folder.is_dir():
        return
    looked, now = folder / ".foldwise-looked", time.time()
    with suppress(OSError):
        since = looked.stat().st_mtime if looked.exists() else 0.0
        for entry in folder.glob("*-cache"):
            written = entry.stat().st_mtime
            if not since - _BEING_WRITTEN <= written <= now - _BEING_WRITTEN:
                continue
            try:
                decompress_executable(entry.read_bytes())
            except OSError:
                continue
            except Exception:
                entry.unlink()
        looked.touch()


def _requested_devices() -> int:
    setting = os.environ.get("FOLDWISE_DEVICES")
    if setting is None:
        return cores()
    if not setting.isdigit() or int(setting) < 1:
        raise ValueError(f"FOLDWISE_DEVICES must be a whole number of at least 1, got {setting!r}")
    most = max(_MOST_DEVICES, 4 * cores())
    if int(setting) > most:
        raise ValueError(
            f"FOLDWISE_DEVICES must be at most {most} on this machine, which has {cores()} cores, "
            f"got {setting}; each device has threads and memory of its own"
        )
    return int(setting)


@contextmanager
def alone() -> Iterator[None]:
    """Within this, programs have one lane: others of the machine's cores have work of their own."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def _devices() -> int:
    """Number of devices that a program runs on."""
    return 1 if _ALONE.get() else jax.local_device_count()


def lanes() -> int:
    """Number of pieces that run side by side: the devices, or the cores if there is one device."""
    if _ALONE.get():
        return 1
    devices = jax.local_device_count()
    if devices == 1 and jax.default_backend() == "cpu":
        return cores()
    return devices


def precision_context(precision: str) -> Any:
    """Context in which JAX computes in ``precision``; thread-local, so enter it in each thread.

    Programs are compiled in it, and keys are threefry's, whatever the caller has chosen.
    """
    if precision not in ("float64", "float32"):
        raise ValueError(f'precision must be "float64" or "float32", got {precision!r}')
    if _FORKED:
        raise RuntimeError(
            "JAX must not have started before a process is forked, but it had: its threads are not "
            "in this process, and it would wait for them for ever; start processes with "
            'multiprocessing.get_context("spawn"), ProcessPoolExecutor(mp_context=that), or before '
            "anything is fitted"
        )
    return _numbers(precision == "float64")


@contextmanager
def _numbers(double: bool) -> Iterator[None]:
    """What JAX must do here, whatever the caller has set for the whole process."""
    with (
        jax.enable_x64(double),
        jax.disable_jit(False),
        jax.default_prng_impl("threefry2x32"),
    ):
        yield


def usual_errors() -> Any:
    """NumPy's own way with overflow and division by zero, whatever the caller has set.

    Densities of zero are no mistake: what comes of them becomes the status of a fold.
    """
    return np.errstate(divide="warn", over="warn", under="ignore", invalid="warn")


def forget_constants() -> None:
    """Let JAX forget the copies it keeps of arrays that functions close over.

    A NumPy array that a function was traced with in single precision stays single, whatever the
    precision of the next trace, while that trace is cached (JAX 0.10): programs of mixed
    precision then fail to compile. Compiled functions of the caller are compiled anew.
    """
    jax.clear_caches()


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), thread_name_prefix="foldwise")


def in_threads(function: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
    """What ``function`` gives for each part, a thread for each core: for long work of NumPy."""
    return [function(part) for part in parts] if _ALONE.get() else [*_pool().map(function, parts)]


@lru_cache(maxsize=1)
def _background() -> ThreadPoolExecutor:
    """For compiling while something else goes on, what is waited for beside what comes next."""
    return ThreadPoolExecutor(cores(), thread_name_prefix="foldwise-background")


def import_for_tables() -> None:
    """Import what diagnostics and tables need: best done while programs compile.

    In this thread, since SciPy looks at modules that another one has half imported. xarray imports
    every kind of array that is installed, dask's too, when it makes its first variable.
    """
    import_module("arviz_stats.base")
    import_module("xarray").Variable((), 0.0)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Within this, Python does not look for cycles: tracing makes many objects that stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Waiting:
    """Seconds in which programs were traced or waited for; those of several threads count once."""

    def __init__(self) -> None:
        self.seconds, self._began, self._waiting, self._lock = 0.0, 0.0, 0, Lock()

    def __enter__(self) -> None:
        with self._lock:
            if not self._waiting:
                self._began = time.perf_counter()
            self._waiting += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self.seconds += time.perf_counter() - self._began


_WAITING = _Waiting()


def seconds_compiling() -> float:
    """Seconds that this process has waited for its programs so far."""
    return _WAITING.seconds


class Program:
    """A compiled function of ``(sharded, shared)`` that runs on all lanes at once.

    ``function`` sees the part of ``sharded`` (a pytree of arrays with a common leading axis) that
    belongs to its lane and all of ``shared``; what it returns is stacked along the leading axis.
    With several devices this is one program over a device mesh; with one CPU device the same
    program is called from one thread per lane. Lanes take turns where LAPACK is called: for large
    matrices, and for factorisations other than Cholesky's (``factorise.py``).

    It is traced when it is made, and compiled in the background: the first call waits for that.
    ``quick`` asks for a short time to compile rather than to run: for one lane, not for a mesh.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        sharded: Any,
        shared: Any,
        precision: str = "float64",
        quick: bool = False,
    ):
        self.precision, self._quick = precision, quick
        self.devices = 1 if quick else _devices()
        self.lanes = lanes()
        with _WAITING, _without_collections(), precision_context(precision):
            sharded, shared = _shapes((sharded, shared))
            one_lane = _shapes(sharded, self.lanes)
            if self.devices > 1:
                lowered = _lowered(_over_devices(function), sharded, shared)
            else:
                lowered = _lowered(function, one_lane, shared)
            # A batched LAPACK call (what factorise.py does not do) takes a thread of XLA's pool and
            # waits there for others of the pool: with as many lanes as threads, for ever.
            self._one_by_one = self.lanes > 1 and "lapack_" in lowered.as_text()
            if self._one_by_one and self.devices > 1:
                lowered = _lowered(function, one_lane, shared)
        _background().submit(_drop_short_entries)
        self._compiling = _background().submit(self._compile, lowered)

    def _compile(self, lowered: Any) -> Any:
        with precision_context(self.precision):
            return _compiled(lowered, self._quick)

    def ready(self) -> Any:
        """Wait until it is compiled, and return what runs on the devices."""
        with _WAITING:
            return self._compiling.result()

    def __call__(self, sharded: Any, shared: Any) -> Any:
        """Run all lanes and return their outputs as NumPy arrays."""
        if self.lanes == 1 or (self.devices > 1 and not self._one_by_one):
            return self._run(sharded, shared)
        pieces = [_lane(sharded, lane, self.lanes) for lane in range(self.lanes)]
        if self._one_by_one:
            done = [self._run(piece, shared) for piece in pieces]
        else:
            parts = [_pool().submit(self._run, piece, shared) for piece in pieces]
            done = [part.result() for part in parts]
        return jax.tree.map(lambda *piece: np.concatenate(piece), *done)

    def _run(self, sharded: Any, shared: Any) -> Any:
        with precision_context(self.precision):
            return jax.tree.map(np.asarray, self.ready()(sharded, shared))


class _OfMember:
    """The program of a family with the selection of one member."""

    def __init__(self, program: Program, selection: Any):
        self.program, self.selection = program, selection
        self.ready = program.ready

    def __call__(self, sharded: Any, shared: Any) -> Any:
        return self.program(sharded, (shared, self.selection))


class Programs(dict[Any, Program]):
    """Programs of a model, or of all members of a family; other processes compile their own."""

    def of(self, derived: Hashable) -> Programs:
        """Programs of a model that is made from this one, the same whenever it is made."""
        return self.__dict__.setdefault("made", {}).setdefault(derived, Programs())

    def __reduce__(self) -> Any:
        return Programs, ()


def compiled(
    owner: Any,
    what: Hashable,
    function: Callable[[Any, Any], Any],
    sharded: Any,
    shared: Any,
    precision: str = "float64",
    quick: bool = False,
) -> Program | _OfMember:
    """The program of ``function`` for arguments of these shapes, kept with the model it is of.

    ``what`` names the function: two of the same name must be the same function of ``owner``. The
    arguments may be arrays or ``jax.ShapeDtypeStruct``. The members of a family share their
    programs, which take the selection as data. ``quick``: see ``Program``.
    """
    programs = owner.__dict__.setdefault("_programs", Programs())
    selection = owner.__dict__.get("selection")

    def of_selection(sharded: Any, both: tuple[Any, Any]) -> Any:
        with owner.selected(both[1]):
            return function(sharded, both[0])

    if selection is not None:
        shared = (shared, selection)
    with precision_context(precision):  # JAX 0.12 knows no float64 shapes elsewhere
        leaves, tree = jax.tree.flatten(_shapes((sharded, shared)))
    shapes = tuple((leaf.shape, leaf.dtype.str) for leaf in leaves)
    key = (what, _devices(), lanes(), precision, shapes, tree)
    if key not in programs:
        chosen = function if selection is None else of_selection
        programs[key] = Program(chosen, sharded, shared, precision, quick)
    return programs[key] if selection is None else _OfMember(programs[key], selection)


def _lowered(function: Callable[[Any, Any], Any], *arguments: Any) -> Any:
    """``function`` for arguments of these shapes, ready to be compiled."""
    traced = jax.jit(function).trace(*arguments)
    if jax.default_backend() != "cpu":
        return traced.lower()
    return traced.lower(_private_parameters=lowering())


def _compiled(lowered: Any, quick: bool) -> Any:
    """``lowered``, compiled; ``quick``: as fast as can be, to run a little slower."""
    if quick and jax.default_backend() == "cpu":
        with suppress(jax.errors.JaxRuntimeError):  # of a jaxlib that knows no such option
            return lowered.compile(compiler_options=_QUICK)
    return lowered.compile()


def _shapes(tree: Any, pieces: int = 1) -> Any:
    """Shapes and types of arrays, of one of ``pieces`` of them along the first axis."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        array = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf)
        first = (array.shape[0] // pieces, *array.shape[1:]) if pieces > 1 else array.shape
        return jax.ShapeDtypeStruct(first, jax.dtypes.canonicalize_dtype(array.dtype))

    return jax.tree.map(shape, tree)


def _over_devices(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    from jax.sharding import AxisType, PartitionSpec

    mesh = jax.make_mesh((jax.local_device_count(),), ("lane",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec("lane"), PartitionSpec())
    return jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("lane"), check_vma=False
    )


def _lane(tree: Any, lane: int, count: int) -> Any:
    def part(array: Any) -> Any:
        size = array.shape[0] // count
        return array[lane * size : (lane + 1) * size]

    return jax.tree.map(part, tree)
