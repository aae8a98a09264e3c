"""What a study or a run of the command line found."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import foldwise as fw
from foldwise.results.text import WIDTH

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Outcome:
    """What a study found.

    ``results`` are by model, "A" first; ``comparison`` is None for a single model; ``tables`` are
    texts by title, beyond the results' own; ``figures`` make a figure each, by file stem;
    ``source`` is where the models are written, ``title`` the question.
    """

    name: str
    results: dict[str, fw.CVResult]
    comparison: fw.Comparison | None
    conclusion: str
    tables: dict[str, str]
    figures: dict[str, Callable[[], Figure]]
    source: str = ""
    title: str = ""

    def compared(self) -> fw.Comparison:
        """The comparison; raises where there is a single model."""
        if self.comparison is None:
            raise ValueError(f"a comparison needs several models, but {self.name} has one")
        return self.comparison

    def __str__(self) -> str:
        parts = [str(result) for result in self.results.values()]
        parts += [f"{title}\n{text}" for title, text in self.tables.items()]
        if self.comparison is not None:
            parts.append(str(self.comparison))
        if self.conclusion:
            parts.append(textwrap.fill(self.conclusion, WIDTH, subsequent_indent="  "))
        return "\n\n".join(parts)
