"""Output tokens per second where requests come one by one: a closed loop on the engine itself, without HTTP.

So many requests are under way; whenever one ends the next begins. Prompts of 128 to 1,024 tokens and answers of 32 to
224 end at unlike times, so most steps hold a prompt beside sequences that decode, as on a server. Random weights,
greedy, end tokens ignored, prefix cache off. The median of the repetitions is quoted.

    python benchmarks/staggered.py
    python benchmarks/staggered.py --debug no-prompt-graphs --name staggered_launched
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Iterator
from importlib import metadata

from bench_output import Row, need_gpu, write_result

from meltcore import LLM, SamplingParams
from meltcore.engine.engine import Engine
from meltcore.engine.messages import AddRequest

PROMPT_TOKENS, ANSWER_TOKENS = (128, 1024), (32, 224)
ROUNDS = 6  # requests of a level for each that is under way


def requests(count: int, vocab_size: int, seed: int) -> Iterator[AddRequest]:
    draw = random.Random(seed)
    for number in range(count):
        prompt = [draw.randrange(vocab_size) for _ in range(draw.randint(*PROMPT_TOKENS))]
        sampling = SamplingParams(max_tokens=draw.randint(*ANSWER_TOKENS), ignore_eos=True)
        yield AddRequest(f"{seed}.{number}", prompt, sampling)


def rate(engine: Engine, at_once: int, seed: int) -> float:
    """Output tokens a second, from the first request to the last token."""
    left = iter(list(requests(ROUNDS * at_once, engine.vocab_size, seed)))
    tokens, begun = 0, time.perf_counter()
    for _, request in zip(range(at_once), left, strict=False):
        engine.add(request)
    while engine.has_work:
        for output in engine.step().outputs:
            tokens += len(output.token_ids)
            following = next(left, None) if output.finish_reason else None
            if following is not None:
                engine.add(following)
    return tokens / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--at-once", default="1,10,100,400", help="requests under way, levels with commas")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--debug", default="", help="debug switches, with commas")
    parser.add_argument("--name", default="staggered", help="of the result file")
    args = parser.parse_args()
    need_gpu(model=args.model)

    levels = [int(level) for level in args.at_once.split(",")]
    debug = ("no-prefix-cache", *filter(None, args.debug.split(",")))
    llm = LLM(args.model, load_format="dummy", max_model_len=2048, max_num_seqs=max(levels), debug=debug)
    rows = []
    gc.disable()  # as the offline API does while it runs
    for level in levels:
        rate(llm.engine, level, seed=0)  # graphs that are recorded when they are first met
        rates = [rate(llm.engine, level, seed) for seed in range(1, 1 + args.reps)]
        print(f"{level} at once: {[round(each) for each in rates]}", flush=True)
        work = f"{level} at once, 128 to 1024 in / 32 to 224 out"
        rows.append(Row(work=work, unit="output tokens/s", value=statistics.median(rates)))
    llm.close()
    versions = {"torch": metadata.version("torch"), "triton": metadata.version("triton")}
    write_result(args.name, rows, versions, [f"debug switches: {', '.join(debug)}"])


if __name__ == "__main__":
    main()
