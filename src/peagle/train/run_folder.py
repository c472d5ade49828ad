"""The folder of a run: who may start in it, and what is written into it.

RUN/recipe.json provenance.json   what was run, where and from which commit
RUN/metrics.jsonl curves.png      one line per log and per evaluation; TensorBoard beside it
RUN/checkpoints/                  to resume from
RUN/head/                         the best head so far, by acceptance length on held-out rows
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from peagle.checkpoints.heads.loading import save_head
from peagle.errors import TrainingError
from peagle.files import write_json
from peagle.provenance import provenance
from peagle.train.distributed import rank, total, whole_network
from peagle.train.run_state import Progress, prune, restore_newest, save_state
from peagle.train.setup import Setup


class RunFolder:
    """All processes call each method; the first one writes."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.path = Path(setup.recipe.run.folder)
        self.checkpoints = self.path / "checkpoints"
        self.head = self.path / "head"

    def start(self, *, resume: bool) -> Progress:
        """Where the run begins: the newest good checkpoint, or nothing."""
        old = None
        if resume:
            trainer = self.setup.trainer
            old = restore_newest(self.checkpoints, self.setup.network, trainer.optimizer)
        elif any(self.checkpoints.glob("step-*")):
            raise TrainingError(
                f"{self.path} already holds a run",
                hint="continue it with --resume, or set run.folder to a new folder",
            )
        if rank() == 0:
            with self.writing():
                write_json(self.path / "recipe.json", self.setup.recipe.as_dict())
                write_json(self.path / "provenance.json", provenance(probe_torch=True))
        return old or Progress()

    def save_state(self, progress: Progress) -> None:
        setup = self.setup
        with self.writing():
            newest = save_state(self.checkpoints, setup.network, setup.trainer.optimizer, progress)
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

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A full disk is the user's to mend."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"cannot write to {self.path}: {error}",
                hint="checkpoints written before are good: make room and go on with --resume",
            ) from error
