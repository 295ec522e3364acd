"""One strategy of strategies.py in its own process: warms up, prints "warm", waits for a line, runs, prints results.

Every strategy answers the same prompts (those of the GPU score) with 128 tokens each, greedy, end tokens ignored, with
random weights of the same configuration. Process p of n answers the prompts p, p + n, p + 2n, ...

Packages are imported by the strategy that needs them. One that cannot run here ends with its reason on standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from typing import Any

from meltcore.measure.score import workload
from meltcore.models.checkpoints.checkpoint import open_checkpoint

OUTPUT_TOKENS = workload.OUTPUT_TOKENS
# Answers this many prompts and returns the number of generated tokens.
Answer = Callable[[list[list[int]]], int]


def random_model(args: argparse.Namespace, dtype: str | None = None, **options: Any) -> Any:
    """A transformers model of the configuration with random weights, which never ends an answer early."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(open_checkpoint(args.model, files="config").folder)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype or args.dtype), **options).eval()
    return never_ends(model)


def never_ends(model: Any) -> Any:
    """The model, set to ignore end tokens."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def left_padded(prompts: list[list[int]], longest: int, device: str) -> tuple[Any, Any]:
    """Token ids and attention mask of a batch, [prompts, longest] each."""
    import torch

    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids.to(device), mask.to(device)


def generate(model: Any, args: argparse.Namespace, longest: int | None = None, **options: Any) -> Answer:
    """`generate` on a left-padded batch, as its documentation shows: a batch starts and ends as a whole.

    longest: pads every batch to this length; None for its own longest prompt.
    """
    import torch

    def answer(prompts: list[list[int]]) -> int:
        length = longest or max(map(len, prompts))
        ids, mask = left_padded(prompts, length, args.device)
        with torch.inference_mode():
            whole = model.generate(ids, attention_mask=mask, max_new_tokens=OUTPUT_TOKENS, do_sample=False, **options)
        return int(whole[:, length:].numel())

    return answer


def transformers_generate(args: argparse.Namespace) -> Answer:
    """`generate` of transformers, eager."""
    return generate(random_model(args), args)


def transformers_compiled(args: argparse.Namespace) -> Answer:
    """`generate` with torch.compile: a static cache and prompts of one length, so that nothing is compiled again.

    On a GPU "reduce-overhead" captures CUDA graphs of the compiled step.
    """
    from transformers import CompileConfig

    is_gpu = args.device.startswith("cuda")
    compiled = CompileConfig(mode="reduce-overhead" if is_gpu else "default")
    compiled._compile_all_devices = True  # transformers compiles on accelerators alone otherwise
    longest = workload.MAX_PROMPT
    return generate(random_model(args), args, longest, cache_implementation="static", compile_config=compiled)


def transformers_int8(args: argparse.Namespace) -> Answer:
    """`generate` with INT8 weights by bitsandbytes, which quantizes while a checkpoint is loaded."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    with tempfile.TemporaryDirectory() as folder:
        random_model(args).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=BitsAndBytesConfig(load_in_8bit=True),
            device_map={"": args.device},
            dtype=getattr(torch, args.dtype),
        )
    return generate(never_ends(model.eval()), args)


def transformers_async(args: argparse.Namespace) -> Answer:
    """Asynchronous tasks of one request each on one model: an event loop over threads, on one CUDA stream."""
    return concurrently(args, own_streams=False)


def transformers_streams(args: argparse.Namespace) -> Answer:
    """The same with a CUDA stream per task, so that kernels of several requests may run concurrently."""
    if not args.device.startswith("cuda"):
        raise SystemExit("needs a GPU: only CUDA has streams")
    return concurrently(args, own_streams=True)


def concurrently(args: argparse.Namespace, *, own_streams: bool) -> Answer:
    import torch

    model = random_model(args)
    threads = ThreadPoolExecutor(args.batch)
    streams = [torch.cuda.Stream() for _ in range(args.batch)] if own_streams else []
    one = generate(model, args)

    def task(number: int, prompt: list[int]) -> int:
        with torch.cuda.stream(streams[number]) if streams else nullcontext():
            made = one([prompt])
            if streams:
                streams[number].synchronize()
        return made

    async def gather(prompts: list[list[int]]) -> int:
        loop = asyncio.get_running_loop()
        tasks = [loop.run_in_executor(threads, task, *numbered) for numbered in enumerate(prompts)]
        return sum(await asyncio.gather(*tasks))

    return lambda prompts: asyncio.run(gather(prompts))


