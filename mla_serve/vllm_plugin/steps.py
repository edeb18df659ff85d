"""One step's decodes: which kernel, and its plan; persistent ones for batches that are replayed from a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mla_serve.backends.base import BatchLayout, Limits
from mla_serve.selection import BoundSelector, PinError
from mla_serve.selection.selector import LAST_RESORT
from mla_serve.shapes import AttentionShape, DType, MLADims, Phase
from mla_serve.vllm_plugin.deployment import Deployment, Planned

__all__ = ["Batch", "DecodePlanner", "Warm"]

Warm = Callable[[Planned, int], None]


@dataclass(frozen=True, slots=True)
class Batch:
    """What the host knows of a step: query and key lengths of all its requests, decodes first; graph padding has length 0."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...] | None
    max_kv: int


class DecodePlanner:
    """Makes the Planned of each step for one group of layers.

    While `capturing`, a batch gets a kernel for its own size and for `expected_context` tokens each, and a plan that later
    batches of that size refresh in place. `warm` then runs the kernel once on so many query tokens, so that whatever it
    compiles or loads happens before the capture.
    """

    def __init__(
        self, deployment: Deployment, limits: Limits, dims: MLADims, *, scale: float, page_size: int,
        cache_dtype: DType | None = None, warm: Warm | None = None,
    ) -> None:  # fmt: skip
        self.deployment, self.dims, self.scale, self.page_size = deployment, dims, scale, page_size
        self.limits, self.cache_dtype, self.verified = limits, cache_dtype, deployment.size.verified
        self.capturing = False
        self._warm = warm
        self._captured: dict[tuple[int, int], Planned] = {}
        self._even = deployment.bind(dims, page_size, limits, cache_dtype=cache_dtype)

    @property
    def expected_context(self) -> int:
        """Tokens per request that a captured kernel is chosen for."""
        size = self.deployment.size
        return min(self.deployment.settings.expected_context or size.max_model_len, size.max_model_len)

    @property
    def absorb_up_to(self) -> int:
        """See `Deployment.absorb_up_to`."""
        return self.deployment.absorb_up_to(self.dims)

    def why_no_graphs(self) -> str | None:
        """None if a kernel made for it can be captured, else the reason, for a person."""
        shape = AttentionShape.decode(
            self.dims, batch=1, kv_len=self.expected_context, dtype=self.deployment.size.dtype, page_size=self.page_size,
            q_len=self.verified, cache_dtype=self.cache_dtype, graph=True,
        )  # fmt: skip
        try:
            decision = self.deployment.selector.decide(shape)
        except PinError as error:
            return str(error)
        if decision.winner == LAST_RESORT[True] and self.deployment.pinned(Phase.DECODE) is None:
            return f"no kernel but {decision.winner}, the last resort, can be captured here"
        return None

    def plan(self, batch: Batch, query_start_loc: Tensor, kv_lens: Tensor, block_table: Tensor, *, num_tokens: int) -> Planned:
        """The first `kv_lens.shape[0]` requests of `batch` are the decodes, `num_tokens` their rows with graph padding."""
        n = kv_lens.shape[0]
        q_lens = batch.q_lens[:n]
        live = sum(1 for length in q_lens if length)
        exact = batch.kv_lens is not None and self.deployment.size.host_lens
        known = None
        if batch.kv_lens is not None:  # what stands in a row of graph padding is left over from earlier steps
            known = tuple(kv if q else 0 for q, kv in zip(q_lens, batch.kv_lens[:n], strict=True))
        layout = BatchLayout(
            num_requests=n,
            live_requests=live,
            num_tokens=sum(q_lens),
            max_q=max(q_lens),
            max_kv=batch.max_kv if known is None else max(known),
            query_start_loc=query_start_loc,
            kv_start_loc=query_start_loc,  # absorbed calls do not read it
            kv_lens=kv_lens,
            q_lens_host=q_lens,
            kv_lens_host=known,
            host_lens_exact=exact,
            block_table=block_table,
            page_size=self.page_size,
        )
        size = n, max(1, num_tokens // n)
        alone = len(batch.q_lens) == n and all(length in (0, size[1]) for length in q_lens)
        if self.capturing or (alone and size in self._captured):
            planned = self._replayed(size, layout)
        else:
            planned = self._eager(layout, max(1, live), known)
        self.deployment.counts.steps["decode", planned.kernel.decision.label] += 1
        return planned

    def _replayed(self, size: tuple[int, int], layout: BatchLayout) -> Planned:
        planned = self._captured.get(size)
        if planned is not None:
            planned.plan = planned.kernel.plan(layout, scale=self.scale, reuse=planned.plan)
            return planned
        n, q_len = size
        kernel = self._even.decode(n, n * self.expected_context, ragged=False, q_len=q_len, graph=True)
        planned = self._captured[size] = Planned(kernel, kernel.plan(layout, scale=self.scale))
        if self._warm is not None:
            self._warm(planned, n * q_len)
        return planned

    def _eager(self, layout: BatchLayout, live: int, known: tuple[int, ...] | None) -> Planned:
        keys = max(1, sum(known) if known is not None else layout.max_kv * live)
        ragged = layout.max_kv * live > 2 * keys
        bound, q_len = self._bound_for(layout)
        kernel = bound.decode(live, keys, ragged=ragged, q_len=q_len)
        return Planned(kernel, kernel.plan(layout, scale=self.scale))

    def _bound_for(self, layout: BatchLayout) -> tuple[BoundSelector, int]:
        """Kernels for this batch and the query tokens that they are asked for.

        A mixture of lengths, and any length that only a short prompt has, goes to kernels that take mixtures, as one bucket.
        """
        longest = max(1, layout.max_q)
        if longest == 1 or (longest <= self.verified and layout.num_tokens == longest * layout.live_requests):
            return self._even, longest
        flexible = self.deployment.bind(self.dims, self.page_size, self.limits, cache_dtype=self.cache_dtype, even=False)
        return flexible, self.deployment.extension(self.dims)
