"""A node of the cluster: makes what runs here agree with what the service wants, and reports it.

Knows no socket and no process: `Starts` are the processes, real or simulated.
"""

from abc import ABC, abstractmethod

from headway.cluster.service.messages import NodeOrders, NodeReport, StartReport, WantedStart
from headway.cluster.service.outcome import RankResult
from headway.errors import EngineUnreachable, HeadwayError


class Starts(ABC):
    """The starts of jobs on one node. All of it survives a kill of whoever uses it."""

    @abstractmethod
    def report(self) -> list[StartReport]:
        """Every start that was begun here and not forgotten."""

    @abstractmethod
    def begin(self, wanted: WantedStart) -> None:
        """Start a command. A key that was begun before is left as it is."""

    @abstractmethod
    def signal(self, key: str, numbers: tuple[int, ...]) -> None:
        """Send the signals of a list that were not sent before."""

    @abstractmethod
    def end(self, key: str) -> None:
        """Have a command end: SIGUSR1, then SIGKILL after its grace period. Repeating it has no effect."""

    @abstractmethod
    def kill(self, key: str) -> None:
        """Kill the processes of a start at once."""

    @abstractmethod
    def forget(self, key: str) -> None:
        """Remove what is kept of a start that has exited."""

    @abstractmethod
    def accept(self, epoch: int, cluster: str) -> bool:
        """Whether orders of this service may be obeyed: of the same cluster, and of none older than the newest."""


class ClusterNode:
    """One node; the service asks nothing of it but what its orders say."""

    def __init__(self, name: str, starts: Starts) -> None:
        self.name, self._starts = name, starts
        self._refused: dict[str, RankResult] = {}
        """Starts that will never begin here, until the service has heard of it."""
        self.problems: tuple[str, ...] = ()
        """Why it should get no jobs."""

    def report(self) -> NodeReport:
        """Everything that runs here or has exited."""
        known = self._starts.report()
        refused = [StartReport(key, "exited", result) for key, result in self._refused.items()]
        return NodeReport(self.name, (*known, *refused), self.problems)

    def obey(self, orders: NodeOrders, age_s: float = 0.0) -> bool:
        """Carry out orders; False if they come from a service that is not the newest. `age_s` is the time since the
        report was sent that they answer."""
        if not self._starts.accept(orders.epoch, orders.cluster):
            return False
        known = {start.key: start for start in self._starts.report()}
        wanted = {start.key: start for start in orders.starts}
        self._refused = {key: result for key, result in self._refused.items() if key in wanted}
        # 1 what is not wanted any more: given up, or its exit is recorded
        for key, start in known.items():
            if key not in wanted:
                if start.state == "running":
                    self._starts.kill(key)
                else:
                    self._starts.forget(key)
        # 2 what is to end, 3 what is to run
        for key, order in wanted.items():
            if key in self._refused:
                continue
            if key not in known:
                if age_s < orders.begin_within_s:
                    self._begin(order)
            elif order.action == "end" and known[key].state == "running":
                self._starts.end(key)
            if order.signals and order.action == "run":
                self._starts.signal(key, order.signals)
        return True

    def _begin(self, order: WantedStart) -> None:
        if order.action == "end":
            self._refused[order.key] = RankResult()
        elif not order.request:  # it ran here, and this node has lost its files
            self._refused[order.key] = RankResult(lost=True)
        elif order.secrets is None:
            names = ", ".join(order.request["secrets"])  # type: ignore[arg-type]
            why = f"the service cannot read the values of {names} any more: submit the job again"
            self._refused[order.key] = RankResult(error=why)
        else:
            try:
                self._starts.begin(order)
            except EngineUnreachable:  # its code cannot be fetched now: the next orders repeat it
                return
            except HeadwayError as error:
                self._refused[order.key] = RankResult(error=error.message)
            except OSError as error:
                where = f": {error.filename}" if error.filename else ""
                self._refused[order.key] = RankResult(error=f"{error.strerror}{where}")
