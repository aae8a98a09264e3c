"""Data sets: where they are found, that they are what was published, and how they are converted."""

import csv
import hashlib
import io
import json
import os
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pandas as pd
import pytest

from foldwise import datasets

PUBLISHED = Path(os.environ.get("FOLDWISE_DATA", ""))
needs_data = pytest.mark.skipif(
    not (PUBLISHED / "rats.csv").is_file(),
    reason="the published data are not here: FOLDWISE_DATA must name a folder with rats.csv, ...",
)

CONTENT = b"a,b\n1,0.5\n2,1.0\n"
UPSTREAM = {"N": 2, "first": [1, 2], "b": [0.5, 1]}


def zipped(data) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("data.json", json.dumps(data))
    return stream.getvalue()


@pytest.fixture
def pair(monkeypatch, tmp_path):
    """A data set of two rows; no folder named, an empty cache, and nothing online."""
    table = datasets._posteriordb({"a": ("first", int), "b": ("b", float)})
    found = datasets.Dataset(
        "two rows", "a test", "none", "http://x/pair", hashlib.sha256(CONTENT).hexdigest(), table
    )
    monkeypatch.setitem(datasets.DATASETS, "pair", found)
    monkeypatch.delenv("FOLDWISE_DATA", raising=False)
    monkeypatch.setenv("FOLDWISE_CACHE", str(tmp_path / "cache"))

    def offline(url):
        raise OSError("no route to host")

    monkeypatch.setattr(datasets, "_fetch", offline)
    return tmp_path / "cache" / "data" / "pair.csv"


def serve(monkeypatch, raw):
    asked = []
    monkeypatch.setattr(datasets, "_fetch", lambda url: asked.append(url) or raw)
    return asked


def test_named_folder_comes_first(pair, monkeypatch, tmp_path):
    asked = serve(monkeypatch, zipped(UPSTREAM))
    named = tmp_path / "named"
    named.mkdir()
    (named / "pair.csv").write_bytes(CONTENT)
    monkeypatch.setenv("FOLDWISE_DATA", str(named))
    table = datasets.load("pair")
    pd.testing.assert_frame_equal(table, pd.DataFrame({"a": [1, 2], "b": [0.5, 1.0]}))
    assert asked == [] and not pair.exists()
    assert datasets.folder() == named


def test_edited_file_in_the_named_folder_is_refused(pair, monkeypatch, tmp_path):
    serve(monkeypatch, zipped(UPSTREAM))
    edited = CONTENT.replace(b"0.5", b"0.6")
    (tmp_path / "pair.csv").write_bytes(edited)
    monkeypatch.setenv("FOLDWISE_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"pair\.csv must be the published data") as refusal:
        datasets.load("pair")
    assert hashlib.sha256(edited).hexdigest() in str(refusal.value)
    assert hashlib.sha256(CONTENT).hexdigest() in str(refusal.value)


def test_download_is_kept_in_the_cache(pair, monkeypatch, tmp_path):
    asked = serve(monkeypatch, zipped(UPSTREAM))
    monkeypatch.setenv("FOLDWISE_DATA", str(tmp_path / "nowhere"))  # has no file: goes on
    first = datasets.load("pair")
    assert pair.read_bytes() == CONTENT
    assert [file.name for file in pair.parent.iterdir()] == ["pair.csv"]
    pd.testing.assert_frame_equal(datasets.load("pair"), first)
    assert asked == ["http://x/pair"]


def test_damaged_cache_is_downloaded_again(pair, monkeypatch):
    pair.parent.mkdir(parents=True)
    pair.write_bytes(CONTENT[:-3])
    with (
        pytest.warns(UserWarning, match="is damaged; pair is downloaded again"),
        pytest.raises(ConnectionError, match=r"(?s)is damaged.*Downloading it.*no route to host"),
    ):
        datasets.load("pair")
    serve(monkeypatch, zipped(UPSTREAM))
    with pytest.warns(UserWarning, match="is damaged; pair is downloaded again"):
        datasets.load("pair")
    assert pair.read_bytes() == CONTENT


def test_offline_says_where_it_looked(pair, tmp_path, monkeypatch):
    with pytest.raises(ConnectionError) as refusal:
        datasets.load("pair")
    message = str(refusal.value)
    for part in ("FOLDWISE_DATA is not set", str(pair.parent), "http://x/pair", "Go online"):
        assert part in message
    monkeypatch.setenv("FOLDWISE_DATA", str(tmp_path))
    monkeypatch.setenv("FOLDWISE_CACHE", "off")
    with pytest.raises(ConnectionError, match=r"has no pair\.csv .*the cache is switched off"):
        datasets.load("pair")


def test_cache_switched_off_or_not_writable(pair, monkeypatch, tmp_path):
    serve(monkeypatch, zipped(UPSTREAM))
    monkeypatch.setenv("FOLDWISE_CACHE", "off")
    assert datasets.folder() is None
    assert len(datasets.load("pair")) == 2
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setenv("FOLDWISE_CACHE", str(file))
    with pytest.warns(UserWarning, match="could not be kept in the cache"):
        assert len(datasets.load("pair")) == 2


def test_default_cache_is_beside_the_compiled_programs(monkeypatch, tmp_path):
    from foldwise.support.runtime import cache_dir

    monkeypatch.delenv("FOLDWISE_DATA", raising=False)
    monkeypatch.delenv("FOLDWISE_CACHE", raising=False)
    assert datasets.folder() == cache_dir().parent / "data"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (zipped({**UPSTREAM, "b": [0.5, 1.5]}), "has changed since it was published"),
        (zipped({"N": 2, "b": [0.5, 1]}), "KeyError: 'first'"),
        (zipped({**UPSTREAM, "b": [0.5]}), "could not be read as such"),
        (zipped({**UPSTREAM, "first": [1, 2.5]}), "whole numbers were expected, got 2.5"),
        (zipped([1, 2]), "could not be read as such"),
        (b"<html>sign in</html>", "BadZipFile"),
    ],
)
def test_other_content_online_is_refused(pair, monkeypatch, raw, says):
    serve(monkeypatch, raw)
    with pytest.raises(ValueError, match=says):
        datasets.load("pair")
    assert not pair.exists()


