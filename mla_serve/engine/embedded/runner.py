"""Runs one step of a model: lays the works' tokens out flat, asks for kernels, makes plans, returns logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mla_serve.backends.base import BatchLayout, Limits, torch_dtype
from mla_serve.engine.embedded.attention import ContextChunk, Planned, StepAttention
from mla_serve.engine.embedded.config import ModelConfig
from mla_serve.engine.embedded.loader import Checkpoint
from mla_serve.engine.embedded.memory import pages_in_memory, zeros
from mla_serve.engine.embedded.model import Model
from mla_serve.engine.embedded.rope import turns
from mla_serve.engine.embedded.sequence import Work
from mla_serve.errors import UserError
from mla_serve.shapes import DType

if TYPE_CHECKING:  # the runner is handed one; it builds none
    from mla_serve.selection.selector import Selector

__all__ = ["Runner", "context_chunks"]

Piece = tuple[int, int, int]  # request, first token, end


def context_chunks(starts: Sequence[int], chunk: int) -> Iterator[list[Piece]]:
    """Cuts the cached context of prefills, `starts` tokens each, into runs of `chunk` tokens across requests.

    Each run holds pieces (request, first token, end) of neighbouring requests, so that its queries are one slice of rows.
    """
    run: list[Piece] = []
    room = chunk
    for request, length in enumerate(starts):
        at = 0
        while at < length:
            end = min(length, at + room)
            run.append((request, at, end))
            room -= end - at
            at = end
            if not room:
                yield run
                run, room = [], chunk
        if not length and run:  # neighbours only: a request without context lies between
            yield run
            run, room = [], chunk
    if run:
        yield run


class Runner:
    """A model, its latent cache and the kernels bound to it.

    The cache is [layers, num_pages, page_size, latent + rope], zero-initialised, so that slots nobody wrote hold no NaN. All
    pages are the caller's to hand out. `config`, `dtype`, `num_pages` and `bound` (the decisions in force) are for reading;
    `progress` is called after each layer of a step, since a large model's step on a CPU may take minutes.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: DType | None,
        device: torch.device,
        page_size: int,
        num_pages: int | None,
        max_requests: int,
        max_tokens: int,
        max_model_len: int,
        selector: Selector,
        context_chunk: int = 4096,
    ) -> None:
        """Loads `model_dir` in `dtype` (None: the checkpoint's). `num_pages` None: as memory allows.

        `max_tokens` counts the query tokens of one step, `context_chunk` the cached tokens up-projected at a time.
        Raises CheckpointError for a directory that cannot be served, UserError for limits that cannot be kept.
        """
        self.config = ModelConfig.from_dir(model_dir)
        if max_model_len > self.config.max_position:
            raise UserError(
                f"a maximum length of {max_model_len} is over the {self.config.max_position} tokens the model was made for; "
                "ask for at most that"
            )
        named = dtype or self.config.dtype
        checkpoint = Checkpoint(model_dir, dtype=torch_dtype(named) if named else None, device=device)
        self.dtype: DType = named or _name(checkpoint.dtype)
        self.device = device
        self.page_size = page_size
        self.context_chunk = context_chunk
        self._model = Model.load(self.config, checkpoint)
        self.progress: Callable[[], None] = lambda: None
        dims = self.config.dims
        self._turns = turns(self.config.rope, dims.rope, max_model_len, device)

        page_bytes = self.config.num_layers * page_size * dims.latent_row * torch_dtype(self.dtype).itemsize
        per_request = math.ceil(max_model_len / page_size)
        self.num_pages = num_pages or pages_in_memory(device, page_bytes, least=per_request, most=per_request * max_requests)
        size = (self.config.num_layers, self.num_pages, page_size, dims.latent_row)
        self._cache = zeros(size, torch_dtype(self.dtype), device)
        limits = Limits(max_requests, max_tokens, max(max_tokens, context_chunk))
        self.bound = selector.bind(dims, dtype=self.dtype, page_size=page_size, limits=limits)

    @torch.inference_mode()
    def run(self, work: Sequence[Work], *, all_positions: bool = False) -> Tensor:
        """Computes one step; latents go to the pages of each work's sequence.

        Works of one token with something before it run absorbed if they come first; all others run un-absorbed. Returns float32
        logits [rows, vocab], one row per position that a work wants, in order, or one per computed token if `all_positions`.
        """
        tokens, positions, slots = self._flat(work)
        step = self._step(work, positions, slots)
        rows = None
        if not all_positions:
            starts = accumulate((w.count for w in work), initial=0)
            wanted = [at + position - w.start for at, w in zip(starts, work, strict=False) for position in w.wanted]
            if len(wanted) < len(tokens):
                rows = torch.tensor(wanted, dtype=torch.int64).to(self.device, non_blocking=True)
        return self._model(tokens, self._cache, step, rows, self.progress)

    @torch.inference_mode()
    def zero_pages(self, pages: Sequence[int]) -> None:
        """Clears pages in every layer: a request whose latents may be NaN has left them, and some kernels read unused slots."""
        self._cache.index_fill_(1, torch.tensor(pages, dtype=torch.int64).to(self.device), 0.0)

    def _flat(self, work: Sequence[Work]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, positions and cache slots of all new tokens, [tokens] int64 each, moved to the device as one."""
        ids: list[int] = []
        positions, slots = [], []
        for w in work:
            ids += w.seq.token_ids[w.start : w.start + w.count]
            positions.append(np.arange(w.start, w.start + w.count))
            slots.append(self._slots(w, w.start, w.start + w.count))
        flat = torch.from_numpy(np.stack([np.array(ids, dtype=np.int64), np.concatenate(positions), np.concatenate(slots)]))
        tokens, where, into = flat.to(self.device, non_blocking=True)
        return tokens, where, into

    def _slots(self, work: Work, first: int, end: int) -> np.ndarray:
        """Where tokens first to end of a sequence lie in the flattened cache, int64."""
        low = first // self.page_size
        if end - first == 1:
            return np.array([work.seq.pages[low] * self.page_size + first % self.page_size])
        token = np.arange(first, end)
        pages = np.array(work.seq.pages[low : -(-end // self.page_size)], dtype=np.int64)
        return pages[token // self.page_size - low] * self.page_size + token % self.page_size

    def _step(self, work: Sequence[Work], positions: Tensor, slots: Tensor) -> StepAttention:
        decodes = next((i for i, w in enumerate(work) if w.count != 1 or w.start == 0), len(work))
        prefills = work[decodes:]
        return StepAttention(
            turn=self._turns.index_select(0, positions),
            slots=slots,
            decodes=decodes,
            decode=self._plan_decode(work[:decodes]) if decodes else None,
            prefill=self._plan_prefill(prefills) if prefills else None,
            context=[
                self._plan_context(prefills, run) for run in context_chunks([w.start for w in prefills], self.context_chunk)
            ],
        )

    def _plan_decode(self, work: Sequence[Work]) -> Planned:
        lens = [w.start + 1 for w in work]
        used = [-(-n // self.page_size) for n in lens]
        table = np.zeros((len(work), max(used)), dtype=np.int32)
        for row, w, pages in zip(table, work, used, strict=True):
            row[:pages] = w.seq.pages[:pages]
        batch = BatchLayout.make(
            [1] * len(work),
            lens,
            self.device,
            block_table=torch.from_numpy(table).to(self.device, non_blocking=True),
            page_size=self.page_size,
        )
        kernel = self.bound.decode(len(work), sum(lens), ragged=max(lens) * len(work) > 2 * sum(lens))
        return Planned(kernel, kernel.plan(batch, scale=self.config.softmax_scale))

    def _plan_prefill(self, work: Sequence[Work]) -> Planned:
        counts = [w.count for w in work]
        kernel = self.bound.prefill(len(work), sum(counts), lse=any(w.start for w in work))
        batch = BatchLayout.make(counts, counts, self.device)
        return Planned(kernel, kernel.plan(batch, scale=self.config.softmax_scale))

    def _plan_context(self, work: Sequence[Work], run: Sequence[Piece]) -> ContextChunk:
        first, last = run[0][0], run[-1][0]
        counts = [w.count for w in work[first : last + 1]]
        keys = [end - start for _, start, end in run]
        before = sum(w.count for w in work[:first])
        slots = np.concatenate([self._slots(work[request], start, end) for request, start, end in run])
        kernel = self.bound.context(len(run), sum(counts), sum(keys))
        batch = BatchLayout.make(counts, keys, self.device)
        return ContextChunk(
            rows=slice(before, before + sum(counts)),
            slots=torch.from_numpy(slots).to(self.device, non_blocking=True),
            attend=Planned(kernel, kernel.plan(batch, scale=self.config.softmax_scale)),
        )


def _name(dtype: torch.dtype) -> DType:
    names: dict[torch.dtype, DType] = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    return names[dtype]
