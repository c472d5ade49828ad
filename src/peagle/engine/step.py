"""One step as a function of tensors: verify the drafts, commit, draft for the next step.

Nothing in here asks the device for a value unless the layout is exact, so on a GPU a step is
captured once as a CUDA graph and replayed. Inputs are copied into the step's own tensors before
each run. Prompt rows stand in the same passes as decode rows, of the target and of the drafter.

Shapes: B slots, K draft tokens, I items of Q prompt rows, C width of the aux hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from peagle.engine.host_sampling import HostSampling
from peagle.engine.row_layouts import PagedModel, RowLayout
from peagle.engine.sampler import (
    CoupledSampler,
    RejectionSampler,
    SampledSlots,
    Sampler,
    SamplerOutput,
    Sampling,
)
from peagle.kernels.device_batch import Committed, DeviceBatch, StepCounts
from peagle.kernels.reference.trees import SharedRows, TreePath
from peagle.kernels.step_ops import StepOps
from peagle.models.drafter import (
    DraftBatch,
    NetworkDrafter,
    Packing,
    PromptRows,
    RowItems,
    Rows,
    TreeDrafter,
)
from peagle.models.output import OutputRows
from peagle.models.target import TargetModel


class StepShape(NamedTuple):
    """What a CUDA graph is captured for."""

    batch: int
    depth: int  # draft tokens per slot that stand behind each other; 0: no speculation
    sampling: Sampling
    by_rejection: bool = False  # how sampled requests verify their drafts
    num_splits: int = 1  # of the decode rows' attention
    num_items: int = 0  # of prompt rows
    rows_per_item: int = 1
    num_nodes: int | None = None  # of trees, per slot; None: drafts are chains of `depth`
    # Drafts that slots verify on average; None: each as many as it has. What one verifies more than
    # another depends on how probable its drafts are.
    mean_nodes: int | None = None
    feeds: bool = False  # `depth` is 0, and the drafter reads new rows so that it can draft later

    @property
    def max_drafts(self) -> int:
        """Draft tokens per slot in all."""
        return self.depth if self.num_nodes is None else self.num_nodes

    @property
    def decode_rows(self) -> int:
        """Of all slots together."""
        return self.shared_rows or self.batch * (self.max_drafts + 1)

    @property
    def prompt_rows(self) -> int:
        return self.num_items * self.rows_per_item

    @property
    def shared_rows(self) -> int | None:
        """Decode rows of all slots together, where they share them."""
        return None if self.mean_nodes is None else self.batch * (self.mean_nodes + 1)


class StepInputs(NamedTuple):
    """What the host says; the fields of one int64 tensor, so that one copy brings everything."""

    slots: Tensor  # [B]; padding where there is none
    caps: Tensor  # [B] drafts that each may verify
    prompt_ids: Tensor  # [I * Q]
    next_ids: Tensor  # [I * Q] the token after each: what the drafter reads
    item_slots: Tensor  # [I]
    item_starts: Tensor  # [I]
    item_counts: Tensor  # [I] rows that are real
    draft_counts: Tensor  # [I] those that the drafter reads, too


def empty_inputs(
    shape: StepShape, padding: int, device: torch.device | None = None
) -> tuple[Tensor, StepInputs]:
    """The tensor and its fields: nobody's rows yet."""
    rows = shape.num_items * shape.rows_per_item
    sizes = [shape.batch] * 2 + [rows] * 2 + [shape.num_items] * 4
    packed = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    fields = StepInputs(*torch.split(packed, sizes))
    fields.slots.fill_(padding)
    fields.item_slots.fill_(padding)
    return packed, fields


@dataclass(frozen=True)
class Drafting:
    """The drafter's side, where it runs inside the step."""

    drafter: NetworkDrafter
    model: PagedModel


@dataclass(frozen=True)
class StepModels:
    """What all steps of an engine share."""

    target: TargetModel
    model: PagedModel
    drafting: Drafting | None
    max_draft_tokens: int  # a request with more is not drafted for
    state: DeviceBatch
    ops: StepOps
    layout: RowLayout
    block_size: int
    rows_per_depth: int = 1  # that drafts leave in the drafter's cache

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.drafting.drafter.aux_hidden_state_layers if self.drafting else ()


