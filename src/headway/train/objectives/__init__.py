"""What a run minimizes: an objective turns log-probabilities of tokens into named sums, and says how they are counted.

A method of post-training is an objective and a format of samples: the loop, the meshes, exact resume and the ledger do
not know which one runs.
"""

from headway.train.objectives.base import CountedObjective, NextToken
from headway.train.objectives.choose import make_objective

__all__ = ["CountedObjective", "NextToken", "make_objective"]
