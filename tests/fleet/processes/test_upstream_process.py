"""Upstream servers started by a command: templates, environment, readiness, death, the end of their owner."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from places import ROOT
from scripted_server import COMMAND_LINE
from waiting import WAIT_S

from meltcore.common.errors import ConfigError
from meltcore.common.process import free_port, group_members
from meltcore.fleet.processes import upstream_process
from meltcore.fleet.processes.upstream_command import upstream_command
from meltcore.fleet.processes.upstream_process import UpstreamProcess
from meltcore.settings.fleet_spec import ModelSection, TimeoutsSection
from meltcore.settings.server_templates import TEMPLATES, UPSTREAM_TEMPLATES

SCRIPTED = f"{COMMAND_LINE} --port {{port}} --ttft-ms 1 --itl-ms 0"
SOURCE = str(ROOT / "src")


def config(command: str = SCRIPTED, **fields: Any) -> ModelSection:
    return ModelSection(command=command, **({"environment": {"PYTHONPATH": SOURCE}} | fields))


def program(folder: Path, name: str, text: str = "") -> Path:
    """An executable that stands for an upstream server."""
    path = folder / name
    path.write_text(text or "#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("template", "name", "expected"),
    [
        (
            "vllm",
            "vllm",
            "serve /w/a b --host 127.0.0.1 --port 7000 --served-model-name m --max-model-len 4096 --max-num-seqs 8 "
            "--tensor-parallel-size 2",
        ),
        (
            "sglang",
            "python",
            "-m sglang.launch_server --model-path /w/a b --host 127.0.0.1 --port 7000 --served-model-name m "
            "--context-length 4096 --max-running-requests 8 --tp-size 2",
        ),
        (
            "llama.cpp",
            "llama-server",
            "--model /w/a b --host 127.0.0.1 --port 7000 --alias m --n-gpu-layers 999 --ctx-size 32768 --parallel 8",
        ),
        (
            "tensorrt-llm",
            "trtllm-serve",
            "serve /w/a b --host 127.0.0.1 --port 7000 --backend pytorch --max_seq_len 4096 --max_batch_size 8 "
            "--tp_size 2",
        ),
    ],
)
def test_templates(template: str, name: str, expected: str, tmp_path: Path) -> None:
    """The program of the server's own environment, a path with a blank as one argument, no path of our modules."""
    binaries = tmp_path / "venv" / "bin"
    binaries.mkdir(parents=True)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    program(binaries, name)
    settings = config(
        template,
        checkpoint="/w/a b",
        python=str(binaries / "python"),
        max_model_len=4096,
        max_num_seqs=8,
        tensor_parallel_size=2,
        device=(2, 3),
        environment={"A": "1"},
    )
    found = upstream_command("m", settings, 0, 7000)
    assert found.arguments[0] == str(binaries / name)
    assert " ".join(found.arguments[1:]) == expected
    assert "/w/a b" in found.arguments
    assert found.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert found.environment["VIRTUAL_ENV"] == str(tmp_path / "venv")
    assert found.environment["A"] == "1"
    assert "PYTHONPATH" not in found.environment