class Verified(NamedTuple):
    """What the draft reads of the verification before it."""

    counts: StepCounts
    sampled_token_ids: Tensor  # [B, K+1]
    committed: Committed
    aux_hidden_states: Tensor | None  # [B * (K+1), C]
    prompt_states: Tensor | None  # [I * Q, C]


class Step:
    def __init__(self, models: StepModels, shape: StepShape) -> None:
        self.models, self.shape = models, shape
        device = models.state.numbers.device
        self.inputs, self.fields = empty_inputs(shape, models.state.padding, device)

    def __call__(self) -> Tensor:
        """-> the report; see kernels/reference/batch.py."""
        verified = self.verify()
        self.draft(verified)
        return verified.committed.report

    def verify(self, host: HostSampling | None = None) -> Verified:
        """One pass of the target over all rows; drafts that it agrees with are committed."""
        models, fields, shape = self.models, self.fields, self.shape
        counts = models.ops.begin_step(models.state, fields.slots, fields.caps, shape.max_drafts)
        num_drafts = models.layout.max_drafts(counts.num_drafts, shape.max_drafts)
        counts = counts.narrowed(num_drafts, is_tree=shape.num_nodes is not None)
        shared = None
        if shape.shared_rows is not None:
            given = models.state, fields.slots, counts, shape.shared_rows
            counts, shared = models.ops.share_rows(*given)
            sizes = shared.ranks.numel(), shared.places, num_drafts + 1
            packing = Packing(*sizes, is_shared=True)
        else:
            packing = models.layout.pack(counts.num_rows, num_drafts + 1)
        hidden, aux_hidden_states = self._run_target(counts, shared)
        output = OutputRows(hidden[: len(packing)], models.target)
        if host is not None:
            output = host.adjusted(output, counts, packing)
        depths = None if counts.tree is None else counts.tree.depths
        sampled = self._sampler(counts.num_outputs, depths).verify(
            output, counts.drafts, counts.num_drafts, packing
        )
        num_rows = sampled.sampled_token_ids.numel()  # padding included
        states: tuple[Tensor | None, Tensor | None] = (None, None)
        if aux_hidden_states is not None:
            states = aux_hidden_states[:num_rows], aux_hidden_states[num_rows:]
        path = None
        if counts.tree is not None:
            path, states = self._take_path(counts, sampled, states, shared, host)
            sampled = SamplerOutput(path.drafts, path.sampled, path.usable)
        committed = models.ops.commit(
            models.state,
            fields.slots,
            counts,
            *sampled,
            models.max_draft_tokens,
            shape.depth,
            models.rows_per_depth,
            None if path is None else path.report,
        )
        return Verified(counts, sampled.sampled_token_ids, committed, *states)

    def _take_path(
        self,
        counts: StepCounts,
        sampled: SamplerOutput,
        states: tuple[Tensor | None, Tensor | None],
        shared: SharedRows | None,
        host: HostSampling | None,
    ) -> tuple[TreePath, tuple[Tensor | None, Tensor | None]]:
        """What the target takes of the trees, as if they had been chains; the cache as well."""
        models, cache = self.models, self.models.model.cache
        path = models.ops.walk_tree(
            counts, sampled.sampled_token_ids, sampled.usable, self.shape.depth, shared
        )
        for table, planes in cache.planes_by_table.items():
            models.ops.move_rows(
                cache.keys[planes],
                cache.values[planes],
                models.state.block_tables[table],
                self.fields.slots,
                counts.num_computed,
                path,
                models.block_size,
            )
        if host is not None:
            host.take_path(path.rows.tolist())
        own, prompt = states
        if own is not None:
            row_starts = None if shared is None else shared.starts
            own = models.ops.path_rows(own, path.rows, counts.drafts.shape[1] + 1, row_starts)
        return path, (own, prompt)

    def draft(self, verified: Verified) -> None:
        """Drafts for the next step, and the drafter's cache of prompts."""
        models, fields, drafting = self.models, self.fields, self.models.drafting
        if drafting is None or not (self.shape.depth or self.shape.feeds):
            return
        committed = verified.committed
        depth = models.layout.max_drafts(committed.num_drafts, self.shape.depth)
        prompt = self._prompt_rows(verified)
        if not depth and prompt is None and not self.shape.feeds:
            return
        depth = max(depth, 1)  # rows of a prompt alone, or none to draft: nobody reads the one
        assert verified.aux_hidden_states is not None
        sampler = self._sampler(committed.num_outputs)
        batch = DraftBatch(
            slots=fields.slots,
            tokens=verified.sampled_token_ids,
            aux_hidden_states=verified.aux_hidden_states,
            starts=verified.counts.num_computed,
            num_real=committed.num_real,
            num_rows=committed.num_rows,
            num_drafts=committed.num_drafts,
            depth=depth,
            prompt=prompt,
            attend=lambda items: self._rows(drafting.model, items),
            pack=models.layout.pack,
            pack_depths=partial(models.layout.pack_depths, committed.num_drafts),
            sample=sampler.draft,
            candidates=sampler.candidates if isinstance(sampler, CoupledSampler) else None,
            temperature=self._temperature(),
            ops=models.ops,
        )
        if self.shape.feeds:
            drafting.drafter.feed(batch)
        elif self.shape.num_nodes is None:
            drafts = drafting.drafter.propose(batch)
            models.ops.store_drafts(models.state, fields.slots, drafts)
        else:
            self._draft_tree(cast(TreeDrafter, drafting.drafter), batch)

    def _draft_tree(self, drafter: TreeDrafter, batch: DraftBatch) -> None:
        state, lattice = self.models.state, drafter.lattice(batch)
        if lattice is not None:
            limits = batch.num_drafts, state.drafts.shape[1]
            self.models.ops.store_tree(state, self.fields.slots, *lattice, *limits)

    def _temperature(self) -> Tensor | None:
        if self.shape.sampling == "greedy":
            return None
        return self.models.state.temperature[self.fields.slots]

    def _run_target(
        self, counts: StepCounts, shared: SharedRows | None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states of the real rows, decode rows first, and all rows' aux hidden states."""
        models, fields, table = self.models, self.fields, self.models.target.input_table
        rows_per_slot = counts.drafts.shape[1] + 1
        places = fields.slots, counts.num_computed, counts.num_rows
        items = [RowItems(*places, rows_per_slot, counts.tree, shared=shared)]
        if self.shape.num_items:
            items.append(self._prompt_items(fields.item_counts))
        # Before the embeddings: the layers' first kernel may start while the last one still runs.
        rows = self._rows(models.model, items)
        row_places = None if shared is None else shared.places
        x = models.ops.embed_tokens(table, counts.last_tokens, counts.drafts, row_places)
        if self.shape.num_items:
            none = fields.prompt_ids.new_empty(len(fields.prompt_ids), 0)
            x = torch.cat((x, models.ops.embed_tokens(table, fields.prompt_ids, none)))
        is_read = self.shape.depth or self.shape.feeds
        aux_hidden_state_layers = models.aux_hidden_state_layers if is_read else ()
        hidden, aux_hidden_states = models.target.run(
            rows.packing.take(x), rows.positions, rows.attention, aux_hidden_state_layers
        )
        return hidden, None if aux_hidden_states is None else rows.packing.put(aux_hidden_states)

    def _prompt_items(self, counts: Tensor) -> RowItems:
        fields = self.fields
        return RowItems(fields.item_slots, fields.item_starts, counts, self.shape.rows_per_item)

    def _prompt_rows(self, verified: Verified) -> PromptRows | None:
        if not self.shape.num_items:
            return None
        assert verified.prompt_states is not None
        items = self._prompt_items(self.fields.draft_counts)
        return PromptRows(self.fields.next_ids, verified.prompt_states, items)

    def _rows(self, model: PagedModel, items: Sequence[RowItems]) -> Rows:
        return self.models.layout.rows(model, items, self.shape.num_splits)

    def _sampler(self, outputs: Tensor, depths: Tensor | None = None) -> Sampler:
        kind = RejectionSampler if self.shape.by_rejection else CoupledSampler
        return kind(self.models.ops, self._sampled_slots(outputs, depths))

    def _sampled_slots(self, outputs: Tensor, depths: Tensor | None = None) -> SampledSlots:
        """For rows whose first decides output position `outputs` [B]."""
        state, slots = self.models.state, self.fields.slots
        return SampledSlots(state, slots, outputs, self.shape.sampling, depths)
