"""The command line: what is parsed, called, printed and refused."""

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from command import fails

import foldwise as fw
from foldwise import studies
from foldwise.results.result import FoldWarning
from foldwise.studies import cli, output, own_file

# ---------------------------------------------------------------- run


def test_run_prints_and_writes(saved):
    folder, printed = saved
    results = {n: fw.load(folder / f) for n, f in (("a", "with_x.nc"), ("b", "x_without.nc"))}
    assert "a line of the user's own" not in printed  # goes to standard error
    for result in results.values():
        assert str(result) in printed and result.info["draws"] == 60
    assert "with x predicts better than x/without" in printed
    assert (folder / "report.txt").read_text() == printed
    assert sorted(os.listdir(folder)) == [
        "figures",
        "report.html",
        "report.json",
        "report.txt",
        "with_x.nc",
        "x_without.nc",
    ]
    assert os.listdir(folder.parent) == ["results"]
    page = (folder / "report.html").read_text()
    assert "with x predicts better than x/without" in page and "fw.model_family(" in page
    assert "foldwise run" in page and "--seed 5" in page
    drawn = {file.stem for file in (folder / "figures").iterdir()}
    assert {"progress", "errors", "difference", "probability"} <= drawn
    assert {
        "compare",
        "diagnostics_with_x",
        "rhat_max_x_without",
    } <= drawn and "pit_with_x" not in drawn


def run_file(tmp_path, text) -> str:
    file = tmp_path / "mine.py"
    file.write_text(text)
    return str(file)


TWO = """
import numpy as np
import foldwise as fw

def make():
    return fw.Model(lambda q: -0.5 * q**2, lambda q: -0.5 * (q - np.arange(4.0)) ** 2, 0.0, 4)

models = {"one": make(), "two": make()}
folds = fw.leave_one_out(4)
settings = {"draws": 70, "chains": 3, "scores": "log"}
"""


@pytest.fixture
def asked(monkeypatch, results):
    """Arguments of cross_validate, which answers with the saved results."""
    calls, answers = [], iter(results.values())

    def cross_validate(
        model,
        folds,
        draws=1,
        chains=1,
        scores=None,
        warmup=1,
        memory="",
        target_mcse=None,
        seed=None,
        progress=True,
    ):
        calls.append({key: value for key, value in locals().items() if key in FIELDS})
        return next(answers)

    FIELDS = (
        "model",
        "draws",
        "chains",
        "scores",
        "warmup",
        "memory",
        "target_mcse",
        "seed",
        "progress",
    )
    monkeypatch.setattr(fw, "cross_validate", cross_validate)
    return calls


def test_options_come_before_settings(asked, tmp_path, capsys):
    file = run_file(tmp_path, TWO)
    options = ["--draws=80", "--seed=9", "--memory=online", "--target-mcse=0.5", "--no-progress"]
    assert cli.main(["run", file, *options]) == 0
    assert [call.pop("model").name for call in asked] == ["one", "two"]
    assert [call.pop("seed") for call in asked] == [9, 10]
    one = {
        "draws": 80,
        "chains": 3,
        "scores": "log",
        "warmup": 1,
        "memory": "online",
        "target_mcse": 0.5,
        "progress": False,
    }
    assert asked == [one, one]
    assert "compared by" in capsys.readouterr().out


def test_quick_comes_before_settings_and_after_options(asked, tmp_path):
    assert cli.main(["run", run_file(tmp_path, TWO), "--quick", "--warmup", "40"]) == 0
    used = {key: asked[0][key] for key in ("draws", "chains", "warmup", "scores")}
    assert used == {"draws": 50, "chains": 4, "warmup": 40, "scores": "log"}
    assert asked[0]["progress"] is True
    assert asked[1]["seed"] == asked[0]["seed"] + 1


def test_a_single_model_takes_the_name_of_its_file(asked, tmp_path, capsys):
    text = TWO.replace('models = {"one": make(), "two": make()}', "model = make()")
    assert cli.main(["run", run_file(tmp_path, text), "--json"]) == 0
    assert [call["model"].name for call in asked] == ["mine"]
    report = json.loads(capsys.readouterr().out)
    assert list(report["models"]) == ["mine"] and report["name"] == "mine"


def test_json_leaves_the_users_own_lines_out(asked, tmp_path, capsys):
    file = run_file(tmp_path, "print('chatter')\n" + TWO)
    assert cli.main(["run", file, "--json"]) == 0
    captured = capsys.readouterr()
    assert list(json.loads(captured.out)["models"]) == ["one", "two"]
    assert "chatter" in captured.err


