"""The effect of a very long prompt on sequences that decode: p99 ITL before it and during its prefill.

Dummy weights (of a GGUF file its shapes and formats), and experts drawn at random with --debug uniform-routing. The
prompt is prefilled once as the engine does it, in chunks limited by engine/core/pacing.py, and once in whole steps, as
ordinary prompts are. A large model on one GPU takes minutes in chunks: --seconds ends that part early, and its rows
then say how many tokens were prefilled.

    python benchmarks/long_prompt.py --model Qwen/Qwen3.5-35B-A3B --length 200000 --load 8 --debug uniform-routing
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from bench_output import Row, Target, need_gpu, write_result

from meltcore.engine.generation.engine import GenerationEngine
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.settings.config import EngineConfig

REACH = 2.0  # the most that p99 ITL may grow
PROMPT = 500  # tokens of each sequence of the load


class Seen(NamedTuple):
    """What other requests and the long prompt itself experienced in one run."""

    itl_ms: float  # p99
    longest_ms: float
    read: int  # tokens of the long prompt that were prefilled: all, unless time ran out
    took_s: float  # for those; up to the first token where all were read
    pages: int  # of the KV cache: the most that all sequences held


class Load:
    """An engine under `size` sequences that decode."""

    def __init__(self, config: EngineConfig, size: int, tokens: int) -> None:
        self.engine = GenerationEngine(config)
        self._random = random.Random(0)
        self._names = itertools.count()
        self._last_s: dict[str, float] = {}
        self._load = [self.add(PROMPT, tokens) for _ in range(size)]
        self._most_pages = 0

    def add(self, length: int, tokens: int) -> str:
        name = str(next(self._names))
        ids = [self._random.randrange(self.engine.vocab_size) for _ in range(length)]
        self.engine.add(AddRequest(name, ids, SamplingParams(max_tokens=tokens, ignore_eos=True)))
        return name

    def run(self, *, steps: int = 0, until: str = "", most_s: float = math.inf) -> list[float]:
        """Run `steps` steps, or until the first token of `until`. Returns the load's ITLs in seconds, ascending."""
        gaps: list[float] = []
        end_s = time.monotonic() + most_s
        while steps > 0 or (until and until not in self._last_s and time.monotonic() < end_s):
            steps -= 1
            step = self.engine.step()
            self._most_pages = max(self._most_pages, self.engine.pool.num_used)
            for output in step.outputs:
                before, self._last_s[output.request_id] = self._last_s.get(output.request_id), step.step_ended_s
                if before is not None and output.request_id in self._load:
                    gaps.append(step.step_ended_s - before)
        return sorted(gaps)

    def read(self, length: int, most_s: float = math.inf) -> Seen:
        began_s, self._most_pages = max(self._last_s.values()), 0
        name = self.add(length, 2)
        gaps = self.run(until=name, most_s=most_s)
        running = self.engine.scheduler.running
        read = length if name in self._last_s else sum(each.num_computed_tokens for each in running if each.id == name)
        took_s = max(self._last_s.values()) - began_s
        self.engine.abort([name])
        return Seen(p99_ms(gaps), gaps[-1] * 1e3, read, took_s, self._most_pages)


def p99_ms(gaps: list[float]) -> float:
    return gaps[int(0.99 * (len(gaps) - 1))] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3.5-35B-A3B")
    parser.add_argument("--length", type=int, default=200_000, help="Tokens of the long prompt.")
    parser.add_argument("--load", type=int, default=8, help="Sequences that decode meanwhile.")
    parser.add_argument("--tokens", type=int, default=40_000, help="Most output tokens of each of them.")
    parser.add_argument("--seconds", type=float, default=math.inf, help="Time limit of the prefill in chunks.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--debug", default="", help="Debug switches, separated by commas.")
    args = parser.parse_args()
    if args.device.startswith("cuda"):
        need_gpu(args.tp)
    config = EngineConfig(
        model=args.model,
        device=args.device,
        tensor_parallel_size=args.tp,
        load_format="dummy",
        max_num_seqs=args.load + 1,
        debug=tuple(filter(None, args.debug.split(","))),
        enable_prefix_caching=False,
    )
    load = Load(config, args.load, args.tokens)
    load.run(steps=100)
    alone_ms = p99_ms(load.run(steps=300))
    print(f"alone: p99 ITL {alone_ms:.2f} ms", flush=True)
    in_chunks = load.read(args.length, args.seconds)
    print(f"in chunks: {in_chunks}", flush=True)
    load.run(steps=50)
    load.engine.scheduler.long_prompt = args.length
    whole = load.read(args.length)
    load.engine.close()

    work = f"{args.length:,} tokens, {args.load} decoding"
    rows = [Row(work=f"{args.load} decoding alone, p99 ITL", unit="ms", value=alone_ms)]
    for name, seen in (("in chunks", in_chunks), ("in whole steps", whole)):
        growth, is_whole = seen.itl_ms / alone_ms, seen.read == args.length
        measured = f"{work}, {name}" if is_whole else f"{work}, {name}, first {seen.read:,} prefilled"
        target = Target(REACH, better="lower") if seen is in_chunks else None
        rows += [
            Row(work=f"{measured}: p99 ITL over that alone", unit="x", value=growth, target=target),
            Row(work=f"{measured}: longest ITL", unit="ms", value=seen.longest_ms),
            Row(work=f"{measured}: most KV pages in use", unit="pages", value=seen.pages),
        ]
        if is_whole:
            rows.append(Row(work=f"{measured}: TTFT of the long prompt", unit="s", value=seen.took_s))
        else:
            rows.append(Row(work=f"{measured}: prefill rate", unit="tokens/s", value=seen.read / seen.took_s))
    versions = {"torch": metadata.version("torch"), "triton": metadata.version("triton")}
    write_result(rows, versions, subject=Path(args.model).name if args.model.endswith(".gguf") else args.model)


if __name__ == "__main__":
    main()
