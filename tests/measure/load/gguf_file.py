"""Writes a bundled dense model as a GGUF file, for llama.cpp: `gguf_file.py MODEL_FOLDER OUT.gguf`.

Needs the packages gguf and numpy, not Meltcore. All weights are written as float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor as float32; the file holds bfloat16, which numpy lacks."""
    data = path.read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:header_end]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        start, end = entry["data_offsets"]
        raw = np.frombuffer(data[header_end + start : header_end + end], dtype=np.uint16)
        tensors[name] = (raw.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
    return tensors


def write_gguf(folder: Path, path: Path) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name("sums")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    special = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    tokens = {index: token for token, index in tokenizer["model"]["vocab"].items()} | special
    order = range(config["vocab_size"])
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")  # the same splitting rule
    writer.add_token_list([tokens.get(index, f"[unused{index}]") for index in order])
    writer.add_token_types([control if index in special or index not in tokens else normal for index in order])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in read_safetensors(folder / "model.safetensors").items():
        stored_name = names.get_name(name, try_suffixes=(".weight",))
        assert stored_name is not None, name
        writer.add_tensor(stored_name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
