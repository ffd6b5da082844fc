"""Devices and precisions by name."""

import torch

from ds2.config.schema import ConfigError


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device of a rank: `auto` and `cuda` are GPU number `local_rank` modulo the GPUs of the host.

    Raises:
        ConfigError: an unknown name, a GPU that does not exist, or default tensors of torch that are not float32 on the
            CPU, as those are of which ds2 makes its own.
    """
    dtype, place = torch.get_default_dtype(), torch.get_default_device()
    if dtype != torch.float32 or place.type != "cpu":
        raise ConfigError(
            f"torch's default tensors are {dtype} on {place}, ds2 needs torch.float32 on cpu: "
            "torch.set_default_dtype(torch.float32); torch.set_default_device('cpu')"
        )
    count = torch.cuda.device_count()
    if name == "auto" and not count:
        return torch.device("cpu")
    try:
        device = torch.device("cuda" if name == "auto" else name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is not one of auto, cpu, cuda, cuda:N") from error
    if device.type == "cuda":
        if (device.index or 0) >= count:
            raise ConfigError(f"device={name!r}: torch sees {count} GPUs; set device=cpu or device=auto")
        if device.index is None:
            device = torch.device("cuda", local_rank % count)
        torch.cuda.set_device(device)
    return device


def resolve_precision(name: str, device: torch.device) -> str:
    """Return the precision; `auto` is bf16 on a GPU, fp32 on a CPU. Raises ConfigError for an unknown name."""
    if name not in ("auto", "fp32", "bf16"):
        raise ConfigError(f"precision={name!r} is not one of auto, fp32, bf16")
    return name if name != "auto" else ("bf16" if device.type == "cuda" else "fp32")
