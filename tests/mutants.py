"""Breaks the source in small ways, one at a time in a copy, and says which no test notices.

    python tests/mutants.py               # all; `make mutants`
    python tests/mutants.py verify        # those whose file or text contains the word

A mutant whose tests all pass is alive: the tests do not hold what that line says. Not part of CI.
Add an entry to MUTANTS for each rule that you change: the file, a text that it has exactly once, a
text that is wrong, and the test files that should fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = "src", "tests", "pyproject.toml"
MAX_SECONDS = 600  # of the tests of one mutant; a hang is noticed, too


class Mutant(NamedTuple):
    file: str  # under src/peagle
    old: str
    new: str
    tests: tuple[str, ...]  # under tests

    def __str__(self) -> str:
        return f"{self.file}: {self.old!r} -> {self.new!r}"


DETOKENIZER = ("engine/test_detokenizer.py",)
OPEN_ANSWERS = ("server/test_async_llm.py",)
CHANNELS = ("server/test_engine_loop.py",)
VERIFY = "speculation/test_verify_distribution.py", "speculation/test_verify_rows.py"
SAMPLING = ("speculation/test_sampling_distribution.py",)
COUNTS = ("speculation/test_acceptance_counts.py",)
COD = "train/test_cod.py", "teacher_forcing/test_partition.py"
PARTITION = ("teacher_forcing/test_partition.py",)
LOSSES = ("train/test_losses.py",)
HEAD_WINDOWS = "teacher_forcing/test_parity_with_serving.py", "evaluate/test_engine_agreement.py"
BEAMS = ("evaluate/test_engine_agreement.py",)
DATASET = ("data/test_dataset.py",)
OPTIMIZER = ("train/test_optimizer.py",)
LAYOUT = ("checkpoints/test_vllm_layout.py",)
BLOCKS = ("engine/test_blocks.py",)
CPU_KERNELS = ("kernels/cpu/test_ops.py",)
CPU_LINEAR = ("kernels/cpu/test_linear.py",)
CPU_DRAFTS = ("kernels/cpu/test_drafts.py",)
REFERENCE = ("kernels/reference/test_linear.py",)
TREES = ("engine/test_trees.py",)
GRAMMAR = ("engine/test_structured_outputs.py",)
WINDOWS = "engine/test_windows.py", "engine/test_blocks.py"
PREFIXES = "engine/test_prefix_caching.py", "engine/test_blocks.py"
AUTO = ("engine/test_auto.py",)
GPU_TREES = ("kernels/gpu/test_trees.py",)
BUDGET = ("speculation/test_budget.py",)
GROWN_TREES = ("speculation/test_trees.py",)
CACHES = ("engine/test_cache_after_rejection.py",)
DRAFT_ROOM = ("kernels/reference/test_batch.py",)
CORRECTION = ("models/test_correction.py",)
TOGETHER = ("engine/test_features_together.py",)
EXPERTS = ("kernels/gpu/test_experts.py",)
LOW_BIT = ("checkpoints/test_stored_tensors.py",)
ADAPTER = ("models/test_adapter.py",)
REAPER = ("deploy/test_reaper.py",)
ENDPOINTS = ("deploy/test_up_and_down.py",)
PLANS = ("deploy/test_plan.py",)
FORMATS = ("data/test_chat_formats.py",)
SCHEDULER = (
    "engine/test_scheduler.py",
    "engine/test_preemption.py",
    "engine/test_independence.py",
    "engine/test_mixed_steps.py",
)

MUTANTS = (
    # Text as it grows, and the channels of API servers.
    Mutant(
        "engine/detokenizer.py",
        "            self._prefix += fresh\n",
        "            pass\n",
        DETOKENIZER,
    ),
    Mutant(
        "engine/detokenizer.py",
        "self._window = self._read\n",
        "self._window = self._tried\n",
        DETOKENIZER,
    ),
    Mutant("server/async_llm.py", "if self.total <= most:", "if self.total < most:", OPEN_ANSWERS),
    Mutant(
        "server/engine_loop.py",
        "for request in list(channel.open.values()):",
        "for request in ():",
        CHANNELS,
    ),
    Mutant(
        "server/engine_loop.py",
        "bool(news.logprobs or news.trees)",
        "bool(news.logprobs)",
        CHANNELS,
    ),
    Mutant(
        "engine/engine.py",
        "token_ids[:num_drafts], parents[:num_drafts]",
        "token_ids, parents",
        CHANNELS,
    ),
    # Structured outputs.
    Mutant("engine/grammar.py", "        self._go_to(())\n", "", GRAMMAR),
    Mutant("engine/grammar.py", "parent in paths and ", "", GRAMMAR),
    Mutant("engine/grammar.py", "bits[row] = 0", "pass", GRAMMAR),
    Mutant("engine/grammar.py", "matcher.deep_copy()", "matcher", GRAMMAR),
    Mutant(
        "engine/grammar.py",
        "if self._eos_token_ids.intersection(rest):",
        "if False:",
        GRAMMAR,
    ),
    Mutant("engine/runner.py", "caps[n] = min(caps[n], len(kept))", "pass", GRAMMAR),
    Mutant("engine/engine.py", 'if self._verification == "coupled":', "if True:", GRAMMAR),
    Mutant("engine/adjust.py", "if request.grammar is not None:  #", "if False:  #", GRAMMAR),
    # Sliding windows.
    Mutant(
        "engine/layer_groups.py",
        "max(position - self.size + 1, 0)",
        "max(position - self.size + 2, 0)",
        WINDOWS,
    ),
    Mutant("engine/blocks.py", "self.num_passed + self.window.max_blocks", "num_blocks", WINDOWS),
    Mutant("engine/blocks.py", "window is None or ends[length]", "True or ends[length]", WINDOWS),
    Mutant("engine/blocks.py", "key + bytes([group]) if group else key", "key", WINDOWS),
    Mutant(
        "engine/blocks.py", "max(group.num_known, group.num_passed)", "group.num_known", WINDOWS
    ),
    Mutant(
        "engine/scheduler.py",
        "self._pass_by(self.running[int(n)], int(batch.num_computed[n]))",
        "self._pass_by(self.running[int(n)], int(batch.start()[n]))",
        WINDOWS,
    ),
    Mutant(
        "engine/scheduler.py",
        "self._pass_by(slot, slot.num_launched)",
        "self._pass_by(slot, slot.num_known - 1)",
        WINDOWS,
    ),
    Mutant("engine/kv_cache.py", "self.end - self.base <= window", "True", WINDOWS),
    # Prefix caching.
    Mutant(
        "engine/prefix_cache.py",
        "tokens[first : end + 1]",
        "tokens[first:end]",
        PREFIXES,
    ),
    Mutant(
        "engine/prefix_cache.py",
        "(len(token_ids) - 1) // block_size",
        "len(token_ids) // block_size",
        PREFIXES,
    ),
    Mutant("engine/prefix_cache.py", "bytes([is_drafted])", "b''", PREFIXES),
    Mutant("engine/prefix_cache.py", "popitem(last=False)", "popitem()", PREFIXES),
    Mutant("engine/prefix_cache.py", "        self._unused.pop(block, None)\n", "", PREFIXES),
    Mutant("engine/blocks.py", "group.held[::-1]", "group.held", PREFIXES),
    Mutant("engine/scheduler.py", "slot.num_launched >= reach", "False", PREFIXES),
    Mutant(
        "engine/scheduler.py",
        "return min(request.num_tokens - 1, drafted)",
        "return request.num_tokens - 1",
        PREFIXES,
    ),
    Mutant("engine/scheduler.py", "slot.num_launched < slot.num_known - 1 or", "", PREFIXES),
    Mutant(
        "engine/scheduler.py",
        "num_drafted_rows(num_tokens + 1,",
        "num_drafted_rows(request.num_tokens,",
        PREFIXES,
    ),
    Mutant(
        "engine/scheduler.py", "or self._is_computed_by_another(request, num_cached)", "", PREFIXES
    ),
    Mutant("engine/engine.py", "slot.is_cacheable = False  #", "pass  #", PREFIXES),
    Mutant("speculation/draft_limit.py", "limit - depth - 3", "limit - depth - 2", PREFIXES),
    Mutant(
        "speculation/draft_limit.py",
        "max_draft_tokens - depth - 1",
        "max_draft_tokens - depth",
        PREFIXES,
    ),
    # Verification and sampling.
    Mutant("speculation/verify.py", "& (q > 0), num_drafts)", ", num_drafts)", VERIFY),
    Mutant(
        "speculation/verify.py",
        "< num_drafts.unsqueeze(1)\n",
        "<= num_drafts.unsqueeze(1)\n",
        VERIFY,
    ),
    Mutant("speculation/verify.py", "torch.where(usable, residual, p)", "p", VERIFY),
    Mutant("speculation/verify.py", "cumprod(1).sum(1)", "sum(1)", VERIFY),
    Mutant(
        "speculation/draft_limit.py",
        "limits - num_tokens - 1",
        "limits - num_tokens",
        (
            "kernels/reference/test_batch.py",
            "engine/test_stats.py",
            "engine/test_greedy_equals_plain.py",
        ),
    ),
    Mutant(
        "speculation/noise.py",
        "+ _signed(domain * _GOLDEN64, 64)",
        "",
        ("speculation/test_noise.py",),
    ),
    Mutant(
        "speculation/sampling.py",
        "logits.float() / rows.temperature",
        "logits.float() * rows.temperature",
        SAMPLING,
    ),
    Mutant(
        "speculation/statistics.py",
        "reached[num_accepted] += times",
        "reached[num_accepted] += 0",
        COUNTS,
    ),
    # Low-bit experts, and targets by transformers' modules.
    Mutant(
        "kernels/gpu/experts.py", "(pairs & 15, pairs >> 4)", "(pairs >> 4, pairs & 15)", EXPERTS
    ),
    Mutant(
        "kernels/gpu/experts.py", "begins + (program - (behind - blocks))", "begins + 0", EXPERTS
    ),
    Mutant("kernels/gpu/experts.py", "scale_rows + start // SCALE_INPUTS", "scale_rows", EXPERTS),
    Mutant("kernels/gpu/experts.py", "min(rows, experts)", "1", EXPERTS),
    Mutant("checkpoints/stored_tensors.py", "<= names", "!= names", LOW_BIT),
    Mutant("checkpoints/weights.py", "tensor.dtype != place.dtype if", "False if", LOW_BIT),
    Mutant("models/config.py", "inner % outputs == 0 and", "", LOW_BIT),
    Mutant("models/adapter.py", "// powers % BASE", "% BASE", ADAPTER),
    Mutant("models/adapter.py", "tokens[:TRIAL_CUT]), expected", "tokens), expected", ADAPTER),
    # The engine.
    Mutant("engine/scheduler.py", "            left //= 2\n", "            pass\n", SCHEDULER),
    Mutant(
        "engine/scheduler.py",
        "budget -= sum(s.num_prompt_rows + 1 for s in self._prompting)",
        "pass",
        SCHEDULER,
    ),
    Mutant(
        "engine/scheduler.py",
        "self.waiting.appendleft(slot.request)",
        "self.waiting.append(slot.request)",
        SCHEDULER,
    ),
    Mutant(
        "engine/scheduler.py",
        "(slot, without):\n            self._preempt(next(reversed(self.running.values())))",
        "(slot, without):\n            self._preempt(next(iter(self.running.values())))",
        SCHEDULER,
    ),
    Mutant(
        "engine/scheduler.py",
        "request.num_tokens + num_rows + 1",
        "request.num_tokens",
        SCHEDULER,
    ),
    Mutant(
        "engine/scheduler.py", "if self._num_preempted == num_preempted:", "if True:", SCHEDULER
    ),
    Mutant(
        "engine/sampler.py",
        "            slots.by_slot(usable, packing),\n",
        "            slots.by_slot(usable, packing)[:, :1].expand(-1, depth + 1),\n",
        ("engine/test_sampler.py",),
    ),
    Mutant(
        "engine/host_sampling.py",
        "(log_probs[row] > chosen)",
        "(log_probs[row] >= chosen)",
        ("engine/test_logprobs.py",),
    ),
    Mutant(
        "engine/block_pools.py",
        " or (last is not None and wanted in self._unreserved)",
        "",
        BLOCKS,
    ),
    Mutant("engine/block_pools.py", " and block not in self._reserved", "", BLOCKS),
    # Kernels.
    Mutant("kernels/reference/linear.py", ".add(norm.eps)", "", REFERENCE),
    Mutant("kernels/reference/linear.py", "weight.shape, None, eps)", "weight.shape)", REFERENCE),
    Mutant(
        "kernels/cpu/ops.c",
        "choose(highest == all(-INFINITY), all(0.0f), highest)",
        "highest",
        CPU_KERNELS,
    ),
    Mutant("kernels/cpu/ops.c", " && (!window || base >= limit - window)", "", CPU_KERNELS),
    Mutant("kernels/cpu/linear.c", "if (!first) sums[r][v] += *place;", "", CPU_LINEAR),
    Mutant("kernels/cpu/linear.c", "if (width < WIDTH && !first)", "if (0)", CPU_LINEAR),
    Mutant("kernels/cpu/linear.c", "if (ids[row] < 0 ||", "if (", CPU_LINEAR),
    Mutant("kernels/cpu/linear.c", "if (bits[i] & 0xffff) return 0;", "", CPU_LINEAR),
    Mutant("kernels/cpu/drafts.c", "place > 0 && value > r", "place > 0 && value >= r", CPU_DRAFTS),
    Mutant(
        "kernels/cpu/drafts.c", "scores[i] + usable_log_prob(own)", "scores[i] + own", CPU_DRAFTS
    ),
    Mutant("kernels/cpu/drafts.c", "t->depths[row] + 1", "n + 1", CPU_DRAFTS),
    Mutant("kernels/cpu/drafts.c", "is_there ? p->tokens[places[n]] : 0", "77", CPU_DRAFTS),
    Mutant("kernels/cpu/drafts.c", "if (parents[n] != row) continue;", "", CPU_DRAFTS),
    Mutant("kernels/cpu/drafts.c", "!is_nan && isfinite", "isfinite", CPU_DRAFTS),
    Mutant("kernels/cpu/drafts.c", "starts[b] + rows[k]", "starts[b] + k", CPU_DRAFTS),
    Mutant(
        "kernels/cpu/ops.c",
        "load(states[q].out + d + i * LANES) * all(kept[q])",
        "load(states[q].out + d + i * LANES)",
        CPU_KERNELS,
    ),
    # Training.
    Mutant(
        "models/masks.py",
        "key.depth <= query.depth",
        "key.depth < query.depth",
        ("teacher_forcing/test_attention.py", "teacher_forcing/test_parity_with_serving.py"),
    ),
    Mutant("train/cod.py", "torch.minimum(kept, runs)", "kept", COD),
    Mutant("train/cod.py", "(rate**depth).clamp(min=floor)", "rate**depth", COD),
    Mutant(
        "teacher_forcing/partition.py",
        "next_end = torch.full((n,), n)",
        "next_end = torch.full((n,), n - 1)",
        COD,
    ),
    Mutant(
        "teacher_forcing/partition.py",
        "weights=depth_weights[depth[rows]],\n    )\n\n\n",
        "weights=depth_weights[torch.zeros_like(depth[rows])],\n    )\n\n\n",
        PARTITION,
    ),
    Mutant(
        "teacher_forcing/partition.py",
        "weights=depth_weights[depth[rows]],\n    )\n    return",
        "weights=depth_weights[torch.zeros_like(depth[rows])],\n    )\n    return",
        PARTITION,
    ),
    Mutant("teacher_forcing/partition.py", " and load.fits(middle)", "", PARTITION),
    Mutant("teacher_forcing/partition.py", "index - 1 - reach", "index - reach", PARTITION),
    Mutant(
        "models/head_config.py",
        "self.num_hidden_layers * (window - 1)",
        "self.num_hidden_layers * (window - 2)",
        PARTITION,
    ),
    Mutant("teacher_forcing/draft_model.py", "else window - step", "else window", HEAD_WINDOWS),
    Mutant("teacher_forcing/draft_model.py", "step - window + 1)", "step - window)", HEAD_WINDOWS),
    Mutant("evaluate/beams.py", "self.slot < anchors", "self.slot <= anchors", BEAMS),
    Mutant("evaluate/beams.py", "(same_document & before_anchor)", "before_anchor", BEAMS),
    Mutant("evaluate/beams.py", "self.position < window", "self.position <= window", BEAMS),
    Mutant("evaluate/beams.py", "row) & 1 > 0", "row) >= 0", BEAMS),
    Mutant("speculation/trees.py", "(depth < num_depths", "(depth <= num_depths", BEAMS),
    Mutant(
        "teacher_forcing/draft_model.py",
        "(segment.elements, segment.positions, (window,))",
        "(segment.elements, segment.positions)",
        HEAD_WINDOWS,
    ),
    Mutant(
        "teacher_forcing/attention.py",
        "position.low[:, None] - position.high[None, :] < window",
        "position.high[:, None] - position.low[None, :] < window",
        ("teacher_forcing/test_attention.py",),
    ),
    Mutant(
        "teacher_forcing/attention.py",
        "certain & (position.high[:, None] - position.low[None, :] < window)",
        "certain & (position.low[:, None] - position.high[None, :] < window)",
        ("teacher_forcing/test_attention.py",),
    ),
    Mutant(
        "kernels/reference/attention.py",
        "(place >= 0) | (key > position - window)",
        "(place >= 0) | (key >= position - window)",
        ("engine/test_trees.py",),
    ),
    Mutant(
        "kernels/gpu/attention.py",
        "~is_before[None, :] | (key[None, :] > passed)",
        "is_ancestor | (key[None, :] > passed)",
        ("kernels/gpu/test_attention.py",),
    ),
    Mutant(
        "kernels/gpu/attention.py",
        "~is_before[None, :] | (key[None, :] > passed)",
        "~is_before[None, :] | (key[None, :] >= passed)",
        ("kernels/gpu/test_attention.py",),
    ),
    # A loss weighted by acceptance
    Mutant(
        "teacher_forcing/partition.py",
        "anchors[counts[anchors] > 0] - first",
        "torch.arange(begin, end)[counts[begin:end] > 0] - first",
        PARTITION,
    ),
    Mutant(
        "train/planner.py",
        "depth_weights / retention.to(depth_weights.dtype)",
        "depth_weights",
        LOSSES,
    ),
    Mutant("train/losses.py", "torch.where(weights > 0, acceptance, 0.0)", "acceptance", LOSSES),
    Mutant("train/losses.py", "p[:, :-1].cumprod(1)", "p[:, 1:].cumprod(1)", LOSSES),
    Mutant("train/losses.py", "p[:, depth + 1] * opened", "p[:, depth] * opened", LOSSES),
    Mutant("train/losses.py", 'of_log=losses.kind != "tv"', "of_log=True", LOSSES),
    Mutant("train/losses.py", "rows, accumulate=True", "rows", LOSSES),
    Mutant(
        "train/losses.py",
        "truth, weights, table_gradient)\n                else",
        "truth, unit, table_gradient)\n                else",
        LOSSES,
    ),
    Mutant("train/losses.py", "swept.gradient.mul_(weights[:, None])", "pass", LOSSES),
    Mutant("train/losses.py", "torch.where(q < p, q, 0.0)", "torch.where(q > p, q, 0.0)", LOSSES),
    Mutant(
        "train/losses.py", "torch.minimum(p, log_q.exp())", "torch.maximum(p, log_q.exp())", LOSSES
    ),
    Mutant(
        "data/dataset.py", "name if number.isdigit() and name in ids else row_id", "row_id", DATASET
    ),
    Mutant("data/dataset.py", " and name in ids", "", DATASET),
    Mutant("train/optimizer.py", "p.dim() >= 2]", "p.dim() >= 1]", OPTIMIZER),
    Mutant("train/optimizer.py", '"weight_decay": 0.0', '"weight_decay": 0.1', OPTIMIZER),
    Mutant("train/optimizer.py", "betas=options.betas,", "", OPTIMIZER),
    Mutant("train/optimizer.py", "1.0 - math.cos", "1.0 + math.cos", OPTIMIZER),
    Mutant("train/optimizer.py", "return progress / options.warmup", "return 1.0", OPTIMIZER),
    Mutant("train/optimizer.py", "options.final + (1.0 - options.final) * left", "left", OPTIMIZER),
    Mutant(
        "train/run_folder.py",
        'value.to(parameter.device if fused else "cpu")',
        "torch.zeros_like(value)",
        ("train/test_resume.py",),
    ),
    # Trees of drafts.
    Mutant(
        "speculation/trees.py",
        "sums.sort(dim=1, descending=True",
        "sums.sort(dim=1, descending=False",
        GROWN_TREES,
    ),
    Mutant("speculation/trees.py", "log_probs.clamp(max=0.0)", "log_probs", GROWN_TREES),
    Mutant(
        "speculation/trees.py", "carries = is_there & (parents", "carries = (parents", GROWN_TREES
    ),
    Mutant("speculation/trees.py", "(paths if by_path else last)", "last", CACHES),
    Mutant("speculation/statistics.py", " and not is_leaf", "", COUNTS),
    Mutant("speculation/budget.py", " or self._depth_is_free", "", AUTO),
    Mutant("speculation/draft_limit.py", "+ 1 + rows_per_depth) //", "+ 1) //", DRAFT_ROOM),
    Mutant("speculation/draft_limit.py", "- (depth + 2)", "- (depth + 3)", DRAFT_ROOM),
    Mutant("kernels/reference/trees.py", "before | (1 << rows)", "1 << rows", CACHES),
    Mutant("kernels/reference/trees.py", "first_row - width + paths", "paths", CACHES),
    Mutant("models/eagle3.py", "self.network.norm(states) if", "states if", CACHES),
    Mutant("models/eagle3.py", "beam.paths, width)", "beam.paths * 0, width)", CACHES),
    Mutant("models/ngram.py", " / rank", "", ("models/test_ngram.py",)),
    Mutant("models/ngram.py", "node.parent.weight + 1.0", "root.weight", ("models/test_ngram.py",)),
    Mutant("speculation/trees.py", ", best % beam", ", best // beam", GROWN_TREES),
    Mutant(
        "speculation/trees.py", "last = behind[:, 0].argmax(1, keepdim=True)", "pass", GROWN_TREES
    ),
    # Candidates behind candidates.
    Mutant(
        "models/correction.py", "token_ids[:, :-1], output", "token_ids[:, 1:], output", CORRECTION
    ),
    Mutant(
        "models/correction.py",
        "temperature > 0, temperature, 1.0",
        "temperature > 0, 1.0, 1.0",
        CORRECTION,
    ),
    Mutant("models/correction.py", " + own.logsumexp(-1, keepdim=True)", "", CORRECTION),
    Mutant(
        "speculation/trees.py",
        "lattice.log_probs.masked_fill(~is_drafted, -torch.inf)",
        "lattice.log_probs",
        TREES,
    ),
    Mutant("kernels/reference/trees.py", "(depth <= path.num", "(depth < path.num", TREES),
    Mutant("kernels/reference/batch.py", "starts[:, None] + depths", "places", TREES),
    Mutant(
        "kernels/reference/batch.py",
        "torch.minimum(torch.minimum(state.num_drafts[slots], caps), has_room)",
        "torch.minimum(state.num_drafts[slots], caps)",
        TREES,
    ),
    Mutant("kernels/reference/attention.py", "(key_position > position", "(key > position", TREES),
    Mutant("engine/step.py", "host.take_path(path.rows.tolist())", "pass", TREES),
    Mutant(
        "engine/step.py",
        "self._sampler(counts.num_outputs, depths)",
        "self._sampler(counts.num_outputs)",
        TREES,
    ),
    Mutant("engine/row_layouts.py", "parents[n][:last]", "None", TREES),
    Mutant(
        "engine/kv_cache.py", "key[self.start - self.base :] = self.start + depths", "pass", TREES
    ),
    Mutant("engine/host_batch.py", "ahead = self.draft_rows[slots]", "ahead = 0", TREES),
    Mutant(
        "engine/request.py",
        "cache_slack(self.num_speculative_tokens, self.num_draft_nodes, self.rows_per_depth)",
        "0",
        TREES,
    ),
    Mutant(
        "engine/host_batch.py",
        "np.maximum(self.per_step[slots] + ahead, self.num_rows[slots])",
        "self.per_step[slots] + ahead",
        TREES,
    ),
    Mutant("engine/host_sampling.py", "[*paths[parent], draft]", "[*paths[-1], draft]", TREES),
    Mutant("kernels/cpu/ops.c", "start + (path ? path[0] : row)", "start + row", CPU_KERNELS),
    Mutant(
        "kernels/cpu/ops.c", "lowest_row = start;", "lowest_row = start + task->begin;", CPU_KERNELS
    ),
    # What vLLM is told about a head.
    Mutant(
        "checkpoints/heads/vllm_layout.py",
        '"rope_theta": parameters["rope_theta"]}',
        '"rope_theta": 10000.0}',
        LAYOUT,
    ),
    Mutant(
        "checkpoints/heads/vllm_layout.py",
        'written["rope_scaling"] = dict(parameters)',
        "pass",
        LAYOUT,
    ),
    Mutant(
        "checkpoints/heads/vllm_layout.py",
        '"target_hidden_size": config.target_hidden_size',
        '"target_hidden_size": config.hidden_size',
        LAYOUT,
    ),
    # Deployments: whose they are, when they are due, and what is removed.
    Mutant("deploy/reaper.py", "if PLAN_TAG in tags:", "if tags is not None:", REAPER),
    Mutant("deploy/reaper.py", "tzinfo=UTC)) <= now", "tzinfo=UTC)) > now", REAPER),
    Mutant(
        "deploy/reaper.py",
        "except sagemaker.exceptions.ClientError as error:\n            yield",
        "except ZeroDivisionError as error:\n            yield",
        REAPER,
    ),
    Mutant("deploy/reaper.py", '["LastModifiedTime"] > now - idle', '["Tags"] is None', REAPER),
    Mutant("deploy/reaper.py", ' if PLAN_TAG in one["Tags"]}', "}", REAPER),
    Mutant("deploy/endpoints.py", '"Creating") in NEVER_ANSWERED:', '"Creating"):', ENDPOINTS),
    Mutant(
        "deploy/endpoints.py", '"EndpointStatus") in BUSY:', '"EndpointStatus") is 0:', ENDPOINTS
    ),
    Mutant("deploy/endpoints.py", "[PLAN_TAG] != plan.digest:", "[PLAN_TAG] is None:", ENDPOINTS),
    Mutant("deploy/endpoints.py", "not already or kind not in", "kind in", ENDPOINTS),
    Mutant("deploy/endpoints.py", "[PLAN_TAG] == only_plan}", "}", ENDPOINTS),
    Mutant("deploy/aws.py", 'text.replace(secret, "***")', "text", ENDPOINTS),
    Mutant("deploy/instances.py", "- RESERVE_GB) * gpus", ") * gpus", PLANS),
    Mutant("deploy/container.py", '("" if value else "NO_")', '""', PLANS),
    # What an answer holds beside its content.
    Mutant("data/chat_formats.py", '"string" not in kinds or value is None', "kinds", FORMATS),
    Mutant("data/chat_formats.py", "found.calls or (text and", "(text and", FORMATS),
    Mutant(
        "data/chat_formats.py",
        "opening.start(), after).rstrip()",
        "opening.start(), after)",
        FORMATS,
    ),
    Mutant("data/chat_formats.py", "0 if ended else _overlap(", "0 and _overlap(", FORMATS),
    Mutant("data/chat_formats.py", "ended and block.may_stay_open", "ended", FORMATS),
    Mutant("data/chat_formats.py", 'self.reads_calls or b.kind != "call"', "True", FORMATS),
    Mutant("data/chat_formats.py", "at = len(self._rest) - held", "at = len(self._rest)", FORMATS),
    # How many drafts a step verifies.
    Mutant("engine/rests.py", "if gain < GAIN_TO_WAKE", "if gain < 0", AUTO),
    Mutant("engine/rests.py", "request.has_rested or ", "", AUTO),
    Mutant("engine/scheduler.py", "request.block_keys.clear()", "pass", AUTO),
    Mutant("engine/request.py", "0 if self.rests else", "", AUTO),
    Mutant("engine/scheduler.py", "and budget.rows_are_exact and", "and", AUTO),
    Mutant(
        "speculation/node_budget.py", "outcomes.num_drafts[there],", "outcomes.num_drafts,", BUDGET
    ),
    Mutant("speculation/node_budget.py", "drafting_rows=drafting", "drafting_rows=0.0", BUDGET),
    Mutant("speculation/node_budget.py", "means[:, :drafted] +=", "means[:, :] +=", BUDGET),
    Mutant("speculation/node_budget.py", "min(int((values > 0).sum()),", "min(", BUDGET),
    Mutant("speculation/costs.py", "        self._guess_again()\n\n", "\n", BUDGET),
    Mutant("speculation/budget.py", "steps = batch - fewer", "steps = batch", BUDGET),
    Mutant("speculation/budget.py", "if n * batch <= rows]", "if n <= rows]", BUDGET),
    Mutant(
        "kernels/reference/trees.py",
        "(ranks < num_rows).sum(1)",
        "(ranks <= num_rows).sum(1)",
        GPU_TREES,
    ),
    Mutant(
        "kernels/reference/trees.py",
        "counts.num_drafts, lengths - 1",
        "counts.num_drafts, lengths",
        GPU_TREES,
    ),
    Mutant("kernels/reference/trees.py", "(1, rows[:, 1:]) - len(rows)", "(1, rows[:, 1:])", AUTO),
    Mutant("engine/engine.py", "(chosen.caps, schedule", "(drafts.caps, schedule", AUTO),
    Mutant("engine/engine.py", " and not shape.num_items:", ":", AUTO),
    Mutant("engine/engine.py", "mean is not None and mean < nodes", "mean is not None", AUTO),
    Mutant("engine/engine.py", "if shape.depth and not depth:", "if False:", AUTO),
    Mutant("speculation/budget.py", "< CAPTURE_SECONDS", "< 0", BUDGET),
    Mutant("speculation/budget.py", "key=lambda other: not other", "key=lambda other: 0", BUDGET),
    Mutant("speculation/budget.py", "max(gain, PROBE_SHARE * RAREST_PROBE)", "gain", BUDGET),
    Mutant("speculation/budget.py", "+ prompt_rows > room", "> room", BUDGET),
    Mutant("speculation/budget.py", "hopes=True)\n", "hopes=False)\n", BUDGET),
    Mutant("speculation/costs.py", "y - max(slope, 0.0) * x", "y", BUDGET),
    Mutant("speculation/costs.py", "doubt * float(high - low)", "0.0", BUDGET),
    Mutant("models/p_eagle.py", "0 < num_rows <= MAX_CORRECTED_ROWS", "num_rows", TREES),
    Mutant("engine/scheduler.py", "drafts = self.budget.fitted(drafts, left)", "pass", AUTO),
    Mutant("speculation/budget.py", "np.where(fits, tokens", "np.where(True, tokens", BUDGET),
    Mutant("engine/step.py", "drafting.drafter.feed(batch)", "pass", AUTO),
    Mutant("engine/step.py", "drafting.drafter.feed(batch)", "pass", TOGETHER),
    Mutant(
        "engine/engine.py",
        "own_drafts = self.budget.after_cut(",
        "self.budget.after_cut(",
        TOGETHER,
    ),
    Mutant("engine/runner.py", "state.draft_scores[slots[n], kept]\n", "0.0\n", TOGETHER),
    Mutant(
        "kernels/reference/batch.py",
        "torch.where(num_depths > 0, num_new, 0)",
        "torch.where(num_depths > 0, num_new, 0) * (max_depth > 0)",
        TOGETHER,
    ),
    Mutant(
        "kernels/reference/batch.py",
        "num_drafts = num_depths = num_depths.clamp(max=max_depth)",
        "num_drafts = num_depths",
        ("kernels/reference/test_batch.py",),
    ),
)


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if all(word in str(m) for word in words)]
    wrong = [problem for m in chosen for problem in problems(m)]
    if wrong:
        print(*wrong, "mend the entries of tests/mutants.py", sep="\n", file=sys.stderr)
        return 2
    if not tests_pass_unbroken(chosen):
        print("these tests fail without any mutant: run `make test`", file=sys.stderr)
        return 2
    alive = [mutant for mutant in chosen if lives(mutant)]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants were noticed")
    return 1 if alive else 0


def problems(mutant: Mutant) -> list[str]:
    """Why it cannot be made: the source has moved on."""
    file = ROOT / "src/peagle" / mutant.file
    if not file.is_file():
        return [f"src/peagle/{mutant.file} does not exist"]
    times = file.read_text(encoding="utf-8").count(mutant.old)
    found = [] if times == 1 else [f"src/peagle/{mutant.file} has {times} times {mutant.old!r}"]
    missing = [test for test in mutant.tests if not (ROOT / "tests" / test).is_file()]
    return found + [f"tests/{test} does not exist" for test in missing]


def tests_pass_unbroken(mutants: list[Mutant]) -> bool:
    """Else a mutant would be noticed for nothing."""
    tests = tuple(sorted({test for mutant in mutants for test in mutant.tests}))
    with tempfile.TemporaryDirectory(prefix="peagle-mutant-") as name:
        copy_tree(Path(name))
        return tests_pass(Path(name), tests)


def lives(mutant: Mutant) -> bool:
    with tempfile.TemporaryDirectory(prefix="peagle-mutant-") as name:
        copy = Path(name)
        copy_tree(copy)
        file = copy / "src/peagle" / mutant.file
        source = file.read_text(encoding="utf-8")
        file.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        passed = tests_pass(copy, mutant.tests)
    print("ALIVE  " if passed else "noticed", mutant, flush=True)
    return passed


def copy_tree(copy: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)


def tests_pass(copy: Path, tests: tuple[str, ...]) -> bool:
    files = [str(copy / "tests" / test) for test in tests]
    # Ahead of the installed package, which is the tree that is not broken.
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=MAX_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):  # 1: a test failed; else pytest itself did not get so far
        raise RuntimeError(done.stdout.decode() + done.stderr.decode())
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
