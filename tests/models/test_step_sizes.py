"""Sizes of a step are those of the kernels that it launches, and all families can be planned."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from few_layers import open_few_layers

from meltcore.engine.memory.workspace import plan_workspace
from meltcore.kernels.moe.grouped_gemm_tma import BLOCK_M
from meltcore.kernels.quant import ggml_experts
from meltcore.kernels.quant.ggml import empty
from meltcore.kernels.quant.ggml_experts import experts_scratch_values
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.models.decoders.decoder_families import DECODER_CONFIGS
from meltcore.models.loader import build_meta_model, default_dtype
from meltcore.models.quantized.quantization import largest_slices, quantize_as_llama_cpp, scratch_bytes
from meltcore.models.quantized.step_sizes import MIN_DEQUANTIZED_PAIRS, decoder_step
from meltcore.models.registry import ARCHITECTURES

META = torch.device("meta")


def test_every_architecture_has_a_configuration() -> None:
    assert set(DECODER_CONFIGS) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "google/gemma-3-27b-it", "Qwen/Qwen3-30B-A3B"])
def test_slices_are_those_of_the_largest_weights_in_blocks(name: str) -> None:
    """Of linear layers, of the head or of experts, whichever is largest."""
    model = build_meta_model(open_few_layers(name), torch.bfloat16, META)
    slices = largest_slices(model)
    assert scratch_bytes(model, torch.device("cuda")) == 0
    with META, default_dtype(torch.bfloat16):
        quantize_as_llama_cpp(model, "q8_0")
    assert 2 * max(slices) == scratch_bytes(model, torch.device("cuda"))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-35B-A3B"])
def test_slices_of_experts_are_those_that_kernels_dequantize(name: str) -> None:
    """Only steps that reach the kernels' limit need them; a step of a fleet's default has fewer tokens."""
    model = build_meta_model(open_few_layers(name), torch.bfloat16, META)
    config, slices = model.config, largest_slices(model)
    assert config.experts is not None
    count, width = config.experts.num_experts + config.experts.shared_expert, config.experts.moe_intermediate_size
    shapes = (count, 2 * width, config.hidden_size), (count, config.hidden_size, width)
    gate_up, down = (empty(GgmlType.Q8_0, shape, META) for shape in shapes)
    assert slices.experts == experts_scratch_values([gate_up], down)
    assert MIN_DEQUANTIZED_PAIRS == ggml_experts.MIN_DEQUANTIZED_PAIRS
    step = decoder_step(config, 2, slices)
    needed = partial(plan_workspace, step, vocab_size=1, max_num_seqs=1, max_model_len=64, logit_rows=1)
    below, at = (
        needed(max_num_batched_tokens=tokens, penalty_slots=1, has_graphs=False).step
        for tokens in (step.expert_tokens - 1, step.expert_tokens)
    )
    assert at - below > step.expert_bytes > 2 * BLOCK_M * count * (config.hidden_size + width)
    assert step.expert_tokens > 2048
