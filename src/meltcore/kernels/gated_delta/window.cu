// Gated DeltaNet for windows in bfloat16 (see window.py). A block computes one value head of one window. Four neighboring
// lanes share two columns of the head's state, a quarter of the keys each, in registers. All tokens meet the state as it
// was stored: tensor cores compute its products with their keys and queries in one pass. While the state is on its way, a
// warp computes from the tokens alone how each one's output, and its part of the new state, follow from such products
// and from the values of all. Follows instructions.cu.
//
// Macros: KEY_HEADS, HEADS, DRAFTS (the most of a window), TAPS (of the convolution).

constexpr int DIM = 128, PARTS = 4, PART = DIM / PARTS, WIDTH = 2, THREADS = PARTS * DIM / WIDTH, WARPS = THREADS / 32;
constexpr int TOKENS = DRAFTS + 1, EARLIER = TAPS - 1;
constexpr int KEYS = KEY_HEADS * DIM, CHANNELS = 2 * KEYS + HEADS * DIM, GROUP = HEADS / KEY_HEADS;
constexpr int ENTRIES = TAPS + 2 * DRAFTS, COLUMNS = CHANNELS + 2 * HEADS;
// Rows: keys of the tokens from DRAFTS before the window on, then queries of the window.
constexpr int KEY_ROWS = DRAFTS + TOKENS, ROWS = KEY_ROWS + TOKENS, TILES = (ROWS + 15) / 16, TILED_ROWS = 16 * TILES;
constexpr int PADDED = (KEY_ROWS + 3) / 4 * 4, UNROLLED = DRAFTS <= 7 ? 64 : 1;
// Shared memory: these rows, whose parts lie in different banks; values of the tokens, in which outputs replace those of
// the window; its gates; products of rows; the decay and beta of each token; factors; products of rows with the state.
constexpr int PART_BYTES = 4 * (PART + 4), ROW_BYTES = PARTS * PART_BYTES;
constexpr int AT_VALUES = ROWS * ROW_BYTES, AT_GATES = AT_VALUES + KEY_ROWS * 4 * DIM;
constexpr int AT_PRODUCTS = AT_GATES + TOKENS * 4 * DIM, AT_RULE = AT_PRODUCTS + 4 * TILED_ROWS * TILED_ROWS;
constexpr int AT_FACTORS = AT_RULE + 8 * PADDED, AT_READS = AT_FACTORS + 4 * PADDED * (2 * TOKENS + 3);
static_assert(KEY_ROWS <= DIM / 2, "a thread of the gates has the rule of one token");
enum Tile { KEY, QUERY, VALUE, GATE };
// Rows of factors: of each token's value and read, of each window token's read by its query and, behind these, of the
// stored state; then how outputs and additions to the stored state follow.
enum Factors { OF_VALUES, OF_READS, OF_STATES, OF_OUTPUTS, OF_ADDITIONS = OF_OUTPUTS + TOKENS };

__device__ __forceinline__ float number(const u16* at) { return __uint_as_float((u32)*at << 16); }

// Divides as exactly as `/`, without its branches: values of the reference that are rounded alike stay equal.
__device__ __forceinline__ float silu(float x) {
    float divisor = fminf(1.0f + expf(-x), 1e37f), inverse = __fdividef(1.0f, divisor), quotient = x * inverse;
    return fmaf(fmaf(-quotient, divisor, x), inverse, quotient);
}

// Of a key or query.
__device__ __forceinline__ u32 row_place(u32 shared, int row, int dim) {
    return shared + row * ROW_BYTES + dim / PART * PART_BYTES + dim % PART * 4;
}

__device__ __forceinline__ u32 value_place(u32 shared, int row, int column) {
    return shared + AT_VALUES + 4 * (row * DIM + column);
}

__device__ __forceinline__ u32 gate_place(u32 shared, int token, int column) {
    return shared + AT_GATES + 4 * (token * DIM + column);
}

__device__ __forceinline__ u32 product_place(u32 shared, int row, int other) {
    return shared + AT_PRODUCTS + 4 * (row * TILED_ROWS + other);
}

__device__ __forceinline__ u32 factor_place(u32 shared, int factors, int token) {
    return shared + AT_FACTORS + 4 * (factors * PADDED + token);
}

