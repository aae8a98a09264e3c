"""The batched HMC step: its random numbers, what it accepts, and how its step sizes adapt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blackjax.adaptation.step_size import dual_averaging_adaptation
from scipy import stats

from foldwise.sampling import kernel
from foldwise.sampling.kernel import ChainState, Moment, StepSize, hmc_step
from foldwise.sampling.metric import FoldMetric
from foldwise.support.runtime import precision_context

# ---------------------------------------------------------------- random numbers

ITERATIONS, FOLDS, CHAINS, SIZE = 400, 8, 4, 31
# chance of a failure by bad luck alone, in each test of a hypothesis
LUCK = 1e-5


def randomness(keys, counter, size, precision="float64"):
    with precision_context(precision):
        found = jax.jit(kernel._randomness, static_argnums=2)(keys, counter, size)
        return [np.asarray(part) for part in found]


@pytest.fixture(scope="module")
def keys(seed):
    """Keys as alike as keys can be: neighbouring numbers."""
    fold, chain = np.meshgrid(np.arange(FOLDS), seed + np.arange(CHAINS), indexing="ij")
    return np.stack([fold, chain], axis=-1).astype(np.uint32)


@pytest.fixture(scope="module")
def numbers(keys):
    """Normals (iteration, fold, chain, size) and log uniforms (iteration, fold, chain)."""

    def of_iteration(counter):
        return kernel._randomness(keys, jnp.full(FOLDS, counter), SIZE)

    with precision_context("float64"):
        noise, log_uniform = jax.jit(jax.vmap(of_iteration))(jnp.arange(ITERATIONS))
        return np.asarray(noise), np.asarray(log_uniform)


@pytest.fixture(scope="module")
def all_normals(numbers):
    """The uniforms as normals, too, in the last place: (iteration, fold, chain, size + 1)."""
    noise, log_uniform = numbers
    return np.concatenate([noise, stats.norm.ppf(np.exp(log_uniform))[..., None]], axis=-1)


# raw moments of a standard normal: order, value, variance of a single power
@pytest.mark.parametrize("order, value, variance", [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)])
def test_moments_of_the_normals(numbers, order, value, variance):
    noise = numbers[0]
    error = np.sqrt(variance / noise.size)
    assert abs(np.mean(noise**order) - value) < 4.5 * error


def test_normals_and_uniforms_have_their_distributions(numbers):
    noise, log_uniform = numbers
    assert stats.kstest(noise.ravel(), "norm").pvalue > LUCK
    assert stats.kstest(np.exp(log_uniform).ravel(), "uniform").pvalue > LUCK
    assert np.all(log_uniform < 0.0)


@pytest.mark.parametrize("beyond", [2.0, 3.0, 4.0])
def test_tails_of_the_normals(numbers, beyond):
    noise = numbers[0]
    for side in (noise, -noise):
        count = int((side > beyond).sum())
        assert stats.binomtest(count, noise.size, stats.norm.sf(beyond)).pvalue > LUCK


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_no_word_gives_an_infinite_number(monkeypatch, precision, word):
    monkeypatch.setattr(
        "foldwise.support.noise.threefry_2x32", lambda key, count: jnp.full_like(count, word)
    )
    key, counter = np.zeros((1, 1, 2), np.uint32), np.zeros(1, np.int32)
    noise, log_uniform = randomness(key, counter, 3, precision)
    # the outermost of 2^32 numbers, or in single precision one rounding from the edge
    outermost = {"float64": stats.norm.isf(2.0**-33), "float32": stats.norm.isf(2.0**-24)}
    np.testing.assert_allclose(np.abs(noise), outermost[precision], rtol=1e-6)
    assert np.all(np.isfinite(log_uniform)) and np.all(log_uniform <= 0.0)


def assert_uncorrelated(series):
    """All pairs of rows are uncorrelated, and so are their sizes."""
    count, length = series.shape
    above = np.triu_indices(count, 1)
    for values in (series, np.abs(series)):
        z = np.sqrt(length) * np.corrcoef(values)[above]
        assert np.abs(z).max() < stats.norm.isf(LUCK / len(z) / 2)
        assert abs(np.mean(z**2) - 1.0) < 5.0 * np.sqrt(2.0 / len(z))


def test_chains_and_folds_are_independent(all_normals):
    by_chain = all_normals.transpose(1, 2, 0, 3).reshape(FOLDS * CHAINS, -1)
    assert_uncorrelated(by_chain)
    # nor with another chain's next iteration
    shifted = all_normals[1:].transpose(1, 2, 0, 3).reshape(FOLDS * CHAINS, -1)
    before = all_normals[:-1].transpose(1, 2, 0, 3).reshape(FOLDS * CHAINS, -1)
    assert_uncorrelated(np.concatenate([before, shifted]))


def test_iterations_are_independent(all_normals):
    assert_uncorrelated(all_normals.reshape(ITERATIONS, -1))


def test_numbers_of_one_iteration_are_independent(all_normals):
    assert_uncorrelated(all_normals.reshape(-1, SIZE + 1).T)


def test_numbers_are_as_seldom_equal_as_random_words(all_normals):
    words = np.round(stats.norm.cdf(all_normals).ravel() * 2.0**32 - 0.5)
    equal = len(words) - len(np.unique(words))
    assert stats.poisson.sf(equal, len(words) ** 2 / 2.0**33) > LUCK


def test_a_chain_has_the_same_numbers_whatever_runs_beside_it(keys):
    counter = np.arange(10, 10 + FOLDS, dtype=np.int32)
    noise, log_uniform = randomness(keys, counter, SIZE)
    alone = randomness(keys[5:6, 2:3], counter[5:6], SIZE)
    np.testing.assert_array_equal(alone[0], noise[5:6, 2:3])
    np.testing.assert_array_equal(alone[1], log_uniform[5:6, 2:3])


@pytest.mark.parametrize("size", [1, 4])
def test_there_are_as_many_numbers_as_asked_for(keys, size):
    noise, log_uniform = randomness(keys, np.zeros(FOLDS, np.int32), size)
    assert noise.shape == (FOLDS, CHAINS, size) and log_uniform.shape == (FOLDS, CHAINS)
    assert len(np.unique(noise)) == noise.size


# ---------------------------------------------------------------- the step and its size


def normal(q):
    """A standard normal and one score."""
    return -0.5 * jnp.sum(q**2, axis=-1), -q, jnp.sum(q, axis=-1)


def chains_of(density, q, log_step):
    log_step = jnp.asarray(log_step)
    sizes = StepSize(log_step, log_step, jnp.zeros_like(log_step), log_step)
    return ChainState(q, *density(q), sizes)


def run(density, metric, seed, warmup, draws, n_steps, target, chains=16):
    """Chains from the origin: steps after warm-up, acceptance (draw, fold), and positions."""
    folds, d = metric.covariance.shape[:2]
    keys = np.random.default_rng([seed, 1]).integers(
        2**32, size=(folds, chains, 2), dtype=np.uint32
    )

    def body(state, i):
        state, info = hmc_step(
            state,
            keys,
            jnp.full(folds, i),
            n_steps,
            Moment(i, i < warmup, target, jnp.bool_(False)),
            density,
            metric,
        )
        recorded = info.acceptance.mean(axis=1), state.position, state.step_size
        return state, recorded

    with precision_context("float64"):
        start = chains_of(density, jnp.zeros((folds, chains, d)), jnp.full(folds, jnp.log(0.01)))
        iterations = jnp.arange(warmup + draws)
        _, found = jax.jit(lambda state: jax.lax.scan(body, state, iterations))(start)
        acceptance, position, sizes = jax.tree.map(lambda a: np.asarray(a)[warmup:], found)
    for part in sizes:
        np.testing.assert_array_equal(part, part[[0] * draws])  # nothing adapts after warm-up
    return np.exp(sizes.log_step_average[0]), acceptance, position


def test_step_sizes_reach_their_target_acceptance(seed):
    # scales differ, so that no number of steps is a whole period in all directions
    scale, target = np.linspace(0.2, 0.8, 20), np.array([0.8, 0.95, 0.99])
    unit = FoldMetric(*np.stack([[np.eye(len(scale))] * 3] * 2))

    def narrow(q):
        return -0.5 * jnp.sum((q / scale) ** 2, axis=-1), -q / scale**2, jnp.sum(q, axis=-1)

    step, acceptance, position = run(narrow, unit, seed, 500, 300, jnp.array([3, 5, 7]), target)
    assert np.all(step < kernel.LARGEST_STEP)
    np.testing.assert_allclose(acceptance.mean(axis=0), target, atol=0.03)
    # what is accepted are draws of the posterior
    np.testing.assert_allclose(np.mean((position / scale) ** 2, axis=(0, 2, 3)), 1.0, atol=0.06)


def test_steps_do_not_grow_beyond_the_largest(seed):
    unit = FoldMetric(*np.ones((2, 1, 1, 1)))
    step, acceptance, _ = run(normal, unit, seed, 300, 100, jnp.array([2]), np.array([0.8]))
    assert step[0] == pytest.approx(kernel.LARGEST_STEP, rel=0.01)
    assert acceptance.mean() > 0.85


def adapted(acceptance, start, target):
    """Log steps, their averages and errors after each acceptance, of one fold."""
    log_step = jnp.array([np.log(start)])
    state = StepSize(log_step, jnp.zeros(1), jnp.zeros(1), log_step + np.log(10.0))
    found = []
    for t, value in enumerate(acceptance):
        state = kernel._adapt(state, jnp.array([value]), jnp.int32(t), jnp.array([target]))
        found.append([float(part[0]) for part in state[:3]])
    return np.array(found).T


def by_blackjax(acceptance, start, target):
    init, update, _ = dual_averaging_adaptation(target, t0=10, gamma=0.05, kappa=0.75)
    state, found = init(start), []
    for value in acceptance:
        state = update(state, value)
        found.append([float(state.log_step_size), float(state.avg_error)])
    return np.array(found).T


@pytest.mark.parametrize("target", [0.8, 0.95])
def test_dual_averaging_is_that_of_blackjax(rng, target):
    acceptance, start = rng.uniform(0.5, 1.0, size=100), 1e-8
    with precision_context("float64"):
        log_step, average, error = adapted(acceptance, start, target)
        expected, expected_error = by_blackjax(acceptance, start, target)
    assert log_step.max() < np.log(kernel.LARGEST_STEP) and np.ptp(log_step) > 0.5
    np.testing.assert_allclose(log_step, expected, rtol=1e-12)
    np.testing.assert_allclose(error, expected_error, rtol=1e-12, atol=1e-14)
    # The average counts the step just found, as in Hoffman and Gelman (2014) and in Stan;
    # BlackJAX's counts the one before.
    own = 0.0
    for t, value in enumerate(log_step, start=1):
        own = t**-0.75 * value + (1.0 - t**-0.75) * own
        assert average[t - 1] == pytest.approx(own, rel=1e-12)


def test_dual_averaging_is_capped_and_comes_down_again():
    acceptance = np.concatenate([np.ones(30), np.zeros(30)])
    with precision_context("float64"):
        log_step, average, error = adapted(acceptance, 0.1, 0.8)
        expected, expected_error = by_blackjax(acceptance, 0.1, 0.8)
    largest = np.log(kernel.LARGEST_STEP)
    assert expected.max() > largest > expected.min()
    np.testing.assert_allclose(log_step, np.minimum(expected, largest), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(error, expected_error, rtol=1e-12, atol=1e-14)
    assert average.max() <= largest


def test_refreshing_moves_nothing_and_evaluates_the_density(rng):
    folds, chains, d = 2, 3, 3
    metric = FoldMetric(*np.stack([[np.eye(d)] * folds] * 2))
    with precision_context("float64"):
        q = jnp.asarray(rng.normal(size=(folds, chains, d)))
        state = chains_of(normal, q, jnp.log(jnp.array([0.1, 0.2])))
        empty = state._replace(
            log_density=jnp.zeros((folds, chains)),
            gradient=jnp.zeros_like(q),
            scores=jnp.zeros((folds, chains)),
        )
        keys = rng.integers(2**32, size=(folds, chains, 2), dtype=np.uint32)
        now, info = jax.jit(hmc_step, static_argnames="density")(
            empty,
            keys,
            jnp.zeros(folds, int),
            jnp.array([3, 5]),
            Moment(jnp.int32(0), jnp.bool_(True), jnp.full(folds, 0.8), jnp.bool_(True)),
            normal,
            metric,
        )
        assert bool(info.moved.all())
        for mine, theirs in zip(jax.tree.leaves(now), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-14)
