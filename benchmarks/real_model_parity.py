"""How close a model with real weights is to transformers in float32 on the same file: results/real_model_parity/.

    python benchmarks/real_model_parity.py .venv/real-models/smollm2-135m-instruct.q4_1.gguf --folder /tmp/formats
    python benchmarks/real_model_parity.py .venv/real-models/gemma-3-270m.q4_k_m.gguf --formats as-is,safetensors

The file is measured as it comes and stored in other formats (scripts/real_models.py). Both sides get the same ids.
Perplexity is of prose in English and Hindi, and of prompts of 1,000 and 4,000 tokens. A greedy text is
compared up to the first position where it differs. If the two best tokens of the reference are less than 0.05 apart
there, rounding may decide, and the text counts as differing by a tie. A tie earlier in the text, where both chose the
same token, excuses nothing. llama.cpp stands beside it where xllamacpp is installed: it rounds activations to 8 bits.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import torch
from bench_output import Row, Target, write_result
from parity_texts import ENGLISH, HINDI, PROMPTS
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))
from real_models import FORMATS, SAFETENSORS, store

from meltcore import LLM, SamplingParams
from meltcore.offline.llm import Completion

AS_IS = "as-is"
OUTPUT_TOKENS, LONG_OUTPUT_TOKENS = 64, 16
LONG_PROMPTS = (1_000, 4_000)
TIE = 0.05  # of two log-probabilities: rounding may decide between them
TOLERANCE = {"cpu": 2e-4, "cuda": 1e-3}  # relative, of a perplexity
_LOGITS_ROWS = 256  # a vocabulary of 262,144 takes 256 MiB in float32
_LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
_LLAMA_CPP_LIMIT_S = 600


class Perplexity(NamedTuple):
    """Holds the two perplexities of a text, and the largest difference of a token's log-probability.

    equal_choices: the share of positions at which both choose the same next token.
    """

    ours: float
    reference: float
    largest_difference: float
    equal_choices: float

    @property
    def relative_difference(self) -> float:
        return abs(self.ours / self.reference - 1)


class Difference(NamedTuple):
    """The first position where a greedy text leaves the reference.

    Args:
        prompt: index of the prompt, with the long prompts last.
        position: index of the output token.
        gap: difference of the reference's two best log-probabilities there.
    """

    prompt: int
    position: int
    gap: float

    def __str__(self) -> str:
        where = f"text {self.prompt} leaves the reference at token {self.position}"
        return f"{where}, where its two best tokens are {self.gap:.4f} apart"


@dataclass
class Parity:
    """Holds what one file gave: a perplexity per text, and the greedy texts that leave the reference."""

    perplexities: dict[str, Perplexity]
    num_texts: int
    differences: list[Difference]
    equal_to_llama_cpp: int | None = None

    @property
    def faults(self) -> list[Difference]:
        """Return the differences at positions where the reference has no tie."""
        return [each for each in self.differences if each.gap >= TIE]


class _Reference:
    """The network of transformers in float32, with the values that `gguf.quants` reads from the file."""

    def __init__(self, path: Path, device: torch.device) -> None:
        where, file = (path, None) if path.is_dir() else (path.parent, path.name)
        found = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32)
        self.model: PreTrainedModel = found.to(device).eval()

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int], first: int = 1) -> Iterator[torch.Tensor]:
        """Yield log-probabilities of the tokens from position `first` on, float32 [some rows, vocabulary]."""
        ids = torch.tensor([token_ids], device=self.model.device)
        hidden = self.model.model(ids).last_hidden_state[0, first - 1 : -1]
        for rows in hidden.split(_LOGITS_ROWS):
            yield self.model.lm_head(rows).float().log_softmax(-1)


def measure(
    path: Path,
    device: str,
    *,
    dtype: str = "auto",
    long_prompts: Sequence[int] = LONG_PROMPTS,
    beside_llama_cpp: bool = False,
) -> Parity:
    """Return the parity of a GGUF file or a safetensors folder on `device`, cpu or cuda, computed in `dtype`."""
    llm = LLM(str(path), device=device, dtype=dtype, max_model_len=max((2_000, *long_prompts)) + OUTPUT_TOKENS)
    try:
        texts = {"English": ENGLISH, "Hindi": HINDI}
        prompts = {name: llm.tokenizer.encode(text, add_special_tokens=True) for name, text in texts.items()}
        license_ids = llm.tokenizer.encode(_LICENSE.read_text(encoding="utf-8") * 2, add_special_tokens=True)
        prompts |= {f"{length:,} tokens": license_ids[:length] for length in long_prompts}
        scored = llm.generate(list(prompts.values()), SamplingParams(max_tokens=1, prompt_logprobs=1))
        greedy = llm.generate(list(PROMPTS), SamplingParams(max_tokens=OUTPUT_TOKENS))
        long_ids = [license_ids[:length] for length in long_prompts]
        greedy += llm.generate(long_ids, SamplingParams(max_tokens=LONG_OUTPUT_TOKENS)) if long_ids else []
    finally:
        llm.close()
    del llm
    reference = _Reference(path, torch.device(device))
    perplexities = {name: _perplexity(reference, each) for name, each in zip(prompts, scored, strict=True)}
    differences = [found for index, each in enumerate(greedy) if (found := _first_difference(reference, index, each))]
    parity = Parity(perplexities, len(greedy), differences)
    if beside_llama_cpp:
        parity.equal_to_llama_cpp = _equal_to_llama_cpp(path, greedy[: len(PROMPTS)])
    return parity


def _perplexity(reference: _Reference, completion: Completion) -> Perplexity:
    ours = torch.tensor([each.logprob for each in completion.prompt_logprobs], dtype=torch.float64)
    token_ids = completion.prompt_token_ids
    next_ids = torch.tensor(token_ids[1:]).split(_LOGITS_ROWS)
    chosen, parts = [], []
    for rows, ids in zip(reference.logprobs(token_ids), next_ids, strict=True):
        parts.append(rows.gather(1, ids[:, None].to(rows.device))[:, 0])
        chosen += rows.argmax(-1).tolist()
    theirs = torch.cat(parts).double().cpu()
    equal = sum(each.top_token_ids == [best] for each, best in zip(completion.prompt_logprobs, chosen, strict=True))
    return Perplexity(
        math.exp(-ours.mean()), math.exp(-theirs.mean()), float((ours - theirs).abs().max()), equal / len(chosen)
    )


def _first_difference(reference: _Reference, prompt: int, completion: Completion) -> Difference | None:
    """Return where the greedy text leaves what the reference would choose after the same tokens.

    Both have chosen the same tokens up to there, so that only the gap of this position can explain the difference.
    """
    tokens = completion.prompt_token_ids + completion.token_ids
    logprobs = torch.cat(list(reference.logprobs(tokens, len(completion.prompt_token_ids))))
    best = logprobs.topk(2)
    chosen = torch.tensor(completion.token_ids, device=logprobs.device)
    wrong = (best.indices[:, 0] != chosen).nonzero()
    if not len(wrong):
        return None
    position = int(wrong[0])
    return Difference(prompt, position, float(best.values[position, 0] - best.values[position, 1]))


def _equal_to_llama_cpp(path: Path, completions: Sequence[Completion]) -> int:
    """Return how many greedy texts llama.cpp continues with the same tokens, on two threads of the CPU."""
    requests = [{"prompt": each.prompt_token_ids, "max_tokens": OUTPUT_TOKENS} for each in completions]
    texts = llama_cpp.completions(path, requests, _LLAMA_CPP_LIMIT_S)
    answers = [[token["id"] for token in text] for text in texts]
    pairs = zip(answers, completions, strict=True)
    return sum(answer == each.token_ids[: len(answer)] for answer, each in pairs)


def rows(format_name: str, parity: Parity, device: str) -> list[Row]:
    """Return the rows of a file in the result."""
    found = [
        Row(
            work=f"{format_name}, {text}",
            unit="perplexity",
            value=each.ours,
            peer="transformers in float32",
            peer_value=each.reference,
            ratio=each.reference / each.ours,
        )
        for text, each in parity.perplexities.items()
    ]
    found += [
        Row(work=f"{format_name}, {text}, equal first choices", unit="%", value=each.equal_choices * 100)
        for text, each in parity.perplexities.items()
    ]
    worst = max(each.relative_difference for each in parity.perplexities.values())
    found.append(
        Row(
            work=f"{format_name}, largest difference of a perplexity",
            unit="%",
            value=worst * 100,
            target=Target(TOLERANCE[device] * 100, better="lower"),
        )
    )
    equal = parity.num_texts - len(parity.differences)
    found.append(Row(work=f"{format_name}, equal of {parity.num_texts} greedy texts", unit="texts", value=equal))
    found.append(Row(work=f"{format_name}, texts that differ by no tie", unit="texts", value=len(parity.faults)))
    if parity.equal_to_llama_cpp is not None:
        work = f"{format_name}, equal to llama.cpp of {len(PROMPTS)} greedy texts"
        found.append(Row(work=work, unit="texts", value=parity.equal_to_llama_cpp))
    return found


def main() -> None:
    """Measure the formats and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="GGUF file.")
    parser.add_argument("--formats", default=",".join((AS_IS, *FORMATS, SAFETENSORS)))
    parser.add_argument("--folder", type=Path, help="Where stored formats are kept (default: a temporary folder).")
    parser.add_argument("--device", choices=sorted(TOLERANCE), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto", help="Type of activations (default: the engine's choice).")
    args = parser.parse_args()
    if find_spec("accelerate") is None:
        parser.error("transformers reads GGUF files with the package accelerate only: pip install --group real")
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    import transformers

    versions: dict[str, Any] = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    beside_llama_cpp = find_spec("xllamacpp") is not None
    if beside_llama_cpp:
        import xllamacpp

        versions["xllamacpp"] = xllamacpp.__version__
    with tempfile.TemporaryDirectory() as temporary:
        for format_name in args.formats.split(","):
            path = args.model
            if format_name != AS_IS:
                suffix = "" if format_name == SAFETENSORS else ".gguf"
                path = store(
                    args.model, format_name, (args.folder or Path(temporary)) / f"{path.stem}-{format_name}{suffix}"
                )
            parity = measure(
                path,
                args.device,
                dtype=args.dtype,
                long_prompts=LONG_PROMPTS if format_name in (AS_IS, SAFETENSORS) else (),
                beside_llama_cpp=beside_llama_cpp and format_name != SAFETENSORS,
            )
            title = format_name if args.dtype == "auto" else f"{format_name} in {args.dtype}"
            notes = [f"{title}: {each}" for each in parity.differences]
            found = rows(title, parity, args.device)
            write_result(found, versions, notes, subject=args.model.name, gpus=args.device == "cuda")


if __name__ == "__main__":
    main()
