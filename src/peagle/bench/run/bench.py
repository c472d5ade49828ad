"""`bench(plan)`: from a plan to results, with everything checked that can be before it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from peagle.bench.results.document import Manifest, Results
from peagle.bench.results.figures import counted
from peagle.bench.results.store import Store
from peagle.bench.run.grid import (
    HeadLimits,
    grid_settings,
    head_info,
    head_limits,
    make_cells,
)
from peagle.bench.run.plan import EMBEDDED, ENGINE_KEYS, VLLM_KEYS, BenchPlan
from peagle.bench.run.runner import GridProgress, GridRunner
from peagle.bench.run.sessions import Build, EndpointSession, EngineSession, Session, engine_config
from peagle.bench.workloads.prompter import Prompter, without_misfits
from peagle.bench.workloads.sources import load_workload
from peagle.bench.workloads.workload import Workload
from peagle.checkpoints.references import load_config, load_tokenizer, resolve_model
from peagle.errors import ConfigError
from peagle.files import check_folder
from peagle.provenance import provenance

Note = Callable[[str], None]
MOST_NAMED = 5  # skipped rows of a workload


def bench(plan: BenchPlan, build: Build, progress: GridProgress, note: Note) -> Results:
    """Runs or continues a grid in `plan.out`."""
    # 1. Everything that can be refused without an engine is refused before one is loaded.
    check_folder(plan.path)
    served = _served(plan, note) if plan.is_endpoint else None
    dtype, device = _place(plan)
    heads = [] if served else head_limits(plan.spec_model, plan.model)
    settings, remarks = grid_settings(plan, heads)
    for remark in remarks:
        note(remark)
    workloads = [load_workload(w, limit=plan.num_prompts, raw=plan.raw) for w in plan.workload]
    _refuse_same_names(workloads)

    # 2. Prompts that the model cannot take are set aside; the hash is over the others.
    prompter = None if served else _prompter(plan)
    if prompter is not None:
        limit = _max_model_len(plan)
        workloads = [without_misfits(w, prompter, limit) for w in workloads]
    _report(workloads, plan, note)
    _tell_of_repeats(workloads, plan, note)

    # 3. The grid. Engines start with their first cell.
    session: Session | None = served
    if prompter is not None:
        own = device if plan.backend == EMBEDDED else None
        session = EngineSession(plan, settings, build, prompter, own)
    assert session is not None
    store = Store(plan.path)
    named = {workload.name: workload for workload in workloads}
    cells = make_cells(plan, settings, list(named))
    with closing(session), store.opened(overwrite=plan.overwrite):
        manifest = store.agree(_manifest(plan, heads, workloads, dtype, device))
        return GridRunner(plan, manifest, store, session, named, cells, progress).run()


def _refuse_same_names(workloads: Sequence[Workload]) -> None:
    names = [workload.name for workload in workloads]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two workloads are named {twice}", hint="write NAME=FILE")


def _served(plan: BenchPlan, note: Note) -> EndpointSession:
    """Asks the server for its models."""
    served = EndpointSession(plan)
    if served.endpoint.model not in ("", plan.model):  # "": it is not said
        note(f"warning: {plan.backend} serves {served.endpoint.model}, not {plan.model}")
    return served


def _prompter(plan: BenchPlan) -> Prompter:
    return Prompter(load_tokenizer(resolve_model(plan.model)), raw=plan.raw, seed=plan.seed)


def _max_model_len(plan: BenchPlan) -> int:
    config = load_config(resolve_model(plan.model)).get_text_config()
    return plan.max_model_len or int(config.max_position_embeddings)


def _place(plan: BenchPlan) -> tuple[str, str]:
    """Data type and device, as they are rather than as they were asked for."""
    if plan.backend != EMBEDDED:
        return plan.dtype, "unknown"
    from peagle.engine.loading import choose_device, choose_dtype

    config = engine_config(plan)
    device = choose_device(config)
    return str(choose_dtype(config, device)).removeprefix("torch."), str(device)


def _report(workloads: Sequence[Workload], plan: BenchPlan, note: Note) -> None:
    for workload in workloads:
        for bad in workload.bad[:MOST_NAMED]:
            note(f"{workload.name}: skipped {bad.where}: {bad.error}")
        more = len(workload.bad) - MOST_NAMED
        if more > 0:
            note(f"{workload.name}: skipped {more} more, {len(workload.tasks)} prompts are left")
    if plan.raw:
        note("warning: raw prompts, no chat template: a chat model answers unlike in use")


def _tell_of_repeats(workloads: Sequence[Workload], plan: BenchPlan, note: Note) -> None:
    streams = max(plan.concurrencies, default=0)
    for workload in workloads:
        if len(workload.tasks) < streams * workload.num_tasks_of(plan.answers_per_stream):
            prompts = counted(len(workload.tasks), "prompt")
            answers = counted(plan.answers_per_stream, "answer")
            note(
                f"{workload.name} has {prompts}, repeated until each of "
                f"{counted(streams, 'stream')} has produced {answers}"
            )


def _manifest(
    plan: BenchPlan,
    heads: Sequence[HeadLimits],
    workloads: Sequence[Workload],
    dtype: str,
    device: str,
) -> Manifest:
    return Manifest(
        provenance=provenance(probe_torch=plan.backend == EMBEDDED),
        model=plan.model,
        backend=plan.backend,
        dtype=dtype,
        device=device,
        seed=plan.seed,
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
        num_repeats=plan.repeats,
        heads=[head_info(head) for head in heads],
        workloads=[workload.info() for workload in workloads],
        settings=_other_settings(plan),
    )


def _other_settings(plan: BenchPlan) -> dict[str, Any]:
    """The rest of what a number depends on."""
    fields = ("dtype", "device")  # stand in the manifest as they are, not as they were asked for
    keys = [name for name in (*ENGINE_KEYS, *VLLM_KEYS) if name not in fields]
    names = (
        *("raw", "ignore_eos", "interleave", "warmup", "answers_per_stream", "min_answers"),
        *keys,
    )
    given = {name: getattr(plan, name) for name in names}
    return {"confidence": "95 %, Student's t", **given}
