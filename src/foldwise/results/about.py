"""Where and with what a result was made: versions, machine, memory; how to cite."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

_PACKAGES = ("foldwise", "jax", "jaxlib", "blackjax", "numpy", "scipy", "xarray")
CITATION = (
    "Cooper, A., Vehtari, A., Forbes, C., Simpson, D., Kennedy, L. (2024). Bayesian "
    "cross-validation by parallel Markov chain Monte Carlo. Statistics and Computing; and "
    "foldwise, CITATION.cff."
)


@dataclass(frozen=True)
class About:
    """What a report says about its run, besides what results know themselves."""

    title: str = ""
    command: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    texts: dict[str, str] = field(default_factory=dict)


def versions() -> dict[str, str]:
    """Versions of Python, foldwise and what it stands on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # run from a source tree
            continue
    return found


def machine() -> dict[str, Any]:
    """System, cores and the most memory that this process has taken, in megabytes."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": os.cpu_count(),
    }
    if sys.platform != "win32":
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found["peak memory, MB"] = round(most / (2**20 if sys.platform == "darwin" else 2**10))
    return found
