"""What a file declares is looked at before it is read; damaged files give no other numbers."""

import os
import random
import resource
import subprocess
import sys
from dataclasses import replace

import h5py
import numpy as np
import pytest
from damage import KINDS, damaged, outcome
from stored import same_result

from foldwise.results import files as storage
from foldwise.results import sealing

pytestmark = pytest.mark.fast


@pytest.fixture
def bare(saved):
    """The file without its seal, as older versions wrote it."""
    raw = saved.read_bytes()
    assert raw[-sealing._SEAL_BYTES :].startswith(b"\nfoldwise-seal ")
    saved.write_bytes(raw[: -sealing._SEAL_BYTES])
    return saved


def test_a_file_without_its_seal_is_read(loo, bare):
    assert sealing.seal_holds(bare) is None
    same_result(loo, storage.load(bare))


def test_every_changed_byte_breaks_the_seal(saved, seed):
    raw, rng = saved.read_bytes(), random.Random(seed)
    for place in [0, len(raw) - 1, *(rng.randrange(len(raw)) for _ in range(20))]:
        content = bytearray(raw)
        content[place] ^= 1
        saved.write_bytes(content)
        assert sealing.seal_holds(saved) is not True


@pytest.mark.parametrize("seal", [True, False])
def test_damaged_files_give_a_clear_error_or_the_right_numbers(seal, loo, saved, seed, request):
    raw = (saved if seal else request.getfixturevalue("bare")).read_bytes()
    rng, found = random.Random(seed), []
    for k in range((10 if seal else 4) * len(KINDS)):
        saved.write_bytes(damaged(raw, KINDS[k % len(KINDS)], rng))
        found.append(outcome(saved, loo))
    assert found.count("refused") > (0.95 if seal else 0.8) * len(found)


@pytest.mark.parametrize("name", ["numpy_dtype", "labels"])
def test_attributes_of_variables_are_part_of_the_checksum(name, saved):
    group, name = ("scores/log/folds/fold", name)
    with h5py.File(saved, "r+") as file:
        file[group].attrs[name] = "<i4" if name == "numpy_dtype" else "json"
    with pytest.raises(ValueError, match=r"loo\.nc must be as foldwise saved it"):
        storage.load(saved)


@pytest.mark.parametrize("dtype", ["<i4", "<U60000000", "|b1", "<M8[D]", "<c16", "object"])
def test_a_type_that_values_cannot_have_had_is_refused(dtype, loo, tmp_path):
    """As in a file of an older version, whose checksum leaves attributes of variables out."""
    values = np.resize([0.5, 2.5, -1.5], loo.info["n_obs"])
    odd = replace(loo, test={**loo.test, "y": values})
    storage.write_whole(tmp_path / "first.nc", _unsized(odd))
    with h5py.File(tmp_path / "first.nc", "r+") as file:
        file["test/y"].attrs["numpy_dtype"] = dtype
    with pytest.raises(ValueError, match=r"first\.nc is a foldwise result") as caught:
        storage.load(tmp_path / "first.nc")
    assert "cannot have been" in str(caught.value.__cause__)


def _unsized(result):
    """A file without the attribute by which one sees what the checksum is of."""
    tree = storage._result_tree(result)
    del tree.attrs["size"]
    tree.attrs["checksum"] = storage._checksum(tree, False)
    return bytes(tree.to_netcdf(None, engine="h5netcdf", encoding=storage._encodings(tree)))


def _soft(file):
    file["mixing/again"] = h5py.SoftLink("/scores")


def _external(file):
    file["mixing/again"] = h5py.ExternalLink("/etc/hostname", "/")


def _cycle(file):
    file["mixing/again"] = file["/"]


def _second(file):
    file["mixing/again"] = file["scores"]


def _elsewhere(file):
    file.create_dataset(
        "mixing/again", (8,), "u1", external=[("/proc/self/environ", 0, h5py.h5f.UNLIMITED)]
    )


def _virtual(file):
    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource("/tmp/other.h5", "x", (4,))
    file.create_virtual_dataset("mixing/again", layout)


def _huge(file):
    data = file.create_dataset("mixing/again", (2**33,), "f8", chunks=(2**16,), compression=1)
    data[:10] = 1.0


def _huge_plain(file):
    file.create_dataset("mixing/again", (2**33,), "f8")


def _huge_text(file):
    file.create_dataset("mixing/again", (4,), "S60000000", chunks=(1,), compression=1)


def _huge_chunk(file):
    data = file.create_dataset("mixing/again", (4,), "f8", chunks=(2**22,), maxshape=(None,))
    data[:] = 1.0


def _deep(file):
    file["mixing"].create_group("/".join("a" * 40))


def _reference(file):
    file["mixing"].create_dataset("again", (2,), h5py.ref_dtype)


def _record(file):
    file["mixing"].create_dataset("again", (2,), np.dtype([("a", "f8"), ("b", "i4")]))


WRONG = {
    _soft: "is a link to elsewhere",
    _external: "is a link to elsewhere",
    _cycle: "is linked a second time",
    _second: "is linked a second time",
    _elsewhere: "is in other files",
    _virtual: "is in other files",
    _huge: "declares 68719476736 bytes",
    _huge_plain: "declares 68719476736 bytes",
    _huge_text: "is of the type",
    _huge_chunk: "in another way",
    _deep: "are more than 32 deep",
    _reference: "is of the type",
    _record: "is of the type",
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_what_no_result_declares_is_refused_before_it_is_read(change, saved, monkeypatch):
    with h5py.File(saved, "r+") as file:
        change(file)
    monkeypatch.setattr(storage.xr, "open_datatree", None)  # nothing is read
    with pytest.raises(ValueError, match=rf"loo\.nc .* could not be read: .*{WRONG[change]}"):
        storage.load(saved)


def test_a_file_that_declares_another_size_is_refused(saved, monkeypatch):
    with h5py.File(saved, "r+") as file:
        file.attrs["size"] += 8
    monkeypatch.setattr(storage, "_checksum", None)  # not even read
    with pytest.raises(ValueError, match="must be as foldwise saved it"):
        storage.load(saved)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.nc")
    with pytest.raises(ValueError, match=r"pipe\.nc must be a file .* but it is a pipe"):
        storage.load(tmp_path / "pipe.nc")


def test_a_file_that_does_not_fit_into_memory_is_not_called_damaged(saved, monkeypatch):
    monkeypatch.setattr(storage, "free_memory", lambda: 1000)
    with pytest.raises(MemoryError, match=r"loo\.nc must fit in memory, but there is too little"):
        storage.load(saved)


def test_memory_that_is_lacking_while_reading_is_not_damage(saved, monkeypatch):
    def lacking(*_, **__):
        raise OSError("Can't synchronously read data (memory allocation failed for chunk)")

    monkeypatch.setattr(storage.xr, "open_datatree", lacking)
    with pytest.raises(MemoryError, match=r"loo\.nc must fit in memory"):
        storage.load(saved)


SAVES = """
import resource, signal, sys
import foldwise as fw
result = fw.load(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    result.save(sys.argv[1])
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="files have no limit")
def test_a_disk_without_room_leaves_the_older_file_and_the_process(saved):
    before = saved.read_bytes()
    assert len(before) > 50_000
    command = [sys.executable, "-c", SAVES, str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "could not be written" in done.stdout and "has room" in done.stdout
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]
