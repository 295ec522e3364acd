"""Models that take turns, over scripted engines: their requests wait, memory is never exceeded, faults are survived."""

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from server_harness import Answer, RunningServer, configure, make_model, running, serve_command
from waiting import WAIT_S, wait_until

from meltcore.fleet.run.restart_policy import RestartAfterPause
from meltcore.settings.config import PriorityClass
from meltcore.settings.fleet_spec import ModelSection, ResidencySection

COMPLETIONS = "/v1/completions"
FAST = RestartAfterPause(first_pause_s=0.05, max_pause_s=0.2, max_deaths=4, probe_limit_s=10.0)
SWIFT = ResidencySection(minimum_s=0.1, turn_s=0.4, swaps_per_minute=1000)


class Fleet:
    """A running fleet, and the folder in which each awake engine has a file."""

    def __init__(self, server: RunningServer, folder: Path) -> None:
        self.server, self.folder = server, folder

    def status(self, name: str) -> str:
        models = self.server.request("GET", "/v1/status").json["models"]
        # An API server that has just started lists no model yet.
        return next((str(model["status"]) for model in models if model["name"] == name), "")

    def wait_status(self, **statuses: str) -> None:
        wait_until(lambda: all(self.status(name) == status for name, status in statuses.items()), f"{statuses}")

    def complete(self, model: str, max_tokens: int = 4, **headers: str) -> Answer:
        body = {"model": model, "prompt": "ab", "max_tokens": max_tokens}
        return self.server.post(COMPLETIONS, body, headers)

    def fault(self, model: str, *wakes: str) -> None:
        (self.folder / model / "wake_faults").write_text("\n".join(wakes))

    def check(self) -> None:
        overcommitted = self.folder / "device" / "overcommitted"
        assert not overcommitted.exists(), overcommitted.read_text()
        self.server.check_no_leak()


