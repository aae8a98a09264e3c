"""What all rooms share: the writer, the check of counts, counts and durations in words."""

import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest

from foldwise.support import writer
from foldwise.support.checks import check_count
from foldwise.support.words import counted, duration
from foldwise.support.writer import beside, move_folder, remove_stale, whole_file, write_whole


def test_a_file_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "result.txt"
    target.write_text("old")
    with whole_file(target) as partial:
        partial.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["result.txt"]


def test_a_file_that_fails_leaves_the_older_one_and_nothing_else(tmp_path):
    target = tmp_path / "result.txt"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(target) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.txt"]


def test_a_file_is_flushed_to_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    target, order = tmp_path / "result.txt", []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def noted(*arguments, name=name, real=real):
            order.append(name)
            real(*arguments)

        monkeypatch.setattr(os, name, noted)
    write_whole(target, b"new")
    assert target.read_bytes() == b"new"
    assert order[:2] == ["fsync", "replace"]


WRITES_FOR_EVER = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("writer", sys.argv[1])
writer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(writer)
print("begun", flush=True)
while True:
    for letter in (b"a", b"b"):
        writer.write_whole(Path(sys.argv[2]), letter * 2_000_000)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no locks")
def test_a_killed_writer_leaves_a_whole_file_and_what_it_left_is_removed(tmp_path, seed):
    target, left, rng = tmp_path / "result", 0, random.Random(seed)
    for _ in range(8):
        command = [sys.executable, "-c", WRITES_FOR_EVER, writer.__file__, str(target)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.read(5)
        time.sleep(0.05 + rng.random() * 0.05)
        process.kill()
        process.communicate()
        assert len(set(target.read_bytes())) == 1 and target.stat().st_size == 2_000_000
        assert len(os.listdir(tmp_path)) <= 2  # what is left of this one, none of the others
        left += len(os.listdir(tmp_path)) - 1
    assert left > 0
    remove_stale(tmp_path)
    assert os.listdir(tmp_path) == ["result"]


def test_what_others_are_writing_is_left_alone(tmp_path):
    with whole_file(tmp_path / "one") as partial:
        partial.write_text("one")
        write_whole(tmp_path / "two", b"two")
        assert partial.read_text() == "one"
    assert sorted(os.listdir(tmp_path)) == ["one", "two"]


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_takes_its_place(tmp_path, there):
    target = tmp_path / "out"
    if there:
        target.mkdir()
        (target / "old").touch()
    done = beside(target)
    done.mkdir()
    (done / "new").touch()
    move_folder(done, target)
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(target) == ["new"]


def test_a_folder_that_cannot_take_its_place_leaves_the_older_one(tmp_path, monkeypatch):
    target, done = tmp_path / "out", tmp_path / "done"
    target.mkdir()
    done.mkdir()
    rename = os.rename

    def fail(source, place):
        if source == done:
            raise OSError("no")
        rename(source, place)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="no"):
        move_folder(done, target)
    assert sorted(os.listdir(tmp_path)) == ["done", "out"]


def test_whole_numbers_of_any_integer_type_become_integers():
    for value in (3, np.int8(3), np.array(3)):
        assert type(check_count("draws", value, 3)) is int
        assert check_count("draws", value, 3) == 3


@pytest.mark.parametrize("value", [3.0, "3", None, True, np.True_, [3]])
def test_what_is_no_whole_number_is_wrong_in_kind_and_in_value(value):
    kind = type(value).__name__
    for error in (TypeError, ValueError):
        with pytest.raises(error, match=rf"draws must be a whole number .* 1, got .*\({kind}\)"):
            check_count("draws", value, 1)


def test_a_whole_number_too_small_is_wrong_in_value_alone():
    with pytest.raises(ValueError, match="draws must be a whole number of at least 3, got 2$") as e:
        check_count("draws", 2, 3)
    assert not isinstance(e.value, TypeError)


def test_counts_and_durations_in_words():
    assert [counted(n, "fold") for n in (0, 1, 2)] == ["0 folds", "1 fold", "2 folds"]
    seconds = (0.04, 99.94, 100.0, 5999.0, 6000.0, np.nan)
    words = ["0.0 s", "99.9 s", "1.7 min", "100.0 min", "1.7 h", "n/a"]
    assert [duration(s) for s in seconds] == words
