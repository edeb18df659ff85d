"""vLLM as the engine, for production: its parallelism and its scheduler, our attention and our server."""

from mla_serve.engine.vllm.config import VllmConfig, vllm_arguments
from mla_serve.engine.vllm.engine import VllmEngine

__all__ = ["VllmConfig", "VllmEngine", "vllm_arguments"]
