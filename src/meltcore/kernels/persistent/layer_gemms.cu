// What a dense decoder computes from one attention to the next for up to 16 tokens, in one launch (layer_gemms.py):
// output projection, addition, norm, gate and up with SwiGLU, down, addition, norm, QKV of the next layer.
//
// A block, one per SM, has some rows of all four weights, and reads all tokens. One warp copies weights to shared memory,
// in the order of use, from before the previous kernel has ended. WARPS others multiply; each has a part of the columns
// of a GEMM, of all the block's rows.
//
// Between two GEMMs blocks exchange their outputs through global memory, that is, L2, in pieces of 16 bytes that are
// written and read by one instruction: 8 columns of a token. Memory that no block has written yet holds EMPTY, which no rounding
// yields: readers poll, and there are neither barriers nor fences. A launch uses one of two sets of this memory, and
// empties the other, which the launch before it has used.
//
// Macros: HIDDEN, ATTENTION (columns of the output projection), INTERMEDIATE, QKV (rows); BLOCKS; IN_FLIGHT: copies of
// weights at a time, so that exchanged values do not wait behind many of them.

constexpr int WARPS = 8;
constexpr int PRODUCER = WARPS;
constexpr int THREADS = 32 * (WARPS + 1);
constexpr int OUT_ROWS = HIDDEN / BLOCKS;  // of a block, as the following
constexpr int UP_ROWS = INTERMEDIATE / BLOCKS;
constexpr int QKV_ROWS = QKV / BLOCKS;
constexpr u32 EMPTY = 0xffffffffu;  // two bfloat16 that are not numbers, of another form than the one of arithmetic
static_assert(OUT_ROWS == 8 && UP_ROWS == 24 && QKV_ROWS == 32, "rows of an instruction's tiles");
static_assert(HIDDEN % 256 == 0 && ATTENTION % 256 == 0 && INTERMEDIATE % 256 == 0, "a warp has groups of 32 columns");

// Of a row of weights in shared memory: neighboring rows are in different banks.
__host__ __device__ constexpr int stride(int columns) { return 2 * columns + 64; }

constexpr int AT_OUT = 0;  // the output projection, and then the second half of QKV
constexpr int OUT_BYTES = OUT_ROWS * stride(ATTENTION);
constexpr int HALF_QKV_BYTES = QKV_ROWS / 2 * stride(HIDDEN);
constexpr int AT_QKV = OUT_BYTES > HALF_QKV_BYTES ? OUT_BYTES : HALF_QKV_BYTES;
constexpr int AT_UP = AT_QKV + HALF_QKV_BYTES;  // gate and up, and then sums of them and of QKV
constexpr int AT_DOWN = AT_UP + 2 * UP_ROWS * stride(HIDDEN);
constexpr int AT_SUMS = AT_DOWN + OUT_ROWS * stride(INTERMEDIATE);
constexpr int AT_SQUARES = AT_SUMS + WARPS * 512;
constexpr int AT_BARRIERS = AT_SQUARES + WARPS * 64;
constexpr int OUT_CHUNKS = 2, UP_CHUNKS = 6, DOWN_CHUNKS = 4, QKV_CHUNKS = 4;
constexpr int UP_CHUNK = OUT_CHUNKS, DOWN_CHUNK = UP_CHUNK + UP_CHUNKS, QKV_CHUNK = DOWN_CHUNK + DOWN_CHUNKS;
constexpr int CHUNKS = QKV_CHUNK + QKV_CHUNKS;
constexpr int OUT_READ = CHUNKS;  // the barrier of warps that have read the output projection
static_assert(AT_BARRIERS + 8 * (CHUNKS + 1) <= 227 * 1024, "a block has 227 KiB of shared memory at most");
static_assert(2 * UP_ROWS * stride(HIDDEN) >= WARPS * (2 * UP_ROWS / 8) * 512, "sums fit in place of weights");

// Exchanged values: [column / 32][token / 8][token % 8][column % 32].
constexpr int TOKENS = 16, GROUP_BYTES = 2 * 32 * TOKENS;
constexpr int TO_ACTIVATED = 2 * TOKENS * HIDDEN;
constexpr int TO_NEXT = TO_ACTIVATED + 2 * TOKENS * INTERMEDIATE;
constexpr int SET_BYTES = TO_NEXT + 2 * TOKENS * HIDDEN;

