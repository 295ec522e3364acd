"""Backends of known speed: the fastest is named; what is missing, dies or cannot be has a reason; nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from rich.console import Console
from scripted_server import COMMAND_LINE
from waiting import WAIT_S

from meltcore.cli.main import main
from meltcore.measure.documents.backends import BackendComparison, BackendRun, SetUp
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.runfolder import RunFolder
from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.documents.values.documents import find_documents
from meltcore.measure.experiments.compare.backend_plan import BackendOptions, BackendsPlan, EqualSettings, PlannedRun
from meltcore.measure.experiments.compare.backend_runs import published_reason, run_backends
from meltcore.measure.experiments.compare.backend_verdicts import best_backends, find_aspects
from meltcore.measure.experiments.compare.starts import StartOptions
from meltcore.measure.experiments.servers import PORT
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.report.render import render

SOURCE = str(ROOT / "src")
SCRIPTED = f"{COMMAND_LINE} --port {{port}} --ttft-ms 5"
SETTINGS = EqualSettings(
    max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=4096, api_server_count=2, load_format="dummy"
)
MEMORY = 141_000_000_000
ONE_SERVER: tuple[SetUp, ...] = ("sessions", "batching")


def scripted(more: str = "", **fields: Any) -> BackendOptions:
    return BackendOptions(command=f"{SCRIPTED} {more}", environment={"PYTHONPATH": SOURCE}, **fields)


def program(folder: Path, name: str, text: str = "#!/bin/sh\n") -> Path:
    """An executable that stands for a backend's own program."""
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return folder / name


def small_load(**fields: Any) -> StartOptions:
    defaults = {"concurrency": (1, 4), "num_prompts": (6, 12), "workload": "random:in=8,out=16", "num_warmups": 1}
    load = LoadConfig(url="", continuous_usage=False, seed=3, **(defaults | fields))  # type: ignore[arg-type]
    return StartOptions(load=load, start_limit_s=20.0)


def compare(plan: BackendsPlan, folder: Path, load: StartOptions | None = None) -> BackendComparison:
    plan = replace(plan, max_session_concurrency=1)
    return run_backends(plan, load or small_load(), RunFolder.create(folder, "compare-backends"), Console(quiet=True))


