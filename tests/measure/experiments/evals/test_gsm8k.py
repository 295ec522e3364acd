"""GSM8K: grading, prompts and the gate, against servers with known answers."""

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_openai import FORMS, STRICT_FORMS, AnsweringServer, FakeServer
from places import SHARED

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.runfolder import RunFolder, read_result
from meltcore.measure.documents.schema import Evaluation
from meltcore.measure.experiments.evals import gsm8k
from meltcore.measure.experiments.evals.config import Gsm8kConfig
from meltcore.measure.experiments.evals.evaluation import score_runs
from meltcore.measure.experiments.evals.gsm8k import gate, run_gsm8k
from meltcore.measure.experiments.evals.gsm8k_data import (
    BUNDLED_SHOTS,
    BUNDLED_SOURCE,
    INVALID,
    Item,
    Shots,
    conversation,
    exact_match,
    extract_flexible,
    extract_strict,
    read_items,
    read_shots,
)

ITEMS = [Item(f"Problem {at}: how many?", f"Some work.\n#### {at * 37 + 5:,}") for at in range(200)]
PUBLISHED = SHARED / "data" / "gsm8k" / "test.jsonl"


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps({"question": item.question, "answer": item.answer}) + "\n" for item in ITEMS))
    return str(path)


@pytest.fixture
def answering() -> Iterator[Callable[[int, str], AnsweringServer]]:
    servers: list[AnsweringServer] = []

    def start(right: int, form: str) -> AnsweringServer:
        servers.append(AnsweringServer(ITEMS, right, form))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "form"),
    [*((right, "sentence") for right in (0, 174, 200)), *((175, form) for form in FORMS)],
)
def test_correct_answers_are_counted_exactly_in_every_format(
    answering: Callable[[int, str], AnsweringServer], data: str, right: int, form: str
) -> None:
    result = run_gsm8k(answering(right, form).address, Gsm8kConfig(data=data))
    assert result.evaluation is not None
    assert (result.evaluation.correct, result.evaluation.total, result.evaluation.failed) == (right, 200, 0)
    assert result.evaluation.strict_correct == (right if form in STRICT_FORMS else 0)
    assert (result.verdict, result.gates[0].status) == (("OK", "PASS") if right >= 175 else ("FAILED", "FAIL"))


@pytest.mark.parametrize(("asked", "needed"), [(200, 175), (100, 88), (8, 7), (1, 1), (1319, 1155)])
def test_gate_is_the_least_count_of_at_least_seven_eighths(asked: int, needed: int) -> None:
    for right, status in ((needed, "PASS"), (needed - 1, "FAIL")):
        evaluation = Evaluation(total=asked, correct=right, strict_correct=0, failed=0, ci_low=0.0, ci_high=1.0)
        assert gate(evaluation).status == status
    assert (needed - 1) / asked < 0.875 <= needed / asked


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("The answer is 18.", "18", "18."),
        ("The answer is 18", "1", "18"),  # strict asks for a character after the number
        ("The answer is -1,234.50.", "-1,234.50", "-1,234.50."),
        ("The answer is $18.", INVALID, "$18."),
        ("The answer is 7. No, the answer is 9.", "7.", "9."),
        ("It is 7 of 9 ...", INVALID, "..."),
        ("none", INVALID, INVALID),
    ],
)
def test_numbers_are_extracted_as_in_the_public_harness(text: str, strict: str, flexible: str) -> None:
    assert (extract_strict(text), extract_flexible(text)) == (strict, flexible)


@pytest.mark.parametrize("text", ["1234", "1,234", "$1,234.", "work #### 1,234"])
def test_commas_dollars_and_a_final_full_stop_are_ignored(text: str) -> None:
    assert exact_match(text, "1234")
    assert not exact_match(text, "1235")
    assert not exact_match("1234.00", "1234")  # the harness compares text, not numbers


