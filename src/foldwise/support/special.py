"""Special functions of SciPy, imported on first use: they cost a third of importing JAX."""

from typing import Any

import numpy as np


def expit(x: Any) -> np.ndarray:
    """Logistic function, 1 / (1 + exp(-x))."""
    from scipy import special

    return special.expit(x)


def log_expit(x: Any) -> np.ndarray:
    """Log of the logistic function, without underflow."""
    from scipy import special

    return special.log_expit(x)


def logsumexp(x: Any, axis: int | tuple[int, ...] | None = None) -> Any:
    """Log of the sum of exponentials along an axis, without overflow."""
    from scipy import special

    return special.logsumexp(x, axis=axis)


def normal_cdf(x: Any) -> Any:
    """Distribution function of the standard normal."""
    from scipy import special

    return special.ndtr(x)


def softmax(x: Any, axis: int | None = None) -> np.ndarray:
    """exp(x) scaled to sum to one along an axis, without overflow."""
    from scipy import special

    return special.softmax(x, axis=axis)
