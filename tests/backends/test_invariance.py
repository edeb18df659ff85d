"""The invariant mode: a request's bits do not depend on its batch mates, bit for bit, for every backend that claims it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mla_serve.backends import AttentionError, Backend, BatchLayout, Padded, Reference
from mla_serve.backends.torch_mla import TorchMLA
from mla_serve.shapes import AttentionShape
from tests.backends.cases import SCALE, Case, make
from tests.backends.contenders import SMALL, Contender, contenders

CPU = torch.device("cpu")
INVARIANT = [
    Contender(c.backend, replace(c.shape, batch_invariant=True))
    for c in contenders()
    if getattr(c.backend, "inner", c.backend).batch_invariant and c.backend.device.type == "cpu"
]


def batch_of(case: Case, requests: Sequence[int]) -> Case:
    """The same tensors of these requests of `case`, in this order."""
    assert case.batch.q_lens_host is not None
    assert case.batch.kv_lens_host is not None
    q_at, k_at = case.batch.query_start_loc.tolist(), case.batch.kv_start_loc.tolist()
    q_rows = torch.cat([torch.arange(q_at[i], q_at[i + 1]) for i in requests])
    k_rows = torch.cat([torch.arange(k_at[i], k_at[i + 1]) for i in requests])
    q_lens, kv_lens = ([lens[i] for i in requests] for lens in (case.batch.q_lens_host, case.batch.kv_lens_host))
    first, second, third = case.inputs
    if case.shape.absorbed:
        assert case.batch.block_table is not None
        table = case.batch.block_table[list(requests)]
        batch = BatchLayout.make(q_lens, kv_lens, CPU, block_table=table, page_size=case.batch.page_size)
        return replace(case, inputs=(first[q_rows], second[q_rows], third), batch=batch)
    return replace(case, inputs=(first[q_rows], second[k_rows], third[k_rows]), batch=BatchLayout.make(q_lens, kv_lens, CPU))


def changes(backend: Backend, shape: AttentionShape) -> list[str]:
    """What of a request's result changes with its company: nothing, in the invariant mode."""
    q_lens = [shape.q_len] * 6 if shape.absorbed else [70, 9, 9, 1, 33, 9]
    kv_lens = q_lens if not shape.absorbed and shape.causal else [700, 40, 40, shape.q_len, 300, 0]
    case = make(shape, q_lens, kv_lens, CPU)
    state = case.prepare(backend)

    def results(requests: Sequence[int], need_lse: bool) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
        part = batch_of(case, requests)
        out, lse = part.run(backend, backend.plan(state, part.batch, scale=SCALE), need_lse=need_lse)
        at = part.batch.query_start_loc.tolist()
        rows = {request: slice(at[i], at[i + 1]) for i, request in enumerate(requests)}
        return {request: (out[here], None if lse is None else lse[here]) for request, here in rows.items()}

    alone = {i: results([i], backend.gives_lse)[i] for i in range(len(q_lens))}
    found = []
    for company in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [1, 2], [2, 1, 5], [3, 0], [4, 3, 1]):
        for need_lse in {backend.gives_lse, False}:
            for request, (out, lse) in results(company, need_lse).items():
                want, want_lse = alone[request]
                if not torch.equal(out, want) or (lse is not None and want_lse is not None and not torch.equal(lse, want_lse)):
                    found.append(f"request {request} in {company}, LSE {'' if need_lse else 'not '}asked for")
    return found


@pytest.mark.parametrize("contender", INVARIANT, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_request_has_the_same_bits_in_any_company(contender: Contender, threads: int) -> None:
    torch.set_num_threads(threads)
    assert changes(contender.backend, contender.shape) == []


@pytest.mark.parametrize("contender", INVARIANT, ids=str)
def test_the_invariant_mode_is_right_too(contender: Contender) -> None:
    shape = contender.shape
    q_lens = [shape.q_len] * 3 if shape.absorbed else [5, 0, 9]
    case = make(shape, q_lens, q_lens if not shape.absorbed and shape.causal else [33, 7, 0], CPU)
    (out, lse), (want, want_lse) = case.answer(contender.backend, out=case.blank()), case.expected()
    assert (out.float() - want).norm() <= 1e-2 * want.norm()
    assert lse is None or torch.allclose(lse, want_lse, atol=2e-3)


def test_every_backend_of_this_host_has_the_mode() -> None:
    names = {getattr(c.backend, "inner", c.backend).name for c in INVARIANT}
    assert names >= {"torch-flash", "torch-math", "torch-mla", "reference"}
    assert any(isinstance(c.backend, Padded) for c in INVARIANT)


def test_without_the_mode_bits_change() -> None:
    """Else the tests above would prove nothing: the ordinary decode pads to the longest and splits by the batch."""
    shape = next(c.shape for c in INVARIANT if c.backend.name == "torch-mla" and c.shape.dtype == "float32")
    assert changes(TorchMLA(CPU), replace(shape, batch_invariant=False))


def test_a_kernel_that_runs_requests_alone_needs_to_know_where_they_end() -> None:
    shape = AttentionShape.decode(SMALL, batch=2, kv_len=8, dtype="float32", page_size=4)
    case = make(replace(shape, batch_invariant=True), [1, 1], [5, 8], CPU)
    blind = replace(case.batch, host_lens_exact=False)
    kernel = TorchMLA(CPU)
    with pytest.raises(AttentionError, match="needs exact host lengths to run each request by itself"):
        kernel.plan(case.prepare(kernel), blind, scale=SCALE)
    with pytest.raises(AttentionError, match="captured graph"):
        kernel.require(replace(case.shape, graph=True))


def test_the_oracle_has_the_mode() -> None:
    assert Reference.batch_invariant
