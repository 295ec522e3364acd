"""GGUF checkpoints of all architectures give configuration and logits of the networks they were written from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_tools as tools
import gguf
import gguf_tools
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType, GGUFValueType
from gguf_file import write_gguf
from gguf_tools import (
    MIXES,
    add_tensors,
    add_tokenizer,
    config_of,
    finish,
    load_dequantized,
    new_writer,
    permute,
    write_model,
)
from transformers import PreTrainedModel

from meltcore import LLM, SamplingParams
from meltcore.common.errors import ConfigError
from meltcore.common.sizes import size_text
from meltcore.engine.memory.memory_needs import engine_needs
from meltcore.engine.worker.loading import load
from meltcore.kernels.fp8.fp8 import FP8
from meltcore.kernels.quant.ggml import dequantize_reference
from meltcore.kernels.quant.ggml_linear import scratch_values
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.layers.ggml_weights import GgmlExperts, GgmlWeight
from meltcore.layers.quantization import DenseExperts
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models import loader
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL, open_checkpoint
from meltcore.models.checkpoints.gguf.gguf_config import read_config
from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel
from meltcore.models.decoders.model import Model
from meltcore.models.loader import TORCH_DTYPES, build_meta_model, build_model, fill_dummy_weights, load_weights
from meltcore.models.quantized.quantization import weight_dtypes
from meltcore.settings.config import DType, EngineConfig, Quantization
from meltcore.settings.fleet_spec import ModelSection

# Settings that GGUF files cannot express are left at what llama.cpp computes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {"mlp_only_layers": []},
    "granite": {"tie_word_embeddings": True},
    "olmo2": {},
    "phi3": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None, "tie_word_embeddings": True},
    "gemma3_text": {
        "num_hidden_layers": 7,
        "layer_types": None,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
    },
}
CPU = torch.device("cpu")
# Sizes that are whole blocks, of 32 also on each of two ranks.
BLOCKS_OF_32: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 128, "moe_intermediate_size": 64}
BLOCKS_OF_256: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
}


def reference_of(family: str, **changes: Any) -> PreTrainedModel:
    reference = tools.make_reference(3, family, **(FAMILIES[family] | changes))
    reference.tie_weights()
    return reference


def loaded(path: Path, quantization: Quantization = "none", group: TensorParallelGroup | None = None) -> Model:
    checkpoint = open_checkpoint(str(path), files="all")
    model = build_model(checkpoint, torch.float32, CPU, quantization, group)
    load_weights(model, checkpoint, lambda stage, fraction: None)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_configuration_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    reference = reference_of(family)
    reference.save_pretrained(tmp_path)
    file = write_model(tmp_path / "model.gguf", reference)
    published = config_of(tmp_path)
    assert config_of(file) == published
    assert tools.error_against(reference, file, max_model_len=512) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("store", ["BF16", "F16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
def test_16_bit_files_give_the_logits_of_the_rounded_weights(tmp_path: Path, family: str, store: str) -> None:
    reference = reference_of(family)
    file = write_model(tmp_path / "model.gguf", reference, store)
    dtype = torch.bfloat16 if store == "BF16" else torch.float16
    for name, weight in reference.named_parameters():
        if weight.dim() > 1 and not name.endswith("mlp.gate.weight"):
            weight.data = weight.data.to(dtype).float()
    assert tools.error_against(reference, file, max_model_len=512) <= 1e-4
    stated = open_checkpoint(str(file), files="text").config["torch_dtype"]
    assert stated == ("float16" if store == "F16" and family != "gemma3_text" else "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "formats"),
    [("Q8_0", {"q8_0"}), ("Q4_0 and Q8_0", {"q4_0", "q8_0"}), ("Q4_K_M", {"q4_k", "q6_k"})],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text", "phi3"])
def test_quantized_files_give_the_logits_of_the_dequantized_weights(
    tmp_path: Path, family: str, store: str, formats: set[str]
) -> None:
    """With --dtype float32, where only the weights are rounded. The formats of a layer differ, also of its values."""
    reference = reference_of(family, **(BLOCKS_OF_256 if store == "Q4_K_M" else BLOCKS_OF_32))
    file = write_model(tmp_path / "model.gguf", reference, store)
    assert load_dequantized(reference, file) >= (10 if family == "phi3" else 15)  # which merges some
    assert tools.error_against(reference, file, max_model_len=512) <= 1e-4
    assert set(weight_dtypes(outline(file))) == formats | {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", GgmlType, ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_every_format_gives_the_logits_of_the_dequantized_weights(tmp_path: Path, family: str, kind: GgmlType) -> None:
    """In all matrices of the file: linear layers, embedding, head and stacked experts.

    Where scales are rounded, all experts compute every token: rounding may select another one.
    """
    experts = {"num_experts_per_tok": tools.FAMILIES["qwen3_moe"]["num_experts"]} if kind.name == "IQ4_XS" else {}
    reference = reference_of(family, **(BLOCKS_OF_32 if kind.block_size == 32 else BLOCKS_OF_256) | experts)
    file = write_model(tmp_path / "model.gguf", reference, kind.name)
    assert load_dequantized(reference, file) >= 13
    assert tools.error_against(reference, file, max_model_len=512) <= (2e-3 if kind.name == "IQ4_XS" else 1e-4)
    assert set(weight_dtypes(outline(file))) == {kind.held.type.name.lower(), "float32"}


@pytest.mark.slow
@pytest.mark.parametrize("store", MIXES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_formats_mix_within_a_layer(tmp_path: Path, family: str, store: str) -> None:
    sizes = BLOCKS_OF_32 if store == "blocks of 32" else BLOCKS_OF_256
    reference = reference_of(family, **sizes | {"num_hidden_layers": 4, "layer_types": None})
    file = write_model(tmp_path / "model.gguf", reference, store)
    kinds = {tensor.type.name for tensor in GGUFModel(file).tensors.values()}
    assert len(kinds & set(MIXES[store])) >= 5
    load_dequantized(reference, file)
    assert tools.error_against(reference, file, max_model_len=512) <= 2e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "store"), [("llama", "Q4_0 and Q8_0"), ("qwen3_moe", "Q4_0 and Q8_0"), ("gemma3_text", "Q4_K_M")]
)
@pytest.mark.parametrize("group", [None, TensorParallelGroup(1, 2)], ids=["whole", "rank 1 of 2"])
def test_fp8_of_a_quantized_file_is_that_of_its_values(
    tmp_path: Path, family: str, store: str, group: TensorParallelGroup | None
) -> None:
    """To the bit, also where a rank's columns begin within a block. Embedding and head keep their blocks."""
    sizes = BLOCKS_OF_256 if store == "Q4_K_M" else BLOCKS_OF_32 | {"intermediate_size": 96}
    reference = reference_of(family, **sizes)
    file = write_model(tmp_path / "model.gguf", reference, store)
    load_dequantized(reference, file)
    reference.save_pretrained(tmp_path / "dense")
    found, expected = (dict(loaded(path, "fp8", group).named_parameters()) for path in (file, tmp_path / "dense"))
    linear = [name for name, weight in expected.items() if weight.dtype == FP8]
    assert len(linear) == 4 * reference.config.num_hidden_layers
    for name in linear:
        assert torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)), name
        scales = name.replace("values", "scales")
        assert torch.equal(found[scales], expected[scales]), scales
    assert {weight.dtype for name, weight in found.items() if name.startswith("embedding")} == {torch.uint8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "ranks"), [("Q5_0", 2), ("MXFP4", 2), ("Q3_K", 2), ("IQ4_XS", 4), ("IQ4_NL", 4), ("Q5_K", 2), ("Q4_1", 2)]
)
def test_ranks_hold_their_parts_of_restored_blocks(tmp_path: Path, store: str, ranks: int) -> None:
    """Also where a rank's columns begin within a stored block, of which it reads the whole one."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}
    reference = reference_of("llama", **BLOCKS_OF_256 | heads | {"hidden_size": 512})
    file = write_model(tmp_path / "model.gguf", reference, store)
    whole, *parts = (
        loaded(file, group=group) for group in (None, *(TensorParallelGroup(i, ranks) for i in range(ranks)))
    )
    for part, dim in (("mlp.down_proj", -1), ("self_attn.o_proj", -1)):
        first, *rest = (
            dequantize_reference(
                (
                    model.blocks[1].mlp.down_proj if "mlp" in part else model.blocks[1].attention.o_proj
                ).weight.blocks.tensor
            )
            for model in (whole, *parts)
        )
        assert torch.equal(first, torch.cat(rest, dim))


def answers_of(file: Path, ranks: int) -> list[tuple[list[int], list[list[float]]]]:
    settings = {"device": "cpu", "dtype": "float32", "memory_bytes": 2**28, "max_num_seqs": 4}
    llm = LLM(str(file), tokenizer=BUNDLED_MODEL, tensor_parallel_size=ranks, **settings)
    prompts = [tools.random_prompt(length, length) for length in (3, 90)]
    found = llm.generate(prompts, SamplingParams(max_tokens=8, logprobs=4, ignore_eos=True))
    llm.close()
    return [(each.token_ids, [step.top_logprobs for step in each.logprobs]) for each in found]


@pytest.mark.slow
def test_ranks_of_quantized_files_answer_as_one_device(tmp_path: Path) -> None:
    """With experts and other matrices, in two formats."""
    reference = reference_of("qwen3_moe", **BLOCKS_OF_32)
    file = write_model(tmp_path / "model.gguf", reference, "Q4_0 and Q8_0")
    for alone, together in zip(*(answers_of(file, ranks) for ranks in (1, 2)), strict=True):
        assert alone[0] == together[0]
        torch.testing.assert_close(*(torch.tensor(logprobs) for _, logprobs in (alone, together)), rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("family", "store", "sizes", "message"),
    [
        # Three ranks would cut no block, but 8 attention heads.
        (
            "qwen3",
            "Q8_0",
            {"intermediate_size": 192},
            r"4 cuts 192 columns .* of 32; the largest .*\.gguf can have is 2$",
        ),
        ("qwen3_moe", "Q4_K_M", BLOCKS_OF_256, "4 cuts 256 columns .* of 256; the largest .* can have is 1$"),
    ],
)
def test_ranks_that_cut_blocks_are_refused_with_the_largest_size(
    tmp_path: Path, family: str, store: str, sizes: dict[str, Any], message: str
) -> None:
    changes = {"num_attention_heads": 8, "num_key_value_heads": 4} | sizes
    file = write_model(tmp_path / "model.gguf", reference_of(family, **changes), store)
    with pytest.raises(ConfigError, match=message):
        tools.open_engine(file, tensor_parallel_size=4)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_dummy_weights_have_the_formats_of_a_file_that_is_not_read(tmp_path: Path, family: str) -> None:
    """Ranks hold their parts of the same weights."""
    file = write_model(tmp_path / "model.gguf", reference_of(family, **BLOCKS_OF_32), "Q4_0 and Q8_0")
    data = file.read_bytes()
    first_tensor = min(tensor.offset for tensor in GGUFModel(file).tensors.values())
    file.write_bytes(data[:first_tensor] + bytes(len(data) - first_tensor))
    checkpoint = open_checkpoint(str(file), files="config")
    models = []
    for group in (None, TensorParallelGroup(0, 2), TensorParallelGroup(1, 2)):
        models.append(build_model(checkpoint, torch.float32, CPU, group=group))
        fill_dummy_weights(models[-1], checkpoint, 5)
    whole, *ranks = (
        block.mlp.down_proj.weight.blocks if family == "qwen3" else block.mlp.experts.down_proj
        for block in (model.blocks[0] for model in models)
    )
    assert {"q4_0", "q8_0", "float32"} == set(weight_dtypes(models[0]))
    values = [dequantize_reference(part.tensor) for part in (whole, *ranks)]
    assert torch.equal(values[0], torch.cat(values[1:], -1))
    assert values[0].std() == pytest.approx(loader.DUMMY_WEIGHT_STD, rel=0.1)
    if family == "qwen3":  # which takes values in place of blocks
        in_fp8 = build_model(checkpoint, torch.float32, CPU, "fp8")
        fill_dummy_weights(in_fp8, checkpoint, 5)
        assert set(weight_dtypes(in_fp8)) == {"float8_e4m3fn", "q4_0", "q8_0", "float32"}
    logits = tools.open_engine(file, load_format="dummy", max_model_len=64)
    logits.add("one", [1, 2, 3], max_tokens=3)
    assert len(logits.run()["one"]) == 3
    assert torch.stack(logits.logits["one"]).isfinite().all()


def test_plan_has_the_slice_of_a_quantized_weight_that_a_step_dequantizes(tmp_path: Path) -> None:
    """On a GPU a quarter of Gemma-3-27B's largest weight, 43,008 rows of 5,376 columns."""
    with torch.device("meta"):
        large = GgmlWeight(GgmlType.Q4_0, (43_008,), 5376)
    assert scratch_values(large.blocks.tensor, torch.device("cuda")) == 10_752 * 5376
    reference = reference_of("llama", **BLOCKS_OF_32)
    for store, scratch in (("F32", []), ("Q8_0", [4 * 64 * tools.VOCAB])):  # of the head
        engine = tools.open_engine(write_model(tmp_path / f"{store}.gguf", reference, store)).engine
        assert [row.size_bytes for row in engine.memory if row.name == "scratch"] == scratch


