"""Drafts of the layer for multi-token prediction: which they are, and that they change no answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import engine_tools as tools
import numpy as np
import pytest
import torch
from mtp_tools import HEAD_DIM, HIDDEN, KV_HEADS, PAGE, SIZES, build, metadata_of, open_small
from safetensors.torch import load_file, save_file
from waiting import WAIT_S

from meltcore.common.errors import ConfigError, RankError
from meltcore.engine.core.batch import MtpInputs, Step
from meltcore.engine.distributed.rank_messages import SamplingStep
from meltcore.engine.distributed.ranks import Ranks
from meltcore.engine.generation.speculation import Speculation
from meltcore.engine.worker import drafter
from meltcore.engine.worker.mtp_drafter import MtpDrafter
from meltcore.engine.worker.warm_up import EVERY_SAMPLING, StepLimits, rehearse
from meltcore.models.decoders.qwen3_5 import Qwen3_5
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import Grammar, SamplingParams

MTP = {"method": "mtp", "num_speculative_tokens": 3}
PROMPTS = {name: tools.random_prompt(length, length) for name, length in (("a", 3), ("b", 58))}
HYBRID, ATTENTION_ONLY = ["linear_attention", "full_attention"], ["full_attention"] * 2


def write(folder: Path, share: float, **changes: Any) -> Path:
    """A model whose next token mostly follows from the newest token alone, which the layer knows too.

    share: of attention and experts. At 0 each draft is right.
    """
    shapes = {name: each.shape for name, each in build(folder, **changes).checkpoint_tensors().items()}
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            tensor.zero_()
        elif name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            tensor *= share
    tensors["model.embed_tokens.weight"] *= HIDDEN**0.5
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(HIDDEN), share * torch.eye(HIDDEN)], dim=1)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), 0.2, layer_types=ATTENTION_ONLY)


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drafts pay is measured, and does not matter here."""
    monkeypatch.setattr(Speculation, "begin", lambda self, _scheduler: self._num_drafts)


def answers(seen: tools.SeenEngine, **sampling: object) -> dict[str, list[int]]:
    for request_id, prompt in PROMPTS.items():
        seen.add(request_id, prompt, **{"max_tokens": 30, **sampling})
    return seen.run()


@torch.inference_mode()
def expected_drafts(model: Qwen3_5, token_ids: list[int], count: int) -> list[int]:
    """The drafts after known tokens, from one whole pass of the model and of the layer."""
    page_table, shape = torch.tensor([[0] * 4, [3, 1, 4, 2]]), (5, PAGE, KV_HEADS, HEAD_DIM)
    caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in model.kv_cache_specs()]
    known, size = torch.tensor(token_ids), len(token_ids) - 1
    metadata = metadata_of(0, size, page_table)
    hidden = model(known[:-1], torch.arange(size), caches, [metadata] * len(caches))
    hidden = model.draft_hidden(known[1:], hidden, torch.arange(size), caches[-1], metadata)[-1:]
    drafts = [int(model.logits(hidden).argmax())]
    for position in range(size, size + count - 1):
        arrays = torch.tensor(drafts[-1:]), hidden, torch.tensor([position])
        hidden = model.draft_hidden(*arrays, caches[-1], metadata_of(position, 1, page_table))
        drafts.append(int(model.logits(hidden).argmax()))
    return drafts


