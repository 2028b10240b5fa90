"""Detection of silent data corruption: replicas hold bitwise equal parameters, unless hardware altered some of them.

Gradients are reduced over replicas and all replicas make the same update, so that equal parameters stay equal. A
difference is not rounding: memory flipped a bit, or arithmetic failed after the reduction.

Each parameter's bits are summed as wrapping 64-bit words, in one read without a copy (summing 32-bit words into 64 bits
copies, and takes 3.6 times as long on a CPU). A single changed bit always changes the sum. A worker's sums are hashed
into one number, and only those numbers are exchanged while they agree.

To find the corrupted replica: of three or more, the others outvote it. Of two, a replay decides, but not by its digest:
after the next gradient reduction the error has reached all replicas. So the first differing element is recorded, and
the replica farther from the replayed value is wrong.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from headway.errors import HeadwayError
from headway.parallel import World
from headway.parallel.local_part import to_local
from headway.recipe.assignment import SuspectElement

WORD = 8
CHUNKS = 64
_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMED = 3


@dataclass(frozen=True)
class ReplicaDifference:
    """What differs between this worker and its counterparts in other replicas."""

    tensors: tuple[str, ...] = ()
    """Names of parameters; none if only other workers differ."""
    index: int | None = None
    """Index of the first differing element of the first of them, in memory order."""
    values: tuple[float, ...] = ()
    """Each replica's value there."""


class Corrupted(HeadwayError):
    """Replicas that should hold the same parameters differ. All workers raise it together.

    `digests` are those of whole replicas, and `replica` is this worker's.
    """

    def __init__(
        self, step: int, agreed: int, digests: Sequence[str], replica: int, difference: ReplicaDifference
    ) -> None:
        tensors = difference.tensors
        some = ", ".join(tensors[:_NAMED]) + ", ..." * (len(tensors) > _NAMED) or "parameters of other workers"
        super().__init__(
            f"replicas differ after step {step} ({some}); they were equal after step {agreed}",
            hint="a device or its memory is faulty; headway report says which, if known",
        )
        self.facts = {"step": step, "agreed": agreed, "replica": replica, "digests": tuple(digests),
                      "tensors": tensors, "index": difference.index, "values": difference.values}  # fmt: skip


class ReplicaChecker:
    """Compares this worker's parameters with those of its counterparts in other replicas."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        world: World,
        every: int,
        start: int,
        doubt: SuspectElement | None = None,
    ) -> None:
        assert world.axis("replicate").size > 1, "comparing needs replicas"
        self._parameters, self._world, self._every, self._doubt = parameters, world, every, doubt
        # Views are created once: parameters do not move, and creating a view takes longer than a small sum.
        self._pieces = [(name, bits) for name, parameter in parameters.items() for bits in views(parameter)]
        self.agreed = start
        """The last step after which all were equal; initially the restored one."""

    def due(self, step: int) -> bool:
        """Whether replicas are compared after a step, independent of saves."""
        return step % self._every == 0 or (self._doubt is not None and step == self._doubt.step)

    def compare(self, step: int) -> str:
        """Return the digest that all replicas share; raise Corrupted on every worker if they differ."""
        copies = self._world.axis("replicate")
        sums = torch.stack([bits.sum(dtype=torch.int64) for _, bits in self._pieces])
        numbers_by_rank = [pair.tolist() for pair in self._world.gather(torch.tensor([copies.rank, _number(sums)]))]
        digests = [
            _digest([number for of, number in numbers_by_rank if of == replica]) for replica in range(copies.size)
        ]
        if len(set(digests)) > 1:
            raise Corrupted(step, self.agreed, digests, copies.rank, self._difference(sums))
        self.agreed = step
        return digests[0]

    def doubted(self, step: int) -> float | None:
        """Return this worker's value of the suspect element; None at other steps and on other workers."""
        doubt = self._doubt
        if doubt is None or (doubt.step, doubt.rank) != (step, self._world.rank):
            return None
        parameter = self._parameters.get(doubt.tensor)
        return None if parameter is None else float(_elements(parameter)[doubt.index])

    def _difference(self, sums: Tensor) -> ReplicaDifference:
        differs = self._differs(sums)
        names = dict.fromkeys(name for (name, _), yes in zip(self._pieces, differs, strict=True) if yes)
        if not names:
            return ReplicaDifference()
        elements = _elements(self._parameters[next(iter(names))])
        index = self._first(elements.view(_OF_SIZE[elements.element_size()]))
        values = torch.stack(self._of_all(elements[index : index + 1].double())).flatten().tolist()
        return ReplicaDifference(tuple(names), index, tuple(values))

    def _first(self, bits: Tensor) -> int:
        """Return the first element that differs between replicas, by bisection over sums."""
        low, high = 0, bits.numel()
        while high - low > 1:
            parts = bits[low:high].tensor_split(min(CHUNKS, high - low))
            which = self._differs(torch.stack([part.sum(dtype=torch.int64) for part in parts])).index(True)
            low += sum(part.numel() for part in parts[:which])
            high = low + parts[which].numel()
        return low

    def _differs(self, numbers: Tensor) -> list[bool]:
        """Return which numbers differ between replicas."""
        differs: list[bool] = (torch.stack(self._of_all(numbers)) != numbers).any(dim=0).tolist()
        return differs

    def _of_all(self, numbers: Tensor) -> list[Tensor]:
        """Return the numbers of all replicas, from the counterparts of this worker."""
        copies = self._world.axis("replicate")
        gathered = [torch.empty_like(numbers) for _ in range(copies.size)]
        dist.all_gather(gathered, numbers, group=copies.group)
        return gathered


def views(tensor: Tensor) -> list[Tensor]:
    """Return views of this worker's part of a tensor: 64-bit words, and the remaining bytes."""
    local = _plain(tensor)
    size = local.element_size()
    if not _by_memory(local).is_contiguous() or local.storage_offset() * size % WORD:
        return [local.view(_OF_SIZE[size])]
    flat = _elements(tensor)
    full_words = flat.numel() * size // WORD * WORD // size
    rest = [flat[full_words:].view(_OF_SIZE[size])] if full_words < flat.numel() else []
    return [flat[:full_words].view(torch.int64), *rest]


def _plain(tensor: Tensor) -> Tensor:
    """Return this worker's part of a tensor as real numbers."""
    local = to_local(tensor.detach())
    return torch.view_as_real(local) if local.is_complex() else local


def _by_memory(local: Tensor) -> Tensor:
    """Return a tensor with its dims permuted to memory order."""
    return local.permute(sorted(range(local.ndim), key=local.stride, reverse=True))


def _elements(tensor: Tensor) -> Tensor:
    """Return this worker's part of a tensor, flat in memory order."""
    return _by_memory(_plain(tensor)).reshape(-1)


def _number(sums: Tensor) -> int:
    """Hash a worker's sums into 64 bits."""
    return int.from_bytes(hashlib.sha256(sums.cpu().numpy().tobytes()).digest()[:8], "little", signed=True)


def _digest(numbers: Sequence[int]) -> str:
    """Return a replica's digest, from its workers' numbers by rank."""
    return hashlib.sha256(" ".join(map(str, numbers)).encode()).hexdigest()[:16]
