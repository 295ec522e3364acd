"""What answers under grammars cost themselves and the free answers beside them, on the engine itself, without HTTP.

A level decodes a number of sequences, of which a share follows grammars: lists of records as arguments of tools are,
which no answer ends. The masks of these records cost what masks of published tool schemas cost (mean 34 us, p99 225 us
on one core). Random weights never end a text by themselves, so with --texts most masks are those near the limit of a
text, which cost 0.3 to 1.5 ms. A level is timed from the 8th token of each sequence to the end of the first one, so
that neither prompts nor compilations are in it. Levels that are compared run one after another, as often as --reps
says. Random weights, greedy, prefix cache off. The peer of a row is the same level without a grammar.

    python benchmarks/structured.py --tokenizer FOLDER       # Qwen3-0.6B with its own vocabulary
    python benchmarks/structured.py --model Qwen/Qwen3-8B-AWQ --tokenizer FOLDER
    python benchmarks/structured.py --model meltcore/sums --device cpu --sequences 16
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import replace
from importlib import metadata
from typing import NamedTuple

from bench_output import Row, Target, need_gpu, write_result
from llguidance import LLMatcher

from meltcore import LLM, SamplingParams
from meltcore.engine.generation.engine import GenerationEngine
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import Grammar

PROMPT_TOKENS, FIRST_TOKENS = 16, 8
FIELDS = {
    "id": {"type": "integer"},
    "unit": {"enum": ["celsius", "fahrenheit"]},
    "price": {"type": "number"},
    "paid": {"type": "boolean"},
    "day": {"type": "string", "format": "date"},
    "kind": {"enum": ["one-way", "return", "multi-city"]},
    "seats": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
}
TEXTS = {
    "city": {"type": "string", "maxLength": 40},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
}


class Level(NamedTuple):
    """Tokens per second of the free and of the constrained sequences of a level, and what their masks took."""

    free: float
    constrained: float
    mask_us: float
    late: int

    @property
    def total(self) -> float:
        return self.free + self.constrained


def grammar(number: int, fields: dict[str, object]) -> Grammar:
    """A grammar of its own for each of 16 kinds of requests, so that compiled ones are shared as on a server."""
    record = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    schema = {"type": "array", "items": record | {"title": f"kind {number % 16}"}, "minItems": 1000}
    options = {"whitespace_pattern": r"\n[ ]{0,32}|[ ]"}
    return Grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))  # type: ignore[arg-type]


def run(
    engine: GenerationEngine, sequences: int, constrained: int, tokens: int, seed: int, fields: dict[str, object]
) -> Level:
    """Decode the sequences of a level, of which the first `constrained` follow grammars."""
    names, counts = [f"{seed}.{number}" for number in range(sequences)], dict[str, int]()
    for number, name in enumerate(names):
        prompt = [(seed * 7919 + number * 31 + at) % engine.vocab_size for at in range(PROMPT_TOKENS)]
        follows = grammar(number, fields) if number < constrained else None
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, grammar=follows)
        engine.add(AddRequest(name, prompt, sampling))
        counts[name] = 0
    has_begun, has_ended, began_s, ended_s = False, False, 0.0, 0.0
    at_begin, before = dict(counts), engine.stats()
    after, at_end = before, counts
    while engine.has_work:
        for output in engine.step().outputs:
            counts[output.request_id] += len(output.token_ids)
            if output.error is not None:
                raise SystemExit(f"a request has failed: {output.error}")
            if output.finish_reason is not None and not has_ended:
                has_ended, ended_s, after, at_end = True, time.perf_counter(), engine.stats(), dict(counts)
        if not has_begun and min(counts.values()) >= FIRST_TOKENS:
            has_begun, began_s, at_begin, before = True, time.perf_counter(), dict(counts), engine.stats()
    took_s = ended_s - began_s
    done = [at_end[name] - at_begin[name] for name in names]
    masks = after.masks_total - before.masks_total
    return Level(
        sum(done[constrained:]) / took_s,
        sum(done[:constrained]) / took_s,
        (after.mask_s_total - before.mask_s_total) / max(masks, 1) * 1e6,
        after.late_masks_total - before.late_masks_total,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--tokenizer", help="Folder of a real vocabulary; without, tokens have made-up texts.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="Of each answer.")
    parser.add_argument("--texts", action="store_true", help="Records with short texts, too.")
    parser.add_argument("--reps", type=int, default=3)
    args = parser.parse_args()
    need_gpu(model=args.model)

    llm = LLM(
        args.model,
        tokenizer=args.tokenizer,
        device=args.device,
        load_format="auto" if args.model.startswith("meltcore/") else "dummy",
        max_model_len=1024,
        max_num_seqs=args.sequences,
        enable_prefix_caching=False,
    )
    engine, total = llm.engine, args.sequences
    fifth = total // 5
    levels = {
        f"{total} free": (total, 0),
        f"{total - fifth} free, {fifth} constrained": (total, fifth),
        f"{total} constrained": (total, total),
        "1 free": (1, 0),
        "1 constrained": (1, 1),
    }
    fields: dict[str, object] = FIELDS | TEXTS if args.texts else FIELDS
    gc.disable()  # as the offline API does while it runs
    found: dict[str, list[Level]] = {name: [] for name in levels}
    for seed in range(args.reps + 1):  # the first captures graphs and compiles grammars
        for name, (sequences, constrained) in levels.items():
            level = run(engine, sequences, constrained, args.tokens, seed, fields)
            print(f"{name}: {level.total:.0f} tokens/s, {level.mask_us:.0f} us per mask, {level.late} late", flush=True)
            if seed:
                found[name].append(level)
    llm.close()

    def median(name: str, field: str) -> float:
        return statistics.median(getattr(level, field) for level in found[name])

    rows = []
    targets = {1: 0.95, 2: 0.90, 4: 0.95}
    names = list(levels)
    for index, name in enumerate(names):
        peer = names[3] if index > 3 else names[0]
        row = Row(work=name, unit="output tokens/s", value=median(name, "total"))
        row.repeats = tuple(replace(row, value=level.total) for level in found[name])
        if index in targets:
            row.peer, row.peer_value = peer, median(peer, "total")
            row.ratio, row.target = row.value / row.peer_value, Target(targets[index], "ratio")
        rows.append(row)
    mixed = Row(work=f"the free ones of: {names[1]}", unit="output tokens/s", value=median(names[1], "free"))
    mixed.repeats = tuple(replace(mixed, value=level.free) for level in found[names[1]])
    mixed.peer, mixed.peer_value = "their share without grammars", median(names[0], "total") * (total - fifth) / total
    mixed.ratio, mixed.target = mixed.value / mixed.peer_value, Target(0.97, "ratio")
    rows.append(mixed)
    notes = [
        f"{name}: {median(name, 'mask_us'):.0f} us of a thread per mask, {median(name, 'late'):.0f} masks late"
        for name, (_, constrained) in levels.items()
        if constrained
    ]
    versions = {name: metadata.version(name) for name in ("torch", "llguidance")}
    write_result(rows, versions, notes, subject=args.model + (", records with texts" if args.texts else ""))


if __name__ == "__main__":
    main()
