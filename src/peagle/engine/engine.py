"""The engine: requests in, tokens out, one `step()` at a time. Knows token ids alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch

from peagle.config import EngineConfig, Verification
from peagle.engine.memory import make_allocator
from peagle.engine.prompts import check_tokens
from peagle.engine.request import Request, TokenLogprobs
from peagle.engine.runner import Runner, TargetRows
from peagle.engine.sampler import Committed, Judged, verify
from peagle.engine.scheduler import Scheduled, Scheduler
from peagle.errors import ConfigError, PeagleError, RequestError
from peagle.models.drafter import Drafter, SequenceDraft
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats


@dataclass(frozen=True)
class Speculation:
    """The drafter an engine runs with, how many drafts it asks for, and how they are judged."""

    drafter: Drafter
    num_speculative_tokens: int
    verification: Verification = "coupled"

    def __post_init__(self) -> None:
        check_depth(self.num_speculative_tokens, self.drafter)


class NewTokens(NamedTuple):
    """What a step gave one request. `request.finish_reason` says whether it was the last."""

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


class Engine:
    """Continuous batching over one target and at most one drafter."""

    def __init__(
        self,
        target: TargetModel,
        config: EngineConfig,
        *,
        eos_token_ids: Sequence[int] = (),
        speculation: Speculation | None = None,
    ) -> None:
        self.target = target
        self.speculation = speculation
        vocabulary = range(target.config.vocab_size)
        self.eos_token_ids = frozenset(t for t in eos_token_ids if t in vocabulary)
        self.max_model_len = _max_model_len(target, config)
        self.stats = SpecDecodeStats()
        self._seeds = random.Random(config.seed)
        drafter = speculation.drafter if speculation else None
        self.allocator = make_allocator(target, drafter, config, self.max_model_len)
        self.scheduler = Scheduler(
            self.allocator,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.max_model_len,
            drafter.max_positions if drafter else None,
        )
        num_slots = self.allocator.num_blocks * self.allocator.block_size
        self.runner = Runner(target, drafter, num_slots)

    @torch.inference_mode()
    def step(self) -> list[NewTokens]:
        """Advances every scheduled request; -> the new tokens of those that sampled or failed."""
        begun = perf_counter()
        schedule = self.scheduler.schedule()
        scheduled = perf_counter()
        drafts = self._propose(schedule)
        drafted = perf_counter()
        rows, committed = self._verify(schedule, drafts)
        verified = perf_counter()
        news = self._commit(schedule, drafts, rows, committed)
        other = (scheduled - begun) + (perf_counter() - verified)
        self._count_time(schedule, drafted - scheduled, verified - drafted, other)
        if not self.has_unfinished:
            self.allocator.check([])  # idle: every block must be back
        return news

    def _propose(self, schedule: Sequence[Scheduled]) -> list[SequenceDraft]:
        return self.runner.propose(schedule, self._verification)

    def _verify(
        self, schedule: Sequence[Scheduled], drafts: Sequence[SequenceDraft]
    ) -> tuple[list[TargetRows], dict[int, Committed | None]]:
        """The target's rows, and what it commits for each entry of the schedule that samples."""
        if not schedule:
            return [], {}
        rows = self.runner.forward(schedule, drafts)
        sampling = [n for n, s in enumerate(schedule) if s.samples]
        batch = []
        for n in sampling:
            logits = rows[n].logits
            assert logits is not None
            batch.append(Judged(schedule[n].request, drafts[n], logits))
        return rows, dict(zip(sampling, verify(batch, self._verification), strict=True))

    def _commit(
        self,
        schedule: Sequence[Scheduled],
        drafts: Sequence[SequenceDraft],
        rows: Sequence[TargetRows],
        committed: dict[int, Committed | None],
    ) -> list[NewTokens]:
        news = []
        for n, scheduled in enumerate(schedule):
            request, result = scheduled.request, committed.get(n)
            failed = n in committed and result is None
            if failed and drafts[n].token_ids:
                # A draft may be the cause: the step is done again, from now on without any.
                request.num_speculative_tokens = 0
                continue
            num_valid = scheduled.num_tokens + (result.num_accepted if result else 0)
            request.num_computed += num_valid
            taps = rows[n].taps
            if taps is not None:
                request.keep_taps(taps, num_valid)
            if result is not None:
                new = self._append(request, result)
                # Drafts behind the token that ended the request were verified for nothing.
                num_accepted = min(result.num_accepted, len(new.token_ids))
                request.stats.observe(len(drafts[n].token_ids), num_accepted)
                self.stats.observe(len(drafts[n].token_ids), num_accepted)
                news.append(new)
            elif failed:
                news.append(self._fail(request))
        return news

    def _append(self, request: Request, committed: Committed) -> NewTokens:
        """Appends tokens up to the first that ends the request; what follows it is dropped."""
        kept = 0
        if self._goes_on_after(request, committed.token_ids):
            request.token_ids += committed.token_ids
            kept = len(committed.token_ids)
        for token in committed.token_ids[kept:]:
            request.token_ids.append(token)
            kept += 1
            if self._ends(request, token):
                self._release(request)
                break
        self.stats.num_output_tokens += kept
        logprobs = committed.logprobs[:kept]
        request.logprobs += logprobs
        return NewTokens(request, committed.token_ids[:kept], logprobs)

    def _goes_on_after(self, request: Request, token_ids: Sequence[int]) -> bool:
        """True where none of the tokens ends the request: the usual case, in few operations."""
        count = len(token_ids)
        within = request.num_outputs + count < request.max_tokens
        in_context = request.num_tokens + count < self.max_model_len
        return within and in_context and request.stop_token_ids.isdisjoint(token_ids)

    def _ends(self, request: Request, token: int) -> bool:
        if token in request.stop_token_ids:
            is_eos = token in self.eos_token_ids and token not in request.params.stop_token_ids
            request.stop_reason = None if is_eos else token  # vLLM names stop ids alone
            request.finish("stop")
        elif request.num_outputs == request.max_tokens or request.num_tokens == self.max_model_len:
            request.finish("length")
        return request.finish_reason is not None

    def _fail(self, request: Request) -> NewTokens:
        request.error = (
            f"no token can be chosen at output {request.num_outputs}: "
            "the logits are NaN or infinite, or every token is banned"
        )
        request.finish("error")
        self._release(request)
        return NewTokens(request, [], [])

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        bad_word_ids: Sequence[Sequence[int]] = (),
        seed: int | None = None,
    ) -> Request:
        """Queues a request; raises RequestError if it can never be served."""
        self.check_request(prompt_token_ids, params)
        room = self.max_model_len - len(prompt_token_ids)
        seed = params.seed if seed is None else seed
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            num_speculative_tokens=self._num_speculative_tokens(params),
            stop_token_ids=frozenset(ends),
            bad_word_ids=tuple(tuple(word) for word in bad_word_ids),
        )
        self._enqueue(request)
        return request

    def abort(self, request: Request) -> None:
        """Ends a request whose caller went away, and frees its blocks."""
        if request.finish_reason is None:
            request.finish("abort")
            self._release(request)

    def stop_at(self, request: Request, num_outputs: int) -> None:
        """Ends a request at a stop string that its first `num_outputs` tokens complete."""
        surplus = request.num_outputs - num_outputs
        del request.token_ids[request.num_tokens - surplus :]
        del request.logprobs[num_outputs:]
        self.stats.num_output_tokens -= surplus
        if request.finish_reason is None:
            self._release(request)
        request.finish("stop")

    def _enqueue(self, request: Request) -> None:
        self.scheduler.add(request)

    def _release(self, request: Request) -> None:
        """Gives back what a request that ends holds."""
        self.scheduler.finish(request)

    @property
    def num_graphs(self) -> int:
        """Captured so far, where steps are graphs."""
        return 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        check_tokens(
            prompt_token_ids,
            params,
            max_model_len=self.max_model_len,
            vocab_size=self.target.config.vocab_size,
        )
        self._num_speculative_tokens(params)

    def _num_speculative_tokens(self, params: SamplingParams) -> int:
        if self.speculation is None:
            return 0
        if params.num_speculative_tokens is None:
            return self.speculation.num_speculative_tokens
        if params.num_speculative_tokens > 0:
            check_depth(params.num_speculative_tokens, self.speculation.drafter, RequestError)
        return params.num_speculative_tokens

    @property
    def _verification(self) -> Verification:
        return self.speculation.verification if self.speculation else "coupled"

    def _count_time(
        self, schedule: Sequence[Scheduled], draft: float, verify: float, other: float
    ) -> None:
        """A request's times are its even share of each step it took part in."""
        self.stats.draft_time += draft
        self.stats.verify_time += verify
        self.stats.other_time += other
        for scheduled in schedule:
            stats = scheduled.request.stats
            stats.draft_time += draft / len(schedule)
            stats.verify_time += verify / len(schedule)
            stats.other_time += other / len(schedule)


def check_depth(
    num_speculative_tokens: int, drafter: Drafter, error: type[PeagleError] = ConfigError
) -> None:
    if num_speculative_tokens > drafter.max_speculative_tokens:
        raise error(
            f"num_speculative_tokens={num_speculative_tokens} is more than this "
            f"{drafter.method} drafter can draft",
            hint=f"use at most {drafter.max_speculative_tokens}",
        )


def _max_model_len(target: TargetModel, config: EngineConfig) -> int:
    longest = target.config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the target's context of {longest}",
            hint=f"use at most {longest}",
        )
    return config.max_model_len or longest
