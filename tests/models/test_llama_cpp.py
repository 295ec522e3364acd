"""GGUF files give the tokens of llama.cpp, and its log-probabilities within the rounding of its activations.

Optional: needs llama.cpp's bindings, xllamacpp, on a CPU. `make test-real` installs them and runs these.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from random_gguf import layout, new_writer, text_config, write_data, write_header
from waiting import WAIT_S

from meltcore import LLM, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None and not os.environ.get("REQUIRE_REAL"),
        reason="llama.cpp's bindings, xllamacpp, are not installed (make test-real)",
    ),
]

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "bos_token_id": 7998,
    "eos_token_id": 7999,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# A window that the prompt exceeds, scaled rotary frequencies, experts.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "sliding_window": 96,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 64,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "llama": {"rope_scaling": LLAMA3},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
}
PROMPT = [500 + 37 * index % 7000 for index in range(200)]
TOKENS = 6
# Its caches of keys and values are float16, and activations that meet quantized weights have 8 bits.
TOLERANCES = {"f32": 0.02, "q8_0": 0.2, "q4_0": 0.4, "q4_k_m": 0.4}


def answer_of_llama_cpp(path: Path) -> list[tuple[int, float]]:
    request = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 3}
    [answer] = llama_cpp.completions(path, [request], WAIT_S)
    return [(token["id"], token["logprob"]) for token in answer]


@pytest.mark.parametrize("file_type", TOLERANCES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_llama_cpp(tmp_path: Path, family: str, file_type: str) -> None:
    """In quantized files all experts compute every token: rounding may select another one, which is no small error."""
    changes = {"num_experts_per_tok": 8} if family == "qwen3_moe" and file_type != "f32" else {}
    (tmp_path / "config.json").write_text(json.dumps(SIZES | FAMILIES[family] | changes | {"model_type": family}))
    config, path = text_config(str(tmp_path)), tmp_path / "model.gguf"
    sizes, tensors = layout(config, file_type, None)
    write_header(new_writer(path, config, sizes, file_type), tensors)
    write_data(path, tensors, buffer_bytes=2**24)  # more than a tensor has: no two tokens are the same
    llm = LLM(str(path), device="cpu", dtype="float32", max_model_len=512, max_num_seqs=2)
    [ours] = llm.generate([PROMPT], SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=20))
    llm.close()
    # Tokens below may be bytes. Of incomplete characters llama.cpp gives no log-probabilities.
    first_word = 494 if family == "gemma3_text" else 257
    compared = 0
    for step, our_id, (token_id, logprob) in zip(
        ours.logprobs, ours.token_ids, answer_of_llama_cpp(path), strict=False
    ):
        if min(our_id, token_id) < first_word:
            break
        tops = dict(zip(step.top_token_ids, step.top_logprobs, strict=True))
        assert tops[token_id] == pytest.approx(logprob, abs=TOLERANCES[file_type])
        compared += 1
        if our_id != token_id:  # of nearly equal tokens either may win, and the texts part
            assert file_type != "f32"
            assert step.top_logprobs[0] - tops[token_id] < 2 * TOLERANCES[file_type]
            break
    assert compared >= (2 if file_type == "f32" else 1)
