"""Results taken further."""

from __future__ import annotations

from foldwise.models.model import Model
from foldwise.results.files import restore_run
from foldwise.results.result import CVResult, warn_of_flags
from foldwise.results.summary import summarise
from foldwise.results.weighted import with_chains
from foldwise.sampling.run import Run
from foldwise.sampling.sample import sample
from foldwise.support.checks import check_count
from foldwise.support.progress import Progress
from foldwise.support.runtime import usual_errors


@usual_errors()
def extended(result: CVResult, draws: int, model: Model | None, progress: bool) -> CVResult:
    """The result after ``draws`` more draws of every chain.

    Of ``result`` only its run changes, where that had to be restored.
    """
    if result.run is None:
        result.run = _restored(result, model)
    longer = extend(result.run, draws, progress)
    if result.weighted is not None:
        longer = with_chains(result.weighted, longer)
    for told in ("given_seed", "sampled"):
        if told in result.info:
            longer.info[told] = result.info[told]
    warn_of_flags(longer, stacklevel=5)
    return longer


def extend(run: Run, draws: int, progress: bool = True) -> CVResult:
    """Result of ``run`` after ``draws`` more draws of every chain; ``run`` itself is unchanged."""
    check_count("draws", draws, 1)
    run.model.check_shapes()
    longer = run.copy()
    with Progress(progress, f"more draws{run.model.label}") as bar:
        sample([longer], draws, bar)
    return summarise(longer)


def _restored(result: CVResult, model: Model | None) -> Run:
    """The run of a result that was loaded from a file."""
    if "state" not in result.info and not (result.folds["method"].values == "mcmc").any():
        raise ValueError(
            "extend runs chains further, but this result has none: its scores come from the "
            "full-data draws alone, or from refits; for a smaller Monte Carlo error pass a longer "
            "fit, cross_validate(..., fit=foldwise.fit(model, draws=...))"
        )
    if "state" not in result.info:
        raise ValueError(
            "only a result that holds the state of its chains can be extended, but this "
            "one was merged from several; extend its parts and merge them again"
        )
    if model is None:
        raise ValueError(
            "a result loaded from a file does not hold its model's functions; pass "
            "result.extend(draws, model=model)"
        )
    return restore_run(result, model)
