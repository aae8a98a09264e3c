"""What the build of the pages adds to MkDocs: formulas as MathML, the help of the command line."""

import contextlib
import html
import io
import os
import re
from importlib.util import find_spec
from typing import Any
from unittest import mock

from latex2mathml.converter import convert

# pymdownx.arithmatex marks formulas like this; browsers render MathML without scripts
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
COMMANDS = ("demo", "study", "run", "resume", "show", "plot", "report")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the help of every command, and the reference of the figures, in their places."""
    if "<!-- help of foldwise -->" in markdown and find_spec("foldwise.studies.cli"):
        markdown = markdown.replace("<!-- help of foldwise -->", _help())
    if "<!-- reference of the figures -->" in markdown and find_spec("foldwise.results.figures"):
        markdown = markdown.replace("<!-- reference of the figures -->", _figures())
    return markdown


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML."""
    return FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[2] == "[" else "inline"
    return convert(html.unescape(found[3]).strip(), display=display)


def _figures() -> str:
    import foldwise

    names = [name for name in foldwise.__all__ if name.startswith(("plot_", "save_figures"))]
    modules = [getattr(foldwise, name).__module__ for name in names]
    return "\n\n".join(f"::: {m}.{name}" for m, name in zip(modules, names, strict=True))


def _help() -> str:
    from foldwise.studies.cli import main

    parts = []
    for command in COMMANDS:
        with (
            mock.patch.dict(os.environ, COLUMNS="90"),
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.suppress(SystemExit),
        ):
            main([command, "--help"])
        parts.append(f"## foldwise {command}\n\n```text\n{out.getvalue().strip()}\n```\n")
    return "\n".join(parts)