def left_behind(folder: Path) -> list[str]:
    """Ids of the processes whose output goes to a file below `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):
            if str(path.readlink()).startswith(f"{folder}/"):
                found.append(path.parts[2])
    return found


def planned(plan: BackendsPlan, name: str, start: str) -> PlannedRun:
    return next(run for run in plan.runs() if (run.backend, run.start) == (name, start))


@pytest.mark.parametrize(
    ("name", "binary", "checkpoint", "expected", "lacks"),
    [
        (
            "vllm",
            "vllm",
            "org/m",
            "serve org/m --host 127.0.0.1 --port {port} --served-model-name m --max-model-len 2048 --max-num-seqs 8 "
            "--max-num-batched-tokens 4096 --api-server-count 2 --load-format dummy --no-enable-prefix-caching",
            [],
        ),
        (
            "sglang",
            "python",
            "org/m",
            "-m sglang.launch_server --model-path org/m --host 127.0.0.1 --port {port} --served-model-name m "
            "--context-length 2048 --max-running-requests 8 --chunked-prefill-size 4096 --tokenizer-worker-num 2 "
            "--load-format dummy --disable-radix-cache",
            [],
        ),
        (
            "llama.cpp",
            "llama-server",
            "/w/a b.gguf",
            "--model /w/a b.gguf --host 127.0.0.1 --port {port} --alias m --n-gpu-layers 999 --ctx-size 16384 "
            "--parallel 8 --batch-size 4096 --no-cache-prompt --cache-ram 0",
            ["api_server_count", "load_format"],
        ),
        (
            "tensorrt-llm",
            "trtllm-serve",
            "org/m",
            "serve org/m --host 127.0.0.1 --port {port} --backend pytorch --max_seq_len 2048 --max_batch_size 8 "
            "--max_num_tokens 4096",
            ["api_server_count", "load_format", "no_prefix_cache"],
        ),
    ],
)
def test_equal_settings_in_the_words_of_each_backend(
    name: str, binary: str, checkpoint: str, expected: str, lacks: list[str], tmp_path: Path
) -> None:
    program(tmp_path, binary)
    options = {name: BackendOptions(python=str(tmp_path / "python"), checkpoint=checkpoint, arguments="--more '{}'")}
    plan = BackendsPlan(model="org/m", backends=(name,), settings=SETTINGS, options=options, gpus=("1", "3"))
    run = planned(plan, name, "single")
    assert run.reason == ""
    assert run.command is not None
    assert " ".join(run.command.template[1:]) == f"{expected} --more {{}}"
    assert run.command.template[0] == str(tmp_path / binary)
    assert run.command.environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert "PYTHONPATH" not in run.command.environment
    assert list(run.lacks) == lacks
    assert str(tmp_path) not in run.command.redacted


def test_ours_runs_with_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    run = planned(BackendsPlan(model="m.gguf", settings=SETTINGS), "meltcore", "single")
    assert run.command is not None
    assert run.command.template[:4] == (sys.executable, "-m", "meltcore.cli.main", "serve")
    assert run.command.environment["PYTHONPATH"] == SOURCE
    assert list(run.lacks) == []


def test_set_ups_of_several_gpus(tmp_path: Path) -> None:
    for name in ("vllm", "llama-server", "trtllm-serve", "python"):
        program(tmp_path, name)
    names = ("vllm", "sglang", "llama.cpp", "tensorrt-llm")
    options = {name: BackendOptions(python=str(tmp_path / "python")) for name in names}
    options["llama.cpp"] = BackendOptions(python=str(tmp_path / "python"), checkpoint="m.gguf")
    plan = BackendsPlan(model="org/m", backends=names, options=options, gpus=("0", "2"), gpu_memory_bytes=MEMORY)

    def flags(name: str, start: str) -> tuple[str, ...]:
        run = planned(plan, name, start)
        assert run.command is not None, run.reason
        assert run.command.environment["CUDA_VISIBLE_DEVICES"] == "0,2"
        return run.command.template

    assert flags("vllm", "data-parallel")[-2:] == ("--data-parallel-size", "2")
    assert flags("sglang", "split")[-2:] == ("--tp-size", "2")
    assert flags("tensorrt-llm", "split")[-2:] == ("--tp_size", "2")
    assert "--split-mode" not in flags("llama.cpp", "split")
    for name in ("llama.cpp", "tensorrt-llm"):
        assert planned(plan, name, "data-parallel").reason == "it has no data parallelism of its own"
    fleet = planned(plan, "vllm", "load-balanced").fleet(8123, 60.0, 2)
    model = fleet["models"]["m"]
    assert (model["replicas"], fleet["server"]["port"]) == (2, 8123)
    assert model["memory"] > MEMORY / 2, "each on a GPU of its own"
    assert f"--port '{PORT}'" in model["command"]
    (tmp_path / "fleet.yaml").write_text(json.dumps(fleet))
    assert main(["plan", str(tmp_path / "fleet.yaml"), "--vram", "141,141"]) == 0
    assert main(["plan", str(tmp_path / "fleet.yaml"), "--vram", "141"]) == 1


def test_two_servers_share_one_gpu_and_its_memory(tmp_path: Path) -> None:
    python = str(program(tmp_path, "python"))
    program(tmp_path, "vllm")
    options = {"vllm": BackendOptions(python=python)}
    plan = BackendsPlan(
        model="org/m", backends=("meltcore", "vllm"), options=options, gpus=("0",), gpu_memory_bytes=MEMORY
    )
    ours, theirs = planned(plan, "meltcore", "load-balanced"), planned(plan, "vllm", "load-balanced")
    assert ours.command is not None
    assert theirs.command is not None
    assert ours.command.template[-2:] == ("--memory", str(MEMORY * 45 // 100))
    assert theirs.command.template[-2:] == ("--gpu-memory-utilization", "0.45")
    shared = ours.fleet(8000, 60.0, None)
    assert (shared["models"]["m"]["memory"], theirs.fleet(1, 1.0, None)["models"]["m"]["memory"]) == (
        MEMORY * 45 // 100,
    ) * 2
    (tmp_path / "fleet.yaml").write_text(json.dumps(shared))
    assert main(["plan", str(tmp_path / "fleet.yaml"), "--vram", "141"]) == 0, "a fleet plans the memory of commands"
    alone = planned(plan, "vllm", "single").command
    assert alone is not None
    assert "--gpu-memory-utilization" not in alone.template
    assert planned(plan, "vllm", "split").reason == "it needs 2 GPUs; 1 can be used"


@pytest.mark.parametrize(
    ("fields", "name", "start", "reason"),
    [
        ({"model": "folder"}, "llama.cpp", "single", "reads GGUF files; got folder (--checkpoint llama.cpp=FILE.gguf)"),
        ({"model": "/w/m.gguf"}, "vllm", "single", "its template reads no GGUF file; got m.gguf"),
        ({"model": "m"}, "sglang", "quantized", "no quantized checkpoint was given (--quantized)"),
        ({"model": "m"}, "vllm", "single", "the program 'vllm' of its command is not there"),
        (
            {"model": "m", "options": {"vllm": scripted(skip=frozenset({"load-balanced"}))}},
            "vllm",
            "load-balanced",
            "left out (--skip)",
        ),
    ],
)
def test_what_cannot_be_started_has_its_reason(
    fields: dict[str, Any], name: str, start: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    run = planned(BackendsPlan(**fields), name, start)
    assert reason in run.reason
    assert run.command is None


@pytest.mark.slow
def test_fastest_is_named_and_what_was_not_measured_says_why(tmp_path: Path) -> None:
    options = {"quick": scripted("--itl-ms 1"), "slow": scripted("--itl-ms 40"), "dies": scripted("--die-after 12")}
    options |= {"broken": scripted("--no-such-flag"), "absent": BackendOptions(command="no-such-program {port}")}
    folder = RunFolder.create(tmp_path, "compare-backends")
    seen: list[int] = []

    class Watched(Console):
        """Looks at the folder where a line says how a run went."""

        def print(self, *objects: Any, **options: Any) -> None:
            [line] = objects
            assert line.partition(",")[0] == backends[len(seen)]
            seen.append(len(json.loads(folder.result_path.read_text())["runs"]) if folder.result_path.exists() else 0)
            assert left_behind(tmp_path) == [], line

    backends = tuple(options)
    plan = BackendsPlan(model="/w/m", backends=backends, options=options, set_ups=ONE_SERVER, max_session_concurrency=1)
    found = run_backends(plan, small_load(), folder, Watched())
    assert seen == [0, 1, 2, 3, 4], "written after each run"
    assert [(best.set_up, best.levels, best.backend) for best in found.best] == [
        ("sessions", [1], "quick"),
        ("batching", [4], "quick"),
        ("", [1], "quick"),
        ("", [4], "quick"),
    ]
    runs = {run.backend: run for run in found.runs}
    for name, itl_s in (("quick", 0.001), ("slow", 0.04)):
        level = runs[name].level(4)
        assert level is not None
        assert 0 < level.output_tokens_per_s < 1.05 * 4 * 16 / (15 * itl_s), "none is faster than the script"
        assert runs[name].reason == ""
        assert runs[name].ready_s is not None
        assert (runs[name].host_memory_bytes or 0) > 2**20
    assert "at concurrency 4" in runs["dies"].reason
    assert "the server died" in runs["dies"].reason
    assert runs["dies"].level(1) is not None
    assert runs["dies"].level(4) is None
    assert "ended with code 2 before it could become ready" in runs["broken"].reason
    assert (
        runs["absent"].reason
        == "the program 'no-such-program' of its command is not there (PATH, or `python` of its own)"
    )
    findings = {aspect.name: aspect.findings for aspect in found.aspects}
    assert len(findings) == 9
    assert findings["Concurrency"]["quick"].startswith("4 concurrent, ")
    assert findings["Performance"]["dies"] == "not measured: it did not finish the load"
    assert findings["Performance"]["broken"] == "not measured: it did not start"
    assert findings["Performance"]["absent"] == "not measured: it did not start"
    assert findings["Quantization support"]["quick"] == "not measured: not part of this comparison"
    [document] = find_documents(folder.path)
    page = render(document.content)
    for text in ("quick", "the server died", "no-such-program", "Batching", "Community and ecosystem"):
        assert text in page
    assert str(tmp_path) not in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "binary", "wanted"),
    [
        (
            "llama.cpp",
            "llama-server",
            "--ctx-size 16384 --parallel 8 --batch-size 4096 --no-cache-prompt --cache-ram 0",
        ),
        ("tensorrt-llm", "trtllm-serve", "--max_seq_len 2048 --max_batch_size 8 --max_num_tokens 4096"),
    ],
)
def test_template_starts_a_program_of_that_name(name: str, binary: str, wanted: str, tmp_path: Path) -> None:
    """The program ends with status 3 where the flags of the equal settings are not exactly these."""
    code = (
        f'#!/bin/sh\ncase "$*" in *"{wanted}") ;; *) echo "flags: $*"; exit 3;; esac\n'
        'while [ "$1" != --port ]; do shift; done\n'
        f'exec {COMMAND_LINE} --port "$2" --ttft-ms 1 --itl-ms 0\n'
    )
    program(tmp_path, binary, code)
    environment = {"PYTHONPATH": SOURCE, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    options = {name: BackendOptions(environment=environment, checkpoint="m.gguf" if name == "llama.cpp" else "m")}
    plan = BackendsPlan(model="m", backends=(name,), settings=SETTINGS, options=options, set_ups=ONE_SERVER)
    [run] = compare(plan, tmp_path, small_load(concurrency=(2,), num_prompts=(4,))).runs
    assert run.reason == ""
    assert run.level(2) is not None
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_load_is_balanced_over_two_servers_by_a_fleet(tmp_path: Path) -> None:
    plan = BackendsPlan(model="m", backends=("a",), options={"a": scripted("--itl-ms 1")}, set_ups=("load-balanced",))
    [run] = compare(plan, tmp_path, small_load(concurrency=(4,), num_prompts=(12,))).runs
    assert run.reason == ""
    assert run.replicas == 2
    level = run.level(4)
    assert level is not None
    assert level.succeeded == 12
    [fleet] = tmp_path.glob("*/fleet-a.yaml")
    assert json.loads(fleet.read_text())["models"]["m"]["replicas"] == 2
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_server_that_runs_already_is_measured_and_left_running(tmp_path: Path) -> None:
    command = [*SCRIPTED.replace("{port}", "0").split(), "--itl-ms", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            running = {"theirs": url, "gone": "http://127.0.0.1:1"}
            plan = BackendsPlan(model="m", backends=(), running=running, set_ups=(*ONE_SERVER, "split"))
            found = compare(plan, tmp_path, small_load(concurrency=(2,), num_prompts=(4,)))
            assert server.poll() is None
        finally:
            server.kill()
    theirs, gone, *others = found.runs
    assert (theirs.reason, theirs.ready_s) == ("", None)
    assert theirs.level(2) is not None
    assert gone.reason == "nothing answers a request for its models at its address"
    assert {run.reason for run in others} == {"it runs already: only one server is measured"}
    ease = next(aspect for aspect in found.aspects if aspect.name.startswith("Ease"))
    assert ease.findings["theirs"] == "not measured: it ran already"
    assert url not in render(found)


def level(concurrency: int, rate: float, failed: int = 0) -> LevelResult:
    return LevelResult(
        concurrency=concurrency,
        requests=100,
        succeeded=100 - failed,
        failed=failed,
        peak_in_flight=concurrency,
        duration_s=1.0,
        output_tokens_per_s=rate,
        total_tokens_per_s=rate,
        prompt_tokens=1,
        output_tokens=1,
        verdict="FAILED" if failed else "OK",
        failures={"http 500: broken": failed // 2 + 1, "connection reset": failed // 2} if failed else {},
    )


def comparison(**rates: list[LevelResult]) -> BackendComparison:
    runs = [BackendRun(backend=name, start="single", model="m", levels=levels) for name, levels in rates.items()]
    return BackendComparison(
        started="",
        duration_s=0.0,
        fingerprint=take_fingerprint(),
        model="m",
        backends=list(rates),
        set_ups=["batching"],
        most_sessions=1,
        settings={},
        load={"concurrency": [4, 8]},
        runs=runs,
    )


def test_small_lead_and_incomplete_levels_name_no_best() -> None:
    close = best_backends(comparison(a=[level(4, 100), level(8, 200)], b=[level(4, 104), level(8, 204)]))[0]
    assert close.backend is None
    assert "no clear best: b leads a by 3.0 %" in close.reason
    clear = best_backends(comparison(a=[level(4, 100), level(8, 200)], b=[level(4, 110), level(8, 204)]))[0]
    assert clear.backend == "b"
    failing = best_backends(comparison(a=[level(4, 100), level(8, 200)], b=[level(4, 900), level(8, 900, failed=2)]))
    assert [(best.levels, best.backend) for best in failing] == [([4, 8], None), ([4], "b"), ([8], None)]
    assert failing[1].reason == "9.00 times a (single)"
    lucky = best_backends(comparison(a=[level(4, 900, failed=1), level(8, 900)], b=[level(4, 1), level(8, 1)]))[0]
    assert lucky.backend == "a", "one answer in a hundred without text is no failure of the server"


def test_reason_of_a_failed_start_is_the_exception_and_not_its_hint() -> None:
    text = """the server ended with code 1 before it could become ready:
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, no GGUF file in /w/m
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
    reason = published_reason(text)
    assert reason.startswith("the server ended with code 1 before it could become ready: pydantic_core.")
    assert "1 validation error for ModelConfig Value error, no GGUF file in" in reason
    assert "further information" not in reason


