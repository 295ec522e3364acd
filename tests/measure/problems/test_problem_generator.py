"""What the problems promise: disjoint by construction, repeatable, of known shape. Parsed here independently."""

import hashlib
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import pytest

from meltcore.measure.problems import Problem, evaluation_set, extract_answer, generate, is_correct
from meltcore.measure.problems.sums import MAX_TABLE_OPERAND, Sum, is_held_out

_SYMBOLS = {"plus": "+", "minus": "-", "times": "*"}
_INFIX = re.compile(r"(?=\b(\d+) (\+|-|\*|plus|minus|times) (\d+)\b)")
_PREFIX = re.compile(r"the (sum|difference|product) (?:of|between) (\d+) and (\d+)")
_NAMED = {"sum": "+", "difference": "-", "product": "*"}


def _expressions(text: str) -> list[tuple[str, int, int]]:
    infix = [(_SYMBOLS.get(sign, sign), int(a), int(b)) for a, sign, b in _INFIX.findall(text)]
    return infix + [(_NAMED[name], int(a), int(b)) for name, a, b in _PREFIX.findall(text)]


def _of_problem(problem: Problem) -> list[tuple[str, int, int]]:
    return _expressions(problem.question) + _expressions(problem.answer)


def _steps(answer: str) -> Iterator[tuple[int, int]]:
    """Both sides of every "=" in a worked answer: 34 * 6 = 180 + 24 = 204 gives two pairs."""
    for chain in re.findall(r"\d+(?: [-+*=] \d+)+", answer):
        values = [_value(side) for side in chain.split(" = ")]
        yield from pairwise(values)


def _value(side: str) -> int:
    first, *rest = side.split(" ")
    if not rest:
        return int(first)
    a, b = int(first), int(rest[1])
    return {"+": a + b, "-": a - b, "*": a * b}[rest[0]]


@pytest.mark.parametrize("kind", ["short", "long", "mixed"])
def test_no_training_text_contains_a_held_out_expression(kind: str) -> None:
    problems = generate("train", kind=kind, num_problems=1000, seed=11)
    assert not [(found, each) for each in problems for found in _of_problem(each) if is_held_out(*found)]


@pytest.mark.parametrize("kind", ["short", "long", "mixed"])
def test_every_held_out_problem_uses_a_held_out_combination(kind: str) -> None:
    for problem in generate("heldout", kind=kind, num_problems=800, seed=12):
        operation, a, b = _of_problem(problem)[0]
        assert is_held_out(operation, a, b), problem


def test_held_out_combinations_never_met_in_training() -> None:
    def ordered(expression: tuple[str, int, int]) -> tuple[str, int, int]:
        operation, a, b = expression
        return expression if operation == "-" else (operation, min(a, b), max(a, b))

    trained = {ordered(e) for p in generate("train", kind="mixed", num_problems=2500, seed=1) for e in _of_problem(p)}
    asked = {ordered(_of_problem(p)[0]) for p in generate("heldout", kind="mixed", num_problems=1500, seed=1)}
    assert len(asked) > 700
    assert not trained & asked


def test_order_of_operands_does_not_change_the_split() -> None:
    for a in range(2, 120, 7):
        for b in range(2, 120, 5):
            assert is_held_out("+", a, b) == is_held_out("+", b, a)
            assert is_held_out("*", a, b) == is_held_out("*", b, a)


def test_sums_within_20_are_training() -> None:
    for a in range(MAX_TABLE_OPERAND + 1):
        for b in range(MAX_TABLE_OPERAND + 1):
            assert not any(is_held_out(operation, a, b) for operation in "+-*")


def test_about_one_combination_in_five_is_held_out() -> None:
    held_out = sum(is_held_out("-", a, b) for a in range(100, 200) for b in range(21, 100))
    assert 0.18 < held_out / (100 * 79) < 0.22


def test_every_number_has_a_trainable_next_step() -> None:
    """Otherwise drawing the second step of a training story would never end."""
    for value in range(1000):
        assert any(Sum("+", value, other).is_trainable for other in range(2, 100))
        assert any(Sum("-", value, other).is_trainable for other in range(1, min(99, max(1, value)) + 1))
        assert any(Sum("-", value + other, value).is_trainable for other in range(1, 100))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_worked_step_is_true_and_ends_in_the_value(split: str) -> None:
    for problem in generate(split, kind="mixed", num_problems=1000, seed=13):
        assert problem.answer.endswith(f"The answer is {problem.value}.")
        assert problem.value >= 0
        assert all(left == right for left, right in _steps(problem.answer)), problem.answer
        if problem.kind != "short":
            assert list(_steps(problem.answer))
            assert f"= {problem.value}. The answer" in problem.answer


