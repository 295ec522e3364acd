// GEMM of experts on Hopper GPUs (grouped_gemm_wgmma.py), and of FP8 weights with scales of 128 x 128 blocks
// (../fp8/block_fp8_wgmma.py), after instructions.cu and wgmma.cu.
//
// One block per SM loops over tiles of up to 128 pairs and 256 rows of the weight. Its warp groups:
//   0     loads weights by TMA. Inputs of gate and up are rows of tokens, which threads copy; those of down are rows of
//         pairs in the order of tiles, loaded by TMA
//   1, 2  multiply 64 pairs each. One may be some steps behind the other, so that it still multiplies while the other
//         stores. The second group skips tiles of at most 64 pairs.
//
// Macros: K, columns of inputs and weights; N_TILES of a weight; GATED: 1 if a tile has 128 gate rows and 128 up rows,
// and stores silu(gate) * up; TOP_K of a token, if GATED; NUM_STAGES of the ring; SHARED_BYTES; FP8: 1 if operands are
// e4m3 with a scale per 128 columns, and what experts store for down is quantized; DENSE: 1 if all rows of tokens have one
// weight, for FP8, with a RESIDUAL (1) that is added to.

constexpr int BLOCK_M = 128, BLOCK_N = 256, BLOCK_K = FP8 ? 128 : 64;
constexpr bool GATHERS = GATED && !DENSE;
constexpr int GROUP_M = 64;     // pairs of a warp group
constexpr int COPY_ROWS = 128;  // of the weight
constexpr int COPY_PAIRS = FP8 ? 16 : GROUP_M;  // of inputs: the rest of a tile is not read
constexpr int GROUP_TILES = 8;  // dense: tiles of tokens that share their weights in the L2 cache
constexpr int STEPS = K / BLOCK_K;
constexpr int THREADS = 3 * 128;
constexpr int LOADER_REGISTERS = FP8 ? 40 : 56, COMPUTE_REGISTERS = FP8 ? 232 : 224;
static_assert(K % BLOCK_K == 0, "");

// --- shared memory: rows of 128 bytes whose 16-byte parts are swizzled -----------------------------------------------

constexpr int GROUP_BYTES = GROUP_M * 128, INPUT_BYTES = BLOCK_M * 128, COPY_BYTES = COPY_ROWS * 128;
constexpr int WEIGHT_BYTES = BLOCK_N * 128, STAGE_BYTES = INPUT_BYTES + WEIGHT_BYTES;
constexpr int STORE_BYTES = 16 * 256;  // of a warp: 16 rows of 128 columns
constexpr int AT_STORES = NUM_STAGES * STAGE_BYTES, AT_BARRIERS = AT_STORES + 8 * STORE_BYTES;
constexpr int FULL = 0, EMPTY = NUM_STAGES;
constexpr int ALIGNMENT = 1024;  // of the swizzle's pattern
static_assert(ALIGNMENT + AT_BARRIERS + 8 * 2 * NUM_STAGES <= SHARED_BYTES, "");

struct Params {
    const TensorMap *weight, *activated;
    const char* tokens;
    u16* outputs;
    const int *pairs, *expert_ids, *num_valid;
    int num_tiles;  // dense: tokens
    const float *input_scales, *weight_scales;
    float* output_scales;
    int output_stride;
};

// The tiles of this block, those of an expert and of one tile of pairs beside each other. What the next one needs is
// loaded a tile ahead.
struct Tiles {
    const Params& params;
    int index, m_tile, n_tile, expert, valid;
    int next_valid = 0, next_expert = 0;

    __device__ __forceinline__ explicit Tiles(const Params& params) : params(params), index(blockIdx.x) {
        look_ahead();
    }

    __device__ __forceinline__ bool has_next() const {
        return index < (DENSE ? (params.num_tiles + BLOCK_M - 1) / BLOCK_M : params.num_tiles) * N_TILES;
    }
    __device__ __forceinline__ int next_m_tile() const { return index / N_TILES; }
    __device__ __forceinline__ int first() const { return m_tile * BLOCK_M; }
    __device__ __forceinline__ int next_first() const { return next_m_tile() * BLOCK_M; }

