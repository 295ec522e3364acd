"""The engine behind two pipes: the tokens of the offline API, one line per step, and an end with its input."""

import io
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from waiting import WAIT_S

from meltcore import LLM, SamplingParams
from meltcore.engine.generation import json_lines
from meltcore.protocol.json_lines import (
    Abort,
    FailedLine,
    Generate,
    LoadingLine,
    ReadyLine,
    RefusedLine,
    StepLine,
    ToEngineLine,
    decode,
    decode_request,
    encode,
)

CONFIG = {"model": "meltcore/sums", "device": "cpu", "max_model_len": 1152, "max_num_seqs": 4}


class Pipes:
    def __init__(self, config: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meltcore.engine.generation"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.send(config)

    def send(self, line: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(WAIT_S)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Pipes]:
    """A process for all tests; the last of them ends it."""
    found = Pipes(CONFIG)
    try:
        while (line := found.receive())["type"] == "loading":
            pass
        assert line["type"] == "ready"
        yield found
    finally:
        found.stop()


@pytest.mark.slow
def test_json_lines_give_the_tokens_of_the_offline_api(shared: Pipes) -> None:
    prompts = {3: [5, 9, 11, 40], 7: [6] * 30}
    for number, prompt in prompts.items():
        shared.send({"type": "generate", "id": number, "prompt": prompt, "max_tokens": 12})
    tokens: dict[int, list[int]] = {3: [], 7: []}
    ended: dict[int, str] = {}
    times = [time.monotonic()]
    while len(ended) < 2:
        step = shared.receive()
        assert step["type"] == "step"
        assert len(set(step["ids"])) == len(step["ids"]) == len(step["tokens"])
        for number, new in zip(step["ids"], step["tokens"], strict=True):
            tokens[number] += new
        ended |= dict(step["ended"])
        times.append(step["t_s"])
    assert ended == {3: "length", 7: "length"}
    assert times == sorted(times)
    assert times[-1] <= time.monotonic(), "one clock for all processes"
    llm = LLM("meltcore/sums", device="cpu", max_model_len=1152, max_num_seqs=4)
    answers = llm.generate(list(prompts.values()), SamplingParams(max_tokens=12, ignore_eos=True))
    assert list(tokens.values()) == [answer.token_ids for answer in answers]


@pytest.mark.slow
def test_aborted_id_can_be_used_again(shared: Pipes) -> None:
    shared.send({"type": "generate", "id": 1, "prompt": [5], "max_tokens": 1000})
    assert shared.receive()["ids"] == [1]
    shared.send({"type": "abort", "ids": [1, 99]})
    while not (step := shared.receive())["ended"]:
        pass
    assert step["ended"] == [[1, "abort"]]
    shared.send({"type": "generate", "id": 1, "prompt": [5], "max_tokens": 1})
    assert shared.receive()["ended"] == [[1, "length"]]


@pytest.mark.slow
def test_invalid_request_is_refused_alone(shared: Pipes) -> None:
    shared.send({"type": "generate", "id": 1, "prompt": [5] * 2000, "max_tokens": 1})
    refused = shared.receive()
    assert (refused["type"], refused["id"]) == ("refused", 1)
    assert "1 to 1151 tokens; it has 2000" in refused["error"]
    shared.send({"type": "generate", "id": 2, "prompt": [5], "max_tokens": 1})
    assert shared.receive()["ids"] == [2]


@pytest.mark.slow
def test_end_of_input_ends_the_process_in_a_request(shared: Pipes) -> None:
    shared.send({"type": "generate", "id": 1, "prompt": [5], "max_tokens": 1000})
    shared.receive()
    assert shared.end() == 0


class Ended(BaseException):
    """The process has ended with this exit status."""


def test_undecodable_line_ends_the_process_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(status: int) -> NoReturn:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    requests: queue.SimpleQueue[ToEngineLine] = queue.SimpleQueue()
    lines = b'{"type":"abort","ids":[1]}\n{"type":"generate","id":"one"}\n{"type":"abort","ids":[2]}\n'
    with pytest.raises(Ended, match="2"):
        json_lines._read_requests(io.BytesIO(lines), requests)
    assert (requests.get(), requests.empty()) == (Abort([1]), True)
    assert "cannot be decoded" in capsys.readouterr().err


@pytest.mark.slow
def test_missing_model_is_reported_and_ends_the_process() -> None:
    pipes = Pipes(CONFIG | {"model": "./nowhere"})
    failed = pipes.receive()
    assert failed["type"] == "failed"
    assert "no such folder" in failed["message"]
    assert pipes.process.wait(WAIT_S) == 1
    pipes.stop()


def test_lines_survive_encoding() -> None:
    for line in (
        StepLine(1.5, [1, 2], [[5], [6, 7]], [(2, "length")]),
        LoadingLine("weights", 0.5),
        RefusedLine(3, "too long"),
        FailedLine("out of memory"),
        ReadyLine(
            version="0.1.0",
            device="CPU",
            dtype="float32",
            weight_source="dummy",
            num_parameters=9,
            vocab_size=824,
            max_num_seqs=64,
            max_model_len=1152,
            num_pages=10,
            page_size=64,
            load_s=1.0,
        ),
    ):
        assert decode(encode(line)) == line
    for request in (Generate(1, [2, 3], 128), Abort([1, 2])):
        assert decode_request(encode(request)) == request


@pytest.mark.slow
def test_greedy_requests_have_the_bytes_that_they_had_before_temperatures() -> None:
    assert encode(Generate(1, [2, 3], 128)) == b'{"type":"generate","id":1,"prompt":[2,3],"max_tokens":128}'
    sampled = encode(Generate(1, [2], 4, 0.7))
    assert sampled == b'{"type":"generate","id":1,"prompt":[2],"max_tokens":4,"temperature":0.7}'
    assert decode_request(sampled) == Generate(1, [2], 4, 0.7)
