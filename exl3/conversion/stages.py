"""The conversion, one top-level module after another.

Each module is loaded plain, reads the rows as the quantised modules before it left them, has its
linear layers quantised, and passes the rows on through the result. So later layers are fitted to
the errors of earlier ones. Only one module is in memory at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, FormatError, UnsupportedError
from ..loader import save_tensors
from ..loader.base import TensorSource
from ..model import Config, Model
from ..modules import Block, Embedding, Head, Linear, LoadOptions, Module
from ..ops.codebook import Codebook
from ..quant import (
    InputGroup,
    LinearJob,
    OutputHessian,
    QuantizedLinear,
    QuantizeOptions,
    check_weight,
    quantize_groups,
)
from ..quant.allocation import BitGroup, allocate_bits
from ..quant.packing import stored_tensors
from .calibration import CalibrationPlan, make_calibration
from .capture import Captured, Group, run_rows, share_groups
from .checkpoint import JobState, qtensors_file, save_checkpoint
from .device import conversion_device, placed, tensor_cores
from .images import dump_images
from .progress import Progress
from .sensitivity import (
    LayerSensitivity,
    SensitivityOptions,
    has_sensitivity,
    load_sensitivity,
    measure_sensitivity,
    remove_sensitivity,
)

logger = logging.getLogger(__name__)

LEAVE = 16  # head_bits that mean "not quantised"
_MAX_BAD_SHARE = 0.1
_TILES_A_STEP = 512  # about what a large GPU takes at once; small layers go together up to this
_SHARE_PRIORITY = {"attn_in": 0, "attn_out": 0, "mlp_in": 1, "mlp_out": 2}
_OTHER_PRIORITY = 3


def bit_groups(model: Model) -> list[BitGroup]:
    """The groups that the budget of bits is spent on: all but the head."""
    blocks = [m for m in model.modules if isinstance(m, Block)]
    result: dict[str, BitGroup] = {}
    for index, block in enumerate(blocks):
        distance = min(index, len(blocks) - 1 - index)
        for group in share_groups(block):
            kind = group.key.rpartition(".")[2]
            numel = sum(layer.weights_numel() for layer in group.layers)
            priority = _SHARE_PRIORITY.get(kind, _OTHER_PRIORITY)
            result.setdefault(group.key, BitGroup(group.key, numel, priority, distance))
    return list(result.values())


class Conversion:
    """A running job: its arguments, its source, and its state so far."""

    def __init__(self, arguments: dict[str, Any], job: JobState, config: Config) -> None:
        self.arguments = arguments
        self.job = job
        self.config = config
        self.work = Path(arguments["work_dir"])
        self.model = Model.from_config(config)
        self.options = QuantizeOptions(
            codebook=Codebook.from_label(arguments["codebook"]),
            out_scales=arguments["out_scales"],
            seed=arguments["seed"],
        )
        self.device = conversion_device(arguments["devices"])
        self._last_checkpoint = time.monotonic()

    def run(self, progress: Progress) -> bool:
        """Quantise all modules that are left. False if `--max_module` stopped it early."""
        self._start()
        modules = self.model.modules
        limit = self.arguments.get("max_module")
        work = [_weights_of(m for m in module if isinstance(m, Linear)) for module in modules]
        progress.start(sum(work), done=sum(work[: self.job.next_module_idx]))
        self._measure_sensitivity(progress)
        progress.count_from_here()
        for index in range(self.job.next_module_idx, len(modules)):
            module = modules[index]
            progress.step(module.key)
            module.load(self.config.stc, LoadOptions(torch.float32, self._device_of(module)))
            self._module(module, progress)
            module.unload()
            self.job.next_module_idx = index + 1
            stopping = limit is not None and index >= limit
            last = index + 1 == len(modules)
            if last:
                self.job.state = None
            self._checkpoint(index, forced=last or stopping)
            if stopping and not last:
                return False
        remove_sensitivity(self.work)
        return True

    def _measure_sensitivity(self, progress: Progress) -> None:
        """The pass before the modules, unless it was made, or is not wanted or possible."""
        unfinished = self.job.next_module_idx < len(self.model.modules)
        wanted = bool(self.arguments.get("sensitivity")) and unfinished
        if not wanted or has_sensitivity(self.work, self.model):
            return
        assert self.job.input_ids is not None
        options = SensitivityOptions(seed=self.arguments["seed"], device=self.device)
        try:
            measure_sensitivity(
                self.model, self.config.stc, self.job.input_ids, self.work, options, progress.step
            )
        except UnsupportedError as error:
            logger.warning("all errors of a layer's outputs count alike, because %s", error)

    def _start(self) -> None:
        """Calibration tokens and bit rates of a new job."""
        if self.job.input_ids is not None:
            return
        a = self.arguments
        plan = CalibrationPlan(
            a["cal_rows"],
            a["cal_cols"],
            a["seed"],
            a["cal_data"],
            a["cal_dataset"],
            str(self.device),
        )
        calibration = make_calibration(self.config, plan)
        self.job.input_ids, self.job.calibration = calibration.input_ids, calibration.record
        self.job.q_strategy = allocate_bits(bit_groups(self.model), a["bits"])
        if a["hq"]:
            logger.info("--hq: this architecture asks for no floors, so nothing is raised")
        save_checkpoint(self.work, self.job)

    def _checkpoint(self, index: int, *, forced: bool) -> None:
        newest = self.arguments["last_checkpoint_index"]
        if 0 <= newest < index and not forced:
            return
        if not forced:
            due = self._last_checkpoint + self.arguments["checkpoint_interval"]
            if time.monotonic() < due:
                return
        save_checkpoint(self.work, self.job)
        self._last_checkpoint = time.monotonic()

    def _device_of(self, module: Module) -> torch.device:
        """Where a module runs; looking up embeddings is no work, and gives float32 on the CPU."""
        return torch.device("cpu") if isinstance(module, Embedding) else self.device

    @property
    def _skipped(self) -> frozenset[int]:
        return frozenset(int(entry["row"]) for entry in self.job.bad_rows)

    def _module(self, module: Module, progress: Progress) -> None:
        """Quantise one module, keep its tensors, and move the rows past it."""
        groups = [g for g in share_groups(module) if self._bits(g) != LEAVE]
        for layer in (layer for group in groups for layer in group.layers):
            check_weight(layer.key, layer.weight_dense())
        state = self.job.input_ids if self.job.state is None else self.job.state
        assert state is not None
        state = placed(state, self._device_of(module))
        found = load_sensitivity(self.work, module.key)
        weights = _token_weights(groups, found, state)
        before = self._run_rows(module, state, groups=groups, weights=weights)
        self._note_bad_rows(module, before)
        results: dict[str, QuantizedLinear] = {}
        for batch in _batches(self._jobs(group, before, found) for group in groups):
            results |= self._quantize(batch)
            progress.advance(sum(job.weight.numel() for group in batch for job in group.jobs))
        if self.arguments["image_dump"]:
            dump_images(self.work / "images", results)
        tensors = module_tensors(self.config.stc, module, results)
        save_tensors(qtensors_file(self.work, module.key), tensors)
        after = before
        if results:
            error = self._output_error_of_head(module, state, results)
            if not isinstance(module, Head):
                _use(module, results)
                after = self._run_rows(module, state)
                self._note_bad_rows(module, after)
                error = _relative_error(after.output, before.output)
            layers = [asdict(r.report) for r in results.values()]
            self.job.reports.append({"module": module.key, "output_error": error, "layers": layers})
        if after.output is not None:
            self.job.state = after.output

    def _run_rows(self, module: Module, state: Tensor, **gathered: Any) -> Captured:
        device = self._device_of(module)
        with tensor_cores(device):
            return run_rows(module, state, skip=self._skipped, device=device, **gathered)

    def _bits(self, group: Group) -> int:
        if group.layers[0].is_head:
            return int(self.arguments["head_bits"])
        return self.job.q_strategy[group.key]

    def _jobs(
        self, group: Group, captured: Captured, found: Mapping[str, LayerSensitivity]
    ) -> InputGroup:
        bits = self._bits(group)
        jobs = [
            LinearJob(
                layer.key,
                layer.weight_dense(),
                bits,
                layer.bias,
                _output_hessian(found.get(layer.key), self.device),
            )
            for layer in group.layers
        ]
        return InputGroup(jobs, captured.hessians[group.key], group.key)

    def _quantize(self, batch: Sequence[InputGroup]) -> dict[str, QuantizedLinear]:
        results = quantize_groups(batch, self.options)
        for result in results:
            report = result.report
            logger.info(
                "%s: %d bits, proxy error %.3g, weight error %.3g",
                report.key,
                report.bits,
                report.proxy_error,
                report.weight_error,
            )
            if report.note:
                logger.warning("%s: plain rounding, because %s", report.key, report.note)
        return {result.report.key: result for result in results}

    def _note_bad_rows(self, module: Module, captured: Captured) -> None:
        """List rows that became non-finite; too many of them stop the job."""
        for row in captured.bad_rows:
            logger.warning("%s: calibration row %d is not finite; left out", module.key, row)
            self.job.bad_rows.append({"row": row, "module": module.key})
        assert self.job.input_ids is not None
        rows = len(self.job.input_ids)
        if len(self.job.bad_rows) > _MAX_BAD_SHARE * rows:
            raise ConfigError(
                f"{module.key}: {len(self.job.bad_rows)} of {rows} calibration rows are no longer"
                f" finite ({_MAX_BAD_SHARE:.0%} may be); the source model overflows or is damaged"
            )

    def _output_error_of_head(
        self, module: Module, state: Tensor, results: dict[str, QuantizedLinear]
    ) -> float:
        """Relative squared error of the head's logits, on one row; 0 for other modules."""
        if not isinstance(module, Head):
            return 0.0
        row = next(r for r in range(len(state)) if r not in self._skipped)
        weight, new = module.weight_dense(), results[module.key].weight
        x = state[row].to(weight.device)
        return _relative_error((x @ new)[None], (x @ weight)[None])


