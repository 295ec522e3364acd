"""The bundled models' tokenizer: a small byte-level BPE with Qwen's splitting pattern, and its ChatML template.

A reasoning model has two more tokens, around its reasoning, and a template that begins every answer with them; with an
empty pair for a direct answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from meltcore.measure.problems import Problem, generate

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
REPLY_START = f"{TURN_START}assistant\n"
CONTEXT_TOKENS = 2048

# Words keep their leading space, digits are single tokens: "37" is two, so place value is visible to the model.
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
REPLY_PREFIX{%- endif -%}
"""
_THINKS = """\
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- else -%}
{{- '<think>\\n' -}}
{%- endif -%}
"""

# The prefix of a reply: without reasoning tokens, with an empty pair, or with the first of the pair.
ReplyPrefix = Literal["plain", "answering", "thinking"]
REPLY_PREFIXES: dict[ReplyPrefix, str] = {
    "plain": REPLY_START,
    "answering": f"{REPLY_START}{THINK}\n\n{END_THINK}\n\n",
    "thinking": f"{REPLY_START}{THINK}\n",
}


def conversation(problem: Problem, prefix: ReplyPrefix) -> str:
    """Return prompt and answer as the chat template renders them: a training text."""
    reply = problem.answer
    if prefix == "thinking":
        reply += f"\n{END_THINK}\n\nThe answer is {problem.value}."
    return f"{TURN_START}user\n{problem.question}{TURN_END}\n{REPLY_PREFIXES[prefix]}{reply}{TURN_END}"


def has_reasoning(tokenizer: Tokenizer) -> bool:
    return tokenizer.token_to_id(THINK) is not None


def train_tokenizer(seed: int, *, thinking: bool) -> Tokenizer:
    """Return a tokenizer of at most 1,026 tokens, trained on training problems. Special tokens have ids 0, 1, 2.

    thinking: add the two tokens around reasoning, which are no special tokens, as in Qwen3.5.
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
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (THINK, END_THINK)])
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
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
    (folder / "chat_template.jinja").write_text(
        _TEMPLATE.replace("REPLY_PREFIX", _THINKS if has_reasoning(tokenizer) else "")
    )


def _sample(seed: int) -> Iterator[str]:
    yield "<|im_start|>system\nYou are a careful assistant.<|im_end|>\n"
    for problem in generate("train", kind="mixed", num_problems=_SAMPLE, seed=seed):
        yield conversation(problem, "plain")
