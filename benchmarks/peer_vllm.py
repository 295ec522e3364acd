"""vLLM's offline API on the work of offline.py, on the same machine: writes results/peer_vllm/GPU.json.

Run with vLLM on the path, FOLDER holding a config.json. Random weights, BF16, prefix cache off, CUDA graphs captured up
to the batch. The environment variable below selects experts at random; the result names the routing.

    python benchmarks/peer_vllm.py --model FOLDER
    VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random python benchmarks/peer_vllm.py --model FOLDER --seqs 64 \\
        --works "1,8,64@1024:1024/256" --subject Qwen/Qwen3.5-35B-A3B
    (the same) --speculative-config '{"method": "mtp", "num_speculative_tokens": 3, \\
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.33}'
"""

from __future__ import annotations

import json
import os
from importlib import metadata

from offline_work import process_age_s
from peer_run import GRAPH_SIZES, measure_peer, peer_parser


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--speculative-config", type=json.loads, metavar="JSON")
    args = parser.parse_args()
    try:
        import torch
        from vllm import LLM, SamplingParams
    except ModuleNotFoundError as error:
        raise SystemExit(f"needs vLLM on the path: {error}") from None
    if torch.cuda.device_count() < args.tp:
        raise SystemExit(f"needs NVIDIA GPUs: {args.tp}, torch sees {torch.cuda.device_count()}")
    speculation = args.speculative_config
    window = 1 + speculation["num_speculative_tokens"] if speculation else 1
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
        compilation_config={"cudagraph_capture_sizes": [window * size for size in GRAPH_SIZES if size <= args.seqs]},
        speculative_config=speculation,
        additional_config={"gdn_prefill_backend": "triton"},  # of Gated DeltaNet; the default needs FlashInfer
    )

    def generate(prompts: list[list[int]], out: int) -> int:
        sampling = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    generate([[args.vocab - 1] * 8], 1)
    run = {
        "versions": {"vllm": metadata.version("vllm"), "torch": metadata.version("torch")},
        "process_start_to_first_token_s": process_age_s(),
        "routing": os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY"),
        "speculative_config": speculation,
    }
    measure_peer("peer_vllm", args, generate, run)


if __name__ == "__main__":
    main()