# The high bytes of a block's float16 scales, where it has more than one or it is not the second byte.
SCALE_BYTES = {"Q4_1": (1, 3), "Q5_1": (1, 3), "Q2_K": (81, 83), "Q3_K": (109,), "Q4_K": (1, 3), "Q5_K": (1, 3)}
SCALE_BYTES |= {"Q6_K": (209,), "MXFP4": (0,)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "quantization"),
    [(kind, "none") for kind in GgmlType] + [(kind, "fp8") for kind in (GgmlType.Q4_1, GgmlType.Q6_K)],
)
def test_blocks_whose_scale_is_no_number_are_refused(
    tmp_path: Path, kind: GgmlType, quantization: Quantization
) -> None:
    """Of each scale of a block infinity and NaN, of MXFP4 powers that Q8_0 cannot have, and values in FP8 can."""
    reference = reference_of("qwen3", **(BLOCKS_OF_32 if kind.block_size == 32 else BLOCKS_OF_256))
    file = write_model(tmp_path / "model.gguf", reference, kind.name)
    offset = GGUFModel(file).tensors["blk.1.ffn_up.weight"].offset + 3 * kind.block_bytes
    content = file.read_bytes()
    for index in SCALE_BYTES.get(kind.name, (1,)):
        for high_byte in (0x7C, 0xFF):
            damaged = bytearray(content)
            damaged[offset + index - (kind.name != "MXFP4") : offset + index + 1] = (
                bytes((high_byte | 0x80,)) if kind.name == "MXFP4" else bytes((0, high_byte))
            )
            file.write_bytes(damaged)
            with pytest.raises(ConfigError, match=r"model\.gguf: blk\.1\.ffn_up\.weight has (a block|.* not finite)"):
                loaded(file, quantization)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["Q4_1 and F16", "Q5_0 and Q4_1", "Q5_K, IQ4_XS and Q3_K"])
