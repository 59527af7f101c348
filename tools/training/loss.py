"""The distillation loss with its gradient in closed form: on a CPU, autograd's own takes as long as the network."""

from __future__ import annotations

from typing import Any

import torch

CHUNK = 512  # positions at once: their probabilities stay small enough for the memory to be used again


def distillation_loss(logits: Any, labels: Any, soft: Any, soft_ids: Any, soft_p: Any, weight: float) -> Any:
    """Mean over the positions with a label of cross-entropy, mixed with that to the target's projected probabilities.

    logits [N, V]; labels int64 [N], -1 for none; soft int64 [N]: row of soft_ids int64, soft_p float32 [S, K], -1 for
    none. Where there is one: (1 - weight) · NLL + weight · -Σ p̃ log q, which is KL(p̃ ‖ q) up to p̃'s own entropy; its
    gradient in the logits is q - p̃.
    """
    return _Distillation.apply(logits, labels, soft, soft_ids, soft_p, weight)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Any, labels: Any, soft: Any, soft_ids: Any, soft_p: Any, weight: float) -> Any:
        counted = (labels >= 0).float()
        mixed = torch.where(soft >= 0, weight * counted, 0.0)
        hard = counted - mixed
        gradient = torch.empty_like(logits)
        total = logits.new_zeros((), dtype=torch.float32)
        for begin in range(0, len(labels), CHUNK):
            part = slice(begin, begin + CHUNK)
            z = logits[part].float()
            log_q = z - torch.logsumexp(z, -1, keepdim=True)
            wanted = labels[part].clamp(min=0)[:, None]
            total -= (hard[part] * log_q.gather(1, wanted)[:, 0]).sum()
            rows = torch.nonzero(mixed[part])[:, 0]
            mass = hard[part]
            if len(rows):
                entry = soft[part][rows]
                ids, p = soft_ids[entry], soft_p[entry] * mixed[part][rows, None]
                total -= (p * log_q[rows].gather(1, ids)).sum()
                mass = mass.index_add(0, rows, p.sum(-1))
            change = log_q.exp_().mul_(mass[:, None])
            if len(rows):
                change.index_put_((rows[:, None], ids), -p, accumulate=True)
            gradient[part] = change.scatter_add_(1, wanted, -hard[part][:, None])
        count = counted.sum().clamp(min=1)
        ctx.save_for_backward(gradient.div_(count))
        return total / count

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(gradients[0]), None, None, None, None, None
