"""Commands that are taken up again: what was asked for, and what of it is finished.

A checkpoint folder of the command line has ``command.json``, which command it was and from where,
and for each model a folder of ``cross_validate(..., checkpoint=)``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foldwise.results.checkpoints import MANIFEST
from foldwise.studies.output import file_stems
from foldwise.support.keeping import SUFFIX
from foldwise.support.words import counted
from foldwise.support.writer import write_whole

COMMAND = "command.json"
# What pieces are called, by the first word of their files.
_WORDS = {
    "fit": "full-data fit",
    "longer": "longer fit",
    "weights": "piece of importance weights",
    "refits": "refit",
    "folds": "piece of folds",
    "rung": "piece of rungs",
}


def begin(folder: Path, arguments: Sequence[str], seed: int | None) -> int | None:
    """Note in ``folder`` which command this is; returns the seed that it had before, if it had."""
    if seed is None and (folder / COMMAND).is_file():
        seed = read(folder).get("seed")
    folder.mkdir(parents=True, exist_ok=True)
    command = {"arguments": list(arguments), "folder": str(Path.cwd()), "seed": seed}
    write_whole(folder / COMMAND, json.dumps(command, indent=1).encode())
    return seed


def note_seed(folder: Path, seed: int) -> None:
    """Note the seed that the command was given by chance."""
    write_whole(folder / COMMAND, json.dumps({**read(folder), "seed": seed}, indent=1).encode())


def read(folder: Path) -> dict[str, Any]:
    """The command that a folder was made by."""
    file = folder / COMMAND
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} must be a folder that --checkpoint made, with {COMMAND} in it, but it is "
            "not; a run of Python goes on by the same call of cross_validate with checkpoint="
        )
    try:
        command: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _ = [*command["arguments"], Path(command["folder"])]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged ({error}); start the command again with --checkpoint {folder}"
        ) from error
    return command


def of_model(folder: Path | None, names: Sequence[str], name: str) -> Path | None:
    """Where a model's run is kept."""
    return None if folder is None else folder / file_stems(dict.fromkeys(names))[name]


def finished(folder: Path) -> str:
    """What of a command is finished, a line for each model."""
    lines = []
    for place in sorted(file.parent for file in folder.glob(f"*/{MANIFEST}")):
        names = (file.name.split("-") for file in place.glob(f"*{SUFFIX}"))
        kinds = Counter(parts[0] for parts in names if f"part{SUFFIX}" not in parts)
        said = [counted(kinds[kind], word) for kind, word in _WORDS.items() if kinds[kind]]
        lines.append(f"  {place.name}: {', '.join(said) or 'nothing yet'}")
    return "\n".join(["finished so far:", *(lines or ["  nothing yet"])])
