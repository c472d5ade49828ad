"""Sampling parameters of a workload's requests."""

from __future__ import annotations

from peagle.bench.plan import BenchPlan
from peagle.bench.workloads import Task
from peagle.sampling_params import SamplingParams
from peagle.speculation.noise import derive_seed


class RequestParams:
    """Parameters of a task's turn. Each has its own seed, the same in every cell and repeat."""

    def __init__(
        self, plan: BenchPlan, max_tokens: int, ignore_eos: bool, depth: int | None
    ) -> None:
        self.plan, self.max_tokens = plan, max_tokens
        self.ignore_eos, self.depth = ignore_eos, depth
        self._seeds: dict[str, int] = {}

    def __call__(self, task: Task, turn: int) -> SamplingParams:
        number = self._seeds.setdefault(task.id, len(self._seeds))
        return SamplingParams(
            temperature=self.plan.temperature,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            seed=derive_seed(derive_seed(self.plan.seed, number), turn),
            num_speculative_tokens=self.depth,
        )