@contextmanager
def fleet(
    models: dict[str, PriorityClass],
    *,
    options: dict[str, dict[str, Any]] | None = None,
    residency: ResidencySection = SWIFT,
    wait: dict[str, str] | None = None,
    **settings: Any,
) -> Iterator[Fleet]:
    """Models of these classes that take turns. `options`: of the engine of one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "device").mkdir()
        configs = {}
        for model, priority_class in models.items():
            checkpoint = make_model(folder / model)
            own = {"device_folder": str(folder / "device"), **(options or {}).get(model, {})}
            (checkpoint / "engine.json").write_bytes(msgspec.json.encode(own))
            configs[model] = ModelSection(
                checkpoint=str(checkpoint),
                load_format="dummy",
                device="cpu",
                priority=priority_class,
                residency="sleepable",
            )
        config = configure(configs, port=0, api_server_count=2, residency=residency, **settings)
        with running(serve_command(config, policy=FAST), folder / "stderr") as server:
            found = Fleet(server, folder)
            last = min(models, key=lambda each: ("interactive", "standard", "batch").index(models[each]))
            found.wait_status(**(wait or {each: "ready" if each == last else "sleeping" for each in models}))
            yield found


@pytest.mark.slow
def test_models_take_turns_without_losing_a_request_or_exceeding_the_memory() -> None:
    with fleet({"a": "interactive", "b": "standard", "c": "batch"}, options={"b": {"wake_s": 0.1}}) as found:
        server = found.server
        health = server.request("GET", "/health").json
        assert health == {"status": "ready", "sleeping": ["b", "c"]}
        cards = {card["id"]: card.get("status") for card in server.request("GET", "/v1/models").json["data"]}
        assert cards == {"a": None, "b": "sleeping", "c": "sleeping"}
        text = server.request("GET", "/metrics").body.decode()
        assert 'meltcore:engine_sleep_state{model_name="b",sleep_state="weights_offloaded"} 1.0' in text
        assert 'meltcore:engine_sleep_state{model_name="a",sleep_state="awake"} 1.0' in text
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda index: found.complete("abc"[index % 3], 20), range(72)))
        assert [answer.status for answer in answers] == [200] * 72
        found.check()
        assert 3 <= server.metrics()["wakes_total"] < 40  # in turns, not request by request
        assert len(server.engine_pids()) == 3  # none was started again


@pytest.mark.slow
def test_open_requests_end_before_their_model_sleeps_and_the_limit_ends_the_rest() -> None:
    with fleet({"a": "interactive", "b": "standard"}, options={"a": {"step_s": 0.01}}, drain_timeout_s=1.0) as found:
        with ThreadPoolExecutor(4) as pool:
            short = pool.submit(found.complete, "a", 60)
            wait_until(lambda: found.server.metrics()["num_requests_running"] >= 1, "it runs")
            waits = pool.submit(found.complete, "b")
            assert (short.result().status, waits.result().status) == (200, 200)
            long = pool.submit(found.complete, "a", 4000)
            found.wait_status(a="ready")
            wait_until(lambda: found.server.metrics()["num_requests_running"] >= 1, "it runs")
            assert pool.submit(found.complete, "b").result().status == 200
            refused = long.result()
        assert (refused.status, refused.error["code"]) == (503, "model_asleep")
        assert int(refused.headers["retry-after"]) >= 1
        found.check()


@pytest.mark.slow
def test_request_that_cannot_wait_gets_503_and_still_wakes_its_model() -> None:
    slow = ResidencySection(minimum_s=3.0, turn_s=4.0)
    with fleet({"a": "interactive", "b": "standard"}, residency=slow) as found:
        refused = found.complete("b", **{"X-Request-Timeout": "0.5"})  # a stays for at least 3 s
        assert (refused.status, refused.error["code"]) == (503, "model_asleep")
        assert 1 <= int(refused.headers["retry-after"]) <= 3
        assert "X-Request-Timeout is 0.5 s" in refused.error["message"]
        assert found.server.metrics()["requests_rejected_total"] == 1
        found.wait_status(b="ready", a="sleeping")
        assert found.complete("b").status == 200
        found.check()


@pytest.mark.slow
def test_engine_that_dies_asleep_or_waking_or_cannot_wake() -> None:
    with fleet({"a": "interactive", "b": "standard"}) as found:
        server = found.server
        asleep, awake = server.engine_pids()  # the less urgent class is loaded first
        with ThreadPoolExecutor(2) as pool:
            os.kill(awake, signal.SIGSTOP)  # its request stays open, so that b has to wait
            long = pool.submit(found.complete, "a")
            wait_until(lambda: server.metrics()["requests_in_flight"] == 1, "a has a request")
            waits = pool.submit(found.complete, "b")
            wait_until(lambda: server.metrics()["queue_requests"] == 1, "it waits")
            os.kill(asleep, signal.SIGKILL)
            wait_until(lambda: "it is started again when it is wanted" in server.stderr, "its death is stated")
            assert found.status("b") == "sleeping"
            assert server.engine_pids() == [awake]
            os.kill(awake, signal.SIGCONT)
            assert (long.result().status, waits.result().status) == (200, 200)  # started once a has given its memory up
        found.wait_status(a="sleeping")

        found.fault("a", "no memory is left on the device")
        refused = found.complete("a")
        assert (refused.status, refused.error["code"]) == (503, "model_asleep")
        assert "no memory is left on the device" in refused.error["message"]
        assert found.complete("a").status == 200  # after a pause
        found.wait_status(b="sleeping")

        found.fault("b", "die")
        assert found.complete("b").status in (500, 503)
        found.wait_status(b="ready")
        assert found.complete("b").status == 200
        found.check()


@pytest.mark.slow
def test_engine_without_sleep_mode_is_ended_and_started_again() -> None:
    with fleet({"a": "interactive", "b": "standard"}, options={"b": {"no_sleep": True}}) as found:
        assert len(found.server.engine_pids()) == 1
        assert [found.complete(name).status for name in "abab"] == [200] * 4
        assert "b cannot sleep (scripted engine without a sleep mode): its process is ended" in found.server.stderr
        found.check()


@pytest.mark.slow
def test_fleet_with_a_sleeping_model_ends_and_its_requests_with_it() -> None:
    slow = ResidencySection(minimum_s=600.0)  # longer than the test
    with fleet({"a": "interactive", "b": "standard"}, residency=slow, drain_timeout_s=0.3) as found:
        pids = found.server.engine_pids()
        answers: list[Answer] = []
        client = threading.Thread(target=lambda: answers.append(found.complete("b")))
        client.start()
        wait_until(lambda: found.server.metrics()["queue_requests"] == 1, "it waits")
        found.server.signal()
        assert found.server.wait_exit() == 0
        client.join(WAIT_S)
        assert [answer.status for answer in answers] == [503]
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
