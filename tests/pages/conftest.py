"""The page is also looked at on a running server."""

from tests.server.conftest import checkpoint, server

__all__ = ["checkpoint", "server"]
