"""Small parts of the server: admission, health, metrics, log, sampling defaults and flags."""

import argparse
import asyncio
import errno
import gc
import io
import json
import os
import re
import sys
import threading
import time
import weakref
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from places import ROOT
from waiting import WAIT_S, until, wait_until

from meltcore.cli import serve as serve_cli
from meltcore.cli import stop as stop_cli
from meltcore.common.errors import ConfigError, RequestError
from meltcore.common.options import from_options
from meltcore.common.sizes import size_text
from meltcore.common.tasks import DEFAULT
from meltcore.fleet.processes.engine_process import LocalEngineProcess
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL, open_checkpoint
from meltcore.protocol.generation import EngineStats, FromEngine
from meltcore.protocol.shell import EngineFailed
from meltcore.serve.http.http_server import tune_gc
from meltcore.serve.requests.admission import Admission, Load
from meltcore.serve.requests.backend import Health
from meltcore.serve.requests.log import BYTES_PER_WRITE, MAX_LINES_WAITING, Log
from meltcore.serve.requests.metrics import Metrics
from meltcore.serve.requests.protocol import ChatMessage, ChatRequest, decode_request
from meltcore.serve.requests.stats import ServerStats
from meltcore.serve.status import _model
from meltcore.serve.tasks.generation import prompts
from meltcore.serve.tasks.generation.prompts import chat_prompt, encode_all
from meltcore.serve.tasks.generation.sampling import checkpoint_defaults, sampling_params
from meltcore.serve.tasks.generation.text_model import load_text_model
from meltcore.settings.config import EngineConfig
from meltcore.settings.fleet_spec import ModelSection
from meltcore.text.chat_template import ChatTemplate
from meltcore.text.control_tokens import ControlTokens
from meltcore.text.tokenizer import Tokenizer


def test_admission_counts_requests_beyond_max_num_seqs() -> None:
    admission = Admission(max_queue=3, max_units=1000, max_num_seqs=2)
    admission.check(Load(4, 0), requests=1, replicas=1, units=5)
    with pytest.raises(RequestError, match="4 requests would wait, the limit is 3") as caught:
        admission.check(Load(5, 0), requests=1, replicas=1, units=5)
    assert caught.value.status == 429
    with pytest.raises(RequestError, match="1001 prompt tokens would wait"):
        admission.check(Load(1, 1000), requests=1, replicas=1, units=1)


def test_admission_counts_the_sequences_of_living_replicas() -> None:
    admission = Admission(max_queue=0, max_units=1000, max_num_seqs=2)
    admission.check(Load(4, 0), requests=2, replicas=3, units=5)
    with pytest.raises(RequestError, match="2 requests would wait, the limit is 0"):
        admission.check(Load(4, 0), requests=2, replicas=2, units=5)


def test_health_distinguishes_a_stuck_engine_from_an_idle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerStats(num_processes=2)
    (stats,) = server.models
    now_s = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    health = Health(stats, stuck_after_s=2.0)
    assert health.problem() == "loading: starting"
    health.set("ready", "ready")
    now_s[0] += 3
    assert health.problem() is None
    stats.assign(0, 5)  # work after an idle time: the limit starts now
    assert health.problem() is None
    now_s[0] += 3
    assert "no step has finished" in (health.problem() or "")
    stats.assign(0, 5)  # more work is not a sign of life
    assert health.problem() is not None
    other = ServerStats(num_processes=2, process_index=1, fds=server.fds)
    other.models[0].record_step(EngineStats(), now_s[0])  # another API server has seen a step
    assert health.problem() is None


