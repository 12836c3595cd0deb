"""Text form of a layer map: `0..15,11..31`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import ConfigError

_ITEM = re.compile(r"(\d+)|(\d*)\.\.(\d*)")


def parse_layer_map(text: str | Iterable[int], num_layers: int) -> list[int]:
    """Layer numbers in the order they run.

    Args:
        text: a list of ints, or items `3`, `2..5` (inclusive), `5..2` (down), `4..`, `..4`, `..`.
    Raises:
        ConfigError: bad syntax, an empty map, or a layer that the model lacks.
    """
    layers: list[int] = []
    if isinstance(text, str):
        for item in text.replace(" ", "").split(","):
            match = _ITEM.fullmatch(item)
            if match is None:
                raise ConfigError(
                    f"layer_map: {item!r} is neither a number nor a range such as 4..9"
                )
            if match[1] is not None:
                layers.append(int(match[1]))
                continue
            first = int(match[2]) if match[2] else 0
            last = int(match[3]) if match[3] else num_layers - 1
            step = 1 if last >= first else -1
            layers.extend(range(first, last + step, step))
    else:
        layers = [int(layer) for layer in text]
    if not layers:
        raise ConfigError("layer_map: names no layer")
    bad = [layer for layer in layers if not 0 <= layer < num_layers]
    if bad:
        raise ConfigError(f"layer_map: layer {bad[0]} is not in 0..{num_layers - 1}")
    return layers
