"""What to train: typed, validated, TOML in, JSON out."""

from headway.recipe.assignment import Assignment, Doubt, Judge, Trial
from headway.recipe.changes import CHANGEABLE, changes, check_resumable
from headway.recipe.faults import Fault, FaultPlan
from headway.recipe.load import load_recipe, nearest_keys, to_toml, with_settings
from headway.recipe.model import Layout, Model
from headway.recipe.schema import Checkpoint, Data, Eval, Health, Parallel, Recipe, Store, Train

__all__ = [
    "CHANGEABLE",
    "Assignment",
    "Checkpoint",
    "Data",
    "Doubt",
    "Eval",
    "Fault",
    "FaultPlan",
    "Health",
    "Judge",
    "Layout",
    "Model",
    "Parallel",
    "Recipe",
    "Store",
    "Train",
    "Trial",
    "changes",
    "check_resumable",
    "load_recipe",
    "nearest_keys",
    "to_toml",
    "with_settings",
]
