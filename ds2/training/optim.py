"""Optimizers, learning-rate schedules and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ds2.config.schema import ConfigError, OptimConfig


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Nesterov SGD (Persistent RNN paper, section 5.3) or AdamW; weight decay only on matrices and kernels.

    On a GPU each parameter is read and written once a step (torch's fused implementation), and the learning rate is a
    tensor there, which a CUDA graph of the step reads anew each time; on a CPU, foreach.
    Weights whose names start with a key of `layer_rates` (the longest one counts) learn at that factor of the rate.

    Raises:
        ConfigError: a key that no weight's name starts with.
    """
    unused = [p for p in config.layer_rates if not any(starts(name, p) for name, _ in model.named_parameters())]
    if unused:
        raise ConfigError(f"optim.layer_rates has {unused}: {no_such_weights(model)}")
    groups: list[dict[str, Any]] = []
    for prefix in (None, *config.layer_rates):
        part = [
            parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and longest_prefix(name, config.layer_rates) == prefix
        ]
        factor = 1.0 if prefix is None else config.layer_rates[prefix]
        matrices, vectors = [p for p in part if p.ndim >= 2], [p for p in part if p.ndim < 2]
        for params, decay in ((matrices, config.weight_decay), (vectors, 0.0)):
            groups.append({"params": params, "weight_decay": decay, "rate_factor": factor})
    groups = [group for group in groups if group["params"]]
    on_gpu = all(p.is_cuda for p in model.parameters())
    rate = config.learning_rate
    if on_gpu:
        for group in groups:  # a tensor each: one that all shared would have the last group's factor
            group["lr"] = torch.tensor(rate, device=group["params"][0].device)
    momentum, betas = config.momentum, (config.betas[0], config.betas[1])
    if config.name == "sgd":
        return torch.optim.SGD(
            groups, lr=rate, momentum=momentum, nesterov=momentum > 0, fused=on_gpu, foreach=not on_gpu
        )
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=on_gpu, foreach=not on_gpu, capturable=on_gpu)


def learning_rate(config: OptimConfig, step: int, epoch: int, progress: float) -> float:
    """The rate of one step.

    Args:
        config: schedule and its settings.
        step: optimizer steps already taken.
        epoch: 1-based.
        progress: fraction of the planned training behind this step, 0..1.

    Returns:
        `learning_rate` divided by `anneal` per finished epoch (section 5.3), or its half cosine to zero, or itself;
        times the linear warm-up.
    """
    rate = config.learning_rate
    if config.schedule == "anneal":
        rate /= config.anneal ** (epoch - 1)
    elif config.schedule in ("cosine", "timed_cosine"):
        rate *= 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
    if step < config.warmup_steps:
        rate *= (step + 1) / config.warmup_steps
    return rate


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group the rate, times its own factor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * group["rate_factor"])
        else:
            group["lr"] = rate * group["rate_factor"]


def starts(name: str, prefix: str) -> bool:
    """Whether a weight's dotted name is `prefix` or lies beneath it."""
    return name == prefix or name.startswith(prefix + ".")


def longest_prefix(name: str, prefixes: Iterable[str]) -> str | None:
    """The longest of the prefixes that a weight's name starts with, or None."""
    return max((prefix for prefix in prefixes if starts(name, prefix)), key=len, default=None)


def no_such_weights(model: nn.Module) -> str:
    """Say which starts of names a model's weights have."""
    parts = {name: len(list(child.children())) for name, child in model.named_children() if list(child.parameters())}
    named = [f"{name}.0 to {name}.{count - 1}" if count > 1 else name for name, count in parts.items()]
    return f"no weight's name starts so; this model has {', '.join(dict.fromkeys([*parts, *named]))}"


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm over all gradients, of any shapes: () float32 on their device (no host synchronisation)."""
    return nn.utils.get_total_norm(gradients, foreach=True)


def clip_gradients(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Rescale all gradients to `max_norm` where `norm` exceeds it (Pascanu et al. 2012); 0 leaves them alone."""
    if max_norm > 0:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
