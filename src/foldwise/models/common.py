"""What the adapters share."""

from importlib import import_module
from typing import Any

_EXTRA = {"numpyro": "numpyro", "pymc": "pymc", "bambi": "bambi"}


def need(package: str) -> Any:
    """Import an optional package, or say how to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(
            f"{package} is needed for this, but it cannot be imported ({error}); "
            f'pip install "foldwise[{_EXTRA[package]}]"'
        ) from error


def choose_observed(names: list[str], wanted: str | None, what: str) -> str:
    """The observed variable to cross-validate: the one named, or the only one."""
    if not names:
        raise ValueError(f"the model must have an observed {what}, but it has none; pass the data")
    if wanted is None:
        if len(names) > 1:
            raise ValueError(
                f"the model has {len(names)} observed {what}s, {', '.join(names)}; name the one to "
                f'cross-validate, observed="{names[0]}" (the others stay in the training data)'
            )
        return names[0]
    if wanted not in names:
        raise ValueError(f"observed must be one of {', '.join(names)}; got {wanted!r}")
    return wanted
