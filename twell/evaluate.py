"""Validation: what the model's loss is on text it has not seen."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from data.loader import Batch
from twell import parallel
from twell.routing import Routing


@torch.no_grad()
def validate_model(
    model: nn.Module, batches: Sequence[Batch], token_bytes: Tensor, routing: Routing
) -> dict[str, float]:
    """Loss of `model` over validation windows, summed over ranks.

    Args:
        model: maps (tokens, targets, doc_ids) to an output with `loss_sum`; compiled or not.
        batches: this rank's share of the fixed windows, all of one shape; targets of -100 are not counted.
        token_bytes: int64 [n_vocab], bytes of text per token id, 0 for special tokens.
        routing: of the model; if a buffer of its sparse kernels is too small, all is done again with larger ones.

    Returns:
        val/loss (nats per token), val/perplexity, and val/bits_per_byte = total bits / total bytes of the targets.
    """
    while True:
        totals = _totals(model, batches, token_bytes)
        # One read; every rank repeats if one of them must, since the sums cross ranks.
        nats, tokens, n_bytes = parallel.sum_over_ranks(totals).tolist()
        if not parallel.max_over_ranks(routing.overflowed().int()).item():
            break
        routing.update()
    loss = nats / tokens
    return {
        "val/loss": loss,
        "val/perplexity": math.exp(min(loss, 700.0)),  # beyond 700 exp overflows a double
        "val/bits_per_byte": nats / math.log(2) / max(n_bytes, 1),
    }


def _totals(model: nn.Module, batches: Sequence[Batch], token_bytes: Tensor) -> Tensor:
    """This rank's nats, counted tokens and bytes, float64 [3]."""
    totals = torch.zeros(3, dtype=torch.float64, device=token_bytes.device)
    for batch in batches:
        counted = batch.targets >= 0  # [b, t]
        totals[0] += model(batch.tokens, batch.targets, batch.doc_ids).loss_sum
        totals[1] += counted.sum()
        totals[2] += (token_bytes[batch.targets.clamp(min=0)] * counted).sum()
    return totals
