"""The full evaluation of a real server with the bundled model in FP8, and its submission."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_openai import TOKENIZER
from test_submission import read, submit

from meltcore.cli.main import main
from meltcore.measure.documents.runfolder import read_result
from meltcore.measure.documents.schema import RunResult
from meltcore.measure.experiments.evals.gsm8k_data import BUNDLED_SOURCE
from meltcore.measure.experiments.servers import MeltcoreServer

pytestmark = pytest.mark.slow
QUICK = ["--num-prompts", "4", "--input-len", "16", "--output-len", "12", "--tokenizer", TOKENIZER]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log"
    options = ["--device", "cpu", "--memory", "128MiB", "--quantization", "fp8", "--kv-cache-dtype", "fp8"]
    with MeltcoreServer(["serve", "--port", "0", "meltcore/sums", *options], log, report=print) as server:
        yield server.wait_ready()


def evaluate(address: str, out: Path, *options: str) -> RunResult:
    assert main(["eval", "all", address, "--out", str(out), *QUICK, *options]) == 0
    [folder] = out.iterdir()
    return read_result(folder)


def test_bundled_model_gets_a_score_and_is_submitted_without_rules_and_refused_with_them(
    address: str, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    result = evaluate(address, runs, "--data", BUNDLED_SOURCE, "--limit", "12", "--shots", "none")
    assert result.evaluation is not None
    assert result.evaluation.accuracy >= 0.95
    assert result.eval_score is not None
    assert result.eval_score.total_tokens_per_s > result.eval_score.output_tokens_per_s > 0
    assert result.settings["weights"] == "real"
    submit(tmp_path / "free", runs)
    measured = read(tmp_path / "free/results/throughput.json")
    assert [each["successful_requests"] for each in measured["results"]] == [4] * 7
    assert all(each["total_completion_tokens"] > 0 for each in measured["results"])
    assert "FP8 KV cache" in (tmp_path / "free/WRITEUP.md").read_text()
    assert submit(tmp_path / "strict", runs, "--rules", "hackathon") == 1
    gates = {gate["name"]: gate for gate in read(tmp_path / "strict/submission.json")["gates"]}
    assert gates["KV cache in BF16"]["detail"] == "kv_cache_dtype: float8_e4m3fn"
    weights = gates["weights in BF16 (no FP8, INT8 or 4-bit)"]
    # Other weights are in float16 or float32, as the CPU multiplies them.
    assert weights["status"] == "FAIL"
    assert weights["detail"].removeprefix("weight_dtypes: ").split(", ")[-1] == "float8_e4m3fn"


def test_speed_only_gives_a_weighted_throughput_and_no_score(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluate(address, tmp_path, "--speed-only", "--output-len", "4")
    assert [gate.status for gate in result.gates] == ["NOT RUN", "PASS", "NOT RUN", "NOT RUN"]
    assert result.weighted_throughput is not None
    assert (result.eval_score, result.evaluation) == (None, None)
    assert {level.output_tokens for level in result.levels} == {4 * 4}
    printed = capsys.readouterr().out
    assert "NOT RUN  GSM8K" in printed
    assert "weighted throughput:" in printed
    assert "score:" not in printed
