"""Checks of arguments that several modules share."""

import operator
import secrets
import sys
from pathlib import Path
from typing import Any

import numpy as np


class NotACount(TypeError, ValueError):
    """What should be a whole number is none: wrong in kind, so whoever catches either is served."""


def outside() -> int:
    """The stacklevel at which a method that is called to warn points at the caller of foldwise."""
    package, frame, level = str(Path(__file__).parents[1]), sys._getframe(1), 2
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        # np.errstate and contextlib decorate functions of foldwise
        if not file.startswith(package) and not file.endswith(
            ("_ufunc_config.py", "contextlib.py")
        ):
            break
        frame, level = frame.f_back, level + 1
    return level


def is_integer(value: Any) -> bool:
    """Whether ``value`` is a whole number by its type, which True and False are not."""
    if isinstance(value, bool | np.bool_):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def check_count(name: str, value: Any, least: int) -> int:
    """``value`` as an integer; raises unless it is a whole number of at least ``least``."""
    must = f"{name} must be a whole number of at least {least}, got {value!r}"
    if not is_integer(value):
        raise NotACount(f"{must} ({type(value).__name__})")
    if operator.index(value) < least:
        raise ValueError(must)
    return operator.index(value)


def check_name(what: str, value: str, known: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of the known names."""
    if value not in known:
        names = ", ".join(f'"{name}"' for name in known)
        raise ValueError(f"{what} must be one of {names}; got {value!r}")


def resolve_seed(seed: int | None) -> int:
    """The seed given, or a new one."""
    if seed is None:
        return secrets.randbits(32)
    seed = check_count("seed", seed, 0)
    if seed >= 2**63:
        raise ValueError(f"seed must be below 2**63, got {seed}")
    return seed
