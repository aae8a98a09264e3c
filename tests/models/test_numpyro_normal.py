"""NumPyro's normal distributions of all rows: any set of rows, and a local level by a filter."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy
from numpyro.infer.util import potential_energy
from scipy import stats

import foldwise as fw
from foldwise.models.numpyro_normal import is_normal, joint_draw, joint_log_density

RNG = np.random.default_rng(7)
N, M, S = 6, 0.3, 1.2
Y = RNG.normal(size=N)
ROOT = np.tril(RNG.normal(size=(N, N)), -1) + np.diag(RNG.uniform(0.5, 1.5, size=N))
C = ROOT @ ROOT.T
FACTOR = RNG.normal(size=(N, 2))
NEIGHBOURS = (np.abs(np.arange(N)[:, None] - np.arange(N)) == 1).astype(float)
RING = np.array([2.0, 0.5, 0.2, 0.1, 0.2, 0.5])
A = np.array([[0.9, 0.2], [0.0, 0.7]])
SQUARE = RNG.normal(size=(3, 2))


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def states():
    """Covariance of three steps of z_t = A z_(t-1) + e_t from z_0: what each noise moves."""
    whole = np.zeros((6, 6))
    for k in range(3):
        moved = [np.linalg.matrix_power(A, t - k) if t >= k else np.zeros((2, 2)) for t in range(3)]
        whole += np.concatenate(moved) @ np.concatenate(moved).T
    return whole


def kron(size, column):
    return np.kron(C[:size, :size], C[6 - column :, 6 - column :])


LOC = M * np.ones(N)
# distribution, mean, covariance of its entries, values, the axis of rows
NORMAL = {
    "covariance": (lambda: dist.MultivariateNormal(LOC, S**2 * C), M, S**2 * C, Y, 0),
    "root": (lambda: dist.MultivariateNormal(M, scale_tril=S * ROOT), M, S**2 * C, Y, 0),
    "precision": (
        lambda: dist.MultivariateNormal(M, precision_matrix=C / S**2),
        M,
        S**2 * np.linalg.inv(C),
        Y,
        0,
    ),
    "low rank": (
        lambda: dist.LowRankMultivariateNormal(LOC, FACTOR, S**2 * np.ones(N)),
        M,
        FACTOR @ FACTOR.T + S**2 * np.eye(N),
        Y,
        0,
    ),
    "walk": (lambda: dist.GaussianRandomWalk(S, N), 0.0, S**2 * np.tri(N) @ np.tri(N).T, Y, 0),
    "neighbours": (
        lambda: dist.CAR(M, 0.7, S, NEIGHBOURS),
        M,
        np.linalg.inv(S * (np.diag(NEIGHBOURS.sum(axis=0)) - 0.7 * NEIGHBOURS)),
        Y,
        0,
    ),
    "ring": (lambda: dist.CirculantNormal(LOC, RING), M, scipy.linalg.circulant(RING), Y, 0),
    "matrix, rows": (
        lambda: dist.MatrixNormal(M * np.ones((3, 2)), ROOT[:3, :3], np.linalg.cholesky(C[4:, 4:])),
        M,
        kron(3, 2),
        SQUARE,
        0,
    ),
    "matrix, columns": (
        lambda: dist.MatrixNormal(M * np.ones((3, 2)), ROOT[:3, :3], np.linalg.cholesky(C[4:, 4:])),
        M,
        kron(3, 2),
        SQUARE,
        1,
    ),
    "states": (lambda: dist.GaussianStateSpace(3, A, np.eye(2)), 0.0, states(), SQUARE, 0),
    # two independent series of the same three times: rows are times
    "series": (
        lambda: dist.MultivariateNormal(M, C[:3, :3]).expand([2]),
        M,
        np.kron(np.eye(2), C[:3, :3]),
        SQUARE.T,
        1,
    ),
}


@pytest.mark.parametrize("name", NORMAL)
def test_any_set_of_rows(name):
    make, mean, covariance, y, axis = NORMAL[name]
    n = y.shape[axis]
    masks = np.array([np.arange(n) % 3 != 1, np.arange(n) == 1, np.ones(n, bool)])

    @jax.jit
    def all_at_once(masks):
        distribution = make()
        assert is_normal(distribution)
        joint = jax.vmap(lambda rows: joint_log_density(distribution, y, rows, axis))(masks)
        drawn = joint_draw(jax.random.key(1), distribution, y, masks[0], axis)
        return joint, drawn, distribution.log_prob(y).sum()

    joint, drawn, own = all_at_once(masks)
    entries = (
        np.broadcast_to(np.expand_dims(masks, 2 - axis), (3, *y.shape)) if y.ndim > 1 else masks
    )
    for found, seen in zip(joint, entries, strict=True):
        part = covariance[np.ix_(seen.ravel(), seen.ravel())]
        exact = stats.multivariate_normal(np.full(len(part), mean), part)
        assert float(found) == pytest.approx(exact.logpdf(y[seen]), abs=1e-9)
    assert float(joint[2]) == pytest.approx(float(own), abs=1e-9)
    seen = entries[0]
    np.testing.assert_allclose(np.asarray(drawn)[seen], y[seen], atol=1e-8)
    assert not np.isclose(np.asarray(drawn)[~seen], y[~seen]).any()


def test_other_distributions_are_not_normal():
    heavy = dist.MultivariateStudentT(4.0, jnp.zeros(N), jnp.eye(N))
    assert not is_normal(heavy) and not is_normal(dist.Dirichlet(jnp.ones(N)))


# ---------------------------------------------------------------- a local level


class LocalLevel:
    """A level that walks at random, seen with noise 1; the walk's sd has the prior exp(N(-1, 1)).

    Answers by a Kalman filter that steps over unseen rows, and quadrature over the sd.
    """

    n, first = 16, 4.0

    def __init__(self):
        rng = np.random.default_rng(3)
        self.y = rng.normal(0, 2) + rng.normal(0, 0.5, self.n).cumsum() + rng.normal(size=self.n)
        self.z, weight = np.polynomial.hermite_e.hermegauss(60)
        self.log_prior = np.log(weight / weight.sum())
        self.walk = np.exp(2 * (self.z - 1.0))

    def numpyro_model(self, y=None):
        sd = numpyro.sample("sd", dist.LogNormal(-1.0, 1.0))
        steps = jnp.arange(self.n)
        level = self.first + sd**2 * jnp.minimum(steps[:, None], steps)
        normal = dist.MultivariateNormal(0.0, level + jnp.eye(self.n))
        numpyro.sample("y", normal, obs=y)

    def filtered(self, rows):
        """Log density of the rows, for each sd of the quadrature."""
        level, variance = np.zeros_like(self.walk), np.full_like(self.walk, self.first)
        total = np.zeros_like(self.walk)
        for t in range(self.n):
            if rows[t]:
                total += stats.norm.logpdf(self.y[t], level, np.sqrt(variance + 1))
                gain = variance / (variance + 1)
                level, variance = level + gain * (self.y[t] - level), variance * (1 - gain)
            variance = variance + self.walk
        return total

    def log_score(self, train, test):
        seen = np.isin(np.arange(self.n), train)
        both = seen | np.isin(np.arange(self.n), test)
        evidence = [
            scipy.special.logsumexp(self.log_prior + self.filtered(r)) for r in (both, seen)
        ]
        return evidence[0] - evidence[1]

    def mean_and_variance(self, train, row):
        """Of a test row's predictive distribution, a mixture over the sd."""
        steps, moments = np.arange(self.n), []
        for walk in self.walk:
            covariance = self.first + walk * np.minimum(steps[:, None], steps) + np.eye(self.n)
            gain = covariance[row, train] @ np.linalg.inv(covariance[np.ix_(train, train)])
            moments.append(
                (gain @ self.y[train], covariance[row, row] - gain @ covariance[train, row])
            )
        mean, variance = np.array(moments).T
        seen = np.isin(steps, train)
        weight = scipy.special.softmax(self.log_prior + self.filtered(seen))
        centre = weight @ mean
        return centre, weight @ (variance + (mean - centre) ** 2)


