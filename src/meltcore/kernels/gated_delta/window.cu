// Gated DeltaNet for windows in bfloat16 (see window.py). A block computes one value head of one window. Four neighboring
// lanes share a column of the head's state, a quarter of the keys each, in registers: a sum over keys takes two
// exchanges, and the threads meet when the tokens have been convolved and when they have been computed, not in between.
// Follows instructions.cu.
//
// Macros: KEY_HEADS, HEADS, DRAFTS (the most of a window), TAPS (of the convolution).

constexpr int DIM = 128, PARTS = 4, PART = DIM / PARTS, THREADS = PARTS * DIM, WARPS = THREADS / 32;
constexpr int TOKENS = DRAFTS + 1, EARLIER = TAPS - 1;
constexpr int KEYS = KEY_HEADS * DIM, CHANNELS = 2 * KEYS + HEADS * DIM, GROUP = HEADS / KEY_HEADS;
constexpr int ENTRIES = TAPS + 2 * DRAFTS, COLUMNS = CHANNELS + 2 * HEADS;
// Shared memory: keys, queries, values or outputs, and gates of a phase's tokens, in rows whose parts lie in different
// banks; then their sums over dims; then the decay and beta of each.
constexpr int PART_BYTES = 4 * (PART + 4), ROW_BYTES = PARTS * PART_BYTES, TILE_BYTES = TOKENS * ROW_BYTES;
constexpr int AT_SUMS = 4 * TILE_BYTES, AT_RULE = AT_SUMS + 16 * TOKENS;
enum Tile { KEY, QUERY, VALUE, GATE };
enum Sum { KEY_SQUARES, QUERY_SQUARES, PRODUCTS, OUTPUT_SQUARES };

__device__ __forceinline__ float number(const u16* at) { return __uint_as_float((u32)*at << 16); }

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

__device__ __forceinline__ u32 place(u32 shared, Tile tile, int token, int dim) {
    return shared + tile * TILE_BYTES + token * ROW_BYTES + dim / PART * PART_BYTES + dim % PART * 4;
}

__device__ __forceinline__ u32 sum_place(u32 shared, Sum sum, int token) { return shared + AT_SUMS + 4 * (4 * token + sum); }

struct Window {
    const u16 *projected, *ring;  // of its first token, and of its slot
    int stride, position;

    // Writes the convolution of a channel for `count` tokens from `first` on, rounded as in the reference. All loads are in
    // flight together.
    __device__ __forceinline__ void convolve(u32 shared, Tile tile, const u16* weights, int channel, int first, int count) const {
        float inputs[EARLIER + TOKENS], taps[TAPS];
        int entry = (position + first - EARLIER + ENTRIES) % ENTRIES;
#pragma unroll
        for (int i = 0; i < TAPS; ++i) taps[i] = number(weights + channel * TAPS + i);
#pragma unroll
        for (int i = 0; i < EARLIER + TOKENS; ++i) {
            int offset = first + i - EARLIER;
            bool is_known = i < EARLIER + count && position + offset >= 0;
            const u16* at = offset >= 0 && is_known ? projected + offset * stride : ring + entry * COLUMNS;
            float input = number(at + channel);
            inputs[i] = is_known ? input : 0.0f;
            entry = entry + 1 < ENTRIES ? entry + 1 : 0;
        }
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < TAPS; ++i) sum += inputs[token + i] * taps[i];
            if (token < count) store_float(place(shared, tile, token, threadIdx.x % DIM), rounded(silu(sum)));
        }
    }
};

// Adds up a product of two tiles over the dims of each token, a warp for each sum.
__device__ __forceinline__ void add_up(u32 shared, Sum sum, Tile first, Tile second, int token) {
    float value = 0.0f;
#pragma unroll
    for (int dim = threadIdx.x % 32; dim < DIM; dim += 32)
        value += load_float(place(shared, first, token, dim)) * load_float(place(shared, second, token, dim));
    value = sum_lanes<16>(value);
    if (threadIdx.x % 32 == 0) store_float(sum_place(shared, sum, token), value);
}

