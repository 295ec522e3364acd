"""References of the package: what they hold, what they compare with, and the ratio."""

from pathlib import Path

import msgspec
import pytest
from places import ROOT
from reference_score import trim
from sample_scores import sample_device, sample_scored_run

from meltcore.common.errors import ConfigError
from meltcore.common.files import read_document
from meltcore.measure.documents.score import ScoredRun
from meltcore.measure.documents.values.scores import (
    NamedScore,
    differences,
    find_reference,
    ratio_line,
    ratios,
    shipped_references,
)


def named(peak: float = 20_000.0, **changes: object) -> NamedScore:
    return NamedScore("mine", sample_scored_run([sample_device(peak)], **changes))


def test_every_shipped_reference_ranks_and_is_made_from_the_committed_result() -> None:
    shipped = shipped_references()
    assert [each.name for each in shipped] == ["h200"]
    for each in shipped:
        source = ROOT / "benchmarks" / "results" / "gpu_score" / f"{each.name}.json"
        assert each.run == trim(read_document(source, ScoredRun)), "run scripts/reference_score.py"
        assert each.is_reference
        assert each.score.not_comparable == []
        assert (each.run.fingerprint.arguments, each.score.devices[0].uuid, each.score.devices[0].lines) == (
            [],
            None,
            None,
        )
    [h200] = shipped
    assert h200.hardware == "NVIDIA H200"
    assert h200.score.output_tokens_per_s == pytest.approx(35_063.1, abs=0.1)
    assert h200.score.devices[0].levels[0].utilization["sm_active_percent"] == pytest.approx(86.2, abs=0.1)


def test_file_in_the_folder_is_a_reference(tmp_path: Path) -> None:
    assert shipped_references(tmp_path) == []
    (tmp_path / "b.json").write_bytes(msgspec.json.encode(sample_scored_run()))
    (tmp_path / "a.json").write_bytes(msgspec.json.encode(sample_scored_run()))
    assert [each.name for each in shipped_references(tmp_path)] == ["a", "b"]


def test_only_a_complete_comparable_run_becomes_a_reference() -> None:
    with pytest.raises(ConfigError, match="complete, comparable run"):
        trim(sample_scored_run(not_comparable=["measured on a CPU"]))
    late = sample_scored_run()
    late.verdict = "CLIENT_BOUND"
    with pytest.raises(ConfigError, match="verdict OK"):
        trim(late)


def test_comparable_score_has_a_ratio_to_each_shipped_reference_whatever_the_engine() -> None:
    score = named(17_531.56, engine="9.9.9+00000000").score
    [found] = ratios(score, None)
    assert (found.name, found.reasons, found.per_gpu) == ("h200", [], None)
    assert found.ratio == pytest.approx(0.5, rel=1e-3)
    assert ratio_line(found) == "0.50 × NVIDIA H200 (h200: 35,063 output tok/s, engine 0.1.0+ce4a80de)"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"workload": "gpu-score-fp8/1"}, "the workload versions differ: gpu-score-fp8/1, gpu-score/1"),
        ({"dtype": "float16"}, "the precisions differ: float16, bfloat16"),
        ({"weights": "real"}, "the weights differ: real, dummy"),
        ({"model": "Qwen/Qwen3-4B"}, "the models differ: qwen3-4b, qwen3-0.6b"),
        ({"not_comparable": ["measured on a CPU"]}, "measured on a CPU"),
        ({"output_tokens_per_s": None}, "this run has no score"),
    ],
)
def test_incomparable_score_has_no_ratio_and_says_why_where_one_was_asked_for(
    changes: dict[str, object], reason: str
) -> None:
    score = named(**changes).score
    assert ratios(score, None) == []
    [found] = ratios(score, find_reference("h200"))
    assert found.ratio is None
    assert found.reasons == [reason]
    assert ratio_line(found).startswith("No ratio to NVIDIA H200 (h200")
    assert ratio_line(found).endswith(reason)


def test_eight_gpus_compare_in_sum_and_per_gpu() -> None:
    eight = NamedScore("mine", sample_scored_run([sample_device(35_063.12, f"GPU {n}") for n in range(8)]))
    [found] = ratios(eight.score, None)
    assert (found.ratio, found.per_gpu) == (pytest.approx(8.0, rel=1e-3), pytest.approx(1.0, rel=1e-3))
    assert ratio_line(found).endswith(", 1.00 × per GPU")


def test_reference_is_a_name_or_a_path(tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    path.write_bytes(msgspec.json.encode(sample_scored_run()))
    assert find_reference(str(path)).name == "theirs"
    with pytest.raises(ConfigError, match="--reference h100: no such file, and the shipped references are h200"):
        find_reference("h100")
    path.write_bytes(msgspec.json.encode(sample_scored_run([sample_device(sustained=None)])))
    with pytest.raises(ConfigError, match="this result has no score"):
        find_reference(str(path))
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a meltcore document"):
        find_reference(str(path))


def test_differences_name_a_reference_that_is_not_comparable_itself() -> None:
    theirs = named(not_comparable=["the run is incomplete"]).score
    assert differences(named().score, theirs) == ["the reference: the run is incomplete"]
