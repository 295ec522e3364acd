"""Grammars through the whole engine: valid answers, late masks, failures, preemption and reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import engine_tools as tools
import numpy as np
import pytest
from llguidance import LLParserLimits
from waiting import WAIT_S, wait_until

from meltcore.common.errors import RequestError
from meltcore.engine.core.constraint import Constraint, MaskTable
from meltcore.engine.core.constraints import Constraints, _fail
from meltcore.engine.core.request import RequestStatus
from meltcore.protocol.generation import AddRequest, SequenceOutput
from meltcore.protocol.sampling_params import Grammar, SamplingParams

pytestmark = pytest.mark.slow

PROMPT = tools.random_prompt(30, 0)
END = 1  # of the random models
DIGITS = Grammar("start: /[0-9]{3}x[0-9]{3}/")
LETTERS = Grammar("start: /[a-z]{2,30}/")
RECORD = Grammar(r'start: /\{"a": [0-9]{1,9}, "b": "(no|yes)"\}/')


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tools.with_tokenizer(checkpoint, tmp_path_factory.mktemp("constrained"))


@pytest.fixture(params=["in step", "one ahead", "device waits", pytest.param("gpu", marks=pytest.mark.gpu)])
def seen(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tools.SeenEngine:
    """An engine. Where the device waits, a CPU samples before a mask can be filled, unless the token was refused."""
    if request.param == "gpu":
        return tools.open_engine(folder, overlap=True, device="cuda", max_model_len=300, max_num_batched_tokens=160)
    opened = tools.open_engine(folder, overlap=request.param != "in step")
    if request.param == "device waits":
        opened.engine._constraints.does_device_wait = True
        for limit in ("_ALONE_S", "_GRACE_S"):
            monkeypatch.setattr(f"meltcore.engine.core.constraints.{limit}", 0.0)
    return opened


def run(seen: tools.SeenEngine) -> dict[str, list[SequenceOutput]]:
    outputs: dict[str, list[SequenceOutput]] = {}
    for output in seen.outputs():
        outputs.setdefault(output.request_id, []).append(output)
    seen.engine.check_idle()
    return outputs


def ids(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text(outputs: list[SequenceOutput]) -> str:
    return bytes(token for token in ids(outputs) if token != END and token < 256).decode()


def test_constrained_answers_follow_their_grammars_and_free_ones_do_not_change(seen: tools.SeenEngine) -> None:
    seen.add("free", PROMPT, max_tokens=12)
    free = ids(run(seen)["free"])
    seen.add("free", PROMPT, max_tokens=12)
    seen.add("digits", PROMPT, max_tokens=12, grammar=DIGITS)
    seen.add("record", PROMPT, max_tokens=40, grammar=RECORD, temperature=1.0, seed=1, top_p=0.9)
    seen.add("cut", PROMPT, max_tokens=5, grammar=DIGITS, temperature=1.0, seed=1, logprobs=2)
    outputs = run(seen)
    assert ids(outputs["free"]) == free
    answer = text(outputs["digits"])
    assert re.fullmatch(r"\d{3}x\d{3}", answer)
    assert outputs["digits"][-1].finish_reason == "stop"  # the grammar allows no further token
    assert json.loads(text(outputs["record"])).keys() == {"a", "b"}
    assert outputs["cut"][-1].finish_reason == "length"
    assert len(text(outputs["cut"])) == 5
    assert all(output.logprobs is not None for output in outputs["cut"])


@pytest.mark.gpu
def test_free_answers_on_a_gpu_are_the_same_beside_constrained_ones_in_float32(folder: Path) -> None:
    """Greedy and drawn ones. In 16 bits the rounding of other batch sizes changes tokens; here it is too small."""
    seen = tools.open_engine(folder, overlap=True, device="cuda", max_num_seqs=40, max_model_len=300)

    def free_answers(num_constrained: int) -> dict[str, list[int]]:
        for number in range(16):
            prompt = tools.random_prompt(20 + number, number)
            seen.add(f"free {number}", prompt, max_tokens=40, temperature=float(number % 2), seed=number)
        for number in range(num_constrained):
            settings = {"temperature": 1.0, "seed": number, "grammar": RECORD}
            seen.add(f"constrained {number}", PROMPT, max_tokens=40, **settings)
        return {name: ids(outputs) for name, outputs in run(seen).items() if name.startswith("free")}

    alone = free_answers(0)
    assert len(alone) == 16
    assert free_answers(20) == alone


def test_seeds_penalties_and_stop_tokens_work_with_a_grammar(seen: tools.SeenEngine) -> None:
    for name, seed in (("one", 5), ("same", 5), ("other", 6)):
        seen.add(name, PROMPT, temperature=1.0, seed=seed, max_tokens=20, grammar=LETTERS, frequency_penalty=0.5)
    outputs = run(seen)
    assert ids(outputs["one"]) == ids(outputs["same"]) != ids(outputs["other"])
    seen.engine.runner.model.lm_head.weight.values.zero_()  # all logits equal: greedy repeats the first letter
    seen.add("penalized", PROMPT, max_tokens=6, grammar=LETTERS, frequency_penalty=1.0)
    seen.add("stopped", PROMPT, max_tokens=6, grammar=LETTERS, frequency_penalty=1.0, stop_token_ids=(ord("c"),))
    outputs = run(seen)
    assert ids(outputs["penalized"])[:2] == [ord("a"), ord("b")]  # then the end token, which has a lower id
    assert END in ids(outputs["penalized"])
    assert outputs["stopped"][-1].finish_reason == "stop"


def test_end_token_ends_an_answer_that_may_go_on(seen: tools.SeenEngine) -> None:
    seen.engine.runner.model.lm_head.weight.values.zero_()  # the end token has the lowest id that is ever allowed
    seen.add("ends", PROMPT, max_tokens=20, grammar=LETTERS, ignore_eos=False)
    seen.add("ignores", PROMPT, max_tokens=20, grammar=LETTERS, ignore_eos=True)
    outputs = run(seen)
    assert ids(outputs["ends"]) == ids(outputs["ignores"]) == [ord("a"), ord("a"), END]
    assert outputs["ends"][-1].stop_token_id == END
    assert outputs["ignores"][-1].finish_reason == "stop"


class SlowMasks:
    """Lets masks of some rows be filled only once they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release, self.slow_matchers = Event(), set[int]()
        fill_group = Constraints._fill_group

        def fill(constraints: Constraints, group: list) -> None:
            if any(id(constraint) in self.slow_matchers for constraint, _ in group):
                assert self.release.wait(60)
            fill_group(constraints, group)

        monkeypatch.setattr(Constraints, "_fill_group", fill)
        monkeypatch.setattr("meltcore.engine.core.constraints._ALONE_S", 0.01)


