"""Results that the tests of this room share, each made once."""

from pathlib import Path

import problems
import pytest
from stored import Case

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