def test_the_users_file_does_not_run_if_the_folder_is_refused(tmp_path, capsys):
    file = run_file(tmp_path, "print('working')")
    assert "working" not in fails(capsys, "run", file, "--out", str(tmp_path))


def test_models_of_other_packages_are_adapted(asked, tmp_path, monkeypatch):
    adapted = fw.Model(lambda q: -0.5 * q**2, lambda q: -0.5 * (q - np.arange(4.0)) ** 2, 0.0, 4)
    monkeypatch.setitem(own_file._ADAPTERS, "pymc", lambda model: adapted)
    text = "class Model: pass\nModel.__module__ = 'pymc.model.core'\n" + TWO
    text = text.replace('{"one": make(), "two": make()}', '{"one": Model()}')
    assert cli.main(["run", run_file(tmp_path, text)]) == 0
    assert asked[0]["model"].log_prior is adapted.log_prior
    assert asked[0]["model"].name == "one" and adapted.name is None


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("folds =", "other =", 'mine.py must define "folds"'),
        ("models =", "other =", 'mine.py must define "models"'),
        ('{"one": make(), "two": make()}', "{}", "must be a dict of at least one model"),
        ('{"one": make(), "two": make()}', "[make()]", "must be a dict of at least one model"),
        ('"two": make()', '"two": make', "model 'two' in .* is a function; a NumPyro model"),
        ("settings = {", "settings = {'draw': 1, ", "but one is 'draw'"),
        ("settings = {", "settings = 1, {", "settings in .* must be a dict, got tuple"),
        ("leave_one_out(4)", "leave_one_out(5)", "folds have n=5 and the model n_obs=4"),
        ('"draws": 70', '"draws": 7', "needs at least 20 batches"),
    ],
)
def test_a_file_that_lacks_something(tmp_path, capsys, old, new, says):
    assert old in TWO
    message = fails(
        capsys, "run", run_file(tmp_path, TWO.replace(old, new)), "--out", str(tmp_path / "out")
    )
    assert re.search(says, message), message
    assert message.startswith("foldwise: error: ") and message.count("\n") == 1
    assert set(os.listdir(tmp_path)) - {"__pycache__"} == {"mine.py"}


def test_errors_of_the_users_file_show_its_lines_only(tmp_path, capsys):
    text = TWO.replace("folds = fw.leave_one_out(4)", "folds = fw.k_fold(4, 9)")
    message = fails(capsys, "run", run_file(tmp_path, text))
    assert 'mine.py", line 9, in <module>\n    folds = fw.k_fold(4, 9)' in message
    assert message.count('File "') == 1
    assert message.splitlines()[-1].startswith("ValueError: ")

    (tmp_path / "helper.py").write_text("def help():\n    return 1 / 0\n")
    message = fails(capsys, "run", run_file(tmp_path, "import helper\nhelper.help()\n" + TWO))
    assert 'mine.py", line 2' in message and 'helper.py", line 2, in help' in message
    assert message.endswith("ZeroDivisionError: division by zero\n")

    message = fails(capsys, "run", run_file(tmp_path, TWO.replace("make():", "make(:")))
    assert "mine.py" in message and "line 5" in message and "SyntaxError" in message

    # inside a function that JAX traces, far below our own code
    text = TWO.replace("-0.5 * q**2", "-0.5 * q.sort_of()")
    message = fails(capsys, "run", run_file(tmp_path, text))
    assert "q.sort_of()" in message and message.count('File "') == 1
    assert "AttributeError" in message


def test_lines_of_the_users_file_below_an_error_of_ours(tmp_path, capsys):
    text = (
        TWO
        + """
def check():
    try:
        1 / 0
    except ZeroDivisionError as error:
        return ValueError("a density cannot be computed"), error
"""
    )
    space = {}
    exec(compile(text, str(tmp_path / "mine.py"), "exec"), space)
    ours, theirs = space["check"]()
    ours.__cause__ = theirs
    message = cli._message(ours, tmp_path)
    assert "in check" in message and message.endswith("ValueError: a density cannot be computed")


def test_our_own_lines_are_never_the_users(tmp_path):
    """Not even where the user's file lies in a folder that holds the package."""
    try:
        fw.k_fold(4, 9)
    except ValueError as error:
        problem = error
    problem.__traceback__ = problem.__traceback__.tb_next  # without this file's line
    assert cli._own_lines(problem, Path(fw.__file__).parent.parent) == ""
    assert cli._message(problem, Path(fw.__file__).parent.parent).startswith("foldwise: error: ")


