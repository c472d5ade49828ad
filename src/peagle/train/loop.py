"""The run: steps until the schedule ends, with logs, evaluations and checkpoints on the way.

RUN/recipe.json provenance.json   what was run, where and from which commit
RUN/metrics.jsonl curves.png      one line per log and per evaluation; TensorBoard beside it
RUN/checkpoints/                  to resume from
RUN/head/                         the best head so far, by acceptance length on held-out rows
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from peagle.checkpoints.heads import save_head
from peagle.errors import TrainingError
from peagle.provenance import provenance, write_json
from peagle.train.batches import Prefetch
from peagle.train.distributed import rank, total, whole_network
from peagle.train.evaluation import Evaluation
from peagle.train.journal import Journal
from peagle.train.objective import PlannedRow
from peagle.train.optimizer import learning_rate_share
from peagle.train.run_state import Progress, prune, restore_newest, save_state
from peagle.train.setup import Setup
from peagle.train.trainer import Metrics


class Run:
    def __init__(self, setup: Setup, *, resume: bool = False) -> None:
        self.setup, self.recipe = setup, setup.recipe
        self.folder = Path(self.recipe.run.folder)
        self.checkpoints = self.folder / "checkpoints"
        self.progress = self._start(resume)
        self.journal = Journal(self.folder, silent=rank() > 0)
        self.total_steps = total_steps(setup)
        self._log_time = time.monotonic()
        self._waited = 0.0
        self._first = True

    def __call__(self) -> Progress:
        """Trains to the end of the schedule; -> where it stands then."""
        setup, recipe = self.setup, self.recipe
        per_step = recipe.data.rows_per_step
        rows = setup.batches.rows_from(self.progress.step * per_step)
        pin = setup.trainer.device.type == "cuda"
        prefetch = Prefetch(rows, recipe.data.prefetch, pin=pin)
        try:
            while (share := self._share()) < 1.0:
                began = time.monotonic()
                planned = self._next(prefetch, per_step)
                rate = learning_rate_share(recipe.schedule, share)
                setup.trainer.step(planned, recipe.optimizer.learning_rate * rate)
                self._count_step(began)
                self._after_step()
        finally:
            prefetch.close()
        self._finish()
        self.journal.close()
        return self.progress

    def _next(self, prefetch: Prefetch, count: int) -> list[PlannedRow]:
        began = time.monotonic()
        rows = [next(prefetch) for _ in range(count)]
        self._waited += time.monotonic() - began
        return rows

    def _count_step(self, began: float) -> None:
        """One step done. The first since the start compiles code: its time does not count."""
        run, step = self.recipe.run, self.progress.step + 1
        self.progress = self.progress._replace(step=step)
        due = (run.log_every, run.checkpoint_every, run.evaluate_every or run.log_every)
        if self._first or any(step % every == 0 for every in due):
            self._log()
        seconds = 0.0 if self._first else time.monotonic() - began
        self._first = False
        self.progress = self.progress._replace(seconds=self.progress.seconds + seconds)

    def _after_step(self) -> None:
        run, step = self.recipe.run, self.progress.step
        if run.evaluate_every > 0 and step % run.evaluate_every == 0:
            self.evaluate()
        if step % run.checkpoint_every == 0:
            self.save()

    def _share(self) -> float:
        """How much of the run is behind us, the step about to run included: in (0, 1]."""
        schedule = self.recipe.schedule
        if schedule.minutes is not None:
            share = self.progress.seconds / (60 * schedule.minutes)
            return total(share if rank() == 0 else 0.0, self.setup.trainer.device)
        if self.progress.step >= self.total_steps:
            return 1.0
        return (self.progress.step + 0.5) / self.total_steps

    def _log(self) -> Metrics:
        """Reads the counters, which waits for the device, and stops on a loss that is no number."""
        metrics = self.setup.trainer.take_metrics()
        now = time.monotonic()
        seconds, self._log_time = now - self._log_time, now
        waited, self._waited = self._waited, 0.0
        if metrics.steps == 0:
            return metrics
        if not (math.isfinite(metrics.loss) and math.isfinite(metrics.gradient_norm)):
            raise TrainingError(
                f"the loss is {metrics.loss} and the gradient {metrics.gradient_norm} "
                f"at step {self.progress.step}",
                hint=f"resume from {self.checkpoints} with a lower optimizer.learning_rate",
            )
        record = metrics._asdict() | {
            "step": self.progress.step,
            "minutes": round(self.progress.seconds / 60, 3),
            "tokens_per_second": round(metrics.tokens / seconds),
            "waiting_share": round(waited / seconds, 4),
            "learning_rate": self.setup.trainer.optimizer.param_groups[0]["lr"],
        }
        self.journal.write("train", record)
        return metrics

    def evaluate(self) -> Evaluation | None:
        """Acceptance on held-out rows; a better head than any before replaces RUN/head."""
        if self.setup.evaluator is None:
            self._save_head()
            return None
        result = self.setup.evaluator(self.setup.trainer.model)
        length = result.acceptance_length(self.recipe.head.num_speculative_tokens)
        self.journal.write("evaluate", {"step": self.progress.step, **result.as_dict()})
        if length > self.progress.best:
            self.progress = self.progress._replace(best=length, best_step=self.progress.step)
            self._save_head()
        self._log_time = time.monotonic()
        return result

    def _save_head(self) -> None:
        network = whole_network(self.setup.network)
        if rank() == 0:
            save_head(network, self.folder / "head")

    def save(self) -> None:
        trainer = self.setup.trainer
        save_state(self.checkpoints, self.setup.network, trainer.optimizer, self.progress)
        if rank() == 0:
            prune(self.checkpoints, self.recipe.run.keep_checkpoints)
        self._log_time = time.monotonic()

    def _finish(self) -> None:
        self._log()
        self.evaluate()
        self.save()

    def _start(self, resume: bool) -> Progress:
        self.folder.mkdir(parents=True, exist_ok=True)
        old = None
        if resume:
            trainer = self.setup.trainer
            old = restore_newest(self.checkpoints, self.setup.network, trainer.optimizer)
        elif any(self.checkpoints.glob("step-*")):
            raise TrainingError(
                f"{self.folder} already holds a run",
                hint="continue it with --resume, or set run.folder to a new folder",
            )
        if rank() == 0:
            write_json(self.folder / "recipe.json", self.recipe.as_dict())
            write_json(self.folder / "provenance.json", provenance(probe_torch=True))
        return old or Progress()


def total_steps(setup: Setup) -> int:
    """Steps of the whole run; 0 where the schedule goes by time."""
    schedule, batches = setup.recipe.schedule, setup.batches
    if schedule.steps is not None:
        return schedule.steps
    if schedule.epochs is None:
        return 0
    rows = len(batches.epoch(0).rows) // batches.world
    return max(int(rows * schedule.epochs / setup.recipe.data.rows_per_step), 1)
