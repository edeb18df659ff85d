"""The bundled demo model: a tiny DeepSeek-V3-shaped network, and the questions that it answers word for word.

Importing this package reads no weights and does not import torch; `python -m mla_serve.demo.train` made the model.
"""

from __future__ import annotations

from pathlib import Path

from mla_serve.demo.questions import Question, fallback, fault_reply, questions

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"

__all__ = ["MODEL_DIR", "Question", "fallback", "fault_reply", "questions"]
