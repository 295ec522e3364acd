"""Launches of kernels/{attention,gated_delta,sampling} and of the elementwise kernels, on meta tensors, as the engine
makes them for a model."""

from __future__ import annotations

from functools import partial

import torch
from kernel_tools import CompileCase, ModelShape

from meltcore.kernels import activation, embedding, grouped_convolution, layer_norm, norm, rotary, step_io
from meltcore.kernels.attention import beam, decode, kv_cache, packed, prefill, stream_k, windows
from meltcore.kernels.attention.metadata import AttentionMetadata, AttentionParams, HeadNorms
from meltcore.kernels.capability import capability, shared_memory_bytes, sm_count
from meltcore.kernels.fp8.fp8 import FP8, FP8_CAPABILITY
from meltcore.kernels.gated_delta import convolution, intra_chunk, state_scan, window
from meltcore.kernels.gated_delta import decode as gated_delta_decode
from meltcore.kernels.gated_delta.common import CHUNK, GatedDeltaParams, GatedDeltaShape, chunk_rows
from meltcore.kernels.sampling import argmax, beam_top_k, drafts, draw, penalties, resample, token_mask, top_k_top_p

Cases = list[CompileCase]
VOCAB = 151936
MAX_PAGES = 640


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def indices(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int64)


class Attention:
    """An attention layer of a model, and a step of 64 tokens."""

    def __init__(self, model: ModelShape, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.qkv = meta(64, (model.heads + 2 * model.kv_heads) * model.head_dim, dtype=dtype)
        self.page_table, self.index = indices(64, MAX_PAGES), indices(64, MAX_PAGES)[:, 0]
        # Types of the cache that this device has.
        self.cache_types = [dtype, FP8] if capability(self.qkv.device) >= FP8_CAPABILITY else [dtype]

    def params(self, cache: torch.dtype | None = None, *, normed: bool = True) -> AttentionParams:
        model = self.model
        pages = meta(128, model.page_size, model.kv_heads, model.head_dim, dtype=cache or self.dtype)
        norms = HeadNorms(self.qkv[0], self.qkv[0], 1e-6) if normed else None
        return AttentionParams(norms, meta(4096, model.head_dim), pages, pages, 1.0, model.sliding_window)

    def variants(self) -> list[AttentionParams]:
        """With and without norms, and with each type of cache."""
        return [self.params(normed=False), *map(self.params, self.cache_types)]


def store_kv_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of, slots = Attention(model, dtype), indices(64)
    return [partial(kv_cache.store_kv, of.qkv, params, slots, slots) for params in of.variants()]


def decode_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of = Attention(model, dtype)

    def case(params: AttentionParams, splits: int, sequences: int) -> CompileCase:
        sizes = model.kv_heads, model.head_dim, params.key_cache.element_size(), MAX_PAGES
        limits = sm_count(of.qkv.device), shared_memory_bytes(of.qkv.device)
        launch = decode.decode_launch(sequences, *sizes, *limits)._replace(splits=splits)
        given = of.qkv, params, of.index, of.page_table, of.index
        return partial(decode.decode_attention, *given, launch=launch)

    cases = [case(of.params(normed=False), 16, 1)]
    for params in map(of.params, of.cache_types):
        cases += [case(params, splits, 1000) for splits in (1, 2)] + [case(params, 16, few) for few in (1, 12)]
    return cases


def stream_k_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of = Attention(model, dtype)
    sizes = 64, model.heads, model.kv_heads, model.head_dim
    launch = stream_k.stream_k_for(*sizes, of.qkv.device) or stream_k.StreamK(1, 1)
    return [
        partial(decode.decode_attention, of.qkv, params, of.index, of.page_table, of.index, launch=launch)
        for params in of.variants()
    ]


def prefill_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of = Attention(model, dtype)
    given = [(params, 4) for params in of.variants()] + [(of.params(), 512)]
    return [
        partial(prefill.prefill_attention, of.qkv, params, of.page_table, meta(tiles, 4, dtype=torch.int32))
        for params, tiles in given
    ]


def window_attention_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    """Few and many windows of 4 tokens, and of as many tokens as a tile has rows for."""
    of = Attention(model, dtype)
    group = model.heads // model.kv_heads
    return [
        partial(
            *(windows.window_attention, of.qkv, params, of.page_table, meta(tiles, 4, dtype=torch.int32)),
            *(queries, params.empty_output(of.qkv)),
        )
        for params in of.variants()
        for tiles, queries in ((4, 4), (512, 4), (4, min(8, 64 // group)))
    ]


def beam_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    """Five beams of 64 sentences, with as many positions of the source as of the target."""
    cache = meta(2, 65, model.heads, 40, 5, model.head_dim, dtype=dtype)
    query, slots = meta(64, 5, 3, model.heads, model.head_dim, dtype=dtype), indices(64)
    writers = meta(65, 5, 40, dtype=torch.int8)
    return [
        partial(beam.beam_self_attention, query, cache, writers, slots, slots, 40),
        partial(
            beam.beam_cross_attention, query[:, :, 0].contiguous(), cache[..., 0, :].contiguous(), slots, slots, 40
        ),
    ]


def packed_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    """A text encoder's batch of 64 tokens. Attention has 16 bits, and heads of at most MAX_HEAD_DIM values."""
    hidden = meta(64, model.heads * model.head_dim, dtype=dtype)
    qkv = meta(64, 3 * hidden.shape[1], dtype=dtype if dtype.itemsize == 2 else torch.float16)
    heads = model.heads * -(-model.head_dim // packed.MAX_HEAD_DIM)
    return [
        partial(packed.packed_attention, qkv, meta(12, 3, dtype=torch.int32), heads),
        *[partial(packed.mean_of_rows, hidden, meta(2, 8, dtype=index)) for index in (torch.int32, torch.int64)],
    ]


def norm_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    hidden, heads = meta(64, model.hidden_size, dtype=dtype), meta(64, model.heads, model.head_dim, dtype=dtype)
    return [
        partial(norm.rms_norm, hidden, hidden[0], 1e-6),
        partial(norm.add_rms_norm, hidden, hidden, hidden[0], 1e-6),
        partial(norm.rms_norm, heads, heads[0, 0], 1e-6),
        partial(norm.norm_add_rms_norm, hidden, hidden, *[norm.Norm(hidden[0].float(), 1e-6)] * 2),
    ]


def layer_norm_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    hidden = meta(64, 5, model.hidden_size, dtype=dtype)
    vectors = (meta(64, 6, model.hidden_size, dtype=dtype)[:, 0],) * 3
    return [
        partial(layer_norm.add_layer_norm, hidden, hidden, hidden[0, 0], hidden[0, 0], 1e-5),
        partial(layer_norm.add_layer_norm, hidden, hidden, hidden[0, 0], hidden[0, 0], 1e-5, keeps_sum=False),
        *[
            partial(layer_norm.embed_layer_norm, [hidden[0]] * 3, index, hidden[0, 0], hidden[0, 0], 1e-5)
            for index in (indices(3, 64), meta(3, 2048, dtype=torch.int32))
        ],
        partial(layer_norm.modulated_layer_norm, hidden, *vectors[:2], 1e-6),
        partial(layer_norm.add_modulated_layer_norm, hidden, hidden, *vectors, 1e-6),
    ]


def grouped_convolution_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    """Of synthesis: 16 groups, with padding and without."""
    size = 1024 if model.hidden_size >= 1024 else 48
    hidden, weight = meta(2, 1400, size, dtype=dtype), meta(31, size // 16, size, dtype=dtype).permute(2, 1, 0)
    given = hidden, weight, hidden[0, 0]
    return [partial(grouped_convolution.grouped_convolution, *given, lengths) for lengths in (None, indices(2))]


def rotary_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    heads = meta(2, 1400, 3, model.heads, model.head_dim, dtype=dtype)
    return [partial(rotary.rotate_pairs, heads[:, :, :2, 0], meta(2, 4096, model.head_dim // 2)[:, :1400])]


def activation_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    size, kv_size = model.heads * model.head_dim, model.kv_heads * model.head_dim
    projected = meta(64, 2 * size + 2 * kv_size, dtype=dtype)
    return [
        partial(activation.gelu, meta(64, model.intermediate_size, dtype=dtype)),
        partial(activation.swiglu, meta(64, 2 * model.intermediate_size, dtype=dtype)),
        partial(activation.geglu, meta(64, 2 * model.intermediate_size, dtype=dtype)),
        partial(activation.apply_sigmoid_gate, meta(64, size, dtype=dtype), projected[:, :size]),
    ]


def embedding_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    return [partial(embedding.sharded_embedding, meta(1000, model.hidden_size, dtype=dtype), indices(64), 1000)]


def step_io_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    some = indices(64)
    return [
        partial(step_io.apply_updates, indices(128 + 3 * 5), indices(128), indices(1025, 64), 5),
        partial(step_io.finish_step, some, some, some, indices(1025), indices(1), indices(4, 1024)),
    ]


class GatedDelta:
    """A Gated DeltaNet layer of a model, and a step with the given numbers of tokens and sequences."""

    def __init__(
        self, shape: GatedDeltaShape, dtype: torch.dtype, tokens: int, sequences: int = 4, drafts: int = 0
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.projected = meta(tokens, shape.width, dtype=dtype)
        self.out = meta(tokens, shape.heads * shape.value_dim, dtype=dtype)
        self.params = GatedDeltaParams(
            conv=meta(shape.conv_channels, shape.kernel, dtype=dtype),
            a_log=meta(shape.heads),
            dt_bias=meta(shape.heads),
            norm=meta(shape.value_dim, dtype=dtype),
            eps=1e-6,
            key_heads=shape.key_heads,
            conv_states=meta(
                *(9, shape.kernel + 2 * drafts, shape.conv_channels + 2 * shape.heads * (drafts > 0)), dtype=dtype
            ),
            recurrent_states=meta(9, shape.heads, shape.key_dim, shape.value_dim),
        )
        index = indices(sequences)
        self.metadata = AttentionMetadata(
            *(index, index, index, index, 0, index, index, []),
            state_slots=index,
            query_start_loc=index,
            chunk_indices=meta(8, 2, dtype=torch.int32),
        )
        self.rows = chunk_rows(tokens, sequences)
        self.convolved = meta(self.rows, shape.conv_channels * CHUNK, dtype=dtype)


def gated_delta_decode_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of, index = GatedDelta(GatedDeltaShape(*model.delta), dtype, 64), indices(64)
    given = of.projected, of.params, index, index, of.shape, of.out
    return [partial(gated_delta_decode.gated_delta_decode, *given)]


def window_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of = GatedDelta(GatedDeltaShape(*model.delta), dtype, 64, drafts=3)
    metadata = of.metadata._replace(num_windows=4, replay_lens=indices(4))
    replays = partial(window.count_replays, indices(9), indices(5), indices(5), indices(6), 4)
    return [partial(window.gated_delta_windows, of.projected, of.params, metadata, of.shape, of.out), replays]


def convolution_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of = GatedDelta(GatedDeltaShape(*model.delta), dtype, 512)
    return [partial(convolution.convolve_chunks, of.projected, of.params, of.metadata, of.shape)]


def intra_chunk_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    of = GatedDelta(GatedDeltaShape(*model.delta), dtype, 512)
    return [partial(intra_chunk.prepare_chunks, of.projected, of.convolved, of.params, of.metadata, of.shape)]


def state_scan_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    def launch(sequences: int) -> None:
        of = GatedDelta(GatedDeltaShape(*model.delta), dtype, 512, sequences)
        matrices = meta(of.rows, of.shape.heads, CHUNK, CHUNK, dtype=dtype)
        prepared = intra_chunk.PreparedChunks(matrices, matrices, meta(of.rows, of.shape.heads, 2, CHUNK))
        outputs = state_scan.scan_chunks(of.projected, of.convolved, prepared, of.params, of.metadata, of.shape)
        state_scan.norm_chunks(of.projected, outputs, of.params, of.metadata, of.shape, of.out)

    return [partial(launch, sequences) for sequences in (1, 256)]


def argmax_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    return [partial(argmax.argmax, meta(64, VOCAB, dtype=dtype))]


def beam_top_k_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    return [partial(beam_top_k.log_softmax_top_k, meta(64, VOCAB, dtype=dtype), 10, 2, meta(64, dtype=torch.bool))]


def draw_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    logits, best = meta(64, VOCAB, dtype=dtype), indices(64)
    return [
        *(partial(draw.gumbel_sample, logits, meta(64), best, best, thresholds) for thresholds in (None, best)),
        partial(draw._pack, meta(64, 1024, dtype=dtype), 1024, best, best, 1024),
    ]


def top_k_top_p_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    logits, settings = meta(64, VOCAB, dtype=dtype), meta(64)
    return [partial(top_k_top_p.threshold_tokens, logits, settings, indices(64), settings, settings)]


def penalties_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    index, values = indices(64), meta(64)
    counts, in_prompt = meta(64, VOCAB, dtype=torch.int32), meta(64, VOCAB, dtype=torch.bool)
    given = meta(64, VOCAB), index, index, counts, in_prompt, values, values, values
    return [partial(penalties.apply_penalties, *given)]


def token_mask_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    masks = meta(65, VOCAB // token_mask.WORD_BITS, dtype=torch.int32)
    return [
        partial(token_mask.wait_for_masks, *[indices(64)] * 3, indices(65), indices(2, 65), indices(2)),
        partial(token_mask.mask_logits, meta(64, VOCAB), masks, indices(64)),
    ]


def resample_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    some, rings = indices(64), (indices(1), indices(4, 1024))
    settings = resample.RowSettings(indices(2), indices(2), some, some, meta(64))
    tokens = resample.StepTokens(some, some, some, indices(1025), *rings)
    logits = meta(64, VOCAB, dtype=torch.float32)
    return [partial(resample.resample, logits, settings, tokens, indices(65), indices(2, 65))]


def drafts_cases(model: ModelShape, dtype: torch.dtype) -> Cases:
    tables = drafts.DraftTables(
        meta(65, 4097, dtype=torch.int32), indices(65), indices(65, 7), *(indices(65) for _ in range(2))
    )
    step = tables, indices(64), indices(65), indices(512), indices(64)
    synthetic = drafts.SyntheticAcceptance(meta(7), 2**40)
    return [
        partial(drafts.accept_and_propose, *step, drafts.NgramSizes(4, 2)),
        partial(drafts.accept_and_propose, *step, drafts.NgramSizes(4, 2), synthetic),
        partial(drafts.accept_and_propose, *step, None, synthetic),
        partial(drafts.follow_windows, tables, *map(indices, (1, 512, 512, 512, 66, 66, 2 * 129))),
    ]


CASES = {
    beam: beam_cases,
    kv_cache: store_kv_cases,
    decode: decode_cases,
    stream_k: stream_k_cases,
    packed: packed_cases,
    prefill: prefill_cases,
    windows: window_attention_cases,
    norm: norm_cases,
    layer_norm: layer_norm_cases,
    grouped_convolution: grouped_convolution_cases,
    rotary: rotary_cases,
    activation: activation_cases,
    embedding: embedding_cases,
    step_io: step_io_cases,
    gated_delta_decode: gated_delta_decode_cases,
    window: window_cases,
    convolution: convolution_cases,
    intra_chunk: intra_chunk_cases,
    state_scan: state_scan_cases,
    argmax: argmax_cases,
    beam_top_k: beam_top_k_cases,
    draw: draw_cases,
    top_k_top_p: top_k_top_p_cases,
    penalties: penalties_cases,
    token_mask: token_mask_cases,
    resample: resample_cases,
    drafts: drafts_cases,
}
BY_NAME = {module.__name__: cases for module, cases in CASES.items()}
