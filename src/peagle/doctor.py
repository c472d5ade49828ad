"""What in a dataset or a head silently costs acceptance, compared with the target they are for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from peagle.backends.vllm.released import released_with_head
from peagle.checkpoints.heads.config import read_head_config
from peagle.checkpoints.heads.references import resolve_head, resolve_head_config
from peagle.checkpoints.references import (
    load_config,
    load_tokenizer,
    resolve_config,
    resolve_model,
    same_target,
)
from peagle.config import EngineConfig
from peagle.data.dataset import Dataset
from peagle.data.fingerprints import template_fingerprint, tokenizer_fingerprint
from peagle.data.packing import lay_out
from peagle.data.summary import share, spread, supervised_per_row
from peagle.engine.memory import ModelMemory, head_memory, target_memory
from peagle.engine.prompts import PromptReader
from peagle.errors import ModelError, PeagleError, RequestError
from peagle.evaluate.offline import Pair, evaluate_pair, load_pair
from peagle.models.adapter import adapted_config
from peagle.models.config import DecoderConfig
from peagle.models.head_config import HeadConfig
from peagle.models.target import default_aux_hidden_state_layers
from peagle.prepare.dataset_spec import recorded_params
from peagle.teacher_forcing.partition import supervised_runs
from peagle.train.cod import retentions
from peagle.train.recipe import CodSection, HeadSection

SAMPLE = 512  # rows that are read in full
Rows = list[tuple[Tensor, Tensor]]  # token ids and mask of each
EVALUATED_TOKENS = 8192
EVALUATED_DEPTH = 4
Level = Literal["error", "warning", "ok"]


class Finding(NamedTuple):
    level: Level
    check: str
    message: str
    hint: str | None = None


def graded(
    check: str, message: str, *, warning: bool, error: bool = False, hint: str | None = None
) -> Finding:
    """The worst level that holds; the hint is for those who need one."""
    if error:
        return Finding("error", check, message, hint)
    return Finding("warning", check, message, hint) if warning else Finding("ok", check, message)


def guarded(check: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """What a check cannot even look at is a finding, too."""
    try:
        yield from findings
    except PeagleError as error:
        yield Finding("error", check, error.message, error.hint)


def examine_data(
    folder: Path, model: str, template_kwargs: Mapping[str, Any] | None = None
) -> Iterator[Finding]:
    """`template_kwargs`: the variables of the chat template that serving sets."""
    dataset = Dataset(folder)
    target = resolve_model(model)
    tokenizer, config = load_tokenizer(target), load_config(target)
    rows = sample_rows(dataset)
    yield from check_fingerprints(dataset.manifest["made_by"], model, tokenizer)
    yield check_template_kwargs(dataset.manifest["made_by"], template_kwargs or {}, tokenizer)
    yield from check_frame(rows, tokenizer, dataset.manifest["made_by"])
    yield check_vocabulary(rows, int(config.vocab_size))
    yield from check_mask(dataset, rows)
    yield from check_answers(dataset)
    yield check_lengths(dataset, int(config.max_position_embeddings))
    yield check_loss_shares(rows, HeadSection.max_speculative_tokens)


def sample_rows(dataset: Dataset) -> Rows:
    """Evenly over the dataset."""
    step = max(len(dataset) // SAMPLE, 1)
    picked = [dataset[i] for i in range(0, len(dataset), step)]
    return [(torch.as_tensor(r.token_ids), torch.as_tensor(r.loss_mask).bool()) for r in picked]


def check_fingerprints(made_by: dict[str, Any], model: str, tokenizer: Any) -> Iterator[Finding]:
    again = "prepare the data again with this target"
    if not same_target(str(made_by.get("target")), model):
        message = f"the answers are {made_by.get('target')}'s, not {model}'s"
        yield Finding("warning", "target", message, "fine if both name the same model")
    pairs = (
        ("tokenizer", tokenizer_fingerprint(tokenizer)),
        ("chat_template", template_fingerprint(tokenizer)),
    )
    for name, its in pairs:
        what = name.replace("_", " ")
        if name not in made_by:
            yield Finding("warning", what, "the manifest does not say which one was used", again)
        elif made_by[name] == its:
            yield Finding("ok", what, "the target's own")
        elif made_by[name] is None:
            message = "the prompts were prepared without the chat template, which serving applies"
            yield Finding("warning", what, message, "prepare without --raw")
        else:
            yield Finding("error", what, "not the target's", again)


def check_template_kwargs(
    made_by: Mapping[str, Any], served: Mapping[str, Any], tokenizer: Any
) -> Finding:
    """A head that learned one reasoning mode drafts poorly in another. Two ways to ask for the
    same prompts are one mode: a variable that has its default, or that the template ignores."""
    prepared = made_by.get("chat_template_kwargs", {})
    differ = prepared != served and bool(tokenizer.chat_template)
    differ = differ and probe_prompts(tokenizer, prepared) != probe_prompts(tokenizer, served)
    message = f"template variables: {json.dumps(prepared)} in the data, {json.dumps(served)} served"
    hint = "give --chat-template-kwargs as served, or prepare the data again with it"
    return graded("reasoning mode", message, warning=differ, hint=hint)


def check_frame(rows: Rows, tokenizer: Any, made_by: Mapping[str, Any]) -> Iterator[Finding]:
    """Do rows begin, and answers follow, as the template writes it? Needs no manifest."""
    if not tokenizer.chat_template:
        return
    start, end = template_frame(tokenizer, made_by.get("chat_template_kwargs", {}))
    begins = [tokens[: len(start)].tolist() == start for tokens, _ in rows]
    hint = "prepare with this target's chat template: it is what serving sends"
    wrong = 1 - sum(begins) / len(begins)
    message = f"{1 - wrong:.0%} of the rows begin as the target's chat template does"
    yield graded("row start", message, warning=wrong > 0, error=wrong > 0.5, hint=hint)
    firsts = [(tokens, int(mask.int().argmax())) for tokens, mask in rows if mask.any()]
    ends = [tokens[max(at - len(end), 0) : at].tolist() == end for tokens, at in firsts]
    wrong = 1 - sum(ends) / max(len(ends), 1)
    message = f"{1 - wrong:.0%} of the answers start right after the templated prompt"
    hint = "the mask must begin with the first generated token"
    yield graded("answer start", message, warning=wrong > 0, error=wrong > 0.5, hint=hint)


def template_frame(
    tokenizer: Any, kwargs: Mapping[str, Any] | None = None
) -> tuple[list[int], list[int]]:
    """Tokens that every templated prompt begins with, and those that it ends with."""
    prompts = probe_prompts(tokenizer, kwargs)
    backwards = [prompt[::-1] for prompt in prompts]
    return _common_start(prompts), _common_start(backwards)[::-1]


def probe_prompts(tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> list[list[int]]:
    """A few conversations by the chat template."""
    reader = PromptReader(tokenizer)
    probes = [
        [{"role": "user", "content": "What is 2 + 2?"}],
        [{"role": "user", "content": "Zähle bis drei"}],
        [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}],
    ]
    prompts = []
    for probe in probes:
        try:
            prompts.append(reader.render_chat(probe, kwargs=kwargs)["prompt_token_ids"])
        except RequestError:  # some templates know no system message
            continue
    return prompts


def _common_start(sequences: Sequence[Sequence[int]]) -> list[int]:
    common = []
    for column in zip(*sequences, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return common


def check_vocabulary(rows: Rows, vocab_size: int) -> Finding:
    largest = max(int(tokens.max()) for tokens, _ in rows)
    message = f"the largest token id is {largest}, the target's vocabulary has {vocab_size}"
    hint = "the data was made with another tokenizer: prepare it again"
    return graded("token ids", message, warning=False, error=largest >= vocab_size, hint=hint)


def check_mask(dataset: Dataset, rows: Rows) -> Iterator[Finding]:
    nothing = sum(not mask.any() for _, mask in rows) / len(rows)
    message = f"{nothing:.0%} of the rows have no supervised token"
    hint = "they cost training time and teach the head nothing: drop them"
    yield graded("mask", message, warning=nothing > 0, hint=hint)
    prompt = sum(bool(mask[0]) for _, mask in rows) / len(rows)
    message = f"{prompt:.0%} of the rows supervise their first token, which is the prompt's"
    hint = "the mask must be 1 on tokens that the target generated, and on no others"
    yield graded("mask on prompts", message, warning=prompt > 0, error=prompt > 0.01, hint=hint)


def check_answers(dataset: Dataset) -> Iterator[Finding]:
    clipped, looping = share(dataset, "clipped"), share(dataset, "looping")
    hint = "raise --max-tokens: the head never sees how long answers end"
    yield graded(
        "clipped",
        f"{clipped:.0%} of the rows have a clipped answer",
        warning=clipped > 0.3,
        hint=hint,
    )
    hint = "loops are learnt quickly and teach little: use --cut-loops or data.skip_looping"
    yield graded("loops", f"{looping:.0%} of the rows loop", warning=looping > 0.2, hint=hint)


def check_lengths(dataset: Dataset, context: int) -> Finding:
    rows, answers = spread(dataset.lengths), spread(supervised_per_row(dataset))
    message = (
        f"rows have {rows['mean']:.0f} tokens, the longest {rows['max']}; answers "
        f"{answers['mean']:.0f}; the target's context is {context}"
    )
    hint = "acceptance falls beyond these lengths: prepare longer rows, or set head.sliding_window"
    return graded("lengths", message, warning=4 * rows["max"] < context, hint=hint)


def check_loss_shares(rows: Rows, depths: int) -> Finding:
    """What each depth weighs in the loss, under the recipes' default COD."""
    counts = torch.zeros(depths, dtype=torch.double)
    for tokens, mask in rows:
        runs = supervised_runs(lay_out([tokens], [mask], [0], len(tokens)))
        counts += (runs[:, None] > torch.arange(depths)).sum(0)
    counts *= retentions(depths, CodSection.retention, CodSection.floor)
    shares = counts / counts.sum().clamp(min=1)
    listed = " ".join(f"{x:.2f}" for x in shares.tolist())
    hint = (
        "deep drafts are hardly trained: raise cod.retention or cod.floor, or the answers' length"
    )
    message = f"share of the loss per depth with cod.retention={CodSection.retention}: {listed}"
    return graded("loss shares", message, warning=float(shares[-1]) < 0.02, hint=hint)


