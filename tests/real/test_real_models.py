"""Models with real weights, as people have them: the numbers of transformers, and answers that can be read.

Optional: `make test-real` fetches SmolLM2-135M-Instruct and runs these. With REAL_NAMES="smollm2 gemma3" it fetches
Gemma 3 270M too, under Google's terms.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from openai import OpenAI
from parity_texts import PROMPTS
from real_model_parity import AS_IS, LONG_PROMPTS, TOLERANCE, measure
from real_models import FORMATS, SAFETENSORS, store
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from meltcore import LLM, SamplingParams
from meltcore.measure.experiments.servers import MeltcoreServer
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.text.chat_template import ChatTemplate
from meltcore.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STRINGS = 3_000
NUM_CONCURRENT = 32
# Letters and marks of six scripts, emoji with joiners and modifiers, controls, whitespace, digits, punctuation, code.
ALPHABETS = (
    "abcdefghij KLMNOPQRSTUVWXYZ",
    "अआइईकखगघचछजझटठड ािीुूेैोौं़्।",
    "ಅಆಇಈಕಖಗಘಚಛಜ ಾಿೀುೂೆೇೊೋಂ್",
    "அஆஇஈகஙசஞடணத ாிீுூெேொோ்",
    "的一是不了人我在有他这中大来上个国，。",
    "ابتثجحخدذرزسشص ًٌٍَُِّْ،؟",
    "👩👨👧👦🏽🏿❤️‍🔥🇮🇳🇩🇪 🙂",
    "\x00\x01\x07\x1b\x7f\u200b\u200d\u2060\ufeff",
    " \t\n\r\u00a0\u2003\u3000",
    "0123456789 .,-+eE",
    "!?\"'()[]{}<>|\\/@#$%^&*_=~`:;",
    "'s 't 're 've 'm 'll 'd I'M don't",
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>", "<jupyter_start>", "<s>", "</s>")
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a fruit."}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada."},
        {"role": "user", "content": "  What is my name?\n"},
    ],
)


@pytest.mark.parametrize("format_name", [AS_IS, *FORMATS, SAFETENSORS])
def test_smollm2_computes_what_transformers_does(smollm2: Path, format_name: str, tmp_path: Path) -> None:
    suffix = "" if format_name == SAFETENSORS else ".gguf"
    path = smollm2 if format_name == AS_IS else store(smollm2, format_name, tmp_path / f"smollm2-{format_name}{suffix}")
    check_parity(path, LONG_PROMPTS if format_name == AS_IS else ())


@pytest.mark.parametrize("format_name", [AS_IS, SAFETENSORS])
def test_gemma3_computes_what_transformers_does(gemma3: Path, format_name: str, tmp_path: Path) -> None:
    path = gemma3 if format_name == AS_IS else store(gemma3, format_name, tmp_path / "gemma3")
    check_parity(path, LONG_PROMPTS if format_name == AS_IS else ())


def check_parity(path: Path, long_prompts: tuple[int, ...]) -> None:
    parity = measure(path, "cpu", long_prompts=long_prompts)
    for text, perplexity in parity.perplexities.items():
        assert perplexity.relative_difference < TOLERANCE["cpu"], (text, perplexity)
    assert not parity.faults
    print(f"{path.name}: {len(parity.differences)} of {parity.num_texts} texts differ by a tie", parity.differences)


def strings(special: tuple[str, ...]) -> Iterator[str]:
    """Yield strings of one alphabet, of several, and with the text of special tokens."""
    rng = random.Random(20261128)
    for index in range(NUM_STRINGS):
        alphabets = [rng.choice(ALPHABETS) for _ in range(1 + index % 3)]
        text = "".join("".join(rng.choices(letters, k=rng.randint(1, 24))) for letters in alphabets)
        yield text if index % 10 else f"{text[:9]}{rng.choice(special)}{text[9:]}"


@pytest.fixture(scope="module")
def reference(smollm2_folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the folder in transformers."""
    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.mark.parametrize("source", ["GGUF", "folder"])
def test_3000_strings_have_the_tokens_of_transformers(
    smollm2: Path, smollm2_folder: Path, reference: PreTrainedTokenizerBase, source: str
) -> None:
    checkpoint = open_checkpoint(str(smollm2 if source == "GGUF" else smollm2_folder), files="all")
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    wrong = [
        text
        for text in strings(SPECIAL)
        if tokenizer.encode(text, add_special_tokens=True) != reference(text)["input_ids"]
    ]
    assert not wrong, f"{len(wrong)} strings differ, the first is {wrong[0]!r}"


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_3000_strings_have_the_tokens_of_llama_cpp(name: str, request: pytest.FixtureRequest) -> None:
    """Its tokenizer is its own code, where the references of the other tests are built from the file by ours."""
    path: Path = request.getfixturevalue(name)
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(str(path), files="all"))
    texts = list(strings(SPECIAL))
    expected = llama_cpp.tokens(path, texts, 300, special=True)
    pairs = zip(texts, expected, strict=True)
    wrong = [text for text, ids in pairs if tokenizer.encode(text, add_special_tokens=False) != ids]
    assert not wrong, f"{len(wrong)} strings differ, the first is {wrong[0]!r}"


def test_chats_are_rendered_as_transformers_does(smollm2: Path, reference: PreTrainedTokenizerBase) -> None:
    checkpoint = open_checkpoint(str(smollm2), files="all")
    template = ChatTemplate.from_checkpoint(checkpoint, {})
    for messages in CHATS:
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == expected


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    engine = LLM(str(smollm2), max_model_len=2048)
    yield engine
    engine.close()


def test_answer_ends_with_the_stop_token_which_is_no_text(llm: LLM) -> None:
    [answer] = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(max_tokens=64))
    assert "Paris" in answer.text
    assert (answer.finish_reason, "<|" in answer.text) == ("stop", False)


def test_concurrent_requests_get_the_answers_that_they_get_alone(llm: LLM) -> None:
    prompts = [f"{PROMPTS[index % len(PROMPTS)]}{' ' * (index // len(PROMPTS))}" for index in range(NUM_CONCURRENT)]
    sampling = SamplingParams(max_tokens=24)
    together = [each.token_ids for each in llm.generate(prompts, sampling)]
    alone = [llm.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    assert together == alone


def test_client_of_openai_chats_with_the_file_as_it_comes(smollm2: Path, tmp_path: Path) -> None:
    reports: list[str] = []
    command = ["serve", str(smollm2), "--port", "0", "--max-model-len", "2048", "--served-model-name", "smollm2"]
    with MeltcoreServer(command, tmp_path / "server.log", report=reports.append) as server:
        client = OpenAI(base_url=f"{server.wait_ready(ready_limit_s=600)}/v1", api_key="none", timeout=300)
        messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
        request: dict[str, Any] = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 64}
        whole = client.chat.completions.create(**request).choices[0]
        pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**request, stream=True) if chunk.choices]
        messages += [
            {"role": "assistant", "content": whole.message.content},
            {"role": "user", "content": "And of Italy?"},
        ]
        second = client.chat.completions.create(**request).choices[0]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.message.content
    assert "Paris" in (whole.message.content or "")
    assert whole.finish_reason == pieces[-1].finish_reason == "stop"
    assert "Rome" in (second.message.content or "")
