"""Silent corruption: replicas hold the same parameters bit for bit, unless a machine has altered some of them.

Gradients are added up over replicas and every one takes the same stride, so that equal parameters stay equal. What
parts them is no rounding: memory that flipped a bit, or arithmetic that went wrong after the gradients were added up.

Each parameter's bits are added up as 64-bit words, wrapping round: one read of it, no copy (a sum of 32-bit words into
64 bits would make one, and take 3.6 times as long on a CPU). A single changed bit always changes the sum. The sums of
a worker are hashed into one number, and those numbers are all that travels as long as they agree.

Which replica is at fault: of three or more, the one that the others outvote. Of two, a replay tells, but not by its
digest: with the next exchange of gradients what one replica computed with a wrong parameter has moved all of them. So
the first element that differs is kept, and the replica that is farther from the replay's has it wrong.
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

__all__ = ["Corrupted", "ReplicaChecker", "ReplicaDifference"]

WORD = 8
CHUNKS = 64
_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMED = 3


@dataclass(frozen=True)
class ReplicaDifference:
    """What differs between this worker and its like in other replicas."""

    tensors: tuple[str, ...] = ()
    """Parameters; none where the difference lies with other workers."""
    index: int | None = None
    """The first element of the first of them that differs, in the order of its memory here."""
    values: tuple[float, ...] = ()
    """What each replica has there."""


class Corrupted(HeadwayError):
    """Replicas that should hold the same parameters do not. All workers raise it together.

    `digests` are those of the whole replicas, and `replica` is the one this worker belongs to.
    """

    def __init__(
        self, step: int, agreed: int, digests: Sequence[str], replica: int, difference: ReplicaDifference
    ) -> None:
        tensors = difference.tensors
        some = ", ".join(tensors[:_NAMED]) + ", ..." * (len(tensors) > _NAMED) or "parameters of other workers"
        super().__init__(
            f"replicas differ after step {step} ({some}); they were equal after step {agreed}",
            hint="a device or its memory is at fault; headway report says which, as far as that is known",
        )
        self.facts = {"step": step, "agreed": agreed, "replica": replica, "digests": tuple(digests),
                      "tensors": tensors, "index": difference.index, "values": difference.values}  # fmt: skip


class ReplicaChecker:
    """This worker's parameters, and when they are held against those of its like in other replicas."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        world: World,
        every: int,
        start: int,
        doubt: SuspectElement | None = None,
    ) -> None:
        assert world.axis("replicate").size > 1, "there is something to compare with"
        self._parameters, self._world, self._every, self._doubt = parameters, world, every, doubt
        # Views, made once: a parameter stays where it is, and making them takes longer than adding a small one up.
        self._pieces = [(name, bits) for name, parameter in parameters.items() for bits in views(parameter)]
        self.agreed = start
        """The last step after which all were equal: at first the one they were all restored to."""

    def due(self, step: int) -> bool:
        """Whether a step is followed by a comparison, saved or not."""
        return step % self._every == 0 or (self._doubt is not None and step == self._doubt.step)

    def compare(self, step: int) -> str:
        """The digest that all replicas have in common; Corrupted on every worker if there is none."""
        copies = self._world.axis("replicate")
        sums = torch.stack([bits.sum(dtype=torch.int64) for _, bits in self._pieces])
        told = [pair.tolist() for pair in self._world.gather(torch.tensor([copies.rank, _number(sums)]))]
        digests = [_digest([number for of, number in told if of == replica]) for replica in range(copies.size)]
        if len(set(digests)) > 1:
            raise Corrupted(step, self.agreed, digests, copies.rank, self._difference(sums))
        self.agreed = step
        return digests[0]

    def doubted(self, step: int) -> float | None:
        """What this worker has now where replicas differed before; None at other steps and on other workers."""
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
        """The first element that is not the same in all replicas, of some whose sum is not: by ever smaller parts."""
        low, high = 0, bits.numel()
        while high - low > 1:
            parts = bits[low:high].tensor_split(min(CHUNKS, high - low))
            which = self._differs(torch.stack([part.sum(dtype=torch.int64) for part in parts])).index(True)
            low += sum(part.numel() for part in parts[:which])
            high = low + parts[which].numel()
        return low

    def _differs(self, numbers: Tensor) -> list[bool]:
        """Which of some numbers are not the same in all replicas."""
        found: list[bool] = (torch.stack(self._of_all(numbers)) != numbers).any(dim=0).tolist()
        return found

    def _of_all(self, numbers: Tensor) -> list[Tensor]:
        """The numbers of all replicas, from those who hold the same part of the model."""
        copies = self._world.axis("replicate")
        found = [torch.empty_like(numbers) for _ in range(copies.size)]
        dist.all_gather(found, numbers, group=copies.group)
        return found


def views(tensor: Tensor) -> list[Tensor]:
    """The memory of what this worker has of a tensor, as 64-bit words and what is left over: views, no copies."""
    mine = _plain(tensor)
    size = mine.element_size()
    if not _by_memory(mine).is_contiguous() or mine.storage_offset() * size % WORD:
        return [mine.view(_OF_SIZE[size])]
    flat = _elements(tensor)
    whole = flat.numel() * size // WORD * WORD // size
    rest = [flat[whole:].view(_OF_SIZE[size])] if whole < flat.numel() else []
    return [flat[:whole].view(torch.int64), *rest]


def _plain(tensor: Tensor) -> Tensor:
    """What this worker has of a tensor, in real numbers."""
    mine = to_local(tensor.detach())
    return torch.view_as_real(mine) if mine.is_complex() else mine


def _by_memory(mine: Tensor) -> Tensor:
    """A tensor with its dims in the order in which they lie in memory."""
    return mine.permute(sorted(range(mine.ndim), key=mine.stride, reverse=True))


def _elements(tensor: Tensor) -> Tensor:
    """What this worker has of a tensor, one element after the other as they lie in memory."""
    return _by_memory(_plain(tensor)).reshape(-1)


def _number(sums: Tensor) -> int:
    """One 64-bit number that stands for a worker's sums."""
    return int.from_bytes(hashlib.sha256(sums.cpu().numpy().tobytes()).digest()[:8], "little", signed=True)


def _digest(numbers: Sequence[int]) -> str:
    """What stands for a replica: its workers' numbers, by rank."""
    return hashlib.sha256(" ".join(map(str, numbers)).encode()).hexdigest()[:16]
