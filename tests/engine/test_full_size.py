"""Published shapes at full size against transformers, through all execution paths of the engine.

On a GPU; on a CPU the same tests run with a small network of Qwen3's form.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import engine_tools as tools
import pytest
import torch
from full_size_tools import Comparison, Subject, write_checkpoint

FLOAT32_TOLERANCE = 1e-4  # the largest difference against the largest logit
ROUTED = 0.8  # of the tokens, at least: those before which no router's choice hangs on rounding
DECIDED = 500  # tokens whose top-two gap the noise cannot turn round, in every run; of few, 65 in 100
# How far our bfloat16 may be from float32, in units of how far transformers' is: another order of sums has another
# largest outlier, but the same spread.
RMS_SLACK, LARGEST_SLACK = 1.05, 1.5

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "bos_token_id": None,
    "eos_token_id": 1,
}
FEWER_TOKENS = {"vocab_size": 8192, "eos_token_id": 1, "bos_token_id": None}
# For each: the published configuration, where it runs, tokens an answer, and what is changed in the configuration.
SUBJECTS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "small": ("Qwen/Qwen3-0.6B", "cpu", 24, SMALL),
    "Qwen3-0.6B": ("Qwen/Qwen3-0.6B", "cuda", 128, {}),
    # At its full width; eight of its layers are as many weights as Qwen3-0.6B has.
    "Qwen2.5-1.5B": ("Qwen/Qwen2.5-1.5B-Instruct", "cuda", 128, {"num_hidden_layers": 8}),
    # Three layers of Gated DeltaNet and one of attention, of full width, with an eighth of the experts.
    "Qwen3.5-35B-A3B": (
        "Qwen/Qwen3.5-35B-A3B",
        "cuda",
        24,
        FEWER_TOKENS | {"num_hidden_layers": 4, "num_experts": 32},
    ),
    # One layer of each, with all experts.
    "Qwen3.5-35B-A3B, all experts": (
        "Qwen/Qwen3.5-35B-A3B",
        "cuda",
        24,
        FEWER_TOKENS | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "Qwen3-30B-A3B": ("Qwen/Qwen3-30B-A3B", "cuda", 24, FEWER_TOKENS | {"num_hidden_layers": 2}),
}
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "alone": {"max_num_seqs": 1},
    "threes": {"max_num_seqs": 3},
    "chunked": {"max_num_batched_tokens": 100},
    "one step ahead": {"overlap": True},
    "preempted": {"pages": 40, "overlap": True},
    "cached": {"overlap": True},
}


def on_device(subject: str, *more: str) -> Any:
    """Parameters of a test, marked where they need a GPU. One process loads a subject (`make test-gpu`)."""
    on_gpu = SUBJECTS[subject][1] == "cuda"
    return pytest.param(subject, *more, marks=[pytest.mark.gpu, pytest.mark.xdist_group(subject)] if on_gpu else ())


# The second family differs inside a layer; what the engine does around layers is the same, so two ways are enough. So
# is the small one in bfloat16; in float32 it goes all ways.
CASES = [
    *(on_device("small", way) for way in ("together", "chunked", "preempted")),
    *(on_device("Qwen3-0.6B", way) for way in WAYS),
    *(on_device("Qwen2.5-1.5B", way) for way in ("chunked", "preempted")),
]
# In bfloat16 a router's ties fall either way, in transformers as here, and the noise comes from other experts.
EXACT_CASES = [
    *(on_device("small", way) for way in ("alone", "threes", "one step ahead", "cached")),
    *(on_device("Qwen3.5-35B-A3B", way) for way in ("together", "chunked", "one step ahead")),
    *(on_device(name, "one step ahead") for name in ("Qwen3.5-35B-A3B, all experts", "Qwen3-30B-A3B")),
]


@pytest.fixture(scope="module")
def subject_named(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """Each is made once, whatever order the tests come in."""

    @cache
    def make(name: str) -> Subject:
        published, device, answer_tokens, changes = SUBJECTS[name]
        folder = tmp_path_factory.mktemp(name)
        write_checkpoint(folder, published, **changes)
        return Subject.load(folder, device, answer_tokens)

    return make


@pytest.fixture
def subject(request: pytest.FixtureRequest, subject_named: Callable[[str], Subject]) -> Subject:
    return subject_named(request.param)


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def run(subject: Subject, dtype: str, way: str) -> Comparison:
    prompts = subject.prompts()
    seen = subject.open_engine(dtype, **WAYS[way])
    if way == "cached":
        for request_id, prompt in prompts.items():
            seen.add(f"before {request_id}", prompt, max_tokens=1)
        seen.run()
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt, max_tokens=subject.answer_tokens)
    comparison = subject.compare(seen, prompts)
    stats = seen.engine.stats()
    assert (stats.preemptions_total > 0) == (way == "preempted")
    if way == "cached":
        assert stats.prefix_hit_tokens_total == sum((len(prompt) - 1) // 64 * 64 for prompt in prompts.values())
    return comparison


@pytest.mark.parametrize("subject", [on_device(name) for name in SUBJECTS], indirect=True)
def test_attention_is_peaked(subject: Subject) -> None:
    peak = tools.attention_peak(subject.exact, subject.prompts()["r641"])
    assert peak > 0.2, "uniform attention over 320 keys or more would put 0.003 on each"


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "way"), [*CASES, *EXACT_CASES], indirect=["subject"])
def test_float32_logits_and_tokens_equal_transformers(subject: Subject, way: str) -> None:
    seen = run(subject, "float32", way)
    error = seen.relative_error()
    print(f"{way}: relative error {error:.1e}, experts beyond doubt at {int(seen.routed.sum())} of {len(seen.routed)}")
    experts = getattr(subject.exact.config.get_text_config(), "num_experts", 0)
    assert float(seen.routed.float().mean()) >= (ROUTED if experts else 1)
    assert error <= FLOAT32_TOLERANCE
    wrong = ((seen.chosen != seen.expected()) & seen.routed).nonzero()[:, 0]
    assert len(wrong) == 0, f"top-two gaps of the wrong ones: {seen.gaps()[wrong].tolist()}"


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "way"), CASES, indirect=["subject"])
def test_bfloat16_error_is_within_rounding_noise(subject: Subject, way: str) -> None:
    seen = run(subject, "bfloat16", way)
    (rms, largest), (noise_rms, noise) = seen.error(), seen.noise()
    decided = seen.gaps() > 2 * noise  # either of the two logits may be off by the noise
    wrong = (seen.chosen != seen.expected()) & decided
    print(
        f"{way}: rms {rms:.4f} of {noise_rms:.4f}, largest {largest:.4f} of {noise:.4f}, {int(decided.sum())} decided"
    )
    assert rms <= RMS_SLACK * noise_rms
    assert largest <= LARGEST_SLACK * noise
    assert int(decided.sum()) >= min(DECIDED, 0.65 * len(decided))
    assert int(wrong.sum()) == 0


def logits_of(subject: Subject, dtype: str, **settings: object) -> dict[str, torch.Tensor]:
    seen = subject.open_engine(dtype, **settings)
    for request_id, prompt in subject.prompts().items():
        seen.add(request_id, prompt, max_tokens=subject.answer_tokens)
    seen.run()
    return {request_id: torch.stack(rows) for request_id, rows in seen.logits.items()}


def assert_same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for request_id, logits in first.items():
        assert torch.equal(logits, second[request_id]), request_id


@pytest.mark.slow
@pytest.mark.parametrize("subject", [on_device("small"), on_device("Qwen3-0.6B")], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_overlap_changes_no_bit(subject: Subject, dtype: str) -> None:
    assert_same_bits(logits_of(subject, dtype, overlap=False), logits_of(subject, dtype, overlap=True))


@pytest.mark.parametrize("subject", [on_device("Qwen3-0.6B")], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_change_no_bit_at_the_same_padded_batch(subject: Subject, dtype: str) -> None:
    """All sixteen decode in every step after the first: a captured size, so that eager steps have the same shapes."""
    decodes_in_graphs = logits_of(subject, dtype, debug=("no-prefill-graphs",))
    assert_same_bits(decodes_in_graphs, logits_of(subject, dtype, enforce_eager=True))
