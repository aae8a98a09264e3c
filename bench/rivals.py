"""What a user might pick instead of foldwise, each as a function of a subject and a seed.

Each returns a ``Found``: log scores of the folds that were run, their Monte Carlo errors, seconds
in all and for compiling (importing the packages is not counted), and gradients. Where only a sample
of folds was run, seconds and gradients are per fold, for the caller to extrapolate.
"""

import time
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

import foldwise as fw
from foldwise.scores.diagnostics import series_variance
from foldwise.support import runtime

WARMUP, DRAWS, CHAINS = 300, 1000, 4


@dataclass
class Found:
    """What a method found of each model: ``folds`` are the positions of those that were run.

    ``mcse`` is that of the total over these folds. ``once`` are seconds that do not grow with the
    number of folds, ``each`` those per fold and model; ``compile`` is a part of ``once``.
    """

    folds: np.ndarray
    elpd: dict[str, np.ndarray] = field(default_factory=dict)
    mcse: dict[str, float] = field(default_factory=dict)
    once: float = 0.0
    each: float = 0.0
    compile: float = 0.0
    gradients_once: float = 0.0
    gradients_each: float = 0.0
    note: str = ""


def log_mean(ll):
    """Log of the mean density of draws (chain, draw), and its Monte Carlo error."""
    score = logsumexp(ll) - np.log(ll.size)
    relative = np.exp(ll - score)
    batch = max(1, int(np.sqrt(ll.shape[1])))
    return score, float(np.sqrt(series_variance(relative, batch)))


def chosen_folds(subject, count, seed):
    k = len(subject.folds)
    if count is None or count >= k:
        return np.arange(k)
    return np.sort(np.random.default_rng([seed, 77]).choice(k, count, replace=False))


# ---------------------------------------------------------------- foldwise


def foldwise(subject, seed, method, marginal=None):
    """``cross_validate`` as it comes; compiling is what it traces and waits for programs.

    Gradients are not counted for results without chains, whose fits they are.
    """
    runtime.import_for_tables()  # imports are on nobody's clock
    waited = runtime.seconds_compiling()
    found, began, fits = Found(np.arange(len(subject.folds))), time.perf_counter(), 0.0
    for k, (label, model) in enumerate(subject.models.items()):
        result = fw.cross_validate(
            model,
            subject.folds,
            method=method,
            marginal=marginal,
            seed=100 * seed + k,
            progress=False,
        )
        found.elpd[label], found.mcse[label] = result.folds["elpd"].values, result.mcse
        found.gradients_once += result.info["gradients"] + result.info["fit_gradients"]
        fits += result.info["seconds"]["fit"]
    found.once = time.perf_counter() - began
    found.compile = runtime.seconds_compiling() - waited
    found.note = f"of which full-data fits {fits:.1f} s"
    return found


# ---------------------------------------------------------------- the paper's sampler


def paper(subject, seed, folds=None):
    """Algorithm 1: HMC with five leapfrog steps, tuned and started from the full data; plain mean.

    The step size and diagonal metric are those of window adaptation on all data; chains start at
    random full-data draws, and the score is the log of the mean predictive density.
    """
    chosen = chosen_folds(subject, subject.paper_folds, seed) if folds is None else folds
    found, lengths = Found(chosen), subject.paper
    for k, (label, model) in enumerate(subject.models.items()):
        with jax.enable_x64(True):
            _paper_model(found, model, subject.folds, lengths, label, 100 * seed + k)
    return found


def _paper_fit(model, lengths):
    """Function of a key and a start: full-data draws, step size and diagonal metric of a chain."""
    import blackjax

    kernel = blackjax.hmc.build_kernel()

    def density(q):
        return model.flat_log_prior(q) + model.flat_log_likelihood(q).sum()

    def fit(key, start):
        adapt = blackjax.window_adaptation(
            blackjax.hmc,
            density,
            num_integration_steps=5,
            adaptation_info_fn=lambda *_: None,
        )
        (state, tuned), _ = adapt.run(key, start, lengths.fit_warmup)
        step, metric = tuned["step_size"], tuned["inverse_mass_matrix"]

        def one(state, key):
            state, _ = kernel(key, state, density, step, metric, 5)
            return state, state.position

        keys = jax.random.split(jax.random.fold_in(key, 1), lengths.fit_draws)
        return jax.lax.scan(one, state, keys)[1], step, metric

    return jax.vmap(fit)


def _paper_folds(model, lengths):
    """Function of keys, starts, training rows, test rows, step size and metric: log scores."""
    import blackjax

    kernel = blackjax.hmc.build_kernel()

    def chain(key, start, train, rows, valid, step, metric):
        def density(q):
            ll = model.flat_log_likelihood(q)
            return model.flat_log_prior(q) + jnp.where(train, ll, 0.0).sum()

        def one(state, key):
            state, _ = kernel(key, state, density, step, metric, 5)
            ll = model.flat_log_likelihood(state.position)[rows]
            return state, jnp.where(valid, ll, 0.0).sum()

        keys = jax.random.split(key, lengths.warmup + lengths.draws)
        return jax.lax.scan(one, blackjax.hmc.init(start, density), keys)[1][lengths.warmup :]

    shared = (None,) * 5
    return jax.vmap(jax.vmap(chain, in_axes=(0, 0, *shared)), in_axes=(0, 0, 0, 0, 0, None, None))


