"""Writes a GGUF file of a published configuration with random weights, to measure speed without a download.

The file has the layout and the metadata that llama.cpp's converter gives the model, and a vocabulary of the right size,
made up of bytes and numbered words: both Meltcore and llama.cpp load it. Scales keep activations near unit variance in
all layers. TYPE mixes formats as llama.cpp's quantizer does: a Q4_0 or Q4_K_M file keeps its head in Q6_K. The
exception is Gemma 3 in Q4_0: Google's file keeps its embedding, which is also the head, in F16.

    python benchmarks/random_gguf.py google/gemma-3-27b-it q4_0 /dev/shm/gemma-3-27b-q4_0.gguf       # 17.2 GB, Google's
    python benchmarks/random_gguf.py google/gemma-3-27b-it q4_0 /dev/shm/q6_k_head.gguf --head q6_k  # 15.6 GB
    python benchmarks/random_gguf.py Qwen/Qwen3-30B-A3B q8_0 /dev/shm/qwen3-30b-a3b-q8_0.gguf        # 32.5 GB
"""

from __future__ import annotations

import argparse
import sys
import time
from math import prod
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    LlamaFileType,
    TokenType,
)

from meltcore.kernels.quant.ggml import random_blocks
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.models.checkpoints.checkpoint import Checkpoint, open_checkpoint, read_json
from meltcore.models.checkpoints.gguf.gguf_config import EMBEDDING, FAMILIES, HEAD
from meltcore.models.checkpoints.gguf_weights import gguf_name
from meltcore.models.decoders.decoder_config import DecoderConfig
from meltcore.models.loader import build_meta_model
from meltcore.models.writers.gguf_writer import add_metadata, config_metadata, rope_factors
from meltcore.text.tokenizer import byte_alphabet

