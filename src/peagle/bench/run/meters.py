"""Memory, GPU use and what else the machine does during a run, where the platform tells."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

EVERY_MS = 200
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
STAT = Path("/proc/stat")
FEWEST_TICKS = 20  # of a CPU; the kernel counts hundredths of a second, and others' in whole ones


class GpuWatch:
    """The driver's tool, printing the share of time with work, read by a thread of ours for as long
    as a grid runs: to start it takes longer than a short run does. Silent where it is missing."""

    def __init__(self) -> None:
        self._lines: list[tuple[float, str]] = []  # time and line
        self._tool = _start_tool()
        if self._tool is not None:
            threading.Thread(target=self._read, args=(self._tool,), daemon=True).start()

    def mean(self, begun: float, ended: float) -> float | None:
        """The mean between two times of time.perf_counter."""
        return mean_utilization(line for at, line in list(self._lines) if begun <= at <= ended)

    def close(self) -> None:
        if self._tool is not None:
            self._tool.terminate()
            self._tool.wait()

    def _read(self, tool: subprocess.Popen[str]) -> None:
        assert tool.stdout is not None
        for line in tool.stdout:
            self._lines.append((time.perf_counter(), line))


class CpuMeter:
    """The share of this process's CPUs that others took while the block ran: other processes, or
    the hypervisor for other machines (steal). None where the system does not tell, and for blocks
    too short to tell. A drafter's speed-up measured beside them is worth little."""

    def __init__(self) -> None:
        self.others: float | None = None

    def __enter__(self) -> CpuMeter:
        self._begun = _cpu_ticks()
        return self

    def __exit__(self, *_: object) -> None:
        ended = _cpu_ticks()
        if self._begun is None or ended is None:
            return
        total, used, own = (b - a for a, b in zip(self._begun, ended, strict=True))
        if total >= FEWEST_TICKS:
            self.others = min(1.0, max(0.0, used - own) / total)


def _cpu_ticks() -> tuple[float, float, float] | None:
    """Of the CPUs that we may use: all ticks so far, those that were used, those that we used."""
    try:
        lines = STAT.read_text(encoding="ascii").splitlines()
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        rows = [[int(n) for n in fields[1:9]] for fields in map(str.split, lines)
                if fields and fields[0] in names]  # fmt: skip
    except (OSError, ValueError, AttributeError):  # no Linux
        return None
    if not rows:
        return None
    total = sum(map(sum, rows))
    idle = sum(row[3] + row[4] for row in rows)  # waiting for a disk is not used either
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return total, total - idle, own * os.sysconf("SC_CLK_TCK")


class Meters:
    """Measures while the block runs. `device`: where the engine of this process computes; None
    for an engine elsewhere, whose memory is not ours to see. Memory is the whole process's, so
    it holds every engine that is alive."""

    def __init__(self, device: str | None, watch: GpuWatch | None = None) -> None:
        self.device, self.watch = device, watch
        self.peak_memory_bytes: int | None = None
        self.gpu_utilization: float | None = None
        self.other_cpu_share: float | None = None
        self._cpu = CpuMeter()

    def __enter__(self) -> Meters:
        self._begun = time.perf_counter()
        self._cpu.__enter__()
        if self.device is not None and self.device.startswith("cuda"):
            import torch

            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.device is not None:
            with contextlib.suppress(OSError):
                CLEAR_REFS.write_text("5")  # the kernel forgets the peak so far
        return self

    def __exit__(self, *_: object) -> None:
        self._cpu.__exit__()
        if self.device is not None:  # an engine elsewhere would count as somebody else
            self.other_cpu_share = self._cpu.others
        if self.watch is not None:
            self.gpu_utilization = self.watch.mean(self._begun, time.perf_counter())
        if self.device is not None and self.device.startswith("cuda"):
            import torch

            self.peak_memory_bytes = int(torch.cuda.max_memory_allocated(self.device))
        elif self.device is not None:
            self.peak_memory_bytes = peak_resident_bytes()


def _start_tool() -> subprocess.Popen[str] | None:
    try:
        return subprocess.Popen(
            [
                "nvidia-smi",
                "--query-gpu=index,utilization.gpu",
                "--format=csv,noheader,nounits",
                f"--loop-ms={EVERY_MS}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        return None


def mean_utilization(lines: Iterable[str]) -> float | None:
    """The mean over time of the GPU that had most to do; None without lines. Lines are
    `index, percent`."""
    shares: dict[str, list[int]] = {}
    for line in lines:
        index, _, percent = line.partition(",")
        if percent.strip().isdigit():
            shares.setdefault(index, []).append(int(percent))
    return max((fmean(values) / 100 for values in shares.values()), default=None)


def peak_resident_bytes() -> int | None:
    with contextlib.suppress(OSError):
        for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
