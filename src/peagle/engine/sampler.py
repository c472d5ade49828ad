"""How a step chooses tokens: the drafts, and what the target makes of them.

Neither form asks the host for anything. Row j of a request decides its output position
`outputs + j`; its noise depends on the request's seed and on that position alone, so neither
batch, step, preemption nor drafter can change a sampled token (verification "coupled").

Shapes: B slots, K draft tokens, n rows of each slot, V tokens, Vd of them the drafter's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.device_batch import DeviceBatch
from peagle.kernels.reference.sampling import SampledTokens, SamplingMetadata
from peagle.kernels.reference.trees import Candidates
from peagle.kernels.step_ops import StepOps
from peagle.models.drafter import Packing
from peagle.models.output import OutputRows
from peagle.sampling_params import SamplingParams
from peagle.speculation.trees import BEAM
from peagle.speculation.verify import PADDING

# What a step has to be able to do for its requests; each includes the one before it.
Sampling = Literal["greedy", "sampled", "filtered"]
SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)


def sampling_of(params: Iterable[SamplingParams]) -> Sampling:
    """What a step must be able to do for requests with these."""
    drawn = [p for p in params if not p.greedy]
    if not drawn:
        return "greedy"
    filtered = any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in drawn)
    return "filtered" if filtered else "sampled"


class SamplerOutput(NamedTuple):
    """What `commit` reads: a draft is kept where it is the token that was sampled."""

    drafts: Tensor  # [B, K]
    sampled_token_ids: Tensor  # [B, K+1]; of a tree, [R] where slots share rows
    usable: Tensor  # the same, bool


@dataclass(frozen=True)
class SampledSlots:
    """The slots of a step, and the output position [B] that the first row of each decides."""

    state: DeviceBatch
    slots: Tensor
    outputs: Tensor
    sampling: Sampling
    depths: Tensor | None = None  # [B, n] where rows are a tree's: how far behind the first each is

    @property
    def filters(self) -> bool:
        return self.sampling == "filtered"

    def metadata(
        self, first: int, packing: Packing, *, is_one_depth: bool = False
    ) -> SamplingMetadata:
        """Of rows first .. first + n - 1 of each slot, [B * n], packed; or of n rows that are all
        `first`."""
        per_slot = packing.rows_per_item
        offsets = self.depths
        if is_one_depth:
            offsets = torch.full((per_slot,), first, device=self.outputs.device)
        elif offsets is None:
            offsets = torch.arange(first, first + per_slot, device=self.outputs.device)
        positions = packing.take((self.outputs[:, None] + offsets).flatten())
        slots, state = packing.take(self.slots.repeat_interleave(per_slot)), self.state
        return SamplingMetadata(
            temperature=state.temperature[slots],
            top_k=state.top_k[slots],
            top_p=state.top_p[slots],
            min_p=state.min_p[slots],
            seeds=state.seeds[slots],
            positions=positions,
        )

    def by_slot(self, x: Tensor, packing: Packing) -> Tensor:
        """Packed rows [R, ...] -> [B, n, ...]; shared ones stay as they are."""
        if packing.is_shared:
            return x
        return packing.put(x).view(len(self.slots), packing.rows_per_item, *x.shape[1:])


class Sampler(Protocol):
    def draft(self, output: OutputRows, first: int, packing: Packing) -> Tensor:
        """Rows of drafts first .. first + n - 1, packed -> tokens [B, n], the target's ids."""
        ...

    def verify(
        self, output: OutputRows, drafts: Tensor, num_drafts: Tensor, packing: Packing
    ) -> SamplerOutput:
        """The target's rows after each prefix of the drafts [B, K], packed."""
        ...


