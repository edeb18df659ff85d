"""The laws of the contract, as functions of any backend: each raises LawBroken, which names the law and the backend.

The suite runs them on every real backend, native and padded, and on two fakes; `test_mutants.py` shows that they have teeth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from mla_serve.backends import AttentionError, Backend, Padded, Plan, merge
from mla_serve.shapes import AttentionShape, Phase
from tests.backends.cases import LIMITS, SCALE, Case, Result, make, packed, with_batch
from tests.backends.fakes import Watched
from tests.backends.judging import LawBroken, agree, require

__all__ = ["LAWS", "LawBroken", "broken_laws", "laws_for"]


@dataclass(frozen=True)
class Law:
    name: str
    check: Callable[[Backend, AttentionShape], None]
    applies: Callable[[Backend, AttentionShape], bool]


LAWS: dict[str, Law] = {}


def law(applies: Callable[[Backend, AttentionShape], bool] = lambda backend, shape: True):
    """Registers check_NAME as the law NAME, for the backends and shapes that it speaks about."""

    def register(check: Callable[[Backend, AttentionShape], None]) -> Callable[[Backend, AttentionShape], None]:
        name = check.__name__.removeprefix("check_")
        LAWS[name] = Law(name, check, applies)
        return check

    return register


def laws_for(backend: Backend, shape: AttentionShape) -> list[str]:
    return [name for name, law in LAWS.items() if law.applies(backend, shape)]


def broken_laws(backend: Backend, shape: AttentionShape) -> dict[str, str]:
    """The laws that `backend` breaks, with what each says."""
    broken = {}
    for name in laws_for(backend, shape):
        try:
            LAWS[name].check(backend, shape)
        except LawBroken as error:
            broken[name] = str(error)
    return broken


def _absorbed(backend: Backend, shape: AttentionShape) -> bool:
    return shape.absorbed


def lengths(shape: AttentionShape, *, batch: int = 3) -> tuple[list[int], list[int]]:
    """A ragged batch that fits the phase: square in prefill, longer context, one or more tokens on a cache."""
    q_lens = [shape.q_len] * batch if shape.absorbed else [5, 1, 9, 4][:batch]
    kv_lens = {Phase.PREFILL: q_lens, Phase.CONTEXT: [33, 7, 2, 18][:batch], Phase.DECODE: [5, 40, 17, 64][:batch]}
    return q_lens, kv_lens[shape.phase]


@law()
def check_scale(backend: Backend, shape: AttentionShape) -> None:
    """The plan's scale multiplies the logits, whatever the widths are (K06)."""
    for scale in (SCALE, 0.135234, 0.0625):
        case = make(shape, *lengths(shape), backend.device)
        agree("scale", backend, case, case.answer(backend, scale=scale), case.expected(scale), f"at scale {scale}")


@law(lambda backend, shape: backend.gives_lse)
def check_lse(backend: Backend, shape: AttentionShape) -> None:
    """Natural log, float32, [tokens, heads]; none where none is asked for, and the same output then."""
    case = make(shape, *lengths(shape), backend.device)
    out, lse = case.answer(backend)
    require(lse is not None, "lse", backend, "gives none")
    assert lse is not None
    form = (lse.dtype, lse.shape, lse.is_contiguous())
    require(form == (torch.float32, out.shape[:2], True), "lse", backend, f"is {form}")
    want_out, want_lse = case.expected()
    agree("lse", backend, case, (want_out.to(out.dtype), lse), (want_out, want_lse))
    alone, none = case.answer(backend, need_lse=False)
    require(none is None, "lse", backend, "gives one unasked")
    agree("lse", backend, case, (alone, None), case.expected(), "without the LSE")


