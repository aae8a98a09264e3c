"""Data sets of the worked examples: found on disk or downloaded, and always checked.

A data set is one CSV file with a known SHA-256. It is read from the folder that the environment
variable ``FOLDWISE_DATA`` names, else from the user's cache, else downloaded from where it was
first published, converted to the same CSV file and kept in the cache. A file with another checksum
is never used: other data would silently give other numbers.

=========== ====== =========================================================== ================
name          rows what                                                        licence
=========== ====== =========================================================== ================
rats           150 weights of 30 young rats on five days                       BSD-3-Clause
radon_all   12,573 radon in homes of 386 US counties                           BSD-3-Clause
radon_mn       919 the same for the 85 counties of Minnesota                   BSD-3-Clause
air_traffic    420 monthly international air passengers of Australia           CC BY 3.0 AU
wells        3,020 who switched to a safer well in Bangladesh                  BSD-3-Clause
kidiq          434 test scores of children, and their mothers                  BSD-3-Clause
=========== ====== =========================================================== ================
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foldwise.support.runtime import cache_dir
from foldwise.support.writer import whole_file

if TYPE_CHECKING:
    import pandas as pd

_POSTERIORDB = (
    "https://raw.githubusercontent.com/stan-dev/posteriordb/master/posterior_database/data/data/"
)
_AIRPORT_TRAFFIC = (
    "https://data.gov.au/data/dataset/cc5d888f-5850-47f3-815d-08289b22f5a8/"
    "resource/38bdc971-cb22-4894-b19a-814afc4e8164/download/mon_pax_web.csv"
)
_DOWNLOAD_SECONDS = 30


@dataclass(frozen=True)
class Dataset:
    """Where a data set comes from, and how its table is made from the file found there."""

    about: str
    source: str
    licence: str
    url: str
    sha256: str
    table: Callable[[bytes], Iterable[Iterable[object]]]


def load(name: str) -> pd.DataFrame:
    """The data set called ``name``, checked; see :func:`describe` for what it is.

    Looks in the folder named by ``FOLDWISE_DATA``, then in the user's cache, then downloads.
    """
    import pandas as pd

    return pd.read_csv(io.BytesIO(_content(name)))


def describe(name: str) -> str:
    """What the data set is, its columns, where it comes from and its licence."""
    found = _find(name)
    return (
        f"{name}: {found.about}\nSource: {found.source}\n{found.url}\nLicence: {found.licence}\n"
        f"SHA-256 of {name}.csv: {found.sha256}"
    )


def folder() -> Path | None:
    """Where data sets are looked for first: the folder ``FOLDWISE_DATA`` names, else the cache.

    None if that variable is not set and the cache is switched off (``FOLDWISE_CACHE=off``).
    """
    setting = os.environ.get("FOLDWISE_DATA")
    return Path(setting).expanduser() if setting else _cache_folder()


def _find(name: str) -> Dataset:
    if name not in DATASETS:
        raise ValueError(f"a data set must be one of {', '.join(DATASETS)}; got {name!r}")
    return DATASETS[name]


def _cache_folder() -> Path | None:
    """Beside the compilation cache, or in the folder that ``FOLDWISE_CACHE`` names."""
    programs = cache_dir()
    if programs is None:
        return None
    return (programs if os.environ.get("FOLDWISE_CACHE") else programs.parent) / "data"


# ---------------------------------------------------------------- finding


def _content(name: str) -> bytes:
    """The CSV file, from the first place that has it."""
    found = _find(name)
    file = f"{name}.csv"
    looked = ["FOLDWISE_DATA is not set"]
    if os.environ.get("FOLDWISE_DATA"):
        given = Path(os.environ["FOLDWISE_DATA"]).expanduser() / file
        if given.is_file():
            return _given(given, found)
        looked = [f"FOLDWISE_DATA has no {file} (it names {given.parent})"]
    cache = _cache_folder()
    if cache is None:
        looked.append("the cache is switched off")
    elif (cache / file).is_file():
        content = (cache / file).read_bytes()
        if _sha256(content) == found.sha256:
            return content
        damaged = f"the copy in the cache, {cache / file}, is damaged"
        warnings.warn(f"{damaged}; {name} is downloaded again", stacklevel=3)
        looked.append(damaged)
    else:
        looked.append(f"the cache has no {file} ({cache})")
    content = _download(name, found, looked)
    if cache is not None:
        _keep(content, cache / file)
    return content


def _given(file: Path, found: Dataset) -> bytes:
    content = file.read_bytes()
    if _sha256(content) != found.sha256:
        raise ValueError(
            f"{file} must be the published data, but it is not: its SHA-256 is "
            f"{_sha256(content)} and should be {found.sha256}. Restore it, or delete it to have "
            "it downloaded; to use data of your own, read them with pandas"
        )
    return content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _keep(content: bytes, target: Path) -> None:
    """Write to the cache, whole or not at all; a cache that cannot be written is no failure."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as partial:
            partial.write_bytes(content)
    except OSError as error:
        warnings.warn(f"{target} could not be kept in the cache ({error})", stacklevel=4)