    __device__ __forceinline__ void look_ahead() {
        if (DENSE || !has_next()) return;
        next_valid = __ldg(params.num_valid + next_m_tile());
        next_expert = __ldg(params.expert_ids + next_m_tile());
    }

    __device__ __forceinline__ bool next() {
        if (DENSE) {
            if (!has_next()) return false;
            int first_m = index / (GROUP_TILES * N_TILES) * GROUP_TILES, within = index - first_m * N_TILES;
            int group = min((params.num_tiles + BLOCK_M - 1) / BLOCK_M - first_m, GROUP_TILES);
            m_tile = first_m + within % group, n_tile = within / group, expert = 0;
            valid = min(params.num_tiles - m_tile * BLOCK_M, BLOCK_M);
            index += gridDim.x;
            return true;
        }
        while (has_next()) {
            m_tile = next_m_tile(), n_tile = index % N_TILES;
            valid = next_valid, expert = next_expert;
            index += gridDim.x;
            look_ahead();
            if (valid > 0) return true;
        }
        return false;
    }
};

// --- loading ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_weight(const Params& params, u32 to, int row, int column, u32 barrier) {
    constexpr int SECOND = GATED ? N_TILES * COPY_ROWS : COPY_ROWS;  // up rows are below all gate rows
    copy_box(to, params.weight, column, row, barrier);
    copy_box(to + COPY_BYTES, params.weight, column, row + SECOND, barrier);
}

__device__ __forceinline__ int weight_row(const Tiles& tile) {
    constexpr int ROWS = N_TILES * BLOCK_N;
    return tile.expert * ROWS + tile.n_tile * (GATED ? COPY_ROWS : BLOCK_N);
}

// Each thread copies a 16-byte part of every 16th row, that of a pair's token. Rows without a pair repeat token 0.
__device__ __forceinline__ void load_tokens(const Params& params, u32 shared, int thread) {
    constexpr int PARTS = BLOCK_M / 16;
    Ring<NUM_STAGES> ring;
    Tiles tile(params);
    int row = thread / 8, part = thread % 8;
    u32 to = shared + row * 128 + (part ^ row % 8) * 16;
    u32 offsets[PARTS], next_pairs[PARTS];
    int loaded_m_tile = -1;
    auto load_pairs = [&](int m_tile, int first, int valid) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i)
            next_pairs[i] = row + 16 * i < valid ? __ldg(params.pairs + first + row + 16 * i) : 0;
        loaded_m_tile = m_tile;
    };
    while (tile.next()) {
        if (loaded_m_tile != tile.m_tile) load_pairs(tile.m_tile, tile.first(), tile.valid);
#pragma unroll
        for (int i = 0; i < PARTS; ++i) offsets[i] = next_pairs[i] / TOP_K * (128 / BLOCK_K * K) + part * 16;
        if (tile.has_next()) load_pairs(tile.next_m_tile(), tile.next_first(), tile.next_valid);
        int from_row = weight_row(tile);
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            u32 full = shared + AT_BARRIERS + 8 * (FULL + ring.slot), stage = ring.slot * STAGE_BYTES;
            wait(shared + AT_BARRIERS + 8 * (EMPTY + ring.slot), ring.phase ^ 1);
            if (thread == 0) {
                expect(full, WEIGHT_BYTES);
                load_weight(params, shared + stage + INPUT_BYTES, from_row, step * BLOCK_K, full);
            }
            const char* from = params.tokens + step * 128;
#pragma unroll
            for (int i = 0; i < PARTS; ++i)
                if (tile.valid > (FP8 ? i * 16 : i / (PARTS / 2) * GROUP_M))
                    VOLATILE("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                             ::"r"(to + stage + i * 16 * 128), "l"(from + offsets[i]) : "memory");
            VOLATILE("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
            ring.next();
        }
    }
#if FP8
    // Until all copies have been used. With cp.async.wait_all the compiler would ignore the registers that warps take.
#pragma unroll
    for (int i = 0; i < NUM_STAGES; ++i, ring.next()) wait(shared + AT_BARRIERS + 8 * (EMPTY + ring.slot), ring.phase ^ 1);
#else
    VOLATILE("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ __forceinline__ void load_activated(const Params& params, u32 shared) {
    Ring<NUM_STAGES> ring;
    Tiles tile(params);
    while (tile.next()) {
        int from_row = weight_row(tile), copies = (tile.valid + COPY_PAIRS - 1) / COPY_PAIRS;
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            u32 full = shared + AT_BARRIERS + 8 * (FULL + ring.slot), stage = shared + ring.slot * STAGE_BYTES;
            wait(shared + AT_BARRIERS + 8 * (EMPTY + ring.slot), ring.phase ^ 1);
            expect(full, WEIGHT_BYTES + copies * (COPY_PAIRS * 128));
            load_weight(params, stage + INPUT_BYTES, from_row, step * BLOCK_K, full);
            for (int copy = 0; copy < copies; ++copy)
                copy_box(stage + copy * (COPY_PAIRS * 128), params.activated, step * BLOCK_K,
                         tile.first() + copy * COPY_PAIRS, full);
            ring.next();
        }
    }
}

