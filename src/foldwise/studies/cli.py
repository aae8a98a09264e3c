"""The command line: parse, call, print.

Reports go to standard output; progress, warnings and errors to standard error. Exit codes: 0 done
(flagged folds are said in the report and in a warning), 1 an error, 2 a command line that makes no
sense, 130 stopped by Ctrl-C, 143 by SIGTERM. ``FOLDWISE_DEBUG=1`` shows where an error came from.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import foldwise as fw
from foldwise import studies
from foldwise.crossval import MEMORIES, METHODS
from foldwise.results.colour import coloured
from foldwise.results.text import WIDTH
from foldwise.studies import output, own_file, resuming
from foldwise.support.checks import resolve_seed
from foldwise.support.signals import Terminated, ended_by_terminate

# Called with the results so far whenever a model is done; and what does the work of a command.
Finished = Callable[[dict[str, fw.CVResult]], None]
Run = Callable[[Finished], tuple[studies.Outcome, Mapping[str, Any]]]

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

# A fast look: just enough batches for a Monte Carlo error.
QUICK = {"chains": 4, "draws": 50, "warmup": 30}
_SAMPLING = ("draws", "chains", "warmup", "target_mcse")

_EXAMPLE_FILE = """\
FILE.py is a Python file of yours that defines

  models    a dict of models by name, or model, a single one: foldwise.Model,
            what from_numpyro, from_pymc or from_bambi return, a PyMC or Bambi
            model, or a foldwise.model_family
  folds     which rows to leave out, such as foldwise.leave_one_out(n)
  settings  (optional) a dict of further arguments of foldwise.cross_validate,
            such as {"draws": 200, "scores": ("log", "crps")}; options above
            take their place

examples:
  foldwise run my_models.py
  foldwise run my_models.py --target-mcse 0.5 --out results/my_models
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    options.said = shlex.join(["foldwise", *options.arguments])
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    file = getattr(options, "file", None)
    own = file and file.resolve().parent  # before the user's file may change folders
    try:
        with _warnings_in_a_line(), ended_by_terminate():
            options.command(options)
            sys.stdout.flush()
    except KeyboardInterrupt as stop:
        by = "SIGTERM" if isinstance(stop, Terminated) else "Ctrl-C"
        left = [*getattr(stop, "__notes__", ["nothing was written"]), *_how_to_go_on(options)]
        print(f"foldwise: stopped by {by}; {'; '.join(left)}", file=sys.stderr)
        return 143 if isinstance(stop, Terminated) else 130
    except BrokenPipeError:  # the reader of our output has gone, as in "foldwise show DIR | head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        message = _message(error, own)
        if message is None or os.environ.get("FOLDWISE_DEBUG", "0") not in ("", "0"):
            raise
        left = [message, *getattr(error, "__notes__", []), *_how_to_go_on(options)]
        print("\n".join(left), file=sys.stderr)
        return 1
    return 0


def _how_to_go_on(options: argparse.Namespace) -> list[str]:
    """How to take up a command that ended early, where it has begun to keep what it does."""
    folder = getattr(options, "checkpoint", None)
    if folder is None or not any(folder.glob("*/")):
        return []
    return [f"foldwise resume {folder} goes on from there"]


# ---------------------------------------------------------------- commands


def _demo(options: argparse.Namespace) -> None:
    print(
        "Two regressions on simulated groups, every group left out in turn.\n",
        file=sys.stderr,
    )
    _conduct(options, _studied("toy", studies.Options(progress=options.progress, method="auto")))


def _study(options: argparse.Namespace) -> None:
    if options.list:
        width = max(map(len, studies.STUDIES))
        print("\n".join(f"{name:<{width}}  {about}" for name, about in studies.STUDIES.items()))
        return
    if options.name is None:
        options.parser.error(f"NAME is missing: one of {', '.join(studies.STUDIES)}")
    chosen = studies.Options(
        quick=options.quick,
        seed=1 if options.seed is None else options.seed,
        memory=options.memory,
        method=options.method,
        progress=options.progress,
        checkpoint=options.checkpoint,
        **{key: getattr(options, key) for key in _SAMPLING},
    )
    _conduct(options, _studied(options.name, chosen))


