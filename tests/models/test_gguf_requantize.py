"""GGUF files that are quantized again: their values are those of the gguf package, rounded once more."""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_tools import add_tokenizer, config_of, finish, write_model
from test_gguf import BLOCKS_OF_32, BLOCKS_OF_256, reference_of

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.gguf.gguf_file import GGUFArray, GGUFModel
from meltcore.models.writers.gguf_requantize import check_requantizable, requantize

Q8_0, Q4_0 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0
# Bytes of the float16 scales in a block, of formats that are not served.
SCALES = {"IQ2_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "Q3_K": (108,)}


def write(path: Path, kinds: dict[str, str], columns: int = 256) -> Path:
    """Write tensors of random blocks by their types, with metadata of several types."""
    writer, draw = gguf.GGUFWriter(path, "falcon"), np.random.default_rng(0)
    writer.add_string("general.name", "a model")
    writer.add_uint32("general.file_type", 99)
    writer.add_int8("falcon.small", -3)
    writer.add_array("falcon.numbers", [1.5, -2.5])
    add_tokenizer(writer, tokens=["a", "b", "ü"])
    for name, kind in kinds.items():
        raw = GGMLQuantizationType[kind]
        size, block_bytes = gguf.GGML_QUANT_SIZES[raw]
        if kind in ("F32", "F16"):
            values = draw.standard_normal((8, columns)).astype(np.float32 if kind == "F32" else np.float16)
            writer.add_tensor(name, values, raw_dtype=raw)
            continue
        blocks = draw.integers(0, 256, (8, columns // size, block_bytes), dtype=np.uint8)
        for first in SCALES.get(kind, (0,)):
            scale = (draw.random((8, columns // size)) + 0.5).astype(np.float16) * np.float16(0.01)
            blocks[..., first : first + 2] = scale[..., None].view(np.uint8)
        writer.add_tensor(name, blocks.reshape(8, -1), raw_dtype=raw)
    return finish(writer, path)


def assert_requantized(source: Path, written: Path, to: GGMLQuantizationType, head: str) -> None:
    before, after = GGUFModel(source), GGUFModel(written)
    assert list(after.tensors) == list(before.tensors)
    for name, tensor in before.tensors.items():
        expected = before.file_by_tensor[name].blocks(name)
        found = after.tensors[name]
        assert found.shape == tensor.shape
        is_kept = len(tensor.shape) == 1 or "inp" in name
        assert found.type == (tensor.type if is_kept else Q8_0 if name == head else to)
        if found.type != tensor.type:
            expected = quantize(dequantize(expected, tensor.type), found.type)
        assert np.array_equal(after.file_by_tensor[name].blocks(name), expected), name


@pytest.mark.parametrize("to", [Q8_0, Q4_0], ids=lambda each: each.name)
def test_values_are_rounded_once_more_and_the_rest_is_copied(tmp_path: Path, to: GGMLQuantizationType) -> None:
    """Also of formats and of an architecture that are not served, and of tensors that have their type already."""
    kinds = dict(zip((f"blk.{index}.w.weight" for index in range(9)), [*SCALES, "Q8_0", "F16", "Q4_0"], strict=True))
    source = write(tmp_path / "model.gguf", {"token_embd.weight": "Q3_K", "output.weight": "IQ2_XXS"} | kinds)
    model = GGUFModel(source)
    check_requantizable(model, allow_requantize=True)
    requantize(model, tmp_path / "new.gguf", to, lambda *_: None)
    assert_requantized(source, tmp_path / "new.gguf", to, "output.weight")
    after = GGUFModel(tmp_path / "new.gguf")
    assert after.metadata["general.file_type"] == {Q8_0: 7, Q4_0: 2}[to]
    for key, value in model.metadata.items():
        if isinstance(value, GGUFArray):
            assert model.files[0].raw_value(key) == after.files[0].raw_value(key)
        elif key != "general.file_type":
            assert after.metadata[key] == value
    assert after.texts("tokenizer.ggml.tokens") == ["a", "b", "ü"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "store"), [("llama", "Q5_K"), ("qwen3_moe", "Q4_1"), ("gemma3_text", "Q4_K_M"), ("qwen2", "F16")]
)
def test_requantized_model_is_read_as_the_same_network(tmp_path: Path, family: str, store: str) -> None:
    reference = reference_of(family, **(BLOCKS_OF_32 if store == "Q4_1" else BLOCKS_OF_256))
    source = write_model(tmp_path / "model.gguf", reference, store)
    arguments = ["quantize", str(source), "--to", "q8_0", "--out", str(tmp_path / "new.gguf")]
    assert main([*arguments, *(["--allow-requantize"] if store != "F16" else [])]) == 0
    assert config_of(tmp_path / "new.gguf") == config_of(source)
    head = "token_embd.weight" if reference.config.tie_word_embeddings else "output.weight"
    assert_requantized(source, tmp_path / "new.gguf", Q8_0, head)
    engine = tools.open_engine(tmp_path / "new.gguf", max_model_len=64)
    engine.add("one", [1, 2, 3], max_tokens=3)
    assert len(engine.run()["one"]) == 3


def test_quantized_input_needs_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "model.gguf", {"token_embd.weight": "Q5_0", "a.weight": "IQ2_XXS", "b.weight": "Q5_0"})
    arguments = ["quantize", str(source), "--out", str(tmp_path / "new.gguf"), "--to"]
    assert main([*arguments, "q8_0"]) == 2
    assert capsys.readouterr().err == (
        f"meltcore quantize: {source} is quantized already: it stores 2 tensors as Q5_0, 1 tensor as IQ2_XXS. Rounding "
        "rounded values loses more than quantizing the original model; --allow-requantize does it nevertheless\n"
    )
    assert main([*arguments, "fp8", "--allow-requantize"]) == 2
    assert f"`meltcore serve {source} --quantization fp8`" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("kind", ["imatrix", "adapter", "controlvector"])
def test_only_networks_are_quantized_again(tmp_path: Path, kind: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", kind)
    writer.add_tensor("v.w.weight", np.ones((8, 32), dtype=np.float32))
    model = GGUFModel(finish(writer, tmp_path / "a.gguf"))
    with pytest.raises(ConfigError, match=rf"a\.gguf is an? .* \(general\.architecture is '{kind}'\), and no model"):
        check_requantizable(model, allow_requantize=False)


def test_what_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"token_embd.weight": "Q5_0", "blk.0.w.weight": "F32"})
    with pytest.raises(ConfigError, match=r"model\.gguf is the source, so it is not replaced"):
        requantize(GGUFModel(source), source, Q8_0, lambda *_: None, overwrite=True)
    unreadable = write(tmp_path / "unreadable.gguf", {"token_embd.weight": "Q8_K"})
    with pytest.raises(ConfigError, match=r"unreadable\.gguf: Q8_K cannot be read"):
        check_requantizable(GGUFModel(unreadable), allow_requantize=True)
    for value, message in ((np.inf, "not finite numbers"), (9e6, r"a value of magnitude 9e\+06; Q8_0 holds up to")):
        content = bytearray(source.read_bytes())
        offset = GGUFModel(source).tensors["blk.0.w.weight"].offset
        content[offset : offset + 4] = np.float32(value).tobytes()
        damaged = tmp_path / "damaged.gguf"
        damaged.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"damaged\.gguf: blk\.0\.w\.weight has .*{message}"):
            requantize(GGUFModel(damaged), tmp_path / "new.gguf", Q8_0, lambda *_: None)
        damaged.unlink()
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", "unreadable.gguf"}


@pytest.mark.parametrize(
    ("name", "value"), [("blk.0.norm.weight", np.float32(np.nan)), ("blk.0.w.weight", np.float16(np.inf))]
)
def test_tensors_that_are_copied_are_checked_too(tmp_path: Path, name: str, value: np.generic) -> None:
    """Vectors, and the scale of a block of the format that is written."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "falcon")
    writer.add_tensor("blk.0.norm.weight", np.ones(64, dtype=np.float32))
    writer.add_tensor("blk.0.w.weight", quantize(np.ones((4, 64), dtype=np.float32), Q8_0), raw_dtype=Q8_0)
    source = finish(writer, tmp_path / "model.gguf")
    content, offset = bytearray(source.read_bytes()), GGUFModel(source).tensors[name].offset
    content[offset : offset + value.nbytes] = value.tobytes()
    source.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"model\.gguf: {name} has values that are not finite numbers"):
        requantize(GGUFModel(source), tmp_path / "new.gguf", Q8_0, lambda *_: None)


def test_rows_that_are_no_whole_blocks_stay_unquantized(tmp_path: Path) -> None:
    """With all experts of their layer."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    shapes = {"ffn_gate_exps": (2, 48, 64), "ffn_up_exps": (2, 48, 64), "ffn_down_exps": (2, 64, 48), "attn_q": (8, 40)}
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(shape, dtype=np.float16))
    writer.add_tensor("blk.0.attn_k.weight", np.ones((8, 64), dtype=np.float16))
    source = finish(writer, tmp_path / "model.gguf")
    requantize(GGUFModel(source), tmp_path / "new.gguf", Q4_0, lambda *_: None)
    types = {name: tensor.type.name for name, tensor in GGUFModel(tmp_path / "new.gguf").tensors.items()}
    assert types.pop("blk.0.attn_k.weight") == "Q4_0"
    assert set(types.values()) == {"F16"}