def _batches(groups: Iterable[InputGroup]) -> Iterator[list[InputGroup]]:
    """Groups to quantise together: small layers, so that the encoder has enough tiles a step."""
    batch: list[InputGroup] = []
    tiles = 0
    for group in groups:
        if batch and tiles + group.tiles() > _TILES_A_STEP:
            yield batch
            batch, tiles = [], 0
        batch.append(group)
        tiles += group.tiles()
    if batch:
        yield batch


def _token_weights(
    groups: Iterable[Group], found: Mapping[str, LayerSensitivity], state: Tensor
) -> dict[str, Tensor]:
    """How much each token counts for a group: the mean of its layers; 1 in rows not measured."""
    result = {}
    for group in groups:
        measured = [found[layer.key] for layer in group.layers if layer.key in found]
        if measured:
            weights = torch.ones(state.shape[:2])
            weights[measured[0].rows] = sum(m.weights for m in measured) / len(measured)
            result[group.key] = weights
    return result


def _output_hessian(found: LayerSensitivity | None, device: torch.device) -> OutputHessian | None:
    return None if found is None else OutputHessian(found.output.to(device))


def _weights_of(layers: Iterable[Linear]) -> int:
    return sum(layer.weights_numel() for layer in layers)


def _relative_error(output: Tensor | None, plain: Tensor | None) -> float:
    """Squared error over squared size; rows left out are zero in both."""
    if output is None or plain is None:
        return 0.0
    sums = torch.zeros(2, dtype=torch.float64, device=output.device)
    for some, exact in zip(output.split(16), plain.split(16), strict=True):  # all: two copies more
        sums[0] += (some - exact).square().sum(dtype=torch.float64)
        sums[1] += exact.square().sum(dtype=torch.float64)
    error, energy = sums.tolist()
    return float(error / max(energy, 1e-30))