// Brings what `apply` needs of tokens into shared memory. HAS_OUTPUT: replayed tokens need neither queries nor gates.
template <bool HAS_OUTPUT>
__device__ __forceinline__ void prepare(u32 shared, const Window& window, const u16* weights, int head, int first, int count,
                                        const u16* rule, int rule_stride, float a_log, float dt_bias) {
    int dim = threadIdx.x % DIM, tile = threadIdx.x / DIM, channel = head / GROUP * DIM + dim;
    if (tile == KEY) {
        window.convolve(shared, KEY, weights, KEYS + channel, first, count);
    } else if (tile == VALUE) {
        window.convolve(shared, VALUE, weights, 2 * KEYS + head * DIM + dim, first, count);
    } else if (tile == QUERY) {
        if (HAS_OUTPUT) window.convolve(shared, QUERY, weights, channel, first, count);
    } else {
        if (dim < count) {  // the decay and beta of a token
            const u16* at = HAS_OUTPUT ? rule + (i64)dim * rule_stride
                                       : rule + (i64)((window.position + first + dim) % ENTRIES) * COLUMNS;
            float b = number(at), a = number(at + HEADS) + dt_bias;
            float softplus = a > 20.0f ? a : logf(1.0f + expf(a));
            store_float(shared + AT_RULE + 8 * dim, expf(-expf(a_log) * softplus));
            store_float(shared + AT_RULE + 8 * dim + 4, 1.0f / (1.0f + expf(-b)));
        }
        if (HAS_OUTPUT) {
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) {
                const u16* at = window.projected + (i64)min(token, count - 1) * window.stride + CHANNELS + head * DIM + dim;
                float gate = silu(number(at));
                if (token < count) store_float(place(shared, GATE, token, dim), gate);
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x / 32; i < (HAS_OUTPUT ? 3 : 1) * count; i += WARPS) {
        int token = i % count;
        if (i < count) add_up(shared, KEY_SQUARES, KEY, KEY, token);
        else if (i < 2 * count) add_up(shared, QUERY_SQUARES, QUERY, QUERY, token);
        else add_up(shared, PRODUCTS, QUERY, KEY, token);
    }
    __syncthreads();
}

// Applies a token to a quarter of a column of the state. Returns the token's output there.
template <bool HAS_OUTPUT>
__device__ __forceinline__ float apply(u32 shared, int token, float* state) {
    int column = threadIdx.x / PARTS;
    u32 keys = place(shared, KEY, token, threadIdx.x % PARTS * PART), queries = keys + QUERY * TILE_BYTES;
    float by_key[4] = {}, by_query[4] = {};
#pragma unroll
    for (int i = 0; i < PART; i += 4) {
        uint4 key = load4(keys + 4 * i);
        by_key[0] += state[i] * __uint_as_float(key.x), by_key[1] += state[i + 1] * __uint_as_float(key.y);
        by_key[2] += state[i + 2] * __uint_as_float(key.z), by_key[3] += state[i + 3] * __uint_as_float(key.w);
        if (!HAS_OUTPUT) continue;
        uint4 query = load4(queries + 4 * i);
        by_query[0] += state[i] * __uint_as_float(query.x), by_query[1] += state[i + 1] * __uint_as_float(query.y);
        by_query[2] += state[i + 2] * __uint_as_float(query.z), by_query[3] += state[i + 3] * __uint_as_float(query.w);
    }
    float2 rule = load_float2(shared + AT_RULE + 8 * token);
    float decay = rule.x, beta = rule.y;
    float key_scale = inverse_root(load_float(sum_place(shared, KEY_SQUARES, token)) + 1e-6f);
    float old_value = decay * key_scale * sum_lanes<PARTS / 2>((by_key[0] + by_key[1]) + (by_key[2] + by_key[3]));
    float scaled = key_scale * beta * (load_float(place(shared, VALUE, token, column)) - old_value);
#pragma unroll
    for (int i = 0; i < PART; i += 4) {
        uint4 key = load4(keys + 4 * i);
        state[i] = decay * state[i] + __uint_as_float(key.x) * scaled;
        state[i + 1] = decay * state[i + 1] + __uint_as_float(key.y) * scaled;
        state[i + 2] = decay * state[i + 2] + __uint_as_float(key.z) * scaled;
        state[i + 3] = decay * state[i + 3] + __uint_as_float(key.w) * scaled;
    }
    if (!HAS_OUTPUT) return 0.0f;
    float query_scale = inverse_root(load_float(sum_place(shared, QUERY_SQUARES, token)) + 1e-6f) * inverse_root((float)DIM);
    float old_output = decay * sum_lanes<PARTS / 2>((by_query[0] + by_query[1]) + (by_query[2] + by_query[3]));
    return query_scale * (old_output + load_float(sum_place(shared, PRODUCTS, token)) * scaled);
}

extern "C" __global__ void __launch_bounds__(THREADS) gated_delta_windows(
    const u16* projected, const u16* weights, const float* a_log, const float* dt_bias, const u16* norm, u16* ring,
    float* states, const i64* positions, const i64* slots, const i64* replay_lens, const i64* query_start_loc, u16* out,
    float eps, int projected_stride, int conv_stride, int state_stride) {
    launch_dependents();
    extern __shared__ char memory[];
    u32 shared = __cvta_generic_to_shared(memory);
    int head = blockIdx.x % HEADS, sequence = blockIdx.x / HEADS, column = threadIdx.x / PARTS;
    int position = positions[sequence];
    i64 slot = slots[sequence], first_token = query_start_loc[sequence];
    int size = query_start_loc[sequence + 1] - first_token, replay_len = position > 0 ? replay_lens[sequence] : 0;
    ring += slot * conv_stride;
    states += slot * state_stride + (i64)(head * DIM + threadIdx.x % PARTS * PART) * DIM + column;
    projected += first_token * projected_stride;
    out += first_token * HEADS * DIM + head * DIM;
    Window window = {projected, ring, projected_stride, position};
    float head_a_log = a_log[head], head_dt_bias = dt_bias[head], state[PART];
#pragma unroll
    for (int i = 0; i < PART; ++i) state[i] = position > 0 ? states[i * DIM] : 0.0f;

    // The state, the ring and the replay need nothing that a recent kernel wrote: it runs while the previous one ends.
    if (replay_len > 0) {
        prepare<false>(shared, window, weights, head, -replay_len, replay_len, ring + CHANNELS + head, 0, head_a_log,
                       head_dt_bias);
        for (int token = 0; token < replay_len; ++token) apply<false>(shared, token, state);
        __syncthreads();  // all have read what the window's tokens replace
    }
    wait_for_previous();
    if (position < 0) {
        for (int i = threadIdx.x; i < size * DIM; i += THREADS) out[i / DIM * (HEADS * DIM) + i % DIM] = 0;
        return;
    }

    const u16* rule = projected + CHANNELS + HEADS * DIM + head;
    prepare<true>(shared, window, weights, head, 0, size, rule, projected_stride, head_a_log, head_dt_bias);
    for (int token = 0; token < size; ++token) {
        float output = apply<true>(shared, token, state);
        if (threadIdx.x % PARTS == 0) store_float(place(shared, VALUE, token, column), output);
        if (token) continue;
#pragma unroll
        for (int i = 0; i < PART; ++i) states[i * DIM] = state[i];
    }
    __syncthreads();
    for (int token = threadIdx.x / 32; token < size; token += WARPS) add_up(shared, OUTPUT_SQUARES, VALUE, VALUE, token);
    __syncthreads();
    for (int i = threadIdx.x; i < size * DIM; i += THREADS) {
        int token = i / DIM, dim = i % DIM;
        float scale = inverse_root(load_float(sum_place(shared, OUTPUT_SQUARES, token)) / DIM + eps);
        float output = load_float(place(shared, VALUE, token, dim)) * scale * number(norm + dim);
        out[token * (HEADS * DIM) + dim] = to_bf16(output * load_float(place(shared, GATE, token, dim)));
        // No block reads this entry in this step: the heads that share a key head need no order among them.
        const u16* row = projected + (i64)token * projected_stride;
        u16* entry = ring + (i64)((position + token) % ENTRIES) * COLUMNS;
        int channel = head / GROUP * DIM + dim, value_channel = 2 * KEYS + head * DIM + dim;
        entry[value_channel] = row[value_channel];
        if (dim < 2) entry[CHANNELS + dim * HEADS + head] = rule[(i64)token * projected_stride + dim * HEADS];
        if (head % GROUP == 0) entry[channel] = row[channel], entry[KEYS + channel] = row[KEYS + channel];
    }
}
