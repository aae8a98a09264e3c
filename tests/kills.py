"""Cross-validation in processes of its own, which are ended at any moment and started again."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

# What is run: name of a problem, and arguments of cross_validate.
TO_TARGET = {"memory": "online", "target_mcse": 0.3, "max_draws": 400}
SCENARIOS = {
    "chains": ("hierarchical", {"method": "mcmc", "draws": 60, "marginal": False}),  # and rungs
    "online": ("hierarchical", {"method": "mcmc", "draws": 60, "marginal": False, **TO_TARGET}),
    "globals": ("hierarchical", {"method": "mcmc", "draws": 60}),  # chains on what is shared
    "weights": ("outliers", {}),
    "cells": ("far scale", {}),  # integrals, and a refit
    "rows": ("five_fold", {"method": "mcmc", "draws": 60, "scores": ("log_pointwise", "crps")}),
}
RUN = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import kills
from foldwise.sampling import program
from foldwise.support import keeping
keeping.LEAST_SECONDS, keeping.MOST_SHARE = 0.0, 1e9  # keep all there is, at every segment
program.BLOCK_BYTES = 8 * 60 * 4 * 6  # and have several blocks
print("begun", flush=True)
result = kills.run(sys.argv[2], sys.argv[3])
print("saving", flush=True)
result.save(sys.argv[4])
print("done", flush=True)
"""


def problem(name: str):
    """A problem of ``problems.py``; with outliers, some of its folds need more than weights."""
    import problems

    if name == "far scale":
        return problems.FarScale(6.0)
    if name != "outliers":
        return getattr(problems, name)()
    from dataclasses import replace

    found = problems.regression()
    y = found.y.copy()
    y[[3, 17]] += 12.0
    return replace(found, y=y)


def run(scenario: str, checkpoint: str | None):
    """The result of a scenario."""
    import foldwise as fw

    name, options = SCENARIOS[scenario]
    found = problem(name)
    options = {"seed": 7, "progress": False, "checkpoint": checkpoint or None, **options}
    return fw.cross_validate(found.model(), found.folds, **options)


def start(scenario: str, checkpoint: str | Path, saved: Path) -> subprocess.Popen:
    """A process at work on a scenario."""
    command = [sys.executable, "-c", RUN, str(Path(__file__).parent), scenario, str(checkpoint)]
    return subprocess.Popen([*command, str(saved)], stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> float:
    """Seconds that a process took from the beginning of its work to the end."""
    assert process.stdout.readline() == "begun\n"
    began = time.monotonic()
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and out.endswith("done\n")
    return time.monotonic() - began


def kill(process: subprocess.Popen, rng: random.Random, seconds: float) -> bool:
    """End a process with SIGKILL at a random moment; False where it had finished before."""
    assert process.stdout.readline() == "begun\n"
    time.sleep(rng.uniform(0.0, seconds))
    process.send_signal(signal.SIGKILL)
    out, _ = process.communicate()
    return "done" not in out


def pieces(folder: Path) -> dict[str, float]:
    """When each piece of a folder was written."""
    return {p.name: os.stat(p).st_mtime for p in folder.glob("*.piece")}
