"""Draw the figure of README from README's own example.

python docs/make_figures.py
"""

from typing import Any

from run_pages import ROOT, blocks

from foldwise.results.figures import plot_difference, save_figures


def main() -> None:
    """Run the two blocks that compare two models, and draw their difference by fold."""
    namespace: dict[str, Any] = {}
    for block in blocks((ROOT / "README.md").read_text())[:2]:
        exec(block.code, namespace)
    figure = plot_difference(*namespace["results"])
    save_figures({"difference": figure}, ROOT / "docs" / "figures")


if __name__ == "__main__":
    main()
