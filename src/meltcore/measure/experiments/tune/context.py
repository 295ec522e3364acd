"""Searches the longest context and the maximum number of concurrent sequences that fit in memory."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meltcore.common.errors import ConfigError
from meltcore.common.files import parse_json
from meltcore.common.sizes import size_text
from meltcore.measure.documents.tuning import Fact, Tuning, TuningPoint
from meltcore.measure.experiments.servers import Api, ApiError, ServerProcess
from meltcore.measure.experiments.tune.config import ANSWER_TOKENS, ContextOptions
from meltcore.measure.experiments.tune.run import Tuner, make_tuning
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.wire.probe import parse_gauges

_POLL_S = 0.02
# What servers log about their KV cache: ours counts pages, vLLM tokens.
_PAGES = re.compile(r"([\d,]+) KV pages of (\d+) tokens")
_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_FULL_ATTENTION = "full_attention"


def tune_context(tuner: Tuner, options: ContextOptions, load: LoadConfig) -> Tuning:
    """Run both searches and return the result. Raises ConfigError if a config.json is wrong."""
    search = ContextSearch(tuner, options, load)
    path = Path(options.config or tuner.checkpoint or "")
    if options.config or (tuner.checkpoint and path.is_dir()):
        config = read_config(path)
        search.vocab_size = config.get("text_config", config).get("vocab_size")
        search.bytes_per_token = kv_bytes_per_token(config, options.kv_element_size)
    search.run()
    return make_tuning("context", tuner, load, search.points, search.finding, facts=search.facts)


def kv_bytes_per_token(config: dict[str, Any], element_size: int) -> int:
    """Return the bytes of one token in the KV cache: 2 (keys, values) x layers x KV heads x head size x `element_size`.

    `config` is a checkpoint's config.json. If it has `layer_types`, only full attention layers count. Raises
    ConfigError if a number is missing.
    """
    text_config = config.get("text_config", config)
    try:
        num_layers = text_config["num_hidden_layers"]
        layer_types = text_config.get("layer_types") or [_FULL_ATTENTION] * num_layers
        num_kv_heads = text_config.get("num_key_value_heads") or text_config["num_attention_heads"]
        head_dim = text_config.get("head_dim") or text_config["hidden_size"] // text_config["num_attention_heads"]
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]}, so the KV cache cannot be calculated") from error
    return int(2 * layer_types.count(_FULL_ATTENTION) * num_kv_heads * head_dim * element_size)


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json, or the config.json of a folder. Raises ConfigError if it is unreadable."""
    file = path / "config.json" if path.is_dir() else path
    config = parse_json(file)
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return config


def reported_capacity(log: str) -> tuple[int, int] | None:
    """Return the number of tokens and the page size of the KV cache from a server's log.

    Returns None for an unknown log.
    """
    if pages := _PAGES.search(log):
        return int(pages[1].replace(",", "")) * int(pages[2]), int(pages[2])
    if tokens := _TOKENS.search(log):
        return int(tokens[1].replace(",", "")), 1
    return None


def max_sequences(capacity: int, length: int, page_size: int) -> int:
    """Return how many sequences of `length` tokens, in whole pages, fit in a cache of `capacity` tokens."""
    return capacity // (-(-length // page_size) * page_size)


