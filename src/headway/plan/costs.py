"""The cost model at four fidelities.

limit        roofline: vendor peaks, full bandwidth, everything overlapped
default      a model of kernels and links, with parameters fitted to published runs
measured     ceilings that `headway hardware measure` measured on the device
calibrated   default or measured, with parameters refitted to a few of your own runs
"""

from dataclasses import dataclass, field
from typing import Literal

from headway.errors import UsageError
from headway.hardware import Ceilings, Cluster, find_ceilings
from headway.plan.collective_times import NetworkModel
from headway.plan.efficiencies import IDEAL, Efficiencies, fitted_parameters
from headway.plan.rates import LimitRates, MeasuredRates, ModelRates, Rates, generation

Fidelity = Literal["limit", "default", "measured", "calibrated"]


@dataclass(frozen=True, eq=False)
class CostModel:
    """A cluster with the modelled speed of its devices and links."""

    cluster: Cluster
    rates: Rates
    parameters: Efficiencies = field(default_factory=Efficiencies)
    demand: float = 1.0
    """Power that GEMMs would draw at full clock, relative to the chip's limit."""
    fidelity: Fidelity = "default"

    @property
    def ideal(self) -> bool:
        """Whether nothing is lost: fidelity `limit`."""
        return self.fidelity == "limit"

    @property
    def network(self) -> NetworkModel:
        """Links at the bandwidth that collectives reach."""
        p = self.parameters
        return NetworkModel(self.cluster, p.near, p.far, latency=p.latency)


def make_cost_model(
    cluster: Cluster,
    fidelity: Fidelity = "default",
    parameters: Efficiencies | None = None,
    ceilings: Ceilings | None = None,
) -> CostModel:
    """The cost model at a fidelity; `measured` uses the given ceilings or those that Headway ships for the chip."""
    chip = cluster.chip
    if fidelity == "limit":
        return CostModel(cluster, LimitRates(chip), IDEAL, fidelity=fidelity)
    parameters = parameters or fitted_parameters()
    ceilings = ceilings or (find_ceilings(chip) if fidelity == "measured" else None)
    if ceilings is None and fidelity == "measured":
        raise UsageError(
            f"no measured ceilings for {chip.name}",
            hint="run headway hardware measure there, and pass its file with --ceilings",
        )
    if ceilings is None:
        return CostModel(cluster, ModelRates(chip), parameters, generation(chip).demand, fidelity)
    share = ceilings.sustained_share("bf16") if ceilings.sustained else 1.0
    return CostModel(cluster, MeasuredRates(chip, ceilings), parameters.measured(), share**-2, fidelity)
