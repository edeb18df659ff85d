from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mla_serve.backends import AttentionError, BatchLayout, reference_decode, reference_prefill
from mla_serve.shapes import AttentionShape
from tests.backends.cases import decode
from tests.backends.contenders import SMALL

CPU = torch.device("cpu")


@pytest.mark.parametrize(("sq", "sk"), [(9, 9), (4, 11), (1, 30)])
def test_prefill_is_torch_attention_in_float64(sq: int, sk: int) -> None:
    q, k, v = torch.randn(sq, 3, 24), torch.randn(sk, 3, 24), torch.randn(sk, 3, 16)
    mask = torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq)
    for causal in (True, False):
        out, lse = reference_prefill(q, k, v, BatchLayout.make([sq], [sk], CPU), scale=0.3, causal=causal)
        args = (t.double().transpose(0, 1) for t in (q, k, v))
        want = F.scaled_dot_product_attention(*args, attn_mask=mask if causal else None, scale=0.3).transpose(0, 1)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
        scores = (torch.einsum("qhd,khd->hqk", q.double(), k.double()) * 0.3).masked_fill(~mask & causal, float("-inf"))
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1).T, rtol=1e-5, atol=1e-6)


def test_decode_is_prefill_on_the_gathered_latents() -> None:
    shape = AttentionShape.decode(SMALL, batch=2, kv_len=40, dtype="float32", page_size=16, q_len=3)
    case = decode(shape, [3, 3], [40, 7], CPU)
    q_nope, q_pe, cache = case.inputs
    out, lse = reference_decode(q_nope, q_pe, cache, case.batch, scale=0.2, cache_scale=0.5)
    table = case.batch.block_table
    rows = [(table[i, : -(-n // 16)].long()[:, None] * 16 + torch.arange(16)).flatten()[:n] for i, n in enumerate((40, 7))]
    latents = cache.flatten(0, 1)[torch.cat(rows)] * 0.5
    k = latents.unsqueeze(1).expand(-1, shape.heads, -1)
    q = torch.cat([q_nope, q_pe], dim=-1)
    want = reference_prefill(q, k, k[..., : shape.v], BatchLayout.make([3, 3], [40, 7], CPU), scale=0.2, causal=True)
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(lse, want[1])


def test_float32_products_are_exact_and_the_setting_is_put_back() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        q = torch.randn(4, 2, 16)
        reference_prefill(q, q, q, BatchLayout.make([4], [4], CPU), scale=0.25, causal=True)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_decode_without_a_block_table_is_refused() -> None:
    q = torch.randn(1, 2, 16)
    with pytest.raises(AttentionError, match="needs a block table"):
        reference_decode(q, q, torch.randn(1, 4, 32), BatchLayout.make([1], [3], CPU), scale=1.0)
