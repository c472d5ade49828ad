"""LLM: the call that vLLM's users know, on the embedded engine."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.checkpoints.targets import eos_token_ids
from peagle.compatibility import LLM_ARGUMENTS, drop_unused
from peagle.config import EngineConfig, SpeculativeConfig, from_mapping
from peagle.engine.answers import PromptAnswers, open_answers
from peagle.engine.detokenizer import decoder_of
from peagle.engine.engine import Engine
from peagle.engine.grammar import GrammarCompiler
from peagle.engine.loading import (
    check_speculation,
    choose_device,
    load_engine_target,
    load_speculation,
)
from peagle.engine.offline import OfflineInference
from peagle.engine.prompts import Message, PromptReader, TokenizedPrompt
from peagle.engine.request import Request
from peagle.errors import ConfigError
from peagle.outputs import Counter, Gauge, Metric, RequestOutput, Vector
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats

logger = logging.getLogger(__name__)


class LLM(OfflineInference[PromptAnswers]):
    """A target, optionally with a drafter, behind `generate`, `chat` and `stream`.

    `speculative_config` takes vLLM's keys, of which `spec_model`, `spec_tokens` and `spec_method`
    say three. Other keywords are those of EngineConfig; vLLM's that would change nothing here are
    accepted, see `compatibility`.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        spec_model: str | None = None,
        spec_tokens: int | None = None,
        spec_method: str | None = None,
        revision: str | None = None,
        **options: Any,
    ) -> None:
        own = drop_unused(options, LLM_ARGUMENTS, ConfigError)
        given = {name: value for name, value in own.items() if value is not None}
        config = from_mapping(EngineConfig, given, "LLM(...)")
        asked = {
            "model": spec_model, "num_speculative_tokens": spec_tokens, "method": spec_method
        }  # fmt: skip
        speculative = _speculative_config(speculative_config, asked)
        self._name, began = model, time.monotonic()
        # Said before a model is fetched or loaded: a device that is not there, impossible drafts.
        choose_device(config)
        check_speculation(speculative, config)
        self.model_path: Path = resolve_model(model, revision=revision)
        self._tokenizer = load_tokenizer(self.model_path)
        self._decoder = decoder_of(self._tokenizer)
        super().__init__(PromptReader(self._tokenizer))
        target = load_engine_target(self.model_path, config)
        self.engine = Engine(
            target,
            config,
            eos_token_ids=eos_token_ids(self.model_path),
            speculation=load_speculation(speculative, target),
        )
        self._log_start(config, time.monotonic() - began)
        self._grammars = GrammarCompiler(
            self._tokenizer, target.config.vocab_size, self.engine.eos_token_ids
        )
        self._counter = itertools.count()
        self._active: dict[Request, PromptAnswers] = {}
        self._num_prompt_tokens = 0
        if config.warm_up:
            self.engine.warm_up()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **unused: Any,
    ) -> list[RequestOutput]:
        """`generate` on conversations, rendered by the model's chat template."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        variables = dict(chat_template_kwargs or {})
        if not add_generation_prompt:
            variables["add_generation_prompt"] = False
        if continue_final_message:
            variables["continue_final_message"] = True
        if tools:
            variables["tools"] = tools
        prompts = [
            self._prompts.render_chat(
                conversation,
                chat_template=chat_template,
                content_format=chat_template_content_format,
                kwargs=variables,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **unused)

    def get_metrics(self) -> list[Metric]:
        """Totals since start and what is going on, under vLLM's names."""
        labels = {"model_name": self._name, "engine": "0"}
        stats, scheduler = self.engine.stats, self.engine.scheduler
        metrics: list[Metric] = [
            Gauge("vllm:num_requests_running", labels, float(len(scheduler.running))),
            Gauge("vllm:num_requests_waiting", labels, float(len(scheduler.waiting))),
            Counter("vllm:prompt_tokens", labels, self._num_prompt_tokens),
            Counter("vllm:generation_tokens", labels, stats.num_output_tokens),
        ]
        if self.engine.speculation is None:
            return metrics
        per_pos = stats.num_accepted_tokens_per_pos
        per_pos = per_pos + [0] * (self.num_speculative_tokens - len(per_pos))
        prefix = "vllm:spec_decode_num"
        return [
            *metrics,
            Counter(f"{prefix}_drafts", labels, stats.num_drafts),
            Counter(f"{prefix}_draft_tokens", labels, stats.num_draft_tokens),
            Counter(f"{prefix}_accepted_tokens", labels, stats.num_accepted_tokens),
            Vector(f"{prefix}_accepted_tokens_per_pos", labels, per_pos),
        ]

    def close(self) -> None:
        """Nothing to end here: the engine lives in this process. Other backends start some."""

    @property
    def stats(self) -> SpecDecodeStats:
        """Totals over all requests since start."""
        return self.engine.stats

    @property
    def num_compiled(self) -> int:
        """Steps captured as CUDA graphs so far; 0 on a CPU."""
        return self.engine.num_graphs

    @property
    def method(self) -> str:
        speculation = self.engine.speculation
        return speculation.drafter.method if speculation else "none"

    @property
    def is_auto(self) -> bool:
        """Whether each step verifies as many drafts as pay."""
        return self.engine.budget is not None

    @property
    def num_speculative_tokens(self) -> int:
        speculation = self.engine.speculation
        return speculation.num_speculative_tokens if speculation else 0

    def add_request(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        *,
        streamed: bool = False,
        keeps_trees: bool = False,
    ) -> PromptAnswers:
        """Queues a prompt. `step` advances it, `abort_request` gives it up. `streamed` is
        the contract's: here every prompt is reported as it grows. `keeps_trees`: its requests
        remember their drafts, for which a GPU's next step waits."""
        request_id = str(next(self._counter))
        self._num_prompt_tokens += len(prompt.token_ids)
        answers = open_answers(
            self.engine,
            self._tokenizer,
            self._decoder,
            self._grammars,
            request_id,
            *prompt,
            params,
        )
        for answer in answers.answers:
            self._active[answer.request] = answers
            answer.request.draft_trees = [] if keeps_trees else None
        return answers

    def step(self) -> list[PromptAnswers]:
        """Advances every open prompt; -> those that got something new, each once."""
        changed: dict[PromptAnswers, None] = {}
        for new in self.engine.step():
            answers = self._active[new.request]
            answers.take(new, self.engine)
            changed[answers] = None
        for answers in changed:
            if answers.finished:
                self._forget(answers)
        return list(changed)

    def abort_request(self, request: PromptAnswers) -> None:
        for answer in request.answers:
            self.engine.abort_request(answer.request)
        request.finished = True
        self._forget(request)

    def _check(self, prompt: TokenizedPrompt, params: SamplingParams) -> None:
        self.engine.check_request(prompt.token_ids, params)
        if params.structured_outputs is not None:
            self._grammars.compile(params.structured_outputs)

    def _log_start(self, config: EngineConfig, seconds: float) -> None:
        weight, allocator = self.engine.target.embed_tokens.weight, self.engine.allocator
        logger.info("%s: %s on %s in %.1f s", self._name, weight.dtype, weight.device, seconds)
        logger.info("drafter: %s, K = %d", self.method, self.num_speculative_tokens)
        logger.info("KV cache: %d blocks of %d tokens", allocator.num_blocks, allocator.block_size)
        if allocator.has_windows:
            sizes = ", ".join(str(w.size) if w else "none" for w in allocator.windows)
            logger.info("block tables of a request, by sliding window: %s", sizes)
        logger.debug("%s", config)

    def _forget(self, answers: PromptAnswers) -> None:
        for answer in answers.answers:
            self._active.pop(answer.request, None)


def _speculative_config(
    given: SpeculativeConfig | Mapping[str, Any] | None, asked: Mapping[str, Any]
) -> SpeculativeConfig:
    asked = {key: value for key, value in asked.items() if value is not None}
    if given is not None and asked:
        raise ConfigError(
            "speculative_config and spec_* were both given", hint="use one of the two"
        )
    if isinstance(given, SpeculativeConfig):
        return given
    return SpeculativeConfig.from_mapping(given or asked)