@law(lambda backend, shape: shape.causal)
def check_causal(backend: Backend, shape: AttentionShape) -> None:
    """Bottom-right: query i of Sq sees keys up to Sk - Sq + i (K12)."""
    for q_lens, kv_lens in (([128], [400]), ([3], [7]), ([1], [400]), ([3, 3, 2], [7, 7, 2]), ([4, 6], [9, 3])):
        if backend.even_queries and len(set(q_lens)) > 1:
            continue
        sized = replace(shape, q_len=max(q_lens)) if shape.absorbed else shape
        case = make(sized, q_lens, kv_lens, backend.device, unread=1e4 if backend.leaks_nan else math.nan)
        agree("causal", backend, case, case.answer(backend), case.expected(), f"with {q_lens} queries on {kv_lens} keys")


@law()
def check_empty(backend: Backend, shape: AttentionShape) -> None:
    """Requests without keys give zeros and -inf, also into an output full of NaN; without queries, nothing (K09)."""
    if shape.absorbed:
        batches = [([shape.q_len] * 64, [0] * 20 + [13] + [0] * 43), ([shape.q_len] * 3, [0, 0, 0])]
    elif shape.phase is Phase.PREFILL:
        batches = [([0, 4, 0, 3], [0, 4, 0, 3]), ([2, 4, 3], [0, 4, 0])]
    else:
        batches = [([3, 0, 2, 5], [0, 4, 0, 9]), ([3, 2], [0, 0])]
    for q_lens, kv_lens in batches:
        case = make(shape, q_lens, kv_lens, backend.device)
        out, lse = case.answer(backend, out=case.blank())
        want = case.expected()
        agree("empty", backend, case, (out, lse), want, f"with {kv_lens} keys")
        dead = want[1] == float("-inf")
        require(not out[dead].any(), "empty", backend, f"output of rows without keys is not exactly 0 with {kv_lens} keys")


@law()
def check_output(backend: Backend, shape: AttentionShape) -> None:
    """Native width, contiguous, the queries' dtype; written into `out` where given, and nowhere beside it."""
    case = make(shape, *lengths(shape), backend.device)
    blank = case.blank()
    out, _ = case.answer(backend, need_lse=False)
    form = (out.shape, out.dtype, out.is_contiguous())
    require(form == (blank.shape, blank.dtype, True), "output", backend, f"is {form}")
    agree("output", backend, case, (out, None), case.expected())
    fence = torch.full((blank.shape[0] + 2, *blank.shape[1:]), 7.0, dtype=blank.dtype, device=blank.device)
    given = fence[1:-1].fill_(float("nan"))
    written, _ = case.answer(backend, need_lse=False, out=given)
    agree("output", backend, case, (given, None), case.expected(), "written into `out`")
    require(written.data_ptr() == given.data_ptr(), "output", backend, "returns another tensor than `out`")
    require(bool((fence[0] == 7).all() and (fence[-1] == 7).all()), "output", backend, "writes beside `out`")


@law()
def check_inputs(backend: Backend, shape: AttentionShape) -> None:
    """Inputs, packed storage and cache are byte-identical after the call (K02)."""
    cases = [("separate tensors", make(shape, *lengths(shape), backend.device)), *packed(shape, backend.device)]
    for name, case in cases:
        before = [t.clone() for t in case.storages]
        case.answer(backend, need_lse=backend.gives_lse)
        same = all(torch.equal(a, b) for a, b in zip(before, case.storages, strict=True))
        require(same, "inputs", backend, f"an input changed ({name})")


@law()
def check_packed(backend: Backend, shape: AttentionShape) -> None:
    """Views of one packed buffer are read through their strides and offsets, never from the buffer's base (K02)."""
    for name, case in packed(shape, backend.device):
        agree("packed", backend, case, case.answer(backend), case.expected(), f"({name})")


