"""The folder of a run: who may start in it, what is written into it, and how a run goes on from it.

RUN/recipe.json provenance.json   what was run, where and from which commit
RUN/metrics.jsonl curves.png      one line per log and per evaluation; TensorBoard beside it
RUN/head/                         the best head so far, by acceptance length on held-out rows
RUN/checkpoints/step-00000500/    to resume from: atomic, newest good one first, no pickle
    network.safetensors           fp32 master weights
    optimizer.safetensors         moments, by parameter name
    state.json                    step, seconds, best, SHA-256 of the others and of the rows
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from peagle.checkpoints.heads.loading import save_head
from peagle.config import changed_values
from peagle.errors import TrainingError
from peagle.files import atomic_folder, remove_all_leftovers, write_json, writing
from peagle.provenance import provenance
from peagle.train.distributed import like, rank, total, whole, whole_network
from peagle.train.recipe import Recipe, recipe_keys
from peagle.train.setup import Setup

logger = logging.getLogger(__name__)
RECIPE, CHECKPOINTS, HEAD = "recipe.json", "checkpoints", "head"
NETWORK, OPTIMIZER, STATE = "network.safetensors", "optimizer.safetensors", "state.json"


class RunProgress(NamedTuple):
    """Where a run stands; with the recipe's seed it fixes every later row and draw."""

    step: int = 0
    seconds: float = 0.0  # spent in steps
    best: float = 0.0  # acceptance length of the best evaluated step
    best_step: int = -1
    evaluated_step: int = -1  # the newest


class RunFolder:
    """All processes call each method; the first one writes."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.path = Path(setup.recipe.run.folder)
        self.checkpoints = self.path / CHECKPOINTS
        self.head = self.path / HEAD
        self.data = setup.dataset.identity()

    def start(self, *, resume: bool, report: Callable[[str], None]) -> RunProgress:
        """Where the run begins: at the newest good checkpoint, or at nothing. Writes no file
        before that is clear; `report` gets a line for each key that has changed."""
        changes = check_start(self.setup.recipe, resume=resume)
        progress = self._restore() if resume else RunProgress()
        for change in changes:
            report(f"resumed with another value of {change}")
        if rank() == 0:
            with self.writing():
                write_json(self.path / RECIPE, self.setup.recipe.as_dict())
                write_json(self.path / "provenance.json", provenance(probe_torch=True))
        return progress

    def _restore(self) -> RunProgress:
        setup = self.setup
        state = restore_newest(self.checkpoints, setup.network, setup.trainer.optimizer)
        changed = changed_values(state.get("data", {}), self.data)
        if changed:
            which = "; ".join(f"{name} {change}" for name, change in changed.items())
            raise TrainingError(
                f"the data is not what {self.path} was trained on: {which}",
                hint=f"resume with the same rows, or {_new_run(self.path)}",
            )
        if rank() == 0:
            remove_all_leftovers(self.checkpoints)
        return RunProgress(**state["progress"])

    def save_state(self, progress: RunProgress) -> None:
        setup = self.setup
        with self.writing():
            newest = save_state(
                self.checkpoints,
                setup.network,
                setup.trainer.optimizer,
                progress,
                self.data,
            )
            if rank() == 0:
                prune(newest, setup.recipe.run.keep_checkpoints)

    def save_head(self) -> None:
        network = whole_network(self.setup.network)
        if rank() == 0:
            with self.writing():
                save_head(network, self.head)

    def lost_head(self) -> bool:
        """Whether there is none: a kill may take it in the moment of its replacement."""
        lost = rank() == 0 and not self.head.is_dir()
        return total(float(lost), self.setup.trainer.device) > 0

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """A full disk is the user's to mend."""
        return writing(self.path, then="go on with --resume: checkpoints written before are good")


def check_start(recipe: Recipe, *, resume: bool) -> list[str]:
    """Refuses what would lose or mix runs, before anything is loaded or written; -> the keys of
    a resumed recipe that have another value, which they may."""
    folder = Path(recipe.run.folder)
    has_checkpoints = any((folder / CHECKPOINTS).glob("step-*"))
    if not resume:
        if has_checkpoints:
            raise TrainingError(
                f"{folder} already holds a run",
                hint="continue it with --resume, or set run.folder to a new folder",
            )
        if (folder / HEAD).is_dir():
            raise TrainingError(
                f"{folder} already holds a head, but no checkpoint to resume from",
                hint="set run.folder to a new folder, or move the head away",
            )
        return []
    if not has_checkpoints:
        raise TrainingError(
            f"{folder} has no checkpoint to resume from", hint="leave out --resume to start the run"
        )
    return _check_changes(folder, recipe)


