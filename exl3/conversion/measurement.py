"""What each group of layers costs in quality when it comes from one or another EXL3 version.

One group at a time is put into the reference model, all else stays as it is there; the measure is
the KL divergence from the reference's own output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError
from ..model import Config, Model
from ..modules import Batch, Linear, LoadOptions, Module
from ..util.measures import compute_kl_div
from .capture import TOKENS_PER_PASS

LEVELS = ("layers", "attention and MLP", "layers that share an input", "linear layers")
_LOGIT_TOKENS = 512  # bounds the logits that are alive at once


@dataclass(frozen=True, slots=True)
class Group:
    """Linear layers that are chosen together; `module` is the index of their top-level module."""

    name: str
    module: int
    keys: tuple[str, ...]
    is_head: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group as one version has it. `bits`: of its weights without padding and scales. `kl`: nats
    per token."""

    version: int
    bits: int
    kl: float


@dataclass(frozen=True, slots=True)
class GroupResult:
    """All that was measured of a group; `numel` counts its weights."""

    group: Group
    numel: int
    candidates: tuple[Candidate, ...]


def linear_groups(model: Model, level: int) -> list[Group]:
    """The groups of a model at a level, see `LEVELS`, in running order; a head is its own."""
    groups: dict[tuple[int, str], list[Linear]] = {}
    for index, top in enumerate(model.modules):
        for layer in top:
            if isinstance(layer, Linear):
                parent = layer.key.rpartition(".")[0]
                name = (top.key, parent, layer.share, layer.key)[level]
                groups.setdefault((index, layer.key if layer.is_head else name), []).append(layer)
    return [
        Group(name, index, tuple(layer.key for layer in layers), layers[0].is_head)
        for (index, name), layers in groups.items()
    ]


def bits_of_layer(config: Config, layer: Linear) -> int:
    """Bits per weight of a layer in the files: those of its trellis, or of its plain dtype."""
    name = f"{layer.key}.trellis"
    if name in config.stc:
        return config.stc.info(name).shape[-1] // 16
    keys = (f"{layer.key}.weight", f"{layer.alt_key}.weight")
    key = next((k for k in keys if k in config.stc), None)
    if key is None:
        raise ConfigError(f"{config.directory}: has neither {name} nor {keys[0]}")
    return config.stc.info(key).dtype.itemsize * 8


def check_same_model(first: Config, others: Sequence[Config]) -> None:
    """Raises ConfigError if models differ in architecture or in any size."""
    for other in others:
        for name in ("architecture", "hidden_size", "num_hidden_layers", "vocab_size"):
            a, b = getattr(first, name), getattr(other, name)
            if a != b:
                raise ConfigError(
                    f"{other.directory}: {name} is {b}, {first.directory} has {a}; versions of one "
                    "model are expected"
                )
        sizes = [
            {m.key: (m.in_features, m.out_features) for m in model if isinstance(m, Linear)}
            for model in (Model.from_config(first), Model.from_config(other))
        ]
        if sizes[0] != sizes[1]:
            raise ConfigError(f"{other.directory}: layers differ from those of {first.directory}")


