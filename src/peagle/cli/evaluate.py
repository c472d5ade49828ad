"""`peagle evaluate`: acceptance of a head for every K, from text alone; no server."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from peagle.cli import render
from peagle.cli.flags import Json, expand_flags
from peagle.cli.flags.answers import AnswerFlags, Limit, Split
from peagle.cli.flags.engine import EngineFlags
from peagle.cli.flags.sampling import MAX_TOKENS
from peagle.config import MAX_DRAFT_NODES
from peagle.errors import ConfigError, DataError

if TYPE_CHECKING:
    from peagle.data.dataset import Dataset
    from peagle.evaluate.contexts import ContextAcceptance
    from peagle.evaluate.evaluator import Evaluation
    from peagle.evaluate.recall import GreedyEvaluation
    from peagle.sampling_params import SamplingParams

T = TypeVar("T")


@expand_flags
def evaluate(
    answers: AnswerFlags,
    engine: EngineFlags,
    head: Annotated[str, typer.Argument(metavar="HEAD", help="A folder or a shipped head.")],
    model: Annotated[
        str | None, typer.Option(help="The target; default: the one the head names.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A dataset of peagle prepare.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Instead of --data: prompts, which the target answers first.")
    ] = None,
    held_out_share: Annotated[
        float | None,
        typer.Option(
            help="Use only rows that training held out, by this data.held_out_share.",
            min=0,
            max=1,
        ),
    ] = None,
    split: Split = "train",
    limit: Limit = None,
    spec_tokens: Annotated[
        int | None,
        typer.Option(help="The largest K; default: what the head was trained for.", min=1),
    ] = None,
    spec_nodes: Annotated[
        int | None,
        typer.Option(
            help="Also evaluate trees of 1 to N drafts, at most K levels deep.",
            min=1,
            max=MAX_DRAFT_NODES,
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Maximum length of an answer, in tokens.")
    ] = MAX_TOKENS,
    as_json: Json = False,
) -> None:
    """Measure a head offline: acceptance length for K = 1, 2, ... in one pass."""
    if (data is None) == (prompts is None):
        raise ConfigError(
            "give either --data or --prompts", hint="--data DATASET or --prompts FILE"
        )
    from peagle.data.dataset import Dataset, is_held_out
    from peagle.data.prompts import read_prompts
    from peagle.evaluate.offline import (
        evaluate_pair,
        load_pair,
        own_answers,
    )

    found = None
    if prompts is not None:
        # Only those that count are answered.
        found = read_prompts(prompts, split=split, limit=None if held_out_share else limit)
        if held_out_share is not None:
            held_out = [p for p in found.good if is_held_out(p.id, held_out_share)]
            found = found._replace(good=_not_empty(held_out, "prompt", prompts)[:limit])
    dataset = Dataset(data) if data else None
    pair = load_pair(head, model, engine.config())
    k = pair.check_drafts(spec_tokens, spec_nodes)
    with tempfile.TemporaryDirectory(prefix="peagle-evaluate-") as folder:
        if found is not None:
            render.note(f"answering {len(found.good)} prompts first")
            spec = answers.spec(pair.network.config.target_model, max_tokens)
            dataset, counts = own_answers(pair, found, spec, Path(folder))
            if counts.failed:
                render.note(f"{counts.failed} prompts failed and are left out")
        assert dataset is not None
        params = _sampling_params(answers, dataset)
        rows = list(range(len(dataset)))
        if data is not None and held_out_share is not None:
            rows = _not_empty(dataset.split(held_out_share)[1], "row", str(data))
        rows = rows[: limit if data else None]
        results, chains, trees = evaluate_pair(pair, dataset, rows, k, params, spec_nodes)
    document = {
        "head": head,
        "method": pair.network.config.method,
        "model": str(pair.folder),
        "temperature": params.temperature,
        "num_speculative_tokens": k,
        "rows": len(rows),
        "acceptance": {way: result.as_dict() for way, result in results.items()},
    }
    if pair.network.correction is not None and not params.greedy:
        render.note("sampled drafts are evaluated without the head's correction")
    out = sys.stderr if as_json else sys.stdout
    for way, result in results.items():
        _print_acceptance(way, result, chains, out)
    if chains is not None:
        document["recall"] = {name: recall.as_dict() for name, recall in chains.recall.items()}
        document["oracle"] = chains.oracle.as_dict()
        document["by_context"] = chains.by_context.as_dict()
    if trees is not None:
        document["trees"] = trees.acceptance.as_dict()
        document["trees_by_context"] = trees.by_context.as_dict()
        _print_trees(trees.acceptance, k, out)
    if chains is not None:
        _print_contexts(f"chains of {k}", chains.by_context, out)
    if trees is not None:
        _print_contexts(f"trees of {spec_nodes}", trees.by_context, out)
    if as_json:
        from peagle.provenance import provenance

        render.print_json({**document, "provenance": provenance(probe_torch=True)})


def _sampling_params(answers: AnswerFlags, dataset: Dataset) -> SamplingParams:
    """How drafts are verified: as the text was sampled, unless the user says otherwise."""
    from peagle.prepare.dataset_spec import recorded_params

    recorded = recorded_params(dataset.manifest["made_by"])
    if answers.temperature is None or answers.temperature == recorded.temperature:
        return recorded
    render.note(
        f"the text was sampled at temperature {recorded.temperature}, "
        f"drafts are verified at {answers.temperature}: no engine would report these figures"
    )
    return answers.params(recorded.max_tokens or MAX_TOKENS)


def _not_empty(held_out: list[T], what: str, place: str) -> list[T]:
    if not held_out:
        raise DataError(f"no {what} of {place} is held out", hint="raise --held-out-share")
    return held_out


def _print_acceptance(
    way: str, result: Evaluation, chains: GreedyEvaluation | None, file: Any
) -> None:
    """Lengths by K, with the oracle's; and each position by itself."""
    sizes = _shown(result.max_tokens, (1, 2, 3, 5, 7, 11, 15, 23, 31))
    rows = _length_rows(result, sizes)
    if chains is not None:
        lengths = (f"{chains.oracle.acceptance_length(k):.2f}" for k in sizes)
        rows.append(["oracle of the best 16", *lengths])
    columns = ("rows", *(f"K={k}" for k in sizes))
    render.print_table(f"mean acceptance length, {way}", columns, rows, file=file)
    recall = {} if chains is None else chains.recall["all"].shares()
    shares = {f"best {best}": values for best, values in recall.items()}
    _print_positions(f"per position at K={result.max_tokens}, {way}", result, shares, file)