def test_formats_mix_within_the_experts_of_a_layer(tmp_path: Path, store: str) -> None:
    """Unquantized ones too: then all experts of the layer hold values, and plan and log say so."""
    sizes = BLOCKS_OF_256 if "K" in store else BLOCKS_OF_32
    experts = {"num_experts_per_tok": tools.FAMILIES["qwen3_moe"]["num_experts"]}
    reference = reference_of("qwen3_moe", **sizes | experts)
    file = write_model(tmp_path / "model.gguf", reference, store)
    load_dequantized(reference, file)
    assert tools.error_against(reference, file, max_model_len=512) <= 2e-3
    model = loaded(file)
    kind = type(model.blocks[0].mlp.experts)
    assert kind is (DenseExperts if "F16" in store else GgmlExperts)
    rows = engine_needs(ModelSection(checkpoint=str(file), dtype="float32", max_model_len=64, max_num_seqs=2)).rows
    assert rows[0].size_bytes == sum(weight.nbytes for weight in model.parameters())
    assert ("tensors of Q4_1 are held as values in the model's type" in rows[0].note) == ("F16" in store)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "store"), [("llama", "blocks of 32"), ("gemma3_text", "blocks of 256")])
def test_planned_weights_are_those_that_are_held(
    tmp_path: Path, family: str, store: str, dtype: DType, capfd: pytest.CaptureFixture[str]
) -> None:
    """To the byte, and plan and log name each format that is held as another one, with its bytes and its loss."""
    sizes = BLOCKS_OF_32 if store == "blocks of 32" else BLOCKS_OF_256
    reference = reference_of(family, **sizes | {"num_hidden_layers": 4, "layer_types": None})
    file = write_model(tmp_path / "model.gguf", reference, store)
    section = ModelSection(checkpoint=str(file), dtype=dtype, max_model_len=64, max_num_seqs=2)
    row = next(row for row in engine_needs(section).rows if row.name == "weights")
    checkpoint = open_checkpoint(str(file), files="all")
    on_gpu = build_model(checkpoint, TORCH_DTYPES[dtype], torch.device("meta"))
    assert row.size_bytes == sum(weight.nbytes for weight in on_gpu.parameters())
    config = EngineConfig(model=str(file), device="cpu", dtype=dtype, memory_bytes=2**28, max_model_len=64)
    load(config, checkpoint, CPU, lambda stage, fraction: None)
    model = GGUFModel(file)
    restored = {tensor.type for tensor in model.tensors.values()} & {
        GGMLQuantizationType(each) for each in GgmlType if each.held.type != each
    }
    assert len(restored) >= 2
    log = capfd.readouterr().err
    for kind in restored:
        tensors = [tensor for tensor in model.tensors.values() if tensor.type == kind]
        stored_bytes = sum(tensor.num_bytes for tensor in tensors)
        held = GgmlType(kind).held
        text = f"{len(tensors)} tensors of {kind.name} are held as {held.type.name}: {size_text(stored_bytes)} of"
        assert text in row.note
        assert f"loss: {held.loss or 'none'}" in row.note
        # In float32 a CPU converts all of them once more, and only a loss is worth a line.
        assert (text in log) == (dtype == "bfloat16" or held.loss != "")