// Of one of the 16 columns of a warp.
__device__ __forceinline__ u32 read_place(u32 shared, int row, int column) {
    return shared + AT_READS + 4 * ((threadIdx.x / 32 * TILED_ROWS + row) * 16 + column);
}

__device__ __forceinline__ void store_pair(u32 at, float first, float second) {
    store_words(at, __float_as_uint(first), __float_as_uint(second));
}

// Multiplies rows among themselves in one warp. Rows are exact in tf32. Rows past the last have products of no meaning.
__device__ __forceinline__ void multiply_rows(u32 shared) {
    int lane = threadIdx.x % 32, part = lane % PARTS;
    for (int tile = 0; tile < TILES * TILES; ++tile) {
        int row = tile % TILES * 16 + lane / PARTS, other_row = tile / TILES * 16 + lane / PARTS;
        u32 lower = row_place(shared, min(row, ROWS - 1), part * PART), upper = row_place(shared, min(row + 8, ROWS - 1), part * PART);
        u32 left = row_place(shared, min(other_row, ROWS - 1), part * PART);
        u32 right = row_place(shared, min(other_row + 8, ROWS - 1), part * PART);
        float sums[2][2][4] = {};
#pragma unroll
        for (int i = 0; i < PART; i += 4) {
            uint4 low = load4(lower + 4 * i), high = load4(upper + 4 * i), one = load4(left + 4 * i), other = load4(right + 4 * i);
            multiply_tf32(sums[0][0], {low.x, high.x, low.y, high.y}, {one.x, one.y});
            multiply_tf32(sums[1][0], {low.x, high.x, low.y, high.y}, {other.x, other.y});
            multiply_tf32(sums[0][1], {low.z, high.z, low.w, high.w}, {one.z, one.w});
            multiply_tf32(sums[1][1], {low.z, high.z, low.w, high.w}, {other.z, other.w});
        }
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float (*half)[4] = sums[i / 4];
            store_pair(product_place(shared, row + i % 4 / 2 * 8, tile / TILES * 16 + i / 4 * 8 + part * 2),
                       half[0][i % 4] + half[1][i % 4], half[0][i % 4 + 1] + half[1][i % 4 + 1]);
        }
    }
}

// Computes factors in one warp. A token adds its key to the state as often as `solve` says; a lane follows what of that
// goes back to one token.
__device__ __forceinline__ void combine(u32 shared) {
#pragma unroll 1
    for (int origin = threadIdx.x % 32; origin < PADDED; origin += 32) {
        float weights[KEY_ROWS], scale = 1.0f;
#pragma unroll UNROLLED
        for (int token = 0; token < KEY_ROWS; ++token) {
            float2 rule = load_float2(shared + AT_RULE + 8 * token);
            float decay = rule.x, beta = rule.y;
            float key_scale = inverse_root(load_float(product_place(shared, token, token)) + 1e-6f);
            float read_factor = key_scale * key_scale * beta * decay, read = 0.0f;
#pragma unroll UNROLLED
            for (int i = 0; i < KEY_ROWS; ++i) {
                if (i >= token) continue;
                read += load_float(product_place(shared, token, i)) * weights[i];
                weights[i] *= decay;
            }
            weights[token] = (origin == token ? 1.0f : 0.0f) - read_factor * read;
            if (origin == token) {
                store_float(factor_place(shared, OF_VALUES, token), key_scale * beta);
                store_float(factor_place(shared, OF_READS, token), read_factor * scale);
            }
            scale *= decay;
            if (token < DRAFTS) continue;
            int row = KEY_ROWS + token - DRAFTS;
            float squares = load_float(product_place(shared, row, row)), output = 0.0f;
            float query_scale = inverse_root(squares + 1e-6f) * inverse_root((float)DIM);
#pragma unroll UNROLLED
            for (int i = 0; i < KEY_ROWS; ++i)
                if (i <= token) output += load_float(product_place(shared, row, i)) * weights[i];
            store_float(factor_place(shared, OF_OUTPUTS + token - DRAFTS, origin), query_scale * output);
            if (origin == 0) store_float(factor_place(shared, OF_STATES, token - DRAFTS), query_scale * scale);
            if (token > DRAFTS) continue;
            if (origin == 0) store_float(factor_place(shared, OF_STATES, TOKENS), scale);
#pragma unroll UNROLLED
            for (int i = 0; i <= DRAFTS; ++i) store_float(factor_place(shared, OF_ADDITIONS + i, origin), weights[i]);
        }
    }
}

