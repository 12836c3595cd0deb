"""How much the loss minds errors of each layer's output, per token and per pair of columns.

With g_t the gradient of the loss at a layer's output for token t, the weights of its tokens are
|g_t|^2 and its output Hessian is H_O = sum g_t g_t^T. The labels of the loss are sampled from the
model itself, so that E[g g^T] is the Fisher matrix: the second derivative of the KL divergence
between the model and what quantisation makes of it. Source: YAQA (arXiv 2505.22988).

One pass over the plain model, block by block, forwards and then backwards. Only the states that
blocks read are kept in between; the files of the pass lie in `sensitivity/` of the work directory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import StorageError, UnsupportedError
from ..loader import load_tensors, save_tensors
from ..loader.base import TensorSource
from ..model import Model
from ..model.placement import free_bytes
from ..modules import Batch, Block, Embedding, Head, Linear, LoadOptions, Module, RMSNorm
from ..quant import HessianAccumulator
from ..util.file import storage_errors
from .capture import TOKENS_PER_PASS
from .checkpoint import SENSITIVITY
from .device import placed
from .differentiable import check_block, product_dtype, rms_norm, run_block

MAX_TOKENS = 32768
MAX_STATE_BYTES = 4 << 30
WHOLE = 4096
"""Layers of so many columns keep their whole output Hessian; wider ones blocks of it."""
PART = 2048
_KEPT_SHARE = 0.25  # of free memory: smaller models stay loaded between the two passes
_SCORES = 1 << 28  # of attention, alive at once on CUDA: a few tensors of this size, 1 GiB each
_GROUP = 128  # probabilities that are added first when a label is drawn


@dataclass(frozen=True, slots=True)
class SensitivityOptions:
    """How the pass runs. Only `seed`, `max_tokens` and `dtype` change more than last bits."""

    seed: int = 0
    device: torch.device = torch.device("cpu")
    max_tokens: int = MAX_TOKENS
    """Of whole calibration rows, but one row at the least."""
    dtype: torch.dtype | None = None
    """Of products; None: the fastest of bfloat16 and float32 here."""
    tokens_per_pass: int | None = None
    """None: as many as `run_rows` takes."""
    logits_per_pass: int = 1 << 26


@dataclass(frozen=True, slots=True)
class LayerSensitivity:
    """What the pass found out about one linear layer."""

    rows: Tensor
    """int64 (r,): numbers of the calibration rows that were read, ascending."""
    weights: Tensor
    """float32 (r, cols): |g_t|^2, mean 1 over tokens of finite rows; 0 for other rows."""
    output: Tensor
    """float32 (blocks, size, size): H_O over its mean diagonal. One block of all columns if they
    are at most `WHOLE`, else the diagonal blocks of `PART` columns, the last padded with zeros."""


def choose_rows(total: int, cols: int, max_tokens: int = MAX_TOKENS) -> list[int]:
    """Numbers of the rows to read: as many as `max_tokens` allows, evenly from all."""
    count = max(1, min(total, max_tokens // cols))
    return [i * total // count for i in range(count)]


def uniforms(seed: int, row: int, cols: int) -> Tensor:
    """What decides the labels of one calibration row: float64 (cols,) in [0, 1)."""
    digest = hashlib.blake2b(f"labels {seed} {row}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.rand(cols, generator=generator, dtype=torch.float64)


def sample_labels(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """int64 (m,): the first column at which the running sum exceeds `uniform` times the whole sum.

    Args:
        probabilities: float32 (m, n), 0 or more.
        uniform: float64 (m,) in [0, 1).
    """
    n = probabilities.shape[1]
    p = F.pad(probabilities, (0, -n % _GROUP)) if n % _GROUP else probabilities
    p = p.unflatten(1, (-1, _GROUP))
    sums = p.sum(-1, dtype=torch.float64).cumsum(1)
    target = (uniform * sums[:, -1])[:, None]
    group = (sums <= target).sum(1).clamp(max=sums.shape[1] - 1)
    before = F.pad(sums, (1, 0)).gather(1, group[:, None])
    inner = p[torch.arange(len(p), device=p.device), group].double().cumsum(1)
    within = (before + inner <= target).sum(1).clamp(max=_GROUP - 1)
    return (group * _GROUP + within).clamp(max=n - 1)


def measure_sensitivity(
    model: Model,
    stc: TensorSource,
    input_ids: Tensor,
    work: Path,
    options: SensitivityOptions,
    step: Callable[[str], None] = lambda label: None,
) -> None:
    """Measure every quantisable linear layer of all blocks and write one file per block.

    Args:
        model: with nothing loaded, and so it is afterwards.
        input_ids: int64 (rows, cols).
        step: called with a label before each part of the pass.
    Raises:
        UnsupportedError: a part of the model has no differentiable form here, or no row stays
            finite; nothing was written.
        StorageError: no room for the files.
    """
    embedding, blocks, norm, head = _parts(model)
    cols, values = input_ids.shape[1], len(blocks) * blocks[0].attention_norm.dim
    limit = min(options.max_tokens, MAX_STATE_BYTES // (2 * values))
    rows = choose_rows(len(input_ids), cols, limit)
    narrow = 4 * values * len(rows) * cols > MAX_STATE_BYTES
    _check_room(work, blocks, len(rows) * cols)
    run = _Pass(model, stc, rows, options, cols)
    files = _Files(work)
    try:
        with run.loaded(embedding):
            x = embedding.forward(input_ids[rows].reshape(-1)).float()
        x = placed(x.unflatten(0, (len(rows), -1)), options.device, len(blocks) + 1)
        states = []
        for block in blocks:
            step(f"{block.key}, forwards")
            states.append(x.to(torch.bfloat16) if narrow else x)
            x = run.forward(block, x)
        step(f"{head.key}, gradient")
        x = run.loss_gradient(norm, head, x)
        for block in reversed(blocks):
            step(f"{block.key}, backwards")
            files.add(block.key, run.backward(block, states.pop(), x))
        files.wait()
    finally:
        files.close()
        for module in model.modules:
            module.unload()


def sensitivity_file(work: Path, module_key: str) -> Path:
    """Where the layers of one block are kept."""
    return work / SENSITIVITY / f"{module_key}.safetensors"


def has_sensitivity(work: Path, model: Model) -> bool:
    """True if the pass was finished: the file of the first block is written last."""
    blocks = [m for m in model.modules if isinstance(m, Block)]
    return bool(blocks) and all(sensitivity_file(work, b.key).is_file() for b in blocks)


def load_sensitivity(work: Path, module_key: str) -> dict[str, LayerSensitivity]:
    """All measured layers of one module, by key; none if there is no file."""
    file = sensitivity_file(work, module_key)
    if not file.is_file():
        return {}
    tensors = load_tensors(file)
    keys = [name.removesuffix(".output") for name in tensors if name.endswith(".output")]
    return {
        key: LayerSensitivity(tensors["rows"], tensors[f"{key}.weights"], tensors[f"{key}.output"])
        for key in keys
    }


def remove_sensitivity(work: Path) -> None:
    """Drop the files of the pass; harmless where there are none."""
    with storage_errors(work / SENSITIVITY, "remove"):
        if (work / SENSITIVITY).exists():
            shutil.rmtree(work / SENSITIVITY)


def sensitivity_bytes(layers: list[Linear], tokens: int) -> int:
    """Disk space that the pass needs for these layers."""
    sizes = [_block_shape(layer.out_features) for layer in layers]
    return sum(4 * (blocks * size * size + tokens) for blocks, size in sizes)


def _block_shape(columns: int) -> tuple[int, int]:
    return (1, columns) if columns <= WHOLE else (-(-columns // PART), PART)


def _layers(block: Block) -> list[Linear]:
    return [part for part in block if isinstance(part, Linear) and part.quantizable]


def _check_room(work: Path, blocks: list[Block], tokens: int) -> None:
    remove_sensitivity(work)  # what a pass that was cut short left
    needed = sum(sensitivity_bytes(_layers(block), tokens) for block in blocks)
    free = shutil.disk_usage(next(p for p in (work, *work.absolute().parents) if p.is_dir())).free
    if needed > free:
        raise StorageError(
            0,
            f"{work}: the sensitivity of all layers takes {needed / 1e9:.1f} GB, {free / 1e9:.1f}"
            " GB are free; give another work directory, or start with --no-sensitivity",
        )


def _parts(model: Model) -> tuple[Embedding, list[Block], RMSNorm, Head]:
    """The model as one chain of known parts.

    Raises:
        UnsupportedError: it is another.
    """
    embedding, *middle, norm, head = model.modules
    blocks = [part for part in middle if type(part) is Block]
    kinds = (type(embedding) is Embedding, type(norm) is RMSNorm, type(head) is Head)
    if not all(kinds) or not blocks or len({block.key for block in blocks}) != len(middle):
        raise UnsupportedError(
            "sensitivity: expected an embedding, blocks that are all different, a norm and a head;"
            f" got {', '.join(dict.fromkeys(type(m).__name__ for m in model.modules))}"
        )
    for block in blocks:
        check_block(block)
    assert isinstance(embedding, Embedding) and isinstance(norm, RMSNorm) and isinstance(head, Head)
    return embedding, blocks, norm, head


class _Files:
    """Writes the files of blocks, in their order, while the next block is measured."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def add(self, module_key: str, tensors: dict[str, Tensor]) -> None:
        """Write a file once the one before is written; raises what that one met."""
        self.wait()
        self._last = self._thread.submit(
            save_tensors, sensitivity_file(self._work, module_key), tensors
        )

    def wait(self) -> None:
        """Until all is written.

        Raises:
            StorageError: it cannot be.
        """
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """End the thread, after the file that it writes."""
        self._thread.shutdown()


