"""What a grid runs on: engines of this process, or one server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from peagle.bench.backend_client import BackendClient
from peagle.bench.calls import Client
from peagle.bench.endpoint import Endpoint, find_model
from peagle.bench.endpoint_client import EndpointClient
from peagle.bench.engines import Build, Engines
from peagle.bench.gaps import KnownGaps
from peagle.bench.grid import Drafting
from peagle.bench.lossless import GapsOf
from peagle.bench.plan import EMBEDDED, BenchPlan
from peagle.bench.prompter import Prompter
from peagle.bench.server_metrics import read_metrics
from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.errors import PeagleError
from peagle.speculation.statistics import SpecDecodeStats

API_KEY = "OPENAI_API_KEY"  # the variable that OpenAI's own client reads


class Session(Protocol):
    tokenizer: Any  # None where the model cannot be read here
    device: str | None  # of this process's engine; None: it runs elsewhere

    def client(self, drafting: Drafting) -> Client: ...

    def engine_number(self, drafting: Drafting) -> int:
        """Of what serves it, built if need be; one that was built anew has a new number."""
        ...

    def depth(self, drafting: Drafting) -> int | None:
        """What each request asks for; None where the engine's K is fixed."""
        ...

    def counters(self) -> SpecDecodeStats | None:
        """The backend's own totals, where answers carry no acceptance."""
        ...

    def gaps_of(self, drafting: Drafting) -> GapsOf | None: ...

    def num_compiled(self, drafting: Drafting) -> int:
        """Backend.num_compiled of what serves it."""
        ...

    def close(self) -> None: ...


class EngineSession:
    def __init__(
        self,
        plan: BenchPlan,
        methods: Sequence[Drafting],
        build: Build,
        prompter: Prompter,
        device: str | None,
    ) -> None:
        self.plan, self.prompter, self.device = plan, prompter, device
        self.tokenizer = prompter.tokenizer
        self.engines = Engines(plan, methods, build)
        self.gaps = KnownGaps(len(prompter.tokenizer))

    def client(self, drafting: Drafting) -> Client:
        return BackendClient(self.engines.get(drafting), self.prompter)

    def engine_number(self, drafting: Drafting) -> int:
        return self.engines.number(drafting)

    def depth(self, drafting: Drafting) -> int | None:
        return drafting.num_speculative_tokens if self.plan.backend == EMBEDDED else None

    def counters(self) -> SpecDecodeStats | None:
        return None

    def gaps_of(self, drafting: Drafting) -> GapsOf | None:
        """vLLM's K holds for all requests, so it cannot be asked for the plain target's."""
        if self.plan.backend != EMBEDDED:
            return None
        return partial(self.gaps.of, self.engines.get(drafting))

    def num_compiled(self, drafting: Drafting) -> int:
        return self.engines.get(drafting).num_compiled

    def close(self) -> None:
        self.engines.close()


class EndpointSession:
    def __init__(self, plan: BenchPlan) -> None:
        endpoint = Endpoint(plan.backend, api_key=os.environ.get(API_KEY))
        self.endpoint = find_model(endpoint, plan.model)
        self.plan = plan
        self.device: str | None = None
        self.tokenizer = _tokenizer(plan.model)

    def client(self, drafting: Drafting) -> Client:
        return EndpointClient(
            self.endpoint, raw=self.plan.raw, seed=self.plan.seed, tokenizer=self.tokenizer
        )

    def engine_number(self, drafting: Drafting) -> int:
        return 0  # the server's own affair

    def depth(self, drafting: Drafting) -> int | None:
        return None

    def counters(self) -> SpecDecodeStats | None:
        return read_metrics(self.endpoint)

    def gaps_of(self, drafting: Drafting) -> GapsOf | None:
        return None

    def num_compiled(self, drafting: Drafting) -> int:
        return 0

    def close(self) -> None:
        pass


def _tokenizer(model: str) -> Any:
    """Only for random tokens and for texts of samples; a server's model may be unknown here."""
    try:
        return load_tokenizer(resolve_model(model, local_files_only=True))
    except PeagleError:
        return None
