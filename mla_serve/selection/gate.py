"""Correctness before the clock: a kernel that has not shown the right answer is not timed.

"Ran without an exception" is no success: kernels return log2 for natural log, read slots that nobody wrote, keep an old
step's plan. So every candidate is held against the float32 reference on small batches that are built to make it fail, and
then, on the bucket's full size, on a sample of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_serve.backends.base import AttentionError, Backend, Plan, State
from mla_serve.backends.padded import PaddedState
from mla_serve.selection.company import changed_by_company
from mla_serve.selection.inputs import GARBAGE, Call, limits_of, make_call, poison
from mla_serve.selection.timing import capture
from mla_serve.shapes import AttentionShape

_Sizes = tuple[list[int], list[int]]

_LONGEST = {"cpu": 160, "cuda": 1100}  # tokens; past a tile's border on a CPU, past several splits of the keys on a GPU
_SAMPLED_ROWS = 8


@dataclass(frozen=True, slots=True)
class GateResult:
    """`failure` is None for a kernel that may be timed, else why not, with its figure.

    `error` is the largest relative L2 of a request's output and `lse_error` the largest absolute difference of an LSE, both
    over all runs; None where nothing could be compared. `leaks_nan`: NaN in a slot that must not be read reached the output.
    """

    error: float | None = None
    lse_error: float | None = None
    leaks_nan: bool = False
    failure: str | None = None


class _Failed(Exception):
    """The reason why a candidate is out; never leaves this module."""


def tolerance(shape: AttentionShape) -> float:
    """Largest relative L2 to the float32 reference: 1e-5 where everything is float32, else 1e-2."""
    return 1e-5 if shape.dtype == "float32" and shape.cache_dtype in (None, "float32") else 1e-2


def lse_tolerance(lse: Tensor) -> Tensor:
    """Largest absolute difference to each LSE of the reference."""
    return 2e-3 + 1e-5 * lse.abs()


def check(backend: Backend, shape: AttentionShape, *, seed: int, clean_pool: bool = False) -> GateResult:
    """Runs `backend` (maybe a Padded) on batches of `shape`'s kind and says whether it may serve.

    In order: a ragged batch with empty rows and +-1e4 in every slot that must not be read, its output pre-filled with NaN; the
    same again while a second plan is live; a smaller batch of other lengths on that very plan, so that what the first left
    behind shows; the same with NaN in those slots; where `shape` is served from a CUDA graph, a captured run replayed with
    both. Buffers of a padded form are full of NaN before each run, and all inputs must be byte-identical afterwards. Where
    `shape` asks for batch invariance, requests alone must then give the same bits as among others. `clean_pool` says that the
    cache never holds NaN, which forgives a kernel that lets one
    through; else that disqualifies it. Raises what the kernel raises in `prepare` or its first run.
    """
    judge = _Judge(backend, shape)
    first, second = _first_sizes(shape, backend.device), _second_sizes(shape, backend.device)
    state = backend.prepare(shape, limits_of(first, second))
    longest = max(*first[1], *second[1])  # one width of block table for both, as a captured graph needs
    try:
        large = make_call(shape, *first, backend.device, seed=seed, max_kv=longest)
        small = make_call(shape, *second, backend.device, seed=seed + 1, max_kv=longest)
        plan = backend.plan(state, large.batch, scale=large.scale)
        judge.run(large, plan, need_lse=shape.lse, what="on a ragged batch", may_raise=True)
        backend.plan(state, small.batch, scale=small.scale)
        judge.run(
            large, plan, need_lse=shape.lse, what="without an output of ours, while a second plan is live", give_out=False
        )
        plan = judge.replan(small, plan)
        judge.run(small, plan, need_lse=backend.gives_lse, what="with other lengths on the same plan")
        judge.run_with_nan(small, plan)
        if shape.graph and backend.device.type == "cuda":
            judge.replay(large, small, state)
        if shape.batch_invariant and (changed := changed_by_company(backend, shape, seed=seed)):
            raise _Failed(changed)
    except _Failed as failed:
        return judge.result(str(failed))
    if judge.leaks_nan and not clean_pool:
        return judge.result("lets NaN from slots that must not be read into the output")
    return judge.result(None)


def spot_check(backend: Backend, call: Call, plan: Plan, *, seed: int) -> GateResult:
    """One run at the bucket's full size, a sample of its rows against the reference. Raises what the kernel raises."""
    judge = _Judge(backend, call.shape)
    out = call.empty_output(math.nan)
    _, lse = call.run(backend, plan, need_lse=call.shape.lse, out=out)
    try:
        judge.sample(call, out, lse, seed)
    except _Failed as failed:
        return judge.result(f"at full size: {failed}")
    return judge.result(None)


