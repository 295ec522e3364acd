"""vLLM's offline API on the work of offline.py, on the same machine: writes results/peer_vllm/h200.json.

Run with vLLM on the path, FOLDER holding a config.json. Random weights, BF16, prefix cache off, CUDA graphs captured up
to the batch. The environment variable below selects experts at random; the result names the routing.

    python benchmarks/peer_vllm.py --model FOLDER
    VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random python benchmarks/peer_vllm.py --model FOLDER --seqs 64 \\
        --works "1,8,64@1024:1024/256" --subject Qwen/Qwen3.5-35B-A3B
"""

from __future__ import annotations

import argparse
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

from offline_work import LONG, SHORT, VOCAB, measure, parse_works, process_age_s

RESULTS = Path(__file__).parent / "results"  # bench_output.py needs Meltcore, which vLLM's environment may lack


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="Folder with a config.json.")
    parser.add_argument("--works", default=f"{SHORT} {LONG}")
    parser.add_argument("--seqs", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=16384, help="Tokens per step.")
    parser.add_argument("--tp", type=int, default=1, help="Tensor-parallel size.")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=VOCAB, help="Prompts have token ids below it.")
    parser.add_argument("--out", type=Path, default=RESULTS / "peer_vllm" / "h200.json", help="Result file.")
    parser.add_argument("--subject", help="Subject of the run in the result file (default: --model).")
    args = parser.parse_args()
    try:
        import torch
        from vllm import LLM, SamplingParams
    except ModuleNotFoundError as error:
        raise SystemExit(f"needs vLLM on the path: {error}") from None
    if torch.cuda.device_count() < args.tp:
        raise SystemExit(f"needs NVIDIA GPUs: {args.tp}, torch sees {torch.cuda.device_count()}")
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, 2049, 64)]
    llm = LLM(
        model=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=args.tp,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=args.seqs,
        max_num_batched_tokens=args.budget,
        gpu_memory_utilization=0.9,
        enable_prefix_caching=False,
        disable_log_stats=True,
        compilation_config={"cudagraph_capture_sizes": [size for size in sizes if size <= args.seqs]},
        additional_config={"gdn_prefill_backend": "triton"},  # of Gated DeltaNet; the default needs FlashInfer
    )

    def generate(prompts: list[list[int]], out: int) -> int:
        sampling = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    generate([[args.vocab - 1] * 8], 1)
    result: dict[str, Any] = {
        "subject": args.subject or args.model,
        "versions": {"vllm": metadata.version("vllm"), "torch": metadata.version("torch")},
        "process_start_to_first_token_s": process_age_s(),
        "tp": args.tp,
        "routing": os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY"),
        "rows": [],
    }
    earlier = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    runs = [*(run for run in earlier if run["subject"] != result["subject"]), result]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for measured in measure(parse_works(args.works), generate, args.reps, args.seed, args.vocab):
        print(
            f"{measured.work}: {measured.median:,.0f} tok/s of {[round(rate) for rate in measured.rates]}", flush=True
        )
        result["rows"].append({"work": str(measured.work), "rates": measured.rates})
        args.out.write_text(json.dumps({"runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