class Measurement:
    """A loaded reference, calibration rows, and versions to compare.

    Args:
        reference: loaded on the CPU; not changed in the end.
        versions: of the same model.
        input_ids: int64 (rows, cols).
        logits_bytes: memory for the reference's logits; if they need more, they are computed again
            for each measurement.
    """

    def __init__(
        self, reference: Model, versions: Sequence[Config], input_ids: Tensor, logits_bytes: int
    ) -> None:
        self.reference = reference
        self.configs = list(versions)
        self.models = [Model.from_config(config) for config in versions]
        self.ids = input_ids
        self.head = copy.copy(reference.head)  # stays as it is while the other is exchanged
        self._layers = {m.key: m for m in reference if isinstance(m, Linear)}
        self._own: list[dict[str, Linear]] = [
            {m.key: m for m in model if isinstance(m, Linear)} for model in self.models
        ]
        final = self._reference_output()
        self._final = final
        size = input_ids.numel() * reference.config.vocab_size * 2
        self._kept: list[Tensor] | None = None
        if size <= logits_bytes:
            self._kept = [self._logits(self.head, x).half() for x in self._pieces(final)]

    def count(self, level: int) -> int:
        """Measurements that a level takes."""
        return len(linear_groups(self.reference, level)) * len(self.models)

    @torch.inference_mode()
    def run(self, level: int, step: Callable[[str], None]) -> list[GroupResult]:
        """Measure every group; `step` is called with its name before each measurement."""
        groups: dict[int, list[Group]] = {}
        for group in linear_groups(self.reference, level):
            groups.setdefault(group.module, []).append(group)
        results = []
        state = self._embedded()
        for index in range(1, len(self.reference.modules)):
            module = self.reference.modules[index]
            for group in groups.get(index, []):
                found = []
                for version in range(len(self.models)):
                    step(group.name)
                    with self._exchanged(group, version) as bits:
                        found.append(Candidate(version, bits, self._divergence(index, state)))
                numel = sum(self._layers[key].weights_numel() for key in group.keys)
                results.append(GroupResult(group, numel, tuple(found)))
            if index <= len(self.reference.blocks):
                state = self._advance(module, state)
        return results

    @contextmanager
    def _exchanged(self, group: Group, version: int) -> Iterator[int]:
        """The group's layers as a version has them; gives the bits of their weights."""
        config, bits = self.configs[version], 0
        kept = []
        try:
            for key in group.keys:
                layer, own = self._layers[key], self._own[version][key]
                bits += bits_of_layer(config, own) * own.weights_numel()
                own.load(config.stc, LoadOptions(plain_dtype=torch.float32))
                kept.append((layer, layer.plain, layer.bias, layer.weight))
                layer.plain, layer.bias, layer.weight = own.plain, own.bias, own.weight
                own.unload()
            yield bits
        finally:
            for layer, plain, bias, weight in kept:
                layer.plain, layer.bias, layer.weight = plain, bias, weight

    def _parts(self) -> Iterator[slice]:
        """Rows that are run together."""
        step = max(1, TOKENS_PER_PASS["cpu"] // self.ids.shape[1])
        for start in range(0, self.ids.shape[0], step):
            yield slice(start, start + step)

    def _embedded(self) -> Tensor:
        flat = self.reference.embedding.forward(self.ids.reshape(-1))
        return flat.view(*self.ids.shape, -1)

    def _advance(self, module: Module, state: Tensor) -> Tensor:
        """State (rows, cols, hidden) behind a module."""
        cols = state.shape[1]
        out = [
            module.forward(x.flatten(0, 1), Batch.dense(x.shape[0], cols)).view_as(x)
            for x in (state[part] for part in self._parts())
        ]
        return torch.cat(out)

    @torch.inference_mode()
    def _reference_output(self) -> Tensor:
        state = self._embedded()
        for block in self.reference.blocks:
            state = self._advance(block, state)
        return state

    @staticmethod
    def _pieces(state: Tensor) -> tuple[Tensor, ...]:
        return state.flatten(0, 1).split(_LOGIT_TOKENS)

    @torch.inference_mode()
    def _logits(self, head: Linear, x: Tensor) -> Tensor:
        batch = Batch.dense(x.shape[0], 1)
        assert isinstance(head, type(self.head))
        return head.logits(x, batch, self.reference.final_norm)

    def _divergence(self, start: int, state: Tensor) -> float:
        """Mean KL over all tokens of the model as it is now, run from the module `start` on."""
        for block in self.reference.blocks[start - 1 :]:
            state = self._advance(block, state)
        vocab, total = self.reference.config.vocab_size, 0.0
        for index, (x, y) in enumerate(
            zip(self._pieces(state), self._pieces(self._final), strict=True)
        ):
            kept = self._kept
            target = self._logits(self.head, y) if kept is None else kept[index]
            logits = self._logits(self.reference.head, x)
            total += float(compute_kl_div(logits, target, vocab).double().sum())
        return total / self.ids.numel()
