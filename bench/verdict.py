"""Is the error behind a verdict right? Short runs of two regressions whose exact answers are known.

Two models that differ in a covariate without effect, so that the Monte Carlo error of short runs is
about as large as the standard error. Exact values of every fold are known. Over many seeds the
estimate must scatter by its Monte Carlo error (z near 1), and the error s behind the verdict must
be the root of the exact squared SE plus the Monte Carlo variance. The SE of a noisy run has the
folds' own noise in it; adding the Monte Carlo variance to that counts it twice (column "naive").

    python bench/verdict.py [--seeds 40] [--draws 50]
"""

import argparse
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import problems  # noqa: E402

import foldwise as fw  # noqa: E402

# ways to run: what every fold's score is made from
WAYS = {
    "chains, plain mean": {"method": "mcmc", "estimator": "mean"},
    "chains, bridge": {"method": "mcmc"},
    "weights": {"method": "importance"},
}


def run(way, draws, seeds, fit_draws):
    whole = problems.regression()
    keep = [0, 1, 2]
    short = replace(whole, X=whole.X[:, keep], prior=whole.prior[keep], name="without x3")
    models = [problem.model() for problem in (whole, short)]
    exact = whole.joint() - short.joint()
    truth, se = exact.sum(), np.sqrt(len(exact)) * exact.std(ddof=1)
    found = []
    for seed in range(seeds):
        fits = [
            fw.fit(model, draws=fit_draws, warmup=300, seed=2 * seed + k, progress=False)
            for k, model in enumerate(models)
        ]
        results = [
            fw.cross_validate(
                model,
                whole.folds,
                fit=fit,
                draws=draws,
                seed=1000 + 2 * seed + k,
                progress=False,
                **way,
            )
            for k, (model, fit) in enumerate(zip(models, fits, strict=True))
        ]
        pair = fw.compare(results)
        found.append((pair.diff - truth, pair.se, pair.mcse, pair.error))
    off, noisy, mcse, error = np.array(found).T
    return {
        "MCSE": np.sqrt(np.mean(mcse**2)),
        "z": np.sqrt(np.mean((off / mcse) ** 2)),
        "SE exact": se,
        "SE of runs": np.sqrt(np.mean(noisy**2)),
        "s": np.sqrt(np.mean(error**2)),
        "s wanted": np.sqrt(se**2 + np.mean(mcse**2)),
        "naive": np.sqrt(np.mean(noisy**2 + mcse**2)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--fit-draws", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    table = {
        name: run(way, options.draws, options.seeds, options.fit_draws)
        for name, way in WAYS.items()
    }
    columns = list(next(iter(table.values())))
    print(f"{'':<20}" + "".join(f"{column:>12}" for column in columns))
    for name, row in table.items():
        print(f"{name:<20}" + "".join(f"{row[column]:>12.3f}" for column in columns))


if __name__ == "__main__":
    main()