def _compiled(found, function, *arguments):
    """The compiled function for such arguments, made once for each model."""
    began = time.perf_counter()
    model, build, lengths = function
    key = (build.__name__, jax.tree.map(np.shape, arguments[1:]).__repr__())
    programs = model.__dict__.setdefault("_paper", {})
    if key not in programs:
        programs[key] = jax.jit(build(model, lengths)).lower(*arguments).compile()
    seconds = time.perf_counter() - began
    found.compile += seconds
    found.once += seconds
    return programs[key]


def _paper_model(found, model, folds, lengths, label, seed):
    keys = jax.random.split(jax.random.key(seed), lengths.chains)
    starts = jnp.stack([model.initial(jax.random.fold_in(one, 2)) for one in keys])
    program = _compiled(found, (model, _paper_fit, lengths), keys, starts)
    began = time.perf_counter()
    positions, steps, metrics = jax.tree.map(np.asarray, program(keys, starts))
    found.once += time.perf_counter() - began
    found.gradients_once += lengths.chains * (lengths.fit_warmup + lengths.fit_draws) * 5

    padded = np.resize(found.folds, -(-len(found.folds) // 2) * 2)
    rows, valid = folds.padded_test(padded, int(folds.n_test.max()))
    flat = positions.reshape(-1, positions.shape[-1])
    chosen = np.random.default_rng([seed, 1]).integers(
        len(flat), size=(len(padded), lengths.chains)
    )
    keys = jax.random.split(jax.random.key(seed + 1), (len(padded), lengths.chains))
    mesh = jax.make_mesh((jax.local_device_count(),), ("fold",))
    by_fold = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fold"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = jax.device_put((keys, flat[chosen], folds.train_mask(padded), rows, valid), by_fold)
    tuned = jax.device_put((np.median(steps), metrics.mean(axis=0)), everywhere)
    program = _compiled(found, (model, _paper_folds, lengths), *arguments, *tuned)
    began = time.perf_counter()
    ll = np.asarray(program(*arguments, *tuned))[: len(found.folds)]
    found.each += (time.perf_counter() - began) / len(found.folds)
    found.gradients_each += lengths.chains * (lengths.warmup + lengths.draws) * 5
    scores = [log_mean(fold) for fold in ll]
    found.elpd[label] = np.array([score for score, _ in scores])
    found.mcse[label] = float(np.sqrt(sum(error**2 for _, error in scores)))


# ---------------------------------------------------------------- refits one by one


def nutpie(subject, seed, folds=None):
    """PyMC model compiled once by nutpie, the training rows swapped as data."""
    import nutpie as sampler
    import pymc  # noqa: F401, imports are on nobody's clock

    chosen = chosen_folds(subject, subject.refits, seed) if folds is None else folds
    found = Found(chosen)
    for k, label in enumerate(subject.models):
        began = time.perf_counter()
        program, by_row = subject.in_pymc(label)
        compiled = sampler.compile_pymc_model(program)
        found.compile += time.perf_counter() - began
        scores, began = [], time.perf_counter()
        for fold in chosen:
            train = subject.folds.train_mask(np.array([fold]))[0].astype(float)
            trace = sampler.sample(
                compiled.with_data(train=train),
                draws=DRAWS,
                tune=WARMUP,
                chains=CHAINS,
                cores=runtime.cores(),
                seed=10_000 * seed + 1000 * k + int(fold),
                save_warmup=True,
                progress_bar=False,
            )
            draws = {
                name: np.asarray(values).reshape(CHAINS * DRAWS, *values.shape[2:])
                for name, values in trace.posterior.data_vars.items()
            }
            test = subject.folds.test(int(fold))
            ll = by_row(draws, test).sum(axis=1)
            scores.append(log_mean(ll.reshape(CHAINS, DRAWS)))
            for group in (trace.sample_stats, trace.warmup_sample_stats):
                found.gradients_each += float(group["n_steps"].sum()) / len(chosen)
        found.each += (time.perf_counter() - began) / len(chosen)
        found.elpd[label] = np.array([score for score, _ in scores])
        found.mcse[label] = float(np.sqrt(sum(error**2 for _, error in scores)))
    found.once = found.compile
    return found


def numpyro(subject, seed, folds=None):
    """NumPyro's NUTS compiled once, the training rows an argument."""
    import numpyro as package
    from numpyro.infer import MCMC, NUTS, init_to_value

    chosen = chosen_folds(subject, subject.refits, seed) if folds is None else folds
    found = Found(chosen)
    for k, (label, model) in enumerate(subject.models.items()):

        def program(train, model=model):
            real = package.distributions.constraints.real_vector
            flat = package.distributions.ImproperUniform(real, (), (model.dimension,))
            q = package.sample("q", flat)
            rows = jnp.where(train, model.flat_log_likelihood(q), 0.0)
            package.factor("density", model.flat_log_prior(q) + rows.sum())

        with jax.enable_x64(True):
            start = init_to_value(values={"q": model.initial(jax.random.key(0))})

            def chain(key, train, program=program, start=start):
                mcmc = MCMC(
                    NUTS(program, init_strategy=start),
                    num_warmup=WARMUP,
                    num_samples=DRAWS,
                    progress_bar=False,
                )
                mcmc.run(key, train, extra_fields=("num_steps",))
                return mcmc.get_samples()["q"], mcmc.get_extra_fields()["num_steps"]

            # MCMC(num_chains=4) itself would compile anew in every run
            chains = jax.pmap(chain, in_axes=(0, None))
            at_test = jax.jit(
                lambda q, rows, model=model: jax.lax.map(
                    lambda one: model.flat_log_likelihood(one)[rows].sum(), q
                )
            )
            scores, seconds = [], []
            for fold in (chosen[0], *chosen):  # the first of them once more, to compile
                began = time.perf_counter()
                train = jnp.asarray(subject.folds.train_mask(np.array([fold]))[0])
                key = jax.random.key(10_000 * seed + 1000 * k + int(fold))
                q, steps = chains(jax.random.split(key, CHAINS), train)
                q = np.asarray(q).reshape(CHAINS * DRAWS, -1)
                ll = np.asarray(at_test(q, subject.folds.test(int(fold))))
                scores.append(log_mean(ll.reshape(CHAINS, DRAWS)))
                seconds.append(time.perf_counter() - began)
                found.gradients_each += float(steps.sum()) / len(chosen) * (len(scores) > 1)
        found.each += float(np.mean(seconds[1:]))
        found.compile += max(seconds[0] - float(np.mean(seconds[1:])), 0.0)
        found.elpd[label] = np.array([score for score, _ in scores[1:]])
        found.mcse[label] = float(np.sqrt(sum(error**2 for _, error in scores[1:])))
    found.once, found.note = found.compile, "gradients without warm-up"
    return found


# ---------------------------------------------------------------- importance sampling


def psis(subject, seed):
    """Pareto-smoothed importance sampling from one full-data fit (arviz-stats)."""
    from arviz_stats.base import array_stats

    from foldwise.models.evaluate import rows_at

    found, began, beyond = Found(np.arange(len(subject.folds))), time.perf_counter(), []
    for k, (label, model) in enumerate(subject.models.items()):
        fit = fw.fit(model, seed=100 * seed + k, progress=False)
        rows = np.concatenate([part for _, part in rows_at(model, fit.flat)])
        scores, errors = [], []
        for fold in range(len(subject.folds)):
            train = subject.folds.train_mask(np.array([fold]))[0]
            left_out = rows[:, ~train].sum(axis=1)
            log_weight, k_hat = array_stats.psislw(left_out)  # of weights 1 / exp(left_out)
            log_weight = log_weight - logsumexp(log_weight)
            ll = rows[:, subject.folds.test(fold)].sum(axis=1)
            score = logsumexp(log_weight + ll)
            scores.append(score)
            beyond.append(float(k_hat) > 0.7)
            terms = np.exp(log_weight) * (np.exp(ll - score) - 1.0) * len(ll)
            errors.append(series_variance(terms.reshape(fit.positions.shape[0], -1), 31))
        found.elpd[label] = np.array(scores)
        found.mcse[label] = float(np.sqrt(np.sum(errors)))
        found.gradients_once += fit.gradients
    found.once = time.perf_counter() - began
    found.note = f"Pareto k over 0.7 in {np.mean(beyond):.0%} of folds"
    return found


METHODS = {
    "foldwise": partial(foldwise, method="mcmc", marginal=False),
    "globals": partial(foldwise, method="mcmc"),
    "auto": partial(foldwise, method="auto"),
    "paper": paper,
    "nutpie": nutpie,
    "numpyro": numpyro,
    "psis": psis,
}
TITLES = {
    "foldwise": "foldwise, chains",
    "globals": "foldwise, chains on what is shared",
    "auto": "foldwise, auto",
    "paper": "the paper's sampler",
    "nutpie": "nutpie refits",
    "numpyro": "NumPyro refits",
    "psis": "PSIS",
}


def gradient_seconds(subject):
    """Seconds of one gradient of the first model as a compiled loop over contiguous data."""
    gradient = subject.loop()
    gradient()
    best = np.inf
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(200):
            gradient()
        best = min(best, (time.perf_counter() - began) / 200)
    return best
