"""From an architecture's spec and a configuration to modules."""

from __future__ import annotations

from ..errors import ConfigError
from ..modules import (
    Attention,
    Block,
    Embedding,
    GatedMLP,
    Head,
    Linear,
    Module,
    RMSNorm,
    Rope,
)
from .arch_spec import Proj, decoder_sizes, evaluate
from .config import Config

# Names of `hidden_act` in configurations -> kinds of the activation op.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


class DecoderBuilder:
    """Builds the text model of one configuration; nothing is loaded."""

    def __init__(self, config: Config) -> None:
        if config.hidden_act not in ACTIVATIONS:
            raise ConfigError(
                f"{config.config_filename}: hidden_act {config.hidden_act!r} is unknown; this "
                f"version knows {', '.join(ACTIVATIONS)}"
            )
        self.config, self.arch = config, config.arch
        self.sizes = decoder_sizes(config)
        self.rope = Rope(config.rope_settings)

    def modules(self) -> list[Module]:
        """Embedding, blocks in running order, final norm, head."""
        config, arch = self.config, self.arch
        order = config.layer_map or list(range(config.num_hidden_layers))
        unique = {layer: self.block(layer) for layer in dict.fromkeys(order)}
        blocks = [unique[layer].repeat(instance) for instance, layer in enumerate(order)]
        tied = f"{arch.embedding_key}" if config.tie_word_embeddings else None
        return [
            Embedding(arch.embedding_key, vocab=config.vocab_size, hidden=config.hidden_size),
            *blocks,
            self.norm(arch.final_norm_key),
            Head(
                arch.head_key,
                hidden=config.hidden_size,
                vocab=config.vocab_size,
                alt_key=tied,
            ),
        ]

    def norm(self, key: str, dim: int | None = None) -> RMSNorm:
        """An RMSNorm over `dim`, the hidden size by default."""
        return RMSNorm(key, dim=dim or self.config.hidden_size, eps=self.config.rms_norm_eps)

    def linear(self, parent: str, proj: Proj) -> Linear:
        """One projection of the part `parent`; the Hessian group is named after its block."""
        bias = self.config.flags[proj.bias] if isinstance(proj.bias, str) else proj.bias
        block = parent.rpartition(".")[0]
        return Linear(
            f"{parent}.{proj.name}",
            in_features=evaluate(proj.k, self.sizes),
            out_features=evaluate(proj.n, self.sizes),
            share=f"{block}.{proj.share}",
            split=proj.split,
            bias=bias,
        )

    def block(self, layer: int) -> Block:
        """One decoder layer."""
        config, arch = self.config, self.arch
        key = f"{arch.layers_key}.{layer}"
        attention_key, mlp_key = f"{key}.{arch.attention.name}", f"{key}.{arch.mlp.name}"
        q, k, v, o = (self.linear(attention_key, p) for p in arch.attention.projections)
        gate, up, down = (self.linear(mlp_key, p) for p in arch.mlp.projections)
        qk_norms = None
        if arch.attention.qk_norm:
            qk_norms = (
                self.norm(f"{attention_key}.{arch.attention.q_norm_name}", config.head_dim),
                self.norm(f"{attention_key}.{arch.attention.k_norm_name}", config.head_dim),
            )
        return Block(
            key,
            layer=layer,
            attention_norm=self.norm(f"{key}.{arch.attention_norm_name}"),
            attention=Attention(
                attention_key,
                q_heads=config.num_q_heads,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                projections=(q, k, v, o),
                qk_norms=qk_norms,
                rope=self.rope,
                window=config.layer_windows[layer],
            ),
            mlp_norm=self.norm(f"{key}.{arch.mlp_norm_name}"),
            mlp=GatedMLP(
                mlp_key, projections=(gate, up, down), activation=ACTIVATIONS[config.hidden_act]
            ),
        )
