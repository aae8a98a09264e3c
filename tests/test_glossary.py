"""Every word that results use is explained in the documentation."""

import re
from pathlib import Path

import pytest

import foldwise as fw
from foldwise.scores.diagnostics import ADVICE

DOCS = Path(__file__).resolve().parents[1] / "docs"


def explained(heading):
    """What stands in backticks in a section of the page on diagnostics."""
    section = (DOCS / "diagnostics.md").read_text().split(f"## {heading}\n")[1]
    return re.findall(r"`([^`]+)`", section.split("\n## ")[0])


@pytest.fixture(scope="module")
def result(prepared, seed):
    problem, model, fit = prepared("five_fold")
    scores = ("log_pointwise", "log", "crps")
    return fw.cross_validate(model, problem.folds, fit, scores=scores, seed=seed, progress=False)


@pytest.mark.parametrize("score", ["log_pointwise", "log", "crps"])
def test_columns_of_folds_and_rows_are_explained(result, score):
    found, words = result.score(score), explained("The table by fold")
    assert {"fold", *found.folds} <= set(words)
    if found.rows is not None:
        assert {"row", *found.rows} <= set(words)


# the same result twice: only the names of columns matter
# one result stands for two models: only its words are looked at
@pytest.mark.filterwarnings("ignore::foldwise.results.compare.SeedWarning")
@pytest.mark.parametrize("score", ["log", "crps"])
def test_columns_of_comparisons_are_explained(result, score):
    words = explained("The comparison") + explained("The totals")
    assert set(fw.compare([result, result], score=score).table) <= set(words)


def test_every_status_is_explained_worst_first():
    words = explained("Status of a fold")
    assert [word for word in words if word in ADVICE] == list(ADVICE)


def test_words_of_advice_and_warnings_are_defined():
    defined = re.findall(r"^\| ([^|]+) \|", (DOCS / "glossary.md").read_text(), re.M)
    defined = {word.strip() for line in defined for word in line.split(",")}
    wanted = {"fine", "flagged", "partner", "rung", "overlap", "node", "lane", "bridge", "Pareto k"}
    assert wanted | {"R-hat", "warm-up", "draw", "improper", "by row", "divergence"} <= defined