@law(lambda backend, shape: isinstance(backend, Padded))
def check_padding(backend: Backend, shape: AttentionShape) -> None:
    """Padded parts are zero before every call, in one buffer of the State's own that a larger batch has dirtied (K02)."""
    assert isinstance(backend, Padded)
    watched = Watched(backend.inner, shape)
    padded = type(backend)(watched, backend.padding)
    state = padded.prepare(shape, LIMITS)
    cases = [make(shape, *lengths(shape, batch=n), backend.device) for n in (4, 2, 4, 1)]
    cases += [replace(case, shape=shape) for _, case in packed(shape, backend.device)]
    for case in cases:
        got = case.run(padded, padded.plan(state, case.batch, scale=SCALE))
        require(not watched.faults, "padding", backend, "; ".join(watched.faults))
        agree("padding", backend, case, got, case.expected(), "in a buffer used before")
        for storage in case.storages:
            inside = range(storage.data_ptr(), storage.data_ptr() + storage.numel())
            at = [name for name, places in watched.places.items() if any(place in inside for place in places)]
            require(not at, "padding", backend, f"{at} padded inside the caller's storage")
    moved = [name for name, places in watched.places.items() if len(places) > 1]
    require(not moved, "padding", backend, f"allocates a padded buffer for {moved} more than once per State")


@law(_absorbed)
def check_unread(backend: Backend, shape: AttentionShape) -> None:
    """What lies in slots that must not be read never changes the answer: +-1e4, and NaN but where that is owned to (K08)."""
    for unread in (1e4, -1e4, *(() if backend.leaks_nan else (math.nan,))):
        case = make(shape, *lengths(shape), backend.device, unread=unread)
        agree("unread", backend, case, case.answer(backend), case.expected(), f"with {unread} in unread slots")


@law(_absorbed)
def check_pages(backend: Backend, shape: AttentionShape) -> None:
    """Any page size of the pool is right or refused with a reason (K08, K14)."""
    for page in (4, 16, 48, 64, 128, 528):
        sized = replace(shape, page_size=page)
        reason = backend.supports(sized)
        if reason is not None:
            require(bool(reason.strip()), "pages", backend, f"refuses page size {page} without a reason")
            continue
        kv_lens = [1, 13, 64, 65]
        case = make(sized, [shape.q_len] * 4, kv_lens, backend.device)
        agree("pages", backend, case, case.answer(backend), case.expected(), f"at page size {page}")


@law(lambda backend, shape: shape.absorbed and backend.takes_cache_scale)
def check_cache_scale(backend: Backend, shape: AttentionShape) -> None:
    """Stored values times `cache_scale` are the latents, as keys and as values."""
    float8 = replace(shape, cache_dtype="float8_e4m3fn")
    if backend.device.type == "cuda" and backend.supports(float8) is None:  # the only cache that some kernels scale
        shape = float8
    for cache_scale in (0.5, 1.75):
        case = replace(make(shape, *lengths(shape), backend.device), cache_scale=cache_scale)
        agree("cache_scale", backend, case, case.answer(backend), case.expected(), f"at cache scale {cache_scale}")


@law()
def check_large_logits(backend: Backend, shape: AttentionShape) -> None:
    """Queries with a standard deviation of 100 give finite, right answers (K13)."""
    for kv_len in (256, 8192) if backend.device.type == "cuda" else (256,):
        q_len = shape.q_len if shape.absorbed else 256 if shape.phase is Phase.PREFILL else 16
        case = make(shape, [q_len], [kv_len], backend.device, spread=100.0)
        # A logit of 1,000 is rounded to 6e-5 in float32, which is the relative error of its exponential.
        slack = 10.0 if shape.dtype == "float32" else 1.0
        agree("large_logits", backend, case, case.answer(backend), case.expected(), f"on {kv_len} keys", slack=slack)


