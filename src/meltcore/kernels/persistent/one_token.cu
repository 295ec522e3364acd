// GEMVs of one token.
struct Gemv : Warp {
    using Norm = uint2;  // weights of the columns 4 * lane to 4 * lane + 3 of this warp
    __device__ __forceinline__ Norm load_norm(u32 weights) { return load2(weights + warp * 256 + 8 * lane); }

    // Of column lane / 4 of a matrix instruction: bit 0 is the half of a lane's 16 bytes, bit 1 is set for odd rows,
    // bit 2 for what the factors' upper part lacks.
    __device__ __forceinline__ u32 factor_bytes() const { return lane % 4 * 16 ^ lane / 8 % 2 * 64; }
    __device__ __forceinline__ uint2 factors_of(uint4 words) const {
        return lane / 4 % 2 ? make_uint2(words.y, words.w) : make_uint2(words.x, words.z);
    }

    // The residual stream of this warp's columns times the weight of the norm, as the sum of two bfloat16.
    __device__ __forceinline__ void load_factors(Norm norm, uint2* factors) {
        uint2 x = load2(block.shared + AT_X + warp * 256 + 8 * lane);
        float a = low(x.x) * low(norm.x), b = high(x.x) * high(norm.x);
        float c = low(x.y) * low(norm.y), d = high(x.y) * high(norm.y);
        u32 at = block.shared + AT_FACTORS + warp * 512, first = pack(a, b), second = pack(c, d);
        store_words(at + 8 * lane, first, second);
        u32 rest = pack(a - low(first), b - high(first)), second_rest = pack(c - low(second), d - high(second));
        store_words(at + 256 + 8 * lane, rest, second_rest);
        __syncwarp();
        u32 from = at + lane / 16 * 256 + factor_bytes();
#pragma unroll
        for (int i = 0; i < 4; ++i) factors[i] = factors_of(load4((from + i / 2 * 128) ^ i % 2 * 64));
        __syncwarp();
    }

    // The sum of row lane / 4, in lanes of `has_result`.
    __device__ __forceinline__ float result(const float* sums) const {
        float sum = sums[0] + sums[3];
        return sum + exchange(sum, 2);
    }
    __device__ __forceinline__ bool has_result() const { return lane % 4 == lane / 4 % 2; }

    // Stores the sums of CHUNKS chunks of rows over this warp's columns.
    template <int CHUNKS, int STRIDE>
    __device__ __forceinline__ void multiply_rows(const uint4 (*weights)[4], Norm norm) {
        uint2 factors[4];
        load_factors(norm, factors);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            float sums[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) multiply(sums, weights[chunk][i], factors[i]);
            float sum = result(sums);
            if (has_result()) store_float(block.shared + AT_SUMS + 4 * (warp * STRIDE + chunk * CHUNK_ROWS + lane / 4), sum);
        }
    }

    // Multiplies 16 rows (a tile) by a half of the columns, BLOCKS times 64. A pair of warps has a tile.
    template <int BLOCKS, int STRIDE>
    __device__ __forceinline__ void multiply_tile(const uint4 (*weights)[4], u32 vector, u32 tag) {
        float sums[2][4] = {};
        u32 from = vector + warp % 2 * BLOCKS * 128 + factor_bytes();
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                uint2 factors = factors_of(load4((from + i * 128) ^ j * 64));
                if (lane >= 16) factors = make_uint2(0, 0);
                multiply(sums[0], weights[i][j], factors);
                multiply(sums[1], weights[i][2 + j], factors);
            }
        float2 both = make_float2(result(sums[0]), result(sums[1]));
        int tile = warp / 2, row = tile * 16 + lane / 4;
        u32 at = block.shared + AT_PAIR_SUMS + 4 * row;
        if (warp % 2) {
            if (has_result()) store_float(at, both.x), store_float(at + 32, both.y);
            VOLATILE("bar.arrive %0, 64;" ::"r"(4 + tile) : "memory");
        } else {
            VOLATILE("bar.sync %0, 64;" ::"r"(4 + tile) : "memory");
            if (has_result()) {
                u64* to = params.exchange + (((tag & 1) * TEAM + block.rank) * TEAMS + block.team) * OUT_ROWS + row;
                publish(to, __float_as_uint(both.x + load_float(at)), tag);
                publish(to + 8, __float_as_uint(both.y + load_float(at + 32)), tag);
            }
        }
    }
};