def test_drafts_are_those_of_a_whole_pass(folder: Path) -> None:
    """Of several sequences, after prompts in chunks, after accepted and rejected drafts, and at the ends of pages."""
    seen = tools.open_engine(folder, speculative_config=MTP, max_num_batched_tokens=48)
    model = seen.engine.runner.model
    assert isinstance(model, Qwen3_5)
    for request_id, prompt in PROMPTS.items():
        seen.add(request_id, prompt, max_tokens=14)
    compared, accepted = 0, set()
    while seen.engine.has_work:
        before = {request.id: len(request.token_ids) for request in seen.engine.scheduler.running}
        seen.engine.step()
        for request in seen.engine.scheduler.running:
            if request.num_in_history != len(request.token_ids):
                continue
            accepted.add(len(request.token_ids) - before.get(request.id, len(request.token_ids)))
            pages_end = len(request.pages) * PAGE
            usable = min(3, 1 + pages_end - len(request.token_ids) + 1)  # later ones would need a page that is missing
            expected = expected_drafts(model, request.token_ids, 3)
            assert list(request.drafts[:usable]) == expected[:usable], (request.id, len(request.token_ids))
            compared += usable
    assert compared > 30
    assert accepted >= {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("layer_types", [HYBRID, ATTENTION_ONLY], ids=["hybrid", "attention"])
def test_answers_are_those_without_drafts(tmp_path: Path, layer_types: list[str]) -> None:
    write(tmp_path, 0.2, layer_types=layer_types)
    plain, seen = tools.open_engine(tmp_path), tools.open_engine(tmp_path, speculative_config=MTP)
    for sampling in ({}, {"temperature": 1.0, "seed": 3, "presence_penalty": 1.0, "logprobs": 1}):
        truth = answers(plain, **sampling)
        assert answers(seen, **sampling) == truth
    assert answers(seen, **sampling, speculative_decoding=False) == truth
    drafted, accepted = np.frombuffer(seen.engine.stats().draft_sums).reshape(2, -1)[:, :3]
    assert all(0 < few < many for few, many in zip(accepted, drafted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layer_types", [HYBRID, ATTENTION_ONLY], ids=["hybrid", "attention"])
def test_right_drafts_are_accepted(tmp_path: Path, layer_types: list[str], device: str) -> None:
    """30 tokens take the step of the prompt and eight of four tokens, of which the last has one."""
    write(tmp_path, 0.0, layer_types=layer_types)
    truth = answers(tools.open_engine(tmp_path, device=device))
    seen = tools.open_engine(tmp_path, device=device, speculative_config=MTP)
    assert answers(seen) == truth
    assert seen.steps == 9


def test_drafts_do_not_reach_pages_of_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the page table keeps the pages of an earlier sequence, which another one may have by now."""
    seen = tools.open_engine(folder, speculative_config=MTP, max_num_seqs=2)
    seen.add("long", tools.random_prompt(150, 9), max_tokens=2)
    seen.run()
    written: set[int] = set()
    draft = MtpDrafter._draft

    def recording(self: MtpDrafter, *arguments: Any) -> torch.Tensor:
        written.update(arguments[2].flatten().tolist())
        return draft(self, *arguments)

    monkeypatch.setattr(MtpDrafter, "_draft", recording)
    seen.add("short", tools.random_prompt(62, 10), max_tokens=6)
    owned: set[int] = {0}
    while seen.engine.has_work:
        seen.engine.step()
        owned.update(*(request.pages for request in seen.engine.scheduler.running))
    assert written <= owned
    assert 0 in written


def test_rehearsal_looks_up_no_result_of_a_skipped_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped kernels leave any numbers in sampled tokens, accepted counts and drafts."""

    def garbage(*shape: int) -> torch.Tensor:
        return torch.full(shape, 2**40)

    seen = tools.open_engine(folder, speculative_config=MTP)
    runner, drafted = seen.engine.runner, []
    assert isinstance(runner.drafter, MtpDrafter)
    monkeypatch.setattr(runner, "argmax", lambda logits: garbage(len(logits)))
    monkeypatch.setattr(runner.drafter, "_argmax", lambda logits: drafted.append(len(logits)) or garbage(len(logits)))
    monkeypatch.setattr(drafter, "accept_and_propose", lambda _tables, rows, *_: garbage(len(rows), 5))
    rehearse(runner, StepLimits(0, 250, 140))
    assert drafted == [len(EVERY_SAMPLING) - 1] * 3
    runner.drafter.warm_up([1, 2])
    assert drafted[3:] == [1, 1, 1, 2, 2, 2]
    assert not runner.caches[-1][0][1:].any()


def test_layer_takes_one_more_cache_also_by_its_older_name(folder: Path) -> None:
    plain = tools.open_engine(folder)
    seen = tools.open_engine(folder, speculative_config=MTP | {"method": "qwen3_5_mtp"})
    assert isinstance(seen.engine.runner.drafter, MtpDrafter)
    caches = [len(each.engine.runner.caches) for each in (plain, seen)]
    assert caches == [SIZES["num_hidden_layers"], SIZES["num_hidden_layers"] + 1]
    assert seen.engine.ready().speculative_decoding == "mtp"


# Of ranks: greedy tokens and tokens drawn by temperature come from candidates, the others from rank 0 alone.
RANK_SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 3},
    "gathered": {"temperature": 1.0, "seed": 4, "top_k": 20, "presence_penalty": 1.0, "logprobs": 1},
    "without drafts": {"speculative_decoding": False},
}
Drafts = dict[tuple[str, int], tuple[int, ...]]


@contextmanager
def opened(folder: Path, **settings: Any) -> Iterator[tools.SeenEngine]:
    limits = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "enable_prefix_caching": False, "rank_timeout_s": WAIT_S}
    seen = tools.open_engine(folder, pages=6, **(limits | settings))
    with closing(seen.engine):
        yield seen


def answers_and_drafts(seen: tools.SeenEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, list[int]], Drafts]:
    """The answers, and the drafts after each known number of tokens of a request. Most steps have drafts."""
    choices = random.Random(1)
    monkeypatch.setattr(Speculation, "begin", lambda self, _scheduler: choices.choice([0, *[self._num_drafts] * 3]))
    found: dict[str, list[int]] = {}
    drafts: Drafts = {}
    for index, (kind, sampling) in enumerate(RANK_SAMPLING.items()):
        seen.add(kind, tools.random_prompt(30 + 30 * index, index), max_tokens=40, **sampling)
    while seen.engine.has_work:
        for output in seen.engine.step().outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
        for request in seen.engine.scheduler.running:
            if request.num_in_history == len(request.token_ids):
                drafts[request.id, len(request.token_ids)] = request.drafts
    seen.engine.check_idle()
    return found, drafts


