"""Which GPUs the kernels of CTC run on: a block an utterance, or two, no waits between blocks."""

import torch

LEAST_CAPABILITY = (8, 0)  # for reductions over a warp


def why_no_device(device: torch.device) -> str | None:
    """Say why no kernel of CTC runs on a device; None if they do."""
    if device.type != "cuda":
        return f"the log-probs are on {device}, these kernels need a CUDA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, these kernels need 8.0 or later"
    return None
