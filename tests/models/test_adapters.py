"""Models of other packages: the same densities and scores, fits that are used, clear refusals."""

import importlib
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import problems
import pymc as pm
import pytest
import trios
import xarray as xr
from numpyro.contrib.control_flow import scan
from numpyro.handlers import mask, scale
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import potential_energy

import foldwise as fw
from foldwise import crossval

SHORT = {"chains": 4, "draws": 300, "warmup": 300, "progress": False}
pytestmark = [
    # fits here are short on purpose
    pytest.mark.filterwarnings("ignore::foldwise.sampling.fit.FitWarning"),
    # PyTensor, PyMC, Bambi and arviz 0.23 warn of each other's coming changes
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def trio():
    done = {}

    def get(name):
        if name not in done:
            done[name] = trios.TRIOS[name]()
        return done[name]

    return get


def in_pymc(trio, position):
    """A position of the JAX model by the names of PyMC's value variables."""
    values = trio.pymc_model.rvs_to_values
    return {values[rv].name: position[rv.name] for rv in trio.pymc_model.free_RVs}


# ---------------------------------------------------------------- the same model three times


@pytest.mark.parametrize("name", trios.TRIOS)
def test_same_densities(trio, name):
    three = trio(name)
    rng = np.random.default_rng(5)
    with jax.enable_x64(True):
        for _ in range(3):
            position = jax.tree.map(lambda v: rng.normal(0, 0.5, np.shape(v)), three.jax._template)
            prior, rows = three.jax.log_prior(position), three.jax.log_likelihood(position)
            for other, place in ((three.numpyro, position), (three.pymc, in_pymc(three, position))):
                assert float(other.log_prior(place)) == pytest.approx(float(prior), abs=1e-10)
                # PyTensor folds the constant of Student's t with SciPy's log gamma function, from
                # which JAX's differs by 6e-10
                close = 1e-9 if name == "student t" else 1e-10
                np.testing.assert_allclose(other.log_likelihood(place), rows, rtol=0, atol=close)
                again = other.unconstrain(other.constrain(place))
                for key, value in place.items():
                    np.testing.assert_allclose(again[key], value, atol=1e-10)


@pytest.mark.parametrize("name", ["linear", "hierarchical, non-centred"])
def test_same_scores(trio, name, seed):
    three, found = trio(name), {}
    scores = ("log", "crps", "hyvarinen")
    for k, package in enumerate(("numpyro", "pymc")):
        model = getattr(three, package)
        fit = fw.fit(model, seed=seed + 10 + k, **SHORT)
        found[package] = fw.cross_validate(
            model, fw.leave_group_out(trios.GROUP), fit, scores, seed=seed + k, progress=False
        )
    fit = fw.fit(three.jax, seed=seed + 12, **SHORT)
    plain = fw.cross_validate(
        three.jax, fw.leave_group_out(trios.GROUP), fit, seed=seed + 2, progress=False
    )
    one, two = found["numpyro"], found["pymc"]
    assert abs(one.elpd - plain.elpd) < 4 * np.hypot(one.mcse, plain.mcse)
    for score in scores:
        a, b = one.score(score), two.score(score)
        assert abs(a.total - b.total) < 4 * np.hypot(a.mcse, b.mcse)


@pytest.mark.parametrize("name", trios.TRIOS)
def test_simulates_from_the_observed_distribution(trio, name):
    three = trio(name)
    position = three.jax._template
    keys = jax.random.split(jax.random.key(1), 4000)
    with jax.enable_x64(True):
        means = []
        for model, place in (
            (three.numpyro, position),
            (three.pymc, in_pymc(three, position)),
        ):
            draws = np.asarray(jax.vmap(model.simulate, in_axes=(0, None))(keys, place), float)
            assert draws.shape == (4000, trios.N)
            means.append((draws.mean(axis=0), draws.std(axis=0) / np.sqrt(4000)))
    (a, sa), (b, sb) = means
    assert (np.abs(a - b) < 5 * np.hypot(sa, sb)).all() and sa.max() > 0


# ---------------------------------------------------------------- what models may contain


def test_numpyro_with_several_sites_factors_and_reparameterisation(seed):
    y, other = trios.CONTINUOUS, trios.COUNTS

    def model(y=None, other=None):
        mu = numpyro.sample("mu", dist.Normal())
        with numpyro.handlers.reparam(config={"z": LocScaleReparam(0)}), numpyro.plate("groups", 6):
            z = numpyro.sample("z", dist.Normal(mu, 0.5))
        numpyro.factor("soft", -0.5 * mu**2)
        with numpyro.plate("rows", trios.N):
            numpyro.sample("y", dist.Normal(z[trios.GROUP], 1.0), obs=y)
            numpyro.sample("other", dist.Poisson(jnp.exp(mu)), obs=other)

    with pytest.raises(ValueError, match=r'2 observed sites, y, other; name .* observed="y"'):
        fw.from_numpyro(model, y=y, other=other)
    with pytest.raises(ValueError, match="observed must be one of y, other; got 'x'"):
        fw.from_numpyro(model, y=y, other=other, observed="x")
    found = fw.from_numpyro(model, y=y, other=other, observed="y")
    assert set(found._template) == {"mu", "z_decentered"}
    position = {"mu": 0.3, "z_decentered": np.linspace(-1, 1, 6)}
    norm, poisson = trios.norm.logpdf, jax.scipy.stats.poisson.logpmf
    with jax.enable_x64(True):
        expected = 2 * norm(0.3) + norm(position["z_decentered"]).sum() + 0.5 * np.log(2 * np.pi)
        expected += poisson(other, np.exp(0.3)).sum()
        assert float(found.log_prior(position)) == pytest.approx(float(expected), abs=1e-10)
        alpha = 0.3 + 0.5 * position["z_decentered"]
        rows = norm(y, alpha[trios.GROUP], 1.0)
        np.testing.assert_allclose(found.log_likelihood(position), rows, atol=1e-10)


def test_multivariate_rows(seed):
    y = np.random.default_rng(1).normal(size=(12, 2))

    def model(y=None):
        mu = numpyro.sample("mu", dist.Normal().expand([2]).to_event(1))
        with numpyro.plate("rows", 12):
            numpyro.sample("y", dist.MultivariateNormal(mu, jnp.eye(2)), obs=y)

    with pm.Model() as in_pymc:
        mu = pm.Normal("mu", shape=2)
        pm.MvNormal("y", mu, np.eye(2), observed=y)
    one, two = fw.from_numpyro(model, y=y), fw.from_pymc(in_pymc)
    assert one.n_obs == two.n_obs == 12
    position = {"mu": np.array([0.2, -0.1])}
    with jax.enable_x64(True):
        expected = trios.norm.logpdf(y - position["mu"]).sum(axis=1)
        np.testing.assert_allclose(one.log_likelihood(position), expected, atol=1e-10)
        np.testing.assert_allclose(two.log_likelihood(position), expected, atol=1e-10)


def test_pymc_with_potential_data_and_two_observed():
    with pm.Model() as model:
        x = pm.Data("x", trios.X[:, 0])
        a = pm.Uniform("a", -2, 3)
        pm.Potential("soft", -0.5 * a**2)
        pm.Normal("y", a * x, 1.0, observed=trios.CONTINUOUS)
        pm.Poisson("n", pm.math.exp(a), observed=trios.COUNTS)
    with pytest.raises(ValueError, match=r'2 observed variables, y, n; name .* observed="y"'):
        fw.from_pymc(model)
    found = fw.from_pymc(model, observed="n")
    (name,) = found._template
    with jax.enable_x64(True):
        u, a = 0.4, -2 + 5 / (1 + np.exp(-0.4))
        norm = trios.norm.logpdf
        expected = norm(trios.CONTINUOUS, a * trios.X[:, 0]).sum() - 0.5 * a**2
        expected += -np.log(5.0) + np.log((a + 2) * (3 - a) / 5)
        assert float(found.log_prior({name: u})) == pytest.approx(float(expected), abs=1e-10)
        rows = jax.scipy.stats.poisson.logpmf(trios.COUNTS, np.exp(a))
        np.testing.assert_allclose(found.log_likelihood({name: u}), rows, atol=1e-10)


def test_bambi_with_random_effects(seed):
    import bambi
    import pandas as pd

    data = pd.DataFrame(
        {"y": trios.CONTINUOUS, "x": trios.X[:, 0], "g": [f"g{k}" for k in trios.GROUP]}
    )
    model = fw.from_bambi(bambi.Model("y ~ x + (1|g)", data))
    fit = fw.fit(model, seed=seed, **SHORT)
    folds = fw.leave_group_out(data["g"])
    found = fw.cross_validate(model, folds, fit, ("log", "rmse"), seed=seed, progress=False)
    assert found.folds["fold"].values.tolist() == [f"g{k}" for k in range(6)]
    assert np.isfinite(found.elpd) and 0 < found.score("rmse").total < 3
    with pytest.raises(TypeError, match="must be a bambi.Model, got DataFrame"):
        fw.from_bambi(data)
    with pytest.raises(TypeError, match="must be a pymc.Model, got DataFrame"):
        fw.from_pymc(data)
    with pytest.raises(TypeError, match="must be a NumPyro model, a function, got DataFrame"):
        fw.from_numpyro(data)


def scaled_latents(y=None):
    with scale(scale=0.5):
        mu, s = numpyro.sample("mu", dist.Normal()), numpyro.sample("s", dist.HalfNormal())
        simplex = numpyro.sample("simplex", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("rows", trios.N):
        numpyro.sample("y", dist.Normal(mu + simplex[0], s), obs=y)


def masked_latents(y=None):
    with mask(mask=False):
        s = numpyro.sample("s", dist.HalfNormal(2.0))
    with numpyro.plate("groups", 3), mask(mask=np.array([True, False, True])):
        z = numpyro.sample("z", dist.Gamma(2.0, 1.0))
    free = numpyro.sample("free", dist.HalfNormal().mask(False))
    with numpyro.plate("rows", trios.N):
        numpyro.sample("y", dist.Normal(z.sum() + free, s), obs=y)


def scaled_and_masked_observations(y=None):
    mu, s = numpyro.sample("mu", dist.Normal()), numpyro.sample("s", dist.LogNormal())
    with numpyro.plate("rows", trios.N):
        with scale(scale=3.0), mask(mask=trios.GROUP > 2):
            numpyro.sample("other", dist.Normal(mu, s), obs=2.0 * trios.CONTINUOUS)
        with scale(scale=1.0), mask(mask=trios.GROUP >= 0):
            numpyro.sample("y", dist.Normal(mu, s), obs=y)


def latents_in_a_scan(y=None):
    s = numpyro.sample("s", dist.HalfNormal())

    def step(x, _):
        x = numpyro.sample("x", dist.Normal(x, s))
        with numpyro.plate("pair", 2):
            positive = numpyro.sample("positive", dist.HalfNormal())
        simplex = numpyro.sample("simplex", dist.Dirichlet(jnp.ones(3)))
        return x, x + positive.sum() + simplex[0]

    _, level = scan(step, 0.0, jnp.arange(trios.N))
    with numpyro.plate("rows", trios.N):
        numpyro.sample("y", dist.Normal(level, 1.0), obs=y)


@pytest.mark.parametrize(
    "model", [scaled_latents, masked_latents, scaled_and_masked_observations, latents_in_a_scan]
)
def test_numpyro_densities_are_numpyros_own(model):
    y = trios.CONTINUOUS
    found = fw.from_numpyro(model, y=y, observed="y")
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        position = jax.tree.map(
            lambda v: jnp.asarray(rng.normal(0, 0.5, np.shape(v))), found._template
        )
        own = float(found.log_prior(position) + found.log_likelihood(position).sum())
        assert own == pytest.approx(-float(potential_energy(model, (), {"y": y}, position)))
        again = found.unconstrain(found.constrain(position))
        for name, value in position.items():
            np.testing.assert_allclose(again[name], value, atol=1e-10)


# ---------------------------------------------------------------- data that change


def test_numpyro_arguments_changed_in_place():
    x, y = trios.X[:, 0].copy(), trios.CONTINUOUS.copy()

    def model(data, weight, y=None):
        b = numpyro.sample("b", dist.Normal())
        with numpyro.plate("rows", trios.N):
            numpyro.sample("y", dist.Normal(b * data["x"] * weight, 1.0), obs=y)

    data = {"x": x}
    found = fw.from_numpyro(model, data, jnp.ones(trios.N, np.float32), y=y)
    found.check()
    for array in (x, y):
        array[0] += 1.0
        with pytest.raises(ValueError, match="arguments must stay .* call from_numpyro again"):
            found.check()
        with pytest.raises(ValueError, match="call from_numpyro again"):
            fw.cross_validate(found, fw.leave_one_out(trios.N), seed=1, progress=False)
        array[0] = trios.X[0, 0] if array is x else trios.CONTINUOUS[0]
    found.check()
    data["x"] = 2.0 * x
    with pytest.raises(ValueError, match="call from_numpyro again"):
        found.check()


def test_pymc_data_that_are_set():
    x, y = trios.X[:, 0], trios.CONTINUOUS
    with pm.Model() as model:
        pm.Data("x", x)
        mean = pm.Normal("b") * model["x"]
        pm.Normal("obs", mean, 1.0, observed=pm.Data("y", y))
    found = fw.from_pymc(model)
    found.check()
    for name, value in (("x", x), ("y", y)):
        pm.set_data({name: 2.0 * value}, model=model)
        with pytest.raises(ValueError, match=f"data '{name}' must stay .* call from_pymc again"):
            found.check()
        with pytest.raises(ValueError, match="call from_pymc again"):
            fw.fit(replace(found, name="renamed"), seed=1, progress=False)
        with pytest.raises(ValueError, match="call from_pymc again"):
            fw.cross_validate(found, fw.leave_one_out(trios.N), seed=1, progress=False)
        pm.set_data({name: value}, model=model)
    found.check()


# ---------------------------------------------------------------- fits that users have


def numpyro_linear(y=None):
    a = numpyro.sample("a", dist.Normal())
    s = numpyro.sample("s", dist.HalfNormal())
    numpyro.deterministic("twice", 2 * a)
    with numpyro.plate("rows", trios.N):
        numpyro.sample("y", dist.Normal(a, s), obs=y)


@pytest.fixture(scope="module")
def mcmc():
    found = MCMC(
        NUTS(numpyro_linear),
        num_warmup=300,
        num_samples=400,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    found.run(jax.random.key(0), y=trios.CONTINUOUS)
    return found


def test_a_finished_numpyro_fit_is_used(mcmc, seed):
    model = fw.from_numpyro(numpyro_linear, y=trios.CONTINUOUS)
    fit = fw.Fit.from_numpyro(model, mcmc)
    samples = mcmc.get_samples(group_by_chain=True)
    a, s = np.moveaxis(fit.positions, 2, 0)
    np.testing.assert_allclose(a, samples["a"], rtol=1e-6)
    np.testing.assert_allclose(np.exp(s), samples["s"], rtol=1e-5)
    with mock.patch.object(
        crossval, "full_data_fit", side_effect=AssertionError("refitted")
    ) as made:
        found = fw.cross_validate(model, fw.k_fold(trios.N, 3), fit, seed=seed, progress=False)
    assert made.call_count == 0 and found.info["fit_seed"] == fit.seed
    assert fw.Fit.from_numpyro(model, mcmc).seed == fit.seed


def test_a_finished_nutpie_fit_is_used(trio, seed):
    # not there in `make test-oldest`: pip looks too long for a version that goes with the rest
    nutpie = pytest.importorskip("nutpie", reason="not for the oldest versions")
    three = trio("linear")
    trace = nutpie.sample(
        nutpie.compile_pymc_model(three.pymc_model),
        draws=300,
        tune=300,
        chains=2,
        seed=1,
        progress_bar=False,
    )
    fit = fw.Fit.from_arviz(three.pymc, trace)
    names = list(three.pymc._template)
    assert names == ["a", "b", "s_log__"] and fit.positions.shape == (2, 300, 4)
    np.testing.assert_allclose(np.exp(fit.positions[..., 3]), trace.posterior["s"], rtol=1e-10)
    with mock.patch.object(
        crossval, "full_data_fit", side_effect=AssertionError("refitted")
    ) as made:
        fw.cross_validate(three.pymc, fw.k_fold(trios.N, 3), fit, seed=seed, progress=False)
    assert made.call_count == 0


def test_draws_of_a_plain_model_by_name(seed):
    import xarray as xr

    rng = np.random.default_rng(2)
    model = fw.Model(
        lambda q: -0.5 * q["mu"] ** 2,
        lambda q: -0.5 * (q["mu"] - np.arange(4.0)) ** 2,
        {"mu": 0.0},
        4,
    )
    draws = xr.Dataset({"mu": (("chain", "draw"), rng.normal(1.2, 0.45, (4, 500)))})
    fit = fw.Fit.from_arviz(model, draws)
    np.testing.assert_array_equal(fit.positions[..., 0], draws["mu"])
    tree = xr.DataTree.from_dict({"posterior": draws})
    assert fw.Fit.from_arviz(model, tree).seed == fit.seed
    with pytest.raises(ValueError, match="mu are missing; they have nu"):
        fw.Fit.from_arviz(model, draws.rename(mu="nu"))
    with pytest.raises(ValueError, match=r"'mu' must have shape .* but have \(4, 500, 2\)"):
        fw.Fit.from_arviz(
            model, xr.Dataset({"mu": (("chain", "draw", "k"), np.zeros((4, 500, 2)))})
        )
    with pytest.raises(TypeError, match="must hold a posterior group"):
        fw.Fit.from_arviz(model, {"mu": 1.0})
    with pytest.raises(ValueError, match="at least 2 chains of 100 draws, but these are 1 of 500"):
        fw.Fit.from_arviz(model, draws.isel(chain=[0]))


def test_draws_outside_the_support(mcmc):
    import xarray as xr

    model = fw.from_numpyro(numpyro_linear, y=trios.CONTINUOUS)
    samples = mcmc.get_samples(group_by_chain=True)
    draws = {name: (("chain", "draw"), -np.abs(samples[name])) for name in ("a", "s")}
    with pytest.raises(
        ValueError, match="inside the support of the model's parameters, but 800 of"
    ):
        fw.Fit.from_arviz(model, xr.Dataset(draws))


def test_pymc_leaves_the_number_of_devices_alone():
    code = """
import foldwise as fw, pymc as pm, numpy as np, jax, os
with pm.Model() as model:
    pm.Normal("y", pm.Normal("mu"), 1.0, observed=np.zeros(3))
fw.from_pymc(model)
print(os.environ.get("XLA_FLAGS"), jax.local_device_count())
"""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["FOLDWISE_DEVICES"] = "2"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert out.stdout.split() == ["None", "2"]


# ---------------------------------------------------------------- refusals


def rows_of(y, latent=None, plate=None):
    def model(y=None):
        mu = numpyro.sample("mu", dist.Normal())
        if latent is not None:
            numpyro.sample("odd", latent)
        with plate or numpyro.plate("rows", len(trios.CONTINUOUS)):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    return model


def test_numpyro_refusals():
    y = trios.CONTINUOUS
    with pytest.raises(ValueError, match="continuous, but site 'odd' is discrete.*sum it out"):
        fw.from_numpyro(rows_of(y, dist.Bernoulli(0.5)), y=y)
    with pytest.raises(ValueError, match="must have an observed site, but it has none"):
        fw.from_numpyro(rows_of(y))
    missing = np.where(np.arange(trios.N) == 3, np.nan, y)
    with pytest.raises(ValueError, match="'y' must have no missing values, but row 3 is NaN"):
        fw.from_numpyro(rows_of(y), y=missing)

    def subsampled(y=None):
        mu = numpyro.sample("mu", dist.Normal())
        with numpyro.plate("rows", trios.N, subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y[i])

    with pytest.raises(ValueError, match="plate 'rows' takes a subsample of 10 of 30"):
        fw.from_numpyro(subsampled, y=y)

    def optimised(y=None):
        mu = numpyro.param("mu", 0.0)
        with numpyro.plate("rows", trios.N):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    with pytest.raises(ValueError, match="must have a prior, but site 'mu' is a numpyro.param"):
        fw.from_numpyro(optimised, y=y)


def test_numpyro_rows_that_do_not_count_as_one():
    y, some = trios.CONTINUOUS, trios.GROUP > 1

    def rows(handler=None, obs_mask=None):
        def model(y=None):
            normal = dist.Normal(numpyro.sample("mu", dist.Normal()), 1.0)
            with numpyro.plate("rows", trios.N), handler or mask(mask=True):
                numpyro.sample("y", normal, obs=y, obs_mask=obs_mask)

        return model

    with pytest.raises(ValueError, match=r"'y' must not be scaled, .* by \[2.\].*take handlers"):
        fw.from_numpyro(rows(scale(scale=2.0)), y=y)
    with pytest.raises(ValueError, match="'y' must not be scaled"):
        fw.from_numpyro(scale(rows(), scale=0.1), y=y)
    with pytest.raises(ValueError, match="but they are with obs_mask"):
        fw.from_numpyro(rows(obs_mask=some), y=y)
    hidden = np.ma.masked_array(y, ~some)
    with pytest.raises(ValueError, match="data must not be masked, but row 0"):
        fw.from_numpyro(rows(), y=hidden)
    with pytest.raises(ValueError, match="data must not be masked, but row 0"):
        fw.from_numpyro(lambda: rows()(hidden))


@pytest.mark.parametrize("kind", ["values", "vectors", "batches of one"])
def test_numpyro_rows_outside_of_plates(kind):
    """A distribution of one value, or one vector, counts once for each that is observed."""
    y = trios.CONTINUOUS.reshape(10, 3) if kind == "vectors" else trios.CONTINUOUS

    def model(plate, y=None):
        mu = numpyro.sample("mu", dist.Normal())
        row = dist.Normal(mu, 1.0)
        if kind == "vectors":
            row = dist.MultivariateNormal(mu * jnp.ones(3), jnp.eye(3) + 0.3)
        if kind == "batches of one":
            row = row.expand([1])
        with numpyro.plate("rows", len(y)) if plate else nullcontext():
            numpyro.sample("y", row, obs=y)

    apart, found = (fw.from_numpyro(model, plate, y=y) for plate in (True, False))
    assert found.n_obs == len(y) and found.joint_log_likelihood is None
    with jax.enable_x64(True):
        position = {"mu": jnp.float64(0.3)}
        rows = [one.log_likelihood_at(position) for one in (found, apart)]
        np.testing.assert_allclose(*rows, rtol=1e-12)
        key = jax.random.key(1)
        drawn = [np.asarray(one.simulate(key, position)) for one in (found, apart)]
    assert drawn[0].shape == y.shape and len(np.unique(drawn[0])) == y.size
    np.testing.assert_allclose(*drawn, rtol=1e-6)


def test_pymc_refusals():
    y = trios.CONTINUOUS
    with pm.Model() as discrete:
        k = pm.Bernoulli("k", 0.5)
        pm.Normal("y", k, 1.0, observed=y)
    with pytest.raises(ValueError, match="continuous, but 'k' is discrete; sum it out"):
        fw.from_pymc(discrete)
    with pm.Model() as unobserved:
        pm.Normal("mu")
    with pytest.raises(ValueError, match="must have an observed variable, but it has none"):
        fw.from_pymc(unobserved)
    with pm.Model() as weighted:
        pm.Normal("y", pm.Normal("mu"), 1.0, observed=y, total_size=1000)
    with pytest.raises(ValueError, match="'y' must not be weighted, but it has a total_size"):
        fw.from_pymc(weighted)
    with pm.Model() as approximate:
        kernel = pm.gp.cov.ExpQuad(1, ls=pm.Gamma("reach", 3.0, 2.0))
        x = np.linspace(0.0, 1.0, len(y))[:, None]
        process = pm.gp.MarginalApprox(cov_func=kernel)
        process.marginal_likelihood("y", X=x, Xu=x[::10], y=y, sigma=0.3)
    with pytest.raises(
        ValueError, match="MarginalApprox, needs the joint .* joint_log_likelihood=f"
    ):
        fw.from_pymc(approximate, rows=approximate.potentials[0].name)


def test_pymc_operations_without_jax():
    import pytensor.tensor as pt
    from pytensor.compile.ops import as_op

    @as_op(itypes=[pt.dscalar], otypes=[pt.dscalar])
    def opaque(x):
        return np.asarray(x)

    with pm.Model() as model:
        mu = pm.Normal("mu")
        pm.Normal("y", opaque(mu), 1.0, observed=trios.CONTINUOUS)
    with pytest.raises(ValueError, match="can convert to JAX, but a part of it has no JAX version"):
        fw.from_pymc(model)


@pytest.mark.parametrize(
    "package, call", [("numpyro", "from_numpyro"), ("pymc", "from_pymc"), ("bambi", "from_bambi")]
)
def test_a_missing_package_gives_the_install_command(package, call):
    with (
        mock.patch.dict(sys.modules, {package: None}),
        pytest.raises(ImportError, match=rf'pip install "foldwise\[{package}\]"'),
    ):
        getattr(importlib.import_module("foldwise"), call)(None)


def test_a_numpyro_model_that_ran_in_single_precision_before():
    """MCMC in NumPyro's default precision, data as arguments and closed over."""
    x, scale = (np.random.default_rng(k).normal(size=40) for k in range(2))
    group, y = np.arange(40) % 4, x + 0.5

    def model(x, group, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([4]))
        numpyro.sample("y", dist.Normal(b[group] * x, 1.0 + scale**2), obs=y)

    mcmc = numpyro.infer.MCMC(
        numpyro.infer.NUTS(model),
        num_warmup=100,
        num_samples=200,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), x, group, y=y)
    adapted = fw.from_numpyro(model, x, group, y=y)
    fit = fw.Fit.from_numpyro(adapted, mcmc)
    result = fw.cross_validate(adapted, fw.leave_one_out(40)[:5], fit=fit, seed=1, progress=False)
    assert np.isfinite(result.elpd)


def test_draws_of_other_data_are_refused():
    """The usual mistake: data or priors were edited, the trace is old."""
    problem = problems.regression()
    model, other = problem.model(), replace(problem, y=2.0 * problem.y).model()
    own = fw.fit(model, seed=1, progress=False)
    draws = xr.Dataset({"beta": (("chain", "draw", "d"), own.positions)})

    def named(model):
        return fw.Model(
            lambda q: model.log_prior(q["beta"]),
            lambda q: model.log_likelihood(q["beta"]),
            {"beta": np.zeros(own.positions.shape[-1])},
            model.n_obs,
        )

    right, wrong = named(model), named(other)
    folds = problem.folds[:4]
    fw.cross_validate(right, folds, fw.Fit.from_arviz(right, draws), seed=1, progress=False)
    with pytest.raises(ValueError, match="draws must be of this model's posterior"):
        fw.cross_validate(wrong, folds, fw.Fit.from_arviz(wrong, draws), seed=1, progress=False)