class _Judge:
    """Runs one backend and keeps the worst figures of all its runs."""

    def __init__(self, backend: Backend, shape: AttentionShape) -> None:
        self.backend, self.shape = backend, shape
        self.expected: dict[int, tuple[Tensor, Tensor]] = {}
        self.errors: list[float] = []
        self.lse_errors: list[float] = []
        self.leaks_nan = False

    def result(self, failure: str | None) -> GateResult:
        return GateResult(max(self.errors, default=None), max(self.lse_errors, default=None), self.leaks_nan, failure)

    def run(self, call: Call, plan: Plan, *, need_lse: bool, what: str, may_raise: bool = False, give_out: bool = True) -> None:
        """Runs `call` and compares. An exception is a failure, unless it is the first run's and `may_raise`."""
        out, before = call.empty_output(math.nan), _bytes(call)
        if isinstance(plan.state, PaddedState):
            for buffer in plan.state.buffers.values():
                buffer.fill_(math.nan)
        try:
            result, lse = call.run(self.backend, plan, need_lse=need_lse, out=out if give_out else None)
        except Exception as error:
            if may_raise or isinstance(error, torch.OutOfMemoryError):
                raise
            raise _Failed(f"raised {describe(error)} {what}") from error
        try:
            self.untouched(call, before)
            self.form(result, out, lse, need_lse=need_lse, same=give_out)
            self.compare(call, result, lse)
        except _Failed as failed:
            raise _Failed(f"{failed} ({what})") from None

    def replan(self, call: Call, plan: Plan) -> Plan:
        """`plan`, refreshed for `call`."""
        try:
            return self.backend.plan(plan.state, call.batch, scale=call.scale, reuse=plan)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise _Failed(f"raised {describe(error)} when a plan was refreshed") from error

    def run_with_nan(self, call: Call, plan: Plan) -> None:
        """The same call again with NaN where nobody may read: right still, or it leaks."""
        poison(call, math.nan)
        known = len(self.errors), len(self.lse_errors)
        try:
            self.run(call, plan, need_lse=self.backend.gives_lse, what="with NaN in unread slots")
        except _Failed:
            # With finite garbage this very call was right, so what is wrong now is the NaN.
            self.leaks_nan = True
            del self.errors[known[0] :], self.lse_errors[known[1] :]
        finally:
            poison(call, GARBAGE)

    def replay(self, large: Call, small: Call, state: State) -> None:
        """One run captured in a CUDA graph, then replayed with `small`'s lengths, pages and live rows, and with `large`'s."""
        pages = max(call.tensors[2].shape[0] for call in (large, small))
        q_nope, q_pe, cache = large.tensors
        pool = cache.new_zeros(pages, *cache.shape[1:])
        pool[: cache.shape[0]] = cache
        static = replace(large, tensors=(q_nope.clone(), q_pe.clone(), pool))
        try:
            plan = self.backend.plan(state, large.batch, scale=large.scale)
            run = capture(lambda: static.run(self.backend, plan, need_lse=self.shape.lse), self.backend.device)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise _Failed(f"raised {describe(error)} when a run was captured in a CUDA graph") from error
        for call, what in ((small, "other lengths"), (large, "the first lengths again")):
            for buffer, value in zip(static.tensors, call.tensors, strict=True):
                buffer[: value.shape[0]] = value
            self.replan(call, plan)
            try:
                self.compare(call, *run())
            except _Failed as failed:
                raise _Failed(f"{failed} (a CUDA graph replayed with {what})") from None

    def untouched(self, call: Call, before: Sequence[Tensor]) -> None:
        for name, buffer, old in zip(_names(call), _bytes(call, copy=False), before, strict=True):
            if not torch.equal(buffer, old):
                raise _Failed(f"wrote into its input ({name})")

    def form(self, result: Tensor, out: Tensor, lse: Tensor | None, *, need_lse: bool, same: bool) -> None:
        """Shapes, strides and dtypes of what came back for `out`; `same`: it must be that very memory."""
        if result.shape != out.shape or result.dtype != out.dtype or not result.is_contiguous():
            got = f"{list(result.shape)} {result.dtype}, strides {list(result.stride())}"
            raise _Failed(f"returned an output of {got}, for {list(out.shape)} {out.dtype}")
        if same and result.data_ptr() != out.data_ptr():
            raise _Failed("did not write into the output it was given")
        if need_lse and lse is None:
            raise _Failed("gave no LSE though one was asked for")
        if lse is not None and (lse.shape != out.shape[:2] or lse.dtype != torch.float32):
            raise _Failed(f"gave an LSE of {list(lse.shape)} {lse.dtype} for {list(out.shape[:2])} float32")

    def compare(self, call: Call, out: Tensor, lse: Tensor | None) -> None:
        # Once per call: what a trap holds changes nothing in the answer.
        if id(call) not in self.expected:
            self.expected[id(call)] = call.expected()
        expected, expected_lse = self.expected[id(call)]
        at = 0
        for q_len in call.batch.q_lens_host or ():
            rows = slice(at, at + q_len)
            self.compare_rows(out[rows], None if lse is None else lse[rows], expected[rows], expected_lse[rows])
            at += q_len

    def sample(self, call: Call, out: Tensor, lse: Tensor | None, seed: int) -> None:
        """First and last row of the first request, last row of the last, and random ones."""
        q_lens = call.batch.q_lens_host or ()
        live = [i for i, q_len in enumerate(q_lens) if q_len]
        generator = torch.Generator().manual_seed(seed)
        picks = [(live[0], 0), (live[0], q_lens[live[0]] - 1), (live[-1], q_lens[live[-1]] - 1)]
        while len(picks) < _SAMPLED_ROWS:
            request = live[int(torch.randint(len(live), (), generator=generator))]
            picks.append((request, int(torch.randint(q_lens[request], (), generator=generator))))
        for request, row in dict.fromkeys(picks):
            at = sum(q_lens[:request]) + row
            rows = slice(at, at + 1)
            self.compare_rows(out[rows], None if lse is None else lse[rows], *call.expected_row(request, row))

    def compare_rows(self, out: Tensor, lse: Tensor | None, expected: Tensor, expected_lse: Tensor) -> None:
        """Rows of one request. Keeps the figures, raises _Failed with the one that is too large."""
        if not out.numel():
            return
        if not torch.isfinite(out).all():
            raise _Failed("output holds NaN or infinity")
        scale = expected.norm()
        error = float((out.float() - expected).norm() / scale) if scale else float(out.float().abs().max())
        self.errors.append(error)
        if error > tolerance(self.shape):
            what = f"output off by {error:.2%}" if scale else f"output {error:.3g} in a row that has no keys and must be zero"
            raise _Failed(f"{what}, relative L2; at most {tolerance(self.shape):.3g}" if scale else what)
        if lse is not None:
            self._compare_lse(lse, expected_lse)

    def _compare_lse(self, lse: Tensor, expected: Tensor) -> None:
        empty = expected == -math.inf
        if not (lse[empty] == -math.inf).all():
            raise _Failed("LSE of a row without keys is not -inf")
        lse, expected = lse[~empty], expected[~empty]
        if not lse.numel():
            return
        if not torch.isfinite(lse).all():
            raise _Failed("LSE of a row with keys is NaN or infinite")
        self.lse_errors.append(float((lse - expected).abs().max()))
        if bool(((lse - expected).abs() > lse_tolerance(expected)).any()):
            off = float((lse - expected).abs().sum() / expected.abs().sum())
            natural = lse * math.log(2.0)
            mended = bool(((natural - expected).abs() <= lse_tolerance(expected)).all())
            hint = "base 2: times ln 2 it is right" if mended else "times ln 2 does not mend it"
            raise _Failed(f"LSE off by {off:.0%} ({hint})")


