"""Gradients per layer against Transformers' autograd; files, resuming and rows left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_conversion import HIDDEN, digests, tiny_tensors, write_source
from torch import Tensor

from exl3 import Config, Model
from exl3.conversion import sensitivity
from exl3.conversion.checkpoint import clear_job, holds_job
from exl3.conversion.differentiable import check_block, product_dtype, run_block
from exl3.conversion.sensitivity import (
    LayerSensitivity,
    SensitivityOptions,
    choose_rows,
    has_sensitivity,
    load_sensitivity,
    measure_sensitivity,
    remove_sensitivity,
    sample_labels,
    sensitivity_file,
    uniforms,
)
from exl3.errors import StorageError, UnsupportedError
from exl3.modules import Batch, Block
from tests.model.tiny_models import make_tiny, random_ids

EXACT = SensitivityOptions(seed=3, dtype=torch.float32)
ROWS, COLS = 3, 40
Result = dict[str, LayerSensitivity]


def open_model(folder: Path) -> Model:
    return Model.from_config(Config.from_directory(str(folder)))


def measure(
    folder: Path, work: Path, ids: Tensor, options: SensitivityOptions = EXACT, **changes: Any
) -> Result:
    """One pass; the layers of all blocks."""
    model = open_model(folder)
    measure_sensitivity(model, model.config.stc, ids, work, replace(options, **changes))
    assert has_sensitivity(work, model)
    assert not any(module.loaded for module in model.modules)
    keys = [m.key for m in model.modules if isinstance(m, Block)]
    return {name: layer for key in keys for name, layer in load_sensitivity(work, key).items()}


def same(actual: Result, expected: Result, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for key, layer in actual.items():
        for name in ("rows", "weights", "output"):
            a, b = getattr(layer, name), getattr(expected[key], name)
            scale = float(b.abs().max())
            torch.testing.assert_close(
                a, b, rtol=tolerance, atol=tolerance * scale, msg=f"{key}.{name}"
            )


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return random_ids(ROWS, COLS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 blocks, hidden size 96, MLP 160."""
    return make_tiny(tmp_path_factory.mktemp("llama"), "llama").directory


@contextmanager
def output_gradients(model: torch.nn.Module) -> Iterator[dict[str, Tensor]]:
    """Gradients at the outputs of all linear layers during a backward pass, (tokens, n)."""
    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        return lambda module, inputs, outputs: seen.__setitem__(name, outputs[0].flatten(0, -2))

    handles = [
        module.register_full_backward_hook(hook(name))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "head" not in name
    ]
    yield seen
    for handle in handles:
        handle.remove()


def reference(model: Any, ids: Tensor, seed: int) -> Result:
    """The same by Transformers, all at once, in float64 past the gradients."""
    with output_gradients(model) as seen, torch.enable_grad():
        logits = model(ids).logits.flatten(0, 1)
        uniform = torch.cat([uniforms(seed, row, ids.shape[1]) for row in range(len(ids))])
        labels = sample_labels(torch.softmax(logits.detach(), -1), uniform)
        F.cross_entropy(logits, labels, reduction="sum").backward()
    result = {}
    for key, gradient in seen.items():
        g = gradient.double()
        weights = g.square().sum(1).view(ids.shape)
        output = g.T @ g
        result[key] = LayerSensitivity(
            torch.arange(len(ids)),
            (weights / weights.mean()).float(),
            (output / output.diagonal().mean()).float()[None],
        )
    return result


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen2"])
def test_equals_transformers(tmp_path: Path, family: str, ids: Tensor) -> None:
    """Head norms and YaRN, a sliding window, biases and a tied head among them."""
    made = make_tiny(tmp_path / "model", family)
    actual = measure(made.directory, tmp_path, ids)
    assert len(actual) == 3 * 7
    same(actual, reference(made.reference, ids, EXACT.seed), 2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen2"])
def test_block_is_the_modules(tmp_path: Path, family: str) -> None:
    model = open_model(make_tiny(tmp_path / "model", family).directory)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * 40, 96, generator=generator)
    for block in [m for m in model.modules if isinstance(m, Block)]:
        block.load(model.config.stc)
        check_block(block)
        actual = run_block(block, x, Batch.dense(2, 40), lambda key, gradient: None)
        expected = block.forward(x, Batch.dense(2, 40))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_sampled_labels_follow_the_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 1000, generator=generator)
    logits[:, ::3] = -torch.inf
    p = torch.softmax(logits, -1)
    uniform = torch.rand(64, generator=generator, dtype=torch.float64)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    labels = sample_labels(p, uniform)
    sums = p.double().cumsum(1)
    expected = torch.searchsorted(sums, (uniform * sums[:, -1])[:, None], right=True)[:, 0]
    assert torch.equal(labels, expected)
    assert (labels % 3 != 0).all()
    few = torch.tensor([[0.1, 0.0, 0.6, 0.3]]).expand(4000, 4)
    counts = sample_labels(few, uniforms(0, 0, 4000)).bincount(minlength=4) / 4000
    torch.testing.assert_close(counts, few[0], rtol=0, atol=0.03)
    assert (
        sample_labels(torch.full((2, 300), torch.nan), torch.tensor([0.5, 0.9]).double()).max()
        < 300
    )


