"""Numbers as text: as many digits as their errors allow."""

from __future__ import annotations

from typing import Any

import numpy as np


def listed(values: Any) -> str:
    """Values in a row; at most five of them."""
    items = [str(value) for value in np.atleast_1d(np.asarray(values, dtype=object)).ravel()]
    more = f" and {len(items) - 5} more" if len(items) > 5 else ""
    return ", ".join(items[:5]) + more


def places(value: float, significant: int) -> int:
    """Decimals that show ``significant`` digits of a positive value; one if there is no value."""
    if not np.isfinite(value) or value <= 0:
        return 1
    return max(significant - 1 - int(np.floor(np.log10(value))), 0)


def fixed(value: float, decimals: int) -> str:
    """A number with ``decimals`` decimals, but no more than three."""
    if not np.isfinite(value):
        return "n/a" if np.isnan(value) else str(value)
    text = f"{value:.{min(decimals, 3)}f}"
    return text.lstrip("-") if float(text) == 0 else text


def error_text(value: float) -> str:
    """A Monte Carlo error with two digits."""
    if not np.isfinite(value):
        return "n/a"
    decimals = places(value, 2)
    return f"{value:.{decimals}f}" if decimals <= 5 else f"{value:.1e}"


def se_text(value: float, decimals: int) -> str:
    """A standard error: as exact as its estimate, but with two digits at least, three at most."""
    return fixed(value, min(max(decimals, places(value, 2)), places(value, 3)))


def probability_text(value: float) -> str:
    """A probability with three digits."""
    if not np.isfinite(value):
        return "n/a"
    if value > 0.9995:
        return ">0.999"
    return f"{value:.3f}" if value >= 0.0005 else "<0.001"


def rounded_up(value: float) -> int:
    """A number of draws with two digits, rounded up."""
    if value < 100:
        return int(np.ceil(value / 10.0)) * 10
    unit = 10 ** (int(np.floor(np.log10(value))) - 1)
    return int(np.ceil(value / unit)) * unit
