"""Muon for the hidden matrices, AdamW for embeddings and norms, and a wall-clock schedule."""

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from models.train.parallel import layer_of

MATRIX_RATE = 0.013
OTHER_RATE = 1.5e-3
WARMUP = 0.01
DECAY_FROM = 0.5


def optimizers(
    model: nn.Module, scale: float = 1.0, rank: int = 0, world: int = 1, *, muon: bool = True
) -> list[Optimizer]:
    """One optimizer for this process's share of the layers' matrices, one for everything else.

    Without `muon` there is a single one: Muon computes in bf16, which a processor may not have.
    """
    hidden = [(n, p) for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2]
    hidden = hidden if muon else []
    matrices = [p for n, p in hidden if layer_of(n) % world == rank]
    matrix_ids = {id(p) for _, p in hidden}
    others = [p for p in model.parameters() if id(p) not in matrix_ids]
    optims: list[Optimizer] = [
        AdamW(others, lr=OTHER_RATE * scale, betas=(0.9, 0.95), weight_decay=0.0)
    ]
    if matrices:
        rate = MATRIX_RATE * scale
        optims.insert(0, Muon(matrices, lr=rate, momentum=0.95, weight_decay=0.03))
    for optimizer in optims:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optims


def set_rate(optims: list[Optimizer], progress: float) -> float:
    """Warm-up, a plateau that can be left at any time, then linear decay to zero.

    `progress` is the share of the wall-clock budget that is spent.
    """
    factor = min(1.0, (progress + 1e-3) / WARMUP)
    if progress > DECAY_FROM:
        factor = max(0.0, (1.0 - progress) / (1.0 - DECAY_FROM))
    for optimizer in optims:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
    return factor
