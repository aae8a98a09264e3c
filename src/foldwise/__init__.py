"""foldwise: brute-force cross-validation of Bayesian models, all folds at once."""

from typing import TYPE_CHECKING, Any

from foldwise.crossval import cross_validate
from foldwise.folds.folds import Folds
from foldwise.folds.schemes import (
    from_labels,
    from_splits,
    from_splitter,
    group_k_fold,
    k_fold,
    leave_group_out,
    leave_one_out,
    stratified_k_fold,
)
from foldwise.folds.time_and_space import h_block, hv_block, leave_future_out, spatial_block
from foldwise.models.family import ModelFamily, model_family
from foldwise.models.model import Model
from foldwise.models.numpyro import from_numpyro
from foldwise.models.pymc import from_bambi, from_pymc
from foldwise.results.compare import Comparison, compare
from foldwise.results.methods import load, merge
from foldwise.results.result import CVResult
from foldwise.sampling.fit import Fit
from foldwise.sampling.full_data import fit
from foldwise.support.runtime import configure

if TYPE_CHECKING:
    from foldwise.results.figures import (
        plot_chains,
        plot_compare,
        plot_diagnostics,
        plot_difference,
        plot_errors,
        plot_ess,
        plot_pareto_k,
        plot_pit,
        plot_probability,
        plot_progress,
        plot_rhat,
        plot_rhat_max,
        plot_scheme,
        save_figures,
    )

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
    "plot_chains",
    "plot_compare",
    "plot_diagnostics",
    "plot_difference",
    "plot_errors",
    "plot_ess",
    "plot_pareto_k",
    "plot_pit",
    "plot_probability",
    "plot_progress",
    "plot_rhat",
    "plot_rhat_max",
    "plot_scheme",
    "save_figures",
    "spatial_block",
    "stratified_k_fold",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # figures load matplotlib, so only when asked for
    if name in __all__ and name.startswith(("plot_", "save_figures")):
        from foldwise.results import figures

        return getattr(figures, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


configure()
