"""Query rows that see no key: kernels leave their LSE at +inf or some large number, and it must be -inf.

Which rows these are is told from the lengths, never from what a kernel returned: +inf in another row is a fault, and hiding it
would let a merge drop the row.
"""

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


def blind_rows_on_device(batch: BatchLayout, *, causal: bool) -> Tensor:
    """The same from the lengths on the device, always a tensor [num_tokens]; nothing is copied to the host."""
    starts = batch.query_start_loc
    row = torch.arange(batch.num_tokens, device=starts.device, dtype=torch.int32)
    owner = (torch.searchsorted(starts, row, right=True) - 1).clamp_(0, batch.num_requests - 1)
    kv_lens = batch.kv_lens[owner]
    if not causal:
        return kv_lens == 0
    return row - starts[owner] < starts.diff()[owner] - kv_lens


def blind(batch: BatchLayout, *, causal: bool) -> Tensor | None:
    """By host lengths where they are exact, else on the device."""
    if batch.kv_lens_host is None or batch.q_lens_host is None or not batch.host_lens_exact:
        return blind_rows_on_device(batch, causal=causal) if batch.num_tokens else None
    return blind_rows(batch, causal=causal, device=batch.kv_lens.device)
