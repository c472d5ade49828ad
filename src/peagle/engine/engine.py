"""The engine: requests in, tokens out, one `step()` at a time. Knows token ids alone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from peagle.config import MAX_DRAFT_NODES, EngineConfig, Verification
from peagle.engine.adjust import needs_adjustment
from peagle.engine.build import (
    draft_probs_shape,
    drafts_per_step,
    host_drafter,
    make_budget,
    make_runner,
)
from peagle.engine.clock import Clock
from peagle.engine.grammar import Grammar
from peagle.engine.host_batch import Column
from peagle.engine.host_sampling import HostSampling
from peagle.engine.memory import make_allocator, make_groups
from peagle.engine.prefix_cache import PrefixCacheStats
from peagle.engine.prompts import check_tokens
from peagle.engine.request import DraftTree, Request, TokenLogprobs
from peagle.engine.runner import Report
from peagle.engine.sampler import SAMPLINGS
from peagle.engine.scheduler import Chunk, Schedule, Scheduler, Slot
from peagle.engine.step import StepShape
from peagle.errors import ConfigError, PeagleError, RequestError
from peagle.kernels.device_batch import HEADER
from peagle.models.drafter import Drafter, HostTreeDrafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from peagle.speculation.budget import DraftChoice, Outcomes
from peagle.speculation.costs import StepRun
from peagle.speculation.draft_limit import cache_slack
from peagle.speculation.statistics import SpecDecodeStats
from peagle.speculation.trees import BEAM, num_candidates


@dataclass(frozen=True)
class Speculation:
    """The drafter an engine runs with, how many drafts it asks for, and how they are verified."""

    drafter: Drafter
    num_speculative_tokens: int
    verification: Verification = "coupled"
    num_draft_nodes: int | None = None  # drafts are trees of so many tokens; None: chains
    is_auto: bool = False  # these are upper limits, and each step verifies as many as pay

    def __post_init__(self) -> None:
        check_drafts(
            self.drafter, self.num_speculative_tokens, self.num_draft_nodes, self.verification
        )
        if self.is_auto and self.verification == "rejection":
            raise ConfigError(
                "speculation auto verifies by coupling, not by rejection",
                hint="use speculation fixed, or verification coupled",
            )

    @property
    def cache_slack(self) -> int:
        """As Request.cache_slack, at most: requests may ask for deeper trees than the engine's."""
        return cache_slack(self.drafter.max_tree_depth, self.num_draft_nodes, self.rows_per_depth)

    @property
    def rows_per_depth(self) -> int:
        """That drafts take in the drafter's cache."""
        return 1 if self.num_draft_nodes is None else self.drafter.rows_per_depth


class DraftLimits(Protocol):
    """What is known of a drafter before it is loaded: some of `Drafter`."""

    @property
    def method(self) -> str: ...
    @property
    def max_speculative_tokens(self) -> int: ...
    @property
    def max_tree_depth(self) -> int: ...


def check_drafts(
    limits: DraftLimits, depth: int, num_nodes: int | None, verification: Verification
) -> None:
    """Whether a drafter can draft so many, and whether they can be verified so."""
    if num_nodes is not None:
        if not limits.max_tree_depth:
            raise ConfigError(
                f"num_draft_nodes={num_nodes}, but {limits.method} cannot draft trees",
                hint="drop it",
            )
        if verification == "rejection":
            raise ConfigError(
                "rejection verifies chains, not trees", hint="use verification coupled"
            )
    check_depth(depth, limits, is_tree=num_nodes is not None)
    most = min(MAX_DRAFT_NODES, num_candidates(depth, BEAM))
    if num_nodes is not None and num_nodes > most:
        raise ConfigError(
            f"num_draft_nodes={num_nodes} is more than a tree of depth {depth} can have",
            hint=f"use at most {most}",
        )


def check_depth(
    depth: int,
    limits: DraftLimits,
    error: type[PeagleError] = ConfigError,
    *,
    is_tree: bool,
) -> None:
    most = limits.max_tree_depth if is_tree else limits.max_speculative_tokens
    if depth > most:
        what = f"this {limits.method} drafter can draft" + (" in trees" if is_tree else "")
        raise error(
            f"num_speculative_tokens={depth} is more than {what}", hint=f"use at most {most}"
        )


