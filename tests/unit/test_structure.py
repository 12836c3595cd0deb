"""The rules of the source tree that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8

# What a package may import of exl3's other packages. Not listed: may import everything.
LAYERS: dict[str, set[str]] = {
    "ops": set(),
    "util": set(),
    "quant": {"ops"},
    "loader": {"util"},
    "tokenizer": {"util"},
    "sampling": {"ops"},
    "cache": {"ops"},
    "modules": {"ops", "quant", "cache", "loader"},
    "model": {"ops", "quant", "modules", "cache", "loader", "tokenizer", "util"},
}
FORBIDDEN_EVERYWHERE = {"server"}

# Signatures that the public interface fixes (ExLlamaV3's names and order).
FIXED_SIGNATURES = {
    "generator/generator.py": {"__init__", "generate"},
    "generator/job.py": {"__init__"},
    "generator/filter/llguidance.py": {"__init__"},
    "sampling/presets.py": {"__init__"},
    "model/model.py": {"load", "load_gen"},
    "model_init.py": {"add_args", "init"},
    "ops/attention.py": {"paged_attention"},
    "ops/rope.py": {"rope_append_"},
}


def python_files() -> list[Path]:
    return sorted((ROOT / "exl3").rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tracked(*patterns: str) -> list[Path]:
    out = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    return [ROOT / name for name in out.split("\0") if name and (ROOT / name).is_file()]


def hits_of(pattern: str, *globs: str) -> list[str]:
    """`file:line` of every line of the tracked files that matches, this file left out."""
    found = re.compile(pattern)
    return [
        f"{relative(path)}:{number}"
        for path in tracked(*globs)
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if found.search(line)
    ]


def imported_packages(path: Path) -> Iterator[str]:
    """Names of the exl3 packages that a file imports, anywhere in it."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            parts = base + (node.module.split(".") if node.module else [])
            names = [[*parts, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        for name in names:
            if len(name) > 1 and name[0] == "exl3" and (ROOT / "exl3" / name[1]).is_dir():
                yield name[1]


@pytest.mark.parametrize("path", python_files(), ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    parts = path.relative_to(ROOT / "exl3").parts
    if len(parts) < 2:
        return
    own = parts[0]
    for name in imported_packages(path):
        assert name == own or name not in FORBIDDEN_EVERYWHERE
        if own in LAYERS:
            assert name == own or name in LAYERS[own], f"{own} must not import {name}"


def test_files_are_small() -> None:
    long = {
        relative(path): lines
        for path in tracked("*.py", "*.cpp", "*.h", "*.cu", "*.cuh")
        if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not long


@pytest.mark.parametrize("path", python_files(), ids=relative)
def test_functions_are_small(path: Path) -> None:
    fixed = FIXED_SIGNATURES.get(str(path.relative_to(ROOT / "exl3")), set())
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        doc = ast.get_docstring(node)
        lines = (node.end_lineno or 0) - node.lineno + 1
        lines -= len(doc.splitlines()) if doc else 0
        assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"
        args = node.args
        names = [a.arg for a in args.posonlyargs + args.args + args.kwonlyargs]
        count = len([n for n in names if n not in ("self", "cls")])
        shape_rule = node.name == "_"  # the op's schema fixes its parameters
        assert count <= MAX_PARAMETERS or node.name in fixed or shape_rule, (
            f"{node.name}: {count} parameters"
        )


def test_import_needs_no_compiled_library_and_sets_no_environment() -> None:
    code = (
        "import os, sys; before = dict(os.environ); import exl3; "
        "assert dict(os.environ) == before; assert 'exl3_ext' not in sys.modules; "
        "assert 'torch' not in sys.modules; print(exl3.__version__)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_no_absolute_paths_or_registry_hosts() -> None:
    pattern = r"(?<![\w.])/(?:work|home|root)/|pypi\.org|pythonhosted|huggingface\.co"
    assert not hits_of(pattern, "*.py", "*.cpp", "*.h", "*.md", "*.toml", "Makefile", ".ci/*")


def test_no_todo_without_issue() -> None:
    assert not hits_of(r"TODO(?!\(#\d+\))", "*.py", "*.cpp", "*.h", "*.cu", "*.cuh")