@pytest.mark.parametrize(
    ("began_s_ago", "took_s", "expected_s"),
    [
        (0.2, 0, 1),  # for the first time
        (3, 0, 3),
        (90, 0, 5),
        (10, 40, 30),
        (1, 400, 60),
        (39.5, 40, 1),
        (43, 40, 3),  # later than the last time
        (-8, 0, 8),  # after a pause
        (-8, 40, 48),
    ],
)
def test_retry_after_while_a_model_starts_follows_its_last_start(
    began_s_ago: float, took_s: float, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    supervisor = ServerStats(num_processes=2)
    health = Health(ServerStats(num_processes=2, process_index=1, fds=supervisor.fds).models[0])
    supervisor.models[0].set("start_s", now_s - began_s_ago)
    supervisor.models[0].set("start_took_s", took_s)
    for status in ("loading", "restarting"):
        health.set(status, "the reason")  # type: ignore[arg-type]  # one of them
        error = health.not_ready(health.reason)
        assert (str(error), error.status, error.code) == ("the reason", 503, "not_ready")
        assert error.retry_after_s == pytest.approx(expected_s)
    health.set("draining", "going down")
    assert health.not_ready(health.reason).retry_after_s is None


def test_dead_status_is_final() -> None:
    health = Health(ServerStats().models[0])
    health.set("dead", "died")
    health.set("draining", "going down")
    assert (health.status, health.problem()) == ("dead", "died")


def test_histogram_buckets_are_cumulative_over_all_processes() -> None:
    first = ServerStats(num_processes=2)
    second = ServerStats(num_processes=2, process_index=1, fds=first.fds)
    stats = [first.models[0], second.models[0]]
    for process, value_s, times in ((0, 0.0005, 1), (1, 0.001, 2), (0, 11.0, 1)):
        stats[process].inter_token_latency.observe(value_s, times)
    for each in stats:
        buckets, total = each.inter_token_latency.totals()
        assert (buckets[0], buckets[-2], buckets[-1]) == (("0.001", 3), ("10.0", 3), ("+Inf", 4))
        assert total == pytest.approx(11.0025)


def test_every_metric_is_in_the_mapping_table() -> None:
    table = (ROOT / "docs" / "metrics.md").read_text()
    stats = ServerStats()
    for family in Metrics(stats, lambda: {"m": stats.models[0]}).collect():
        assert f"`{family.name.removeprefix('meltcore:')}`" in table


class _StuckStream(io.StringIO):
    """A pipe that is full: writing waits until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def write(self, text: str) -> int:
        self.go_on.wait(WAIT_S)
        return super().write(text)


def test_log_with_a_full_pipe_does_not_block() -> None:
    stream, stats = _StuckStream(), ServerStats()
    log = Log("json", stats, stream)
    for number in range(MAX_LINES_WAITING + 1000):
        log.write("request", number=number)
    assert stream.getvalue() == "", "no line has got through yet"
    assert 1000 - BYTES_PER_WRITE // 60 <= stats.local_value("log_lines_dropped") <= 1000
    stream.go_on.set()
    log.close(wait_s=WAIT_S)
    lines = stream.getvalue().splitlines()
    assert len(lines) == MAX_LINES_WAITING + 1000 - stats.local_value("log_lines_dropped")
    assert msgspec.json.decode(lines[0])["number"] == 0


class _FullDisk(io.StringIO):
    """A file on a disk that is full until the test makes room."""

    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_log_goes_on_after_a_full_disk() -> None:
    """The first error ended the thread, and the process wrote no line any more."""
    stream, stats = _FullDisk(), ServerStats()
    log = Log("json", stats, stream)
    for number in range(3):
        log.write("request", number=number)
    wait_until(lambda: stats.local_value("log_lines_dropped") == 3, "the loss of the lines")
    stream.is_full = False
    for number in (3, 4):
        log.write("request", number=number)
        wait_until(lambda number=number: f'"number":{number}' in stream.getvalue(), "the line")
    log.close(wait_s=WAIT_S)
    lines = [msgspec.json.decode(line) for line in stream.getvalue().splitlines()]
    assert [line.get("number") for line in lines if line["event"] == "request"] == [3, 4]
    [lost] = [line for line in lines if line["event"] != "request"]
    assert (lost["event"], lost["error"]) == ("log_lines_lost", "[Errno 28] No space left on device")


class _Pipe(io.StringIO):
    """Keeps what each write was."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        time.sleep(0.001)  # so that lines gather
        return len(text)


def test_log_lines_of_several_processes_do_not_mix_in_a_pipe() -> None:
    pipe = _Pipe()
    log = Log("json", ServerStats(), pipe)
    for number in range(2000):
        log.write("request", number=number, user="ü" * (number % 50))
    log.close(wait_s=10)
    assert all(text.endswith("}\n") and len(text.encode()) <= BYTES_PER_WRITE for text in pipe.writes)
    assert [msgspec.json.decode(line)["number"] for line in "".join(pipe.writes).splitlines()] == list(range(2000))
    assert len(pipe.writes) < 1000


def test_text_log_lines_are_key_value_pairs() -> None:
    stream = io.StringIO()
    log = Log("text", ServerStats(), stream)
    log.write("request", status=200, error=None, user="a b")
    log.close()
    assert stream.getvalue().endswith('event=request status=200 user="a b"\n')


def test_user_field_cannot_forge_or_flood_log_lines() -> None:
    stream = io.StringIO()
    log = Log("text", ServerStats(), stream)
    log.write("request", user="x\ntime=now", error="\x1b[2J")
    log.write("request", user="u" * 1_000_000)
    log.close()
    forged, long = stream.getvalue().splitlines()
    assert forged.endswith('event=request user="x\\ntime=now" error="\\u001b[2J"')
    assert long.endswith('uuu... (1000000 characters)"')
    assert len(long) < 400


def test_log_lines_have_the_time_in_utc() -> None:
    stream = io.StringIO()
    log = Log("json", ServerStats(), stream)
    log.write("request")
    log.close()
    said = msgspec.json.decode(stream.getvalue())["time"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", said)
    assert abs(datetime.fromisoformat(said) - datetime.now(UTC)) < timedelta(seconds=10)


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        ({}, {"temperature": 0.0}),
        ({"temperature": 0.6, "top_k": 20, "do_sample": True}, {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0.6, "do_sample": False}, {"temperature": 0.0}),
        ({"top_p": 0.9}, {"top_p": 0.9}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"temperature": "0.6", "top_k": 20.0, "min_p": 0}, {"temperature": 0.6, "top_k": 20, "min_p": 0.0}),
        ({"top_p": None, "do_sample": True}, {}),
    ],
)
def test_checkpoint_defaults(generation_config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert checkpoint_defaults(generation_config) == expected


@pytest.mark.parametrize(
    ("generation_config", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number; got 'hot'"),
        ({"temperature": True}, "temperature must be a number; got True"),
        ({"temperature": 5}, r"temperature must be at least 0\.0 and at most 2\.0; got 5\.0"),
        ({"temperature": 1.0, "top_p": 0}, r"top_p must be more than 0\.0 .*; got 0\.0"),
        ({"top_p": float("nan")}, "top_p must be more than .*; got nan"),
        ({"top_k": 2.5}, r"top_k must be a whole number; got 2\.5"),
        ({"top_k": -2}, "top_k must be at least 0 .*; got -2"),
        ({"top_k": 2**40}, "top_k must be at least 0 .*; got 1099511627776"),
        ({"repetition_penalty": [1]}, r"repetition_penalty must be a number; got \[1\]"),
        ({"temperature": 0.6, "do_sample": "false"}, "do_sample must be true or false; got 'false'"),
    ],
)
def test_checkpoint_default_out_of_range_is_refused_at_start(generation_config: dict[str, Any], message: str) -> None:
    """Not when a request comes that does not name the field."""
    with pytest.raises(ConfigError, match=f"^of/it.json: {message}; --generation-config greedy"):
        checkpoint_defaults(generation_config, "of/it.json")


def test_checkpoint_defaults_are_checked_only_when_they_are_used(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    (tmp_path / "generation_config.json").write_text('{"top_k": "many"}')
    greedy = ModelSection(checkpoint=str(tmp_path), load_format="dummy")
    model = msgspec.structs.replace(greedy, generation_config="auto")
    assert load_text_model(greedy).sampling_defaults == {}
    path = re.escape(str(tmp_path / "generation_config.json"))
    with pytest.raises(ConfigError, match=f"^{path}: top_k must be a whole number; got 'many'"):
        load_text_model(model)


def test_unknown_response_template_is_logged_with_what_is_read_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    model = ModelSection(checkpoint=str(tmp_path), load_format="dummy")
    calls = {"open": "<x>", "content": "kv-lines"}
    for template, note in (
        ("{{ tools }}<tool_call>", "'kv-lines'; calls are read as hermes, which its chat template shows"),
        ("{{ messages }}", "'kv-lines'; the model takes no tools"),
    ):
        settings = {"chat_template": template, "response_template": {"fields": {"tool_calls": calls}}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        load_text_model(model)
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"meltcore: {tmp_path}: response_template.fields.tool_calls has the unknown content")
        assert note in line
        load_text_model(msgspec.structs.replace(model, tool_call_parser="none"))
        assert capsys.readouterr().err == ""


def test_request_overrides_the_checkpoint_defaults() -> None:
    request = decode_request(b'{"model": "m", "messages": [], "temperature": 0.2, "top_k": -1}', ChatRequest)
    params = sampling_params(
        request,
        prompt_tokens=3,
        max_model_len=10,
        vocab_size=99,
        defaults={"temperature": 0.6, "top_k": 5, "top_p": 0.9},
    )
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.2, 0, 0.9, 7)


def test_greedy_is_the_default() -> None:
    request = decode_request(b'{"model": "m", "messages": []}', ChatRequest)
    params = sampling_params(request, prompt_tokens=3, max_model_len=10, vocab_size=99, defaults={})
    assert (params.temperature, params.top_p) == (0.0, 1.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "--bogus"],
        [],
        ["m", "--port", "70000"],
        ["m", "--max-num-seqs", "0"],
        ["m", "--seed", str(2**63)],
        ["m", "--api-key", ""],  # a request without a key would match it
        ["m", "--host", ""],  # would be every address of the machine
        ["m", "--served-model-name", " "],
        ["m", "--served-model-name", "bad\udcff"],  # bytes of the shell that are no UTF-8
        ["m", "--request-timeout", "nan"],
        ["m", "--debug", "everything"],
        ["m", "--log-format", "xml"],
    ],
)
def test_wrong_flags_are_errors(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve_cli.add_arguments(parser)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(arguments)
    assert caught.value.code == 2


def test_flags_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("meltcore.fleet.supervisor.serve", lambda config: seen.append(config) or 0)
    monkeypatch.setattr(
        "meltcore.serve.tasks.generation.servable.check_servable", lambda model: DEFAULT
    )  # there is no model m
    parser = argparse.ArgumentParser()
    serve_cli.add_arguments(parser)
    flags = "m --served-model-name a b --port 0 --memory 2GiB --debug no-prefill-graphs --debug no-peer-memory"
    flags += " --max-body 1MiB --enforce-eager --no-async-scheduling --generation-config auto"
    flags += " -tp 2 -dp 4 --api-server-count 3 --allowed-origins https://x http://y:3000"
    assert serve_cli.run(parser.parse_args(flags.split())) == 0
    ((config, places, _),) = map(msgspec.structs.astuple, seen)
    assert places == {}, "serve has no plan"
    assert (config.server.port, config.limits.max_body, config.server.api_server_count) == (0, 2**20, 3)
    assert config.server.allowed_origins == ("https://x", "http://y:3000")
    ((name, model),) = config.models.items()
    assert (name, model.checkpoint, model.aliases, model.replicas) == ("a", "m", ("b",), 4)
    assert (model.memory, model.tensor_parallel_size, model.device) == (2**31, 2, "auto")
    assert model.debug == ("no-prefill-graphs", "no-peer-memory")
    assert (model.enforce_eager, model.async_scheduling, model.generation_config) == (True, False, "auto")
    assert model.enable_prefix_caching


@pytest.mark.parametrize(
    ("flags", "prefix_caching", "async_scheduling", "stated"),
    [
        ("", True, None, ()),
        ("--enable-prefix-caching --async-scheduling", True, True, ()),
        ("--no-enable-prefix-caching", False, None, ("--no-enable-prefix-caching",)),
        ("--no-async-scheduling", True, False, ("--no-async-scheduling",)),
        ("--enforce-eager --debug uniform-routing", True, None, ("--enforce-eager", "uniform-routing")),
    ],
)
def test_switches_of_vllm_are_read_and_stated(
    flags: str, prefix_caching: bool, async_scheduling: bool | None, stated: tuple[str, ...]
) -> None:
    parser = argparse.ArgumentParser()
    serve_cli.add_arguments(parser)
    config = from_options(EngineConfig, parser.parse_args(["m", *flags.split()]), model="m")
    assert (config.enable_prefix_caching, config.async_scheduling) == (prefix_caching, async_scheduling)
    assert config.debug_options == stated


def test_stop_reports_that_no_server_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no server started with --daemon is running on port 9"):
        stop_cli.run(SimpleNamespace(port=9, all=False, timeout=1.0))  # type: ignore[arg-type]


def test_record_of_a_dead_server_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from meltcore.fleet.daemon import DaemonRecord, running, state_dir

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    reused = DaemonRecord(os.getpid(), 1, 8000, "http://127.0.0.1:8000", "m", "log")  # our id, another start time
    path = state_dir() / "serve-8000.json"
    path.write_bytes(msgspec.json.encode(reused))
    assert running() == []
    assert not path.exists()


@pytest.mark.parametrize("place", ["file/meltcore", "file"])
def test_state_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, place: str) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / place))
    folder = re.escape(str(tmp_path / place / "meltcore"))
    with pytest.raises(ConfigError, match=f"{folder}, cannot be used: Not a directory .XDG_STATE_HOME says where"):
        stop_cli.run(SimpleNamespace(port=9, all=False, timeout=1.0))  # type: ignore[arg-type]