// --- computing -------------------------------------------------------------------------------------------------------

#if FP8
// Products of 64 pairs and 128 rows of the weight, of 32 columns. add: to those of the columns before.
__device__ __forceinline__ void multiply_half(float* products, u64 inputs, u64 weight, int add) {
    VOLATILE("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
             "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
             "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
             "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
             "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
             "%62, %63}, %64, %65, p, 1, 1; }"
             : OUTPUTS_64(products) : "l"(inputs), "l"(weight), "r"(add));
}

// Rounded once, for quotients that are neither tiny nor huge. __fdiv_rn has a call for these, with which the compiler
// ignores the registers that the warp groups take.
__device__ __forceinline__ float divide(float dividend, float divisor) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
    inverse = fmaf(inverse, fmaf(-divisor, inverse, 1.0f), inverse);
    float quotient = dividend * inverse;
    quotient = fmaf(fmaf(-divisor, quotient, dividend), inverse, quotient);
    return fmaf(fmaf(-divisor, quotient, dividend), inverse, quotient);
}
#else
#define REGISTERS_128 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
    "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, " \
    "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
    "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, " \
    "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
    "%124, %125, %126, %127}"

// Products of 64 pairs and 256 rows of the weight, of 16 columns. add: to those of the columns before.
__device__ __forceinline__ void multiply_weight(float* sums, u64 inputs, u64 weight, int add) {
    VOLATILE("{ .reg .pred p; setp.ne.b32 p, %130, 0;\n"
             "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " REGISTERS_128 ", %128, %129, p, 1, 1, 0, 0; }"
             : OUTPUTS_64(sums), OUTPUTS_64((sums + 64)) : "l"(inputs), "l"(weight), "r"(add));
}
#endif

// A thread has two rows of its warp's 16, lane / 4 and 8 more, and of every 8 columns two.
struct Group {
    const Params& params;
    u32 shared;
    int group, warp, lane;  // 0 or 1; of the warp group; of the warp
    Ring<NUM_STAGES> ring;

    __device__ __forceinline__ u32 barrier(int index) const { return shared + AT_BARRIERS + 8 * index; }

    __device__ __forceinline__ void release(u32 slot) const {
        if (lane == 0) arrive(barrier(EMPTY + slot));
    }

    __device__ __forceinline__ void skip() {
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            wait(barrier(FULL + ring.slot), ring.phase);
            release(ring.slot);
            ring.next();
        }
    }

#if FP8
    // first: of the warp's rows in the tile. Products of 128 columns are scaled as they are added.
    __device__ __forceinline__ void multiply(float* sums, const Tiles& tile, int first) {
        constexpr int ROW_BLOCKS = 2 * N_TILES, SECOND = GATED ? N_TILES : 1;
        int row_block = tile.expert * ROW_BLOCKS + tile.n_tile * (GATED ? 1 : 2);
        const float* weight_scales = params.weight_scales + (i64)row_block * STEPS;
        const float* row_scales[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int row = tile.first() + min(first + lane / 4 + 8 * i, tile.valid - 1);
            if (GATHERS) row = __ldg(params.pairs + row) / TOP_K;
            row_scales[i] = params.input_scales + (i64)row * STEPS;
        }
        float input_scales[2], next_scales[2], half_scales[2], next_half_scales[2], products[64];
        auto load_scales = [&](int step) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                next_scales[i] = __ldcg(row_scales[i] + step);
                next_half_scales[i] = __ldg(weight_scales + i * SECOND * STEPS + step);
            }
        };
        load_scales(0);