def test_examples_come_as_turns_before_the_question() -> None:
    messages = conversation(BUNDLED_SHOTS, ITEMS[0])
    assert [message["role"] for message in messages] == ["user", "assistant"] * 8 + ["user"]
    assert messages[0]["content"] == f"Q: {BUNDLED_SHOTS[0].question}\nA:"
    assert messages[1]["content"] == BUNDLED_SHOTS[0].answer
    assert messages[-1]["content"] == "Q: Problem 0: how many?\nA:"
    assert conversation((), ITEMS[0]) == [{"role": "user", "content": ITEMS[0].question}]


def test_own_examples_have_the_format_and_a_not_comparable_note(
    answering: Callable[[int, str], AnsweringServer], data: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert read_shots(None) == Shots(BUNDLED_SHOTS, "own", is_comparable=False)
    address = answering(200, "sentence").address
    own = run_gsm8k(address, Gsm8kConfig(data=data, limit=8))
    assert any("not comparable" in note for note in own.notes)
    file = tmp_path / "shots.jsonl"
    file.write_text(
        "".join(json.dumps({"question": each.question, "target": each.answer}) + "\n" for each in BUNDLED_SHOTS)
    )
    given = run_gsm8k(address, Gsm8kConfig(data=data, limit=8, shots=str(file)))
    assert not any("not comparable" in note for note in given.notes)
    assert (own.settings["shots"], given.settings["shots"]) == ("own", "file")


def test_own_examples_are_correct() -> None:
    assert len({shot.question for shot in BUNDLED_SHOTS}) == 8
    assert [extract_strict(shot.answer) for shot in BUNDLED_SHOTS] == ["23", "13", "1500", "41", "22", "20", "9", "88"]


def test_examples_of_an_installed_harness_are_read_from_its_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    task = tmp_path / "lm_eval" / "tasks" / "gsm8k" / "gsm8k-cot.yaml"
    task.parent.mkdir(parents=True)
    (tmp_path / "lm_eval" / "__init__.py").touch()
    samples = "".join(f"  - question: q{at}\n    target: The answer is {at}.\n" for at in range(8))
    task.write_text(f"fewshot_config:\n  sampler: first_n\n  samples:\n{samples}")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = read_shots(None)
    assert (found.source, found.is_comparable) == ("lm-eval", True)
    assert found.examples[7] == Item("q7", "The answer is 7.")
    task.write_text("fewshot_config: {}\n")
    with pytest.raises(ConfigError, match="lm-eval"):
        read_shots(None)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "holds 0 problems"),
        ("{}\n", "line 1"),
        ("[]\n", "line 1"),
        ('{"question": "q", "answer": "a"}\n{"question": "q"}\n', "line 2"),
        ("x\n", "not JSON"),
    ],
)
def test_unusable_data_is_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        read_items(str(path), 1)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_items(str(tmp_path / "absent.jsonl"), 1)
    with pytest.raises(ConfigError):
        read_shots(str(path))


def test_folder_stands_for_its_test_file(data: str, tmp_path: Path) -> None:
    Path(data).rename(tmp_path / "test.jsonl")
    assert read_items(str(tmp_path), 200) == ITEMS
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"test\.jsonl cannot be read: .*No such file"):
        read_items(str(tmp_path), 1)


@pytest.mark.parametrize("source", ["x.json", "x.jsonl", "/no/such", "./x", "../x", "~/x", "/proc/version/x"])
def test_path_is_not_a_hub_data_set(source: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: .*(No such file|Not a directory)"):
        read_items(source, 1)


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    item = Item("How many\x85\u2028\u2029?", "#### 3")
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps({"question": item.question, "answer": item.answer}, ensure_ascii=False) + "\n", "utf-8")
    assert read_items(str(path), 1) == [item]


@pytest.mark.parametrize("row", [{"question": "q"}, {"answer": "a"}, {"question": "q", "answer": 3}])
def test_hub_data_set_of_another_format_is_refused(monkeypatch: pytest.MonkeyPatch, row: dict) -> None:
    rows = [{"question": "q", "answer": "a"}, row]
    hub = SimpleNamespace(load_dataset=lambda name, part, split: rows)
    monkeypatch.setitem(sys.modules, "datasets", hub)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="someone/sums row 2"):
        read_items("someone/sums", 1)


