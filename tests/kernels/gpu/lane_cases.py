"""Random lane states, and each operation of kernels/plain/lanes.py as a slow loop over lanes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.lane_state import LaneState, RowPlan, StepCounts, make_lane_state
from peagle.kernels.plain.lanes import HEADER

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = 10 if DEVICE.type == "cuda" else 25
VOCAB = 4  # few, so that drafts often agree
TAPPED = 5
BLOCK_SIZE = 3
TRASH = 999


@dataclass(frozen=True)
class Case:
    """A state, a batch with dummies in it, and what a step would have drafted and chosen."""

    state: LaneState
    lanes: Tensor  # [B]
    depth: int
    max_draft_tokens: int
    drafts: Tensor  # [B, K]
    chosen: Tensor  # [B, K+1]
    usable: Tensor  # [B, K+1]
    taps: Tensor | None  # [B, K+1, C]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_lanes, depth = draw(st.integers(1, 6)), draw(st.integers(0, 7))
    state = _random_state(num_lanes, depth + draw(st.integers(1, 3)), depth, generator)
    order = torch.randperm(num_lanes, generator=generator)[: draw(st.integers(1, num_lanes))]
    padding = torch.full((draw(st.integers(0, 3)),), num_lanes)
    lanes = torch.cat((order, padding))
    shape = (len(lanes), depth + 1)
    chosen = torch.randint(VOCAB, shape, generator=generator)
    drafts = chosen[:, :-1].clone()
    wrong = torch.rand(drafts.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    drafts[wrong] = VOCAB
    broken = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3]))
    taps = torch.randn(*shape, TAPPED, generator=generator) if draw(st.booleans()) else None
    reach = draw(st.sampled_from([0, 8, 14, 1000]))
    tensors = (t.to(DEVICE) for t in (lanes, drafts, chosen, ~broken))
    on_device = LaneState(*(t.to(DEVICE) for t in state))
    own_lanes, *others = tensors
    kept = None if taps is None else taps.to(DEVICE)
    return Case(on_device, own_lanes, depth, reach, *others, kept)


def _random_state(
    num_lanes: int, max_pending: int, depth: int, generator: torch.Generator
) -> LaneState:
    """Lanes at any point of a request, some ended; the dummy as it is made."""
    state = make_lane_state(num_lanes, 9, max_pending, TAPPED, torch.zeros(()))

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (num_lanes,), generator=generator)

    real = slice(0, num_lanes)
    state.block_tables[real] = torch.randint(50, (num_lanes, 9), generator=generator).int()
    state.num_prompt[real] = whole(1, 12)
    state.num_computed[real] = state.num_prompt[real] + whole(0, 10)
    state.limits[real] = state.num_computed[real] + whole(-1, 12)
    state.limits[real] *= whole(0, 5).clamp(max=1)  # one in five has ended
    state.wanted_drafts[real] = whole(0, depth + 2)
    behind = torch.minimum(whole(1, max_pending + 1), state.num_computed[real])
    state.draft_starts[real] = state.num_computed[real] - behind
    state.last_tokens[real] = whole(0, VOCAB)
    state.pending_tokens[real] = torch.randint(
        VOCAB, state.pending_tokens[real].shape, generator=generator
    )
    state.pending_taps[real] = torch.randn(state.pending_taps[real].shape, generator=generator)
    return state


def copied(state: LaneState) -> LaneState:
    return LaneState(*(t.clone() for t in state))


def slow_begin_step(case: Case) -> StepCounts:
    rows = []
    for lane in case.lanes.tolist():
        computed, limit = int(case.state.num_computed[lane]), int(case.state.limits[lane])
        start, wanted = int(case.state.draft_starts[lane]), int(case.state.wanted_drafts[lane])
        num_tokens = computed + 1
        running = num_tokens < limit
        # Draft d stands at position num_tokens + d, and a bonus token must fit behind it. Its row
        # in the drafter stands two positions before it.
        drafts = 0
        while (
            drafts < min(wanted, case.depth)
            and num_tokens + drafts + 1 < limit
            and num_tokens + drafts <= case.max_draft_tokens
        ):
            drafts += 1
        pending = computed - start if running else 0
        draft_rows = pending + max(drafts - 1, 0) if running else 0
        outputs = num_tokens - int(case.state.num_prompt[lane])
        verify = drafts + 1 if running else 0
        last = int(case.state.last_tokens[lane])
        rows.append((computed, start, pending, drafts, draft_rows, verify, outputs, last))
    counts = torch.tensor(rows, device=case.lanes.device).t().contiguous()
    pending = [case.state.pending_tokens[lane, : case.depth + 1] for lane in case.lanes.tolist()]
    return StepCounts(*counts, torch.stack(pending))


def slow_plan_rows(
    block_tables: Tensor,
    tables: Tensor,
    starts: Tensor,
    counts: Tensor,
    rows_per_item: int,
    max_position: int,
) -> RowPlan:
    ends, positions, slots = [], [], []
    for table, start, count in zip(tables.tolist(), starts.tolist(), counts.tolist(), strict=True):
        ends.append(start + count if count else 0)
        for j in range(rows_per_item):
            positions.append(min(start + j, max_position))
            if j < count:
                block = int(block_tables[table, (start + j) // BLOCK_SIZE])
                slots.append(block * BLOCK_SIZE + (start + j) % BLOCK_SIZE)
            else:
                slots.append(TRASH)
    device = tables.device
    return RowPlan(
        tables.int(),
        starts.int(),
        torch.tensor(ends, dtype=torch.int32, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(slots, device=device),
    )


def slow_expand_rows(real: Tensor, num_real: Tensor, mask: Tensor, num_rows: int) -> Tensor:
    out = []
    for lane, count in enumerate(num_real.tolist()):
        out += [real[lane, r] if r < count else mask for r in range(num_rows)]
    return torch.stack(out)


def slow_commit(case: Case, counts: StepCounts) -> tuple[LaneState, Tensor]:
    """The state after the step, and its report."""
    state = copied(case.state)
    report = []
    for row, lane in enumerate(case.lanes.tolist()):
        chosen, drafts = case.chosen[row].tolist(), case.drafts[row].tolist()
        num_drafts = int(counts.num_drafts[row])
        said: list[int] = []
        broken = False
        while int(counts.num_verify_rows[row]) and not broken:
            at = len(said)
            broken = not bool(case.usable[row, at])
            said.append(chosen[at])
            if not (at < num_drafts and drafts[at] == chosen[at]):
                break
        if broken:
            said = []  # the step is done again, without drafts
            state.wanted_drafts[lane] = 0
            if num_drafts == 0:
                state.limits[lane] = 0
        if said:
            state.last_tokens[lane] = said[-1]
        before = int(counts.num_computed[row])
        state.num_computed[lane] = before + len(said)
        if case.taps is not None:
            state.draft_starts[lane] = before
            state.pending_tokens[lane, : case.depth + 1] = case.chosen[row]
            state.pending_taps[lane, : case.depth + 1] = case.taps[row]
        report.append([len(said), num_drafts, int(broken and num_drafts == 0), *chosen])
    assert len(report[0]) == HEADER + case.depth + 1
    return state, torch.tensor(report, device=case.lanes.device)


def check_states(ours: LaneState, theirs: LaneState) -> None:
    """Equal to the bit in every lane but the dummy, which must only stay ended."""
    for name, mine, other in zip(LaneState._fields, ours, theirs, strict=True):
        assert torch.equal(mine[:-1], other[:-1]), name
    for state in (ours, theirs):
        assert int(state.limits[-1]) == int(state.num_computed[-1]) == 0