def test_split_file_loads_what_one_file_does(tmp_path: Path) -> None:
    reference = reference_of("llama")
    whole = loaded(write_model(tmp_path / "whole.gguf", reference))
    (tmp_path / "parts").mkdir()
    write_model(tmp_path / "parts" / "m.gguf", reference, split_tensors=7)
    parts = sorted((tmp_path / "parts").iterdir())
    assert len(parts) == 5
    split = loaded(tmp_path / "parts")
    for name, weight in whole.named_parameters():
        assert torch.equal(weight, dict(split.named_parameters())[name]), name
    parts[2].unlink()
    with pytest.raises(ConfigError, match=r"one of 5 parts; missing: m-00003-of-00005\.gguf"):
        open_checkpoint(str(parts[0]), files="all")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text", "olmo2", "phi3"])
def test_each_rank_loads_its_share(tmp_path: Path, family: str) -> None:
    """Rows of permuted heads, experts and norms of a rank are those that it loads from the published layout."""
    reference = reference_of(family)
    reference.save_pretrained(tmp_path)
    file = write_model(tmp_path / "model.gguf", reference)
    for rank in range(2):
        models = []
        for path in (tmp_path, file):
            checkpoint = open_checkpoint(str(path), files="all")
            models.append(build_model(checkpoint, torch.float32, CPU, group=TensorParallelGroup(rank, 2)))
            load_weights(models[-1], checkpoint, lambda stage, fraction: None)
        ours, theirs = (dict(model.named_parameters()) for model in models[::-1])
        assert ours.keys() == theirs.keys()
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, rtol=1e-6, atol=1e-6)


