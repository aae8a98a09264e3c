"""Worked examples, one file each, and what they share: how a study is run and what it says.

A study has ``models(data)``, ``folds(data)`` and ``run(options)``. :func:`conduct` fits each model
to all data, cross-validates it, compares the models and puts together what was found.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from inspect import getsource
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import foldwise as fw
from foldwise.results.checkpoints import kept_fit
from foldwise.results.numbers import listed
from foldwise.results.text import WIDTH
from foldwise.results.verdict import standing
from foldwise.studies.outcome import Outcome
from foldwise.studies.output import figures
from foldwise.studies.resuming import of_model
from foldwise.support.runtime import seconds_compiling
from foldwise.support.words import duration

STUDIES = {
    "toy": "simulated groups: does a fourth covariate predict new groups better?",
    "rats": "growth of 30 rats: does a new rat need a slope of its own?",
    "radon": "radon in homes of 386 counties: does the floor help to predict a new county?",
    "air": "air passengers by month: month-on-month or year-on-year growth?",
    "poisson": "a Poisson regression of 50 counts, leave-one-out in constant memory",
}
HALF_LOG_TWO_PI = 0.5 * np.log(2.0 * np.pi)


@dataclass(frozen=True)
class Options:
    """How to run a study; None means the study's own choice.

    ``finished`` is called with the results so far whenever a model is done.
    """

    quick: bool = False
    seed: int = 1
    memory: str | None = None
    draws: int | None = None
    chains: int | None = None
    warmup: int | None = None
    target_mcse: float | None = None
    progress: bool = True
    method: str | None = None
    checkpoint: Path | None = None
    finished: Callable[[dict[str, fw.CVResult]], None] | None = field(default=None, compare=False)

    def said(self) -> dict[str, Any]:
        """What was chosen, for the report."""
        return {key: value for key, value in vars(self).items() if key != "finished"}


@dataclass(frozen=True)
class Plan:
    """A study's own run lengths and scores; ``quick_folds`` are those of a quick run."""

    draws: int
    quick_folds: slice
    warmup: int = 50
    chains: int = 4
    fit_draws: int = 1000
    fit_warmup: int = 1000
    scores: tuple[str, ...] = ("log",)
    memory: str = "draws"
    method: str = "mcmc"

    def quick(self) -> Plan:
        """A plan that takes seconds: its numbers are rough."""
        return replace(self, draws=60, warmup=30, fit_draws=300, fit_warmup=300)


def seed_of(seed: int, model: int) -> int:
    """The seed of a study's model: of the first the one given, far apart for the others."""
    return seed + 1_000_000 * model


def run(name: str, options: Options = Options()) -> Outcome:  # noqa: B008, a frozen default
    """Run the study called ``name``."""
    if name not in STUDIES:
        raise ValueError(f"the studies are {', '.join(STUDIES)}; got {name!r}")
    module = import_module(f"foldwise.studies.{name}")
    outcome: Outcome = module.run(options)
    outcome.source, outcome.title = getsource(module), f"{name}: {STUDIES[name]}"
    return outcome


# ---------------------------------------------------------------- running


def conduct(
    name: str, models: dict[str, fw.Model], folds: fw.Folds, plan: Plan, options: Options, aim: str
) -> Outcome:
    """Fit and cross-validate every model, compare them, and say what was found.

    ``aim`` completes the sentence "A predicts ... better than B".
    """
    whole = len(folds)
    if options.quick:
        plan, folds = plan.quick(), folds[plan.quick_folds]
    plan = replace(
        plan,
        **{
            key: getattr(options, key)
            for key in ("draws", "chains", "warmup", "memory", "method")
            if getattr(options, key) is not None
        },
    )
    results, fits, compiling = {}, {}, {}
    for k, (label, model) in enumerate(models.items()):
        seed, waited = seed_of(options.seed, k), seconds_compiling()
        place = of_model(options.checkpoint, [*models], label)
        lengths = {"draws": plan.fit_draws, "warmup": plan.fit_warmup, "seed": seed}
        # brute force is the paper's, on all parameters
        marginal = False if plan.method == "mcmc" else None
        made = partial(fw.fit, model, **lengths, progress=options.progress, marginal=marginal)
        beside = place and place.with_name(f"{place.name}.fit")
        fits[label] = kept_fit(beside, model, made, **lengths)
        compiling[label] = seconds_compiling() - waited
        results[label] = fw.cross_validate(
            model,
            folds,
            fit=fits[label],
            scores=plan.scores,
            chains=plan.chains,
            draws=plan.draws,
            warmup=plan.warmup,
            target_mcse=options.target_mcse,
            max_draws=max(2000, plan.draws),
            memory=plan.memory,
            method=plan.method,
            marginal=marginal,
            seed=seed,
            progress=options.progress,
            checkpoint=place,
        )
        results[label].info["given_seed"] = options.seed
        if options.finished is not None:
            options.finished(results)
    comparison = fw.compare(results) if len(results) > 1 else None
    tables = {"How it was run": run_table(results, fits, plan, compiling)}
    if options.quick:
        count = f"{len(folds)} of {whole} folds"
        tables["A quick run"] = f"Only {count} and short chains: its numbers are rough."
    return Outcome(
        name,
        results,
        comparison,
        conclusion(results, comparison, aim),
        tables,
        figures(results),
    )


