from __future__ import annotations

import pytest

from tests.backends.contenders import Contender, contenders, params
from tests.backends.laws import LAWS, laws_for

PAIRS = [(name, contender) for contender in contenders() for name in laws_for(contender.backend, contender.shape)]


@pytest.mark.parametrize(("law", "contender"), params(PAIRS))
def test_law(law: str, contender: Contender) -> None:
    LAWS[law].check(contender.backend, contender.shape)
