"""Shared set-up: seeds that can be swept, and one model per problem, compiled once."""

import os
from functools import cache

import numpy as np
import problems
import pytest

import foldwise as fw

SEED = int(os.environ.get("FOLDWISE_TEST_SEED", "0"))


@pytest.fixture(scope="session")
def seed() -> int:
    """Seed of the suite; set FOLDWISE_TEST_SEED to sweep."""
    return SEED


@pytest.fixture(scope="session")
def prepared():
    """prepared(name): a closed-form problem, its model and a full-data fit, each made once."""

    @cache
    def make(name: str):
        problem = getattr(problems, name)()
        model = problem.model()
        return problem, model, fw.fit(model, seed=100 + SEED, progress=False)

    return make


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(SEED)
