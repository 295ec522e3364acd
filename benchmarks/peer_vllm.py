"""vLLM's offline API on the work of offline.py, for the same machine and hour: writes results/offline_vllm.json.

Run with vLLM on the path, FOLDER holding a config.json. Random weights, BF16, prefix cache off, CUDA graphs captured up
to the batch.

    python benchmarks/peer_vllm.py --model FOLDER
"""

from __future__ import annotations

import argparse
import json
from importlib import metadata
from pathlib import Path

from offline_work import LONG, SHORT, measure, parse_works, process_age_s


def main() -> None:
    from vllm import LLM, SamplingParams

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="folder with a config.json")
    parser.add_argument("--works", default=f"{SHORT} {LONG}")
    parser.add_argument("--seqs", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=16384, help="tokens a step")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, 2049, 64)]
    llm = LLM(
        model=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=args.seqs,
        max_num_batched_tokens=args.budget,
        gpu_memory_utilization=0.9,
        enable_prefix_caching=False,
        disable_log_stats=True,
        compilation_config={"cudagraph_capture_sizes": [size for size in sizes if size <= args.seqs]},
    )

    def generate(prompts: list[list[int]], out: int) -> int:
        sampling = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    generate([[1000] * 8], 1)
    result = {
        "versions": {"vllm": metadata.version("vllm"), "torch": metadata.version("torch")},
        "process_start_to_first_token_s": process_age_s(),
        "rows": [],
    }
    path = Path(__file__).parent / "results" / "offline_vllm.json"
    for measured in measure(parse_works(args.works), generate, args.reps, args.seed):
        print(
            f"{measured.work}: {measured.median:,.0f} tok/s of {[round(rate) for rate in measured.rates]}", flush=True
        )
        result["rows"].append({"work": str(measured.work), "rates": measured.rates})
        path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
