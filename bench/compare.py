"""foldwise beside what a user would pick instead, on the same models, data and folds.

Every method runs on every subject in a process of its own, with empty caches, so nothing is
compiled before; on rats once more in a new process that finds what the first has cached ("again").
"foldwise" has chains on all parameters for every fold, "globals" on what all rows share,
"auto" is what it does when nothing is said.
Where refits are slow a random sample of folds is run and time extrapolated, marked ~. Then the
error of the difference between the rats models over many seeds, at the paper's run length on both
sides, and how time grows with the number of folds. Prints tables and ratios with their targets and
writes compare.json and compare.md. Exits with 1 where a ratio misses its target (with --quick: half
of it). Needs FOLDWISE_DATA.

    FOLDWISE_DATA=... python bench/compare.py [--out FOLDER] [--quick] [--parts rats growth ...]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

SUBJECTS = ("rats", "radon", "air", "wells")
METHODS = ("foldwise", "globals", "auto", "paper", "nutpie", "numpyro", "psis")
PARTS = (*SUBJECTS, "accuracy", "growth")
LEFT_OUT = (30, 100, 300, 1000, 3000)
GROUPS = (30, 100, 300, 1000)
# name: target, whether at least or at most
TARGETS = {
    "rats: faster than nutpie refits": (5.0, "at least"),
    "radon: faster than nutpie refits": (20.0, "at least"),
    "air: faster than nutpie refits": (8.0, "at least"),
    "rats: auto faster than nutpie refits": (8.0, "at least"),
    "radon: auto faster than nutpie refits": (40.0, "at least"),
    "wells: auto faster than nutpie refits": (500.0, "at least"),
    "wells: auto against the full-data fit and PSIS": (1.6, "at most"),
    "radon: auto, all folds against the two full-data fits": (0.4, "at most"),
    "rats: error of the difference, the paper's sampler against foldwise": (4.0, "at least"),
    "radon: CV of both models against the two full-data fits": (6.0, "at most"),
    "growth: exponent of time against folds": (1.1, "at most"),
}


# ---------------------------------------------------------------- in a process of its own


def one(subject_name, method, seed, folds):
    """What a method finds and takes, as plain values."""
    import rivals
    from subjects import SUBJECTS

    subject = SUBJECTS[subject_name]()
    arguments = {} if folds is None else {"folds": np.arange(len(subject.folds))[:folds]}
    found = rivals.METHODS[method](subject, seed, **arguments)
    count, models = len(subject.folds), len(subject.models)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record = asdict(found) | {
        "folds": found.folds.tolist(),
        "elpd": {label: values.tolist() for label, values in found.elpd.items()},
        "sampled": len(found.folds) < count,
        "seconds": found.once + found.each * count,
        "posteriors": models * count,
        "memory": peak,
        "gradients": found.gradients_once + found.gradients_each * count,
    }
    if method == "foldwise":
        record["loop"] = rivals.gradient_seconds(subject)
        if subject.exact is not None:
            record["exact"] = {label: subject.exact(label).tolist() for label in subject.models}
    return record


def accuracy(seeds):
    """Errors of the rats difference at 8 chains of 500 draws, foldwise and the paper's sampler."""
    import rivals
    from subjects import SUBJECTS

    import foldwise as fw

    subject = SUBJECTS["rats"]()
    exact = subject.exact("A").sum() - subject.exact("B").sum()
    errors, mcse = {"foldwise": [], "paper": []}, {"foldwise": [], "paper": []}
    for seed in range(seeds):
        results = []
        for k, model in enumerate(subject.models.values()):
            own = 2 * seed + k
            fit = fw.fit(model, chains=8, draws=2000, seed=own, progress=False)
            results.append(
                fw.cross_validate(
                    model,
                    subject.folds,
                    fit,
                    chains=8,
                    draws=500,
                    method="mcmc",
                    seed=own,
                    progress=False,
                )
            )
        errors["foldwise"].append(results[0].elpd - results[1].elpd - exact)
        mcse["foldwise"].append(float(np.hypot(results[0].mcse, results[1].mcse)))
        found = rivals.paper(subject, seed)
        errors["paper"].append(found.elpd["A"].sum() - found.elpd["B"].sum() - exact)
        mcse["paper"].append(float(np.hypot(found.mcse["A"], found.mcse["B"])))
    rms = {name: float(np.sqrt(np.mean(np.square(e)))) for name, e in errors.items()}
    return {"errors": errors, "mcse": mcse, "rms": rms, "seeds": seeds, "exact": exact}


