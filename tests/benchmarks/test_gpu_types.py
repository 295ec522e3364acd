"""The GPU score within the memory of each GPU type, the tables of the docs, and scripts/check_gpu.sh. No GPU."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

import gpu_types
import performance_tables
import pytest
from gpu_types import GPU_TYPES, GpuType, LevelRun, run_level, score_plan
from places import ROOT
from waiting import WAIT_S

from meltcore.engine.memory.memory_plan import RESERVE_FRACTION
from meltcore.kernels.architectures import ARCHITECTURES
from meltcore.measure.score import workload

SCRIPT = ROOT / "scripts" / "check_gpu.sh"
MIB = 2**20
MEMORY_MIB = {16: 16_376, 24: 24_564, 32: 32_607}
# Requests that run concurrently, and the most preemptions per 100 requests that are accepted.
EXPECTED = {16: (128, 0), 24: (256, 1), 32: (384, 10)}
run_level_once = functools.cache(run_level)  # the table of the levels has the same


@pytest.mark.parametrize("gpu", GPU_TYPES, ids=lambda gpu: gpu.name)
def test_score_fits_every_gpu_type(gpu: GpuType) -> None:
    """Weights, pages and reserve fit, and the reserve holds the activations and logits of the largest step."""
    plan, settings = score_plan(gpu.memory_mib), workload.gpu_settings(None, gpu.memory_mib * MIB)
    memory_bytes = gpu.memory_mib * MIB - gpu_types.CONTEXT_BYTES
    reserve = int(memory_bytes * RESERVE_FRACTION)
    assert 2 * workload.NUM_PARAMETERS + plan.cache_bytes + reserve <= memory_bytes + plan.page_bytes
    assert plan.max_num_seqs == settings["max_num_seqs"] == workload.concurrent_sequences(gpu.memory_mib * MIB)
    # A request halfway through its answer has 640 tokens, in 10 pages and a part of one.
    assert plan.pages >= 10 * plan.max_num_seqs
    # Residual and normalized states, QKV, attention output, gate and up, and their activation; logits in 16 bits.
    activations = settings["max_num_batched_tokens"] * 2 * (2 * 1024 + 4096 + 2048 + 6144 + 3072)
    logits = plan.max_num_seqs * gpu_types.QWEN3_06B.vocab_size * 2
    assert activations + logits < reserve / 2


@pytest.mark.slow
@pytest.mark.parametrize("gigabytes", MEMORY_MIB)
@pytest.mark.parametrize("concurrency", workload.LEVELS)
def test_every_level_of_the_score_runs_in(gigabytes: int, concurrency: int) -> None:
    """Up to 10,000 concurrent requests: what does not run waits, and few requests are preempted."""
    level = run_level_once(MEMORY_MIB[gigabytes], concurrency)
    most, preempted = EXPECTED[gigabytes]
    assert level.running == min(concurrency, most)
    assert level.queued == max(0, concurrency - most)
    assert level.finished >= 4 * level.running
    assert 100 * level.preemptions <= preempted * level.finished
    if concurrency <= most:
        assert level.preemptions == 0


@pytest.mark.slow
def test_page_of_the_score_has_the_table_of_the_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_types, "run_level", run_level_once)
    table = "\n".join(gpu_types.ladder_table())
    assert f"score ladder -->\n\n{table}\n" in (ROOT / "docs" / "gpu-score.md").read_text(), "run `make tables`"


@pytest.mark.slow
def test_memory_for_fewer_pages_preempts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation sees preemption: with a larger assumed context the same requests have fewer pages."""
    usual = run_level(MEMORY_MIB[32], 400)
    monkeypatch.setattr(gpu_types, "CONTEXT_BYTES", 4 * 2**30)
    scarce = run_level(MEMORY_MIB[32], 400)
    assert scarce.preemptions / scarce.finished > 1.5 * usual.preemptions / usual.finished > 0
    assert isinstance(scarce, LevelRun)


def test_gpu_types_cover_every_architecture_that_is_compiled() -> None:
    assert {gpu.capability for gpu in GPU_TYPES} == ARCHITECTURES.keys()


def test_only_gpu_types_with_result_files_are_measured() -> None:
    states = {line.split(" | ")[0].strip("| "): line.split(" | ")[5] for line in gpu_types.types_table()[2:]}
    assert {name for name, state in states.items() if state == "measured"} == {"H200"}
    assert states["GeForce RTX 5090"] == "compiled only"
    assert re.match(r"measured: \w+(, \w+)* alone; one run", states["H100 80GB HBM3"])


def test_generated_table_replaces_what_stands_between_its_comments() -> None:
    stale = "before\n<!-- generated: gpu types -->\nstale\n<!-- end of generated -->\nafter"
    made = performance_tables.rendered(stale)
    assert made.startswith("before\n<!-- generated: gpu types -->\n\n| GPU type |")
    assert made.endswith("|\n\n<!-- end of generated -->\nafter")
    assert "stale" not in made
    with pytest.raises(ValueError, match="no generated table 'other'; one of gpu types, score ladder"):
        performance_tables.rendered(stale.replace("gpu types", "other"))


def check_gpu(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    for name in ("meltcore", "python"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $CUDA_VISIBLE_DEVICES: $*"\n{program}\n')
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "MELTCORE": str(tmp_path / "meltcore"), "PYTHON": str(tmp_path / "python")}
    command = ["bash", str(SCRIPT), str(tmp_path / "out"), "3"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_check_gpu_runs_every_step_on_the_chosen_gpu(tmp_path: Path) -> None:
    done = check_gpu(tmp_path, "exit 0")
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert [line.split(" (")[0] for line in done.stdout.splitlines()] == [
        f"{name}: status 0" for name in ("snapshot", "certify", "bench-fp8", "bench", "gpu-tests")
    ]
    assert (out / "snapshot.json").read_text() == "meltcore 3: snapshot --json\n"
    assert (out / "certify.log").read_text() == f"meltcore 3: certify --tier standard --out {out}\n"
    assert (out / "gpu-tests.log").read_text() == "python 3: -m pytest -m gpu -rs\n"
    again = check_gpu(tmp_path, "exit 0")
    assert (again.returncode, again.stderr) == (1, f"{out} exists; name a new folder\n")


def test_check_gpu_goes_on_after_a_step_that_fails(tmp_path: Path) -> None:
    done = check_gpu(tmp_path, 'case "$1" in certify) exit 2;; esac')
    assert done.returncode == 1
    assert "certify: status 2" in done.stdout
    assert done.stdout.count(": status 0") == 4
