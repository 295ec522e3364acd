"""Comparison with lm-evaluation-harness, which runs where it is installed."""

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_openai import FORMS, AnsweringServer
from waiting import WAIT_S

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.runfolder import read_result
from meltcore.measure.experiments.evals.config import Gsm8kConfig
from meltcore.measure.experiments.evals.gsm8k import (
    HarnessError,
    HarnessItem,
    compare,
    find_package,
    run_gsm8k,
    run_harness,
)
from meltcore.measure.experiments.evals.gsm8k_data import (
    BUNDLED_SHOTS,
    BUNDLED_SOURCE,
    Item,
    Shots,
    conversation,
    grade,
    read_items,
)
from meltcore.measure.experiments.servers import Answer, Api, MeltcoreServer

# A Python that has lm-eval need not be the one that runs the tests: its packages are many.
HARNESS = os.environ.get("LM_EVAL_PYTHON") or (sys.executable if importlib.util.find_spec("lm_eval") else None)
SHOTS = Shots(BUNDLED_SHOTS, "own", is_comparable=False)
ITEM = Item("How many?", "#### 18")

needs_harness = pytest.mark.skipif(HARNESS is None, reason="lm-eval is not installed; LM_EVAL_PYTHON may name a Python")


def theirs(text: str, strict: bool, flexible: bool) -> HarnessItem:
    return HarnessItem(conversation(BUNDLED_SHOTS, ITEM), text, {"strict": strict, "flexible": flexible})


def statuses(item: HarnessItem, our_text: str = "The answer is 18.") -> list[str]:
    return [gate.status for gate in compare([grade(ITEM, Answer(our_text))], [item], SHOTS)]


def test_same_prompts_and_grades_pass_both_gates() -> None:
    assert statuses(theirs("The answer is 18.", True, True)) == ["PASS", "PASS"]
    assert statuses(theirs("It is $18.", False, True), "It is $18.") == ["PASS", "PASS"]


def test_another_grade_for_the_same_text_fails() -> None:
    assert statuses(theirs("The answer is 18.", False, True)) == ["PASS", "FAIL"]
    assert statuses(theirs("It is 18", True, True)) == ["PASS", "FAIL"]


def test_another_prompt_fails() -> None:
    item = theirs("The answer is 18.", True, True)
    assert statuses(item._replace(messages=item.messages[2:])) == ["FAIL", "PASS"]


def test_different_answer_in_the_second_run_is_reported_and_fails_nothing() -> None:
    [_, gate] = compare([grade(ITEM, Answer("The answer is 18."))], [theirs("Who knows", False, False)], SHOTS)
    assert gate.status == "PASS"
    assert "equal in both runs: 0" in gate.detail


