"""SGLang's offline API on the work of offline.py, on the same machine: writes results/peer_sglang/GPU.json.

Run with SGLang on the path, FOLDER holding a config.json. Random weights, BF16, radix cache off, CUDA graphs captured
up to the batch, attention by FlashAttention 3.

    python benchmarks/peer_sglang.py --model FOLDER --subject Qwen/Qwen3-0.6B
"""

from __future__ import annotations

from importlib import metadata

from offline_work import process_age_s
from peer_run import GRAPH_SIZES, measure_peer, peer_parser


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--attention", default="fa3", help="Attention backend: fa3 or triton.")
    parser.add_argument("--memory", type=float, default=0.85, help="Fraction for weights and the KV cache.")
    args = parser.parse_args()
    try:
        import sglang
        import torch
    except ModuleNotFoundError as error:
        raise SystemExit(f"needs SGLang on the path: {error}") from None
    if torch.cuda.device_count() < args.tp:
        raise SystemExit(f"needs NVIDIA GPUs: {args.tp}, torch sees {torch.cuda.device_count()}")
    engine = sglang.Engine(
        model_path=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        tp_size=args.tp,
        dtype="bfloat16",
        context_length=4096,
        max_running_requests=args.seqs,
        chunked_prefill_size=args.budget,
        max_prefill_tokens=args.budget,
        mem_fraction_static=args.memory,
        disable_radix_cache=True,
        log_level="error",
        attention_backend=args.attention,
        sampling_backend="pytorch",
        grammar_backend="none",
        random_seed=args.seed,
        cuda_graph_bs_decode=[size for size in GRAPH_SIZES if size <= args.seqs],
        cuda_graph_max_bs_decode=args.seqs,
    )

    def generate(prompts: list[list[int]], out: int) -> int:
        sampling = {"temperature": 0, "max_new_tokens": out, "ignore_eos": True}
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        return sum(answer["meta_info"]["completion_tokens"] for answer in answers)

    generate([[args.vocab - 1] * 8], 1)
    run = {
        "versions": {"sglang": metadata.version("sglang"), "torch": metadata.version("torch")},
        "process_start_to_first_token_s": process_age_s(),
        "routing": None,
        "attention": args.attention,
    }
    measure_peer("peer_sglang", args, generate, run)
    engine.shutdown()


if __name__ == "__main__":
    main()
