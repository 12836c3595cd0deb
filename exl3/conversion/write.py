"""Writing the converted model, and checking it (format page, section 3)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import FormatError
from ..loader import SafetensorsCollection, TensorInfo, TensorSource, TensorSpec, write_sharded
from ..model import Config, Model
from ..modules import Linear
from ..quant.packing import MULTIPLIER_NAMES
from ..util.file import atomic_file, storage_errors, write_json
from ..version import __version__
from .checkpoint import QTENSORS, JobState
from .stages import stored_plain

logger = logging.getLogger(__name__)

REPORT_NAME = "conversion_report.json"
_WRITTEN = ("config.json", "quantization_config.json", REPORT_NAME)


@dataclass(frozen=True, slots=True)
class Output:
    """A model to write: finished modules, and the source for whatever no module covers."""

    arguments: dict[str, Any]
    job: JobState
    config: Config
    qtensors: SafetensorsCollection
    extra: tuple[str, ...]
    """Tensors of the source that belong to no module."""

    @classmethod
    def of(cls, arguments: dict[str, Any], job: JobState, config: Config) -> Output:
        """Open what a finished job left in its work directory."""
        finished = SafetensorsCollection(Path(arguments["work_dir"]) / QTENSORS)
        covered: set[str] = set()
        for module in Model.from_config(config).modules:
            covered.update(config.stc.list(module.key))
        extra = tuple(key for key in config.stc.keys() if key not in covered)  # noqa: SIM118
        if extra:
            logger.warning(
                "%d tensors belong to no part of the model and are copied as they are: %s ...",
                len(extra),
                extra[0],
            )
        return cls(arguments, job, config, finished, extra)

    def get(self, key: str) -> torch.Tensor:
        """A tensor as it is written."""
        if key in self.qtensors:
            return self.qtensors.get(key)
        return stored_plain(key, self.config.stc.get(key))

    def specs(self) -> list[TensorSpec]:
        """All tensors to write, module by module in running order."""
        specs: list[TensorSpec] = []
        for module in Model.from_config(self.config).modules:
            for key in self.qtensors.list(module.key):
                info = self.qtensors.info(key)
                specs.append(TensorSpec(key, info.shape, info.dtype))
        for key in self.extra:
            specs.append(TensorSpec.of(key, self.get(key)))
        return specs

    def bits(self) -> float:
        """Average bits per weight of all quantised layers but the head, without padding."""
        layers = [layer for entry in self.job.reports for layer in entry["layers"]]
        heads = {
            m.key for m in Model.from_config(self.config) if isinstance(m, Linear) and m.is_head
        }
        body = [layer for layer in layers if layer["key"] not in heads]
        numel = sum(layer["in_features"] * layer["out_features"] for layer in body)
        spent = sum(layer["in_features"] * layer["out_features"] * layer["bits"] for layer in body)
        return round(spent / numel, 2) if numel else 16.0

    def quantization_config(self) -> dict[str, Any]:
        """The part of config.json that says how the model was quantised."""
        a = self.arguments
        return {
            "quant_method": "exl3",
            "version": __version__,
            "bits": self.bits(),
            "head_bits": a["head_bits"],
            "calibration": {"rows": a["cal_rows"], "cols": a["cal_cols"]},
            "out_scales": a["out_scales"],
            "codebook": a["codebook"],
        }


def write_model(output: Output) -> Path:
    """Write the directory and check it. Existing files of other names stay.

    `config.json` comes last: without it the directory does not pass for a model.

    Raises:
        StorageError: the disk is full or not writable; names the file.
        FormatError: what was written does not read back.
    """
    folder = Path(output.arguments["out_dir"]).expanduser()
    with storage_errors(folder, "create"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").unlink(missing_ok=True)
        for stale in folder.glob(".*.tmp"):  # of a run that was killed while writing
            stale.unlink()
    specs = output.specs()
    shard_mb = output.arguments["shard_size"]
    write_sharded(folder, specs, output.get, shard_mb=shard_mb)
    for file in output.config.source.files():
        if file.name not in _WRITTEN:
            copy_file(file, folder / file.name)
    quantization = output.quantization_config()
    storage = tensor_storage(output.config, output.qtensors)
    write_json(folder / "quantization_config.json", {**quantization, "tensor_storage": storage})
    write_json(folder / REPORT_NAME, report_values(output))
    config = dict(output.config.source.config_dict)
    if "quantization_config" in config:
        config["original_quantization_config"] = config.pop("quantization_config")
    config["quantization_config"] = quantization
    write_json(folder / "config.json", config)
    check_model(folder, output, specs)
    return folder


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; it appears whole or not at all."""
    with storage_errors(source, "read"), source.open("rb") as file, atomic_file(target) as copy:
        shutil.copyfileobj(file, copy)


