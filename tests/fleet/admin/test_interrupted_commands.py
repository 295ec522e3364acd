"""Commands that meet the end of a fleet, or another fleet: an error that says so, and no traceback."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from waiting import WAIT_S

import meltcore
from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.common.options import Size
from meltcore.common.process import LoggedProcess, call_with_timeout, start_ticks
from meltcore.fleet import daemon
from meltcore.fleet.admin import admin
from meltcore.fleet.admin.operations import FleetOperations
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.fleet.plan.planned import no_planner
from meltcore.fleet.run.logs import _Tail, find_logs, log_folder, log_path
from meltcore.fleet.supervisor import FleetOptions
from meltcore.serve.api_server import APIServer
from meltcore.settings.fleet_spec import FleetSpec, ModelSection, ServerSection, TimeoutsSection

BUNDLED = Path(meltcore.__file__).parent / "bundled"


def test_restart_of_a_model_whose_loading_is_cancelled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(name="a", names=("a",), config=None, status="loading", limits=None)
    supervisor: Any = SimpleNamespace(models={0: model})

    async def replace(*_: object) -> Any:
        loading = asyncio.create_task(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(loading.cancel)  # as the end of the fleet does
        return SimpleNamespace(loading=loading, status="draining", reason="")

    async def restart() -> None:
        operations = FleetOperations(supervisor, Mock())
        monkeypatch.setattr(operations, "_replace", replace)
        await asyncio.wait_for(operations.restart("a"), WAIT_S)

    with pytest.raises(ConfigError, match="a was ended while it was loading"):
        asyncio.run(restart())


@pytest.mark.parametrize(("name", "fault"), [("sums", "shard"), ("phrases", "shard"), ("sums", "tokenizer")])
def test_reload_for_files_that_are_missing_is_refused_before_an_engine_ends(
    tmp_path: Path, name: str, fault: str
) -> None:
    """Missing shards, and a broken tokenizer, were found only when the engine of before had ended."""
    checkpoint = tmp_path / name
    shutil.copytree(BUNDLED / name, checkpoint)
    if fault == "shard":
        (checkpoint / "model.safetensors").unlink()
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
        (checkpoint / "model-00001-of-00002.safetensors").touch()
    else:
        (checkpoint / "tokenizer.json").write_text("{")
    task = {"sums": "generation", "phrases": "translation"}[name]
    section = ModelSection(checkpoint=str(checkpoint), device="cpu", memory=Size(2**30), task=task)
    running, new = (FleetSpec(models={"m": each}) for each in (ModelSection(checkpoint=f"meltcore/{name}"), section))

    async def read_running(_checkpoints: object) -> None:
        return None

    model = SimpleNamespace(name="m", names=("m",), config=running.models["m"])  # has no method that ends it
    supervisor: Any = SimpleNamespace(models={0: model}, fleet=PlacedFleet(running), read_running=read_running)
    planner: Any = SimpleNamespace(checkpoints=list, config=lambda _report, running: PlacedFleet(new))
    reason = "missing: model-00002-of-00002.safetensors" if fault == "shard" else "tokenizer.json"
    with pytest.raises(ConfigError, match=f"models.m: .*{reason}"):
        asyncio.run(FleetOperations(supervisor, lambda: planner).reload())


def test_reload_whose_checkpoints_hang_blocks_neither_a_restart_nor_the_end() -> None:
    """A hub that accepted and was silent held up `restart` for an hour without a word, and `down` for ever."""
    released = threading.Event()
    model = SimpleNamespace(name="a", names=("a",), status="ready", limits=1, replace_engines=AsyncMock())
    fleet = PlacedFleet(FleetSpec(models={"a": ModelSection(checkpoint="m")}))
    late = msgspec.structs.replace(fleet.spec, timeouts=TimeoutsSection(start_s=0.01))
    supervisor: Any = SimpleNamespace(models={0: model}, fleet=fleet, read_running=AsyncMock())
    planner: Any = SimpleNamespace(checkpoints=released.wait)

    async def change() -> None:
        operations = FleetOperations(supervisor, lambda: planner)
        hung = asyncio.create_task(operations.reload())
        await asyncio.sleep(0)
        assert await operations.restart("a") == ["a"]
        with pytest.raises(ConfigError, match=r"another reload has been reading .* for \d+ s, and may for 600 s"):
            await operations.reload()
        assert not hung.done()
        supervisor.fleet = PlacedFleet(late)
        with pytest.raises(ConfigError, match=r"not read within 0\.01 s \(timeouts\.start_s\): nothing has changed"):
            await FleetOperations(supervisor, lambda: planner).reload()

    try:
        call_with_timeout(WAIT_S, lambda: asyncio.run(change()))  # ends while the thread of the reload hangs
    finally:
        released.set()


def test_reload_names_the_checkpoint_that_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    sections = (ModelSection(checkpoint=each, device="cpu") for each in ("meltcore/sums", str(tmp_path)))
    old, new = (FleetSpec(models={"m": each}, timeouts=TimeoutsSection(start_s=0.1)) for each in sections)
    model = SimpleNamespace(name="m", names=("m",), config=old.models["m"])
    supervisor: Any = SimpleNamespace(models={0: model}, fleet=PlacedFleet(old), read_running=AsyncMock())
    planner: Any = SimpleNamespace(checkpoints=list, config=lambda _report, running: PlacedFleet(new))
    with pytest.raises(ConfigError, match=rf"nothing has changed; models\.m: reading {tmp_path}$"):
        call_with_timeout(WAIT_S, lambda: asyncio.run(FleetOperations(supervisor, lambda: planner).reload()))


def test_server_without_a_fleet_yaml_is_not_changed() -> None:
    """Its engine would not be started again."""
    operations = FleetOperations(SimpleNamespace(read_running=None), no_planner)  # type: ignore[arg-type]
    changes = (operations.reload, lambda: operations.restart(None), lambda: operations.sleep("a"))
    for change in (*changes, lambda: operations.wake("a")):
        with pytest.raises(ConfigError, match=r"started without a fleet\.yaml: end it, and start it with other option"):
            asyncio.run(change())


def write_record(command: str, port: int, log: str = "") -> None:
    """Write the record of a server on a port that runs, as this process does."""
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    record = daemon.DaemonRecord(os.getpid(), ticks, port, f"http://127.0.0.1:{port}", "m", log)
    (daemon.state_dir() / f"{command}-{port}.json").write_bytes(msgspec.json.encode(record))


@pytest.mark.parametrize("command", [["reload"], ["restart"], ["sleep", "a"], ["wake", "a"]], ids=lambda each: each[0])
@pytest.mark.parametrize("is_sent", [True, False])
def test_interrupted_change_of_a_fleet_says_that_it_goes_on_once_it_was_sent(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    is_sent: bool,
) -> None:
    async def interrupt(connecting: Any, *_: object) -> None:
        if is_sent:
            await connecting
        connecting.close()
        raise KeyboardInterrupt

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    write_record("up", 8001)
    monkeypatch.setattr("meltcore.fleet.admin.admin.connect", AsyncMock())
    monkeypatch.setattr("meltcore.fleet.admin.admin.ask", interrupt)
    assert main(command) == 130
    assert capsys.readouterr().err.splitlines() == [
        *(["meltcore: the fleet goes on with it; `meltcore ps` shows its models"] if is_sent else []),
        f"meltcore {command[0]}: interrupted",
    ]


def test_change_that_meets_the_end_of_a_fleet_says_so() -> None:
    """The answer was a traceback of the server, and a draining model was said not to exist."""
    model = SimpleNamespace(name="a", names=("a", "b"), status="draining", reason="the server is going down")
    operations = FleetOperations(SimpleNamespace(models={0: model}), Mock())  # type: ignore[arg-type]
    for change in (operations.restart, operations.sleep, operations.wake):
        with pytest.raises(ConfigError, match="b is draining: the server is going down"):
            asyncio.run(change("b"))

    async def cancelled(_model: str | None) -> None:
        raise asyncio.CancelledError

    request: Any = SimpleNamespace(headers={}, query_params={})
    answer = asyncio.run(admin._endpoint(cancelled)(request))
    assert (answer.status_code, json.loads(answer.body)) == (503, {"error": "the fleet is going down"})


def test_restart_of_all_models_that_fails_says_what_was_restarted() -> None:
    models: dict[int, Any] = {
        at: SimpleNamespace(name=name, names=(name,), status="ready", limits=1, replace_engines=AsyncMock())
        for at, name in enumerate("abcd")
    }
    models[2].replace_engines.side_effect = ConfigError("no memory")
    supervisor: Any = SimpleNamespace(
        models=models, fleet=PlacedFleet(FleetSpec(models={"a": ModelSection(url="http://h")}))
    )
    error = "c did not come back: no memory; restarted before: a, b; not restarted: d"
    with pytest.raises(ConfigError, match=error):
        asyncio.run(FleetOperations(supervisor, Mock()).restart(None))


@pytest.mark.parametrize("rename", [True, False], ids=["written anew", "missing for a while"])
def test_logs_that_are_followed_go_on_in_the_files_of_the_next_fleet(tmp_path: Path, rename: bool) -> None:
    """`logs -f` ended with FileNotFoundError after `down` and `up`, or followed the deleted file for ever."""
    path = tmp_path / "a.log"
    path.write_text("first\n")
    tail = _Tail(path)
    assert list(tail.lines()) == ["first"]
    if rename:
        (tmp_path / "new").write_text("of the second fleet\n")
        (tmp_path / "new").rename(path)
    else:
        path.rename(tmp_path / "held")  # so that its inode is not used again
        assert list(tail.lines()) == []
        path.write_text("of the second fleet\n")
    assert list(tail.lines()) == ["of the second fleet"]


def test_ps_says_of_which_model_a_reason_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal reasons of two models were one line, without a name."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    write_record("up", 8001)
    row = {"replica": 0, "task": "generation", "state": "loading", "status": "loading", "reason": "loading: starting"}
    row |= {"pid": None, "memory_bytes": 0, "restarts": 0, "open_requests": 0, "port": 8001, "node": None}
    rows = [row | {"model": "a"}, row | {"model": "b"}, row | {"model": "b", "replica": 1}]
    rows += [row | {"model": "c", "reason": "c could not be loaded: no such folder"}]
    monkeypatch.setattr("meltcore.fleet.admin.admin.call_admin", lambda *_: rows)
    assert main(["ps"]) == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        *("a: loading: starting", "b: loading: starting", "c could not be loaded: no such folder")
    ]


def test_down_finds_fleets_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for command, port in (("serve", 8000), ("up", 8001)):
        write_record(command, port)
    assert [record.port for record in daemon.running()] == [8000, 8001]
    assert daemon.find_fleet(None).port == 8001
    with pytest.raises(ConfigError, match="no fleet is running on port 8000"):
        daemon.find_fleet(8000)


def test_down_of_a_fleet_that_has_just_ended_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill(pid: int, signum: int) -> None:
        raise ProcessLookupError(pid, signum)

    monkeypatch.setattr(os, "kill", kill)
    ended = daemon.DaemonRecord(pid=2**22, start_ticks=1, port=1, url="http://127.0.0.1:1", model="a", log="")
    assert daemon.stop([ended], 1.0) == 0
    assert "stopped http://127.0.0.1:1 (a)" in capsys.readouterr().out


def test_fleet_on_the_port_of_another_at_a_second_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It took the record of the first one, emptied its logs, and both were called by one port."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    write_record("up", 8001)
    log = log_path(log_folder(daemon.state_dir(), 8001), "m", 0, 1)
    log.parent.mkdir()
    log.write_text("live")
    spec = FleetSpec(models={"m": ModelSection(url="http://h")}, server=ServerSection(host="127.0.0.2", port=8001))
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:8001 serves m already .* choose another"):
        daemon.serve_recorded(PlacedFleet(spec), "", FleetOptions(log_folder=daemon.state_dir()))
    assert log.read_text() == "live"
    assert [record.port for record in daemon.running()] == [8001]


def test_log_of_a_daemon_replaces_no_file_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It replaced the fleet file or the model file, and emptied the log of a server that ran."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    engine_log = log_path(log_folder(daemon.state_dir(), 8001), "m", 0, 1)
    engine_log.parent.mkdir()
    files = [tmp_path / name for name in ("fleet.yaml", "model.gguf", "template.jinja", "keys", "live.log")]
    for path in (*files, engine_log):
        path.write_text("in use")
    write_record("up", 8001, str(tmp_path / "live.log"))
    (tmp_path / "link").symlink_to(tmp_path / "fleet.yaml")
    model = ModelSection(checkpoint="model.gguf", chat_template="template.jinja")
    fleet = PlacedFleet(FleetSpec(models={"m": model}, server=ServerSection(port=8002, api_key_file="keys")))
    source = daemon.PlannedFleet(str(tmp_path / "fleet.yaml"), msgspec.Raw(b"null"))
    (tmp_path / "notes.txt").write_text("in use")
    with pytest.raises(ConfigError, match=r"--log .*notes.txt: this file is no log of a server"):
        daemon.start(fleet, source, log=tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "in use"
    for text in ("", "meltcore: listening on http://127.0.0.1:8002\n", "time=2026-11-29T00:00:00 event=request\n"):
        (tmp_path / "old.log").write_text(text)  # of an earlier server
        daemon._check_log(tmp_path / "old.log", fleet.spec, source)
    for path in (*files, engine_log, tmp_path / "link"):
        with pytest.raises(ConfigError, match=r"--log .* (the server reads|writes to) this file; name another one"):
            daemon.start(fleet, source, log=path)
        assert path.read_text() == "in use"


def test_logs_of_models_with_similar_names_are_apart(tmp_path: Path) -> None:
    """`a/b` and `a--b` had one log, `qwen` and `qwen.1` too, and a name of many slashes was too long for a file.

    Logs of removed models were among all logs, and aliases were unknown.
    """
    names = {"a/b": 1, "a--b": 1, "qwen": 2, "qwen.1": 1, "qwen.1.2": 1, "q" + "/" * 127: 2}
    written = {}
    for name, replicas in names.items():
        written[name] = [log_path(tmp_path, name, replica, replicas) for replica in range(replicas)]
        for path in written[name]:
            path.write_text(name)
    for name, paths in written.items():
        found = find_logs(tmp_path, "", name)
        assert [log.path for log in found] == paths
        assert {log.path.read_text() for log in found} == {name}
        assert {log.name.partition("@")[0] for log in found} == {name}
    with pytest.raises(ConfigError, match=r"no log of qwen\.2 in .*; it has a/b, a--b, q/"):
        find_logs(tmp_path, "", "qwen.2")
    aliases = {"a/b": ["near"], "qwen": ["q", "one"]}  # of the fleet after a reload
    assert {log.path for log in find_logs(tmp_path, "", None, aliases)} == {*written["a/b"], *written["qwen"]}
    assert [log.path for log in find_logs(tmp_path, "", "one", aliases)] == written["qwen"]
    assert [log.path for log in find_logs(tmp_path, "", "a--b", aliases)] == written["a--b"], "it was removed"


@pytest.mark.parametrize(
    ("exit_status", "name", "error"),
    [
        (0, "daemon.log", "the server was ended before it was ready; its log: .*daemon.log"),
        (2, "daemon.log", "the fleet does not fit"),
        (2, "/dev/full", "exit status 2; its log /dev/full cannot be written: No space left on device"),
    ],
)
def test_end_of_a_server_that_starts_in_the_background_is_told_apart_from_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exit_status: int, name: str, error: str
) -> None:
    """`meltcore down` meanwhile made the last line of the log the error of `up --daemon`.

    On a full disk the error named the log alone, which was empty.
    """
    log = tmp_path / name

    class EndedProcess(LoggedProcess):
        returncode, pid = exit_status, 1

        def start(self) -> Any:
            with suppress(OSError):
                log.write_text("meltcore up: the fleet does not fit\n")
            return self

        def send(self, data: bytes) -> Any:
            assert b"/h" in data
            return io.BytesIO()

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(daemon, "LoggedProcess", EndedProcess)
    fleet = PlacedFleet(FleetSpec(models={"m": ModelSection(url="http://h")}))
    with pytest.raises(ConfigError, match=error):
        daemon.start(fleet, daemon.OneModel(), log=log)


def test_request_that_an_api_server_accepts_while_its_model_drains_is_ended() -> None:
    """It was told nothing and waited without end: the count of open requests had been read as 0 before."""
    done: list[str] = []

    async def stop() -> None:
        done.append("stop")

    model: Any = SimpleNamespace(
        name="a", number=3, loading=None, stop=stop, drain=lambda _: done.append("drain"),
        stats=SimpleNamespace(total=lambda _: 0),
    )  # fmt: skip
    fleet = PlacedFleet(FleetSpec(models={"a": ModelSection(url="http://h")}))
    supervisor: Any = SimpleNamespace(fleet=fleet, turns=Mock(), broadcast=lambda message: done.append(message.code))
    asyncio.run(FleetOperations._end(SimpleNamespace(_supervisor=supervisor), model, "a is being removed"))  # type: ignore[arg-type]
    assert done == ["drain", "stop", "model_stopping"]


def test_api_server_ends_the_requests_of_a_model_that_is_removed() -> None:
    done: list[str] = []
    backend: Any = SimpleNamespace(
        names=("a",), close=lambda: done.append("close"), end_all=lambda error, *_: done.append(error.code)
    )
    stats = SimpleNamespace(remove_model=lambda _: done.append("statistics"))
    server: Any = SimpleNamespace(_models={3: backend}, _model_table=Mock(), _stats=stats)
    APIServer._remove_model(server, 3)
    assert done == ["model_stopping", "statistics", "close"]
    assert server._models == {}
