"""Output tokens per second where requests arrive one by one: a closed loop on the engine itself, without HTTP.

A level keeps a constant number of requests in flight. Prompts of 128 to 1,024 tokens and answers of 32 to 224 end at
different times, so most steps prefill a prompt beside sequences that decode, as on a server. Random weights,
greedy, end tokens ignored, prefix cache off. The median of the repetitions is quoted.

    python benchmarks/staggered.py
    python benchmarks/staggered.py --debug no-prefill-graphs
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
from meltcore.engine.generation.engine import GenerationEngine
from meltcore.protocol.generation import AddRequest

PROMPT_TOKENS, ANSWER_TOKENS = (128, 1024), (32, 224)
ROUNDS = 6  # requests of a level, as a multiple of its concurrency


def requests(count: int, vocab_size: int, seed: int) -> Iterator[AddRequest]:
    draw = random.Random(seed)
    for number in range(count):
        prompt = [draw.randrange(vocab_size) for _ in range(draw.randint(*PROMPT_TOKENS))]
        sampling = SamplingParams(max_tokens=draw.randint(*ANSWER_TOKENS), ignore_eos=True)
        yield AddRequest(f"{seed}.{number}", prompt, sampling)


def rate(engine: GenerationEngine, concurrency: int, seed: int) -> float:
    """Output tokens per second, from the first request to the last token."""
    left = iter(list(requests(ROUNDS * concurrency, engine.vocab_size, seed)))
    tokens, begun = 0, time.perf_counter()
    for _, request in zip(range(concurrency), left, strict=False):
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
    parser.add_argument(
        "--concurrency", default="1,10,100,400", help="Levels: requests in flight, separated by commas."
    )
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--debug", default="", help="Debug switches, separated by commas.")
    args = parser.parse_args()
    need_gpu(model=args.model)

    levels = [int(level) for level in args.concurrency.split(",")]
    debug = tuple(filter(None, args.debug.split(",")))
    llm = LLM(
        args.model,
        load_format="dummy",
        max_model_len=2048,
        max_num_seqs=max(levels),
        enable_prefix_caching=False,
        debug=debug,
    )
    rows = []
    gc.disable()  # as the offline API does while it runs
    for level in levels:
        rate(llm.engine, level, seed=0)  # captures the graphs of the shapes that occur
        rates = [rate(llm.engine, level, seed) for seed in range(1, 1 + args.reps)]
        print(f"concurrency {level}: {[round(each) for each in rates]}", flush=True)
        work = f"concurrency {level}, 128 to 1024 in / 32 to 224 out"
        rows.append(Row(work=work, unit="output tokens/s", value=statistics.median(rates)))
    llm.close()
    versions = {"torch": metadata.version("torch"), "triton": metadata.version("triton")}
    subject = " ".join((args.model, *debug))
    write_result(rows, versions, [f"debug: {', '.join(llm.engine.config.debug_options)}"], subject=subject)


if __name__ == "__main__":
    main()
