"""What a cost model leans on, by how much it knows: the fidelities.

limit        the speed of light: vendors' peaks, full bandwidth, everything overlapped
default      a model of kernels and links, with parameters fitted to published runs
measured     the ceilings that `headway hardware measure` found on the device
calibrated   default or measured, with parameters refitted to a few runs of your own
"""

from dataclasses import dataclass, field
from typing import Literal

from headway.errors import UsageError
from headway.hardware import Ceilings, Cluster, find_ceilings
from headway.plan.collective_times import NetworkModel
from headway.plan.efficiencies import IDEAL, Efficiencies, fitted_parameters
from headway.plan.rates import LimitRates, MeasuredRates, ModelRates, Rates, family

__all__ = ["CostModel", "Fidelity", "make_cost_model"]

Fidelity = Literal["limit", "default", "measured", "calibrated"]


@dataclass(frozen=True, eq=False)
class CostModel:
    """A cluster, and how fast its devices and links are taken to be."""

    cluster: Cluster
    rates: Rates
    parameters: Efficiencies = field(default_factory=Efficiencies)
    demand: float = 1.0
    """Power that products would draw at full clock, over the chip's own limit."""
    fidelity: Fidelity = "default"

    @property
    def ideal(self) -> bool:
        """Whether this is the speed of light."""
        return self.fidelity == "limit"

    @property
    def network(self) -> NetworkModel:
        """Links as collectives reach them."""
        p = self.parameters
        return NetworkModel(self.cluster, p.near, p.far, latency=p.latency)


def make_cost_model(
    cluster: Cluster,
    fidelity: Fidelity = "default",
    parameters: Efficiencies | None = None,
    ceilings: Ceilings | None = None,
) -> CostModel:
    """Costs at a fidelity; `measured` takes the ceilings given, or those that Headway ships for the chip."""
    chip = cluster.chip
    if fidelity == "limit":
        return CostModel(cluster, LimitRates(chip), IDEAL, fidelity=fidelity)
    parameters = parameters or fitted_parameters()
    ceilings = ceilings or (find_ceilings(chip) if fidelity == "measured" else None)
    if ceilings is None and fidelity == "measured":
        raise UsageError(
            f"nothing was measured on {chip.name}",
            hint="headway hardware measure writes such a file; --ceilings FILE names it",
        )
    if ceilings is None:
        return CostModel(cluster, ModelRates(chip), parameters, family(chip).demand, fidelity)
    share = ceilings.sustained_share("bf16") if ceilings.sustained else 1.0
    return CostModel(cluster, MeasuredRates(chip, ceilings), parameters.measured(), share**-2, fidelity)
