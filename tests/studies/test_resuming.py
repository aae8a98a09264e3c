"""Commands that end early and are taken up again."""

import json
import os
from functools import wraps

import pytest
from command import fails
from stored import same_result

import foldwise as fw
from foldwise.studies import cli, resuming

MINE = """
import jax.numpy as jnp
import numpy as np
import foldwise as fw

x = np.linspace(-1, 1, 20)
y = 2 * x + np.random.default_rng(1).normal(size=20)

def make(slope):
    return fw.Model(
        lambda q: -0.5 * jnp.sum(q**2),
        lambda q: -0.5 * (y - q[0] - slope * q[1] * x) ** 2 - 0.919,
        np.zeros(2), 20,
    )

models = {"one": make(1.0), "two": make(0.0)}
folds = fw.k_fold(20, 4)
settings = {"draws": 60, "method": "mcmc"}
"""


@pytest.fixture
def stopped(tmp_path, monkeypatch, capsys, light_figures):
    """A command that Ctrl-C has ended in its second model; its folders."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    real = fw.cross_validate

    @wraps(real)
    def once(model, folds, **settings):
        if model.name == "two":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fw.crossval, "tune", stop)
                return real(model, folds, **settings)
        return real(model, folds, **settings)

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fw, "cross_validate", once)
        arguments = ["run", "mine.py", "--checkpoint", "kept", "--out", "out", "--no-progress"]
        message = fails(capsys, *arguments, code=130)
    assert f"what is finished is kept in {tmp_path / 'kept' / 'two'}" in message
    assert f"what was finished is in {tmp_path / 'out'}" in message
    assert "foldwise resume kept goes on from there" in message
    assert os.listdir(tmp_path / "out") == ["one.nc"]
    return tmp_path


@pytest.fixture
def light_figures(monkeypatch):
    monkeypatch.setattr(cli.output, "draw", lambda figures, folder: [])


def test_a_command_goes_on_where_it_was(stopped, capsys, monkeypatch):
    folder = stopped / "kept"
    seed = json.loads((folder / "command.json").read_text())["seed"]
    before = {file: file.stat().st_mtime_ns for file in folder.glob("*/*.piece")}
    elsewhere = stopped / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert cli.main(["resume", str(folder)]) == 0
    said = capsys.readouterr().err
    assert "foldwise run mine.py --checkpoint kept --out out --no-progress\n" in said
    assert "  one: 1 full-data fit, 1 piece of folds\n  two: 1 full-data fit\n" in said
    assert {file: file.stat().st_mtime_ns for file in before} == before  # nothing was done again
    assert {"one.nc", "two.nc", "report.json"} <= set(os.listdir(stopped / "out"))
    assert sorted(os.listdir(stopped)) == ["elsewhere", "kept", "mine.py", "out"]
    monkeypatch.chdir(stopped)
    assert cli.main(["run", "mine.py", "--seed", str(seed), "--out", "again"]) == 0
    for name in ("one.nc", "two.nc"):
        same_result(fw.load(stopped / "out" / name), fw.load(stopped / "again" / name), times=False)


def test_a_study_keeps_its_fits_too(tmp_path, capsys, monkeypatch, light_figures):
    kept = tmp_path / "kept"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fw.crossval, "tune", None)  # the folds never begin
        arguments = ["study", "poisson", "--quick", "--no-progress", "--checkpoint", str(kept)]
        assert f"foldwise resume {kept} goes on" in fails(capsys, *arguments)
    assert "A.fit: 1 full-data fit" in resuming.finished(kept)
    monkeypatch.setattr(fw, "fit", lambda *_, **__: None)  # it is not made again
    assert cli.main(["resume", str(kept)]) == 0


def test_folders_that_are_no_command(tmp_path, capsys):
    message = fails(capsys, "resume", str(tmp_path))
    assert "must be a folder that --checkpoint made" in message
    (tmp_path / "command.json").write_text("{")
    assert "command.json is damaged" in fails(capsys, "resume", str(tmp_path))
