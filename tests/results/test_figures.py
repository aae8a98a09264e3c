import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from problems import by_chains

import foldwise as fw
from foldwise.results import figures_chains, figures_scheme
from foldwise.results.axes import Picture
from foldwise.results.calibration import uniform_band
from foldwise.results.extend import extend
from foldwise.results.figures_folds import _K_WINDOW
from foldwise.results.replay import first_draws
from foldwise.results.summary import summarise
from foldwise.scores import diagnostics


@pytest.fixture(scope="module")
def many(run, less, seed):
    """Two regressions, leave-one-out over 40 rows."""
    model, fit = less
    folds = fw.leave_one_out(40)
    other = by_chains(model, folds, fit=fit, draws=60, warmup=30, seed=seed + 4, progress=False)
    return [run("regression", 60, seed + 3), other]


def data(line):
    return np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)


def band(axes, k=0):
    """Lower and upper edge of a band, by x."""
    vertices = axes.collections[k].get_paths()[0].vertices
    x = np.unique(vertices[:, 0])
    edges = [vertices[vertices[:, 0] == value, 1] for value in x]
    return x, np.array([e.min() for e in edges]), np.array([e.max() for e in edges])


def marks(axes):
    """Value and row of every mark of a panel."""
    found = [c.get_offsets() for c in axes.collections if hasattr(c, "get_sizes")]
    found = np.concatenate([np.asarray(f) for f in found if len(f)])
    return found[np.argsort(found[:, 1])]


def title(figure):
    return figure.get_suptitle().replace("\n", " ")


# ---------------------------------------------------------------- against iterations


@pytest.mark.parametrize("score", ["log", "crps", "mse"])
def test_progress_of_a_difference(pair, score):
    found = fw.compare(pair, score)
    axes = fw.plot_progress(*pair, score=score).axes[0]
    x, y = data(axes.lines[0])
    assert x[0] == 20 and x[-1] == 160 and len(x) >= 8
    assert y[-1] == pytest.approx(found.diff, rel=1e-9)
    for n in (20, 160):
        shorter = [first_draws(result, n, score) for result in pair]
        expected = fw.compare(shorter, score)
        assert y[list(x).index(n)] == pytest.approx(expected.diff, rel=1e-9)
        for which, error in enumerate((expected.error, expected.mcse)):
            at, low, high = band(axes, which)
            k = int(np.flatnonzero(at == n)[0])
            assert high[k] - low[k] == pytest.approx(4 * error, rel=1e-6)
            assert high[k] + low[k] == pytest.approx(2 * expected.diff, rel=1e-6)
    assert "iterations per chain" in axes.get_xlabel()
    assert (
        axes.get_ylabel()
        == {
            "log": "elpd difference",
            "crps": "crps difference",
            "mse": "mse saved",
        }[score]
    )


def test_progress_of_one_model(pair):
    figure = fw.plot_progress(pair[0])
    x, y = data(figure.axes[0].lines[0])
    assert y[-1] == pytest.approx(pair[0].elpd, rel=1e-9)
    assert y[3] == pytest.approx(first_draws(pair[0], int(x[3])).elpd, rel=1e-9)
    assert figure.axes[0].get_ylabel() == "elpd"
    assert "regression" in title(figure)


def test_models_of_different_lengths_end_at_the_shorter(pair):
    longer = extend(pair[0].run, 40, progress=False)
    shorter = pair[1].info["draws"]
    figure = fw.plot_progress(longer, pair[1])
    x, y = data(figure.axes[0].lines[0])
    assert x[-1] == shorter < longer.info["draws"]
    assert f"after {shorter} iterations" in title(figure)
    both = fw.compare([first_draws(longer, shorter), pair[1]])
    assert y[-1] == pytest.approx(both.diff, rel=1e-9)


def test_errors(pair):
    found = fw.compare(pair)
    axes = fw.plot_errors(*pair).axes[0]
    se, mcse, fixed = (data(line)[1][-1] for line in axes.lines)
    assert se == pytest.approx(found.se, rel=1e-9)
    assert mcse == pytest.approx(found.mcse, rel=1e-7)
    parts = [result.score("log").full_variance for result in pair]
    assert fixed == pytest.approx(np.sqrt(sum(parts)), rel=1e-7)
    assert axes.get_yscale() == "log"
    (one,) = [data(line)[1][-1] for line in fw.plot_errors(pair[0]).axes[0].lines[:1]]
    assert one == pytest.approx(pair[0].se, rel=1e-9)


