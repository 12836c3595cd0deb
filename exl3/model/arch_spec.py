"""Architectures as data: one spec drives loading, key mapping, Hessian groups, splits and plans."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError

_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.FloorDiv: operator.floordiv,
}


def evaluate(expression: str, sizes: Mapping[str, int]) -> int:
    """Value of a size expression such as `q_heads*head_dim`: names, whole numbers, `* + //`."""

    def visit(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](visit(node.left), visit(node.right))
        if isinstance(node, ast.Name) and node.id in sizes:
            return sizes[node.id]
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ConfigError(f"size expression {expression!r} uses something other than {[*sizes]}")

    return visit(ast.parse(expression, mode="eval").body)


@dataclass(frozen=True, slots=True)
class Derived:
    """A field's default that is a size expression over fields read before it."""

    expression: str


@dataclass(frozen=True, slots=True)
class Field:
    """One attribute of `Config` read from `config.json`.

    `default` None and `required` False: the attribute is None where the key is missing or null.
    """

    name: str
    keys: tuple[str, ...]
    types: tuple[type, ...]
    default: Any = None
    required: bool = False


@dataclass(frozen=True, slots=True)
class Proj:
    """One linear layer of a block.

    `k`, `n`: input and output size. `share`: layers of a block with the same word see the same
    input, so they share a Hessian. `split`: the dim that tensor parallel cuts. `bias`: False,
    True, or the config key (a flag) that says so.
    """

    name: str
    k: str
    n: str
    share: str
    split: str
    bias: bool | str = False


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention; projections in the order q, k, v, o."""

    projections: tuple[Proj, Proj, Proj, Proj]
    name: str = "self_attn"
    qk_norm: bool = False  # RMSNorm over each head of q and k before RoPE
    q_norm_name: str = "q_norm"
    k_norm_name: str = "k_norm"


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(act(gate(x)) * up(x)); projections in the order gate, up, down."""

    projections: tuple[Proj, Proj, Proj]
    name: str = "mlp"


@dataclass(frozen=True, slots=True)
class Window:
    """Which layers attend to the last `sliding_window` tokens only, where `layer_types` is absent.

    `flag`: key that must be true for the window to count. `first_layer`: key of the first layer
    that has it. `default` and `first_default`: values of missing keys.
    """

    default: int | None = None
    flag: str | None = None
    first_layer: str | None = None
    first_default: int = 0


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """One-turn prompt; `{system}` and `{prompt}` are filled in."""

    user: str
    system: str = ""  # put before `user` when there is a system prompt
    default_system: str | None = None
    start: str = ""


@dataclass(frozen=True, slots=True)
class Arch:
    """Everything that the engine knows about one architecture."""

    name: str
    fields: tuple[Field, ...]
    attention: Attention
    mlp: GatedMlp
    chat: ChatFormat
    embedding_key: str = "model.embed_tokens"
    layers_key: str = "model.layers"
    final_norm_key: str = "model.norm"
    head_key: str = "lm_head"
    attention_norm_name: str = "input_layernorm"
    mlp_norm_name: str = "post_attention_layernorm"
    window: Window | None = None  # None: a sliding window in the config is an error
    default_max_positions: int = 8192
    default_tied: bool = False
    flags: tuple[str, ...] = ()  # boolean keys that projections' `bias` refers to
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # key -> values allowed


def decoder_sizes(config: Any) -> dict[str, int]:
    """The names that size expressions may use."""
    return {
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "q_heads": config.num_q_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab": config.vocab_size,
    }


DECODER_FIELDS: tuple[Field, ...] = (
    Field("vocab_size", ("vocab_size",), (int,), required=True),
    Field("hidden_size", ("hidden_size",), (int,), required=True),
    Field("intermediate_size", ("intermediate_size",), (int,), required=True),
    Field("num_hidden_layers", ("num_hidden_layers",), (int,), required=True),
    Field("num_q_heads", ("num_attention_heads",), (int,), required=True),
    Field("num_kv_heads", ("num_key_value_heads",), (int,), Derived("num_q_heads")),
    Field("head_dim", ("head_dim",), (int,), Derived("hidden_size//num_q_heads")),
    Field("rms_norm_eps", ("rms_norm_eps",), (float,), 1e-6),
    Field("hidden_act", ("hidden_act", "hidden_activation"), (str,), "silu"),
    Field("initializer_range", ("initializer_range",), (float,), 0.02),
)

GQA = Attention(
    projections=(
        Proj("q_proj", k="hidden", n="q_heads*head_dim", share="attn_in", split="n"),
        Proj("k_proj", k="hidden", n="kv_heads*head_dim", share="attn_in", split="n"),
        Proj("v_proj", k="hidden", n="kv_heads*head_dim", share="attn_in", split="n"),
        Proj("o_proj", k="q_heads*head_dim", n="hidden", share="attn_out", split="k"),
    )
)

GATED_MLP = GatedMlp(
    projections=(
        Proj("gate_proj", k="hidden", n="intermediate", share="mlp_in", split="n"),
        Proj("up_proj", k="hidden", n="intermediate", share="mlp_in", split="n"),
        Proj("down_proj", k="intermediate", n="hidden", share="mlp_out", split="k"),
    )
)

CHATML = ChatFormat(
    system="<|im_start|>system\n{system}<|im_end|>\n",
    user="<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
)
