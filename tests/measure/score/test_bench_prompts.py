"""Prompts of a file: every bad file is refused with its line, and the hash of a good one names the workload."""

import hashlib
import json
from pathlib import Path

import pytest

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.score import plan as score_plan
from meltcore.measure.score import workload
from meltcore.measure.score.config import BenchConfig
from meltcore.measure.score.engine_process import EngineError
from meltcore.measure.score.plan import load_prompts, make_plan


def file_of(folder: Path, content: bytes | str, name: str = "mine.txt") -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_one_prompt_per_line_in_order_and_round_again(tmp_path: Path) -> None:
    found = load_prompts(file_of(tmp_path, "\ufeffWhat is 2 + 2?\r\n\n  \nWhat is 30 + 4?\n"), None, cpu=True)
    first, second = found.tokens
    assert first != second
    assert [found.prompt(number, 824) for number in range(5)] == [first, second, first, second, first]
    spaced = load_prompts(file_of(tmp_path, "What is 2 + 2?"), None, cpu=True)
    assert spaced.tokens == [first], "neither the mark at the beginning nor the line's end is a part of a prompt"


def test_jsonl_holds_prompts_with_line_breaks_and_other_fields(tmp_path: Path) -> None:
    lines = [{"prompt": "one\ntwo", "id": 7}, {"prompt": "three"}]
    text = "\n".join(map(json.dumps, lines))
    found = load_prompts(file_of(tmp_path, text, "mine.jsonl"), None, cpu=True)
    assert len(found.tokens) == 2
    assert found.tokens != load_prompts(file_of(tmp_path, text, "mine.txt"), None, cpu=True).tokens


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mine.txt", b"", "the file has no prompt"),
        ("mine.txt", b"\n  \n\t\n", "the file has no prompt"),
        ("mine.txt", b"good\nbad \xff\n", r"line 2 is not UTF-8 \(byte 9\)"),
        ("mine.txt", b"good\n\n" + b"x" * 51, "line 3 has 51 characters; at most 50 fit"),
        ("mine.txt", b"a\nb\nc\nd\n", "4 prompts; at most 3 are taken"),
        ("mine.txt", b"1 2 3 4 5 6 7 8 9 0 1 2 3 4 5\n", r"line 1 has \d+ tokens; 1 to 10 fit"),
        ("mine.txt", b"x\n" * 60, "120 bytes; at most 100 are read"),
        ("mine.jsonl", b'{"prompt": "a"}\nb\n', 'line 2 is not an object with a text "prompt"'),
        ("mine.jsonl", b'{"text": "a"}\n', "line 1 is not an object.*prompt"),
        ("mine.jsonl", b'{"prompt": 5}\n', "line 1 is not an object.*prompt"),
        ("mine.jsonl", b'{"prompt": ""}\n', "line 1 has 0 tokens"),
    ],
)
def test_bad_file_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, message: str
) -> None:
    monkeypatch.setattr(score_plan, "MAX_LINE_CHARACTERS", 50)
    monkeypatch.setattr(score_plan, "MAX_PROMPTS", 3)
    monkeypatch.setattr(score_plan, "MAX_PROMPT_TOKENS", 10)
    monkeypatch.setattr(score_plan, "MAX_FILE_BYTES", 100)
    with pytest.raises(ConfigError, match=message):
        load_prompts(file_of(tmp_path, content, name), None, cpu=True)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prompts .*none.txt: No such file"):
        load_prompts(str(tmp_path / "none.txt"), None, cpu=True)
    with pytest.raises(ConfigError, match="Is a directory"):
        load_prompts(str(tmp_path), None, cpu=True)


def test_tokenizer_comes_from_a_checkpoint_folder(tmp_path: Path) -> None:
    file = file_of(tmp_path, "hello")
    with pytest.raises(ConfigError, match=r"--model must be a checkpoint folder with a tokenizer\.json$"):
        load_prompts(file, None, cpu=False)
    with pytest.raises(ConfigError, match=r"Qwen/Qwen3-0\.6B is no folder"):
        load_prompts(file, "Qwen/Qwen3-0.6B", cpu=False)
    with pytest.raises(ConfigError, match=r"tokenizer .*tokenizer\.json"):
        load_prompts(file, str(tmp_path), cpu=False)
    bundled = str(score_plan._CPU_MODEL)
    assert load_prompts(file, bundled, cpu=False).tokens == load_prompts(file, None, cpu=True).tokens


def test_tokens_beyond_the_vocabulary_are_an_error_of_the_engine(tmp_path: Path) -> None:
    found = load_prompts(file_of(tmp_path, "hello"), None, cpu=True)
    assert found.prompt(0, found.highest_id + 1) == found.tokens[0]
    with pytest.raises(EngineError, match=f"token {found.highest_id}; the model's vocabulary has {found.highest_id}"):
        found.prompt(0, found.highest_id)


def test_hash_of_the_file_names_the_workload(tmp_path: Path) -> None:
    names = []
    for content in ("hello\n", "hello\n\n", "hello\n"):
        plan = make_plan(BenchConfig(cpu=True, prompts=file_of(tmp_path, content)))
        assert plan.prompt_file is not None
        assert plan.prompt_file.sha256 == hashlib.sha256(content.encode()).hexdigest()
        assert plan.name == f"gpu-prompts/1+{plan.prompt_file.sha256[:16]}"
        names.append(plan.name)
    assert names[0] == names[2] != names[1]


def test_context_holds_the_longest_prompt(tmp_path: Path) -> None:
    short = make_plan(BenchConfig(cpu=True, prompts=file_of(tmp_path, "hello")))
    assert short.context == workload.CONTEXT == make_plan(BenchConfig(cpu=True)).context
    long = make_plan(BenchConfig(cpu=True, prompts=file_of(tmp_path, "1 2 3 " * 500)))
    assert long.prompt_file is not None
    assert long.context == long.prompt_file.max_tokens + 128 > workload.CONTEXT


def test_score_keeps_its_name_and_its_prompts() -> None:
    plan = make_plan(BenchConfig())
    assert (plan.name, plan.prompt, plan.grid, plan.prompt_file) == ("gpu-score/1", workload.prompt, None, None)
    assert make_plan(BenchConfig(precision="fp8")).name == "gpu-score-fp8/1"


def test_command_refuses_a_bad_file_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--cpu", "--out", str(tmp_path / "runs"), "--prompts"]
    assert main([*arguments, str(tmp_path / "none.txt")]) == 2
    assert capsys.readouterr().err == f"meltcore bench: --prompts {tmp_path / 'none.txt'}: No such file or directory\n"
    assert main([*arguments, file_of(tmp_path, "a"), "--sweep"]) == 2
    assert "excludes --prompts" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