def describe(error: BaseException) -> str:
    """An exception in one line: its message where it is a backend's own, type and first line else."""
    first = str(error).strip().split("\n", 1)[0]
    return first if isinstance(error, AttentionError) else f"{type(error).__name__}: {first}"


def _first_sizes(shape: AttentionShape, device: torch.device) -> _Sizes:
    """A ragged batch with an empty row. Decode: lengths across page borders, one slot with a query and no keys."""
    longest = _LONGEST.get(device.type, _LONGEST["cpu"])
    if shape.absorbed:
        page, q = shape.page_size or 1, shape.q_len
        kv = max(q, min(shape.kv_len, longest))
        return [q] * 5, [kv + page, max(q, kv // 2), 0, max(q, page), max(q, kv)]
    q, kv = min(shape.q_len, longest), min(shape.kv_len, longest)
    if shape.causal:
        return [q, max(1, q // 3), 0, q, 1], [q, max(1, q // 3), 0, q + 7, 5]
    return [q, max(1, q // 3), 3, 0, 1], [kv, max(1, kv // 2), 0, 0, kv]


def _second_sizes(shape: AttentionShape, device: torch.device) -> _Sizes:
    """Other lengths, fewer live rows, the last ones empty as in a padded graph; causal ones with more keys than queries."""
    longest = _LONGEST.get(device.type, _LONGEST["cpu"])
    if shape.absorbed:
        page, q = shape.page_size or 1, shape.q_len
        empty = 3 if shape.graph else 1  # a captured graph keeps its number of rows
        return [q] * (2 + empty), [q, max(q, page + 1), *([0] * empty)]
    q = min(max(1, shape.q_len // 2), longest)
    if shape.causal:
        return [3, q, 0, 0], [7, q + 33, 0, 0]
    return [q, 2, 0], [9, min(max(1, shape.kv_len // 2), longest), 0]


def _names(call: Call) -> tuple[str, ...]:
    return ("q_nope", "q_pe", "cache", "block table") if call.shape.absorbed else ("q", "k", "packed keys and values")


def _bytes(call: Call, *, copy: bool = True) -> list[Tensor]:
    """The buffers behind a call as bytes: NaN is unlike itself, bytes are not."""
    flat = [buffer.view(torch.uint8) for buffer in call.buffers]
    return [view.clone() for view in flat] if copy else flat
