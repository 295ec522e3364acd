"""`meltcore quantize`: the bundled models, quantized and served, and runs that end early."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import WAIT_S

from meltcore import LLM, SamplingParams
from meltcore.cli.main import main
from meltcore.measure.problems import evaluation_set, is_correct
from meltcore.models.checkpoints.checkpoint import BUNDLED_GEMMA, BUNDLED_HYBRID, BUNDLED_MODEL

ACCURACY = 0.95


def accuracy(path: Path, count: int | None = None) -> float:
    """The share of right answers to the held-out problems, or to the first `count` of them."""
    problems = evaluation_set()[:count]
    llm = LLM(str(path), device="cpu", memory_bytes=2**27)
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    answers = llm.chat(chats, SamplingParams(max_tokens=256))
    llm.close()
    right = [is_correct(problem, answer.text) for problem, answer in zip(problems, answers, strict=True)]
    return sum(right) / len(right)


@pytest.mark.slow
def test_named_after_model_and_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", BUNDLED_MODEL, "--to", "q8_0"]) == 0
    assert "sums-Q8_0.gguf: 1.99 MiB" in capsys.readouterr().out
    assert accuracy(tmp_path / "sums-Q8_0.gguf", 4) == 1.0
    assert main(["quantize", BUNDLED_MODEL, "--to", "q8_0"]) == 2
    assert "sums-Q8_0.gguf exists already; --overwrite replaces it" in capsys.readouterr().err
    assert main(["quantize", BUNDLED_MODEL, "--to", "q4_0", "--out", "sums-Q8_0.gguf", "--overwrite"]) == 0
    assert (tmp_path / "sums-Q8_0.gguf").stat().st_size < 1.3e6
    assert main(["quantize", BUNDLED_MODEL, "--to", "q4_0", "--out", "none/m.gguf"]) == 2
    assert "cannot write none/m.gguf: No such file or directory" in capsys.readouterr().err
    assert main(["quantize", BUNDLED_MODEL, "--to", "q4_0", "--out", "m"]) == 2
    assert "--out m: the name of a GGUF file ends with .gguf" in capsys.readouterr().err
    assert main(["quantize", BUNDLED_MODEL, "--to", "fp8"]) == 0
    assert "sums-FP8: 2.07 MiB" in capsys.readouterr().out
    assert (tmp_path / "sums-FP8" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "to"),
    [
        (BUNDLED_MODEL, "q4_0"),
        (BUNDLED_MODEL, "fp8"),
        (BUNDLED_HYBRID, "fp8"),
        (BUNDLED_GEMMA, "q4_0"),
        (BUNDLED_GEMMA, "fp8"),
    ],
)
def test_held_out_accuracy(tmp_path: Path, model: str, to: str) -> None:
    path = tmp_path / ("fp8" if to == "fp8" else "m.gguf")
    assert main(["quantize", model, "--to", to, "--out", str(path)]) == 0
    assert accuracy(path, 12) >= ACCURACY


def test_failed_write_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit of the file's size fails a write as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        status = main(["quantize", BUNDLED_MODEL, "--to", "q8_0", "--out", str(tmp_path / "m.gguf")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2
    assert f"cannot write {tmp_path / 'm.gguf'}: File too large" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_terminated_run_leaves_no_file(tmp_path: Path) -> None:
    """SIGTERM while tensors are written, each of which takes a second here."""
    code = (
        "import sys, time; from meltcore.models.writers import gguf_writer; from meltcore.cli.main import main\n"
        "blocks = gguf_writer._StoredTensor.blocks\n"
        "def slow(*args):\n"
        "    print('begun', flush=True); time.sleep(1)\n"
        "    return blocks(*args)\n"
        "gguf_writer._StoredTensor.blocks = slow\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["quantize", BUNDLED_MODEL, "--to", "q8_0", "--out", str(tmp_path / "m.gguf")]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "begun"
        assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=WAIT_S) == 130
    assert list(tmp_path.iterdir()) == []
