"""One strategy of strategies.py in a process of its own: warm up, say "warm", wait for a line, work, say what was done.

Every strategy answers the same prompts (those of the GPU score) with 128 tokens each, greedy, end tokens ignored, with
random weights of the same configuration. The first prompt of process p of n is p, the next p + n: no two share one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice

from meltcore.bench import workload
from meltcore.models.checkpoint import open_checkpoint

OUTPUT_TOKENS = workload.OUTPUT_TOKENS
# Answers so many prompts and returns the number of tokens made.
Answer = Callable[[list[list[int]]], int]


def transformers_generate(args: argparse.Namespace) -> Answer:
    """`generate` on a left-padded batch, as its documentation shows: a batch begins and ends together."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(open_checkpoint(args.model, files="config").folder)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def answer(prompts: list[list[int]]) -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=args.device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]).to(args.device)
        with torch.inference_mode():
            whole = model.generate(ids, attention_mask=mask, max_new_tokens=OUTPUT_TOKENS, do_sample=False)
        return int(whole[:, longest:].numel())

    return answer


def vllm_offline(args: argparse.Namespace) -> Answer:
    """vLLM's offline API with graphs captured up to the batch, so that it, too, is at its best."""
    from vllm import LLM, SamplingParams

    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, 2049, 64)]
    llm = LLM(
        model=str(open_checkpoint(args.model, files="config").folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=workload.CONTEXT,
        max_num_seqs=1024,
        max_num_batched_tokens=16_384,
        enable_prefix_caching=False,
        disable_log_stats=True,
        compilation_config={"cudagraph_capture_sizes": [size for size in sizes if size <= 1024]},
    )
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)

    def answer(prompts: list[list[int]]) -> int:
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in found)

    return answer


def meltcore_offline(args: argparse.Namespace) -> Answer:
    """Our offline API."""
    from meltcore import LLM, SamplingParams

    llm = LLM(
        args.model,
        load_format="dummy",
        dtype=args.dtype,
        device=args.device,
        max_model_len=workload.CONTEXT,
        debug=("no-prefix-cache",),
    )
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    def answer(prompts: list[list[int]]) -> int:
        return sum(len(each.token_ids) for each in llm.generate(prompts, sampling))

    return answer


STRATEGIES = {"transformers": transformers_generate, "vllm": vllm_offline, "meltcore": meltcore_offline}


def prompts_of(args: argparse.Namespace, vocab_size: int) -> Iterator[list[int]]:
    number = args.process
    while True:
        yield workload.prompt(number, vocab_size)
        number += args.processes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("strategy", choices=STRATEGIES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--batch", type=int, required=True, help="requests given to the strategy together")
    parser.add_argument("--seconds", type=float, required=True, help="no batch begins later")
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()

    vocab_size = int(open_checkpoint(args.model, files="config").text_config["vocab_size"])
    prompts = prompts_of(args, vocab_size)
    answer = STRATEGIES[args.strategy](args)
    answer(list(islice(prompts, args.batch)))
    print("warm", flush=True)
    sys.stdin.readline()
    started = time.monotonic()
    tokens = requests = 0
    while requests == 0 or time.monotonic() - started < args.seconds:
        batch = list(islice(prompts, args.batch))
        made = answer(batch)
        assert made == len(batch) * OUTPUT_TOKENS, f"{made} tokens for {len(batch)} requests"
        requests += len(batch)
        tokens += made
    done = {"tokens": tokens, "requests": requests, "started_s": started, "ended_s": time.monotonic()}
    print(f"done {json.dumps(done)}", flush=True)


if __name__ == "__main__":
    main()