#pragma unroll
        for (int i = 0; i < 128; ++i) sums[i] = 0.0f;
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            u32 stage = shared + ring.slot * STAGE_BYTES;
            u64 inputs = descriptor(stage + group * GROUP_BYTES, 16);
#pragma unroll
            for (int i = 0; i < 2; ++i) input_scales[i] = next_scales[i], half_scales[i] = next_half_scales[i];
            load_scales(min(step + 1, STEPS - 1));
            wait(barrier(FULL + ring.slot), ring.phase);
            if (GATHERS) fence_async();  // after the loaders' copies, which are not TMA's
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u64 weight = descriptor(stage + INPUT_BYTES + half * COPY_BYTES, 16);
                pin<64>(products);
                begin_products();
#pragma unroll
                for (int i = 0; i < BLOCK_K / 32; ++i) multiply_half(products, inputs + 2 * i, weight + 2 * i, i > 0);
                commit_products();
                wait_products<0>();
                pin<64>(products);
                if (half) release(ring.slot);
                float factors[2] = {input_scales[0] * half_scales[half], input_scales[1] * half_scales[half]};
#pragma unroll
                for (int i = 0; i < 64; ++i) sums[64 * half + i] += products[i] * factors[i / 2 % 2];
            }
            ring.next();
        }
    }

    // Stores a row's part of 8 numbers, quantized. The row's 128 numbers, in 16 lanes, share a scale.
    __device__ __forceinline__ void store_quantized(uint4 words, u64* to, float* scale, bool stores) const {
        constexpr float MAX = 448.0f, MIN_AMAX = 1e-20f;
        float values[8], amax = MIN_AMAX;
        unpack(words, values);
#pragma unroll
        for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(values[i]));
        amax = max_lanes<8>(amax);
        float inverse = divide(MAX, amax);
        u64 parts = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u16 pair;
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
                : "=h"(pair) : "f"(values[2 * i + 1] * inverse), "f"(values[2 * i] * inverse));
            parts |= (u64)pair << 16 * i;
        }
        if (stores) *to = parts;
        if (stores && lane % 16 == 0) *scale = divide(amax, MAX);
    }
#else
    __device__ __forceinline__ void multiply(float* sums, const Tiles&, int) {
        u32 before = 0;
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            u32 stage = shared + ring.slot * STAGE_BYTES;
            u64 inputs = descriptor(stage + group * GROUP_BYTES, 16), weight = descriptor(stage + INPUT_BYTES, 16);
            wait(barrier(FULL + ring.slot), ring.phase);
            if (GATED) fence_async();  // after the loaders' copies, which are not TMA's
            pin<128>(sums);
            begin_products();
#pragma unroll
            for (int i = 0; i < BLOCK_K / 16; ++i)
                multiply_weight(sums, inputs + 2 * i, weight + 2 * i, i > 0 ? 1 : step);
            commit_products();
            if (step > 0) {
                wait_products<1>();
                release(before);
            }
            before = ring.slot;
            ring.next();
        }
        wait_products<0>();
        pin<128>(sums);
        release(before);
    }
#endif

    // Stores 128 columns of the warp's first `rows` rows. value(i): number i of this thread; target(row): where a row goes.
    template <typename Value, typename Target>
    __device__ __forceinline__ void store(int rows, Value value, Target target) const {
        u32 at = shared + AT_STORES + (group * 4 + warp) * STORE_BYTES;
#if RESIDUAL
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int row = 2 * i + lane / 16;
            if (row < rows) store4(at + row * 256 + (lane % 16 ^ row % 8) * 16, ((uint4*)target(row))[lane % 16]);
        }
        __syncwarp();
