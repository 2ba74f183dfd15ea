"""Data-parallel training over processes of one thread each.

On a busy machine this beats one process of two threads: processes wait for each other once a
step, threads once an operation. Each process runs Muon for its share of the layers only.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.train.checkpoint import CACHE


def join(name: str, rank: int, world: int) -> None:
    """Join the process group of this run, if it has other processes."""
    if world == 1:
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    meeting = CACHE / f"{name}.meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)


def leave(name: str, world: int) -> None:
    """Leave the process group, and remove its meeting file for the next run."""
    if world == 1:
        return
    dist.barrier()
    dist.destroy_process_group()
    (CACHE / f"{name}.meeting").unlink(missing_ok=True)


def layer_of(parameter_name: str) -> int:
    """The layer's number, as 3 in `model.layers.3.mlp...`."""
    return int(parameter_name.split(".layers.")[1].split(".")[0])


def sum_gradients(model: nn.Module, extra: list[float], world: int) -> list[float]:
    """Sum all gradients, and some numbers, over the processes."""
    if world == 1:
        return extra
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([*(grad.flatten() for grad in grads), torch.tensor(extra)])
    dist.all_reduce(flat)
    _spread(flat, grads)
    return flat[-len(extra) :].tolist()


def share_matrices(model: nn.Module, world: int) -> None:
    """Copy each layer's matrices from the process that updated them to all others."""
    if world == 1:
        return
    matrices = [(n, p.data) for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2]
    for source in range(world):
        owned_matrices = [p for n, p in matrices if layer_of(n) % world == source]
        flat = torch.cat([p.flatten() for p in owned_matrices])
        dist.broadcast(flat, source)
        _spread(flat, owned_matrices)


def _spread(flat: Tensor, parts: list[Tensor]) -> None:
    start = 0
    for part in parts:
        part.copy_(flat[start : start + part.numel()].view_as(part))
        start += part.numel()
