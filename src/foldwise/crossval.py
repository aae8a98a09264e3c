"""cross_validate: the workflow, in order."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, overload

import numpy as np

from foldwise.folds.folds import Folds
from foldwise.models.evaluate import gradients_program, rows_program
from foldwise.models.family import ModelFamily
from foldwise.models.model import Model
from foldwise.models.structure import cells_at_start, find_cells, without_cells
from foldwise.results.checkpoints import identity_of, opened, seed_kept
from foldwise.results.result import CVResult, warn_of_flags
from foldwise.results.summary import summarise
from foldwise.results.weighted import all_chains, weighted_result, with_chains
from foldwise.sampling.fit import Fit, FitError, check_draws
from foldwise.sampling.full_data import full_data_fit, longer_fit
from foldwise.sampling.marginal import (
    NO_GROUPS,
    all_parameters,
    marginal_fit,
    marginal_models,
    pays,
)
from foldwise.sampling.metric import MetricShape
from foldwise.sampling.planning import check_memory
from foldwise.sampling.prepare import prepared, tune
from foldwise.sampling.refits import least_share, with_refits
from foldwise.sampling.run import Settings, fold_program
from foldwise.sampling.sample import sample
from foldwise.sampling.target import Goal, longer_fit_needed, not_reached, run_to_target
from foldwise.sampling.tuning import (
    FullDraws,
    fold_metrics_fit,
    full_data,
    partner_draws,
)
from foldwise.scores import integrals, needs
from foldwise.scores.importance import Importance, by_importance
from foldwise.scores.logscore import ESTIMATORS
from foldwise.scores.weighing import FullSample, others
from foldwise.support.checks import check_count, check_name, resolve_seed
from foldwise.support.keeping import Finished, keeper
from foldwise.support.memory import limit_of, limited
from foldwise.support.progress import Progress
from foldwise.support.runtime import import_for_tables, usual_errors
from foldwise.support.workers import working

METHODS = ("auto", "importance", "mcmc")
MEMORIES = ("draws", "online")
PRECISIONS = ("float64", "float32")
# Longer fits that are made for an error to be reached, and draws of each of their chains.
MOST_REFITS, MOST_FIT_DRAWS = 2, 10_000
# Batch means need this many batches for an error worth the name.
LEAST_BATCHES = 20


@overload
def cross_validate(model: Model, folds: Folds, *args: Any, **kwargs: Any) -> CVResult: ...


@overload
def cross_validate(
    model: ModelFamily, folds: Folds, *args: Any, **kwargs: Any
) -> dict[str, CVResult]: ...


@usual_errors()
def cross_validate(
    model: Model | ModelFamily,
    folds: Folds,
    fit: Fit | None = None,
    scores: str | tuple[str, ...] | None = None,
    chains: int = 4,
    draws: int = 100,
    warmup: int = 50,
    batch: int = 10,
    target_mcse: float | None = None,
    max_draws: int = 2000,
    method: str = "auto",
    marginal: bool | None = None,
    estimator: str = "auto",
    memory: str = "draws",
    keep: str | tuple[str, ...] = (),
    precision: str = "float64",
    seed: int | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    executor: Any = None,
    memory_limit: str | int | None = None,
) -> CVResult | dict[str, CVResult]:
    """Cross-validation score of ``model``: the log predictive density of each fold's test rows.

    Fits the model to all rows and reweights these draws for each fold, with the parameters of
    groups integrated out. Folds for which that cannot be relied on are refitted, where few
    parameters are shared, or sampled, all chains of all these folds in lock-step, from starting
    points and with tuning taken from the full-data fit; so are all folds with ``method="mcmc"``.
    The total is the sum over folds of
    log p(test rows | training rows); higher is better.

    Parameters
    ----------
    model
        What to cross-validate. For a family of models (``model_family``) the answer is a dict of
        results by name.
    folds
        Which rows each fold leaves out.
    fit
        Full-data fit of this model; made here when left out: with the parameters of groups
        integrated out (``foldwise.sampling.globals``), for small models by many short chains that
        are tuned together (``foldwise.sampling.pooled``), else, or where these fail, by NUTS.
    scores
        One name or several, all from one run; the first is the one that tables show. ``"log"`` is
        the joint log density of a fold's test rows, ``"log_pointwise"`` the sum of their log
        densities row by row; None means the second for random and stratified K-fold, the first
        elsewhere. Others need ``simulate``, ``row_log_density`` and ``y`` of the model:
        ``"hyvarinen"`` and ``"dss"`` (also ``_pointwise``), ``"crps"``, ``"scrps"``, ``"energy"``,
        ``"interval"`` (``"interval_0.5"`` for another level), ``"mse"``, ``"rmse"``, ``"mae"``,
        ``"r2"``, ``"brier"``, ``"accuracy"``.
    chains
        Chains per fold.
    draws
        Draws kept from each chain.
    warmup
        Iterations before them.
    batch
        Shortest batch of the batch-means error, in draws; doubled as a chain grows beyond 64
        batches, and in folds whose chains are slow until a batch holds four autocorrelation times.
    target_mcse
        Run on until the total's Monte Carlo error is at most this, and no chains are too slow for
        their length.
    max_draws
        Draws of each chain at which such a run stops, with a warning if it is not there.
    method
        ``"auto"`` reweights the full-data draws, with the parameters of groups integrated out.
        Where that is not reliable it samples what all rows share anew (at most 15 parameters), or
        runs chains; chains for all folds where it does not apply:
        kept draws, an ``estimator`` that was asked for, leave-future-out, and scores other than
        log scores where parameters are integrated out. ``"importance"`` never runs chains, and
        flags those folds. ``"mcmc"`` samples the posterior of every fold.
    marginal
        Whether parameters that belong to a group of rows alone are integrated out: of the full-data
        fit, the weights, and the chains of folds, which then sample what is left; where draws are
        kept or predicted from, these parameters are drawn given it. None: wherever that can be and
        pays, which it does not for chains where most are shared and no group loses all its rows.
        False: nowhere, the brute force of the paper on all parameters. True: an error says where
        it cannot be.
    estimator
        ``"mean"`` averages the predictive density over the fold's draws, ``"bridge"`` also uses
        the draws of its partner, ``"auto"`` takes the bridge wherever there is a partner.
    memory
        ``"draws"`` keeps the log score of every draw, ``"online"`` running sums only.
    keep
        What to store besides: ``"position"``, every draw of every fold, and ``"predictive"``, its
        predictive draws of the test rows; ``result.to_datatree()`` gives them.
    precision
        ``"float64"``, or ``"float32"`` for accelerators without it.
    seed
        Whole number; None draws one, which the result records. Give two models different ones.
    progress
        Whether to show a progress bar.
    checkpoint
        Folder in which all that is finished is kept. The same call again, in this process or
        another, goes on from there, to the same result; without a seed, with the seed it had.
    executor
        Who does the work of the folds (importance weights, refits, chains): an executor of
        ``concurrent.futures``, or a ``dask.distributed.Client``. The full-data fit stays here.
    memory_limit
        What this process may hold, such as ``"4GB"``; None: all that the machine, or its container,
        has free. Draws of the fit are thinned and pieces made smaller to fit in; a run that cannot
        is refused at once.
    """
    models = model.members if isinstance(model, ModelFamily) else [model]
    settings = Settings(
        scores=_score_names(scores, folds),
        estimator=estimator,
        memory=memory,
        keep=(keep,) if isinstance(keep, str) else tuple(keep),
        chains=chains,
        warmup=warmup,
        batch=batch,
        precision=precision,
        seed=resolve_seed(seed_kept(checkpoint) if seed is None else seed),
    )
    goal, seeds = Goal(draws, target_mcse, max_draws), _seeds(model, fit, settings.seed)
    _check_settings(settings, goal)
    for candidate in models:
        _check_inputs(candidate, folds, fit)
        candidate.check_shapes()
        needs.check(settings.scores, settings.keep, candidate, folds, memory)
    _check_bridge(folds, settings)
    weighted = _weighs(method, models, folds, settings, marginal)
    alone = _integrates(marginal, weighted, models, folds, settings)
    aim = {"draws": draws, "target_mcse": target_mcse, "max_draws": max_draws, "method": method}
    aim |= {} if marginal is None else {"marginal": marginal}
    aim |= {} if memory_limit is None else {"memory_limit": limit_of(memory_limit)}
    integrated = alone and not weighted and _have_cells(models)
    check_memory(models, folds, settings, goal, weighted, memory_limit, integrated)
    kept = _kept(checkpoint, lambda: identity_of(models, folds, settings, fit, **aim))
    share = None if memory_limit is None else limit_of(memory_limit)
    work = f"cross-validation{models[0].label}" if len(models) == 1 else f"{len(models)} models"
    with working(executor, models), limited(share), kept, Progress(progress, work) as bar:
        began = time.perf_counter()
        chained = not weighted and marginal is None
        _begin_to_compile(models, folds, settings, weighted, alone, chained)
        import_for_tables()
        preparing = time.perf_counter() - began
        fits = []
        for candidate, own_seed in zip(models, seeds, strict=True):
            fits.append(_fit(candidate, fit, own_seed, bar, alone, chained))
        tasks = [
            Task(candidate, folds, own_fit, replace(settings, seed=own_seed), fit is None, marginal)
            for candidate, own_fit, own_seed in zip(models, fits, seeds, strict=True)
        ]
        tasks[0] = tasks[0]._replace(preparing=preparing)
        if weighted:
            found = [_by_importance(task, goal, method == "importance", bar) for task in tasks]
        else:
            found = _by_chains(tasks, goal, bar)
    results = {str(task.model.name): result for task, result in zip(tasks, found, strict=True)}
    for task, result in zip(tasks, found, strict=True):
        if task.settings.seed != settings.seed:  # of a family, whose members have their own
            result.info["given_seed"] = settings.seed
        task.model.check_same()  # as it was when the first program was traced, to the last
        warn_of_flags(result)
    return results if isinstance(model, ModelFamily) else results[str(model.name)]


def _kept(
    checkpoint: str | os.PathLike[str] | None, identity: Callable[[], dict[str, Any]]
) -> AbstractContextManager[object]:
    """Within this, what is finished is kept in the folder ``checkpoint``, where one is given."""
    return nullcontext() if checkpoint is None else opened(checkpoint, identity())


class Task(NamedTuple):
    """A model to cross-validate, and how; ``fitted_here`` says that its fit's time counts.

    ``preparing`` are seconds in which programs were traced before the fit, which needs them first.
    ``marginal`` is what was asked for; of a model of the globals alone, ``seen`` are draws of all
    parameters and what they say of the test rows.
    """

    model: Model
    folds: Folds
    fit: Fit
    settings: Settings
    fitted_here: bool
    marginal: bool | None = None
    preparing: float = 0.0
    seen: FullDraws | None = None

    @property
    def fit_seconds(self) -> float:
        """Time of the fit, where it was made for this, with that of its programs."""
        return self.preparing + self.fit.seconds if self.fitted_here else 0.0


def _by_chains(tasks: Sequence[Task], goal: Goal, bar: Progress) -> list[CVResult]:
    """Results of tasks that are sampled side by side: chains for every fold."""
    tasks, why_all = _of_globals(tasks)
    for task in tasks:
        task.model.check_gradient()
    runs = [
        prepared(t.model, t.folds, t.fit, t.settings, goal.draws, bar, len(tasks), t.seen)
        for t in tasks
    ]
    for run, task in zip(runs, tasks, strict=True):
        run.seconds = {"fit": task.fit_seconds, **run.seconds}
    tune(runs, bar)
    sample(runs, goal.draws, bar)
    if goal.target is not None:
        run_to_target(runs, goal, goal.target, bar)
    found = [summarise(run) for run in runs]
    for result in found if why_all else ():
        result.info["sampled"] = f"sampled all parameters: {why_all}"
    return found


def _of_globals(tasks: Sequence[Task]) -> tuple[Sequence[Task], str]:
    """The same tasks with what belongs to groups alone integrated out, where that can be.

    And why not, where there are groups.
    """
    head = tasks[0]
    if head.marginal is False:
        return tasks, ""
    if reason := all_parameters(head.settings, head.model, head.folds):
        return tasks, reason if _have_cells([task.model for task in tasks]) else ""
    by_row = needs.emitted(head.settings.scores, (), head.folds, head.model, np.zeros(0)).by_row
    models, fits = [task.model for task in tasks], [task.fit for task in tasks]
    wanted = bool(head.marginal)
    found, why_not = marginal_models(models, fits, head.folds, by_row, wanted)
    if wanted and not found:
        raise ValueError(f"marginal=True needs parameters to integrate out, but {why_not}")
    if not found:
        return tasks, "" if why_not == NO_GROUPS else why_not
    alone = [
        task._replace(
            model=model,
            fit=marginal_fit(model, task.fit),
            seen=full_data(task.model, task.folds, task.fit),
        )
        for model, task in zip(found, tasks, strict=True)
    ]
    return alone, ""


def _by_importance(task: Task, goal: Goal, everything: bool, bar: Progress) -> CVResult:
    """The result of a task from its full-data draws; chains for folds that need them.

    ``everything``: no chains, and folds that need them are flagged.
    """
    found, seconds = _weights(task, everything, bar)
    for _ in range(MOST_REFITS):
        draws = _fit_draws_to_target(task, goal, found)
        if not draws:
            break
        longer = partial(longer_fit, task.model, task.fit, draws, bar, task.marginal is not False)
        task = task._replace(fit=keeper().made("longer-fit", longer))
        found, seconds = _weights(task, everything, bar)
    if not everything:
        found = _refits(task, found, seconds, bar)
    rest = np.flatnonzero(~found.used)
    if len(rest) == len(task.folds):
        return all_chains(_by_chains([task], goal, bar)[0], found, seconds)
    result = weighted_result(
        task.model, task.folds, task.fit, task.settings, goal.draws, found, seconds
    )
    if everything or not len(rest):
        if goal.target is not None and not result.mcse <= goal.target:
            reason = longer_fit_needed(task.fit, goal.target, result.mcse**2)
            warnings.warn(not_reached(goal.target, result.mcse**2, reason), stacklevel=3)
        return result
    others = task._replace(folds=task.folds[rest], fitted_here=False)
    beside = found.influence[task.settings.scores[0]]
    return with_chains(result, _by_chains([others], goal._replace(beside=beside), bar)[0])


def _weights(task: Task, everything: bool, bar: Progress) -> tuple[Importance, dict[str, float]]:
    """Scores of a task's folds from its full-data draws, and how long that took."""
    model, folds, fit, settings = task[:4]
    began = time.perf_counter()
    by_chain, length = partner_draws(fit, 1)
    draws = FullSample(by_chain.reshape(-1, model.dimension), len(by_chain), length)
    bar.start("importance weights of the folds", len(folds) * len(draws.positions))
    # other scores are weighed where there are no cells, or none are used
    plain = bool(others(settings.scores)) or task.marginal is False
    structure = without_cells(model) if plain else find_cells(model, draws.positions)
    scores, seed, least = settings.scores, settings.seed, least_share(structure, settings.scores)
    found = by_importance(
        model, structure, folds, draws, scores, everything, seed, least, bar.advance
    )
    return found, {"fit": task.fit_seconds, "weights": time.perf_counter() - began}


