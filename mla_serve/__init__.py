"""mla_serve serves models with Multi-head Latent Attention, each attention call through the kernel measured best for it."""

__version__ = "0.1.0"
