"""Runs once, before serving, what serving will run: a kernel compiled in the middle of a step stops everyone.

A rehearsal first, in which what is not compiled yet is noted and left out, so that all of it compiles side by side.

Graphs compile what decode steps need. Here go prompts of every size that the kernels tell apart, and every way to
choose a token, all on the padding row, whose page and state slot nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from meltcore.engine.compile_ahead import Turn, compile_ahead
from meltcore.engine.graphs import PADDING_ROW
from meltcore.engine.messages import AddRequest
from meltcore.engine.request import Request
from meltcore.engine.runner import ModelRunner
from meltcore.engine.sampling_params import SamplingParams
from meltcore.engine.scheduler import Chunk

# One step each: products of one token, few, three sizes of tiles, and many (kernels/linear.py).
PROMPT_TOKENS = (1, 2, 17, 33, 65, 129)
# More of them for routed experts: pairs alone, found and placed in all ways (kernels/expert_product.py), and copied to
# their places (kernels/expert_tiles.py).
EXPERT_TOKENS = (3, 5, 9, 114, 228, 257, 456, 513, 1024, 3656)
# Of recurrent layers: states are cut by how many prompts a step has (kernels/delta_scan.py).
PROMPTS_AT_ONCE = (2, 4, 8, 16)
# Sequences of decode steps that are made of unlike kernels (kernels/linear.py, kernels/decode_attention.py).
DECODES = (1, 2, 12, 16, 24, 48, 96, 160, 320)
EVERY_CHOICE = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=2, top_p=0.9, min_p=0.01),
    SamplingParams(frequency_penalty=0.1),
    SamplingParams(logprobs=1),
)


class Limits(NamedTuple):
    """Of steps: sequences that decode, tokens of a sequence, and tokens of a step."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int


def warm_up(runner: ModelRunner, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int) -> None:
    """Compute prompts within these limits (`Limits`), and forget them; only what padding writes to is written."""
    _launch_prompts(runner, max_num_seqs, max_model_len, max_num_batched_tokens)
    _launch_choices(runner, EVERY_CHOICE)


def compile_kernels(runner: ModelRunner, limits: Limits, turn: Turn) -> None:
    """Compile what serving launches on this GPU, as far as it is known, side by side."""
    use_device = partial(torch.cuda.set_device, torch.cuda.current_device())
    compile_ahead(partial(rehearse, runner, *limits), use_device, turn)


def rehearse(runner: ModelRunner, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int) -> None:
    """The launches of `warm_up` and of decode steps, where kernels are left out and their results are anything.

    So nothing here may use a chosen token as an index: no penalties and no log-probabilities. Ranks each do this alone.
    """
    with runner.alone():
        runner.rehearse_decodes([count for count in DECODES if count <= max_num_seqs])
        _launch_prompts(runner, max_num_seqs, max_model_len, max_num_batched_tokens)
        _launch_choices(runner, EVERY_CHOICE[:3])
    runner.forget_tokens()


def _launch_prompts(runner: ModelRunner, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int) -> None:
    for tokens in PROMPT_TOKENS + (EXPERT_TOKENS if runner.model.config.experts else ()):
        if tokens <= max_num_batched_tokens:
            runner.launch(_prompts(tokens, max_model_len)).read()
    runner.launch(_most_tiles(max_num_seqs, max_model_len, max_num_batched_tokens)).read()
    for count in PROMPTS_AT_ONCE if runner.model.recurrent_layers() else ():
        runner.launch([_prompt(number, 2, SamplingParams()) for number in range(count)]).read()


def _launch_choices(runner: ModelRunner, choices: Sequence[SamplingParams]) -> None:
    runner.launch([_prompt(number, 1, sampling) for number, sampling in enumerate(choices)]).read()


def _most_tiles(max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int) -> list[Chunk]:
    """A step with as many tiles of queries as there can be (kernels/prefill_attention.py): short prompts, as many as
    may run at once, and what is left of the tokens in the first of them."""
    short = min(2, max_model_len)
    count = max(1, min(max_num_seqs, max_num_batched_tokens // short))
    left = max_num_batched_tokens - count * short
    chunks = []
    for number in range(count):
        more = min(left, max_model_len - short)
        left -= more
        chunks.append(_prompt(number, short + more, SamplingParams()))
    return chunks


def _prompts(tokens: int, max_model_len: int) -> list[Chunk]:
    """So many tokens in as few prompts as they fit into."""
    sizes = [min(max_model_len, tokens - done) for done in range(0, tokens, max_model_len)]
    return [_prompt(number, size, SamplingParams()) for number, size in enumerate(sizes)]


def _prompt(number: int, tokens: int, sampling: SamplingParams) -> Chunk:
    request = Request(AddRequest(f"warm up {number}", [0] * tokens, sampling), number, frozenset(), None)
    request.row = PADDING_ROW
    request.penalty_slot = 0  # nobody has it yet, and who gets it starts it anew
    return Chunk(request, 0, tokens, samples=True)
