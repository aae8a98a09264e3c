"""Rows of PyMC models that depend on each other: any of them, the others integrated out."""

import jax
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
import scipy.stats as st

import foldwise as fw

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
N = 8
Y = np.random.default_rng(4).normal(size=N)
APART = np.abs(np.arange(N)[:, None] - np.arange(N))
KERNEL = np.exp(-APART / 2.0) + 0.3 * np.eye(N)
ONES = np.ones(N)


def normal_covariance():
    pm.MvNormal("y", pm.Normal("m") * ONES, pm.HalfNormal("s") * KERNEL, observed=Y)
    return {"m": 0.3, "s": 1.4}, 0.3 * ONES, 1.4 * KERNEL


def normal_cholesky():
    root = np.linalg.cholesky(KERNEL)
    pm.MvNormal("y", pm.Normal("m") * ONES, chol=pm.HalfNormal("s") * root, observed=Y)
    return {"m": 0.3, "s": 1.4}, 0.3 * ONES, 1.4**2 * KERNEL


def normal_precision():
    tau = pm.HalfNormal("s") * np.linalg.inv(KERNEL)
    pm.MvNormal("y", pm.Normal("m") * ONES, tau=tau, observed=Y)
    return {"m": 0.3, "s": 1.4}, 0.3 * ONES, KERNEL / 1.4


def marginal_process():
    scale = pm.HalfNormal("s")
    # an array: PyTensor 3 divides by a Python number in single precision
    process = pm.gp.Marginal(cov_func=scale**2 * pm.gp.cov.ExpQuad(1, ls=np.array(1.5)))
    process.marginal_likelihood("y", X=np.arange(N)[:, None] / 1.0, y=Y, sigma=0.5, jitter=0.0)
    covariance = 1.4**2 * np.exp(-0.5 * (APART / 1.5) ** 2) + 0.25 * np.eye(N)
    return {"s": 1.4}, 0.0 * ONES, covariance


def conditional_autoregression():
    near = (APART == 1).astype(float)
    pm.CAR("y", pm.Normal("m") * ONES, near, 0.6, pm.HalfNormal("t"), observed=Y)
    precision = 1.4 * (np.diag(near.sum(axis=1)) - 0.6 * near)
    return {"m": 0.3, "t": 1.4}, 0.3 * ONES, np.linalg.inv(precision)


def random_walk():
    first = pm.Normal.dist(pm.Normal("m"), 2.0)
    pm.GaussianRandomWalk("y", 0.2, pm.HalfNormal("s"), init_dist=first, observed=Y)
    variance = 4.0 + 1.4**2 * np.minimum(np.arange(N)[:, None], np.arange(N))
    return {"m": 0.3, "s": 1.4}, 0.3 + 0.2 * np.arange(N), variance


def autoregression(constant):
    def make():
        rho = pm.Normal("rho", shape=2 + constant)
        first = pm.Normal.dist(0.5, 2.0)
        pm.AR("y", rho, pm.HalfNormal("s"), init_dist=first, constant=constant, observed=Y)
        lags = np.array([0.5, -0.3])
        # y = A^-1 (start and constants + noise), A unit lower triangular
        a = np.eye(N)
        for t in range(2, N):
            a[t, [t - 1, t - 2]] = -lags
        noise = np.diag([4.0, 4.0] + [1.4**2] * (N - 2))
        shift = np.array([0.5, 0.5] + [0.7 if constant else 0.0] * (N - 2))
        back = np.linalg.inv(a)
        rho = np.array([0.7, *lags]) if constant else lags
        return {"rho": rho, "s": 1.4}, back @ shift, back @ noise @ back.T

    return make


FORMS = {
    "normal, covariance": normal_covariance,
    "normal, Cholesky": normal_cholesky,
    "normal, precision": normal_precision,
    "gp.Marginal": marginal_process,
    "CAR": conditional_autoregression,
    "GaussianRandomWalk": random_walk,
    "AR": autoregression(False),
    "AR with a constant": autoregression(True),
}


