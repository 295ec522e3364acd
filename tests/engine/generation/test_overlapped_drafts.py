"""Steps with drafts stay in flight until the next step is scheduled or, as graphs of windows, until it is launched."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import engine_tools as tools
import pytest
import torch
from graph_tools import Uncaptured
from speculation_tools import NGRAM, ForcedDrafts
from test_mtp_drafts import ATTENTION_ONLY, HYBRID, MTP, write

from meltcore.engine.core.chunk import Chunk
from meltcore.engine.generation.engine import GenerationEngine
from meltcore.engine.generation.speculation import Speculation
from meltcore.engine.worker import drafter
from meltcore.engine.worker.launched_step import LaunchedStep
from meltcore.engine.worker.model_runner import ModelRunner
from meltcore.engine.worker.mtp_drafter import MtpDrafter
from meltcore.engine.worker.prefill_graphs import graph_buckets
from meltcore.engine.worker.sampler import Sampler
from meltcore.kernels.attention import paged as paged_attention
from meltcore.kernels.sampling.drafts import DraftTables, follow_windows
from meltcore.protocol.generation import SequenceOutput
from meltcore.protocol.sampling_params import Grammar

# By the step before which they arrive: prompts of these lengths, and sampling.
ARRIVALS: dict[int, dict[str, tuple[int, dict[str, Any]]]] = {
    0: {"long": (58, {"max_tokens": 80, "logprobs": 1}), "aborted": (70, {"max_tokens": 90})},
    3: {"stopped": (20, {"max_tokens": 60}), "again": (58, {"max_tokens": 40})},
    7: {"drawn": (100, {"temperature": 1.0, "seed": 3, "max_tokens": 70}), "one": (9, {"max_tokens": 1})},
    20: {"without": (31, {"max_tokens": 30, "speculative_decoding": False})},
}
_SAMPLE = Sampler._sample
ABORTS = {14: "aborted"}  # in the step before it no request ends, which would release its pages later


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation, "begin", lambda self, _scheduler: self._num_drafts)


class Served(NamedTuple):
    """All that an engine has scheduled, answered and kept."""

    steps: list[list[tuple[object, ...]]]
    answers: dict[str, list[int]]
    ends: dict[str, object]
    cached_pages: list[list[list[int]]]
    counts: list[list[float]]


def with_graphs(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps of windows be padded as for graphs, of at most 4 sequences."""
    buckets = graph_buckets(4, 128, 4)
    if isinstance(runner.drafter, MtpDrafter):
        runner.drafter.keep_hidden_states(buckets[-1].size)
    runner._prefill_graphs = Uncaptured(runner, buckets)  # type: ignore[assignment]
    # Kernel by kernel as on CUDA, each by its torch body.
    monkeypatch.setattr(paged_attention, "use_triton", lambda _tensor: True)


def serve(
    folder: Path, stop: int | None = None, graphs: pytest.MonkeyPatch | None = None, **settings: Any
) -> tuple[Served, tools.SeenEngine]:
    """The same requests arrive and are aborted before the same steps. `stop` ends one of them."""
    seen = tools.open_engine(
        folder, max_model_len=256, max_num_batched_tokens=96, max_num_seqs=4, **{"pages": 6} | settings
    )
    if graphs is not None:
        with_graphs(seen.engine.runner, graphs)
    engine, steps, index = seen.engine, list[list[tuple[object, ...]]](), 0
    launch, outputs = engine.runner.launch, list[SequenceOutput]()

    def recording(scheduled: list[Chunk], *rest: Any) -> LaunchedStep:
        states = [(chunk.request.row, chunk.request.recurrent_slot, *chunk.request.pages) for chunk in scheduled]
        steps.append([(c.request.id, *c[1:], state) for c, state in zip(scheduled, states, strict=True)])
        return launch(scheduled, *rest)

    engine.runner.launch = recording  # type: ignore[method-assign]
    while engine.has_work or index <= max(ARRIVALS):
        for request_id, (length, sampling) in ARRIVALS.get(index, {}).items():
            stops = {"stop_token_ids": [stop]} if stop is not None and request_id == "stopped" else {}
            seen.add(request_id, tools.random_prompt(length, length), **sampling, **stops)
        engine.abort([ABORTS[index]] if index in ABORTS else [])
        outputs += engine.step().outputs
        index += 1
    engine.check_idle()
    answers: dict[str, list[int]] = {}
    for output in outputs:
        answers.setdefault(output.request_id, []).extend(output.token_ids)
    ends = {each.request_id: (each.finish_reason, each.stop_token_id) for each in outputs if each.finish_reason}
    cache = engine.scheduler.cache
    assert cache is not None
    cached_pages = [list(page_set.values()) for page_set in cache._page_sets]
    stats = engine.stats()
    return Served(steps, answers, ends, cached_pages, [list(stats.drafted), list(stats.accepted)]), seen