class NewTokens(NamedTuple):
    """What a step gave one request. `request.finish_reason` says whether it was the last."""

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


class InFlight(NamedTuple):
    """A launched step whose report has not been read: which slot each of its rows is for."""

    report: Report
    slots: Sequence[Slot]
    indices: Column
    serials: Column
    num_requests: int  # that were running
    host: HostSampling | None
    drafts: DraftChoice | None
    shape: StepShape  # before it was padded
    padded_shape: StepShape
    shown: dict[int, tuple[list[int], list[int]]]  # drafts of the rows whose requests keep them
    is_alone: bool = False  # no other step ran beside it, and no graph was captured for it

    @property
    def is_tree(self) -> bool:
        """Whether its drafts were trees."""
        return self.shape.num_nodes is not None

    @property
    def num_columns(self) -> int:
        """Tokens in each row of the report, new or not."""
        return self.shape.depth + 1

    def paths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which drafts were accepted, counted from 1; 0 behind them."""
        if not self.is_tree:
            width = rows.shape[1] - HEADER - 1
            return _accepted(rows, np.broadcast_to(np.arange(1, width + 1), (len(rows), width)))
        first = HEADER + self.shape.depth + 1
        return _accepted(rows, rows[:, first : first + self.shape.depth])

    def outcomes(self, rows: NDArray[np.int64]) -> Outcomes:
        """Where requests share rows, a draft's place is that among the drafts of all, as if they
        had been dealt out to the requests in turn."""
        num_drafts = np.where(rows[:, 0] > 0, rows[:, 1], 0)  # 0: it had ended
        if self.shape.mean_nodes is None or not len(rows):
            return Outcomes(num_drafts, self.paths(rows))
        first = HEADER + 2 * self.shape.depth + 1
        places = rows[:, first : first + self.shape.depth] // len(rows) + 1
        mean = -(-rows[:, 1].sum() // len(rows))
        return Outcomes(np.where(rows[:, 0] > 0, mean, 0), _accepted(rows, places))


class Engine:
    """Continuous batching over one target and at most one drafter.

    On a GPU shapes are static, so that steps are CUDA graphs, and a step is collected while the
    next one runs; on a CPU shapes are exact and every step is collected at once. Whoever loads the
    models binds their kernels: see models.binding.
    """

    def __init__(
        self,
        target: TargetModel,
        config: EngineConfig,
        *,
        eos_token_ids: Sequence[int] = (),
        speculation: Speculation | None = None,
        static_shapes: bool | None = None,  # None: on a GPU
        async_scheduling: bool | None = None,  # None: on a GPU
    ) -> None:
        self.target = target
        self.speculation = speculation
        vocabulary = range(target.config.vocab_size)
        self.eos_token_ids = frozenset(t for t in eos_token_ids if t in vocabulary)
        self.max_model_len = _max_model_len(target, config)
        self.stats = SpecDecodeStats()
        self._seeds = random.Random(config.seed)
        on_gpu = target.embed_tokens.weight.is_cuda and target.captures
        drafter = speculation.drafter if speculation else None
        self._host_drafter = host_drafter(drafter)
        probs_shape = draft_probs_shape(speculation, target)
        cache_len = self.max_model_len + (speculation.cache_slack if speculation else 0)
        num_nodes = speculation.num_draft_nodes if speculation else None
        if num_nodes is not None and speculation is not None and speculation.is_auto:
            fitting = config.max_num_batched_tokens // config.max_num_seqs - 1
            num_nodes = min(num_nodes, max(fitting, 1))  # the budget keeps to the step's rows
        groups = make_groups(target, drafter, config, cache_len, *drafts_per_step(speculation))
        self.allocator = make_allocator(
            target, drafter, config, cache_len, groups, probs_shape, num_nodes
        )
        self.runner = make_runner(
            target,
            speculation,
            self.allocator,
            groups,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            cache_len=cache_len,
            static=on_gpu if static_shapes is None else static_shapes,
        )
        self.clock = Clock(self.stats)
        self.budget = make_budget(speculation, self.runner, config.max_num_batched_tokens)
        self.runner.on_capture = self._learn_of_graph
        self.scheduler = Scheduler(
            self.allocator,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.runner.models.state.drafts.shape[1],
            self.eos_token_ids,
            self.clock,
            self.budget,
            prefix_caching=config.enable_prefix_caching,
            max_draft_tokens=self.runner.max_draft_tokens,
        )
        # A drafter on the host needs the last tokens before it can draft the next.
        overlaps = on_gpu if async_scheduling is None else async_scheduling
        self._overlaps = overlaps and self._host_drafter is None
        self._in_flight: deque[InFlight] = deque()

    @torch.inference_mode()
    def step(self) -> list[NewTokens]:
        """Advances every scheduled request; -> the new tokens of those that sampled or failed.

        Launches the next step, then collects the one before it, or, without overlap, this one.
        """
        schedule = self.scheduler.schedule()
        self.runner.open_slots(schedule.opened)
        self.runner.write_blocks(schedule.grown)
        if schedule:
            self._launch(schedule)
        # What the host takes part in is collected at once, and so is all that ran before it.
        overlaps = self._overlaps and schedule and self._in_flight[-1].host is None
        news: list[NewTokens] = []
        while len(self._in_flight) > (1 if overlaps else 0):
            news += self._collect(self._in_flight.popleft())
        if not self.has_unfinished:
            self._in_flight.clear()  # what still runs is nobody's
            self.clock.pause()
            self.allocator.check([])  # idle: every block must be back
        return news

    def _launch(self, schedule: Schedule) -> None:
        """Requests whose logits the host changes or reads take an eager step of their own, ahead of
        the others'."""
        chunks = schedule.chunks
        needs_host = self.scheduler.batch.needs_host[schedule.slots] > 0
        drafts, own_drafts = schedule.drafts, None
        if drafts is not None:
            own_drafts = drafts.part(needs_host[: len(drafts.caps)]).unshared()
            drafts = drafts.part(~needs_host[: len(drafts.caps)])
        if needs_host.any():
            slots, caps = schedule.slots[needs_host], schedule.caps[needs_host]
            if own_drafts is not None:
                caps = np.minimum(caps, own_drafts.num_drafts)
            own = set(slots.tolist())  # a prompt that goes on needs nothing of the host
            hosts = [c for c in chunks if c.slot.index in own]
            requests = [self.scheduler.running[n].request for n in slots.tolist()]
            if self._verification == "coupled":
                caps = self.runner.cut_drafts(slots.tolist(), requests, caps)
                if self.budget is not None and own_drafts is not None:
                    own_drafts = self.budget.after_cut(own_drafts, slots[: len(own_drafts.caps)])
            shape = self._shape(slots, hosts)
            step = self._run(shape, slots, caps, hosts, own_drafts, HostSampling(requests))
            self._in_flight.append(step._replace(is_alone=bool(needs_host.all())))
            schedule = schedule._replace(
                slots=schedule.slots[~needs_host],
                caps=schedule.caps[~needs_host],
                chunks=[c for c in chunks if c not in hosts],
            )
        if schedule:
            shape = self._shape(schedule.slots, schedule.chunks)
            if drafts is not None and self.runner.has_graphs:
                schedule, drafts = self._with_graph(shape, schedule, drafts)
            num_graphs = self.runner.num_graphs
            step = self._run(shape, schedule.slots, schedule.caps, schedule.chunks, drafts)
            has_captured = self.runner.num_graphs > num_graphs  # while the device waited
            is_alone = not (needs_host.any() or has_captured)
            self._in_flight.append(step._replace(is_alone=is_alone))
        self.scheduler.launched(chunks)

    def _run(
        self,
        shape: StepShape,  # of all drafts that these slots may have
        indices: Column,
        caps: Column,
        chunks: Sequence[Chunk],
        drafts: DraftChoice | None,
        host: HostSampling | None = None,
    ) -> InFlight:
        batch = self.scheduler.batch
        if drafts is not None:
            shape = with_choice(shape, drafts)
            self._count_choice(indices[: len(drafts.caps)], drafts)
        padded_shape = self.runner.padded_shape(shape, chunks)
        slots = [self.scheduler.running[n] for n in indices.tolist()]
        shown = {
            n: self.runner.read_drafts(slot.index)
            for n, slot in enumerate(slots)
            if slot.request.draft_trees is not None
        }
        report = self.runner.run(padded_shape, indices, caps, chunks, host)
        batch.in_flight[indices] += 1
        num_running = len(self.scheduler.running)
        return InFlight(
            report,
            slots,
            indices,
            batch.serials[indices],
            num_running,
            host,
            drafts,
            shape,
            padded_shape,
            shown,
        )

    def _with_graph(
        self, shape: StepShape, schedule: Schedule, drafts: DraftChoice
    ) -> tuple[Schedule, DraftChoice]:
        """With drafts that there is a graph for, unless one is to be captured; timed, if that is
        due."""
        assert self.budget is not None
        own = schedule.slots[: len(drafts.caps)]  # behind them: those that came with their prompts
        padded_shape = self.runner.padded_shape(shape, schedule.chunks)
        chosen = self.budget.captured(
            drafts,
            self.scheduler.batch.num_rows[own] - 1,
            padded_shape.prompt_rows,
            lambda choice: self.runner.has_graph(with_choice(padded_shape, choice)),
        )
        if self.budget.needs_timing(chosen):
            alone = with_choice(self._shape(own, ()), chosen)
            self.runner.capture(self.runner.padded_shape(alone, ()))
        if chosen is drafts:
            return schedule, drafts
        caps = np.concatenate((chosen.caps, schedule.caps[len(own) :]))
        return schedule._replace(caps=caps), chosen

    def _shape(self, indices: Column, chunks: Sequence[Chunk]) -> StepShape:
        """With drafts as deep and as large as the largest of these slots."""
        batch = self.scheduler.batch
        slots, reach = indices, int(batch.reach(indices).max(initial=1))
        if chunks:
            slots = np.concatenate((indices, [c.slot.index for c in chunks]))
        sampling = SAMPLINGS[batch.sampling[indices].max(initial=0)]
        return StepShape(
            batch=len(indices),
            depth=int(batch.per_step[slots].max()) - 1,
            sampling=sampling,
            by_rejection=self._verification == "rejection" and sampling != "greedy",
            num_splits=self.runner.num_splits(len(indices), reach),
            num_nodes=int(batch.num_rows[slots].max()) - 1 if self._has_trees else None,
        )

    @property
    def _has_trees(self) -> bool:
        return self.speculation is not None and self.speculation.num_draft_nodes is not None

    def _collect(self, step: InFlight) -> list[NewTokens]:
        """Waits for the step, if it must, and commits what it gave. The host has a few
        microseconds for each request: those to which nothing special happens are counted as
        arrays."""
        rows = step.report.rows()[: len(step.slots)]
        seconds = self.clock.count(step.report.marks, step.num_requests)
        self._learn(step, rows, seconds)
        num_new, num_drafts, batch = rows[:, 0], rows[:, 1], self.scheduler.batch
        tokens = rows[:, HEADER : HEADER + step.num_columns]
        is_open = batch.serials[step.indices] == step.serials
        if step.shown:
            self._keep_trees(step, rows, is_open)
        opened = step.indices[is_open]
        batch.in_flight[opened] -= 1
        batch.num_computed[opened] += num_new[is_open]
        continues = is_open & self._continues(step.indices, num_new, tokens)
        is_leaf = rows[:, -1] if step.is_tree else np.zeros(len(rows), dtype=np.int64)
        columns = (step.indices, num_drafts, num_new - 1, is_leaf)
        self._count(*(column[continues] for column in columns))
        news = []
        each = zip(continues.tolist(), tokens.tolist(), num_new.tolist(), strict=True)
        for n, (goes_on, row, count) in enumerate(each):
            if goes_on:
                request, output_ids = step.slots[n].request, row[:count]
                request.token_ids += output_ids
                news.append(NewTokens(request, output_ids, []))
            elif is_open[n]:
                news += self._collect_one(step, n, rows[n].tolist())
        if self._host_drafter is not None:
            self._draft_on_host([s for s in step.slots if not s.closed])
        return news

    def _keep_trees(
        self, step: InFlight, rows: NDArray[np.int64], is_open: NDArray[np.bool_]
    ) -> None:
        """Of requests that take the step's tokens: not of those that have ended meanwhile."""
        paths = step.paths(rows)
        for n, (token_ids, parents) in step.shown.items():
            num_new, num_drafts = rows[n, :2].tolist()
            request = step.slots[n].request
            if is_open[n] and num_new and num_drafts and request.draft_trees is not None:
                accepted = paths[n, : num_new - 1].tolist()
                bonus = int(rows[n, HEADER + num_new - 1])
                drafts = token_ids[:num_drafts], parents[:num_drafts]
                tree = DraftTree(request.num_outputs, *drafts, accepted, bonus)
                request.draft_trees.append(tree)

    def _count_choice(self, slots: Column, drafts: DraftChoice) -> None:
        batch = self.scheduler.batch
        most = batch.num_rows[slots] - 1
        batch.offered[slots] += most
        batch.expected[slots] += drafts.expected
        self.stats.num_offered_tokens += int(most.sum())
        self.stats.num_expected_tokens += float(drafts.expected.sum())

    def _learn(self, step: InFlight, rows: NDArray[np.int64], seconds: float) -> None:
        """What the drafts of a step were worth, and what it cost."""
        drafts = step.drafts
        if self.budget is None or drafts is None:
            return
        rows = rows[: len(drafts.caps)]  # behind them: requests that came with their prompts
        outcomes = step.outcomes(rows)
        shape = step.padded_shape
        is_known = self.runner.static or len(step.slots) == len(rows)
        measured = seconds if step.is_alone and is_known else None
        run = StepRun(measured, shape.batch, shape.decode_rows, shape.prompt_rows)
        self.budget.observe(drafts, outcomes, run)

    def _learn_of_graph(self, shape: StepShape, seconds: float) -> None:
        """A graph was captured, and took so long over nobody's rows."""
        if self.budget is not None and (shape.depth or shape.feeds) and not shape.num_items:
            costs = self.budget.graph_costs
            costs.start(shape.batch, shape.decode_rows, seconds, is_off=shape.feeds)

    def _continues(
        self, indices: Column, num_new: Column, tokens: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Where tokens came, none of them may end the request, and its limit is not reached."""
        batch = self.scheduler.batch
        # The newest token is not computed.
        out: NDArray[np.bool_] = batch.num_computed[indices] + 1 < batch.limits[indices]
        out &= (num_new > 0) & ((batch.ends_early + batch.needs_host)[indices] == 0)
        for token in self.eos_token_ids:  # one or two
            rows, columns = (tokens == token).nonzero()
            out[rows[columns < num_new[rows]]] = False
        return out

    def _count(self, slots: Column, drafted: Column, kept: Column, is_leaf: Column) -> None:
        """Of requests that continue."""
        batch = self.scheduler.batch
        self.stats.num_output_tokens += int(kept.sum()) + len(kept)
        batch.outcomes[slots, drafted, kept, is_leaf] += 1
        if not drafted.any():
            self.stats.observe(0, 0, len(slots))
            return
        size, depths = batch.outcomes.shape[1], batch.per_step[slots] - 1
        numbers = (drafted * size + kept) * 2 + is_leaf
        for depth in set(depths.tolist()):  # mostly one
            times = np.bincount(numbers[depths == depth])
            for number in times.nonzero()[0].tolist():
                pair, ends_in_leaf = divmod(number, 2)
                outcome = *divmod(pair, size), int(times[number]), depth
                self.stats.observe(*outcome, is_leaf=bool(ends_in_leaf))

    def _collect_one(self, step: InFlight, n: int, row: list[int]) -> list[NewTokens]:
        """A request that may have ended, that got nothing, or whose logits the host reads."""
        slot, (num_new, num_drafts, failed) = step.slots[n], row[:HEADER]
        request = slot.request
        if not num_new:
            slot.is_cacheable = False  # if it goes on, then without drafts
            return [self._fail(request)] if failed else []
        token_ids = row[HEADER : HEADER + num_new]
        logprobs = [] if step.host is None else step.host.logprobs(n, token_ids)
        new = self._append(request, token_ids, logprobs)
        # Drafts behind the token that ended the request were verified for nothing.
        outcome = num_drafts, min(num_new - 1, len(new.token_ids))
        depth, is_leaf = request.draft_depth, step.is_tree and bool(row[-1])
        request.stats.observe(*outcome, depth=depth, is_leaf=is_leaf)
        self.stats.observe(*outcome, depth=depth, is_leaf=is_leaf)
        if not slot.closed:  # its minimum length may be reached
            needs_host = request.params.logprobs is not None or needs_adjustment(request)
            self.scheduler.batch.needs_host[slot.index] = needs_host
        return [new]

    def _draft_on_host(self, slots: Sequence[Slot]) -> None:
        assert self._host_drafter is not None
        begun = perf_counter()
        allowed = self.runner.models.state.num_drafts.tolist()
        asked = [s for s in slots if allowed[s.index] > 0]
        if not asked:
            return
        histories = [s.request.token_ids for s in asked]
        counts = [allowed[s.index] for s in asked]
        if self._has_trees:
            drafter = cast(HostTreeDrafter, self._host_drafter)
            depths = self.runner.num_depths([s.index for s in asked])
            drafts = drafter.propose_trees(histories, counts, depths)
        else:
            drafts = self._host_drafter.propose(histories, counts)
        self.runner.set_drafts([s.index for s in asked], drafts)
        self.clock.count_draft(perf_counter() - begun, len(self.scheduler.running))

    def _append(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs]
    ) -> NewTokens:
        """Appends tokens up to the first that ends the request; what follows it is dropped."""
        kept = 0
        for token in token_ids:
            request.append(token)
            kept += 1
            if self._ends(request, token):
                self.scheduler.finish(request)
                break
        self.stats.num_output_tokens += kept
        request.logprobs += logprobs[:kept]
        return NewTokens(request, token_ids[:kept], logprobs[:kept])

    def _ends(self, request: Request, token: int) -> bool:
        if token in request.stop_token_ids:
            is_eos = token in self.eos_token_ids and token not in request.params.stop_token_ids
            request.stop_reason = None if is_eos else token  # vLLM names stop ids alone
            request.finish("stop")
        elif request.num_outputs == request.max_tokens or request.num_tokens == self.max_model_len:
            request.finish("length")
        return request.finish_reason is not None

    def _fail(self, request: Request) -> NewTokens:
        problem = None if request.grammar is None else request.grammar.error
        request.error = f"no token can be chosen at output {request.num_outputs}: " + (
            problem or "the logits are NaN or infinite, or every token is banned"
        )
        request.finish("error")
        self.scheduler.finish(request)
        return NewTokens(request, [], [])

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        bad_word_ids: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
        seed: int | None = None,
    ) -> Request:
        """Queues a request; raises RequestError if it can never be served. `grammar`: of its
        structured outputs, at its beginning and nobody else's."""
        assert (grammar is None) == (params.structured_outputs is None)
        self.check_request(prompt_token_ids, params)
        room = self.max_model_len - len(prompt_token_ids)
        seed = params.seed if seed is None else seed
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids)
        depth = self._num_speculative_tokens(params)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            num_speculative_tokens=depth,
            num_draft_nodes=self._num_draft_nodes(params, depth),
            rows_per_depth=self.speculation.rows_per_depth if self.speculation else 1,
            stop_token_ids=frozenset(ends),
            bad_word_ids=tuple(tuple(word) for word in bad_word_ids),
            grammar=grammar,
        )
        self.scheduler.add(request)
        return request

    def abort_request(self, request: Request) -> None:
        """Ends a request whose caller went away, and frees its blocks."""
        if request.finish_reason is None:
            request.finish("abort")
            self.scheduler.finish(request)

    def stop_at(self, request: Request, num_outputs: int) -> None:
        """Ends a request at a stop string that its first `num_outputs` tokens complete."""
        surplus = request.num_outputs - num_outputs
        del request.token_ids[request.num_tokens - surplus :]
        del request.logprobs[num_outputs:]
        self.stats.num_output_tokens -= surplus
        if request.finish_reason is None:
            self.scheduler.finish(request)
        request.finish("stop")

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures the CUDA graphs of common steps now rather than when each is first met."""
        self.runner.warm_up(self._common_drafts, self.scheduler.max_num_batched_tokens)

    def _common_drafts(self, batch: int, has_prompts: bool) -> list[StepShape]:
        """What so many requests may be drafted; beside prompts only what is most likely."""
        plain, speculation = StepShape(batch=batch, depth=0, sampling="greedy"), self.speculation
        if speculation is None:
            return [plain]
        depth, nodes = speculation.num_speculative_tokens, speculation.num_draft_nodes
        if self.budget is None:
            return [plain._replace(depth=depth, num_nodes=nodes)]
        numbers = self.budget.likely(batch, most_likely_alone=has_prompts)
        return [
            plain._replace(
                depth=depth, num_nodes=most if self._has_trees else None, mean_nodes=mean
            )
            for depth, most, mean in (self.budget.form_of(n, batch) for n in numbers)
        ]

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Totals since start."""
        return self.scheduler.prefix_cache_stats

    @property
    def num_graphs(self) -> int:
        """Captured so far, where steps are graphs."""
        return self.runner.num_graphs

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        check_tokens(
            prompt_token_ids,
            params,
            max_model_len=self.max_model_len,
            vocab_size=self.target.config.vocab_size,
        )
        self._num_draft_nodes(params, self._num_speculative_tokens(params))

    def _num_speculative_tokens(self, params: SamplingParams) -> int:
        if self.speculation is None or params.num_draft_nodes == 0:
            return 0
        if params.num_speculative_tokens is None:
            return self.speculation.num_speculative_tokens
        asked, engines_own = params.num_speculative_tokens, self.speculation.num_speculative_tokens
        if asked > 0:
            drafter = self.speculation.drafter
            check_depth(asked, drafter, RequestError, is_tree=self._has_trees)
        if asked > engines_own and self._verification == "rejection":
            raise RequestError(
                f"num_speculative_tokens={asked} is more than the engine keeps probabilities for",
                hint=f"use at most {engines_own}, or verification coupled",
            )
        return asked

    def _num_draft_nodes(self, params: SamplingParams, depth: int) -> int | None:
        """Of a request with drafts of this depth."""
        most = self.speculation.num_draft_nodes if self.speculation else None
        asked = params.num_draft_nodes
        if asked is not None and self.speculation is not None and asked > (most or 0):
            raise RequestError(
                f"num_draft_nodes={asked} is more than the engine drafts",
                hint=f"use at most {most}" if most else "drop it: this engine drafts chains",
            )
        if most is None:
            return None
        return (most if asked is None else asked) if depth else 0

    @property
    def _verification(self) -> Verification:
        return self.speculation.verification if self.speculation else "coupled"


def with_choice(shape: StepShape, drafts: DraftChoice) -> StepShape:
    """Of a step that verifies no more than these of its drafts, and drafts no deeper."""
    depth, nodes, mean = min(shape.depth, drafts.depth), shape.num_nodes, drafts.mean_drafts
    if shape.depth and not depth:
        return shape._replace(depth=0, num_nodes=None, feeds=True)
    if nodes is None:
        return shape._replace(depth=depth)
    nodes = min(nodes, drafts.num_drafts)
    shares = mean is not None and mean < nodes
    return shape._replace(depth=depth, num_nodes=nodes, mean_nodes=mean if shares else None)


def _accepted(rows: NDArray[np.int64], paths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of drafts one behind the other [B, K], those that were accepted; 0 behind them."""
    return np.where(np.arange(paths.shape[1]) < rows[:, :1] - 1, paths, 0)


def _max_model_len(target: TargetModel, config: EngineConfig) -> int:
    longest = target.config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the target's context of {longest}",
            hint=f"use at most {longest}",
        )
    return config.max_model_len or longest
