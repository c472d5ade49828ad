"""A head, its target and text of the target: everything that an offline evaluation needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from peagle.checkpoints.heads.config import read_head_config
from peagle.checkpoints.heads.loading import load_head
from peagle.checkpoints.heads.references import resolve_head
from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.checkpoints.targets import eos_token_ids
from peagle.config import MAX_DRAFT_NODES, MAX_SPECULATIVE_TOKENS, EngineConfig
from peagle.data.dataset import Dataset, DatasetWriter, check_tokens
from peagle.data.prompts import Prompts
from peagle.engine.engine import Engine
from peagle.engine.loading import choose_device, load_engine_target
from peagle.errors import ConfigError, DataError
from peagle.evaluate.evaluator import Evaluation, Evaluator
from peagle.evaluate.recall import GreedyEvaluation, evaluate_greedy
from peagle.evaluate.sampled import SampledAcceptance, evaluate_sampled
from peagle.evaluate.trees import TreeEvaluation, evaluate_trees
from peagle.models.binding import bind_kernels
from peagle.models.eagle import EagleNetwork
from peagle.models.layers import matrix_of
from peagle.models.target import TargetModel
from peagle.prepare.answers import EmbeddedAnswers
from peagle.prepare.dataset_spec import DatasetSpec
from peagle.prepare.preparation import ALL_ROWS, Preparation, PreparationCounts
from peagle.sampling_params import SamplingParams
from peagle.speculation.trees import BEAM, max_tree_depth, num_candidates
from peagle.teacher_forcing.draft_model import DraftModel, autocast
from peagle.teacher_forcing.features import OnlineFeatures
from peagle.teacher_forcing.partition import UNPADDED, Shapes


@dataclass(frozen=True)
class Pair:
    """A target and a head that fits it, on one device."""

    folder: Path
    target: TargetModel
    network: EagleNetwork
    config: EngineConfig

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len or self.target.config.max_position_embeddings

    def check_drafts(self, num_speculative_tokens: int | None, num_draft_nodes: int | None) -> int:
        """The K up to which the head can be evaluated, by chains and by trees of so many nodes."""
        head = self.network.config
        most = MAX_SPECULATIVE_TOKENS if head.method == "eagle3" else head.max_speculative_tokens
        what = "tokens"
        if num_draft_nodes is not None:
            most, what = max_tree_depth(head.method, most), "tokens behind each other in a tree"
        depth = num_speculative_tokens or min(head.max_speculative_tokens, most)
        if not 1 <= depth <= most:
            raise ConfigError(f"this head cannot draft {depth} {what}", hint=f"use 1 to {most}")
        most_nodes = min(MAX_DRAFT_NODES, num_candidates(depth, BEAM))
        if num_draft_nodes is not None and not 1 <= num_draft_nodes <= most_nodes:
            raise ConfigError(
                f"a tree of depth {depth} cannot have {num_draft_nodes} nodes",
                hint=f"use 1 to {most_nodes}",
            )
        return depth


def load_pair(head: str, model: str | None, config: EngineConfig) -> Pair:
    """`model` None: the target that the head names."""
    choose_device(config)  # a device that is not there is said before a model is fetched
    named = read_head_config(resolve_head(head)).target_model
    folder = resolve_model(model or named)
    target = load_engine_target(folder, config).requires_grad_(False)
    weight = target.embed_tokens.weight
    network = load_head(head, target, dtype=weight.dtype, device=weight.device)
    network.requires_grad_(False)
    bind_kernels(network)
    return Pair(folder, target, network, config)


def own_answers(
    pair: Pair, prompts: Prompts, spec: DatasetSpec, folder: Path
) -> tuple[Dataset, PreparationCounts]:
    """The target's answers, written into `folder`."""
    tokenizer: Any = load_tokenizer(pair.folder)
    writer = DatasetWriter(folder, spec.record(tokenizer), rows_per_shard=ALL_ROWS)
    engine = Engine(pair.target, pair.config, eos_token_ids=eos_token_ids(pair.folder))
    source = EmbeddedAnswers(engine, spec.params)
    preparation = Preparation(writer, source, spec.dialogue_options(tokenizer))
    counts = preparation(prompts.good, prompts.bad)
    if not counts.answered:
        errors = (folder / "errors.jsonl").read_text().splitlines()
        raise DataError(f"no prompt was answered: {errors[0] if errors else 'all were too long'}")
    return Dataset(folder), counts


class PairEvaluation(NamedTuple):
    acceptance: Mapping[str, Evaluation]  # `greedy`, or `coupled` and `rejection` if sampled
    chains: GreedyEvaluation | None  # the first in more detail; None if sampled
    trees: TreeEvaluation | None


def evaluate_pair(
    pair: Pair,
    dataset: Dataset,
    indices: list[int],
    max_tokens: int,
    params: SamplingParams,
    num_nodes: int | None = None,
) -> PairEvaluation:
    """Acceptance for K = 1 .. max_tokens, and on greedy text for trees of 1 .. num_nodes drafts,
    max_tokens of them behind each other."""
    check_tokens(dataset, indices, pair.target.config.vocab_size)
    evaluator = build_evaluator(pair, dataset, indices, max_tokens)
    model = DraftModel(pair.network)
    if not params.greedy:
        if num_nodes is not None:
            raise ConfigError(
                "trees are evaluated on greedy answers", hint="drop --spec-nodes or --temperature"
            )
        adjusted = pair.target.adjusted if pair.target.changes_logits else None
        rule = SampledAcceptance(matrix_of(pair.target.lm_head), params, adjusted)
        return PairEvaluation(evaluate_sampled(evaluator, model, rule), None, None)
    chains = evaluate_greedy(evaluator, model)
    trees = None if num_nodes is None else evaluate_trees(evaluator, model, num_nodes)
    return PairEvaluation({"greedy": chains.acceptance}, chains, trees)


def build_evaluator(pair: Pair, dataset: Dataset, indices: list[int], max_tokens: int) -> Evaluator:
    """On GPU all passes have one padded shape, for attention is compiled for each."""
    device = pair.target.embed_tokens.weight.device
    on_gpu = device.type == "cuda"
    longest = int(dataset.lengths[indices].max())
    tokens_per_row = max(longest, 8192 if on_gpu else 1024)
    max_rows = 2 * tokens_per_row if on_gpu else tokens_per_row + 2048
    return Evaluator(
        dataset,
        indices,
        OnlineFeatures(pair.target, pair.network.config.aux_hidden_state_layer_ids),
        max_tokens,
        tokens_per_row=tokens_per_row,
        max_rows=max_rows,
        shapes=Shapes(row_multiple=max_rows) if on_gpu else UNPADDED,
        chunk_rows=1024 if on_gpu else 256,
        max_model_len=pair.max_model_len,
        autocast=autocast(device, None),
    )
