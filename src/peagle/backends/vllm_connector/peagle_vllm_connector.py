"""vLLM's hidden-states connector for vLLM on a CPU. Imported by vLLM, never by us.

vLLM's own connector copies through CUDA streams and pinned memory, which a CPU build lacks. This
folder alone goes on vLLM's PYTHONPATH, so that nothing of ours can stand before its packages.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    example_hidden_states_connector as vllm_connector,
)


class CopiedAlready:
    """Stands for the CUDA event that tells when a copy is done: here it is when it begins."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuHiddenStatesConnector(
    vllm_connector.ExampleHiddenStatesConnector  # type: ignore[misc]
):
    def _submit_async_write(self, pending: vllm_connector.PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids)
        slots = blocks[:, None] * self._block_size + torch.arange(self._block_size)
        states = vllm_connector.extract_from_kv_cache(
            self._kv_cache, slots.flatten(), len(pending.token_ids)
        )
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids}
        copied, lock = CopiedAlready(), self._lock_fds.pop(pending.req_id, None)
        self._req_copy_events[pending.req_id] = copied
        self._write_tensors(tensors, copied, pending.filename, lock)
