"""Published config.json files at a small size give transformers' logits, and no field of theirs is passed over.

The configurations are those of `PUBLISHED_CONFIG_FOLDERS` and of published_configs.json, which names the source of
each. Its fields were read from public copies of these files.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from meltcore.errors import ConfigError
from meltcore.models.checkpoint import PUBLISHED_CONFIG_FOLDERS, read_json

Config = dict[str, Any]
TOLERANCE = 1e-4
PROMPT_TOKENS = 60
OTHERS = read_json(Path(__file__).parent / "published_configs.json")
LAYERS = 6  # with one of each kind: the fourth of SmolLM3 has no rotary embeddings, the sixth of Gemma 3 no window
SIZES: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "head_dim": 32,
    "vocab_size": tools.VOCAB,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
}
VISION: Config = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "temporal_patch_size": 1,
    "num_position_embeddings": 16,
}
# Neither transformers nor we compute anything from these. The tests compare both.
WITHOUT_EFFECT = {
    "_name_or_path",
    "attention_dropout",  # of training
    "boi_token_index",
    "bos_token_id",
    "dtype",
    "embd_pdrop",  # of training
    "eoi_token_index",
    "eos_token_id",
    "full_attn_mod",  # of Phi's own code, which transformers does not have
    "image_token_id",
    "image_token_index",
    "initializer_range",
    "interpolate_factor",  # as full_attn_mod
    "is_llama_config",
    "mamba_ssm_dtype",  # the type of states in transformers' kernels; ours are float32
    "max_window_layers",  # of Qwen's sliding windows, which are refused
    "mm_tokens_per_image",
    "mrope_interleaved",  # of positions in images
    "mrope_section",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "no_rope_layer_interval",  # SmolLM3 lists the layers, too
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "qkv_bias",  # fields that transformers' class does not have
    "resid_pdrop",  # of training
    "router_aux_loss_coef",
    "text_config.tie_word_embeddings",  # that of the whole model counts
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_mrope",
    "use_qk_norm",
    "video_token_id",
    "vision_end_token_id",
    "vision_start_token_id",
}
LENGTHS = {"max_position_embeddings", "original_max_position_embeddings"}  # only some scalings follow from them
# They shape the encoder of images, which is not read.
OF_VISION = {"multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer"}
IDENTITY = {"architectures", "model_type"}  # they choose the family


def published() -> dict[str, Config]:
    """Every configuration of a model without quantization, by its hub id."""
    bundled = {name: read_json(folder / "config.json") for name, folder in PUBLISHED_CONFIG_FOLDERS.items()}
    found = {**bundled, **{name: entry["config"] for name, entry in OTHERS.items()}}
    return {name: config for name, config in found.items() if "quantization_config" not in config}


PUBLISHED = published()


def shrink(config: Config, field: str = "") -> Config:
    """Return a published configuration at a small size: the one rule by which fields change.

    Sizes are those of SIZES, ratios of heads stay even or odd, lists end with the layers or dimensions that are left,
    ids of tokens lie in the small vocabulary, and weights are float32. All other fields stay.
    """
    if field == "vision_config":
        return config | {name: value for name, value in VISION.items() if name in config}
    small = {name: _shrunk(name, value) for name, value in config.items()}
    scaling = config.get("rope_scaling") or {}
    if "long_factor" in scaling:  # one factor for each pair of dimensions that rotate
        head_dim = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
        pairs = int(head_dim * config.get("partial_rotary_factor", 1.0)) // 2
        cut = {name: value[:pairs] for name, value in scaling.items() if name.endswith("_factor")}
        small["rope_scaling"] = scaling | cut
    if config.get("num_key_value_heads") == config.get("num_attention_heads"):
        small |= {"num_key_value_heads": 4} if "num_key_value_heads" in config else {}
    return small


def _shrunk(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return shrink(value, name) if name.endswith("_config") else value
    if name == "num_key_value_heads":
        return min(value, 2)
    if name in SIZES and value:
        return SIZES[name]
    if name in ("layer_types", "no_rope_layers") and value:
        return value[:LAYERS]
    if name.endswith(("_token_id", "_token_index")) and value is not None:
        return [each % 300 for each in value] if isinstance(value, list) else tools.VOCAB - 1 - value % 16
    return "float32" if name in ("torch_dtype", "dtype") else value


def reference_of(config: Config) -> PreTrainedModel:
    """A model of transformers without meaningful weights."""
    if config["model_type"] == "mistral3":  # published with a head, though transformers' class ties it by default
        config = {"tie_word_embeddings": False, **config}
    kind = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    return kind.from_config(AutoConfig.for_model(**copy.deepcopy(config))).float().eval()


def prompt() -> list[int]:
    return tools.random_prompt(PROMPT_TOKENS, 1, tools.VOCAB - 20)  # without the ids of images


@torch.no_grad()
def logits_of(reference: PreTrainedModel) -> torch.Tensor:
    logits: torch.Tensor = reference(torch.tensor([prompt()]), logits_to_keep=1).logits[0, -1]
    return logits


def our_logits(folder: Path) -> torch.Tensor:
    seen = tools.open_engine(folder, max_model_len=128, max_num_seqs=1)
    seen.add("one", prompt(), max_tokens=1)
    seen.run()
    return seen.logits["one"][0]


def write(folder: Path, config: Config, reference: PreTrainedModel) -> None:
    reference.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


def test_thirty_configurations_name_their_source() -> None:
    assert len(PUBLISHED) >= 30
    assert not OTHERS.keys() & PUBLISHED_CONFIG_FOLDERS.keys()
    for name, entry in OTHERS.items():
        assert entry["source"] == f"https://huggingface.co/{name}/blob/main/config.json"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configuration_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    config = shrink(PUBLISHED[name])
    reference = reference_of(config)
    tools.randomise(reference, 3)
    write(tmp_path, config, reference)
    assert tools.relative_error(our_logits(tmp_path), logits_of(reference)) <= TOLERANCE


# --- every field counts


def fields_of(config: Config, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all fields but sizes, those of vision and those that choose the family."""
    for name, value in config.items():
        if isinstance(value, dict) and name != "vision_config":
            yield from fields_of(value, (*path, name))
        elif not isinstance(value, dict) and name not in SIZES.keys() | IDENTITY | OF_VISION | {"num_key_value_heads"}:
            yield (*path, name)


