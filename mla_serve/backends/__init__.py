"""Attention kernels behind one contract (`base`). The torch ones are built in, others come by entry point (`registry`)."""

from mla_serve.backends.base import AttentionError, Backend, BatchLayout, Kind, Limits, Plan, State
from mla_serve.backends.merge import merge
from mla_serve.backends.padded import Padded, Padding
from mla_serve.backends.reference import Reference, reference_decode, reference_prefill
from mla_serve.backends.registry import BUILT_IN, load_backends

__all__ = [
    "BUILT_IN",
    "AttentionError",
    "Backend",
    "BatchLayout",
    "Kind",
    "Limits",
    "Padded",
    "Padding",
    "Plan",
    "Reference",
    "State",
    "load_backends",
    "merge",
    "reference_decode",
    "reference_prefill",
]
