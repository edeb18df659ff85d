"""The page as a server gives it: of the same server that the tests of HTTP share."""

from tests.server.conftest import checkpoint, server

__all__ = ["checkpoint", "server"]
