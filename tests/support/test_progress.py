"""Progress: on standard error, at once, and in plain lines where there is no terminal."""

import io
import re
import sys
import time
import types

import pytest

from foldwise.support import progress
from foldwise.support.progress import Bar, Lines, Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_are_said_at_once_and_as_time_passes(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SOON", 0.0)
    shown = Lines("fit of A", period=0.05)
    assert capsys.readouterr().err == "foldwise:   0 s  fit of A\n"
    shown.start("folds", 200)
    assert capsys.readouterr().err == "foldwise:   0 s  folds\n"
    shown.advance(50)
    time.sleep(0.2)
    shown.stop()
    captured = capsys.readouterr()
    assert "folds: 25 %, about " in captured.err and captured.err.count("\n") >= 2
    assert captured.out == ""
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_stages_in_quick_succession_are_one_line(capsys):
    with Progress(True, "fit of A") as bar:
        for k in range(20):
            bar.start(f"stage {k}")
    assert capsys.readouterr().err.count("\n") == 1


def test_a_stage_that_is_named_already_is_not_named_again(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SOON", 0.0)
    with Progress(True, "fit of A") as bar:
        bar.start("fit of A", 3)
        bar.start("folds of A", 3)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("s  ")[1] for line in lines] == ["fit of A", "folds of A"]


def test_nothing_is_said_unless_asked(capsys):
    with Progress(False, "fit of A") as bar:
        bar.start("folds", 3)
        bar.advance(1)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_terminal_gets_a_bar_on_standard_error(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(progress, "SOON", 0.0)  # bars of short stages go
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Progress(True, "fit of A") as bar:
        assert isinstance(bar._display, Bar)
        bar.start("folds", 2)
        bar.advance(2)
    assert "folds" in terminal.getvalue() and "100%" in terminal.getvalue()
    assert terminal.getvalue().index("fit of A") < terminal.getvalue().index("folds")
    assert capsys.readouterr().out == ""


def test_a_long_description_leaves_room_for_the_bar_and_its_times(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with Progress(True, "fit") as bar:
        bar.start("folds of a model with a very long name, [red]which[/red] nobody can shorten", 2)
        bar.advance(1)
        bar._display._bar.refresh()
    shown = [line for line in re.split(r"[\r\n]", _plain(terminal.getvalue())) if "50%" in line]
    assert shown and all(len(line) <= 80 for line in shown)
    assert "folds of a model" in shown[-1] and "… " in shown[-1] and " left " in shown[-1]


def test_stages_that_took_no_time_leave_no_bar(monkeypatch):
    """And the others stay."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Progress(True, "fit") as bar:
        bar.start("weights", 2)
        bar.advance(2)
        assert [task.description for task in bar._display._bar.tasks] == ["weights"]
        monkeypatch.setattr(progress, "SOON", 0.0)
        bar.start("refits", 2)
        monkeypatch.setattr(progress, "SOON", 60.0)
        bar.start("chains", 2)
        assert [task.description for task in bar._display._bar.tasks] == ["weights", "chains"]


def _plain(text):
    """Without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.fixture
def notebook(monkeypatch):
    """Stands in for IPython; what is below the cell."""
    shown = []

    class Handle:
        def update(self, line):
            shown[-1] = repr(line)

    def display(line, display_id):
        shown.append(repr(line))
        return Handle()

    class ZMQInteractiveShell:
        pass

    package = types.ModuleType("IPython")
    package.get_ipython = ZMQInteractiveShell
    module = types.ModuleType("IPython.display")
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


def test_a_notebook_keeps_one_line(notebook, capsys):
    with Progress(True, "fit of A") as bar:
        assert notebook == ["foldwise: fit of A"]
        bar.start("folds", 2)
        assert notebook == ["foldwise: folds"]
        bar.advance(1)
    assert len(notebook) == 1 and notebook[0].startswith("foldwise: fit of A: 0.")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
