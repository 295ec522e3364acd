"""What follows from points already measured: the knee, the finding, and how precisions lie apart."""

import json
from pathlib import Path

import pytest

from meltcore.errors import ConfigError
from meltcore.problems import evaluation_set
from meltcore.results.tuning import TuningPoint
from meltcore.tune.attempt import FLAGS, flags_of
from meltcore.tune.batching import best_and_knee, finding
from meltcore.tune.precision import Question, Written, bundled_questions, compare_answers, gsm8k_questions
from meltcore.tune.precision import finding as precision_finding


def point(
    seqs: int, rate: float | None, tokens: int = 512, within: float | None = None, ok: bool = True
) -> TuningPoint:
    return TuningPoint(settings={"seqs": seqs, "tokens": tokens}, ok=ok, output_tokens_per_s=rate, within_limits=within)


def test_the_knee_is_the_smallest_setting_within_2_percent_of_the_best() -> None:
    points = [point(8, 500), point(16, 900), point(32, 985), point(64, 1000), point(128, 990)]
    assert best_and_knee(points) == (3, 2)
    assert finding(points, 3, 2).startswith("The knee is 32 sequences, 512 tokens a step: 985 output tok/s, 98.5 %")


def test_gains_are_counted_from_the_server_as_it_is_shipped_which_is_no_choice_itself() -> None:
    shipped = TuningPoint(settings={}, ok=True, output_tokens_per_s=2000.0)
    points = [shipped, point(8, 1200), point(16, 2400), point(64, 2420)]
    assert best_and_knee(points) == (3, 2)
    assert finding(points, 3, 2).endswith("(2,000 output tok/s): +20.0 % at the knee, +21.0 % at the best.")
    assert finding([shipped, points[1]], 1, 1).endswith("as it is shipped (2,000 output tok/s): -40.0 %.")
    dead = TuningPoint(settings={}, ok=False, why="no")
    assert "shipped" not in finding([dead, points[1]], 1, 1)
    assert best_and_knee([shipped]) == (None, None)


def test_of_equal_sequences_the_smaller_budget_is_the_knee() -> None:
    assert best_and_knee([point(32, 1000, tokens=2048), point(32, 990, tokens=512), point(64, 999)]) == (0, 1)


def test_what_misses_the_limits_or_did_not_run_is_neither_best_nor_knee() -> None:
    points = [
        point(8, 500, within=1.0),
        point(16, 900, within=0.96),
        point(32, 1000, within=0.94),
        point(64, 2000, ok=False),
    ]
    assert best_and_knee(points) == (1, 1)
    assert "nothing smaller comes near" in finding(points, 1, 1)
    none = [point(8, 500, within=0.5), point(16, None, ok=False)]
    assert best_and_knee(none) == (None, None)
    assert finding(none, None, None).startswith("No setting meets the limits: 1 of 2 ran")


def test_other_servers_have_other_words() -> None:
    assert flags_of(["seqs=-np", "length=-c"]) == {**FLAGS, "seqs": "-np", "length": "-c"}
    for bad in ("seqs", "colour=-x", "seqs="):
        with pytest.raises(ConfigError, match="is not of the form"):
            flags_of([bad])


def test_tokens_are_compared_up_to_the_first_that_differs() -> None:
    questions = [Question({}, lambda text: text == "ab"), Question({}, lambda text: text == "x")]
    first = [Written("ab", [("a", -0.1), ("b", -0.2)]), Written("x", [("x", -1.0)])]
    second = [Written("ac", [("a", -0.3), ("c", -9.0)]), Written("x", [("x", -1.1)])]
    found = compare_answers(questions, first, second)
    assert (found.asked, found.right, found.failed, found.same_text) == (2, 1, 0, 1)
    assert found.tokens_compared == 2
    assert found.logprob_mean == pytest.approx(0.15)
    assert found.logprob_most == pytest.approx(0.2)


def test_a_failed_answer_is_not_right_and_not_the_same() -> None:
    found = compare_answers([Question({}, lambda text: True)], [Written(failed=True)], [Written(failed=True)])
    assert (found.right, found.failed, found.same_text, found.logprob_mean) == (0, 1, 0, None)


def test_the_finding_names_what_did_not_run() -> None:
    fast = TuningPoint(settings={"precision": "bfloat16"}, ok=True, output_tokens_per_s=110.0)
    slow = TuningPoint(settings={"precision": "float16"}, ok=True, output_tokens_per_s=100.0)
    refused = TuningPoint(settings={"precision": "fp8"}, ok=False, why="no")
    text = precision_finding([slow, fast, refused])
    assert text == "bfloat16 is the fastest: 110 output tok/s, +10.0 % on float16. Did not run: fp8."
    assert precision_finding([refused]) == "No precision ran."
    shipped = TuningPoint(settings={}, ok=True, output_tokens_per_s=88.0)
    assert precision_finding([shipped, fast]).endswith("+25.0 % on the server as shipped.")


def test_items_of_gsm8k_are_asked_and_marked_as_its_evaluation_does(tmp_path: Path) -> None:
    lines = [{"question": "How many?", "answer": "Two and two.\n#### 4"}, {"question": "And now?", "answer": "#### 9"}]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = gsm8k_questions(tmp_path / "items.jsonl", 2)
    assert first.body["messages"][-1]["content"].startswith("Q: How many?")
    assert first.body["stop"]
    assert first.judge("So the answer is 4.")
    assert not first.judge("The answer is 9.")
    assert second.judge("The answer is 9.")


def test_bundled_questions_are_the_held_out_ones() -> None:
    questions = bundled_questions(3)
    assert len(questions) == 3
    assert questions[0].judge(f"The answer is {evaluation_set()[0].value}.")
    assert not questions[0].judge("I do not know.")