// Multiplies rows with this warp's columns of the state. Of a number of the state tf32 takes the first 11 bits, and then
// all but 2 of the others.
__device__ __forceinline__ void read_state(u32 shared, const float2* state) {
    int lane = threadIdx.x % 32, part = lane % PARTS;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        int row = tile * 16 + lane / PARTS;
        u32 lower = row_place(shared, min(row, ROWS - 1), part * PART), upper = row_place(shared, min(row + 8, ROWS - 1), part * PART);
        float sums[WIDTH][2][4] = {};
#pragma unroll
        for (int i = 0; i < PART; i += 4) {
            uint4 low = load4(lower + 4 * i), high = load4(upper + 4 * i);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                u32 first[4], rest[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    float number = j ? state[i + k].y : state[i + k].x;
                    first[k] = __float_as_uint(number) & 0xffffe000u;
                    rest[k] = __float_as_uint(number - __uint_as_float(first[k]));
                }
                multiply_tf32(sums[j][0], {low.x, high.x, low.y, high.y}, {first[0], first[1]});
                multiply_tf32(sums[j][1], {low.x, high.x, low.y, high.y}, {rest[0], rest[1]});
                multiply_tf32(sums[j][0], {low.z, high.z, low.w, high.w}, {first[2], first[3]});
                multiply_tf32(sums[j][1], {low.z, high.z, low.w, high.w}, {rest[2], rest[3]});
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i += 2)
            store_float4(read_place(shared, row + i * 4, part * 4), sums[0][0][i] + sums[0][1][i], sums[1][0][i] + sums[1][1][i],
                         sums[0][0][i + 1] + sums[0][1][i + 1], sums[1][0][i + 1] + sums[1][1][i + 1]);
    }
}

