"""Random state: to and from a checkpoint."""

import base64

import torch

from headway.parallel import World


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