def _check_changes(folder: Path, recipe: Recipe) -> list[str]:
    try:
        before = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be compared: %s", folder / RECIPE, error)
        return []
    changed = changed_values(before, json.loads(json.dumps(recipe.as_dict())))
    free = {key.full_name for key in recipe_keys() if key.changeable}
    fixed = [f"{name}: {change}" for name, change in changed.items() if name not in free]
    if fixed:
        raise TrainingError(
            f"{folder} was started with another recipe: {'; '.join(fixed)}",
            hint=f"resume with the original values, or {_new_run(folder)}",
        )
    return [f"{name}: {change}" for name, change in changed.items()]


def _new_run(folder: Path) -> str:
    return f"start from its head: run.folder=NEW head.start_from={folder / HEAD}"


def save_state(
    folder: Path,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: RunProgress,
    data: dict[str, Any],
) -> Path:
    """All processes call this; the first one writes. `data` identifies the rows."""
    path = folder / f"step-{progress.step:08d}"
    weights = _gathered(trained_weights(network))
    moments = _gathered(_optimizer_tensors(network, optimizer))
    if rank() > 0:
        return path
    with atomic_folder(path) as temporary:
        save_file(weights, temporary / NETWORK)
        save_file(moments, temporary / OPTIMIZER)
        hashes = {name: _sha256(temporary / name) for name in (NETWORK, OPTIMIZER)}
        state = {"progress": progress._asdict(), "data": data, "sha256": hashes}
        (temporary / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    return path


def restore_newest(
    folder: Path, network: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Loads the newest checkpoint that is whole; -> its state.json."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        state = _read_state(path)
        if state is None:
            logger.warning("checkpoint %s is damaged", path)
            continue
        _load_weights(network, load_file(path / NETWORK), path)
        _load_optimizer(network, optimizer, load_file(path / OPTIMIZER))
        return state
    raise TrainingError(
        f"no checkpoint in {folder} can be read",
        hint=f"nothing was changed; {_new_run(folder.parent)}",
    )


def prune(newest: Path, keep: int) -> None:
    """Keeps the last checkpoints up to `newest`; one beyond it is damaged or of no use."""
    paths = sorted(newest.parent.glob("step-*"))
    kept = [path for path in paths if path <= newest][-keep:]
    for path in paths:
        if path not in kept:
            shutil.rmtree(path)


def trained_weights(network: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}


def _optimizer_tensors(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in network.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = value
    return tensors


def _load_weights(network: nn.Module, stored: dict[str, Tensor], path: Path) -> None:
    weights = trained_weights(network)
    fits = weights.keys() == stored.keys() and all(
        weight.shape == stored[name].shape for name, weight in weights.items()
    )
    if not fits:
        raise TrainingError(
            f"{path} was written for a head of other sizes than this recipe's",
            hint="resume with the recipe in RUN/recipe.json, or set run.folder to a new folder",
        )
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(like(stored[name], weight))


def _load_optimizer(
    network: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    parameters = dict(network.named_parameters())
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition("/")
        parameter = parameters[name]
        # AdamW keeps its step count where the parameter is when fused, else on the CPU.
        fused = any(group.get("fused") for group in optimizer.param_groups)
        if key == "step":
            optimizer.state[parameter][key] = value.to(parameter.device if fused else "cpu")
        else:
            optimizer.state[parameter][key] = like(value.to(parameter.device), parameter)


def _gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: whole(t.detach()).contiguous().clone() for name, t in tensors.items()}


def _read_state(path: Path) -> dict[str, Any] | None:
    """The checkpoint's state.json if every file is there and unharmed."""
    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        whole = all(_sha256(path / name) == value for name, value in state["sha256"].items())
    except (OSError, ValueError, KeyError):
        return None
    return state if whole else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
