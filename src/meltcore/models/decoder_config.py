"""What config.json says of a decoder (models/decoder.py), and the switches of its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meltcore.layers.norm import RMSNorm, ZeroCentredNorm
from meltcore.models.config_fields import Fields

# What DecoderConfig takes as it stands in config.json.
_AS_PUBLISHED = (
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
    """The fields of config.json that shape routed experts.

    dense_layers: those with an ordinary feed-forward; shared_expert: every token goes through one more expert.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    dense_layers: frozenset[int]
    shared_expert: bool

    @classmethod
    def read(cls, config: Fields) -> ExpertsConfig:
        """From config.json, whose number of experts has one of two names. Raises ConfigError for a field that is
        missing or wrong, more experts to a token than there are, or a shared expert that is not as wide as the others.
        """
        if not config.has("num_experts"):
            config = config.replaced(num_experts=config.optional("num_local_experts"))
        sizes = config.required("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        experts, width = sizes["num_experts"], sizes["moe_intermediate_size"]
        if sizes["num_experts_per_tok"] > experts:
            raise config.wrong("num_experts_per_tok", f"from 1 to num_experts, {experts}")
        shared_width = config.optional("shared_expert_intermediate_size", 0)
        if shared_width not in (0, width):
            raise config.wrong("shared_expert_intermediate_size", f"0 or moe_intermediate_size, {width}")
        layers = range(config.required("num_hidden_layers")["num_hidden_layers"])
        step = config.optional("decoder_sparse_step", 1)
        dense = {layer for layer in layers if (layer + 1) % step} | set(config.optional("mlp_only_layers", ()))
        return cls(
            **sizes,
            norm_topk_prob=config.optional("norm_topk_prob", False),
            dense_layers=frozenset(dense),
            shared_expert=shared_width > 0,
        )


@dataclass(frozen=True)
class RecurrentConfig:
    """The fields of config.json that shape Gated DeltaNet, and the layers that have it instead of attention."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    layers: frozenset[int]

    @classmethod
    def read(cls, config: Fields) -> RecurrentConfig:
        """From config.json, which names every layer's kind or says how far layers of attention are apart. Raises
        ConfigError for a field that is missing or wrong, a kind that we do not compute, or sizes that do not fit
        together."""
        sizes = config.required(*(name for name in cls.__dataclass_fields__ if name != "layers"))
        count = config.required("num_hidden_layers")["num_hidden_layers"]
        kinds = config.optional("layer_types")
        if kinds is None:
            apart = config.required("full_attention_interval")["full_attention_interval"]
            if apart > count:
                raise config.wrong("full_attention_interval", f"from 1 to num_hidden_layers, {count}")
            kinds = ["linear_attention" if (layer + 1) % apart else "full_attention" for layer in range(count)]
        if len(kinds) != count or not {"full_attention"} <= set(kinds) <= {"full_attention", "linear_attention"}:
            raise config.wrong(
                "layer_types",
                f"linear_attention or full_attention for each of {count} layers, and full_attention for one at least",
            )
        heads, key_heads = sizes["linear_num_value_heads"], sizes["linear_num_key_heads"]
        if heads % key_heads:
            raise config.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads}")
        recurrent = (layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
        return cls(**sizes, layers=frozenset(recurrent))


@dataclass(frozen=True)
class DecoderConfig:
    """The fields of config.json that shape the network, and the switches of its family.

    intermediate_size: of ordinary feed-forwards, None where all are routed; rotary_dim: how many dimensions of a head
    turn with its position, the first ones.

    qkv_bias: queries, keys and values have a bias; head_norms: each head's query and key are normalised; output_gate:
    what comes out of attention is gated; zero_centred_norms: norms have their scale's distance from one as their
    weight; experts: what feed-forwards choose from, None for a dense network; recurrent: of the layers that are no
    attention, None where there are none.
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
    tie_word_embeddings: bool
    qkv_bias: bool
    head_norms: bool
    output_gate: bool
    zero_centred_norms: bool
    experts: ExpertsConfig | None
    recurrent: RecurrentConfig | None

    @classmethod
    def read(
        cls,
        config: Fields,
        *,
        qkv_bias: bool,
        head_norms: bool,
        output_gate: bool = False,
        zero_centred_norms: bool = False,
        turning: float = 1.0,
        experts: ExpertsConfig | None = None,
        recurrent: RecurrentConfig | None = None,
    ) -> DecoderConfig:
        """From config.json. turning: the share of a head that turns where nothing is said of it; a family in which
        that is all has no other. Raises ConfigError for a field that is missing or wrong, or a variant that we do not
        compute."""
        rope = plain_rope(config)
        if config.optional("use_sliding_window", False):
            raise config.not_computed("use_sliding_window")
        if config.not_null("hidden_act", "silu") != "silu":
            raise config.not_computed("hidden_act")
        if recurrent is None and set(config.optional("layer_types", ())) - {"full_attention"}:
            raise config.not_computed("layer_types")
        config = config.replaced(rope_theta=rope.optional("rope_theta", config.optional("rope_theta")))
        all_routed = experts is not None and not experts.dense_layers
        values: dict[str, Any] = {"intermediate_size": None}
        values |= config.required(*_AS_PUBLISHED, *(() if all_routed else ("intermediate_size",)))
        heads, key_heads, head_dim = (values[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        if heads % key_heads:
            raise config.wrong("num_attention_heads", f"a multiple of num_key_value_heads, {key_heads}")
        return cls(
            **values,
            rotary_dim=_rotary_dim(config, rope, head_dim, turning),
            tie_word_embeddings=config.optional("tie_word_embeddings", False),
            qkv_bias=qkv_bias,
            head_norms=head_norms,
            output_gate=output_gate,
            zero_centred_norms=zero_centred_norms,
            experts=experts,
            recurrent=recurrent,
        )

    def norm(self, size: int) -> RMSNorm:
        kind = ZeroCentredNorm if self.zero_centred_norms else RMSNorm
        return kind(size, self.rms_norm_eps)


def plain_rope(config: Fields) -> Fields:
    """What is said of rotary embeddings, in a field of its own that has one of two names: where there are both, that
    which transformers takes. Raises ConfigError where either asks for other angles than the plain ones."""
    for name in ("rope_scaling", "rope_parameters"):
        said = config.optional(name, {})
        for key, value in said.items():
            of_a_kind_of_layer = isinstance(value, dict)
            if of_a_kind_of_layer or (key in ("rope_type", "type") and value not in (None, "default")):
                raise config.part(name).not_computed(key)
    return config.part("rope_scaling" if config.optional("rope_scaling") else "rope_parameters")


def _rotary_dim(config: Fields, rope: Fields, head_dim: int, turning: float) -> int:
    """How many dimensions of a head turn: an even number, since they turn in pairs."""
    name = "partial_rotary_factor"
    share = rope.not_null(name, config.not_null(name, turning))
    if turning == 1.0 and share != 1.0:
        raise (rope if rope.has(name) else config).not_computed(name)
    rotary_dim = int(head_dim * share)
    if head_dim % 2 or rotary_dim % 2 or rotary_dim == 0:
        raise config.wrong("head_dim", f"even, and so must be as much of it as turns, {share:g} of it")
    return rotary_dim