def test_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match="rats, radon_all, radon_mn, air_traffic, wells, kidiq"):
        datasets.load("iris")


@pytest.mark.parametrize("name", datasets.DATASETS)
def test_describe_names_source_and_licence(name):
    text = datasets.describe(name)
    assert datasets.DATASETS[name].url in text and "Licence: " in text
    assert datasets.DATASETS[name].sha256 in text


class Pages(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/missing":
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", "8" if self.path == "/short" else "4")
        self.end_headers()
        self.wfile.write(b"data")

    def log_message(self, *args):
        pass


def test_fetch_over_http():
    with HTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert datasets._fetch(f"{address}/whole") == b"data"
        with pytest.raises(OSError, match="404"):
            datasets._fetch(f"{address}/missing")
        with pytest.raises(OSError, match="IncompleteRead"):
            datasets._fetch(f"{address}/short")
        server.shutdown()
    with pytest.raises(OSError):
        datasets._fetch(address)


# ---------------------------------------------------------------- the published files


@needs_data
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("rats", (150, 3)),
        ("radon_all", (12573, 4)),
        ("radon_mn", (919, 4)),
        ("air_traffic", (420, 6)),
        ("wells", (3020, 5)),
        ("kidiq", (434, 4)),
    ],
)
def test_published_files_load(name, shape):
    table = datasets.load(name)
    assert table.shape == shape
    assert not table.isna().any().any()


def columns_of(name) -> dict[str, list]:
    """Columns of a published file as JSON has them: 1.0 is 1."""
    with (PUBLISHED / f"{name}.csv").open(newline="") as stream:
        head, *rows = csv.reader(stream)
    values = [[float(v) for v in column] for column in zip(*rows, strict=True)]
    values = [[int(v) if v.is_integer() else v for v in column] for column in values]
    return dict(zip(head, values, strict=True))


@needs_data
@pytest.mark.parametrize("name", ["radon_all", "radon_mn", "wells", "kidiq"])
def test_json_becomes_the_published_file(name):
    columns = columns_of(name)
    raw = {"N": len(next(iter(columns.values()))), "J": 1}
    raw |= dict(sorted(columns.items()))
    content = datasets._csv_bytes(datasets.DATASETS[name].table(zipped(raw)))
    assert content == (PUBLISHED / f"{name}.csv").read_bytes()


@needs_data
def test_rats_upstream_are_in_order_of_days():
    columns = columns_of("rats")
    order = sorted(range(150), key=lambda i: (columns["day"][i], columns["rat"][i]))
    names = {"rat": "rat", "x": "day", "y": "weight"}
    raw = {key: [columns[column][i] for i in order] for key, column in names.items()}
    assert raw["rat"][:3] == [1, 2, 3]
    raw |= {"N": 30, "Npts": 150, "xbar": 22}
    content = datasets._csv_bytes(datasets.DATASETS["rats"].table(zipped(raw)))
    assert content == (PUBLISHED / "rats.csv").read_bytes()


@needs_data
def test_air_traffic_is_the_international_part_of_all_airports():
    """Upstream has a line for each airport and month, domestic and international."""
    head = "AIRPORT,Year,Month,Dom_Pax_In,Dom_Pax_Out,Dom_Pax_Total,Int_Pax_In,Int_Pax_Out"
    lines = [f"\ufeff{head},Int_Pax_Total,Pax_In,Pax_Out,Pax_Total"]
    for row in datasets.load("air_traffic").itertuples(index=False):
        when, passengers = f"{row.Year},{row.Month}", f"{row.Inbound},{row.Outbound},{row.Total}"
        lines.append(f"ADELAIDE,{when},1,2,3,4,5,6,7,8,9")
        lines.append(f"All Australian Airports,{when},1,2,3,{passengers},7,8,9")
    lines.append("All Australian Airports,2020,1,1,2,3,4,5,6,7,8,9")
    raw = "\r\n".join(lines).encode()
    content = datasets._csv_bytes(datasets.DATASETS["air_traffic"].table(raw))
    assert content == (PUBLISHED / "air_traffic.csv").read_bytes()
