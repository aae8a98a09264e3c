"""The house measured: files, functions, knots, and the way of one call through the rooms.

From the syntax trees of ``src/foldwise``: files and lines, lengths and parameters of functions (the
whole of them, docstrings too), share of comment lines, and the largest group of modules that import
each other. Then one ``cross_validate`` of 8 folds is followed: how many files it walks through, and
in how many distinct ways (this function of one module calls that one of another) it crosses between
modules. Limits: no function over 60 lines or with more than 9 parameters but ``cross_validate``, no
file over 600 lines, no knot but for the methods of results, fewer than 120 crossings.

    python bench/house.py
"""

import ast
import sys
import threading
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import test_house  # noqa: E402

SOURCE = ROOT / "src" / "foldwise"
MOST_LINES, MOST_PARAMETERS, MOST_FILE, MOST_CROSSINGS = 60, 9, 600, 120


def functions(tree):
    """Name, lines and number of parameters of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            names = [argument.arg for argument in given if argument.arg not in ("self", "cls")]
            yield node.name, node.end_lineno - node.lineno + 1, len(names)


def knot():
    """The largest group of modules that import each other, but for methods of results."""
    arrows = {n: f for n, f in test_house.graph().items() if n != test_house.REACHES_UP}

    def reached(name):
        seen, left = set(), [name]
        while left:
            for other in arrows.get(left.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return seen

    reach = {name: reached(name) for name in arrows}
    return max(sum(a in reach[b] and b in reach[a] for b in arrows) for a in arrows)


def crossings():
    """Files of the package that one call of cross_validate walks through, and its crossings."""
    import problems

    import foldwise as fw

    problem = problems.regression()
    folds = fw.k_fold(problem.folds.n, 8, seed=1)
    files, found, inside = set(), set(), str(SOURCE)

    def watch(frame, event, _):
        if event != "call" or not frame.f_code.co_filename.startswith(inside):
            return
        files.add(frame.f_code.co_filename)
        caller = frame.f_back
        if caller is None or not caller.f_code.co_filename.startswith(inside):
            return
        one, two = caller.f_code, frame.f_code
        if one.co_filename != two.co_filename:
            found.add((one.co_filename, one.co_name, two.co_filename, two.co_name))

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        fw.cross_validate(
            problem.model(), folds, scores="log", seed=1, progress=False, method="mcmc"
        )
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return files, found


def main():
    sizes, comments, lines, longest = {}, 0, 0, []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text().splitlines()
        name = str(path.relative_to(SOURCE))
        sizes[name] = len(text)
        lines += len(text)
        comments += sum(line.strip().startswith("#") for line in text)
        longest += [(n, name, *rest) for n, *rest in functions(ast.parse(path.read_text()))]
    lengths = np.array([length for _, _, length, _ in longest])
    quantiles = np.quantile(lengths, [0.5, 0.9])
    print(f"{len(sizes)} files, {lines:,} lines, {comments / lines:.1%} comments")
    print(f"function lines: median {quantiles[0]:g}, p90 {quantiles[1]:g}, max {lengths.max()}")
    group = knot()
    files, found = crossings()
    print(f"largest knot: {group} modules")
    print(f"cross_validate of 8 folds: {len(files)} files, {len(found)} distinct crossings")
    wrong = [f"file {name}: {size} lines" for name, size in sizes.items() if size > MOST_FILE]
    for name, file, length, parameters in longest:
        if name != "cross_validate" and (length > MOST_LINES or parameters > MOST_PARAMETERS):
            wrong.append(f"{file}: {name}, {length} lines, {parameters} parameters")
    if group:
        wrong.append(f"knot of {group} modules")
    if len(found) >= MOST_CROSSINGS:
        wrong.append(f"{len(found)} crossings, must be fewer than {MOST_CROSSINGS}")
    print("\n".join(f"MISSED {line}" for line in wrong) or "all within limits")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
