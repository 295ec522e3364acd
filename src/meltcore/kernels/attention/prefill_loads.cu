// Attention of chunks of prompts on Hopper GPUs (prefill_wgmma.py), after instructions.cu and wgmma.cu: what loads.
//
// One block per SM loops over work items: a tile of up to 64 queries and two heads of a group. Its warp groups:
//   0, 1  one warp copies keys and values by TMA to two rings in shared memory; the others normalize and rotate the
//         queries of the next item while this one is computed
//   2, 3  compute one head each. They take turns with the tensor cores: while one issues its matrix products, the
//         other computes its softmax.
// Blocks of keys are visited from the last to the first, so those with masks come first.
//
// Macros: HEADS, KV_HEADS, PAGE_SIZE; NORM: 1 if heads are normalized; KEY_STAGES, VALUE_STAGES of the rings.

constexpr int HEAD_DIM = 128;
constexpr int QUERIES = 64;      // of a tile
constexpr int BLOCK_KEYS = 128;
constexpr int COPY_KEYS = 64;    // of one copy, which is within a page
constexpr int HALF_DIMS = 64;    // a row of the swizzled layout: 128 bytes
constexpr int PAIRS = HEADS / 2;
constexpr int THREADS = 4 * 128;
constexpr int QUERY_WARPS = 7;
constexpr int LOADER_REGISTERS = 64, COMPUTE_REGISTERS = 192;
static_assert(PAGE_SIZE % COPY_KEYS == 0, "a copy is within a page");
static_assert(HEADS / KV_HEADS % 2 == 0, "two heads share keys");

// --- shared memory: [half of the dims][row][64 dims], rows of 128 bytes whose 16-byte parts are swizzled -------------

constexpr int QUERY_HALF = QUERIES * 128, HEAD_BYTES = 2 * QUERY_HALF, QUERY_BYTES = 2 * HEAD_BYTES;
constexpr int BLOCK_HALF = BLOCK_KEYS * 128, BLOCK_BYTES = 2 * BLOCK_HALF;
constexpr int COPY_BYTES = COPY_KEYS * 128;
constexpr int AT_KEYS = 2 * QUERY_BYTES;
constexpr int AT_VALUES = AT_KEYS + KEY_STAGES * BLOCK_BYTES;
constexpr int AT_WEIGHT = AT_VALUES + VALUE_STAGES * BLOCK_BYTES;  // of the norm
constexpr int AT_BARRIERS = AT_WEIGHT + 2 * HEAD_DIM;

enum Barrier {
    KEYS_FULL = 0,
    KEYS_EMPTY = KEYS_FULL + KEY_STAGES,
    VALUES_FULL = KEYS_EMPTY + KEY_STAGES,
    VALUES_EMPTY = VALUES_FULL + VALUE_STAGES,
    QUERIES_FULL = VALUES_EMPTY + VALUE_STAGES,
    QUERIES_EMPTY = QUERIES_FULL + 2,
    NUM_BARRIERS = QUERIES_EMPTY + 2
};
constexpr int ALIGNMENT = 1024;  // of the swizzle's pattern
static_assert(ALIGNMENT + AT_BARRIERS + 8 * NUM_BARRIERS <= SHARED_BYTES, "");

struct Params {
    const TensorMap *keys, *values;
    const u16 *qkv, *weight;
    const float* rotary;
    const i64* page_table;
    const int4* tiles;
    u16* out;
    int num_tiles, qkv_stride, table_stride;
    float eps, scale_log2;
};

// The work items of this block, those with most keys first. Every second round is in reverse order, so that no block
// has the longest item of every round.
struct Items {
    const Params& params;
    int round = 0, head;
    int row, first_token, num_queries, context_len;

    __device__ __forceinline__ explicit Items(const Params& params) : params(params) {}

    __device__ __forceinline__ bool next() {
        for (;;) {
            int index = round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
            if (round * (int)gridDim.x >= params.num_tiles * PAIRS) return false;
            ++round;
            if (index >= params.num_tiles * PAIRS) continue;
            int4 tile = __ldg(params.tiles + index / PAIRS);
            if (tile.z == 0) continue;  // padding
            head = index % PAIRS * 2;
            row = tile.x, first_token = tile.y, num_queries = tile.z, context_len = tile.w;
            return true;
        }
    }
    __device__ __forceinline__ int end() const { return context_len + num_queries; }
    __device__ __forceinline__ int blocks() const { return (end() + BLOCK_KEYS - 1) / BLOCK_KEYS; }
    __device__ __forceinline__ int kv_head() const { return head / (HEADS / KV_HEADS); }
};

