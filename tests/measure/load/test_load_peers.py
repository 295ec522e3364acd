"""Servers that end streams without [DONE] (transformers serve) or send no usage (llama-cpp-python), where installed."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import WAIT_S

import meltcore
from meltcore.common.process import LoggedProcess
from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.experiments.evals.conformance import run_checks
from meltcore.measure.experiments.servers import Api, accepts_connections
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.run.runner import run_levels

MODEL = Path(meltcore.__file__).parent / "bundled" / "sums"
# A Python with transformers[serving], llama-cpp-python[server] and gguf: their packages are many.
PYTHON = os.environ.get("PEERS_PYTHON")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="PEERS_PYTHON names no Python with transformers serve and llama.cpp"),
]


def serve(arguments: list[str], folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in own} | {"OMP_NUM_THREADS": "1"}
    command = [str(PYTHON), *arguments, "--port", str(port)]
    with LoggedProcess(
        command, folder / "log", name="the server", report=print, environment=environment, stop_limit_s=5.0
    ) as server:
        server.wait_for(lambda: accepts_connections(address) or None, WAIT_S, "listen")
        yield address


@pytest.fixture(scope="module")
def transformers_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    script = str(Path(str(PYTHON)).with_name("transformers"))
    yield from serve([script, "serve", str(MODEL), "--device", "cpu"], tmp_path_factory.mktemp("transformers"))


@pytest.fixture(scope="module")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("llama")
    file = folder / "sums.gguf"
    subprocess.run([str(PYTHON), str(Path(__file__).with_name("gguf_file.py")), str(MODEL), str(file)], check=True)
    # By default a new request interrupts the stream of another.
    options = ["--model", str(file), "--n_ctx", "2048", "--n_threads", "1", "--interrupt_requests", "false"]
    yield from serve(["-m", "llama_cpp.server", *options], folder)


def load(url: str, *, stream: bool = True, tokenizer: str | None = None) -> LevelResult:
    [level] = run_levels(
        LoadConfig(url=url, model=str(MODEL), concurrency=(2,), num_prompts=(10,), stream=stream, tokenizer=tokenizer)
    )
    assert (level.failures, level.succeeded) == ({}, 10)
    assert level.accuracy is not None
    assert level.accuracy >= 0.9
    return level


def test_streams_without_done_count_with_a_note(transformers_server: str) -> None:
    level = load(transformers_server)
    assert any("10 of 10 streams ended after finish_reason, without [DONE]" in reason for reason in level.reasons)
    assert level.token_count_source == "server-reported"
    assert load(transformers_server, stream=False).ttft_ms.n == 0


def test_answers_without_usage_are_counted_by_events_or_tokenizer(llama_server: str) -> None:
    by_events, by_tokenizer = load(llama_server), load(llama_server, tokenizer=str(MODEL))
    assert (by_events.token_count_source, by_tokenizer.token_count_source) == ("events", "tokenizer")
    assert by_events.output_tokens == pytest.approx(by_tokenizer.output_tokens, rel=0.3)
    assert (by_events.prompt_tokens, by_tokenizer.prompt_tokens > 0) == (0, True)


@pytest.mark.parametrize("name", ["transformers_server", "llama_server"])
def test_conformance_finds_what_works_and_what_does_not(name: str, request: pytest.FixtureRequest) -> None:
    results = {each.name: each.status for each in run_checks(Api(request.getfixturevalue(name)), str(MODEL))}
    assert results["a chat answer has OpenAI's fields"] == results["usage adds up"] == "PASS"
    assert results["the same greedy request gives the same text"] == "PASS"
    assert results["stream_options.include_usage adds a last chunk with the usage"] == "FAIL"
    assert results["broken JSON is a 400 error object"] == "FAIL"
