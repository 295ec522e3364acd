"""`meltcore serve` refuses a model with all reasons in one line, before it prints or starts anything."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
from waiting import WAIT_S

from meltcore.cli.main import main
from meltcore.common.gpus.machine import VisibleGpu
from meltcore.common.process import call_with_timeout
from meltcore.common.sizes import GIB
from meltcore.fleet import daemon, supervisor
from meltcore.fleet.plan import machine
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL
from meltcore.text.tokenizer import Tokenizer, byte_alphabet

FIELDS = {"context_length": 64, "embedding_length": 256, "block_count": 1, "feed_forward_length": 256}

GOOD_TOKENIZER = Tokenizer.synthetic_bytes(300)._backend.to_str()


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(supervisor, "serve", fail)
    monkeypatch.setattr(daemon, "start", fail)


def write(
    path: Path,
    architecture: str,
    types: list[str],
    pre: str | None,
    tokens: list[str] | None = None,
    merges: list[str] | None = None,
) -> Path:
    """Write the header of a GGUF file with a matrix of each type. pre: the pre-tokenizer; None: no tokens."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in FIELDS.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    if pre is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens or [f"t{index}" for index in range(32)])
        writer.add_token_merges(merges or ["t 1"])
    for index, name in enumerate(types):
        kind = gguf.GGMLQuantizationType[name]
        size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.zeros((32, 256 // size * block_bytes), dtype=np.uint8)
        writer.add_tensor("token_embd.weight" if index == 0 else f"blk.0.ffn_{index}.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that is printed."""
    assert main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("daemon_options", [[], ["--daemon"]], ids=["foreground", "daemon"])
@pytest.mark.parametrize(
    ("architecture", "types", "pre", "reasons"),
    [
        (
            "rwkv7",
            ["IQ2_XXS", "TQ1_0", "IQ2_XXS", "Q4_K"],
            "none-such",
            [
                "general.architecture is 'rwkv7'",
                "stores 2 tensors as IQ2_XXS, 1 tensor as TQ1_0 (first: token_embd.weight)",
                "tokenizer.ggml.pre is 'none-such'",
            ],
        ),
        ("llama", ["IQ1_M", "F16"], None, ["stores 1 tensor as IQ1_M", "has no tokenizer (tokenizer.ggml.tokens)"]),
        ("qwen2", ["Q5_0", "Q2_K"], "none-such", ["tokenizer.ggml.pre is 'none-such'"]),
    ],
)
def test_all_reasons_of_a_gguf_file_are_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    architecture: str,
    types: list[str],
    pre: str | None,
    reasons: list[str],
    daemon_options: list[str],
) -> None:
    path = write(tmp_path / "model.gguf", architecture, types, pre)
    line = refusal([str(path), *daemon_options], capsys)
    for reason in reasons:
        assert reason in line
    assert (f"{len(reasons)} reasons: (1)" in line) == (len(reasons) > 1)
    assert "--tokenizer" in line
    with_tokenizer = [*daemon_options, "--tokenizer", "meltcore/sums"]
    if len(reasons) > 1:
        assert "tokenizer.ggml" not in refusal([str(path), *with_tokenizer], capsys)


def test_all_reasons_of_a_folder_are_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"architectures": ["MambaForCausalLM"], "quantization_config": {"quant_method": "hqq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = refusal([str(tmp_path)], capsys)
    assert "4 reasons: (1) config.json names MambaForCausalLM; we have Gemma3" in line
    for reason in ("quant_method", "holds no *.safetensors files", "has no tokenizer.json; name a folder"):
        assert reason in line
    assert ", BertForSequenceClassification, BertModel, " in line
    line = refusal([str(tmp_path), "--load-format", "dummy"], capsys)
    assert "2 reasons: (1) config.json names MambaForCausalLM" in line


BROKEN: dict[str, tuple[dict[str, str], str]] = {
    "missing": ({}, "no such folder"),
    "empty": ({"README.md": ""}, "has no tokenizer.json"),
    "another layout": ({"tokenizer.model": "", "vocab.json": "{}"}, "tokenizer.model and vocab.json cannot be used"),
    "cut short": ({"tokenizer.json": '{"version": "1.0", "model": {'}, "tokenizer.json cannot be read"),
    "settings": ({"tokenizer.json": GOOD_TOKENIZER, "tokenizer_config.json": "["}, "tokenizer_config.json"),
    "a field": ({"tokenizer.json": GOOD_TOKENIZER, "special_tokens_map.json": '{"eos_token": 3}'}, "eos_token must be"),
}


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("is_gguf", [True, False])
def test_broken_tokenizer_is_one_of_all_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, is_gguf: bool
) -> None:
    """Of a model that is refused for others too, and of one that is not."""
    files, reason = BROKEN[kind]
    tokenizer, template = write_files(tmp_path / "tok", files), tmp_path / "none.jinja"
    options = ["--tokenizer", str(tokenizer), "--chat-template", str(template)]
    if is_gguf:
        model, good = write(tmp_path / "m.gguf", "rwkv7", ["IQ2_XXS"], None), BUNDLED_MODEL
        expected = ["general.architecture is 'rwkv7'", "stores 1 tensor as IQ2_XXS"]
    else:
        config = {"architectures": ["MambaForCausalLM"], "quantization_config": {"quant_method": "hqq"}}
        model, good = write_files(tmp_path / "m", {"config.json": json.dumps(config)}), "meltcore/sums-gemma"
        expected = ["names MambaForCausalLM", "quant_method", "holds no *.safetensors files"]
    line = refusal([str(model), *options], capsys)
    for each in (*expected, f"--tokenizer {tokenizer}", reason, f"--chat-template {template}"):
        assert each in line
    assert f"{len(expected) + 2} reasons" in line
    line = refusal([good, *options[:2]], capsys)
    assert line.startswith(f"meltcore serve: --tokenizer {tokenizer}")
    assert reason in line


@pytest.mark.parametrize(
    ("files", "reasons"),
    [
        ({"tokenizer.json": "{"}, ["tokenizer.json cannot be read"]),
        ({"tokenizer.json": GOOD_TOKENIZER, "tokenizer_config.json": '{"eos_token": 1}'}, ["eos_token"]),
    ],
    ids=["tokenizer", "settings"],
)
def test_broken_files_of_a_folder_are_among_all_its_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], reasons: list[str]
) -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64}
    write_files(tmp_path / "m", {"config.json": json.dumps(config)} | files)
    line = refusal([str(tmp_path / "m")], capsys)
    for reason in ("config.json lacks num_hidden_layers", "holds no *.safetensors files", *reasons):
        assert reason in line
    assert "3 reasons" in line


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (["a", "b", "a"], "has 'a' twice"),
        ([*byte_alphabet()], "the tokenizer cannot be built"),  # the merge is of others
        (["a", "b"], "has 2 tokens and none for 94 of the 96 characters of plain ASCII text"),
        ([*byte_alphabet(), "x" * 3_000_000], "a token, id 256, of 3000000 characters; the limit is 512"),
    ],
    ids=["a token twice", "a merge of others", "letters are missing", "a long token"],
)
def test_tokenizer_of_a_gguf_file_that_cannot_be_built_is_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokens: list[str], reason: str
) -> None:
    path = write(tmp_path / "m.gguf", "rwkv7", ["F16"], "qwen2", tokens=tokens, merges=["x y"])
    line = refusal([str(path)], capsys)
    assert "2 reasons: (1) general.architecture is 'rwkv7'" in line
    assert reason in line