def _refits(task: Task, found: Importance, seconds: dict[str, float], bar: Progress) -> Importance:
    """``found`` with folds that weights cannot serve refitted, where few parameters are shared."""
    began, keeps = time.perf_counter(), keeper()
    stages = [Finished(keeps, "refit"), Finished(keeps, "refit-in-layers")]
    refits = partial(with_refits, task.model, task.folds, found, task.settings.seed, bar, stages)
    found = keeps.made("refits", refits)
    for finished in stages:
        finished.forget()
    seconds["refits"] = time.perf_counter() - began
    return found


def _fit_draws_to_target(task: Task, goal: Goal, found: Importance) -> int:
    """Draws of each chain of a longer fit that the target needs; 0 where none is made.

    Where the folds have no chains that add to the error, half of it may be the full-data draws'.
    """
    if goal.target is None or not task.fitted_here or not found.used.any():
        return 0
    variance = float(found.draws.variance(found.influence[task.settings.scores[0]]))
    most = goal.target**2 * (1.0 if found.used.all() else 0.5)
    have = len(found.draws.positions) / found.draws.chains
    if variance <= most or not np.isfinite(variance):
        return 0
    return min(int(np.ceil(1.2 * have * variance / most)), MOST_FIT_DRAWS)


def _weighs(
    method: str, models: Sequence[Model], folds: Folds, settings: Settings, marginal: bool | None
) -> bool:
    """Whether folds may be scored by importance sampling; raises where they must and can not."""
    check_name("method", method, METHODS)
    # where folds bridge to each other, as in leave-future-out, most are far from the full data
    chained = bool(((folds.partner >= 0) & (folds.partner < len(folds))).any())
    usual = settings.estimator == "auto" and settings.precision == "float64"
    if method == "mcmc" or (method == "auto" and (settings.keep or chained or not usual)):
        return False
    other = others(settings.scores)
    cells = other and marginal is not False and _have_cells(models)
    if method == "importance" and settings.keep:
        raise ValueError(
            f'method="importance" keeps no draws, but keep={settings.keep} was asked for; use '
            'method="auto" or "mcmc"'
        )
    if method == "importance" and cells:
        raise ValueError(
            f'method="importance" gives log scores where parameters of groups are integrated out, '
            f'but {", ".join(other)} was asked for; use method="auto" or "mcmc"'
        )
    return not cells