class _Pass:
    """The rows that are still finite, and where and how they are run."""

    def __init__(
        self,
        model: Model,
        stc: TensorSource,
        rows: list[int],
        options: SensitivityOptions,
        cols: int,
    ) -> None:
        self.stc, self.rows, self.cols, self.options = stc, rows, cols, options
        self.device = options.device
        self.dtype = options.dtype or product_dtype(self.device)
        self.alive = list(range(len(rows)))
        weights = sum(m.weights_numel() for m in model if isinstance(m, Linear))
        self.keep = 4 * weights < _KEPT_SHARE * _free_memory(self.device)

    @contextmanager
    def loaded(self, module: Module) -> Iterator[None]:
        """A module in memory: embeddings on the host, a head in float32 for the sake of logits."""
        device = torch.device("cpu") if isinstance(module, Embedding) else self.device
        dtype = self.dtype if isinstance(module, Block) else torch.float32
        module.load(self.stc, LoadOptions(dtype, device))
        yield
        if not self.keep or not isinstance(module, Block):
            module.unload()

    def parts(self, block: Block) -> Iterator[list[int]]:
        """Rows that are finite, as many at a time as memory allows."""
        step = (self.options.tokens_per_pass or TOKENS_PER_PASS[self.device.type]) // self.cols
        if self.device.type == "cuda":
            step = min(step, _SCORES // (block.attention.q_heads * self.cols**2))
        step = max(1, step)
        for start in range(0, len(self.alive), step):
            yield self.alive[start : start + step]

    def drop(self, finite: Tensor) -> None:
        """Go on without the rows that are False in bool (rows,)."""
        good = finite.tolist()
        self.alive = [row for row in self.alive if good[row]]
        if not self.alive:
            raise UnsupportedError(
                f"sensitivity: none of {len(self.rows)} calibration rows stays finite"
            )

    @torch.no_grad()
    def forward(self, block: Block, x: Tensor) -> Tensor:
        """float32 (rows, cols, hidden) past one block; rows left out are 0."""
        y = torch.zeros_like(x)
        finite = torch.ones(len(x), dtype=torch.bool, device=x.device)
        with self.loaded(block):
            for part in self.parts(block):
                out = run_block(block, self._sent(x, part), self._batch(part), _ignore)
                out = self._rows(out).to(x.device)
                finite[part] = torch.isfinite(out).flatten(1).all(1)
                y[part] = torch.where(finite[part, None, None], out, 0)
        self.drop(finite)
        return y

    def loss_gradient(self, norm: RMSNorm, head: Head, x: Tensor) -> Tensor:
        """Gradient of the cross entropy at what the final norm reads, like x; 0 for bad rows."""
        gradient = torch.zeros_like(x)
        uniform = torch.stack(
            [uniforms(self.options.seed, self.rows[row], self.cols) for row in self.alive]
        ).flatten()
        hidden = x[self.alive].flatten(0, 1)
        result = torch.empty_like(hidden)
        step = max(1, self.options.logits_per_pass // head.out_features)
        with self.loaded(norm), self.loaded(head):
            assert head.plain is not None
            narrow = head.plain.to(self.dtype)
            for start in range(0, len(hidden), step):
                h = hidden[start : start + step].to(self.device).requires_grad_()
                with torch.enable_grad():
                    y = rms_norm(h, norm)
                p = torch.softmax(F.linear(y.detach(), head.plain, head.bias), -1)
                labels = sample_labels(p, uniform[start : start + step].to(p.device))
                p[torch.arange(len(p), device=p.device), labels] -= 1
                y.backward((p.to(narrow.dtype) @ narrow).float())
                assert h.grad is not None
                result[start : start + step] = h.grad.to(result.device)
        gradient[self.alive] = self._rows(result)
        self.drop(torch.isfinite(gradient).flatten(1).all(1))
        return gradient

    def backward(self, block: Block, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """The tensors of a block's file. `gradient`, at its output, becomes that at its input x."""
        layers = _layers(block)
        finite = torch.ones(len(x), dtype=torch.bool, device=gradient.device)
        weights = {layer.key: torch.zeros(x.shape[:2]) for layer in layers}
        sums = {layer.key: _OutputSum(layer.out_features, self.device) for layer in layers}
        with self.loaded(block):
            for part in self.parts(block):
                below, seen = self._gradients(block, self._sent(x, part), gradient, part)
                sizes = {key: self._rows(g.square().sum(1)) for key, g in seen.items()}
                good = torch.isfinite(below).flatten(1).all(1)
                for size in sizes.values():
                    good &= torch.isfinite(size).all(1)
                finite[part] = good.to(finite.device)
                gradient[part] = below.to(gradient.device)
                tokens = None if bool(good.all()) else good.repeat_interleave(self.cols)
                for key, weight in weights.items():
                    weight[part] = sizes[key].cpu()
                    sums[key].add(seen[key] if tokens is None else seen[key][tokens])
        self.drop(finite)
        bad = [row for row in range(len(x)) if row not in self.alive]
        tensors = {"rows": torch.tensor(self.rows)}
        for key, weight in weights.items():
            weight[bad] = 0
            tensors[f"{key}.weights"] = _mean_one(weight, self.alive)
            tensors[f"{key}.output"] = sums[key].finish()
        return tensors

    def _gradients(
        self, block: Block, x: Tensor, gradient: Tensor, part: list[int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Of a few rows: at the block's input (rows, cols, hidden), and at each layer's output."""
        seen: dict[str, Tensor] = {}
        with torch.enable_grad():
            y = run_block(block, x.requires_grad_(), self._batch(part), seen.__setitem__)
        y.backward(self._sent(gradient, part))
        assert x.grad is not None
        return self._rows(x.grad), seen

    def _rows(self, tokens: Tensor) -> Tensor:
        """(m, ..) -> (rows, cols, ..)."""
        return tokens.unflatten(0, (-1, self.cols))

    def _sent(self, x: Tensor, part: list[int]) -> Tensor:
        return x[part].to(self.device, torch.float32).flatten(0, 1)

    def _batch(self, part: list[int]) -> Batch:
        return Batch.dense(len(part), self.cols).to(self.device)


def _ignore(key: str, gradient: Tensor) -> None:
    """An observer of passes without a gradient."""


def _mean_one(weight: Tensor, rows: list[int]) -> Tensor:
    """(rows, cols) with mean 1 over `rows`; all alike if the loss minds none of them."""
    mean = float(weight[rows].mean(dtype=torch.float64))
    if mean > 0:
        return weight / mean
    weight[rows] = 1
    return weight


class _OutputSum:
    """H_O of one layer while it is gathered."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.columns, self.device = columns, device
        self.shape = _block_shape(columns)
        size = self.shape[1]
        self._sums = [
            HessianAccumulator(min(size, columns - start), device)
            for start in range(0, columns, size)
        ]

    def add(self, gradient: Tensor) -> None:
        """Add the rows of float32 (m, columns)."""
        for part, columns in zip(self._sums, gradient.split(self.shape[1], 1), strict=True):
            part.add(columns)

    def finish(self) -> Tensor:
        """`LayerSensitivity.output`; the identity if every gradient is 0."""
        blocks, size = self.shape
        result = torch.zeros(blocks, size, size, device=self.device)
        for block, part in zip(result, self._sums, strict=True):
            block[: part.features, : part.features] = part.finish().matrix
        diagonal = result.diagonal(dim1=1, dim2=2)
        mean = float(diagonal.sum(dtype=torch.float64)) / self.columns
        if mean > 0:
            return result.div_(mean).cpu()
        for block, part in zip(result, self._sums, strict=True):
            block.diagonal()[: part.features] = 1
        return result.cpu()


def _free_memory(device: torch.device) -> int:
    """Bytes free where modules are loaded."""
    if device.type == "cuda":
        return free_bytes(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
