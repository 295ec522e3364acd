"""Published FP8 checkpoints keep their numbers on every rank, and give the logits that their format defines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import open_engine, random_prompt
from few_layers import open_few_layers
from fp8_tools import FP8, SIZES, logits_error, write_fp8

from meltcore.common.errors import ConfigError
from meltcore.kernels.fp8.block_fp8 import BlockFp8Tensor
from meltcore.layers.fp8_weights import BlockFp8Weight, Fp8Experts, Fp8Weight
from meltcore.layers.merged_weight import MergedWeight
from meltcore.layers.quantization import DenseExperts, DenseWeight
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.checkpoints.safetensors_file import SafetensorsFile
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.loader import build_meta_model, build_model, load_weights
from meltcore.models.quantized.quantization import weight_dtypes

Tensors = dict[str, torch.Tensor]
CPU, META = torch.device("cpu"), torch.device("meta")
# Of the largest logit. An input that two implementations round to different e4m3 numbers changes what follows.
ROUNDING = 0.15


def loaded(folder: Path, group: TensorParallelGroup | None = None, **settings: Any) -> Decoder:
    checkpoint = open_checkpoint(str(folder), files="all")
    model = build_model(checkpoint, torch.float32, CPU, group=group, **settings)
    load_weights(model, checkpoint, lambda stage, fraction: None)
    return model


def dequantized(module: torch.nn.Module) -> list[torch.Tensor]:
    """The matrices of a weight of any format."""
    if isinstance(module, MergedWeight):
        return [torch.cat([dequantized(part)[0] for part in module.parts])]
    if isinstance(module, BlockFp8Weight):
        return [BlockFp8Tensor(module.values, module.scales).dequantize()]
    if isinstance(module, Fp8Weight):
        return [module.values.float() * module.scales[:, None]]
    if isinstance(module, Fp8Experts):
        gate_up = BlockFp8Tensor(module.gate_up_values, module.gate_up_scales)
        return [gate_up.dequantize(), BlockFp8Tensor(module.down_values, module.down_scales).dequantize()]
    if isinstance(module, DenseExperts):
        return [module.gate_up_proj, module.down_proj]
    assert isinstance(module, DenseWeight)
    return [module.values]


def weights(model: Decoder) -> dict[str, torch.nn.Module]:
    """The weights of the layers by their path, and no parts of merged ones."""
    return {name: module for name, module in model.named_modules() if name.endswith((".weight", ".experts"))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "strategy"),
    [*((family, "block") for family in SIZES), ("qwen3_5_moe_text", "channel"), ("qwen3_moe", "tensor")],
)
def test_every_rank_keeps_the_published_numbers(tmp_path: Path, family: str, strategy: str) -> None:
    """Merged, reordered and sharded ones too: their values are those of the dequantized checkpoint."""
    write_fp8(tmp_path, family, strategy)
    for group in (None, TensorParallelGroup(0, 2), TensorParallelGroup(1, 2)):
        ours, theirs = weights(loaded(tmp_path, group)), weights(loaded(tmp_path / "dequantized", group))
        assert ours.keys() == theirs.keys()
        for name, module in ours.items():
            for found, expected in zip(dequantized(module), dequantized(theirs[name]), strict=True):
                assert torch.equal(found, expected), name
        quantized = [module for module in ours.values() if not isinstance(module, DenseWeight)]
        assert len(quantized) >= 3


def test_blocks_may_be_cut_off(tmp_path: Path) -> None:
    """By the end of a matrix, in rows and in columns."""
    reference = write_fp8(tmp_path, "qwen3", intermediate_size=336)
    ours, theirs = weights(loaded(tmp_path)), weights(loaded(tmp_path / "dequantized"))
    for name, module in ours.items():
        assert torch.equal(dequantized(module)[0], dequantized(theirs[name])[0]), name
    assert logits_error(reference, tmp_path) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "strategy", "settings"),
    [
        ("qwen3", "block", {}),
        ("qwen3", "channel", {}),
        ("qwen3_moe", "block", {}),
        ("qwen3_moe", "tensor", {}),
        ("qwen3_5_moe_text", "block", {}),
        ("qwen3_5_moe_text", "channel", {}),
        ("qwen3", "block", {"max_num_batched_tokens": 64}),
        ("qwen3_5_moe_text", "block", {"max_num_batched_tokens": 64}),
    ],
    ids=str,
)
def test_logits_are_those_of_the_format(tmp_path: Path, family: str, strategy: str, settings: dict[str, Any]) -> None:
    """Against transformers with dequantized weights, whose inputs are quantized as the format asks for."""
    reference = write_fp8(tmp_path, family, strategy)
    assert logits_error(reference, tmp_path, strategy, **settings) <= ROUNDING


@pytest.mark.slow
def test_two_ranks_generate_the_tokens_of_one(tmp_path: Path) -> None:
    write_fp8(tmp_path, "qwen3_moe")
    tokens = []
    for ranks in (1, 2):
        seen = open_engine(tmp_path, max_model_len=512, tensor_parallel_size=ranks, rank_timeout_s=30.0)
        if ranks > 1:
            del seen.engine.runner.sample  # the recording one: ranks have no whole rows of logits
        try:
            seen.add("one", random_prompt(40, 1), max_tokens=4)
            tokens.append(seen.run()["one"])
        finally:
            seen.engine.close()
    assert tokens[0] == tokens[1]


def scales_of(tensors: Tensors) -> list[str]:
    return [name for name in tensors if name.endswith("_scale_inv")]


def transposed(tensors: Tensors) -> None:
    for name in scales_of(tensors):
        if len(tensors[name]) == tensors[name].shape[1]:
            tensors[name] = tensors[name].t()


def inverse(tensors: Tensors) -> None:
    """Of scales around their mean: the name says inverse."""
    for name in scales_of(tensors):
        tensors[name] = tensors[name].mean().square() / tensors[name]


def row_off_by_one(tensors: Tensors) -> None:
    for name in scales_of(tensors):
        tensors[name] = tensors[name].roll(1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("change", [transposed, inverse, row_off_by_one])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_wrong_scales_show(tmp_path: Path, family: str, change: Callable[[Tensors], None]) -> None:
    reference = write_fp8(tmp_path, family, change=change)
    assert logits_error(reference, tmp_path) > 2 * ROUNDING


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.0.mlp.experts.3.down_proj.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(Q_PROJ + "_scale_inv"), r"1 missing tensors: .*q_proj\.weight_scale_inv .*quant_"),
        (lambda tensors: tensors.pop(EXPERT + "_scale_inv"), r"experts\.3\.down_proj\.weight_scale_inv .*method fp8"),
        (lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].float()}), r"q_proj.weight is stored as F32; quantiz"),
        (
            lambda tensors: tensors.update({EXPERT: tensors[EXPERT].view(torch.uint8)}),
            r"3\.down_proj.weight is stored as U8",
        ),
        (
            lambda tensors: tensors.update({Q_PROJ + "_scale_inv": torch.ones(1, 2)}),
            r"weight_scale_inv has shape \[1, 2\]; the configuration asks for \[2, 2\]",
        ),
        (
            lambda tensors: tensors.update({EXPERT + "_scale_inv": torch.ones(2, 2).to(FP8)}),
            r"down_proj\.weight_scale_inv is stored as F8_E4M3; scales must be F64, F32, F16, BF16$",
        ),
        (
            lambda tensors: tensors.update({EXPERT + "_scale_inv": torch.ones(2, 2, dtype=torch.int32)}),
            r"weight_scale_inv is stored as I32; scales must be F64, F32, F16, BF16$",
        ),
        (
            lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].float().to(torch.float8_e5m2)}),
            r"q_proj\.weight is stored as F8_E5M2; quantization_config asks for F8_E4M3$",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.gate.weight_scale_inv": torch.ones(1, 2)}),
            r"1 unexpected tensors: model\.layers\.0\.mlp\.gate\.weight_scale_inv \(quantization_config: quant_method",
        ),
        (
            lambda tensors: tensors.update(
                {"lm_head.weight": tensors["lm_head.weight"].to(FP8), "lm_head.weight_scale_inv": torch.ones(3, 2)}
            ),
            r"lm_head.weight is stored as F8_E4M3; weights must be unquantized",
        ),
    ],
)
def test_contradicting_tensors_are_named_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensors], object], message: str
) -> None:
    write_fp8(tmp_path, "qwen3_moe", change=change)

    def read(*_: object) -> torch.Tensor:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(SafetensorsFile, "read", read)
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path)


def test_scales_may_have_16_bits(tmp_path: Path) -> None:
    def rounded(tensors: Tensors) -> None:
        tensors.update({name: tensors[name].bfloat16() for name in scales_of(tensors)})

    reference = write_fp8(tmp_path, "qwen3_moe", change=rounded)
    assert logits_error(reference, tmp_path) <= ROUNDING


@pytest.mark.parametrize("family", SIZES)
def test_weights_take_the_bytes_of_their_numbers_and_scales(tmp_path: Path, family: str) -> None:
    reference = write_fp8(tmp_path, family)
    model = loaded(tmp_path)
    counted = sum(parameter.nbytes for parameter in reference.parameters())
    values_count = sum(each.numel() for each in model.parameters() if each.dtype == FP8)
    scale_bytes = sum(each.nbytes for name, each in model.named_parameters() if name.endswith("scales"))
    assert sum(each.nbytes for each in model.parameters()) == counted - 3 * values_count + scale_bytes
    assert scale_bytes <= 0.002 * values_count
    assert "float8_e4m3fn" in weight_dtypes(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scale_bytes", "gigabytes"),
    [("Qwen/Qwen3-30B-A3B-FP8", 7_299_072, 31.2), ("Qwen/Qwen3.5-35B-A3B-FP8", 8_345_600, 35.7)],
)
def test_published_configurations_have_dummy_weights(name: str, scale_bytes: int, gigabytes: float) -> None:
    """A scale takes 4 bytes per 128 x 128 numbers, and per 32 x 128 of queries and keys that are reordered."""
    checkpoint = open_checkpoint(name, files="config")
    model = build_meta_model(checkpoint, torch.bfloat16, META)
    wide = build_meta_model(open_checkpoint(name.removesuffix("-FP8"), files="config"), torch.bfloat16, META)
    values_count = sum(each.numel() for each in model.parameters() if each.dtype == FP8)
    found = sum(each.nbytes for each in model.parameters())
    assert found == sum(each.nbytes for each in wide.parameters()) - values_count + scale_bytes
    assert abs(found / 1e9 - gigabytes) < 0.05
    kinds = {type(module) for module in weights(model).values()}
    assert Fp8Experts in kinds
    assert (MergedWeight in kinds) == ("3.5" in name)


@pytest.mark.slow
def test_shards_of_blocks_are_whole_ones() -> None:
    """3 would cut whole blocks (768 columns are 6), but not the 4 heads of keys: 2 is the largest size."""
    checkpoint = open_few_layers("Qwen/Qwen3-30B-A3B-FP8")
    build_meta_model(checkpoint, torch.bfloat16, META, group=TensorParallelGroup(1, 2))
    message = r"--tensor-parallel-size 4 cuts 768 columns of a quantized weight within blocks of 128; .* is 2$"
    with pytest.raises(ConfigError, match=message):
        build_meta_model(checkpoint, torch.bfloat16, META, group=TensorParallelGroup(1, 4))
    hybrid = open_few_layers("Qwen/Qwen3.5-35B-A3B-FP8")
    build_meta_model(hybrid, torch.bfloat16, META, group=TensorParallelGroup(3, 4))


@pytest.mark.parametrize(("capability", "message"), [((8, 0), r"quant_method fp8 needs .* 8\.9 .*; A GPU has 8\.0")])
def test_gpu_without_fp8_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    checkpoint = open_checkpoint("Qwen/Qwen3-30B-A3B-FP8", files="config")
    with pytest.raises(ConfigError, match=message):
        build_meta_model(checkpoint, torch.bfloat16, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"is quantized already \(quant_method fp8\); it .* --quantization fp8"):
        build_meta_model(checkpoint, torch.bfloat16, META, "fp8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config.quant_method must be one of"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0 and at most 1; got 0"),
    ],
)
def test_wrong_field_names_the_folder(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_fp8(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}: config.json: {message}")):
        loaded(tmp_path)


def test_experts_of_different_formats_are_refused(tmp_path: Path) -> None:
    write_fp8(tmp_path, "qwen3_moe")
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"in_proj_a"', '"mlp.experts.5.up_proj"'))
    message = (
        r"layers\.0\.mlp\.experts\.0\.gate_proj and .*experts\.5\.up_proj differently; the experts of a layer must"
    )
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text"])
def test_models_with_experts_are_quantized_while_loading(tmp_path: Path, family: str) -> None:
    """All linear layers and experts but the gates of a recurrence, with a scale per channel."""
    write_fp8(tmp_path, family)
    for group in (None, TensorParallelGroup(1, 2)):
        ours = weights(loaded(tmp_path / "dequantized", group, quantization="fp8"))
        theirs = weights(loaded(tmp_path / "dequantized", group))
        for name, module in ours.items():
            for found, expected in zip(dequantized(module), dequantized(theirs[name]), strict=True):
                if isinstance(module, DenseWeight):
                    assert torch.equal(found, expected)
                    continue
                error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
                assert error.max() < 0.04, name  # a number of e4m3 is off by 2^-4 of itself at most
                kept_rows = 2 * 4 // (group.size if group else 1) if isinstance(module, MergedWeight) else 0
                assert (error > 0.0).float().mean() > 0.5, name
                assert not error[len(error) - kept_rows :].any(), name
        kinds = {type(module).__name__ for module in ours.values()}
        assert kinds >= {"Fp8Weight", "Fp8Experts"}
        assert ("MergedWeight" in kinds) == (family == "qwen3_5_moe_text")
