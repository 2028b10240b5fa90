"""Recipes: what to train, as typed and validated settings; TOML in, JSON out."""

from headway.recipe.assignment import Assignment, ParityTrial, SpikeReference, SuspectElement
from headway.recipe.changes import CHANGEABLE, changed_keys, check_resumable
from headway.recipe.faults import Fault, FaultPlan
from headway.recipe.load import load_recipe, nearest_keys, to_toml, with_mesh, with_settings
from headway.recipe.lora import Lora
from headway.recipe.model import Model, ModelLayout
from headway.recipe.schema import Checkpoint, Data, Eval, Parallel, Recipe, Store, Train

__all__ = [
    "CHANGEABLE",
    "Assignment",
    "Checkpoint",
    "Data",
    "Eval",
    "Fault",
    "FaultPlan",
    "Lora",
    "Model",
    "ModelLayout",
    "Parallel",
    "ParityTrial",
    "Recipe",
    "SpikeReference",
    "Store",
    "SuspectElement",
    "Train",
    "changed_keys",
    "check_resumable",
    "load_recipe",
    "nearest_keys",
    "to_toml",
    "with_mesh",
    "with_settings",
]
