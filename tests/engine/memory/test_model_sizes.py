"""Sizes of models that a child process reads: the bytes of engines, one child for all, and its end in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import WAIT_S

from meltcore.common.errors import ConfigError
from meltcore.common.process import CompletedRun
from meltcore.engine.memory import model_sizes
from meltcore.engine.memory.memory_needs import UnknownSizesError, engine_needs, read_model_sizes
from meltcore.engine.memory.model_sizes import SizeRequest, read_sizes
from meltcore.engine.synthesis.synthesis import STEPS, load_synthesis_model, weight_bytes
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.settings.fleet_spec import ModelSection
from meltcore.text.synthesis.vocabulary import load_vocabulary

# Bytes of weights of published shapes, counted from configurations by other code at commit d6d1b1fa.
WEIGHTS: list[tuple[int, dict[str, Any]]] = [
    (5_335_949_312, {"shapes": "allenai/OLMo-2-0425-1B-Instruct", "format": "q8_0", "device": "cpu"}),
    (2_062_666_752, {"shapes": "google/gemma-3-4b-it", "format": "q8_0", "tensor_parallel_size": 2}),
    (17_223_756_800, {"shapes": "google/gemma-3-27b-it", "format": "q4_0"}),
    (4_652_843_008, {"shapes": "meta-llama/Llama-3.1-8B-Instruct", "format": "q4_0"}),
    (1_910_839_296, {"shapes": "microsoft/Phi-3-mini-4k-instruct", "tensor_parallel_size": 4}),
    (1_192_099_840, {"shapes": "Qwen/Qwen3-0.6B"}),
    (1_503_395_840, {"shapes": "Qwen/Qwen3-0.6B", "device": "cpu"}),
    (6_179_874_816, {"shapes": "Qwen/Qwen3-8B-AWQ"}),
    (31_518_281_728, {"shapes": "Qwen/Qwen3-8B-AWQ", "device": "cpu"}),
    (32_452_374_528, {"shapes": "Qwen/Qwen3-30B-A3B", "format": "q8_0"}),
    (15_666_507_776, {"shapes": "Qwen/Qwen3-30B-A3B", "quantization": "fp8", "tensor_parallel_size": 2}),
    (31_174_545_408, {"shapes": "Qwen/Qwen3-30B-A3B-FP8"}),
    (34_682_182_912, {"shapes": "Qwen/Qwen3.5-35B-A3B", "tensor_parallel_size": 2}),
    (36_848_069_632, {"shapes": "Qwen/Qwen3.5-35B-A3B", "format": "q8_0"}),
    (2_231_087_104, {"shapes": "ai4bharat/indictrans2-en-indic-1B", "task": "translation"}),
    (2_046_013_440, {"shapes": "ai4bharat/indictrans2-indic-en-1B", "task": "translation"}),
    (2_416_193_536, {"shapes": "ai4bharat/indictrans2-indic-indic-1B", "task": "translation"}),
    (423_553_024, {"shapes": "ai4bharat/indictrans2-en-indic-dist-200M", "task": "translation"}),
    (423_561_216, {"shapes": "ai4bharat/indictrans2-indic-en-dist-200M", "task": "translation"}),
    (462_395_600, {"shapes": "ai4bharat/IndicF5", "task": "synthesis"}),
    (870_664_600, {"shapes": "ai4bharat/IndicF5", "task": "synthesis", "device": "cpu"}),
    (1_256_666_414, {"shapes": "ai4bharat/indic-conformer-600m-multilingual", "task": "transcription"}),
]


def planned_bytes(fields: dict[str, Any]) -> int:
    model = ModelSection(**({"checkpoint": "not/here", "max_num_seqs": 1} | fields))
    return engine_needs(model, on_cpu=model.device == "cpu").rows[0].size_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("size_bytes", "fields"), WEIGHTS, ids=str)
def test_published_shapes_weigh_what_they_did(size_bytes: int, fields: dict[str, Any]) -> None:
    assert planned_bytes(fields) == size_bytes


@pytest.mark.parametrize(
    ("name", "weights_format", "published_bytes"),
    [("google/gemma-3-27b-it", "q4_0", 17.2e9), ("Qwen/Qwen3-30B-A3B", "q8_0", 32.5e9)],
)
def test_files_of_llama_cpp_have_their_published_sizes(name: str, weights_format: str, published_bytes: float) -> None:
    assert planned_bytes({"shapes": name, "format": weights_format}) == pytest.approx(published_bytes, rel=0.01)


def test_sizes_of_synthesis_are_those_of_the_prepared_model() -> None:
    checkpoint = open_checkpoint("meltcore/voice", files="all")
    vocabulary = load_vocabulary(checkpoint, is_dummy=False)
    model = load_synthesis_model(checkpoint, torch.float32, torch.device("cpu"), vocabulary.size, steps=STEPS)
    prepared = sum(values.nbytes for values in model.parameters()) + model.modulations.nbytes
    assert weight_bytes(ModelSection(checkpoint="meltcore/voice"), True) == prepared


@pytest.mark.slow
def test_process_without_torch_has_the_sizes_of_one_with_it() -> None:
    code = (
        "import sys; from meltcore.engine.memory.memory_needs import engine_needs, read_model_sizes; "
        "from meltcore.settings.fleet_spec import ModelSection; "
        "models = [ModelSection(checkpoint='meltcore/sums'), ModelSection(checkpoint='meltcore/phrases', "
        "task='translation')]; read_model_sizes(dict(zip('ab', models)), 60.0); "
        "from meltcore.engine.memory import model_sizes; model_sizes._built_by_child = None; "
        "print(*(engine_needs(model).budget_bytes for model in models), 'torch' in sys.modules)"
    )
    child = subprocess.run([sys.executable, "-c", code], timeout=WAIT_S, check=True, capture_output=True, text=True)
    models = ModelSection(checkpoint="meltcore/sums"), ModelSection(checkpoint="meltcore/phrases", task="translation")
    assert child.stdout.split() == [*(str(engine_needs(model).budget_bytes) for model in models), "False"]


@pytest.mark.slow
def test_errors_of_the_child_are_those_of_models(tmp_path: Path) -> None:
    """An unknown architecture, and a size that ranks cannot divide; the sizes of another model arrive all the same."""
    (tmp_path / "config.json").write_text('{"architectures": ["Unheard"]}')
    function = "meltcore.engine.worker.loading:decoder_sizes"
    unknown = ModelSection(checkpoint=str(tmp_path))
    odd = ModelSection(checkpoint="HuggingFaceTB/SmolLM2-135M-Instruct", load_format="dummy", tensor_parallel_size=2)
    fine = ModelSection(checkpoint="meltcore/sums")
    requests = [SizeRequest(function, model, False, "") for model in (unknown, odd, fine)]
    first, second, sizes = model_sizes._built_by_child(requests)
    assert isinstance(first, UnknownSizesError)
    assert "Unheard; not a model here" in str(first)
    assert isinstance(second, ConfigError)
    assert "does not divide this model's 9 attention heads" in str(second)
    assert sizes == read_sizes(requests[2:])[0]


@pytest.mark.parametrize("quantization", [{}, {"quantization_config": {"quant_method": "gptq", "bits": 4}}])
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_damaged_weights_keep_no_fleet_from_its_plan(tmp_path: Path, device: str, quantization: dict[str, Any]) -> None:
    """Their engine alone fails, with the error."""
    config = json.loads((open_checkpoint("Qwen/Qwen3-0.6B", files="config").folder / "config.json").read_text())
    group = {"group_size": 128, "desc_act": False} if quantization else {}
    settings = {name: values | group for name, values in quantization.items()}
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    whole = planned_bytes({"checkpoint": str(tmp_path), "load_format": "dummy", "device": device})
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    assert planned_bytes({"checkpoint": str(tmp_path), "device": device}) == whole


def test_child_that_dies_or_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    request = SizeRequest("not.a.module:sizes", ModelSection(checkpoint="any"), False, "")
    with pytest.raises(ConfigError, match="failed: exit status 1; ModuleNotFoundError"):
        model_sizes._built_by_child([request])
    ended = CompletedRun(None, b"", b"loading\n")
    monkeypatch.setattr(model_sizes, "run", lambda *_, **__: ended)
    with pytest.raises(ConfigError, match="failed: no answer within 180 s; loading"):
        model_sizes._built_by_child([request])


def test_answers_and_errors_are_kept_until_a_checkpoint_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    answers: list[Any] = [ConfigError("damaged"), 1, 2]

    def built(requests: list[SizeRequest]) -> list[Any]:
        asked.append(len(requests))
        return [answers.pop(0) for _ in requests]

    monkeypatch.setattr(model_sizes, "_built", built)
    request = SizeRequest("any:function", ModelSection(checkpoint=str(tmp_path)), False, "one")
    assert isinstance(read_sizes([request])[0], ConfigError)
    assert isinstance(read_sizes([request])[0], ConfigError)
    mended = request._replace(contents="two")
    assert read_sizes([mended, mended]) == [1, 1]
    assert read_sizes([mended]) == [1]
    assert read_sizes([mended._replace(contents="three"), mended]) == [2, 1]
    assert asked == [1, 1, 1]


def test_models_of_a_fleet_are_read_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where one of them cannot be read; a folder that is written again is read again."""
    asked: list[int] = []
    built = model_sizes._built

    def counted(requests: list[SizeRequest]) -> list[Any]:
        asked.append(len(requests))
        return built(requests)

    monkeypatch.setattr(model_sizes, "_built", counted)
    monkeypatch.setattr(model_sizes, "_known", {})
    source = open_checkpoint("meltcore/sums", files="config").folder / "config.json"
    (tmp_path / "config.json").write_text(source.read_text())
    models = [ModelSection(checkpoint=name) for name in ("meltcore/sums", str(tmp_path), str(tmp_path / "missing"))]
    read_model_sizes(dict(zip("abc", models, strict=True)), 60.0)
    for model in models[:2]:
        engine_needs(model)
        engine_needs(model, on_cpu=True)
    assert asked == [4]
    os.utime(tmp_path, (1, 1))
    engine_needs(models[1])
    assert asked == [4, 1]
