"""peagle: lossless parallel speculative decoding. `LLM` and `SamplingParams` as in vLLM.

cli              the `peagle` command, one file per verb
backends         the engines that verbs can use: the embedded one and vLLM
engine           the embedded engine: requests in, tokens out
speculation      sampling, verification and acceptance as pure functions
models           targets and drafters, for training and for serving
kernels          fast paths for CPUs and GPUs, beside their references
checkpoints      model references, weights and heads on disk
data             prompts, conversations and prepared datasets
prepare          prompts -> a dataset of the target's own answers
train            a dataset -> a head
teacher_forcing  a drafter over whole texts, in training and in evaluation
evaluate         acceptance of a head, offline
bench            speed, latency and acceptance, measured; plots, advice, predictions
deploy           endpoints on SageMaker
heads            the heads that ship
doctor           what in a dataset or a head silently costs acceptance
config           what the engine and its drafter are told at start
sampling_params  how one request is sampled
outputs          what a caller gets back
errors           errors that a user can cause
files            files and folders that are whole or not there
http             HTTP to model servers: connections, retries, errors
locking          file locks that do not outlive their holder
cache            the folder of things that can be made again
processes        child processes, ended with all their children
provenance       hardware, versions, commit, command and time of a figure
log              logging to stderr
__main__         `python -m peagle`
"""

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
