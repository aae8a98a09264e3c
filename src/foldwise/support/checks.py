"""Checks of arguments that several modules share."""

import secrets

import numpy as np


def check_count(name: str, value: int, least: int) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_name(what: str, value: str, known: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of the known names."""
    if value not in known:
        names = ", ".join(f'"{name}"' for name in known)
        raise ValueError(f"{what} must be one of {names}; got {value!r}")


def resolve_seed(seed: int | None) -> int:
    """The seed given, or a new one."""
    if seed is None:
        return secrets.randbits(32)
    check_count("seed", seed, 0)
    if seed >= 2**63:
        raise ValueError(f"seed must be below 2**63, got {seed}")
    return int(seed)