def examine_configs(head: str, model: str) -> Iterator[Finding]:
    """What the two configs say together; no weight is read, none needs to be there."""
    config = load_config(resolve_config(model))
    (path,) = guarded("target", map(check_path, [config]))
    yield path
    if path.level == "error":
        return  # there is no target to hold the head against
    head_config = read_head_config(resolve_head_config(head), with_weights=False)
    yield from guarded("fit", check_fit(head_config, config))
    yield from check_layers(head_config, config)
    yield check_drafts(head_config, head)
    yield from guarded("memory", check_memory(head_config, config))


def check_path(config: Any) -> Finding:
    """By what the embedded engine runs the target."""
    family = config.model_type
    try:
        decoder = DecoderConfig.from_transformers(config)
    except ModelError as error:
        adapted_config(config)  # raises where there is no way
        if not _is_causal(family):
            message = f"transformers has no causal language model of type {family}"
            return Finding("error", "target", message, "a target writes text, token by token")
        message = f"{family} runs by transformers' modules, slower: {error.message}"
        return Finding("warning", "target", message, "serve it with --backend vllm")
    by = "the fused kernels" if decoder.has_standard_layers else "its modules"
    message = f"{family} is native and runs by {by}"
    if decoder.experts is not None:
        form = decoder.experts.low_bit
        kept = f", in {form.kind.upper()}," if form else ""
        message += f"; its experts{kept} by a grouped product"
    return Finding("ok", "target", message)