def test_labels_depend_on_seed_and_row_alone() -> None:
    assert torch.equal(uniforms(1, 2, 50)[:20], uniforms(1, 2, 20))
    draws = [uniforms(seed, row, 20) for seed in range(3) for row in range(3)]
    assert len({tuple(d.tolist()) for d in draws}) == 9


def test_rows_are_taken_evenly() -> None:
    assert choose_rows(250, 2048, 16384) == [0, 31, 62, 93, 125, 156, 187, 218]
    assert choose_rows(3, 100) == [0, 1, 2]
    assert choose_rows(5, 40000) == [0]


def test_any_chunk_gives_the_same(llama: Path, tmp_path: Path, ids: Tensor) -> None:
    whole = measure(llama, tmp_path / "a", ids)
    again = measure(llama, tmp_path / "b", ids)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    same(again, whole, 0)
    rows = measure(llama, tmp_path / "c", ids, tokens_per_pass=COLS)
    same(rows, whole, 1e-4)
    same(measure(llama, tmp_path / "d", ids, logits_per_pass=300 * 7), whole, 1e-4)
    other = measure(llama, tmp_path / "e", ids, seed=4)
    key = next(iter(whole))
    assert float((other[key].weights - whole[key].weights).abs().max()) > 0.1


@pytest.mark.cuda
def test_a_device_measures_what_the_cpu_does(
    device: torch.device, llama: Path, tmp_path: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States on the device or on the host; the same bytes twice."""
    want = measure(llama, tmp_path / "cpu", ids)
    there = {"device": device}
    same(measure(llama, tmp_path / "a", ids, **there), want, 2e-3)
    measure(llama, tmp_path / "b", ids, **there)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    monkeypatch.setattr(sensitivity, "placed", lambda state, *_: state)
    measure(llama, tmp_path / "c", ids, **there)
    assert digests(tmp_path / "a") == digests(tmp_path / "c")
    fast = measure(llama, tmp_path / "d", ids, device=device, dtype=torch.bfloat16)
    for key, layer in fast.items():
        assert bool(torch.isfinite(layer.output).all()), key


def test_some_rows_are_those_rows(llama: Path, tmp_path: Path) -> None:
    """A row's labels do not depend on which others are read."""
    ids = random_ids(6, COLS)
    part = measure(llama, tmp_path / "a", ids, max_tokens=2 * COLS)
    whole = measure(llama, tmp_path / "b", ids)
    for key, layer in part.items():
        assert layer.rows.tolist() == [0, 3]
        expected = whole[key].weights[[0, 3]]
        torch.testing.assert_close(layer.weights, expected / expected.mean(), rtol=1e-3, atol=1e-4)


def test_memory_saved_changes_little(
    llama: Path, tmp_path: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States in bfloat16, blocks loaded twice."""
    whole = measure(llama, tmp_path / "a", ids)
    monkeypatch.setattr(sensitivity, "_KEPT_SHARE", 0.0)
    measure(llama, tmp_path / "b", ids)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    monkeypatch.setattr(sensitivity, "MAX_STATE_BYTES", 2 * 3 * ROWS * COLS * 96)
    narrow = measure(llama, tmp_path / "c", ids)
    key = "model.layers.1.self_attn.v_proj"
    difference = (narrow[key].output - whole[key].output).norm() / whole[key].output.norm()
    assert 1e-5 < float(difference) < 0.05
    monkeypatch.setattr(sensitivity, "MAX_STATE_BYTES", 2 * 3 * 2 * COLS * 96)
    assert measure(llama, tmp_path / "d", ids)[key].rows.tolist() == [0, 1]


def test_bfloat16_products_come_close(
    llama: Path, tmp_path: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same labels: those of tokens between two likely ones change."""
    labels = torch.randint(300, (ROWS * COLS,), generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(sensitivity, "sample_labels", lambda p, uniform: labels)
    exact = measure(llama, tmp_path / "a", ids)
    fast = measure(llama, tmp_path / "b", ids, dtype=torch.bfloat16)
    for key, layer in fast.items():
        difference = (layer.output - exact[key].output).norm() / exact[key].output.norm()
        assert 1e-5 < float(difference) < 0.15, key
    assert product_dtype(torch.device("cpu")) in (torch.bfloat16, torch.float32)


def test_wide_layers_keep_blocks_of_the_diagonal(
    llama: Path, tmp_path: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measure(llama, tmp_path / "a", ids)
    monkeypatch.setattr(sensitivity, "WHOLE", 100)
    monkeypatch.setattr(sensitivity, "PART", 64)
    parts = measure(llama, tmp_path / "b", ids)
    key = "model.layers.1.mlp.up_proj"
    full, cut = whole[key].output[0], parts[key].output
    assert full.shape == (160, 160) and cut.shape == (3, 64, 64)
    expected = torch.zeros(3, 64, 64)
    for index, start in enumerate((0, 64, 128)):
        size = min(64, 160 - start)
        expected[index, :size, :size] = full[start : start + size, start : start + size]
    torch.testing.assert_close(cut, expected, rtol=1e-4, atol=1e-4)
    small = "model.layers.1.mlp.down_proj"
    assert parts[small].output.shape == (1, 96, 96)


def test_a_row_that_overflows_is_left_out(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.embed_tokens.weight"][7] = torch.inf
    ids = random_ids(ROWS, COLS)
    ids[ids == 7] = 8
    good = write_source(tmp_path / "good", tiny_tensors())
    bad = write_source(
        tmp_path / "bad", tensors | {"lm_head.weight": tiny_tensors()["model.embed_tokens.weight"]}
    )
    expected = measure(good, tmp_path / "a", ids[:2])
    ids[2, 20] = 7
    actual = measure(bad, tmp_path / "b", ids)
    for key, layer in actual.items():
        assert (layer.weights[2] == 0).all() and layer.rows.tolist() == [0, 1, 2]
        torch.testing.assert_close(layer.weights[:2], expected[key].weights, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(layer.output, expected[key].output, rtol=1e-3, atol=1e-3)
    ids[:, 5] = 7
    with pytest.raises(UnsupportedError, match="none of 3 calibration rows"):
        measure(bad, tmp_path / "c", ids)


def test_a_gradient_that_overflows_is_left_out(
    llama: Path, tmp_path: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the block on, downwards, where it does; layers above keep the row."""
    expected = measure(llama, tmp_path / "a", ids[:2])
    backward = sensitivity._Pass.backward

    def overflow(self: Any, block: Block, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        if block.layer == 1:
            gradient[2, 30] = 1e30
        return backward(self, block, x, gradient)

    monkeypatch.setattr(sensitivity._Pass, "backward", overflow)
    actual = measure(llama, tmp_path / "b", ids)
    for key, layer in actual.items():
        if ".layers.2." in key:
            assert bool((layer.weights[2] > 0).all())
            continue
        assert (layer.weights[2] == 0).all()
        torch.testing.assert_close(layer.weights[:2], expected[key].weights, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(layer.output, expected[key].output, rtol=1e-3, atol=1e-3)


def test_layers_that_do_not_matter_are_weighted_alike(tmp_path: Path, ids: Tensor) -> None:
    tensors = tiny_tensors()
    tensors["model.layers.1.self_attn.o_proj.weight"].zero_()
    layer = measure(write_source(tmp_path / "m", tensors), tmp_path, ids)[
        "model.layers.1.self_attn.v_proj"
    ]
    assert torch.equal(layer.weights, torch.ones(ROWS, COLS))
    assert torch.equal(layer.output, torch.eye(layer.output.shape[1])[None])


def test_killed_pass_starts_again(
    llama: Path, tmp_path: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(llama, tmp_path / "whole", ids)
    expected = digests(tmp_path / "whole")
    assert len(expected) == 3
    work, model, save = tmp_path / "work", open_model(llama), sensitivity.save_tensors
    for saved in range(3):
        left = [saved]

        def until(path: Path, tensors: dict[str, Tensor], left: list[int] = left) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            save(path, tensors)

        monkeypatch.setattr(sensitivity, "save_tensors", until)
        with pytest.raises(KeyboardInterrupt):
            measure_sensitivity(model, model.config.stc, ids, work, EXACT)
        assert not has_sensitivity(work, model) and not any(m.loaded for m in model.modules)
        assert len(list(work.rglob("*.safetensors"))) == saved
    monkeypatch.setattr(sensitivity, "save_tensors", save)
    measure(llama, work, ids)
    assert digests(work) == expected
    assert load_sensitivity(work, "model.norm") == {} and not holds_job(work)
    remove_sensitivity(work)
    remove_sensitivity(work)
    assert not has_sensitivity(work, model) and load_sensitivity(work, "model.layers.0") == {}
    measure(llama, work, ids)
    clear_job(work)
    assert not sensitivity_file(work, "model.layers.0").exists()


def test_what_cannot_be_measured(
    source: Path, tmp_path: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(model: Model, words: str, error: type[Exception] = UnsupportedError) -> None:
        with pytest.raises(error, match=words):
            measure_sensitivity(model, model.config.stc, ids, tmp_path, EXACT)
        assert not (tmp_path / "sensitivity").exists()

    def first(model: Model) -> Block:
        block = model.modules[1]
        assert isinstance(block, Block) and block.attention_norm.dim == HIDDEN
        return block

    model = open_model(source)
    first(model).mlp.activation = "softplus"
    refused(model, "'softplus' has no differentiable form, expected one of silu")
    model = open_model(source)

    class Other(type(first(model).attention)):  # type: ignore[misc]
        """Computes who knows what."""

    first(model).attention.__class__ = Other
    refused(model, "self_attn: Other has no differentiable form")
    model = open_model(source)
    model.modules.insert(1, first(model).repeat(5))
    refused(model, "blocks that are all different")
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr(sensitivity.shutil, "disk_usage", lambda path: usage)
    refused(open_model(source), "GB are free; .*--no-sensitivity", StorageError)
