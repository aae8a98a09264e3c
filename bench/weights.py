"""When can weighted full-data draws be relied on?

Random linear models with known noise, some with outliers and far covariates; 3-, 5- and 10-fold and
leave-one-out; exact draws of the full-data posterior, so that weights are all that can go wrong.
By how many equal weights the weights are worth, as a share of the draws, and by Pareto k: the
number of folds, and the root mean square and mean of (score - exact) / MCSE. The last line is for
the folds that ``foldwise`` would use. Their root mean square must be at most 1.1, and no more than
0.1 % may be beyond 4 errors.

    python bench/weights.py [--problems 60] [--seeds 12] [--draws 4000]
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import problems  # noqa: E402

import foldwise as fw  # noqa: E402
from foldwise.models.structure import without_cells  # noqa: E402
from foldwise.scores.importance import by_importance  # noqa: E402
from foldwise.scores.weighing import FullSample  # noqa: E402

SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1.01)
TAILS = (-np.inf, 0.3, 0.5, 0.7, np.inf)
MOST_RMS, MOST_BEYOND = 1.1, 0.001


def random_problem(rng):
    """A linear model with known noise, and its folds."""
    n, d = int(rng.integers(16, 80)), int(rng.integers(1, 9))
    k, heavy = int(rng.choice([3, 5, 10, n])), rng.random() < 0.5

    def noise(size):
        return rng.standard_t(3, size) if heavy else rng.normal(size=size)

    X = np.column_stack([np.ones(n), noise((n, d - 1))])
    y = X @ rng.normal(size=d) + noise(n)
    folds = fw.leave_one_out(n) if k == n else fw.k_fold(n, k, seed=1)
    return problems.LinearProblem(X, y, 1.0, np.full(d, 5.0), folds, "linear")


def records(count, seeds, draws):
    """k, share, z of ``log`` and of ``log_pointwise``, and whether used, of every fold."""
    rng, found = np.random.default_rng(1), []
    for number in range(count):
        problem = random_problem(rng)
        model = problem.model()
        exact = {"log": problem.joint(), "log_pointwise": problem.pointwise()}
        covariance = np.linalg.inv(problem.X.T @ problem.X + np.diag(problem.prior**-2.0))
        mean = covariance @ problem.X.T @ problem.y
        for seed in range(seeds):
            own = np.random.default_rng([seed, number])
            sample = FullSample(own.multivariate_normal(mean, covariance, draws), 4, 5)
            scored = by_importance(
                model, without_cells(model), problem.folds, sample, tuple(exact), False
            )
            z = [
                (scored.folds[name].value - exact[name]) / np.sqrt(scored.folds[name].variance)
                for name in exact
            ]
            found.append([scored.pareto_k, scored.weight_ess / draws, *z, scored.used])
        print(f"problem {number + 1} of {count}", end="\r", file=sys.stderr)
    return np.concatenate(found, axis=1)


def figures(z) -> str:
    if not len(z):
        return f"{'':22}"
    return f"{len(z):7d}{np.sqrt(np.mean(z**2)):7.2f}{np.mean(z):8.2f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--draws", type=int, default=4000)
    arguments = parser.parse_args()
    k, share, joint, by_row, used = records(arguments.problems, arguments.seeds, arguments.draws)
    print(f"{'share':12}" + "".join(f"{f'k to {high}: n, rms z, mean':>25}" for high in TAILS[1:]))
    for low, high in zip(SHARES, SHARES[1:], strict=False):
        cells = []
        for least, most in zip(TAILS, TAILS[1:], strict=False):
            here = (share >= low) & (share < high) & (k > least) & (k <= most)
            cells.append(f"   {figures(joint[here])}")
        print(f"{low:4g} to {high:<4g}" + "".join(cells))
    used = used.astype(bool)
    missed = False
    for name, z in (("log", joint[used]), ("log_pointwise", by_row[used])):
        rms, beyond = np.sqrt(np.mean(z**2)), np.mean(np.abs(z) > 4)
        missed |= rms > MOST_RMS or beyond > MOST_BEYOND
        print(f"used, {name}: {used.mean():.3f} of folds, rms z {rms:.2f}, beyond 4 {beyond:.5f}")
    print("MISSED" if missed else "ok")
    sys.exit(missed)


if __name__ == "__main__":
    main()
