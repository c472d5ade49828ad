"""`peagle simulate`: predicted OTPS for a target and a GPU that one does not have."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from peagle.bench.results.document import RESULTS, from_json, load_results
from peagle.bench.results.figures import NOTHING, length, quantity, times
from peagle.bench.results.settings import full_name, short_name
from peagle.bench.simulate.acceptance import Profile, read_profiles
from peagle.bench.simulate.predict import (
    Prediction,
    PredictionErrors,
    best_by_concurrency,
    predict_grid,
    validate,
)
from peagle.bench.simulate.roofline import (
    DTYPE_BYTES,
    DecoderShape,
    Gpu,
    RooflineCosts,
    decoder_shape,
    drafter_shape,
    find_gpu,
)
from peagle.bench.simulate.step_costs import (
    MeasuredCosts,
    StepCosts,
    measured_costs,
    measured_table,
)
from peagle.cli import render
from peagle.cli.flags import Json, expand_flags
from peagle.cli.flags.simulate import CostFlags
from peagle.errors import ConfigError, DataError


@expand_flags
def simulate_command(
    flags: CostFlags,
    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="RATES|FILE",
            help="0.73,0.51,0.35 per position; or bench results, or peagle evaluate --json.",
        ),
    ] = None,
    method: Annotated[str, typer.Option(help="With a list of rates: which methods.")] = "p-eagle",
    spec_tokens: Annotated[
        str | None, typer.Option(help="K, or several separated by commas; default: all known.")
    ] = None,
    spec_nodes: Annotated[
        str | None,
        typer.Option(help="Nodes N of trees, or several; default: all known, if any are."),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Concurrent requests; default: those of --costs, else 1,4,16,64."),
    ] = None,
    context: Annotated[int, typer.Option(help="Context length of each request, in tokens.")] = 1024,
    check: Annotated[
        Path | None,
        typer.Option("--validate", help="Predict the cells of bench results, and show the error."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict OTPS by concurrency, K and N, the best of them, and the break-even length."""
    file = sys.stderr if as_json else sys.stdout
    if context < 1:
        raise ConfigError(f"--context {context} is out of range", hint="use >= 1")
    if check is not None:
        document = _validated(check, file)
    else:
        profiles = _profiles(acceptance, method)
        loads = _ints(concurrency) if concurrency is not None else usual_concurrencies(flags)
        costs, notes = step_costs(flags, list(profiles), loads, context)
        predictions = predict_grid(
            costs, profiles,
            ks=_depths(spec_tokens, profiles, flags), nodes=_nodes(spec_nodes, profiles, flags),
            concurrencies=loads, context=context,
        )  # fmt: skip
        _print(predictions, notes, file)
        document = {"notes": notes, "context": context, **_document(predictions)}
    if as_json:
        render.print_json(document)


def _profiles(acceptance: str | None, method: str) -> dict[str, Profile]:
    if acceptance is None:
        raise ConfigError(
            "the acceptance is not known", hint="give --acceptance 0.73,0.51,0.35 or a file"
        )
    return read_profiles(acceptance, method.split(","))


def _depths(spec_tokens: str | None, profiles: dict[str, Profile], flags: CostFlags) -> list[int]:
    """The K that were asked for, or all that every profile knows and that have step times."""
    if spec_tokens is not None:
        return _ints(spec_tokens)
    lengths = [profile.lengths for profile in profiles.values() if profile.lengths]
    if not lengths:
        return []
    first, last = max(map(min, lengths)), min(map(max, lengths))
    known = measured_sizes(flags, trees=False)
    return [k for k in known or range(first, last + 1) if first <= k <= last] or [last]


def _nodes(spec_nodes: str | None, profiles: dict[str, Profile], flags: CostFlags) -> list[int]:
    """The same of trees; none where no profile has any."""
    if spec_nodes is not None:
        return _ints(spec_nodes)
    from peagle.speculation.budget import TREE_NUMBERS

    trees = [line for profile in profiles.values() for line in profile.trees.values()]
    if not trees:
        return []
    last = min(map(max, trees))
    known = measured_sizes(flags, trees=True)
    return [n for n in known or TREE_NUMBERS if n <= last] or [last]


