"""Opening a model: a directory of safetensors files, or a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError
from ..util.file import read_json
from .base import ModelSource
from .safetensors import SafetensorsCollection

CONFIG_NAME = "config.json"


def open_source(path: str | os.PathLike[str], *, load_method: str | None = None) -> ModelSource:
    """Open a model directory (config.json and *.safetensors), a .gguf file, or a directory with
    exactly one .gguf file and no safetensors.

    Raises:
        ConfigError: nothing of that kind there.
        FormatError: a damaged file.
    """
    place = Path(path).expanduser()
    if place.is_file() and place.suffix.lower() == ".gguf":
        return _open_gguf(place, load_method)
    if place.is_file():
        raise ConfigError(f"{place}: expected a model directory or a .gguf file")
    if not place.is_dir():
        raise ConfigError(f"{place}: no such directory; expected a model directory or .gguf file")
    has_safetensors = any(place.glob("*.safetensors"))
    ggufs = sorted(file for file in place.iterdir() if file.suffix.lower() == ".gguf")
    if ggufs and not has_safetensors:
        if len(ggufs) > 1:
            names = ", ".join(file.name for file in ggufs[:4])
            raise ConfigError(
                f"{place}: holds {len(ggufs)} .gguf files ({names}); name one of them"
            )
        return _open_gguf(ggufs[0], load_method)
    config_file = place / CONFIG_NAME
    if not config_file.is_file():
        raise ConfigError(f"{place}: no {CONFIG_NAME}; expected a Hugging Face model directory")
    return ModelSource(
        config_dict=read_json(config_file),
        stc=SafetensorsCollection(place, load_method),
        directory=str(place),
        config_filename=str(config_file),
        origin=str(place),
    )


def _open_gguf(file: Path, load_method: str | None) -> ModelSource:
    from .gguf import open_gguf

    return open_gguf(file, load_method=load_method)