def _studied(name: str, chosen: studies.Options) -> Run:
    if chosen.progress:
        line = f"foldwise: study {name}: {studies.STUDIES[name]}"
        print(textwrap.fill(line, WIDTH, subsequent_indent="  "), file=sys.stderr, flush=True)

    def run(finished: Finished) -> tuple[studies.Outcome, dict[str, Any]]:
        return studies.run(name, replace(chosen, finished=finished)), chosen.said()

    return run


def _run(options: argparse.Namespace) -> None:
    def run(finished: Finished) -> tuple[studies.Outcome, dict[str, Any]]:
        file: Path = options.file
        if options.progress:
            print(f"foldwise: reading {file}", file=sys.stderr, flush=True)
        module = own_file.import_file(file)
        models = own_file.models_of(module, file)
        folds = own_file.needed(module, file, "folds")
        settings = {**own_file.settings_of(module, file), **(QUICK if options.quick else {})}
        for key in (*_SAMPLING, "memory", "method", "seed"):
            if getattr(options, key) is not None:
                settings[key] = getattr(options, key)
        settings["seed"] = resolve_seed(settings.get("seed", options.seed_before))
        if options.checkpoint:
            resuming.note_seed(options.checkpoint, settings["seed"])
        settings["progress"] = options.progress
        outcome = _cross_validated(file.stem, models, folds, settings, finished, options.checkpoint)
        outcome.source = file.read_text(encoding="utf-8", errors="replace")
        return outcome, {key: value for key, value in settings.items() if key != "fit"}

    _conduct(options, run)


def _say(outcome: studies.Outcome) -> None:
    """Print what was found, in colour on a terminal."""
    if not sys.stdout.isatty():
        print(outcome, flush=True)
        return
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(coloured(str(outcome)))


def _resume(options: argparse.Namespace) -> None:
    folder = options.folder.resolve()
    command = resuming.read(folder)
    said = shlex.join(["foldwise", *command["arguments"]])
    print(said, resuming.finished(folder), sep="\n", file=sys.stderr)
    os.chdir(command["folder"])
    again = _parser().parse_args(command["arguments"])
    again.said = said
    again.arguments, again.checkpoint, again.overwrite = command["arguments"], folder, True
    options.checkpoint = folder
    again.command(again)


def _show(options: argparse.Namespace) -> None:
    _say(output.read(options.folder))


def _plot(options: argparse.Namespace) -> None:
    outcome = output.read(options.folder)
    place = options.folder if options.folder.is_dir() else options.folder.parent
    target = options.out or place / "figures"
    with output.new_folder(target, options.overwrite) as folder:
        written = output.draw(outcome.figures, folder)
        if not written:
            raise ValueError(f"no figure of {options.folder} could be drawn")
    for stem in written:
        print(target / f"{stem}.png")


def _conduct(options: argparse.Namespace, run: Run) -> None:
    """Run, write and print; the output folder is made sure of first, and each model kept there.

    Figures come last: whatever becomes of them, everything else is in its place.
    """
    place = output.new_folder(options.out, options.overwrite) if options.out else nullcontext()
    with place as folder:
        checkpoint = getattr(options, "checkpoint", None)
        if checkpoint is not None:
            options.seed_before = resuming.begin(checkpoint, options.arguments, options.seed)
        with redirect_stdout(sys.stderr):
            outcome, settings = run(partial(output.keep, folder=folder) if folder else _ignore)
            settings = {**settings, "command": options.said}
        if folder is not None:
            output.write(outcome, settings, folder)
    report = output.record(outcome, settings)
    if options.json:
        print(output.as_json(report), flush=True)
    else:
        _say(outcome)
    if options.out:
        with _noted(f"results and reports are in {options.out}"):
            output.write_page(outcome, report, options.out / output.PAGE)
            output.draw(outcome.figures, options.out / "figures")
        print(f"\nwritten to {options.out}", file=sys.stderr)


def _report(options: argparse.Namespace) -> None:
    outcome = output.read(options.folder)
    place = options.folder if options.folder.is_dir() else options.folder.parent
    target = options.out or place / output.PAGE
    output.write_page(outcome, output.read_record(options.folder), target)
    print(target)


