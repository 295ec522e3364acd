"""The command, its run folder, and token counts with a tokenizer."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Digits, PreTokenizer, Sequence, WhitespaceSplit
from waiting import WAIT_S

from meltcore.common.errors import ConfigError
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.run.runner import measure
from meltcore.measure.load.token_counter import TokenCounter, open_tokenizer
from meltcore.measure.load.wire.connection import resolve_target

Start = Callable[..., object]
COMMAND = [sys.executable, "-m", "meltcore.cli.main", "load"]


def save_tokenizer(folder: Path, pieces: PreTokenizer) -> str:
    """A tokenizer for which each of `pieces` is a token."""
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pieces
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.slow
def test_command_writes_a_run_folder_and_prints_json(scripted: Start, tmp_path: Path) -> None:
    server = scripted("--ttft-ms", "5", "--itl-ms", "1", "--tokens", "4")
    options = [server.url, "--concurrency", "2,4", "--num-prompts", "12,16", "--workload", "random:in=4,out=4"]  # type: ignore[attr-defined]
    options += ["--out", str(tmp_path), "--goodput", "ttft:1000", "--api-key", "secret-key", "--json"]
    done = subprocess.run(COMMAND + options, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    [folder] = tmp_path.iterdir()
    assert json.loads((folder / "result.json").read_text()) == printed
    assert [level["succeeded"] for level in printed["levels"]] == [12, 16]
    assert printed["status"] == "complete"
    assert all(level["goodput_per_s"] > 0 for level in printed["levels"])
    assert "<html" in (folder / "report.html").read_text()
    levels = [json.loads(line)["level"] for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert (levels.count("concurrency 2"), levels.count("concurrency 4")) == (12, 16)
    assert "secret-key" not in "".join(path.read_text() for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_leaves_a_partial_run(scripted: Start, tmp_path: Path, processes: str) -> None:
    server = scripted("--ttft-ms", "50", "--itl-ms", "5", "--tokens", "4")
    options = [server.url, "--concurrency", "4", "--num-prompts", "4000", "--out", str(tmp_path)]  # type: ignore[attr-defined]
    command = subprocess.Popen([*COMMAND, *options, "--processes", processes], stdout=subprocess.PIPE, text=True)
    try:
        assert wait_for_records(tmp_path, 20)
        command.send_signal(signal.SIGINT)
        output, _ = command.communicate(timeout=WAIT_S)
    finally:
        command.kill()
        command.wait(WAIT_S)
    assert command.returncode == 130
    [folder] = tmp_path.iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["verdict"]) == ("partial", "PARTIAL")
    assert 0 < result["levels"][0]["succeeded"] < 4000
    assert "interrupted" in output


def wait_for_records(root: Path, count: int) -> bool:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        lines = [line for path in root.glob("*/requests.jsonl") for line in path.read_text().splitlines()]
        if len(lines) >= count:
            return True
        time.sleep(0.05)
    return False


def test_agreeing_token_counts_are_confirmed(scripted: Start, tmp_path: Path) -> None:
    server = scripted("--ttft-ms", "5", "--itl-ms", "1", "--tokens", "16")
    tokenizer = save_tokenizer(tmp_path, WhitespaceSplit())
    config = LoadConfig(
        url=server.url, workload="random:in=4,out=16", concurrency=(4,), num_prompts=(8,), tokenizer=tokenizer
    )  # type: ignore[attr-defined]
    [level] = measure(config, []).levels
    assert level.token_count_source == "confirmed"


def test_disagreeing_token_counts_are_reported(scripted: Start, tmp_path: Path) -> None:
    server = scripted("--ttft-ms", "5", "--itl-ms", "1", "--tokens", "16")
    tokenizer = save_tokenizer(tmp_path, Sequence([WhitespaceSplit(), Digits(individual_digits=True)]))
    config = LoadConfig(
        url=server.url, workload="random:in=4,out=16", concurrency=(4,), num_prompts=(8,), tokenizer=tokenizer
    )  # type: ignore[attr-defined]
    result = measure(config, [])
    assert result.levels[0].token_count_source == "server-reported"
    # Words w0 to w15: 10 of two pieces and 6 of three, in each of 8 answers.
    assert any("server reports 128 output tokens, the tokenizer counts 304" in note for note in result.notes)


def test_stored_truncation_and_padding_do_not_change_counts(tmp_path: Path) -> None:
    raw = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    raw.pre_tokenizer = WhitespaceSplit()
    raw.enable_truncation(256)
    raw.enable_padding(length=128)
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path))
    assert [len(tokenizer.encode("word " * words).ids) for words in (3, 512)] == [3, 512]


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        TokenCounter(str(tmp_path))


@pytest.mark.parametrize("path", ["ä", "日本/v1", "a b"])
def test_non_ascii_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="not a server address"):
        resolve_target(f"http://127.0.0.1:9/{path}")


@pytest.mark.slow
def test_unstreamed_run_has_no_ttft_and_a_note(scripted: Start, tmp_path: Path) -> None:
    server = scripted("--ttft-ms", "5", "--itl-ms", "1", "--tokens", "4")
    options = [server.url, "--num-prompts", "4", "--workload", "random:in=4,out=4", "--no-stream"]  # type: ignore[attr-defined]
    done = subprocess.run(
        [*COMMAND, *options, "--out", tmp_path, "--json"], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    [level] = printed["levels"]
    assert (level["succeeded"], level["output_tokens"], level["ttft_ms"]["n"]) == (4, 16, 0)
    assert (level["e2e_ms"]["n"], level["tokens_per_event"]) == (4, None)
    assert any("not streamed: TTFT" in note for note in printed["notes"])