def test_probability(pair):
    found = fw.compare(pair)
    axes = fw.plot_probability(*pair).axes[0]
    x, y = data(axes.lines[3])
    assert y[-1] == pytest.approx(found.prob, rel=1e-9)
    assert y[0] == pytest.approx(fw.compare([first_draws(r, 20) for r in pair]).prob, rel=1e-9)
    assert [line.get_ydata()[0] for line in axes.lines[:3]] == pytest.approx([0.5, 0.95, 0.05])
    assert axes.get_ylim() == (0.0, 1.0)


# ---------------------------------------------------------------- by fold


def test_difference_is_sorted_and_named(pair):
    table = fw.compare(pair).folds
    figure = fw.plot_difference(*pair)
    (axes,) = figure.axes
    order = np.argsort(-table["diff"].values)
    np.testing.assert_allclose(marks(axes)[:, 0], table["diff"].values[order])
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == list(table["fold"].values[order])
    bars = np.array([path.vertices[:, 0] for path in axes.collections[0].get_paths()])
    np.testing.assert_allclose(np.ptp(bars, axis=1), 4 * table["mcse"].values[order])
    assert "minus less" in title(figure)
    diff, se = re.search(r"by ([\d.]+) \(SE ([\d.]+),", fw.compare(pair).verdict.sentence).groups()
    assert f"{diff}, SE over folds {se}" in title(figure)  # the digits of the verdict
    assert axes.get_ylabel() == "fold"


def test_the_scheme_says_what_is_drawn(pair, many):
    few, some = (title(fw.plot_scheme(result)) for result in (pair[0], many[0]))
    assert few == "blue: trains; orange: tested"
    assert some == "blue: trains; orange: tested; 14 of 40 folds drawn"


@pytest.mark.parametrize("count, drawn", [(3, 3), (15, 15), (24, 24), (25, 14), (400, 14)])
def test_the_scheme_skips_no_fold_of_a_few(count, drawn):
    assert len(figures_scheme.drawn_folds(count)) == drawn


def test_of_many_folds_the_ends_are_named_and_all_are_drawn(many):
    found = fw.compare(many)
    above, below = fw.plot_difference(*many).axes
    value = np.sort(found.folds["diff"].values)[::-1]
    np.testing.assert_allclose(marks(above)[:, 0], value)
    ends = np.concatenate([value[:12], value[-12:]])
    np.testing.assert_allclose(marks(below)[:, 0], ends)
    assert len(below.get_yticklabels()) == 24
    texts = [text.get_text() for text in below.texts]
    left = found.diff - ends.sum()
    assert f"… 16 folds not named, together {left:.2f} …" in texts


def test_effective_draws_and_tails_by_fold(many):
    table = many[0].folds
    above, below = fw.plot_ess(many[0]).axes
    np.testing.assert_allclose(marks(above)[:, 0], np.sort(table["ess"].values))
    first = np.argsort(table["ess"].values)[:15]
    assert [t.get_text() for t in below.get_yticklabels()] == [str(k) for k in first]
    assert below.get_xlim()[0] < diagnostics.ESS_LIMIT < below.get_xlim()[1]
    above, _ = fw.plot_pareto_k(many[0]).axes
    expected = np.clip(np.sort(table["pareto_k"].values)[::-1], *_K_WINDOW)
    np.testing.assert_allclose(np.sort(marks(above)[:, 0])[::-1], expected)


def test_folds_that_are_not_a_number_are_counted(pair):
    broken = spoiled(pair[0], lambda draws: draws.__setitem__((2, 1, 5), np.nan))
    with pytest.warns(Warning, match="left out"):
        figure = fw.plot_difference(broken, pair[1])
    assert "1 of 8 folds left out" in title(figure)
    assert len(marks(figure.axes[0])) == 7
    with pytest.warns(Warning, match="left out"):
        figure = fw.plot_progress(broken, pair[1])
    assert "1 of 8 folds left out" in title(figure)
    with (
        pytest.warns(Warning, match="left out"),
        pytest.raises(ValueError, match="every fold's score .* but 1 of 8 folds are left out"),
    ):
        fw.plot_probability(broken, pair[1])
    assert "1 of 640 draws not finite" in title(fw.plot_chains(broken, "group c"))
    assert "1 fold not a number" in title(fw.plot_ess(broken))
    assert "1 fold not a number" in title(fw.plot_rhat(broken))
    gone = spoiled(pair[0], lambda draws: draws.__setitem__(2, np.nan))
    with pytest.raises(ValueError, match="group c have no finite log score"):
        fw.plot_chains(gone, "group c")


