"""FP8 weights: quantized while loading, refused on unsupported devices, and close to the published weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_loader import write_config

from meltcore import LLM, SamplingParams
from meltcore.common.errors import ConfigError
from meltcore.kernels.fp8.fp8 import FP8
from meltcore.layers.fp8_weights import Fp8Weight
from meltcore.layers.linear import LinearBase
from meltcore.measure.problems import evaluation_set, is_correct
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL, open_checkpoint
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.loader import build_model, load_weights
from meltcore.models.quantized.quantization import quantize_to_fp8, require_fp8

CPU = torch.device("cpu")
# e4m3 has 4 significant bits: a number is off by 2^-4 of itself at most, a row by about 0.026 in the mean square.
E4M3_ERROR = 0.04


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint; every row of every matrix has a size of its own, so that a wrong scale shows."""
    write_config(tmp_path)
    torch.manual_seed(0)
    tensors = {}
    model = build_model(open_checkpoint(str(tmp_path), files="text"), torch.float32, CPU)
    for name, target in model.checkpoint_tensors().items():
        rows = torch.logspace(-3, 1, target.shape[0]).view(-1, *[1] * (len(target.shape) - 1))
        tensors[name] = torch.randn(target.shape) * rows
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    checkpoint = open_checkpoint(str(folder), files="all")
    model = build_model(checkpoint, dtype, CPU, "fp8")
    load_weights(model, checkpoint, lambda stage, fraction: None)
    return model


def linears(model: Decoder) -> dict[str, LinearBase]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LinearBase)}


def test_every_matrix_of_a_block_is_loaded_in_fp8(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    model = loaded(folder)
    fused = {
        "attention.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.o_proj": ("self_attn.o_proj",),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down_proj": ("mlp.down_proj",),
    }
    layers = linears(model)
    assert len(layers) == 2 * len(fused)
    for index in range(2):
        for ours, names in fused.items():
            weight = layers[f"blocks.{index}.{ours}"].weight
            assert isinstance(weight, Fp8Weight)
            assert weight.values.dtype == FP8
            published = torch.cat([tensors[f"model.layers.{index}.{name}.weight"] for name in names])
            found = weight.values.float() * weight.scales[:, None]
            error = (found - published).norm(dim=1) / published.norm(dim=1)
            assert error.max() < E4M3_ERROR
            assert torch.equal(weight.values.float().abs().amax(1), torch.full((len(published),), 448.0))


def test_embedding_head_and_norms_stay_as_published(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    targets = loaded(folder).checkpoint_tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(targets[name], tensors[name])


def test_no_matrix_of_a_block_is_ever_allocated_in_a_wider_type(folder: Path) -> None:
    """What a build allocates is what stays; a checkpoint's tensors come one by one."""
    model = build_model(open_checkpoint(str(folder), files="text"), torch.bfloat16, CPU, "fp8")
    wide = {name for name, parameter in model.named_parameters() if parameter.dim() == 2 and parameter.dtype != FP8}
    assert wide == {"embedding.weight.values", "lm_head.weight.values"}
    assert {parameter.dtype for name, parameter in model.named_parameters() if name.endswith("scales")} == {
        torch.float32
    }


def test_matrix_of_another_shape_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"mlp\.up_proj\.weight has shape \[47, 32\].*asks for \[48, 32\]"):
        loaded(folder)


@pytest.mark.parametrize(
    ("capability", "dtype", "intermediate_size", "message"),
    [
        ((8, 6), torch.bfloat16, 48, r"needs compute capability 8\.9 or later; Some GPU has 8\.6"),
        ((9, 0), torch.float16, 48, r"--dtype bfloat16 .*; got float16"),
        (
            (9, 0),
            torch.bfloat16,
            40,
            r"multiples of 16; model\.layers\.0\.mlp\.down_proj\.weight has \[32, 40\]",
        ),
    ],
)
def test_unsupported_fp8_setting_is_refused(
    capability: tuple[int, int],
    dtype: torch.dtype,
    intermediate_size: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    write_config(tmp_path, intermediate_size=intermediate_size)
    model = build_model(open_checkpoint(str(tmp_path), files="text"), dtype, torch.device("meta"))
    with pytest.raises(ConfigError, match=message):
        quantize_to_fp8(model, torch.device("cuda"))


def answers_right(llm: LLM, count: int) -> float:
    problems = evaluation_set()[:count]
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    answers = llm.chat(chats, SamplingParams(max_tokens=256))
    return sum(is_correct(problem, answer.text) for problem, answer in zip(problems, answers, strict=True)) / count


@pytest.mark.slow
def test_bundled_model_answers_in_fp8_and_reports_its_precision() -> None:
    wide = LLM(BUNDLED_MODEL, device="cpu", memory_bytes=2**27).engine.ready()
    llm = LLM(BUNDLED_MODEL, device="cpu", quantization="fp8", kv_cache_dtype="fp8", memory_bytes=2**27)
    ready = llm.engine.ready()
    assert (wide.dtype, ready.dtype) == ("float32", "float32+fp8-weights+fp8-kv")
    assert ready.num_pages > 4 * wide.num_pages  # a byte instead of 4 each, and smaller weights beside them
    assert answers_right(llm, 12) >= 0.95


def test_fp8_cache_is_refused_on_an_unsupported_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8 needs compute capability 8\.9 .*Some GPU has 8\.0"):
        require_fp8("--kv-cache-dtype fp8", torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_held_out_accuracy_in_fp8_on_cuda(cache: str) -> None:
    settings = {"quantization": "fp8", "kv_cache_dtype": cache, "memory_bytes": 2**31}
    llm = LLM(BUNDLED_MODEL, device="cuda", dtype="bfloat16", **settings)
    assert answers_right(llm, len(evaluation_set())) >= 0.95
