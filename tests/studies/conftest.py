"""A run of two models with its folder, and stand-ins for studies and figures."""

import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

import foldwise as fw
from foldwise import results as results_room
from foldwise import studies
from foldwise.studies import cli, output

FAMILY = """
import jax.numpy as jnp
import numpy as np
import foldwise as fw

print("a line of the user's own")
rng = np.random.default_rng(1)
x = rng.normal(size=20)
y = 2 * x + rng.normal(size=20)
models = fw.model_family(
    lambda q, s: -0.5 * jnp.sum(q**2),
    lambda q, s: -0.5 * (y - q[0] - s[0] * q[1] * x) ** 2 - 0.919,
    np.zeros(2), 20, selections=[[1.0], [0.0]], names=["with x", "x/without"], y=y,
)
folds = fw.k_fold(20, 5)
settings = {"draws": 60}
"""


def run_family(folder: Path, *arguments: str) -> str:
    file = folder / "family.py"
    file.write_text(FAMILY)
    out = StringIO()
    with redirect_stdout(out):
        assert (
            cli.main(
                ["run", str(file), "--seed", "5", "--no-progress", "--method", "mcmc", *arguments]
            )
            == 0
        )
    return out.getvalue()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder and printed report of a real run of two models."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        fake_plots(patch, page=True)
        printed = run_family(folder, "--out", str(folder / "new" / "results"))
    return folder / "new" / "results", printed


@pytest.fixture(scope="module")
def results(saved):
    return output.read(saved[0]).results


def fake_plots(monkeypatch, page: bool = False) -> list:
    """Stands in for foldwise.results.figures; a figure is a record of what would be drawn.

    ``page``: the report to mail is written, which takes seconds.
    """
    drawn = []
    if not page:
        monkeypatch.setattr(output, "write_page", lambda outcome, report, file: None)

    def plot(name):
        return lambda *of: drawn.append((name, len(of))) or name

    def save_figures(figures, folder):
        Path(folder).mkdir(exist_ok=True)
        for stem, figure in figures.items():
            (Path(folder) / f"{stem}.png").write_text(figure())

    names = ("progress", "errors", "difference", "probability", "compare", "rhat_max")
    module = SimpleNamespace(
        save_figures=save_figures,
        **{f"plot_{name}": plot(name) for name in (*names, "diagnostics", "pit", "chains")},
    )
    monkeypatch.setitem(sys.modules, "foldwise.results.figures", module)
    monkeypatch.setattr(results_room, "figures", module, raising=False)
    monkeypatch.setattr(fw, "plots", module, raising=False)
    return drawn


@pytest.fixture
def plots(monkeypatch):
    return fake_plots(monkeypatch)


@pytest.fixture
def study(monkeypatch, results):
    """What studies.run was asked for; it answers with the saved results."""
    asked = []

    def run(name, options):
        asked.append((name, options))
        print("chatter of the study")
        return studies.Outcome(
            name, results, fw.compare(results), "A wins.", {"Run": "table"}, {"one": lambda: "one"}
        )

    monkeypatch.setattr(studies, "run", run)
    monkeypatch.setattr(studies, "STUDIES", {"toy": "about toys", "rats": "about rats"})
    return asked


@pytest.fixture
def light(monkeypatch, plots):
    """Results are not written in full, which takes a second each."""
    monkeypatch.setattr(fw.CVResult, "save", lambda self, path: path.write_text("result"))
