"""`meltcore up`, `down`, `ps`, `logs`, `restart` and `reload`, over scripted engines."""

import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_harness import RunningServer, fleet_command, make_model, running
from waiting import WAIT_S, wait_until

import meltcore
from meltcore.cli.main import main
from meltcore.common.process import LoggedProcess
from meltcore.fleet.daemon import find_fleet
from meltcore.fleet.run.logs import LogFile, print_logs, rotate_large
from meltcore.fleet.run.restart_policy import RestartAfterPause
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL

BUNDLED_SUMS = Path(meltcore.__file__).parent / "bundled" / "sums"
COMPLETIONS = "/v1/completions"
POLICY = RestartAfterPause(first_pause_s=0.05, max_deaths=2, probe_limit_s=10.0)


class Fleet:
    """A running fleet of scripted models, and its file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "fleet.yaml"
        self.server: RunningServer

    def write(self, models: dict[str, dict[str, Any]], **sections: Any) -> None:
        """Write fleet.yaml. `engine` of a model: options of its scripted engine."""
        named = {}
        for name, options in models.items():
            checkpoint = self.folder / name
            if not checkpoint.exists():  # else a server that starts may read a file that is being written
                make_model(checkpoint)
                (checkpoint / "engine.json").write_text(json.dumps(options.get("engine", {})))
            fields = {key: value for key, value in options.items() if key != "engine"}
            named[name] = {"checkpoint": str(checkpoint), "load_format": "dummy", "device": "cpu"} | fields
        server = {"port": 0, "api_server_count": 2} | sections.pop("server", {})
        self.file.write_text(json.dumps({"server": server, "models": named} | sections))  # JSON is YAML

    def complete(self, model: str, max_tokens: int = 4) -> int:
        body = {"model": model, "prompt": "ab", "max_tokens": max_tokens}
        return self.server.post(COMPLETIONS, body).status


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = Fleet(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        admin_port = probe.getsockname()[1]
    made.write(
        {"first": {"aliases": ["one"], "engine": {"step_s": 0.005}}, "second": {"engine": {"step_s": 0.005}}},
        server={"admin_port": admin_port},
    )
    with running(fleet_command(made.file, POLICY), tmp_path / "stderr") as made.server:
        wait_until(lambda: made.server.request("GET", "/health").json.get("status") == "ready", "ready")
        yield made


def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    main(["ps", "--json"])
    done = capsys.readouterr()
    assert done.out, done.err
    return {row["model"]: row for row in json.loads(done.out)}


def chat_model(fleet: Fleet) -> str:
    """The model of a chat that names none, by its log line. It refuses a prompt that is longer than its context."""

    def lines() -> list[str]:
        return [line for line in fleet.server.stderr.splitlines() if "path=/v1/chat_direct" in line]

    num_before = len(lines())
    assert fleet.server.post("/v1/chat_direct", {"prompt": "x" * 5000}).status == 400
    wait_until(lambda: len(lines()) > num_before, "the log line")
    return lines()[-1].partition("model=")[2].split()[0]


# threat: a web page: the admin port, which needs no key, refuses requests of pages
@pytest.mark.slow
def test_ps_logs_and_the_admin_port_show_the_fleet(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys)
    first = found["first"]
    assert list(found) == ["first", "second"]
    assert first["pid"] in fleet.server.engine_pids()
    assert {key: first[key] for key in ("task", "state", "memory_bytes", "restarts", "open_requests", "port")} == {
        "task": "generation",
        "state": "ready",
        "memory_bytes": 2**20,
        "restarts": 0,
        "open_requests": 0,
        "port": fleet.server.port,
    }
    assert main(["ps"]) == 0
    table = capsys.readouterr().out
    assert "open requests" in table
    assert "node" not in table.splitlines()[0]
    assert first["node"] is None
    assert str(first["pid"]) in table
    Path(first["log"]).write_text("loading\nhalf a line")
    assert main(["logs", "one", "-n", "1"]) == 0
    assert capsys.readouterr().out == "half a line\n"
    assert main(["logs"]) == 0
    assert "first  | loading" in capsys.readouterr().out
    assert main(["logs", "third"]) == 2
    assert "no log of third" in capsys.readouterr().err
    # The port that fleet.yaml asks for: metrics, ps; nothing for a web page.
    port = json.loads(fleet.file.read_text())["server"]["admin_port"]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as client:
        assert 'requests_accepted_total{model_name="second"}' in client.get("/metrics").text
        assert [row["model"] for row in client.get("/ps").json()] == ["first", "second"]
        refused = client.post("/reload", headers={"origin": "http://example.com"})
        rebound = client.get("/ps", headers={"host": f"evil.example:{port}"})
        assert (rebound.status_code, "localhost" in rebound.text) == (403, True)
        assert (refused.status_code, fleet.server.request("GET", "/ps").status) == (403, 404)
    # A model that fails is in ps with its reason, and the exit status says so.
    (fleet.folder / "first" / "engine.json").write_text(json.dumps({"die_loading": True}))
    os.kill(first["pid"], signal.SIGKILL)
    wait_until(lambda: "first: it is not started again" in fleet.server.stderr, "the last try")
    assert main(["ps"]) == 1
    assert "the engine of first has died 2 times and is not started again" in capsys.readouterr().out
    # Its log says how its engines have ended, and the server's line names the log.
    text = Path(first["log"]).read_text()
    assert "meltcore: first has died: killed by signal 9; 0 open requests failed\n" in text
    assert text.endswith("meltcore: first could not start: the engine ended while loading (exit status 3)\n")
    assert f"(exit status 3); its log: {first['log']}\n" in fleet.server.stderr
    # Repaired, it comes back by a restart.
    (fleet.folder / "first" / "engine.json").write_text("{}")
    assert main(["restart", "one"]) == 0
    assert fleet.complete("first") == 200
    assert main(["down"]) == 0
    assert fleet.server.wait_exit() == 0
    assert main(["ps"]) == 2
    assert "no fleet is running" in capsys.readouterr().err


@pytest.mark.slow
def test_rolling_restart_loses_nothing(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    """Clients that obey the Retry-After of a 503 get every answer whole."""
    before = rows(capsys)
    stop, answers = threading.Event(), list[tuple[str, int]]()

    def ask(model: str) -> None:
        with httpx.Client(base_url=fleet.server.url, timeout=WAIT_S) as client:
            while not stop.is_set():
                body = {"model": model, "prompt": "ab", "max_tokens": 20}
                answer = client.post(COMPLETIONS, json=body)
                answers.append((model, answer.status_code))
                if answer.status_code == 503:
                    assert 1 <= int(answer.headers["retry-after"]) <= 5
                    stop.wait(0.1)
                else:
                    assert answer.json()["usage"]["completion_tokens"] == 20

    holds = {name: fleet.folder / name / "hold" for name in ("first", "second")}
    for hold in holds.values():
        hold.touch()
    with ThreadPoolExecutor(5) as pool:
        asking = [pool.submit(ask, name) for name in ("first", "second") * 2]
        try:
            wait_until(lambda: {(name, 200) for name in holds} <= set(answers), "answers before the restart")
            restarted = pool.submit(main, ["restart"])
            for name, hold in holds.items():
                wait_until(lambda name=name: (name, 503) in answers, f"a refusal of {name} while it is restarted")
                hold.unlink()
            assert restarted.result() == 0
            assert main(["restart", "third"]) == 2
            num_before = len(answers)
            wait_until(
                lambda: {(name, 200) for name in holds} <= set(answers[num_before:]), "answers of the new engines"
            )
        finally:
            stop.set()
            for hold in holds.values():
                hold.unlink(missing_ok=True)
        for future in asking:
            future.result()
    assert "restarted first, second" in (output := capsys.readouterr()).out
    assert "there is no model 'third' in the fleet; it has first, second" in output.err
    assert set(answers) == {(name, status) for name in ("first", "second") for status in (200, 503)}
    after = rows(capsys)
    assert all(after[name]["pid"] != before[name]["pid"] for name in before)
    assert all(not Path(f"/proc/{row['pid']}").exists() for row in before.values())
    assert {row["restarts"] for row in after.values()} == {1}
    assert fleet.server.check_no_leak()["requests_failed_total"] == 0


@pytest.mark.slow
def test_sleep_and_wake_by_command_restart_and_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fleet = Fleet(tmp_path)
    sleepable = {"residency": "sleepable", "engine": {"step_s": 0.005}}
    turns = {"minimum_s": 0.1, "turn_s": 0.5, "swaps_per_minute": 600, "keep": "disk"}
    models = {"first": {"engine": {"step_s": 0.005}}, "a": sleepable | {"priority": "interactive"}, "b": sleepable}
    fleet.write(models, residency=turns)
    with running(fleet_command(fleet.file, POLICY), tmp_path / "stderr") as server:
        fleet.server = server

        def states() -> dict[str, str]:
            main(["ps", "--port", str(server.port), "--json"])
            output = capsys.readouterr()
            assert output.out, output.err
            return {row["model"]: row["state"] for row in json.loads(output.out)}

        def run(*command: str) -> tuple[int, str, str]:
            status = main([*command, "--port", str(server.port)])
            output = capsys.readouterr()
            return status, output.out, output.err

        wait_until(lambda: states() == {"first": "ready", "a": "ready", "b": "sleeping"}, "the start")
        assert run("wake", "b") == (0, "meltcore: awake: b\n", "")
        assert states() == {"first": "ready", "a": "sleeping", "b": "ready"}
        assert run("sleep", "b") == (0, "meltcore: sleeps: b\n", "")
        assert run("sleep", "b")[0] == 0
        assert 'sleep_state="discard_all"} 1.0' in server.request("GET", "/metrics").body.decode()
        status, _, error = run("sleep", "first")
        assert status == 2
        assert "first is always on: `residency: sleepable` in fleet.yaml lets it sleep" in error
        assert run("wake", "unknown")[0] == 2
        pids = server.engine_pids()
        assert run("restart", "a")[0] == 0  # its process ends, and is started when it is wanted
        assert len(server.engine_pids()) == len(pids) - 1
        assert (fleet.complete("a"), fleet.complete("first"), fleet.complete("b")) == (200, 200, 200)
        wait_until(lambda: states()["a"] == "sleeping", "a sleeps again")
        fleet.write({name: models[name] for name in ("first", "b")}, residency=turns)
        assert run("reload")[0] == 0  # without the model that sleeps
        assert states() == {"first": "ready", "b": "ready"}
        fleet.write(models, residency=turns)
        assert run("reload")[0] == 0
        wait_until(lambda: states() == {"first": "ready", "a": "ready", "b": "sleeping"}, "a is loaded in its turn")
        fleet.write(models, residency=turns | {"keep": "host"})
        status, _, error = run("reload")
        assert (status, "residency" in error) == (2, True)
        assert (fleet.complete("b"), fleet.complete("a")) == (200, 200)
        server.check_no_leak()
        server.signal()
        assert server.wait_exit() == 0


@pytest.mark.slow
def test_reload_follows_the_file(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    before = rows(capsys)
    text = fleet.file.read_text()
    sections = {"server": json.loads(text)["server"]}
    for broken, message in (
        (text.replace('"checkpoint"', '"chekpoint"', 1), "unknown key"),
        (text.replace('"api_server_count": 2', '"api_server_count": 1'), "api_server_count changed"),
        (text.replace('"one"', '"second"'), "second"),
        (text.replace('/second"', '/nowhere"'), "models.second: "),
    ):
        assert broken != text
        fleet.file.write_text(broken)
        assert main(["reload"]) == 2
        assert message in capsys.readouterr().err
        assert rows(capsys) == before, "nothing changes"
    body = {"model": "first", "prompt": "ab", "max_tokens": 60, "stream": True}
    streams = [fleet.server.open(COMPLETIONS, body | {"model": name}) for name in ("first", "second")]
    wait_until(lambda: fleet.server.metrics()["requests_in_flight"] == 2, "the streams")
    assert chat_model(fleet) == "first", "the first of the file"
    chosen = {"routes": {"chat": {"model": "third"}}}
    fleet.write({"second": {"max_model_len": 512}, "third": {}}, **sections, **chosen)
    assert main(["reload"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "meltcore: added: third",
        "meltcore: removed: first",
        "meltcore: changed: second",
        "meltcore: models that were added or changed load now; `meltcore ps` shows when they are ready",
    ]
    assert find_fleet(None).model == "second, third"
    for stream in streams:  # what was open has been finished
        data = b""
        while b"[DONE]" not in data and (chunk := stream.recv(65_536)):
            data += chunk
        assert b"[DONE]" in data
    wait_until(lambda: {row["state"] for row in rows(capsys).values()} == {"ready"}, "all to be ready")
    cards = {card["id"]: card for card in fleet.server.request("GET", "/v1/models").json["data"]}
    assert {name: card["max_model_len"] for name, card in cards.items()} == {"second": 512, "third": 4096}
    assert (fleet.complete("first"), fleet.complete("second"), fleet.complete("third")) == (404, 200, 200)
    assert [chat_model(fleet) for _ in range(4)] == ["third"] * 4, "every API server has the new routes"
    killed = fleet.server.api_server_pids()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(set(fleet.server.api_server_pids()) - set(killed)) == 2, "other API servers")
    assert chat_model(fleet) == "third"
    after = rows(capsys)
    assert after["second"]["pid"] != before["second"]["pid"]
    fleet.write({"third": {}, "fourth": {}, "second": {"max_model_len": 512}}, **sections, **chosen)
    assert main(["reload"]) == 0
    assert rows(capsys)["third"]["pid"] == after["third"]["pid"], "an unchanged model keeps its engine"
    assert fleet.complete("third") == 200
    wait_until(lambda: len(fleet.server.engine_pids()) == 3, "the engine of the fourth")
    fleet.write({"fourth": {}, "second": {"max_model_len": 256}, "third": {}}, **sections)
    assert main(["reload"]) == 0
    wait_until(lambda: {row["state"] for row in rows(capsys).values()} == {"ready"}, "the changed model")
    assert [chat_model(fleet) for _ in range(4)] == ["fourth"] * 4, "the first of the file"
    fleet.write({"fourth": {"max_model_len": 256}, "second": {"max_model_len": 256}, "third": {}}, **sections)
    assert main(["reload"]) == 0
    wait_until(lambda: {row["state"] for row in rows(capsys).values()} == {"ready"}, "the changed default")
    assert [chat_model(fleet) for _ in range(4)] == ["fourth"] * 4, "also where it was replaced"
    assert fleet.server.check_no_leak()["requests_failed_total"] == 0


@pytest.mark.slow
def test_alias_that_moves_in_a_reload_leads_to_a_model_at_every_moment(fleet: Fleet) -> None:
    """It was unknown, with 404, from the end of its old model until its new one had been drained and added."""
    sections = {"server": json.loads(fleet.file.read_text())["server"]}
    slow = {"step_s": 0.005}
    for models in (
        {"first": {}, "second": {"aliases": ["one"]}},  # to a model that is replaced later
        {"first": {}, "third": {"aliases": ["one"], "engine": slow}},  # from a removed model to one that is added
        {"first": {"aliases": ["one"]}, "third": {}},  # to a model that is replaced earlier
    ):
        last = list(json.loads(fleet.file.read_text())["models"])[-1]
        body = {"model": last, "prompt": "ab", "max_tokens": 200, "stream": True}
        with ThreadPoolExecutor(1) as pool, fleet.server.open(COMPLETIONS, body) as stream:
            wait_until(lambda: fleet.server.metrics()["requests_in_flight"] == 1, "the stream, which drains slowly")
            fleet.write(models, **sections)
            reload, statuses = pool.submit(main, ["reload"]), set[int]()
            while not reload.done():
                statuses.add(fleet.complete("one"))
            assert reload.result() == 0
            while b"[DONE]" not in stream.recv(65_536):
                pass
        assert statuses <= {200, 503}
        wait_until(lambda: fleet.complete("one") == 200, "the new model of the alias")
    assert fleet.server.check_no_leak()["requests_in_flight"] == 0


@pytest.mark.slow
def test_reload_with_keys_adds_a_model_and_refuses_a_changed_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OTHER_KEY", "other-secret")
    key = tmp_path / "key"
    key.write_text("first-secret\n")
    keys = [{"name": "app", "file": str(key)}, {"name": "other", "env": "OTHER_KEY"}]
    fleet = Fleet(tmp_path)
    fleet.write({"first": {}}, keys=keys)

    def status(model: str, value: str) -> int:
        body = {"model": model, "prompt": "ab", "max_tokens": 4}
        return fleet.server.post(COMPLETIONS, body, {"authorization": f"Bearer {value}"}).status

    with running(fleet_command(fleet.file, POLICY), tmp_path / "stderr") as fleet.server:
        wait_until(lambda: status("first", "first-secret") == 200, "ready")
        fleet.write({"first": {}, "second": {}}, keys=keys)
        assert main(["reload"]) == 0, capsys.readouterr().err
        assert capsys.readouterr().out.startswith("meltcore: added: second\nmeltcore: unchanged: first\nmeltcore: mod")
        wait_until(lambda: status("second", "other-secret") == 200, "the added model")
        key.write_text("second-secret\n")
        assert main(["reload"]) == 2
        error = capsys.readouterr().err
        assert "and keys (app) changed: end it with `meltcore down`" in error
        assert "secret" not in error
        assert not re.search("[0-9a-f]{16}", error), "no hash of a key"
        assert [status("first", f"{which}-secret") for which in ("first", "second")] == [200, 401]


@pytest.mark.slow
def test_logs_are_followed_as_they_grow_and_begin_anew_past_a_limit(tmp_path: Path) -> None:
    """A process goes on to write the emptied file, from its beginning, and the old one is kept."""
    path = tmp_path / "first.log"
    lines: list[str] = []
    read_end, write_end = os.pipe()

    def out(line: str) -> None:
        lines.append(line)
        if line == "last":
            raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(print_logs, [LogFile("first", path)], None, follow=True, out=out)
        with LoggedProcess(["cat"], path, name="cat", report=print, stdin=read_end):
            os.write(write_end, b"a\nb")
            wait_until(lambda: lines == ["a"], "the first line")
            os.write(write_end, b"c\n")
            wait_until(lambda: lines == ["a", "bc"], "the second line")
            rotate_large([path, tmp_path / "none.log"], 5)
            assert path.read_text() == "a\nbc\n", "it has no more than the limit"
            rotate_large([path], 4)
            os.write(write_end, b"d\n")
            wait_until(lambda: lines[-1] == "d", "the line after")
            os.write(write_end, b"last\n")
            assert isinstance(following.exception(20), KeyboardInterrupt)
    os.close(read_end)
    os.close(write_end)
    assert lines == ["a", "bc", "d", "last"]
    assert path.read_text() == "d\nlast\n"
    assert (tmp_path / "first.log.previous").read_text() == "a\nbc\n"


@pytest.mark.slow
def test_two_bundled_models_go_up_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    cut = shutil.copytree(BUNDLED_SUMS, tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    models = {
        "sums": {"checkpoint": BUNDLED_MODEL, "device": "cpu"},
        "missing": {"checkpoint": str(tmp_path / "missing"), "device": "cpu"},
        "cut": {"checkpoint": str(cut), "device": "cpu"},
    }
    file = tmp_path / "fleet.yaml"
    file.write_text(json.dumps({"server": {"port": 0}, "models": models}))
    try:
        assert main(["up", str(file), "--daemon", "--start-timeout", "120"]) == 1, "a model is missing"
        output = capfd.readouterr()
        assert "missing could not be loaded" in output.err
        (line,) = (line for line in output.err.splitlines() if "cut could not be loaded" in line)
        assert "cut could not start" in Path(line.split("; its log: ")[1]).read_text()
        url = output.out.split("listening on ")[1].split()[0]
        body = {"model": "sums", "messages": [{"role": "user", "content": "What is 7 * 8?"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_S).json()
        assert "56" in answer["choices"][0]["message"]["content"]
    finally:
        assert main(["down"]) == 0
