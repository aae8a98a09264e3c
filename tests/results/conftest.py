"""Results that the tests of this room share, each made once."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import problems
import pytest
from problems import by_chains
from stored import Case

import foldwise as fw
from foldwise.results import files as storage
from foldwise.results.result import CVResult


@pytest.fixture(scope="session")
def regression() -> Case:
    return Case.of(problems.regression())


@pytest.fixture(scope="session")
def autoregression() -> Case:
    return Case.of(problems.autoregression())


@pytest.fixture(scope="session")
def loo(regression) -> CVResult:
    return regression.run()


@pytest.fixture(scope="session")
def by_row(regression) -> CVResult:
    return regression.run(problems.five_fold().folds, scores=("log_pointwise", "log"))


@pytest.fixture(scope="session")
def halves(regression) -> tuple[CVResult, CVResult]:
    folds = regression.problem.folds
    return regression.run(folds[:25], estimator="mean"), regression.run(
        folds[25:], estimator="mean"
    )


@pytest.fixture
def saved(loo, tmp_path) -> Path:
    return storage.save(loo, tmp_path / "loo.nc")


@pytest.fixture(scope="module")
def run(prepared):
    """run(problem, draws, seed): cross-validation of one of the problems, or of part of one."""

    def cross_validate(name, draws, seed, folds=None, **arguments):
        problem, model, fit = prepared(name)
        folds = problem.folds if folds is None else folds
        arguments = {"warmup": 30, "progress": False, "fit": fit, **arguments}
        return by_chains(model, folds, draws=draws, seed=seed, **arguments)

    return cross_validate


@pytest.fixture(scope="module")
def less(seed):
    """The regression without two of its columns, and its fit."""
    full = problems.regression()
    model = replace(full, X=full.X[:, :2], prior=full.prior[:2], name="less").model()
    return model, fw.fit(model, draws=300, warmup=200, seed=200 + seed, progress=False)


@pytest.fixture(scope="module")
def pair(run, less, seed):
    """Two regressions on eight named groups, all of three scores."""
    folds = fw.leave_group_out(np.repeat([f"group {letter}" for letter in "abcdefgh"], 5))
    settings = {"draws": 160, "scores": ("log", "crps", "mse")}
    model, fit = less
    other = by_chains(model, folds, fit=fit, warmup=30, seed=seed + 1, progress=False, **settings)
    return [run("regression", folds=folds, seed=seed, **settings), other]


@pytest.fixture(scope="module")
def online(run, seed):
    return run("five_fold", 60, seed, memory="online")
