"""Speed and memory of the engine, as ratios within one run.

On a simulated radon-like problem (12,573 rows, 386 groups of very unequal size, random intercept
and one slope): time per chain-gradient in the chosen chunk against all chains together; one core
against two; integrated autocorrelation time of the largest groups' scores. On the demo problem:
online peak memory at 10,000 draws against 1,000; compile seconds, cold and from the cache; the
whole demo; the cost of importing foldwise.

    python bench/engine.py            all parts, each in processes of its own
    python bench/engine.py --part X   one of gradient, cores, mixing, memory, compile, demo, import
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np

GROUPS, ROWS = 386, 12_573


# ---------------------------------------------------------------- the problems


def radon_like():
    """Model, groups and group sizes of the simulated radon-like problem."""
    import jax.numpy as jnp

    import foldwise as fw

    rng = np.random.default_rng(0)
    sizes = np.maximum(1, rng.lognormal(2.5, 1.3, GROUPS))
    sizes = np.maximum(1, np.round(sizes * ROWS / sizes.sum())).astype(int)
    sizes[np.argmax(sizes)] += ROWS - sizes.sum()
    group = np.repeat(np.arange(GROUPS), sizes)
    floor = rng.binomial(1, 0.3, ROWS).astype(float)
    alpha = 1.3 + 0.5 * rng.normal(size=GROUPS)
    y = alpha[group] - 0.6 * floor + 0.8 * rng.normal(size=ROWS)

    def log_prior(q):
        normal = -0.5 * jnp.sum(q["z"] ** 2) - 0.5 * q["beta"] ** 2 - q["mu"] ** 2 / 32
        gamma = 6 * q["log_tau"] - 9 * jnp.exp(q["log_tau"])
        return normal + gamma + 10 * q["log_sigma"] - 10 * jnp.exp(q["log_sigma"])

    def log_likelihood(q):
        mean = (q["mu"] + jnp.exp(q["log_tau"]) * q["z"])[group] + q["beta"] * floor
        z = (y - mean) * jnp.exp(-q["log_sigma"])
        return -0.5 * z**2 - q["log_sigma"] - 0.5 * np.log(2 * np.pi)

    init = {"mu": 0.0, "beta": 0.0, "log_tau": 0.0, "log_sigma": 0.0, "z": np.zeros(GROUPS)}
    return fw.Model(log_prior, log_likelihood, init, ROWS, name="radon-like"), group, sizes


def radon_sampler(folds, model, chains=4):
    """A sampler with the shared metric and no adaptation, for timing alone."""
    from foldwise.sampling.blocks import Sampler, Tuning
    from foldwise.sampling.metric import MetricShape, shared_metric
    from foldwise.sampling.program import FoldProgram, block_size
    from foldwise.scores.needs import Emit

    d, k = model.dimension, len(folds)
    metric = shared_metric(np.eye(d) * 0.01, np.zeros((k, d), bool), np.ones(d))
    start = np.random.default_rng(1).normal(0, 0.05, (k, chains, d))
    size, shape = block_size(model.n_obs, k, chains), MetricShape.of(metric)
    slots = int(folds.n_test.max())
    program = FoldProgram(model, Emit(), size, chains, 1, slots, 1, shape)
    tuning = Tuning(metric, None, np.zeros(k, bool), np.zeros((k, 1), int), None)
    sampler = Sampler(program, folds, np.full(k, -1), tuning, start, 10, 1)
    sampler.step_size = 0.3
    return sampler


# ---------------------------------------------------------------- parts


def gradient():
    """Microseconds per chain-gradient: in the chosen chunk, and with all chains in one block."""
    import jax

    import foldwise as fw
    from foldwise.sampling import program as program_module
    from foldwise.sampling.program import fold_density
    from foldwise.support.runtime import Program

    model, group, _ = radon_like()
    folds = fw.leave_group_out(group)
    repeats, found = 10, {}

    def descend(block, _):
        state, data = block
        density = fold_density(model, data, by_row=False)
        step = lambda _, q: q + 1e-6 * density(q)[1]  # noqa: E731
        return jax.lax.fori_loop(0, repeats, step, state.position)

    for name, limit in (("chunk", program_module.CHUNK_BYTES), ("together", 2**40)):
        program_module.CHUNK_BYTES = program_module.BLOCK_BYTES = limit
        sampler = radon_sampler(folds, model)
        count = sampler.program.size.folds
        members = np.arange(count) % len(folds)
        block = (sampler._state(members), sampler._data(members))
        program = Program(descend, block, ())
        times = []
        for _ in range(10 if name == "chunk" else 3):
            began = time.perf_counter()
            program(block, ())
            times.append(time.perf_counter() - began)
        found[name] = min(times) / repeats / (4 * count) * 1e6
        found[name + "_chains"] = count * 4
    return found


def one_run():
    """Seconds for a fixed amount of sampling on the cores and devices at hand."""
    import jax

    import foldwise as fw
    from foldwise.sampling.blocks import run_together
    from foldwise.support.runtime import lanes

    model, group, _ = radon_like()
    sampler = radon_sampler(fw.leave_group_out(group)[:40], model)
    sampler.program.compile()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in run_together([sampler], 20):
            pass
        times.append(time.perf_counter() - began)
    return {"seconds": min(times[1:]), "devices": jax.local_device_count(), "lanes": lanes()}


def cores():
    """One core against two, by CPU affinity: a device per core, and threads on one device."""
    everywhere = sorted(os.sched_getaffinity(0))[:2]
    runs = {}
    for name, where, devices in (
        ("one", everywhere[:1], 1),
        ("devices", everywhere, 2),
        ("threads", everywhere, 1),
    ):
        runs[name] = child("one_run", affinity=where, FOLDWISE_DEVICES=str(devices))
    return {
        "one_core_s": runs["one"]["seconds"],
        "two_devices": runs["one"]["seconds"] / runs["devices"]["seconds"],
        "two_threads": runs["one"]["seconds"] / runs["threads"]["seconds"],
    }


def mixing():
    """Autocorrelation times of the 12 largest groups' scores, and the time of a default run."""
    from arviz_stats.base import array_stats

    import foldwise as fw

    model, group, sizes = radon_like()
    began = time.perf_counter()
    fit = fw.fit(model, seed=1, progress=False)
    fit_seconds = time.perf_counter() - began
    largest = np.sort(np.argsort(-sizes)[:12])
    folds = fw.leave_group_out(group)
    result = fw.cross_validate(
        model, folds, fit=fit, seed=2, progress=False, method="mcmc", marginal=False
    )
    draws = result.draws.values[largest]
    times = [d.size / array_stats.ess(d, method="mean") for d in draws]
    return {
        "median": float(np.median(times)),
        "largest": float(np.max(times)),
        "fit_s": fit_seconds,
        "folds_s": result.info["seconds"]["folds"],
        "rungs_s": result.info["seconds"]["rungs"],
        "mcse": result.mcse,
        "flagged": int((result.folds["status"] != "fine").sum()),
    }


