"""Models, folds, fits, results and comparisons go to another process and come back equal."""

import pickle
import subprocess
import sys

import cloudpickle
import jax.numpy as jnp
import numpy as np
import pytest
from problems import by_chains

import foldwise as fw

SETTINGS = {"warmup": 10, "draws": 20, "batch": 4, "seed": 3, "progress": False}
ELSEWHERE = """
import pickle, sys
import foldwise as fw
model, folds, fit, settings = pickle.load(open(sys.argv[1], "rb"))
result = fw.cross_validate(model, folds, fit, method="mcmc", **settings)
pickle.dump((result, folds, fit, fw.compare({"a": result, "b": result})), open(sys.argv[2], "wb"))
"""


@pytest.fixture(scope="module")
def used():
    """A model of closures, its folds, its fit and its result: all have been used."""
    y = np.random.default_rng(0).normal(1.0, 1.0, 12)

    def row_log_density(mu, y):
        return -0.5 * (y - mu) ** 2

    model = fw.Model(lambda mu: -0.5 * mu**2, None, 0.0, 12, None, row_log_density, y, name="mean")
    folds = fw.k_fold(12, 4, seed=1)
    fit = fw.fit(model, draws=100, warmup=100, seed=1, progress=False)
    return model, folds, fit, by_chains(model, folds, fit, **SETTINGS)


def equal(one, two):
    """Whether two results say the same, to the last bit."""
    assert one.folds.identical(two.folds)
    assert str(one) == str(two)
    np.testing.assert_array_equal(one.draws, two.draws)


def test_there_and_back(used, tmp_path):
    model, folds, fit, result = used
    there, back = tmp_path / "there", tmp_path / "back"
    there.write_bytes(cloudpickle.dumps((model, folds, fit, SETTINGS)))
    subprocess.run([sys.executable, "-W", "ignore", "-c", ELSEWHERE, there, back], check=True)
    again, same_folds, same_fit, comparison = pickle.loads(back.read_bytes())
    np.testing.assert_allclose(again.folds["elpd"], result.folds["elpd"], rtol=1e-12)
    assert same_folds.digest == folds.digest
    np.testing.assert_array_equal(same_fit.positions, fit.positions)
    assert comparison.table.loc["a", "elpd"] == pytest.approx(again.elpd, rel=1e-12)


def test_results_come_back_and_go_on(used):
    model, _, _, result = used
    copy = pickle.loads(pickle.dumps(result))
    equal(copy, result)
    longer = copy.extend(10, model=model, progress=False)
    assert longer.info["draws"] == 30 and result.info["draws"] == 20
    with pytest.raises(ValueError, match="does not hold its model"):
        pickle.loads(pickle.dumps(result)).extend(10)


def test_models_leave_compiled_programs_behind(used):
    model = used[0]
    copy = cloudpickle.loads(cloudpickle.dumps(model))
    assert model.__dict__["_programs"] and not copy.__dict__["_programs"]
    assert float(copy.log_prior(2.0)) == float(model.log_prior(2.0))


def test_members_of_a_family_still_share_their_programs():
    def log_likelihood(q, selection):
        return -0.5 * (np.ones(4) - selection @ q["beta"]) ** 2

    family = fw.model_family(
        lambda q, selection: -0.5 * jnp.sum(q["beta"] ** 2),
        log_likelihood,
        {"beta": np.zeros(1)},
        4,
        [[0.0], [1.0]],
    )
    one, two = cloudpickle.loads(cloudpickle.dumps(family)).members
    assert one.__dict__["_programs"] is two.__dict__["_programs"]
    assert float(one.log_likelihood({"beta": np.ones(1)})[0]) == -0.5
    assert float(two.log_likelihood({"beta": np.ones(1)})[0]) == 0.0