def _have_cells(models: Sequence[Model]) -> bool:
    return any(len(cells_at_start(model)) > 0 for model in models)


def _integrates(
    marginal: bool | None,
    weighted: bool,
    models: Sequence[Model],
    folds: Folds,
    settings: Settings,
) -> bool:
    """Whether parameters may be integrated out; raises where they must and can not."""
    if marginal not in (None, True, False):
        raise ValueError(f"marginal must be None, True or False, got {marginal!r}")
    reason = all_parameters(settings, models[0], folds)
    if marginal and reason and not weighted:
        raise ValueError(f"marginal=True cannot be: {reason}; leave marginal out")
    return marginal is not False and (weighted or not reason)


def _score_names(scores: str | tuple[str, ...] | None, folds: Folds) -> tuple[str, ...]:
    """Names of the scores, those that suit the folds where none are given."""
    if scores is None:
        return ("log_pointwise",) if isinstance(folds, Folds) and folds.pointwise else ("log",)
    return (scores,) if isinstance(scores, str) else tuple(scores)


def _fit(
    model: Model, fit: Fit | None, seed: int, bar: Progress, marginal: bool, chained: bool
) -> Fit:
    """The full-data fit of a model: the one given, checked, or one made here.

    ``marginal``: of what is shared alone, where parameters belong to groups; ``chained``: for folds
    that have chains.
    """
    what = "full-data fit" if fit is None else "check of the full-data draws"
    bar.start(f"{what}{model.label}")
    model.check_values()
    if fit is None:
        fit = keeper().made("fit", lambda: full_data_fit(model, seed, bar, marginal, chained))
    else:
        fit.check(model)
        if fit.made_elsewhere:
            keeper().made("fit-checked", partial(_checked, model, fit, seed))
    if reason := fit.failure():
        raise FitError(f"the full-data fit{model.label} has failed: {reason}")
    return fit


