"""Query rows that see no key, told from host lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_serve.backends.base import BatchLayout


def blind_rows(batch: BatchLayout, *, causal: bool, device: torch.device) -> Tensor | None:
    """True [tokens] for rows of requests without keys and, with a causal mask, those before the first key; None if none is.

    Needs the batch's host lengths.
    """
    assert batch.q_lens_host is not None
    assert batch.kv_lens_host is not None
    lens = list(zip(batch.q_lens_host, batch.kv_lens_host, strict=True))
    blind = [q_len - kv_len if causal else 0 if kv_len else q_len for q_len, kv_len in lens]  # first rows of each request
    if max(blind, default=0) <= 0:
        return None
    rows = [row < count for count, (q_len, _) in zip(blind, lens, strict=True) for row in range(q_len)]
    return torch.tensor(rows, device=device)
