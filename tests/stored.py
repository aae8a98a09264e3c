"""Short runs that tests of results share, and equality of results, bit for bit."""

from dataclasses import dataclass, fields, replace

import h5py
import numpy as np
import problems
from problems import by_chains

import foldwise as fw
from foldwise.results.result import CVResult

MORE = 30


@dataclass(frozen=True)
class Case:
    """A problem, its model with the programs compiled for it, and a short full-data fit."""

    problem: problems.LinearProblem
    model: fw.Model
    fit: fw.Fit

    @classmethod
    def of(cls, problem, seed=1):
        model = problem.model()
        fit = fw.fit(model, draws=200, warmup=200, seed=seed, progress=False)
        return cls(problem, model, fit)

    def run(self, folds=None, **options) -> CVResult:
        options = {"fit": self.fit, "seed": 5, "draws": 60, "progress": False, **options}
        return by_chains(self.model, folds or self.problem.folds, **options)


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    if a.dtype == object:
        assert a.tolist() == b.tolist()
        assert [type(x) for x in a.ravel()] == [type(x) for x in b.ravel()]
    else:
        assert a.tobytes() == b.tobytes()


def same_table(a, b):
    assert (a is None) == (b is None)
    if a is not None:
        assert list(a.variables) == list(b.variables)
        assert set(a.coords) == set(b.coords)
        for name in a.variables:
            assert a[name].dims == b[name].dims
            same_bits(a[name].values, b[name].values)


def same_result(a: CVResult, b: CVResult, times=True):
    """Assert that two results have the same numbers, bit for bit, in the same types."""
    assert list(a.scores) == list(b.scores)
    for name in a.scores:
        for f in fields(a.scores[name]):
            mine, theirs = (getattr(r.scores[name], f.name) for r in (a, b))
            if f.name in ("folds", "rows"):
                same_table(mine, theirs)
            elif f.name == "name":
                assert mine == theirs
            else:
                same_bits(mine, theirs)
    same_bits(a.mixing.rhat, b.mixing.rhat)
    same_bits(a.mixing.benchmark, b.mixing.benchmark)
    assert list(a.test) == list(b.test)
    for key in a.test:
        same_bits(a.test[key], b.test[key])
    apart = {"state"} if times else {"state", "seconds"}
    infos = [{k: v for k, v in r.info.items() if k not in apart} for r in (a, b)]
    assert infos[0] == infos[1]
    assert [type(v) for v in infos[0].values()] == [type(v) for v in infos[1].values()]
    assert (a.draws is None) == (b.draws is None)
    if a.draws is not None:
        assert (a.draws.dims, a.draws.name) == (b.draws.dims, b.draws.name)
        same_table(a.draws.to_dataset(), b.draws.to_dataset())


def content(path) -> str:
    with h5py.File(path) as file:
        return file.attrs["checksum"]


def changed(problem, **parts):
    return replace(problem, **parts).model()