Type = GGMLQuantizationType
FILE_TYPES = {
    "q8_0": (Type.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Type.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q4_k_m": (Type.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
    "f16": (Type.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (Type.BF16, LlamaFileType.MOSTLY_BF16),
    "f32": (Type.F32, LlamaFileType.ALL_F32),
}
HEAD_TYPES = {each.name.lower(): each for each in (Type.Q4_0, Type.Q8_0, Type.Q4_K, Type.Q6_K, Type.F16, Type.BF16)}
BUFFER_BYTES = 64 * 2**20  # of random weights, repeated in the file
GEMMA_SPECIAL = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<end_of_turn>": 106}
GEMMA_FIRST_BYTE, GEMMA_VOCAB = 238, 262_144
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


class StoredTensor(NamedTuple):
    """A tensor of the file. values: what is not random."""

    name: str
    shape: tuple[int, ...]
    type: Type
    values: np.ndarray[Any, Any] | None = None

    @property
    def num_bytes(self) -> int:
        block_size, block_bytes = GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // block_size * block_bytes


def text_config(model: str) -> dict[str, Any]:
    """The config.json of a model's language part. Exits for an architecture that GGUF files of Meltcore lack."""
    folder = Path(model)
    if (folder / "config.json").exists():  # beside which an earlier file may lie
        checkpoint = Checkpoint(model, folder, read_json(folder / "config.json"), {})
    else:
        checkpoint = open_checkpoint(model, files="config")
    config = {name: value for name, value in checkpoint.text_config.items() if not isinstance(value, dict)}
    config |= {name: checkpoint.text_config.get(name) for name in ("rope_scaling", "rope_parameters")}
    config = {name: value for name, value in config.items() if value is not None}
    names = {family.model_type: family.architecture for family in FAMILIES.values()}
    if config.get("model_type") not in names:
        sys.exit(f"{model} is of model_type {config.get('model_type')}; supported: {', '.join(names)}")
    if config["model_type"] == "gemma3_text":
        config.setdefault("vocab_size", GEMMA_VOCAB)  # files leave out the rows of images
    return config | {"architectures": [names[config["model_type"]]]}


def layout(config: dict[str, Any], file_type: str, head: str | None) -> tuple[DecoderConfig, list[StoredTensor]]:
    """The network's sizes and the tensors of the file, in its order. head: the head's type instead of the usual one."""
    model = build_meta_model(Checkpoint("", Path(), config, {}), torch.bfloat16, torch.device("meta"))
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name, loader in model.checkpoint_tensors().items():
        shapes.setdefault(gguf_name(name, config["model_type"]), []).append(tuple(loader.shape))
    sizes = model.config
    tensors = [StoredTensor(name, values.shape, Type.F32, values) for name, values in rope_factors(sizes).items()]
    for name, parts in shapes.items():
        shape = (len(parts), *parts[0]) if len(parts) > 1 else parts[0]
        if len(shape) == 1:
            values = np.full(shape, 0.0 if name.endswith(".bias") else 1.0, dtype=np.float32)
            tensors.append(StoredTensor(name, shape, Type.F32, values))
            continue
        stored = matrix_type(name, sizes, file_type, head)
        if shape[-1] % GGML_QUANT_SIZES[stored][0]:
            sys.exit(f"{name} has {shape[-1]} columns, which are not whole blocks of {stored.name}")
        tensors.append(StoredTensor(name, shape, stored))
    return sizes, tensors


def matrix_type(name: str, sizes: DecoderConfig, file_type: str, head: str | None) -> Type:
    """The type that llama.cpp's quantizer gives a matrix."""
    usual = FILE_TYPES[file_type][0]
    if "ffn_gate_inp" in name:
        return Type.F32
    if name == (EMBEDDING if sizes.tie_word_embeddings else HEAD):
        if head is not None:
            return HEAD_TYPES[head]
        if file_type == "q4_0" and sizes.post_norms:
            return Type.F16
        return Type.Q6_K if file_type.startswith("q4") else usual
    if file_type == "q4_k_m" and ("attn_v" in name or "ffn_down" in name):
        layer, eighth = int(name.split(".")[1]), sizes.num_hidden_layers // 8
        is_end = layer < eighth or layer >= 7 * sizes.num_hidden_layers // 8
        return Type.Q6_K if is_end or (layer - eighth) % 3 == 2 else usual
    return usual


def new_writer(path: Path, config: dict[str, Any], sizes: DecoderConfig, file_type: str) -> gguf.GGUFWriter:
    """A writer with the metadata of a model."""
    architecture = next(name for name, family in FAMILIES.items() if family.model_type == config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, config_metadata("random weights", sizes, architecture))
    if sizes.experts is not None:
        writer.add_feed_forward_length(config["intermediate_size"])  # unused; published files have it
    writer.add_file_type(FILE_TYPES[file_type][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_chat_template(CHAT_TEMPLATE)
    (add_sentencepiece if architecture == "gemma3" else add_byte_level)(writer, config, sizes.vocab_size)
    return writer


def add_byte_level(writer: gguf.GGUFWriter, config: dict[str, Any], vocab_size: int) -> None:
    """Bytes, one merge and numbered words, with the special tokens of config.json in their places."""
    tokens = [*byte_alphabet(), "th"]
    tokens += [f"[{index}]" for index in range(len(tokens), vocab_size)]
    types = [TokenType.NORMAL] * vocab_size
    eos = config.get("eos_token_id", vocab_size - 1)
    ends = eos if isinstance(eos, list) else [eos]
    bos = config.get("bos_token_id", ends[0])
    for token_id in (*ends, bos):
        if not 257 <= token_id < vocab_size:
            sys.exit(f"config.json has the special token {token_id}; here they are 257 to {vocab_size - 1}")
        tokens[token_id], types[token_id] = f"<|{token_id}|>", TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe" if config["model_type"] == "llama" else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(bos)
    for add_end, token_id in zip(
        (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id), ends, strict=False
    ):
        add_end(token_id)
    writer.add_add_bos_token(config["model_type"] == "llama")


def add_sentencepiece(writer: gguf.GGUFWriter, _config: dict[str, Any], vocab_size: int) -> None:
    """Gemma's special tokens and bytes in their places, and numbered words. Scores fall with the id."""
    if vocab_size <= GEMMA_FIRST_BYTE + 256:
        sys.exit(f"a vocabulary of {vocab_size} tokens has no room for Gemma's bytes, up to {GEMMA_FIRST_BYTE + 255}")
    tokens = [f"[{index}]" for index in range(vocab_size)]
    types = [TokenType.NORMAL] * vocab_size
    for text, token_id in GEMMA_SPECIAL.items():
        tokens[token_id], types[token_id] = text, TokenType.UNKNOWN if text == "<unk>" else TokenType.CONTROL
    for byte in range(256):
        tokens[GEMMA_FIRST_BYTE + byte], types[GEMMA_FIRST_BYTE + byte] = f"<0x{byte:02X}>", TokenType.BYTE
    tokens[GEMMA_FIRST_BYTE + 256] = "▁"  # a space
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(vocab_size)])
    writer.add_token_types(types)
    writer.add_bos_token_id(GEMMA_SPECIAL["<bos>"])
    writer.add_eos_token_id(GEMMA_SPECIAL["<eos>"])
    writer.add_eot_token_id(GEMMA_SPECIAL["<end_of_turn>"])
    writer.add_unk_token_id(GEMMA_SPECIAL["<unk>"])
    writer.add_pad_token_id(GEMMA_SPECIAL["<pad>"])
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def random_rows(stored: Type, columns: int, generator: torch.Generator, num_bytes: int) -> np.ndarray[Any, Any]:
    """Random weights with zero mean and variance 1 / columns as a file stores them, uint8 [blocks, bytes]."""
    block_size, block_bytes = GGML_QUANT_SIZES[stored]
    shape, deviation = (max(1, num_bytes // block_bytes), block_size), columns**-0.5
    if stored.name in GgmlType.__members__:
        rows = random_blocks(GgmlType[stored.name], shape, deviation, generator)
    else:
        dtype = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}[stored]
        rows = torch.empty(shape).normal_(0.0, deviation, generator=generator).to(dtype).view(torch.uint8)
    return rows.numpy()


def write_header(writer: gguf.GGUFWriter, tensors: list[StoredTensor]) -> None:
    """Write the file up to the first byte of its tensors."""
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def write_data(path: Path, tensors: list[StoredTensor], buffer_bytes: int = BUFFER_BYTES) -> None:
    """Append the tensors to the header. Each begins at a random block of a buffer that it repeats."""
    generator, random = torch.Generator().manual_seed(1), Random(1)
    buffers: dict[tuple[Type, int], np.ndarray[Any, Any]] = {}
    with path.open("ab") as file:
        for tensor in tensors:
            file.write(bytes(-file.tell() % GGUF_DEFAULT_ALIGNMENT))
            if tensor.values is not None:
                file.write(tensor.values.tobytes())
                continue
            key = tensor.type, tensor.shape[-1]
            if key not in buffers:
                buffers[key] = random_rows(*key, generator, buffer_bytes)
            data, block_bytes = memoryview(buffers[key].reshape(-1)), buffers[key].shape[1]
            start, left = random.randrange(len(buffers[key])) * block_bytes, tensor.num_bytes
            while left:
                left -= file.write(data[start : start + left])
                start = 0
        file.write(bytes(-file.tell() % GGUF_DEFAULT_ALIGNMENT))


def leave_out(path: Path, tensors: list[StoredTensor]) -> None:
    """Give the file its size with a hole in place of the tensors."""
    end = path.stat().st_size
    for tensor in tensors:
        end += -end % GGUF_DEFAULT_ALIGNMENT + tensor.num_bytes
    with path.open("r+b") as file:
        file.truncate(end + -end % GGUF_DEFAULT_ALIGNMENT)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="Hub id with a bundled configuration, or a folder with config.json.")
    parser.add_argument("type", choices=FILE_TYPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sparse", action="store_true", help="Leave the weights out: --load-format dummy reads none.")
    parser.add_argument("--head", choices=HEAD_TYPES, help="Format of the head (a tied one: of the embedding).")
    args = parser.parse_args()
    started_s = time.perf_counter()
    config = text_config(args.model)
    sizes, tensors = layout(config, args.type, args.head)
    write_header(new_writer(args.out, config, sizes, args.type), tensors)
    if args.sparse:
        leave_out(args.out, tensors)
    else:
        write_data(args.out, tensors)
    seconds, size_gb = time.perf_counter() - started_s, args.out.stat().st_size / 1e9
    print(f"{args.out}: {size_gb:.2f} GB in {seconds:.1f} s, {size_gb / seconds:.2f} GB/s")


if __name__ == "__main__":
    main()
