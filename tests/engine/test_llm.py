"""The offline API: prompts queued a step at a time, and no pause for the garbage collector while they are answered."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
from waiting import WAIT_S

from meltcore import LLM, SamplingParams
from meltcore.common.errors import RequestError

PROMPTS = [[20 + number % 7, 30, 40 + number % 5] * (1 + number % 4) for number in range(14)]
STEP_TOKENS = 16  # two prompts or so


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    model = LLM("meltcore/sums", device="cpu", max_num_seqs=8, max_num_batched_tokens=STEP_TOKENS)
    yield model
    model.close()


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def test_answers_have_the_order_of_the_prompts(llm: LLM) -> None:
    together = llm.generate(PROMPTS, [greedy(1 + number % 6) for number in range(len(PROMPTS))])
    alone = [llm.generate(prompt, greedy(1 + number % 6))[0] for number, prompt in enumerate(PROMPTS)]
    assert [answer.prompt_token_ids for answer in together] == PROMPTS
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


def test_first_step_runs_before_the_last_prompt_is_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[int] = []
    step = llm.engine.step

    def seen() -> object:
        queued.append(llm.engine.scheduler.waiting_count)
        return step()

    monkeypatch.setattr(llm.engine, "step", seen)
    llm.generate(PROMPTS, greedy(1))
    longest = max(map(len, PROMPTS))
    assert 0 < queued[0] * min(map(len, PROMPTS)) <= STEP_TOKENS + longest


@pytest.mark.parametrize("wrong", [[-1], [2**33], [10**6], []])
def test_refused_prompt_leaves_an_idle_engine(llm: LLM, wrong: list[int]) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.generate([*PROMPTS, wrong, *PROMPTS], greedy(4))
    if llm.engine.scheduler.cache is not None:
        llm.engine.scheduler.cache.check()
    llm.engine.check_idle()
    assert len(llm.generate(PROMPTS[0], greedy(3))[0].token_ids) == 3


@pytest.mark.parametrize("frozen", [False, True])
def test_generate_runs_no_full_garbage_collection(llm: LLM, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With objects frozen at the interpreter's start, as Python 3.12 has some, too."""
    monkeypatch.setattr("meltcore.offline.llm._STEPS_PER_COLLECTION", 16)
    rounds: list[int] = []
    running = [False]

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and running[0]:
            rounds.append(info["generation"])

    thresholds = gc.get_threshold()
    gc.unfreeze()  # what the tests' own collection has frozen
    if frozen:
        gc.freeze()
        gc.collect()  # the next full one comes after a quarter as many new objects as this one keeps
    gc.set_threshold(50, 1, 1)  # without our care every few allocations
    gc.callbacks.append(note)
    try:
        running[0] = True
        llm.generate(PROMPTS[:4], greedy(40))
        running[0] = False
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
        gc.freeze()  # again
    assert gc.isenabled()
    assert rounds.count(0) > 0, "what is new must be looked at now and then"
    after_the_run = 2  # as soon as it may run again
    assert len([generation for generation in rounds if generation == 2]) <= after_the_run


@pytest.mark.slow
def test_first_token_comes_without_sympy_and_transformers() -> None:
    """Torch imports SymPy where a meta tensor is the model of a new one: 1.8 s on a machine with an H200."""
    code = (
        "import sys; from meltcore import LLM, SamplingParams\n"
        "LLM('meltcore/sums', device='cpu').generate([[20, 30]], SamplingParams(max_tokens=1))\n"
        "print({'sympy', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "set()\n"
