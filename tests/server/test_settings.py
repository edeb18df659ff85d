"""Key files and generation defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mla_serve.engine.embedded.messages import EngineConfig
from mla_serve.errors import UserError
from mla_serve.server.defaults import GenerationDefaults
from mla_serve.server.settings import ServerSettings, read_api_keys


def test_api_keys_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# for the team\n\nfirst\n  second  \n")
    assert read_api_keys(path) == ("first", "second")
    assert read_api_keys(None) == ()


def test_a_key_with_white_space_inside_is_named_by_its_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# two words\nfirst\nse cret\n")
    with pytest.raises(UserError, match=r"^line 3 of the API key file .* has white space inside a key") as raised:
        read_api_keys(path)
    assert "cret" not in str(raised.value)


@pytest.mark.parametrize("content", [None, b"", b"# none\n\n", b"\xff\xfe"])
def test_a_key_file_without_keys_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="the API key file"):
        read_api_keys(path)


def test_settings_do_not_show_their_keys() -> None:
    settings = ServerSettings(engine=EngineConfig(model="/models/tiny"), api_keys=("secret",))
    assert "secret" not in repr(settings)
    assert settings.model_name == "tiny"


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (None, GenerationDefaults()),
        ({"eos_token_id": 1}, GenerationDefaults()),
        ({"temperature": 0.6, "top_p": 0.95, "do_sample": True}, (0.6, 0.95, 0, None)),
        ({"temperature": 0.6, "top_k": 50, "do_sample": False}, (0.0, 1.0, 0, None)),
        ({"max_new_tokens": 100, "top_k": 20}, (1.0, 1.0, 20, 100)),
    ],
)
def test_generation_defaults(tmp_path: Path, file: dict[str, object] | None, expected: object) -> None:
    if file is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(file))
    found = GenerationDefaults.from_dir(tmp_path)
    if isinstance(expected, tuple):
        assert (found.temperature, found.top_p, found.top_k, found.max_tokens) == expected
        assert found.source.startswith("generation_config.json (")
    else:
        assert found == expected


@pytest.mark.parametrize(
    "content",
    ["{bad", "[]", '{"temperature": "hot"}', '{"top_k": 1.5}', '{"top_p": -1}', '{"top_k": true}', '{"top_p": 0}',
     '{"top_p": 1.5}', '{"temperature": Infinity}', '{"temperature": NaN}'],
)  # fmt: skip
def test_a_broken_generation_config_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match="repair or remove it"):
        GenerationDefaults.from_dir(tmp_path)
