"""Output tokens per second of our engine's offline API on dummy weights, closed loop, prefill in the wall time.

A level of c is c requests that start together, of uniform random prompt lengths and equal output lengths; EOS ignored,
greedy, prefix cache off. The median of the repetitions is quoted.

    python benchmarks/offline.py --levels 1,10,100,400,1000
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from importlib import metadata
from pathlib import Path

from bench_output import Row, write_result

from meltcore import LLM, SamplingParams

LOWEST_ID, HIGHEST_ID = 1000, 140_000  # as the peer draws them


def process_age_s() -> float:
    """Seconds since this process was started, imports included; from /proc/self/stat, field 22."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--levels", default="1,10,100,400,1000")
    parser.add_argument("--inlen", default="128:1024", help="LOW:HIGH prompt tokens, uniform")
    parser.add_argument("--out", type=int, default=128, help="output tokens")
    parser.add_argument("--seqs", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=8192, help="tokens a step")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--debug", default="", help="debug switches, with commas")
    parser.add_argument("--name", default="offline", help="of the result file")
    args = parser.parse_args()

    debug = ("no-prefix-cache", *filter(None, args.debug.split(",")))
    settings = {"load_format": "dummy", "max_model_len": 4096, "max_num_seqs": args.seqs, "debug": debug}
    llm = LLM(args.model, max_num_batched_tokens=args.budget, **settings)
    low, high = map(int, args.inlen.split(":"))
    draw = random.Random(args.seed)

    def run(count: int, out: int) -> float:
        """Seconds for `count` requests of `out` tokens."""
        prompts = [
            [draw.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(draw.randint(low, high))] for _ in range(count)
        ]
        started = time.perf_counter()
        answers = llm.generate(prompts, SamplingParams(max_tokens=out, ignore_eos=True))
        elapsed = time.perf_counter() - started
        assert all(len(answer.token_ids) == out for answer in answers)
        return elapsed

    run(1, 1)
    device = llm.engine.ready().device
    rows = [Row(work="process start to first token", unit="s", value=process_age_s())]
    for level in map(int, args.levels.split(",")):
        run(level, 8)
        walls = [run(level, args.out) for _ in range(args.reps)]
        work = f"{device}: {level:,} requests, {args.inlen.replace(':', ' to ')} in / {args.out} out"
        rows.append(Row(work=work, unit="output tokens/s", value=level * args.out / statistics.median(walls)))
        if level == 1:
            rows.append(Row(work=work, unit="ms a token", value=1000 * statistics.median(walls) / args.out))
    write_result(args.name, rows, {"torch": metadata.version("torch"), "triton": metadata.version("triton")})


if __name__ == "__main__":
    main()
