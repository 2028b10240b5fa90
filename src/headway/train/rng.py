"""Random state: to and from a checkpoint."""

import base64
import hashlib

import torch

from headway.parallel import World


def seed_step(seed: int, step: int, world: World) -> None:
    """Seed this worker's random numbers for a step, so that they do not depend on the steps before it.

    Workers of a tensor axis have the same numbers: an input that all of them have is dropped alike.
    """
    place: tuple[int, ...] = (world.data.rank, world.axis("pipeline").rank)
    if world.axis("context").size > 1:
        place = (*place, world.axis("context").rank)
    key = hashlib.sha256(f"{seed}/{step}/{place}".encode()).digest()
    torch.manual_seed(int.from_bytes(key[:8], "little") >> 1)


def rng_state(world: World) -> torch.Tensor:
    """Return this worker's random state as bytes: the CPU's, followed by its GPU's."""
    states = [torch.get_rng_state()]
    if world.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(world.device))
    return torch.cat(states)


def restore_rng(world: World, rng: dict[str, str], workers: int) -> bool:
    """Restore random state; return False if the checkpoint has another number of workers or kind of device."""
    if workers != world.size or str(world.rank) not in rng:
        return False
    state = torch.frombuffer(bytearray(base64.b64decode(rng[str(world.rank)])), dtype=torch.uint8)
    cpu_bytes = torch.get_rng_state().numel()
    if (state.numel() > cpu_bytes) != (world.device.type == "cuda"):
        return False
    torch.set_rng_state(state[:cpu_bytes])
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(state[cpu_bytes:], world.device)
    return True
