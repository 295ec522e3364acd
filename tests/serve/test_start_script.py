"""scripts/start_server.sh: a server that keeps running, a second start, and the cleanup of a failed start."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from waiting import WAIT_S, wait_until

from meltcore.measure.experiments.servers import Api, ApiError
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL

SCRIPT = ROOT / "scripts" / "start_server.sh"
MELTCORE = [sys.executable, "-m", "meltcore.cli.main"]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = tmp_path / "run-meltcore"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m meltcore.cli.main "$@"\n')
    program.chmod(0o755)
    # Its own folder of records, apart from other servers of this user.
    own = {"MODEL": BUNDLED_MODEL, "PORT": str(port), "XDG_STATE_HOME": str(tmp_path), "MELTCORE": str(program)}
    return {**os.environ, **own, "TP": "1", "CUDA_VISIBLE_DEVICES": "", "LOG": str(tmp_path / "server.log")}


def start(settings: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], env=settings, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def answers(settings: dict[str, str]) -> bool:
    try:
        return Api(f"127.0.0.1:{settings['PORT']}", timeout_s=5).get("/live").status == 200
    except ApiError:
        return False


@pytest.mark.slow
def test_script_server_starts_stays_and_is_stopped(settings: dict[str, str]) -> None:
    try:
        done = start(settings, "--device", "cpu", "--memory", "128MiB")
        assert (done.returncode, done.stderr) == (0, "")
        assert f"listening on http://127.0.0.1:{settings['PORT']}" in done.stdout
        api = Api(f"127.0.0.1:{settings['PORT']}")
        assert api.resolve_model()[0] == BUNDLED_MODEL
        assert api.get("/health").status == 200
        assert "listening on" in Path(settings["LOG"]).read_text()
        again = start(settings)
        assert again.returncode == 2
        assert f":{settings['PORT']} serves {BUNDLED_MODEL} already (pid" in again.stderr
        assert api.get("/health").status == 200
    finally:
        stop = [*MELTCORE, "stop", "--port", settings["PORT"]]
        stopped = subprocess.run(stop, env=settings, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert "stopped http://127.0.0.1" in stopped.stdout
    assert not answers(settings)


@pytest.mark.parametrize(
    ("gpus", "given", "asked"),
    [
        (8, {}, "--tensor-parallel-size 8"),
        (8, {"DP": "2"}, "--tensor-parallel-size 4"),
        (6, {}, "--tensor-parallel-size 4"),
        (8, {"TP": "2"}, "--tensor-parallel-size 2"),
        (0, {}, ""),
        (8, {"CUDA_VISIBLE_DEVICES": "0,1"}, "--tensor-parallel-size 2"),
        (8, {"CUDA_VISIBLE_DEVICES": "3, 4,5"}, "--tensor-parallel-size 2"),
        (8, {"CUDA_VISIBLE_DEVICES": "GPU-a1,GPU-b2,MIG-c3,GPU-d4"}, "--tensor-parallel-size 4"),
        (8, {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "DP": "2"}, "--tensor-parallel-size 2"),
        (8, {"CUDA_VISIBLE_DEVICES": "0,1", "TP": "8"}, "--tensor-parallel-size 8"),
        (8, {"CUDA_VISIBLE_DEVICES": "5"}, ""),
        (8, {"CUDA_VISIBLE_DEVICES": ""}, ""),
        (8, {"CUDA_VISIBLE_DEVICES": "-1"}, ""),
        (8, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ""),
    ],
)
def test_all_visible_gpus_are_used_by_default(
    settings: dict[str, str], tmp_path: Path, gpus: int, given: dict[str, str], asked: str
) -> None:
    del settings["TP"], settings["CUDA_VISIBLE_DEVICES"]
    for name, text in (
        ("nvidia-smi", "\n".join(f"echo 'GPU {at}: NVIDIA H200'" for at in range(gpus))),
        ("run-meltcore", 'echo "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{settings['PATH']}"
    done = start(settings | {"PATH": path} | given, "--max-model-len", "4096")
    assert done.returncode == 0
    words = done.stdout
    assert words.startswith(f"serve {BUNDLED_MODEL} --served-model-name {BUNDLED_MODEL} ")
    assert words.endswith("--daemon --start-timeout 900 --max-model-len 4096\n")
    assert asked in words
    assert ("--tensor-parallel-size" in words) == bool(asked)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"HACKATHON_MODEL_ID": "org/model", "MODEL": ""}, "serve org/model "),
        ({"HACKATHON_MODEL_ID": "org/model"}, f"serve {BUNDLED_MODEL} "),
        ({"HACKATHON_DATA_PARALLEL_REPLICAS": "8"}, "--data-parallel-size 8 "),
        ({"HACKATHON_DATA_PARALLEL_REPLICAS": "8", "DP": "2"}, "--data-parallel-size 2 "),
        ({"HACKATHON_DEVICE": "cuda"}, "--device cuda "),
        ({"HACKATHON_DTYPE": "bfloat16"}, "--dtype bfloat16 "),
        ({"HACKATHON_BATCH_MAX_SIZE": "16"}, "--max-num-seqs 16 "),
        ({"HACKATHON_MAX_PENDING_REQUESTS": "4096"}, "--max-queue 4096 "),
    ],
    ids=str,
)
def test_variables_of_the_hackathon_are_aliases(
    settings: dict[str, str], tmp_path: Path, given: dict[str, str], asked: str
) -> None:
    (tmp_path / "run-meltcore").write_text('#!/bin/sh\necho "$@"\n')
    done = start(settings | given)
    assert (done.returncode, done.stderr) == (0, "")
    assert asked in done.stdout
    assert done.stdout.endswith("--daemon --start-timeout 900\n")


def test_variable_without_counterpart_is_named_and_changes_nothing(settings: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "run-meltcore").write_text('#!/bin/sh\necho "$@"\n')
    plain = start(settings)
    done = start(settings | {"HACKATHON_TORCH_COMPILE": "1", "HACKATHON_BACKEND": ""})
    assert done.stdout == plain.stdout
    assert done.stderr == "start_server.sh: HACKATHON_TORCH_COMPILE=1 has no counterpart here\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"TP": "x"}, "argument -tp/--tensor-parallel-size: 'x' is not a whole number"),
        ({"TP": "3"}, "argument -tp/--tensor-parallel-size: invalid choice: 3"),
        ({"TP": "", "DP": "x"}, "argument -dp/--data-parallel-size: 'x' is not a whole number"),
        ({"TP": "", "DP": "0"}, "argument -dp/--data-parallel-size: '0' is not a whole number"),
        ({"TP": "", "DP": "08x"}, "argument -dp/--data-parallel-size: '08x' is not a whole number"),
        ({"PORT": "x"}, "argument --port: 'x' is not a whole number"),
    ],
    ids=str,
)
def test_wrong_value_is_named(settings: dict[str, str], given: dict[str, str], said: str) -> None:
    done = start(settings | given)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_server_that_is_not_ready_in_time_is_ended(settings: dict[str, str]) -> None:
    done = start(settings | {"START_TIMEOUT": "0.5"}, "--device", "cpu")
    assert done.returncode == 2
    assert "was not ready within 0.5 s" in done.stderr
    wait_until(lambda: not answers(settings), "the half-started server to be gone")


def test_interrupted_start_leaves_no_server_behind(settings: dict[str, str]) -> None:
    words = [
        "serve",
        BUNDLED_MODEL,
        "--device",
        "cpu",
        "--port",
        settings["PORT"],
        "--daemon",
        "--log",
        settings["LOG"],
    ]
    starting = subprocess.Popen([*MELTCORE, *words], env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: of_log(settings), "a server that starts")
    starting.send_signal(signal.SIGTERM)
    assert starting.wait(WAIT_S) != 0
    wait_until(lambda: not of_log(settings), "its end")


def of_log(settings: dict[str, str]) -> str:
    """The processes whose command line names the log."""
    found = subprocess.run(["pgrep", "-f", f"meltcore.fleet.daemon {settings['LOG']}"], capture_output=True, text=True)
    return found.stdout


@pytest.mark.slow
def test_missing_model_is_reported(settings: dict[str, str]) -> None:
    done = start(settings | {"MODEL": "./no-such-folder", "START_TIMEOUT": "60"})
    assert done.returncode == 2
    assert "no such folder" in done.stderr


def test_only_a_folder_gets_the_name_of_the_hackathon_model(settings: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "echo-script").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "echo-script").chmod(0o755)
    given = settings | {"MELTCORE": str(tmp_path / "echo-script"), "MODEL": str(tmp_path)}
    assert f"serve {tmp_path} --served-model-name Qwen/Qwen3.5-35B-A3B " in start(given).stdout
    assert f"serve {tmp_path} --served-model-name mine " in start(given | {"NAME": "mine"}).stdout