def test_bundled_problems_have_the_same_format() -> None:
    items = read_items(BUNDLED_SOURCE, 200)
    assert all(item.reference.lstrip("-").isdigit() for item in items)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="no copy of the GSM8K test set beside this checkout")
def test_published_test_set_is_read_whole() -> None:
    items = read_items(str(PUBLISHED), 1319)
    assert items[0].reference == "18"
    assert all(extract_flexible(item.answer).strip("$.") for item in items)
    assert all(exact_match(item.answer, item.reference) for item in items)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="no copy of the GSM8K test set beside this checkout")
def test_published_problems_are_recognized() -> None:
    items = read_items(str(PUBLISHED), 200)
    assert gsm8k.is_published(items)
    assert not gsm8k.is_published(items[:199])
    assert not gsm8k.is_published([*items[:-1], Item(items[-1].question, "#### 1")])


def test_other_problems_than_published_have_a_note(answering: Callable[[int, str], AnsweringServer], data: str) -> None:
    result = run_gsm8k(answering(200, next(iter(FORMS))).address, Gsm8kConfig(data=data))
    assert any(note.startswith("Not the first 200 problems of GSM8K's test split") for note in result.notes)


def test_every_answer_is_written_as_it_arrives(
    answering: Callable[[int, str], AnsweringServer], data: str, tmp_path: Path
) -> None:
    result = run_gsm8k(answering(175, next(iter(FORMS))).address, Gsm8kConfig(data=data), folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "gsm8k.jsonl").read_text().split("\n")[:-1]]
    assert sorted(line["item"] for line in lines) == list(range(200))
    assert sum(line["flexible"] for line in lines) == result.evaluation.correct == 175  # type: ignore[union-attr]
    assert all(line["reference"] == ITEMS[line["item"]].reference for line in lines)


def test_failed_request_is_not_correct_and_fails_the_run(data: str) -> None:
    server = FakeServer("no-usage")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        result = run_gsm8k(server.address, Gsm8kConfig(data=data, limit=8), model="unknown")
    finally:
        server.shutdown()
        server.server_close()
    assert result.evaluation is not None
    assert (result.evaluation.correct, result.evaluation.failed) == (0, 8)
    assert any("8 of 8 requests failed, the first one: status 404" in reason for reason in result.reasons)


def test_server_that_dies_leaves_no_accuracy_of_gsm8k(
    answering: Callable[[int, str], AnsweringServer], data: str, tmp_path: Path
) -> None:
    server = answering(200, next(iter(FORMS)))

    def end_half_way(done: int, right: int, asked: int) -> None:
        if done == 100:
            server.close()

    # A failed gate would say that its answers were wrong.
    result = run_gsm8k(server.address, Gsm8kConfig(data=data), on_answer=end_half_way)
    assert (result.status, result.verdict) == ("partial", "SERVER_DIED")
    assert (result.accuracy, result.evaluation) == (None, None)
    assert [gate.status for gate in result.gates] == ["NOT RUN"]
    [reason] = result.reasons
    found = re.fullmatch(r"the server ended after (\d+) of 200 answers", reason)
    assert found is not None
    assert 100 <= int(found[1]) < 200  # those in flight may still be answered
    folder = RunFolder.create(tmp_path / "runs", "eval")
    folder.write_result(result)
    with pytest.raises(ConfigError, match="is a partial run: the server ended"):
        score_runs([folder.path])


@pytest.mark.slow
def test_command_prints_the_gate_and_exits_by_it(
    answering: Callable[[int, str], AnsweringServer], data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for right, code, word in ((174, 1, "FAIL"), (175, 0, "PASS")):
        out = tmp_path / word
        address = answering(right, "sentence").address
        assert main(["eval", "gsm8k", address, "--data", data, "--out", str(out)]) == code
        assert f"{word}  GSM8K: at least 175 of 200 correct" in capsys.readouterr().out
        [folder] = out.iterdir()
        assert read_result(folder).gates[0].status == word
        assert "at least 175 of 200 correct" in (folder / "report.html").read_text()
