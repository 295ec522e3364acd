"""Reading parts of safetensors files: any part is what slicing the tensor gives, and broken files are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints import tensor_file
from meltcore.models.checkpoints.safetensors_file import SafetensorsFile

TENSORS = {
    "experts": torch.randn(6, 40, 50).bfloat16(),
    "matrix": torch.randn(30, 20),
    "bias": torch.randn(7, dtype=torch.float16),
    "number": torch.tensor(3.5),
    "nothing": torch.empty(0, 4),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shard") / "model.safetensors"
    save_file(TENSORS, path, {"format": "pt"})
    return path


@st.composite
def parts(draw: st.DrawFn) -> tuple[str, tuple[slice, ...]]:
    name = draw(st.sampled_from(sorted(TENSORS)))
    index = []
    for size in TENSORS[name].shape[: draw(st.integers(0, 3))]:
        first = draw(st.integers(0, size))
        index.append(draw(st.sampled_from((slice(None), slice(first, draw(st.integers(first, size)))))))
    return name, tuple(index)


@settings(max_examples=150)
@given(part=parts(), buffered=st.booleans(), run_bytes=st.sampled_from((1, 100, 2**20)))
def test_part_equals_the_slice(path: Path, part: tuple[str, tuple[slice, ...]], buffered: bool, run_bytes: int) -> None:
    name, index = part
    buffer = torch.full((5000,), 77, dtype=torch.uint8) if buffered else None
    with pytest.MonkeyPatch.context() as patch, SafetensorsFile(path) as shard:
        patch.setattr(tensor_file, "_MIN_RANGE_BYTES", run_bytes)
        found = shard.read(name, index, buffer)
    assert torch.equal(found, TENSORS[name][index] if index else TENSORS[name])
    assert found.dtype == TENSORS[name].dtype


def test_entries_have_type_and_shape(path: Path) -> None:
    with SafetensorsFile(path) as shard:
        found = {name: (shard.dtype(name), torch.Size(entry.shape)) for name, entry in shard.entries.items()}
    assert found == {name: (tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()}


def header_of(fields: object) -> bytes:
    header = json.dumps(fields).encode()
    return len(header).to_bytes(8, "little") + header


# threat: a model file: a safetensors header names nothing outside its file
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a tensor file",
        (10**9).to_bytes(8, "little") + b"{}",
        header_of([]),
        header_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}) + bytes(7),
        header_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}) + bytes(8),
        header_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}) + bytes(8),
        header_of({"a": {"dtype": "Q7", "shape": [2], "data_offsets": [0, 9]}}) + bytes(8),
        header_of({"a": {"dtype": 7, "shape": [2], "data_offsets": [0, 8]}}) + bytes(8),
        header_of({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}) + bytes(8),
        header_of({"a": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}}) + bytes(8),
        header_of({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}) + bytes(8),
        header_of({"a": {"shape": [2]}}),
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
    ],
)
def test_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.safetensors cannot be read"):
        SafetensorsFile(path)


@pytest.mark.parametrize("kind", ["I8", "U8", "BOOL", "I64", "F8_E5M2", "F4", "Q7"])
def test_unsupported_type_is_named_when_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header_of({"a": {"dtype": kind, "shape": [2], "data_offsets": [0, 4]}}) + bytes(4))
    with (
        SafetensorsFile(path) as shard,
        pytest.raises(ConfigError, match=rf"model\.safetensors: a is stored as {kind}; .*F16"),
    ):
        shard.read("a")


@pytest.mark.parametrize(("kind", "dtype"), [("F8_E4M3", torch.float8_e4m3fn), ("I32", torch.int32)])
def test_quantized_types_are_read_where_a_loader_asks_for_them(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    values = torch.tensor([1, 3]).to(dtype)
    header = header_of({"a": {"dtype": kind, "shape": [2], "data_offsets": [0, values.nbytes]}})
    path.write_bytes(header + values.view(torch.uint8).numpy().tobytes())
    with SafetensorsFile(path) as shard:
        assert torch.equal(shard.read("a").float(), values.float())
        shard.check_dtype("a", (dtype,))
        with pytest.raises(ConfigError, match=rf"a is stored as {kind}; weights must be unquantized: F64"):
            shard.check_dtype("a", ())
        other, name = (torch.int32, "I32") if kind == "F8_E4M3" else (torch.float8_e4m3fn, "F8_E4M3")
        with pytest.raises(ConfigError, match=rf"a is stored as {kind}; quantization_config asks for {name}"):
            shard.check_dtype("a", (other,))


def test_missing_and_shrinking_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none cannot be read"):
        SafetensorsFile(tmp_path / "none")
    path = tmp_path / "short.safetensors"
    save_file({"a": torch.ones(100)}, path)
    with SafetensorsFile(path) as shard:
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(ConfigError, match="shorter"):
            shard.read("a")
