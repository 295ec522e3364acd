"""Two models behind one address: one API server process, one backend per model."""

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from server_harness import RunningServer, configure, make_model, running, serve_command
from waiting import wait_until

from meltcore.settings.fleet_spec import ModelSection

NAMES = ("first", "second")


@contextmanager
def two_scripted_models(
    *options: str, second: dict[str, Any] | None = None, **settings: Any
) -> Iterator[RunningServer]:
    with tempfile.TemporaryDirectory() as folder:
        models = {
            name: ModelSection(
                checkpoint=str(make_model(Path(folder) / name)), load_format="dummy", max_num_seqs=2, **others
            )
            for name, others in (("first", {}), ("second", second or {}))
        }
        config = configure(models, port=0, api_server_count=1, **settings)
        with running(serve_command(config, *options), Path(folder) / "stderr") as server:
            server.wait_healthy()
            yield server


def complete(server: RunningServer, model: str, **fields: Any) -> Any:
    return server.post("/v1/completions", {"model": model, "prompt": "ab", "max_tokens": 4, **fields})


def by_model(server: RunningServer, name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in server.request("GET", "/metrics").body.decode().splitlines():
        for model in NAMES:
            if line.startswith(f'meltcore:{name}{{model_name="{model}"'):
                found[model] = found.get(model, 0.0) + float(line.rpartition(" ")[2])
    return found


@pytest.mark.slow
def test_metrics_logs_and_errors_are_keyed_by_model() -> None:
    with two_scripted_models() as server:
        assert [card["id"] for card in server.request("GET", "/v1/models").json["data"]] == ["first", "second"]
        assert [complete(server, model).json["model"] for model in ("first", "second", "second")] == [
            "first",
            "second",
            "second",
        ]
        assert by_model(server, "requests_finished_total") == {"first": 1, "second": 2}
        assert by_model(server, "generation_tokens_total") == {"first": 4, "second": 8}
        wait_until(lambda: server.stderr.count("model=second") == 2, "the log lines")
        assert server.stderr.count("model=first") == 1
        missing = complete(server, "third")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        assert all(name in missing.error["message"] for name in NAMES)
        nameless = server.post("/v1/completions", {"prompt": "ab", "max_tokens": 4})
        assert nameless.json["model"] == "first"
        assert len(server.engine_pids()) == 2
        assert len(server.api_server_pids()) == 1


@pytest.mark.slow
def test_full_queue_of_one_model_does_not_affect_the_other() -> None:
    with two_scripted_models("--silent-steps", "150", "--step-s", "0.01", second={"max_queue": 0}) as server:
        with ThreadPoolExecutor(8) as pool:
            answers = {name: [pool.submit(complete, server, name) for _ in range(4)] for name in NAMES}
            statuses = {name: sorted(answer.result().status for answer in answers[name]) for name in NAMES}
        assert statuses == {"first": [200] * 4, "second": [200, 200, 429, 429]}
        assert by_model(server, "requests_rejected_total") == {"first": 0, "second": 2}


@pytest.mark.slow
def test_death_of_one_models_engine_leaves_the_other_model() -> None:
    with two_scripted_models() as server:
        os.kill(server.engine_pids("first")[0], signal.SIGKILL)
        wait_until(lambda: "first has died: killed by signal 9" in server.stderr, "the report")
        wait_until(lambda: complete(server, "first").status == 503, "the refusal")
        assert complete(server, "second").status == 200
        assert server.request("GET", "/health").json == {
            "status": "degraded",
            "replicas": "1 of 2",
            "models": {"first": "the engine has died (killed by signal 9)"},
        }
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.wait_exit() == 1
