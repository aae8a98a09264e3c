"""A run that can be taken up again: whose folder it is, and whether this is the same run.

The folder has ``run.json``, the identity of the run (its models by their densities at fixed points,
folds, data, settings, seed and version), and a file for every piece of work that is finished
(``support/keeping.py``), each with the key of the run and a checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foldwise.results.identity import different_values, model_values
from foldwise.support.keeping import SUFFIX, FolderKeeper, KeepingWarning, keeping
from foldwise.support.locks import LOCK, locked
from foldwise.support.signals import ended_by_terminate
from foldwise.support.writer import write_whole

if TYPE_CHECKING:
    from foldwise.folds.folds import Folds
    from foldwise.models.model import Model
    from foldwise.sampling.fit import Fit
    from foldwise.sampling.run import Settings

MANIFEST = "run.json"
_FORMAT = {"format": "foldwise-checkpoint", "format_version": 1}
_MOST_SAID = 3


def identity_of(
    models: Sequence[Model], folds: Folds, settings: Settings, fit: Fit | None, **goal: Any
) -> dict[str, Any]:
    """What makes a run this run, as plain JSON values."""
    given = "made here" if fit is None else _digest(fit.positions)
    whole = {
        "foldwise": _version(),
        **asdict(settings),
        **goal,
        "fit": given,
        "scheme": folds.digest,
        "folds": f"{len(folds)} of {folds.total}, {_digest(folds.index)}",
        "models": [str(model.name) for model in models],
        "rows": [model.n_obs for model in models],
        "parameters": [model.dimension for model in models],
        "y": [None if model.y is None else _digest(np.asarray(model.y)) for model in models],
        "densities": [model_values(model).tolist() for model in models],
    }
    return json.loads(json.dumps(whole))  # as it comes back from a file


def _version() -> str:
    try:
        return metadata.version("foldwise")
    except metadata.PackageNotFoundError:
        return "unknown"


def _digest(values: np.ndarray) -> str:
    text = values.dtype.kind in "OUST"
    content = repr(values.tolist()).encode() if text else np.ascontiguousarray(values).tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def seed_kept(folder: str | os.PathLike[str] | None) -> int | None:
    """The seed of the run that a folder holds; None where it holds none."""
    if folder is None:
        return None
    manifest = _read(Path(folder) / MANIFEST)
    return None if manifest is None else manifest["identity"]["seed"]


def kept_fit(folder: Path | None, model: Model, make: Callable[[], Fit], **settings: Any) -> Fit:
    """What ``make`` gives, kept in ``folder`` where one is named: a fit of ``model`` so made."""
    if folder is None:
        return make()
    identity = {"foldwise": _version(), **settings, "densities": [model_values(model).tolist()]}
    with opened(folder, json.loads(json.dumps(identity))) as keeper:
        return keeper.made("fit", make)


@contextmanager
def opened(folder: str | os.PathLike[str], identity: Mapping[str, Any]) -> Iterator[FolderKeeper]:
    """Within this, what is finished is kept in ``folder``, and what is there is not done again.

    Raises where the folder holds another run, or something else; where another process is at work
    in it; and where it cannot be written.
    """
    place = Path(folder).expanduser().absolute()
    _make(place)
    with locked(place), ended_by_terminate():
        key = _taken_up(place, identity)
        try:
            with keeping(FolderKeeper(place, key)) as keeper:
                yield keeper
        except BaseException as error:
            error.add_note(
                f"what is finished is kept in {place}; the same call again goes on from there"
            )
            raise


def _make(place: Path) -> None:
    """The folder, made sure of; raises where it is not one to keep a run in."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        held = [entry.name for entry in place.iterdir() if entry.name not in (MANIFEST, LOCK)]
        write_whole(place / f"can-be-written{SUFFIX}", b"")
        (place / f"can-be-written{SUFFIX}").unlink()
    except OSError as error:
        raise OSError(
            f"checkpoint must name a folder in which files can be made, but {place} is not one "
            f"({error}); choose another"
        ) from error
    foreign = [name for name in held if not name.endswith((SUFFIX, ".partial"))]
    if foreign:
        raise FileExistsError(
            f"checkpoint must name a new or empty folder, or one that holds a run, but {place} "
            f"holds {', '.join(sorted(foreign)[:3])}; choose another"
        )


def _taken_up(place: Path, identity: Mapping[str, Any]) -> str:
    """The key of the run in a folder, which must be this one; a new one where there is none."""
    file = place / MANIFEST
    manifest = _read(file)
    if manifest is None:
        if file.exists():
            said = f"{file} is damaged; all that was kept in its folder is done again"
            warnings.warn(said, KeepingWarning, stacklevel=4)
        for piece in place.glob(f"*{SUFFIX}"):
            piece.unlink()
        manifest = {**_FORMAT, "key": secrets.token_hex(16), "identity": dict(identity)}
        write_whole(file, _sealed(manifest))
    found = differences(manifest["identity"], identity)
    if found:
        shown = "; ".join(found[:_MOST_SAID]) + ("; and more" if len(found) > _MOST_SAID else "")
        raise ValueError(
            f"checkpoint must name a folder of this very run, but {place} holds another: {shown}; "
            "use another folder, or delete this one"
        )
    return str(manifest["key"])


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as a file, with its checksum."""
    content = json.dumps(manifest, sort_keys=True)
    digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
    return json.dumps({**manifest, "checksum": digest}, sort_keys=True, indent=1).encode()


def _read(file: Path) -> dict[str, Any] | None:
    """A manifest; None where there is none, or it is damaged."""
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        digest = manifest.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return manifest if json.loads(_sealed(manifest))["checksum"] == digest else None


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What is not the same in two identities, in words."""
    found = []
    for name in here:
        one, two = there.get(name), here[name]
        if one == two or (name == "densities" and not _other_densities(one, two)):
            continue
        if name == "densities":
            found.append(_other_densities(one, two))
        elif name in ("scheme", "folds", "y"):
            what = {"scheme": "rows of the folds", "folds": "folds", "y": "observations"}[name]
            counts = f" ({str(one).split(',')[0]} there, {str(two).split(',')[0]} here)"
            found.append(f"other {what}" + (counts if name == "folds" else ""))
        elif name == "fit":
            found.append("another full-data fit")
        else:
            found.append(f"{name} is {one!r} there and {two!r} here")
    return found


def _other_densities(there: Any, here: Any) -> str:
    """Which density of which model is not the same; empty where all are."""
    if not isinstance(there, list) or len(there) != len(here):
        return "other models"
    for one, two in zip(there, here, strict=True):
        if np.shape(one) != np.shape(two):
            return "other models"
        differ = different_values(np.asarray(one), np.asarray(two))
        if differ:
            what, was, now = differ
            return f"other model or data: the {what} at a point is {was:.6g} there, {now:.6g} here"
    return ""