def value_at(config: Config, path: tuple[str, ...]) -> Any:
    for name in path:
        config = config[name]
    return config


def mutations() -> dict[str, tuple[str, tuple[str, ...]]]:
    """One configuration for each field of a family, and for each kind of value that it is published with."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, config in PUBLISHED.items():
        for path in fields_of(config):
            kind = type(value_at(config, path)).__name__
            scaling = "scaled" if config.get("rope_scaling") else "plain"
            found.setdefault(f"{config['architectures'][0]}-{'.'.join(path)}-{kind}-{scaling}", (name, path))
    return found


def changed(name: str, value: Any) -> Any:
    """Return another value of a field."""
    if value is None:
        return {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "sliding_window": 24}.get(name, 7)
    if isinstance(value, bool):
        return not value
    if name.endswith("token_id"):
        return 5
    if name == "partial_rotary_factor":
        return 0.5
    if isinstance(value, int):
        return value * 3 + 1
    if isinstance(value, float):
        return value * 1.75 + 0.25
    if isinstance(value, list):
        return changed_list(name, value)
    return {"silu": "gelu", "gelu_pytorch_tanh": "silu", "float32": "bfloat16"}.get(value, "other")


def changed_list(name: str, value: list[Any]) -> list[Any]:
    if name == "mlp_only_layers":
        return [1]
    if name == "mrope_section":
        return value[::-1]
    if name == "layer_types":
        return value[::-1]
    return [1 - value[0], *value[1:]] if name == "no_rope_layers" else [5, *value]


MUTATIONS = mutations()


@cache
def base(name: str) -> tuple[Config, dict[str, torch.Tensor], torch.Tensor]:
    """The small configuration, its weights and transformers' logits."""
    config = shrink(PUBLISHED[name])
    reference = reference_of(config)
    tools.randomise(reference, 3)
    return config, reference.state_dict(), logits_of(reference)


@pytest.mark.slow
@pytest.mark.parametrize("case", MUTATIONS)
def test_another_value_changes_the_logits_as_in_transformers_or_is_refused(tmp_path: Path, case: str) -> None:
    name, path = MUTATIONS[case]
    config, weights, logits = base(name)
    mutated = copy.deepcopy(config)
    value_at(mutated, path[:-1])[path[-1]] = changed(path[-1], value_at(config, path))
    original = reference_of(config)
    original.load_state_dict(weights)
    write(tmp_path, mutated, original)
    is_listed = bool({path[-1], ".".join(path)} & WITHOUT_EFFECT)
    try:
        ours = our_logits(tmp_path)
    except ConfigError:
        assert not is_listed
        return
    has_effect = tools.relative_error(ours, logits) > TOLERANCE
    assert has_effect != is_listed or path[-1] in LENGTHS
    theirs = loaded(type(original), tmp_path)
    if theirs is None:  # the rotary scaling of another family, which we compute
        assert path[-1] == "rope_scaling"
    else:
        assert tools.relative_error(ours, logits_of(theirs)) <= TOLERANCE


def loaded(kind: type[PreTrainedModel], folder: Path) -> PreTrainedModel | None:
    """Load a checkpoint with transformers; None where it refuses the configuration."""
    try:
        model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except (ValueError, StrictDataclassError):
        return None
    assert not [*info["missing_keys"], *info["unexpected_keys"]]
    found: PreTrainedModel = model.eval()
    return found
