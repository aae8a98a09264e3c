"""Print-outs in colour, for terminals: the same text, its verdict and its warnings marked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

_REST = r"[^\n]*(?:\n  [^\n]*)*"  # of a line that goes on indented
STYLES = (
    (rf"^foldwise: {_REST}", "bold"),
    (rf"^[^\n]* predicts better than {_REST}", "bold green"),
    (rf"^(?:Over [^\n]*: |Over [^\n]*\. )?(?:Reliable){_REST}", "green"),
    (rf"^(?:Over [^\n]*: |Over [^\n]*\. )?[Uu]ndecided: {_REST}", "bold yellow"),
    (rf"^(?:Over [^\n]*: |Over [^\n]*\. )?[Tt]oo noisy{_REST}", "bold magenta"),
    (rf"^(?:Over [^\n]*: |Over [^\n]*\. )?[Nn]ot to be trusted: {_REST}", "bold red"),
    (rf"^R-hat-max [^\n]* is (?:more|over){_REST}", "red"),
    (r"^\d+ of \d+ folds flagged:", "red"),
    (rf"^- {_REST}", "red"),
    (rf"^(?:Pr\(worse\)|weight): {_REST}", "dim"),
    (rf"^(?:time|seed|ESS) {_REST}", "dim"),
)


def coloured(text: str) -> Text:
    """A print-out as text of rich, which drops the colours where they can not be shown."""
    from rich.text import Text

    found = Text(text)
    for pattern, style in STYLES:
        for match in re.finditer(pattern, text, re.MULTILINE):
            found.stylize(style, *match.span())
    return found
