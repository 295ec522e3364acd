"""Weights with a value that is no finite number are refused by name while they are loaded, whatever stores them."""

from __future__ import annotations

import math
from pathlib import Path

import engine_tools as tools
import pytest
import torch
from fp8_tools import write_fp8
from gguf_tools import write_model
from safetensors.torch import load_file, save_file
from test_gguf import BLOCKS_OF_32, reference_of

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.finite_check import FiniteCheck, seems_finite


@pytest.mark.slow
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"],
)
def test_folder_with_a_value_that_is_not_finite_is_refused(
    tmp_path: Path, value: float, dtype: torch.dtype, name: str
) -> None:
    reference = reference_of("qwen3").to(dtype)
    reference.get_parameter(name).data.view(-1)[-3] = value
    reference.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"model\.safetensors: {name} has values that are not finite numbers in float32"
    ):
        tools.open_engine(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("family", "store", "name", "stored"),
    [
        ("llama", "F32", "model.layers.1.self_attn.q_proj.weight", r"blk\.1\.attn_q\.weight"),  # in another order
        ("llama", "F16", "lm_head.weight", r"output\.weight"),
        ("qwen3_moe", "BF16", "model.layers.0.mlp.experts.down_proj", r"blk\.0\.ffn_down_exps\.weight"),
        ("gemma3_text", "Q8_0", "model.norm.weight", r"output_norm\.weight"),  # less the 1 that it includes
    ],
)
def test_gguf_file_with_a_value_that_is_not_finite_is_refused(
    tmp_path: Path, value: float, family: str, store: str, name: str, stored: str
) -> None:
    reference = reference_of(family, **BLOCKS_OF_32)
    reference.get_parameter(name).data.view(-1)[5] = value
    file = write_model(tmp_path / "model.gguf", reference, store)
    with pytest.raises(ConfigError, match=rf"model\.gguf: {stored} has values that are not finite numbers"):
        tools.open_engine(file)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_fp8_weight_that_is_no_number_is_refused(tmp_path: Path, byte: int) -> None:
    write_fp8(tmp_path, "qwen3")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[3, 4] = byte
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"up_proj\.weight has values that are not finite numbers in float8_e4m3fn"):
        tools.open_engine(tmp_path)


def test_value_beyond_the_type_of_the_model_is_refused(tmp_path: Path) -> None:
    """It would be infinite there. In its own type the checkpoint is served."""
    reference = reference_of("qwen3").to(torch.bfloat16)
    reference.get_parameter("model.norm.weight").data[0] = 1e5
    reference.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has values that are not finite numbers in float16"):
        tools.open_engine(tmp_path, dtype="float16")
    tools.open_engine(tmp_path, dtype="bfloat16")


def test_large_values_whose_sum_is_infinite_are_loaded() -> None:
    values = torch.full((64, 64), 60_000.0, dtype=torch.float16)
    assert not seems_finite(values)
    check = FiniteCheck(Path("f"))
    check.add("w", values)
    check.add("words", torch.full((3,), -1, dtype=torch.int32))
    check.add("empty", torch.empty(0))
    check.finish()
