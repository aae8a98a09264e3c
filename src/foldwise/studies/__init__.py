"""Worked examples, one file each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from foldwise.compare import Comparison
from foldwise.results import CVResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STUDIES = {"toy": "simulated groups: does a fourth covariate predict new groups better?"}


@dataclass(frozen=True)
class Options:
    """How to run a study; None means the study's own choice."""

    quick: bool = False
    seed: int = 1
    memory: str = "draws"
    draws: int | None = None
    chains: int | None = None
    warmup: int | None = None
    target_mcse: float | None = None
    progress: bool = True


@dataclass
class Outcome:
    """What a study found: results by model, comparison, conclusion, texts and figures by name."""

    name: str
    results: dict[str, CVResult]
    comparison: Comparison | None
    conclusion: str
    tables: dict[str, str]
    figures: dict[str, Callable[[], Figure]]


def run(name: str, options: Options = Options()) -> Outcome:  # noqa: B008 (frozen)
    """Run the study called ``name``."""
    if name not in STUDIES:
        raise ValueError(f"the studies are {', '.join(STUDIES)}; got {name!r}")
    outcome: Outcome = import_module(f"foldwise.studies.{name}").run(options)
    return outcome
