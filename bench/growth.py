"""How do time and memory of cross-validation by the full-data draws grow?

Leave-group-out of 300 to 10,000 groups of five rows, an effect for each: seconds of the full-data
fit and of the cross-validation itself (structure, integrals, weights, result; compiling included),
and the exponent of its growth from the smallest size to the largest, at most 1.15. At 3,000 groups
everything takes at most 1.5 times as long as the fit, and as a fit of all parameters by NUTS, which
the target was first set beside. Leave-one-out of a regression with 100,000
rows and 4,000 draws: the peak memory of the process, at most 2 GB. Each size has a process of its
own, so that each compiles.

    python bench/growth.py [--sizes 300,1000,3000,10000] [--rows 100000]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

import numpy as np

MOST_EXPONENT, MOST_RATIO, MOST_GIGABYTES = 1.15, 1.5, 2.0
RATIO_AT = 3000


def groups(count):
    """Five rows of each of ``count`` groups, with an effect of each group, not centred."""
    import jax.numpy as jnp

    import foldwise as fw

    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(count), 5)
    y = 0.3 + 0.7 * rng.normal(size=count)[group] + rng.normal(size=len(group))

    def log_prior(p):
        shared = p["mu"] ** 2 + p["log_tau"] ** 2 + p["log_sigma"] ** 2
        return -0.5 * (shared + jnp.sum(p["z"] ** 2))

    def log_likelihood(p):
        mean = p["mu"] + jnp.exp(p["log_tau"]) * p["z"][group]
        residual = (y - mean) * jnp.exp(-p["log_sigma"])
        return -0.5 * residual**2 - p["log_sigma"] - 0.5 * np.log(2 * np.pi)

    start = {"mu": 0.0, "log_tau": 0.0, "log_sigma": 0.0, "z": np.zeros(count)}
    return fw.Model(log_prior, log_likelihood, start, len(y)), fw.leave_group_out(group)


def rows(count):
    """A regression with three slopes."""
    import jax.numpy as jnp

    import foldwise as fw

    rng = np.random.default_rng(1)
    x = rng.normal(size=(count, 3))
    y = x @ [1.0, 2.0, 3.0] + rng.normal(size=count)

    def log_prior(p):
        return -0.5 * (jnp.sum(p["slope"] ** 2) / 25 + p["log_sigma"] ** 2)

    def log_likelihood(p):
        residual = (y - x @ p["slope"]) * jnp.exp(-p["log_sigma"])
        return -0.5 * residual**2 - p["log_sigma"] - 0.5 * np.log(2 * np.pi)

    start = {"slope": np.zeros(3), "log_sigma": 0.0}
    return fw.Model(log_prior, log_likelihood, start, count), fw.leave_one_out(count)


def one(make, count):
    """Figures of one problem, of this process."""
    import foldwise as fw

    model, folds = make(count)
    began = time.perf_counter()
    result = fw.cross_validate(model, folds, method="auto", seed=1, progress=False)
    whole, fit = time.perf_counter() - began, result.info["seconds"]["fit"]
    return {
        "fit": fit,
        "own": whole - fit,
        "chains": int((result.folds["method"].values == "mcmc").sum()),
        "mcse": result.mcse,
        "draws": result.info["fit_draws"],
        "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def nuts(count):
    """Seconds of a fit of all parameters by NUTS, compiling included."""
    import foldwise as fw

    model, _ = groups(count)
    began = time.perf_counter()
    fw.fit(model, seed=1, marginal=False, progress=False)
    return {"fit": time.perf_counter() - began}


def child(what, count):
    """The same of a new process."""
    command = [sys.executable, __file__, "--child", what, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def show(what, count, found, limit=""):
    print(
        f"{what:10}{count:9d}{found['fit']:9.1f}{found['own']:9.1f}"
        f"{(found['fit'] + found['own']) / found['fit']:8.2f}{found['chains']:8d}"
        f"{found['mcse']:8.3f}{found['draws']:8d}{found['gigabytes']:7.2f}  {limit}",
        flush=True,
    )


def standing(value, most):
    return f"{value:.3g} (at most {most:g}): {'ok' if value <= most else 'MISSED'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="300,1000,3000,10000")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, count = arguments.child
        made = {"groups": groups, "rows": rows}
        print(json.dumps(nuts(int(count)) if what == "nuts" else one(made[what], int(count))))
        return
    print(
        f"{'problem':10}{'size':>9}{'fit s':>9}{'own s':>9}{'/ fit':>8}{'chains':>8}{'mcse':>8}"
        f"{'draws':>8}{'GB':>7}"
    )
    sizes = [int(size) for size in arguments.sizes.split(",")]
    own, verdicts = [], []
    for size in sizes:
        found = child("groups", size)
        own.append(found["own"])
        show("groups", size, found)
        if size == RATIO_AT:
            whole, by_nuts = found["fit"] + found["own"], child("nuts", size)["fit"]
            verdicts.append("all over its fit, " + standing(whole / found["fit"], MOST_RATIO))
            verdicts.append(
                f"all over a fit by NUTS ({by_nuts:.1f} s), "
                + standing(whole / by_nuts, MOST_RATIO)
            )
    if len(sizes) > 1:
        exponent = np.log(own[-1] / own[0]) / np.log(sizes[-1] / sizes[0])
        verdicts.append("exponent " + standing(exponent, MOST_EXPONENT))
    if arguments.rows:
        found = child("rows", arguments.rows)
        show("rows", arguments.rows, found)
        verdicts.append("gigabytes " + standing(found["gigabytes"], MOST_GIGABYTES))
    print("\n".join(verdicts))
    sys.exit(any("MISSED" in verdict for verdict in verdicts))


if __name__ == "__main__":
    main()
