"""What do further scores cost?

Cross-validates the demo's model A with the log score alone and with other scores beside it, in
turns, and prints the time of sampling (warm-up included, compiling not) as a ratio, with the
time of working out the scores afterwards beside it. Adding dss and hyvarinen may cost 30 %.

    python bench/scores.py [--rounds 5]
"""

import argparse
import sys
import time
import warnings

import numpy as np

import foldwise as fw
from foldwise.results.summary import summarise
from foldwise.studies import toy

LIMIT = 1.3
VARIANTS = {
    "log": ("log",),
    "log, dss": ("log", "dss"),
    "log, hyvarinen": ("log", "hyvarinen"),
    "log, dss, hyvarinen": ("log", "dss", "hyvarinen"),
    "log, dss, hyvarinen, crps, energy": ("log", "dss", "hyvarinen", "crps", "energy"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    data = toy.simulate()
    model, folds = toy.model(data, 4, "A"), fw.leave_group_out(data.group)
    fit = fw.fit(model, draws=2000, seed=1, progress=False)
    seconds = {name: [] for name in VARIANTS}
    finishing = dict.fromkeys(VARIANTS, np.inf)
    for _ in range(arguments.rounds):
        for name, scores in VARIANTS.items():
            result = fw.cross_validate(
                model,
                folds,
                fit,
                scores=scores,
                draws=400,
                seed=2,
                progress=False,
                method="mcmc",
                marginal=False,
            )
            seconds[name].append(result.info["seconds"]["folds"])
            began = time.perf_counter()
            summarise(result.run)
            finishing[name] = min(finishing[name], time.perf_counter() - began)
    base = min(seconds["log"])
    print(f"{'scores':36}{'sampling':>10}{'ratio':>8}{'finishing':>11}")
    for name, times in seconds.items():
        print(f"{name:36}{min(times):8.2f} s{min(times) / base:8.2f}{finishing[name]:9.2f} s")
    ratio = min(seconds["log, dss, hyvarinen"]) / base
    print(f"dss and hyvarinen add {100 * (ratio - 1):.0f} % (at most {100 * (LIMIT - 1):.0f} %)")
    sys.exit(ratio > LIMIT)


if __name__ == "__main__":
    main()
