"""What a training run is told. Each default, range and meaning stands here and nowhere else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt, Interval, MinLen

from peagle.config import MAX_SPECULATIVE_TOKENS, Doc, from_mapping
from peagle.errors import ConfigError
from peagle.files import refusal


class Changeable:
    """Marks a key that may have another value when a run is resumed."""


CHANGEABLE = Changeable()
LENGTHS = ("steps", "epochs", "minutes")  # of a schedule: exactly one is set


@dataclass(frozen=True, kw_only=True)
class TargetSection:
    """The model that the head drafts for."""

    model: Annotated[str, Doc("A folder, a Hugging Face id, or smollm2-135m.")] = "smollm2-135m"


@dataclass(frozen=True, kw_only=True)
class HeadSection:
    """The head that is trained."""

    method: Annotated[
        Literal["p-eagle", "eagle3"], Doc("All drafts in one pass, or one pass per draft.")
    ] = "p-eagle"
    num_hidden_layers: Annotated[int, Ge(1), Doc("Layers of the head.")] = 4
    intermediate_size: Annotated[
        int | None, Ge(1), Doc("Width of the layers' MLPs.", if_none="the target's")
    ] = None
    aux_hidden_state_layer_ids: Annotated[
        tuple[Annotated[int, Ge(0)], ...] | None,
        Doc("Layers of the target whose outputs the head reads.", if_none="2, L // 2, L - 3"),
    ] = None
    max_speculative_tokens: Annotated[
        int, Interval(ge=1, le=MAX_SPECULATIVE_TOKENS), Doc("The deepest draft that is trained.")
    ] = 8
    num_speculative_tokens: Annotated[
        int,
        Interval(ge=1, le=MAX_SPECULATIVE_TOKENS),
        Doc("The K that the head advises; acceptance at this K decides which head is best."),
    ] = 7
    train_embed_tokens: Annotated[bool, Doc("The head has an embedding table of its own.")] = False
    train_lm_head: Annotated[bool, Doc("The head has an output table of its own.")] = False
    draft_vocab_size: Annotated[
        int | None,
        Ge(1),
        Doc("Draft only this many tokens, the most frequent ones.", if_none="all"),
    ] = None
    sliding_window: Annotated[
        int | None,
        Ge(1),
        Doc("Positions that a row of the head sees, its own included.", if_none="all"),
    ] = None
    norm_before_residual: Annotated[bool, Doc("The residual takes the normed input.")] = False
    norm_output: Annotated[bool, Doc("EAGLE-3: the next pass reads the normed output.")] = False
    mask_token_id: Annotated[
        int | None, Ge(0), Doc("Row of the mask embedding in exports.", if_none="chosen then")
    ] = None
    start_from: Annotated[
        str | None, Doc("A head whose weights this run starts with.", if_none="random weights")
    ] = None
    correction_size: Annotated[
        int | None,
        Ge(1),
        Doc("Train a correction of this width for `start_from`.", if_none="train the head itself"),
    ] = None
    copy_target_layers: Annotated[
        bool, Doc("Start as the target's last layers; the head needs their sizes.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """What the head is trained on."""

    # A resumed run compares the rows themselves: the folders may have moved.
    path: Annotated[str, CHANGEABLE, Doc("A folder of `peagle prepare`.")] = ""
    more: Annotated[
        tuple[str, ...],
        CHANGEABLE,
        Doc("Further folders, such as sampled answers to the same prompts."),
    ] = ()
    features: Annotated[
        str | None,
        Doc("`vllm`, or a folder of `peagle capture`.", if_none="the target runs in process"),
    ] = None
    tokens_per_row: Annotated[
        int, Ge(1), Doc("Length of a packed row; longer documents are cut.")
    ] = 32768
    rows_per_step: Annotated[int, Ge(1), Doc("Gradient accumulation.")] = 1
    held_out_share: Annotated[
        float, Interval(ge=0, lt=1), Doc("Share of the rows that only evaluations see.")
    ] = 0.02
    max_tokens: Annotated[
        int | None, Ge(1), Doc("Use only this many tokens of the data.", if_none="all")
    ] = None
    skip_looping: Annotated[bool, Doc("Leave out answers that repeat themselves.")] = False
    prefetch: Annotated[int, Ge(1), CHANGEABLE, Doc("Packed rows built ahead of the step.")] = 4


@dataclass(frozen=True, kw_only=True)
class VllmSection:
    """With `data.features: vllm` the target runs there and hands its hidden states over."""

    endpoint: Annotated[
        str | None,
        CHANGEABLE,
        Doc("A server that shares a file system with us.", if_none="the run starts one"),
    ] = None
    folder: Annotated[
        str | None,
        CHANGEABLE,
        Doc(
            "Where states are exchanged; they are deleted once read.",
            if_none="as the server says; for the run's own server, memory",
        ),
    ] = None
    command: Annotated[
        str | None,
        CHANGEABLE,
        Doc("The command before the model's folder.", if_none="the vLLM that is installed"),
    ] = None
    args: Annotated[
        tuple[str, ...], CHANGEABLE, Doc("Further flags, e.g. --tensor-parallel-size=8.")
    ] = ()
    devices: Annotated[
        str | None, CHANGEABLE, Doc("Its CUDA_VISIBLE_DEVICES.", if_none="all devices")
    ] = None
    device: Annotated[
        Literal["auto", "cuda", "cpu"], CHANGEABLE, Doc("What the run's own server runs on.")
    ] = "auto"
    requests: Annotated[int, Ge(1), CHANGEABLE, Doc("Documents in flight.")] = 64
    start_minutes: Annotated[
        float, Gt(0), CHANGEABLE, Doc("How long the server may take to start.")
    ] = 30.0


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW."""

    learning_rate: Annotated[float, Gt(0), CHANGEABLE, Doc("At its peak.")] = 1e-4
    weight_decay: Annotated[float, Ge(0), Doc("For matrices; norms are not decayed.")] = 0.0
    betas: Annotated[
        tuple[
            Annotated[float, Interval(ge=0, lt=1)],
            Annotated[float, Interval(ge=0, lt=1)],
        ],
        Doc("Decay of the two moments."),
    ] = (0.9, 0.95)
    eps: Annotated[float, Gt(0), Doc("Added to the denominator.")] = 1e-8
    max_grad_norm: Annotated[
        float, Gt(0), CHANGEABLE, Doc("Longer gradients are scaled down to it.")
    ] = 1.0


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """When the run ends: exactly one of steps, epochs and minutes is set. The learning rate
    follows the share of it that is used."""

    kind: Annotated[
        Literal["linear", "cosine", "constant"], Doc("How the learning rate falls.")
    ] = "cosine"
    steps: Annotated[int | None, Ge(1), CHANGEABLE, Doc("Optimiser steps.")] = None
    epochs: Annotated[float | None, Gt(0), CHANGEABLE, Doc("Passes over the data.")] = None
    minutes: Annotated[
        float | None, Gt(0), CHANGEABLE, Doc("Time spent in steps, over all resumptions.")
    ] = None
    warmup: Annotated[
        float, Interval(ge=0, le=1), Doc("Share of the run in which the learning rate rises.")
    ] = 0.01
    final: Annotated[
        float, Interval(ge=0, le=1), Doc("Share of the peak learning rate at the end.")
    ] = 0.02