// Applies all tokens to the lane's columns of the state, whose products with the rows are in shared memory. Writes the
// outputs of the lane's tokens, and returns in `added` how much of each key the stored state gains.
__device__ __forceinline__ void solve(u32 shared, int size, float2* added) {
    int part = threadIdx.x % PARTS, column = threadIdx.x / PARTS * WIDTH, warp_column = column % 16;
    float2 gains[KEY_ROWS];
#pragma unroll UNROLLED
    for (int token = 0; token < KEY_ROWS; ++token) {
        float value_factor = load_float(factor_place(shared, OF_VALUES, token));
        float read_factor = load_float(factor_place(shared, OF_READS, token));
        float2 value = load_float2(value_place(shared, token, column)), read = load_float2(read_place(shared, token, warp_column));
        gains[token].x = value_factor * value.x - read_factor * read.x;
        gains[token].y = value_factor * value.y - read_factor * read.y;
    }
    __syncwarp();  // all lanes have read the values
#pragma unroll UNROLLED
    for (int first = 0; first < TOKENS; first += PARTS) {
        int token = first + part;
        if (token >= TOKENS) continue;
        float2 output = load_float2(read_place(shared, KEY_ROWS + token, warp_column));
        float read_factor = load_float(factor_place(shared, OF_STATES, token));
        output.x *= read_factor, output.y *= read_factor;
#pragma unroll UNROLLED
        for (int i = 0; i < KEY_ROWS; ++i) {
            float factor = load_float(factor_place(shared, OF_OUTPUTS + token, i));
            output.x += factor * gains[i].x, output.y += factor * gains[i].y;
        }
        store_pair(value_place(shared, DRAFTS + token, column), output.x, output.y);
    }
#pragma unroll UNROLLED
    for (int token = 0; token < TOKENS; ++token) {
        added[token] = {0.0f, 0.0f};
#pragma unroll UNROLLED
        for (int i = 0; i < TOKENS; ++i) {
            if (i > token) continue;
            float factor = load_float(factor_place(shared, OF_ADDITIONS + token, i));
            added[token].x += factor * gains[i].x, added[token].y += factor * gains[i].y;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gated_delta_windows(
    const u16* projected, const u16* weights, const float* a_log, const float* dt_bias, const u16* norm, u16* ring,
    float* states, const i64* positions, const i64* slots, const i64* replay_lens, const i64* query_start_loc, u16* out,
    float eps, int projected_stride, int conv_stride, int state_stride) {
    launch_dependents();
    extern __shared__ char memory[];
    u32 shared = __cvta_generic_to_shared(memory);
    int head = blockIdx.x % HEADS, sequence = blockIdx.x / HEADS, part = threadIdx.x % PARTS, lane = threadIdx.x % 32;
    int position = positions[sequence];
    i64 slot = slots[sequence], first_token = query_start_loc[sequence];
    int size = query_start_loc[sequence + 1] - first_token, replay_len = position > 0 ? replay_lens[sequence] : 0;
    ring += slot * conv_stride;
    states += slot * state_stride + (i64)(head * DIM + part * PART) * DIM + threadIdx.x / PARTS * WIDTH;
    projected += first_token * projected_stride;
    out += first_token * HEADS * DIM + head * DIM;

    // A thread convolves two channels, or computes two gates and the rule of a token. All loads are in flight together. The
    // state and the ring need nothing that a recent kernel wrote.
    int tile = threadIdx.x / (DIM / 2), dim = threadIdx.x % (DIM / 2) * 2, index = threadIdx.x % (DIM / 2);
    int channel = tile == VALUE ? 2 * KEYS + head * DIM + dim : (tile == KEY ? KEYS : 0) + head / GROUP * DIM + dim;
    u32 inputs[EARLIER + KEY_ROWS];
    u32 taps[TAPS];
    u16 b = 0, a = 0;
    int entry = (position - DRAFTS - EARLIER + ENTRIES) % ENTRIES, rule_offset = index - DRAFTS;
    bool has_rule = tile == GATE && rule_offset >= -replay_len && rule_offset < size;
    u16* rule_entry = ring + (position + rule_offset + ENTRIES) % ENTRIES * COLUMNS + CHANNELS + head;
    if (tile != GATE) {
#pragma unroll
        for (int i = 0; i < EARLIER + DRAFTS; ++i) {
            bool is_known = position + i >= EARLIER + DRAFTS && (i >= DRAFTS || tile != QUERY);
            inputs[i] = is_known ? *(const u32*)(ring + entry * COLUMNS + channel) : 0;
            entry = entry + 1 < ENTRIES ? entry + 1 : 0;
        }
#pragma unroll
        for (int i = 0; i < TAPS; ++i) taps[i] = ((const u32*)(weights + channel * TAPS))[i];
    } else if (has_rule && rule_offset < 0) {
        b = rule_entry[0], a = rule_entry[HEADS];
    }
    float head_a_log = a_log[head], head_dt_bias = dt_bias[head];
    float2 state[PART];
#pragma unroll
    for (int i = 0; i < PART; ++i) state[i] = position > 0 ? *(const float2*)(states + i * DIM) : make_float2(0.0f, 0.0f);

    wait_for_previous();
    if (position < 0) {
        for (int i = threadIdx.x; i < size * DIM; i += THREADS) out[i / DIM * (HEADS * DIM) + i % DIM] = 0;
        return;
    }
    const u16* window = projected + (tile == GATE ? CHANNELS + head * DIM + dim : channel);
    if (has_rule && rule_offset >= 0) {
        const u16* at = projected + (i64)rule_offset * projected_stride + CHANNELS + HEADS * DIM + head;
        b = at[0], a = at[HEADS];
    }
#pragma unroll
    for (int i = 0; i < TOKENS; ++i)
        inputs[EARLIER + DRAFTS + i] = i < size ? *(const u32*)(window + (i64)i * projected_stride) : 0;
    if (tile == GATE) {
        if (index < KEY_ROWS) {
            float decay = 1.0f, beta = 0.0f;
            if (has_rule) {
                float exponent = number(&a) + head_dt_bias;
                float softplus = exponent > 20.0f ? exponent : logf(1.0f + expf(exponent));
                decay = expf(-expf(head_a_log) * softplus), beta = 1.0f / (1.0f + expf(-number(&b)));
            }
            store_pair(shared + AT_RULE + 8 * index, decay, beta);
            if (has_rule && rule_offset >= 0) rule_entry[0] = b, rule_entry[HEADS] = a;
        }
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            u32 gates = inputs[EARLIER + DRAFTS + i];
            store_pair(gate_place(shared, i, dim), silu(low(gates)), silu(high(gates)));
        }
    } else {
        bool stores = tile == VALUE || head % GROUP == 0;
        entry = position % ENTRIES;
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            // No block reads this entry in this step: the heads that share a key head need no order among them.
            if (stores && i < size) *(u32*)(ring + entry * COLUMNS + channel) = inputs[EARLIER + DRAFTS + i];
            entry = entry + 1 < ENTRIES ? entry + 1 : 0;
        }
        u32 place = tile == VALUE ? value_place(shared, 0, dim) : row_place(shared, tile == QUERY ? TOKENS : 0, dim);
        int row_bytes = tile == VALUE ? 4 * DIM : ROW_BYTES;
#pragma unroll
        for (int row = 0; row < KEY_ROWS; ++row) {
            // A mask instead of a branch: the rows are computed side by side.
            int mask = row >= DRAFTS - replay_len && row < DRAFTS + size ? -1 : 0;
            forget_value(mask);
            float first = 0.0f, second = 0.0f;
#pragma unroll
            for (int i = 0; i < TAPS; ++i) {
                first += low(inputs[row + i]) * (i % 2 ? high(taps[i / 2]) : low(taps[i / 2]));
                second += high(inputs[row + i]) * ((TAPS + i) % 2 ? high(taps[(TAPS + i) / 2]) : low(taps[(TAPS + i) / 2]));
            }
            u32 pair = pack(silu(first), silu(second)) & mask;
            if (row >= DRAFTS || tile != QUERY) store_pair(place + row * row_bytes, low(pair), high(pair));
        }
    }
    __syncthreads();
    if (threadIdx.x / 32 == WARPS - 1) {
        multiply_rows(shared);
        __syncwarp();
        combine(shared);
    }
    read_state(shared, state);
    __syncthreads();
    float2 added[TOKENS];
    solve(shared, size, added);
    float scale = load_float(factor_place(shared, OF_STATES, TOKENS));
#pragma unroll
    for (int i = 0; i < PART; ++i) state[i].x *= scale, state[i].y *= scale;
#pragma unroll UNROLLED
    for (int token = 0; token < TOKENS; ++token) {
        if (token < DRAFTS - replay_len) continue;
#pragma unroll
        for (int i = 0; i < PART; i += 4) {
            uint4 key = load4(row_place(shared, token, part * PART) + 4 * i);
            float parts[4] = {__uint_as_float(key.x), __uint_as_float(key.y), __uint_as_float(key.z), __uint_as_float(key.w)};
#pragma unroll
            for (int k = 0; k < 4; ++k) state[i + k].x += parts[k] * added[token].x, state[i + k].y += parts[k] * added[token].y;
        }
    }
#pragma unroll
    for (int i = 0; i < PART; ++i) *(float2*)(states + i * DIM) = state[i];
    __syncthreads();
    for (int token = threadIdx.x / 32; token < size; token += WARPS) {
        uint4 words = load4(value_place(shared, DRAFTS + token, 4 * lane)), gates = load4(gate_place(shared, token, 4 * lane));
        uint2 factors = *(const uint2*)(norm + 4 * lane);
        float outputs[4] = {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z), __uint_as_float(words.w)};
        float squares = outputs[0] * outputs[0] + outputs[1] * outputs[1] + outputs[2] * outputs[2] + outputs[3] * outputs[3];
        float scale = inverse_root(sum_lanes<16>(squares) / DIM + eps);
        uint2 pairs;
        pairs.x = pack(outputs[0] * scale * low(factors.x) * __uint_as_float(gates.x),
                       outputs[1] * scale * high(factors.x) * __uint_as_float(gates.y));
        pairs.y = pack(outputs[2] * scale * low(factors.y) * __uint_as_float(gates.z),
                       outputs[3] * scale * high(factors.y) * __uint_as_float(gates.w));
        *(uint2*)(out + token * (HEADS * DIM) + 4 * lane) = pairs;
    }
}