def test_titles_say_which_part_of_the_scheme_they_are_of(pair):
    known = {**pair[0].info["identity"], "folds": 30}
    some = [replace(r, info={**r.info, "identity": known}) for r in pair]
    for figure in (fw.plot_progress(*some), fw.plot_difference(*some), fw.plot_errors(some[0])):
        assert "; 8 of 30 folds of the scheme" in title(figure)
    assert "of the scheme" not in title(fw.plot_progress(*pair))


# ---------------------------------------------------------------- mixing


def spoiled(result, change):
    """The result had its draws been changed."""
    run = result.run.copy()
    evidence = run.evidence
    draws = evidence.draws.copy()
    change(draws[..., 0])
    run.evidence = replace(evidence, draws=draws).first(evidence.standing.draws, False)
    run.settings = replace(run.settings, scores=("log",))
    run.moves = run.moves * (np.ptp(draws[..., 0], axis=2) > 0)
    return summarise(run)


def test_rhat_by_fold(pair):
    axes = fw.plot_rhat(pair[0]).axes[0]
    ends = np.sort([data(line)[1][-1] for line in axes.lines])
    np.testing.assert_allclose(ends, np.sort(pair[0].mixing.rhat), rtol=1e-10)
    x, y = data(axes.lines[-1])
    worst = int(np.argmax(pair[0].mixing.rhat))
    half = first_draws(pair[0], int(x[3])).mixing.rhat[worst]
    assert y[3] == pytest.approx(half, rel=1e-10)
    name = pair[0].folds["fold"].values[worst]
    assert name in [text.get_text() for text in axes.texts]


def test_rhat_of_many_folds_is_drawn_as_ranges(pair, monkeypatch):
    monkeypatch.setattr(figures_chains, "MOST_LINES", 3)
    axes = fw.plot_rhat(pair[0]).axes[0]
    assert len(axes.lines) == 3
    x, low, high = band(axes)
    others = np.sort(pair[0].mixing.rhat)[:-3]
    assert low[-1] == pytest.approx(others.min()) and high[-1] == pytest.approx(others.max())


def test_rhat_max_and_its_benchmark(pair):
    axes = fw.plot_rhat_max(pair[0]).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["20", "40", "80", "160"]
    mark = [data(line)[1][0] for line in axes.lines]
    assert mark[-1] == pair[0].rhat_max
    assert mark[2] == pytest.approx(first_draws(pair[0], 80).rhat_max, rel=1e-10)
    share = [text.get_text() for text in axes.texts]
    assert share[-1] == f"{pair[0].mixing.share_above:.0%}"


@pytest.mark.parametrize("kind", ["stuck", "shifted"])
def test_a_sick_chain_is_seen(pair, kind):
    def change(draws):
        if kind == "stuck":
            draws[3, 1] = draws[3, 1].min()
        else:
            draws[3, 1] += 5 * draws[3].std()

    sick = spoiled(pair[0], change)
    axes = fw.plot_rhat_max(sick).axes[0]
    assert [text.get_text() for text in axes.texts][-1] == "0%"
    assert "1 of 8 folds above the limit" in title(fw.plot_rhat(sick))
    figure = fw.plot_chains(sick, "group d")
    *traces, running = figure.axes
    status = "stuck chain" if kind == "stuck" else "chains disagree"
    assert len(traces) == 4 and status in title(figure)
    series = sick.draws.values[3]
    for chain, trace in enumerate(traces):
        np.testing.assert_array_equal(data(trace.lines[0])[1], series[chain])
        mean = data(running.lines[chain])[1]
        assert mean[-1] == pytest.approx(series[chain].mean())
        assert mean[19] == pytest.approx(series[chain, :20].mean())


# ---------------------------------------------------------------- calibration


def test_pit(pair):
    left, right = fw.plot_pit(pair[0]).axes
    pit = pair[0].pit().values
    heights = left.patches[1].get_data().values
    np.testing.assert_allclose(heights, np.histogram(pit, len(heights), (0, 1), density=True)[0])
    x, y = data(right.lines[1])
    np.testing.assert_allclose(y, [np.mean(pit <= at) - at for at in x], atol=1e-12)


@pytest.mark.parametrize("rows", [30, 400])
def test_uniform_samples_stay_inside_the_band(rows, rng):
    grid = np.linspace(0, 1, 101)
    low, high = uniform_band(rows, grid)
    sample = np.sort(rng.random((3000, rows)), axis=1)
    inside = np.array([np.searchsorted(s, grid, side="right") / rows for s in sample])
    held = np.mean(((inside >= low - 1e-12) & (inside <= high + 1e-12)).all(axis=1))
    assert abs(held - 0.95) < 0.02


