"""Launches of kernels/{gemm,quant,moe,comm} on meta tensors, as the engine makes them for a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from kernel_tools import CompileCase, ModelShape

from meltcore.kernels.capability import capability
from meltcore.kernels.comm import all_reduce, staged_all_reduce
from meltcore.kernels.comm.symmetric_memory import SymmetricMemory
from meltcore.kernels.fp8 import (
    block_fp8,
    block_fp8_experts,
    block_fp8_gemm,
    fp8,
    fp8_gemv,
    fp8_split_k,
)
from meltcore.kernels.gemm import gemv, split_k, tma
from meltcore.kernels.moe import align, combine, expert_gemv, grouped_gemm, grouped_gemm_tma, router, routing
from meltcore.kernels.norm import Norm
from meltcore.kernels.quant import ggml, ggml_decode, ggml_experts, ggml_gemm
from meltcore.kernels.quant.ggml_types import HELD_TYPES, GgmlType
from meltcore.kernels.quant.int4 import Int4Type

Cases = list[CompileCase]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def fp8_tensor(rows: int, size: int) -> fp8.Fp8Tensor:
    return fp8.Fp8Tensor(meta(rows, size, dtype=fp8.FP8), meta(rows))


def narrow(dtype: torch.dtype) -> torch.dtype:
    """GEMM kernels take 16-bit types; float32 goes to torch."""
    return dtype if dtype.itemsize == 2 else torch.float16


class Matmul(NamedTuple):
    """A linear layer of a block: rows and columns of its weight, and what is fused with it."""

    rows: int
    columns: int
    normed: bool = False
    gated: bool = False
    added: bool = False


def matmuls(model: ModelShape) -> list[Matmul]:
    attention_size, hidden_size = model.heads * model.head_dim, model.hidden_size
    return [
        Matmul(attention_size + 2 * model.kv_heads * model.head_dim, hidden_size, normed=True),
        Matmul(hidden_size, attention_size, added=True),
        Matmul(2 * model.intermediate_size, hidden_size, normed=True, gated=True),
        Matmul(hidden_size, model.intermediate_size, added=True),
    ]


def residual_of(matmul: Matmul, tokens: int, dtype: torch.dtype) -> torch.Tensor | None:
    return meta(tokens, matmul.rows, dtype=dtype) if matmul.added else None


def norm_of(matmul: Matmul, dtype: torch.dtype) -> Norm | None:
    return Norm(meta(matmul.columns, dtype=dtype), 1e-6) if matmul.normed else None


def gemv_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    kind = narrow(dtype)
    cases = []
    for each in [*matmuls(model), Matmul(151936, model.hidden_size)]:
        hidden, weight = meta(1, each.columns, dtype=kind), meta(each.rows, each.columns, dtype=kind)
        options = {"gated": each.gated, "residual": residual_of(each, 1, kind)}
        if gemv.supports(hidden, weight):
            cases.append(partial(gemv.gemv, hidden, weight, norm_of(each, kind), **options))
    return cases


def split_k_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    kind = narrow(dtype)
    return [
        partial(
            split_k.split_k_gemm,
            meta(tokens, each.columns, dtype=kind),
            meta(each.rows, each.columns, dtype=kind),
            gated=each.gated,
            residual=residual_of(each, tokens, kind),
        )
        for tokens in (2, 17, 64, 128)
        for each in matmuls(model)
    ]


def tma_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    """Every tile: of gate and up in a 16-bit type, and of what FP8 has."""
    _, added, gated, _ = matmuls(model)
    cases: Cases = []
    for each, kind, counts in (
        (gated, narrow(dtype), (1024, 2048)),
        *((each, fp8.FP8, (256, 1100, 4096)) for each in (added, gated)),
    ):
        for tokens in counts:
            cases.append(
                partial(
                    tma.tma_gemm,
                    meta(tokens, each.columns, dtype=kind),
                    meta(each.rows, each.columns, dtype=kind),
                    narrow(dtype),
                    scales=(meta(tokens), meta(each.rows)) if kind == fp8.FP8 else None,
                    gated=each.gated,
                    residual=residual_of(each, tokens, narrow(dtype)),
                )
            )
    return cases


def fp8_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    hidden, gated = meta(64, model.hidden_size, dtype=dtype), meta(64, model.intermediate_size, dtype=dtype)
    norm = Norm(meta(model.hidden_size, dtype=dtype), 1e-6)
    return [partial(fp8.quantize, hidden, norm), partial(fp8.quantize, gated)]


def fp8_gemv_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    kind, most = narrow(dtype), fp8_gemv.MAX_TOKENS
    cases: Cases = []
    for each in matmuls(model):
        weight = fp8_tensor(each.rows, each.columns)
        one = {"gated": each.gated, "residual": residual_of(each, 1, kind)}
        cases.append(partial(fp8_gemv.fp8_gemv, meta(1, each.columns, dtype=kind), weight, norm_of(each, kind), **one))
        few = {"gated": each.gated, "residual": residual_of(each, most, kind)}
        cases.append(partial(fp8_gemv.fp8_skinny_gemm, fp8_tensor(most, each.columns), weight, kind, **few))
    return cases


def fp8_split_k_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    kind = narrow(dtype)
    return [
        partial(
            fp8_split_k.fp8_split_k_gemm,
            fp8_tensor(tokens, each.columns),
            fp8_tensor(each.rows, each.columns),
            kind,
            gated=each.gated,
            residual=residual_of(each, tokens, kind),
        )
        for tokens in (24, 64, 128, 2048)
        for each in matmuls(model)
    ]


def block_fp8_tensor(*shape: int, row_group: int = block_fp8.BLOCK, per_channel: bool = False) -> Any:
    *leading, rows, columns = shape
    scales = (rows, 1) if per_channel else (rows // math.gcd(rows, row_group), block_fp8.num_blocks(columns))
    return block_fp8.BlockFp8Tensor(meta(*shape, dtype=fp8.FP8), meta(*leading, *scales))


def block_fp8_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    hidden, gated = meta(64, model.hidden_size, dtype=dtype), meta(64, model.intermediate_size, dtype=dtype)
    norm = Norm(meta(model.hidden_size, dtype=dtype), 1e-6)
    return [partial(block_fp8.quantize_blocks, hidden, norm), partial(block_fp8.quantize_blocks, gated)]


def block_fp8_gemm_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    kind = narrow(dtype)
    merged, added, gated, _ = matmuls(model)
    cases: Cases = []
    sizes = (merged, 4, 32), (gated, 16, 128), (added, 64, 128), (added, 128, 128), (gated, 2048, 128)
    for each, tokens, row_group in sizes:
        cases.append(
            partial(
                block_fp8_gemm.block_fp8_gemm,
                block_fp8_tensor(tokens, each.columns, row_group=1),
                block_fp8_tensor(each.rows, each.columns, row_group=row_group),
                meta(tokens, each.rows // (2 if each.gated else 1), dtype=kind),
                gated=each.gated,
                has_residual=each.added,
            )
        )
    return cases


def block_fp8_experts_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of = Experts(model, narrow(dtype))
    return [
        partial(
            block_fp8_experts.block_fp8_expert_outputs,
            of.hidden(tokens),
            routing.Routing(of.topk_ids(tokens), meta(tokens, of.top_k)),
            block_fp8_tensor(*of.gate_up.shape, per_channel=per_channel),
            block_fp8_tensor(*of.down.shape, per_channel=per_channel),
        )
        for tokens, per_channel in ((2, False), (12, True), *((m * of.count // of.top_k, False) for m in (16, 20)))
    ]


def ggml_weight(ggml_type: ggml.BlockType, *shape: int) -> ggml.GgmlTensor:
    return ggml.empty(ggml_type, shape, torch.device("meta"))


def ggml_decode_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    token_ids, cases = meta(7, dtype=torch.int64), []
    for ggml_type in (*HELD_TYPES, Int4Type(128), Int4Type(32, torch.bfloat16)):
        weight = ggml_weight(ggml_type, 4096, model.hidden_size)
        if isinstance(ggml_type, GgmlType):  # embeddings of 4-bit checkpoints are not quantized
            cases.append(partial(ggml_decode.ggml_embedding, weight, token_ids, dtype, 4096))
        cases.append(partial(ggml_decode.dequantize, weight, meta(4096, model.hidden_size, dtype=dtype)))
    return cases


def ggml_gemm_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    """Fewer tokens than these run the skinny GEMM, which NVRTC compiles (test_ggml_skinny_gemm.py)."""
    kind = narrow(dtype)
    _, added, gated, _ = matmuls(model)
    return [
        partial(
            ggml_gemm.ggml_gemm,
            meta(tokens, each.columns, dtype=kind),
            ggml_weight(ggml_type, each.rows, each.columns),
            gated=each.gated,
            residual=residual_of(each, tokens, kind),
        )
        for ggml_type, each, tokens in (
            (GgmlType.Q8_0, added, 40),
            *((ggml_type, gated, 64) for ggml_type in (*HELD_TYPES, Int4Type(128))),
        )
    ]


def ggml_experts_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of = Experts(model, narrow(dtype))
    return [
        partial(
            ggml_experts.ggml_expert_outputs,
            of.hidden(tokens),
            routing.Routing(of.topk_ids(tokens), meta(tokens, of.top_k)),
            [ggml_weight(gate_up, *of.gate_up.shape)],
            ggml_weight(down, *of.down.shape),
        )
        for tokens, gate_up, down in (
            (2, GgmlType.Q8_0, GgmlType.Q4_0),
            (12, GgmlType.Q4_K, GgmlType.Q8_0),
            (16 * of.count // of.top_k, GgmlType.Q4_0, GgmlType.Q6_K),
            (2, Int4Type(128), Int4Type(128)),
            (ggml_experts.MIN_DEQUANTIZED_PAIRS * of.count // of.top_k, GgmlType.Q8_0, GgmlType.Q8_0),
        )
    ]


class Experts:
    """The expert weights of a model, and routings of some tokens."""

    def __init__(self, model: ModelShape, dtype: torch.dtype) -> None:
        self.dtype, self.size, self.width = dtype, model.hidden_size, model.expert_width
        self.count, self.top_k = model.experts + model.shared_expert, model.choices + model.shared_expert
        self.gate_up = meta(self.count, 2 * self.width, self.size, dtype=dtype)
        self.down = meta(self.count, self.size, self.width, dtype=dtype)

    def hidden(self, tokens: int) -> torch.Tensor:
        return meta(tokens, self.size, dtype=self.dtype)

    def topk_ids(self, tokens: int) -> torch.Tensor:
        return meta(tokens, self.top_k, dtype=torch.int32)


def expert_gemv_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of, hidden = Experts(model, narrow(dtype)), meta(1, model.hidden_size, dtype=narrow(dtype))
    selected = routing.Routing(of.topk_ids(1), meta(1, of.top_k))
    if not expert_gemv.supports(hidden, selected, of.gate_up, of.down):
        return []
    launch = expert_gemv.expert_gemv
    return [partial(launch, residual, hidden, selected, of.gate_up, of.down) for residual in (hidden, None)]


def align_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of, most = Experts(model, dtype), align._MAX_PAIRS_ONE_LAUNCH
    return [
        partial(align.moe_align_block_size, of.topk_ids(tokens), block_m, of.count)
        for tokens, block_m in ((64, 16), (most // of.top_k, 32), (most, 128))
    ]


def grouped_gemm_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of = Experts(model, dtype)

    def launch(tokens: int) -> None:
        topk_ids, pairs = of.topk_ids(tokens), tokens * of.top_k
        activated, output = meta(pairs, of.width, dtype=dtype), meta(pairs, of.size, dtype=dtype)
        up, down = grouped_gemm.select_configs(pairs, of.gate_up, of.down)
        dispatch = grouped_gemm.Dispatch.of(topk_ids, of.down, up.block_m)
        grouped_gemm.grouped_gemm(of.hidden(tokens), of.gate_up, activated, dispatch, config=up, gated=True)
        grouped_gemm.grouped_gemm(activated, of.down, output, dispatch, config=down, gated=False)

    tokens = [1, *(each * of.count // of.top_k for each in ((1, 32, 64) if dtype.itemsize == 2 else (1,)))]
    if capability(of.gate_up.device) == grouped_gemm._TUNED_CAPABILITY:
        for weight in (of.gate_up, of.down):
            by_config = {config: most for most, config in grouped_gemm._tuned_configs(tuple(weight.shape))}
            tokens += [most // of.top_k for most in by_config.values()]
    return [partial(launch, each) for each in tokens]


def grouped_gemm_tma_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of = Experts(model, dtype)
    tokens = triton.cdiv(max(grouped_gemm_tma._MIN_PAIRS.values()) * of.count, of.top_k)
    given = of.hidden(tokens), of.topk_ids(tokens), of.gate_up, of.down
    return [partial(grouped_gemm_tma.expert_outputs_tma, *given)] if grouped_gemm_tma.supports(*given) else []


def combine_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of = Experts(model, dtype)
    residual, outputs, weights = of.hidden(64), of.hidden(64 * of.top_k), meta(64, of.top_k)
    many = combine._EARLY_TOKENS + 1
    norms = [Norm(residual[0], 1e-6), Norm(meta(of.size), 1e-6)]
    return [
        partial(combine.combine, outputs, weights),
        partial(combine.combine, outputs, weights, residual),
        *(partial(combine.combine_add_rms_norm, residual, outputs, weights, norm) for norm in norms),
        partial(
            combine.combine_add_rms_norm, of.hidden(many), of.hidden(many * of.top_k), meta(many, of.top_k), norms[0]
        ),
    ]


def router_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    kind, size = narrow(dtype), model.hidden_size
    weight = meta(model.experts + model.shared_expert, size, dtype=kind)
    norm = Norm(meta(size), 1e-6)
    return [
        partial(router._launch_router, meta(tokens, size, dtype=kind), each, weight)
        for tokens, each in ((2, norm), (2, None), (17, None))
    ]


def routing_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    shared, columns = model.shared_expert, model.experts + model.shared_expert
    launch = partial(routing.select_experts, top_k=model.choices, norm_topk_prob=True, shared_expert=shared)
    return [
        partial(launch, meta(64, columns, dtype=dtype)),
        partial(launch, meta(4, 64, columns), uniform_seed=1, dtype=dtype),
    ]


def symmetric_memory() -> SymmetricMemory:
    """Of rank 3 of eight."""
    pointers, steps = (meta(9, dtype=kind) for kind in (torch.int64, torch.int32))
    return SymmetricMemory(pointers, steps, pointers, 3, steps)


def all_reduce_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    size, memory = model.hidden_size, symmetric_memory()
    partial_sum = meta(8, size, dtype=dtype)
    wide = Norm(meta(size), 1e-6)
    many = meta(all_reduce._MAX_PROGRAMS_WITHOUT_BACKOFF + 1, size, dtype=dtype)
    weights = meta(8, model.choices + model.shared_expert)
    outputs = meta(weights.numel(), size, dtype=dtype)
    fused, combined = all_reduce.all_reduce_rms_norm, all_reduce.combine_all_reduce_rms_norm
    return [
        *([partial(fused, many, memory, wide)] if all_reduce.can_fuse_norm(many, memory.ranks) else []),
        *([partial(combined, outputs, memory, weights, wide, partial_sum)] if model.experts else []),
        partial(all_reduce.all_reduce, partial_sum, memory, partial_sum),
        partial(all_reduce.all_reduce, partial_sum, memory),
        partial(fused, partial_sum, memory, Norm(partial_sum[0], 1e-6), partial_sum),
        partial(fused, partial_sum, memory, wide),
        partial(all_reduce.all_reduce_max, meta(64, dtype=torch.int64), memory),
    ]


def staged_all_reduce_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    residual, memory = meta(600, model.hidden_size, dtype=dtype), symmetric_memory()
    weights = meta(600, model.choices + model.shared_expert)
    outputs = meta(weights.numel(), model.hidden_size, dtype=dtype)
    norm = Norm(residual[0], 1e-6)
    sums, experts = staged_all_reduce.staged_all_reduce_rms_norm, staged_all_reduce.staged_combine_all_reduce_rms_norm
    return [
        partial(sums, residual, memory, norm, residual),
        partial(sums, residual, memory, Norm(meta(model.hidden_size), 1e-6)),
        *([partial(experts, outputs, memory, weights, norm, residual)] if model.experts else []),
    ]


def if_experts(cases: Callable[[ModelShape, torch.dtype], Cases]) -> Callable[[ModelShape, torch.dtype], Cases]:
    return lambda model, dtype: cases(model, dtype) if model.experts else []


CASES = {
    gemv: gemv_cases,
    split_k: split_k_cases,
    tma: tma_cases,
    fp8: fp8_cases,
    fp8_gemv: fp8_gemv_cases,
    fp8_split_k: fp8_split_k_cases,
    block_fp8: block_fp8_cases,
    block_fp8_gemm: block_fp8_gemm_cases,
    block_fp8_experts: if_experts(block_fp8_experts_cases),
    ggml_decode: ggml_decode_cases,
    ggml_gemm: ggml_gemm_cases,
    ggml_experts: if_experts(ggml_experts_cases),
    expert_gemv: if_experts(expert_gemv_cases),
    align: if_experts(align_cases),
    grouped_gemm: if_experts(grouped_gemm_cases),
    grouped_gemm_tma: if_experts(grouped_gemm_tma_cases),
    combine: if_experts(combine_cases),
    router: if_experts(router_cases),
    routing: if_experts(routing_cases),
    all_reduce: all_reduce_cases,
    staged_all_reduce: staged_all_reduce_cases,
}
BY_NAME = {module.__name__: cases for module, cases in CASES.items()}
