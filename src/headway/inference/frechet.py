"""The Frechet distance between two sets of features, by which generated samples are compared with real ones."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.errors import DataError, plural

Features = npt.NDArray[np.floating]


class Moments(NamedTuple):
    """Mean and covariance of features, in float64."""

    mean_D: npt.NDArray[np.float64]
    covariance_DD: npt.NDArray[np.float64]


def moments(features_ND: Features) -> Moments:
    """Return the moments of features; raise DataError for fewer than two samples."""
    count = len(features_ND)
    if count < 2:
        raise DataError(f"a covariance needs two samples, got {plural(count, 'sample')}", hint="generate more")
    features = np.asarray(features_ND, dtype=np.float64)
    return Moments(features.mean(axis=0), np.atleast_2d(np.cov(features, rowvar=False)))


def frechet_distance(first: Moments, second: Moments) -> float:
    """Return |m1 - m2|^2 + trace(C1 + C2 - 2 (C1 C2)^(1/2)): 0 for equal moments.

    The trace of the root is the sum of roots of eigenvalues of C1^(1/2) C2 C1^(1/2), which is symmetric, so that no
    complex root of a nearly singular product has to be discarded.
    """
    if first.mean_D.shape != second.mean_D.shape:
        raise DataError(f"features have {first.mean_D.size} and {second.mean_D.size} numbers", hint="use one network")
    values, vectors = np.linalg.eigh(first.covariance_DD)
    root_DD = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    product_DD = root_DD @ second.covariance_DD @ root_DD
    shared = np.sqrt(np.linalg.eigvalsh((product_DD + product_DD.T) / 2).clip(min=0)).sum()
    gap = first.mean_D - second.mean_D
    both = np.trace(first.covariance_DD) + np.trace(second.covariance_DD)
    return float(gap @ gap + both - 2 * shared)
