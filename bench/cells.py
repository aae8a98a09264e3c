"""Are scores from the full-data draws, with cells integrated out, right, and their errors too?

Repeats over many seeds, each with a full-data fit of its own: means of groups of 2 to 300 rows with
known variances (leave-group-out, leave-one-out, 10-fold; exact in closed form), and counts with an
effect for every row (leave-one-out; exact on a grid of the two globals, with a fine quadrature for
each row), one group of eight far from the others, which is refitted, or, with more parameters that
all rows share, has chains (exact on a grid of the groups' scale), four effects a group, which are
no cells, so that folds by weights and by chains are mixed (exact in closed form), and the growth of
rats, both models (exact by integration over what the rats share; needs FOLDWISE_DATA). Prints z of
the last total, the root mean square of z = (estimate - truth) / MCSE over totals and folds, the
mean error of totals in MCSE, the largest Pareto k, the largest z of a fold, how many folds are
refitted, have chains, and are flagged, and seconds, the fit's too. Root mean squares must lie in
0.8 to 1.25, mean errors within 0.25 MCSE, and no z of a fold that is called fine may be beyond 5.

What is flagged does not claim to be right, so the figures of folds are of those called fine. With
method "importance" the total is that of the folds called fine in at least nine seeds of ten, in
every seed, flagged there or not: the draws that make a fold on the border look fine are those that
make its score too high, and a total of what is called fine would count these alone. With chains a
run with flagged folds counts for its folds alone.

    python bench/cells.py [--seeds 50] [--problems counts,groups] [--method importance]
"""

import argparse
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from scipy.special import gammaln, logsumexp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import integrated  # noqa: E402
import problems  # noqa: E402

import foldwise as fw  # noqa: E402
from foldwise import datasets  # noqa: E402
from foldwise.studies import rats  # noqa: E402

LOW, HIGH, MOST_BIAS, MOST_Z = 0.8, 1.25, 0.25, 5.0
# Share of the seeds in which a fold must be called fine for it to count in totals.
OFTEN = 0.9


class Counts:
    """Counts with log rates mu + tau z_i, z_i ~ N(0, 1), mu ~ N(0, 2), log tau ~ N(-0.5, 0.5)."""

    def __init__(self, n: int = 60):
        rng = np.random.default_rng(5)
        self.y = rng.poisson(np.exp(1.0 + 0.6 * rng.normal(size=n)))
        self.folds = fw.leave_one_out(n)

    def model(self) -> fw.Model:
        y, constant = self.y, gammaln(self.y + 1.0)

        def log_likelihood(p):
            eta = p["mu"] + jnp.exp(p["log_tau"]) * p["z"]
            return y * eta - jnp.exp(eta) - constant

        def log_prior(p):
            shared = (p["mu"] / 2.0) ** 2 + ((p["log_tau"] + 0.5) / 0.5) ** 2
            return -0.5 * (shared + jnp.sum(p["z"] ** 2))

        start = {"log_tau": -0.5, "mu": 1.0, "z": np.zeros(len(y))}
        return fw.Model(log_prior, log_likelihood, start, len(y), name="counts")

    def joint(self) -> np.ndarray:
        """Exact log density of each row given the others."""
        mu, log_tau = np.meshgrid(np.linspace(-0.5, 2.5, 121), np.linspace(-3, 1, 121))
        mu, log_tau = mu.ravel(), log_tau.ravel()
        prior = -0.5 * ((mu / 2.0) ** 2 + ((log_tau + 0.5) / 0.5) ** 2)
        z = np.linspace(-7, 7, 141)
        eta = mu[:, None] + np.exp(log_tau)[:, None] * z
        values, row = np.unique(self.y, return_inverse=True)
        rate = np.exp(eta)
        rows = np.stack(
            [logsumexp(v * eta - rate - 0.5 * z**2, axis=1) - gammaln(v + 1.0) for v in values]
        )[row] + np.log((z[1] - z[0]) / np.sqrt(2 * np.pi))
        whole = prior + rows.sum(axis=0)
        return logsumexp(whole) - logsumexp(whole - rows, axis=1)


class Rats:
    """A model of the study of rats, leave one rat out."""

    def __init__(self, label: str):
        self.data, self.label = datasets.load("rats"), label
        self.folds = rats.folds(self.data)

    def model(self) -> fw.Model:
        return rats.models(self.data)[self.label]

    def joint(self) -> np.ndarray:
        """Exact log density of each rat's rows given the other rats."""
        return integrated.log_predictives(
            integrated.rats(self.data, self.label == "A"), range(30), 9
        )


def groups(folds=None):
    problem = problems.hierarchical()
    return problem if folds is None else replace(problem, folds=folds(len(problem.y)))