def header_of(path: Path, family: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a header whose matrices have no rows but those that the configuration reads."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **(tools.FAMILIES[family] | FAMILIES[family] | {"vocab_size": 300} | changes))
    writer = new_writer(path, config)
    add_tokenizer(writer, tokens=[f"t{index}" for index in range(300)])
    writer.add_tensor("token_embd.weight", np.zeros((300, config.hidden_size), dtype=np.float32))
    for layer in range(config.num_hidden_layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.zeros(config.hidden_size, dtype=np.float32))
    return read_config(GGUFModel(finish(writer, path)))


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("original", [64, 8192])
def test_llama3_scaling_is_recovered_from_its_tensor(tmp_path: Path, factor: float, original: int) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    config = header_of(tmp_path / "model.gguf", "llama", head_dim=128, num_hidden_layers=2, rope_parameters=rope)
    assert config["rope_scaling"] == {name: value for name, value in rope.items() if name != "rope_theta"}
    other = rope | {"high_freq_factor": 9.0}
    with pytest.raises(ConfigError, match=rf"rope_freqs.weight divides rotary frequencies by up to {factor:g}"):
        header_of(tmp_path / "other.gguf", "llama", head_dim=128, num_hidden_layers=2, rope_parameters=other)


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_stated_scaling_is_read(tmp_path: Path, rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}
    config = header_of(tmp_path / "model.gguf", "qwen2", num_hidden_layers=1, rope_parameters=rope)
    expected = {"rope_type": rope_type, "factor": 4.0}
    assert config["rope_scaling"] == expected | (
        {"original_max_position_embeddings": 512} if rope_type == "yarn" else {}
    )
    assert config["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "head_dim"),
    [("1b", 26, 1152, 4, 256), ("4b", 34, 2560, 8, 256), ("27b", 62, 5376, 32, 128)],
)
def test_gemma_files_that_leave_fields_out_have_the_published_ones(
    tmp_path: Path, name: str, layers: int, hidden: int, heads: int, head_dim: int
) -> None:
    """Scale, pattern, local base and linear scaling of Gemma 3, by its size."""
    published = build_model(
        open_checkpoint(f"google/gemma-3-{name}-it", files="config"), torch.float32, torch.device("meta")
    ).config
    ours = header_of(
        tmp_path / "model.gguf",
        "gemma3_text",
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=published.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=published.num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=published.max_position_embeddings,
        sliding_window=published.sliding_window,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    from meltcore.models.decoders.gemma3 import Gemma3

    with torch.device("meta"):
        assert Gemma3(ours).config == replace(published, vocab_size=300)


@pytest.mark.parametrize("window", [None, 96])
def test_mistral3_is_mistral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """The architecture that the converter gives Mistral Small 3.1 since 2025-12, and Ministral 3, which is refused."""
    monkeypatch.setitem(gguf_tools.ARCHITECTURES, "mistral", "mistral3")
    monkeypatch.setitem(gguf_tools._NAMES, "mistral3", gguf.get_tensor_name_map(gguf.MODEL_ARCH.MISTRAL3, 8))
    reference = reference_of("mistral", sliding_window=window)
    reference.save_pretrained(tmp_path)
    file = write_model(tmp_path / "model.gguf", reference)
    assert config_of(file) == config_of(tmp_path)
    assert tools.error_against(reference, file, max_model_len=512) <= 1e-4
    writer = new_writer(tmp_path / "ministral.gguf", reference.config)
    writer.add_float32("mistral3.attention.temperature_scale", 0.1)
    with pytest.raises(ConfigError, match=r"mistral3\.attention\.temperature_scale is 0\.1"):
        read_config(GGUFModel(finish(writer, tmp_path / "ministral.gguf")))


PHI_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 1.25, 1.125, 2.0, 3.0],
    "long_factor": [1.0, 2.5, 3.25, 4.125, 8.0, 16.1],
    "original_max_position_embeddings": 128,
}


