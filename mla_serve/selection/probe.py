"""The default grid of a model, and measuring it: finite, from the smallest bucket to the largest the deployment can see."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest

import torch

from mla_serve.errors import UserError
from mla_serve.selection.decision import Decision
from mla_serve.selection.floor import flops
from mla_serve.selection.measure import BudgetSpent
from mla_serve.selection.selector import Selector
from mla_serve.selection.worker_process import WorkerError
from mla_serve.shapes import AttentionShape, Bucket, DType, MLADims, Phase

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, Decision | None], None]
"""Called after each bucket with how many are done, how many there are, and its decision (None if no kernel can serve it)."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Which sizes are measured; what lies between is served by its nearest neighbour."""

    prefill: dict[int, tuple[int, ...]]  # requests: query tokens each
    context: dict[int, tuple[tuple[int, int], ...]]  # requests: query tokens and key tokens each
    decode: tuple[tuple[int, ...], tuple[int, ...]]  # requests, key tokens each
    ragged: tuple[tuple[int, ...], tuple[int, ...]]


# A CPU's kernels change places early and its long runs take seconds, so its grid is small and ends at 2,048 tokens.
_CPU = _Sizes(
    prefill={1: (16, 64, 128, 256, 512, 1024, 2048), 4: (64, 256)},
    context={1: ((64, 256), (64, 1024), (512, 512), (512, 2048)), 4: ((64, 256),)},
    decode=((1, 4, 16), (64, 256, 1024, 2048)),
    ragged=((4, 16), (256,)),
)
_CUDA = _Sizes(
    prefill={1: (128, 512, 1024, 2048, 4096, 8192), 4: (128, 512, 2048), 16: (128, 512)},
    context={
        1: ((128, 1024), (128, 4096), (512, 1024), (512, 4096), (2048, 1024), (2048, 4096)),
        4: ((128, 1024), (512, 1024)),
    },
    decode=((1, 2, 4, 8, 16, 32, 64, 128), (256, 1024, 4096, 16384)),
    ragged=((8, 32), (1024, 4096)),
)


def grid(
    dims: MLADims, *, dtype: DType, page_size: int, max_model_len: int, max_batch: int, device: torch.device,
    max_tokens: int = 2048, context_chunk: int = 4096, graph: bool = False,
) -> list[AttentionShape]:  # fmt: skip
    """The shapes to measure for a deployment: at most about 60 buckets on a GPU, 40 on a CPU.

    `max_batch` counts running requests, `max_tokens` the query tokens of one step, `context_chunk` the cached tokens
    gathered at a time. Sizes beyond a limit are cut to it. Prefill is measured with and without LSE: kernels differ by it.
    """
    sizes = _CUDA if device.type == "cuda" else _CPU

    def shapes() -> Iterator[AttentionShape]:
        for batch, q_lens in sizes.prefill.items():
            for q_len in q_lens:
                if batch <= max_batch and batch * q_len <= max(max_tokens, q_lens[0]):
                    q = min(q_len, max_model_len)
                    for lse in (False, True):
                        yield AttentionShape.prefill(dims, batch=batch, q_len=q, dtype=dtype, lse=lse)
        for batch, pairs in sizes.context.items():
            for q_len, kv_len in pairs:
                if batch <= max_batch and batch * q_len <= max_tokens and batch * kv_len <= context_chunk:
                    q, kv = min(q_len, max_model_len), min(kv_len, max_model_len)
                    yield AttentionShape.context(dims, batch=batch, q_len=q, kv_len=kv, dtype=dtype)
        for ragged, (batches, kv_lens) in ((False, sizes.decode), (True, sizes.ragged)):
            for batch in batches:
                for kv_len in kv_lens:
                    yield AttentionShape.decode(
                        dims, batch=min(batch, max_batch), kv_len=min(kv_len, max_model_len), dtype=dtype, page_size=page_size,
                        ragged=ragged and max_batch > 3, graph=graph,
                    )  # fmt: skip

    # The phases in turn and the cheapest first, so that a budget or a kill leaves something measured of each.
    unique = sorted(dict.fromkeys(Bucket.of(shape).shape for shape in shapes()), key=flops)
    turns = zip_longest(*([shape for shape in unique if shape.phase is phase] for phase in Phase))
    return [shape for turn in turns for shape in turn if shape is not None]


def probe(
    selector: Selector,
    shapes: Sequence[AttentionShape],
    *,
    progress: Progress | None = None,
    again: bool = True,
    budget_s: float | None = None,
) -> list[Decision]:
    """Measures each bucket of `shapes`; every decision is in the table, and in its file, before the next bucket starts.

    `again` False keeps what the table already holds, so that an interrupted probe goes on where it stopped. What another
    process is measuring for the same file is left to it. A bucket that no kernel can serve is warned about and left out. Once
    `budget_s` seconds have passed, the rest is not measured: those decisions are by kernel class, say so, and are not in the
    table. Raises WorkerError if there is no process to measure in.
    """
    buckets = list(dict.fromkeys(Bucket.of(shape) for shape in shapes))
    decisions: dict[Bucket, Decision | None] = {}
    since = None if not again else datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    selector.measurer.until = None if budget_s is None else time.monotonic() + budget_s
    try:
        for wait in (False, True):  # first what nobody else has begun
            for bucket in buckets:
                if bucket in decisions:
                    continue
                with selector.claim(bucket, wait=wait) as ours:
                    if not ours and not wait:
                        continue
                    try:
                        decisions[bucket] = _measured(selector, bucket, since)
                    except (BudgetSpent, WorkerError):
                        raise
                    except UserError as error:
                        logger.warning("%s: %s", bucket, error)
                        decisions[bucket] = None
                if progress is not None:
                    progress(len(decisions), len(buckets), decisions[bucket])
    except BudgetSpent:
        left = [bucket for bucket in buckets if bucket not in decisions]
        why = f"the budget of {budget_s:g} s was spent"
        logger.warning("%d of %d buckets are not measured: %s", len(left), len(buckets), why)
        for bucket in left:
            try:
                decisions[bucket] = selector.unmeasured(bucket, why)
            except UserError as error:
                logger.warning("%s: %s", bucket, error)
                decisions[bucket] = None
    finally:
        selector.measurer.until = None
    return [decision for bucket in buckets if (decision := decisions[bucket]) is not None]


def _measured(selector: Selector, bucket: Bucket, since: str | None) -> Decision:
    """What the table holds, or with `since` what was measured after that; else measures. Raises BudgetSpent."""
    selector.table.refresh()
    held = selector.table.get(bucket, "measured", selector.fingerprint)
    if held is not None and (since is None or (held.measured_at or "") > since):
        return held
    until = selector.measurer.until
    if until is not None and time.monotonic() >= until:
        raise BudgetSpent(())
    return selector.measure(bucket.shape)