def peak(draws):
    """Peak resident memory in MB of an online run of the demo's model A."""
    import resource
    import warnings

    import foldwise as fw
    from foldwise.studies import toy

    warnings.simplefilter("ignore")
    data = toy.simulate()
    model = toy.model(data, 4, "A")
    folds = fw.leave_group_out(data.group)
    fw.cross_validate(
        model,
        folds,
        draws=draws,
        memory="online",
        seed=1,
        progress=False,
        method="mcmc",
        marginal=False,
    )
    return {"mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def memory():
    low, high = (child("peak", argument=n)["mb"] for n in (1000, 10_000))
    return {"mb_1000": low, "mb_10000": high, "ratio": high / low}


def demo_compile():
    """Seconds to compile the fold program of the demo."""
    import foldwise as fw
    from foldwise.studies import toy

    data = toy.simulate()
    model = toy.model(data, 4, "A")
    fit = fw.fit(model, draws=100, warmup=100, seed=1, progress=False)
    result = fw.cross_validate(
        model,
        fw.leave_group_out(data.group),
        fit=fit,
        seed=1,
        progress=False,
        method="mcmc",
        marginal=False,
    )
    return {"seconds": result.info["seconds"]["compile"]}


def compile_time():
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (child("demo_compile", FOLDWISE_CACHE=folder)["seconds"] for _ in range(2))
    return {"cold_s": cold, "second_process_s": warm}


def demo():
    """The whole demo in a new process, without and with the compilation cache."""
    with tempfile.TemporaryDirectory() as folder:
        times = []
        for _ in range(2):
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "foldwise.studies.toy"],
                check=True,
                capture_output=True,
                env={**os.environ, "FOLDWISE_CACHE": folder},
            )
            times.append(time.perf_counter() - began)
    return {"cold_s": times[0], "again_s": times[1]}


