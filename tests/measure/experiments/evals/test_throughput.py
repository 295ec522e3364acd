"""Throughput: prompts, checks that fail a level, and the weighted throughput."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_openai import CHATTER, CountingServer, Lie
from places import SHARED
from scripted_server import Script, ScriptedServer
from waiting import WAIT_S

import meltcore
from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.runfolder import read_result
from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.documents.weights import WEIGHTS
from meltcore.measure.experiments.evals.config import ThroughputConfig
from meltcore.measure.experiments.evals.throughput import (
    PlannedRequest,
    SpotCheck,
    TextGenerator,
    draw_spot_check,
    make_plan,
    run_throughput,
    weighted_throughput,
)
from meltcore.measure.load.token_counter import TokenCounter

TOKENIZER = str(Path(meltcore.__file__).parent / "bundled" / "sums")
FINE = ("OK", "CLIENT_BOUND")  # a busy machine may slow the client; that says nothing of the server
QWEN = SHARED / "data" / "qwen3-tokenizer"


@pytest.fixture
def counting() -> Iterator[Callable[..., CountingServer]]:
    servers: list[CountingServer] = []

    def start(lie: Lie = "none") -> CountingServer:
        servers.append(CountingServer(TOKENIZER, lie))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def id_server() -> Iterator[ScriptedServer]:
    """Streams 8 tokens at most for a prompt of token ids."""
    server = ScriptedServer(Script(ttft_s=0.001, itl_s=0.0005, tokens=8))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server.port = asyncio.run_coroutine_threadsafe(server.start(), loop).result(WAIT_S)  # type: ignore[attr-defined]
    yield server
    loop.call_soon_threadsafe(server.stop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_S)
    loop.close()


def config(url: str = "http://127.0.0.1:9", **changes: object) -> ThroughputConfig:
    settings: dict[str, object] = {
        "levels": (1, 4), "num_prompts": 8, "input_len": 40, "output_len": 64, "tokenizer": TOKENIZER,
    }  # fmt: skip
    return ThroughputConfig(url=url, **(settings | changes))  # type: ignore[arg-type]


def texts(planned: list[PlannedRequest]) -> list[str]:
    return [str(each.text) for each in planned]


# --- prompts


@pytest.mark.parametrize("tokens", [1, 40, 1024])
def test_random_text_has_exactly_the_requested_tokens(tokens: int) -> None:
    maker = TextGenerator(TOKENIZER)
    made = [maker.text(random.Random(seed), tokens) for seed in range(5)]
    assert [maker.count(text) for text in made] == [tokens] * 5
    assert made[0] == maker.text(random.Random(0), tokens)
    assert tokens == 1 or len(set(made)) == 5


@pytest.mark.skipif(not QWEN.exists(), reason="no copy of Qwen's tokenizer beside this checkout")
def test_qwen_texts_are_exact_too() -> None:
    maker = TextGenerator(str(QWEN))
    assert [maker.count(maker.text(random.Random(seed), 1024)) for seed in range(5)] == [1024] * 5


def test_text_length_that_the_tokenizer_cannot_make_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = TextGenerator(TOKENIZER)
    monkeypatch.setattr("meltcore.measure.experiments.evals.throughput._MAX_ROUNDS", 0)
    with pytest.raises(ConfigError, match="40 tokens"):
        maker.text(random.Random(0), 40)


def test_no_prompt_is_sent_twice_within_or_across_runs() -> None:
    maker = TextGenerator(TOKENIZER)
    plans = [make_plan(config(levels=(1, 2, 4), seed=seed), maker) for seed in (0, 1)]
    sent = [text for plan in plans for part in (plan.warmups, plan.levels) for each in part for text in texts(each)]
    prompts = [text for text in sent if not text.startswith("What is")]
    assert len(prompts) == len(set(prompts)) == 2 * 3 * (2 + 6)
    assert make_plan(config(seed=3), maker) == make_plan(config(seed=3), maker)


def test_reused_prompts_are_the_same_at_every_level_and_in_warmups() -> None:
    plan = make_plan(config(levels=(1, 2, 4), reuse_prompts=True), TextGenerator(TOKENIZER))
    own = [[text for text in texts(level) if not text.startswith("What is")] for level in plan.levels]
    assert own[0] == own[1] == own[2]
    assert [texts(each) for each in plan.warmups] == [own[0][:2]] * 3


def test_each_level_has_two_spot_checks_at_random_positions() -> None:
    plan = make_plan(config(levels=tuple(range(1, 9)), num_prompts=16), TextGenerator(TOKENIZER))
    places = [[at for at, each in enumerate(level) if each.check is not None] for level in plan.levels]
    assert [len(each) for each in places] == [2] * 8
    assert len({tuple(each) for each in places}) > 1
    assert [len(level) for level in plan.levels] == [16] * 8


def test_spot_check_is_passed_by_its_value_not_by_its_operands() -> None:
    assert SpotCheck("What is 7 + 8?", 15).passes("7 + 8 = 15, so 15.0 it is")
    assert not SpotCheck("What is 7 + 8?", 15).passes("What is 7 + 8? 150 or 1.5")
    assert SpotCheck("What is 999 + 2?", 1001).passes("**1,001**")
    for seed in range(200):
        check = draw_spot_check(random.Random(seed))
        assert not check.passes(check.question)


def test_speed_only_sends_ids_and_no_text() -> None:
    plan = make_plan(config(speed_only=True, tokenizer=None), None)
    lines = [each.line for level in plan.levels for each in level]
    assert all(len(line["prompt_token_ids"]) == 40 and line["ignore_eos"] for line in lines)
    assert not any(line["skip_special_tokens"] for line in lines)  # an answer of nothing else would have no text
    assert all(100 <= token < 30_000 for line in lines for token in line["prompt_token_ids"])


def test_speed_only_sends_ids_of_the_servers_vocabulary() -> None:
    plan = make_plan(config(speed_only=True, tokenizer=None), None, 824)
    ids = [each for level in plan.levels for request in level for each in request.line["prompt_token_ids"]]
    assert 100 <= min(ids) <= max(ids) < 824


def test_speed_only_with_a_tokenizer_sends_ids_of_its_vocabulary() -> None:
    maker = TextGenerator(TOKENIZER)
    plan = make_plan(config(speed_only=True, input_len=500), maker)
    sent = {token for level in plan.levels for each in level for token in each.line["prompt_token_ids"]}
    assert sent <= set(maker.token_ids)
    assert max(sent) < 824


def test_ignore_eos_never_applies_to_spot_checks() -> None:
    maker = TextGenerator(TOKENIZER)
    for fixed in (False, True):
        [level, _] = make_plan(config(ignore_eos=fixed), maker).levels
        assert {("ignore_eos" in each.line, each.check is not None) for each in level} == {
            (fixed, False),
            (False, True),
        }
        assert {each.line["temperature"] for each in level if each.check is None} == {1.0}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tokenizer": None}, "--tokenizer"),
        ({"levels": ()}, "levels"),
        ({"levels": (4, 4)}, "levels"),
        ({"levels": (0,)}, "levels"),
        ({"num_prompts": 2, "levels": (1,)}, "spot checks"),
        ({"num_prompts": 0, "speed_only": True}, "--num-prompts must be at least 1; got 0"),
        ({"input_len": 0}, "--input-len"),
        ({"output_len": 0}, "--output-len"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        config(**changes)


# --- runs


def test_fewer_requests_than_a_level_run_with_a_note(counting: Callable[..., CountingServer], tmp_path: Path) -> None:
    result = run_throughput(config(counting().address, levels=(1, 8), num_prompts=3), tmp_path)
    assert (result.verdict in FINE, [level.succeeded for level in result.levels]) == (True, [3, 3])
    assert result.levels[1].peak_in_flight <= 3
    assert any(
        "fewer than the concurrency of the levels 8: they never had more than 3" in note for note in result.notes
    )


def test_honest_server_passes_every_gate(counting: Callable[..., CountingServer], tmp_path: Path) -> None:
    server = counting()
    result = run_throughput(config(server.address), tmp_path)
    assert (result.verdict in FINE, result.reasons) == (True, [])
    assert [gate.status for gate in result.gates] == ["PASS"] * 3
    assert [level.concurrency for level in result.levels] == [1, 4]
    for level in result.levels:
        assert level.checks is not None
        assert (level.checks.spot_checks_correct, level.checks.spot_checks) == (2, 2)
        assert level.token_count_source == "confirmed"
        assert level.warmup_requests == 2
        total = level.total_tokens_per_s * level.duration_s
        assert total == pytest.approx(level.prompt_tokens + level.output_tokens)
        assert level.prompt_tokens == level.checks.counted_prompt_tokens + 12 * 8
    plan = make_plan(config(), TextGenerator(TOKENIZER))
    planned = [plan.warmups[0], plan.levels[0], plan.warmups[1], plan.levels[1]]
    for asked, wanted in zip(
        (server.asked[at:to] for at, to in ((0, 2), (2, 10), (10, 12), (12, 20))), planned, strict=True
    ):
        assert sorted(asked) == sorted(texts(wanted))
    assert len(server.asked) == 20
    assert result.weighted_throughput is None


@pytest.mark.slow
def test_unstreamed_answers_are_checked_alike_and_have_no_ttft(
    counting: Callable[..., CountingServer], tmp_path: Path
) -> None:
    server = counting()
    result = run_throughput(config(server.address, stream=False), tmp_path)
    assert (result.verdict in FINE, result.reasons, server.streamed) == (True, [], 0)
    for level in result.levels:
        assert (level.ttft_ms.n, level.itl_ms.n, level.tpot_ms.n, level.e2e_ms.n) == (0, 0, 0, 8)
        assert level.checks is not None
        assert level.checks.counts_agree
        assert level.total_tokens_per_s > level.output_tokens_per_s > 0
    lying = run_throughput(config(counting("wrong-sums").address, stream=False), tmp_path)
    assert [gate.status for gate in lying.gates] == ["PASS", "FAIL", "PASS"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lie", "gate", "reason"),
    [
        ("wrong-sums", 1, "spot check failed: What is"),
        ("echo", 1, "spot check failed: What is"),
        ("prompt-cut", 2, "prompt tokens, the tokenizer counts"),
        ("output-halved", 2, "output tokens, the tokenizer counts"),
    ],
)
def test_wrong_answer_or_count_fails_its_level_and_its_gate_only(
    counting: Callable[..., CountingServer], tmp_path: Path, lie: Lie, gate: int, reason: str
) -> None:
    result = run_throughput(config(counting(lie).address), tmp_path)
    assert result.verdict == "FAILED"
    assert [each.status for each in result.gates] == ["FAIL" if at == gate else "PASS" for at in range(3)]
    for level in result.levels:
        assert level.verdict == "FAILED"
        assert any(reason in each for each in level.reasons)


def test_more_prompt_tokens_than_a_template_explains_fail_the_level(
    counting: Callable[..., CountingServer], tmp_path: Path
) -> None:
    result = run_throughput(config(counting("prompt-stretched").address, input_len=600, levels=(8,)), tmp_path)
    assert result.verdict == "FAILED"
    assert "prompt tokens, the tokenizer counts" in result.levels[0].reasons[0]
    assert run_throughput(config(counting().address, input_len=600, levels=(8,)), tmp_path).verdict in FINE


def test_one_wrong_spot_check_fails_its_own_level_only(counting: Callable[..., CountingServer], tmp_path: Path) -> None:
    result = run_throughput(config(counting("one-wrong-sum").address), tmp_path)
    assert [level.verdict in FINE for level in result.levels] == [False, True]
    assert result.gates[1].detail == "3 of 4"


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_few_empty_answers_pass_and_many_fail_a_level(
    counting: Callable[..., CountingServer], tmp_path: Path, stream: bool
) -> None:
    server = counting("once-mute")
    result = run_throughput(config(server.address, stream=stream), tmp_path)
    assert (result.verdict in FINE, result.reasons, [level.failed for level in result.levels]) == (True, [], [0, 0])
    assert server.chats == 2 * 8  # warm-ups too, and one answer was empty at each level
    mute = run_throughput(config(counting("mute").address, stream=stream), tmp_path)
    assert mute.verdict == "FAILED"
    assert "6 of 8 answers were an end token and nothing else" in mute.levels[0].reasons


def test_failed_request_fails_the_run(counting: Callable[..., CountingServer], tmp_path: Path) -> None:
    result = run_throughput(config(counting().address, model="no-such-model"), tmp_path)
    assert result.verdict == "FAILED"
    assert [gate.status for gate in result.gates] == ["FAIL"] * 3  # counts of no answer at all agree with nothing
    assert [gate.detail for gate in result.gates[1:]] == [
        "0 of 2; 1 levels did not run",
        "at 0 of 1 levels; 1 levels did not run",
    ]
    assert (result.status, len(result.levels)) == ("partial", 1)
    assert {level.token_count_source for level in result.levels} == {"server-reported"}


def test_server_that_refuses_extra_fields_can_be_measured(
    counting: Callable[..., CountingServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--num-prompts", "4", "--input-len", "8", "--output-len", "64", "--tokenizer", TOKENIZER]
    words = ["eval", "throughput", counting("strict").address, *options, "--levels", "2", "--out", str(tmp_path)]
    assert main(words) == 1
    assert "unknown field continuous_usage_stats" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--no-continuous-usage"]) == 0


def test_reason_of_a_failed_level_is_printed(
    counting: Callable[..., CountingServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--num-prompts", "4", "--input-len", "8", "--output-len", "64", "--tokenizer", TOKENIZER]
    options += ["--levels", "2", "--out", str(tmp_path)]
    assert main(["eval", "throughput", counting("wrong-sums").address, *options]) == 1
    assert "concurrency 2: FAILED: spot check failed: What is" in " ".join(capsys.readouterr().out.split())
    assert main(["eval", "throughput", counting().address, *options, "--model", "no-such-model"]) == 1
    assert "no such model" in " ".join(capsys.readouterr().out.split())


def test_answer_of_another_length_fails_a_level_of_fixed_output(
    counting: Callable[..., CountingServer], tmp_path: Path
) -> None:
    result = run_throughput(config(counting("stops").address, ignore_eos=True), tmp_path)
    assert result.verdict == "FAILED"
    assert "6 of 6 answers do not have 64 tokens" in result.levels[0].reasons[0]


@pytest.mark.parametrize("stream", [True, False])
def test_end_tokens_within_a_fixed_output_are_counted(
    counting: Callable[..., CountingServer], tmp_path: Path, stream: bool
) -> None:
    server = counting()
    result = run_throughput(config(server.address, ignore_eos=True, stream=stream), tmp_path)
    assert (result.verdict in FINE, result.reasons) == (True, [])
    for level in result.levels:
        assert level.checks is not None
        assert level.checks.counted_output_tokens == pytest.approx(level.output_tokens, rel=0.02)
        assert level.output_tokens > 6 * 64


def test_content_tokens_leave_out_end_tokens(counting: Callable[..., CountingServer], tmp_path: Path) -> None:
    result = run_throughput(config(counting("stops").address), tmp_path)
    counter = TokenCounter(TOKENIZER)
    for level in result.levels:
        assert level.checks is not None
        assert level.checks.counted_content_tokens == level.checks.counted_output_tokens - level.succeeded
        assert level.checks.counted_content_tokens > 4 * counter.count(CHATTER)


@pytest.mark.slow
def test_prompts_from_a_prefix_cache_fail_their_level(counting: Callable[..., CountingServer], tmp_path: Path) -> None:
    server = counting("remembers")
    assert run_throughput(config(server.address), tmp_path).verdict in FINE
    again = run_throughput(config(server.address), tmp_path)
    assert again.verdict == "FAILED"
    assert all(
        "came from a prefix cache: this server has had the prompts of --seed 0" in level.reasons[0]
        for level in again.levels
    )
    assert run_throughput(config(server.address, seed=1), tmp_path).verdict in FINE
    reused = run_throughput(config(server.address, reuse_prompts=True), tmp_path)
    assert reused.verdict in FINE
    assert any("a prefix cache may have served" in note for note in reused.notes)


@pytest.mark.slow
def test_speed_only_has_gates_not_run_and_a_weighted_throughput(
    id_server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"http://127.0.0.1:{id_server.port}"  # type: ignore[attr-defined]
    options = [
        "--speed-only",
        "--num-prompts",
        "64",
        "--input-len",
        "16",
        "--output-len",
        "8",
        "--out",
        str(tmp_path),
    ]
    assert main(["eval", "throughput", address, *options]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("making 462 prompts of 16 tokens\n")
    assert "NOT RUN  spot checks" in printed
    assert "weighted throughput" in printed
    assert "score:" not in printed
    [folder] = tmp_path.iterdir()
    result = read_result(folder)
    assert [gate.status for gate in result.gates] == ["PASS", "NOT RUN", "NOT RUN"]
    assert result.weighted_throughput is not None
    assert {level.prompt_tokens for level in result.levels} == {64 * 16}
    report = (folder / "report.html").read_text()
    assert "Weighted throughput" in report
    assert "NOT RUN" in report
    # Twelve tokens asked for and eight given: each level did cheaper work than it was to.
    assert main(["eval", "throughput", address, *options, "--output-len", "12"]) == 1
    assert "weighted throughput:" not in capsys.readouterr().out


def test_weighted_throughput_requires_every_level() -> None:
    def level(concurrency: int) -> LevelResult:
        return LevelResult(
            concurrency=concurrency, requests=1, succeeded=1, failed=0, peak_in_flight=1, duration_s=1.0,
            output_tokens_per_s=10.0 * concurrency, total_tokens_per_s=100.0 * concurrency, prompt_tokens=1,
            output_tokens=1,
        )  # fmt: skip

    levels = [level(concurrency) for concurrency in WEIGHTS]
    found = weighted_throughput(levels)
    assert found is not None
    weighted = 1 * 1 + 1 * 2 + 2 * 4 + 2 * 8 + 4 * 16 + 4 * 32 + 8 * 64
    assert (found.total_tokens_per_s, found.output_tokens_per_s) == (100.0 * weighted, 10.0 * weighted)
    assert weighted_throughput(levels[1:]) is None
    levels[3].verdict = "FAILED"
    assert weighted_throughput(levels) is None
