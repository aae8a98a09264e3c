"""Progress: on standard error, at once, and in plain lines where there is no terminal."""

import io
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
    shown = Lines(period=0.05)
    assert capsys.readouterr().err == "foldwise:   0 s  starting\n"
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
    with Progress(True) as bar:
        for k in range(20):
            bar.start(f"stage {k}")
    assert capsys.readouterr().err.count("\n") == 1


def test_nothing_is_said_unless_asked(capsys):
    with Progress(False) as bar:
        bar.start("folds", 3)
        bar.advance(1)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_terminal_gets_a_bar_on_standard_error(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Progress(True) as bar:
        assert isinstance(bar._display, Bar)
        bar.start("folds", 2)
        bar.advance(2)
    assert "folds" in terminal.getvalue() and "100%" in terminal.getvalue()
    assert capsys.readouterr().out == ""


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
    with Progress(True) as bar:
        assert notebook == ["foldwise: starting"]
        bar.start("folds", 2)
        assert notebook == ["foldwise: folds"]
        bar.advance(1)
    assert len(notebook) == 1 and notebook[0].startswith("foldwise: done in 0.")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