def import_time():
    """Best of several fresh processes each, in turn.

    pip compiles what it installs, JAX for one, to bytecode. So that foldwise's files count as
    installed too, bytecode may be written, and is by a first import that is not counted.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

    def seconds(module):
        code = (
            f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
        )
        out = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        return float(out.stdout)

    seconds("foldwise")
    both = [(seconds("jax"), seconds("foldwise")) for _ in range(7)]
    jax_s, foldwise_s = (min(column) for column in zip(*both, strict=True))
    return {"jax_s": jax_s, "foldwise_s": foldwise_s, "ratio": foldwise_s / jax_s}


# ---------------------------------------------------------------- running parts


def child(part, argument=None, affinity=None, **environment):
    """Run a part in a process of its own and return what it found."""
    command = [sys.executable, "-W", "ignore", __file__, "--part", part]
    if argument is not None:
        command += ["--argument", str(argument)]

    def pin():
        if affinity:
            os.sched_setaffinity(0, affinity)

    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        preexec_fn=pin,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


PARTS = {
    "gradient": gradient,
    "one_run": one_run,
    "cores": cores,
    "mixing": mixing,
    "peak": peak,
    "memory": memory,
    "demo_compile": demo_compile,
    "compile": compile_time,
    "demo": demo,
    "import": import_time,
}


def report(label, value, unit, limit, more_is_better=False):
    ok = value >= limit if more_is_better else value <= limit
    sign = ">=" if more_is_better else "<="
    print(
        f"{label:66}{value:8.2f} {unit:4} {sign} {limit:<5g} {'ok' if ok else 'MISSED'}", flush=True
    )
    return ok


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--argument", type=int)
    arguments = parser.parse_args()
    if arguments.part:
        function = PARTS[arguments.part]
        found = function() if arguments.argument is None else function(arguments.argument)
        print(json.dumps(found))
        return
    ok = True
    g = child("gradient")
    print(
        f"gradient: {g['chunk']:.0f} us a chain in chunks of {g['chunk_chains']} chains, "
        f"{g['together']:.0f} us with all {g['together_chains']} together"
    )
    ok &= report("chunk against all chains together", g["chunk"] / g["together"], "x", 0.4)
    c = child("cores")
    ok &= report("two cores against one, a device per core", c["two_devices"], "x", 1.7, True)
    print(f"{'two cores against one, threads on one device':66}{c['two_threads']:8.2f} x")
    m = child("mixing")
    print(
        f"radon-like at default settings: fit {m['fit_s']:.0f} s, 386 folds {m['folds_s']:.0f} s, "
        f"rungs {m['rungs_s']:.0f} s, MCSE {m['mcse']:.2f}, {m['flagged']} folds flagged"
    )
    ok &= report("autocorrelation time of the 12 largest groups, median", m["median"], "", 4)
    p = child("memory")
    print(
        f"online peak memory: {p['mb_1000']:.0f} MB at 1,000 draws, {p['mb_10000']:.0f} at 10,000"
    )
    ok &= report("online peak memory, 10,000 draws against 1,000", p["ratio"], "x", 1.05)
    t = child("compile")
    ok &= report("compiling the demo's fold program, cold", t["cold_s"], "s", 4)
    ok &= report("the same in a second process", t["second_process_s"], "s", 1)
    d = child("demo")
    ok &= report("the whole demo, nothing compiled before", d["cold_s"], "s", 45)
    print(f"{'the whole demo, second time':66}{d['again_s']:8.2f} s")
    i = child("import")
    print(f"import jax {i['jax_s']:.2f} s, import foldwise {i['foldwise_s']:.2f} s")
    ok &= report("import foldwise against import jax", i["ratio"], "x", 1.3)
    sys.exit(not ok)


if __name__ == "__main__":
    main()