@pytest.mark.slow
@pytest.mark.parametrize("layers", [ATTENTION_ONLY, HYBRID])
@pytest.mark.parametrize("method", [NGRAM, MTP])
def test_steps_are_those_without_async_scheduling(tmp_path: Path, method: dict[str, Any], layers: list[str]) -> None:
    """Chunks, drafts, pages, slots, answers and cached prefixes: with ends of all kinds, arrivals and preemptions."""
    folder = write(tmp_path, 0.2, layer_types=layers)
    truth, _ = serve(folder)
    stop = truth.answers["stopped"][25]
    serial, _ = serve(folder, stop, speculative_config=method)
    overlapped, seen = serve(folder, stop, speculative_config=method, overlap=True)
    assert overlapped.steps == serial.steps
    assert overlapped.ends == serial.ends
    assert overlapped.cached_pages == serial.cached_pages
    assert overlapped.counts == serial.counts
    assert seen.engine.scheduler.preemptions > 0
    assert overlapped.counts[1][2] > 5
    reasons = {"stopped": ("stop", stop), "aborted": ("abort", None)}
    assert overlapped.ends == dict.fromkeys(truth.answers, ("length", None)) | reasons
    aborted, earlier = overlapped.answers.pop("aborted"), truth.answers.pop("aborted")  # in a step of fewer tokens
    assert aborted[: len(earlier)] == earlier[: len(aborted)] != []
    answer = truth.answers["stopped"]
    truth.answers["stopped"] = answer[: answer.index(stop) + 1]
    assert overlapped.answers == truth.answers


@pytest.mark.slow
@pytest.mark.parametrize("layers", [ATTENTION_ONLY, HYBRID])
@pytest.mark.parametrize("method", [NGRAM, MTP])
@pytest.mark.parametrize("pages", [6, 16])
def test_steps_that_follow_windows_change_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any], layers: list[str], pages: int
) -> None:
    """Answers and ends, with ends of all kinds in flight, arrivals, and where pages are missing.

    And drafts and cached prefixes, unless other requests are preempted.
    """
    folder = write(tmp_path, 0.2, layer_types=layers)
    truth, _ = serve(folder, pages=pages)
    stop = truth.answers["stopped"][25]
    serial, _ = serve(folder, stop, speculative_config=method, pages=pages)
    found, _ = serve(folder, stop, monkeypatch, speculative_config=method, overlap=True, pages=pages)
    following = [chunks for chunks in found.steps if any(chunk[6] == (-1,) * 3 for chunk in chunks)]
    assert {len(chunks) for chunks in following} >= {1, 2, 3}
    assert found.ends == serial.ends
    aborted = found.answers.pop("aborted"), serial.answers.pop("aborted")
    length = min(map(len, aborted))
    assert aborted[0][:length] == aborted[1][:length] != []
    assert found.answers == serial.answers
    if pages > 6:
        assert found.counts == serial.counts
        assert [len(each) for each in found.cached_pages] == [len(each) for each in serial.cached_pages]


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [ATTENTION_ONLY, HYBRID])
@pytest.mark.parametrize("method", [NGRAM, MTP])
def test_replayed_steps_that_follow_windows_change_no_answer(
    tmp_path: Path, method: dict[str, Any], layers: list[str]
) -> None:
    folder = write(tmp_path, 0.2, layer_types=layers)
    settings = {"speculative_config": method, "pages": 16, "device": "cuda"}
    serial, _ = serve(folder, overlap=False, **settings)
    found, _ = serve(folder, overlap=True, **settings)
    following = [chunks for chunks in found.steps if any(chunk[6] == (-1,) * 3 for chunk in chunks)]
    assert {len(chunks) for chunks in following} >= {1, 2, 3}
    aborted = found.answers.pop("aborted"), serial.answers.pop("aborted")
    length = min(map(len, aborted))
    assert aborted[0][:length] == aborted[1][:length] != []
    assert found.answers == serial.answers
    assert found.counts == serial.counts