def write_phi(path: Path, reference: PreTrainedModel, *removed: str, **changed: Any) -> Path:
    writer = new_writer(path, reference.config)
    for key in removed:
        writer.tensors[0].pop(key, None)
        writer.kv_data[0].pop(key, None)
    for key, value in changed.items():
        writer.add_float32(f"phi3.rope.scaling.{key}", value)
    add_tokenizer(writer, tokens=["a", "b"])
    add_tensors(writer, reference)
    return finish(writer, path)


def test_longrope_is_read_from_tensors(tmp_path: Path) -> None:
    """Factors, the original length, and the factor of attention, which is the published one in single precision."""
    changes = {"original_max_position_embeddings": 128, "sliding_window": None}
    reference = reference_of("phi3", rope_parameters=dict(PHI_LONGROPE), **changes)
    reference.save_pretrained(tmp_path)
    file = write_phi(tmp_path / "phi.gguf", reference)
    assert config_of(file) == config_of(tmp_path)
    assert tools.error_against(reference, file, max_model_len=512) <= 1e-4
    without = write_phi(tmp_path / "other.gguf", reference, "phi3.rope.scaling.attn_factor")
    assert config_of(without).rope_scaling.attention_factor == 1.0


@pytest.mark.parametrize(
    ("removed", "changed", "message"),
    [
        ("rope_factors_short.weight", {}, r"rope_factors_short\.weight is missing; it must be F32 \[6\]"),
        ("phi3.rope.dimension_count", {}, r"rope_factors_short\.weight is F32 \[6\]; it must be F32 \[8\]"),
        ("", {"factor": 32.0}, r"phi3\.rope\.scaling\.factor is 32\.0, which is not computed here"),
    ],
)
def test_longrope_that_is_not_whole_is_refused(
    tmp_path: Path, removed: str, changed: dict[str, Any], message: str
) -> None:
    lengths = {"original_max_position_embeddings": 128}
    reference = reference_of("phi3", rope_parameters=dict(PHI_LONGROPE), **lengths)
    with pytest.raises(ConfigError, match=message):
        read_config(GGUFModel(write_phi(tmp_path / "phi.gguf", reference, removed, **changed)))