@pytest.mark.parametrize("name", FORMS)
def test_density_of_any_rows(name):
    with pm.Model() as model:
        parameters, mean, covariance = FORMS[name]()
    found = fw.from_pymc(model)
    assert found.n_obs == N and found.simulate is None
    rng = np.random.default_rng(1)
    masks = [np.ones(N, bool), np.arange(N) > 2, np.arange(N) < 3, *(rng.random((4, N)) < 0.5)]
    with jax.enable_x64(True):
        position = found.unconstrain({k: np.asarray(v) for k, v in parameters.items()})
        joint = jax.jit(found.joint_log_likelihood)
        for rows in masks:
            some = np.flatnonzero(rows)
            exact = st.multivariate_normal(mean[some], covariance[np.ix_(some, some)])
            expected = exact.logpdf(Y[some]) if len(some) else 0.0
            assert float(joint(position, rows)) == pytest.approx(expected, abs=1e-8)
        rows = masks[-1]
        keys = jax.random.split(jax.random.key(0), 2000)
        draws = jax.jit(jax.vmap(found.joint_simulate, (0, None, None)))(keys, position, rows)
        np.testing.assert_allclose(draws[:, rows], np.tile(Y[rows], (2000, 1)), atol=1e-6)
        weights = covariance[np.ix_(~rows, rows)] @ np.linalg.inv(covariance[np.ix_(rows, rows)])
        expected = mean[~rows] + weights @ (Y - mean)[rows]
        variance = covariance[np.ix_(~rows, ~rows)] - weights @ covariance[np.ix_(rows, ~rows)]
        error = np.sqrt(np.diagonal(variance) / 2000)
        assert (np.abs(draws[:, ~rows].mean(axis=0) - expected) < 5 * error).all()
        spread = draws[:, ~rows].var(axis=0) / np.diagonal(variance)
        assert (np.abs(spread - 1) < 5 * np.sqrt(2 / 2000)).all()
        gradient = jax.jit(jax.grad(found.joint_log_likelihood))(position, rows)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    check_gradients(model)


def check_gradients(model):
    """Those of the posterior given all rows, compiled for many positions, are PyMC's."""
    found, rng = fw.from_pymc(model), np.random.default_rng(5)

    def density(position):
        if found.joint_log_likelihood is None:
            return found.log_prior(position) + found.log_likelihood_at(position).sum()
        return found.log_prior(position) + found.joint_log_likelihood(position, np.ones(N, bool))

    start = model.initial_point()
    points = {k: v + 0.5 * rng.normal(size=(4, *np.shape(v))) for k, v in start.items()}
    with jax.enable_x64(True):
        gradients = jax.jit(jax.vmap(jax.grad(density)))(points)
    own = model.compile_dlogp(mode="FAST_COMPILE")
    for k in range(4):
        expected = own({name: values[k] for name, values in points.items()})
        parts = [np.ravel(gradients[v.name][k]) for v in model.value_vars]
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-6, atol=1e-6)


def on_a_line(reach, height):
    """Several covariance functions, each with distances of its own."""
    cov = pm.gp.cov
    smooth, rough = cov.ExpQuad(1, ls=reach), cov.Exponential(1, ls=reach)
    warped = cov.WarpedInput(
        1, cov_func=cov.Matern52(1, ls=np.array(1.5)), warp_func=lambda x, a: x / a, args=(reach,)
    )
    return PLACES[:, :1], height**2 * (smooth + rough * warped)


def on_a_plane(reach, height):
    one = pm.gp.cov.Matern32(2, ls=reach)
    return PLACES, height**2 * one * pm.gp.cov.ExpQuad(2, ls=reach, active_dims=[1])


def on_a_process(reach, height):
    """Points that are a function of other points."""
    first = pm.gp.cov.ExpQuad(1, ls=reach)(PLACES[:, :1]) + 1e-6 * pt.eye(N)
    moved = pt.dot(pt.linalg.cholesky(first), pm.Normal("z", shape=N))
    return moved[:, None], height**2 * pm.gp.cov.Matern52(1, ls=reach)


PLACES = np.random.default_rng(6).uniform(0.0, 6.0, size=(N, 2))


@pytest.mark.parametrize("points", [on_a_line, on_a_plane, on_a_process])
@pytest.mark.parametrize("kind", ["marginal", "latent", "centred"])
def test_gradients_of_processes(points, kind):
    """Rounding of the distance of a point from itself must not come into gradients."""
    with pm.Model() as model:
        where, kernel = points(pm.Gamma("reach", 3.0, 2.0), pm.HalfNormal("height"))
        if kind == "marginal":
            pm.gp.Marginal(cov_func=kernel).marginal_likelihood("y", X=where, y=Y, sigma=0.3)
        else:
            process = pm.gp.Latent(cov_func=kernel)
            f = process.prior("f", X=where, jitter=1e-2, reparameterize=kind == "latent")
            pm.Normal("y", f, 0.3, observed=Y)
    check_gradients(model)


