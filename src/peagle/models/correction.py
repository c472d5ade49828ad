"""The correction: what a mask row predicts once the draft before it is known.

A pass of P-EAGLE predicts all drafts at once, so none of them knows which token was drafted before
it. The correction adds that: of a mask row's state h, after the final norm, and the token x before,

    h' = h + down(silu(gate) * up),    [gate ; up] = from_state(h) + from_token(rms(e(x)))

It depends on one token alone, so the scores of all candidates behind all candidates of the depth
before are known at once, without a pass for each draft (`log_probs`). Draft 1 needs none: its row
has read the token before it.

Shapes: C rows, H hidden, W the correction's width, B slots, K depths, M candidates of each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.kernels.cpu.linear import Weight, rows_of, unpacked
from peagle.kernels.policy import gpu_takes
from peagle.kernels.reference.trees import Candidates
from peagle.models.layers import Linear, at_least_float32, silu_mul
from peagle.speculation.trees import BEAM, independent


class Correction(nn.Module):
    def __init__(self, hidden_size: int, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.from_state = Linear(hidden_size, 2 * size, bias=False)
        self.from_token = Linear(hidden_size, 2 * size, bias=False)
        self.down_proj = Linear(size, hidden_size, bias=False)
        # Of a mask row once, and of each token before it: with 2 * size * H weights, and size * H.
        self.weights_per_row = hidden_size * size * (2 + 3 * BEAM)

    def forward(self, normed: Tensor, embeddings: Tensor) -> Tensor:
        """Mask rows' states and the embeddings of the tokens before [C, H] -> states [C, H]."""
        gate_up = self.from_state(normed) + self._of_tokens(embeddings)
        out: Tensor = normed + self.down_proj(silu_mul(gate_up))
        return out

    def log_probs(
        self,
        normed: Tensor,  # [B, K, H] states of drafts 1 .. K
        candidates: Candidates,  # [B, K, M]
        temperature: Tensor | None,  # [B], 0 where greedy; None: all are
        embeddings: Tensor,  # [V, H]
        output: tuple[Weight, Tensor],  # a table, and the candidates' rows of it [B, K, M]
    ) -> Tensor:
        """The candidates' log-probabilities behind each candidate of the depth before.

        -> [B, K, M, M] float32. What a depth's candidates hold of the probability in all is what
        they held without the correction. Draft 1 has the same behind each: none stands before it.
        """
        before, (table, rows) = candidates.token_ids[:, :-1], output
        states = normed[:, 1:].reshape(-1, normed.shape[2])  # [B * (K-1), H]
        if gpu_takes(states):
            return self._on_gpu(states, candidates, temperature, embeddings, output)
        changes = self._changes(states, F.embedding(before.flatten(), embeddings))
        changes = changes.view(*before.shape, -1)  # [B, K-1, M, H]
        shifts = at_least_float32(changes @ rows_of(table, rows[:, 1:]).transpose(-1, -2))
        if temperature is not None:
            shifts = shifts / torch.where(temperature > 0, temperature, 1.0)[:, None, None, None]
        own = candidates.log_probs[:, 1:, None, :]
        later = (own + shifts).log_softmax(-1) + own.logsumexp(-1, keepdim=True)
        return torch.cat((independent(candidates.log_probs[:, :1]), later), dim=1)

    def _changes(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """States [S, H] behind tokens, M for each [S * M, H] -> what is added to them [S * M, H]"""
        of_states, of_tokens = self.from_state(states), self._of_tokens(embeddings)
        gate_up = of_tokens.view(len(states), -1, of_tokens.shape[1]) + of_states[:, None]
        out: Tensor = self.down_proj(silu_mul(gate_up.flatten(0, 1)))
        return out

    def _on_gpu(
        self,
        states: Tensor,  # [B * (K-1), H]
        candidates: Candidates,
        temperature: Tensor | None,
        embeddings: Tensor,
        output: tuple[Weight, Tensor],
    ) -> Tensor:
        from peagle.kernels.gpu.correction import gate_rows, lattice_log_probs, normed_rows

        before = candidates.token_ids[:, :-1].flatten()
        of_tokens = self.from_token(normed_rows(embeddings, before, self.eps))
        changes = self.down_proj(gate_rows(self.from_state(states), of_tokens))
        table, rows = output
        return lattice_log_probs(changes, unpacked(table), rows, candidates, temperature)

    def _of_tokens(self, embeddings: Tensor) -> Tensor:
        """[C, H] -> [C, 2W]"""
        normed = F.rms_norm(at_least_float32(embeddings), embeddings.shape[-1:], None, self.eps)
        out: Tensor = self.from_token(normed.to(embeddings.dtype))
        return out


def initialise_correction(correction: Correction, generator: torch.Generator) -> None:
    """It starts as no correction at all."""
    with torch.no_grad():
        for linear in (correction.from_state, correction.from_token):
            linear.weight.normal_(0.0, 0.02, generator=generator)
        correction.down_proj.weight.zero_()
