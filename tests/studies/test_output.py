"""An outcome as a folder: its report, its files and figures, and folders that are refused."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from command import fails

import foldwise as fw
from foldwise import studies
from foldwise.studies import cli, output


def test_report_for_programs_has_the_results(saved, results):
    report = json.loads((saved[0] / "report.json").read_text())
    assert report["seed"] == 5 and report["settings"]["draws"] == 60
    assert report["versions"]["foldwise"] == fw.__version__ and "jax" in report["versions"]
    for name, result in results.items():
        model = report["models"][name]
        for key in ("elpd", "se", "mcse", "ess", "optimism", "rhat_max", "divergences"):
            assert model[key] == getattr(result, key), key
        assert model["rhat_benchmark"] == np.quantile(result.rhat_benchmark, 0.99)
        assert model["settings"]["seed"] == result.info["seed"]
        assert model["folds"]["elpd"] == result.folds["elpd"].values.tolist()
        assert model["folds"]["fold"] == result.folds["fold"].values.tolist()
        assert model["folds"]["status"] == result.folds["status"].values.tolist()
    phases = [result.info["seconds"] for result in results.values()]
    assert report["seconds"]["folds"] == sum(seconds["folds"] for seconds in phases)
    table = fw.compare(results).table
    assert [row["model"] for row in report["comparison"]["table"]] == list(table.index)
    assert report["comparison"]["table"][1]["elpd_diff"] == table["elpd_diff"].iloc[1]
    assert report["comparison"]["table"][0]["prob_worse"] is None  # not a number


def test_flagged_folds_are_in_the_report(results):
    result = next(iter(results.values()))
    table = result.folds.copy(deep=True)
    table["status"] = table["status"].astype(object)
    table["status"][2] = "stuck chain"
    main = next(iter(result.scores))
    flagged = {main: vars_of(result.scores[main], folds=table)}
    bad = fw.CVResult(flagged, result.mixing, result.test, result.info)
    outcome = studies.Outcome("bad", {"only": bad}, None, "", {}, {})
    report = output.record(outcome, {})
    assert report["models"]["only"]["flagged"] == {"2": "stuck chain"}
    assert len(report["models"]["only"]["advice"]) == 1
    assert report["comparison"] is None
    json.loads(output.as_json(report))


def test_a_comparison_without_a_verdict_is_reported(results):
    first, *_ = results
    result = results[first]
    main = next(iter(result.scores))
    table = result.folds.copy(deep=True)
    table["elpd"].values[2] = np.nan
    table["status"] = table["status"].astype(object)
    table["status"][2] = "not finite"
    failed = {main: vars_of(result.scores[main], folds=table, left_out=1)}
    part = {**result.info, "identity": {**result.info["identity"], "folds": 99}}
    both = {**results, first: fw.CVResult(failed, result.mixing, result.test, part)}
    count = result.folds.sizes["fold"]
    comparison = fw.compare(both)
    outcome = studies.Outcome("bad", both, comparison, "", {}, {})
    report = json.loads(output.as_json(output.record(outcome, {})))["comparison"]
    assert (report["folds"], report["scheme_folds"], report["left_out"]) == (count, 99, 1)
    assert report["missing"] == {first: [2]}
    assert f"{first}: 1 of {count} folds flagged: not finite 1" in report["remarks"]
    assert all(row["prob_worse"] is row["rank"] is None for row in report["table"])
    text = " ".join(str(outcome).split())
    assert "Not to be trusted: 1 of" in text and "predicts better" not in text
    assert report["verdict"]["kind"] == "not to be trusted"


def vars_of(score, **changes):
    return type(score)(**{**score.__dict__, **changes})


def test_a_folder_with_something_in_it_is_refused_before_any_work(study, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("mine")
    message = fails(capsys, "study", "toy", "--out", str(tmp_path))
    assert "must be new or empty" in message
    message = fails(capsys, "study", "toy", "--out", str(tmp_path), "--overwrite")
    assert "also holds thesis.tex" in message
    message = fails(capsys, "study", "toy", "--out", str(tmp_path / "thesis.tex"))
    assert "is a file" in message
    message = fails(capsys, "study", "toy", "--out", str(tmp_path / "thesis.tex" / "out"))
    assert "cannot be made" in message
    assert study == [] and os.listdir(tmp_path) == ["thesis.tex"]


def test_the_folder_one_is_in_is_refused(study, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "the one you are in" in fails(capsys, "study", "toy", "--out", ".")
    assert study == []


def test_overwrite_replaces_all_of_an_earlier_one(study, light, tmp_path):
    out = tmp_path / "out"
    out.mkdir()  # empty is as good as new
    assert cli.main(["study", "toy", "--out", str(out)]) == 0
    (out / "older.nc").write_text("old")
    assert cli.main(["study", "toy", "--out", str(out)]) == 1
    assert (out / "older.nc").exists()
    assert cli.main(["study", "toy", "--out", str(out), "--overwrite"]) == 0
    assert not (out / "older.nc").exists() and (out / "report.json").exists()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_nothing_is_left_when_a_run_fails(study, tmp_path, capsys, monkeypatch, error):
    def run(name, options):
        assert os.listdir(tmp_path / "new") == ["out"]  # the folder is made sure of before
        raise error

    monkeypatch.setattr(studies, "run", run)
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    message = fails(capsys, "study", "toy", "--out", str(tmp_path / "new" / "out"), code=code)
    assert message.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_a_place_taken_meanwhile_costs_nothing(study, light, tmp_path, capsys, monkeypatch):
    out, answer = tmp_path / "out", studies.run
    out.mkdir()
    (out / "older.nc").touch()

    def run(name, options):
        (out / "other").write_text("someone else's")
        return answer(name, options)

    monkeypatch.setattr(studies, "run", run)
    assert cli.main(["study", "toy", "--out", str(out), "--overwrite"]) == 1
    where = Path(capsys.readouterr().err.rpartition("is in ")[2].strip())
    assert (where / "report.json").is_file() and sorted(os.listdir(out)) == ["older.nc", "other"]


def two_of_three(results, error):
    """A study of which the third model fails."""

    def run(name, options):
        first, second = results
        options.finished({first: results[first]})
        options.finished(results)
        raise error

    return run


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_models_that_are_finished_are_kept_when_another_fails(
    study, light, results, tmp_path, capsys, monkeypatch, error, overwrite
):
    out = tmp_path / "out"
    if overwrite:
        out.mkdir()
        (out / "older.nc").touch()
    monkeypatch.setattr(studies, "run", two_of_three(results, error))
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    arguments = ["--overwrite"] if overwrite else []
    message = fails(capsys, "study", "toy", "--out", str(out), *arguments, code=code)
    where = tmp_path / ("out.new" if overwrite else "out")
    assert f"what was finished is in {where}" in message and "nothing" not in message
    assert sorted(os.listdir(where)) == ["with_x.nc", "x_without.nc"]
    assert not overwrite or os.listdir(out) == ["older.nc"]


def test_ctrl_c_while_figures_are_drawn_costs_only_figures(
    study, light, tmp_path, capsys, monkeypatch
):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(output, "draw", stop)
    assert cli.main(["study", "toy", "--out", str(tmp_path / "out")]) == 130
    printed = capsys.readouterr()
    assert f"results and reports are in {tmp_path / 'out'}" in printed.err
    assert "A wins." in printed.out
    assert {"report.json", "report.txt", "with_x.nc"} <= set(os.listdir(tmp_path / "out"))


def test_overwrite_that_ends_between_its_moves_leaves_both_in_sight(
    study, light, tmp_path, monkeypatch
):
    out, rename, moves = tmp_path / "out", os.rename, []
    out.mkdir()
    (out / "older.nc").touch()

    def killed(source, place):
        if moves:
            raise KeyboardInterrupt
        moves.append(source)
        rename(source, place)

    monkeypatch.setattr(os, "rename", killed)
    assert cli.main(["study", "toy", "--out", str(out), "--overwrite"]) == 130
    assert sorted(os.listdir(tmp_path)) == ["out.new", "out.old"]
    assert (tmp_path / "out.new" / "report.json").is_file()


def test_two_runs_do_not_write_into_one_folder(study, light, tmp_path, capsys):
    with output.new_folder(tmp_path / "out"):
        message = fails(capsys, "study", "toy", "--out", str(tmp_path / "out"))
    assert f"one process at a time, but process {os.getpid()}" in message
    assert study == []


def test_a_figure_that_fails_costs_no_results(study, light, tmp_path, capsys, monkeypatch):
    answer = studies.run

    def run(name, options):
        outcome = answer(name, options)
        outcome.figures = {"bad": lambda: 1 / 0, **outcome.figures}
        return outcome

    monkeypatch.setattr(studies, "run", run)
    assert cli.main(["study", "toy", "--out", str(tmp_path / "out")]) == 0
    assert "figure bad is not drawn: ZeroDivisionError" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out" / "figures") == ["one.png"]


def test_file_names_of_models_are_plain_and_distinct():
    names = {"a b": 1, "a/b": 1, "A_B": 1, "..": 1, "": 1, "modèle 2": 1}
    stems = output.file_stems(names)
    assert list(stems.values()) == ["a_b", "a_b_2", "A_B_3", "model", "model_2", "modèle_2"]


def test_json_has_no_numbers_that_json_lacks():
    value = {1: np.array([1.5, np.nan, -np.inf]), "when": np.array(["2020-01"], "datetime64[M]")}
    plain = output._plain({**value, "flag": np.bool_(True), "none": None, "zero": np.array(3)})
    assert plain == {
        "1": [1.5, None, None],
        "when": ["2020-01"],
        "flag": True,
        "none": None,
        "zero": 3,
    }


def test_plot_of_many_is_of_the_best_against_each(results):
    a, b = results.values()
    many = {"bad": b, "good": a, "worse": b}
    stems = [stem for stem in output.figures(many) if stem.startswith("difference")]
    assert stems == ["difference_good_bad", "difference_good_worse"]


def test_figures_of_running_sums_need_no_draws(results):
    a, b = (fw.CVResult(r.scores, r.mixing, r.test, r.info, None) for r in results.values())
    assert list(output.figures({"a": a, "b": b})) == [
        "compare",
        "difference",
        "diagnostics_a",
        "diagnostics_b",
    ]
