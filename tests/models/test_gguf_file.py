"""GGUF files that are cut short, hostile or unsupported are refused by name, quickly and without allocating."""

from __future__ import annotations

import os
import random
import struct
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType, GGUFValueType
from gguf_tools import add_tokenizer, finish
from waiting import WAIT_S

from meltcore.common.errors import ConfigError, UnservableModelError
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL, find_gguf, find_task, open_checkpoint
from meltcore.models.checkpoints.gguf.gguf_config import read_config
from meltcore.models.checkpoints.gguf.gguf_file import GGUFFile, GGUFModel, gguf_checkpoints

F32 = int(GGMLQuantizationType.F32)
TEXT, ARRAY, UINT32 = (int(each) for each in (GGUFValueType.STRING, GGUFValueType.ARRAY, GGUFValueType.UINT32))
HIDDEN, VOCAB = 32, 40
LIMIT_S, LIMIT_BYTES = 2.0, 2**20


def text(value: bytes | str) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def tensor(name: str = "w", dims: tuple[int, ...] = (8, 2), kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_of(
    *parts: bytes, tensors: int = 0, values: int = 0, magic: bytes = b"GGUF", version: int = 3, data: int = 0
) -> bytes:
    header = magic + struct.pack("<IQQ", version, tensors, values) + b"".join(parts)
    return header + bytes(-len(header) % 32 + data)


HOSTILE = {
    "empty": (b"", "cannot be read"),
    "other format": (b"not a GGUF file" * 9, r"begins with b'not '; a GGUF file begins with b'GGUF'"),
    "magic of big-endian": (file_of(magic=b"FUGG"), "big-endian GGUF; little-endian is supported"),
    "big-endian": (file_of(version=3 << 24), "big-endian GGUF"),
    "version 1": (file_of(version=1), "GGUF version 1; supported: 2, 3"),
    "version 4": (file_of(version=4), "GGUF version 4; supported: 2, 3"),
    "cut in the header": (file_of()[:10], "the number of tensors takes 8 bytes from byte 8 on; the file has 10"),
    "2^60 tensors": (file_of(tensors=2**60), f"has {2**60} tensors; at most 65536 are read"),
    "2^60 values": (file_of(values=2**60), f"has {2**60} metadata values; at most 65536 are read"),
    "65,537 tensors that are there": (
        file_of(*(tensor(f"{index}") for index in range(2**16 + 1)), tensors=2**16 + 1),
        "has 65537 tensors; at most 65536",
    ),
    "65,537 values that are there": (
        file_of(*(text(f"{index}") + struct.pack("<II", UINT32, 7) for index in range(2**16 + 1)), values=2**16 + 1),
        "has 65537 metadata values; at most 65536",
    ),
    "tensors beyond the end": (file_of(tensors=9), "takes 4 bytes from byte 32 on; the file has 32"),
    "long key": (file_of(struct.pack("<Q", 2**62), values=1), "takes 4611686018427387904 bytes from byte 32 on"),
    "long text": (file_of(text("a.b") + struct.pack("<IQ", TEXT, 2**63), values=1), "a.b takes 9223372036854775808"),
    "key is no UTF-8": (file_of(text(b"\xff\xfe"), values=1), "is not UTF-8"),
    "unknown value type": (file_of(text("a.b") + struct.pack("<I", 99), values=1), "a.b has the unknown type 99"),
    "long array": (
        file_of(text("a.b") + struct.pack("<IIQ", ARRAY, UINT32, 2**61), values=1),
        "a.b takes 9223372036854775808 bytes",
    ),
    "long array of texts": (
        file_of(text("a.b") + struct.pack("<IIQ", ARRAY, TEXT, 2**21), values=1, data=64),
        "text [0-9]+ of 2097152 in a.b",
    ),
    "2^61 texts": (
        file_of(text("a.b") + struct.pack("<IIQ", ARRAY, TEXT, 2**61), values=1, data=64),
        "the arrays up to a.b have 2305843009213693952 texts; at most 2097152 are read",
    ),
    "many texts in two arrays": (
        file_of(
            text("a.b") + struct.pack("<IIQQ", ARRAY, TEXT, 1, 0),
            text("a.c") + struct.pack("<IIQ", ARRAY, TEXT, 2**21),
            values=2,
        ),
        "the arrays up to a.c have 2097153 texts; at most 2097152 are read",
    ),
    "text in an array beyond the end": (
        file_of(text("a.b") + struct.pack("<IIQQ", ARRAY, TEXT, 2, 2**63), values=1),
        "text 1 of 2 in a.b",
    ),
    "array of arrays": (
        file_of(text("a.b") + struct.pack("<IIQ", ARRAY, ARRAY, 2**61), values=1),
        "a.b is an array of arrays",
    ),
    "key twice": (file_of(*[text("a.b") + struct.pack("<II", UINT32, 7)] * 2, values=2), "metadata has a.b twice"),
    "tensor twice": (file_of(tensor(), tensor(), tensors=2, data=64), "tensor w is there twice"),
    "2^60 dimensions": (
        file_of(text("w") + struct.pack("<I", 2**32 - 1), tensors=1),
        "w has 4294967295 dimensions; supported: 1 to 4",
    ),
    "no dimensions": (file_of(tensor(dims=()), tensors=1), "w has 0 dimensions"),
    "a dimension of 2^60": (
        file_of(tensor(dims=(2**60, 2**60)), tensors=1, data=64),
        r"w, F32 \[1152921504606846976, 1152921504606846976\], ends at byte [0-9]+; the file has",
    ),
    "a dimension of 0": (file_of(tensor(dims=(8, 0)), tensors=1), "w has shape .* no dimension of 0"),
    "half a block": (
        file_of(tensor(dims=(40, 2), kind=GGMLQuantizationType.Q8_0), tensors=1, data=128),
        r"w has shape \[2, 40\]; Q8_0 needs a multiple of 32 values per row",
    ),
    "unknown type": (
        file_of(tensor(kind=77), tensors=1, data=64),
        "stores 1 tensor as unknown type 77 .first: w.; supported: F32, .*; take a file of the model in one",
    ),
    "removed type": (
        file_of(*[tensor(name, kind=kind) for name, kind in (("v", 4), ("w", 36))], tensors=2, data=64),
        "1 tensor as Q4_2, which ggml has removed, 1 tensor as IQ4_NL_4_4, which ggml has removed .first",
    ),
    "offset beyond the end": (file_of(tensor(offset=2**62), tensors=1, data=64), "w, F32 .* ends at byte 46116860"),
    "offset that is not aligned": (file_of(tensor(offset=8), tensors=1, data=72), "w begins at 8, .* multiple of 32"),
    "overlapping tensors": (
        file_of(tensor(), tensor("v", offset=32), tensors=2, data=96),
        "v begins at byte [0-9]+, within w",
    ),
    "cut in the weights": (file_of(tensor(), tensors=1, data=63), "w, F32 .* the file has .* cut short"),
    "alignment of 0": (
        file_of(text("general.alignment") + struct.pack("<II", UINT32, 0), values=1),
        "general.alignment must be a power of two up to 65536; got 0",
    ),
    "alignment of 2^31": (
        file_of(text("general.alignment") + struct.pack("<II", UINT32, 2**31), values=1),
        "general.alignment must be a power of two up to 65536; got 2147483648",
    ),
}


def refused_quickly(path: Path, message: str) -> None:
    """Check that opening raises ConfigError that names the file, within the limits of time and memory."""
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(ConfigError, match=message) as error:
            open_checkpoint(str(path), files="text")
        assert time.process_time() - started < LIMIT_S
        assert tracemalloc.get_traced_memory()[1] < LIMIT_BYTES
    finally:
        tracemalloc.stop()
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


# threat: a model file: lengths in a GGUF header are checked before they are used
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    refused_quickly(path, message)


def test_named_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    done: list[str] = []

    def read() -> None:
        with pytest.raises(ConfigError) as raised:
            GGUFFile(tmp_path / "pipe.gguf")
        done.append(str(raised.value))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(timeout=WAIT_S)
    assert done == [f"{tmp_path / 'pipe.gguf'} cannot be read: it is not a regular file"]


@pytest.mark.slow
def test_header_is_bounded_in_a_file_of_any_size(tmp_path: Path) -> None:
    """A sparse file of 8 TiB: as many empty texts as are read, then numbers beyond the 64 MiB of a header."""
    path = tmp_path / "model.gguf"
    texts = text("a.a") + struct.pack("<IIQ", ARRAY, TEXT, 2**21) + bytes(8 * 2**21)
    path.write_bytes(file_of(texts, text("a.b") + struct.pack("<IIQ", ARRAY, UINT32, 2**40), values=2))
    with path.open("r+b") as file:
        file.truncate(2**43)
    started = time.process_time()
    with pytest.raises(
        ConfigError, match=r"a\.b takes 4398046511104 bytes from byte [0-9]+ on; a header may have 6710"
    ):
        GGUFFile(path)
    assert time.process_time() - started < LIMIT_S


def write(
    path: Path,
    change: dict[str, Any] | None = None,
    *,
    kind: str = "F32",
    tokens: bool = True,
    extra: str | None = None,
) -> Path:
    """Write the header of a Qwen3 of one layer. change: metadata to replace, None to leave a key out.

    extra: the name of one more tensor.
    """
    metadata: dict[str, Any] = {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": 1,
        "feed_forward_length": 48,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    writer = gguf.GGUFWriter(path, "qwen3")
    if tokens:
        add_tokenizer(writer, tokens=[f"t{index}" for index in range(VOCAB)])
    for key, value in (metadata | (change or {})).items():
        full_key = key if key.startswith(("tokenizer.", "general.", "split.")) else f"qwen3.{key}"
        writer.kv_data[0].pop(full_key, None)
        if value is not None:
            writer.add_key_value(full_key, value, GGUFValueType.get_type(value))
    raw = GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[raw]
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), dtype=np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((256, 256 // block * block_bytes), dtype=np.uint8), raw_dtype=raw)
    if extra is not None:
        writer.add_tensor(extra, np.zeros(4, dtype=np.float32))
    return finish(writer, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "falcon"}, "general.architecture is 'falcon'; supported: gemma3, granite, llama"),
        ({"general.architecture": None}, "general.architecture is None"),
        ({"context_length": None}, "lacks qwen3.context_length"),
        ({"context_length": 2**30}, "qwen3.context_length must be a whole number from 2 to 16777216; got 1073741824"),
        ({"context_length": "long"}, "qwen3.context_length must be a whole number .*; got 'long'"),
        ({"block_count": 2}, "block_count is 2; the file has tensors of 1 layers"),
        ({"embedding_length": 64}, r"token_embd.weight has shape \[40, 32\]; it must be \[vocabulary, 64\]"),
        (
            {"attention.head_count": 3, "attention.head_count_kv": 2},
            "head_count must be a multiple of head_count_kv, 2",
        ),
        ({"attention.head_count_kv": [1, 2]}, r"head_count_kv differs between layers: \[1, 2\]"),
        (
            {"attention.key_length": None, "embedding_length": 32, "attention.head_count": 3},
            "multiple of head_count, 3",
        ),
        ({"attention.value_length": 8}, "qwen3.attention.value_length is 8, which is not computed here"),
        ({"rope.dimension_count": 8}, "qwen3.rope.dimension_count is 8, which is not computed here"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "rope.scaling.type is 'longrope'"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"rope.scaling.factor": 0.5}, "qwen3.rope.scaling.factor must be a number from 1 to 1e6; got 0.5"),
        ({"rope.freq_base": 0.5}, "qwen3.rope.freq_base must be a number from 1 to 1e12; got 0.5"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon must be a number above 0"),
        ({"attention.sliding_window": 64}, "qwen3.attention.sliding_window is 64, which is not computed here"),
        ({"expert_count": 8}, "qwen3.expert_count is 8, which is not computed here"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, which is not computed here"),
        ({"attention.scale": 0.25}, "qwen3.attention.scale is 0.25, which is not computed here"),
        ({"attention.temperature_scale": 0.1}, "qwen3.attention.temperature_scale is 0.1, which is not computed here"),
        ({"embedding_scale": 12.0}, "qwen3.embedding_scale is 12.0, which is not computed here"),
        ({"attention.causal": False}, "attention.causal is False, which is not computed here"),
        ({"tokenizer.ggml.tokens": None}, r"has no tokenizer \(tokenizer.ggml.tokens\); name one with --tokenizer"),
        ({"tokenizer.ggml.tokens": [f"t{i}" for i in range(41)]}, "has 41 tokens; token_embd.weight has 40"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of texts; got an array of 2 INT32"),
        ({"tokenizer.ggml.eot_token_id": 2.0}, "eot_token_id must be from 0 to 39; got 2.0"),
        ({"tokenizer.ggml.eos_token_id": "</s>"}, "eos_token_id must be from 0 to 39; got '</s>'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 values for 40 tokens"),
        ({"split.count": 2}, "split.count is 2, and the file's name asks for 1"),
        ({"split.tensors.count": 9}, "split.tensors.count is 9; the parts hold 2"),
    ],
)
def test_wrong_metadata_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "model.gguf", change)
    refused_quickly(path, message)


@pytest.mark.parametrize("kind", ["IQ1_S", "IQ2_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "NVFP4", "Q8_K", "I8"])
def test_unsupported_weights_are_named_with_their_type(tmp_path: Path, kind: str) -> None:
    refused_quickly(
        write(tmp_path / "model.gguf", kind=kind),
        rf"model\.gguf: stores 1 tensor as {kind} \(first: blk\.0\.attn_q\.weight\); supported: F32, F16, BF16, Q4_0.*"
        r"MXFP4; take a file of the model in one of these"
        + ("$" if kind in ("Q8_K", "I8") else r", or write one: meltcore quantize .* --to q8_0 --allow-requantize$"),
    )


def test_all_reasons_of_a_refusal_are_named_together(tmp_path: Path) -> None:
    change = {"general.architecture": "falcon", "tokenizer.ggml.tokens": None}
    refused_quickly(
        write(tmp_path / "model.gguf", change, kind="IQ2_S"),
        r"model\.gguf: 3 reasons: \(1\) general\.architecture is 'falcon'; .*; \(2\) stores 1 tensor as IQ2_S .*; "
        r"\(3\) has no tokenizer \(tokenizer\.ggml\.tokens\); name one with --tokenizer$",
    )
    with pytest.raises(UnservableModelError) as error:
        open_checkpoint(str(tmp_path / "model.gguf"), files="text", tokenizer=BUNDLED_MODEL)
    assert len(error.value.reasons) == 2


@pytest.mark.parametrize(
    "change", [{"general.architecture": "falcon"}, {"expert_count": 8}, {"final_logit_softcapping": 30.0}], ids=str
)
@pytest.mark.parametrize("kind", ["IQ1_S", "IQ2_S"])
def test_another_format_is_no_remedy_for_another_architecture(
    tmp_path: Path, change: dict[str, Any], kind: str
) -> None:
    refused_quickly(
        write(tmp_path / "model.gguf", change, kind=kind),
        rf"2 reasons: .*; \(2\) stores 1 tensor as {kind} .*; take a file of the model in one of these$",
    )


@pytest.mark.parametrize("kind", [each for each in GgmlType if each.block_size == 256], ids=lambda each: each.name)
def test_rows_and_bytes_of_k_quants_are_checked(tmp_path: Path, kind: GgmlType) -> None:
    """A row that is no whole number of blocks, blocks cut short, and a shape of 2^60 rows."""
    for dims, data, message in (
        ((288, 2), 1024, rf"w has shape \[2, 288\]; {kind.name} needs a multiple of 256 values per row"),
        ((256, 2), 2 * kind.block_bytes - 1, rf"w, {kind.name} \[2, 256\], ends at byte .* cut short"),
        ((256, 2**60), 64, rf"w, {kind.name} \[1152921504606846976, 256\], ends at byte"),
    ):
        path = tmp_path / "model.gguf"
        path.write_bytes(file_of(tensor(dims=dims, kind=kind), tensors=1, data=data))
        refused_quickly(path, message)


def test_blocks_are_those_that_were_written(tmp_path: Path) -> None:
    """The seam for quantized weights: the bytes of whole rows, memory-mapped, with GGML's own sizes of blocks."""
    values = np.random.default_rng(0).standard_normal((6, 512), dtype=np.float32)
    for kind in ("Q8_0", "Q4_0"):
        raw = GGMLQuantizationType[kind]
        blocks = gguf.quants.quantize(values, raw)
        writer = gguf.GGUFWriter(tmp_path / f"{kind}.gguf", "qwen3")
        writer.add_tensor("first", np.zeros(3, dtype=np.float32))
        writer.add_tensor("w", blocks.reshape(2, 3, -1), raw_dtype=raw)
        file = GGUFFile(finish(writer, tmp_path / f"{kind}.gguf"))
        entry = file.tensors["w"]
        assert (entry.type.name, entry.shape) == (kind, (2, 3, 512))
        assert file.blocks("w").shape == (6, entry.row_bytes)
        assert np.array_equal(file.blocks("w"), blocks)
        assert not file.blocks("w").flags.owndata


def test_metadata_has_the_values_that_were_written(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen3")
    written = {"i8": -5, "u64": 2**60, "f32": 1e-6, "f64": 0.1, "yes": True, "text": "é日"}
    for add, (key, value) in zip(
        ("int8", "uint64", "float32", "float64", "bool", "string"), written.items(), strict=True
    ):
        getattr(writer, f"add_{add}")(key, value)
    writer.add_array("numbers", [1.5, 2.5])
    writer.add_array("texts", ["", "ü", "b"])
    file = GGUFFile(finish(writer, tmp_path / "a.gguf"))
    assert {key: file.metadata[key] for key in written} == written
    assert file.numbers("numbers").tolist() == [1.5, 2.5]
    assert file.texts("texts") == ["", "ü", "b"]


def test_parts_are_found_by_any_of_them(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3", split_max_tensors=1)
    for index in range(3):
        writer.add_tensor(f"w{index}", np.full(4, index, dtype=np.float32))
    finish(writer, tmp_path / "m.gguf")
    parts = [tmp_path / f"m-0000{index}-of-00003.gguf" for index in (1, 2, 3)]
    for part in parts:
        model = GGUFModel(part)
        assert [file.path for file in model.files] == parts
        assert list(model.tensors) == ["w0", "w1", "w2"]
        assert model.metadata["general.architecture"] == "qwen3"
    parts[1].rename(tmp_path / "part.gguf")
    with pytest.raises(ConfigError, match=r"one of 3 parts; missing: m-00002-of-00003\.gguf"):
        GGUFModel(parts[0])
    with pytest.raises(ConfigError, match=r"part\.gguf: split.no is 1, and the file's name asks for 0"):
        GGUFModel(tmp_path / "part.gguf")
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(parts[2].read_bytes())
    with pytest.raises(ConfigError, match=r"m-00002-of-00003\.gguf: split.no is 2, and the file's name asks for 1"):
        GGUFModel(parts[0])


@pytest.mark.parametrize("number", ["00000", "00002", "00003"])
def test_part_above_the_count_is_not_taken_for_the_first(tmp_path: Path, number: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "qwen3")
    writer.add_tensor("w", np.zeros(4, dtype=np.float32))
    finish(writer, tmp_path / "w.gguf").rename(tmp_path / "m-00001-of-00001.gguf")
    path = tmp_path / f"m-{number}-of-00001.gguf"
    with pytest.raises(ConfigError, match=rf"{path.name} is named part {int(number)} of 1; parts are numbered from 1"):
        GGUFModel(path)
    names = [path.name, "m-00001-of-00001.gguf"]
    assert gguf_checkpoints(names) == {name: [name] for name in names}


@pytest.mark.parametrize("name", ["blk", "blk.\u00b2.x", f"blk.{'9' * 5000}.x"])
def test_tensor_whose_name_has_no_layer_is_none_of_the_network(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model.gguf", extra=name)
    assert read_config(GGUFModel(path))["num_hidden_layers"] == 1


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "mmproj-a.gguf": ({"general.architecture": "clip"}, r"a multimodal projector \(general\.architecture is 'clip'\)"),
    "gemma-3-4b-it-mmproj-f16.gguf": (
        {"general.type": "mmproj"},
        r"a multimodal projector \(general\.type is 'mmproj'",
    ),
    "vision.gguf": ({"general.architecture": "clip"}, "a multimodal projector"),
    "imatrix.gguf": ({"general.type": "imatrix", "general.architecture": None}, "an importance matrix .*'imatrix'"),
    "a-Q8_0.imatrix.GGUF": ({"general.type": "imatrix"}, "an importance matrix"),
    "my-lora-f16.gguf": ({"general.type": "adapter"}, r"an adapter \(general\.type is 'adapter'\)"),
    "happy.gguf": ({"general.architecture": "controlvector"}, "a control vector"),
}


def write_vocabulary(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3")
    add_tokenizer(writer, tokens=["a", "b"])
    return finish(writer, path)


@pytest.mark.parametrize("name", KINDS)
def test_file_that_stands_beside_a_model_is_not_taken_for_it(tmp_path: Path, name: str) -> None:
    change, message = KINDS[name]
    write(tmp_path / "a.gguf")
    write(tmp_path / name, change, tokens=False)
    gguf_model = open_checkpoint(str(tmp_path), files="all").gguf
    assert gguf_model is not None
    assert gguf_model.path == tmp_path / "a.gguf"
    with pytest.raises(ConfigError, match=rf"{name}: it is {message}.*, and no model$"):
        open_checkpoint(str(tmp_path / name), files="all")
    (tmp_path / "a.gguf").unlink()
    with pytest.raises(ConfigError, match=rf"{name}: it is {message}.*, and no model$"):
        open_checkpoint(str(tmp_path), files="all")
    write_vocabulary(tmp_path / "vocab.gguf")
    with pytest.raises(
        ConfigError, match=r"has no GGUF file of a model: .*vocab\.gguf is a vocabulary \(it has no ten"
    ):
        open_checkpoint(str(tmp_path), files="all")
    (tmp_path / "config.json").write_text('{"architectures": []}')  # of random weights
    assert open_checkpoint(str(tmp_path), files="text").gguf is None


def test_name_of_a_model_does_not_make_it_a_projector(tmp_path: Path) -> None:
    """The header counts. A file that cannot be read is told by its name, and so is one of two models."""
    write(tmp_path / "merged-mmproj-imatrix.gguf")
    for name in ("m-MMPROJ-f16.gguf", "m.imatrix.gguf"):
        (tmp_path / name).write_bytes(b"cut short")
    opened = open_checkpoint(str(tmp_path), files="all").gguf
    assert opened is not None
    assert opened.path.name == "merged-mmproj-imatrix.gguf"
    write(tmp_path / "m.gguf")
    opened = open_checkpoint(str(tmp_path), files="all").gguf
    assert opened is not None
    assert opened.path.name == "m.gguf"


def test_first_part_without_tensors_is_no_vocabulary(tmp_path: Path) -> None:
    """As llama-gguf-split writes it with --no-tensor-first-split; beside parts of a projector."""
    write(tmp_path / "m-00002-of-00002.gguf", {"split.no": 1, "split.count": 2}, tokens=False)
    keys = {"split.no": 0, "split.count": 2}
    path = write(tmp_path / "m-00001-of-00002.gguf", keys)
    content = path.read_bytes()
    path.write_bytes(content[:8] + struct.pack("<Q", 0) + content[16 : content.index(b"token_embd.weight") - 8])
    for part in (1, 2):
        change = {"split.no": part - 1, "split.count": 2, "general.architecture": "clip"}
        file = write(tmp_path / f"p-0000{part}-of-00002.gguf", change, tokens=False)
        file.write_bytes(
            file.read_bytes().replace(b"token_embd", f"v.part{part}___".encode()).replace(b"blk.0", b"blk.%d" % part)
        )
    write_vocabulary(tmp_path / "ggml-vocab-a.gguf")
    opened = open_checkpoint(str(tmp_path), files="all").gguf
    assert opened is not None
    assert [file.path.name for file in opened.files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    with pytest.raises(ConfigError, match=r"p-00002-of-00002\.gguf: it is a multimodal projector"):
        open_checkpoint(str(tmp_path / "p-00002-of-00002.gguf"), files="all")


@pytest.mark.parametrize("name", ["sha256-0f9a", "MODEL.GGUF", "model.bin", "m-00001-of-00001.GGUF"])
def test_file_of_any_name_is_known_by_its_first_bytes(tmp_path: Path, name: str) -> None:
    """Ollama's blobs have no suffix. A folder with one is that file, beside others that are no GGUF."""
    write(tmp_path / "m.gguf").rename(tmp_path / name)
    (tmp_path / "sha256-ffff").write_text('{"temperature": 0.6}')
    for model in (tmp_path / name, tmp_path):
        opened = open_checkpoint(str(model), files="all")
        assert opened.gguf is not None
        assert opened.gguf.path == tmp_path / name
        assert find_gguf(str(model), "all") == tmp_path / name
        assert find_task(str(model)).name == "generation"
    with pytest.raises(ConfigError, match=r"sha256-ffff is a file, and not in GGUF; name the folder of a checkpoint"):
        open_checkpoint(str(tmp_path / "sha256-ffff"), files="all")
    (tmp_path / "sha256-ffff").write_bytes(b"FUGG" + bytes(60))
    with pytest.raises(ConfigError, match="sha256-ffff: the file is big-endian GGUF"):
        open_checkpoint(str(tmp_path / "sha256-ffff"), files="all")


def test_folder_with_one_checkpoint_is_opened_and_several_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"of a vision projector")
    opened = open_checkpoint(str(tmp_path), files="all")
    assert opened.config == read_config(GGUFModel(tmp_path / "a.gguf"))
    assert opened.config["architectures"] == ["Qwen3ForCausalLM"]
    write(tmp_path / "b.gguf")
    with pytest.raises(ConfigError, match=r"has 2 GGUF checkpoints, so name one of them: a\.gguf, b\.gguf"):
        open_checkpoint(str(tmp_path), files="all")
    for name in ("none.gguf", "NONE.GGUF"):
        with pytest.raises(ConfigError, match=rf"{name}: no such file"):
            open_checkpoint(str(tmp_path / name), files="all")


def test_damaged_headers_give_config_errors(tmp_path: Path) -> None:
    """Bytes of a good header changed at random: the file is read, or refused, never anything else."""
    path = write(tmp_path / "model.gguf")
    content, generator = path.read_bytes()[:4096], random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        path.write_bytes(damaged[: generator.choice((len(damaged), generator.randrange(len(damaged))))])
        try:
            open_checkpoint(str(path), files="text")
        except ConfigError:
            refused += 1
    assert refused > 100