def onnx_runtime(args: argparse.Namespace) -> Answer:
    """ONNX Runtime with our decode loop: one graph for prompts and tokens, keys and values bound where they are.

    In float16 for bfloat16, which numpy's types, and so the bindings, lack.
    """
    import onnxruntime
    import torch

    is_gpu = args.device.startswith("cuda")
    provider = "CUDAExecutionProvider" if is_gpu else "CPUExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise SystemExit(f"this onnxruntime has no {provider}")
    dtype = "float16" if args.dtype == "bfloat16" else args.dtype
    model = random_model(args, dtype, attn_implementation="eager")
    with tempfile.TemporaryDirectory() as folder:
        past, new = export_onnx(model, f"{folder}/model.onnx")
        session = onnxruntime.InferenceSession(f"{folder}/model.onnx", providers=[provider])
    if session.get_providers()[0] != provider:
        raise SystemExit(f"onnxruntime could not use {provider} and fell back to {session.get_providers()[0]}")
    config, element = model.config, getattr(torch, dtype)
    del model
    where = ("cuda" if is_gpu else "cpu", torch.device(args.device).index or 0)
    numpy_type = torch.zeros(0, dtype=element).numpy().dtype

    def step(tensors: dict[str, torch.Tensor], caches: list[Any]) -> tuple[torch.Tensor, list[Any]]:
        binding = session.io_binding()
        for name, tensor in tensors.items():
            kind = "int64" if tensor.dtype == torch.int64 else numpy_type
            binding.bind_input(name, *where, kind, tuple(tensor.shape), tensor.data_ptr())
        for name, cache in zip(past, caches, strict=True):
            binding.bind_ortvalue_input(name, cache)
        binding.bind_output("token", "cpu")
        for name in new:
            binding.bind_output(name, *where)
        session.run_with_iobinding(binding)
        token, *caches = binding.get_outputs()
        return torch.from_numpy(token.numpy()).to(args.device), caches

    def answer(prompts: list[list[int]]) -> int:
        ids, mask = left_padded(prompts, max(map(len, prompts)), args.device)
        shape = [len(prompts), config.num_key_value_heads, 0, config.head_dim]
        empty = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, numpy_type, *where)
        made, caches = 0, [empty] * len(past)
        for _ in range(OUTPUT_TOKENS):
            inputs = {"ids": ids, "mask": causal_mask(mask, ids.shape[1], element)}
            inputs["positions"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :].contiguous()
            if is_gpu:
                torch.cuda.synchronize()  # the session reads these tensors on a stream of its own
            ids, caches = step(inputs, caches)
            made += ids.numel()
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
        return made

    return answer


def causal_mask(mask: Any, queries: int, dtype: Any) -> Any:
    """What is added to the scores of the last `queries` tokens: [batch, 1, queries, keys]. mask: [batch, keys]."""
    import torch

    keys = mask.shape[1]
    visible = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
    visible = visible & mask.bool()[:, None, None, :]
    return torch.zeros(visible.shape, dtype=dtype, device=mask.device).masked_fill(~visible, torch.finfo(dtype).min)


def export_onnx(model: Any, path: str) -> tuple[list[str], list[str]]:
    """Write a graph from token ids and earlier keys and values to the greedy token and all keys and values.

    Returns the names of the caches that go in and come out. The exporter that traces takes seconds and one package.
    """
    import torch
    from transformers import DynamicCache

    config = model.config

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any, positions: Any, *caches: Any) -> Any:
            cache = DynamicCache()
            for layer in range(config.num_hidden_layers):
                cache.update(caches[2 * layer], caches[2 * layer + 1], layer)
            found = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
            )
            tensors = [each for layer in cache.layers for each in (layer.keys, layer.values)]
            return (found.logits[:, -1].argmax(-1, keepdim=True), *tensors)

    batch, before, queries = 2, 3, 2
    names = [f"{kind}{layer}" for layer in range(config.num_hidden_layers) for kind in ("keys", "values")]
    past, new = [f"past_{name}" for name in names], [f"new_{name}" for name in names]
    ids = torch.ones(batch, queries, dtype=torch.int64, device=model.device)
    mask = torch.zeros(batch, 1, queries, before + queries, dtype=model.dtype, device=model.device)
    cache = torch.zeros(
        batch, config.num_key_value_heads, before, config.head_dim, dtype=model.dtype, device=model.device
    )
    axes = {"ids": {0: "batch", 1: "queries"}, "positions": {0: "batch", 1: "queries"}, "token": {0: "batch"}}
    axes["mask"] = {0: "batch", 2: "queries", 3: "keys"}
    axes |= {name: {0: "batch", 2: "before"} for name in past} | {name: {0: "batch", 2: "keys"} for name in new}
    with torch.no_grad():
        torch.onnx.export(
            Step(),
            (ids, mask, ids, *(cache.clone() for _ in names)),
            path,
            input_names=["ids", "mask", "positions", *past],
            output_names=["token", *new],
            dynamic_axes=axes,
            opset_version=17,
            dynamo=False,
        )
    return past, new


