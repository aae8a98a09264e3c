"""Run the Python blocks of README.md and of the pages, as printed, and keep their output true.

The blocks of a page run in order in one namespace. A ``text`` block that follows a Python block
shows what it prints, without the progress bars and without the lines that say how long it took.

    python docs/run_pages.py [page ...]            write the output anew
    python docs/run_pages.py --check [page ...]    run, and fail where the output reads differently

Numbers may differ between machines; words may not. ``tests/test_readme.py`` checks every page.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
PYTHON = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
TIME = re.compile(r"^time: .*\n(?:  .*\n)*", re.MULTILINE)
NUMBER = re.compile(r"[<>]?-?\b\d+(\.\d+)?(e-?\d+)?\b")
# how R-hat-max compares with chance is said in words that depend on the numbers
BENCHMARK = re.compile(r"R-hat-max.*?100\)(: some\s+have\s+not\s+mixed)?", re.DOTALL)


class Block(NamedTuple):
    """A Python block of a page, and the output shown below it; None where none is shown."""

    line: int
    code: str
    shown: str | None


def pages() -> list[Path]:
    """README.md and the pages that have Python blocks."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if "```python\n" in page.read_text()]


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page, in order."""
    return [
        Block(text.count("\n", 0, found.start()) + 2, found[1], found[2])
        for found in PYTHON.finditer(text)
    ]


def run(page: Path) -> list[str]:
    """What each block of the page prints, run in order in one namespace and an empty folder."""
    namespace: dict[str, Any] = {"__name__": "page"}
    printed = []
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mock.patch("foldwise.support.progress.Progress.__enter__", lambda self: self),
    ):
        for block in blocks(page.read_text()):
            # blank lines put the block where it stands in the page, for tracebacks
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, namespace)
            lines = [line.rstrip() for line in TIME.sub("", out.getvalue()).splitlines()]
            printed.append("\n".join(lines).strip("\n"))
    return printed


def check(page: Path) -> list[str]:
    """Where the output shown on a page reads differently from what its blocks print."""
    wrong = []
    for block, text in zip(blocks(page.read_text()), run(page), strict=True):
        if block.shown is not None and outline(block.shown) != outline(text):
            wrong.append(f"{page.name}:{block.line} shows\n{block.shown}\nbut prints\n{text}")
    return wrong


def outline(text: str) -> list[str]:
    """Words of a text, every number replaced by a mark."""
    return NUMBER.sub("#", BENCHMARK.sub("", text)).split()


def write(page: Path) -> None:
    """Run a page and write its output below the blocks that show theirs."""
    printed = iter(run(page))

    def renewed(found: re.Match[str]) -> str:
        text = next(printed)
        if found[2] is None:
            return found[0]
        return f"```python\n{found[1]}```\n\n```text\n{text}\n```\n"

    page.write_text(PYTHON.sub(renewed, page.read_text()))


def main() -> None:
    """Write or check the pages named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    parser.add_argument("pages", nargs="*", type=Path, help="pages; all by default")
    arguments = parser.parse_args()
    chosen = [page.resolve() for page in arguments.pages] or pages()
    if len(chosen) > 1:  # each by itself: what a page sets in JAX would change the next one's draws
        flags = ["--check"] if arguments.check else []
        command = [sys.executable, __file__, *flags]
        sys.exit(max(subprocess.run([*command, page]).returncode for page in chosen))
    if not arguments.check:
        write(chosen[0])
    elif wrong := check(chosen[0]):
        parser.exit(1, "\n\n".join(wrong) + "\n")


if __name__ == "__main__":
    main()
