"""The peak of a process beside what was planned for its run: ``python tests/peak.py CASE``."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np


def mean(rows):
    """Rows with a common mean."""
    import foldwise as fw

    y = np.random.default_rng(0).normal(size=rows)
    return fw.Model(lambda mu: -0.5 * mu**2, lambda mu: -0.5 * (y - mu) ** 2, 0.0, rows)


def groups(count, each=4):
    """Effects of groups, and the groups of the rows."""
    import jax.numpy as jnp

    import foldwise as fw

    group, rng = np.repeat(np.arange(count), each), np.random.default_rng(0)
    y = rng.normal(size=count)[group] + rng.normal(size=count * each)

    def log_prior(q):
        spread = 0.5 * (q["effect"] / jnp.exp(q["log_tau"])) ** 2 + q["log_tau"]
        return -0.5 * q["mu"] ** 2 - 0.5 * q["log_tau"] ** 2 - spread.sum()

    def log_likelihood(q):
        return -0.5 * (y - q["mu"] - q["effect"][group]) ** 2

    start = {"mu": 0.0, "log_tau": 0.0, "effect": np.zeros(count)}
    return fw.Model(log_prior, log_likelihood, start, len(y)), fw.leave_group_out(group)


def many_folds(rows, count):
    """Many folds of two test rows, over few rows."""
    import foldwise as fw

    rng = np.random.default_rng(1)
    test = [np.sort(rng.choice(rows, 2, replace=False)) for _ in range(count)]
    return fw.from_splits([(np.setdiff1d(np.arange(rows), some), some) for some in test], rows)


def case(name):
    """Model, folds and arguments."""
    import foldwise as fw

    if name == "leave-one-out":
        return mean(3000), fw.leave_one_out(3000), {}
    if name == "chains":
        return mean(20), many_folds(20, 1000), {"method": "mcmc", "draws": 2000, "scores": "log"}
    if name == "online":
        options = {"method": "mcmc", "draws": 60, "memory": "online", "scores": "log"}
        return mean(20), many_folds(20, 4000), options
    if name == "rows":
        return mean(2000), fw.k_fold(2000, 40, seed=1), {}
    if name == "globals":  # chains on what groups share
        return *groups(150), {"method": "mcmc", "draws": 200}
    return *groups(1500), {"method": "importance"}


CASES = ("leave-one-out", "chains", "online", "rows", "cells", "globals")


def measured(name):
    """The peak of a process of its own over its plan, and both in words."""
    command = [sys.executable, str(Path(__file__).resolve()), name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[2]), done.stdout.strip()


def main(name):
    """Print the plan in MB, the peak, and the ratio of the two."""
    warnings.simplefilter("ignore")
    import foldwise as fw
    from foldwise.sampling import planning

    plans, check = [], planning.check_plan

    def noted(plan, limit, settings):
        plans.append(plan)
        check(plan, limit, settings)

    planning.check_plan = noted
    model, folds, options = case(name)
    fw.cross_validate(model, folds, seed=1, progress=False, **options)
    # not ru_maxrss, which begins with that of the process that started this one
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024
    total = sum(plans[0].values())
    parts = ", ".join(f"{part} {size / 1e6:.0f}" for part, size in plans[0].items())
    print(f"{total / 1e6:.0f} {peak / 1e6:.0f} {peak / total:.3f} MB: {parts}")


if __name__ == "__main__":
    main(sys.argv[1])
