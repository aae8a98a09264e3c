"""Print-outs in colour: the same text, with the verdict and what is wrong marked."""

import io

import pytest
from by_hand import A, B, make
from rich.console import Console

from foldwise.results.colour import coloured
from foldwise.results.compare import compare
from foldwise.studies.outcome import Outcome


def styles(thing):
    """The style of each marked line of a print-out."""
    text = coloured(str(thing))
    return {text.plain[span.start : span.end].split("\n")[0]: span.style for span in text.spans}


@pytest.mark.parametrize(
    "kwargs, starts, style",
    [
        ({"mcse": 0.01}, "Undecided: ", "bold yellow"),
        ({"mcse": 0.5}, "Too noisy", "bold magenta"),
        ({"status": "heavy tail"}, "Not to be trusted: ", "bold red"),
    ],
)
def test_the_verdict_is_marked(kwargs, starts, style):
    found = compare({"a": make(A, **kwargs), "b": make(B, **kwargs)})
    marked = {line: how for line, how in styles(found).items() if line.startswith(starts)}
    assert list(marked.values()) == [style]


def test_a_result_is_marked_and_loses_nothing():
    result = make(A, status=["fine", "fine", "stuck chain", "fine"])
    found = styles(result)
    assert found["1 of 4 folds flagged:"] == "red"
    assert next(style for line, style in found.items() if line.startswith("- stuck")) == "red"
    assert coloured(str(result)).plain == str(result)
    good = styles(make(A, mcse=0.01, seconds={"fit": 3.0}, seed=1))
    assert good["time: full-data fit 3.0 s"] == good["seed 1"] == "dim"
    assert next(style for line, style in good.items() if line.startswith("Reliable")) == "green"


def test_terminals_get_colours_and_files_do_not():
    result = make(A)
    for terminal in (True, False):
        stream = io.StringIO()
        system = "standard" if terminal else None
        console = Console(file=stream, force_terminal=terminal, width=100, color_system=system)
        console.print(result)
        assert ("\x1b[" in stream.getvalue()) == terminal


@pytest.mark.parametrize(
    "verdict, style",
    [
        (
            "A predicts better than B: by 7.28 (SE 3.07, MCSE 0.086), probability 0.989.",
            "bold green",
        ),
        (
            "Undecided: A is ahead of B by 7.28 (SE 5.07, MCSE 0.086), probability 0.7.",
            "bold yellow",
        ),
        ("Too noisy: A is ahead of B by 7.28 (SE 5.07, MCSE 6), probability 0.7.", "bold magenta"),
        ("Not to be trusted: A is ahead of B by 7.28 (SE 5, MCSE 1).", "bold red"),
    ],
)
@pytest.mark.parametrize(
    "aim", ["rain", "a new group", "a county that nobody has seen before ever"]
)
def test_a_conclusion_is_marked_to_its_end(verdict, style, aim):
    """However the question makes it wrap."""
    conclusion = f"Which model predicts {aim} better? {verdict}"
    text = coloured(str(Outcome("toy", {}, None, conclusion, {}, {})))
    (span,) = text.spans
    assert (span.start, span.end, span.style) == (0, len(text.plain), style)
    assert "\n  " in text.plain and max(map(len, text.plain.splitlines())) <= 80
