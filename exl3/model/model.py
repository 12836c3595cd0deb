"""`Model`: modules of one component, loading and running them."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, UnsupportedError
from ..modules import Attention, Batch, Block, Embedding, Head, LoadOptions, Module, RMSNorm
from ..settings import settings
from ..util.memory import trim_heap
from .adapters import Adapter, AdapterSet, Chosen, batch_adapters
from .build import DecoderBuilder
from .config import Config
from .decode import DecodeGraphs
from .inputs import Params, check_cache, check_ids, check_params, given_params, make_batch
from .load_options import LoadArguments, console_progress
from .packing import WeightPacker, read_ahead
from .placement import make_plan, out_of_memory
from .segments import Pass, Segment, segments_of
from .split import Plan
from .storage import layout_tree, storage_info

logger = logging.getLogger(__name__)

Callback = Callable[[int, int], None]


class Model:
    """A text model. `modules` is [embedding, block 0, .., final norm, head]."""

    def __init__(self, config: Config, component: str = "text") -> None:
        self.config = config
        self.component = component
        self.modules: list[Module] = DecoderBuilder(config).modules()
        self.caps: dict[str, Any] = {"supports_tp": False, "can_quantize": True}
        self.cache_weakrefs: list[weakref.ref[Any]] = []
        self.loaded_tp = False
        self.tp_output_device: torch.device | None = None
        self.output_device: torch.device | None = None
        self.active_devices: list[torch.device] = []
        self.segments: tuple[Segment, ...] = ()
        self.draft_verifier_params: dict[str, Any] = {}
        self.first_block_idx = 1
        self.logit_layer_idx = len(self.modules) - 1
        self.last_kv_module_idx = len(self.modules) - 3
        self.adapters = AdapterSet()
        self._graphs = DecodeGraphs(self)
        self._load_seconds = 0.0
        self.warned_length = False

    @staticmethod
    def from_config(
        config: Config, component: str = "text", *, swa_full: bool = False, **kwargs: Any
    ) -> Model:
        """A model with nothing loaded.

        Args:
            swa_full: accepted; sliding-window layers always keep a full-length cache here.
        Raises:
            ConfigError: not a config, the checkpoint has no such component, or an argument is
                unknown.
        """
        if not isinstance(config, Config):
            raise ConfigError(
                f"config is {config!r:.80}, expected a Config: Config.from_directory(directory)"
            )
        if component not in config.model_classes:
            raise ConfigError(
                f"{config.config_filename} has no component {component!r}, only "
                f"{', '.join(config.model_classes)}"
            )
        if kwargs:
            raise ConfigError(f"Model.from_config: unknown arguments {sorted(kwargs)}")
        return config.model_classes[component](config, component)

    # Loading

    def load_gen(self, *args: Any, **kwargs: Any) -> Iterator[tuple[int, int]]:
        """Load module by module; arguments are the fields of `LoadArguments`, in order.

        Yields and reports to the callback (done, total) before each of `total` modules, then
        (total, total).
        Raises:
            ConfigError, UnsupportedError: arguments that exclude each other, or a device that
                this version cannot use; before any work.
            OutOfMemory: the model and its caches do not fit; before a weight is read.
            FormatError: a tensor is missing or wrong. What was loaded is dropped.
        """
        arguments = LoadArguments(*args, **kwargs)
        arguments.check()
        return self._load_gen(arguments)

    def _load_gen(
        self, arguments: LoadArguments, plan: Plan | None = None
    ) -> Iterator[tuple[int, int]]:
        plan = plan or make_plan(self, arguments)
        devices = [plan.parts[part].device for part in plan.part_of()]
        self._check_devices(plan)
        if arguments.verbose:
            logger.info("%s: %s", self.config.architecture, plan.text())
        total, start, device = len(self.modules), time.perf_counter(), devices[0]
        complete = False
        packer = WeightPacker()
        try:
            with (
                console_progress(arguments.progressbar, total) as report,
                read_ahead(self.config.stc, self.modules, devices) as stc,
            ):
                for done in range(total + 1):
                    report(done)
                    if arguments.callback is not None:
                        arguments.callback(done, total)
                    if done == total:
                        packer.flush()
                        self._finish_load(plan, time.perf_counter() - start)
                    complete = done == total
                    yield (done, total)
                    if done < total:
                        device = devices[done]
                        plain_dtype = self.config.infer_params.plain_dtype
                        self.modules[done].load(stc, LoadOptions(plain_dtype, device))
                        packer.add(self.modules[done])
        except torch.OutOfMemoryError as error:
            raise out_of_memory(plan, device) from error
        finally:
            if not complete:
                self.unload()

    def _check_devices(self, plan: Plan) -> None:
        if plan.devices[0].type != "cuda":
            return
        for block in self.blocks:
            dim = block.attention.head_dim
            if dim % 8 or dim > 256:
                raise UnsupportedError(
                    f"{block.attention.key}: attention on CUDA has no kernel for head_dim {dim}, "
                    "only for multiples of 8 up to 256; load with device='cpu'"
                )

    def _finish_load(self, plan: Plan, seconds: float) -> None:
        self.segments = segments_of(self.modules, plan)
        self.output_device, self.active_devices = self.segments[-1].device, plan.devices
        self._load_seconds = seconds
        for cache in self.caches():
            cache.alloc(self._cache_devices())
        if plan.devices[0].type == "cuda" and settings().cuda_tuning:
            self._tune()

    def _tune(self) -> None:
        from .tune import tune_model

        try:
            tune_model(self)
        except RuntimeError as error:  # of a card that is full, say
            logger.warning("kernel choices were not measured, built-in rules decide: %s", error)

    def _cache_devices(self) -> list[torch.device]:
        """The device of each layer of a cache: that of its attention."""
        return [segment.device for segment in self.segments for _ in segment.blocks]

    def load(self, *args: Any, **kwargs: Any) -> None:
        """`load_gen`, run to its end."""
        for _ in self.load_gen(*args, **kwargs):
            pass

    def unload(self) -> None:
        """Drop weights, adapters, recorded steps and the tensors of attached caches; harmless
        twice."""
        self._graphs.clear()
        for lora in list(self.adapters.loaded):
            lora.unload()
        for module in self.modules:
            module.unload()
        for cache in self.caches():
            cache.free()
        if self.loaded:
            trim_heap()
            if self.output_device is not None and self.output_device.type == "cuda":
                torch.cuda.empty_cache()
        self.output_device, self.active_devices, self.segments = None, [], ()

    @property
    def loaded(self) -> bool:
        """True between the end of `load` and `unload`."""
        return self.output_device is not None

    def caches(self) -> list[Any]:
        """Attached caches that are still alive."""
        alive = [(ref, ref()) for ref in self.cache_weakrefs]
        self.cache_weakrefs = [ref for ref, cache in alive if cache is not None]
        return [cache for _, cache in alive if cache is not None]

    def attach_cache(self, cache: Any) -> None:
        """Called by `Cache`; its tensors exist while the model is loaded."""
        self.cache_weakrefs.append(weakref.ref(cache))
        if self.loaded:
            cache.alloc(self._cache_devices())

    def detach_cache(self, cache: Any) -> None:
        """Called by `Cache`; drops the steps recorded with it."""
        self._graphs.drop(cache)
        self.cache_weakrefs = [ref for ref in self.cache_weakrefs if ref() not in (cache, None)]
        cache.free()

    def forget_adapter(self, adapter: Adapter | None) -> None:
        """Called by `LoRA`; drops the steps recorded with it."""
        self._graphs.drop_adapter(adapter)

    # Running

    @torch.no_grad()
    def forward(self, input_ids: Tensor, params: Params | None = None) -> Tensor:
        """Logits float32 (bsz, q_len or fewer, V_pad); columns past the vocabulary are -inf.

        Args:
            input_ids: long (bsz, q_len), within the vocabulary.
            params: attention mode, cache and positions, see the interface page, section 3.2.
        """
        params = given_params(input_ids, params)
        logits = self._graphs.step(input_ids, params, self._adapters(input_ids, params))
        if logits is not None:
            return logits
        mode = check_params(params)
        this = Pass(self._batch(input_ids, params, mode))
        x = self._embed(this)
        for segment in self.segments:
            x = this.run(x, segment)
        batch = this.on(self.segments[-1])
        if batch.logit_rows is not None:
            x = x[batch.logit_rows]
            batch.select_adapters(batch.logit_rows)
        y = self.head.logits(x, batch, self.final_norm)
        return y.view(batch.bsz, -1, y.shape[-1])

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, params: Params | None = None) -> None:
        """Store keys and values of these tokens; no logits."""
        params = given_params(input_ids, params)
        mode = check_params(params)
        if mode != "flash_attn":
            raise ConfigError("prefill fills a cache: params needs attn_mode flash_attn")
        this = Pass(self._batch(input_ids, params, mode))
        x = self._embed(this)
        with_blocks = [segment for segment in self.segments if segment.blocks]
        for segment in with_blocks[:-1]:
            x = this.run(x, segment)
        x, last = this.enter(x, with_blocks[-1])
        for block in with_blocks[-1].blocks[:-1]:
            x = block.forward(x, last)
        with_blocks[-1].blocks[-1].store(x, last)

    def _check_ready(self, input_ids: Tensor) -> Tensor:
        if not self.loaded:
            raise ConfigError("the model is not loaded: call load() first")
        return check_ids(input_ids.cpu(), self.config.vocab_size)

    def _note_length(self, tokens: int) -> None:
        """Warn once of a sequence that is longer than the model was made for."""
        limit = self.config.max_position_embeddings
        if tokens > limit and not self.warned_length:
            self.warned_length = True
            logger.warning("a sequence of %d tokens, the model was made for %d", tokens, limit)

    def _batch(self, input_ids: Tensor, params: Params, mode: str) -> Batch:
        """On the host."""
        ids = self._check_ready(input_ids)
        if mode == "flash_attn":
            check_cache(self, params["cache"])
        batch = make_batch(ids, params, mode)
        self._note_length(batch.q_len if batch.seq_lens is None else int(batch.seq_lens.max()))
        batch.adapters = batch_adapters(self._adapters(input_ids, params), batch.q_len)
        return batch

    def _adapters(self, input_ids: Tensor, params: Params) -> tuple[Chosen, ...] | None:
        """The adapters of each sequence; None if no adapter applies."""
        return self.adapters.per_sequence(params, input_ids.shape[0])

    def _embed(self, this: Pass) -> Tensor:
        batch = this.on(self.segments[0])
        assert batch.input_ids is not None
        return self.embedding.forward(batch.input_ids, batch)

    # Parts and figures

    @property
    def embedding(self) -> Embedding:
        """The first module."""
        module = self.modules[0]
        assert isinstance(module, Embedding)
        return module

    @property
    def blocks(self) -> list[Block]:
        """Blocks in running order; a layer map may repeat them."""
        return [module for module in self.modules if isinstance(module, Block)]

    @property
    def final_norm(self) -> RMSNorm:
        """The module before the head."""
        module = self.modules[-2]
        assert isinstance(module, RMSNorm)
        return module

    @property
    def head(self) -> Head:
        """The last module."""
        module = self.modules[-1]
        assert isinstance(module, Head)
        return module

    def __iter__(self) -> Iterator[Module]:
        for module in self.modules:
            yield from module

    def find_module(self, key: str) -> Module:
        """The first module with this key.

        Raises:
            ConfigError: there is none.
        """
        for module in self:
            if module.key == key:
                return module
        raise ConfigError(f"the model has no module {key!r}")

    def get_cache_layers(self) -> list[Attention]:
        """Attention modules in running order: one layer of a cache each."""
        return [block.attention for block in self.blocks]

    def get_recurrent_layers(self) -> list[Module]:
        """Modules with recurrent state; none in these models."""
        return []

    def get_layer_instances(self, idx: int) -> list[int]:
        """Cache layers of checkpoint layer `idx`; several if a layer map repeats it."""
        return [block.attention.instance for block in self.blocks if block.layer == idx]

    def get_layout_tree(self, indent: int) -> str:
        """Text tree of modules, repeats folded."""
        return layout_tree(self.modules, indent)

    def get_storage_info(self) -> tuple[float, float, int]:
        """Bits per weight without the head, of the head, and total bits; from file headers."""
        return storage_info(self.modules, self.config.stc)

    def get_name(self) -> str:
        """Name of the architecture's class."""
        return self.config.architecture

    def fingerprint(self) -> str:
        """Hex digest of all that decides what its cache holds for a text: weights, configuration,
        order of layers. It does not change when the files are moved."""
        config = self.config
        parts = (
            config.stc.fingerprint(),
            json.dumps(config.config_dict, sort_keys=True),
            repr((config.rope_settings, config.layer_map, config.infer_params.plain_dtype)),
            self.component,
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def get_load_metrics(self) -> dict[str, float]:
        """Bytes, seconds and bytes per second of the last load."""
        size = sum(module.stored_bytes(self.config.stc) for module in self.modules)
        seconds = self._load_seconds
        return {
            "bytes": size,
            "seconds": seconds,
            "bytes_per_second": size / seconds if seconds else 0.0,
        }

    def default_chat_prompt(self, prompt: str, system_prompt: str | None = None) -> str:
        """One-turn prompt in the architecture's usual format."""
        chat = self.config.arch.chat
        system = system_prompt if system_prompt is not None else chat.default_system
        text = chat.start
        if system is not None and chat.system:
            text += chat.system.replace("{system}", system)
        return text + chat.user.replace("{prompt}", prompt)

    def get_image_embeddings(self, tokenizer: Any, image: Any, text_alias: Any = None) -> Any:
        """Only a vision component has these."""
        raise UnsupportedError("this component has no vision tower")
