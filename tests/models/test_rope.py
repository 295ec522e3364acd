"""Scaled rotary frequencies: those of transformers, from config.json or --hf-overrides; other fields are refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import torch
from small_config import SMALL
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from meltcore.common.errors import ConfigError
from meltcore.kernels.rotary import inverse_frequencies, rotary_table
from meltcore.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from meltcore.models.configs.config_fields import Fields
from meltcore.models.decoders.decoder_config import DecoderConfig
from meltcore.models.decoders.rope import apply_overrides, max_context, read_rope_scaling

CPU = torch.device("cpu")
ORIGINAL = "original_max_position_embeddings"
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    ORIGINAL: 128,
}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 3.0}
SCALINGS = {
    "linear": LINEAR,
    "llama3": LLAMA3,
    "llama3-published": LLAMA3 | {"factor": 32.0, ORIGINAL: 8192, "rope_theta": 5e5},
    "yarn": YARN,
    "yarn-factor-1": YARN | {"factor": 1.0},
    "yarn-published": YARN | {ORIGINAL: 32768, "rope_theta": 1e6},
    "yarn-attention": YARN | {"attention_factor": 0.7},
    "yarn-betas": YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False, ORIGINAL: 4096},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "factor": 40.0, ORIGINAL: 4096},
    "yarn-one-mscale": YARN | {"mscale": 0.7},
    "yarn-without-original": {"rope_type": "yarn", "factor": 2.0},
    "yarn-equal-bounds": YARN | {"beta_fast": 1.0, "truncate": False, ORIGINAL: 4096},
}


def theirs(rope: dict[str, Any], head_dim: int = 128) -> tuple[torch.Tensor, float]:
    """Inverse frequencies and attention factor of transformers."""
    config = Qwen3Config(
        head_dim=head_dim, max_position_embeddings=8192, rope_parameters={"rope_theta": 1e4} | rope, hidden_size=64
    )
    return ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, CPU)


def fields(rope: dict[str, Any], **others: Any) -> Fields:
    return Fields({"max_position_embeddings": 8192, "rope_parameters": rope} | others)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_attention_factor_equal_transformers(name: str, head_dim: int) -> None:
    rope = SCALINGS[name]
    expected, attention_factor = theirs(rope, head_dim)
    scaling = read_rope_scaling(fields(rope))
    assert scaling is not None
    ours = inverse_frequencies(head_dim, rope.get("rope_theta", 1e4), scaling)
    torch.testing.assert_close(ours, expected.double(), rtol=2e-6, atol=0)
    assert scaling.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_cosines_and_sines_equal_transformers(name: str) -> None:
    rope = SCALINGS[name]
    expected, attention_factor = theirs(rope)
    angles = torch.arange(300).float()[:, None] * expected
    table = rotary_table(128, 300, rope.get("rope_theta", 1e4), CPU, None, read_rope_scaling(fields(rope)))
    whole = torch.cat((angles.cos(), angles.sin()), -1) * attention_factor
    torch.testing.assert_close(table, whole, rtol=0, atol=1e-4)


def test_attention_factor_leaves_dimensions_without_rotation_alone() -> None:
    table = rotary_table(32, 5, 1e4, CPU, 8, read_rope_scaling(fields(YARN)))
    cos, sin = table.chunk(2, dim=-1)
    assert torch.equal(cos[:, 4:], torch.ones(5, 12))
    assert torch.equal(sin[:, 4:], torch.zeros(5, 12))
    assert cos[0, :4].tolist() == pytest.approx([1.1386294] * 4)


def test_table_beyond_a_million_positions_is_exact() -> None:
    """float32 angles would be wrong by 0.03 radians there. The table is built in blocks, whose borders are compared."""
    positions = [1, 65_535, 65_536, 65_537, 1_048_575, 1_048_577, 1_999_999]
    table = rotary_table(8, 2_000_000, 5e6, CPU, None, read_rope_scaling(fields(YARN | {ORIGINAL: 32768})))
    frequencies = inverse_frequencies(8, 5e6, read_rope_scaling(fields(YARN | {ORIGINAL: 32768}))).tolist()
    attention_factor = 0.1 * math.log(4) + 1
    for position in positions:
        exact = [math.cos(position * each) for each in frequencies] + [
            math.sin(position * each) for each in frequencies
        ]
        assert table[position].tolist() == pytest.approx([attention_factor * each for each in exact], abs=3e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("qwen3", YARN),
        ("qwen3", LLAMA3),
        ("qwen3", LINEAR),
        ("qwen2", YARN | {"type": "yarn"}),
        (
            "qwen3_5_moe_text",
            YARN | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        ),
    ],
)
def test_logits_with_scaling_equal_transformers(family: str, rope: dict[str, Any], tmp_path: Path) -> None:
    reference = tools.make_reference(family=family, rope_parameters={"rope_theta": 1e4} | rope)
    reference.save_pretrained(tmp_path)
    assert tools.error_against(reference, tmp_path) <= 1e-4
    config = json.loads((tmp_path / "config.json").read_text())
    own = config["rope_parameters"]
    kept = {name: own[name] for name in ("rope_theta", "partial_rotary_factor", "mrope_section") if name in own}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": kept | {"rope_type": "default"}}))
    assert tools.error_against(reference, tmp_path) > 1e-2, "the scaling must matter here"
    assert tools.error_against(reference, tmp_path, hf_overrides={"rope_parameters": rope}) <= 1e-4


def test_override_extends_the_context(tmp_path: Path) -> None:
    tools.make_reference().save_pretrained(tmp_path)
    rope = {"rope_type": "yarn", "factor": 2.0, ORIGINAL: 1024}
    with pytest.raises(ConfigError) as raised:
        tools.open_engine(tmp_path, max_model_len=1025)
    option = str(raised.value).split("--hf-overrides ")[1].strip("'")
    assert json.loads(option) == {"rope_parameters": rope}
    seen = tools.open_engine(tmp_path, hf_overrides=json.loads(option), max_num_seqs=1)
    assert seen.engine.max_model_len == 2048
    seen.add("long", tools.random_prompt(1500, 3), max_tokens=3)
    assert len(seen.run()["long"]) == 3
    reference = tools.make_reference(max_position_embeddings=2048, rope_parameters=rope | {"rope_theta": 1e4})
    assert tools.error_against(reference, tmp_path, hf_overrides={"rope_parameters": rope}, max_model_len=2048) <= 1e-4
    with pytest.raises(ConfigError, match=r"from 2 to the model's 2048; got 2049\. .*\"factor\": 3\.0"):
        tools.open_engine(tmp_path, max_model_len=2049, hf_overrides={"rope_parameters": rope})
    with pytest.raises(ConfigError, match=r"from 2 to the model's 1024; got 16777217$"):
        tools.open_engine(tmp_path, max_model_len=2**24 + 1)


@pytest.mark.parametrize(
    ("rope", "published", "context"),
    [
        (YARN, 64, 256),
        (YARN, 256, 256),  # config.json states the extended length
        (YARN, 512, 512),
        (LLAMA3, 2048, 2048),  # as Llama 3.2 states 131,072 with 8,192 times 32
        (LINEAR, 100, 300),
        (YARN | {"factor": 1e6}, 64, 2**24),
    ],
)
def test_scaled_context(rope: dict[str, Any], published: int, context: int) -> None:
    scaling = read_rope_scaling(fields(rope, max_position_embeddings=published))
    assert max_context(published, scaling) == context


BAD = [
    (YARN | {"factor": 0.5}, "factor must be a number from 1 to 1e6; got 0.5"),
    (YARN | {"factor": "4"}, 'factor must be a number from 1 to 1e6; got "4"'),
    (YARN | {"factor": True}, "factor must be a number from 1 to 1e6; got true"),
    (YARN | {ORIGINAL: 0}, f"{ORIGINAL} must be a whole number from 1 to 16777216; got 0"),
    (
        YARN | {"beta_fast": 1, "beta_slow": 2},
        "beta_fast must be such that beta_fast, 1, is at least beta_slow, 2; got 1",
    ),
    (YARN | {"beta_slow": 64}, "beta_slow must be such that beta_fast, 32, is at least beta_slow, 64; got 64"),
    (YARN | {"attention_factor": 0}, "attention_factor must be a number above 0 and at most 1e6; got 0"),
    (YARN | {"mscale": -1}, "mscale must be a number from 0 to 1e6; got -1"),
    (YARN | {"truncate": 1}, "truncate must be true or false; got 1"),
    (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor must be more than low_freq_factor, 1; got 1.0"),
    (LLAMA3 | {"low_freq_factor": 0}, "low_freq_factor must be a number above 0 and at most 1e6; got 0"),
    (LINEAR | {"factor": float("nan")}, "factor must be a number from 1 to 1e6; got NaN"),
]


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("rope", "message"), BAD)
def test_bad_field_is_refused_with_its_value(name: str, rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_rope_scaling(Fields({"max_position_embeddings": 8192, name: rope}))
    assert str(raised.value) == f"config.json: {name}.{message}"


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor"])
def test_missing_field_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.json lacks rope_parameters\.{missing}$"):
        read_rope_scaling(fields({name: value for name, value in LLAMA3.items() if name != missing}))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (LINEAR, "rope_scaling yarn of factor 4 and rope_parameters linear of factor 3"),
        (YARN | {"factor": 8}, "rope_scaling yarn of factor 4 and rope_parameters yarn of factor 8"),
        ({"rope_type": "default"}, "rope_scaling yarn of factor 4 and rope_parameters default"),
        ({"rope_theta": 1e4}, "rope_scaling yarn of factor 4 and rope_parameters default"),
    ],
)
def test_contradicting_names_are_refused(other: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_rope_scaling(fields(other, rope_scaling=YARN))
    with pytest.raises(ConfigError, match="contradict each other"):
        read_rope_scaling(fields(YARN, rope_scaling=other))
    assert read_rope_scaling(fields(YARN, rope_scaling=dict(YARN))) == read_rope_scaling(fields(YARN))


def test_original_length_may_stand_outside() -> None:
    scaling = read_rope_scaling(fields({"rope_type": "yarn", "factor": 2}, **{ORIGINAL: 100}))
    assert scaling is not None
    assert scaling.original_max_position_embeddings == 100
    with pytest.raises(ConfigError, match=f"{ORIGINAL} must be the same as outside of this object, 100; got 64"):
        read_rope_scaling(fields(YARN, **{ORIGINAL: 100}))


def checkpoint(**changes: Any) -> Checkpoint:
    return Checkpoint("small", Path(), SMALL | changes, {})


def read(given: Checkpoint) -> DecoderConfig:
    return DecoderConfig.read(Fields(given.config), qkv_bias=False, qk_norm=True)


def overridden(given: Checkpoint, overrides: dict[str, Any]) -> Checkpoint:
    return replace(given, config=apply_overrides(given.config, overrides))


def test_override_replaces_the_scaling_and_keeps_theta() -> None:
    own = LLAMA3 | {"rope_theta": 5e5}
    for name in ("rope_parameters", "rope_scaling"):
        config = read(overridden(checkpoint(rope_theta=None, **{name: own}), {"rope_parameters": YARN}))
        assert config.rope_theta == 5e5
        assert config.rope_scaling == read_rope_scaling(fields(YARN))
    assert read(overridden(checkpoint(), {"rope_parameters": YARN | {"rope_theta": 7e5}})).rope_theta == 7e5
    assert read(overridden(checkpoint(rope_scaling=YARN), {"rope_parameters": {"rope_type": "default"}})) == read(
        checkpoint()
    )
    assert overridden(checkpoint(), {}) == checkpoint()


@pytest.mark.parametrize("overrides", [{"rope_parameters": YARN}, {"text_config": {"rope_parameters": YARN}}])
def test_override_reaches_the_text_part(overrides: dict[str, Any]) -> None:
    whole = Checkpoint("whole", Path(), {"text_config": dict(SMALL), "vision_config": {}}, {})
    text = Fields(apply_overrides(whole.config, overrides)).nested_fields("text_config")
    assert read_rope_scaling(text) == read_rope_scaling(fields(YARN))
    assert whole.config["text_config"] == SMALL


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 8}, "--hf-overrides may replace rope_parameters and nothing else; got hidden_size"),
        ({"rope_scaling": YARN}, "nothing else; got rope_scaling"),
        ({"text_config": {"rope_parameters": YARN, "head_dim": 3}}, "nothing else; got head_dim, rope_parameters"),
        (
            {"rope_parameters": YARN | {"facto": 3}},
            "--hf-overrides: rope_parameters has an unknown field facto; known: ",
        ),
        ({"rope_parameters": [1]}, r"--hf-overrides: rope_parameters must be an object; got \[1\]"),
        ({"rope_parameters": YARN | {"factor": 0.5}}, "--hf-overrides: rope_parameters.factor must be a number from 1"),
        ({"text_config": 7}, "--hf-overrides: text_config must be an object; got 7"),
        (
            {"text_config": {"rope_parameters": {"rope_type": "su"}}},
            "--hf-overrides: text_config.rope_parameters.rope_type",
        ),
    ],
)
def test_wrong_override_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides(checkpoint().config, overrides)


def test_published_shape_takes_an_override() -> None:
    """The form that vLLM documents, with Qwen2.5's numbers: two million positions."""
    rope = {"factor": 64.0, ORIGINAL: 32768, "rope_theta": 1000000, "rope_type": "yarn"}
    published = open_checkpoint("Qwen/Qwen2.5-1.5B-Instruct", files="config")
    config = Fields(apply_overrides(published.config, {"rope_parameters": rope}))
    assert max_context(32768, read_rope_scaling(config)) == 2_097_152