def test_state_folder_without_write_permission_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)  # root may write anywhere
    with pytest.raises(ConfigError, match=f"{tmp_path}/meltcore, cannot be used: Permission denied"):
        stop_cli.run(SimpleNamespace(port=9, all=False, timeout=1.0))  # type: ignore[arg-type]


def test_size_text() -> None:
    assert [size_text(n) for n in (12, 1536, 5 * 2**20, 3 * 2**30)] == ["12 B", "1.50 KiB", "5 MiB", "3 GiB"]


_FAKE_ENGINE = (
    sys.executable,
    "-c",
    "import sys, zmq; context = zmq.Context(); socket = context.socket(zmq.PUSH); "
    "socket.connect(f'ipc://{sys.argv[1]}/from-engine-0.sock'); socket.send(bytes([0x93, 1, 2])); "
    "socket.close(); context.term()",  # which waits until it has been sent
)


def test_unreadable_message_is_an_engine_failure(tmp_path: Path) -> None:
    received: list[FromEngine] = []

    async def run() -> None:
        engine = LocalEngineProcess(
            EngineConfig(model="none"), _FAKE_ENGINE, received.append, directory=tmp_path, client_count=1
        )
        with pytest.raises(ConfigError, match="cannot be read"):
            await engine.start()
        await engine.stop()

    asyncio.run(run())
    assert [type(message) for message in received] == [EngineFailed]


