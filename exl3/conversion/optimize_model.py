"""Putting a model together from the layers of several EXL3 versions, after `measure_model`.

`prepare(parser.parse_args())` checks and chooses, `main` writes the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..errors import ConfigError, Exl3Error, FormatError
from ..loader import SafetensorsCollection, TensorSource, TensorSpec, write_sharded
from ..loader.base import TensorInfo
from ..model import Config, Model
from ..modules import Linear
from ..util.file import read_json, storage_errors, write_json
from ..version import __version__
from .arguments import Parser
from .choose import choose
from .command import run_command
from .convert_model import one_line
from .measure_model import FORMAT
from .measurement import Candidate, Group, GroupResult, bits_of_layer, check_same_model
from .write import REPORT_NAME, copy_file, tensor_storage

Prepared = tuple[dict[str, Any], "Plan | None", bool, str | None]

_WRITTEN = ("config.json", "quantization_config.json", REPORT_NAME)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to take from where."""

    configs: tuple[Config, ...]
    results: tuple[GroupResult, ...]
    chosen: tuple[Candidate, ...]

    def bits(self) -> float:
        """Average bits per weight without the head."""
        pairs = [
            (r.numel, c.bits)
            for r, c in zip(self.results, self.chosen, strict=True)
            if not r.group.is_head
        ]
        return sum(bits for _, bits in pairs) / max(sum(numel for numel, _ in pairs), 1)

    def kl(self) -> float:
        """Divergence to be expected, nats per token: the sum of those measured."""
        return sum(c.kl for c in self.chosen)


def _make_parser() -> Parser:
    parser = Parser(
        prog="python -m exl3.conversion.optimize_model",
        description="Put a model together from EXL3 versions that were measured.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-m", "--measurement", metavar="FILE", help="what measure_model wrote")
    add("-o", "--out_dir", metavar="DIR", help="directory for the model")
    add("-b", "--bits", type=float, help="average bits per weight, without the head")
    add("-ss", "--shard_size", type=int, default=8192, help="MB per file, 0: one file")
    add("-i", "--in_dir", nargs="+", metavar="DIR", help="the versions, if they were moved")
    add("-v", "--verbose", action="store_true", help="errors show where they came from")
    return parser


parser = _make_parser()


def prepare(args: argparse.Namespace) -> Prepared:
    """Check and choose. Returns (in_args, plan, True, None), or with False the reason."""
    try:
        return vars(args), _plan(vars(args)), True, None
    except (Exl3Error, OSError, ImportError) as error:
        return {}, None, False, one_line(error)


def _plan(values: dict[str, Any]) -> Plan:
    for short, name in (("-m", "measurement"), ("-o", "out_dir"), ("-b", "bits")):
        if not values[name]:
            raise ConfigError(f"{short} --{name} is required")
    if values["shard_size"] < 0:
        raise ConfigError(f"-ss --shard_size: expected 0 or more, got {values['shard_size']}")
    measured = read_json(values["measurement"])
    if measured.get("format") != FORMAT:
        raise FormatError(
            f"{values['measurement']}: format is {measured.get('format')!r}, expected {FORMAT!r}"
        )
    try:
        versions = [(v["directory"], v["fingerprint"]) for v in measured["versions"]]
        results = tuple(_result(group, len(versions)) for group in measured["groups"])
    except (KeyError, TypeError, IndexError) as error:
        raise FormatError(f"{values['measurement']}: damaged: {error!r}") from error
    configs = _open(values["in_dir"] or [name for name, _ in versions], versions)
    out = Path(values["out_dir"]).expanduser().resolve()
    if any(Path(config.directory).resolve() == out for config in configs):
        raise ConfigError(f"-o --out_dir {out}: is one of the versions")
    if out.is_dir() and any(out.glob("*.safetensors")):
        raise ConfigError(f"-o --out_dir {out}: holds a model already; give another directory")
    plan = Plan(configs, results, tuple(choose(results, values["bits"])))
    _check_bits(plan)
    return plan


def _result(values: dict[str, Any], versions: int) -> GroupResult:
    group = Group(values["name"], values["module"], tuple(values["keys"]), bool(values["head"]))
    candidates = tuple(
        Candidate(int(c["version"]), int(c["bits"]), float(c["kl"])) for c in values["candidates"]
    )
    if not candidates or any(not 0 <= c.version < versions for c in candidates):
        raise IndexError(f"group {group.name}")
    return GroupResult(group, int(values["numel"]), candidates)


def _open(directories: Sequence[str], versions: Sequence[tuple[str, str]]) -> tuple[Config, ...]:
    """The versions in the order in which they were measured, however they are given."""
    found = [Config.from_directory(name) for name in directories]
    by_fingerprint = {config.stc.fingerprint(): config for config in found}
    missing = [name for name, digest in versions if digest not in by_fingerprint]
    if missing:
        raise ConfigError(
            f"{missing[0]}: this version is not as it was measured, nor among "
            f"{', '.join(directories)}; give it with -i, or measure again"
        )
    configs = tuple(by_fingerprint[digest] for _, digest in versions)
    check_same_model(configs[0], configs[1:])
    return configs


