"""All subsets of the demo's covariates: 16 models x 50 folds side by side in one program.

Prints the comparison of all 16, wall time, how many programs were compiled (each must be compiled
once), and the full model's score beside that of the demo's own model, which must agree within four
Monte Carlo errors.

    python bench/family.py
"""

import itertools
import sys
import time
import warnings

import jax.numpy as jnp
import numpy as np

import foldwise as fw
from foldwise.studies import toy
from foldwise.support import runtime


def family(data):
    """Model A of the demo, each covariate in or out."""
    group, x, y = data.group, data.x, data.y

    def log_prior(q, selection):
        scales = sum(
            -0.5 * (jnp.exp(v) / 10.0) ** 2 + v for v in (q["log_sigma_alpha"], q["log_sigma_y"])
        )
        return scales - 0.5 * (q["mu"] ** 2 + jnp.sum(q["beta"] ** 2) + jnp.sum(q["z"] ** 2))

    def log_likelihood(q, selection):
        alpha = q["mu"] + jnp.exp(q["log_sigma_alpha"]) * q["z"]
        mean = (alpha + x @ (selection * q["beta"]))[group]
        z = (y - mean) / jnp.exp(q["log_sigma_y"])
        return -0.5 * z**2 - q["log_sigma_y"] - toy.HALF_LOG_TWO_PI

    init = {
        "mu": 0.0,
        "log_sigma_alpha": 1.0,
        "log_sigma_y": 1.0,
        "beta": np.zeros(toy.COVARIATES),
        "z": np.zeros(toy.GROUPS),
    }
    subsets = list(itertools.product([0, 1], repeat=toy.COVARIATES))
    names = ["+".join(f"x{k}" for k in range(4) if s[k]) or "none" for s in subsets]
    return fw.model_family(log_prior, log_likelihood, init, len(y), subsets, names, y=y)


def main():
    warnings.simplefilter("ignore")
    data = toy.simulate()
    folds, members = fw.leave_group_out(data.group), family(data)
    made, original = [], runtime.Program

    def counting(*arguments):
        made.append(arguments[0].__qualname__)
        return original(*arguments)

    runtime.Program = counting
    began = time.perf_counter()
    results = fw.cross_validate(members, folds, seed=1, progress=False, method="mcmc")
    seconds = time.perf_counter() - began
    runtime.Program = original
    print(fw.compare(results))
    count = len(results) * len(folds)
    phases = {}
    for result in results.values():
        for phase, spent in result.info["seconds"].items():
            phases[phase] = phases.get(phase, 0.0) + spent
    print(
        f"\n{len(results)} models x {len(folds)} folds = {count} posteriors in {seconds:.0f} s ("
        + ", ".join(f"{phase} {spent:.0f}" for phase, spent in phases.items())
        + f"); {len(made)} programs compiled, {len(set(made))} of them different"
    )
    alone = fw.cross_validate(toy.model(data, 4, "A"), folds, seed=3, progress=False, method="mcmc")
    whole = results["x0+x1+x2+x3"]
    z = (whole.elpd - alone.elpd) / np.hypot(whole.mcse, alone.mcse)
    print(f"full model {whole.elpd:.1f} ({whole.mcse:.2f}), on its own {alone.elpd:.1f} "
          f"({alone.mcse:.2f}): z {z:.1f}")  # fmt: skip
    sys.exit(len(made) > len(set(made)) or abs(z) > 4)


if __name__ == "__main__":
    main()
