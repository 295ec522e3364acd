"""Every script says what it is, and one that needs a GPU says so in a line before it starts or writes anything."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import bench_output
import pytest
import torch

FOLDER = Path(bench_output.__file__).parent
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if 'if __name__ == "__main__"' in path.read_text())
# Others run on a CPU, take --device, or need vLLM first.
NEED_A_GPU = [
    "attention",
    "block_fp8",
    "certify_check",
    "decode_layers",
    "delta_net",
    "experts",
    "fp8",
    "gpu_sharing",
    "http_load",
    "linear",
    "long_prompt",
    "many_streams",
    "offline",
    "quantized_linear",
    "transcription",
    "gemm_sweep",
    "router",
    "staggered",
    "step_profile",
    "strategies",
    "structured",
    "synthesis",
    "translation",
]


def test_scripts_that_start_servers_end_them_at_sigterm() -> None:
    """`timeout` sends SIGTERM, which ended the script alone and left its server."""
    starts = ("MeltcoreServer(", "str(SCRIPTED_SERVER)", "meltcore.fleet.daemon import")
    texts = {path.name: path.read_text() for path in FOLDER.glob("*.py")}
    starters = {name for name, text in texts.items() if any(start in text for start in starts)}
    assert starters >= {"api_server_cost.py", "client_cost.py", "fleet_turns.py", "http_load.py", "running_fleet.py"}
    assert not [name for name in starters if "with signals_as_ctrl_c()" not in texts[name]]


def run(monkeypatch: pytest.MonkeyPatch, script: str, *words: str) -> object:
    """What the script leaves with."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *words])
    with pytest.raises(SystemExit) as left:
        importlib.import_module(script).main()
    return left.value.code


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_help(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, script, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: {script}.py")


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_in_the_table(script: str) -> None:
    readme = (FOLDER / "README.md").read_text()
    assert f"| `{script}.py` |" in readme or script == "strategy_worker"  # which strategies.py starts


@pytest.mark.parametrize("script", NEED_A_GPU)
def test_without_a_gpu_a_script_says_so(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, script) == "needs an NVIDIA GPU"


def test_without_enough_gpus_a_script_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "all_reduce", "--ranks", "4") == "needs 4 NVIDIA GPUs, torch sees 0"
    assert run(monkeypatch, "prompt_all_reduce", "--ranks", "8") == "needs 8 NVIDIA GPUs, torch sees 0"
    assert run(monkeypatch, "dp_against_tp") == "needs 2 NVIDIA GPUs, torch sees 0"
    assert run(monkeypatch, "dp_against_tp", "--gpus", "8") == "needs 8 NVIDIA GPUs, torch sees 0"
    assert run(monkeypatch, "step_profile", "--tp", "8") == "needs 8 NVIDIA GPUs, torch sees 0"


def test_bundled_model_and_a_folder_do_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    bench_output.need_gpu(model="meltcore/sums")
    bench_output.need_gpu(model=str(tmp_path))