class CoupledSampler:
    """Drafter and target sample with the noise of the position, or greedily; a draft is kept
    where both sampled the same."""

    def __init__(self, ops: StepOps, slots: SampledSlots) -> None:
        self.ops, self.slots = ops, slots

    def draft(self, output: OutputRows, first: int, packing: Packing) -> Tensor:
        return self._sample(output, first, packing)[0]

    def verify(
        self, output: OutputRows, drafts: Tensor, num_drafts: Tensor, packing: Packing
    ) -> SamplerOutput:
        return SamplerOutput(drafts, *self._sample(output, 0, packing))

    def candidates(
        self, output: OutputRows, packing: Packing, depth: int | None = None, count: int = BEAM
    ) -> Candidates:
        """The best tokens of the rows of all drafts, packed; or of rows for one; [B, n, count]."""
        slots, metadata = self.slots, None
        if slots.sampling != "greedy":
            metadata = slots.metadata(depth or 0, packing, is_one_depth=depth is not None)
        found = self.ops.top_tokens(
            output.logits(), metadata, output.ids, count, filters=slots.filters
        )
        return Candidates(*(slots.by_slot(x, packing) for x in found))

    def _sample(self, output: OutputRows, first: int, packing: Packing) -> tuple[Tensor, Tensor]:
        """-> tokens and usable [B, n], [R] where slots share rows."""
        slots = self.slots
        if slots.sampling == "greedy":
            sampled = self._best(output)
        else:
            metadata = slots.metadata(first, packing)
            sampled = self.ops.sample_tokens(
                output.logits(), metadata, output.ids, filters=slots.filters
            )
        return slots.by_slot(sampled.token_ids, packing), slots.by_slot(sampled.usable, packing)

    def _best(self, output: OutputRows) -> SampledTokens:
        if output.greedy_without_logits:
            return self.ops.best_tokens(*output.product(), output.ids)
        return self.ops.sample_tokens(output.logits(), None, output.ids)


class RejectionSampler:
    """Keeps the distribution of every draft, for rejection sampling. A greedy request's have one
    token each: the same rule gives exactly its greedy tokens."""

    def __init__(self, ops: StepOps, slots: SampledSlots) -> None:
        self.ops, self.slots = ops, slots

    def draft(self, output: OutputRows, first: int, packing: Packing) -> Tensor:
        slots, state = self.slots, self.slots.state
        assert state.draft_probs is not None
        logits, vocab_size = output.logits(), state.draft_probs.shape[2]
        probs = torch.empty(len(logits), vocab_size, dtype=torch.float32, device=logits.device)
        sampled = self.ops.sample_with_probs(
            logits,
            slots.metadata(first, packing),
            output.ids,
            probs,
            filters=slots.filters,
        )
        depths = slice(first, first + packing.rows_per_item)
        state.draft_probs[slots.slots, depths] = slots.by_slot(probs, packing)
        return slots.by_slot(sampled.token_ids, packing)

    def verify(
        self, output: OutputRows, drafts: Tensor, num_drafts: Tensor, packing: Packing
    ) -> SamplerOutput:
        slots, depth = self.slots, drafts.shape[1]
        metadata = slots.metadata(0, packing)
        probs, usable = self.ops.token_probs(output.logits(), metadata, filters=slots.filters)
        uniforms = self.ops.rejection_uniforms(slots.state.seeds[slots.slots], slots.outputs, depth)
        verified = self.ops.verify_rejection(
            slots.by_slot(probs, packing), self._draft_probs(drafts), drafts, num_drafts, *uniforms
        )
        # A draft is accepted where a token follows. The others are taken out: where rounding
        # leaves nothing of p - q, the bonus token may be the very draft that was refused.
        accepted = verified.token_ids[:, 1:] != PADDING
        return SamplerOutput(
            torch.where(accepted, drafts, PADDING),
            verified.token_ids.clamp(min=0),  # what follows is looked up as a token, for nothing
            slots.by_slot(usable, packing),
        )

    def _draft_probs(self, drafts: Tensor) -> Tensor:
        """[B, K, V]. Greedy drafts are certain: nothing was kept of them where all were greedy."""
        slots, state = self.slots, self.slots.state
        assert state.draft_probs is not None
        kept = state.draft_probs[slots.slots, : drafts.shape[1]]
        is_greedy = (state.temperature[slots.slots] == 0)[:, None, None]
        certain = F.one_hot(drafts, kept.shape[2]).to(kept.dtype)
        return torch.where(is_greedy, certain, kept)