def _is_causal(family: str) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    # The text models of two families are not in the table; the families are.
    return family in NAMES or family.removesuffix("_text_model") in NAMES


def check_drafts(head: HeadConfig, reference: str) -> Finding:
    """K as the config says it. Most released ones do not: what is known of these, from the card."""
    advised, most = head.num_speculative_tokens, head.max_speculative_tokens
    message = f"{head.method}, {advised} draft tokens unless told, {most} at most"
    released = released_with_head(reference)
    if released is None:
        return Finding("ok", "drafts", message)
    depth = released.max_speculative_tokens
    trained = "" if depth is None else f", which was trained for {depth}"
    card = f"its card serves it with {released.num_speculative_tokens}{trained}"
    differs = advised != released.num_speculative_tokens
    hint = f"give --spec-tokens {released.num_speculative_tokens}"
    return graded("drafts", f"{message}; {card}", warning=differs, hint=hint)


def check_fit(head: HeadConfig, config: Any) -> Iterator[Finding]:
    head.check_fits(config)
    yield Finding("ok", "fit", "the head's sizes and layers fit the target")


def check_memory(head: HeadConfig, config: Any) -> Iterator[Finding]:
    """In bfloat16: what a GPU holds before the first request, and per token of context."""
    dtype = torch.bfloat16
    parts = [head_memory(head)]
    try:
        parts.append(target_memory(DecoderConfig.from_transformers(config)))
    except ModelError:
        yield Finding("warning", "memory", "the target's is known once its weights are there")
    weights = " + ".join(f"{part.weight_bytes(dtype) / 2**30:.1f}" for part in reversed(parts))
    cache, beyond = (
        sum(part.token_bytes(dtype, beyond_windows=is_beyond) for part in parts) / 2**10
        for is_beyond in (False, True)
    )
    message = f"{weights} GiB of bfloat16 weights, {cache:.0f} KiB of cache for each token"
    if beyond < cache:
        message += f", {beyond:.0f} KiB beyond the sliding windows"
    yield Finding("ok", "memory", message + _expanded_size(parts[-1], dtype))


