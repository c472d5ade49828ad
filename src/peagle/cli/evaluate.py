"""`peagle evaluate`: acceptance of a head for every K, from text alone; no server."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    from peagle.evaluate.evaluator import Evaluation
    from peagle.sampling_params import SamplingParams


@expand_flags
def evaluate(
    answers: AnswerFlags,
    engine: EngineFlags,
    head: Annotated[str, typer.Argument(metavar="HEAD", help="A folder or a shipped head.")],
    model: Annotated[
        str | None, typer.Option(help="The target; default: the one the head names.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A folder of peagle prepare.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Or prompts, which the target answers first.")
    ] = None,
    held_out_share: Annotated[
        float | None,
        typer.Option(
            help="Only rows that training with this data.held_out_share left out.", min=0, max=1
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
            help="Also as trees of 1 to N drafts, K of them behind each other at most.",
            min=1,
            max=MAX_DRAFT_NODES,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens in an answer.")] = MAX_TOKENS,
    as_json: Json = False,
) -> None:
    """Measure a head offline: acceptance length for K = 1, 2, ... in one pass."""
    if (data is None) == (prompts is None):
        raise ConfigError(
            "give either --data or --prompts", hint="--data DATASET or --prompts FILE"
        )
    from peagle.data.dataset import Dataset
    from peagle.data.prompts import read_prompts
    from peagle.evaluate.offline import (
        evaluate_pair,
        evaluate_pair_trees,
        load_pair,
        own_answers,
    )

    found = read_prompts(prompts, split=split, limit=limit) if prompts else None
    dataset = Dataset(data) if data else None
    pair = load_pair(head, model, engine.config())
    k = pair.check_depth(spec_tokens)
    if spec_nodes is not None:
        pair.check_nodes(spec_nodes, k)
    with tempfile.TemporaryDirectory(prefix="peagle-evaluate-") as folder:
        if found is not None:
            render.note(f"{len(found.good)} prompts are answered")
            spec = answers.spec(pair.network.config.target_model, max_tokens)
            dataset, counts = own_answers(pair, found, spec, Path(folder))
            if counts.failed:
                render.note(f"{counts.failed} prompts failed and are left out")
        assert dataset is not None
        params = _sampling_params(answers, dataset)
        rows = _rows(dataset, held_out_share, limit if data else None)
        results = evaluate_pair(pair, dataset, rows, k, params)
        trees = None
        if spec_nodes is not None:
            if not params.greedy:
                raise ConfigError(
                    "trees are evaluated on greedy answers",
                    hint="drop --spec-nodes or --temperature",
                )
            trees = evaluate_pair_trees(pair, dataset, rows, k, spec_nodes)
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
    _print_tables(results, out)
    if trees is not None:
        document["trees"] = trees.as_dict()
        _print_trees(trees, k, out)
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


def _rows(dataset: Dataset, held_out_share: float | None, limit: int | None) -> list[int]:
    rows = list(range(len(dataset)))
    if held_out_share is not None:
        rows = dataset.split(held_out_share)[1]
    if not rows:
        raise DataError(f"no row of {dataset.folder} is held out", hint="raise --held-out-share")
    return rows[:limit]


def _print_trees(result: Evaluation, depth: int, file: Any) -> None:
    sizes = [n for n in (1, 3, 7, 15, 31, 63) if n < result.max_tokens] + [result.max_tokens]
    lengths = [
        [
            f"{name} ({result.num_documents[name]})",
            *(f"{result.acceptance_length(n, name):.2f}" for n in sizes),
        ]
        for name in result.groups
        if result.num_documents[name]
    ]
    titles = ("rows", *(f"N={n}" for n in sizes))
    render.print_table(
        f"mean acceptance length, trees of depth {depth}", titles, lengths, file=file
    )


def _print_tables(results: dict[str, Evaluation], file: Any) -> None:
    for way, result in results.items():
        k = result.max_tokens
        columns = ("rows", *(f"K={n}" for n in range(1, k + 1)))
        lengths = [
            [
                f"{name} ({result.num_documents[name]})",
                *(f"{s.mean_acceptance_length:.2f}" for s in group),
            ]
            for name, group in result.groups.items()
            if result.num_documents[name]
        ]
        render.print_table(f"mean acceptance length, {way}", columns, lengths, file=file)
        everything = result.groups["all"][-1]
        rates = {
            "accepted": everything.per_position_acceptance,
            "accepted, if all before it were": everything.conditional_acceptance,
        }
        rows = [[name, *(f"{x:.2f}" for x in values)] for name, values in rates.items()]
        titles = ("draft", *(str(n) for n in range(1, len(rows[0]))))
        render.print_table(f"per position at K={k}, {way}", titles, rows, file=file)