#endif
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                u32 to = at + (lane / 4 + 8 * r) * 256 + (i ^ lane / 4) * 16 + lane % 4 * 4;
                u32 before = RESIDUAL ? load_word(to) : 0;
                float first = value(4 * i + 2 * r), second = value(4 * i + 2 * r + 1);
                if (RESIDUAL) first += low(before), second += high(before);
                VOLATILE("st.shared.u32 [%0], %1;" ::"r"(to), "r"(pack(first, second)) : "memory");
            }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int row = 2 * i + lane / 16;
            uint4 words = load4(at + row * 256 + (lane % 16 ^ row % 8) * 16);
            u16* to = target(row);
#if FP8 && !DENSE && GATED
            i64 row_block = ((u64)to - (u64)params.outputs) / 256;  // `to` counts bytes as if they had two
            store_quantized(words, (u64*)((char*)params.outputs + row_block * 128) + lane % 16,
                            params.output_scales + row_block, row < rows);
#else
            if (row < rows) ((uint4*)to)[lane % 16] = words;
#endif
        }
        __syncwarp();
    }

    __device__ __forceinline__ void run() {
        float sums[128];
        Tiles tile(params);
        int first = group * GROUP_M + warp * 16;
        auto pair_of = [&](int tile_row) { return GATED || DENSE ? 0 : __ldg(params.pairs + tile_row + first + lane % 16); };
        int next_pair = 0, loaded_m_tile = -1;
        while (tile.next()) {
            int rows = tile.valid - first, pair = loaded_m_tile == tile.m_tile ? next_pair : pair_of(tile.first());
            if (tile.has_next()) next_pair = pair_of(tile.next_first()), loaded_m_tile = tile.next_m_tile();
            if (tile.valid <= group * GROUP_M) {
                skip();
                continue;
            }
            multiply(sums, tile, first);
            if (GATED) {
                int stride = DENSE ? params.output_stride : N_TILES * 128;
                u16* to = params.outputs + (i64)(tile.first() + first) * stride + tile.n_tile * 128;
                store(
                    rows, [&](int i) { return swiglu(sums[i], sums[64 + i]); },
                    [&](int row) { return to + row * stride; });
            } else {
                u16* to = params.outputs + tile.n_tile * BLOCK_N;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    store(rows, [&](int i) { return sums[64 * half + i]; },
                          [&](int row) {
                              if (DENSE) return to + (i64)(tile.first() + first + row) * params.output_stride + half * 128;
                              return to + (i64)__shfl_sync(~0u, pair, row) * (N_TILES * BLOCK_N) + half * 128;
                          });
            }
        }
    }

    __device__ __forceinline__ static float swiglu(float gate, float up) {
        constexpr float LOG2_E = 1.4426950408889634f;
        return __fdividef(gate, 1.0f + power_of_two(-LOG2_E * gate)) * up;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_grouped_gemm_wgmma(
    const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap activated, const char* tokens,
    u16* outputs,
#if !DENSE
    const int* pairs, const int* expert_ids, const int* num_valid, const int* num_tiles
#if FP8
    ,
#endif
#else
    int num_tokens, int output_stride,
#endif
#if FP8
    const float* input_scales, const float* weight_scales, float* output_scales
#endif
) {
    extern __shared__ char memory[];
    u32 shared = ((u32)__cvta_generic_to_shared(memory) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; ++i) {
            init_barrier(shared + AT_BARRIERS + 8 * (FULL + i), GATHERS ? 1 + 128 : 1);
            init_barrier(shared + AT_BARRIERS + 8 * (EMPTY + i), 8);
        }
        fence_barriers();
    }
    start_dependents();
    wait_for_kernels();
    __syncthreads();
#if DENSE
    Params params{&weight, &activated, tokens, outputs, nullptr, nullptr, nullptr, num_tokens};
    params.output_stride = output_stride;
#else
    Params params{&weight, &activated, tokens, outputs, pairs, expert_ids, num_valid, __ldg(num_tiles)};
#endif
#if FP8
    params.input_scales = input_scales, params.weight_scales = weight_scales, params.output_scales = output_scales;
#endif
    if (warp < 4) {
        release_registers<LOADER_REGISTERS>();
#if GATED && !DENSE
        load_tokens(params, shared, threadIdx.x);
#else
        if (threadIdx.x == 0) load_activated(params, shared);
#endif
    } else {
        take_registers<COMPUTE_REGISTERS>();
        Group{params, shared, warp / 4 - 1, warp % 4, lane}.run();
    }
}
