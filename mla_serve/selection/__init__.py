"""Which kernel serves which shape, and why: candidates, correctness gate, clock, decisions, table, look-up."""

from mla_serve.selection.bound import BoundSelector, Kernel, benchmark_lookup
from mla_serve.selection.candidates import Candidate, candidates
from mla_serve.selection.decision import CandidateResult, Decision
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.selection.pins import PinError, parse_pins
from mla_serve.selection.probe import grid, probe
from mla_serve.selection.report import decision_sentence, render_decision, render_table
from mla_serve.selection.selector import Selector
from mla_serve.selection.table import DecisionTable, default_table_path

__all__ = [
    "BoundSelector",
    "Candidate",
    "CandidateResult",
    "Decision",
    "DecisionTable",
    "Fingerprint",
    "Kernel",
    "PinError",
    "Selector",
    "benchmark_lookup",
    "candidates",
    "decision_sentence",
    "default_table_path",
    "grid",
    "parse_pins",
    "probe",
    "render_decision",
    "render_table",
]
