"""The rooms of the house: which module may know which.

Every import counts, those inside functions and those for types only too.
"""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
# A room may import rooms of a lower floor, and itself. What is not in a room is a room by itself.
FLOORS = {
    "support": 0,
    "datasets": 1,
    "models": 1,
    "folds": 1,
    "scores": 2,
    "sampling": 3,
    "results": 4,
    "crossval": 5,
    "__init__": 6,
    "studies": 7,
    "__main__": 8,
}
# The methods of CVResult and Comparison that print, save, export and draw reach up through this.
REACHES_UP = "foldwise.results.methods"


def module_name(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def modules():
    return {module_name(path): path for path in sorted((SOURCE / "foldwise").rglob("*.py"))}


def imports(name, tree, known):
    """Modules of the package that a module's source imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports by a relative name"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [full if full in known else node.module for full in found]
        else:
            continue
        for full in found:
            full = "foldwise.__init__" if full == "foldwise" else full
            if full in known and full != name:
                yield full


def graph():
    known = modules()
    return {
        name: set(imports(name, ast.parse(path.read_text()), known)) for name, path in known.items()
    }


def room(name):
    return name.split(".")[1]


def test_no_modules_import_each_other():
    arrows = {name: found for name, found in graph().items() if name != REACHES_UP}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_arrows_between_rooms_go_down():
    wrong = [
        f"{name} -> {other}"
        for name, found in graph().items()
        for other in found
        if room(name) != room(other) and FLOORS[room(name)] <= FLOORS[room(other)]
    ]
    assert not wrong, "\n".join(wrong)


def test_only_methods_of_results_reach_up():
    arrows = graph()
    users = {name for name, found in arrows.items() if REACHES_UP in found}
    names = ("results.result", "results.compare", "__init__")
    assert users == {f"foldwise.{name}" for name in names}


def test_scores_import_nothing_that_samples():
    below = [name for name, found in graph().items() if room(name) == "scores" for name in found]
    assert {room(name) for name in below} <= {"scores", "models", "folds", "support"}


def test_importing_foldwise_leaves_parts_of_scipy_alone():
    """They cost a third of importing JAX."""
    program = "import sys, foldwise; assert 'scipy.special' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
