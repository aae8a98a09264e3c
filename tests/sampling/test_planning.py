"""What a run will hold in memory: planned before it runs, and measured against the process."""

import sys

import numpy as np
import peak
import pytest

import foldwise as fw
from foldwise import crossval
from foldwise.support import memory
from foldwise.support.memory import limited, most_values, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4 * 10**9), ("512 MiB", 2**29), ("1.5g", 15 * 10**8), ("2e", None), (2**30, 2**30),
     ("", None), ("0GB", None), (0, None), (1.5, None), ("-1GB", None), (True, None)],
)  # fmt: skip
def test_sizes_in_words(text, size):
    if size is None:
        with pytest.raises(ValueError, match='memory_limit must be a size such as "4GB"'):
            parse_size(text)
    else:
        assert parse_size(text) == size


def model_of(rows):
    y = np.arange(float(rows)) % 7
    return fw.Model(lambda mu: -0.5 * mu**2, lambda mu: -0.5 * (y - mu) ** 2, 0.0, rows)


def test_a_run_that_cannot_fit_is_refused_at_once_with_what_to_do(monkeypatch):
    monkeypatch.setattr(crossval, "_fit", None)  # nothing is done
    model, folds = model_of(2000), fw.leave_one_out(2000)
    with pytest.raises(MemoryError, match=r"fit into 700 MB .* would take about .* GB: ") as caught:
        fw.cross_validate(
            model, folds, draws=20_000, method="mcmc", memory_limit="700MB", progress=False
        )
    said = str(caught.value)
    assert "log scores of every draw 3.84 GB" in said
    assert 'memory="online", fewer draws, part of the folds at a time' in said
    with pytest.raises(MemoryError, match=r"every draw 2\.56 GB.*nothing in keep"):
        fw.cross_validate(
            model, folds, draws=20_000, method="mcmc", keep="position", memory_limit="700MB"
        )


def test_what_is_free_is_the_limit_where_none_is_given(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 10**6)
    with pytest.raises(MemoryError, match="must fit into"):
        fw.cross_validate(model_of(8), fw.leave_one_out(8), progress=False)
    monkeypatch.setattr(memory, "free_memory", lambda: None)
    assert memory.limit_of(None) is None


def test_pieces_follow_the_limit():
    assert most_values(2**25, 0.1) == 2**25
    with limited(80 * 2**20):
        assert most_values(2**25, 0.1) == 2**20
        assert most_values(2**25, 1e-9) == 2**16


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("case", ["leave-one-out", "chains", "rows"])
def test_the_process_takes_what_was_planned(case):
    """At most 1.15 times the plan; ``bench/memory.py`` has the other cases."""
    ratio, said = peak.measured(case)
    assert 0.5 < ratio < 1.15, said
