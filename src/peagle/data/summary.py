"""What a prepared dataset holds, in a few numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from peagle.data.dataset import Dataset, totals

PERCENTILES = (50, 90, 99)


def summarise(dataset: Dataset) -> dict[str, Any]:
    return {
        **totals(dataset.manifest["shards"]),
        "row_tokens": spread(dataset.lengths),
        "answer_tokens": spread(supervised_per_row(dataset)),
        "loop_share": share(dataset, "looping"),
        "clipped_share": share(dataset, "clipped"),
    }


def supervised_per_row(dataset: Dataset) -> Tensor:
    """[rows]"""
    masks = (dataset[i].loss_mask for i in range(len(dataset)))
    return torch.tensor([int(torch.as_tensor(mask).sum()) for mask in masks])


def share(dataset: Dataset, flag: str) -> float:
    """The share of rows that carry a flag: `looping` or `clipped`."""
    return round(sum(bool(row[flag]) for row in dataset.info) / len(dataset), 4)


def spread(lengths: Tensor) -> dict[str, float]:
    values = lengths.double()
    quantiles = torch.quantile(values, torch.tensor(PERCENTILES, dtype=torch.double) / 100)
    named = {f"p{p}": round(float(q), 1) for p, q in zip(PERCENTILES, quantiles, strict=True)}
    return {"mean": round(float(values.mean()), 1), **named, "max": int(values.max())}
