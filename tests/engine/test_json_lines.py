"""The engine behind two pipes: tokens as the offline API gives them, a line a step, and an end with its input."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meltcore import LLM, SamplingParams
from meltcore.bench import lines as measurer
from meltcore.engine import json_lines

LIMIT_S = 30.0
CONFIG = {"model": "meltcore/sums", "device": "cpu", "max_model_len": 1152, "max_num_seqs": 4}


class Pipes:
    def __init__(self, config: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meltcore.engine.json_lines"],
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
        return self.process.wait(LIMIT_S)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def started() -> Iterator[Pipes]:
    found = Pipes(CONFIG)
    try:
        while (line := found.receive())["type"] == "loading":
            pass
        assert line["type"] == "ready"
        yield found
    finally:
        found.stop()


pipes = pytest.fixture(started, name="pipes")
shared = pytest.fixture(started, name="shared", scope="module")


def test_tokens_are_those_of_the_offline_api_one_line_a_step(shared: Pipes) -> None:
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


def test_what_is_aborted_ends_and_its_id_is_free_again(shared: Pipes) -> None:
    shared.send({"type": "generate", "id": 1, "prompt": [5], "max_tokens": 1000})
    assert shared.receive()["ids"] == [1]
    shared.send({"type": "abort", "ids": [1, 99]})
    while not (step := shared.receive())["ended"]:
        pass
    assert step["ended"] == [[1, "abort"]]
    shared.send({"type": "generate", "id": 1, "prompt": [5], "max_tokens": 1})
    assert shared.receive()["ended"] == [[1, "length"]]


def test_a_request_that_cannot_be_served_is_refused_alone(shared: Pipes) -> None:
    shared.send({"type": "generate", "id": 1, "prompt": [5] * 2000, "max_tokens": 1})
    refused = shared.receive()
    assert (refused["type"], refused["id"]) == ("refused", 1)
    assert "1 to 1151 tokens; it has 2000" in refused["error"]
    shared.send({"type": "generate", "id": 2, "prompt": [5], "max_tokens": 1})
    assert shared.receive()["ids"] == [2]


def test_the_end_of_the_input_ends_it_whatever_runs(pipes: Pipes) -> None:
    pipes.send({"type": "generate", "id": 1, "prompt": [5], "max_tokens": 1000})
    pipes.receive()
    assert pipes.end() == 0


def test_a_line_of_another_form_ends_it_with_a_word(pipes: Pipes) -> None:
    pipes.send({"type": "generate", "id": "one"})
    assert pipes.process.wait(LIMIT_S) == 2
    assert pipes.process.stderr is not None
    assert b"none of ours" in pipes.process.stderr.read()


def test_a_model_that_is_not_there_is_said_and_ends_it() -> None:
    pipes = Pipes(CONFIG | {"model": "./nowhere"})
    failed = pipes.receive()
    assert failed["type"] == "failed"
    assert "no such folder" in failed["message"]
    assert pipes.process.wait(LIMIT_S) == 1
    pipes.stop()


def test_engine_and_measurer_mean_the_same_lines() -> None:
    """Declared on both sides, since the halves import nothing of each other."""
    step = json_lines.Step(1.5, [1, 2], [[5], [6, 7]], [(2, "length")])
    assert measurer.decode(msgspec.json.encode(step)) == measurer.Step(1.5, [1, 2], [[5], [6, 7]], [(2, "length")])
    for line in (
        json_lines.Loading("weights", 0.5),
        json_lines.Refused(3, "too long"),
        json_lines.Failed("out of memory"),
        json_lines.Ready("0.1.0", "CPU", "float32", "dummy", 9, 824, 1152, 64, 10, 64, 1.0),
    ):
        assert type(measurer.decode(msgspec.json.encode(line))).__name__ == type(line).__name__
    decoder = msgspec.json.Decoder(json_lines.Generate | json_lines.Abort)
    assert decoder.decode(measurer.encode(measurer.Generate(1, [2, 3], 128))) == json_lines.Generate(1, [2, 3], 128)
    assert decoder.decode(measurer.encode(measurer.Abort([1, 2]))) == json_lines.Abort([1, 2])


def test_the_version_changes_with_the_engines_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = json_lines.engine_version()
    assert before == json_lines.engine_version()
    for folder in ("engine", "kernels"):
        (tmp_path / folder).mkdir()
    kernel = tmp_path / "kernels" / "norm.py"
    kernel.write_text("SIZE = 64\n")
    monkeypatch.setattr("meltcore.__file__", str(tmp_path / "__init__.py"))
    first = json_lines.engine_version()
    kernel.write_text("SIZE = 128\n")
    assert first != json_lines.engine_version()
    assert first.split("+")[0] == before.split("+")[0]
