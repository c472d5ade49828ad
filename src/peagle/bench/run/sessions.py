"""What a grid runs on: engines of this process, or one server.

Engines are built when they are first needed; the one that was not used for longest is closed first.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from peagle.backends.contract import Backend
from peagle.backends.vllm.options import VllmOptions
from peagle.bench.results.settings import Setting
from peagle.bench.run.backend_client import BackendClient
from peagle.bench.run.client import Client
from peagle.bench.run.endpoint_client import EndpointClient, find_model
from peagle.bench.run.lossless import GapsOf, KnownGaps
from peagle.bench.run.plan import (
    AUTO,
    EMBEDDED,
    ENGINE_KEYS,
    OUR_KEYS,
    SAGEMAKER,
    VLLM,
    VLLM_KEYS,
    BenchPlan,
)
from peagle.bench.run.server_metrics import read_metrics
from peagle.bench.workloads.prompter import Prompter
from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.errors import PeagleError
from peagle.http import Endpoint
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats

if TYPE_CHECKING:
    from peagle.deploy.invoke import EndpointRuntime
    from peagle.engine.request import DraftTree

API_KEY = "OPENAI_API_KEY"  # the variable that OpenAI's own client reads
# model, sizes, drafter, and vLLM's own options where the backend is vLLM
Build = Callable[[str, EngineConfig, SpeculativeConfig | None, VllmOptions | None], Backend]


class Session(Protocol):
    tokenizer: Any  # None where the model cannot be read here
    device: str | None  # where this process's engine runs; None: it runs elsewhere

    def client(self, setting: Setting) -> Client: ...

    def engine_number(self, setting: Setting) -> int:
        """The number of the engine, which is built if need be; each that is built has a new one."""
        ...

    def depth(self, setting: Setting) -> int | None:
        """What each request asks for; None where that is the engine's to say."""
        ...

    def counters(self) -> SpecDecodeStats | None:
        """The backend's own totals, where answers carry no acceptance."""
        ...

    def gaps_of(self, setting: Setting) -> GapsOf | None: ...

    def num_compiled(self, setting: Setting) -> int:
        """Backend.num_compiled of what serves it."""
        ...

    def draft_trees(self, setting: Setting, prompt: Any, params: SamplingParams) -> list[DraftTree]:
        """Of the answer to a prompt in the client's form; none where the backend shows none."""
        ...

    def close(self) -> None: ...


class EngineSession:
    def __init__(
        self,
        plan: BenchPlan,
        settings: Sequence[Setting],
        build: Build,
        prompter: Prompter,
        device: str | None,
    ) -> None:
        self.plan, self.prompter, self.device = plan, prompter, device
        self.tokenizer = prompter.tokenizer
        self.engines = Engines(plan, settings, build)
        self.gaps = KnownGaps(len(prompter.tokenizer))

    def client(self, setting: Setting) -> Client:
        return BackendClient(self.engines.get(setting), self.prompter)

    def engine_number(self, setting: Setting) -> int:
        return self.engines.number(setting)

    def depth(self, setting: Setting) -> int | None:
        if self.plan.backend != EMBEDDED or setting.is_auto:
            return None
        return setting.num_speculative_tokens

    def counters(self) -> SpecDecodeStats | None:
        return None

    def gaps_of(self, setting: Setting) -> GapsOf | None:
        """None on vLLM: its K holds for all requests, so it cannot run the plain target."""
        if self.plan.backend != EMBEDDED:
            return None
        return partial(self.gaps.of, self.engines.get(setting))

    def num_compiled(self, setting: Setting) -> int:
        return self.engines.get(setting).num_compiled

    def draft_trees(self, setting: Setting, prompt: Any, params: SamplingParams) -> list[DraftTree]:
        from peagle.engine.llm import LLM

        backend = self.engines.get(setting)
        if not isinstance(backend, LLM):
            return []
        answers = backend.add_request(prompt, params, keeps_trees=True)
        while not answers.finished:
            backend.step()
        return answers.answers[0].request.draft_trees or []

    def close(self) -> None:
        self.engines.close()


class EndpointSession:
    def __init__(self, plan: BenchPlan) -> None:
        self.runtime: EndpointRuntime | None = None  # SageMaker's; None: plain HTTP
        if plan.backend.startswith(SAGEMAKER):
            from peagle.deploy.invoke import find_runtime

            self.runtime = find_runtime(plan.backend.removeprefix(SAGEMAKER))
            self.endpoint = self.runtime.endpoint
        else:
            endpoint = Endpoint(plan.backend, api_key=os.environ.get(API_KEY))
            self.endpoint = find_model(endpoint, plan.model)
        self.plan = plan
        self.device: str | None = None
        self.tokenizer = _tokenizer(plan.model)

    def client(self, setting: Setting) -> Client:
        return EndpointClient(
            self.endpoint,
            source=self.runtime,
            raw=self.plan.raw,
            seed=self.plan.seed,
            tokenizer=self.tokenizer,
        )

    def engine_number(self, setting: Setting) -> int:
        return 0  # a server has one engine as far as we can see

    def depth(self, setting: Setting) -> int | None:
        return None

    def counters(self) -> SpecDecodeStats | None:
        """None from SageMaker, which lets nobody through to the page."""
        return read_metrics(self.endpoint) if self.runtime is None else None

    def gaps_of(self, setting: Setting) -> GapsOf | None:
        return None

    def num_compiled(self, setting: Setting) -> int:
        return 0

    def draft_trees(self, setting: Setting, prompt: Any, params: SamplingParams) -> list[DraftTree]:
        return []

    def close(self) -> None:
        pass


