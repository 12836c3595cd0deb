"""Texts for calibration: those on every Python installation, the user's own, or a public set."""

from __future__ import annotations

import ast
import gc
import importlib
import json
import random
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ConfigError, FormatError
from ..util.file import storage_errors

_TEXT_FIELDS = ("text", "content")
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
)
_MAX_FILE_BYTES = 400_000
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def source_files(seed: int) -> list[Path]:
    """Source files of the standard library, in an order that depends on the seed only."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in root.rglob("*.py")
        if not _SKIPPED_FOLDERS.intersection(file.relative_to(root).parts)
        and file.stat().st_size < _MAX_FILE_BYTES
    ]
    files.sort(key=lambda file: file.relative_to(root).as_posix())
    random.Random(f"{seed}:files").shuffle(files)
    return files


def source_code(seed: int, size: int) -> str:
    """About `size` characters of Python source, whole files."""
    return _join(map(_read_source, source_files(seed)), size)


def prose(seed: int, size: int) -> str:
    """About `size` characters of English: help topics, then documentation strings."""
    topics = _help_topics()
    random.Random(f"{seed}:topics").shuffle(topics)
    half = _join(iter(topics), size // 2)
    strings = (text for file in source_files(seed) for text in _documentation(file))
    with _no_collection():
        return half + "\n\n" + _join(strings, size - len(half))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Syntax trees are so many objects that looking for cycles takes longer than making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _help_topics() -> list[str]:
    """The language reference that `help()` prints; some distributions leave it out."""
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ImportError:
        return []
    return [str(text) for _, text in sorted(module.topics.items())]


def _documentation(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(_read_source(file))
    except (SyntaxError, ValueError):
        return
    for node in _statements(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) > 80:
                yield text


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """As `ast.walk`, in the same order, but without expressions: most of a tree."""
    queue: deque[ast.AST] = deque([tree])
    while queue:
        node = queue.popleft()
        yield node
        for name in node._fields:
            parts = getattr(node, name, None)
            if isinstance(parts, list):
                queue.extend(part for part in parts if isinstance(part, _STATEMENTS))


def _read_source(file: Path) -> str:
    return file.read_text("utf-8", "replace")


def _join(texts: Iterator[str], size: int) -> str:
    parts: list[str] = []
    length = 0
    for text in texts:
        if length >= size:
            break
        parts.append(text)
        length += len(text) + 2
    return "\n\n".join(parts)


def user_texts(path: str) -> list[str]:
    """The user's texts: one file, or all files of a directory, by name.

    `.jsonl` files hold one object a line with a key `text`; anything else is plain UTF-8.

    Raises:
        ConfigError: nothing there, or nothing in it.
        FormatError: a file that is not text.
    """
    place = Path(path).expanduser()
    if place.is_file():
        files = [place]
    elif place.is_dir():
        files = [
            f
            for f in sorted(place.rglob("*"))
            if f.is_file() and not any(p.startswith(".") for p in f.relative_to(place).parts)
        ]
    else:
        raise ConfigError(f"--cal_data {path}: no such file or directory")
    texts = [text for file in files for text in _file_texts(file)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ConfigError(f"--cal_data {path}: no text found in {len(files)} files")
    return texts


def _file_texts(file: Path) -> list[str]:
    with storage_errors(file, "read"):
        data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{file}: not UTF-8 text (byte {error.start}); calibration needs plain text or .jsonl"
        ) from error
    if file.suffix != ".jsonl":
        return [text]
    return [_line_text(file, number, line) for number, line in _lines(text)]


def _lines(text: str) -> Iterable[tuple[int, str]]:
    return ((i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip())


def _line_text(file: Path, number: int, line: str, column: str | None = None) -> str:
    wanted = (column,) if column else _TEXT_FIELDS
    try:
        value = json.loads(line)
    except ValueError as error:
        raise FormatError(f"{file}, line {number}: not JSON ({error})") from error
    for name in wanted:
        if isinstance(value, dict) and isinstance(value.get(name), str):
            return value[name]
    raise FormatError(f"{file}, line {number}: expected an object with {' or '.join(wanted)}")


def dataset_texts(name: str, size: int) -> list[str]:
    """About `size` characters of a public data set: `REPO[:split/column]`.

    Files of the repository whose name contains the split (default `train`) are fetched one by one
    until there is enough: .txt, .jsonl, or .parquet where pyarrow is installed.

    Raises:
        ConfigError: the set cannot be fetched, or has no such files.
    """
    repository, _, rest = name.partition(":")
    split, _, column = rest.partition("/")
    split = split or "train"
    texts: list[str] = []
    length = 0
    for path in _dataset_files(repository, split):
        for text in _dataset_file_texts(path, column or None):
            texts.append(text)
            length += len(text)
            if length >= size:
                return texts
    if not texts:
        raise ConfigError(f"--cal_dataset {name}: no text in the files of split {split!r}")
    return texts


def _dataset_files(repository: str, split: str) -> Iterator[Path]:
    from huggingface_hub import HfApi, hf_hub_download

    try:
        names = sorted(HfApi().list_repo_files(repository, repo_type="dataset"))
        kinds = (".txt", ".jsonl", ".parquet")
        chosen = [n for n in names if split in n and Path(n).suffix in kinds]
        for chosen_name in chosen:
            yield Path(hf_hub_download(repository, chosen_name, repo_type="dataset"))
    except Exception as error:  # the client raises many kinds, all meaning "cannot be fetched"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"--cal_dataset {repository}: cannot fetch ({reason}); check name and network, or use"
            " -cd with local text"
        ) from error
    if not chosen:
        raise ConfigError(
            f"--cal_dataset {repository}: no .txt, .jsonl or .parquet file with {split!r} in its"
            " name"
        )


def _dataset_file_texts(path: Path, column: str | None) -> Iterator[str]:
    if path.suffix == ".parquet":
        yield from _parquet_texts(path, column)
    elif path.suffix == ".jsonl":
        for number, line in _lines(path.read_text("utf-8")):
            yield _line_text(path, number, line, column)
    else:
        yield path.read_text("utf-8")


def _parquet_texts(path: Path, column: str | None) -> Iterator[str]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"{path}: .parquet needs pyarrow (pip install pyarrow), or use -cd with local text"
        ) from error
    file = parquet.ParquetFile(path)
    name = column or next((c for c in _TEXT_FIELDS if c in file.schema_arrow.names), None)
    if name not in file.schema_arrow.names:
        raise ConfigError(
            f"{path}: no column {name or 'text'!r}, only {', '.join(file.schema_arrow.names)}"
        )
    for batch in file.iter_batches(columns=[name]):
        yield from (text for text in batch.column(0).to_pylist() if isinstance(text, str))
