"""vLLM behind the contract of `backends.contract`: the same calls, the same outputs."""

from __future__ import annotations

import itertools
from pathlib import Path

from peagle.backends.vllm.arguments import engine_arguments
from peagle.backends.vllm.engine import shut_down, start_engine, verifies_sampled_drafts
from peagle.backends.vllm.install import check_installed
from peagle.backends.vllm.options import VllmOptions
from peagle.backends.vllm.requests import OpenRequest, check_params, vllm_params
from peagle.backends.vllm.stats import read_counters
from peagle.checkpoints.references import load_tokenizer
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine.offline import OfflineInference
from peagle.engine.prompts import PromptReader, TokenizedPrompt, check_tokens
from peagle.errors import BackendError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats


class VllmBackend(OfflineInference[OpenRequest]):
    """One vLLM engine. Prompts are tokenized here, so both backends answer the same token ids."""

    num_compiled = 0  # it captures its graphs at the start

    def __init__(
        self,
        model: str,
        engine: EngineConfig | None = None,
        drafter: SpeculativeConfig | None = None,
        options: VllmOptions | None = None,
    ) -> None:
        check_installed()
        arguments = engine_arguments(
            model, engine or EngineConfig(), drafter, options or VllmOptions()
        )
        self.model_path: Path = arguments.model_path
        self.method = arguments.method
        self.num_speculative_tokens = arguments.num_speculative_tokens
        self.stats = SpecDecodeStats()
        super().__init__(PromptReader(load_tokenizer(self.model_path)))
        self._engine = start_engine(arguments.keywords, world_size=arguments.options.world_size)
        self.max_num_seqs: int = self._engine.vllm_config.scheduler_config.max_num_seqs
        config = self._engine.vllm_config.model_config
        self.max_model_len, self._vocab_size = config.max_model_len, config.get_vocab_size()
        self._counter = itertools.count()
        self._active: dict[str, OpenRequest] = {}

    def engine_counters(self) -> SpecDecodeStats:
        """vLLM's own totals, which count drafts behind an answer's end as well; see stats.py."""
        return read_counters(self._engine.get_metrics())

    def close(self) -> None:
        if self._engine is not None:
            shut_down(self._engine)
            self._engine = None

    def add_request(
        self, prompt: TokenizedPrompt, params: SamplingParams, *, streamed: bool = False
    ) -> OpenRequest:
        """Queues a prompt. `step` advances it, `abort_request` gives it up."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._engine is None:
            raise BackendError("vLLM has ended", hint="start another backend")
        self._check(prompt, params)
        kind = RequestOutputKind.CUMULATIVE if streamed else RequestOutputKind.FINAL_ONLY
        request_id = str(next(self._counter))
        request = OpenRequest(request_id, *prompt, params, self.max_model_len)
        try:
            self._engine.add_request(
                request_id,
                {"type": "token", "prompt_token_ids": prompt.token_ids},
                VllmSamplingParams(**vllm_params(params), output_kind=kind),
            )
        except ValueError as error:
            raise RequestError(f"vLLM refuses the request: {error}") from error
        self._active[request_id] = request
        return request

    def step(self) -> list[OpenRequest]:
        """Advances every open request; -> those that got something new."""
        try:
            outputs = self._engine.step()
        except Exception as error:
            self.close()
            raise BackendError(f"vLLM died: {type(error).__name__}: {error}") from error
        changed = []
        for output in outputs:
            request = self._active.get(output.request_id)
            if request is None:
                continue
            request.take(output)
            changed.append(request)
            if request.finished:
                del self._active[request.request_id]
                self.stats.merge(request.output().stats)
        return changed

    def abort_request(self, request: OpenRequest) -> None:
        if self._active.pop(request.request_id, None) is not None and self._engine is not None:
            self._engine.abort_request([request.request_id])

    def _check(self, prompt: TokenizedPrompt, params: SamplingParams) -> None:
        k = self.num_speculative_tokens
        check_params(params, k, sampled_drafts=params.greedy or not k or verifies_sampled_drafts())
        check_tokens(
            prompt.token_ids, params, max_model_len=self.max_model_len, vocab_size=self._vocab_size
        )
