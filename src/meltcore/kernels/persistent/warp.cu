// A warp that computes.
struct Warp {
    const Block& block;
    const Params& params;
    int warp, lane;
    Ring ring;

    __device__ __forceinline__ u32 begin() {
        wait(block.barrier(ring.slot), ring.phase);
        return block.slot(ring);
    }

    __device__ __forceinline__ void end() {
        __syncwarp();
        if (lane == 0) arrive(block.barrier(SLOTS + ring.slot));
        ring.next();
    }

    // Passes chunks that this warp does not need.
    __device__ __forceinline__ void pass(int chunks) {
#pragma unroll 1
        for (int i = 0; i < chunks; ++i) {
            begin();
            end();
        }
    }

    // Where this lane reads 8 columns of every 64, at first; the other 8 are at ^ 64. Odd rows begin with the upper
    // half, so that a quarter of a warp reads different banks.
    __device__ __forceinline__ u32 column_bytes() const { return lane % 4 * 16 ^ lane / 4 % 2 * 64; }

    // Loads two times 64 columns of this warp from chunks of 8 whole rows.
    template <int CHUNKS>
    __device__ __forceinline__ void load_rows(uint4 (*weights)[4]) {
        u32 offset = lane / 4 * ROW_BYTES + warp * 256 + column_bytes();
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            u32 slot = begin() + offset;
#pragma unroll
            for (int j = 0; j < 4; ++j) weights[i][j] = load4((slot + j / 2 * 128) ^ j % 2 * 64);
            end();
        }
    }

    // Loads this warp's half of the columns of its tile, whose first row is at `tile`.
    template <int BLOCKS, int BYTES>
    __device__ __forceinline__ void load_tile(u32 tile, uint4 (*weights)[4]) {
        u32 from = tile + lane / 4 * BYTES + warp % 2 * BLOCKS * 128 + column_bytes();
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) weights[i][j] = load4((from + i * 128 + j / 2 * 8 * BYTES) ^ j % 2 * 64);
    }
};
