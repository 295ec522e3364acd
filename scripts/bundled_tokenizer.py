"""The bundled models' tokenizer: a small byte-level BPE with Qwen's way of splitting, and its ChatML template.

A model that thinks has two tokens more, around its thoughts, and a template that begins every answer with them: with an
empty pair where it is to answer at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from meltcore.problems import Problem, generate

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK, THOUGHT = "<think>", "</think>"
REPLY_START = f"{TURN_START}assistant\n"
CONTEXT_TOKENS = 2048

# Words keep their leading space, digits stand alone: "37" is two tokens, so place value is visible to the model.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_VOCABULARY = 1024
_SAMPLE = 20_000

_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
BEGINNING{%- endif -%}
"""
_THINKS = """\
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- else -%}
{{- '<think>\\n' -}}
{%- endif -%}
"""

# How a reply begins, before the model's own words: without thoughts as such, or with an empty or a begun pair.
Beginning = Literal["plain", "answering", "thinking"]
BEGINNINGS: dict[Beginning, str] = {
    "plain": REPLY_START,
    "answering": f"{REPLY_START}{THINK}\n\n{THOUGHT}\n\n",
    "thinking": f"{REPLY_START}{THINK}\n",
}


def conversation(problem: Problem, beginning: Beginning) -> str:
    """The prompt as the chat template renders it and its answer, closed: what the model learns to continue."""
    reply = problem.answer
    if beginning == "thinking":
        reply += f"\n{THOUGHT}\n\nThe answer is {problem.value}."
    return f"{TURN_START}user\n{problem.question}{TURN_END}\n{BEGINNINGS[beginning]}{reply}{TURN_END}"


def thinks(tokenizer: Tokenizer) -> bool:
    return tokenizer.token_to_id(THINK) is not None


def train_tokenizer(seed: int, *, thinking: bool) -> Tokenizer:
    """A tokenizer of at most 1,026 tokens, trained on rendered training problems. Special tokens have ids 0, 1, 2.

    thinking: it has the two tokens around thoughts, which are no special ones, as in Qwen3.5.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(seed), trainer)
    if thinking:
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (THINK, THOUGHT)])
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace("BEGINNING", _THINKS if thinks(tokenizer) else ""))


def _sample(seed: int) -> Iterator[str]:
    yield "<|im_start|>system\nYou are a careful assistant.<|im_end|>\n"
    for problem in generate("train", kind="mixed", count=_SAMPLE, seed=seed):
        yield conversation(problem, "plain")
