"""Command-line arguments that scripts share, and loading a model by them."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any

from .cache import Cache, CacheLayer_fp16, CacheLayer_quant
from .errors import ConfigError
from .model import Config, Model
from .sampling.arguments import MORE_DEFAULTS, add_more_sampling_args, more_steps

SAMPLING_DEFAULTS: Mapping[str, Any] = {
    "temperature": 0.8,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "penalty_range": 1024,
    "min_p": 0.08,
    "top_k": 0,
    "top_p": 1.0,
    "adaptive_target": 1.0,
    "adaptive_decay": 0.9,
}
_TP_PARTS = ("attn", "mlp", "moe", "linear", "linear_attn")
NGRAM_DRAFT_TOKENS = 4


def add_args(
    parser: ArgumentParser,
    cache: bool = True,
    default_cache_size: int = 8192,
    default_recurrent_cache_size: float = 4.0,
    default_cpu_cache_size: float = 0.0,
    add_sampling_args: bool = False,
    default_sampling_args: Mapping[str, Any] | None = None,
    default_autosplit_max_batch_size: int = 1,
    add_draft_model_args: bool = False,
) -> None:
    """Add the flags of the interface page, section 10, to a parser.

    Args:
        default_sampling_args: other defaults, by long name without dashes.
    Raises:
        ConfigError: an unknown name in `default_sampling_args`.
    """
    _add_model_args(parser, default_autosplit_max_batch_size)
    _add_tp_args(parser)
    if cache:
        sizes = (default_cache_size, default_cpu_cache_size, default_recurrent_cache_size)
        _add_cache_args(parser, *sizes)
    if add_sampling_args:
        _add_sampling_args(parser, default_sampling_args or {})
    if add_draft_model_args:
        _add_draft_args(parser)


def _flag(parser: ArgumentParser, short: str, long: str, text: str) -> None:
    parser.add_argument(short, long, action="store_true", help=text)


def _value(
    parser: ArgumentParser, names: str, kind: Callable[[str], Any], default: Any, text: str
) -> None:
    shown = "" if default is None else f", default {default}"
    parser.add_argument(*names.split(), type=kind, default=default, help=text + shown)


def _add_model_args(parser: ArgumentParser, max_batch_size: int) -> None:
    parser.add_argument("-m", "--model_dir", type=str, required=True, help="model directory")
    _value(parser, "-gs --gpu_split", str, None, "GiB to use per device, comma list, or auto")
    _flag(parser, "-lm", "--load_metrics", "show load figures")
    _flag(parser, "-lv", "--load_verbose", "show the placement plan")
    _flag(parser, "-asnf", "--autosplit_no_forward", "skip the measuring pass of the layer split")
    _flag(parser, "-swa_full", "--swa_full", "full-length cache for sliding-window layers")
    _value(parser, "-or --override", str, None, "YAML file: tensors to take from other models")
    _value(parser, "-mcl --moe_cpu_offload", int, 0, "MoE layers with experts on the CPU")
    _value(parser, "-mclt --moe_cpu_threads", int, None, "threads for experts on the CPU")
    _value(
        parser,
        "-ambs --autosplit_max_batch_size",
        int,
        max_batch_size,
        "batch size that the layer split and the cache are planned for",
    )
    _value(parser, "-layer_map --layer_map", str, None, "layers in running order, as 0..15,11..31")


def _add_tp_args(parser: ArgumentParser) -> None:
    _flag(parser, "-tp", "--tensor_parallel", "split every layer over the devices")
    _value(parser, "-tpb --tp_backend", str, "native", "tensor parallel backend: native or nccl")
    for part in _TP_PARTS:
        names = f"-tp_{part} --tp_max_parallelism_{part}"
        _value(parser, names, int, None, f"tensor parallel: most devices for {part} layers")
    _flag(parser, "-tp_moe_ts", "--tp_moe_tensor_split", "split experts by columns")


def _add_cache_args(
    parser: ArgumentParser, size: int, cpu_size: float, recurrent_size: float
) -> None:
    _value(parser, "-cs --cache_size", int, size, "tokens in the cache, a multiple of 256")
    _value(parser, "-cq --cache_quant", str, None, "quantised cache: bits, or k_bits,v_bits")
    _value(parser, "-cca --cache_compand_a", float, 0.0, "companding of the quantised cache")
    _value(parser, "-ccs --cpu_cache_size", float, cpu_size, "GiB of system memory for pages")
    _value(
        parser,
        "-rcs --recurrent_cache_size",
        float,
        recurrent_size,
        "GiB of system memory for recurrent states",
    )


def _add_sampling_args(parser: ArgumentParser, changed: Mapping[str, Any]) -> None:
    default = {**SAMPLING_DEFAULTS, **MORE_DEFAULTS}
    unknown = sorted(set(changed) - set(default))
    if unknown:
        raise ConfigError(f"default_sampling_args: unknown {unknown}; known are {[*default]}")
    default.update(changed)
    for names, kind, text in (
        ("-temp --temperature", float, "sampling temperature"),
        ("-repp --repetition_penalty", float, "repetition penalty, 1 is off"),
        ("-presp --presence_penalty", float, "presence penalty, 0 is off"),
        ("-freqp --frequency_penalty", float, "frequency penalty, 0 is off"),
        ("-penr --penalty_range", int, "tokens that penalties look back, and fade over"),
        ("-minp --min_p", float, "min-p, 0 is off"),
        ("-topk --top_k", int, "top-k, 0 is off"),
        ("-topp --top_p", float, "top-p, 1 is off"),
        ("-adaptive_target --adaptive_target", float, "adaptive-p target, 1 is off"),
        ("-adaptive_decay --adaptive_decay", float, "adaptive-p decay"),
    ):
        _value(parser, names, kind, default[names.rpartition("--")[2]], text)
    _flag(parser, "-temp_first", "--temperature_first", "temperature before the truncation steps")
    add_more_sampling_args(parser, default)


def _add_draft_args(parser: ArgumentParser) -> None:
    _value(parser, "-dm --draft_model_dir", str, None, "draft model directory")
    _value(parser, "-ndt --num_draft_tokens", int, None, "tokens to draft")
    _flag(parser, "-mtp", "--mtp", "draft with the model's own MTP head")
    _value(parser, "-ngram --ngram_match_min", int, 0, "n-gram drafts: shortest match, 0 is off")
    _flag(parser, "-dds", "--dynamic_draft", "adapt the draft length")
    _value(parser, "-dskip --draft_skip_ema", float, 0.3, "accepted tokens below which to skip")
    _value(parser, "-dmcl --draft_moe_cpu_layers", int, 0, "draft MoE layers on the CPU")
    _value(parser, "-dmclt --draft_moe_cpu_threads", int, None, "threads for these")


def init(
    args: Namespace,
    load_tokenizer: bool = True,
    quiet: bool = False,
    progress: bool = True,
    override_dynamic_seq_len: int | None = None,
    min_draft_len: int | None = None,
    **load_kwargs: Any,
) -> tuple[Any, ...]:
    """Load what the arguments ask for.

    Returns:
        (model, config, cache or None, tokenizer or None), and if the draft arguments were added
        also (draft_model, draft_config, draft_cache), None without a drafter.
    Raises:
        ConfigError, UnsupportedError: arguments that exclude each other or cannot be served.
    """
    options = vars(args)
    say = _silent if quiet else _console
    _check(options)
    config = Config.from_directory(args.model_dir, layer_map=args.layer_map)
    if override_dynamic_seq_len:
        config.override_dynamic_seq_len(override_dynamic_seq_len)
    config.infer_params.moe_cpu_offload = args.moe_cpu_offload
    config.infer_params.moe_cpu_threads = args.moe_cpu_threads
    if args.override:
        _apply_override(config, args.override)
    draft_model, draft_config, own_head = _draft(options, config)
    history = _history(options, draft_model, min_draft_len)
    model = Model.from_config(config, swa_full=args.swa_full)
    cache = _cache(options, model, history)
    draft_cache = None if draft_model is None else _cache(options, draft_model, history)
    load = {**_load_arguments(options, progress and not quiet), **load_kwargs}
    if draft_model is not None:
        say(f" -- Loading draft {config.directory if own_head else args.draft_model_dir}")
        draft_model.load(**load)
    say(f" -- Loading {args.model_dir}")
    model.load(**load)
    if args.load_metrics:
        figures = model.get_load_metrics()
        say(f" -- Loaded {figures['bytes'] / 2**30:.3f} GiB in {figures['seconds']:.2f} s")
    tokenizer = None
    if load_tokenizer:
        from .tokenizer import Tokenizer

        tokenizer = Tokenizer.from_config(config)
    found = (model, config, cache, tokenizer)
    if "draft_model_dir" in options:
        return (*found, draft_model, draft_config, draft_cache)
    return found


def _console(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _silent(line: str) -> None:
    return None


def _check(options: Mapping[str, Any]) -> None:
    """Refuse arguments that exclude each other."""
    moe = options["moe_cpu_offload"] or options.get("draft_moe_cpu_layers")
    if options["tensor_parallel"] and moe:
        raise ConfigError("experts on the CPU (-mcl, -dmcl) exclude tensor parallel (-tp)")
    if options["tensor_parallel"] and options["layer_map"]:
        raise ConfigError("-layer_map excludes tensor parallel (-tp)")
    draft, mtp = options.get("draft_model_dir"), options.get("mtp")
    if draft and mtp:
        raise ConfigError("-mtp drafts with the model's own head: it excludes -dm")
    if options["override"] and draft:
        raise ConfigError("-or excludes a draft model (-dm)")
    drafts = draft or mtp
    if not drafts and (options.get("draft_moe_cpu_layers") or options.get("draft_moe_cpu_threads")):
        raise ConfigError("-dmcl and -dmclt need a drafter: -dm or -mtp")


def _draft(options: Mapping[str, Any], config: Config) -> tuple[Model | None, Config | None, bool]:
    """Draft model and its config, and whether it is a head of the model itself."""
    directory = options.get("draft_model_dir")
    if not directory and not options.get("mtp"):
        return None, None, False
    if options.get("mtp") or directory == options["model_dir"]:
        return Model.from_config(config, component="mtp"), config, True
    assert directory is not None
    draft_config = Config.from_directory(directory)
    draft_config.infer_params.moe_cpu_offload = options["draft_moe_cpu_layers"]
    draft_config.infer_params.moe_cpu_threads = options["draft_moe_cpu_threads"]
    return Model.from_config(draft_config), draft_config, False


def _history(options: Mapping[str, Any], draft: Model | None, minimum: int | None) -> int:
    """Tokens that must be possible to take back."""
    wanted = options.get("num_draft_tokens")
    default = 0 if draft is None else draft.caps.get("default_draft_size", 0)
    ngram = NGRAM_DRAFT_TOKENS if options.get("ngram_match_min") and wanted is None else 0
    return max(minimum or 0, default, wanted or 0, ngram)


def _cache(options: Mapping[str, Any], model: Model, history: int) -> Cache | None:
    if "cache_size" not in options:
        return None
    bits = options["cache_quant"]
    layer: dict[str, Any] = {"layer_type": CacheLayer_fp16}
    if bits:
        parts = bits.split(",")
        if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
            raise ConfigError(f"-cq: expected bits or k_bits,v_bits, got {bits!r}")
        layer = {
            "layer_type": CacheLayer_quant,
            "k_bits": int(parts[0]),
            "v_bits": int(parts[-1]),
            "compand_a": options["cache_compand_a"],
        }
    return Cache(
        model,
        max_num_tokens=options["cache_size"],
        max_batch_size=options["autosplit_max_batch_size"],
        max_history=history,
        **layer,
    )


def _load_arguments(options: Mapping[str, Any], bar: bool) -> dict[str, Any]:
    split = options["gpu_split"]
    use = None
    if split and split != "auto":
        try:
            use = [float(part) for part in split.split(",")]
        except ValueError as error:
            raise ConfigError(f"-gs: expected numbers or auto, got {split!r}") from error
    limits = {part: options[f"tp_max_parallelism_{part}"] for part in _TP_PARTS}
    return {
        "use_per_device": use,
        "tensor_p": options["tensor_parallel"],
        "tp_backend": options["tp_backend"],
        "tp_dev_limits": {part: limit for part, limit in limits.items() if limit is not None},
        "tp_options": {"moe_tensor_split": options["tp_moe_tensor_split"]},
        "progressbar": bar,
        "verbose": options["load_verbose"],
        "max_batch_size": options["autosplit_max_batch_size"],
        "autosplit_no_forward": options["autosplit_no_forward"],
    }


def _apply_override(config: Config, filename: str) -> None:
    """Take tensors that match a glob from other checkpoints, as a YAML file says."""
    import yaml

    from .loader import SafetensorsCollection, VariantSafetensorsCollection

    try:
        with open(filename, encoding="utf-8") as file:
            wanted = yaml.safe_load(file)
        sources = {s["id"]: SafetensorsCollection(s["model_dir"]) for s in wanted["sources"]}
        pairs = [(entry["key"], entry["source"]) for entry in wanted["overrides"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{filename}: expected sources (id, model_dir) and overrides (key, source): {error!r}"
        ) from error
    collection = VariantSafetensorsCollection(config.stc)
    for key, source in pairs:
        if source not in sources:
            raise ConfigError(f"{filename}: override {key!r} names unknown source {source!r}")
        collection.add_stc([key], sources[source])
    config.stc = collection


def get_arg_sampler(args: Namespace, tokenizer: Any = None) -> Any:
    """The `ComboSampler` that the sampling arguments describe.

    Args:
        tokenizer: for the flags that speak of text: `-drysb` and `-ban_eos`; also protects line
            ends from XTC.
    Raises:
        ConfigError: a value outside its range, or a flag that needs the tokenizer.
    """
    from .generator.sampler import ComboSampler

    if args.temperature < 0:  # greedy to a program, a slip on the command line
        raise ConfigError(f"-temp --temperature: {args.temperature}, expected 0 (greedy) or more")
    return ComboSampler(
        rep_p=args.repetition_penalty,
        freq_p=args.frequency_penalty,
        pres_p=args.presence_penalty,
        rep_sustain_range=args.penalty_range,
        rep_decay_range=args.penalty_range,
        temperature=args.temperature,
        min_p=args.min_p,
        top_k=args.top_k,
        top_p=args.top_p,
        temp_last=not args.temperature_first,
        adaptive_target=args.adaptive_target,
        adaptive_decay=args.adaptive_decay,
        more=more_steps(vars(args), tokenizer),
    )
