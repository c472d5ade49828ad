"""peagle: lossless parallel speculative decoding. `LLM` and `SamplingParams` as in vLLM."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.engine.llm import LLM
    from peagle.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

# How long OpenMP's threads spin between two parallel regions before they sleep; libgomp reads it
# when torch is first imported. Its own default is some milliseconds: on a machine that others use,
# too, spinning threads take the very cores that the work is waiting for.
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = "1000"


def __getattr__(name: str) -> Any:
    # Lazy: `import peagle` and `peagle --help` must not pay for torch.
    if name == "LLM":
        from peagle.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from peagle.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'peagle' has no attribute {name!r}")
