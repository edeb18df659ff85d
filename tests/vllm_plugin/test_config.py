"""Settings: variables over a file over defaults, and a sentence for each value that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_serve.errors import UserError
from mla_serve.vllm_plugin.config import Settings, takes_default

FILE = """
decisions = "/data/decisions.json"
policy = "availability"
probe = "missing"
budget = 30
default = true
expected_context = 4096
[pins]
decode = "torch-mla"
prefill = "torch-flash+pad"
"""


def test_nothing_must_be_set() -> None:
    assert Settings.load({}) == Settings()
    assert not takes_default({})


def test_variables_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mla.toml"
    path.write_text(FILE)
    environ = {"MLA_SERVE_CONFIG": str(path), "MLA_SERVE_BUDGET": "2.5", "MLA_SERVE_DEFAULT": "0"}
    settings = Settings.load(environ)
    assert settings == Settings(
        decisions="/data/decisions.json",
        policy="availability",
        probe="missing",
        budget=2.5,
        default=False,
        expected_context=4096,
        pins=(("decode", "torch-mla"), ("prefill", "torch-flash+pad")),
    )
    assert settings.pinned == {"decode": "torch-mla", "prefill": "torch-flash+pad"}
    assert not takes_default(environ)
    assert takes_default({"MLA_SERVE_CONFIG": str(path)})
    assert takes_default({"MLA_SERVE_DEFAULT": "1"})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("POLICY", "fastest", "MLA_SERVE_POLICY is 'fastest'; use measured or availability"),
        ("POLICY", "batch-invariant", "use measured or availability"),
        ("PROBE", "yes", "use off, missing or all"),
        ("BUDGET", "0", "give a number above 0"),
        ("BUDGET", "inf", "give a number above 0"),
        ("BUDGET", "soon", "MLA_SERVE_BUDGET is 'soon'"),
        ("EXPECTED_CONTEXT", "4k", "give a whole number of at least 1"),
        ("ABSORB_UP_TO", "0", "give a whole number of at least 1"),
        ("DEFAULT", "maybe", "use 1 or 0"),
        ("PINS", "torch-mla", "write PHASE=KERNEL"),
        ("PINS", "decode=flash-mla", "no kernel is called 'flash-mla'"),
        ("PINS", "dekode=torch-mla", "there is no phase 'dekode'"),
        ("DEFUALT", "1", "which mla_serve does not know; it knows MLA_SERVE_DECISIONS"),
    ],
)
def test_a_bad_variable_is_one_sentence(name: str, value: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        Settings.load({f"MLA_SERVE_{name}": value})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pin = 'decode=torch-mla'", "sets 'pin', which mla_serve does not know"),
        ("budget = true", "give a number above 0"),
        ("pins = 3", "must be pins like 'decode=torch-mla'"),
        ("decisions = 3", "must be a text"),
        ("budget = ", "is no TOML file"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mla.toml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        Settings.load({"MLA_SERVE_CONFIG": str(path)})
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"MLA_SERVE_CONFIG names /none\.toml, which cannot be read"):
        Settings.load({"MLA_SERVE_CONFIG": "/none.toml"})


def test_what_cannot_be_read_is_no_default(caplog: pytest.LogCaptureFixture) -> None:
    """Asked in processes that may serve no MLA model at all: those must start."""
    assert not takes_default({"MLA_SERVE_DEFAULT": "perhaps"})
    assert not takes_default({"MLA_SERVE_CONFIG": "/none.toml"})
    assert not takes_default({"MLA_SERVE_PINS": "nonsense"})
    assert next(record.message.partition(";")[0] for record in caplog.records) == "MLA_SERVE_DEFAULT is 'perhaps'"
