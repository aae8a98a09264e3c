"""Data sets of the studies, read from the folder that FOLDWISE_DATA names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def folder() -> Path:
    """The folder that the environment variable FOLDWISE_DATA names."""
    if "FOLDWISE_DATA" not in os.environ:
        raise FileNotFoundError("set FOLDWISE_DATA to the folder that holds the data sets")
    return Path(os.environ["FOLDWISE_DATA"])


def load(name: str) -> pd.DataFrame:
    """The data set called ``name`` as a table."""
    import pandas as pd

    return pd.read_csv(folder() / f"{name}.csv")
