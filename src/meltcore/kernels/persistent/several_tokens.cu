// GEMVs of several tokens: a matrix instruction multiplies 16 rows and 16 columns of the weights by up to 8 vectors.
//
// A lane has 16 bytes of rows lane / 4 and 8 + lane / 4, that is, the operands of two instructions: the order of columns
// does not matter as long as weights and vectors have the same.
struct Gemv : Warp {
    // The normalized input is the sum of two bfloat16. With up to 4 tokens one instruction multiplies both.
    static constexpr bool BOTH = TOKENS <= 4;

    // Chunks of rows that are in registers before the vectors arrive: with 8 tokens a thread has fewer registers.
    static constexpr int EARLY = TOKENS <= 4 ? 6 : 4;

    using Norm = u32;  // where the weights are of the columns that this lane multiplies first
    __device__ __forceinline__ Norm load_norm(u32 weights) { return weights + warp * 256 + 16 * (lane % 4); }

    __device__ __forceinline__ int token() const { return lane / 4 % TOKENS; }  // whose columns this lane multiplies

    // Odd rows were loaded with their halves of 128 bytes swapped.
    __device__ __forceinline__ void order(uint4& first, uint4& second) {
        if (lane / 4 % 2) {
            uint4 other = first;
            first = second, second = other;
        }
    }

    template <int CHUNKS>
    __device__ __forceinline__ void load_rows(uint4 (*weights)[4]) {
        constexpr int COUNT = CHUNKS < EARLY ? CHUNKS : EARLY;
        Warp::load_rows<COUNT>(weights);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            order(weights[i][0], weights[i][1]), order(weights[i][2], weights[i][3]);
    }

    template <int BLOCKS, int BYTES>
    __device__ __forceinline__ void load_tile(u32 tile, uint4 (*weights)[4]) {
        Warp::load_tile<BLOCKS, BYTES>(tile, weights);
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) order(weights[i][0], weights[i][1]), order(weights[i][2], weights[i][3]);
    }

    // Adds the products of 32 columns of rows lane / 4 (`upper`) and 8 + lane / 4 (`lower`).
    __device__ __forceinline__ void multiply_pair(float* sums, uint4 upper, uint4 lower, uint4 vector) {
        multiply(sums, make_uint4(upper.x, lower.x, upper.y, lower.y), make_uint2(vector.x, vector.y));
        multiply(sums, make_uint4(upper.z, lower.z, upper.w, lower.w), make_uint2(vector.z, vector.w));
    }

    // Two values of the residual stream times weights of the norm, as the sum of two bfloat16.
    __device__ __forceinline__ void factors(u32 x, u32 norm, u32& factor, u32& rest) {
        float first = low(x) * low(norm), second = high(x) * high(norm);
        factor = pack(first, second);
        rest = pack(first - low(factor), second - high(factor));
    }

    // Loads 64 columns of two chunks of rows: [column / 32][chunk].
    __device__ __forceinline__ void load_late(const u32* slots, int columns, uint4 (*weights)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 from = slots[i] + lane / 4 * ROW_BYTES + warp * 256 + 2 * columns + column_bytes();
            weights[0][i] = load4(from), weights[1][i] = load4(from ^ 64);
            order(weights[0][i], weights[1][i]);
        }
    }

    // Stores the sums of CHUNKS chunks of rows over this warp's columns.
    template <int CHUNKS, int STRIDE>
    __device__ __forceinline__ void multiply_rows(const uint4 (*weights)[4], Norm norm) {
        float sums[CHUNKS / 2][4] = {};
        constexpr bool LATE = CHUNKS > EARLY;
        u32 slots[2];
        if constexpr (LATE) {
            Ring second = ring;
            second.next();
            wait(block.barrier(ring.slot), ring.phase), wait(block.barrier(second.slot), second.phase);
            slots[0] = block.slot(ring), slots[1] = block.slot(second);
        }
        uint4 late[2][2];
        u32 from = block.shared + AT_X + token() * X_STRIDE + warp * 256 + 16 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint4 x = load4(from + 64 * i), weight = load4(norm + 64 * i), vector, rest;
            if (LATE && i % 2 == 0) load_late(slots, 32 * i, late);
            factors(x.x, weight.x, vector.x, rest.x), factors(x.y, weight.y, vector.y, rest.y);
            factors(x.z, weight.z, vector.z, rest.z), factors(x.w, weight.w, vector.w, rest.w);
            if (BOTH && lane >= 16) vector = rest;
#pragma unroll
            for (int pair = 0; pair < CHUNKS / 2; ++pair) {
                bool is_late = 2 * pair >= EARLY;
                uint4 upper = is_late ? late[i % 2][0] : weights[2 * pair][i];
                uint4 lower = is_late ? late[i % 2][1] : weights[2 * pair + 1][i];
                multiply_pair(sums[pair], upper, lower, vector);
                if (!BOTH) multiply_pair(sums[pair], upper, lower, rest);
            }
        }
        if constexpr (LATE) end(), end();
        u32 to = block.shared + AT_SUMS + 4 * ((warp * TOKENS + lane % 4 * 2) * STRIDE + lane / 4);
#pragma unroll
        for (int pair = 0; pair < CHUNKS / 2; ++pair)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float sum = BOTH ? sums[pair][i] + exchange(sums[pair][i], 2) : sums[pair][i];
                u32 at = to + 4 * (i % 2 * STRIDE + (2 * pair + i / 2) * CHUNK_ROWS);
                if (lane % 4 * 2 < TOKENS) store_float(at, sum);
            }
    }

    // Multiplies 16 rows (a tile) by a half of the columns, BLOCKS times 64. A pair of warps has a tile.
    template <int BLOCKS, int STRIDE>
    __device__ __forceinline__ void multiply_tile(const uint4 (*weights)[4], u32 vectors, u32 tag) {
        float sums[2][4] = {};
        u32 from = vectors + token() * STRIDE + warp % 2 * BLOCKS * 128 + 16 * (lane % 4);
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                multiply_pair(sums[j], weights[i][j], weights[i][2 + j], load4(from + 128 * i + 64 * j));
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[0][i] += sums[1][i];
        int tile = warp / 2;
        u32 at = block.shared + AT_PAIR_SUMS + 16 * (32 * tile + lane);
        if (warp % 2) {
            store_float4(at, sums[0][0], sums[0][1], sums[0][2], sums[0][3]);
            VOLATILE("bar.arrive %0, 64;" ::"r"(4 + tile) : "memory");
        } else {
            VOLATILE("bar.sync %0, 64;" ::"r"(4 + tile) : "memory");
            uint4 words = load4(at);
            float others[4] = {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                               __uint_as_float(words.w)};
            u64* to = params.exchange + (((tag & 1) * TEAM + block.rank) * TEAMS + block.team) * (TOKENS * OUT_ROWS);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int of = lane % 4 * 2 + i % 2, row = tile * 16 + i / 2 * 8 + lane / 4;
                if (block.runs(of)) publish(to + of * OUT_ROWS + row, __float_as_uint(sums[0][i] + others[i]), tag);
            }
        }
    }
};
