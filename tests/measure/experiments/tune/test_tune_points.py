"""Results of measured points: knee, finding, comparison of precisions."""

import json
from pathlib import Path

import pytest

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.tuning import TuningPoint
from meltcore.measure.experiments.servers import Answer
from meltcore.measure.experiments.tune.precision import (
    EvalItem,
    bundled_items,
    compare_answers,
    gsm8k_items,
    precision_finding,
)
from meltcore.measure.experiments.tune.run import FLAGS, batching_finding, best_and_knee, parse_flags
from meltcore.measure.problems import evaluation_set


def point(
    seqs: int, rate: float | None, tokens: int = 512, attained: float | None = None, ok: bool = True
) -> TuningPoint:
    return TuningPoint(
        settings={"max_num_seqs": seqs, "max_num_batched_tokens": tokens},
        ok=ok,
        output_tokens_per_s=rate,
        slo_attainment=attained,
    )


def test_knee_is_smallest_setting_within_2_percent_of_the_best() -> None:
    points = [point(8, 500), point(16, 900), point(32, 985), point(64, 1000), point(128, 990)]
    assert best_and_knee(points) == (3, 2)
    assert batching_finding(points, 3, 2).startswith(
        "The knee is 32 sequences, 512 tokens per step: 985 output tok/s, 98.5 %"
    )


def test_gains_are_counted_from_default_settings_which_are_no_candidate() -> None:
    default = TuningPoint(settings={}, ok=True, output_tokens_per_s=2000.0)
    points = [default, point(8, 1200), point(16, 2400), point(64, 2420)]
    assert best_and_knee(points) == (3, 2)
    assert batching_finding(points, 3, 2).endswith("(2,000 output tok/s): +20.0 % at the knee, +21.0 % at the best.")
    assert batching_finding([default, points[1]], 1, 1).endswith("default settings (2,000 output tok/s): -40.0 %.")
    dead = TuningPoint(settings={}, ok=False, reason="no")
    assert "default" not in batching_finding([dead, points[1]], 1, 1)
    assert best_and_knee([default]) == (None, None)


def test_knee_has_the_smaller_budget_of_equal_sequences() -> None:
    assert best_and_knee([point(32, 1000, tokens=2048), point(32, 990, tokens=512), point(64, 999)]) == (0, 1)


def test_point_that_misses_the_slo_or_failed_is_neither_best_nor_knee() -> None:
    points = [
        point(8, 500, attained=1.0),
        point(16, 900, attained=0.96),
        point(32, 1000, attained=0.94),
        point(64, 2000, ok=False),
    ]
    assert best_and_knee(points) == (1, 1)
    assert "no smaller setting near it" in batching_finding(points, 1, 1)
    none = [point(8, 500, attained=0.5), point(16, None, ok=False)]
    assert best_and_knee(none) == (None, None)
    assert batching_finding(none, None, None).startswith("No setting meets the SLO: 1 of 2 ran")


def test_flags_of_other_servers() -> None:
    assert parse_flags(["max_num_seqs=-np", "max_model_len=-c"]) == {
        **FLAGS,
        "max_num_seqs": "-np",
        "max_model_len": "-c",
    }
    for bad in ("max_num_seqs", "color=-x", "max_num_seqs="):
        with pytest.raises(ConfigError, match="is not of the form"):
            parse_flags([bad])


def test_tokens_are_compared_up_to_the_first_difference() -> None:
    items = [EvalItem({}, lambda text: text == "ab"), EvalItem({}, lambda text: text == "x")]
    first = [Answer("ab", tokens=[("a", -0.1), ("b", -0.2)]), Answer("x", tokens=[("x", -1.0)])]
    second = [Answer("ac", tokens=[("a", -0.3), ("c", -9.0)]), Answer("x", tokens=[("x", -1.1)])]
    found = compare_answers(items, first, second)
    assert (found.asked, found.correct, found.failed, found.identical) == (2, 1, 0, 1)
    assert found.tokens_compared == 2
    assert found.logprob_diff_mean == pytest.approx(0.15)
    assert found.logprob_diff_max == pytest.approx(0.2)


def test_failed_answer_is_neither_correct_nor_identical() -> None:
    found = compare_answers([EvalItem({}, lambda text: True)], [Answer("", failed=True)], [Answer("", failed=True)])
    assert (found.correct, found.failed, found.identical, found.logprob_diff_mean) == (0, 1, 0, None)


def test_finding_names_precisions_that_did_not_run() -> None:
    fast = TuningPoint(settings={"precision": "bfloat16"}, ok=True, output_tokens_per_s=110.0)
    slow = TuningPoint(settings={"precision": "float16"}, ok=True, output_tokens_per_s=100.0)
    refused = TuningPoint(settings={"precision": "fp8"}, ok=False, reason="no")
    text = precision_finding([slow, fast, refused])
    assert text == "bfloat16 is the fastest: 110 output tok/s, +10.0 % over float16. Did not run: fp8."
    assert precision_finding([refused]) == "No precision ran."
    default = TuningPoint(settings={}, ok=True, output_tokens_per_s=88.0)
    assert precision_finding([default, fast]).endswith("+25.0 % over the default.")


def test_gsm8k_items_are_asked_and_graded_as_by_eval(tmp_path: Path) -> None:
    lines = [{"question": "How many?", "answer": "Two and two.\n#### 4"}, {"question": "And now?", "answer": "#### 9"}]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = gsm8k_items(tmp_path / "items.jsonl", 2)
    assert first.body["messages"][-1]["content"].startswith("Q: How many?")
    assert first.body["stop"]
    assert first.is_correct("So the answer is 4.")
    assert not first.is_correct("The answer is 9.")
    assert second.is_correct("The answer is 9.")


def test_bundled_items_are_held_out() -> None:
    items = bundled_items(3)
    assert len(items) == 3
    assert items[0].is_correct(f"The answer is {evaluation_set()[0].value}.")
    assert not items[0].is_correct("I do not know.")
