"""Do models of other packages give the same cross-validation results?

Nine models written three times (``tests/trios.py``: plain JAX, NumPyro, PyMC) are cross-validated
by leave-group-out, each with its own fit and seed; totals must agree within four Monte Carlo
errors. Then leave-one-out of the kidiq data in PyMC and in Bambi against published values
(Regression and Other Stories: -1876.1, -1914.8 with mom_hs alone, -1872.7 with the interaction),
which must agree within one nat. Needs FOLDWISE_DATA for the second part.

    FOLDWISE_DATA=... python bench/adapters.py
"""

import os
import sys
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import bambi  # noqa: E402
import pandas as pd  # noqa: E402
import pymc as pm  # noqa: E402
import trios  # noqa: E402

import foldwise as fw  # noqa: E402

KIDIQ = {
    "mom_hs": -1914.8,
    "mom_hs + mom_iq": -1876.1,
    "mom_hs + mom_iq + mom_hs:mom_iq": -1872.7,
}


def same_models():
    """Largest difference of totals, in Monte Carlo errors, over all models."""
    worst = 0.0
    folds = fw.leave_group_out(trios.GROUP)
    for name, make in trios.TRIOS.items():
        three, found = make(), {}
        for k, package in enumerate(("jax", "numpyro", "pymc")):
            model = getattr(three, package)
            fit = fw.fit(model, seed=10 + k, progress=False)
            found[package] = fw.cross_validate(model, folds, fit, seed=k, progress=False)
        one = found["jax"]
        z = {
            package: (result.elpd - one.elpd) / np.hypot(result.mcse, one.mcse)
            for package, result in found.items()
            if package != "jax"
        }
        totals = ", ".join(f"{p} {r.elpd:.2f} ({r.mcse:.2f})" for p, r in found.items())
        print(f"{name:28} {totals}; z {z['numpyro']:.1f}, {z['pymc']:.1f}", flush=True)
        worst = max(worst, *map(abs, z.values()))
    return worst


def kidiq_in_pymc(data, formula):
    """rstanarm's default priors, the intercept at the centred predictors."""
    y = data["kid_score"].to_numpy(float)
    columns = [data[name.split(":")].prod(axis=1).to_numpy(float) for name in formula.split(" + ")]
    x = np.column_stack(columns)
    with pm.Model() as model:
        intercept = pm.Normal("intercept", y.mean(), 2.5 * y.std(ddof=1))
        b = pm.Normal("b", 0.0, 2.5 * y.std(ddof=1) / x.std(axis=0, ddof=1), shape=x.shape[1])
        sigma = pm.Exponential("sigma", 1.0 / y.std(ddof=1))
        pm.Normal("y", intercept + pm.math.dot(x - x.mean(axis=0), b), sigma, observed=y)
    return fw.from_pymc(model)


def kidiq_in_bambi(data, formula):
    """Bambi's own default priors, which are nearly the same."""
    return fw.from_bambi(bambi.Model(f"kid_score ~ {formula}", data))


def kidiq(folder):
    data = pd.read_csv(Path(folder) / "kidiq.csv")
    worst = 0.0
    for formula, published in KIDIQ.items():
        for package, make in (("PyMC", kidiq_in_pymc), ("Bambi", kidiq_in_bambi)):
            model = make(data, formula)
            result = fw.cross_validate(model, fw.leave_one_out(len(data)), seed=1, progress=False)
            gap = result.elpd - published
            print(f"kidiq ~ {formula:32} {package:6} {result.elpd:.1f} ({result.mcse:.2f}), "
                  f"published {published}: {gap:+.2f}", flush=True)  # fmt: skip
            worst = max(worst, abs(gap))
    return worst


def main():
    warnings.simplefilter("ignore")
    failed = same_models() > 4.0
    folder = os.environ.get("FOLDWISE_DATA")
    if folder:
        failed |= kidiq(folder) > 1.0
    else:
        print("FOLDWISE_DATA is not set: kidiq left out")
    sys.exit(failed)


if __name__ == "__main__":
    main()
