"""The embedded engine: torch alone, on a CPU or one GPU, in a process of its own."""

from mla_serve.engine.embedded.client import EmbeddedEngine
from mla_serve.engine.embedded.messages import EngineConfig

__all__ = ["EmbeddedEngine", "EngineConfig"]
