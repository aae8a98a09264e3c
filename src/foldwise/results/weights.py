"""Weights of models: stacking."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

STACKING_GAP = 1e-6
_STACKING_STEPS = 100_000


def stacking_weights(log_density: Float[np.ndarray, "unit model"]) -> Float[np.ndarray, " model"]:
    """Weights w of the mixture of models that predicts best (stacking, Yao et al. 2018).

    Maximises mean_i log sum_m w_m exp(log_density_im) over the simplex, by EM:
    w_m <- w_m g_m with g_m = mean_i exp(log_density_im) / mixture_i. Each unit's largest log
    density is subtracted first, which changes nothing and keeps all from underflowing. Steps are
    lengthened, w_m g_m^step, for as long as the objective rises. At the end max_m g_m - 1, a bound
    on how far the objective is from its maximum, is at most 1e-6.
    """
    density = np.exp(log_density - log_density.max(axis=1, keepdims=True))
    count, models = density.shape
    weight, step = np.full(models, 1.0 / models), 1.0
    mixture = density @ weight
    for _ in range(_STACKING_STEPS):
        gain = (1.0 / mixture) @ density / count
        if gain.max() - 1.0 <= STACKING_GAP:
            break
        # in logs, as long steps overflow; and no weight becomes zero, which it could not leave
        exponent = np.log(weight) + step * np.log(np.maximum(gain, 1e-300))
        trial = np.maximum(np.exp(exponent - exponent.max()), 1e-15)
        trial /= trial.sum()
        trial_mixture = density @ trial
        if step > 1.0 and np.log(trial_mixture / mixture).sum() < 0.0:
            step = 1.0  # the plain EM step never falls
            continue
        weight, mixture, step = trial, trial_mixture, 1.5 * step
    return weight