def _ints(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{text!r} is not a list of whole numbers from 1", hint="write 1,3,5")
    return numbers


def _print(predictions: list[Prediction], notes: list[str], file: IO[str]) -> None:
    for note in notes:
        file.write(f"{note}\n")
    columns = (
        *("method, concurrency", "K", "N", "tokens/s", "none", "gain"),
        *("tokens per step", "break-even"),
    )
    rows = [
        [
            f"{p.method}{' auto' if p.is_auto else ''}, {p.concurrency}",
            str(p.num_speculative_tokens),
            NOTHING if p.num_draft_nodes is None else str(p.num_draft_nodes),
            quantity(p.otps),
            quantity(p.plain_otps),
            times(p.gain),
            length(p.acceptance_length),
            length(p.break_even_length),
        ]
        for p in predictions
    ]
    title = "predicted output tokens per second"
    render.print_table(title, columns, rows, names=3, file=file)
    for concurrency, best in best_by_concurrency(predictions).items():
        words = short_name(best.setting, {}) if best else "no speculation"
        gain = f", {times(best.gain)}" if best else ""
        file.write(f"best at concurrency {concurrency}: {words}{gain}\n")


def _document(predictions: list[Prediction]) -> dict[str, Any]:
    best = best_by_concurrency(predictions)
    return {
        "predictions": [asdict(p) | {"gain": p.gain} for p in predictions],
        "best": {str(n): asdict(p) | {"gain": p.gain} if p else None for n, p in best.items()},
    }


def _validated(path: Path, file: IO[str]) -> dict[str, Any]:
    validation = validate(load_results(path))
    columns = ("workload, concurrency", "setting", "measured tokens/s", "own", "left out")
    rows = [
        [
            f"{c.workload}, {c.concurrency}",
            full_name(c.setting),
            quantity(c.measured_otps),
            f"{c.own / c.measured_otps - 1:+.1%}",
            "-" if c.left_out is None else f"{c.left_out / c.measured_otps - 1:+.1%}",
        ]
        for c in validation.cells
    ]
    render.print_table("prediction against measurement", columns, rows, names=2, file=file)
    file.write(f"own step times and acceptance: {_error(validation.own)}\n")
    if validation.left_out:
        file.write(f"from neighbours alone: {_error(validation.left_out)}\n")
    else:
        file.write("from neighbours alone: not known, it takes three K or three concurrencies\n")
    return asdict(validation)


def _error(errors: PredictionErrors) -> str:
    return f"median error {errors.median:.1%}, worst {errors.worst:.1%}, {errors.num_cells} cells"


def step_costs(
    flags: CostFlags, methods: list[str], concurrencies: list[int], context: int
) -> tuple[StepCosts, list[str]]:
    """The costs that the flags ask for, and what a reader must know of them."""
    if flags.costs is not None:
        return _measured(flags.costs), [f"step times: measured, {flags.costs}"]
    if flags.model is None or flags.gpu is None:
        raise ConfigError("step costs are not known", hint="give --model and --gpu, or --costs")
    gpu, target = find_gpu(flags.gpu, flags.dtype), _shape(flags.model)
    drafters = {
        m: drafter_shape(m, target, num_layers=flags.draft_layers, vocab=flags.draft_vocab)
        for m in methods
    }
    costs = RooflineCosts(gpu, target, drafters, DTYPE_BYTES[flags.dtype], flags.assumptions())
    return costs, _cost_notes(costs, gpu, flags, concurrencies, context)


def usual_concurrencies(flags: CostFlags) -> list[int]:
    """What to predict where the user does not say: what was measured, if anything was."""
    if flags.costs is None:
        return [1, 4, 16, 64]
    return sorted({step.concurrency for step in _measured(flags.costs).steps})


def measured_sizes(flags: CostFlags, *, trees: bool) -> list[int] | None:
    """The K of chains, or the N of trees, that were measured; None where step times are computed,
    for any."""
    if flags.costs is None:
        return None
    steps = [step for step in _measured(flags.costs).steps if step.k]
    return sorted({step.num_drafts for step in steps if (step.nodes is not None) == trees})


def _cost_notes(
    costs: RooflineCosts, gpu: Gpu, flags: CostFlags, concurrencies: list[int], context: int
) -> list[str]:
    a = costs.assumed
    notes = [
        f"step times: computed, not measured, for {gpu.name}, {flags.dtype}",
        f"assumed: {a.bandwidth_share:.0%} of peak bandwidth for weights, {a.cache_share:.0%} for "
        f"keys and values, {a.flops_share:.0%} of peak FLOPS, {a.kernel_overhead * 1e6:g} us "
        f"more per kernel, {a.step_overhead * 1e6:g} us more per step",
    ]
    full = [n for n in concurrencies if not costs.fits(n, context)]
    if full:
        sizes = ", ".join(map(str, full))
        notes.append(f"does not fit the GPU's memory at context {context}: concurrency {sizes}")
    return notes


def _shape(model: str) -> DecoderShape:
    path = Path(model)
    if path.suffix != ".json":
        from peagle.checkpoints.builtin import BUILTIN_MODELS, ensure_builtin

        folder = ensure_builtin(model) if model in BUILTIN_MODELS else path
        path = folder / "config.json"
    return decoder_shape(_read_object(path, "give a model folder or a config.json"), str(path))


def _measured(path: Path) -> MeasuredCosts:
    file = path / RESULTS if path.is_dir() else path
    document = _read_object(file, "give step times or an --out of peagle bench")
    if "manifest" in document:
        return measured_table(from_json(document, str(file)))
    return measured_costs(document, str(file))


def _read_object(path: Path, hint: str) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {path}: {reason}", hint=hint) from None
    if not isinstance(document, dict):
        raise DataError(f"{path} is not a JSON object", hint=hint)
    return document