@pytest.fixture
def slow_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowMasks]:
    slow = SlowMasks(monkeypatch)
    yield slow
    slow.release.set()


@pytest.mark.parametrize("is_prompt", [True, False], ids=["first token", "later token"])
def test_late_mask_misses_steps_and_stalls_no_other_row(
    seen: tools.SeenEngine, slow_masks: SlowMasks, is_prompt: bool
) -> None:
    """The free row ends while the mask is late. Then the answer is the same as in time."""
    settings = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "grammar": RECORD, "frequency_penalty": 0.1}
    seen.add("late", PROMPT, **settings)
    expected = ids(run(seen)["late"])
    seen.add("late", PROMPT, **settings)
    request = seen.engine._requests["late"]
    while request.constraint is None or (not is_prompt and request.num_generated < 3):
        seen.engine.step()
    slow_masks.slow_matchers.add(id(request.constraint))
    before = len(request.token_ids)
    seen.add("free", PROMPT, max_tokens=12)
    while "free" in seen.engine._requests:
        seen.engine.step()
    assert len(request.token_ids) <= before + 2  # those whose masks were filled before
    assert seen.engine._constraints.num_late > 0
    slow_masks.release.set()
    list(seen.outputs())
    seen.engine.check_idle()
    assert request.token_ids[request.prompt_length :].tolist() == expected


def test_aborted_and_preempted_requests_leave_a_late_mask_to_itself(
    seen: tools.SeenEngine, slow_masks: SlowMasks
) -> None:
    """The row of a request whose mask is still being written is given to another, which waits for it."""
    seen.add("next", PROMPT, max_tokens=12, grammar=DIGITS)
    expected = ids(run(seen)["next"])
    seen.add("free", PROMPT, max_tokens=500)
    seen.add("gone", PROMPT, max_tokens=12, grammar=RECORD)
    request = seen.engine._requests["gone"]
    while request.constraint is None:
        seen.engine.step()
    slow_masks.slow_matchers.add(id(request.constraint))
    while not request.is_held:
        seen.engine.step()
    row = request.row
    seen.engine.abort(["gone"])
    seen.add("next", PROMPT, max_tokens=12, grammar=DIGITS)
    following = seen.engine._requests["next"]
    outputs: list[SequenceOutput] = []
    while not following.is_held:
        outputs += seen.engine.step().outputs
    assert following.row == row
    slow_masks.release.set()
    while "next" in seen.engine._requests:
        outputs += seen.engine.step().outputs
    seen.engine.abort(["free"])
    run(seen)
    assert ids([output for output in outputs if output.request_id == "next"]) == expected