SCHEMES = {
    "one": fw.leave_one_out(16),
    "blocks": fw.leave_group_out(np.arange(16) // 4),
    "future": fw.leave_future_out(16, start=10),
}


@pytest.fixture(scope="module")
def local_level():
    problem = LocalLevel()
    model = fw.from_numpyro(problem.numpyro_model, y=problem.y)
    return problem, model, fw.fit(model, seed=1, progress=False)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_local_level_by_kalman_filter(local_level, scheme):
    problem, model, fit = local_level
    folds = SCHEMES[scheme]
    result = fw.cross_validate(model, folds, fit, seed=2, progress=False)
    exact = np.array([problem.log_score(train, test) for train, test in folds])
    z = (result.folds["elpd"].values - exact) / result.folds["mcse"].values
    assert np.abs(z).max() < 4 and np.sqrt(np.mean(z**2)) < 1.8
    assert result.mcse < 0.2 and (result.folds["status"] == "fine").all()


def test_the_density_is_numpyros_own(local_level):
    problem, model, _ = local_level
    position = {"sd": jnp.asarray(0.3)}
    own = float(model.log_prior(position) + model.log_likelihood(position).sum())
    theirs = potential_energy(problem.numpyro_model, (), {"y": problem.y}, position)
    assert own == pytest.approx(-float(theirs), abs=1e-9)


@pytest.mark.parametrize("method", ["auto", "mcmc"])
def test_replicates_given_the_training_rows(local_level, method):
    problem, model, fit = local_level
    folds = SCHEMES["one"][::4]
    result = fw.cross_validate(
        model, folds, fit, ("log", "dss", "mse"), method=method, seed=3, progress=False
    )
    moments = [problem.mean_and_variance(train, int(test[0])) for train, test in folds]
    mean, variance = np.array(moments).T
    error = (problem.y[::4] - mean) ** 2
    for name, exact in (("dss", -np.log(variance) - error / variance), ("mse", error)):
        table = result.score(name).folds
        z = (table["score"].values - exact) / table["mcse"].values
        assert np.abs(z).max() < 4, name
    # without the training rows the variance would be several times as large
    assert (variance < 0.6 * (problem.first + 1 + 4 * np.arange(4) * 0.3)).all()
