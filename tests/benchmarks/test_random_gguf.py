"""Files of benchmarks/random_gguf.py are those of the published models, but for their numbers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_gguf import layout, new_writer, text_config, write_data, write_header

from meltcore import LLM, SamplingParams
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.loader import build_meta_model
from meltcore.models.quantized.quantization import weight_dtypes

TINY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 600,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bos_token_id": 598,
    "eos_token_id": [599, 597],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 6,
        "sliding_window": 96,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 64,
    },
    "llama": {},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "file_type", "size_gb"),
    [
        ("google/gemma-3-27b-it", "q4_0", 17.2),  # head in F16; the file of docs/performance.md has Q6_K, 15.57 GB
        ("Qwen/Qwen3-30B-A3B", "q8_0", 32.5),
        ("meta-llama/Llama-3.1-8B-Instruct", "q4_k_m", 4.92),
        ("Qwen/Qwen3-0.6B", "q8_0", 0.63),
    ],
)
def test_size_is_that_of_the_published_file(model: str, file_type: str, size_gb: float) -> None:
    _, tensors = layout(text_config(model), file_type, None)
    assert sum(tensor.num_bytes for tensor in tensors) / 1e9 == pytest.approx(size_gb, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layers"),
    [("google/gemma-3-27b-it", 62), ("Qwen/Qwen3-30B-A3B", 2), ("meta-llama/Llama-3.1-8B-Instruct", 2)],
)
def test_configuration_is_the_published_one(tmp_path: Path, model: str, layers: int) -> None:
    """Gemma's number of layers stands for fields that files leave out."""
    config, path = text_config(model) | {"num_hidden_layers": layers}, tmp_path / "model.gguf"
    sizes, tensors = layout(config, "q4_0", None)
    write_header(new_writer(path, config, sizes, "q4_0"), tensors)
    write_data(path, tensors[:1] if "Llama" in model else [])  # divisors, a part of the configuration
    os.truncate(path, path.stat().st_size + sum(tensor.num_bytes for tensor in tensors) + 64 * len(tensors))  # a hole
    checkpoint = open_checkpoint(str(path), files="all")
    assert checkpoint.gguf is not None
    found = build_meta_model(checkpoint, torch.bfloat16, torch.device("meta")).config
    published = build_meta_model(open_checkpoint(model, files="config"), torch.bfloat16, torch.device("meta")).config
    found_layers = replace(found, num_hidden_layers=published.num_hidden_layers)
    assert replace(found_layers, vocab_size=published.vocab_size) == published
    assert set(checkpoint.eos_token_ids) == set(np.atleast_1d(config["eos_token_id"]))
    assert len(checkpoint.gguf.texts("tokenizer.ggml.tokens")) == found.vocab_size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "file_type", "formats"),
    [
        ("gemma3_text", "q4_0", {"q4_0"}),
        ("llama", "q4_k_m", {"q4_k", "q6_k"}),
        ("qwen3_moe", "q8_0", {"q8_0"}),
    ],
)
def test_file_loads_and_generates(tmp_path: Path, family: str, file_type: str, formats: set[str]) -> None:
    config, path = TINY | FAMILIES[family] | {"model_type": family}, tmp_path / "model.gguf"
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = text_config(str(tmp_path))
    sizes, tensors = layout(config, file_type, None)
    write_header(new_writer(path, config, sizes, file_type), tensors)
    write_data(path, tensors, buffer_bytes=2**20)
    llm = LLM(str(path), max_model_len=256, dtype="float32", device="cpu")
    assert formats <= set(weight_dtypes(llm.engine.runner.model)) <= formats | {"float32", "float16"}
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=5)
    for answer in llm.generate(["th 123", [300 + token for token in range(150)]], sampling):
        assert len(answer.token_ids) == 4
        # Logits of unit variance: the best of 600 is at about exp(3.2) / (600 * exp(0.5)). A tied head repeats a token.
        highest = 0.0 if family == "gemma3_text" else -1.5
        assert all(-6.0 < step.top_logprobs[0] <= highest for step in answer.logprobs)
    llm.close()
    assert llm.tokenizer.decode(llm.tokenizer.encode("th 123", add_special_tokens=False)) == "th 123"
    assert {598, 599}.issubset(llm.tokenizer.special_ids) or family == "gemma3_text"
