"""The device that a process of a run trains on."""

from __future__ import annotations

import os

import torch

from peagle.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """Under torchrun each process takes the GPU of its local rank, unless one is named."""
    try:
        device = None if name == "auto" else torch.device(name)
    except RuntimeError:
        raise ConfigError(f"run.device={name!r} is unknown", hint="use cpu or cuda") from None
    if device is not None and device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        if device is not None:
            raise ConfigError(f"run.device={name}, but torch sees no GPU", hint="run.device=cpu")
        return torch.device("cpu")
    if device is None or device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
