"""Gaussian processes whose function is a parameter, or integrated out, blocks left out: exact."""

import numpy as np
import pytest
from processes import Process

import foldwise as fw
from foldwise.models.evaluate import gradients_program
from foldwise.support.runtime import lanes


@pytest.fixture(scope="module")
def process():
    rng = np.random.default_rng(20)
    t = np.sort(rng.uniform(0, 10, 20))
    y = np.sin(t) + 0.3 * rng.normal(size=20)
    folds = fw.from_labels(np.arange(20) // 5)
    process = Process(np.abs(t[:, None] - t), y, folds, [0.3, 0.0, -1.0])
    process.sd = np.full(3, 0.3)  # 20 points know little of the length scale
    return process


@pytest.mark.parametrize("form", ["latent", "integrated"])
def test_blocks_left_out_of_a_process(process, form):
    model, exact = getattr(process, form)(), process.exact(step=1.0)
    result = fw.cross_validate(model, process.folds, scores="log", seed=1, progress=False)
    z = (result.folds["elpd"].values - exact) / result.folds["mcse"].values
    assert np.abs(z).max() < 4.5 and abs(result.elpd - exact.sum()) < 4 * result.mcse
    # all lanes at once
    program = gradients_program(model)
    assert program.lanes == lanes() and not program._one_by_one
