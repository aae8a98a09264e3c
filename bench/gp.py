"""How long does a Gaussian process with a latent function take, and is it right?

Cross-validates, with default arguments, a process at 133 irregular times whose latent function is a
parameter, f = L z with L the Cholesky factor of its covariance and 136 parameters in all; 19 blocks
of 7 are left out. Prints seconds by stage, the gradients they took, and the error of the total and
of the folds against the exact answer: noise is normal, so the function integrates out, and a grid
over the three hyperparameters does the rest. Then the same for 60 places whose latent function is
integrated out in the model (``joint_log_likelihood``). Last, what a gradient takes, alone and 100
at once, so that times on a busy machine can be judged. Takes about five minutes on two cores.

    python bench/gp.py [--seed 1] [--problems latent]
"""

import argparse
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from processes import Process  # noqa: E402

import foldwise as fw  # noqa: E402
from foldwise.models.evaluate import gradients  # noqa: E402

GRADIENTS = {"fit_gradients": "of the fit", "gradients": "of the folds"}
# Total seconds on two idle cores, z of the total, rms of the folds' z.
MOST_SECONDS, MOST_Z, MOST_RMS = 300.0, 4.0, 1.25


def line(n=133, block=7):
    """Readings after an impact: flat, a dip, a rebound, flat; at irregular times in 0 to 60."""
    rng = np.random.default_rng(133)
    t = np.sort(np.round(60 * rng.beta(1.5, 2.0, n), 1))
    f = -2.2 * np.exp(-(((t - 21) / 5) ** 2)) + 1.1 * np.exp(-(((t - 33) / 6) ** 2))
    y = f + 0.35 * rng.normal(size=n)
    folds = fw.from_labels(np.arange(n) // block)
    return Process(np.abs(t[:, None] - t), y, folds, [np.log(6.0), 0.0, -1.0])


def plane(n=60, k=12):
    """A field at places of the plane, whole neighbourhoods left out."""
    rng = np.random.default_rng(60)
    place = rng.uniform(0, 10, (n, 2))
    distance = np.linalg.norm(place[:, None] - place, axis=-1)
    covariance = np.exp(-0.5 * (distance / 2.0) ** 2) + 0.05 * np.eye(n)
    y = np.linalg.cholesky(covariance) @ rng.normal(size=n)
    return Process(distance, y, fw.spatial_block(place, k, seed=1), [np.log(2.0), 0.0, -1.0])


def gradient_milliseconds(model, points, calls=5):
    """Processor time of one gradient where so many are asked for at once."""
    rng = np.random.default_rng(0)
    at = 0.1 * rng.normal(size=(points, model.dimension))
    gradients(model, at)
    began, used = time.perf_counter(), time.process_time()
    for _ in range(calls):
        gradients(model, at)
    count = calls * points
    return [1e3 * s / count for s in (time.perf_counter() - began, time.process_time() - used)]


def run(name, process, model, seed):
    """One problem; returns whether it is fast and right."""
    exact = process.exact()
    began, used = time.perf_counter(), time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fw.cross_validate(model, process.folds, seed=seed, scores="log")
    wall, used = time.perf_counter() - began, time.process_time() - used
    for warning in caught:
        print(f"  warned: {warning.message}")
    found, mcse = result.folds["elpd"].values, result.folds["mcse"].values
    z = (found - exact) / mcse
    total = (result.elpd - exact.sum()) / result.mcse
    stages = ", ".join(f"{part} {seconds:.1f}" for part, seconds in result.info["seconds"].items())
    print(f"{name}: {wall:.0f} s, {used:.0f} s of processors; {stages}")
    spent = [f"{result.info[which]:,} {of}" for which, of in GRADIENTS.items()]
    print(f"  gradients: {', '.join(spent)}; exact {exact.sum():.3f}")
    print(
        f"  error {result.elpd - exact.sum():.3f}, MCSE {result.mcse:.3f}, z {total:.2f}, "
        f"rms z of {len(z)} folds {np.sqrt(np.mean(z**2)):.2f}, largest {np.abs(z).max():.2f}"
    )
    print(f"  folds by status: {dict(Counter(result.folds['status'].values))}")
    wall_one, one = gradient_milliseconds(model, 100)
    print(f"  a gradient: {one:.2f} ms of a processor, {wall_one:.2f} ms with all lanes")
    print(result)
    return wall < MOST_SECONDS and abs(total) < MOST_Z and np.sqrt(np.mean(z**2)) < MOST_RMS


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--problems", default="", help="only problems whose name contains this")
    arguments = parser.parse_args()
    on_line, on_plane = line(), plane()
    problems = {
        "latent, 133 times": (on_line, on_line.latent()),
        "integrated, 60 places": (on_plane, on_plane.integrated()),
    }
    good = [
        run(name, *problem, arguments.seed)
        for name, problem in problems.items()
        if arguments.problems in name
    ]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