def test_settings_that_are_not_given_add_no_flag(tmp_path: Path) -> None:
    assert tuple(TEMPLATES) == ("meltcore", *UPSTREAM_TEMPLATES)
    for template in UPSTREAM_TEMPLATES:
        for name in ("vllm", "python", "llama-server", "trtllm-serve"):
            program(tmp_path, name)
        plain = upstream_command("m", config(template, checkpoint="c", python=str(tmp_path / "python")), 0, 1).arguments
        assert not {"--max-model-len", "--context-length", "--ctx-size", "--parallel", "--tp-size"} & set(plain)
        assert "1" in plain
    settings = {"checkpoint": "c", "python": str(tmp_path / "python"), "sleep_mode": "vllm", "environment": {"A": "1"}}
    sleeps = upstream_command("m", config("vllm", **settings), 0, 1)
    assert sleeps.arguments[-1] == "--enable-sleep-mode"
    assert (sleeps.environment["VLLM_SERVER_DEV_MODE"], sleeps.environment["A"]) == ("1", "1")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("vllm", "uses {checkpoint}, and the model has no such setting"),
        ("sh --port {prot} {port}", "unknown {prot}; known are {checkpoint}, {name}"),
        ("sh --port 8000", "must pass {port}"),
        ("sh 'open {port}", "is no command line"),
        ("sh {port} {name", "write a brace that is meant twice"),
        ("no-such-program {port}", "'no-such-program' of its command is not there"),
    ],
)
def test_command_that_cannot_work_is_refused(command: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        upstream_command("m", config(command), 0, 1)
    assert str(error.value).startswith("m: ")
    assert message in str(error.value)


def run(
    tmp_path: Path, settings: ModelSection, check: Any = None, start_s: float = 20.0
) -> tuple[UpstreamProcess, list[str]]:
    reports: list[str] = []
    timeouts = TimeoutsSection(start_s=start_s)
    process = UpstreamProcess("m", settings, 0, free_port(), tmp_path / "log", reports.append, timeouts)

    async def life() -> None:
        try:
            await process.start()
            if check is not None:
                await check(process)
        finally:
            pid = process.pid
            await process.stop()
            assert pid is None or group_members(pid) == []

    asyncio.run(life())
    return process, reports


def test_server_is_ready_after_one_real_request_and_ends_with_its_group(tmp_path: Path) -> None:
    async def check(process: UpstreamProcess) -> None:
        answer = await process._upstream.ask("GET", "/metrics", limit_s=5)
        assert b"requests_in_flight_peak 1.0" in answer.body, "the readiness request"
        assert process.pid is not None
        (server,) = set(group_members(process.pid)) - {process.pid}  # the guard leads the group
        os.kill(server, signal.SIGKILL)
        how, _, output = (await asyncio.wait_for(process.wait(), WAIT_S)).partition(":\n")
        assert how == "exit status 137, killed by SIGKILL"
        assert "scripted server listening" in output

    process, reports = run(tmp_path, config(), check)
    assert reports == []
    assert "scripted server listening" in process.log_tail()
    (tmp_path / "log").write_text("of before")
    run(tmp_path, config())
    assert (tmp_path / "log.previous").read_text() == "of before"


@pytest.mark.slow
def test_start_that_fails_names_the_reason_and_the_output(tmp_path: Path) -> None:
    crash = program(tmp_path, "crash", "#!/bin/sh\necho no GPU found\nexit 3\n")
    with pytest.raises(ConfigError, match="ended while starting \\(exit status 3\\):\nno GPU found"):
        run(tmp_path, config(f"{crash} {{port}}"))
    hang = program(tmp_path, "hang", "#!/bin/sh\necho loading shard 1\nsleep 30\n")
    with pytest.raises(ConfigError, match=r"not ready within 4 s .*cannot be connected to(?s:.*)loading shard 1"):
        run(tmp_path, config(f"{hang} {{port}}"), start_s=4.0)
    with pytest.raises(ConfigError, match=r"not ready within 6 s .*did not answer the readiness request"):
        run(tmp_path, config(SCRIPTED + " --fault silent"), start_s=6.0)
    with pytest.raises(ConfigError, match=r"readiness request on /v1/completions with status 429: .*queue is full"):
        run(tmp_path, config(SCRIPTED + " --fault 429"))


def test_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_process, "STOP_LIMIT_S", 0.3)
    stubborn = program(tmp_path, "stubborn", f"#!/bin/sh\ntrap '' TERM\n{SCRIPTED.format(port='$1')} &\nwait\nwait\n")
    _, reports = run(tmp_path, config(f"{stubborn} {{port}}"))
    assert reports == ["the server of m did not end within 0.3 s of SIGTERM; killing it"]


def test_server_does_not_outlive_an_owner_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys, pathlib, msgspec, time\n"
        "from meltcore.common.process import free_port\n"
        "from meltcore.fleet.processes.upstream_process import UpstreamProcess\n"
        "from meltcore.settings.fleet_spec import ModelSection, TimeoutsSection\n"
        "config = msgspec.json.decode(sys.argv[1], type=ModelSection)\n"
        "log, timeouts = pathlib.Path(sys.argv[2]), TimeoutsSection()\n"
        "process = UpstreamProcess('m', config, 0, free_port(), log, print, timeouts)\n"
        "asyncio.run(process.start()); print(process.pid, flush=True); time.sleep(60)\n"
    )
    settings = msgspec.json.encode(config()).decode()
    command = [sys.executable, "-c", code, settings, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        group = int(owner.stdout.readline())
        assert len(group_members(group)) == 2
        owner.kill()
    deadline_s = time.monotonic() + 5
    while group_members(group):
        assert time.monotonic() < deadline_s, "it outlives its owner"
        time.sleep(0.02)


def test_environment_reaches_the_server(tmp_path: Path) -> None:
    show = program(
        tmp_path,
        "show",
        f"#!{sys.executable}\nimport json, os\nprint(json.dumps(dict(os.environ)))\nraise SystemExit(4)\n",
    )
    with pytest.raises(ConfigError, match="exit status 4"):
        run(tmp_path, config(f"{show} {{port}}", environment={"TOKEN": "x y"}))
    shown = json.loads((tmp_path / "log").read_text())
    assert shown["TOKEN"] == "x y"
    assert "PYTHONPATH" not in shown
