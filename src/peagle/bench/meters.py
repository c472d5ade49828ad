"""Memory and GPU use during a run, where the platform tells."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from statistics import fmean
from types import TracebackType

EVERY_MS = 200
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Meters:
    """Measures while the block runs. `device`: where the engine of this process computes; None
    for an engine elsewhere, whose memory is not ours to see. Memory is the whole process's, so
    it holds every engine that is alive."""

    def __init__(self, device: str | None) -> None:
        self.device = device
        self.peak_memory_bytes: int | None = None
        self.gpu_utilization: float | None = None
        self._watcher: subprocess.Popen[str] | None = None

    def __enter__(self) -> Meters:
        if self.device is not None and self.device.startswith("cuda"):
            import torch

            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.device is not None:
            with contextlib.suppress(OSError):
                CLEAR_REFS.write_text("5")  # the kernel forgets the peak so far
        if self.device != "cpu":
            self._watcher = watch_gpu()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watcher is not None:
            self._watcher.terminate()
            self.gpu_utilization = mean_utilization(self._watcher.communicate()[0])
        if self.device is not None and self.device.startswith("cuda"):
            import torch

            self.peak_memory_bytes = int(torch.cuda.max_memory_allocated(self.device))
        elif self.device is not None:
            self.peak_memory_bytes = peak_resident_bytes()


def watch_gpu() -> subprocess.Popen[str] | None:
    """The driver's tool, printing the share of time with work; None without it."""
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


def mean_utilization(listing: str) -> float | None:
    """Over time, of the GPU that had most to do; None if nothing was said. The listing's lines
    are `index, percent`."""
    shares: dict[str, list[int]] = {}
    for line in listing.splitlines():
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