# ---------------------------------------------------------------- what cannot be drawn


@pytest.mark.filterwarnings("ignore::foldwise.results.compare.SeedWarning")
def test_figures_of_results_without_draws(online, run):
    for draw in (fw.plot_progress, fw.plot_errors, fw.plot_rhat):
        with pytest.raises(ValueError, match=r'stored draws.*memory="draws"'):
            draw(online)
    with pytest.raises(ValueError, match="stored draws"):
        fw.plot_chains(online, 0)
    with pytest.raises(ValueError, match="stored draws"):
        fw.plot_probability(online, run("five_fold", 60, 99))
    assert len(marks(fw.plot_ess(online).axes[0])) == 5
    assert len(marks(fw.plot_pareto_k(online).axes[0])) == 5
    (mark,) = fw.plot_rhat_max(online).axes[0].lines
    assert data(mark)[1][0] == online.rhat_max
    with pytest.raises(ValueError, match="predictive draws"):
        fw.plot_pit(online)


def test_figures_of_merged_results(run, seed):
    folds = fw.leave_one_out(30)
    parts = [run("normal_mean", 60, seed + k, folds[k::2]) for k in range(2)]
    merged = fw.merge(parts)
    with pytest.raises(ValueError, match=r"merged.*use the parts"):
        fw.plot_progress(merged)
    assert len(fw.plot_rhat(merged).axes[0].lines) == 30
    assert len(marks(fw.plot_ess(merged).axes[0])) == 30
    traces = fw.plot_chains(merged, 17).axes
    np.testing.assert_array_equal(data(traces[0].lines[0])[1], parts[1].draws.values[8, 0])


def test_what_cannot_be_drawn(pair, many):
    with pytest.raises(ValueError, match="same folds"):
        fw.plot_progress(pair[0], many[0])
    with pytest.raises(ValueError, match="same folds"):
        fw.plot_difference(pair[0], many[0])
    with pytest.raises(ValueError, match=r"one of the 8 folds \(group a, group b, .*got 'z'"):
        fw.plot_chains(pair[0], "z")
    with pytest.raises(TypeError, match="CVResult, got dict"):
        fw.plot_progress({"a": pair[0]})
    with pytest.raises(ValueError, match="effective draws are not known for any fold of crps"):
        fw.plot_ess(pair[0], "crps")
    with pytest.raises(ValueError, match="has the scores log"):
        fw.plot_progress(pair[0], score="brier")


# ---------------------------------------------------------------- files


def test_figures_are_saved_whole(pair, tmp_path):
    folder = tmp_path / "new" / "figures"
    figures = {"ess": fw.plot_ess(pair[0]), "k": lambda: fw.plot_pareto_k(pair[0])}
    paths = fw.save_figures(figures, folder)
    assert [path.name for path in paths] == ["ess.png", "k.png"]
    assert sorted(folder.iterdir()) == paths
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert fw.plot_ess(pair[0])._repr_png_().startswith(b"\x89PNG")