def test_python_without_the_harness_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="cannot be run"):
        find_package("/no/such/python")
    assert main(["eval", "gsm8k", "http://127.0.0.1:9", "--harness", "/bin/false"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("given", ["http://host:1", "host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_harness_gets_the_full_url(given: str) -> None:
    assert Api(given).chat_url == "http://host:1/v1/chat/completions"


# --- a harness that is a script of ours: how it ends, and how we end


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str], str]:
    """A program that says where lm-eval is, as Python would, and asked to run it runs `script`; results go to $OUT."""

    def make(script: str) -> str:
        path = tmp_path / "python"
        found = tmp_path / "site-packages" / "lm_eval"
        find = f'[ "$1" != -c ] || {{ echo {shlex.quote(str(found))}; exit 0; }}'
        path.write_text(f"#!/bin/sh\n{find}\nfor OUT; do :; done\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def asked(tmp_path: Path, servers: list[AnsweringServer], items: list[Item]) -> list[str]:
    """The arguments of an `eval gsm8k` of 200 problems, all answered correctly."""
    servers.append(AnsweringServer(items, 200, "sentence"))
    data = tmp_path / "items.jsonl"
    data.write_text("".join(json.dumps({"question": item.question, "answer": item.answer}) + "\n" for item in items))
    return [
        "eval",
        "gsm8k",
        servers[0].address,
        "--data",
        str(data),
        "--shots",
        "none",
        "--out",
        str(tmp_path / "runs"),
    ]


def test_harness_that_fails_is_a_failed_gate_and_the_answers_are_kept(
    python: Callable[[str], str], asked: list[str], tmp_path: Path
) -> None:
    assert main([*asked, "--harness", python("echo 'KeyError: no such task' >&2; exit 1")]) == 1
    [folder] = (tmp_path / "runs").iterdir()
    result = read_result(folder)
    assert result.evaluation is not None
    assert (result.status, result.evaluation.correct) == ("complete", 200)
    assert [gate.status for gate in result.gates] == ["PASS", "FAIL"]
    assert result.gates[1].detail == "lm-eval ended with 1: KeyError: no such task"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_terminated_run_ends_the_harness_and_removes_its_folder(
    python: Callable[[str], str], asked: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    child, folders = tmp_path / "child", tmp_path / "temporary"
    folders.mkdir()
    # What asks is a child, which a signal to the program alone would leave behind.
    harness = python(f"sleep 60 & echo $! > {child}.new; mv {child}.new {child}; wait")
    process = subprocess.Popen(
        [sys.executable, "-m", "meltcore.cli.main", *asked, "--harness", harness],
        env={**os.environ, "TMPDIR": str(folders)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + 60
        while not child.exists():
            assert time.monotonic() < deadline_s
            assert process.poll() is None
            time.sleep(0.05)
        assert [each.name[:16] for each in folders.iterdir()] == ["meltcore-lm-eval"]
        process.send_signal(number)
        _, error = process.communicate(timeout=WAIT_S)
        left = runs(int(child.read_text()))
    finally:
        process.kill()
        process.wait()
        if child.exists() and runs(int(child.read_text())):
            os.kill(int(child.read_text()), signal.SIGKILL)
    assert (process.returncode, error) == (130, "meltcore eval: interrupted\n")
    assert not left
    assert list(folders.iterdir()) == []


def runs(pid: int) -> bool:
    """Whether the process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
def test_harness_is_ended_at_its_time_limit(python: Callable[[str], str], tmp_path: Path) -> None:
    child = tmp_path / "child"
    harness = python(f"sleep 60 & echo $! > {child}; wait")
    with pytest.raises(HarnessError, match="did not end within 1 s"):
        run_harness(harness, find_package(harness), "http://127.0.0.1:9", "m", [ITEM], SHOTS, timeout_s=1.0)
    assert not runs(int(child.read_text()))


@pytest.mark.parametrize("end", ["\u0085", "\u2028", "\u2029"])
def test_answer_may_contain_unicode_line_separators(python: Callable[[str], str], tmp_path: Path, end: str) -> None:
    messages = conversation(BUNDLED_SHOTS, ITEM)
    sample = {
        "doc_id": 0,
        "arguments": {"gen_args_0": {"arg_0": [json.dumps(messages)]}},
        "resps": [[f"First.{end}The answer is 18."]],
        "exact_match": 1.0,
    }
    lines = [
        json.dumps({**sample, "filter": name}, ensure_ascii=False) for name in ("strict-match", "flexible-extract")
    ]
    samples = tmp_path / "samples"
    samples.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    harness = python(f'mkdir -p "$OUT"/m && cp {samples} "$OUT"/m/samples_meltcore_gsm8k_2026.jsonl')
    [found] = run_harness(harness, find_package(harness), "http://127.0.0.1:9", "m", [ITEM], SHOTS)
    assert found == HarnessItem(messages, f"First.{end}The answer is 18.", {"strict": True, "flexible": True})


# --- the harness itself, where it is installed


class MixedServer(AnsweringServer):
    """Ends its answers in every form in turn."""

    def answer(self, question: str, streamed: bool) -> str:
        form = list(FORMS)[len(question) % len(FORMS)] if not streamed else "number"
        self._form = FORMS[form]
        return super().answer(question, streamed)


@pytest.fixture
def items() -> list[Item]:
    """200 problems whose lengths, and so the forms of their answers, differ."""
    return [Item(f"Problem {at}{'!' * (at % len(FORMS))} how many?", f"#### {at * 37 + 5:,}") for at in range(200)]


@pytest.fixture
def servers() -> Iterator[list[AnsweringServer]]:
    started: list[AnsweringServer] = []
    yield started
    for server in started:
        server.close()


@needs_harness
@pytest.mark.slow
@pytest.mark.parametrize("right", [0, 174, 175, 200])
def test_harness_agrees_on_every_item_in_every_form(
    servers: list[AnsweringServer], items: list[Item], right: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    servers.append(MixedServer(items, right, "number"))
    data = tmp_path_factory.mktemp("items") / "items.jsonl"
    data.write_text("".join(json.dumps({"question": item.question, "answer": item.answer}) + "\n" for item in items))
    result = run_gsm8k(servers[0].address, Gsm8kConfig(data=str(data)), harness=HARNESS)
    assert result.evaluation is not None
    assert result.evaluation.correct == right
    assert [gate.status for gate in result.gates] == ["PASS" if right >= 175 else "FAIL", "PASS", "PASS"]
    assert result.gates[1].detail.startswith("200 of 200")
    assert f"in both askings alike: 200; it found {right} right by flexible" in result.gates[2].detail


@needs_harness
@pytest.mark.slow
def test_harness_agrees_on_the_bundled_problems_without_examples(servers: list[AnsweringServer]) -> None:
    items = read_items(BUNDLED_SOURCE, 50)
    servers.append(AnsweringServer(items, 48, "sentence"))
    result = run_gsm8k(servers[0].address, Gsm8kConfig(data=BUNDLED_SOURCE, limit=50, shots="none"), harness=HARNESS)
    assert result.evaluation is not None
    assert result.evaluation.correct == 48
    assert [gate.status for gate in result.gates] == ["PASS"] * 3


@needs_harness
@pytest.mark.slow
def test_harness_agrees_on_answers_of_the_bundled_model(tmp_path: Path) -> None:
    command = ["serve", "meltcore/sums", "--port", "0", "--device", "cpu"]
    with MeltcoreServer(command, tmp_path / "log", report=print) as server:
        result = run_gsm8k(
            server.wait_ready(), Gsm8kConfig(data=BUNDLED_SOURCE, limit=80, shots="none"), harness=HARNESS
        )
    assert result.evaluation is not None
    assert result.evaluation.accuracy >= 0.95
    assert [gate.status for gate in result.gates] == ["PASS"] * 3