def growth():
    """Seconds of cross-validation by number of folds, of one model and of models that grow."""
    from subjects import growth_model

    import foldwise as fw

    settings = {"draws": 50, "warmup": 26, "method": "mcmc", "seed": 1, "progress": False}
    model, group = growth_model(max(LEFT_OUT))
    folds, fit = fw.leave_group_out(group), fw.fit(model, seed=1, progress=False)
    series = {"left_out": {}, "groups": {}}
    for count in LEFT_OUT:
        began = time.perf_counter()
        fw.cross_validate(model, folds.sample(count, seed=1), fit, **settings)
        series["left_out"][count] = time.perf_counter() - began
    for count in GROUPS:
        model, group = growth_model(count)
        fit = fw.fit(model, seed=1, progress=False)
        began = time.perf_counter()
        fw.cross_validate(model, fw.leave_group_out(group), fit, **settings)
        series["groups"][count] = time.perf_counter() - began
    return series


def alone(*arguments, again=False):
    """Run a part of this script in a process of its own, its caches empty at first.

    With ``again`` a second process follows; ``again`` of the answer is how long that one took.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", __file__, "--child", str(file)]
        command += [str(argument) for argument in arguments]
        flags = [*filter(None, os.environ.get("PYTENSOR_FLAGS", "").split(","))]
        caches = {
            "FOLDWISE_CACHE": f"{folder}/foldwise",
            "NUMBA_CACHE_DIR": f"{folder}/numba",
            "PYTENSOR_FLAGS": ",".join(
                filter(None, [*flags, f"base_compiledir={folder}/pytensor"])
            ),
        }
        if "numpyro" in arguments:
            caches["FOLDWISE_DEVICES"] = "4"  # one for each chain
        found = []
        for _ in range(1 + again):
            subprocess.run(command, env={**os.environ, **caches}, check=True)
            found.append(json.loads(file.read_text()))
        return found[0] | ({"again": found[1]["seconds"]} if again else {})


def child(file, arguments):
    part, *rest = arguments
    if part == "accuracy":
        found = accuracy(int(rest[0]))
    elif part == "growth":
        found = growth()
    else:
        found = one(part, rest[0], int(rest[1]), int(rest[2]) if len(rest) > 2 else None)
    Path(file).write_text(json.dumps(found))


# ---------------------------------------------------------------- tables


def errors_of(record, exact):
    """Errors of the first model's total and of the difference, over the folds that were run."""
    if exact is None:
        return None, None
    gap = {
        label: np.sum(record["elpd"][label]) - np.sum(np.asarray(exact[label])[record["folds"]])
        for label in exact
    }
    first, second = gap.values()
    return first, first - second


def floor_of(record):
    """Seconds of as many gradients in a compiled loop over contiguous data, on two cores."""
    return record["loop"] * record["gradients"] / 2


def times_floor(record):
    return (record["seconds"] - record["compile"]) / floor_of(record)


def whole(seconds):
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:,.0f}"


def line(subject, method, record, exact, titles):
    error, error_of_difference = errors_of(record, exact)
    mark = "~" if record["sampled"] else ""
    mcse = list(record["mcse"].values())
    over = f", {len(record['folds'])} folds" if record["sampled"] else ""
    cells = [
        subject,
        titles[method],
        mark + whole(record["seconds"]),
        mark + whole(record["seconds"] - record["compile"]),
        whole(record["again"]) if "again" in record else "-",
        f"{record['posteriors']:,}",
        f"{record['memory']:,.0f}",
        f"{mark}{record['gradients'] / 1e6:,.1f}",
        f"{times_floor(record):.1f}" if "loop" in record else "-",
        f"{mcse[0]:.2f}",
        "-" if error is None else f"{error:+.2f}",
        f"{np.hypot(*mcse):.2f}",
        "-" if error_of_difference is None else f"{error_of_difference:+.2f}",
        record["note"] + over if record["note"] else over.removeprefix(", "),
    ]
    return cells


HEAD = [
    "problem",
    "method",
    "seconds",
    "compiled",
    "again",
    "posteriors",
    "MB",
    "gradients, M",
    "x floor",
    "MCSE A",
    "error A",
    "MCSE A-B",
    "error A-B",
    "",
]


def markdown(lines):
    widths = [max(len(row[i]) for row in [HEAD, *lines]) for i in range(len(HEAD))]

    def row(cells):
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([row(HEAD), rule, *map(row, lines)])


def exponent(series):
    """Slope of log seconds against log size."""
    size, seconds = np.log([int(k) for k in series]), np.log(list(series.values()))
    return float(np.polyfit(size, seconds, 1)[0])


