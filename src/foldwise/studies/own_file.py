"""A user's own Python file with models and folds, as ``foldwise run`` takes it."""

from __future__ import annotations

import importlib.util
import sys
from copy import copy
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import foldwise as fw

_ADAPTERS = {"pymc": fw.from_pymc, "bambi": fw.from_bambi}


def import_file(file: Path) -> ModuleType:
    """The user's file as a module; it can import its neighbours."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist, or is not a file")
    spec = importlib.util.spec_from_file_location(file.stem, file.resolve())
    if spec is None or spec.loader is None:
        raise ValueError(f"the file must be a Python file, named *.py; got {file}")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    return module


def needed(module: ModuleType, file: Path, name: str) -> Any:
    """What the file calls ``name``; raises where it defines no such thing."""
    if not hasattr(module, name):
        raise ValueError(f'{file} must define "{name}", but it does not; see foldwise run --help')
    return getattr(module, name)


def models_of(module: ModuleType, file: Path) -> dict[str, fw.Model] | fw.ModelFamily:
    """The file's models by name, or its family."""
    if hasattr(module, "model") and not hasattr(module, "models"):
        models = module.model
        if not isinstance(models, (dict, fw.ModelFamily)):
            models = {getattr(models, "name", None) or file.stem: models}
    else:
        models = needed(module, file, "models")
    if isinstance(models, fw.ModelFamily):
        return models
    if not isinstance(models, dict) or not models:
        raise ValueError(
            f"models in {file} must be a dict of at least one model by name, got {models!r}"
        )
    return {str(name): _model(str(name), model, file) for name, model in models.items()}


def _model(name: str, model: Any, file: Path) -> fw.Model:
    """The model, under the name it is to be printed with."""
    package = type(model).__module__.partition(".")[0]
    if package in _ADAPTERS:
        model = _ADAPTERS[package](model)
    if not isinstance(model, fw.Model):
        raise TypeError(
            f"model {name!r} in {file} must be a foldwise.Model, or a PyMC or Bambi model, but it "
            f"is a {type(model).__name__}; a NumPyro model becomes one by foldwise.from_numpyro"
        )
    named = copy(model)
    object.__setattr__(named, "name", name)
    return named


def settings_of(module: ModuleType, file: Path) -> dict[str, Any]:
    """Arguments of ``cross_validate`` that the file sets."""
    settings = getattr(module, "settings", {})
    known = list(signature(fw.cross_validate).parameters)[2:]
    if not isinstance(settings, dict):
        raise TypeError(f"settings in {file} must be a dict, got {type(settings).__name__}")
    for key in settings:
        if key not in known:
            raise ValueError(
                f"settings in {file} must be arguments of foldwise.cross_validate "
                f"({', '.join(known)}), but one is {key!r}"
            )
    return settings
