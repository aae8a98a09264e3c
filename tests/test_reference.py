"""Draws and scores are those of a file that was written before the source was rearranged.

Short runs, since chains amplify rounding: what is compared to 1e-9 must not hang on the order in
which a processor adds. So the runs are made in a process of their own whose programs use what every
processor of the last ten years has (``PLAIN``). Folds start from normal draws made here, but for
one problem, which is fitted. To write the file anew, when draws are meant to change:
``python tests/test_reference.py``.
"""

import json
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from problems import by_chains
from versions import last_bits

import foldwise as fw
from foldwise import datasets
from foldwise.studies import air, rats, toy

FILE = Path(__file__).with_name("reference.json")
SETTINGS = {"warmup": 12, "draws": 20, "batch": 4, "seed": 11, "progress": False}
# Without AVX-512 and with one thread of BLAS: XLA, NumPy and its BLAS choose among instructions
# when they start, and each choice adds in another order, as does each number of threads, which
# packages that other tests import set for all processes to come.
PLAIN = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "OPENBLAS_CORETYPE": "Haswell",
}
COLUMNS = ("elpd", "mcse", "ess", "rhat", "slowest_ess", "acceptance", "overlap", "full_data")


def normal_fit(model, mean, sd):
    """A fit whose draws are independent normal ones."""
    positions = mean + sd * np.random.default_rng(5).normal(size=(4, 200, model.dimension))
    with jax.enable_x64(True):
        prior = float(model.flat_log_prior(positions[0, 0]))
        rows = float(model.flat_log_likelihood(positions[0, 0]).sum())
    return fw.Fit(positions, (prior, rows), np.full(4, 0.1), 0, 3, made_elsewhere=False)


def moments(model):
    """Means and sds of the posterior, with few digits, for the file."""
    fit = fw.fit(model, seed=1, progress=False)
    return np.round([fit.flat.mean(axis=0), fit.flat.std(axis=0)], 3).tolist()


def demo():
    data = toy.simulate()
    return toy.models(data)["A"], toy.folds(data)[:8]


def rats_study():
    table = datasets.load("rats")
    return rats.models(table)["A"], rats.folds(table)[:10]


def air_study():
    table = datasets.load("air_traffic")
    return air.models(table)["A"], air.folds(table)[:20]


def leave_one_out():
    problem = problems.regression()
    scores = ("log", "crps", "hyvarinen", "dss")
    return by_chains(problem.model(), problem.folds, scores=scores, **SETTINGS)


def online():
    problem = problems.autoregression()
    model = problem.model()
    fit = normal_fit(model, 0.0, 0.1)
    return by_chains(model, problem.folds, fit, memory="online", **SETTINGS)


def family():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(24, 2))
    y = x @ [1.0, 0.5] + rng.normal(size=24)

    def log_prior(q, selection):
        return -0.5 * jnp.sum(q["beta"] ** 2)

    def log_likelihood(q, selection):
        return -0.5 * (y - x @ (selection * q["beta"])) ** 2

    init = {"beta": np.zeros(2)}
    both = fw.model_family(log_prior, log_likelihood, init, 24, [[1.0, 1.0], [1.0, 0.0]])
    return next(iter(by_chains(both, fw.k_fold(24, 4, seed=1), **SETTINGS).values()))


STUDIES = {"demo": demo, "rats": rats_study, "air": air_study}
RUNS = {"leave-one-out": leave_one_out, "family": family, "online": online}


def study(name, known):
    model, folds = STUDIES[name]()
    return by_chains(model, folds, normal_fit(model, *known["moments"][name]), **SETTINGS)


def values(result):
    """What is compared: tables by fold of every score, and sums over the draws."""
    found = {
        f"{name} {column}": score.folds[column].values
        for name, score in result.scores.items()
        for column in ("score", *COLUMNS)
        if column in score.folds
    }
    if result.draws is not None:
        found["draws"] = np.asarray(result.draws).reshape(len(result.draws), -1).mean(axis=1)
    return {name: np.asarray(value, float).tolist() for name, value in found.items()}


def run(name, known):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such runs are too short for anything but this
        return values(study(name, known) if name in STUDIES else RUNS[name]())


def all_runs():
    """Moments of the studies' posteriors and values of all runs, of this process."""
    found = {"moments": {name: moments(make()[0]) for name, make in STUDIES.items()}}
    return found | {"values": {name: run(name, found) for name in [*STUDIES, *RUNS]}}


def in_plain_process(*arguments):
    """What this file prints in a process with plain instructions."""
    command = [sys.executable, "-W", "ignore", __file__, *arguments]
    given = {"env": {**os.environ, **PLAIN}, "check": True, "stdout": subprocess.PIPE}
    return json.loads(subprocess.run(command, **given).stdout)


@last_bits
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 instructions")
@pytest.mark.parametrize("name", [*STUDIES, *RUNS])
def test_draws_and_scores_are_those_of_before(name):
    if name in ("rats", "air") and not os.environ.get("FOLDWISE_DATA"):
        pytest.skip("the published data are not here: FOLDWISE_DATA must name their folder")
    before, now = json.loads(FILE.read_text())["values"][name], in_plain_process(name)
    assert set(now) == set(before)
    for column, expected in before.items():
        np.testing.assert_allclose(now[column], expected, rtol=1e-9, atol=1e-9, err_msg=column)


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            FILE.write_text(json.dumps(in_plain_process("all"), indent=0) + "\n")
        case ["all"]:
            print(json.dumps(all_runs()))
        case [one]:
            print(json.dumps(run(one, json.loads(FILE.read_text()))))
