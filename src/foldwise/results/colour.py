"""Print-outs in colour, for terminals: the same text, its verdict and its warnings marked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

_REST = r"[^\n]*(?:\n  [^\n]*)*"  # of a line that goes on indented
# What a verdict may follow: a study's question, and which part of the folds it is about.
_BEFORE = r"^(?:Which model [^?]*\?\s+)?(?:Over [^\n]*: |Over [^\n]*\. )?"
STYLES = (
    (rf"^foldwise: {_REST}", "bold"),
    (rf"{_BEFORE}[^\n]*\s+predicts\s+better\s+than\s{_REST}", "bold green"),
    (rf"{_BEFORE}Reliable{_REST}", "green"),
    (rf"{_BEFORE}[Uu]ndecided:\s{_REST}", "bold yellow"),
    (rf"{_BEFORE}[Tt]oo\s+noisy{_REST}", "bold magenta"),
    (rf"{_BEFORE}[Nn]ot\s+to\s+be\s+trusted:\s{_REST}", "bold red"),
    (rf"^R-hat-max [^\n]* is (?:more|over){_REST}", "red"),
    (r"^\d+ of \d+ folds flagged:", "red"),
    (rf"^- {_REST}", "red"),
    (rf"^(?:Pr\(worse\)|weight): {_REST}", "dim"),
    (rf"^(?:time:|seed|ESS) {_REST}", "dim"),
)


def coloured(text: str) -> Text:
    """A print-out as text of rich, which drops the colours where they can not be shown."""
    from rich.text import Text

    found = Text(text)
    for pattern, style in STYLES:
        for match in re.finditer(pattern, text, re.MULTILINE):
            found.stylize(style, *match.span())
    return found
