"""Leave-one-out of the wells data, all 3,020 rows, from a NumPyro model in one call.

Prints the score beside the published one (vignette "Writing Stan programs for use with the loo
package": elpd -1968.5, SE 15.6, by importance sampling), wall time, peak memory, and the same for
NumPyro refits of 10 random folds one after the other, compiled once, extrapolated to all folds.
Must take less than 10 minutes and 4 GB and lie within 1 nat. Needs FOLDWISE_DATA.

    FOLDWISE_DATA=... python bench/wells.py [--refits 10]
"""

import argparse
import os
import resource
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import foldwise as fw

PUBLISHED, PUBLISHED_SE = -1968.5, 15.6
MOST_SECONDS, MOST_BYTES, MOST_NATS = 600.0, 4e9, 1.0


def data():
    table = np.genfromtxt(
        Path(os.environ["FOLDWISE_DATA"]) / "wells.csv", delimiter=",", names=True
    )
    x = np.column_stack([np.ones(len(table)), table["dist"] / 100.0, table["arsenic"]])
    return x, table["switched"].astype(int)


def model(x, y=None, weight=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    used = numpyro.handlers.mask(mask=True if weight is None else weight)
    with numpyro.plate("rows", len(x)), used:
        numpyro.sample("y", dist.BernoulliLogits(x @ b), obs=y)


def refits(x, y, count):
    """Mean log score and seconds of each of ``count`` refits, compiling apart."""
    kernel = NUTS(model)
    mcmc = MCMC(
        kernel,
        num_warmup=300,
        num_samples=1000,
        num_chains=4,
        chain_method="sequential" if jax.local_device_count() == 1 else "parallel",
        progress_bar=False,
        jit_model_args=True,
    )
    rows = np.random.default_rng(0).choice(len(y), count + 1, replace=False)
    seconds, scores = [], []
    for k, row in enumerate(rows):
        began = time.perf_counter()
        keep = jnp.asarray(np.arange(len(y)) != row)
        mcmc.run(jax.random.key(k), x, y=y, weight=keep)
        eta = np.asarray(mcmc.get_samples()["b"]) @ x[row]
        scores.append(-np.log1p(np.exp(-eta if y[row] else eta)))
        seconds.append(time.perf_counter() - began)
    elpd = [np.log(np.mean(np.exp(s))) for s in scores]
    return rows[1:], np.array(elpd[1:]), seconds[0], np.array(seconds[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--refits", type=int, default=10)
    arguments = parser.parse_args()
    x, y = data()
    began = time.perf_counter()
    result = fw.cross_validate(fw.from_numpyro(model, x, y=y), fw.leave_one_out(len(y)), seed=1)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(result)
    gap = result.elpd - PUBLISHED
    print(
        f"\npublished {PUBLISHED} (SE {PUBLISHED_SE}); difference {gap:.2f} (at most {MOST_NATS})"
    )
    print(
        f"wall time {seconds:.0f} s (at most {MOST_SECONDS:.0f}), "
        f"peak memory {peak / 1e9:.2f} GB (at most {MOST_BYTES / 1e9:.0f})"
    )
    with jax.enable_x64(True):
        rows, elpd, first, each = refits(x, y, arguments.refits)
    ours = result.folds["elpd"].values[rows]
    whole = first + each.mean() * len(y)
    print(
        f"NumPyro refits: {each.mean():.2f} s a fold after {first:.1f} s for the first, so "
        f"{whole / 3600:.1f} h for all {len(y)}: {whole / seconds:.0f} times as long; largest "
        f"difference of a fold's score {np.abs(elpd - ours).max():.4f}"
    )
    failed = abs(gap) > MOST_NATS or seconds > MOST_SECONDS or peak > MOST_BYTES
    sys.exit(failed)


if __name__ == "__main__":
    main()
