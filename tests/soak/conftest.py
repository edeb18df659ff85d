from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mla_serve.engine.embedded.threads import available_threads
from tests.server.conftest import checkpoint

__all__ = ["checkpoint"]


@pytest.fixture(params=sorted({1, available_threads()}), ids=lambda count: f"{count}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """torch on one thread, then on as many as an engine on this host takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
