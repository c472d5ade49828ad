"""Engines behind one contract, for the verbs that generate, measure and serve.

contract        what a verb sees of an engine; `peagle.LLM`, the embedded one, satisfies it as it is
vllm            vLLM, in this process and as a server
vllm_connector  hands hidden states over from vLLM on a CPU; imported by vLLM alone
"""

from __future__ import annotations

from typing import Literal

BackendName = Literal["embedded", "vllm"]