@pytest.mark.parametrize("name", ["owner/usual", "owner/one-GGUF", "owner/several-GGUF:Q8_0"])
def test_model_of_the_hub_is_refused_before_anything_starts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Its weights are not downloaded for that."""
    folder = tmp_path / "hub"
    config = {"architectures": ["MambaForCausalLM"]}
    files = {"config.json": json.dumps(config), "tokenizer.json": "{", "pytorch_model.bin": ""}
    write_files(folder, files if name == "owner/usual" else {"README.md": ""})
    if name != "owner/usual":
        for quantization in ("Q8_0", "Q4_0")[: 1 if name == "owner/one-GGUF" else 2]:
            write(folder / f"m-{quantization}.gguf", "rwkv7", ["IQ2_XXS"], "none-such")
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda _: [path.name for path in folder.iterdir()])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    line = refusal([name, "--tokenizer", "owner/none"] if "GGUF" in name else [name], capsys)
    reasons = (
        ["'rwkv7'", "IQ2_XXS", "--tokenizer"] if "GGUF" in name else ["Mamba", "no *.safetensors", "cannot be read"]
    )
    for reason in (*reasons, "3 reasons"):
        assert reason in line


@pytest.mark.parametrize("name", ["none.gguf", "none"])
def test_a_missing_model_is_refused_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    line = refusal([str(tmp_path / name)], capsys)
    assert line.startswith(f"meltcore serve: {tmp_path / name}: no such f")


def test_a_file_cut_short_is_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "model.gguf", "llama", ["Q4_1", "Q5_K"], "qwen2")
    path.write_bytes(path.read_bytes()[:-100])
    assert "cut short or is damaged" in refusal([str(path)], capsys)


@pytest.mark.parametrize("daemon_options", [[], ["--daemon"]], ids=["foreground", "daemon"])
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("meltcore/tones --max-num-seqs 4", "--max-num-seqs: got 4; memory decides how many of task transcription run"),
        ("meltcore/sums --normalizer original", "--normalizer: got 'original'; is for task translation, and"),
        (
            "meltcore/voice --normalizer original",
            "--normalizer: got 'original'; is for task translation, and",
        ),
        ("meltcore/tones --max-queue-tokens 9", "--max-queue-tokens: got 9; is for task generation or embedding, and"),
        (
            "meltcore/sums --served-model-name qwen Qwen",
            "--served-model-name: 'Qwen' is also --served-model-name qwen; every name",
        ),
        ("meltcore/sums --ssl-keyfile k", "--ssl-keyfile: got k, and no certificate; add --ssl-certfile"),
        ("meltcore/sums --device cuda:3", "--device: got GPU 3; 2 are visible, numbered from 0"),
        ("meltcore/sums -dp 3 -tp 2", "--data-parallel-size: got 3, which needs 6 GPUs (2 each); 2 are visible"),
    ],
)
def test_settings_are_checked_as_in_a_fleet_and_errors_name_the_flag(
    arguments: str,
    reason: str,
    daemon_options: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flags that no engine of the task reads were ignored, and a wrong GPU was a fault of models.NAME.device."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert refusal([*arguments.split(), *daemon_options], capsys).startswith(f"meltcore serve: {reason}")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--memory 1GiB", "--gpu-memory-utilization and --memory are both the memory of an engine: give one of them"),
        ("--device cpu", "0.5 is a fraction of a GPU's memory, and there is no GPU to use; give the memory in bytes"),
        ("--device cuda:1", "0.5 is a fraction of a GPU's memory, and NVML reports no memory; give the memory"),
    ],
)
def test_fraction_of_a_gpu_is_refused_where_it_says_nothing(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = VisibleGpu(1, "GB10", 0, 0, "NVML reports no memory")
    monkeypatch.setattr(machine, "read_gpus", lambda: ((VisibleGpu(0, "GPU", 80, 0), gpu), "1"))
    assert reason in refusal(["meltcore/sums", "--gpu-memory-utilization", "0.5", *arguments.split()], capsys)


@pytest.mark.parametrize(("device", "gib"), [("auto", 40), ("cuda:0", 40), ("cuda:1", 60)])
def test_fraction_of_a_gpu_is_the_memory_of_an_engine(device: str, gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (VisibleGpu(0, "GPU", 80 * GIB, 0), VisibleGpu(1, "GPU", 120 * GIB, 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(machine, "read_gpus", lambda: (gpus, "1"))
    served: list[PlacedFleet] = []
    monkeypatch.setattr(supervisor, "serve", lambda fleet: served.append(fleet) or 0)
    assert main(["serve", "meltcore/sums", "--gpu-memory-utilization", "0.5", "--device", device]) == 0
    assert served[0].spec.models["meltcore/sums"].memory == gib * GIB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("meltcore/sums --trust-remote-code", "argument --trust-remote-code: no code of a checkpoint is ever run"),
        ("meltcore/sums --quantization awq", "argument --quantization: awq: the format is read from the checkpoint's"),
        ("meltcore/sums --dtype=half", "argument --dtype: half: its name here is float16"),
        ("meltcore/sums --dtype=int8", "argument --dtype: invalid choice: 'int8' (choose from"),
        ("meltcore/sums --block-size=16", "argument --block-size: a page of the KV cache has 64 tokens"),
        ("meltcore/sums --revision main", "argument --revision: the hub's main revision is served; for another one"),
        ("meltcore/sums --gpu-memory-utilization 90", "'90' is not a number of more than 0 and at most 1"),
    ],
)
def test_options_of_vllm_are_refused_with_the_reason(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", *arguments.split()])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: meltcore serve MODEL [options] (--help lists them)"
    assert message in error


def test_checkpoint_that_hangs_ends_serve_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "config.json")
    monkeypatch.setattr("meltcore.cli.serve._NOTICE_S", 0.05)
    monkeypatch.setattr("meltcore.cli.serve._READ_LIMIT_S", 0.1)
    assert call_with_timeout(WAIT_S, lambda: main(["serve", str(tmp_path)])) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"meltcore: reading {tmp_path}",
        f"meltcore serve: {tmp_path} was not read within 0.1 s: see whether its file system answers",
    ]