def vllm_offline(args: argparse.Namespace) -> Answer:
    """vLLM's offline API with graphs captured up to the batch, so that it, too, is at its best."""
    from vllm import LLM, SamplingParams

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
        compilation_config={"cudagraph_capture_sizes": graph_sizes()},
    )
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)

    def answer(prompts: list[list[int]]) -> int:
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in found)

    return answer


def sglang_offline(args: argparse.Namespace) -> Answer:
    """SGLang's offline engine with graphs captured up to the batch; its prefix cache is off."""
    from dataclasses import fields

    import sglang
    from sglang.srt.server_args import ServerArgs

    options = {field.name for field in fields(ServerArgs)}
    # Renamed between versions when prefill graphs came.
    graphs = "cuda_graph_max_bs_decode" if "cuda_graph_max_bs_decode" in options else "cuda_graph_max_bs"
    engine = sglang.Engine(
        model_path=str(open_checkpoint(args.model, files="config").folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=args.dtype,
        context_length=workload.CONTEXT,
        max_running_requests=1024,
        chunked_prefill_size=16_384,
        max_prefill_tokens=16_384,
        disable_radix_cache=True,
        log_level="error",
        **{graphs: 1024},
    )
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}

    def answer(prompts: list[list[int]]) -> int:
        found = engine.generate(input_ids=prompts, sampling_params=sampling)
        return sum(each["meta_info"]["completion_tokens"] for each in found)

    return answer


def tensorrt_llm_offline(args: argparse.Namespace) -> Answer:
    """TensorRT-LLM's offline API; block reuse, its prefix cache, is off."""
    from tensorrt_llm import LLM, SamplingParams
    from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig

    llm = LLM(
        model=str(open_checkpoint(args.model, files="config").folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_seq_len=workload.CONTEXT,
        max_batch_size=1024,
        max_num_tokens=16_384,
        kv_cache_config=KvCacheConfig(enable_block_reuse=False),
        cuda_graph_config=CudaGraphConfig(batch_sizes=graph_sizes()),
    )
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, end_id=-1, detokenize=False)

    def answer(prompts: list[list[int]]) -> int:
        found = llm.generate(prompts, sampling, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in found)

    return answer


def graph_sizes() -> list[int]:
    """Batch sizes to capture, up to 1,024."""
    return [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, 1025, 64)]


def meltcore_offline(args: argparse.Namespace) -> Answer:
    """Our offline API."""
    from meltcore import LLM, SamplingParams

    llm = LLM(
        args.model,
        load_format="dummy",
        dtype=args.dtype,
        device=args.device,
        max_model_len=workload.CONTEXT,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    def answer(prompts: list[list[int]]) -> int:
        return sum(len(each.token_ids) for each in llm.generate(prompts, sampling))

    return answer


STRATEGIES = {
    "transformers": transformers_generate,
    "compile": transformers_compiled,
    "int8": transformers_int8,
    "async": transformers_async,
    "streams": transformers_streams,
    "onnxruntime": onnx_runtime,
    "tensorrt_llm": tensorrt_llm_offline,
    "sglang": sglang_offline,
    "vllm": vllm_offline,
    "meltcore": meltcore_offline,
}


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
    parser.add_argument("--batch", type=int, required=True, help="Requests per batch.")
    parser.add_argument("--seconds", type=float, required=True, help="Time after which no batch begins.")
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