# ---------------------------------------------------------------- downloading


def _download(name: str, found: Dataset, looked: list[str]) -> bytes:
    """The file from its source, as the CSV file it must become."""
    elsewhere = f"put {name}.csv into a folder and set FOLDWISE_DATA to that folder"
    try:
        raw = _fetch(found.url)
    except OSError as error:
        raise ConnectionError(
            f"data set {name} is not on this computer: {', and '.join(looked)}. Downloading it "
            f"from {found.url} failed ({error}). Go online, or {elsewhere}"
        ) from error
    try:
        content = _csv_bytes(found.table(raw))
    except (ValueError, LookupError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{found.url} must be the file that {name}.csv is made from, but it could not be "
            f"read as such ({type(error).__name__}: {error}); {elsewhere}"
        ) from error
    if _sha256(content) != found.sha256:
        raise ValueError(
            f"{found.url} has changed since it was published: {name}.csv made from it has the "
            f"SHA-256 {_sha256(content)}, which should be {found.sha256}. To have the same "
            f"numbers, {elsewhere}; the source is {found.source}"
        )
    return content


def _fetch(url: str) -> bytes:
    from http.client import HTTPException
    from urllib.request import Request, urlopen

    try:
        with urlopen(
            Request(url, headers={"User-Agent": "foldwise"}), timeout=_DOWNLOAD_SECONDS
        ) as r:
            return bytes(r.read())
    except HTTPException as error:  # cut short, or not HTTP at all
        raise OSError(f"{type(error).__name__}: {error}") from error


# ---------------------------------------------------------------- converting


