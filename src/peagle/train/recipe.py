"""What a training run is told. Each default stands here and nowhere else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from peagle.config import from_mapping
from peagle.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TargetSection:
    model: str = "smollm2-135m"


@dataclass(frozen=True, kw_only=True)
class HeadSection:
    """Sizes left at None are the target's."""

    method: Literal["p-eagle", "eagle3"] = "p-eagle"
    num_hidden_layers: int = 4
    intermediate_size: int | None = None
    aux_hidden_state_layer_ids: tuple[int, ...] | None = None  # None: 2, L // 2, L - 3
    max_speculative_tokens: int = 8  # the deepest draft that is trained
    num_speculative_tokens: int = 7  # the K that the head advises
    train_embed_tokens: bool = False  # true: the head gets an embedding table of its own
    train_lm_head: bool = False
    draft_vocab_size: int | None = None  # the most frequent tokens; None: all
    norm_before_residual: bool = False
    norm_output: bool = False  # EAGLE-3 only
    mask_token_id: int | None = None
    start_from: str | None = None  # a head whose weights this run starts with
    # Train a correction of this width for the head `start_from`, which stays as it is
    correction_size: int | None = None
    copy_target_layers: bool = False  # start as the target's last layers; needs its sizes


@dataclass(frozen=True, kw_only=True)
class DataSection:
    path: str = ""
    more: tuple[str, ...] = ()  # further folders, such as sampled answers to the same prompts
    # `vllm`, or a folder of `peagle capture`; None: the target runs in process
    features: str | None = None
    tokens_per_row: int = 32768  # a packed row; longer documents are cut
    rows_per_step: int = 1  # gradient accumulation
    held_out_share: float = 0.02
    max_tokens: int | None = None  # use only so many tokens of the data
    skip_looping: bool = False
    prefetch: int = 4  # packed rows built ahead of the step


@dataclass(frozen=True, kw_only=True)
class VllmSection:
    """Read with `data.features: vllm`: the target runs there and hands its hidden states over."""

    endpoint: str | None = None  # a server that shares a file system with us; None: we start one
    # Where states pass through: deleted when read. None: as the server says; for our own, memory
    folder: str | None = None
    # For our own server: what stands before the model's folder; None: the vLLM that is installed
    command: str | None = None
    args: tuple[str, ...] = ()  # further flags, e.g. --tensor-parallel-size=8
    devices: str | None = None  # its CUDA_VISIBLE_DEVICES
    device: Literal["auto", "cuda", "cpu"] = "auto"
    requests: int = 64  # documents in flight
    start_minutes: float = 30.0

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ConfigError(f"vllm.requests={self.requests} is out of range", hint="use >= 1")


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """The run ends at whichever limit is set; the learning rate follows the share of it used."""

    kind: Literal["linear", "cosine", "constant"] = "cosine"
    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None  # time spent in steps, over all resumptions
    warmup: float = 0.01  # share of the run
    final: float = 0.02  # share of the peak learning rate at the end


@dataclass(frozen=True, kw_only=True)
class LossSection:
    kind: Literal["kl", "ce"] = "kl"
    depth_decay: float = 1.0  # depth d weighs depth_decay ** d
    chunk_rows: int = 4096  # logits held at a time


@dataclass(frozen=True, kw_only=True)
class CodSection:
    retention: float = 0.8  # r: depth d is kept with probability r ** d
    floor: float = 0.0  # ... but at least this


@dataclass(frozen=True, kw_only=True)
class RunSection:
    folder: str = "runs/latest"
    seed: int = 0
    device: str = "auto"
    compile: bool = True  # on GPU
    sharding: Literal["ddp", "fsdp2"] = "ddp"  # under torchrun
    partitions: int | Literal["auto"] = 1
    memory_gib: float | None = None  # for `partitions: auto`; None: what the device has free
    activation_checkpointing: bool = False
    log_every: int = 20
    checkpoint_every: int = 500  # steps
    keep_checkpoints: int = 2
    evaluate_every: int = 500  # steps; 0: at the end alone
    evaluate_rows: int = 64
    evaluate_tokens: int = 16  # K up to which acceptance is computed, at most what is trained


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
        schedule = self.schedule
        limits = (schedule.steps, schedule.epochs, schedule.minutes)
        if sum(limit is not None for limit in limits) != 1:
            raise ConfigError(
                "the schedule needs exactly one of steps, epochs and minutes",
                hint="for example schedule.epochs=3",
            )
        self._check_counts()
        if not 0.0 < self.cod.retention <= 1.0:
            raise ConfigError(
                f"cod.retention={self.cod.retention} is out of range", hint="use a share in (0, 1]"
            )
        if self.data.features == "vllm" and self.head.copy_target_layers:
            raise ConfigError(
                "head.copy_target_layers needs the target's layers, which vLLM keeps to itself",
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
        if head.correction_size < 1:
            raise ConfigError("head.correction_size must be at least 1")
        if head.method != "p-eagle" or head.start_from is None:
            raise ConfigError(
                "head.correction_size trains a correction for a p-eagle head that there is",
                hint="name it: head.start_from=HEAD",
            )

    def _check_counts(self) -> None:
        """Numbers of things that a run cannot have none of."""
        counts = {
            "data": ("tokens_per_row", "rows_per_step", "prefetch"),
            "loss": ("chunk_rows",),
            "run": ("log_every", "checkpoint_every", "keep_checkpoints", "evaluate_tokens"),
        }
        for section, names in counts.items():
            for name in names:
                if getattr(getattr(self, section), name) < 1:
                    raise ConfigError(f"{section}.{name} must be at least 1")
        if self.run.partitions != "auto" and self.run.partitions < 1:
            raise ConfigError("run.partitions must be at least 1", hint="use 1 or more, or auto")

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """A YAML file, then `section.key=value` in order, values read as YAML."""
    import yaml  # type: ignore[import-untyped]

    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise ConfigError(f"no recipe at {path}", hint="recipes/ holds examples") from None
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"{path} is not a recipe", hint="it should hold sections, as in recipes/")
    for override in overrides:
        name, equals, value = override.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot):
            raise ConfigError(f"{override!r} is not an override", hint="write section.key=value")
        values = options.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"section {section!r} of the recipe is not a mapping")
        values[key] = _yaml_value(override, value)
    return recipe_from(options)


def _yaml_value(override: str, value: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
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