@dataclass(frozen=True, kw_only=True)
class LossSection:
    """What is minimised."""

    kind: Annotated[
        Literal["kl", "ce", "tv"],
        Doc(
            "Divergence from the target's distribution; cross-entropy with the token that it "
            "wrote; or 0.9 total variation and 0.1 cross-entropy."
        ),
    ] = "kl"
    weighting: Annotated[
        Literal["depth", "acceptance"],
        Doc(
            "A draft weighs what its depth does, or what it adds to the expected acceptance "
            "length; the latter for heads that draft already."
        ),
    ] = "depth"
    depth_decay: Annotated[
        float, Gt(0), Doc("Depth d weighs depth_decay ** d, in the acceptance length as well.")
    ] = 1.0
    chunk_rows: Annotated[
        int, Ge(1), CHANGEABLE, Doc("Rows whose logits are held at a time; affects memory only.")
    ] = 4096


@dataclass(frozen=True, kw_only=True)
class CodSection:
    """Conditional drop-token: which depths of an anchor are trained this time."""

    retention: Annotated[
        float, Interval(gt=0, le=1), Doc("r: depth d is kept with probability r ** d.")
    ] = 0.8
    floor: Annotated[float, Interval(ge=0, le=1), Doc("Lower bound of that probability.")] = 0.0


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Where it runs, what it writes and how often."""

    folder: Annotated[str, MinLen(1), CHANGEABLE, Doc("Where everything is written.")] = (
        "runs/latest"
    )
    seed: Annotated[int, Ge(0), Doc("Of initial weights, row order and drawn depths.")] = 0
    device: Annotated[str, CHANGEABLE, Doc("auto, cpu, cuda, cuda:1 ...")] = "auto"
    compile: Annotated[bool, CHANGEABLE, Doc("Compile the layers on a GPU.")] = True
    sharding: Annotated[
        Literal["ddp", "fsdp2"], CHANGEABLE, Doc("Under torchrun: whole weights, or shards.")
    ] = "ddp"
    partitions: Annotated[
        Annotated[int, Ge(1)] | Literal["auto"],
        CHANGEABLE,
        Doc("Segments of a long row, one pass each; auto: as few as fit."),
    ] = 1
    memory_gib: Annotated[
        float | None,
        Gt(0),
        CHANGEABLE,
        Doc("Memory for `partitions: auto`.", if_none="what the device has free"),
    ] = None
    activation_checkpointing: Annotated[
        bool, CHANGEABLE, Doc("Compute activations twice instead of keeping them.")
    ] = False
    log_every: Annotated[int, Ge(1), CHANGEABLE, Doc("Steps between two lines.")] = 20
    checkpoint_every: Annotated[int, Ge(1), CHANGEABLE, Doc("Steps.")] = 500
    keep_checkpoints: Annotated[int, Ge(1), CHANGEABLE, Doc("Older ones are deleted.")] = 2
    evaluate_every: Annotated[int, Ge(0), CHANGEABLE, Doc("Steps; 0: only at the end.")] = 500
    evaluate_rows: Annotated[int, Ge(1), CHANGEABLE, Doc("Held-out rows, at most.")] = 64
    evaluate_tokens: Annotated[
        int, Ge(1), CHANGEABLE, Doc("Largest K to compute acceptance for, if it was trained.")
    ] = 16


@dataclass(frozen=True, kw_only=True)
class Recipe:
    target: TargetSection = field(default_factory=TargetSection)
    head: HeadSection = field(default_factory=HeadSection)
    data: DataSection = field(default_factory=DataSection)
    vllm: VllmSection = field(default_factory=VllmSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    loss: LossSection = field(default_factory=LossSection)
    cod: CodSection = field(default_factory=CodSection)
    run: RunSection = field(default_factory=RunSection)

    def __post_init__(self) -> None:
        limits = [getattr(self.schedule, name) for name in LENGTHS]
        if sum(limit is not None for limit in limits) != 1:
            raise ConfigError(
                "the schedule needs exactly one of steps, epochs and minutes",
                hint="for example schedule.epochs=3",
            )
        if self.data.features == "vllm" and self.head.copy_target_layers:
            raise ConfigError(
                "head.copy_target_layers needs the target's layers, which vLLM does not expose",
                hint="set it to false, or train without data.features: vllm",
            )
        if self.data.more and self.data.features not in (None, "vllm"):
            raise ConfigError(
                "data.more has no stored states: a folder of `peagle capture` holds one dataset",
                hint="drop data.features or data.more",
            )
        self._check_correction()
        if not self.data.path:
            raise ConfigError("data.path is not set", hint="give a folder of `peagle prepare`")

    def _check_correction(self) -> None:
        head = self.head
        if head.correction_size is None:
            return
        if head.method != "p-eagle" or head.start_from is None:
            raise ConfigError(
                "head.correction_size trains a correction for an existing p-eagle head",
                hint="name it: head.start_from=HEAD",
            )

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class RecipeKey:
    """What is known of one key without a recipe."""

    section: str
    name: str
    annotation: Any
    default: Any

    @property
    def full_name(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def doc(self) -> Doc:
        return next(one for one in self.annotation.__metadata__ if isinstance(one, Doc))

    @property
    def changeable(self) -> bool:
        return CHANGEABLE in self.annotation.__metadata__


def sections() -> dict[str, type]:
    return get_type_hints(Recipe)


def recipe_keys() -> Iterator[RecipeKey]:
    """Every key, in the order of declaration."""
    for section, kind in sections().items():
        hints = get_type_hints(kind, include_extras=True)
        for one in dataclasses.fields(kind):
            yield RecipeKey(section, one.name, hints[one.name], one.default)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """A YAML file, then `section.key=value` in order, values read as YAML. A length of the
    schedule that is given so replaces the file's."""
    options = _read(path)
    changes: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot):
            raise ConfigError(f"{override!r} is not an override", hint="write section.key=value")
        changes.setdefault(section, {})[key] = _yaml_value(override, value)
    for section, values in changes.items():
        before = options.setdefault(section, {})
        if not isinstance(before, dict):
            raise ConfigError(f"section {section!r} of the recipe is not a mapping")
        if section == "schedule" and any(values.get(name) is not None for name in LENGTHS):
            before = {name: value for name, value in before.items() if name not in LENGTHS}
        options[section] = before | values
    return recipe_from(options)


def _read(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise ConfigError(f"no recipe at {path}", hint="recipes/ holds examples") from None
    except OSError as error:
        reason, remedy = refusal(error)
        raise ConfigError(f"cannot read {path}: {reason}", hint=remedy) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 2026-99-99
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"{path} is not a recipe", hint="it should hold sections, as in recipes/")
    return options


def _yaml_value(override: str, value: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{override!r} holds no YAML value", hint="quote it") from None


def recipe_from(options: Mapping[str, Any]) -> Recipe:
    return from_mapping(Recipe, options, "the recipe")


def vllm_section(pairs: Sequence[str]) -> VllmSection:
    """The section from `key=value` alone, for a command without a recipe."""
    values = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        values[key] = _yaml_value(pair, value)
    return from_mapping(VllmSection, values, "vllm")
