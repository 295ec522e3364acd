"""The configuration of a decoder: fields of config.json, and switches in which model families differ.

This module does not import torch, since checkpoints are checked without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meltcore.kernels.rope_scaling import RopeScaling
from meltcore.models.configs.config_fields import Fields
from meltcore.models.decoders.rope import max_context, read_rope_scaling, rope_fields

if TYPE_CHECKING:
    from meltcore.layers.feed_forward import Activation
    from meltcore.layers.norm import RMSNorm

# Fields that DecoderConfig takes unchanged from config.json.
_UNCHANGED_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
)


@dataclass(frozen=True)
class ExpertsConfig:
    """The fields of config.json that define routed experts.

    Layers in `dense_layers` have a dense feed-forward. With `shared_expert`, one more expert computes every token.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    dense_layers: frozenset[int]
    shared_expert: bool

    @classmethod
    def read(cls, config: Fields) -> ExpertsConfig:
        """Read the fields from config.json, where the number of experts is num_experts or num_local_experts.

        Raises ConfigError for a missing or wrong field, for more experts per token than experts, or for a shared expert
        whose width differs from the other experts'.
        """
        if not config.has("num_experts"):
            config = config.with_values(num_experts=config.optional("num_local_experts"))
        sizes = config.required("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        num_experts, width = sizes["num_experts"], sizes["moe_intermediate_size"]
        if sizes["num_experts_per_tok"] > num_experts:
            raise config.rule_error("num_experts_per_tok", f"from 1 to num_experts, {num_experts}")
        shared_width = config.optional("shared_expert_intermediate_size", 0)
        if shared_width not in (0, width):
            raise config.rule_error("shared_expert_intermediate_size", f"0 or moe_intermediate_size, {width}")
        layers = range(config.required("num_hidden_layers")["num_hidden_layers"])
        sparse_step = config.optional("decoder_sparse_step", 1)
        dense_layers = {layer for layer in layers if (layer + 1) % sparse_step} | set(
            config.optional("mlp_only_layers", ())
        )
        return cls(
            **sizes,
            norm_topk_prob=config.optional("norm_topk_prob", False),
            dense_layers=frozenset(dense_layers),
            shared_expert=shared_width > 0,
        )


@dataclass(frozen=True)
class RecurrentConfig:
    """The fields of config.json that define Gated DeltaNet.

    The layers with indices in `layers` have Gated DeltaNet instead of attention.
    """

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    layers: frozenset[int]

    @classmethod
    def read(cls, config: Fields) -> RecurrentConfig:
        """Read the fields from config.json, which states every layer's type or the interval between attention layers.

        Raises ConfigError for a missing or wrong field, an unsupported layer type, or sizes that do not fit together.
        """
        sizes = config.required(*(name for name in cls.__dataclass_fields__ if name != "layers"))
        num_layers = config.required("num_hidden_layers")["num_hidden_layers"]
        layer_types = config.optional("layer_types")
        if layer_types is None:
            interval = config.required("full_attention_interval")["full_attention_interval"]
            if interval > num_layers:
                raise config.rule_error("full_attention_interval", f"from 1 to num_hidden_layers, {num_layers}")
            layer_types = [
                "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)
            ]
        if len(layer_types) != num_layers or not {"full_attention"} <= set(layer_types) <= {
            "full_attention",
            "linear_attention",
        }:
            raise config.rule_error(
                "layer_types",
                f"linear_attention or full_attention for each of {num_layers} layers, "
                "and full_attention for one at least",
            )
        heads, key_heads = sizes["linear_num_value_heads"], sizes["linear_num_key_heads"]
        if heads % key_heads:
            raise config.rule_error("linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads}")
        recurrent_layers = (layer for layer, layer_type in enumerate(layer_types) if layer_type == "linear_attention")
        return cls(**sizes, layers=frozenset(recurrent_layers))


@dataclass(frozen=True)
class DecoderConfig:
    """The fields of config.json that shape the network, and the switches of its family.

    Args:
        intermediate_size: the width of dense feed-forwards. None means that all layers are routed.
        rotary_dim: the number of leading dimensions of a head with rotary embeddings.
        rope_scaling: the scaling of rotary frequencies. None leaves them unscaled.
        qkv_bias: whether queries, keys and values have a bias.
        qk_norm: whether each head's query and key are normalized.
        wide_qk_norm: whether all heads' queries are normalized together, and so are the keys.
        output_gate: whether the output of attention is gated.
        zero_centered_norms: whether a checkpoint stores a norm's scale minus one.
        experts: the routed experts. None makes the model dense.
        recurrent: the recurrent layers. None gives all layers attention.
        sliding_window: the number of newest tokens that a query of the sliding_layers sees, including its own.
        rope_local_theta: the base of the frequencies of the sliding_layers, which are not scaled. None uses the
            frequencies of the other layers.
        attention_scale: the factor of attention scores. None uses head_dim^-0.5.
        post_norms: whether the outputs of attention and feed-forward are normalized before they are added.
        pre_norms: whether attention and feed-forward read the normalized residual stream.
        float32_norms: whether norms round after they have multiplied by their weight.
        activation: the activation of dense feed-forwards.
        embedding_scale: the factor of the token embeddings. None leaves them as they are.
        rounds_embedding_scale: whether that factor is rounded to the weights' type.
        nope_layers: the layers whose queries and keys are not rotated.
        residual_multiplier: the factor of what attention and feed-forward add to the residual stream.
        logits_scaling: the divisor of the logits.
    """

    hidden_size: int
    intermediate_size: int | None
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    output_gate: bool
    zero_centered_norms: bool
    experts: ExpertsConfig | None
    recurrent: RecurrentConfig | None
    sliding_window: int | None = None
    sliding_layers: frozenset[int] = frozenset()
    rope_local_theta: float | None = None
    attention_scale: float | None = None
    post_norms: bool = False
    activation: Activation = "silu"
    embedding_scale: float | None = None
    rounds_embedding_scale: bool = False
    nope_layers: frozenset[int] = frozenset()
    wide_qk_norm: bool = False
    pre_norms: bool = True
    float32_norms: bool = False
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    @classmethod
    def read(
        cls,
        config: Fields,
        *,
        qkv_bias: bool,
        qk_norm: bool,
        output_gate: bool = False,
        zero_centered_norms: bool = False,
        rotary_factor: float | None = None,
        experts: ExpertsConfig | None = None,
        recurrent: RecurrentConfig | None = None,
        sliding_layers: frozenset[int] = frozenset(),
        **switches: Any,
    ) -> DecoderConfig:
        """Read the configuration from the fields of config.json and the switches of a family.

        Args:
            config: the fields of config.json.
            qkv_bias: see DecoderConfig.
            qk_norm: see DecoderConfig.
            output_gate: see DecoderConfig.
            zero_centered_norms: see DecoderConfig.
            rotary_factor: the family's default of partial_rotary_factor. None supports no value but 1.
            experts: see DecoderConfig.
            recurrent: see DecoderConfig.
            sliding_layers: layers whose attention has the window `sliding_window` of config.json.
            switches: further fields of this class.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        rope_config = rope_fields(config)
        for name in ("use_sliding_window", "mlp_bias", "lm_head_bias"):
            if config.optional(name, False):
                raise config.unsupported_field(name)
        # transformers' masks read it in every family, and take null for false. No class has it as a field.
        if not config.optional_not_null("is_causal", True):
            raise config.unsupported_field("is_causal")
        activation = switches.get("activation", "silu")
        activation_name = "hidden_act" if activation == "silu" else "hidden_activation"
        if config.optional_not_null(activation_name, activation) != activation:
            raise config.unsupported_field(activation_name)
        computed_types = {"full_attention"} | ({"sliding_attention"} if sliding_layers else set())
        if recurrent is None and set(config.optional("layer_types", ())) - computed_types:
            raise config.unsupported_field("layer_types")
        config = config.with_values(rope_theta=rope_config.optional("rope_theta", config.optional("rope_theta")))
        all_layers_routed = experts is not None and not experts.dense_layers
        field_values: dict[str, Any] = {"intermediate_size": None}
        field_values |= config.required(*_UNCHANGED_FIELDS, *(() if all_layers_routed else ("intermediate_size",)))
        heads, kv_heads, head_dim = (
            field_values[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        if heads % kv_heads:
            raise config.rule_error("num_attention_heads", f"a multiple of num_key_value_heads, {kv_heads}")
        rotary_dim = _rotary_dim(config, rope_config, head_dim, rotary_factor)
        return cls(
            **field_values,
            rotary_dim=rotary_dim,
            rope_scaling=read_rope_scaling(config, rotary_dim),
            tie_word_embeddings=config.optional("tie_word_embeddings", False),
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            output_gate=output_gate,
            zero_centered_norms=zero_centered_norms,
            experts=experts,
            recurrent=recurrent,
            sliding_window=config.required("sliding_window")["sliding_window"] if sliding_layers else None,
            sliding_layers=sliding_layers,
            **switches,
        )

    @property
    def max_context(self) -> int:
        """The longest context in tokens: the checkpoint's, or a longer one that RoPE scaling gives."""
        return max_context(self.max_position_embeddings, self.rope_scaling)

    def norm(self, size: int) -> RMSNorm:
        """Create a norm of `size` features with this family's class and eps.

        With a residual_multiplier r the residual stream holds 1 / r of its values, so that no layer multiplies its
        output. A norm of x / r with eps / r^2 equals the norm of x with eps.
        """
        import torch

        from meltcore.layers.norm import RMSNorm, ZeroCenteredRMSNorm

        eps = self.rms_norm_eps / self.residual_multiplier**2
        if self.zero_centered_norms:
            return ZeroCenteredRMSNorm(size, eps)
        return RMSNorm(size, eps, torch.float32 if self.float32_norms else None)

    @property
    def norms_are_float32(self) -> bool:
        """Whether the scales of norms are float32, whatever the model's type."""
        return self.zero_centered_norms or self.float32_norms

    @property
    def stream_scale(self) -> float | None:
        """The factor of the token embeddings at the start of the residual stream. None leaves them as they are."""
        scale = (self.embedding_scale or 1.0) / self.residual_multiplier
        return None if scale == 1.0 else scale


def with_head_dim(config: Fields) -> Fields:
    """Return `config` with head_dim, by default hidden_size / num_attention_heads.

    Raises ConfigError if the default is not a whole number.
    """
    if config.has("head_dim"):
        return config
    hidden_size, heads = config.required("hidden_size", "num_attention_heads").values()
    if hidden_size % heads:
        raise config.rule_error("hidden_size", f"a multiple of num_attention_heads, {heads}, without head_dim")
    return config.with_values(head_dim=hidden_size // heads)


def _rotary_dim(config: Fields, rope_config: Fields, head_dim: int, default_factor: float | None) -> int:
    """Return the number of dimensions of a head that have rotary embeddings.

    It is even, since dimensions rotate in pairs.
    """
    name = "partial_rotary_factor"
    factor = rope_config.optional_not_null(name, config.optional_not_null(name, default_factor or 1.0))
    if default_factor is None and factor != 1.0:
        raise (rope_config if rope_config.has(name) else config).unsupported_field(name)
    rotary_dim = int(head_dim * factor)
    if head_dim % 2 or rotary_dim % 2 or rotary_dim == 0:
        raise config.rule_error("head_dim", f"even, and so must be its rotary part, {factor:g} of it")
    return rotary_dim
