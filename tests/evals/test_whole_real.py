"""The whole evaluation of a real server: the bundled model answers GSM8K's form, sums, and counts as it should."""

from pathlib import Path

import pytest
from whole_server import TOKENIZER

from meltcore.cli.main import main
from meltcore.demo.server_process import OwnServer
from meltcore.evals.gsm8k_data import BUNDLED
from meltcore.results.runfolder import read_result

QUICK = ["--requests", "4", "--input-tokens", "16", "--output-tokens", "12", "--limit", "40", "--shots", "none"]


@pytest.mark.slow
def test_the_bundled_model_gets_a_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve = ["meltcore/sums", "--device", "cpu"]
    with OwnServer(serve, tmp_path / "log", say=print) as server:
        address = server.wait_ready()
        options = ["--data", BUNDLED, "--tokenizer", TOKENIZER, "--out", str(tmp_path / "runs"), *QUICK]
        assert main(["eval", "all", address, *options]) == 0, capsys.readouterr().out
    [folder] = (tmp_path / "runs").iterdir()
    result = read_result(folder)
    assert result.evaluation is not None
    assert result.evaluation.share >= 0.95
    assert result.eval_score is not None
    assert result.eval_score.total_tokens_per_s > result.eval_score.output_tokens_per_s > 0
    assert result.settings["weights"] == "real"
