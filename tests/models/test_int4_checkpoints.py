"""AWQ and GPTQ checkpoints give the logits of their exact values; what contradicts their configuration is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import torch
from int4_tools import write_int4
from safetensors.torch import load_file, save_file

from meltcore import LLM, SamplingParams
from meltcore.common.errors import ConfigError
from meltcore.kernels.quant.ggml import dequantize_reference
from meltcore.layers.linear import ColumnParallelLinear
from meltcore.layers.merged_weight import MergedWeight
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL, open_checkpoint
from meltcore.models.decoders.model import Model
from meltcore.models.loader import DUMMY_WEIGHT_STD, build_meta_model, build_model, fill_dummy_weights
from meltcore.models.quantized.quantization import weight_dtypes

CPU = torch.device("cpu")
# Whole groups of 32, also on each of two ranks.
SIZES: dict[str, Any] = {"intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
WIDE: dict[str, Any] = SIZES | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
HYBRID: dict[str, Any] = SIZES | {"shared_expert_intermediate_size": 64, "num_hidden_layers": 3}


def write(
    folder: Path, family: str, layout: str, *, same_order: bool = True, sizes: dict[str, Any] = SIZES, **settings: Any
) -> Any:
    reference = tools.make_reference(3, family, **sizes)
    with torch.no_grad():
        write_int4(folder, reference, layout, {"group_size": 32} | settings, same_order=same_order)
    return reference


def built(folder: Path, group: TensorParallelGroup | None = None) -> Model:
    return build_meta_model(open_checkpoint(str(folder), files="all"), torch.float32, CPU, group=group)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "settings"),
    [
        ("llama", "awq", {}),
        ("qwen3", "gptq", {"sym": True}),
        ("qwen2", "gptq_v2", {"group_size": 64}),
        ("gemma3_text", "awq", {"group_size": 128, "sizes": WIDE}),
        ("qwen3_moe", "awq", {}),
        ("qwen3_moe", "gptq", {}),
        ("qwen3_5_moe_text", "awq", {"sizes": HYBRID}),
        ("llama", "gptq", {"desc_act": True}),
        ("qwen3", "gptq_v2", {"desc_act": True, "same_order": False}),
    ],
    ids=str,
)
def test_logits_are_those_of_the_exact_values(
    tmp_path: Path, family: str, layout: str, settings: dict[str, Any]
) -> None:
    """With prompts in chunks of 64 tokens."""
    reference = write(tmp_path, family, layout, **settings)
    assert tools.error_against(reference, tmp_path, max_num_batched_tokens=64, max_model_len=512) <= 1e-4
    model = built(tmp_path)
    assert set(weight_dtypes(model)) == {f"int4_g{settings.get('group_size', 32)}_f16", "float32"}
    layer = model.blocks[1].attention.qkv_proj
    assert isinstance(layer, ColumnParallelLinear)
    # One GEMM unless matrices have orders of their own.
    assert isinstance(layer.weight, MergedWeight) == (settings.get("same_order") is False)


def answers_of(folder: Path, ranks: int) -> list[tuple[list[int], list[list[float]]]]:
    settings = {"device": "cpu", "dtype": "float32", "memory_bytes": 2**28, "max_num_seqs": 4}
    llm = LLM(str(folder), tokenizer=BUNDLED_MODEL, tensor_parallel_size=ranks, **settings)
    found = llm.generate(
        [tools.random_prompt(length, length) for length in (3, 90)],
        SamplingParams(max_tokens=8, logprobs=4, ignore_eos=True),
    )
    llm.close()
    return [(each.token_ids, [step.top_logprobs for step in each.logprobs]) for each in found]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), [("llama", "gptq"), ("qwen3_moe", "awq")])
def test_two_ranks_answer_as_one_device(tmp_path: Path, family: str, layout: str) -> None:
    write(tmp_path, family, layout)
    for alone, together in zip(*(answers_of(tmp_path, ranks) for ranks in (1, 2)), strict=True):
        assert alone[0] == together[0]
        torch.testing.assert_close(*(torch.tensor(logprobs) for _, logprobs in (alone, together)), rtol=0, atol=2e-4)


def test_zero_biases_of_a_model_without_any_are_read_and_others_refused(tmp_path: Path) -> None:
    reference = write(tmp_path, "llama", "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    bias = "model.layers.1.mlp.down_proj.bias"
    save_file(tensors | {bias: torch.zeros(64)}, tmp_path / "model.safetensors")
    assert tools.error_against(reference, tmp_path, max_model_len=512) <= 1e-4
    save_file(tensors | {bias: torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"model.safetensors: {bias} is not zero, and the model has no bias there"):
        tools.open_engine(tmp_path)


DOWN = "model.layers.0.mlp.down_proj"


def changed_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))


def changed_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    stored = load_file(folder / "model.safetensors")
    for end, tensor in tensors.items():
        stored.pop(f"{DOWN}.{end}", None)
        if tensor is not None:
            stored[f"{DOWN}.{end}"] = tensor
    save_file(stored, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 8}, "bits must be 4; got 8"),
        ({"version": "gemv"}, r"version must be gemm; got \"gemv\""),
        ({"version": "marlin"}, r"version must be gemm; got \"marlin\""),
        ({"group_size": 16}, r"group_size is 16; supported are 32, 64, 128"),
        ({"group_size": -1}, r"group_size is -1; supported are 32, 64, 128"),
        ({"zero_point": False}, r"zero_point is false; AWQ is supported with zero points"),
        ({"group_size": 64}, r"has shape \[\d+, \d+\]; the configuration asks for \[\d+, \d+\]"),
        ({"quant_method": "gptq"}, r"g_idx|has shape"),
        ({"modules_to_not_convert": ["down_proj"]}, r"down_proj.qweight is quantized; config.json: .* excludes it"),
    ],
    ids=str,
)
def test_settings_that_contradict_the_tensors_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    write(tmp_path, "llama", "awq")
    changed_config(tmp_path, **settings)
    with pytest.raises(ConfigError, match=message):
        built(tmp_path)


SCRAMBLED = torch.arange(128, dtype=torch.int32).flip(0) // 32
REFUSED_TENSORS: list[tuple[dict[str, torch.Tensor | None], str]] = [
    ({"qzeros": None}, rf"1 missing tensors: {DOWN}.qzeros"),
    ({"scales": None}, rf"{DOWN}.qweight has no tensor {DOWN}.scales"),
    ({"qweight": torch.zeros(16, 64)}, rf"{DOWN}.qweight is stored as F32; quantization_config asks for I32"),
    ({"qweight": torch.zeros(8, 64, dtype=torch.int32)}, r"g_idx is I32 \[128\]; 64 inputs need I32 \[64\]"),
    ({"scales": torch.zeros(4, 64)}, rf"{DOWN}.scales is stored as F32; scales are F16 or BF16"),
    ({"scales": torch.zeros(2, 64).half()}, rf"{DOWN}.scales has shape \[2, 64\]; .* asks for \[4, 64\]"),
    ({"g_idx": SCRAMBLED}, rf"{DOWN}.g_idx is in activation order; .*desc_act is false"),
    ({"g_idx": torch.zeros(128, dtype=torch.int32)}, "has groups of 0 to 128 inputs, not of 32"),
    ({"g_idx": SCRAMBLED + 1}, r"names group 4; 128 inputs have 4 groups"),
    ({"qweight": None, "qzeros": None, "scales": None, "g_idx": None, "weight": torch.zeros(64, 128)}, "not quantized"),
]


@pytest.mark.parametrize(("tensors", "message"), REFUSED_TENSORS, ids=[message[-40:] for _, message in REFUSED_TENSORS])
def test_tensors_that_contradict_the_settings_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    write(tmp_path, "llama", "gptq")
    changed_tensors(tmp_path, **tensors)
    with pytest.raises(ConfigError, match=message):
        built(tmp_path)


def test_a_scale_that_is_not_finite_is_refused_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, "llama", "gptq")
    changed_tensors(tmp_path, scales=torch.full((4, 64), torch.nan).half())
    with pytest.raises(ConfigError, match=f"model.safetensors: {DOWN}.scales has a scale that is not finite"):
        tools.open_engine(tmp_path)


def test_a_shard_of_activation_order_and_experts_in_it_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "dense", "llama", "gptq", desc_act=True)
    with pytest.raises(ConfigError, match=r"cuts 128 columns .* activation order"):
        built(tmp_path / "dense", TensorParallelGroup(0, 2))
    write(tmp_path / "experts", "qwen3_moe", "gptq", desc_act=True)
    with pytest.raises(ConfigError, match="experts with inputs in activation order"):
        built(tmp_path / "experts")


def test_columns_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama", "awq", sizes=SIZES | {"intermediate_size": 192}, group_size=64)
    changed_config(tmp_path, group_size=128)
    with pytest.raises(ConfigError, match=r"layers.0.self_attn.q_proj: 64 columns are no multiple of .* 128"):
        built(tmp_path)


def test_dummy_weights_of_a_published_configuration_take_its_bits() -> None:
    checkpoint = open_checkpoint("Qwen/Qwen3-8B-AWQ", files="config")
    model = build_meta_model(checkpoint, torch.float16, torch.device("meta"))
    assert weight_dtypes(model) == ["float16", "int4_g128_f16"]
    quantized = 36 * (6144 + 4096 + 3 * 12288) * 4096
    unquantized = 2 * 151936 * 4096 + 36 * (2 * 4096 + 2 * 128) + 4096
    assert sum(each.nbytes for each in model.parameters()) == quantized * 4.25 / 8 + 2 * unquantized


@pytest.mark.parametrize(("family", "layout"), [("llama", "awq"), ("qwen3_moe", "gptq")])
def test_dummy_weights_have_the_deviation_of_published_ones(tmp_path: Path, family: str, layout: str) -> None:
    """Ranks hold their parts of the same weights. Without files the configuration states the formats."""
    write(tmp_path, family, layout)
    (tmp_path / "model.safetensors").unlink()
    checkpoint = open_checkpoint(str(tmp_path), files="config")
    found = []
    for group in (None, TensorParallelGroup(0, 2), TensorParallelGroup(1, 2)):
        model = build_model(checkpoint, torch.float32, CPU, group=group)
        fill_dummy_weights(model, checkpoint, 5)
        mlp = model.blocks[0].mlp
        down = mlp.down_proj.weight.blocks if family == "llama" else mlp.experts.down_proj
        found.append(dequantize_reference(down.tensor))
    assert torch.equal(found[0], torch.cat(found[1:], -1))
    assert found[0].std() == pytest.approx(DUMMY_WEIGHT_STD, rel=0.1)
    assert set(weight_dtypes(model)) == {"int4_g32_f16", "float32"}
    changed_config(tmp_path, quant_method="gptq", desc_act=True)
    with pytest.raises(ConfigError, match="dummy weights have no activation order"):
        build_model(open_checkpoint(str(tmp_path), files="config"), torch.float32, CPU)


def test_quantizing_again_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama", "awq")
    checkpoint = open_checkpoint(str(tmp_path), files="all")
    with pytest.raises(ConfigError, match=r"quantized already \(quant_method awq\); .* --quantization fp8"):
        build_meta_model(checkpoint, torch.float32, CPU, "fp8")