def find_largest_fitting(fits_length: Callable[[int], bool], low: int, high: int, granularity: int) -> int | None:
    """Return the largest multiple of `granularity` in [low, high] that fits. Returns None if none fits.

    The search assumes that every value below a fitting value fits too. Each try costs a server start, so the order
    matters. `high` is tried first and is often the answer. Then `low` is doubled, because a start far above the limit
    fails slowest. Then the interval is bisected.
    """
    largest_fitting, smallest_failing = -(-low // granularity), high // granularity
    if smallest_failing < largest_fitting:
        raise ValueError(f"no multiple of {granularity} lies from {low} to {high}")
    if fits_length(smallest_failing * granularity):
        return smallest_failing * granularity
    if largest_fitting == smallest_failing or not fits_length(largest_fitting * granularity):
        return None
    while 2 * largest_fitting < smallest_failing and fits_length(2 * largest_fitting * granularity):
        largest_fitting *= 2
    smallest_failing = min(smallest_failing, 2 * largest_fitting)
    while smallest_failing - largest_fitting > 1:
        middle = (largest_fitting + smallest_failing) // 2
        if fits_length(middle * granularity):
            largest_fitting = middle
        else:
            smallest_failing = middle
    return largest_fitting * granularity


@dataclass
class ContextSearch:
    """The two searches and their results so far.

    `load` has the model and the seed. `vocab_size` and `bytes_per_token` come from config.json if there is one.
    `capacity` is the largest KV cache that a server reported, in tokens, and `page_size` its page size in tokens.
    """

    tuner: Tuner
    options: ContextOptions
    load: LoadConfig
    vocab_size: int | None = None
    bytes_per_token: int | None = None
    points: list[TuningPoint] = field(default_factory=list)
    default_model_len: int | None = None
    model_len: int | None = None
    num_seqs: int | None = None
    capacity: int | None = None
    page_size: int = 1

    def run(self) -> None:
        """Search the longest context, then the most sequences. Each try is a fresh start."""
        options = self.options
        high = options.max_model_len or self._measure_default()
        if high is not None:
            low, step = min(options.min_model_len, high), min(options.model_len_step, high)
            self.model_len = find_largest_fitting(self._model_len_fits, low, high, step)
        self.num_seqs = find_largest_fitting(self._num_seqs_fits, 1, options.max_num_seqs, 1)

    @property
    def facts(self) -> list[Fact]:
        """The facts of the result: values that the search found, that the server reported, or that were calculated."""
        seq_len = f"{self.options.seq_len:,} tokens"
        rows = []
        if self.default_model_len is not None:
            rows.append(("default context", f"{self.default_model_len:,} tokens", "server-reported"))
        rows.append(("largest context", _tokens(self.model_len), "found by search"))
        seqs = "none" if self.num_seqs is None else f"{self.num_seqs:,}"
        rows.append((f"concurrent sequences of {seq_len}", seqs, "found by search"))
        if self.capacity is None:
            rows.append(("KV cache", "not reported", "server-reported"))
        else:
            rows.append(("largest KV cache seen", _tokens(self.capacity), "server-reported"))
            num_sequences = max_sequences(self.capacity, self.options.seq_len, self.page_size)
            rows.append((f"sequences of {seq_len} that fit in it", f"{num_sequences:,}", "calculated"))
            if self.bytes_per_token is not None:
                size = size_text(self.capacity * self.bytes_per_token)
                text = f"{self.bytes_per_token:,} bytes per token, {size} in all"
                rows.append(("keys and values", text, "calculated from config.json"))
        return [Fact(name=name, value=value, source=source) for name, value, source in rows]

    @property
    def finding(self) -> str:
        """The result in a sentence."""
        seqs = "no sequence" if self.num_seqs is None else f"{self.num_seqs:,} sequences"
        bound = " (the most that was tried)" if self.num_seqs == self.options.max_num_seqs else ""
        return (
            f"The largest context that starts and answers is {_tokens(self.model_len)}; {seqs} of "
            f"{self.options.seq_len:,} tokens run concurrently without preemption{bound}."
        )

    def _measure_default(self) -> int | None:
        """Return the context of a server with default settings, or None if the server does not report it."""

        def inspect(server: ServerProcess, point: TuningPoint) -> None:
            listing: Any = Api(server.url).get("/v1/models").json()
            try:
                self.default_model_len = int(listing["data"][0]["max_model_len"])
            except (KeyError, IndexError, TypeError, ValueError):
                point.reason = "the server does not report its context: set --max-model-len"

        self.points.append(self.tuner.measure({"max_model_len": "default"}, None, args=[], inspect=inspect))
        return self.default_model_len

    def _model_len_fits(self, length: int) -> bool:
        """Return whether the server starts with a context of `length` and answers a request that fills it."""
        load = self._load(length - ANSWER_TOKENS, ANSWER_TOKENS, concurrency=1)
        point = self.tuner.measure({"max_model_len": length}, load, inspect=self._record_capacity)
        self.points.append(point)
        return point.ok

    def _num_seqs_fits(self, seqs: int) -> bool:
        """Return whether `seqs` sequences all run concurrently and none is preempted.

        Half of each sequence is the answer, so that the first sequence still runs when the last one has been prefilled.
        """
        length = self.options.seq_len
        load = self._load(length // 2, length - length // 2, concurrency=seqs)
        watches: list[_GaugeWatch] = []

        def inspect(server: ServerProcess, point: TuningPoint) -> None:
            self._record_capacity(server, point)
            point.peak_running, point.preemptions = watches[0].stop()
            if point.ok and point.preemptions:
                point.ok, point.reason = False, f"out of memory: {point.preemptions:,} preemptions"
            elif point.ok and point.peak_running is not None and point.peak_running < seqs:
                point.ok, point.reason = False, f"at most {point.peak_running:,} ran concurrently"

        point = self.tuner.measure(
            {"max_model_len": length, "max_num_seqs": seqs},
            load,
            on_ready=lambda server: watches.append(_GaugeWatch(Api(server.url, timeout_s=10.0))),
            inspect=inspect,
        )
        self.points.append(point)
        return point.ok

    def _load(self, input_len: int, output_len: int, *, concurrency: int) -> LoadConfig:
        vocab = "" if self.vocab_size is None else f",vocab={self.vocab_size}"
        workload = f"random:in={input_len},out={output_len}{vocab}"
        return replace(
            self.load, concurrency=(concurrency,), num_prompts=(concurrency,), num_warmups=0, workload=workload
        )

    def _record_capacity(self, server: ServerProcess, point: TuningPoint) -> None:
        del point
        capacity = reported_capacity(server.log)
        if capacity is not None and capacity[0] > (self.capacity or 0):
            self.capacity, self.page_size = capacity


def _tokens(count: int | None) -> str:
    return "none" if count is None else f"{count:,} tokens"


class _GaugeWatch:
    """Samples the server's own metrics from a thread: peak of running requests, preemptions since the start."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._peak: int | None = None
        self._stopping = threading.Event()
        self._first_preemptions = self._read().get("num_preemptions_total")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[int | None, int | None]:
        """Return the peak of running requests, and the number of preemptions.

        Each is None if the server has no such metric.
        """
        self._stopping.set()
        self._thread.join(15.0)
        last = self._read().get("num_preemptions_total")
        return self._peak, None if last is None or self._first_preemptions is None else round(
            last - self._first_preemptions
        )

    def _run(self) -> None:
        while not self._stopping.wait(_POLL_S):
            running = self._read().get("num_requests_running")
            if running is not None:
                self._peak = max(self._peak or 0, round(running))

    def _read(self) -> dict[str, float]:
        try:
            reply = self._api.get("/metrics")
        except ApiError:
            return {}  # a server without metrics is judged by its answers alone
        return parse_gauges(reply.body.decode("utf-8", "replace")) if reply.status == 200 else {}