def _ignore(results: dict[str, fw.CVResult]) -> None:
    """Nothing is kept where nobody asked for a folder."""


@contextmanager
def _noted(note: str) -> Iterator[None]:
    """Have ``note`` said where something goes wrong."""
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise


# ---------------------------------------------------------------- a user's own file


def _cross_validated(
    name: str,
    models: dict[str, fw.Model] | fw.ModelFamily,
    folds: Any,
    settings: dict[str, Any],
    finished: Finished,
    checkpoint: Path | None,
) -> studies.Outcome:
    """Results and comparison of the user's models, each with a seed of its own."""
    if isinstance(models, fw.ModelFamily):
        kept = {"checkpoint": checkpoint / "family"} if checkpoint else {}
        results = fw.cross_validate(models, folds, **settings | kept)
    else:
        results = {}
        for k, (label, model) in enumerate(models.items()):
            place = resuming.of_model(checkpoint, [*models], label)
            kept = {"checkpoint": place} if place else {}
            own = {**settings, **kept, "seed": settings["seed"] + k}
            results[label] = fw.cross_validate(model, folds, **own)
            results[label].info["given_seed"] = settings["seed"]
            finished(results)
    comparison = fw.compare(results) if len(results) > 1 else None
    return studies.Outcome(name, results, comparison, "", {}, output.figures(results))


# ---------------------------------------------------------------- messages


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Warnings for users on a line each, and once, without the line of code they came from."""
    said = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in said:
            said.add(str(message))
            print(f"foldwise: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=UserWarning)
        warnings.showwarning = show
        yield


def _message(error: Exception, folder: Path | None) -> str | None:
    """What to tell the user; None for an error that is a mistake of ours, to be seen whole."""
    if isinstance(error, SyntaxError):
        return "foldwise: error in your file\n" + "".join(traceback.format_exception_only(error))
    own = _own_lines(error, folder)
    if own:
        return f"foldwise: error in your file\n{own}{type(error).__name__}: {error}"
    if isinstance(error, (ValueError, TypeError, OSError, ImportError, MemoryError)):
        return f"foldwise: error: {error}"
    return None


def _own_lines(error: BaseException | None, folder: Path | None) -> str:
    """The part of the traceback that is in the user's file, or in files of its folder."""
    if folder is None:
        return ""
    ours = Path(__file__).parents[1]
    while error is not None:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if folder in (path := Path(frame.filename)).parents
            and ours not in path.parents
            and "site-packages" not in path.parts
        ]
        if frames:
            return "".join(traceback.format_list(frames))
        error = error.__cause__ or error.__context__
    return ""