# ---------------------------------------------------------------- what was found, in words


def conclusion(results: dict[str, fw.CVResult], comparison: fw.Comparison | None, aim: str) -> str:
    """The verdict on the study's question, or the score of its one model."""
    if comparison is not None:
        return f"Which model predicts {aim} better? {comparison.verdict}"
    (result,) = results.values()
    count = result.folds.sizes["fold"]
    return (
        f"The model predicts {aim} with a mean log score of {result.elpd / count:.3f} "
        f"(SE {result.se / count:.3f}, MCSE {result.mcse / count:.2g}). {standing(result)}"
    )


def run_table(
    results: dict[str, fw.CVResult],
    fits: dict[str, fw.Fit],
    plan: Plan,
    compiling: dict[str, float],
) -> str:
    """Sizes and seconds of every phase, as in the paper's tables C2 to C4.

    A line for each full-data fit, and for each way in which folds were scored: chains, weights of
    full-data draws, refits. ``prepare`` is starting points, metrics and step size; ``sample`` of
    chains is their warm-up and draws, and the posteriors in between that bridges need.
    ``compiling`` are the seconds of it in each full-data fit.
    """
    lines = [["", "folds", "chains", "warm-up", "draws", "prepare", "compile", "sample", "all, s"]]
    spent = naive = 0.0
    alone = []
    for label, fit in fits.items():
        chains, draws, _ = fit.positions.shape
        compiled = min(compiling[label], fit.seconds)
        adapted = not np.isnan(fit.step_size).all()  # else independence Metropolis: no warm-up
        alone += [] if adapted else [label]
        naive += (fit.seconds - compiled) * results[label].folds.sizes["fold"]
        sizes = ["", str(chains), str(plan.fit_warmup) if adapted else "-", str(draws), ""]
        phases = (compiled, fit.seconds - compiled, fit.seconds)
        lines.append([f"full data, {label}", *sizes, *(f"{phase:.1f}" for phase in phases)])
        spent += fit.seconds
    for label, result in results.items():
        lines += _fold_lines(label, result)
        spent += sum(s for phase, s in result.info["seconds"].items() if phase != "fit")
    used = [k for k in range(len(lines[0])) if any(line[k] for line in lines[1:])]
    lines = [[line[k] for k in used] for line in lines]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    text = [
        cells[0].ljust(widths[0])
        + "".join(cell.rjust(w + 2) for cell, w in zip(cells[1:], widths[1:], strict=True))
        for cells in lines
    ]
    notes = [f"In all {duration(spent)}."]
    if alone:
        notes.append(
            f"Full-data fits without warm-up ({listed(alone)}): parameters that all rows share by "
            "independence Metropolis from a mixture of t densities fitted to their posterior, "
            "those of groups given them."
        )
    else:
        notes[0] += (
            " Refitting every fold as the full data were fitted would take about "
            f"{duration(naive)}, compiling not counted."
        )
    return "\n".join([*text, *(textwrap.fill(note, WIDTH) for note in notes)])


def _fold_lines(label: str, result: fw.CVResult) -> list[list[str]]:
    """A line for each way in which some folds of a result were scored."""
    info, found = result.info, []
    time = dict.fromkeys(("weights", "refits", "prepare", "tune", "compile", "folds", "rungs"), 0.0)
    time |= info["seconds"]
    for title, method in (("weights", "importance"), ("refits", "refit"), ("chains", "mcmc")):
        count = int((result.folds["method"].values == method).sum())
        if not count:
            continue
        if method == "mcmc":
            sizes = [count * info["chains"], info["warmup"], info["draws"]]
            parts = time["prepare"] + time["tune"], time["compile"], time["folds"] + time["rungs"]
            numbers, seconds = [f"{part:.1f}" for part in parts], sum(parts)
        else:
            sizes, numbers, seconds = ["-", "-", "-"], ["", "", ""], time[title]
        line = [f"{title}, {label}", str(count), *map(str, sizes), *numbers, f"{seconds:.1f}"]
        found.append(line)
    return found


# ---------------------------------------------------------------- densities


def normal_log_density(y: Array, mean: Array, log_sigma: Array) -> Array:
    """Log density of N(mean, exp(log_sigma)) at y."""
    residual = (y - mean) * jnp.exp(-log_sigma)
    return -0.5 * residual**2 - log_sigma - HALF_LOG_TWO_PI


def log_gamma_prior(log_x: Array, shape: float, rate: float) -> Array:
    """Log density of log x where x ~ Gamma(shape, rate), Jacobian included, up to a constant."""
    return shape * log_x - rate * jnp.exp(log_x)
