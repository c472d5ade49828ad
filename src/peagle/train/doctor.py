"""What in a dataset silently costs acceptance. Each check compares it with the target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.checkpoints.references import load_config, load_tokenizer, resolve_model
from peagle.data.chat import template_fingerprint, template_frame, tokenizer_fingerprint
from peagle.data.dataset import Dataset
from peagle.data.packing import lay_out
from peagle.data.summary import share, spread, supervised_per_row
from peagle.train.cod import retentions, supervised_runs
from peagle.train.findings import Finding, graded
from peagle.train.recipe import CodSection, HeadSection

SAMPLE = 512  # rows that are read in full

Rows = list[tuple[Tensor, Tensor]]  # token ids and mask of each


def examine_data(folder: Path, model: str) -> Iterator[Finding]:
    dataset = Dataset(folder)
    target = resolve_model(model)
    tokenizer, config = load_tokenizer(target), load_config(target)
    rows = sample_rows(dataset)
    yield from check_fingerprints(dataset.manifest["made_by"], model, tokenizer)
    yield from check_frame(rows, tokenizer)
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
            yield Finding("warning", what, "the manifest does not say which was used", again)
        elif made_by[name] == its:
            yield Finding("ok", what, "that of the target")
        elif made_by[name] is None:
            message = "the prompts were not templated, served ones will be"
            yield Finding("warning", what, message, "prepare without --raw")
        else:
            yield Finding("error", what, "not that of the target", again)


def same_target(recorded: str, model: str) -> bool:
    """Two references, one of which may be the folder that the other stands for."""
    return recorded == model or Path(recorded) == resolve_model(model)


def check_frame(rows: Rows, tokenizer: Any) -> Iterator[Finding]:
    """Do rows begin, and answers follow, as the template writes it? Needs no manifest."""
    if not tokenizer.chat_template:
        return
    start, end = template_frame(tokenizer)
    begins = [tokens[: len(start)].tolist() == start for tokens, _ in rows]
    hint = "prepare with this target's chat template: it is what serving sends"
    wrong = 1 - sum(begins) / len(begins)
    message = f"{wrong:.0%} of the rows do not begin as the target's template does"
    yield graded("row start", message, warning=wrong > 0, error=wrong > 0.5, hint=hint)
    firsts = [(tokens, int(mask.int().argmax())) for tokens, mask in rows if mask.any()]
    ends = [tokens[max(at - len(end), 0) : at].tolist() == end for tokens, at in firsts]
    wrong = 1 - sum(ends) / max(len(ends), 1)
    message = f"{wrong:.0%} of the answers do not start right behind the template's prompt"
    hint = "the mask must begin with the first generated token"
    yield graded("answer start", message, warning=wrong > 0, error=wrong > 0.5, hint=hint)


def check_vocabulary(rows: Rows, vocab_size: int) -> Finding:
    largest = max(int(tokens.max()) for tokens, _ in rows)
    message = f"the largest token id is {largest}, the target has {vocab_size}"
    hint = "the data was made with another tokenizer: prepare it again"
    return graded("token ids", message, warning=False, error=largest >= vocab_size, hint=hint)


def check_mask(dataset: Dataset, rows: Rows) -> Iterator[Finding]:
    nothing = sum(not mask.any() for _, mask in rows) / len(rows)
    message = f"{nothing:.0%} of the rows supervise nothing"
    hint = "they cost training time and teach nothing: drop them"
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
    hint = "loops are learnt in no time: prepare --cut-loops, or train with data.skip_looping"
    yield graded("loops", f"{looping:.0%} of the rows loop", warning=looping > 0.2, hint=hint)


def check_lengths(dataset: Dataset, context: int) -> Finding:
    rows, answers = spread(dataset.lengths), spread(supervised_per_row(dataset))
    message = (
        f"rows have {rows['mean']:.0f} tokens, the longest {rows['max']}; answers "
        f"{answers['mean']:.0f}; the target's context is {context}"
    )
    hint = "acceptance falls beyond the lengths trained: prepare longer conversations or answers"
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
    hint = "deep drafts are hardly trained: raise cod.retention or cod.floor, or longer answers"
    message = f"share of the loss per depth with cod.retention={CodSection.retention}: {listed}"
    return graded("loss shares", message, warning=float(shares[-1]) < 0.02, hint=hint)