# ---------------------------------------------------------------- options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="foldwise",
        description="Cross-validate Bayesian models: most folds are scored from one full-data "
        "fit;\nthe others are sampled by MCMC, all at once in one compiled program.",
        epilog="examples:\n  foldwise demo\n  foldwise study rats --quick\n"
        "  foldwise run my_models.py --out results\n  foldwise show results\n\n"
        "foldwise COMMAND --help says more about each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"foldwise {fw.__version__}")
    parser.set_defaults(command=None, seed_before=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_demo(commands)
    _add_study(commands)
    _add_run(commands)
    _add_resume(commands)
    _add_show(commands)
    _add_plot(commands)
    _add_report(commands)
    return parser


def _add(
    commands: Commands, name: str, command: Callable[..., None], about: str, epilog: str
) -> argparse.ArgumentParser:
    """A command, its one line in the list of commands and its own help."""
    added = commands.add_parser(
        name,
        help=about[0].lower() + about[1:],
        description=f"{about}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.set_defaults(command=command, parser=added)
    return added


def _add_demo(commands: Commands) -> None:
    demo = _add(
        commands,
        "demo",
        _demo,
        "See it work: two models compared, in about a minute",
        "examples:\n  foldwise demo\n  foldwise demo --out demo_results",
    )
    _add_output(demo)


def _add_study(commands: Commands) -> None:
    study = _add(
        commands,
        "study",
        _study,
        "Run one of the paper's examples",
        "examples:\n  foldwise study --list\n  foldwise study rats --quick\n"
        "  foldwise study radon --memory online --out results/radon\n"
        "  foldwise study toy --json > toy.json",
    )
    study.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        choices=list(studies.STUDIES),
        help=f"which: {', '.join(studies.STUDIES)}",
    )
    study.add_argument("--list", action="store_true", help="say what the studies are, and stop")
    _add_sampling(study, "1")
    _add_output(study)


def _add_run(commands: Commands) -> None:
    own = _add(
        commands, "run", _run, "Cross-validate and compare models of your own", _EXAMPLE_FILE
    )
    own.add_argument("file", metavar="FILE.py", type=Path, help="defines models and folds")
    _add_sampling(own, "the file's, or a new one")
    _add_output(own)


def _add_resume(commands: Commands) -> None:
    resume = _add(
        commands,
        "resume",
        _resume,
        "Go on with a command that was given --checkpoint and has ended early",
        "examples:\n  foldwise study radon --checkpoint kept --out results\n  foldwise resume kept",
    )
    resume.add_argument("folder", metavar="DIR", type=Path, help="what --checkpoint named")


def _add_show(commands: Commands) -> None:
    show = _add(
        commands,
        "show",
        _show,
        "Print results that were saved, and their comparison",
        "examples:\n  foldwise show results\n  foldwise show results/A.nc",
    )
    _add_folder(show)


def _add_plot(commands: Commands) -> None:
    plot = _add(
        commands,
        "plot",
        _plot,
        "Draw figures of results that were saved",
        "examples:\n  foldwise plot results\n  foldwise plot results --out figures",
    )
    _add_folder(plot)
    _add_out(plot, "folder for the PNG files; DIR/figures if left out")


def _add_report(commands: Commands) -> None:
    report = _add(
        commands,
        "report",
        _report,
        "Write the report of results that were saved, one HTML file to mail",
        "examples:\n  foldwise report results\n  foldwise report results --out verdict.html",
    )
    _add_folder(report)
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="the HTML file; DIR/report.html if left out"
    )


def _add_folder(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folder",
        metavar="DIR",
        type=Path,
        help="a folder that --out wrote, or one saved result (*.nc)",
    )


def _add_sampling(command: argparse.ArgumentParser, seed: str) -> None:
    group = command.add_argument_group("how to run")
    group.add_argument("--quick", action="store_true", help="a fast look; numbers are rough")
    group.add_argument("--seed", type=_count(0), metavar="N", help=f"seed; {seed} if left out")
    group.add_argument(
        "--method",
        choices=METHODS,
        help="chains for every fold (mcmc), weights of full-data draws (importance), or refits "
        "and chains only where the weights can not be relied on (auto)",
    )
    group.add_argument(
        "--memory",
        choices=MEMORIES,
        help="keep all draws of the log score, or running sums only (online)",
    )
    group.add_argument("--chains", type=_count(2), metavar="N", help="chains per fold")
    group.add_argument("--draws", type=_count(1), metavar="N", help="draws kept from each chain")
    group.add_argument("--warmup", type=_count(10), metavar="N", help="iterations before them")
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="keep all that is finished in this folder; foldwise resume DIR goes on from there",
    )
    group.add_argument(
        "--target-mcse",
        type=_positive,
        metavar="X",
        help="run on until the Monte Carlo error of each total is at most X",
    )


def _add_output(command: argparse.ArgumentParser) -> None:
    _add_out(command, "new folder for the results, the report and the figures")
    group = command.add_argument_group("what to print")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    group.add_argument(
        "--no-progress", dest="progress", action="store_false", help="no progress bars"
    )


def _add_out(command: argparse.ArgumentParser, about: str) -> None:
    group = command.add_argument_group("what to write")
    group.add_argument("--out", type=Path, metavar="DIR", help=about)
    group.add_argument("--overwrite", action="store_true", help="replace an earlier one")


def _count(least: int) -> Callable[[str], int]:
    def number(value: str) -> int:
        if not value.isascii() or not value.isdigit() or int(value) < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {least}, got {value!r}"
            )
        return int(value)

    return number


def _positive(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {value!r}")
    return number