def _print_trees(result: Evaluation, depth: int, file: Any) -> None:
    sizes = _shown(result.max_tokens, (1, 3, 7, 15, 31))
    title = f"mean acceptance length, trees of depth {depth}"
    columns = ("rows", *(f"N={n}" for n in sizes))
    render.print_table(title, columns, _length_rows(result, sizes), file=file)
    _print_positions(f"per depth at N={result.max_tokens}", result, {}, file)


def _print_positions(
    title: str, result: Evaluation, more: Mapping[str, Sequence[float]], file: Any
) -> None:
    """Of the most drafts, over all rows: one line for each draft."""
    everything = result.groups["all"][-1]
    accepted = everything.per_position_acceptance
    before = [1.0, *accepted]
    given = [
        f"{share:.3f}" if reached else "-"  # nobody came so far
        for share, reached in zip(everything.conditional_acceptance, before, strict=False)
    ]
    columns = {"accepted": accepted, **more}
    shares = {name: [f"{share:.3f}" for share in values] for name, values in columns.items()}
    shares = {"accepted": shares.pop("accepted"), "given before": given, **shares}
    # Of answers shorter than the drafts, nothing is known of the last ones.
    by_draft = zip_longest(*shares.values(), fillvalue="-")
    rows = [[str(draft), *row] for draft, row in enumerate(by_draft, start=1)]
    render.print_table(title, ("draft", *shares), rows, file=file)


def _print_contexts(drafts: str, found: ContextAcceptance, file: Any) -> None:
    groups = ("all", "not_looping")
    lengths = {group: found.as_dict().get(group, {}) for group in groups}
    rows = [
        [
            name,
            f"{lengths['all'][name]['steps']:,}",
            *(_length(lengths[group].get(name), "acceptance_length") for group in groups),
            *(_length(lengths[group].get(name), "acceptance_length_per_token") for group in groups),
        ]
        for name in lengths["all"]
    ]
    columns = ("context", "steps", "length", "without loops", "per token", "... without loops")
    title = f"mean acceptance length by context, {drafts}"
    render.print_table(title, columns, rows, file=file)


def _length(figures: Mapping[str, float] | None, key: str) -> str:
    return "-" if figures is None else f"{figures[key]:.2f}"


def _length_rows(result: Evaluation, sizes: Sequence[int]) -> list[list[str]]:
    return [
        [
            f"{name} ({result.num_documents[name]})",
            *(f"{result.acceptance_length(size, name):.2f}" for size in sizes),
        ]
        for name in result.groups
        if result.num_documents[name]
    ]


def _shown(most: int, sizes: Sequence[int]) -> list[int]:
    """Few enough for a terminal of 80 columns."""
    return [size for size in sizes if size < most] + [most]