@pytest.mark.parametrize("bounds", [(0.0, np.inf), (0.5, np.inf), (0.0, 4.0)])
def test_distances_with_bounds_are_left_as_they_are(bounds):
    with pm.Model() as model:
        x = PLACES * pm.HalfNormal("scale")
        norms = pt.sum(pt.sqr(x), axis=1)
        squared = -2.0 * pt.dot(x, x.T) + (norms[:, None] + norms[None, :])
        kernel = pt.exp(-pt.clip(squared, *bounds)) + pt.eye(N)
        pm.MvNormal("y", ONES, kernel, observed=Y)
    found = fw.from_pymc(model)
    own = model.compile_logp(mode="FAST_COMPILE")
    with jax.enable_x64(True):
        position = {"scale_log__": np.array(-1.0)}
        whole = found.log_prior(position) + found.joint_log_likelihood(position, np.ones(N, bool))
        assert float(whole) == pytest.approx(float(own(position)), abs=1e-9)


def test_folds_of_dependent_rows(seed):
    """A normal mean with a normal prior: y is normal, and its conditionals are the exact scores."""
    with pm.Model() as model:
        pm.MvNormal("y", pm.Normal("m") * ONES, KERNEL, observed=Y)
    folds = fw.k_fold(N, 4, seed=1)
    found = fw.cross_validate(fw.from_pymc(model), folds, scores="log", seed=seed, progress=False)
    whole = st.multivariate_normal(np.zeros(N), KERNEL + 1.0)
    exact = 0.0
    for train in folds.train_mask(np.arange(4)):
        rest = st.multivariate_normal(np.zeros(train.sum()), (KERNEL + 1.0)[np.ix_(train, train)])
        exact += whole.logpdf(Y) - rest.logpdf(Y[train])
    assert abs(found.elpd - exact) < 4 * found.mcse


def test_series_that_cannot_be_integrated():
    with pm.Model() as walk:
        heavy = pm.StudentT.dist(nu=4, mu=0, sigma=1)
        pm.GaussianRandomWalk("y", 0.0, pm.HalfNormal("s"), init_dist=heavy, observed=Y)
    with pytest.raises(ValueError, match="init_dist of .* 'y' must be pm.Normal.dist.*StudentT"):
        fw.from_pymc(walk)
    with pm.Model() as student:
        pm.MvStudentT("y", nu=4, mu=pm.Normal("m") * ONES, scale=KERNEL, observed=Y)
    with pytest.raises(ValueError, match=r"shape \(\) for data .* joint_log_likelihood=f"):
        fw.from_pymc(student)
    with pm.Model() as gaps, pytest.warns(pm.exceptions.ImputationWarning):
        first = pm.Normal.dist(0.0, 2.0)
        seen = np.where(np.arange(N) == 3, np.nan, Y)
        pm.GaussianRandomWalk("y", 0.0, pm.HalfNormal("s"), init_dist=first, observed=seen)
    with pytest.raises(ValueError, match="another model, give the joint .* joint_log_likelihood=f"):
        fw.from_pymc(gaps)
    with pm.Model() as island:
        near = (APART == 1).astype(float) * np.outer(np.arange(N) < 5, np.arange(N) < 5)
        pm.CAR("y", ONES, near, 0.6, pm.HalfNormal("t"), observed=Y)
    with pytest.raises(ValueError, match=r"neighbour, but location 5 has none \(3 in all\)"):
        fw.from_pymc(island)
    with pm.Model() as product:
        parts = [np.eye(2), pm.HalfNormal("s") * np.eye(3)]
        pm.KroneckerNormal("y", np.zeros(6), covs=parts, sigma=0.5, observed=Y[:6])
    with pytest.raises(ValueError, match="joint_log_likelihood=f"):
        fw.from_pymc(product)


def test_series_side_by_side_are_rows():
    """With an axis before time, a row is a whole series."""
    with pm.Model() as model:
        scale = pt.stack([pm.HalfNormal("s")] * 3)
        first = pm.Normal.dist(0.0, 2.0)
        pm.GaussianRandomWalk(
            "y", 0.0, scale, init_dist=first, observed=np.tile(Y, (3, 1)), shape=(3, N)
        )
    found = fw.from_pymc(model)
    assert found.n_obs == 3 and found.joint_log_likelihood is None