def test_short_questions_ask_for_the_value() -> None:
    for problem in generate("heldout", kind="short", num_problems=2000, seed=14):
        (operation, a, b), *_ = _expressions(problem.question)
        assert _value(f"{a} {operation} {b}") == problem.value


def test_same_arguments_give_the_same_problems_and_other_seeds_others() -> None:
    again = [generate("heldout", kind="mixed", num_problems=50, seed=seed) for seed in (1, 1, 2)]
    assert again[0] == again[1]
    assert again[0] != again[2]


def test_evaluation_set_is_the_same_in_every_process_and_version() -> None:
    """Accuracies are compared across runs, so a change of the problems has to be deliberate."""
    digest = hashlib.sha256(repr(evaluation_set()).encode()).hexdigest()
    assert digest == "c5b601df948ccbaed661c17aa66af9a9ba7247a8b8e504bda432dfe9a883a74a"


def test_splits_differ_for_one_seed() -> None:
    train, heldout = (generate(split, kind="short", num_problems=200, seed=1) for split in ("train", "heldout"))
    assert not {problem.question for problem in train} & {problem.question for problem in heldout}


@pytest.mark.parametrize("count", [1, 7, 200])
def test_mixed_has_at_least_thirty_percent_long(count: int) -> None:
    problems = generate("heldout", kind="mixed", num_problems=count, seed=3)
    assert len(problems) == count
    assert sum(problem.kind == "long" for problem in problems) >= 0.3 * count


def test_evaluation_set_is_200_held_out_problems_of_all_kinds() -> None:
    problems = evaluation_set()
    assert len({problem.question for problem in problems}) == 200
    assert {problem.kind for problem in problems} == {"short", "medium", "long"}
    assert problems == evaluation_set()


def test_there_are_9000_different_questions_among_10000_short_ones() -> None:
    problems = generate("heldout", kind="short", num_problems=10_000, seed=5)
    assert len({problem.question for problem in problems}) > 9000


def test_needed_fact_occurs_once_on_its_page_among_look_alikes() -> None:
    for problem in generate("heldout", kind="long", num_problems=300, seed=6):
        page = problem.question.rsplit("\n", 1)[0]
        for key in re.findall(r"(\w+ counted \w+|Price of \w+): \d+", problem.answer):
            assert page.count(f"{key}:") == 1
        for name, item in re.findall(r"(\w+) counted (\w+):", problem.answer):
            assert len(re.findall(rf"\b{name} counted \w+:", page)) >= 2
            assert len(re.findall(rf"\w+ counted {item}:", page)) >= 2


def test_town_question_is_for_training_only() -> None:
    asked = {split: sum("town where" in each.question for each in _long(split)) for split in ("train", "heldout")}
    assert asked["train"] > 50
    assert asked["heldout"] == 0


def test_home_and_town_of_a_question_occur_once_on_the_page() -> None:
    for problem in (each for each in _long("train") if "town where" in each.question):
        page = problem.question.rsplit("\n", 1)[0]
        home, houses = re.findall(r"\w+ lives in|Houses in \w+:", problem.answer)
        assert page.count(home) == 1
        assert page.count(houses) == 1


def _long(split: Literal["train", "heldout"]) -> list[Problem]:
    return generate(split, kind="long", num_problems=400, seed=7)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 42.", 42),
        ("The answer is 1,042.", 1042),
        ("The answer is -7", -7),
        ("The answer is 5. No: the sum is 6. The answer is 6.", 6),
        ("The answer is unknown.", None),
        ("42", None),
        ("", None),
    ],
)
def test_answer_is_the_number_after_the_last_phrase(text: str, value: int | None) -> None:
    assert extract_answer(text) == value


def test_grading_uses_the_value_only() -> None:
    problem = Problem("What is 40 + 2?", "The answer is 42.", 42, "short")
    assert is_correct(problem, "Forty and two. The answer is 42.")
    assert not is_correct(problem, "The answer is 24.")
    assert not is_correct(problem, "42")