def _expanded_size(target: ModelMemory, dtype: torch.dtype) -> str:
    if not target.num_low_bit:
        return ""
    expanded = target.num_parameters * dtype.itemsize / 2**30
    return f"; experts stay low-bit (without a kernel for it, as on a CPU: {expanded:.1f} GiB)"


def examine_head(
    head: str, model: str, config: EngineConfig, data: Path | None
) -> Iterator[Finding]:
    head_config = read_head_config(resolve_head(head))
    yield from check_config(head_config, model)
    pair = load_pair(head, model, config)  # raises on d2t, missing weights and what does not fit
    yield Finding("ok", "fit", "the head's sizes, layers and d2t fit the target")
    if data is not None:
        dataset = Dataset(data)
        rows = sample_rows(dataset)
        yield check_mask_id(head_config, rows)
        yield check_window(head_config, int(dataset.lengths.max()))
        yield check_coverage(pair, rows)
        yield from check_acceptance(pair, dataset)


def check_config(head: HeadConfig, model: str) -> Iterator[Finding]:
    if not same_target(head.target_model, model):
        message = f"it was trained for {head.target_model}, not {model}"
        yield Finding("warning", "head's target", message, "fine if both name the same model")
    yield from check_layers(head, load_config(resolve_model(model)))


def check_layers(head: HeadConfig, target: Any) -> Iterator[Finding]:
    usual = default_aux_hidden_state_layers(int(target.num_hidden_layers))
    layers = head.aux_hidden_state_layer_ids
    message = f"the head reads layers {list(layers)}; servers assume {list(usual)}"
    hint = "export writes them to eagle_aux_hidden_state_layer_ids: check that the server reads it"
    yield graded("layer ids", message, warning=layers != usual, hint=hint)
    ours, its = head.max_position_embeddings, int(target.max_position_embeddings)
    sees = "" if head.sliding_window is None else f" and sees {head.sliding_window} of them"
    message = f"the head drafts up to position {ours}{sees}; the target's context is {its}"
    hint = "nothing is drafted beyond it: raise max_position_embeddings, train on longer rows"
    yield graded("head's context", message, warning=ours < its, hint=hint)


def check_mask_id(head: HeadConfig, rows: Rows) -> Finding:
    if head.mask_token_id is None:
        return Finding("ok", "mask id", "the mask embedding is not a row of the table")
    found = sum(int((tokens == head.mask_token_id).sum()) for tokens, _ in rows)
    message = f"the mask id {head.mask_token_id} occurs {found} times in the data"
    hint = "a served token with this id gets the mask's embedding: choose an unused id"
    return graded("mask id", message, warning=False, error=found > 0, hint=hint)


def check_window(head: HeadConfig, longest_row: int) -> Finding:
    sees = min(head.sliding_window or head.max_position_embeddings, head.max_position_embeddings)
    message = f"the head sees up to {sees} positions, the longest row has {longest_row}"
    hint = "it drafts worse behind longer contexts: set sliding_window in its config.json"
    return graded("window", message, warning=sees > 2 * longest_row, hint=hint)


def check_coverage(pair: Pair, rows: Rows) -> Finding:
    ids = pair.network.target_ids.cpu()
    tokens = torch.cat([tokens[mask] for tokens, mask in rows]).long()
    covered = float(torch.isin(tokens, ids).double().mean())
    message = f"the draft vocabulary of {len(ids)} holds {covered:.1%} of the supervised tokens"
    hint = "a token outside it is never drafted: raise head.draft_vocab_size"
    return graded(
        "draft vocabulary", message, warning=covered < 0.98, error=covered < 0.8, hint=hint
    )


def check_acceptance(pair: Pair, dataset: Dataset) -> Iterator[Finding]:
    """On a few rows: a head that is trained but reads the wrong features shows here."""
    fits = int((dataset.lengths.cumsum(0) <= EVALUATED_TOKENS).sum())
    indices = list(range(max(fits, 1)))
    k = min(EVALUATED_DEPTH, pair.network.config.max_speculative_tokens)
    params = recorded_params(dataset.manifest["made_by"])
    found = evaluate_pair(pair, dataset, indices, k, params)
    way, result = next(iter(found.acceptance.items()))
    stats = result.groups["all"][k - 1]
    first = stats.conditional_acceptance[0] if stats.conditional_acceptance else 0.0
    message = (
        f"{first:.0%} of first drafts are accepted, mean acceptance length "
        f"{stats.mean_acceptance_length:.2f} at K={k} ({way}, {len(indices)} rows)"
    )
    hint = "near zero: hardly trained yet, or wrong layer ids, features or chat template"
    yield graded("acceptance", message, warning=first < 0.3, error=first < 0.05, hint=hint)
