"""foldwise: brute-force cross-validation of Bayesian models, all folds at once."""

from foldwise.adapters.numpyro import from_numpyro
from foldwise.adapters.pymc import from_bambi, from_pymc
from foldwise.compare import Comparison, compare
from foldwise.crossval import cross_validate
from foldwise.family import ModelFamily, model_family
from foldwise.fit import Fit, fit
from foldwise.folds import (
    Folds,
    from_labels,
    from_splits,
    from_splitter,
    group_k_fold,
    h_block,
    hv_block,
    k_fold,
    leave_future_out,
    leave_group_out,
    leave_one_out,
    spatial_block,
    stratified_k_fold,
)
from foldwise.model import Model
from foldwise.results import CVResult, load, merge
from foldwise.runtime import configure

__all__ = [
    "CVResult",
    "Comparison",
    "Fit",
    "Folds",
    "Model",
    "ModelFamily",
    "compare",
    "cross_validate",
    "fit",
    "from_bambi",
    "from_labels",
    "from_numpyro",
    "from_pymc",
    "from_splits",
    "from_splitter",
    "group_k_fold",
    "h_block",
    "hv_block",
    "k_fold",
    "leave_future_out",
    "leave_group_out",
    "leave_one_out",
    "load",
    "merge",
    "model_family",
    "spatial_block",
    "stratified_k_fold",
]
__version__ = "0.1.0"

configure()