def test_factor_of_scores_is_refused_without_longrope(tmp_path: Path) -> None:
    file = write_phi(tmp_path / "phi.gguf", reference_of("phi3"), attn_factor=1.25)
    with pytest.raises(ConfigError, match=r"phi3\.rope\.scaling\.attn_factor is 1\.25, which is not computed here"):
        read_config(GGUFModel(file))


def test_granite_without_its_keys_has_no_factors(tmp_path: Path) -> None:
    """As in llama.cpp, where 0 stands for none too; scores then have their usual scale."""
    for value in (None, 0.0):
        reference = reference_of("granite")
        writer = new_writer(tmp_path / "granite.gguf", reference.config)
        for key in ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"):
            del writer.kv_data[0][f"granite.{key}"]
            if value is not None:
                writer.add_float32(f"granite.{key}", value)
        add_tokenizer(writer, tokens=["a", "b"])
        add_tensors(writer, reference)
        config = config_of(finish(writer, tmp_path / "granite.gguf"))
        assert (config.attention_scale, config.stream_scale, config.logits_scaling) == (16**-0.5, None, 1.0)


def test_bundled_model_answers_as_from_its_folder(tmp_path: Path) -> None:
    """Weights, tokenizer, chat template and end tokens of one file."""
    write_gguf(open_checkpoint(BUNDLED_MODEL, files="all").folder, tmp_path / "sums.gguf")
    chats = [[{"role": "user", "content": f"What is {a} * 8?"}] for a in range(3, 9)]
    greedy = SamplingParams(max_tokens=24)
    answers = []
    for model in (BUNDLED_MODEL, str(tmp_path / "sums.gguf")):
        llm = LLM(model, device="cpu", memory_bytes=2**28)
        answers.append([(each.token_ids, each.text, each.finish_reason) for each in llm.chat(chats, greedy)])
        llm.close()
    assert answers[0] == answers[1]
    assert {reason for _, _, reason in answers[0]} == {"stop"}


def test_tensors_are_named_as_in_the_file(tmp_path: Path) -> None:
    reference = reference_of("llama")
    writer = new_writer(tmp_path / "extra.gguf", reference.config)
    add_tokenizer(writer, tokens=["a", "b"])
    add_tensors(writer, reference)
    writer.add_tensor("blk.1.attn_q.bias", np.zeros(128, dtype=np.float32))
    with pytest.raises(ConfigError, match=r"extra\.gguf: 1 unexpected tensors: blk\.1\.attn_q\.bias$"):
        outline(finish(writer, tmp_path / "extra.gguf"))
    writer = new_writer(tmp_path / "less.gguf", reference.config)
    add_tokenizer(writer, tokens=["a", "b"])
    add_tensors(writer, reference)
    del writer.tensors[0]["blk.1.ffn_up.weight"], writer.tensors[0]["output_norm.weight"]
    with pytest.raises(
        ConfigError, match=r"less\.gguf: 2 missing tensors: blk\.1\.ffn_up\.weight, output_norm\.weight$"
    ):
        outline(finish(writer, tmp_path / "less.gguf"))


def test_missing_experts_are_one_tensor(tmp_path: Path) -> None:
    reference = reference_of("qwen3_moe")
    writer = new_writer(tmp_path / "moe.gguf", reference.config)
    add_tokenizer(writer, tokens=["a", "b"])
    add_tensors(writer, reference)
    del writer.tensors[0]["blk.1.ffn_up_exps.weight"]
    with pytest.raises(ConfigError, match=r"moe\.gguf: 1 missing tensors: blk\.1\.ffn_up_exps\.weight$"):
        outline(finish(writer, tmp_path / "moe.gguf"))


@pytest.mark.parametrize("scale", [1e-200, 0.0, -0.25, 1000.0, float("nan"), True])
def test_attention_scale_is_refused_by_its_own_key(tmp_path: Path, scale: float) -> None:
    file = write_gemma(tmp_path / "gemma.gguf", scale)
    message = rf"gemma\.gguf: gemma3\.attention\.scale must be a number from 0\.001 to 10; got {scale}"
    with pytest.raises(ConfigError, match=message):
        read_config(GGUFModel(file))


