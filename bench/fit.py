"""Effective draws per second of the full-data fit: foldwise, nutpie and NumPyro on the same models.

For each model and sampler, in a process of its own with empty caches: the smallest bulk effective
number of draws of any quantity and that of the log posterior, R-hat, and seconds of the first fit,
compiling included, and of a second one with another seed. foldwise is the fit that
``cross_validate`` makes, nutpie samples the model in PyMC, NumPyro the density that foldwise has.
Effective draws of quantities whose R-hat is over 1.05 are not effective: they count as none.
Target: the smallest effective number per second, compiling included, at least that of the better
of the two on every model, and at least 5 times it on three. Needs FOLDWISE_DATA, PyMC, nutpie,
NumPyro.

    FOLDWISE_DATA=... python bench/fit.py [--models rats,counts] [--samplers foldwise,nutpie]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

SAMPLERS = ("foldwise", "nutpie", "numpyro")
CHAINS, WARMUP, DRAWS = 4, 500, 1000
MOST_RHAT = 1.05
LEAST, FAR = 1.0, 5.0


# ---------------------------------------------------------------- models: foldwise's and PyMC's


def _study(name):
    import subjects

    def make():
        subject = subjects.SUBJECTS[name]()
        return subject.models["A"], lambda: subject.in_pymc("A")[0]

    return make


def _schools(centred):
    def make():
        import hard

        problem = hard.EightSchools(centred)

        def in_pymc():
            import pymc as pm

            with pm.Model() as model:
                mu, tau = pm.Normal("mu", 0, 5), pm.HalfCauchy("tau", 5)
                if centred:
                    theta = pm.Normal("theta", mu, tau, shape=8)
                else:
                    theta = mu + tau * pm.Normal("z", 0, 1, shape=8)
                pm.Normal("y", theta, problem.sigma, observed=problem.y)
            return model

        return problem.model(), in_pymc

    return make


def counts():
    """Counts with three covariates and an effect for every row."""
    import pymc as pm

    rng = np.random.default_rng(5)
    x = rng.normal(size=(262, 3))
    y = rng.poisson(np.exp(1.0 + x @ [0.4, -0.2, 0.1] + 0.6 * rng.normal(size=262)))
    with pm.Model() as model:
        mu, b = pm.Normal("mu", 0, 2), pm.Normal("b", 0, 1, shape=3)
        tau, z = pm.HalfNormal("tau", 1), pm.Normal("z", 0, 1, shape=262)
        pm.Poisson("y", pm.math.exp(mu + x @ b + tau * z), observed=y)
    return _of_pymc(model)


def rasch(items=30, persons=500):
    """Answers of persons of normal ability to items of unknown difficulty."""
    import pymc as pm

    rng = np.random.default_rng(6)
    person, item = (part.ravel() for part in np.indices((persons, items)))
    eta = rng.normal(size=persons)[person] - rng.normal(size=items)[item]
    y = rng.binomial(1, 1 / (1 + np.exp(-eta)))
    with pm.Model() as model:
        tau, difficulty = pm.HalfNormal("tau", 2), pm.Normal("difficulty", 0, 2, shape=items)
        ability = pm.Normal("ability", 0, 1, shape=persons)
        pm.Bernoulli("y", logit_p=tau * ability[person] - difficulty[item], observed=y)
    return _of_pymc(model)


def slopes(groups=40, rows=8):
    """Intercepts and slopes of groups, correlated with an LKJ prior; normal rows."""
    import pymc as pm

    rng = np.random.default_rng(7)
    group = np.repeat(np.arange(groups), rows)
    x = rng.normal(size=len(group))
    own = rng.normal(size=(groups, 2)) @ np.array([[0.8, 0.0], [0.3, 0.4]]).T
    y = 1.0 + own[group, 0] + (0.5 + own[group, 1]) * x + 0.7 * rng.normal(size=len(group))
    with pm.Model() as model:
        mean, sigma = pm.Normal("mean", 0, 2, shape=2), pm.HalfNormal("sigma", 1)
        chol, _, _ = pm.LKJCholeskyCov(
            "chol", n=2, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0), compute_corr=True
        )
        z = pm.Normal("z", 0, 1, shape=(groups, 2))
        effect = mean + z @ chol.T
        pm.Normal("y", effect[group, 0] + effect[group, 1] * x, sigma, observed=y)
    return _of_pymc(model)


def _of_pymc(model):
    import foldwise as fw

    return fw.from_pymc(model), lambda: model


MODELS = {
    "rats A": _study("rats"),
    "radon A": _study("radon"),
    "wells": _study("wells"),
    "eight schools, centred": _schools(True),
    "eight schools, non-centred": _schools(False),
    "counts, an effect a row": counts,
    "Rasch, 30 items, 500 persons": rasch,
    "varying slopes, LKJ": slopes,
}


# ---------------------------------------------------------------- samplers


def by_foldwise(model, in_pymc, seed):
    """Draws (chain, draw, quantity), log posterior, and seconds, of two fits."""
    from foldwise.models.evaluate import gradients
    from foldwise.sampling.full_data import full_data_fit
    from foldwise.support.progress import Progress
    from foldwise.support.runtime import import_for_tables

    import_for_tables()  # imports are on nobody's clock
    for k in range(2):
        began = time.perf_counter()
        with Progress(False) as bar:
            fit = full_data_fit(model, seed + k, bar, marginal=True)
        seconds = time.perf_counter() - began
        density = gradients(model, fit.flat).log_density
        yield fit.positions, density.reshape(fit.positions.shape[:2]), seconds


def by_nutpie(model, in_pymc, seed):
    """The same by nutpie; compiling is part of the first."""
    import nutpie

    from foldwise.support.runtime import cores

    program, compiled = in_pymc(), None
    for k in range(2):
        began = time.perf_counter()
        compiled = compiled or nutpie.compile_pymc_model(program)
        trace = nutpie.sample(
            compiled,
            draws=DRAWS,
            tune=WARMUP,
            chains=CHAINS,
            cores=cores(),
            seed=seed + k,
            progress_bar=False,
        )
        seconds = time.perf_counter() - began
        free = [value.name for value in program.free_RVs]
        draws = [np.asarray(trace.posterior[n]).reshape(CHAINS, DRAWS, -1) for n in free]
        yield np.concatenate(draws, axis=2), np.asarray(trace.sample_stats["logp"]), seconds


def by_numpyro(model, in_pymc, seed):
    """The same by NumPyro's NUTS, chains on devices of their own."""
    import jax
    import jax.numpy as jnp
    import numpyro as package
    from numpyro.infer import MCMC, NUTS, init_to_value

    def program():
        real = package.distributions.constraints.real_vector
        flat = package.distributions.ImproperUniform(real, (), (model.dimension,))
        q = package.sample("q", flat)
        package.factor("density", model.flat_log_prior(q) + model.flat_log_likelihood(q).sum())

    with jax.enable_x64(True):

        def chain(key, start):
            mcmc = MCMC(
                NUTS(program, init_strategy=init_to_value(values={"q": start})),
                num_warmup=WARMUP,
                num_samples=DRAWS,
                progress_bar=False,
            )
            mcmc.run(key, extra_fields=("potential_energy",))
            return mcmc.get_samples()["q"], -mcmc.get_extra_fields()["potential_energy"]

        chains = jax.pmap(chain)
        for k in range(2):
            began = time.perf_counter()
            keys = jax.random.split(jax.random.key(seed + k), CHAINS)
            starts = jnp.stack([jnp.asarray(model.initial(key)) for key in keys])
            q, density = (np.asarray(part) for part in chains(keys, starts))
            yield q, density, time.perf_counter() - began


