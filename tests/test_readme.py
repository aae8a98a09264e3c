"""Python blocks of README and of the pages run as printed, and show what they print."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_pages
from versions import other_versions

import foldwise as fw
from foldwise.models import family, model

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("page", run_pages.pages(), ids=lambda page: page.name)
def test_blocks_run_and_show_what_they_print(page):
    # in a process of its own: a page may set options of JAX
    command = [sys.executable, "docs/run_pages.py", "--check", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if other_versions():  # words that hang on draws may be others
        assert "Traceback" not in done.stderr, done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_output_that_reads_differently_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint('elpd', -1.5)\n```\n\n```text\nelpd -1.7\n```\n")
    assert run_pages.check(page) == []
    page.write_text("```python\nprint('elpd', -1.5)\n```\n\n```text\nloss -1.5\n```\n")
    assert "page.md:2 shows\nloss -1.5" in run_pages.check(page)[0]
    run_pages.write(page)
    assert "```text\nelpd -1.5\n```" in page.read_text()


def test_links_of_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.M)
            assert anchor in [re.sub(r"[^a-z0-9]+", "-", title.lower()) for title in titles]


def test_every_public_name_is_in_the_reference():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = {name.split(".")[-1] for name in re.findall(r"^::: (foldwise\S*)", pages, re.M)}
    # the page of the figures shows all of them
    figures = {
        name
        for name in fw.__all__
        if getattr(fw, name).__module__.startswith("foldwise.results.figures")
    }
    assert set(fw.__all__) - figures <= listed
    assert all(f"`{name}`" in pages for name in figures)


@pytest.mark.parametrize("module", [family, model], ids=lambda m: m.__name__)
def test_docstring_examples(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


def test_the_table_of_rivals_is_short():
    """At most eight rows and six columns; the full one is in the documentation."""
    section = (ROOT / "README.md").read_text().split("## Beside what you might use instead")[1]
    lines = [line for line in section.split("## ")[0].splitlines() if line.startswith("|")]
    assert 3 <= len(lines) <= 10
    assert {line.count("|") - 1 for line in lines} == {6}


def test_the_citation_has_what_the_format_asks_for():
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the docs extra")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(found)
    assert found["version"] == fw.__version__
    assert len(found["preferred-citation"]["authors"]) == 5


def test_every_figure_of_the_gallery_has_a_call_that_exists():
    text = (ROOT / "docs" / "gallery.md").read_text()
    calls = re.findall(r"^    fw\.(plot_\w+)\(", text, re.M)
    assert set(calls) == {name for name in fw.__all__ if name.startswith("plot_")}
    for name in re.findall(r"\(figures/(\w+)\.png\)", text):
        assert (ROOT / "docs" / "figures" / f"{name}.png").is_file(), name