@pytest.mark.parametrize(("scale", "scalar"), [(0.001, 1e6), (168**-0.5, 168.0), (10.0, 0.01)])
def test_attention_scale_gives_the_published_scalar(tmp_path: Path, scale: float, scalar: float) -> None:
    config = read_config(GGUFModel(write_gemma(tmp_path / "gemma.gguf", scale)))
    assert config["query_pre_attn_scalar"] == pytest.approx(scalar)


@pytest.mark.parametrize("wrong", [2, float("nan"), -1])
def test_pattern_of_windows_is_of_true_and_false(tmp_path: Path, wrong: float) -> None:
    writer = new_writer(tmp_path / "gemma.gguf", reference_of("gemma3_text").config)
    key, pattern = "gemma3.attention.sliding_window_pattern", [1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1]
    layers = writer.kv_data[0]["gemma3.block_count"].value
    writer.kv_data[0].pop(key, None)
    writer.add_key_value(key, [wrong, *map(type(wrong), pattern[1:layers])], GGUFValueType.ARRAY)
    add_tokenizer(writer, tokens=["a", "b"])
    add_tensors(writer, reference_of("gemma3_text"))
    with pytest.raises(ConfigError, match=rf"{key} must be true or false for each layer; got {wrong}"):
        read_config(GGUFModel(finish(writer, tmp_path / "gemma.gguf")))


def write_gemma(path: Path, scale: float) -> Path:
    """Write a Gemma 3 whose attention has a scale of 64 bits, or a flag instead."""
    reference = reference_of("gemma3_text")
    writer = new_writer(path, reference.config)
    writer.kv_data[0].pop("gemma3.attention.scale", None)
    kind = GGUFValueType.BOOL if scale is True else GGUFValueType.FLOAT64
    writer.add_key_value("gemma3.attention.scale", scale, kind)
    add_tokenizer(writer, tokens=["a", "b"])
    add_tensors(writer, reference)
    return finish(writer, path)


def outline(path: Path) -> Model:
    return build_meta_model(open_checkpoint(str(path), files="all"), torch.float32, CPU)


def test_sizes_that_the_tensors_contradict_are_not_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.Model, "to_empty", lambda *_, **__: pytest.fail("weights were allocated"))
    monkeypatch.setattr(loader, "host_available_bytes", lambda: 2**50)
    reference = reference_of("qwen3")
    writer = new_writer(tmp_path / "wide.gguf", reference.config)
    writer.kv_data[0].pop("qwen3.feed_forward_length")
    writer.add_feed_forward_length(2**20)
    add_tokenizer(writer, tokens=["a", "b"])
    add_tensors(writer, reference)
    file = finish(writer, tmp_path / "wide.gguf")
    message = r"wide\.gguf: blk\.0\.ffn_gate\.weight has shape \[96, 64\]; the configuration asks for \[1048576, 64\]"
    with pytest.raises(ConfigError, match=message):
        build_model(open_checkpoint(str(file), files="all"), torch.float32, CPU)
    monkeypatch.setattr(loader, "host_available_bytes", lambda: 2**20)
    with pytest.raises(ConfigError, match=r"the weights take .* of host memory are available"):
        build_model(open_checkpoint(str(file), files="all"), torch.float32, CPU)


def test_wrong_field_names_the_file(tmp_path: Path) -> None:
    reference = reference_of("qwen3_moe")
    writer = new_writer(tmp_path / "moe.gguf", reference.config)
    writer.kv_data[0].pop("qwen3moe.expert_used_count")
    writer.add_expert_used_count(9)
    add_tokenizer(writer, tokens=["a", "b"])
    add_tensors(writer, reference)
    with pytest.raises(ConfigError, match=r"moe\.gguf, as config.json: num_experts_per_tok must be from 1 to"):
        outline(finish(writer, tmp_path / "moe.gguf"))


def test_permuted_rows_are_those_of_interleaved_rotation() -> None:
    """The fixture's permutation, by its meaning: rows of a head are i, i + head_dim / 2, i + 1, ..."""
    rows = permute(torch.arange(16.0)[:, None], heads=2).flatten().tolist()
    assert rows == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
