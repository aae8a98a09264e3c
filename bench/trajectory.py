"""How long should the trajectories of HMC be?

Cross-validates the demo's model A, and 37 groups of bench/engine.py's radon-like problem, with
several mean lengths and jitters of the trajectories (see ``sampling/blocks.py``), and prints the
integrated autocorrelation time of the folds' log scores and the gradients spent for one effective
draw. Takes about five minutes on two cores.

    python bench/trajectory.py [--seeds 2]
"""

import argparse
import warnings

import numpy as np
from arviz_stats.base import array_stats
from engine import radon_like

import foldwise as fw
from foldwise.sampling import blocks as sampler
from foldwise.studies import toy

LENGTHS = ((2 / 3, 0.8), (2 / 3, 0.5), (5 / 9, 0.5), (1 / 2, 0.5))


def problems():
    """Name, model, folds and draws of each problem."""
    data = toy.simulate()
    yield "demo", toy.model(data, 4, "demo"), fw.leave_group_out(data.group), 400
    model, group, sizes = radon_like()
    chosen = np.union1d(np.argsort(-sizes)[:12], np.arange(0, len(sizes), 16))
    yield "radon-like", model, fw.leave_group_out(group)[chosen], 200


def autocorrelation_times(result):
    draws = result.draws.values
    effective = array_stats.ess(draws, chain_axis=1, draw_axis=2, method="mean")
    return draws[0].size / np.asarray(effective)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(
        f"{'problem':12}{'length':>8}{'jitter':>8}{'steps':>8}{'median':>8}{'largest':>9}{'cost':>7}"
    )
    for name, model, folds, draws in problems():
        fit = fw.fit(model, seed=1, progress=False)
        for length, jitter in LENGTHS:
            sampler.TRAJECTORY, sampler.JITTER = length * np.pi, jitter
            times = []
            for seed in range(arguments.seeds):
                result = fw.cross_validate(
                    model,
                    folds,
                    fit,
                    draws=draws,
                    estimator="mean",
                    seed=seed,
                    progress=False,
                    method="mcmc",
                    marginal=False,
                )
                times.append(autocorrelation_times(result))
            time = np.mean(times, axis=0)
            steps = sampler.leapfrog_counts(result.info["step_size"], 0, 1000).mean()
            print(
                f"{name:12}{length:5.2f} pi{jitter:8.1f}{steps:8.2f}{np.median(time):8.2f}"
                f"{time.max():9.2f}{steps * time.mean():7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