def test_nothing_is_written_when_a_figure_fails(pair, tmp_path):
    figures = {"ess": fw.plot_ess(pair[0]), "bad": lambda: fw.plot_chains(pair[0], "z")}
    with pytest.raises(ValueError, match="8 folds"):
        fw.save_figures(figures, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    with pytest.raises(ValueError, match="plain file names"):
        fw.save_figures({"../ess": figures["ess"]}, tmp_path)
    (tmp_path / "file").write_text("here")
    with pytest.raises(OSError, match="choose a folder"):
        fw.save_figures({"ess": figures["ess"]}, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "here"


def test_an_interrupted_save_leaves_the_older_figure(pair, tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError("no room")

    (tmp_path / "ess.png").write_text("older")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        fw.save_figures({"ess": fw.plot_ess(pair[0])}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ess.png"]
    assert (tmp_path / "ess.png").read_text() == "older"


def test_importing_foldwise_leaves_matplotlib_alone():
    program = (
        "import sys, foldwise as fw; assert 'matplotlib' not in sys.modules; "
        "assert 'plot_ess' in dir(fw); fw.plot_ess; assert 'matplotlib' in sys.modules; "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="plot_nothing"):
        _ = fw.plot_nothing
    assert issubclass(Picture, Figure)


# ---------------------------------------------------------------- comparisons and diagnostics


def test_compare_draws_differences_with_both_errors(pair):
    found = fw.compare(pair)
    figure = fw.plot_compare(found)
    axes = figure.axes[0]
    thin, thick = (c.get_segments()[0][:, 0] for c in axes.collections[:2])
    row = found.table.iloc[1]
    half = [2 * row["error_diff"], 2 * row["mcse_diff"]]
    for segment, size in zip((thin, thick), half, strict=True):
        np.testing.assert_allclose(segment, row["elpd_diff"] + np.array([-size, size]))
    assert data(axes.lines[0])[0].tolist() == [0.0, 0.0]  # the line of zero
    assert [label.get_text() for label in axes.get_yticklabels()] == list(found.table.index)
    text = " ".join(title(figure).split())
    assert found.verdict.headline in text and f"MCSE {error(found.mcse)}" in text
    assert title(fw.plot_compare(dict(zip("ab", pair, strict=True)))) != ""


def error(value):
    from foldwise.results.numbers import error_text

    return error_text(value)


def test_compare_wraps_names(pair):
    long = "a model with " + "very " * 30 + "many words"
    figure = fw.plot_compare({long: pair[0], "b": pair[1]})
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    lines = max(labels, key=len).split("\n")
    assert len(lines) == 3 and max(map(len, lines)) <= 24 and lines[-1].endswith("…")
    assert all(len(line) < 110 for line in figure.get_suptitle().split("\n"))


def test_diagnostics_of_folds_with_chains(pair, online):
    for result in (pair[0], online):
        figure = fw.plot_diagnostics(result)
        table = result.folds
        labels = [ax.get_ylabel() for ax in figure.axes]
        bridged = (table["estimator"].values == "bridge").all()
        first = "overlap,\ndraws" if bridged else "Pareto k\nof densities"
        assert labels == [first, "R-hat", "effective\ndraws"]
        values = [c.get_offsets()[:, 1] for c in figure.axes[1].collections]
        np.testing.assert_allclose(np.concatenate(values), table["rhat"])
        assert result.info["model"] in title(figure)
        assert title(figure).startswith(f"{result.info['model']}: no fold of")


def test_diagnostics_name_flagged_folds(pair):
    table = pair[0].folds.copy(deep=True)
    table["status"] = table["status"].astype(object)
    table["status"][3] = "poor overlap"
    main = next(iter(pair[0].scores))
    scores = {main: replace(pair[0].score(main), folds=table)}
    figure = fw.plot_diagnostics(replace(pair[0], scores=scores))
    assert "1 of 8 folds flagged: poor overlap 1" in title(figure)
    assert "group d" in [text.get_text() for text in figure.axes[0].texts]
    fine, flagged = (c.get_offsets() for c in figure.axes[0].collections)
    assert len(fine) == 7 and flagged[:, 0].tolist() == [3.0]
    labels = figure.axes[-1].xaxis.get_major_formatter()
    assert [labels(at) for at in (0.0, 3.0, 3.5, 8.0)] == ["group a", "group d", "", ""]


def test_diagnostics_of_folds_by_weights(prepared, seed):
    problem, model, fit = prepared("regression")
    result = fw.cross_validate(model, problem.folds, fit, seed=seed, progress=False)
    assert (result.folds["method"].values != "mcmc").all()
    figure = fw.plot_diagnostics(result)
    labels = [ax.get_ylabel() for ax in figure.axes]
    assert labels == ["Pareto k\nof weights", "effective\ndraws"]


@pytest.mark.parametrize(
    "power, words",
    [(0.3, "too narrow"), (9.0, "too wide"), (1.0, "stays inside"), (0.0, "too low")],
)
def test_pit_that_leaves_its_band_is_marked(pair, power, words):
    result = replace(pair[1])
    count = result.calibration.sizes["test_row"]
    even = (np.arange(count) + 0.5) / count
    low = np.where(even < 0.5, 0.5 * (2 * even) ** (1 / power if power else 1), 0.0)
    pit = np.where(even < 0.5, low, 1 - low[::-1]) if power else 0.5 + even / 2
    result.calibration = result.calibration.copy(deep=True)
    result.calibration["below"].values[:], result.calibration["equal"].values[:] = pit, 0.0
    figure = fw.plot_pit(result)
    assert words in title(figure) and "one bar in 20 is outside by chance" in title(figure)
    red = figure.axes[1].lines[2].get_ydata()
    assert np.isfinite(red).any() == (words != "stays inside")
