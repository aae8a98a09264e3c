"""Counts and durations in words, the same everywhere."""

from math import isfinite


def counted(number: int, word: str) -> str:
    """A number of things: "1 fold", "3 folds"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def duration(seconds: float) -> str:
    """A time in seconds, minutes or hours, with one decimal."""
    if not isfinite(seconds):
        return "n/a"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