def tensor_storage(config: Config, stc: TensorSource) -> dict[str, Any]:
    """Stored tensors of every leaf module of a model, in running order."""
    result: dict[str, Any] = {}
    for key, infos in _leaves(config, stc):
        stored: dict[str, dict[str, Any]] = {
            info.key: {
                "shape": list(info.shape),
                "n_bytes": info.n_bytes,
                "dtype": str(info.dtype),
            }
            for info in infos
        }
        entry: dict[str, Any] = {"stored_tensors": stored}
        trellis = stored.get(f"{key}.trellis")
        if trellis is not None:
            entry |= {"quant_format": "exl3", "bits_per_weight": trellis["shape"][-1] // 16}
            for name in MULTIPLIER_NAMES:
                if f"{key}.{name}" in stored:
                    value = int(stc.get(f"{key}.{name}")) & 0xFFFFFFFF
                    entry[f"{name}_multiplier"] = value
        result[key] = entry
    return result


def _leaves(config: Config, stc: TensorSource) -> Iterator[tuple[str, list[TensorInfo]]]:
    """Modules without children, and the tensors stored under their names."""
    for module in Model.from_config(config):
        names = stc.list(module.key)
        direct = [name for name in names if "." not in name[len(module.key) + 1 :]]
        if not module.children() and direct:
            direct.sort(key=_stored_order)
            yield module.key, [stc.info(name) for name in direct]


def _stored_order(name: str) -> tuple[int, str]:
    order = ("suh", "svh", *MULTIPLIER_NAMES, "trellis", "bias")
    leaf = name.rpartition(".")[2]
    return (order.index(leaf) if leaf in order else len(order), leaf)


def report_values(output: Output) -> dict[str, Any]:
    """`conversion_report.json`: all that makes the conversion reproducible, and its errors.

    No times or paths, so that the same command gives the same bytes.
    """
    a, job = output.arguments, output.job
    options = ("bits", "head_bits", "hq", "codebook", "out_scales", "seed")
    return {
        "exl3_version": __version__,
        "source_fingerprint": a["source_fingerprint"],
        "options": {name: a[name] for name in options},
        "calibration": {"rows": a["cal_rows"], "cols": a["cal_cols"], **job.calibration},
        "bad_rows": job.bad_rows,
        "bits": output.bits(),
        "bytes": sum(spec.n_bytes for spec in output.specs()),
        "modules": job.reports,
    }


def check_model(folder: Path, output: Output, specs: list[TensorSpec]) -> None:
    """Open the written directory as a model, and compare every tensor with what was meant.

    Raises:
        FormatError: names the first tensor that differs.
    """
    written = Config.from_directory(str(folder))
    model = Model.from_config(written)
    _compare(folder, written.stc, output, specs)
    for module in model:
        if not isinstance(module, Linear) or f"{module.key}.trellis" not in written.stc:
            continue
        rows, columns, _ = written.stc.info(f"{module.key}.trellis").shape
        if rows * 16 < module.in_features or columns * 16 < module.out_features:
            raise FormatError(
                f"{folder}: {module.key}.trellis has {rows} x {columns} tiles, too few for"
                f" {module.in_features} x {module.out_features}; run the conversion again"
            )
    written.stc.close()


def _compare(folder: Path, written: TensorSource, output: Output, specs: list[TensorSpec]) -> None:
    wanted = {spec.key for spec in specs}
    if set(written.keys()) != wanted:
        other = sorted(set(written.keys()) ^ wanted)
        raise FormatError(
            f"{folder}: other tensors than those written are there or missing: {other[:3]}; remove"
            " stray .safetensors files and run with -r"
        )
    for key in sorted(wanted):
        if not torch.equal(written.get(key), output.get(key)):
            raise FormatError(
                f"{folder}: tensor {key} reads back other than it was written; the disk may be"
                " failing: run with -r to write again"
            )
