"""The run: steps until the schedule ends, with logs, evaluations and checkpoints on the way."""

from __future__ import annotations

import logging
import math
import time
from contextlib import AbstractContextManager

from peagle.errors import TrainingError
from peagle.evaluate.evaluator import Evaluation
from peagle.processes import StopSignals, Terminated
from peagle.progress import Work, track
from peagle.train.batches import Prefetch
from peagle.train.distributed import rank, total, world_size
from peagle.train.journal import Journal, Report
from peagle.train.optimizer import learning_rate_share
from peagle.train.planner import PlannedRow
from peagle.train.run_folder import RunFolder, RunProgress
from peagle.train.setup import Setup
from peagle.train.trainer import Metrics

logger = logging.getLogger(__name__)

CUT_SHARE = 0.01  # of the elements: more than that are cut, and the user should know


class TrainingRun:
    """`report` gets a line for the terminal at each log and each evaluation."""

    def __init__(self, setup: Setup, *, resume: bool = False, report: Report = logger.info) -> None:
        self.setup, self.recipe = setup, setup.recipe
        self.folder = RunFolder(setup)
        self.total_steps = total_steps(setup)
        self.progress = self.folder.start(resume=resume, report=report if rank() == 0 else _silent)
        step = self.progress.step
        with self.folder.writing():
            self.journal = Journal(
                self.folder.path,
                report,
                from_step=step,
                evaluated_step=self.progress.evaluated_step,
                silent=rank() > 0,
            )
        self._saved = self.progress if step else None
        self._log_time = time.monotonic()
        self._waited = 0.0
        self._first = True
        self._warned = False

    def __call__(self) -> RunProgress:
        """Trains to the end of the schedule; -> where it stands then. A signal to stop interrupts
        after the step that it meets, when that is saved; a second one at once."""
        setup, recipe = self.setup, self.recipe
        per_step = recipe.data.rows_per_step
        rows = setup.batches.rows_from(self.progress.step * per_step)
        pin = setup.trainer.device.type == "cuda"
        prefetch = Prefetch(rows, recipe.data.prefetch, pin=pin)
        try:
            with StopSignals(impatient=True) as signals, self._tracked() as work:
                while (share := self._share()) < 1.0 and not self._must_stop(signals):
                    began = time.monotonic()
                    planned = self._next(prefetch, per_step)
                    rate = learning_rate_share(recipe.schedule, share)
                    setup.trainer.step(planned, recipe.optimizer.learning_rate * rate)
                    self._count_step(began)
                    self._after_step()
                    work.reach(self._done_of_total()[0], f"step {self.progress.step}")
                self._finish(whole=share >= 1.0)
            signals.interrupt()
            if share < 1.0:  # another process was told to stop
                raise Terminated
        finally:
            prefetch.close()
            with self.folder.writing():
                self.journal.close()
        return self.progress

    def _tracked(self) -> AbstractContextManager[Work]:
        done, total = self._done_of_total()
        by_time = self.recipe.schedule.minutes is not None
        return track("training", total, "minutes" if by_time else "steps", done=done)

    def _done_of_total(self) -> tuple[float, float]:
        """What the schedule counts: minutes or steps."""
        minutes = self.recipe.schedule.minutes
        if minutes is None:
            return self.progress.step, self.total_steps
        return self.progress.seconds / 60, minutes

    @property
    def saved_step(self) -> int:
        """Where a resumed run would begin."""
        return self._saved.step if self._saved else 0

    def _must_stop(self, signals: StopSignals) -> bool:
        """Processes stop after the same step, so they agree; only where they log, because that
        waits for their devices anyway."""
        stop = bool(signals.received)
        if world_size() == 1:
            return stop
        agree = self.progress.step % self.recipe.run.log_every == 0
        return agree and total(float(stop), self.setup.trainer.device) > 0

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
        """Reads the counters, which waits for the device; stops on a loss that is not finite."""
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
                hint=f"resume from {self.folder.checkpoints} with a lower optimizer.learning_rate",
            )
        self._warn_of_cuts(metrics)
        done, whole = self._done_of_total()
        record = metrics._asdict() | {
            "step": self.progress.step,
            "done": round(min(done / whole, 1.0), 4),
            "minutes": round(self.progress.seconds / 60, 3),
            "tokens_per_second": round(metrics.tokens / seconds),
            "waiting_share": round(waited / seconds, 4),
            "learning_rate": self.setup.trainer.optimizer.param_groups[0]["lr"],
        }
        with self.folder.writing():
            self.journal.write("train", record)
        return metrics

    def _warn_of_cuts(self, metrics: Metrics) -> None:
        """Once: the padded shapes were measured on a few rows, and later ones may draw more."""
        if metrics.cut_share > CUT_SHARE and not self._warned:
            self._warned = True
            logger.warning(
                "%.1f %% of the drawn elements do not fit the padded rows and are not trained on",
                100 * metrics.cut_share,
            )

    def evaluate(self) -> Evaluation | None:
        """Acceptance on held-out rows; a better head than any before replaces RUN/head."""
        if self.setup.evaluator is None:
            self.folder.save_head()
            return None
        step = self.progress.step
        result = self.setup.evaluator(self.setup.trainer.model)
        length = result.acceptance_length(self.recipe.head.num_speculative_tokens)
        with self.folder.writing():
            self.journal.write("evaluate", {"step": step, **result.as_dict()})
        self.progress = self.progress._replace(evaluated_step=step)
        if length > self.progress.best or self.folder.lost_head():
            self.progress = self.progress._replace(best=length, best_step=step)
            self.folder.save_head()
        self._log_time = time.monotonic()
        return result

    def save(self) -> None:
        self.folder.save_state(self.progress)
        self._saved = self.progress
        self._log_time = time.monotonic()

    def _finish(self, *, whole: bool) -> None:
        self._log()
        evaluated = self.progress.evaluated_step == self.progress.step
        if whole and (not evaluated or self.folder.lost_head()):
            self.evaluate()
        if self._saved != self.progress and self.progress.step:
            self.save()


def _silent(_line: str) -> None:
    pass


def total_steps(setup: Setup) -> int:
    """Steps of the whole run; 0 where the schedule goes by time."""
    schedule, batches = setup.recipe.schedule, setup.batches
    if schedule.steps is not None:
        return schedule.steps
    if schedule.epochs is None:
        return 0
    rows = len(batches.epoch(0).rows) // batches.world
    return max(int(rows * schedule.epochs / setup.recipe.data.rows_per_step), 1)