def _checked(model: Model, fit: Fit, seed: int) -> bool:
    check_draws(model, fit, seed)
    return True


def _seeds(model: Model | ModelFamily, fit: Fit | None, seed: int) -> list[int]:
    """A seed for each model."""
    if not isinstance(model, ModelFamily):
        return [seed]
    if fit is not None:
        raise ValueError("each model of a family has a fit of its own, made here; leave fit out")
    return [int(own) for own in np.random.SeedSequence(seed).generate_state(len(model))]


def _check_inputs(model: Model, folds: Folds, fit: Fit | None) -> None:
    """Raise unless model, folds and fit are what they should be, and of the same rows."""
    if not isinstance(model, Model):
        raise TypeError(
            f"model must be a foldwise.Model, got {type(model).__name__}; from_numpyro, from_pymc "
            "and from_bambi make one of a model of these packages"
        )
    if not isinstance(folds, Folds):
        raise TypeError(
            f"folds must be Folds, for example foldwise.leave_one_out(n); got "
            f"{type(folds).__name__}"
        )
    if fit is not None and not isinstance(fit, Fit):
        raise TypeError(
            f"fit must be what foldwise.fit(model) returns, got {type(fit).__name__}; for draws "
            "that you have there are foldwise.Fit.from_arviz and Fit.from_numpyro"
        )
    if folds.n != model.n_obs:
        raise ValueError(
            f"folds and model must have the same rows, but folds have n={folds.n} and the model "
            f"n_obs={model.n_obs}; build the folds from the model's data"
        )


