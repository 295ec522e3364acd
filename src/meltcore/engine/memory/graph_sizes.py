"""Lists the sizes of steps that are captured as CUDA graphs. It needs no torch, so a memory plan can count graphs."""

from __future__ import annotations

# Prompt tokens of the largest graph: the device computes longer steps more slowly than the host launches them.
MAX_GRAPH_TOKENS = 8192
# Prompt tokens of buckets without and with decodes, and the numbers of decodes; closer together where padding costs
# more. Beyond 8,192 an H200 takes longer to compute a step than the host to launch it, unless ranks share a model.
PREFILL_ONLY = (
    *(64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072),
    *(3584, 4096, 4608, 5120, 5632, 6144, 7168, 8192, 10240, 12288, 16384),
)
MIXED = (128, 256, 512, 768, 1024, 2048, 4096, 6144, 8192, 12288, 16384)
DECODES = (16, 64, 128, 256, 512)
# Buckets of up to this many decodes are captured before serving, since benchmarks often run so few sequences. A bucket
# captured at its first use costs the host two launches of the step: 0.1 s each with routed experts on four ranks.
CAPTURED_DECODES = 64
# Of rows that lie one after another without padding: tokens of the largest batch whose graphs are _PACKED_STEP apart.
# The activations of more tokens leave a GPU's L2 cache. Then tokens of the smallest graph.
MAX_PACKED_TOKENS, _FIRST_PACKED, _PACKED_STEP = 16_384, 64, 1024
# Windows (a token and its drafts) of the largest graph. With seven drafts it has up to 1,024 tokens, whose logits take
# 0.6 GB for a vocabulary of 152,000. Steps of more windows are launched kernel by kernel.
MAX_WINDOWS = 128
# A step with drafts computes the logits of this many tokens, or of one token of each sequence if these are more.
_DRAFT_ROWS = 256
# The tokens of a graph for each of its rows. A shorter row takes this many.
MIN_ROW_TOKENS = 8


def max_prefills(tokens: int) -> int:
    """Return the maximum number of chunks of more than one token in a bucket of this many prompt tokens."""
    return max(4, tokens // 64)


def bucket_shapes(max_num_seqs: int, max_tokens: int) -> list[tuple[int, int]]:
    """Return (decodes, prompt tokens) of buckets up to `max_tokens` and `max_num_seqs`, ascending by their sum."""
    counts = [count for count in DECODES if count < max_num_seqs]
    if max_num_seqs <= DECODES[-1]:
        counts.append(max_num_seqs)
    shapes = [(0, tokens) for tokens in PREFILL_ONLY]
    shapes += [(count, tokens) for count in counts for tokens in MIXED]
    return sorted((shape for shape in shapes if shape[1] <= max_tokens), key=sum)


def sampled_tokens(max_num_seqs: int, window: int) -> int:
    """Return how many tokens of decoding sequences a step samples at most, with up to `window` for each."""
    return max(max_num_seqs, min(max_num_seqs * window, _DRAFT_ROWS))


def decode_samples(decodes: int, max_num_seqs: int, window: int) -> int:
    """Return how many tokens the decoding sequences of a bucket sample at most, with up to `window` for each.

    In a bucket of more than MAX_WINDOWS decodes each samples one.
    """
    return decodes if decodes > MAX_WINDOWS else min(decodes * window, sampled_tokens(max_num_seqs, window))


def window_shapes(max_num_seqs: int, max_tokens: int, window: int) -> list[tuple[int, int]]:
    """Return (windows, tokens) of buckets for steps with drafts, ascending. No step has more than `max_tokens`.

    A window has up to `window` tokens. Numbers of windows are powers of two, as those for which the engine measures
    whether drafts pay. Returns no shape for windows of one token.
    """
    if window == 1:
        return []
    most = min(max_num_seqs, MAX_WINDOWS, max_tokens)
    counts = [*(1 << power for power in range((most - 1).bit_length())), most]
    tokens = {count: min(decode_samples(count, max_num_seqs, window), max_tokens) for count in counts}
    return [(count, tokens[count]) for count in counts if 0 < count <= most]


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, ascending up to `max_num_seqs`. Sizes are closer where padding costs more."""
    sizes = [1, 2, 4, 8, 10, 12, 16, 24, 32, 48, *range(64, 128, 8), *range(128, 256, 16), *range(256, 512, 32)]
    sizes += [*range(512, 1024, 64), *range(1024, max_num_seqs, 256)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def packed_sizes(batch_tokens: int) -> list[int]:
    """Return the numbers of tokens to which batches of at most `batch_tokens` are padded, in increasing order.

    All of them are multiples of the smallest, for aligned tables. The last may be a little larger than a batch.
    """
    most = -(-batch_tokens // _FIRST_PACKED) * _FIRST_PACKED
    doubled = [_FIRST_PACKED << power for power in range((_PACKED_STEP // _FIRST_PACKED).bit_length())]
    step = -(-most // MAX_PACKED_TOKENS) * _PACKED_STEP
    return [size for size in (*doubled, *range(2 * _PACKED_STEP, most, step)) if size < most] + [most]
