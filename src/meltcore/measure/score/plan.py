"""Plans the measurements of a run: the name of its workload, its prompts, and the grid of a sweep.

Prompts of a file are read, checked, tokenized, and named by a hash of the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.score import PromptFile, SweepGrid
from meltcore.measure.load.token_counter import open_tokenizer
from meltcore.measure.score import workload
from meltcore.measure.score.config import SWEEP_FRACTION, BenchConfig
from meltcore.measure.score.engine_process import EngineError
from meltcore.measure.score.workload import Precision

MAX_FILE_BYTES = 256 * 2**20
MAX_PROMPTS = 100_000
MAX_LINE_CHARACTERS = 200_000
MAX_PROMPT_TOKENS = 32_768
_HASH_DIGITS = 16
_CPU_MODEL = Path(__file__).parents[2] / "bundled" / workload.CPU_MODEL.rpartition("/")[2]
SWEEP_PROMPT_TOKENS = workload.MIN_PROMPT


class _Line(msgspec.Struct):
    """A line of a JSONL file; its other fields are ignored."""

    prompt: str


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The tokens of every prompt in the order of the file, and the SHA-256 of the file's bytes."""

    tokens: list[list[int]]
    sha256: str

    @cached_property
    def highest_id(self) -> int:
        """The highest token id of all prompts."""
        return max(map(max, self.tokens))

    @property
    def digest(self) -> str:
        """The first digits of the hash, which are part of the workload's name."""
        return self.sha256[:_HASH_DIGITS]

    def prompt(self, number: int, vocab_size: int) -> list[int]:
        """Return the prompt of request `number`, in the order of the file. After the last prompt the first one follows.

        Raises EngineError if the model has no such tokens.
        """
        if self.highest_id >= vocab_size:
            raise EngineError(f"the tokenizer gave token {self.highest_id}; the model's vocabulary has {vocab_size:,}")
        return self.tokens[number % len(self.tokens)]


def load_prompts(file: str, model: str | None, *, cpu: bool) -> Prompts:
    """Read and tokenize a file of prompts with the tokenizer of `model`. The default on a CPU is the bundled model.

    Raises ConfigError for a file that cannot be used, with its line, and if there is no tokenizer.
    """
    folder = Path(model).expanduser() if model is not None else _CPU_MODEL if cpu else None
    if folder is None or not folder.is_dir():
        raise ConfigError(
            "--prompts needs a tokenizer: --model must be a checkpoint folder with a tokenizer.json"
            + (f"; {model} is no folder" if model is not None else "")
        )
    file_bytes = _read(file)
    numbered_texts = _texts(file, file_bytes)
    tokenizer = open_tokenizer(str(folder))
    tokens = []
    for line_number, text in numbered_texts:
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        if not 1 <= len(token_ids) <= MAX_PROMPT_TOKENS:
            raise ConfigError(
                f"--prompts {file}: line {line_number} has {len(token_ids):,} tokens; 1 to {MAX_PROMPT_TOKENS:,} fit"
            )
        tokens.append(token_ids)
    return Prompts(tokens=tokens, sha256=hashlib.sha256(file_bytes).hexdigest())


def _read(file: str) -> bytes:
    path = Path(file)
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(f"--prompts {file}: {size:,} bytes; at most {MAX_FILE_BYTES:,} are read")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--prompts {file}: {error.strerror}") from error


def _texts(file: str, file_bytes: bytes) -> list[tuple[int, str]]:
    """Return the prompts with their line numbers. Blank lines are skipped. A *.jsonl file has objects with "prompt"."""
    try:
        lines = file_bytes.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = file_bytes.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"--prompts {file}: line {line} is not UTF-8 (byte {error.start:,})") from error
    is_jsonl = Path(file).suffix.lower() == ".jsonl"
    prompts = []
    for line_number, text in enumerate((raw_line.removesuffix("\r") for raw_line in lines), 1):
        if len(text) > MAX_LINE_CHARACTERS:
            raise ConfigError(
                f"--prompts {file}: line {line_number} has {len(text):,} characters; at most {MAX_LINE_CHARACTERS:,} "
                "fit"
            )
        if text.strip():
            prompts.append((line_number, _json_prompt(file, line_number, text) if is_jsonl else text))
    if not prompts:
        raise ConfigError(f"--prompts {file}: the file has no prompt, one per line")
    if len(prompts) > MAX_PROMPTS:
        raise ConfigError(f"--prompts {file}: {len(prompts):,} prompts; at most {MAX_PROMPTS:,} are taken")
    return prompts


def _json_prompt(file: str, line_number: int, text: str) -> str:
    try:
        return msgspec.json.decode(text, type=_Line).prompt
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f'--prompts {file}: line {line_number} is not an object with a text "prompt": {error}'
        ) from error


@dataclass(frozen=True, kw_only=True)
class ScorePlan:
    """The workload of a score. `prompt` returns tokens for (request number, vocabulary size).

    Only results with the same `name` are ranked together. `grid` has the cells of a sweep, or is None for a score.
    `prompt_file` is set if the prompts come from a file.
    """

    name: str
    precision: Precision
    prompt: Callable[[int, int], list[int]] = workload.prompt
    grid: SweepGrid | None = None
    prompt_file: PromptFile | None = None

    @property
    def context(self) -> int:
        """The number of tokens of the longest request, at least the longest of the score's workload."""
        max_prompt_tokens = 0 if self.prompt_file is None else self.prompt_file.max_tokens
        return max(workload.CONTEXT, max_prompt_tokens + workload.OUTPUT_TOKENS)


def make_plan(config: BenchConfig) -> ScorePlan:
    """Return the plan of a run: of the score, of a file of prompts, or of a sweep.

    Raises ConfigError for an unusable file.
    """
    precision = workload.PRECISIONS[config.precision]
    if config.prompts is not None:
        return _prompts_plan(load_prompts(config.prompts, config.model, cpu=config.cpu), precision)
    if not config.sweep:
        return ScorePlan(name=precision.name, precision=precision)
    grid = SweepGrid(
        concurrency=list(config.sweep_concurrency),
        output_lens=list(config.sweep_output_lens),
        temperatures=list(config.sweep_temperatures),
        prompt_tokens=SWEEP_PROMPT_TOKENS,
        cell_s=SWEEP_FRACTION * config.duration_s / config.sweep_cells,
    )
    return ScorePlan(
        name=precision.name.replace("score", "sweep"), precision=precision, prompt=_sweep_prompt, grid=grid
    )


def _prompts_plan(prompts: Prompts, precision: Precision) -> ScorePlan:
    lengths = [len(tokens) for tokens in prompts.tokens]
    return ScorePlan(
        name=f"{precision.name.replace('score', 'prompts')}+{prompts.digest}",
        precision=precision,
        prompt=prompts.prompt,
        prompt_file=PromptFile(
            sha256=prompts.sha256,
            prompts=len(lengths),
            min_tokens=min(lengths),
            mean_tokens=sum(lengths) / len(lengths),
            max_tokens=max(lengths),
        ),
    )


def _sweep_prompt(index: int, vocab_size: int) -> list[int]:
    """Return the first SWEEP_PROMPT_TOKENS tokens of the score's prompt `index`.

    All sweep prompts have the same length.
    """
    return workload.prompt(index, vocab_size)[:SWEEP_PROMPT_TOKENS]
