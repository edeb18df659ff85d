"""The command line as a user meets it: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from mla_serve import __version__
from mla_serve.cli import main
from mla_serve.demo import MODEL_DIR, questions


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error of `mla-serve WORDS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["mla-serve", *words])
    with pytest.raises(SystemExit) as ended:
        main()  # typer always exits
    out = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out.out, out.err


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda *words: run(monkeypatch, capsys, *words)


def test_the_console_script_is_installed_and_knows_its_version() -> None:
    script = Path(sys.executable).with_name("mla-serve")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"mla-serve {__version__}\n"


def test_importing_the_package_and_asking_for_help_needs_no_heavy_library() -> None:
    heavy = "('torch', 'transformers', 'fastapi', 'vllm', 'flashinfer', 'transformer_engine', 'flash_attn')"
    code = f"import sys, mla_serve.cli; sys.exit(' '.join(m for m in {heavy} if m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr.strip() == ""


def test_doctor_names_every_backend_with_a_reason(cli) -> None:
    status, out, _ = cli("doctor", "--json")
    report = json.loads(out)
    backends = {row["name"]: row for row in report["backends"]}
    assert status == 0
    assert backends["torch-math"]["usable"] is True
    assert all(row["usable"] or row["reason"] for row in backends.values())
    assert report["versions"]["torch"]
    assert (backends["torch-flash"]["library"], backends["fa3"]["library"]) == ("torch", "vllm or flash-attn-3")
    status, out, _ = cli("doctor")
    assert status == 0
    assert "torch-flash" in out


def test_explain_measures_once_then_reads_the_table(cli, tmp_path: Path) -> None:
    table = tmp_path / "decisions.json"
    words = ("explain", "--phase", "prefill", "--q-len", "32", "--heads", "2", "--dtype", "float32", "--decisions", str(table))
    status, out, _ = cli(*words, "--json")
    first = json.loads(out)
    assert status == 0
    assert first["policy"] == "measured"
    assert first["bucket"]["q_len"] == 32
    reasons = {(row["backend"], row["padding"] is None): row["reason"] for row in first["candidates"]}
    assert reasons["torch-flash", True] == "needs equal QK and V widths (192, 128)"
    assert first["winner"] in first["why"]
    again = json.loads(cli(*words, "--json")[1])
    assert again["measured_at"] == first["measured_at"]
    assert again["candidates"] == first["candidates"]
    text = cli(*words)[1]
    assert "needs equal QK and V widths (192, 128)" in text


def test_explain_obeys_a_pin_and_never_swaps_it(cli) -> None:
    shape = ("explain", "--phase", "prefill", "--q-len", "32", "--heads", "2", "--dtype", "float32", "--json")
    assert json.loads(cli(*shape, "--attention", "prefill=torch-math")[1])["winner"] == "torch-math"
    status, out, err = cli(*shape, "--attention", "prefill=torch-flash+native")
    assert (status, out) == (1, "")
    assert "needs equal QK and V widths (192, 128)" in err


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("serve", "/no/such/dir"), 1, "there is no directory /no/such/dir"),
        (("serve", "--attention", "prefill=flash9"), 1, "no kernel is called 'flash9'"),
        (("serve", "--attention", "warmup=torch-math"), 1, "there is no phase 'warmup'"),
        (("serve", "--policy", "fastest"), 2, "there is no policy 'fastest'"),
        (("serve", "--engine", "sglang"), 2, "there is no engine 'sglang'"),
        (("serve", "--port", "70000"), 2, "less than or equal to 65535"),
        (("serve", "--dtype", "int3"), 2, "there is no dtype 'int3'"),
        (("probe", "--grid", "moon"), 1, "there is no grid 'moon'"),
        (("probe", "--tp", "3"), 1, "4 heads cannot be divided among 3 ranks"),
        (("explain", "--phase", "encode"), 2, "there is no phase 'encode'"),
        (("explain", "--qk", "500"), 2, "500"),
        (("table", "show", "/no/such/file.json"), 1, "there is no decision file"),
        (("bench", "serve", "--against", "llama"), 2, "there is no peer 'llama'"),
        (("bench", "attention", "--emulate", "sm80"), 1, "there is no GPU here"),
        (("serve", "--attention", "decode=flashmla"), 1, "page 16: needs a CUDA device, this is cpu"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_bad_input_is_one_clear_sentence(cli, words: tuple[str, ...], status: int, says: str) -> None:
    code, out, err = cli(*words)
    assert code == status
    assert out == ""
    assert says in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    if status == 1:
        assert len(err.strip().splitlines()[-1]) < 400


def broken(directory: Path, **fields: object) -> str:
    config = json.loads((MODEL_DIR / "config.json").read_text()) | fields
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, directory)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def test_a_broken_checkpoint_is_one_clear_sentence(cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{")
    cases = {
        str(tmp_path / "empty"): "config.json",
        str(tmp_path / "bad"): "config.json",
        broken(tmp_path / "llama", architectures=["LlamaForCausalLM"]): "LlamaForCausalLM",
        broken(tmp_path / "unweighted"): "safetensors",
    }
    for directory, says in cases.items():
        for command in (("serve", directory, "--port", "0"), ("probe", directory)):
            if command[0] == "probe" and "unweighted" in directory:
                continue  # a grid needs the config alone
            status, _, err = cli(*command)
            assert status == 1, (command, err)
            last = err.strip().splitlines()[-1]
            assert last.startswith("mla-serve: ")
            assert says in last


def test_serve_says_its_start_as_json_answers_and_drains(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("mla-serve")
    command = [script, "serve", "--port", "0", "--json", "--threads", "1", "--num-pages", "256", "--probe", "off"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            start = json.loads(process.stdout.readline())
            assert start["model"] == "mla-serve-demo"
            assert start["directory"] == str(MODEL_DIR)
            assert any(line.startswith("decode") and "torch-mla" in line for line in start["attention"])
            client = openai.OpenAI(base_url=f"{start['url']}/v1", api_key="none", max_retries=0)
            answer = client.chat.completions.create(
                model=start["model"], messages=[{"role": "user", "content": "What is MLA?"}]
            )
            expected = next(question.answer for question in questions() if question.prompt == "What is MLA?")
            assert answer.choices[0].message.content == expected
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