def test_files_that_are_not_python(tmp_path, capsys):
    assert "does not exist" in fails(capsys, "run", str(tmp_path / "none.py"))
    (tmp_path / "notes.txt").write_text("no")
    assert "must be a Python file" in fails(capsys, "run", str(tmp_path / "notes.txt"))


def test_debug_shows_everything(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLDWISE_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        cli.main(["run", str(tmp_path / "none.py")])


def test_our_own_mistakes_are_not_hidden(study, monkeypatch):
    def broken(name, options):
        raise KeyError("a bug")

    monkeypatch.setattr(studies, "run", broken)
    with pytest.raises(KeyError, match="a bug"):
        cli.main(["study", "toy"])


# ---------------------------------------------------------------- study and demo


def test_study_passes_its_options(study, capsys):
    options = ["--quick", "--seed=4", "--memory=online", "--draws=70", "--chains=2", "--warmup=20"]
    assert cli.main(["study", "rats", *options, "--target-mcse", "0.1", "--no-progress"]) == 0
    assert study == [
        ("rats", studies.Options(True, 4, "online", 70, 2, 20, target_mcse=0.1, progress=False))
    ]
    captured = capsys.readouterr()
    assert captured.out.endswith("\n\nA wins.\n") and "Run\ntable" in captured.out
    assert "compared by" in captured.out
    assert "chatter" not in captured.out and "chatter" in captured.err


def test_study_with_nothing_said_is_the_studys_own(study):
    assert cli.main(["study", "toy"]) == 0
    assert cli.main(["demo"]) == 0
    assert study == [("toy", studies.Options()), ("toy", studies.Options(method="auto"))]


def test_study_as_json_and_folder(study, light, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["study", "toy", "--json", "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "report.json").read_text())
    assert printed["conclusion"] == "A wins." and printed["tables"] == {"Run": "table"}
    assert printed["settings"]["quick"] is False and printed["seed"] == 1
    assert (out / "figures" / "one.png").read_text() == "one"


def test_list_and_names(study, capsys):
    assert cli.main(["study", "--list"]) == 0
    assert capsys.readouterr().out == "toy   about toys\nrats  about rats\n"
    assert "NAME is missing: one of toy, rats" in fails(capsys, "study", code=2)
    message = fails(capsys, "study", "mice", code=2)
    assert "'mice'" in message and "toy" in message and "rats" in message
    assert study == []


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--draws", "0"], "whole number of at least 1, got '0'"),
        (["--draws", "many"], "whole number of at least 1, got 'many'"),
        (["--chains", "1"], "whole number of at least 2, got '1'"),
        (["--warmup", "5"], "whole number of at least 10"),
        (["--seed", "-1"], "whole number of at least 0"),
        (["--seed", "1.5"], "whole number of at least 0"),
        (["--target-mcse", "0"], "positive number, got '0'"),
        (["--target-mcse", "nan"], "positive number, got 'nan'"),
        (["--target-mcse", "x"], "positive number, got 'x'"),
        (["--memory", "disk"], "invalid choice: 'disk'"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_options_that_make_no_sense(study, capsys, option, says):
    assert says in fails(capsys, "study", "toy", *option, code=2)
    assert study == []


def test_no_command_shows_help(capsys):
    assert "foldwise study rats --quick" in fails_without_command(capsys)


def fails_without_command(capsys) -> str:
    assert cli.main([]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "study", "run", "show", "plot"])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"  foldwise {command} " in capsys.readouterr().out.partition("examples:")[2] + " "


def test_warnings_are_one_line_each_and_once(study, monkeypatch, capsys):
    answer = studies.run

    def warn(name, options):
        for _ in range(2):
            warnings.warn("3 of 40 folds flagged", FoldWarning, stacklevel=1)
        return answer(name, options)

    monkeypatch.setattr(studies, "run", warn)
    assert cli.main(["study", "toy"]) == 0
    assert capsys.readouterr().err.count("foldwise: warning: 3 of 40 folds flagged\n") == 1


# ---------------------------------------------------------------- show and plot


def test_show_prints_what_the_run_printed(saved, capsys):
    assert cli.main(["show", str(saved[0])]) == 0
    assert capsys.readouterr().out == (saved[0] / "report.txt").read_text()


def test_show_one_result_and_bare_results(saved, tmp_path, capsys):
    folder = saved[0]
    assert cli.main(["show", str(folder / "with_x.nc")]) == 0
    assert capsys.readouterr().out == f"{fw.load(folder / 'with_x.nc')}\n"
    for file in folder.glob("*.nc"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert cli.main(["show", str(tmp_path)]) == 0
    assert "with_x predicts better than x_without" in capsys.readouterr().out


def test_show_keeps_tables_and_conclusion(study, plots, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert cli.main(["study", "toy", "--out", out]) == 0
    printed = capsys.readouterr().out
    assert cli.main(["show", out]) == 0
    assert capsys.readouterr().out == printed


def test_results_that_cannot_be_compared_are_shown(saved, tmp_path, capsys, monkeypatch):
    def refuse(results):
        raise ValueError("they test other rows")

    monkeypatch.setattr(output, "compare", refuse)
    assert cli.main(["show", str(saved[0])]) == 0
    captured = capsys.readouterr()
    assert "the results are not compared: they test other rows" in captured.err
    assert captured.out.count("scores by plain means over draws") == 2


def test_show_refuses_what_is_no_result(tmp_path, capsys):
    assert "does not exist" in fails(capsys, "show", str(tmp_path / "none"))
    assert "there are none" in fails(capsys, "show", str(tmp_path))
    (tmp_path / "report.json").write_text('{"models": {"A": ')
    assert "report.json must be a report" in fails(capsys, "show", str(tmp_path))
    (tmp_path / "report.json").write_text('{"models": {"A": {"file": "A.nc"}}}')
    assert "A.nc does not exist" in fails(capsys, "show", str(tmp_path))
    (tmp_path / "A.nc").write_text("not netCDF")
    assert "A.nc must be a result saved by foldwise" in fails(capsys, "show", str(tmp_path))


def test_plot_draws_into_a_new_folder(saved, plots, tmp_path, capsys):
    assert cli.main(["plot", str(saved[0]), "--out", str(tmp_path / "figures")]) == 0
    printed = capsys.readouterr().out.split("\n")
    assert str(tmp_path / "figures" / "progress.png") in printed
    assert sorted(os.listdir(tmp_path / "figures")) == sorted(
        Path(line).name for line in printed if line
    )
    assert ("progress", 2) in plots and ("probability", 2) in plots
    assert ("diagnostics", 1) in plots and plots[0] == ("compare", 1)
    assert "must be new or empty" in fails(capsys, "plot", str(saved[0]))  # the run's own figures
    single = str(tmp_path / "one")
    assert cli.main(["plot", str(saved[0] / "with_x.nc"), "--out", single]) == 0
    assert plots[-3:] == [("diagnostics", 1), ("rhat_max", 1), ("chains", 2)]
    assert ("progress", 1) in plots


def test_every_figure_can_be_drawn(saved, tmp_path, capsys):
    assert cli.main(["plot", str(saved[0]), "--out", str(tmp_path / "figures")]) == 0
    captured = capsys.readouterr()
    drawn = [Path(line) for line in captured.out.splitlines()]
    assert captured.err == "" and len(drawn) == 11
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in drawn)


def test_plot_says_when_nothing_could_be_drawn(saved, plots, tmp_path, capsys, monkeypatch):
    def fail(figures, folder):
        raise ValueError("needs stored draws")

    monkeypatch.setattr(sys.modules["foldwise.results.figures"], "save_figures", fail)
    message = fails(capsys, "plot", str(saved[0]), "--out", str(tmp_path / "figures"))
    assert "no figure of" in message and "needs stored draws" in message
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- as users start it


def command(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "foldwise", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_version_and_entry_point():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"foldwise": "foldwise.studies.cli:main"}
    with command("--version") as started:
        assert started.communicate()[0] == f"foldwise {fw.__version__}\n"
    assert started.returncode == 0


@pytest.mark.parametrize(
    ("number", "code", "by"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_signals_leave_one_line_and_nothing_else(tmp_path, number, code, by):
    waiting = "lambda *_, **__: (print('ready', flush=True), time.sleep(60))"
    file = run_file(tmp_path, f"{TWO}settings = {{}}\nimport time\nfw.cross_validate = {waiting}\n")
    with command("run", file, "--out", str(tmp_path / "out")) as started:
        assert started.stderr.readline() == f"foldwise: reading {file}\n"
        assert started.stderr.readline() == "ready\n"  # what a run prints goes there
        assert "out" in os.listdir(tmp_path)
        started.send_signal(number)
        out, err = started.communicate(timeout=60)
    assert started.returncode == code
    assert (out, err) == ("", f"foldwise: stopped by {by}; nothing was written\n")
    assert set(os.listdir(tmp_path)) - {"__pycache__"} == {"mine.py"}


def test_a_reader_that_stops_early_is_no_error(saved):
    with command("show", str(saved[0])) as started:
        started.stdout.close()
        err = started.stderr.read()
    assert started.returncode == 1
    assert err == ""
