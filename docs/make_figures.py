"""Draw the figures of README and of the gallery from README's and the tutorial's own examples.

python docs/make_figures.py
"""

import re
from pathlib import Path
from typing import Any

from PIL import Image
from run_pages import ROOT, blocks

import foldwise as fw

FIGURES = ROOT / "docs" / "figures"
# a heading of the gallery, the call below it and its picture
CALL = re.compile(r"^    (fw\.plot_[^\n]*)$.*?\(figures/(\w+)\.png\)", re.MULTILINE | re.DOTALL)


def namespace_of(page: Path, count: int | None = None) -> dict[str, Any]:
    """What the first Python blocks of a page have made."""
    found: dict[str, Any] = {}
    for block in blocks(page.read_text())[:count]:
        exec(block.code, found)
    return found


def main() -> None:
    """Draw all figures, in 64 colours, which keeps files small."""
    tutorial = namespace_of(ROOT / "docs" / "tutorial.md")
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    figures = {name: eval(call, {"fw": fw}, tutorial) for call, name in CALL.findall(gallery)}
    for path in fw.save_figures(figures, FIGURES):
        Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    main()