# ---------------------------------------------------------------- each in a process of its own


def one(name, sampler, seed):
    """What a sampler gave on a model."""
    from foldwise.scores.diagnostics import by_parameter

    warnings.simplefilter("ignore")
    model, in_pymc = MODELS[name]()
    if sampler == "nutpie":
        in_pymc()  # building a model is on nobody's clock
    run = {"foldwise": by_foldwise, "nutpie": by_nutpie, "numpyro": by_numpyro}[sampler]
    found = []
    for draws, density, seconds in run(model, in_pymc, seed):
        moving = draws[:, :, np.ptp(draws, axis=(0, 1)) > 0]
        ess, rhat = by_parameter("ess", moving), by_parameter("rhat", moving)
        worst = float(np.where(rhat <= MOST_RHAT, ess, 0.0).min())
        of_density = float(by_parameter("ess", density[:, :, None])[0])
        found.append(
            {"ess": worst, "density": of_density, "rhat": float(rhat.max()), "seconds": seconds}
        )
    return found


def alone(name, sampler, seed):
    """The same in a process of its own, its caches empty."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", __file__, "--child", str(file)]
        command += ["--models", name, "--samplers", sampler, "--seed", str(seed)]
        flags = [*filter(None, os.environ.get("PYTENSOR_FLAGS", "").split(","))]
        caches = {
            "FOLDWISE_CACHE": f"{folder}/foldwise",
            "NUMBA_CACHE_DIR": f"{folder}/numba",
            "PYTENSOR_FLAGS": ",".join([*flags, f"base_compiledir={folder}/pytensor"]),
        }
        if sampler == "numpyro":
            caches["FOLDWISE_DEVICES"] = str(CHAINS)
        subprocess.run(command, env={**os.environ, **caches}, check=True)
        return json.loads(file.read_text())


def table(name, samplers, seed):
    """Print the lines of a model; returns how many times the better rival foldwise is."""
    rate, model = {}, name
    for sampler in samplers:
        first, again = runs = alone(model, sampler, seed)
        rate[sampler] = first["ess"] / first["seconds"]
        print(
            f"{name:30}{sampler:10}{first['ess']:8.0f}{first['density']:8.0f}"
            f"{max(run['rhat'] for run in runs):8.3f}{first['seconds']:9.2f}{again['seconds']:9.2f}"
            f"{rate[sampler]:10.1f}{again['ess'] / again['seconds']:10.1f}"
            f"{first['density'] / first['seconds']:10.1f}",
            flush=True,
        )
        name = ""
    rivals = [value for sampler, value in rate.items() if sampler != "foldwise"]
    if "foldwise" not in rate or not rivals:
        return None
    best = max(rivals)
    return rate["foldwise"] / best if best > 0 else np.inf


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="")
    parser.add_argument("--samplers", default=",".join(SAMPLERS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        found = one(arguments.models, arguments.samplers, arguments.seed)
        arguments.child.write_text(json.dumps(found))
        return
    chosen = [
        name
        for name in MODELS
        if not arguments.models or any(part in name for part in arguments.models.split(","))
    ]
    print(
        f"{'model':30}{'sampler':10}{'ess':>8}{'of lp':>8}{'R-hat':>8}{'seconds':>9}{'again':>9}"
        f"{'ess/s':>10}{'again':>10}{'lp ess/s':>10}",
        flush=True,
    )
    times = {}
    for name in chosen:
        samplers = arguments.samplers.split(",")
        times[name] = table(name, samplers, arguments.seed)
    known = {name: value for name, value in times.items() if value is not None}
    if not known:
        return
    for name, value in known.items():
        print(f"{name:30}{value:8.2f} times the better rival, compiling included")
    far = sum(value >= FAR for value in known.values())
    ok = min(known.values()) >= LEAST and (far >= 3 or len(known) < len(MODELS))
    print(f"at least {LEAST:g} on all: {min(known.values()) >= LEAST}; at least {FAR:g} on {far}")
    sys.exit(not ok)


if __name__ == "__main__":
    main()