def ratios_of(found):
    """What the targets are about, of the parts that were run."""
    ratios = {}
    for name in ("rats", "radon", "air"):
        if {"foldwise", "nutpie"} <= set(found.get(name, {})):
            ratio = found[name]["nutpie"]["seconds"] / found[name]["foldwise"]["seconds"]
            ratios[f"{name}: faster than nutpie refits"] = ratio
    for name in ("rats", "radon", "wells"):
        if {"auto", "nutpie"} <= set(found.get(name, {})):
            ratio = found[name]["nutpie"]["seconds"] / found[name]["auto"]["seconds"]
            ratios[f"{name}: auto faster than nutpie refits"] = ratio
    if {"auto", "psis"} <= set(found.get("wells", {})):
        ratio = found["wells"]["auto"]["seconds"] / found["wells"]["psis"]["seconds"]
        ratios["wells: auto against the full-data fit and PSIS"] = ratio
    if "auto" in found.get("radon", {}):
        whole = found["radon"]["auto"]
        fits = float(whole["note"].split()[-2])
        name = "radon: auto, all folds against the two full-data fits"
        ratios[name] = (whole["seconds"] - fits) / fits
    if "accuracy" in found:
        rms = found["accuracy"]["rms"]
        name = "rats: error of the difference, the paper's sampler against foldwise"
        ratios[name] = rms["paper"] / rms["foldwise"]
    if "foldwise" in found.get("radon", {}):
        whole = found["radon"]["foldwise"]
        fits = float(whole["note"].split()[-2])
        name = "radon: CV of both models against the two full-data fits"
        ratios[name] = (whole["seconds"] - fits) / fits
    if "growth" in found:
        name = "growth: exponent of time against folds"
        ratios[name] = exponent(found["growth"]["left_out"])
    return ratios


def report(found, quick):
    """All that is printed, and whether every target is met."""
    from rivals import TITLES

    lines, floors, met = [], [], True
    for subject in SUBJECTS:
        for method, record in found.get(subject, {}).items():
            exact = found[subject].get("foldwise", {}).get("exact")
            lines.append(line(subject, method, record, exact, TITLES))
            if "loop" in record:
                floors.append(
                    f"- {subject}: foldwise's {record['gradients'] / 1e6:.1f} M gradients at "
                    f"{1e6 * record['loop']:.1f} us in a compiled loop over contiguous data, on "
                    f"two cores, are {floor_of(record):.1f} s; foldwise without compiling took "
                    f"{times_floor(record):.1f} times that"
                )
    parts = [markdown(lines)] if lines else []
    parts.append(
        "Seconds in all, without compiling, and in a second process that finds the first one's "
        "caches; ~ extrapolated from the folds named. Errors are against exact answers, over the "
        "folds that were run."
    )
    if floors:
        parts.append("The floor:\n\n" + "\n".join(floors))
    if "accuracy" in found:
        a = found["accuracy"]
        parts.append(
            f"Difference of the rats models, {a['seeds']} seeds, 8 chains of 500 draws: rms error "
            + ", ".join(
                f"{a['rms'][k]:.2f} {TITLES[k]} (mean MCSE {np.mean(a['mcse'][k]):.2f})"
                for k in ("foldwise", "paper")
            )
            + f"; exact {a['exact']:.2f}"
        )
    if "growth" in found:
        for name, what in (
            ("left_out", "folds of a model with 3,000 groups"),
            ("groups", "groups, all left out"),
        ):
            series = found["growth"][name]
            times = ", ".join(f"{size}: {seconds:.1f}" for size, seconds in series.items())
            parts.append(f"Seconds by number of {what}: {times}; exponent {exponent(series):.2f}")
    verdicts = []
    for name, ratio in ratios_of(found).items():
        target, sense = TARGETS[name]
        limit = target / 2 if quick else target
        good = ratio >= limit if sense == "at least" else ratio <= limit
        met &= good
        verdicts.append(f"- {name}: {ratio:.2f} ({sense} {limit:g}){'' if good else '  MISSED'}")
    parts.append("\n".join(verdicts))
    return "\n\n".join(parts), met


def save(found, folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.json").write_text(json.dumps(found, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="bench/out", help="folder for compare.json and compare.md")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--quick", action="store_true", help="rats only, few folds and seeds")
    parser.add_argument("--seeds", type=int, default=30, help="of the accuracy part")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], arguments.child[1:])
        return
    out = Path(arguments.out)
    if arguments.quick:
        folder = os.environ.get("FOLDWISE_DATA")
        if not folder or not Path(folder).is_dir():
            print(f"skipped: FOLDWISE_DATA={folder} names no folder with the data")
            return
        found = {
            "rats": {
                "foldwise": alone("rats", "foldwise", 1),
                "nutpie": alone("rats", "nutpie", 1, 6),
            },
            "accuracy": alone("accuracy", 2),
        }
    else:
        found = {}
        for part in arguments.parts:
            if part in SUBJECTS:
                found[part] = {}
                for method in arguments.methods:
                    found[part][method] = alone(part, method, 1, again=part == "rats")
                    took = found[part][method]["seconds"]
                    print(f"{part}, {method}: {took:.0f} s", file=sys.stderr, flush=True)
                    save(found, out)
            else:
                found[part] = alone(*((part, arguments.seeds) if part == "accuracy" else (part,)))
                save(found, out)
    text, met = report(found, arguments.quick)
    print(text)
    save(found, out)
    (out / "compare.md").write_text(text + "\n")
    sys.exit(not met)


if __name__ == "__main__":
    main()