def _tokenizer(model: str) -> Any:
    """Needed only for random tokens and texts of samples; a server's model may be unknown here."""
    try:
        return load_tokenizer(resolve_model(model, local_files_only=True))
    except PeagleError:
        return None


class Engines:
    """One per head and size of its trees, which serves every K (vLLM: one per head and K, since its
    K is fixed)."""

    def __init__(self, plan: BenchPlan, settings: Sequence[Setting], build: Build) -> None:
        self.plan, self.build = plan, build
        self.deepest: dict[tuple[str, int | None, bool], int] = {}
        for setting in settings:
            key = _drafter_key(setting)
            depth = setting.num_speculative_tokens
            self.deepest[key] = max(depth, self.deepest.get(key, 0))
        every = 1 if plan.backend == VLLM else len(self.deepest)
        self.most = min(plan.max_engines or every, len(settings))
        self._alive: dict[Setting, Backend] = {}  # the one used longest ago first
        self._numbers: dict[Setting, int] = {}  # of those alive, in the order they were built
        self._num_built = 0

    def get(self, setting: Setting) -> Backend:
        key = self._key(setting)
        if key in self._alive:
            self._alive[key] = self._alive.pop(key)
            return self._alive[key]
        while len(self._alive) >= self.most:
            self._end(next(iter(self._alive)))
        config = self._share(engine_config(self.plan))
        backend = self.build(self.plan.model, config, _drafter(key), vllm_options(self.plan))
        self._alive[key] = backend
        self._num_built += 1
        self._numbers[key] = self._num_built
        return backend

    def number(self, setting: Setting) -> int:
        """It changes when the engine is closed and built again."""
        self.get(setting)
        return self._numbers[self._key(setting)]

    def _share(self, config: EngineConfig) -> EngineConfig:
        """The limit counts what is in use already, so engine n of m may fill n/m of it: without
        that the first one's cache would leave nothing to the others of this GPU."""
        whole = config.gpu_memory_utilization
        part = (len(self._alive) + 1) / self.most
        return replace(config, gpu_memory_utilization=whole * part)

    def close(self) -> None:
        for key in list(self._alive):
            self._end(key)

    def _key(self, setting: Setting) -> Setting:
        if self.plan.backend == VLLM:
            return setting
        deepest = self.deepest[_drafter_key(setting)]
        return replace(setting, num_speculative_tokens=deepest)

    def _end(self, key: Setting) -> None:
        self._alive.pop(key).close()
        gc.collect()
        with suppress(ImportError):
            import torch

            torch.cuda.empty_cache()  # nothing to do without CUDA


def engine_config(plan: BenchPlan) -> EngineConfig:
    """Room for every stream at once: a request that waits for a place measures the setting."""
    given = {name: getattr(plan, name) for name in ENGINE_KEYS}
    if plan.backend == VLLM:
        del given["quantization"]  # its options carry it: it knows more kinds than we do
    sizes = {name: value for name, value in given.items() if value is not None}
    streams = max([*plan.concurrencies, EngineConfig.max_num_seqs])
    defaults = {"max_num_seqs": streams, "seed": plan.seed, "enable_prefix_caching": False}
    return EngineConfig(**{**defaults, **sizes})


def vllm_options(plan: BenchPlan) -> VllmOptions | None:
    """None for the embedded engine."""
    if plan.backend != VLLM:
        return None
    names = [name for name in (*ENGINE_KEYS, *VLLM_KEYS) if name not in OUR_KEYS]
    given = {name: getattr(plan, name) for name in names}
    return VllmOptions(**given | {"enable_prefix_caching": bool(plan.enable_prefix_caching)})


def _drafter_key(setting: Setting) -> tuple[str, int | None, bool]:
    return setting.head or setting.method, setting.num_draft_nodes, setting.is_auto


def _drafter(key: Setting) -> SpeculativeConfig | None:
    if not key.num_speculative_tokens:
        return None
    return SpeculativeConfig.from_mapping(
        {
            "method": None if key.head else key.method,
            "model": key.head,
            "num_speculative_tokens": None if key.is_auto else key.num_speculative_tokens,
            "num_draft_nodes": key.num_draft_nodes,
            "speculation": AUTO if key.is_auto else None,
        }
    )
