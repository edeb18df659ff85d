"""What MODEL may be, and what it is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_serve.models import public_name


def test_a_hub_model_is_called_as_it_was_typed_and_a_directory_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert public_name(None) == "mla-serve-demo"
    assert public_name("deepseek-ai/DeepSeek-V2-Lite") == "deepseek-ai/DeepSeek-V2-Lite"
    (tmp_path / "tiny" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "tiny")
    assert public_name(str(tmp_path / "tiny")) == public_name(f"{tmp_path}/tiny/") == "tiny"
    assert public_name(str(tmp_path / "link")) == "link"
    monkeypatch.chdir(tmp_path / "tiny")
    assert public_name(".") == "tiny"
    assert public_name("..") == tmp_path.name