def test_failed_requests_are_shown_with_their_share_and_most_frequent_reason() -> None:
    found = comparison(a=[level(4, 100), level(8, 200)], b=[level(4, 900, failed=2), level(8, 900, failed=51)])
    found.best, found.aspects = best_backends(found), find_aspects(found)
    for best, share in zip(found.best, ("2 to 51", "2", "51"), strict=True):
        assert best.backend is None
        assert best.reason.startswith("no comparison: only a completed all levels")
        assert best.reason.endswith(f"; b failed {share} % (single)")
    findings = {aspect.name: aspect.findings for aspect in found.aspects}
    assert findings["Performance"]["b"] == "at 8 failed 51 %: http 500: broken"
    assert findings["Concurrency"]["b"] == "at 4 failed 2 %: http 500: broken"
    assert findings["Memory efficiency"]["b"] == "at 8 failed 51 %: http 500: broken"
    page = render(found)
    assert "failed 51 %: http 500: broken" in page
    assert "too many requests failed" not in page
    neither = best_backends(comparison(a=[level(4, 1, failed=9), level(8, 1)], b=[level(4, 1, failed=8), level(8, 1)]))
    assert (
        neither[0].reason == "no backend completed all levels; a failed 0 to 9 % (single); b failed 0 to 8 % (single)"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "vllm,trition"], "backend 'trition' has no template"),
        (["--backends", "vllm", "--python", "sglang=/p"], "--python: 'sglang' is not among --backends vllm"),
        (["--set-ups", "batched"], "--set-ups: 'batched' is unknown; there are sessions, quantized, batching"),
        (["--skip", "vllm=fast"], "--skip: 'fast' is unknown"),
        (["--env", "vllm=HOME"], "--env vllm: 'HOME' is not of the form NAME=VALUE"),
        (["--add", "http://127.0.0.1:1"], "--add: 'http://127.0.0.1:1' is not of the form NAME=VALUE"),
        (["--add", "vllm=http://127.0.0.1:1"], "each backend needs a name of its own"),
        (["--quantized", "a.gguf", "--quantized", "b.gguf"], "--quantized is given twice for all backends"),
        (["--concurrency", "4,4"], "--concurrency: each level once; got 4,4"),
        (["--backends", ""], "no backend to measure"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare-backends", "m", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_interrupt_keeps_what_was_measured_and_ends_the_server(tmp_path: Path) -> None:
    script = f"{SCRIPTED} --itl-ms 1"
    command = [sys.executable, "-m", "meltcore.cli.main", "compare-backends", "m", "--backends", "meltcore,vllm"]
    command += ["--command", f"meltcore={script}", "--command", f"vllm={script} --fault silent"]
    command += ["--env", f"vllm=PYTHONPATH={SOURCE}", "--set-ups", "batching", "--concurrency", "2"]
    command += ["--num-prompts", "4", "--workload", "random:in=8,out=8", "--sessions", "1", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    compared = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        deadline_s = time.monotonic() + 60
        while not list(tmp_path.glob("*/server-vllm-single.log")):
            assert time.monotonic() < deadline_s
            assert compared.poll() is None, compared.communicate()
            time.sleep(0.02)
        compared.send_signal(signal.SIGTERM)
        assert compared.wait(WAIT_S) == 130
    finally:
        compared.kill()
        compared.communicate()
    [result] = tmp_path.glob("*/result.json")
    found = json.loads(result.read_text())
    assert [run["backend"] for run in found["runs"]] == ["meltcore"]
    assert found["notes"] == ["It was interrupted: later runs were not made."]
    assert left_behind(tmp_path) == []
