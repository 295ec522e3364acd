"""Child processes: started, watched, ended with their group; time limits and blocked signals."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from waiting import WAIT_S, until

from meltcore.common import process
from meltcore.common.process import ProcessError, block_signals, call_with_timeout, loading_modules
from meltcore.common.process_output import last_error

SLEEP = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"]
IGNORES_SIGTERM = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)",
]
WRITES_MUCH = [sys.executable, "-c", "import os, time; os.write(1, bytes(1_000_000)); time.sleep(60)"]
# A parent that leaves a child of its own behind in its group.
LEAVES_CHILD = [sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '60']); print('done')"]


def test_run_returns_output_and_exit_status() -> None:
    program = "import sys; data = sys.stdin.read(); print(data * 2); sys.stderr.write('note'); sys.exit(3)"
    done = process.run([sys.executable, "-c", program], stdin=b"ab", limit_s=20)
    assert done == (3, b"abab\n", b"note", False)


@pytest.mark.slow
def test_run_past_its_limit_keeps_the_output_and_ends_the_group() -> None:
    started: list[subprocess.Popen[bytes]] = []
    done = process.run(IGNORES_SIGTERM, limit_s=5.0, terminate_limit_s=0.2, on_start=started.append)
    assert done == (None, b"ready\n", b"", False)
    assert process.group_members(started[0].pid) == []


def test_run_ends_what_a_program_left_in_its_group() -> None:
    started: list[subprocess.Popen[bytes]] = []
    done = process.run(LEAVES_CHILD, limit_s=20, on_start=started.append)
    assert done.returncode == 0
    assert process.group_members(started[0].pid) == []


def test_missing_program_is_named() -> None:
    with pytest.raises(ProcessError, match=r"no-such-program cannot be started: No such file"):
        process.run(["no-such-program"], limit_s=5)


def test_async_start_names_a_missing_program_and_end_kills_after_the_limit() -> None:
    async def work() -> int | None:
        with pytest.raises(ProcessError, match="no-such-program cannot be started"):
            await process.start_async(["no-such-program"])
        child = await process.start_async(SLEEP, stdout=subprocess.DEVNULL)
        await process.end_async(child, 0.1)
        return child.returncode

    assert asyncio.run(work()) == -signal.SIGKILL


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_process_ends_whose_output_no_task_reads_any_more(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def work() -> None:
        child = await process.start_async(WRITES_MUCH, stdout=subprocess.PIPE)
        assert child.stdout is not None
        await child.stdout.readexactly(1)
        await until(lambda: child.stdout._paused, "a pipe that is full")  # type: ignore[union-attr]
        await asyncio.wait_for(process.end_async(child, 0.0), WAIT_S)
        assert child.returncode == -signal.SIGKILL
        assert child.stdout.at_eof()

    run(work())


def test_logged_process_waits_for_its_log_and_ends_with_its_group(tmp_path: Path) -> None:
    lines: list[str] = []
    with process.LoggedProcess(
        IGNORES_SIGTERM, tmp_path / "log", name="the server", report=lines.append, stop_limit_s=0.2
    ) as child:
        assert child.wait_for(lambda: child.log or None, 20, "print a line") == "ready\n"
        assert child.running
        pid = child.pid
    assert child.returncode == -signal.SIGKILL
    assert process.group_members(pid) == []
    assert lines == ["the server did not end within 0.2 s of SIGTERM; killing it"]


def test_logged_process_that_ends_first_or_is_late_is_an_error(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "import sys; print('no GPU'); sys.exit(4)"]
    with (
        process.LoggedProcess(failing, tmp_path / "a", name="the server", report=print) as child,
        pytest.raises(ProcessError, match=r"the server ended with code 4 before it could become ready:\nno GPU"),
    ):
        child.wait_for(lambda: None, 20, "become ready")
    with (
        process.LoggedProcess(SLEEP, tmp_path / "b", name="the server", report=print) as child,
        pytest.raises(ProcessError, match=r"the server did not become ready within 0\.3 s:"),
    ):
        child.wait_for(lambda: None, 0.3, "become ready")
    assert not child.running


PYDANTIC_LOG = """
(APIServer pid=4179)     s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)
(APIServer pid=4179) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=4179)   Value error, No GGUF file found in w. [type=value_error, input_value=(), input_type=X]
(APIServer pid=4179)     For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
PYDANTIC_FIELD_LOG = """
pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig
block_size
  Input should be 16 or 32 [type=literal_error, input_value=7, input_type=int]
    For further information visit https://errors.pydantic.dev/2.14/v/literal_error
"""
TORCH_LOG = """
(EngineCore pid=12) ERROR 11-24 12:00:00 [core.py:700]   File "torch/nn/functional.py", line 2, in linear
(EngineCore pid=12) ERROR 11-24 12:00:00 [core.py:700] torch.AcceleratorError: CUDA error: an illegal memory access
(EngineCore pid=12) ERROR 11-24 12:00:00 [core.py:700] CUDA kernel errors might be asynchronously reported later.
(EngineCore pid=12) ERROR 11-24 12:00:00 [core.py:700] For debugging consider passing CUDA_LAUNCH_BLOCKING=1
(EngineCore pid=12) ERROR 11-24 12:00:00 [core.py:700] Compile with `TORCH_USE_CUDA_DSA` to enable assertions.
/usr/lib/python3.12/multiprocessing/resource_tracker.py:279: UserWarning: There appear to be 1 leaked objects
  warnings.warn('resource_tracker: There appear to be 1 leaked objects')
"""
RANK_LOG = """
ValueError: not this one
During handling of the above exception, another exception occurred:
[rank0]: Traceback (most recent call last):
[rank0]:   File "serve.py", line 3, in <module>
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.
[rank0]:[W1124 12:00:00.5 ProcessGroupNCCL.cpp:1250] Warning: destroy_process_group() was not called
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            PYDANTIC_LOG,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, No GGUF "
            "file found in w. [type=value_error, input_value=(), input_type=X]",
        ),
        (
            PYDANTIC_FIELD_LOG,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig block_size Input should "
            "be 16 or 32 [type=literal_error, input_value=7, input_type=int]",
        ),
        (TORCH_LOG, "torch.AcceleratorError: CUDA error: an illegal memory access"),
        (RANK_LOG, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."),
        ("subprocess.TimeoutExpired: Command 'x' timed out\n", "subprocess.TimeoutExpired: Command 'x' timed out"),
        ("loading\nerror: unknown model architecture: 'x'\n", "error: unknown model architecture: 'x'"),
        ("", ""),
    ],
)
def test_error_of_a_log_is_its_last_exception_and_no_hint(text: str, error: str) -> None:
    assert last_error(text) == error


def test_stopped_processes_and_start_times_are_read_from_proc() -> None:
    child = process.start(SLEEP, stdout=subprocess.DEVNULL)
    try:
        ticks = process.start_ticks(child.pid)
        assert ticks is not None
        assert not process.is_stopped(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        until = time.monotonic() + WAIT_S
        while not process.is_stopped(child.pid):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert process.start_ticks(child.pid) == ticks
    finally:
        assert process.end_group(child, 0.2)
    assert process.start_ticks(child.pid) is None
    assert not process.is_stopped(child.pid)
    assert process.describe_exit(child.returncode) == f"killed by signal {-child.returncode}"
    assert process.describe_exit(3) == "exit status 3"


def test_call_with_timeout_returns_raises_or_gives_up() -> None:
    assert call_with_timeout(5.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(5.0, lambda: 1 // 0)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        call_with_timeout(0.05, lambda: threading.Event().wait(20))


def test_blocked_signals_take_effect_when_the_block_is_left() -> None:
    done = []

    def work() -> None:
        with block_signals():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_block_signals_does_nothing_on_other_threads() -> None:
    handlers = []

    def look() -> None:
        with block_signals():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(WAIT_S)
    assert handlers == [signal.default_int_handler]


def test_modules_are_loaded_without_collections_and_not_traversed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: enabled.append(gc.isenabled()))

    @loading_modules()
    def load() -> None:
        enabled.append(gc.isenabled())
        raise ImportError

    with pytest.raises(ImportError):
        load()
    assert enabled == [False, False]
    assert gc.isenabled()
