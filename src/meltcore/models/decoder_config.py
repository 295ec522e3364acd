"""What config.json says of a decoder (models/decoder.py), and the switches of its family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meltcore.errors import ConfigError
from meltcore.layers.norm import RMSNorm, ZeroCentredNorm

# What DecoderConfig takes as it stands in config.json.
_AS_PUBLISHED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
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
    def read(cls, config: Mapping[str, Any]) -> ExpertsConfig:
        """From a parsed config.json, whose number of experts has one of two names. Raises ConfigError for a missing
        field, more experts to a token than there are, or a shared expert that is not as wide as the others."""
        values = {"norm_topk_prob": False, **config}
        values["num_experts"] = values.get("num_experts") or values.get("num_local_experts")
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        _require(values, (*names, "num_hidden_layers"))
        experts, choices = values["num_experts"], values["num_experts_per_tok"]
        if not 1 <= choices <= experts:
            raise ConfigError(f"config.json: num_experts_per_tok is from 1 to num_experts, {experts}; got {choices}")
        width, shared_width = values["moe_intermediate_size"], values.get("shared_expert_intermediate_size") or 0
        if shared_width not in (0, width):
            raise ConfigError(
                f"config.json: a shared expert is as wide as the others here, moe_intermediate_size {width}; "
                f"got shared_expert_intermediate_size {shared_width}"
            )
        step, layers = values.get("decoder_sparse_step") or 1, range(values["num_hidden_layers"])
        dense = {layer for layer in layers if (layer + 1) % step} | set(values.get("mlp_only_layers") or ())
        return cls(
            **{name: values[name] for name in names}, dense_layers=frozenset(dense), shared_expert=shared_width > 0
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
    def read(cls, config: Mapping[str, Any]) -> RecurrentConfig:
        """From a parsed config.json, which names every layer's kind or says how far layers of attention are apart.
        Raises ConfigError for a missing field, a kind that we do not compute, or sizes that do not fit together."""
        names = tuple(name for name in cls.__dataclass_fields__ if name != "layers")
        _require(config, (*names, "num_hidden_layers"))
        count, kinds = config["num_hidden_layers"], config.get("layer_types")
        if kinds is None:
            _require(config, ("full_attention_interval",))
            apart = config["full_attention_interval"]
            kinds = ["linear_attention" if (layer + 1) % apart else "full_attention" for layer in range(count)]
        if len(kinds) != count or not {"full_attention"} <= set(kinds) <= {"full_attention", "linear_attention"}:
            raise ConfigError(
                f"config.json: layer_types names linear_attention or full_attention for each of {count} layers, "
                f"and full_attention for one at least; got {', '.join(map(str, kinds))}"
            )
        heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
        if heads % key_heads:
            raise ConfigError(f"config.json: linear_num_value_heads is a multiple of {key_heads}; got {heads}")
        recurrent = (layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
        return cls(**{name: config[name] for name in names}, layers=frozenset(recurrent))


@dataclass(frozen=True)
class DecoderConfig:
    """The fields of config.json that shape the network, and the switches of its family.

    intermediate_size: of ordinary feed-forwards, None where there are none; rotary_dim: how many dimensions of a head
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
        config: Mapping[str, Any],
        *,
        qkv_bias: bool,
        head_norms: bool,
        output_gate: bool = False,
        zero_centred_norms: bool = False,
        experts: ExpertsConfig | None = None,
        recurrent: RecurrentConfig | None = None,
    ) -> DecoderConfig:
        """From a parsed config.json. Raises ConfigError for a missing field or a variant that we do not compute."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        unsupported = {
            "use_sliding_window": bool(config.get("use_sliding_window")),
            "hidden_act": config.get("hidden_act", "silu") != "silu",
            "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
        }
        for name, is_set in unsupported.items():
            if is_set:
                raise ConfigError(
                    f"config.json sets {name} to {config.get(name, rope)}, which this decoder does not compute"
                )
        values: dict[str, Any] = {
            "rope_theta": rope.get("rope_theta"),
            "tie_word_embeddings": False,
            "intermediate_size": None,
        }
        values |= {name: value for name, value in config.items() if value is not None}
        all_routed = experts is not None and not experts.dense_layers
        _require(values, [name for name in _AS_PUBLISHED if not (all_routed and name == "intermediate_size")])
        turning = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
        return cls(
            **{name: values[name] for name in _AS_PUBLISHED},
            rotary_dim=int(values["head_dim"] * turning),
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


def _require(config: Mapping[str, Any], names: Sequence[str]) -> None:
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise ConfigError(f"config.json lacks {', '.join(missing)}")