def _check_settings(settings: Settings, goal: Goal) -> None:
    """Raise unless a run can be done so."""
    chains, batch = settings.chains, settings.batch
    for name, value, least in (
        ("chains", chains, 2),
        ("draws", goal.draws, 1),
        ("batch", batch, 1),
        ("warmup", settings.warmup, 10),
    ):
        check_count(name, value, least)
    if chains * (goal.draws // batch) < LEAST_BATCHES:
        raise ValueError(
            f"a fold needs at least {LEAST_BATCHES} batches for its Monte Carlo error, but "
            f"chains={chains} of draws={goal.draws} in batches of {batch} give "
            f"{chains * (goal.draws // batch)}; use more draws or a smaller batch"
        )
    if goal.target is not None:
        if not isinstance(goal.target, (int, float, np.number)) or not goal.target > 0:
            raise ValueError(f"target_mcse must be a positive number, got {goal.target!r}")
        if goal.most < goal.draws:
            raise ValueError(f"max_draws={goal.most} must be at least draws={goal.draws}")
    check_name("estimator", settings.estimator, ESTIMATORS)
    check_name("memory", settings.memory, MEMORIES)
    check_name("precision", settings.precision, PRECISIONS)
    if not settings.scores:
        raise ValueError("scores must name at least one score")
    for name in settings.scores:
        if not isinstance(name, str):
            raise TypeError(f'scores must be names such as "log", but one is {name!r}')
    needs.rules_of(settings.scores)


def _check_bridge(folds: Folds, settings: Settings) -> None:
    if settings.estimator != "bridge":
        return
    by_row = [n for n in ("log_pointwise", "hyvarinen_pointwise") if n in settings.scores]
    if by_row and folds.n_test.max() > 1:
        raise ValueError(
            f'estimator="bridge" needs joint scores, but {by_row[0]} was asked for folds with up '
            f'to {folds.n_test.max()} test rows; use scores="log" or estimator="auto"'
        )
    alone = int((folds.partner < 0).sum())
    if alone:
        raise ValueError(
            f'estimator="bridge" needs a partner for every fold, but {alone} of {len(folds)} have '
            "none, because training and test rows together are no other posterior's training rows "
            "(buffers, gaps, windows, a last fold that stops before the end of the data); use "
            'estimator="auto"'
        )


def _begin_to_compile(
    models: Sequence[Model],
    folds: Folds,
    settings: Settings,
    weighted: bool,
    alone: bool,
    chained: bool,
) -> None:
    """Let programs compile in the background that will be needed, whatever the fit will be.

    That of the folds only where the fit does not decide its shapes, and every fold has chains.
    ``alone``: parameters of groups are integrated out, where there are any. Where most belong to
    none, fits for ``chained`` folds, and chains, may be on all of them after all.
    """
    model = models[0]
    rows_program(model)  # what is looked at first
    by_class = any(rule.discrete for rule in needs.rules_of(settings.scores).values())
    cells_used = alone and _have_cells(models[:1])
    shared = cells_at_start(model) if cells_used else None
    on_all = shared is None or (chained and not pays(shared, folds))
    if not by_class and not weighted and on_all and fold_metrics_fit(model, folds):
        emit = needs.emitted(settings.scores, settings.keep, folds, model, np.zeros(0))
        shape = MetricShape(own=True)
        fold_program(model, folds, settings, emit, shape, len(models)).compile()
    if shared is None or (chained and shared.mostly_shared):
        gradients_program(model)
    else:
        integrals.begin_to_compile(model, shared)
