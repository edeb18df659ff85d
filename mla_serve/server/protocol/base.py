"""How bodies are read: strictly typed, null means absent everywhere, unknown fields are kept aside."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

FAST = Field(fail_fast=True)  # one wrong item is enough: ten thousand errors would only cost time

TokenIds = Annotated[list[int], FAST]
Strings = Annotated[list[str], FAST]


class Strict(BaseModel):
    """No coercion ("5" is no integer); unknown fields are kept aside, so that an answer can say that they were ignored."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


def header_names(names: Iterable[str]) -> list[str]:
    """Those names of unknown fields that are fit for a header, and not too many."""
    return [name for name in names if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name)][:32]