PROBLEMS = {
    "groups, leave-group-out": (groups, "log"),
    "groups, leave-one-out": (lambda: groups(fw.leave_one_out), "log"),
    "groups, 10-fold": (lambda: groups(lambda n: fw.k_fold(n, 10, seed=1)), "log"),
    "groups, 10-fold by row": (lambda: groups(lambda n: fw.k_fold(n, 10, seed=1)), "log_pointwise"),
    "far group, refitted": (lambda: problems.FarScale(6.0), "log"),
    "very far group, refitted": (lambda: problems.FarScale(60.0), "log"),
    "far group, chains": (lambda: problems.FarScale(6.0, spare=14), "log"),
    "four effects a group": (problems.many_effects, "log"),
    "counts, leave-one-out": (Counts, "log"),
    "rats A, leave-group-out": (lambda: Rats("A"), "log"),
    "rats B, leave-group-out": (lambda: Rats("B"), "log"),
}


def run(model, folds, score, exact, seed, method):
    """z of fine folds and of the total, its MCSE, Pareto k, how folds were made, and seconds.

    With method "importance" the fit is kept, for :func:`add_totals`.
    """
    began = time.perf_counter()
    fit = fw.fit(model, seed=20_000 + seed, progress=False)
    settings = {"fit": fit, "method": method, "scores": score, "seed": seed, "progress": False}
    found = fw.cross_validate(model, folds, **settings)
    seconds = time.perf_counter() - began
    table = found.folds
    fine = table["status"].values == "fine"
    made = table["method"].values
    error = float(found.elpd - (folds.fold_weight * exact).sum())
    return {
        "settings": settings if method == "importance" else None,
        "fine": fine,
        "fold_z": ((table["elpd"].values - exact) / table["mcse"].values)[fine],
        "z": error / found.mcse if fine.all() else np.nan,
        "mcse": found.mcse,
        "k": float(np.where(fine & (made == "importance"), table["pareto_k"], -np.inf).max()),
        "refits": int((made == "refit").sum()),
        "chains": int((made == "mcmc").sum()),
        "flagged": int((~fine).sum()),
        "seconds": seconds,
    }


def add_totals(model, folds, exact, records):
    """Put z and MCSE of the total of folds that are hardly ever flagged into all records."""
    often = np.flatnonzero(np.mean([record["fine"] for record in records], axis=0) >= OFTEN)
    some = folds[often]
    truth = float((some.fold_weight * exact[often]).sum())
    for record in records:
        found = fw.cross_validate(model, some, **record["settings"])
        record["mcse"], record["z"] = found.mcse, (found.elpd - truth) / found.mcse


def summary(name, records):
    """The line of a problem, and whether it is within limits."""

    def rms(values):
        return float(np.sqrt(np.mean(np.square(values)))) if len(values) else np.nan

    def mean(key):
        return np.mean([record[key] for record in records])

    z = np.array([record["z"] for record in records])
    z = z[np.isfinite(z)]
    folds = np.concatenate([record["fold_z"] for record in records])
    total, fold = rms(z), rms(folds)
    bias = float(z.mean()) if len(z) else np.nan
    most = float(np.abs(folds).max(initial=0.0))
    ok = LOW <= total <= HIGH and LOW <= fold <= HIGH and abs(bias) <= MOST_BIAS and most <= MOST_Z
    line = (
        f"{name:26}{z[-1] if len(z) else np.nan:8.2f}{total:7.2f}{fold:7.2f}"
        f"{bias:12.2f}{mean('mcse'):8.3f}"
        f"{max(record['k'] for record in records):7.2f}{most:7.1f}"
        f"{mean('refits'):8.1f}{mean('chains'):8.1f}{mean('flagged'):9.1f}"
        f"{np.median([record['seconds'] for record in records]):9.2f}{'ok' if ok else 'MISSED':>8}"
    )
    return line, ok


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--problems", default="")
    parser.add_argument("--method", default="auto", choices=["auto", "importance", "mcmc"])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(
        f"{'problem':26}{'total z':>8}{'rms':>7}{'folds':>7}{'mean error':>12}{'mcse':>8}{'k':>7}"
        f"{'max z':>7}{'refits':>8}{'chains':>8}{'flagged':>9}{'seconds':>9}{'':>8}",
        flush=True,
    )
    missed = False
    for name, (make, score) in PROBLEMS.items():
        if arguments.problems and not any(p in name for p in arguments.problems.split(",")):
            continue
        problem = make()
        model = problem.model()
        exact = problem.joint() if score == "log" else problem.pointwise()
        records = [
            run(model, problem.folds, score, exact, seed, arguments.method)
            for seed in range(arguments.seeds)
        ]
        if arguments.method == "importance":
            add_totals(model, problem.folds, exact, records)
        line, ok = summary(name, records)
        missed |= not ok
        print(line, flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