def _use(module: Module, results: dict[str, QuantizedLinear]) -> None:
    """Let the quantised layers compute what their stored tensors stand for, exactly."""
    for layer in module:
        if isinstance(layer, Linear) and layer.key in results:
            layer.plain = results[layer.key].weight.T.contiguous()


def module_tensors(
    stc: TensorSource, module: Module, results: dict[str, QuantizedLinear]
) -> dict[str, Tensor]:
    """All tensors of a finished module: EXL3 for quantised layers, the others as they are."""
    replaced = {f"{key}.{name}" for key in results for name in ("weight", "bias")}
    tensors: dict[str, Tensor] = {}
    for key, result in results.items():
        stored = stored_tensors(key, result.tensors)
        tensors |= {name: tensor.cpu() for name, tensor in stored.items()}
    for name in stc.list(module.key):
        if name not in replaced and name not in tensors:
            tensors[name] = stored_plain(name, stc.get(name))
    return tensors


def stored_plain(name: str, tensor: Tensor) -> Tensor:
    """An unquantised tensor as written: float32 becomes float16, or bfloat16 if it is too large.

    Raises:
        FormatError: values that are not finite.
    """
    if not tensor.is_floating_point():
        return tensor
    if not bool(torch.isfinite(tensor).all()):
        raise FormatError(f"{name}: holds values that are not finite; the source is damaged")
    if tensor.dtype not in (torch.float32, torch.float64):
        return tensor
    fits = not tensor.numel() or float(tensor.abs().max()) <= torch.finfo(torch.float16).max
    return tensor.to(torch.float16 if fits else torch.bfloat16)