__device__ __forceinline__ void sync_threads(int barrier, int threads) {
    VOLATILE("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
    VOLATILE("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// --- loading ---------------------------------------------------------------------------------------------------------

struct Source {
    int rows[2], copies;  // rows of the cache
};

template <int STAGES>
__device__ __forceinline__ void load_block(
    u32 to, u32 full, u32 empty, const TensorMap* map, int column, const Source& source, Ring<STAGES>& ring, int lane) {
    if (lane == 0) {
        wait(empty + 8 * ring.slot, ring.phase ^ 1);
        u32 barrier = full + 8 * ring.slot;
        expect(barrier, source.copies * 2 * COPY_BYTES);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (i < source.copies)
                    copy_box(to + ring.slot * BLOCK_BYTES + half * BLOCK_HALF + i * COPY_BYTES, map,
                             column + half * HALF_DIMS, source.rows[i], barrier);
    }
    __syncwarp();
    ring.next();
}

__device__ __forceinline__ void load_keys_and_values(const Params& params, u32 shared, int lane) {
    Ring<KEY_STAGES> key_ring;
    Ring<VALUE_STAGES> value_ring;
    u32 barriers = shared + AT_BARRIERS;
    Items item(params);
    while (item.next()) {
        const i64* pages = params.page_table + (i64)item.row * params.table_stride;
        int column = item.kv_head() * HEAD_DIM, last = item.blocks() - 1, row = 0;
        Source source, before;
#pragma unroll 1
        for (int block = last; block >= 0; --block) {
            if (block == last || block % 16 == 15) {  // each lane has one of the next 32 copies
                int key = (block / 16 * 32 + lane) * COPY_KEYS;
                row = key < item.end() ? (int)__ldg(pages + key / PAGE_SIZE) * PAGE_SIZE + key % PAGE_SIZE : 0;
            }
            source.rows[0] = __shfl_sync(~0u, row, block % 16 * 2);
            source.rows[1] = __shfl_sync(~0u, row, block % 16 * 2 + 1);
            source.copies = block * BLOCK_KEYS + COPY_KEYS < item.end() ? 2 : 1;
            load_block(shared + AT_KEYS, barriers + 8 * KEYS_FULL, barriers + 8 * KEYS_EMPTY, params.keys, column,
                       source, key_ring, lane);
            if (block != last)
                load_block(shared + AT_VALUES, barriers + 8 * VALUES_FULL, barriers + 8 * VALUES_EMPTY, params.values,
                           column, before, value_ring, lane);
            before = source;
        }
        load_block(shared + AT_VALUES, barriers + 8 * VALUES_FULL, barriers + 8 * VALUES_EMPTY, params.values, column,
                   before, value_ring, lane);
    }
}

// Normalizes two dims, with the reference's rounding.
__device__ __forceinline__ u32 normalize(u32 pair, float scale, u32 weight) {
    return multiply_pairs(pack(low(pair) * scale, high(pair) * scale), weight);
}

// Rotates two dims of each half.
__device__ __forceinline__ void rotate(u32& first, u32& second, float2 cos, float2 sin) {
    float a = low(first), b = high(first), c = low(second), d = high(second);
    first = pack(a * cos.x - c * sin.x, b * cos.y - d * sin.y);
    second = pack(c * cos.x + a * sin.x, d * cos.y + b * sin.y);
}

// A token's two heads before they are rotated: a lane has 8 dims of each half, and their angles.
struct Query {
    uint4 first[2], second[2];
    float4 cos[2], sin[2];

    __device__ __forceinline__ void load(const Params& params, const Items& item, int token, int part) {
        token = min(token, item.num_queries - 1);  // those past the end repeat the last one
        const uint4* query = (const uint4*)(params.qkv + (i64)(item.first_token + token) * params.qkv_stride) +
                             item.head * (HEAD_DIM / 8) + part;
        const float4* angles = (const float4*)params.rotary + (item.context_len + token) * (HEAD_DIM / 4) + 2 * part;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            first[i] = __ldg(query + 16 * i), second[i] = __ldg(query + 16 * i + 8);
            cos[i] = __ldg(angles + i), sin[i] = __ldg(angles + 16 + i);
        }
    }

    __device__ __forceinline__ static void normalize_head(uint4& a, uint4& b, u32 weights, float eps) {
        float x[8], sum = 0.0f;
        unpack(a, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(x[i], x[i], sum);
        unpack(b, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(x[i], x[i], sum);
        float scale = inverse_root(sum_lanes<4>(sum) / HEAD_DIM + eps);
        uint4 weight = load4(weights);
        a.x = normalize(a.x, scale, weight.x), a.y = normalize(a.y, scale, weight.y);
        a.z = normalize(a.z, scale, weight.z), a.w = normalize(a.w, scale, weight.w);
        weight = load4(weights + HEAD_DIM);
        b.x = normalize(b.x, scale, weight.x), b.y = normalize(b.y, scale, weight.y);
        b.z = normalize(b.z, scale, weight.z), b.w = normalize(b.w, scale, weight.w);
    }

    __device__ __forceinline__ void store(const Params& params, u32 shared, u32 queries, int token, int part) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint4 &a = first[i], &b = second[i];
            if (NORM) normalize_head(a, b, shared + AT_WEIGHT + 16 * part, params.eps);
            rotate(a.x, b.x, make_float2(cos[0].x, cos[0].y), make_float2(sin[0].x, sin[0].y));
            rotate(a.y, b.y, make_float2(cos[0].z, cos[0].w), make_float2(sin[0].z, sin[0].w));
            rotate(a.z, b.z, make_float2(cos[1].x, cos[1].y), make_float2(sin[1].x, sin[1].y));
            rotate(a.w, b.w, make_float2(cos[1].z, cos[1].w), make_float2(sin[1].z, sin[1].w));
            u32 to = queries + i * HEAD_BYTES + token * 128 + (part ^ token % 8) * 16;
            store4(to, a);
            store4(to + QUERY_HALF, b);
        }
    }
};

// `warp` of QUERY_WARPS prepares the queries of all items: 4 tokens at a time, of which a lane has an eighth.
__device__ __forceinline__ void load_queries(const Params& params, u32 shared, int warp, int lane) {
    Ring<2> ring;
    int part = lane % 8;
    Items item(params);
    while (item.next()) {
        wait(shared + AT_BARRIERS + 8 * (QUERIES_EMPTY + ring.slot), ring.phase ^ 1);
#pragma unroll 1
        for (int token = warp * 4 + lane / 8; token < QUERIES; token += QUERY_WARPS * 4) {
            Query query;
            query.load(params, item, token, part);
            query.store(params, shared, shared + ring.slot * QUERY_BYTES, token, part);
        }
        fence_async();
        __syncwarp();
        if (lane == 0) arrive(shared + AT_BARRIERS + 8 * (QUERIES_FULL + ring.slot));
        ring.next();
    }
}