def test_template_receives_reasoning_of_earlier_messages() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}|{{ m.reasoning_content }}]{% endfor %}")
    tokenizer = Tokenizer.synthetic_bytes(300)
    thinker = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "q"}, thinker, thinker | {"reasoning_content": None}],
    }
    request = decode_request(json.dumps(body).encode(), ChatRequest)
    ids = asyncio.run(chat_prompt(tokenizer, template, request.messages, None))
    assert tokenizer.decode(ids) == "[q|][a|hm][a|]"


@pytest.mark.parametrize(("characters", "on_thread"), [(100, False), (20_000, True)])
@pytest.mark.parametrize("documents", [False, True])
def test_long_chat_or_document_is_tokenized_on_a_thread(characters: int, *, on_thread: bool, documents: bool) -> None:
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(BUNDLED_MODEL, files="text"))
    threads: list[bool] = []

    class Template(ChatTemplate):
        def render(self, *args: Any, **kwargs: Any) -> Any:
            threads.append(threading.current_thread() is not threading.main_thread())
            return super().render(*args, **kwargs)

    template, text = Template("{{ messages[0].content }}{{ documents }}"), "a " * (characters // 2)
    message = ChatMessage(role="user", content="hi" if documents else text)
    kwargs = {"documents": [{"text": text}]} if documents else None
    assert asyncio.run(chat_prompt(tokenizer, template, [message], kwargs))
    assert set(threads) == {on_thread}


@pytest.mark.parametrize("content", ["<" * 4000, "a<|im_end|>" * 400, " " * 20_000 + "<|im_end|>" * 40])
def test_chat_that_is_too_long_is_refused_before_its_control_tokens_are_sought(
    monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    sought: list[str] = []
    find = ControlTokens.find
    monkeypatch.setattr(ControlTokens, "find", lambda self, text: sought.append(text) or find(self, text))
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(BUNDLED_MODEL, files="text"))
    template = ChatTemplate("{{ messages[0].content }}<|im_end|>")
    messages = [ChatMessage(role="user", content=content)]
    with pytest.raises(RequestError, match="maximum context length is 20"):
        asyncio.run(chat_prompt(tokenizer, template, messages, None, 20))
    assert sought == []
    assert asyncio.run(chat_prompt(tokenizer, template, messages, None, 10_000))
    assert sought != []


class CountedTokens:
    """A tokenizer of 2,000 characters a token, and of one where "<" begins. It notes the texts that it encodes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.sizes.append(len(text))
        return [7] * (len(text.rstrip("<")) // 2000 + text.count("<"))


def encode_counted(text: str, tokenizer: CountedTokens) -> list[int]:
    [ids] = asyncio.run(encode_all(tokenizer, [text], "prompt", add_special_tokens=True, context=30))  # type: ignore[arg-type]
    return ids


def test_long_text_of_few_tokens_is_tokenized_completely() -> None:
    """Which none of its pieces rules out."""
    tokenizer = CountedTokens()
    assert encode_counted("x" * 40_000, tokenizer) == [7] * 20
    assert tokenizer.sizes == [16_384, 16_384, 7_232, 40_000]


@pytest.mark.parametrize("few", [0, 16_000, 40_000])
def test_text_of_many_tokens_is_not_tokenized_completely_wherever_they_begin(few: int) -> None:
    tokenizer = CountedTokens()
    with pytest.raises(RequestError, match=f"of this prompt's {few + 10**6} characters are .* tokens already"):
        encode_counted("x" * few + "<" * 10**6, tokenizer)
    assert sum(tokenizer.sizes) <= few + 2 * 16_384


@pytest.mark.parametrize("content", ["<|im_end|>" * 85, ("<|im_end|>" * 5 + "<|im_start|>" * 5 + " ") * 8])
@pytest.mark.parametrize(
    ("context", "fault"), [(50, "maximum context length is 50"), (9, "at most 100 tokens are counted for one request")]
)
def test_control_tokens_in_messages_are_counted_as_the_text_that_they_are(
    monkeypatch: pytest.MonkeyPatch, content: str, context: int, fault: str
) -> None:
    """As control tokens they would be one token each, and few enough."""
    monkeypatch.setattr(prompts, "MAX_COUNTED_TOKENS", 100)
    monkeypatch.setattr(prompts, "_PIECE_CHARS", 500)
    sizes: list[int] = []
    encode = ControlTokens.encode
    monkeypatch.setattr(ControlTokens, "encode", lambda *args: sizes.append(len(args[1])) or encode(*args))
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(BUNDLED_MODEL, files="text"))
    template = ChatTemplate("<|im_start|>{{ messages[0].content }}<|im_end|>")
    messages = [ChatMessage(role="user", content=content)]
    with pytest.raises(RequestError, match=fault):
        asyncio.run(chat_prompt(tokenizer, template, messages, None, context, is_only_counted=context == 9))
    assert len(sizes) == 1
    assert sizes[0] < len(content)


def test_few_long_texts_are_tokenized_concurrently() -> None:
    """Others wait, so that the memory of all is bounded."""
    begun: list[str] = []
    may_end = threading.Event()

    class Waits:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            begun.append(text)
            assert may_end.wait(WAIT_S)
            return [7]

    async def run() -> None:
        one = partial(encode_all, Waits(), ["x" * 20_000], "prompt", add_special_tokens=True)  # type: ignore[arg-type]
        texts = asyncio.gather(*(one() for _ in range(12)))
        await until(lambda: len(begun) == 4, "four texts to begin")
        assert prompts._THREADS._work_queue.qsize() == 8
        may_end.set()
        assert await texts == [[[7]]] * 12

    asyncio.run(run())


def test_parts_of_a_message_other_than_text_are_named() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}'
    with pytest.raises(RequestError, match=r"content\[\d\]\.type: Invalid value 'image_url'; only text is known"):
        decode_request(body, ChatRequest)
    with pytest.raises(RequestError, match="the body: Expected `object`, got `array`"):
        decode_request(b"[1]", ChatRequest)


def test_the_status_counts_as_waiting_only_what_a_queue_holds() -> None:
    """A request that an engine has begun without a step's end yet runs, and one of an upstream server too."""
    stats = ServerStats().models[0]
    backend = SimpleNamespace(names=("m",), stats=stats, health=SimpleNamespace(status="ready"))

    def counts() -> tuple[float, float]:
        model = _model(backend)  # type: ignore[arg-type]
        return model["running"], model["waiting"]

    assert counts() == (0, 0)
    stats.set_in_flight(1)
    assert counts() == (1, 0)
    stats.set_in_flight(5)
    stats.add("queue_requests", 2)
    stats.record_step(EngineStats(running=2, waiting=1), 1.0)
    assert counts() == (2, 3)
    stats.set_in_flight(0)  # and the engine has ended no step since
    stats.add("queue_requests", -2)
    assert counts() == (0, 0)


def test_objects_of_a_removed_model_are_collected_when_another_is_opened() -> None:
    """They were excluded from garbage collection for good, each model with two descriptors of its statistics."""
    model = SimpleNamespace(data=io.BytesIO())
    model.own, kept = model, weakref.ref(model.data)
    thresholds = gc.get_threshold()
    try:
        tune_gc()
        del model
        tune_gc()
        assert kept() is None
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
