"""Optimizers, frozen weights, learning-rate schedules, the step of an optimizer, and averages of weights."""

import copy
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from ds2_ops.optimizer import FusedNorm, FusedUpdate, why_not
from torch import Tensor, nn

from ds2.config.schema import ConfigError, OptimConfig
from ds2.distributed.gradients import GradientReducer
from ds2.system.cuda_graph import GraphRecorder
from ds2.system.tensor_file import counting_modules

log = logging.getLogger(__name__)


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Nesterov SGD (Persistent RNN paper, section 5.3) or AdamW; weight decay only on matrices and kernels.

    Each parameter is read and written once a step (torch's fused implementation). On a GPU the learning rate is a
    tensor there, which a CUDA graph of the step reads at each replay.
    Weights whose names start or end with a key of `layer_rates` (the longest one counts) learn at that factor of the
    rate.

    Raises:
        ConfigError: a key that no weight's name starts or ends with.
    """
    check_keys("optim.layer_rates", config.layer_rates, model)
    groups: list[dict[str, Any]] = []
    for key in (None, *config.layer_rates):
        part = [
            parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and longest_key(name, config.layer_rates) == key
        ]
        factor = 1.0 if key is None else config.layer_rates[key]
        matrices, vectors = [p for p in part if p.ndim >= 2], [p for p in part if p.ndim < 2]
        for params, decay in ((matrices, config.weight_decay), (vectors, 0.0)):
            groups.append({"params": params, "weight_decay": decay, "rate_factor": factor})
    groups = [group for group in groups if group["params"]]
    on_gpu = all(p.is_cuda for p in model.parameters())
    rate = config.learning_rate
    if on_gpu:
        for group in groups:  # one tensor per group: a shared one would have the last group's factor
            group["lr"] = torch.tensor(rate, device=group["params"][0].device)
    momentum, betas = config.momentum, (config.betas[0], config.betas[1])
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=momentum, nesterov=momentum > 0, fused=True)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True, capturable=on_gpu)


def state_shapes(config: OptimConfig, parameter: Tensor) -> dict[str, torch.Size]:
    """Return the shapes of the tensors, by name, that the optimizer has of a parameter from its first step on."""
    if config.name == "sgd":
        return {"momentum_buffer": parameter.shape} if config.momentum else {}
    return {"exp_avg": parameter.shape, "exp_avg_sq": parameter.shape, "step": torch.Size()}


def learning_rate(config: OptimConfig, step: int, epoch: int, done: float, warmed_up: float = 0.0) -> float:
    """The rate of one step.

    Args:
        step: optimizer steps already taken.
        epoch: 1-based.
        done: completed fraction of the planned training, 0..1.
        warmed_up: completed fraction of the longest warm-up that the planned training has time for.

    Returns:
        `learning_rate` divided by `anneal` per finished epoch (section 5.3), or its half cosine to zero, or itself;
        times the linear warm-up, which ends after `warmup_steps` or when `warmed_up` reaches 1.
    """
    rate = config.learning_rate
    if config.schedule == "anneal":
        rate /= config.anneal ** (epoch - 1)
    elif config.schedule in ("cosine", "timed_cosine"):
        rate *= 0.5 * (1 + math.cos(math.pi * min(max(done, 0.0), 1.0)))
    if step < config.warmup_steps:
        rate *= min(1.0, max((step + 1) / config.warmup_steps, warmed_up))
    return rate


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group the rate, times its own factor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * group["rate_factor"])
        else:
            group["lr"] = rate * group["rate_factor"]


def selects(key: str, name: str) -> bool:
    """Return whether a weight's dotted name starts or ends with the parts of `key`, which has dots between them too.

    The weights of cells with gates have names of torch.nn, such as weight_hh_l0; weight_hh selects them too.
    """
    names = {name, name.replace("_l0", "")}
    return any(f".{n}.".startswith(f".{key}.") or f".{n}.".endswith(f".{key}.") for n in names)


def longest_key(name: str, keys: Iterable[str]) -> str | None:
    """The longest of the keys that select a weight, or None."""
    return max((key for key in keys if selects(key, name)), key=len, default=None)


def check_keys(setting: str, keys: Iterable[str], model: nn.Module) -> None:
    """Raise ConfigError where a key of a setting selects no weight; it has the first parts of all weights' names."""
    unused = [key for key in keys if not any(selects(key, name) for name, _ in model.named_parameters())]
    if not unused:
        return
    parts = {name: len(list(child.children())) for name, child in model.named_children() if list(child.parameters())}
    named = [f"{name}.0 to {name}.{count - 1}" if count > 1 else name for name, count in parts.items()]
    raise ConfigError(
        f"{setting} has {unused}: no weight's name starts or ends so; this model has "
        f"{', '.join(dict.fromkeys([*parts, *named]))}"
    )


def freeze(model: nn.Module, keys: Sequence[str]) -> None:
    """Freeze the weights whose names start or end with one of `keys`; running statistics still change.

    Raises:
        ConfigError: a key that selects no weight, or nothing left to train.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(longest_key(name, keys) is None)
    check_keys("train.freeze", keys, model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"train.freeze={list(keys)} leaves nothing to train: freeze fewer parts")
    if keys:
        total = sum(p.numel() for p in model.parameters())
        frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
        log.info("train.freeze: %s of %s parameters stay as they are", f"{frozen:,}", f"{total:,}")


def clip_gradients(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Rescale all gradients to `max_norm` where `norm` exceeds it (Pascanu et al. 2012); 0 leaves them alone."""
    if max_norm > 0:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))