@law(lambda backend, shape: backend.gives_lse)
def check_merge(backend: Backend, shape: AttentionShape) -> None:
    """The state over 3072 keys merged with the state over the next 64 is the state over all of them (K03)."""
    device, old, new = backend.device, 3072, 64
    if shape.absorbed:
        whole = make(shape, [1], [old + new], device)
        one = replace(shape, q_len=1)
        table, page = whole.batch.block_table, shape.page_size
        assert table is not None
        assert page is not None
        first = make(one, [1], [old], device).batch
        last = make(one, [1], [new], device).batch
        parts = [
            with_batch(replace(whole, shape=one, batch=first), block_table=table),
            with_batch(replace(whole, shape=one, batch=last), block_table=table[:, old // page :].contiguous()),
        ]
    else:
        whole = make(replace(shape, causal=True), [new], [old + new], device)
        q, k, v = whole.inputs
        context = replace(shape, phase=Phase.CONTEXT, causal=False)
        parts = [
            replace(make(context, [new], [old], device), inputs=(q, k[:old], v[:old])),
            replace(make(replace(shape, causal=True), [new], [new], device), inputs=(q, k[old:], v[old:])),
        ]
    states = [part.answer(backend) for part in parts]
    merged = merge(*states[0], *states[1])  # type: ignore[arg-type]
    want = whole.expected()
    agree("merge", backend, whole, merged, want)
    if shape.dtype == "float32":
        worst = float((merged[0] - want[0]).abs().max())
        require(worst < 1e-3, "merge", backend, f"off by {worst:.3g} from a single pass")


@law()
def check_plans(backend: Backend, shape: AttentionShape) -> None:
    """Plans live side by side and share nothing that changes; a refreshed Plan is the new step and nothing of the old one."""
    state = backend.prepare(shape, LIMITS)
    first, second, third = (make(shape, *lengths(shape, batch=n), backend.device) for n in (2, 4, 3))
    plan_1 = backend.plan(state, first.batch, scale=SCALE)
    plan_2 = backend.plan(state, second.batch, scale=0.1)
    for what, case, plan, scale in (
        ("the older of two live plans", first, plan_1, SCALE),
        ("the newer of two live plans", second, plan_2, 0.1),
        ("the older of two live plans, again", first, plan_1, SCALE),
    ):
        agree("plans", backend, case, case.run(backend, plan), case.expected(scale), f"({what})")
    if shape.graph:  # has its own law: a captured plan keeps its sizes
        return
    plan_1 = backend.plan(state, third.batch, scale=0.2, reuse=plan_1)
    agree("plans", backend, third, third.run(backend, plan_1), third.expected(0.2), "(a refreshed plan)")
    agree("plans", backend, second, second.run(backend, plan_2), second.expected(0.1), "(beside a refreshed plan)")


@law(lambda backend, shape: backend.device.type == "cuda")
def check_early_plan(backend: Backend, shape: AttentionShape) -> None:
    """Step n + 1 may be planned before step n's kernels have run."""
    state = backend.prepare(shape, LIMITS)
    first, second = (make(shape, *lengths(shape, batch=n), backend.device) for n in (3, 4))
    first.run(backend, backend.plan(state, first.batch, scale=SCALE))  # compiles what is compiled on first use
    torch.cuda.synchronize()
    plan = backend.plan(state, first.batch, scale=SCALE)
    torch.cuda._sleep(200_000_000)  # about a tenth of a second, in cycles
    got = first.run(backend, plan)
    after = second.run(backend, backend.plan(state, second.batch, scale=SCALE))
    agree("early_plan", backend, first, got, first.expected(), "(planned over)")
    agree("early_plan", backend, second, after, second.expected(), "(planned early)")


@law(lambda backend, shape: backend.capturable and shape.absorbed)
def check_replay(backend: Backend, shape: AttentionShape) -> None:
    """Captured once, replayed with other lengths, other block tables and fewer live rows, on the same addresses."""
    shape = replace(shape, graph=True)
    reason = backend.supports(shape)
    require(reason is None, "replay", backend, f"says it can be captured and refuses: {reason}")
    state = backend.prepare(shape, LIMITS)
    steps = ([64, 3, 40, 17], [1, 70, 9, 33], [12, 80, 0, 0], [0, 0, 0, 0], [5, 6, 7, 8])
    cases = [make(shape, [shape.q_len] * 4, kv_lens, backend.device, table_width=6) for kv_lens in steps]
    pool = torch.full((32, *cases[0].inputs[2].shape[1:]), float("nan"), dtype=cases[0].inputs[2].dtype, device=backend.device)
    inputs = tuple(t.clone() for t in cases[0].inputs[:2])
    plan = backend.plan(state, cases[0].batch, scale=SCALE)
    static = replace(cases[0], inputs=(*inputs, pool))
    replay = _capture(backend, static, plan)
    for step, case in enumerate(cases):
        pool.fill_(float("nan"))
        pool[: case.inputs[2].shape[0]] = case.inputs[2]
        for buffer, value in zip(inputs, case.inputs[:2], strict=True):
            buffer.copy_(value)
        refreshed = backend.plan(state, case.batch, scale=SCALE, reuse=plan)
        require(refreshed is plan, "replay", backend, "a refreshed plan is another object")
        agree("replay", backend, case, replay(), case.expected(), f"(step {step}, {steps[step]} keys)")


def _capture(backend: Backend, case: Case, plan: Plan) -> Callable[[], Result]:
    """A CUDA graph of one run; on a CPU the run itself, which may look at nothing but its plan and its inputs either."""
    if backend.device.type != "cuda":
        return lambda: case.run(backend, plan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.run(backend, plan)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = case.run(backend, plan)

    def replay() -> Result:
        graph.replay()
        return result

    return replay


@law()
def check_refusal(backend: Backend, shape: AttentionShape) -> None:
    """What a backend cannot do is refused with a reason that a person can read, and never tried (K11)."""
    for name, odd in _odd_shapes(shape):
        reason = backend.supports(odd)
        if reason is None:
            continue
        require(len(reason.strip()) > 10, "refusal", backend, f"refuses {name} with {reason!r}")
        try:
            backend.prepare(odd, LIMITS)
        except AttentionError as error:
            named = backend.name in str(error) and reason in str(error)
            require(named, "refusal", backend, f"prepare refuses {name} with {str(error)!r}")
        else:
            require(False, "refusal", backend, f"prepares {name}, which it does not support")
    case = make(shape, *lengths(shape), backend.device)
    state = case.prepare(backend)
    for batch in (replace(case.batch, host_lens_exact=False), replace(case.batch, q_lens_host=None, kv_lens_host=None)):
        blind = replace(case, batch=batch)
        try:
            plan = backend.plan(state, batch, scale=SCALE)
        except AttentionError as error:
            require(backend.needs_host_lens, "refusal", backend, f"needs host lengths and does not say so: {error}")
        else:
            require(not backend.needs_host_lens, "refusal", backend, "plans without the exact host lengths that it needs")
            agree("refusal", backend, case, blind.run(backend, plan), case.expected(), "without exact host lengths")


def _odd_shapes(shape: AttentionShape) -> Sequence[tuple[str, AttentionShape]]:
    other = {
        Phase.DECODE: AttentionShape(Phase.PREFILL, 1, 4, 4, shape.heads, 192, 128, 64, shape.dtype),
        Phase.PREFILL: AttentionShape(Phase.DECODE, 1, 1, 4, shape.heads, 576, 512, 64, shape.dtype, page_size=16),
        Phase.CONTEXT: AttentionShape(Phase.DECODE, 1, 1, 4, shape.heads, 576, 512, 64, shape.dtype, page_size=16),
    }
    return (
        ("the other form", other[shape.phase]),
        ("wider keys than values", shape.widened(qk=shape.v + 64)),
        ("wider values than keys", shape.widened(v=shape.qk + 16)),
        ("a float8 input", replace(shape, dtype="float8_e4m3fn")),
        ("a graph", replace(shape, graph=True)),
        ("more heads", shape.widened(heads=shape.heads + 3)),
    )