def _check_bits(plan: Plan) -> None:
    """The measurement speaks of the layers that these versions have."""
    layers = {m.key: m for m in Model.from_config(plan.configs[0]) if isinstance(m, Linear)}
    known = [key for result in plan.results for key in result.group.keys]
    if sorted(known) != sorted(layers):
        other = sorted(set(known) ^ set(layers))
        raise FormatError(f"the measurement is of other layers than the model's: {other[:3]}")
    for result, candidate in zip(plan.results, plan.chosen, strict=True):
        config = plan.configs[candidate.version]
        bits = sum(
            bits_of_layer(config, layers[key]) * layers[key].weights_numel()
            for key in result.group.keys
        )
        if bits != candidate.bits:
            raise FormatError(
                f"{result.group.name} has {bits} bits in {config.directory}, the measurement says "
                f"{candidate.bits}"
            )


class Mixed(TensorSource):
    """The tensors of the chosen versions; all that is no linear layer is the first one's."""

    def __init__(self, plan: Plan) -> None:
        sources = [config.stc for config in plan.configs]
        layers = {key for result in plan.results for key in result.group.keys}
        self._source: dict[str, TensorSource] = {
            key: sources[0]
            for key in sources[0].keys()  # noqa: SIM118
            if key.rpartition(".")[0] not in layers
        }
        for result, candidate in zip(plan.results, plan.chosen, strict=True):
            source = sources[candidate.version]
            for layer in result.group.keys:
                self._source |= {key: source for key in source.list(layer)}

    def keys(self) -> Sequence[str]:
        return sorted(self._source)

    def info(self, key: str) -> TensorInfo:
        return self._source[key].info(key)

    def get(self, key: str, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._source[key].get(key, dtype=dtype)

    def fingerprint(self) -> str:
        raise NotImplementedError


def main(in_args: dict[str, Any], job_state: Plan, console: Console | None = None) -> bool:
    """Write the model; True when it is written.

    Raises:
        StorageError: the disk is full or not writable.
        FormatError: what was written does not open as a model.
    """
    console = console or Console(stderr=True)
    plan, first = job_state, job_state.configs[0]
    folder = Path(in_args["out_dir"]).expanduser()
    with storage_errors(folder, "create"):
        folder.mkdir(parents=True, exist_ok=True)
    mixed = Mixed(plan)
    specs = [
        TensorSpec(key, info.shape, info.dtype)
        for key, info in ((key, mixed.info(key)) for key in _ordered(first, mixed))
    ]
    write_sharded(folder, specs, mixed.get, shard_mb=in_args["shard_size"])
    for file in first.source.files():
        if file.name not in _WRITTEN:
            copy_file(file, folder / file.name)
    _write_config(folder, plan, mixed)
    with SafetensorsCollection(folder) as written:
        for key in mixed.keys():  # noqa: SIM118
            if not torch.equal(written.get(key), mixed.get(key)):
                raise FormatError(f"{folder}: tensor {key} reads back other than it was written")
    Model.from_config(Config.from_directory(str(folder)))
    for index, config in enumerate(plan.configs):
        count = sum(c.version == index for c in plan.chosen)
        console.print(f"{config.directory}: {count} groups", highlight=False, soft_wrap=True)
    console.print(
        f"{folder}: {plan.bits():.3f} bits per weight, KL {plan.kl():.4f} expected",
        highlight=False,
        soft_wrap=True,
    )
    return True


def _ordered(config: Config, stc: TensorSource) -> list[str]:
    """Keys in running order, those of no module last."""
    keys = [key for module in Model.from_config(config).modules for key in stc.list(module.key)]
    return list(dict.fromkeys([*keys, *stc.keys()]))


def _write_config(folder: Path, plan: Plan, mixed: Mixed) -> None:
    first = plan.configs[0]
    config = dict(first.source.config_dict)
    before = config.get("quantization_config") or {}
    heads = [
        c.bits // r.numel for r, c in zip(plan.results, plan.chosen, strict=True) if r.group.is_head
    ]
    quantization = {
        **before,
        "quant_method": "exl3",
        "version": __version__,
        "bits": round(plan.bits(), 2),
        "head_bits": heads[0] if heads else before.get("head_bits"),
    }
    storage = tensor_storage(first, mixed)
    write_json(folder / "quantization_config.json", {**quantization, "tensor_storage": storage})
    write_json(folder / "config.json", {**config, "quantization_config": quantization})


def run(argv: Sequence[str] | None = None) -> int:
    """The command line; errors are one line; returns the exit status."""
    return run_command(parser, prepare, main, argv)


if __name__ == "__main__":
    raise SystemExit(run())
