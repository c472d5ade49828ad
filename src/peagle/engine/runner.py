"""Runs scheduled rows as a step: eagerly, or as a CUDA graph of one of few shapes.

A run copies its inputs to the device, starts the step and the copy of its report back, and
returns at once. Copies go through pinned memory, which torch keeps until they are done, so the
host waits for nothing until it reads a report.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.engine.blocks import BlockTable
from peagle.engine.clock import Mark, StepMarks
from peagle.engine.cuda_graphs import GraphedStep, GraphMemory
from peagle.engine.host_sampling import HostSampling
from peagle.engine.request import Request
from peagle.engine.scheduler import Chunk, Slot
from peagle.engine.step import Step, StepModels, StepShape, empty_inputs
from peagle.models.drafter import SequenceDraft
from peagle.progress import track
from peagle.speculation import trees
from peagle.speculation.draft_limit import draft_limit

# Which few shapes there are graphs for. Rows of a prompt that attend together; items of them.
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ROWS_PER_ITEM = 16
ITEM_COUNTS = (0, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
WARM_CONTEXTS = (64, 128, 256, 512, 1024)  # of the longest request, for steps captured ahead

DraftShapes = Callable[[int, bool], list[StepShape]]  # requests, whether prompts come with them


def padded(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that holds them; beyond, multiples of the largest."""
    largest = sizes[-1]
    if count > largest:
        return -(-count // largest) * largest
    return sizes[bisect_left(sizes, count)]


class Report:
    """What a step tells the host; `rows` waits for it, and so for its marks."""

    def __init__(self, on_device: Tensor, begun: Mark, verified: Mark | None = None) -> None:
        self._host = on_device
        if on_device.is_cuda:
            self._host = torch.empty_like(on_device, device="cpu", pin_memory=True)
            self._host.copy_(on_device, non_blocking=True)
        self.marks = StepMarks(begun, verified, Mark(on_device.device))

    def rows(self) -> NDArray[np.int64]:
        self.marks.ended.wait()
        rows: NDArray[np.int64] = self._host.numpy()
        return rows


class Runner:
    """`static`: shapes are those of few graphs, padded. `tables`: by slot, as the layout reads
    them."""

    def __init__(
        self, models: StepModels, tables: list[BlockTable | None], *, static: bool
    ) -> None:
        self.models, self.static = models, static
        self._tables = tables
        self._graphs: dict[StepShape, GraphedStep] = {}
        self.on_capture: Callable[[StepShape, float], None] | None = None  # with its seconds
        self.device = models.state.numbers.device
        self._memory = GraphMemory() if static and self.device.type == "cuda" else None

    def num_splits(self, batch: int, context: int) -> int:
        """Parts into which attention divides the keys of a batch; a few sizes, for few graphs."""
        if self._memory is None:
            return 1
        from peagle.kernels.gpu.attention import batch_invariant_splits, choose_splits

        target, longest = self.models.target, 1 << (context - 1).bit_length()
        num_items, kv_heads = padded(max(batch, 1), BATCH_SIZES), target.config.num_key_value_heads
        if target.policy.batch_invariant:
            dim = target.config.head_dim
            return batch_invariant_splits(num_items, kv_heads, dim, longest, self._num_sms)
        return choose_splits(num_items, kv_heads, longest, self._num_sms)

    @cached_property
    def _num_sms(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @property
    def max_draft_tokens(self) -> int | None:
        """See StepModels; None where no drafter has a cache."""
        return None if self.models.drafting is None else self.models.max_draft_tokens

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def run(
        self,
        shape: StepShape,  # padded
        slots: NDArray[np.int64],
        caps: NDArray[np.int64],
        chunks: Sequence[Chunk],
        host: HostSampling | None = None,
    ) -> Report:
        inputs = self._inputs(shape, slots, caps, chunks)
        if self._memory is None or host is not None:
            return self._run_eagerly(Step(self.models, shape), inputs, host)
        return Report(*self._graph(shape).run(inputs))

    @property
    def has_graphs(self) -> bool:
        return self._memory is not None

    def has_graph(self, shape: StepShape) -> bool:
        return shape in self._graphs

    def capture(self, shape: StepShape) -> None:
        self._graph(shape)

    def warm_up(self, drafts: DraftShapes, max_rows: int) -> None:
        """Captures the shapes that greedy requests meet: every size of a batch and of prompts, for
        contexts of WARM_CONTEXTS, with the drafts of each. There is nothing to do where steps are
        not graphs."""
        if self._memory is None:
            return
        shapes = self._common_shapes(drafts, max_rows)
        with track("capturing CUDA graphs", len(shapes), "graphs") as work:
            for shape in shapes:
                self._graph(shape)
                work.advance()

    def _common_shapes(self, drafts: DraftShapes, max_rows: int) -> list[StepShape]:
        """The largest first: the memory of a graph serves all that need less."""
        last = padded(self.models.state.padding, BATCH_SIZES)  # the last slot is padding
        shapes = [
            shape._replace(
                num_splits=self.num_splits(batch, context),
                num_items=num_items,
                rows_per_item=ROWS_PER_ITEM,
            )
            for num_items in reversed(ITEM_COUNTS)
            for batch in reversed(BATCH_SIZES)
            for shape in reversed(drafts(batch, num_items > 0))
            for context in WARM_CONTEXTS
            if batch <= last and num_items <= padded(-(-max_rows // ROWS_PER_ITEM), ITEM_COUNTS)
        ]
        return list(dict.fromkeys(shapes))

    def _graph(self, shape: StepShape) -> GraphedStep:
        assert self._memory is not None
        if shape not in self._graphs:
            graph = self._graphs[shape] = GraphedStep(Step(self.models, shape), self._memory)
            if self.on_capture is not None:
                self.on_capture(shape, graph.seconds)
        return self._graphs[shape]

    def _run_eagerly(self, step: Step, inputs: Tensor, host: HostSampling | None) -> Report:
        begun = Mark(self.device)
        step.inputs.copy_(inputs)
        verified = step.verify(host)
        mark = Mark(self.device)
        step.draft(verified)
        return Report(verified.committed.report, begun, mark)

    def padded_shape(self, shape: StepShape, chunks: Sequence[Chunk]) -> StepShape:
        """With the prompt rows' items; under graphs, one of the few shapes that holds it."""
        if not self.static:
            longest = max((c.num_rows for c in chunks), default=1)
            return shape._replace(num_items=len(chunks), rows_per_item=longest)
        return shape._replace(
            batch=padded(max(shape.batch, 1), BATCH_SIZES),
            num_items=padded(_num_items(chunks), ITEM_COUNTS),
            rows_per_item=ROWS_PER_ITEM,
        )

    def _inputs(
        self,
        shape: StepShape,
        slots: NDArray[np.int64],
        caps: NDArray[np.int64],
        chunks: Sequence[Chunk],
    ) -> Tensor:
        packed, tensors = empty_inputs(shape, self.models.state.padding)
        # The same memory, quicker to write to.
        tensors.slots.numpy()[: len(slots)] = slots
        tensors.caps.numpy()[: len(slots)] = caps
        if not chunks:
            return packed
        fields = {name: tensor.numpy() for name, tensor in tensors._asdict().items()}
        item, size = 0, shape.rows_per_item
        for chunk in chunks:
            request, end = chunk.slot.request, chunk.first + chunk.num_rows
            num_items = -(-chunk.num_rows // size)
            rows, items = (
                slice(item * size, item * size + chunk.num_rows),
                slice(item, item + num_items),
            )
            offsets = np.arange(num_items) * size
            fields["prompt_ids"][rows] = request.token_ids[chunk.first : end]
            fields["next_ids"][rows] = request.token_ids[chunk.first + 1 : end + 1]
            fields["item_slots"][items] = chunk.slot.index
            fields["item_starts"][items] = chunk.first + offsets
            fields["item_counts"][items] = counts = np.minimum(chunk.num_rows - offsets, size)
            fields["draft_counts"][items] = counts * self._is_drafted(request, end)
            item += num_items
        return packed

    def _is_drafted(self, request: Request, num_rows: int) -> bool:
        """False where its rows would be beyond the drafter's positions, or nobody reads them."""
        in_reach = num_rows < self.models.max_draft_tokens
        return request.draft_depth > 0 and in_reach

    def open_slots(self, slots: Sequence[Slot]) -> None:
        """Tells the device of requests that were admitted."""
        if not slots:
            return
        state = self.models.state
        numbers = torch.tensor([_numbers(s) for s in slots]).t()
        fractions = torch.tensor([_fractions(s.request) for s in slots], dtype=torch.float32).t()
        places = self._to_device(torch.tensor([s.index for s in slots]))
        state.numbers[:, places] = self._to_device(numbers.contiguous())
        state.fractions[:, places] = self._to_device(fractions.contiguous())

    def write_blocks(self, slots: Sequence[Slot]) -> None:
        """Tells the device which blocks these have gained."""
        gained: list[tuple[int, int, int, int]] = []  # table, slot, column, block
        for slot in slots:
            table = slot.request.table
            assert table is not None
            self._tables[slot.index] = table
            for number, group in enumerate(table.groups):
                first = group.num_written
                new = enumerate(group.blocks[first:], start=first)
                gained += [(number, slot.index, column, block) for column, block in new]
                group.num_written = len(group.blocks)
        if not gained:
            return
        state = self.models.state
        numbers, places, columns, blocks = self._to_device(torch.tensor(gained).t().contiguous())
        state.block_tables[numbers, places, columns] = blocks.int()
        tables = [s.request.table for s in slots]
        capacity = [[s.index for s in slots], [t.capacity if t else 0 for t in tables]]
        places, values = self._to_device(torch.tensor(capacity))
        state.capacity[places] = values

    def set_drafts(self, slots: Sequence[int], drafts: Sequence[SequenceDraft]) -> None:
        """Those of a drafter on the host, for the next step."""
        state = self.models.state
        for slot, (token_ids, probabilities, parents, scores) in zip(slots, drafts, strict=True):
            count = len(token_ids)
            if parents is not None:
                self._set_tree(slot, token_ids, parents)
                if state.draft_scores is not None:
                    state.draft_scores[slot, :count] = torch.tensor(scores or ())
                continue
            tokens = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
            state.drafts[slot, :count] = tokens
            state.num_drafts[slot] = count
            if state.draft_probs is not None and count:
                probs = state.draft_probs[slot, :count]
                if probabilities is None:
                    probs.zero_().scatter_(1, tokens[:, None], 1.0)
                else:
                    probs.copy_(probabilities)

    def num_depths(self, slots: Sequence[int]) -> list[int]:
        """Nodes that may stand behind each other in trees for the next step."""
        state, models = self.models.state, self.models
        most = torch.minimum(state.max_drafts, state.max_depths)
        limits = state.limits, state.capacity, models.max_draft_tokens, models.rows_per_depth
        depths: list[int] = draft_limit(most, state.num_computed + 1, *limits)[list(slots)].tolist()
        return depths

    def read_drafts(self, slot: int) -> tuple[list[int], list[int]]:
        """Draft tokens of the next step and their parents, counted from 1; 0 is the last token."""
        state = self.models.state
        token_ids = state.drafts[slot].tolist()
        if state.trees is None:
            return token_ids, list(range(len(token_ids)))
        return token_ids, state.trees.parents[slot].tolist()

    def cut_drafts(
        self, slots: Sequence[int], requests: Sequence[Request], caps: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Drafts that a request's grammar forbids leave before they cost a row -> the new caps.

        Not for rejection: there a forbidden draft has to be refused, for what follows is drawn
        from what is left of the target's distribution.
        """
        state, caps = self.models.state, caps.copy()
        constrained = [n for n, r in enumerate(requests) if r.grammar is not None and caps[n] > 0]
        if not constrained:
            return caps
        places = [slots[n] for n in constrained]
        counts = state.num_drafts[places].tolist()
        tokens = state.drafts[places].tolist()
        parents = [list(range(len(own))) for own in tokens]
        if state.trees is not None:
            parents = state.trees.parents[places].tolist()
        for n, count, drafts, rows in zip(constrained, counts, tokens, parents, strict=True):
            grammar = requests[n].grammar
            assert grammar is not None
            kept = grammar.permitted(drafts[:count], rows[:count])
            if state.trees is not None and len(kept) < count:
                self._set_tree(slots[n], *trees.pruned(drafts, rows, kept))
                if state.draft_scores is not None:
                    state.draft_scores[slots[n], : len(kept)] = state.draft_scores[slots[n], kept]
            caps[n] = min(caps[n], len(kept))
        return caps

    def _set_tree(self, slot: int, token_ids: list[int], parents: list[int]) -> None:
        state, count = self.models.state, len(token_ids)
        assert state.trees is not None
        tokens, rows = self._to_device(torch.tensor([[token_ids], [parents]], dtype=torch.int64))
        state.drafts[slot, :count] = tokens[0]
        state.num_drafts[slot] = count
        state.trees.parents[slot, :count] = rows[0]
        state.trees.depths[slot, : count + 1] = trees.depths(rows)[0]
        state.trees.ancestors[slot, : count + 1] = trees.ancestors(rows)[0]

    def _to_device(self, host: Tensor) -> Tensor:
        """Without waiting, where the device is another."""
        if self.device.type != "cuda":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)


def _num_items(chunks: Sequence[Chunk]) -> int:
    """Of prompt rows, where shapes are padded."""
    return sum(-(-chunk.num_rows // ROWS_PER_ITEM) for chunk in chunks)


def _numbers(slot: Slot) -> list[int]:
    """In the order of DeviceBatch's columns."""
    request = slot.request
    num_prompt = len(request.prompt_token_ids)
    return [
        request.token_ids[-1],
        slot.num_known - 1,
        num_prompt + request.max_tokens,
        num_prompt,
        request.max_drafts,
        0,  # it has no drafts yet
        max(request.params.top_k, 0),
        request.seed,
        0 if request.table is None else request.table.capacity,
        request.draft_depth,
    ]


def _fractions(request: Request) -> list[float]:
    params = request.params
    return [0.0 if params.greedy else params.temperature, params.top_p, params.min_p]
