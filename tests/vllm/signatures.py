"""Every call that a vLLM makes on the plugin's classes, bound to their signatures; and every name the plugin takes from it.

It reads vLLM's Python sources and imports none of them, so a version needs no installing. What it cannot tell: whether values
mean the same, which only running a version can.

    python -m tests.vllm.signatures vllm-0.33.0.whl ...      wheels, or directories that hold vllm/
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).parents[2] / "mla_serve" / "vllm_plugin"
MLA = "model_executor/layers/attention/mla_attention.py"
BACKEND = "v1/attention/backend.py"
PREFILL = "v1/attention/backends/mla/prefill/base.py"

# Our class: its file, and the bases it has in vLLM, nearest first.
CLASSES: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "AttentionBackend": ("decode.py", (("MLACommonBackend", MLA), ("AttentionBackend", BACKEND))),
    "Builder": ("decode.py", (("MLACommonMetadataBuilder", MLA), ("AttentionMetadataBuilder", BACKEND))),
    "Impl": (
        "decode.py",
        (("MLACommonImpl", MLA), ("MLACommonBaseImpl", MLA), ("MLAAttentionImpl", BACKEND), ("AttentionImplBase", BACKEND)),
    ),
    "PrefillBackend": ("prefill.py", (("MLAPrefillBackend", PREFILL),)),
}
# Names too common to tell by the call alone whose method is meant; the base's own signature is compared instead.
COMMON = {"__init__", "build", "clone", "forward", "get_name"}
# An impl that is no MLA's has methods of the same names; those are called elsewhere.
SCOPE = {"Impl": ("mla", "deepseek")}


@dataclass
class Findings:
    """`checked` counts what was compared; `problems` is what would break."""

    checked: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def count(self, what: str, problem: str | None) -> None:
        self.checked[what] = self.checked.get(what, 0) + 1
        if problem is not None:
            self.problems.append(problem)


def check(root: Path) -> Findings:
    """`root` holds the package vllm."""
    found = Findings()
    for name, (file, bases) in CLASSES.items():
        ours = methods(PLUGIN / file, name)
        theirs: dict[str, ast.FunctionDef] = {}
        for base, path in bases:
            for method, node in methods(root / "vllm" / path, base).items():
                if method == "__init__":  # vLLM makes them as the furthest base says; nearer ones have more for subclasses
                    theirs[method] = node
                theirs.setdefault(method, node)
        for method in sorted(ours.keys() & theirs.keys()):
            found.count("overrides", narrower(name, signature(ours[method]), signature(theirs[method]), method))
        for method, node in theirs.items():
            if abstract(node) and method not in ours:
                found.count("abstract methods", f"{name} does not implement {method}, which is abstract")
        for where, call in calls(root / "vllm", (ours.keys() & theirs.keys()) - COMMON, SCOPE.get(name, ("",))):
            found.count("calls", refused(name, signature(ours[call.func.attr]), call, where))  # type: ignore[attr-defined]
    for module, names in imported():
        found.count("names", missing(root, module, names))
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def methods(path: Path, name: str) -> dict[str, ast.FunctionDef]:
    """The functions in the body of class `name` in a file."""
    found = [node for node in tree(path).body if isinstance(node, ast.ClassDef) and node.name == name]
    assert found, f"{path} has no class {name}"
    return {node.name: node for node in found[0].body if isinstance(node, ast.FunctionDef)}


def signature(node: ast.FunctionDef) -> inspect.Signature:
    """Of a method as it is called: without self or cls."""
    parameter, kinds = inspect.Parameter, inspect._ParameterKind
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = len(positional) - len(node.args.defaults)
    found = [
        parameter(arg.arg, kinds.POSITIONAL_OR_KEYWORD, default=None if number >= defaults else parameter.empty)
        for number, arg in enumerate(positional)
    ]
    if not any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list):
        found = found[1:]
    if node.args.vararg:
        found.append(parameter(node.args.vararg.arg, kinds.VAR_POSITIONAL))
    found += [
        parameter(arg.arg, kinds.KEYWORD_ONLY, default=parameter.empty if default is None else None)
        for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    ]
    if node.args.kwarg:
        found.append(parameter(node.args.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)


def abstract(node: ast.FunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "abstractmethod" for mark in node.decorator_list)


def narrower(name: str, ours: inspect.Signature, theirs: inspect.Signature, method: str) -> str | None:
    """Why a call that the base's method takes would not be taken by ours: all by keyword, or only what has no default."""
    named = [p for p in theirs.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for given in (named, [p for p in named if p.default is p.empty]):
        try:
            ours.bind(**{p.name: None for p in given})
        except TypeError as error:
            return f"{name}.{method}{ours} is narrower than vLLM's {method}{theirs}: {error}"
    return None


def calls(root: Path, names: set[str], scope: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
    """Calls of methods of these names, but on super(), in files of vLLM with a word of `scope` in their path."""
    for path in sorted(root.rglob("*.py")):
        if not any(word in str(path.relative_to(root)) for word in scope):
            continue
        text = path.read_text(encoding="utf-8")
        if not any(f".{name}(" in text for name in names):
            continue
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in names:
                continue
            if isinstance(node.func.value, ast.Call) and getattr(node.func.value.func, "id", None) == "super":
                continue
            yield f"{path.relative_to(root.parent)}:{node.lineno}", node


def refused(name: str, ours: inspect.Signature, call: ast.Call, where: str) -> str | None:
    """Why the call would raise TypeError on our method; what * and ** bring is not known and left out."""
    given = [None for arg in call.args if not isinstance(arg, ast.Starred)]
    named = {word.arg: None for word in call.keywords if word.arg is not None}
    open_ended = len(given) < len(call.args) or len(named) < len(call.keywords)
    try:
        (ours.bind_partial if open_ended else ours.bind)(*given, **named)
    except TypeError as error:
        return f"{where} calls {ast.unparse(call.func)}, and {name} takes {ours}: {error}"
    return None


def imported() -> Iterator[tuple[str, list[str]]]:
    """What the plugin takes from vLLM's modules, by import or by `_from`."""
    for path in sorted(PLUGIN.glob("*.py")):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield str(node.module), [alias.name for alias in node.names]
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "_from":
                module, *names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                yield f"vllm.{module}", [str(name) for name in names]


def missing(root: Path, module: str, names: list[str]) -> str | None:
    """The names that a module does not bind at its top level, or by a lazy table of it."""
    base = root / Path(*module.split("."))
    path = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
    if not path.is_file():
        return f"there is no module {module}"
    bound: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name):
            bound.add(node.id)
    lazy = {node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    submodules = {child.stem for child in path.parent.iterdir()} if path.name == "__init__.py" else set()
    unknown = [name for name in names if name not in bound | lazy | submodules]
    return f"{module} has no {', '.join(unknown)}" if unknown else None


def unpacked(wheel: Path, into: Path) -> Path:
    """The Python sources of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into, [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")])
    return into


def main(paths: list[str]) -> int:
    rows: list[dict[str, Any]] = []
    for path in map(Path, paths):
        with tempfile.TemporaryDirectory() as directory:
            found = check(unpacked(path, Path(directory)) if path.suffix == ".whl" else path)
        rows.append({"vllm": path.name.split("-cp")[0], "checked": found.checked, "problems": found.problems})
    print(json.dumps(rows, indent=1))
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
