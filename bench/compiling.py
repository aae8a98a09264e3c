"""What programs take to compile and to run, compiled quickly and with all that XLA does.

The program of the integrals over groups' parameters, of the growth of rats (150 rows) and of radon
(12,573 rows), with each set of options; CPU seconds, which other work on the machine does not
change much. ``models/evaluate.py`` says for which models the last of them is used.
Needs FOLDWISE_DATA.

    FOLDWISE_CACHE=off FOLDWISE_DATA=... python bench/compiling.py
"""

import time

import jax
import numpy as np

from foldwise import datasets
from foldwise.models import evaluate
from foldwise.models.structure import find_cells
from foldwise.scores import cells
from foldwise.scores.nodes import rule
from foldwise.studies import radon, rats
from foldwise.support import runtime

OPTIONS = {
    "all that XLA does": {},
    "without emitters of fused loops": {"xla_cpu_use_fusion_emitters": False},
    "LLVM's optimiser at 1": {"xla_backend_optimization_level": 1},
    "both: quick": runtime._QUICK,
}
DRAWS, REPEATS = 2000, 4


def measured(module, data, options):
    """CPU seconds to compile the program, and to run it at so many draws."""
    runtime._QUICK, evaluate.FEW_ROWS = options, 10**9
    model = module.models(datasets.load(data))["A"]
    draws = np.resize(model.probes()[:1], (DRAWS, model.dimension))
    structure = find_cells(model, draws[:1])
    keep, nodes = np.ones(model.n_obs, bool), rule(7, int(structure.sizes.max()))
    took = []
    for repeats in (1, REPEATS):
        began = time.process_time()
        for _ in range(repeats):
            cells.log_integrals(model, structure, draws, keep, nodes)
        took.append((time.process_time() - began) / repeats)
    return took[0] - took[1], took[1]


def main():
    jax.config.update("jax_enable_compilation_cache", False)
    print(f"{'':34}{'rats: compile':>14}{'run':>8}{'radon: compile':>16}{'run':>8}", flush=True)
    measured(rats, "rats", {})  # what JAX itself does once
    for title, options in OPTIONS.items():
        line = [*measured(rats, "rats", options), *measured(radon, "radon_all", options)]
        print(f"{title:34}{line[0]:14.2f}{line[1]:8.2f}{line[2]:16.2f}{line[3]:8.2f}", flush=True)


if __name__ == "__main__":
    main()
