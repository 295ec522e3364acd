"""Published config.json files at a small size give transformers' logits, and no field of theirs is passed over.

The configurations are those of `PUBLISHED_CONFIG_FOLDERS` and of published_configs.json, which names the source of
each. Its fields were read from public copies of these files.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import engine_tools as tools
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from meltcore.common.errors import ConfigError
from meltcore.kernels.gemm.half_weight import supports_half_weights
from meltcore.layers.half_weights import HalfWeight
from meltcore.models.checkpoints.checkpoint import PUBLISHED_CONFIG_FOLDERS, read_json
from meltcore.models.quantized import host_weights

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
OF_ROTARY = {
    *("factor", "high_freq_factor", "long_factor", "low_freq_factor", "rope_theta", "rope_type", "short_factor", "type")
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


def open_engine(folder: Path) -> tools.SeenEngine:
    return tools.open_engine(folder, max_model_len=128, max_num_seqs=1)


def our_logits(folder: Path) -> torch.Tensor:
    return first_logits(open_engine(folder))


def first_logits(seen: tools.SeenEngine) -> torch.Tensor:
    seen.add("one", prompt(), max_tokens=1)
    seen.run()
    return seen.logits["one"][0]


def write(folder: Path, config: Config, reference: PreTrainedModel) -> None:
    reference.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


class Base(NamedTuple):
    """A small configuration with random weights: its folder and transformers' logits."""

    config: Config
    weights: dict[str, torch.Tensor]
    folder: Path
    logits: torch.Tensor


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Base]:
    @cache
    def make(name: str) -> Base:
        config, folder = shrink(PUBLISHED[name]), tmp_path_factory.mktemp("base")
        reference = reference_of(config)
        tools.randomise(reference, 3)
        write(folder, config, reference)
        return Base(config, reference.state_dict(), folder, logits_of(reference))

    return make


def with_weights(config: Config, made: Base) -> PreTrainedModel | None:
    """Return a model of transformers with the weights of `made`; None where transformers refuses the configuration."""
    try:
        model = reference_of(config)
    except (ValueError, StrictDataclassError):
        return None
    model.load_state_dict(made.weights)
    return model


def loaded(made: Base, folder: Path) -> PreTrainedModel:
    """Load a checkpoint with transformers."""
    model: PreTrainedModel
    model, info = type(reference_of(made.config)).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not [*info["missing_keys"], *info["unexpected_keys"]]
    return model.eval()


def test_thirty_configurations_name_their_source() -> None:
    assert len(PUBLISHED) >= 30
    assert not OTHERS.keys() & PUBLISHED_CONFIG_FOLDERS.keys()
    for name, entry in OTHERS.items():
        assert entry["source"] == f"https://huggingface.co/{name}/blob/main/config.json"


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configuration_gives_the_logits_of_transformers(base: Callable[[str], Base], name: str) -> None:
    made = base(name)
    assert tools.relative_error(our_logits(made.folder), made.logits) <= TOLERANCE


# --- weights of 16 bits, which a CPU converts

FAMILIES = {config["architectures"][0]: name for name, config in PUBLISHED.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES.values())
def test_weights_of_16_bits_have_the_logits_of_transformers_as_served(
    tmp_path: Path, base: Callable[[str], Base], name: str
) -> None:
    made = base(name)
    reference = with_weights(made.config, made)
    assert reference is not None
    write(tmp_path, made.config, reference.bfloat16())
    seen = open_engine(tmp_path)
    kinds = {type(layer.weight) for layer in host_weights._layers(seen.engine.runner.model)}
    assert (HalfWeight in kinds) == supports_half_weights()
    assert tools.relative_error(first_logits(seen), logits_of(loaded(made, tmp_path))) <= TOLERANCE


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


class Mutation(NamedTuple):
    """A published configuration, and the fields of it that get other values."""

    name: str
    paths: list[tuple[str, ...]]


@cache
def mutations(*, listed: bool) -> dict[str, Mutation]:
    """Each field of a family, and each kind of value that it is published with.

    listed: those of WITHOUT_EFFECT, together for a configuration. Else every field is alone, and again where the
    rotary embeddings are scaled if it is one of theirs.
    """
    found: dict[str, Mutation] = {}
    seen: set[tuple[str, ...]] = set()
    for name, config in PUBLISHED.items():
        for path in fields_of(config):
            scaled = bool(config.get("rope_scaling")) and path[-1] in OF_ROTARY | LENGTHS
            kind = type(value_at(config, path)).__name__
            key = (config["architectures"][0], ".".join(path), kind, "scaled" if scaled else "plain")
            if key not in seen and is_listed(path) == listed:
                case = name if listed else "-".join(key)
                found.setdefault(case, Mutation(name, [])).paths.append(path)
            seen.add(key)
    return found


def is_listed(path: tuple[str, ...]) -> bool:
    return bool({path[-1], ".".join(path)} & WITHOUT_EFFECT)


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


def mutate(folder: Path, made: Base, paths: list[tuple[str, ...]]) -> Config:
    """Write the files of a configuration with other values in some fields; return its config.json."""
    mutated = copy.deepcopy(made.config)
    for path in paths:
        value_at(mutated, path[:-1])[path[-1]] = changed(path[-1], value_at(made.config, path))
    for file in made.folder.iterdir():
        (folder / file.name).hardlink_to(file)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(mutated))
    return mutated


@pytest.mark.slow
@pytest.mark.parametrize("case", mutations(listed=True))
def test_other_values_of_fields_without_effect_keep_the_logits(
    tmp_path: Path, base: Callable[[str], Base], case: str
) -> None:
    made = base(case)
    mutated = mutate(tmp_path, made, mutations(listed=True)[case].paths)
    assert tools.relative_error(our_logits(tmp_path), made.logits) <= TOLERANCE
    theirs = with_weights(mutated, made)
    assert theirs is not None
    assert tools.relative_error(logits_of(theirs), made.logits) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("case", mutations(listed=False))
def test_another_value_changes_the_logits_as_in_transformers_or_is_refused(
    tmp_path: Path, base: Callable[[str], Base], case: str
) -> None:
    name, [path] = mutations(listed=False)[case]
    made = base(name)
    mutated = mutate(tmp_path, made, [path])
    try:
        ours = our_logits(tmp_path)
    except ConfigError:
        return
    assert tools.relative_error(ours, made.logits) > TOLERANCE or path[-1] in LENGTHS
    # Only a file tells a tied head from one of its own.
    theirs = loaded(made, tmp_path) if path[-1] == "tie_word_embeddings" else with_weights(mutated, made)
    if theirs is None:  # the rotary scaling of another family, which we compute
        assert path[-1] == "rope_scaling"
    else:
        assert tools.relative_error(ours, logits_of(theirs)) <= TOLERANCE
