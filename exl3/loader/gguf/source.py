"""A GGUF file as a source of tensors and as a model directory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import FormatError, UnsupportedError
from ...settings import settings
from ...util.file import read_json, storage_errors, write_json
from ..base import ModelSource, TensorInfo, TensorSource
from ..reader import LoadMetrics, RangeReader
from ..safetensors import SAMPLE_BYTES, sample_positions
from .config import architecture_of, build_config, build_generation_config
from .header import GgufTensor, read_header
from .names import ROPE_FACTORS, heads_of, hugging_face_name
from .tokenizer import build_tokenizer, build_tokenizer_config, chat_templates

logger = logging.getLogger(__name__)

# Part of the name of a rebuilt folder; raise it when what is rebuilt changes.
_REBUILD_VERSION = 1
_CONFIG = "config.json"


def _gguf_package() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise UnsupportedError(
            "reading GGUF files needs the gguf package: pip install 'exl3[gguf]'"
        ) from error
    return gguf


class GgufTensors(TensorSource):
    """The tensors of a GGUF file under their Hugging Face names and in that layout.

    Float16 tensors stay float16, all others are de-quantised to float32.

    Raises:
        UnsupportedError: an architecture, tensor or tensor type that cannot be read.
        FormatError: a damaged file.
    """

    def __init__(self, path: str | os.PathLike[str], load_method: str | None = None) -> None:
        self._gguf = _gguf_package()
        sizes = {int(kind): size for kind, size in self._gguf.GGML_QUANT_SIZES.items()}
        self.header = read_header(Path(path), sizes)
        self._arch = architecture_of(self.header)
        self._reader = RangeReader(threaded=load_method != "python")
        self._tensors: dict[str, GgufTensor] = {}
        for tensor in self.header.tensors:
            if tensor.name == ROPE_FACTORS:
                continue
            key = hugging_face_name(tensor.name)
            if key is None:
                raise UnsupportedError(
                    f"{path}: tensor {tensor.name!r} has no place in {self._arch.class_name}"
                )
            self._check_type(tensor)
            self._tensors[key] = tensor
        self._keys = sorted(self._tensors)

    def _type_name(self, tensor: GgufTensor) -> str:
        return self._gguf.GGMLQuantizationType(tensor.ggml_type).name

    def _check_type(self, tensor: GgufTensor) -> None:
        """Find out now, by one block, whether the package can de-quantise a type."""
        kinds = self._gguf.GGMLQuantizationType
        if tensor.ggml_type in (kinds.F32, kinds.F16, kinds.BF16):
            return
        _, block_bytes = self._gguf.GGML_QUANT_SIZES[kinds(tensor.ggml_type)]
        block = torch.zeros(1, block_bytes, dtype=torch.uint8).numpy()
        try:
            self._gguf.quants.dequantize(block, kinds(tensor.ggml_type))
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{self.header.path}: tensor {tensor.name!r} is {self._type_name(tensor)}, which "
                "the gguf package cannot de-quantise; take another file of the model"
            ) from error

    @property
    def metrics(self) -> LoadMetrics:
        return self._reader.metrics

    def keys(self) -> Sequence[str]:
        return self._keys

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def info(self, key: str) -> TensorInfo:
        tensor = self._tensor(key)
        half = tensor.ggml_type == self._gguf.GGMLQuantizationType.F16
        dtype = torch.float16 if half else torch.float32
        count = 1
        for dim in tensor.shape:
            count *= dim
        path = str(self.header.path)
        return TensorInfo(key, tensor.shape, dtype, count * dtype.itemsize, path)

    def get(self, key: str, *, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._tensor(key)
        weight = self._dequantised(tensor)
        heads = heads_of(tensor.name) if self._arch.interleaved else None
        if heads is not None:
            weight = self._halves(weight, tensor, heads)
        return weight if dtype is None else weight.to(dtype)

    def rope_factors(self) -> list[float] | None:
        """The RoPE frequency factors that some files carry."""
        for tensor in self.header.tensors:
            if tensor.name == ROPE_FACTORS:
                return self._dequantised(tensor).flatten().tolist()
        return None

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(self.header.raw)
        digest.update(f"\0{self.header.size}".encode())
        path = self.header.path
        with storage_errors(path, "read"), path.open("rb") as file:
            for tensor in sorted(self.header.tensors, key=lambda t: t.offset):
                for position in sample_positions(tensor.n_bytes):
                    file.seek(tensor.offset + position)
                    digest.update(file.read(min(SAMPLE_BYTES, tensor.n_bytes)))
        return digest.hexdigest()

    def close(self) -> None:
        self._reader.close()

    def _tensor(self, key: str) -> GgufTensor:
        if key not in self._tensors:
            raise self._missing(key, str(self.header.path))
        return self._tensors[key]

    def _dequantised(self, tensor: GgufTensor) -> Tensor:
        kinds = self._gguf.GGMLQuantizationType
        plain = {kinds.F32: torch.float32, kinds.F16: torch.float16, kinds.BF16: torch.bfloat16}
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        data = torch.empty(rows, tensor.n_bytes // rows, dtype=torch.uint8)
        self._reader.read(
            self.header.path,
            offset=tensor.offset,
            target=data,
            identity=(self.header.size, self.header.mtime_ns),
        )
        kind = kinds(tensor.ggml_type)
        if kind in plain:
            weight = data.view(plain[kind])
            weight = weight.float() if kind == kinds.BF16 else weight
        else:
            weight = torch.from_numpy(self._gguf.quants.dequantize(data.numpy(), kind))
        return weight.reshape(tensor.shape)

    def _halves(self, weight: Tensor, tensor: GgufTensor, heads: str) -> Tensor:
        """Rows of a head from interleaved RoPE pairs to two halves."""
        prefix = f"{self.header.metadata['general.architecture']}.attention.head_count"
        count = self.header.metadata.get(prefix)
        if heads == "k":
            count = self.header.metadata.get(f"{prefix}_kv", count)
        rows = weight.shape[0]
        if not isinstance(count, int) or count <= 0 or rows % (2 * count):
            raise FormatError(
                f"{self.header.path}: tensor {tensor.name!r} has {rows} rows for {count} heads, "
                "expected an even number for each"
            )
        paired = weight.view(count, rows // count // 2, 2, *weight.shape[1:])
        return paired.transpose(1, 2).reshape(weight.shape)


def open_gguf(path: str | os.PathLike[str], *, load_method: str | None = None) -> ModelSource:
    """Open a GGUF file as a model; config and tokenizer are rebuilt into the cache folder."""
    file = Path(path)
    tensors = GgufTensors(file, load_method)
    folder = _rebuilt_folder(tensors)
    return ModelSource(
        config_dict=read_json(folder / _CONFIG),
        stc=tensors,
        directory=str(folder),
        config_filename=str(folder / _CONFIG),
        origin=str(file),
    )


def _rebuilt_folder(tensors: GgufTensors) -> Path:
    """The folder of this file's config and tokenizer; made once, and whole or not at all."""
    header = tensors.header
    # Of the tensors themselves only the RoPE factors have a part in what is rebuilt.
    known = (_REBUILD_VERSION, header.size, tensors.rope_factors())
    digest = hashlib.sha256(repr(known).encode() + header.raw)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", header.path.stem)[:64]
    folder = settings().cache_dir / "gguf" / f"{stem}-{digest.hexdigest()[:16]}"
    if (folder / _CONFIG).is_file() and (folder / "tokenizer.json").is_file():
        return folder
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{stem}.", dir=folder.parent))
        try:
            _rebuild(tensors, temporary)
            temporary.chmod(0o755)
            if folder.is_dir():  # incomplete: something was deleted from it
                shutil.rmtree(folder, ignore_errors=True)
            _rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    logger.info("%s: config and tokenizer rebuilt in %s", header.path, folder)
    return folder


def _rename(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / _CONFIG).is_file():  # else another process was faster
            raise


def _rebuild(tensors: GgufTensors, folder: Path) -> None:
    header = tensors.header
    write_json(folder / _CONFIG, build_config(header, tensors.rope_factors()))
    write_json(folder / "generation_config.json", build_generation_config(header))
    write_json(folder / "tokenizer_config.json", build_tokenizer_config(header))
    tokenizer = json.loads(build_tokenizer(header).to_str())
    write_json(folder / "tokenizer.json", tokenizer, indent=None)
    for name, text in chat_templates(header).items():
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")