@pytest.mark.slow
def test_ranks_draft_as_one_gpu(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prompts in chunks, preemptions, steps without drafts and a faulty token mask, until a rank ends."""
    folder = tools.with_tokenizer(write(tmp_path, 0.2, layer_types=HYBRID), tmp_path_factory.mktemp("constrained"))
    grammar: dict[str, Any] = {"grammar": Grammar("start: /[0-9]{9}x[a-f]{9}/"), "max_tokens": 25}
    with opened(folder) as seen:
        truth, _ = answers_and_drafts(seen, monkeypatch)
        seen.add("constrained", PROMPTS["b"], **grammar)
        constrained = seen.run()
    with opened(folder, speculative_config=MTP, overlap=True) as seen:
        found, expected = answers_and_drafts(seen, monkeypatch)
        assert found == truth
        assert seen.engine.scheduler.preemptions > 0
    with opened(folder, speculative_config=MTP, overlap=True, tensor_parallel_size=2) as seen:
        check_warm_up(seen)
        assert answers_and_drafts(seen, monkeypatch) == (truth, expected)
        assert len(expected) > 60
        drafted, accepted = np.frombuffer(seen.engine.stats().draft_sums).reshape(2, -1)[:, :3]
        assert all(0 < few < many for few, many in zip(accepted, drafted, strict=True))
        seen.add("constrained", PROMPTS["b"], **grammar)
        assert seen.run() == constrained
        check_faulty_mask(seen)
        assert answers_and_drafts(seen, monkeypatch) == (truth, expected)
        with monkeypatch.context() as patch:
            send_other_inputs(patch, next_ids=lambda inputs: np.roll(inputs.next_ids, 1))
            found, drafts = answers_and_drafts(seen, patch)
        assert found == truth, "no draft changes an answer"
        assert drafts != expected
        check_end_of_rank(seen, monkeypatch)


def send_other_inputs(patch: pytest.MonkeyPatch, **changes: Callable[[MtpInputs], Any]) -> None:
    """Rank 1 gets other inputs than rank 0 has."""
    run = Ranks.run

    def sending(ranks: Ranks, step: Step, sampling: SamplingStep) -> None:
        assert step.mtp is not None
        changed = {name: change(step.mtp) for name, change in changes.items()}
        run(ranks, step._replace(mtp=step.mtp._replace(**changed)), sampling)

    patch.setattr(Ranks, "run", sending)


def check_warm_up(seen: tools.SeenEngine) -> None:
    """Rank 0 drafts without rank 1, which receives nothing."""
    runner = seen.engine.runner
    assert isinstance(runner.drafter, MtpDrafter)
    rehearse(runner, StepLimits(0, 250, 140))
    with runner.without_collectives():
        runner.drafter.warm_up([1, 2])


def check_faulty_mask(seen: tools.SeenEngine) -> None:
    """Rank 1 drafts in the step whose mask fails on rank 0."""

    def mask(generated: Sequence[int]) -> torch.Tensor | None:
        if len(generated) > 3:
            raise ValueError("its own")
        return None

    seen.engine.add(AddRequest("masked", PROMPTS["a"], SamplingParams(max_tokens=20, ignore_eos=True)), mask)
    seen.add("beside it", PROMPTS["b"], max_tokens=20)
    with pytest.raises(ValueError, match="its own"):
        seen.run()
    seen.engine.abort(["masked", "beside it"])
    seen.run()


def check_end_of_rank(seen: tools.SeenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for its drafts."""
    ranks, draft = seen.engine._ranks, MtpDrafter._draft
    assert ranks is not None
    process = ranks._processes[1]

    def killing(*arguments: Any) -> torch.Tensor:
        process.kill()
        process.wait(WAIT_S)
        return draft(*arguments)

    monkeypatch.setattr(MtpDrafter, "_draft", killing)
    seen.add("one", PROMPTS["a"])
    with pytest.raises(RankError, match=rf"rank 1 \(process {process.pid}\): has ended: killed by signal 9"):
        seen.run()


@pytest.mark.slow
def test_ranks_accept_the_same_drafts_at_random(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    found = []
    for ranks in (1, 2):
        with opened(folder, speculative_config=MTP | synthetic, tensor_parallel_size=ranks, seed=7) as seen:
            found.append(answers_and_drafts(seen, monkeypatch))
            if ranks == 2:
                send_other_inputs(monkeypatch, started_rows=lambda _: [], started_lengths=lambda _: [])
                found.append(answers_and_drafts(seen, monkeypatch))
    assert found[0] == found[1] != found[2]


def test_layer_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    """As in the files of some fine-tuned models, whose config.json still names the layer."""
    tensors = load_file(folder / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if "mtp." not in name}, tmp_path / "model.safetensors")
    open_small(tmp_path, layer_types=ATTENTION_ONLY)
    with pytest.raises(ConfigError, match=r"missing tensors: mtp\.fc\.weight"):
        tools.open_engine(tmp_path, speculative_config=MTP)