def test_step_of_a_recurrent_model_waits_for_its_masks(
    tmp_path: Path, slow_masks: SlowMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recurrent state cannot take a token twice: the step waits, and ends the request where the limit is over."""
    tools.make_reference(family="qwen3_5_moe_text").save_pretrained(tmp_path / "model")
    seen = tools.open_engine(tools.with_tokenizer(tmp_path / "model", tmp_path / "constrained"))
    seen.add("expected", PROMPT, max_tokens=12, grammar=DIGITS)
    expected = ids(run(seen)["expected"])
    wait, asked = Constraints.wait, []

    def release_in_time(*args: object, may_be_late: bool) -> object:
        asked.append(may_be_late)
        if len(asked) == 2:
            slow_masks.release.set()
        return wait(*args, may_be_late=may_be_late)

    monkeypatch.setattr(Constraints, "wait", release_in_time)
    seen.add("one", PROMPT, max_tokens=12, grammar=DIGITS)
    assert ids(run(seen)["one"]) == expected
    assert set(asked) == {False}

    monkeypatch.setattr("meltcore.engine.core.constraints._LIMIT_S", 0.01)
    slow_masks.release.clear()
    asked.clear()
    asked += [False] * 3
    seen.add("stuck", PROMPT, max_tokens=12, grammar=DIGITS)
    request = seen.engine._requests["stuck"]
    while request.constraint is None:
        seen.engine.step()
    slow_masks.slow_matchers.add(id(request.constraint))
    seen.add("free", PROMPT, max_tokens=4)
    outputs = run(seen)
    assert outputs["stuck"][-1].finish_reason == "error"
    assert "0.01 s" in str(outputs["stuck"][-1].error)
    assert len(ids(outputs["free"])) == 4


def test_preempted_answers_follow_their_grammars(folder: Path) -> None:
    """Recomputed tokens are committed once."""
    alone = tools.open_engine(folder)
    settings = {"max_tokens": 60, "temperature": 1.0, "grammar": Grammar("start: /([a-z]{3}x){14}/")}
    expected = {}
    for seed in range(3):
        alone.add(str(seed), PROMPT, seed=seed, **settings)
        expected |= {name: ids(each) for name, each in run(alone).items()}
    for overlap in (False, True):
        crowded = tools.open_engine(folder, pages=4, overlap=overlap, max_model_len=128)
        for seed in range(3):
            crowded.add(str(seed), PROMPT, seed=seed, **settings)
        assert {name: ids(each) for name, each in run(crowded).items()} == expected
        assert crowded.engine.stats().preemptions_total > 0


def test_answer_is_constrained_after_its_reasoning(seen: tools.SeenEngine) -> None:
    seen.add("free", PROMPT, max_tokens=8)
    free = ids(run(seen)["free"])
    assert free[3] not in free[:3]
    started = Grammar(DIGITS.text, (0, free[3]), starts_in_reasoning=True)
    seen.add("started", PROMPT, max_tokens=20, grammar=started)
    seen.add("starts", PROMPT, max_tokens=20, grammar=Grammar(DIGITS.text, (free[0], free[3])))
    seen.add("omits", PROMPT, max_tokens=20, grammar=Grammar(DIGITS.text, (END, free[3])))
    seen.add("plain", PROMPT, max_tokens=20, grammar=DIGITS)
    outputs = run(seen)
    assert ids(outputs["started"])[:4] == ids(outputs["starts"])[:4] == free[:4]
    assert len(ids(outputs["started"])) == len(ids(outputs["starts"])) == 4 + 7
    assert re.fullmatch(rb"\d{3}x\d{3}", bytes(ids(outputs["started"])[4:]))
    assert ids(outputs["omits"]) == ids(outputs["plain"])


def test_failing_and_refused_grammars_end_their_requests_only(
    seen: tools.SeenEngine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen.add("refused", PROMPT, grammar=Grammar("start: missing"))
    seen.add("also refused", PROMPT, grammar=Grammar('start: %json {"not": {}}'))
    seen.add("free", PROMPT, max_tokens=4)
    outputs = run(seen)
    assert "missing" in str(outputs["refused"][-1].error)
    assert "not" in str(outputs["also refused"][-1].error)
    assert outputs["refused"][-1].finish_reason == outputs["also refused"][-1].finish_reason == "error"
    assert len(ids(outputs["free"])) == 4

    # A sampled token that the grammar does not allow, as if the mask were wrong.
    monkeypatch.setattr("meltcore.engine.worker.sampler.mask_logits", lambda *_arguments: None)
    seen.add("wrong", PROMPT, grammar=DIGITS)
    seen.add("free", PROMPT, max_tokens=4)
    outputs = run(seen)
    assert outputs["wrong"][-1].finish_reason == "error"
    assert outputs["wrong"][-1].error_code == "grammar_failed"
    assert "its grammar and its tokens do not agree" in str(outputs["wrong"][-1].error)
    assert "doesn't satisfy the grammar" in str(outputs["wrong"][-1].error)
    assert re.search(r"meltcore: the grammar of request wrong has failed: .*\w", capfd.readouterr().err)
    assert len(ids(outputs["free"])) == 4


@pytest.mark.parametrize("does_device_wait", [False, True])
def test_preempted_answer_gets_its_own_mask_when_it_returns_to_its_row(
    folder: Path, does_device_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile an answer of higher priority has used the row with another grammar."""
    seen = tools.open_engine(folder, pages=4, max_model_len=256, enable_prefix_caching=False)
    seen.engine._constraints.does_device_wait = does_device_wait
    for limit in ("_ALONE_S", "_GRACE_S"):
        monkeypatch.setattr(f"meltcore.engine.core.constraints.{limit}", 0.0 if does_device_wait else 10.0)
    seen.add("pages", tools.random_prompt(55, 1), max_tokens=14)
    seen.add("letters", tools.random_prompt(132, 2), max_tokens=40, grammar=Grammar("start: /[a-z]{30}/"))
    request, rows, outputs = seen.engine._requests["letters"], set[int](), list[SequenceOutput]()
    is_added = False
    while seen.engine.has_work:
        outputs += [each for each in seen.engine.step().outputs if each.request_id == "letters"]
        if request.status is RequestStatus.RUNNING:
            rows.add(request.row)
        elif seen.engine.stats().preemptions_total == 1 and not is_added:
            is_added = True
            sampling = SamplingParams(max_tokens=12, ignore_eos=True, grammar=DIGITS)
            seen.engine.add(AddRequest("digits", tools.random_prompt(70, 3), sampling, priority=-1))
            for compiled in seen.engine._constraints._compiling.values():  # before the other one gets a row again
                compiled.result(WAIT_S)
    assert seen.engine.stats().preemptions_total == 1
    assert len(rows) == 1
    assert re.fullmatch("[a-z]{30}", text(outputs))


def test_mask_that_fails_ends_its_request_with_the_error(
    seen: tools.SeenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance then writes a mask of the end tokens alone, and the matcher has the error."""
    limits = LLParserLimits(step_lexer_fuel=200, verbose_errors=False)
    monkeypatch.setattr("meltcore.text.grammar._LIMITS", limits)
    seen.add("fails", PROMPT, max_tokens=60, ignore_eos=False, grammar=Grammar('start: /(.{1,100}x){1,100}/ "end"'))
    seen.add("free", PROMPT, max_tokens=4)
    outputs = run(seen)
    assert outputs["fails"][-1].finish_reason == "error"
    assert "too many" in str(outputs["fails"][-1].error)
    assert END not in ids(outputs["fails"])
    assert len(ids(outputs["free"])) == 4


def test_exception_of_a_thread_ends_the_request_that_it_concerns(
    seen: tools.SeenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_group, broken = Constraints._fill_group, set[int]()

    def fill(constraints: Constraints, group: list[tuple[Constraint, int]]) -> None:
        if any(id(constraint) in broken for constraint, _ in group):
            raise MemoryError("no room for a state")
        fill_group(constraints, group)

    monkeypatch.setattr(Constraints, "_fill_group", fill)
    seen.add("stays", PROMPT, max_tokens=12, grammar=DIGITS)
    seen.add("fails", PROMPT, max_tokens=12, grammar=DIGITS)
    request, outputs = seen.engine._requests["fails"], list[SequenceOutput]()
    while request.constraint is None:
        outputs += seen.engine.step().outputs
    broken.add(id(request.constraint))
    outputs += seen.outputs()
    seen.engine.check_idle()
    ended = {output.request_id: output for output in outputs if output.finish_reason is not None}
    assert ended["fails"].finish_reason == "error"
    assert "MemoryError: no room for a state" in str(ended["fails"].error)
    assert re.fullmatch(r"\d{3}x\d{3}", text([output for output in outputs if output.request_id == "stays"]))


@pytest.mark.parametrize(
    ("stop_reason", "advice"),
    [
        ("ParserTooComplex", "too many alternatives in one place"),
        ("LexerTooComplex", "a regular expression"),
        ("NoExtensionBias", "exclude each other"),
        ("InternalError", "do not agree"),
    ],
)
def test_error_of_a_failed_grammar_has_the_reason_and_no_stack(stop_reason: str, advice: str) -> None:
    matcher: Any = SimpleNamespace(get_error=lambda: "Too many items\nstack of Rust", stop_reason=lambda: stop_reason)
    request: Any = SimpleNamespace(id="one", error=None, error_code=None)
    _fail(request, Constraint(matcher, DIGITS))
    assert advice in request.error
    assert request.error.endswith("(llguidance: Too many items)")


def test_model_without_a_tokenizer_refuses_grammars_by_name(checkpoint: Path) -> None:
    seen = tools.open_engine(checkpoint)
    seen.add("one", PROMPT, grammar=DIGITS)
    assert "tokenizer.json" in str(run(seen)["one"][-1].error)


def test_request_is_aborted_while_its_grammar_is_compiled(
    seen: tools.SeenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, compile_grammar = Event(), Constraints._compile

    def compile_late(constraints: Constraints, grammar: Grammar, arrival: int) -> object:
        assert release.wait(60)
        return compile_grammar(constraints, grammar, arrival)

    monkeypatch.setattr(Constraints, "_compile", compile_late)
    seen.add("gone", PROMPT, grammar=DIGITS)
    seen.add("stays", PROMPT, max_tokens=12, grammar=DIGITS)
    seen.add("free", PROMPT, max_tokens=4)
    while "free" in seen.engine._requests:
        seen.engine.step()
    assert seen.engine.stats().waiting == 2
    seen.engine.abort(["gone"])
    release.set()
    outputs = run(seen)
    assert [output.finish_reason for output in outputs["gone"]] == ["abort"]
    assert len(text(outputs["stays"])) == 7


class _Arrived:
    status: object

    def __init__(self, arrival: int) -> None:
        self.arrival = arrival


def test_grammars_of_aborted_requests_are_not_begun() -> None:
    release, begun = Event(), list[str]()

    def compile_late(grammar: Grammar, _arrival: int) -> None:
        begun.append(grammar.text)
        assert release.wait(WAIT_S)

    constraints = Constraints(lambda: pytest.fail("no compiler is needed"), lambda _: pytest.fail("nor a mask"))
    constraints._compile = compile_late  # type: ignore[assignment, method-assign]
    requests: list[Any] = [_Arrived(index) for index in range(6)]
    try:
        for index, request in enumerate(requests):
            constraints.add(request, Grammar(str(index)))
        wait_until(lambda: len(begun) == 2, "two threads to begin")
        for request in requests[:5]:
            constraints.remove(request)
    finally:
        release.set()
        constraints._compile_pool.shutdown()
    assert (begun[2:], constraints.num_compiling, constraints.num_open) == (["5"], 1, 1)


def test_rows_that_were_slow_together_are_filled_apart_until_they_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def submit(fill: Callable[[list], None], group: list) -> Future[None]:
        sizes.append(len(group))
        fill(group)
        return Future()

    constraints = Constraints(lambda: pytest.fail("no compiler is needed"), lambda num_ids: pytest.fail(str(num_ids)))
    matcher = SimpleNamespace(unsafe_compute_mask_ptr=lambda *_: None, is_error=lambda: False)
    constraints._mask_pool = SimpleNamespace(submit=submit)  # type: ignore[assignment]
    constraints._executor = matcher  # type: ignore[assignment]
    constraints._table = MaskTable(np.zeros((10, 2), np.int32), np.zeros(10, np.int64), np.zeros((2, 10), np.int64))
    rows = [(Constraint(matcher, DIGITS, row), row) for row in range(1, 10)]  # type: ignore[arg-type]
    for slow_s in (-1.0, WAIT_S, WAIT_S):
        monkeypatch.setattr("meltcore.engine.core.constraints._SLOW_S", slow_s)
        constraints._begin(rows, is_alone=False)
        for constraint, _ in rows:
            assert not constraint.is_filling
            constraint.num_taken += 1
    assert sizes == [9, 3, 2, 2, 2, 9]


def test_min_tokens_and_a_grammar_exclude_each_other(seen: tools.SeenEngine) -> None:
    with pytest.raises(RequestError, match="min_tokens must be 0"):
        seen.engine.add(AddRequest("one", PROMPT, SamplingParams(min_tokens=2, grammar=DIGITS)))