def _later(tables: DraftTables, *inputs: torch.Tensor) -> None:
    follow_windows(tables._replace(lengths=tables.lengths + 1), *inputs)


def _by_host_positions(sampler: Sampler, *given: Any) -> torch.Tensor:
    return _SAMPLE(sampler, *given[:3], None)


def _without_drafts(tables: DraftTables, *inputs: torch.Tensor) -> None:
    follow_windows(tables._replace(drafts=torch.full_like(tables.drafts, -1)), *inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (drafter, "follow_windows", _later),
        (drafter, "follow_windows", _without_drafts),
        (Sampler, "_sample", _by_host_positions),
        (LaunchedStep, "after_read", lambda self: self),
    ],
)
def test_mutations_of_following_steps_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, mutant: Callable[..., Any]
) -> None:
    folder, sizes = write(tmp_path, 0.2, layer_types=ATTENTION_ONLY), {"speculative_config": NGRAM, "pages": 16}
    serial, _ = serve(folder, **sizes)
    monkeypatch.setattr(owner, name, mutant)
    found, _ = serve(folder, None, monkeypatch, overlap=True, **sizes)
    assert (found.answers, found.counts) != (serial.answers, serial.counts)


@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_are_made_after_the_next_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """The device has the next step before the host makes, and a process sends, the outputs of a step with drafts.

    Also if the next step, or the step itself, has no drafts while the other has.
    """
    num_drafts = cycle([3, 3, 0])
    monkeypatch.setattr(Speculation, "begin", lambda _self, _scheduler: next(num_drafts))
    seen = tools.open_engine(write(tmp_path, 0.2, layer_types=ATTENTION_ONLY), speculative_config=MTP, overlap=overlap)
    events: list[str] = []

    def noting(kind: type, name: str, event: str) -> None:
        whole: Callable[..., Any] = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *all_: events.append(event) or whole(*all_))

    noting(type(seen.engine.runner), "launch", "launch")
    noting(LaunchedStep, "read", "read")
    noting(GenerationEngine, "_outputs_of", "outputs")
    seen.add("one", tools.random_prompt(5, 1), max_tokens=16)
    seen.run()
    num_steps = events.count("launch")
    assert num_steps > 4
    if overlap:
        later = ["read", "launch", "outputs"] * (num_steps - 1)
        assert events == ["launch", *later, "read", "outputs"]
    else:
        assert events == ["launch", "read", "outputs"] * num_steps


def test_abort_of_a_grammar_with_drafts_in_flight(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.make_reference().save_pretrained(tmp_path)
    folder = tools.with_tokenizer(tmp_path, tmp_path_factory.mktemp("constrained"))
    grammar: dict[str, Any] = {"grammar": Grammar("start: /[0-9]{30}/"), "max_tokens": 25}
    truth = tools.open_engine(folder)
    truth.add("kept", tools.random_prompt(20, 20), **grammar)
    answer = truth.run()["kept"]
    seen, outputs = tools.open_engine(folder, speculative_config=NGRAM, overlap=True), list[SequenceOutput]()
    forced = ForcedDrafts(monkeypatch, {"kept": answer, "aborted": answer}, 3)
    for request_id in ("kept", "aborted"):
        seen.add(request_id, tools.random_prompt(20, 20), **grammar)
    engine = seen.engine
    for output in seen.outputs():
        outputs.append(output)
        if output.request_id == "aborted" and len(output.token_ids) > 1:
            launched = engine._launched
            assert launched is not None
            assert any(chunk.drafts and chunk.request.id == "aborted" for chunk in launched.chunks)
            engine.abort(["aborted"])
    engine.check_idle()
    assert [token_id for each in outputs if each.request_id == "kept" for token_id in each.token_ids] == answer
    assert [each.finish_reason for each in outputs if each.request_id == "aborted"][-1] == "abort"
    assert forced.num_windows[3] > 4