def _csv_bytes(table: Iterable[Iterable[object]]) -> bytes:
    """Lines of a table, the first its header, as a CSV file."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(table)
    return stream.getvalue().encode()


def _posteriordb(
    columns: dict[str, tuple[str, type]], sort: bool = False
) -> Callable[[bytes], list[list[object]]]:
    """Makes a table of a zipped JSON file with a list for each column.

    ``columns`` are the table's, each with the name of its list and the type of its numbers; rows
    are sorted by all columns where ``sort``.
    """

    def table(raw: bytes) -> list[list[object]]:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            data = json.loads(archive.read(archive.namelist()[0]))
        values = [[_number(v, kind) for v in data[key]] for key, kind in columns.values()]
        rows = [list(row) for row in zip(*values, strict=True)]
        return [list(columns), *(sorted(rows) if sort else rows)]

    return table


def _number(value: Any, kind: type) -> object:
    if kind is int and int(value) != value:
        raise ValueError(f"whole numbers were expected, got {value!r}")
    return kind(value)


def _same(**kinds: type) -> dict[str, tuple[str, type]]:
    """Columns that keep their names."""
    return {name: (name, kind) for name, kind in kinds.items()}


def _air_traffic(raw: bytes) -> list[list[object]]:
    """International passengers of all airports together, 1985 to 2019."""
    whole = "All Australian Airports"
    columns = ("Year", "Month", "Int_Pax_In", "Int_Pax_Out", "Int_Pax_Total")
    rows = [
        [int(line[column]) for column in columns]
        for line in csv.DictReader(io.StringIO(raw.decode("utf-8-sig")))
        if line["AIRPORT"] == whole and 1985 <= int(line["Year"]) <= 2019
    ]
    head: list[object] = ["Scope", "Year", "Month", "Inbound", "Outbound", "Total"]
    return [head, *([whole, *row] for row in sorted(rows))]


def _of_posteriordb(about: str, file: str, sha256: str, table: Any) -> Dataset:
    source = f"posteriordb (github.com/stan-dev/posteriordb), {file}.json.zip"
    return Dataset(about, source, "BSD-3-Clause", f"{_POSTERIORDB}{file}.json.zip", sha256, table)


_RADON = _same(log_radon=float, floor_measure=int, log_uppm=float, county_idx=int)

DATASETS = {
    "rats": _of_posteriordb(
        "weight in g of 30 young rats on days 8, 15, 22, 29 and 36 (Gelfand et al. 1990), 150 "
        "rows: rat (1 to 30), day, weight",
        "rats_data",
        "d2063d9fba2e3b5fd7fd767b0aef786aaa30d96df89120c54af7917a67e2a817",
        _posteriordb({"rat": ("rat", int), "day": ("x", int), "weight": ("y", int)}, sort=True),
    ),
    "radon_all": _of_posteriordb(
        "radon in US homes, 12,573 rows: log_radon, floor_measure (9 in 284 rows), log_uppm (log "
        "of the county's uranium), county_idx (1 to 386)",
        "radon_all",
        "e6641268fc745bfe9bd7d799d62fb997a6e47954625ea1c02c13a10d5a43b7c7",
        _posteriordb(_RADON),
    ),
    "radon_mn": _of_posteriordb(
        "radon in homes of Minnesota, 919 rows: as radon_all, county_idx 1 to 85",
        "radon_mn",
        "dd3eeef79fa553579c022901ed86ee74d1295f27821040077c6eb925c9089ba8",
        _posteriordb(_RADON),
    ),
    "air_traffic": Dataset(
        "monthly international air passengers of all Australian airports, January 1985 to "
        "December 2019, 420 rows: Scope, Year, Month, Inbound, Outbound, Total",
        "Airport Traffic Data of the Bureau of Infrastructure and Transport Research Economics "
        "(BITRE) at data.gov.au, monthly passengers, rows of all Australian airports",
        "CC BY 3.0 AU",
        _AIRPORT_TRAFFIC,
        "055aade92da3babcb6151a5018ee36dde9842f92023371f2872b505a195885ab",
        _air_traffic,
    ),
    "wells": _of_posteriordb(
        "well switching in Bangladesh, 3,020 rows: switched (0 or 1), arsenic (of the own well), "
        "dist (m to the nearest safe well), assoc (0 or 1), educ (years)",
        "wells_data",
        "1d90fb0b01597f54a8ccbe2d91a10246294d0c56344f03a025294071044da1f4",
        _posteriordb(_same(switched=int, arsenic=float, dist=float, assoc=int, educ=int)),
    ),
    "kidiq": _of_posteriordb(
        "children's test scores, 434 rows: kid_score, mom_hs (0 or 1), mom_iq, mom_work (1 to 4)",
        "kidiq_with_mom_work",
        "10c36a1dc6dfa529c0bf19a684b5fe45ea6cb99f7e801b7045c7cbda81bec39f",
        _posteriordb(_same(kid_score=int, mom_hs=int, mom_iq=float, mom_work=int)),
    ),
}