Model = TypeVar("Model", bound=nn.Module)


class WeightAverage(Generic[Model]):
    """A moving average of a model: average <- d average + (1 - d) model, d = min(decay, (1 + n) / (10 + n)).

    The growing d lets the average forget the random start in the first n updates. Floating-point buffers (running
    statistics of batch normalisation) are averaged like weights; other buffers are copied.
    """

    def __init__(self, model: Model, decay: float) -> None:
        """Start the average at the present weights; `decay` lies in (0, 1)."""
        self.decay = decay
        self.updates = 0
        self.model: Model = copy.deepcopy(model)
        self.model.requires_grad_(False).eval()
        self._source: nn.Module | None = None

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take one step towards `model`, whose tensors must be those of the first call."""
        if model is not self._source:
            self._find_tensors(model)
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self._averaged, self._current, 1 - decay)
        for averaged, current in self._copied:
            averaged.copy_(current)
        for ours, theirs in self._counting:
            ours.set_extra_state(theirs.get_extra_state())

    def _find_tensors(self, model: nn.Module) -> None:
        """Collect all tensors once: state dicts take 2 ms of the host at the end of each step, in which a GPU waits."""
        ours, theirs = (dict((*m.named_parameters(), *m.named_buffers())) for m in (self.model, model))
        pairs = [(ours[name], value) for name, value in theirs.items()]
        self._averaged = [averaged for averaged, current in pairs if current.is_floating_point()]
        self._current = [current for _, current in pairs if current.is_floating_point()]
        self._copied = [(averaged, current) for averaged, current in pairs if not current.is_floating_point()]
        counting = (counting_modules(m).values() for m in (self.model, model))
        self._counting = list(zip(*counting, strict=True))
        self._source = model


class OptimizerStep:
    """Clips the gradients and takes the optimizer's step; from the second time on as a CUDA graph, if `graphed`.

    The first step makes the optimizer's state. From then on a GPU takes it in one launch (`ds2_ops.optimizer`), which
    also rounds the weights for the next pass.

    Args:
        optimizer: on a GPU with its learning rates in tensors, where it is graphed.
        gradients: of all its parameters.
        clip_norm: the largest norm of all gradients together; 0 for no bound.
        graphed: whether to record the step.
        why_no_kernels: why all ranks use torch's kernels; '' if they use those of ds2_ops, which round differently.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: GradientReducer,
        clip_norm: float,
        *,
        graphed: bool,
        why_no_kernels: str = "",
    ) -> None:
        self._optimizer, self._gradients, self._clip_norm = optimizer, gradients, clip_norm
        self._graphed = graphed
        self._replay: Callable[[], None] | None = None
        self._norm = torch.empty(0)
        self._fused: FusedUpdate | None = None
        reason = why_no_kernels or why_not(optimizer)
        self._fuses = not reason
        parts = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        # Of all gradients, () float32 on their device, without a wait of the host; its bits do not depend on buckets.
        self.norm: Callable[[], Tensor] = partial(nn.utils.get_total_norm, parts, foreach=True)
        if self._fuses:
            self.norm = FusedNorm(gradients.buckets)
        elif gradients.comm.device.type == "cuda":
            log.info("the optimizer's step runs on torch's kernels: %s", reason)

    @property
    def ignores_nonfinite(self) -> bool:
        """Whether a step with a non-finite norm changes nothing, so that the host need not read the norm first."""
        return self._fuses and bool(self._optimizer.state)

    def __call__(self, norm: Tensor) -> None:
        """Take a step with gradients of this norm, a scalar on their device; finite unless `ignores_nonfinite`."""
        again = bool(self._optimizer.state)
        if again and self._fuses and self._fused is None:
            self._fused = FusedUpdate(self._optimizer, self._gradients.rounded)
        if again and self._graphed and self._replay is None:
            self._norm = norm.clone()
            with GraphRecorder().recording() as graph:
                self._launch(self._norm)
            self._replay = graph.replay
        if self._replay is None:
            self._launch(norm)
        else:
            self._norm.copy_(norm)
            self._replay()

    def _launch(self, norm: Tensor) -> None:
        if self._fused is not None:
            self._fused(norm, self._clip_norm)
        else:
            clip_gradients(self._gradients.buckets, norm, self._clip_norm)
            self._optimizer.step()
        self._gradients.set_copies_current(self._fused is not None)