struct Params {
    const char* attention;  // [tokens][ATTENTION]
    char* residual;         // [tokens][HIDDEN], read and written
    char* qkv;              // [tokens][QKV]
    const char *out_weight, *gate_up_weight, *down_weight, *qkv_weight, *mlp_norm;
    const char* next_norm;  // of the next layer, as the QKV weight
    bool has_next;
    char *used, *emptied;  // sets of exchanged values
    int tokens;
    float eps;
};

__device__ __forceinline__ uint4 load_piece(const char* from) {
    u64 first, second;
    VOLATILE("{ .reg .b128 piece; ld.relaxed.gpu.global.b128 piece, [%2]; mov.b128 {%0, %1}, piece; }"
             : "=l"(first), "=l"(second) : "l"(from) : "memory");
    return make_uint4((u32)first, (u32)(first >> 32), (u32)second, (u32)(second >> 32));
}

__device__ __forceinline__ void store_piece(char* to, u64 first, u64 second) {
    VOLATILE("{ .reg .b128 piece; mov.b128 piece, {%1, %2}; st.relaxed.gpu.global.b128 [%0], piece; }"
             ::"l"(to), "l"(first), "l"(second) : "memory");
}

__device__ __forceinline__ uint4 load_global(const char* from) {
    uint4 value;
    VOLATILE("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
             : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ u32 product(u32 first, u32 second) {
    u32 pair;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(first), "r"(second));
    return pair;
}

// Copies what is read once per step: it is the first to leave L2.
__device__ __forceinline__ void copy_once(u32 to, const void* from, int bytes, u32 barrier) {
    VOLATILE("{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy; "
             "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
             "[%0], [%1], %2, [%3], policy; }"
             ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

struct Block {
    const Params& params;
    u32 shared;
    int warp, lane;

    __device__ __forceinline__ u32 barrier(int index) const { return shared + AT_BARRIERS + 8 * index; }
};

// The warp that copies weights.
struct Producer : Block {
    int issued;

    template <int COLUMNS>
    __device__ __forceinline__ void rows(int at, const char* weight, int first_row, int count) {
        if (issued >= IN_FLIGHT) wait(barrier(issued - IN_FLIGHT), 0);
        u32 full = barrier(issued++);
        if (lane == 0) expect(full, count * 2 * COLUMNS);
        __syncwarp();
        const char* from = weight + (i64)(first_row + lane) * (2 * COLUMNS);
        if (lane < count) copy_once(shared + at + lane * stride(COLUMNS), from, 2 * COLUMNS, full);
    }

    __device__ __forceinline__ void run() {
        int block = blockIdx.x;
        constexpr int PER_OUT = OUT_ROWS / OUT_CHUNKS, PER_DOWN = OUT_ROWS / DOWN_CHUNKS;
        constexpr int PER_UP = 2 * UP_ROWS / UP_CHUNKS, PER_QKV = QKV_ROWS / QKV_CHUNKS;
#pragma unroll 1
        for (int i = 0; i < OUT_ROWS; i += PER_OUT)
            rows<ATTENTION>(AT_OUT + i * stride(ATTENTION), params.out_weight, block * OUT_ROWS + i, PER_OUT);
#pragma unroll 1
        for (int i = 0; i < 2 * UP_ROWS; i += PER_UP) {
            int row = block * UP_ROWS + i % UP_ROWS + i / UP_ROWS * INTERMEDIATE;
            rows<HIDDEN>(AT_UP + i * stride(HIDDEN), params.gate_up_weight, row, PER_UP);
        }
#pragma unroll 1
        for (int i = 0; i < OUT_ROWS; i += PER_DOWN)
            rows<INTERMEDIATE>(AT_DOWN + i * stride(INTERMEDIATE), params.down_weight, block * OUT_ROWS + i, PER_DOWN);
        if (!params.has_next) return;
#pragma unroll 1
        for (int i = 0; i < QKV_ROWS; i += PER_QKV) {
            if (i == QKV_ROWS / 2) wait(barrier(OUT_READ), 0);
            int at = i < QKV_ROWS / 2 ? AT_QKV + i * stride(HIDDEN) : AT_OUT + (i - QKV_ROWS / 2) * stride(HIDDEN);
            rows<HIDDEN>(at, params.qkv_weight, block * QKV_ROWS + i, PER_QKV);
        }
    }
};

// A warp that multiplies: tokens are the rows of a matrix instruction, and 8 rows of a weight its columns.
//
// A lane has 16 bytes of token lane / 4, of token 8 + lane / 4 and of row lane / 4: the operands of two instructions.
// The order of columns does not matter as long as tokens and weights have the same.
struct Consumer : Block {
    __device__ __forceinline__ int token(int half) const { return 8 * half + lane / 4; }

    template <int FIRST, int COUNT>
    __device__ __forceinline__ void wait_chunks() {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) wait(barrier(FIRST + i), 0);
    }

    // Loads this warp's columns of 8 * COUNT rows.
    template <int COLUMNS, int COUNT>
    __device__ __forceinline__ void load_weights(int at, uint4 (*weights)[COLUMNS / 256]) {
        u32 from = shared + at + lane / 4 * stride(COLUMNS) + warp * (COLUMNS / 4) + 16 * (lane % 4);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS / 256; ++j)
                weights[i][j] = load4(from + 8 * i * stride(COLUMNS) + 64 * j);
    }

    __device__ __forceinline__ void load_attention(uint4 (*x)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            bool valid = token(half) < params.tokens;
            const char* from = params.attention + (i64)token(half) * (2 * ATTENTION) + warp * (ATTENTION / 4);
#pragma unroll
            for (int i = 0; i < ATTENTION / 256; ++i)
                x[i][half] = valid ? load_global(from + 64 * i + 16 * (lane % 4)) : make_uint4(0, 0, 0, 0);
        }
    }

    // Loads this warp's columns of exchanged values, once they have been written. Tokens past the end are 0.
    template <int COLUMNS>
    __device__ __forceinline__ void receive(const char* from, uint4 (*x)[2]) {
        constexpr int GROUPS = COLUMNS / 256;
        from += warp * GROUPS * GROUP_BYTES;
        Watch watch;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) x[i][0] = x[i][1] = make_uint4(0, 0, 0, 0);
        for (;; watch.check()) {
            bool arrived = true;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (token(half) < params.tokens) {
#pragma unroll
                    for (int i = 0; i < GROUPS; ++i)
                        x[i][half] = load_piece(from + i * GROUP_BYTES + half * (GROUP_BYTES / 2) + 16 * lane);
                }
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) arrived &= x[i][0].w != EMPTY && x[i][1].w != EMPTY;
            if (__all_sync(~0u, arrived)) break;
        }
    }

    template <int GROUPS>
    __device__ __forceinline__ void multiply_group(float* sums, const uint4* x, uint4 weights, float* others) {
        multiply(sums, make_uint4(x[0].x, x[1].x, x[0].y, x[1].y), make_uint2(weights.x, weights.y));
        multiply(others, make_uint4(x[0].z, x[1].z, x[0].w, x[1].w), make_uint2(weights.z, weights.w));
    }

    // Stores the sums of a tile of tokens and COUNT tiles of rows over this warp's columns.
    template <int GROUPS, int COUNT>
    __device__ __forceinline__ void multiply_tile(
        int at, const uint4 (*x)[2], const uint4 (*weights)[GROUPS]) {
        constexpr int CHAINS = COUNT == 1 ? 4 : 1;  // an instruction waits for the sums before it
        float sums[COUNT][CHAINS][4] = {};
#pragma unroll
        for (int i = 0; i < GROUPS; ++i)
#pragma unroll
            for (int j = 0; j < COUNT; ++j)
                multiply_group<GROUPS>(sums[j][2 * i % CHAINS], x[i], weights[j][i], sums[j][(2 * i + 1) % CHAINS]);
        u32 to = shared + at + (warp) * COUNT * 512 + 16 * lane;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
#pragma unroll
            for (int chain = 1; chain < CHAINS; ++chain)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[j][0][i] += sums[j][chain][i];
            store_float4(to + 512 * j, sums[j][0][0], sums[j][0][1], sums[j][0][2], sums[j][0][3]);
        }
    }

    // Multiplies tokens by the norm's weight, and stores their sums of squares. The norm's factor follows the GEMM.
    template <int GROUPS>
    __device__ __forceinline__ void scale(uint4 (*x)[2], const uint4* norm) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) {
                u32 words[4] = {x[i][half].x, x[i][half].y, x[i][half].z, x[i][half].w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    squares = fmaf(low(words[j]), low(words[j]), fmaf(high(words[j]), high(words[j]), squares));
                x[i][half] = make_uint4(product(words[0], norm[i].x), product(words[1], norm[i].y),
                                        product(words[2], norm[i].z), product(words[3], norm[i].w));
            }
            squares = sum_lanes<2>(squares);
            if (lane % 4 == 0)
                store_float(shared + AT_SQUARES + 4 * ((warp) * 16 + half * 8 + lane / 4), squares);
        }
    }

    __device__ __forceinline__ void load_norm(const char* weight, uint4* norm) {
#pragma unroll
        for (int i = 0; i < HIDDEN / 256; ++i)
            norm[i] = load_global(weight + warp * (HIDDEN / 4) + 64 * i + 16 * (lane % 4));
    }

    // Returns the norm's factor of a token.
    __device__ __forceinline__ float factor(int half) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i)
            squares += load_float(shared + AT_SQUARES + 4 * ((i) * 16 + half * 8 + lane / 4));
        return inverse_root(fmaf(squares, 1.0f / HIDDEN, params.eps));
    }

    // Returns all warps' sums of a token, and of two rows of a tile of rows: 2 * (lane % 4) and the next.
    template <int COUNT>
    __device__ __forceinline__ float2 sum_of(int at, int row_tile, int half) {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            float2 part = load_float2(shared + at + (i * COUNT + row_tile) * 512 + 16 * lane + 8 * half);
            sum.x += part.x, sum.y += part.y;
        }
        return sum;
    }

    // Shares 8 columns of a token, of which each of four lanes has two; and empties their place in the other set.
    __device__ __forceinline__ void publish(int to, int half, int piece, u32 pair) {
        u32 other = __shfl_xor_sync(~0u, pair, 1);
        u64 first = (u64)other << 32 | pair, second = __shfl_xor_sync(~0u, first, 2);
        if (lane % 4) return;
        i64 at = to + piece / 4 * GROUP_BYTES + half * (GROUP_BYTES / 2) +
                 64 * (lane / 4) + 16 * (piece % 4);
        if (token(half) < params.tokens) store_piece(params.used + at, first, second);
        store_piece(params.emptied + at, ~0ull, ~0ull);
    }

    __device__ __forceinline__ void sync() { sync_named<1, WARPS>(); }

    // Adds this warp's tokens of a GEMM to the residual stream, and shares it.
    __device__ __forceinline__ void add(u32& residual, int to) {
        float2 sum = sum_of<1>(AT_SUMS, 0, warp);
        residual = pack(low(residual) + sum.x, high(residual) + sum.y);
        publish(to, warp, blockIdx.x, residual);
    }

    __device__ __forceinline__ float swiglu(float gate, float up) {
        return __fdividef(gate, 1.0f + power_of_two(-1.44269504f * gate)) * up;
    }

    __device__ __forceinline__ u32* residual_of(int half) const {
        return (u32*)(params.residual + (i64)token(half) * (2 * HIDDEN)) + blockIdx.x * (OUT_ROWS / 2) + lane % 4;
    }

    __device__ __forceinline__ void run() {
        u32 residual = 0;  // two columns of a token, in each lane of the first two warps, whose tokens are halves
        bool owns = warp < 2;
        int half = warp % 2, row_tile = warp / 2;  // of the sums of gate and up, and of QKV
        {  // output projection
            uint4 weights[1][ATTENTION / 256], x[ATTENTION / 256][2];
            wait_chunks<0, OUT_CHUNKS>();
            load_weights<ATTENTION, 1>(AT_OUT, weights);
            __syncwarp();
            if (lane == 0) arrive(barrier(OUT_READ));
            VOLATILE("griddepcontrol.wait;" ::: "memory");
            load_attention(x);
            if (owns && token(warp) < params.tokens)
                VOLATILE("ld.global.cg.u32 %0, [%1];" : "=r"(residual) : "l"(residual_of(warp)) : "memory");
            multiply_tile<ATTENTION / 256, 1>(AT_SUMS, x, weights);
            sync();
            if (owns) add(residual, 0);
        }
        {  // gate and up
            constexpr int COUNT = 2 * UP_ROWS / 8;
            uint4 weights[COUNT][HIDDEN / 256], norm[HIDDEN / 256], x[HIDDEN / 256][2];
            load_norm(params.mlp_norm, norm);
            wait_chunks<UP_CHUNK, UP_CHUNKS>();
            load_weights<HIDDEN, COUNT>(AT_UP, weights);
            sync();  // sums take the place of the weights
            receive<HIDDEN>(params.used, x);
            scale<HIDDEN / 256>(x, norm);
            multiply_tile<HIDDEN / 256, COUNT>(AT_UP, x, weights);
            sync();
            if (row_tile < UP_ROWS / 8) {
                float2 gate = sum_of<COUNT>(AT_UP, row_tile, half);
                float2 up = sum_of<COUNT>(AT_UP, row_tile + UP_ROWS / 8, half);
                float by = factor(half);
                u32 pair = pack(swiglu(by * gate.x, by * up.x), swiglu(by * gate.y, by * up.y));
                publish(TO_ACTIVATED, half, blockIdx.x * (UP_ROWS / 8) + row_tile, pair);
            }
        }
        {  // down
            uint4 weights[1][INTERMEDIATE / 256], x[INTERMEDIATE / 256][2];
            wait_chunks<DOWN_CHUNK, DOWN_CHUNKS>();
            load_weights<INTERMEDIATE, 1>(AT_DOWN, weights);
            receive<INTERMEDIATE>(params.used + TO_ACTIVATED, x);
            multiply_tile<INTERMEDIATE / 256, 1>(AT_SUMS, x, weights);
            sync();
            if (owns) {
                add(residual, TO_NEXT);
                if (token(warp) < params.tokens) *residual_of(warp) = residual;
            }
        }
        if (!params.has_next) return;
        constexpr int COUNT = QKV_ROWS / 8;
        uint4 weights[COUNT][HIDDEN / 256], norm[HIDDEN / 256], x[HIDDEN / 256][2];
        load_norm(params.next_norm, norm);
        wait_chunks<QKV_CHUNK, QKV_CHUNKS>();
        load_weights<HIDDEN, COUNT / 2>(AT_QKV, weights);
        load_weights<HIDDEN, COUNT / 2>(AT_OUT, weights + COUNT / 2);
        receive<HIDDEN>(params.used + TO_NEXT, x);
        scale<HIDDEN / 256>(x, norm);
        multiply_tile<HIDDEN / 256, COUNT>(AT_UP, x, weights);
        sync();
        float2 sum = sum_of<COUNT>(AT_UP, row_tile, half);
        float by = factor(half);
        u32* to = (u32*)(params.qkv + (i64)token(half) * (2 * QKV)) + blockIdx.x * (QKV_ROWS / 2);
        if (token(half) < params.tokens) to[row_tile * 4 + lane % 4] = pack(by * sum.x, by * sum.y);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) layer_gemms(
    const char* attention, char* residual, char* qkv, const char* out_weight, const char* gate_up_weight,
    const char* down_weight, const char* qkv_weight, const char* mlp_norm, const char* next_norm, char* exchange,
    int has_next, int set, int tokens, float eps) {
    extern __shared__ __align__(1024) char memory[];
    VOLATILE("griddepcontrol.launch_dependents;");
    Params params{attention,
                  residual,
                  qkv,
                  out_weight,
                  gate_up_weight,
                  down_weight,
                  qkv_weight,
                  mlp_norm,
                  next_norm,
                  has_next != 0,
                  exchange + set * SET_BYTES,
                  exchange + (1 - set) * SET_BYTES,
                  tokens,
                  eps};
    Block block{params, (u32)__cvta_generic_to_shared(memory), (int)threadIdx.x / 32, (int)threadIdx.x % 32};
    if (threadIdx.x == PRODUCER * 32) {
        for (int i = 0; i < CHUNKS; ++i) init_barrier(block.barrier(i), 1);
        init_barrier(block.barrier(OUT_READ), WARPS);
        VOLATILE("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (block.warp == PRODUCER)
        Producer{block, 0}.run();
    else
        Consumer{block}.run();
}
