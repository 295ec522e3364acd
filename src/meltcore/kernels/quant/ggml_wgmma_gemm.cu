// Mixed-input GEMM on Hopper GPUs (ggml_wgmma_gemm.py), after instructions.cu, wgmma.cu and ggml_bits.cu.
//
// Rows of the weight are the first operand of wgmma, which may be in registers: there they are decoded. Tokens are the
// second one, in shared memory. Products of chunks of columns, of tiles of the weight's rows and of tokens, are cut
// into one equal run for every block (stream-K). Warp groups:
//   0     its warps load packed values by TMA, tokens by TMA, and scales
//   1...  decode and multiply 64 rows each. While the tensor cores multiply 32 columns, the next ones are decoded into
//         other registers
//
// A decoded value is rounded once, to the type of the tokens: bits of a quantized value are put into the mantissa of a
// float32 number, and what a fused multiply-add makes of it and the scale is exact (with minima: rounded to float32).
//
// Macros: FORMAT, GROUP, BF16_SCALES, HALF (ggml_bits.cu); TOKENS of a tile; WARP_GROUPS that multiply; WEIGHT_STAGES,
// TOKEN_STAGES; SHARED_BYTES.

constexpr int CHUNK = FORMAT == Q8_0 ? 128 : 256;  // columns of 128 bytes of a row's values
constexpr int BOX = 64;                            // columns of 128 bytes of a token
constexpr int BOXES = CHUNK / BOX;
constexpr int ROWS = 64 * WARP_GROUPS;
constexpr int SUMS = TOKENS / 2;  // of a thread
constexpr int GATED = 1, RESIDUAL = 2, FLOAT_OUTPUT = 4;  // flags of a launch
constexpr int WARPS = 4 * WARP_GROUPS;  // that multiply
constexpr int THREADS = 128 + 32 * WARPS, SCALE_THREADS = 64;
// Registers per thread after the warp groups have divided them anew. Their sum may not exceed the registers that the
// block starts with, which are 168 per thread with two computing warp groups and 128 with three.
constexpr int COMPUTE_REGISTERS = WARP_GROUPS == 2 ? 232 : 160, LOADER_REGISTERS = WARP_GROUPS == 2 ? 40 : 32;

// --- shared memory ---------------------------------------------------------------------------------------------------

// Values are stored with the swizzle for rows of 128 bytes, and high bits with the one for rows of their bytes. The scales of one row in one chunk form a record: it begins with words of scales, and words of sub-scales or
// zero points follow.
constexpr int GROUPS = 256 / GROUP, ZERO_BYTES = GROUPS < 4 ? 4 : GROUPS;  // of INT4, per chunk
constexpr bool HAS_PAIRS = FORMAT == Q4_1 || FORMAT == Q5_1;  // of a scale and a minimum for 32 columns
constexpr bool HAS_SUBSCALES = FORMAT == Q4_K || FORMAT == Q5_K;
constexpr int RECORD = FORMAT == Q8_0 || (FORMAT == INT4 && GROUP == 128)               ? 8
                       : FORMAT == Q6_K || HAS_PAIRS || (FORMAT == INT4 && GROUP == 32) ? 32
                                                                                        : 16;
// Values of 4 bits with scales of at most 11 bits are decoded in pairs of bfloat16. Q4_0, with a scale per 32 columns,
// gains nothing.
constexpr bool IN_PAIRS = !HALF && FORMAT == INT4;
constexpr bool HAS_MINIMA = HAS_PAIRS || HAS_SUBSCALES;
constexpr int VALUE_BYTES = ROWS * 128, HIGH_BYTES = ROWS * ROW_HIGH_BYTES;
constexpr int AT_HIGH = VALUE_BYTES, AT_SCALES = AT_HIGH + HIGH_BYTES;
constexpr int ALIGNMENT = 1024;  // of the swizzle's pattern
constexpr int WEIGHT_BYTES = (AT_SCALES + ROWS * RECORD + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
constexpr int TOKEN_BYTES = TOKENS * 128;
constexpr int AT_TOKENS = WEIGHT_STAGES * WEIGHT_BYTES, AT_BARRIERS = AT_TOKENS + TOKEN_STAGES * TOKEN_BYTES;
constexpr int WEIGHT_FULL = 0, WEIGHT_EMPTY = WEIGHT_STAGES, TOKEN_FULL = 2 * WEIGHT_STAGES;
constexpr int TOKEN_EMPTY = TOKEN_FULL + TOKEN_STAGES, BARRIERS = TOKEN_EMPTY + TOKEN_STAGES;
static_assert(VALUE_BYTES % ALIGNMENT == 0 && TOKEN_BYTES % ALIGNMENT == 0, "");
constexpr int AT_ARRIVED = AT_BARRIERS + 8 * BARRIERS;  // how many parts of a tile were there before
static_assert(ALIGNMENT + AT_ARRIVED + 4 <= SHARED_BYTES, "");

struct Params {
    const TensorMap *values, *high, *tokens;
    const char *scales, *subscales;
    void* output;
    float* partial;
    int* counters;
    int token_count, outputs, k, output_stride, chunks, token_tiles, units, flags;

    __device__ __forceinline__ bool gated() const { return flags & GATED; }
};

// The units of a block: chunks of a tile one after the other, tiles of the same rows of the weight beside each other.
struct Units {
    const Params& params;
    int unit, end;

    __device__ __forceinline__ explicit Units(const Params& params)
        : params(params), unit(begin_of(params, blockIdx.x)), end(begin_of(params, blockIdx.x + 1)) {}
    __device__ __forceinline__ static int begin_of(const Params& params, int block) {
        return (i64)block * params.units / gridDim.x;
    }
    // The block that has a unit.
    __device__ __forceinline__ static int block_of(const Params& params, int unit) {
        return ((i64)(unit + 1) * gridDim.x - 1) / params.units;
    }
    __device__ __forceinline__ bool has_one() const { return unit < end; }
    __device__ __forceinline__ int tile() const { return unit / params.chunks; }
    __device__ __forceinline__ int chunk() const { return unit % params.chunks; }
    __device__ __forceinline__ int row_tile() const { return tile() / params.token_tiles; }
    __device__ __forceinline__ int token_tile() const { return tile() % params.token_tiles; }
};

// --- loading ---------------------------------------------------------------------------------------------------------

// 16 rows of a tile are two times 8 of the weight, of which a gated one has 8 gate and 8 up rows.
__device__ __forceinline__ void copy_rows(u32 to, const void* map, int byte, int sixteen, u32 barrier) {
    VOLATILE("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
             "[%0], [%1, {%2, %3, %3, %4}], [%5];"
             ::"r"(to), "l"(map), "r"(byte), "r"(0), "r"(sixteen), "r"(barrier) : "memory");
}

template <int BYTES>
__device__ __forceinline__ void copy_async(u32 to, const void* from, int bytes = BYTES) {
    if constexpr (BYTES == 16)
        VOLATILE("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    else
        VOLATILE("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 ::"r"(to), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
}

__device__ __forceinline__ void load_values(const Params& params, u32 shared) {
    Ring<WEIGHT_STAGES> ring;
    int first = Units(params).unit;
    for (Units units(params); units.has_one(); ++units.unit, ring.next()) {
        if (units.unit - first == WEIGHT_STAGES) wait_for_kernels();
        u32 full = shared + AT_BARRIERS + 8 * (WEIGHT_FULL + ring.slot), stage = shared + ring.slot * WEIGHT_BYTES;
        wait(shared + AT_BARRIERS + 8 * (WEIGHT_EMPTY + ring.slot), ring.phase ^ 1);
        expect(full, VALUE_BYTES + HIGH_BYTES);
        copy_rows(stage, params.values, units.chunk() * 128, units.row_tile() * (ROWS / 16), full);
        if (HIGH_BYTES > 0)
            copy_rows(stage + AT_HIGH, params.high, units.chunk() * ROW_HIGH_BYTES, units.row_tile() * (ROWS / 16), full);
    }
}

__device__ __forceinline__ void load_tokens(const Params& params, u32 shared) {
    Ring<TOKEN_STAGES> ring;
    wait_for_kernels();
    for (Units units(params); units.has_one(); ++units.unit)
        for (int box = 0; box < BOXES; ++box, ring.next()) {
            u32 full = shared + AT_BARRIERS + 8 * (TOKEN_FULL + ring.slot);
            wait(shared + AT_BARRIERS + 8 * (TOKEN_EMPTY + ring.slot), ring.phase ^ 1);
            expect(full, TOKEN_BYTES);
            copy_box(shared + AT_TOKENS + ring.slot * TOKEN_BYTES, params.tokens, units.chunk() * CHUNK + box * BOX,
                     units.token_tile() * TOKENS, full);
        }
}

__device__ __forceinline__ u32 weight_row(const Params& params, int row_tile, int row) {
    if (!params.gated()) return min(row_tile * ROWS + row, params.outputs - 1);
    return row / 8 % 2 * params.outputs + min(row_tile * (ROWS / 2) + row / 16 * 8 + row % 8, params.outputs - 1);
}

__device__ __forceinline__ void load_record(const Params& params, u32 to, u32 row, u32 chunk) {
    u32 chunks = params.chunks;
    if (FORMAT == Q8_0) {
        u32 words = (params.k / 32 + 1) / 2;
#pragma unroll
        for (u32 word = 2 * chunk; word < 2 * chunk + 2; ++word) {  // past the end: zeros
            const char* from = params.scales + (u64)(row * words + min(word, words - 1)) * 4;
            copy_async<4>(to + (word - 2 * chunk) * 4, from, word < words ? 4 : 0);
        }
    } else if (FORMAT == Q4_0) {
        copy_async<16>(to, params.scales + (u64)(row * chunks + chunk) * 16);
    } else if (HAS_PAIRS) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            copy_async<16>(to + 16 * i, params.scales + (u64)(row * chunks + chunk) * 32 + 16 * i);
    } else if (HAS_SUBSCALES) {
        copy_async<4>(to, params.scales + (u64)(row * chunks + chunk) * 4);
#pragma unroll
        for (int word = 0; word < 3; ++word)
            copy_async<4>(to + 4 + 4 * word, params.subscales + (u64)(row * chunks + chunk) * 12 + 4 * word);
    } else if (FORMAT == Q6_K) {
        copy_async<16>(to, params.subscales + (u64)(row * chunks + chunk) * 16);
        copy_async<4>(to + 16, params.scales + (u64)(row * ((chunks + 1) / 2) + chunk / 2) * 4);
    } else {
        copy_async<2 * GROUPS>(to, params.scales + (u64)(row * chunks + chunk) * (2 * GROUPS));
        copy_async<ZERO_BYTES>(to + 2 * GROUPS, params.subscales + (u64)(row * chunks + chunk) * ZERO_BYTES);
    }
}

__device__ __forceinline__ void load_scales(const Params& params, u32 shared, int thread) {
    Ring<WEIGHT_STAGES> ring;
    int first = Units(params).unit;
    for (Units units(params); units.has_one(); ++units.unit, ring.next()) {
        if (units.unit - first == WEIGHT_STAGES) wait_for_kernels();
        u32 full = shared + AT_BARRIERS + 8 * (WEIGHT_FULL + ring.slot), stage = shared + ring.slot * WEIGHT_BYTES;
        wait(shared + AT_BARRIERS + 8 * (WEIGHT_EMPTY + ring.slot), ring.phase ^ 1);
#pragma unroll
        for (int row = thread; row < ROWS; row += SCALE_THREADS)
            load_record(params, stage + AT_SCALES + row * RECORD, weight_row(params, units.row_tile(), row),
                        units.chunk());
        VOLATILE("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
    }
    VOLATILE("cp.async.wait_all;" ::: "memory");
}

// --- decoding --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 load_half_word(u32 at) {
    u16 bits;
    VOLATILE("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(at) : "memory");
    return bits;
}

__device__ __forceinline__ u32 add_pairs(u32 a, u32 b) {
    u32 out;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

__device__ __forceinline__ u32 multiply_add_pairs(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

// The upper 16 bits of a number, twice.
__device__ __forceinline__ u32 twice(float value) { return __byte_perm(__float_as_uint(value), 0, 0x3232); }

// What a thread of wgmma's first operand needs of a chunk of 64 rows. It has rows g and g + 8 of its warp's 16, and of
// every 16 columns 2t, 2t + 1, 2t + 8 and 2t + 9.
struct Raw {
    // The words of these columns, in a row and in each half of its 32 words; unused for Q8_0. IN_PAIRS: of two words
    // next to each other, their lower halves and then their upper ones.
    u32 words[2][2][4];
    u32 high[2][2][2];   // half words of Q6_K, or fifth bits in bytes, 2t and 2t + 1, then 2t + 8 and 2t + 9
    u32 record[2][RECORD / 4];
    u32 values;  // Q8_0: where row g begins
    int g, t;

    __device__ __forceinline__ void read(u32 stage, int first_row, int lane, int chunk) {
        g = lane / 4, t = lane % 4;
        values = stage + (first_row + g) * 128;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            int row = first_row + g + 8 * which;
#pragma unroll
            for (int i = 0; i < RECORD / 8; ++i) {
                uint2 pair = load_words(stage + AT_SCALES + row * RECORD + 8 * i);
                record[which][2 * i] = pair.x, record[which][2 * i + 1] = pair.y;
            }
            if (FORMAT == Q6_K) record[which][4] >>= chunk % 2 * 16;
            if (FORMAT == Q8_0) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int piece = 4 * half + 2 * i + t / 2;
                    uint2 pair = load_words(stage + row * 128 + (piece ^ g) * 16 + t % 2 * 8);
                    words[which][half][2 * i] = IN_PAIRS ? __byte_perm(pair.x, pair.y, 0x5410) : pair.x;
                    words[which][half][2 * i + 1] = IN_PAIRS ? __byte_perm(pair.x, pair.y, 0x7632) : pair.y;
                    if (FORMAT == Q6_K)
                        high[which][half][i] =
                            load_word(stage + AT_HIGH + row * 64 + ((2 * half + i) ^ row / 2 % 4) * 16 + t * 4);
                    if (HAS_FIFTH_BIT)
                        high[which][half][i] =
                            load_half_word(stage + AT_HIGH + row * 32 + (half ^ row / 4 % 2) * 16 + 8 * i + 2 * t);
                }
        }
    }

    __device__ __forceinline__ static uint2 load_words(u32 at) {
        uint2 value;
        VOLATILE("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(at) : "memory");
        return value;
    }

    // Value `index` of a plane of 4 to 6 bits, plus `base(plane)`: moved to bits 8, 12 or 16, below the exponent that
    // makes that bit a one. INT4 has no bit 8: what `offset` has there, times a scale, would not fit a float32 number.
    __device__ __forceinline__ static int position(int plane) {
        if (FORMAT == INT4) return plane == 2 || plane == 4 || plane > 5 ? 16 : 12;
        return 4 * (plane < 2 ? plane + 2 : plane < 5 ? plane : plane - 3);
    }
    __device__ __forceinline__ static float base(int plane) { return (float)(1 << (23 - position(plane))); }

    __device__ __forceinline__ float number(int which, int half, int index, int plane) const {
        const u32 word = words[which][half][index], at = position(plane);
        const int right = 4 * plane - (int)at;
        const u32 moved = right < 0 ? word << -right : word >> right;
        const u32 exponent = (127 + 23 - at) << 23;
        if (FORMAT == Q6_K) {
            const u32 pair = high[which][half][index / 2];
            const int from = 2 * plane + 16 * (index % 2), to = at + 4;
            const u32 top = from < to ? pair << (to - from) : pair >> (from - to);
            return __uint_as_float(and_or(moved, 15 << at, and_xor(top, 3 << to, exponent | 2 << to)));
        }
        if (HAS_FIFTH_BIT) {
            const int from = plane + 8 * (index % 2), to = at + 4;
            const u32 bits = high[which][half][index / 2];
            const u32 top = from < to ? bits << (to - from) : bits >> (from - to);
            return __uint_as_float(and_or(moved, 15 << at, and_or(top, 1 << to, exponent)));
        }
        if (HAS_MINIMA) return __uint_as_float(and_xor(moved, 15 << at, exponent));
        return __uint_as_float(and_xor(moved, 15 << at, exponent | 8 << at));
    }

    // The scale of 32 columns, or of 16 of them for Q6_K.
    __device__ __forceinline__ float scale(int which, int half, int plane) const {
        const u32* words = record[which];
        if (FORMAT == Q6_K)
            return half_to_float(words[4]) * (float)(signed char)(words[plane / 2] >> (16 * (plane % 2) + 8 * half));
        if (HAS_PAIRS) return half_to_float(words[plane]);
        if (HAS_SUBSCALES) {
            const u32 low = words[1 + plane / 4] >> (8 * (plane % 4));
            const u32 high = words[3] >> (8 * (plane % 4) + 4 * (plane / 4));
            return half_to_float(words[0]) * (float)((low & 15) | (high & 3) << 4);
        }
        const int index = FORMAT == INT4 ? plane * GROUPS / 8 : plane;
        const u32 bits = words[index / 2];
        if (BF16_SCALES) return __uint_as_float(index % 2 ? bits & 0xFFFF0000 : bits << 16);
        return half_to_float(bits >> (16 * (index % 2)));
    }

    // What is added to a value after scaling.
    __device__ __forceinline__ float minimum(int which, int plane) const {
        const u32* words = record[which];
        if (HAS_PAIRS) return half_to_float(words[plane] >> 16);
        const u32 low = words[1 + plane / 4] >> (8 * (plane % 4) + 4);
        const u32 high = words[3] >> (8 * (plane % 4) + 4 * (plane / 4) + 2);
        return -half_to_float(words[0] >> 16) * (float)((low & 15) | (high & 3) << 4);
    }

    // What is added to a number, which is `added` more than its bits, to get the value before scaling. Zero points of
    // INT4 are stored as 8 - zero.
    __device__ __forceinline__ float offset(int which, int plane, float added) const {
        if (HAS_MINIMA) return -added;
        if (FORMAT == Q6_K) return -(added + 32.0f);
        if (FORMAT == Q4_0) return -(added + 8.0f);
        const int index = plane * GROUPS / 8;
        const u32 zeros = record[which][GROUPS / 2 + index / 4];
        return (float)(signed char)(zeros >> (8 * (index % 4))) - (added + 8.0f);
    }

    // A value is put into the mantissa of 128. The scale is the sum of its upper 8 bits and at most 3 others, whose
    // product with a value of at most 4 bits is exact: so the value times the scale is rounded once.
    __device__ __forceinline__ void decode_pairs(u32* operands, int plane) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const float by = scale(which, 0, plane), upper = __uint_as_float(__float_as_uint(by) & 0xFFFF0000);
            const u32 minus = twice(offset(which, plane, 128.0f)), lower = twice(by - upper);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const u32 bits = words[which][half][2 * i + plane / 4] >> (4 * (plane % 4));
                    const u32 values = add_pairs(and_xor(bits, 0x000F000F, 0x43084308), minus);
                    operands[4 * half + 2 * i + which] =
                        BF16_SCALES ? multiply_pairs(values, twice(by))
                                    : multiply_add_pairs(values, twice(by), multiply_pairs(values, lower));
                }
        }
    }

    // Decodes 32 columns, plane `plane` of the chunk, to the operands of two products.
    __device__ __forceinline__ void decode(u32* operands, int plane) const {
        if constexpr (IN_PAIRS) {
            decode_pairs(operands, plane);
            return;
        }
#pragma unroll
        for (int which = 0; which < 2; ++which)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float by = scale(which, half, plane);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float first, second;
                    if (FORMAT == Q8_0) {
                        // Bytes plus 128, at bit 8 of 32,768.
                        const u32 from = values + which * 1024 + ((2 * plane + half) ^ g) * 16 + 2 * t + 8 * i;
                        const u32 pair = load_half_word(from) ^ 0x8080;
                        const float minus = by * (-32768.0f - 128.0f);
                        first = fmaf(__uint_as_float(__byte_perm(pair, 0x47000000, 0x7404)), by, minus);
                        second = fmaf(__uint_as_float(__byte_perm(pair, 0x47000000, 0x7414)), by, minus);
                    } else {
                        first = number(which, half, 2 * i, plane), second = number(which, half, 2 * i + 1, plane);
                        const float plus = offset(which, plane, base(plane));
                        if (FORMAT == Q4_0 || FORMAT == INT4) {
                            first = fmaf(first, by, plus * by), second = fmaf(second, by, plus * by);
                        } else if (HAS_MINIMA) {
                            const float least = minimum(which, plane);
                            first = fmaf(first + plus, by, least), second = fmaf(second + plus, by, least);
                        } else {
                            first = (first + plus) * by, second = (second + plus) * by;
                        }
                    }
                    operands[4 * half + 2 * i + which] = to_pair(first, second);
                }
            }
    }
};

// --- multiplying -----------------------------------------------------------------------------------------------------

#define OUTPUTS_32(d) OUTPUTS_8(d, 0), OUTPUTS_8(d, 8), OUTPUTS_8(d, 16), OUTPUTS_8(d, 24)
#define R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define R0_3 R0 ", " R1 ", " R2 ", " R3
#define R4_7 R4 ", " R5 ", " R6 ", " R7
#define R8_11 R8 ", " R9 ", " R10 ", " R11
#define R12_15 R12 ", " R13 ", " R14 ", " R15
#if TOKENS == 16
#define REGISTERS "{" R0 "}, {%8, %9, %10, %11}, %12, p"
#define ADD "%13"
#define OUTPUTS(d) OUTPUTS_8(d, 0)
#elif TOKENS == 32
#define REGISTERS "{" R0 ", " R1 "}, {%16, %17, %18, %19}, %20, p"
#define ADD "%21"
#define OUTPUTS(d) OUTPUTS_8(d, 0), OUTPUTS_8(d, 8)
#elif TOKENS == 64
#define REGISTERS "{" R0_3 "}, {%32, %33, %34, %35}, %36, p"
#define ADD "%37"
#define OUTPUTS(d) OUTPUTS_32(d)
#elif TOKENS == 96
#define REGISTERS "{" R0_3 ", " R4 ", " R5 "}, {%48, %49, %50, %51}, %52, p"
#define ADD "%53"
#define OUTPUTS(d) OUTPUTS_32(d), OUTPUTS_8(d, 32), OUTPUTS_8(d, 40)
#elif TOKENS == 128
#define REGISTERS "{" R0_3 ", " R4_7 "}, {%64, %65, %66, %67}, %68, p"
#define ADD "%69"
#define OUTPUTS(d) OUTPUTS_64(d)
#elif TOKENS == 192
#define REGISTERS "{" R0_3 ", " R4_7 ", " R8_11 "}, {%96, %97, %98, %99}, %100, p"
#define ADD "%101"
#define OUTPUTS(d) OUTPUTS_64(d), OUTPUTS_32((d + 64))
#elif TOKENS == 256
#define REGISTERS "{" R0_3 ", " R4_7 ", " R8_11 ", " R12_15 "}, {%128, %129, %130, %131}, %132, p"
#define ADD "%133"
#define OUTPUTS(d) OUTPUTS_64(d), OUTPUTS_64((d + 64))
#endif
#if HALF
#define TYPES "f32.f16.f16"
#else
#define TYPES "f32.bf16.bf16"
#endif
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

// Products of 64 rows of the weight, 16 columns, in registers, and TOKENS tokens. add: they are added to the products of the columns before.
__device__ __forceinline__ void multiply_tokens(float* d, const u32* weight, u64 tokens, int add) {
    VOLATILE("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0;\n"
             "wgmma.mma_async.sync.aligned.m64n" TEXT(TOKENS) "k16." TYPES " " REGISTERS ", 1, 1, 0; }"
             : OUTPUTS(d)
             : "r"(weight[0]), "r"(weight[1]), "r"(weight[2]), "r"(weight[3]), "l"(tokens), "r"(add));
}

struct Group {
    const Params& params;
    u32 shared;
    int group, warp, lane;  // of those that multiply; of the warp group; of the warp
    Ring<WEIGHT_STAGES> weights;
    Ring<TOKEN_STAGES> tokens;
    u32 used = ~0u;  // a stage of tokens that products may still read

    __device__ __forceinline__ u32 barrier(int index) const { return shared + AT_BARRIERS + 8 * index; }
    __device__ __forceinline__ int first_row() const { return group * 64 + warp * 16; }

    __device__ __forceinline__ void release_tokens() {
        if (lane == 0 && used != ~0u) arrive(barrier(TOKEN_EMPTY + used));
        used = ~0u;
    }

    __device__ __forceinline__ void multiply_chunk(float* sums, u32 (&operands)[2][8], int chunk,
                                                   int add) {
        Raw raw;
        wait(barrier(WEIGHT_FULL + weights.slot), weights.phase);
        raw.read(shared + weights.slot * WEIGHT_BYTES, first_row(), lane, chunk);
#pragma unroll
        for (int box = 0; box < BOXES; ++box) {
            u64 place = descriptor(shared + AT_TOKENS + tokens.slot * TOKEN_BYTES, 16);
            wait(barrier(TOKEN_FULL + tokens.slot), tokens.phase);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Of the products one pair is left, whose operands are in the other buffer.
                wait_products<1>();
                pin<8>(operands[half]);
                if (half == 1) release_tokens();  // of the box before
                raw.decode(operands[half], 2 * box + half);
                begin_products();
                multiply_tokens(sums, operands[half], place + 4 * half, box + half > 0 ? 1 : add);
                multiply_tokens(sums, operands[half] + 4, place + 4 * half + 2, 1);
                commit_products();
                // By now all of the chunk has come to registers. Scales may be copied from the L1 cache: they may come
                // sooner than words that are on their way.
                if (FORMAT != Q8_0 && box == BOXES / 2 && half == 0) release_weight();
            }
            used = tokens.slot;
            tokens.next();
        }
        if (FORMAT == Q8_0) release_weight();
    }

    __device__ __forceinline__ void release_weight() {
        __syncwarp();
        if (lane == 0) arrive(barrier(WEIGHT_EMPTY + weights.slot));
        weights.next();
    }

    // Adds the sums of all blocks that have a part of the tile, in their order, in the last one to finish.
    __device__ __forceinline__ bool reduce(float* sums, int tile, int part, int first, int last) const {
        constexpr int PIECES = SUMS / 4;
        const int thread = threadIdx.x - 128;
        float4* partial = (float4*)params.partial + thread;
        auto slot_of = [&](int block) -> int {
            return block + (Units::begin_of(params, block) < tile * params.chunks ? gridDim.x : 0);
        };
        float4* to = partial + (i64)slot_of(part) * (PIECES * 32 * WARPS);
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
            __stcg(to + i * (32 * WARPS), make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
        fence();
        sync_named<1, WARPS>();
        if (thread == 0) {
            const int before = atomicAdd(params.counters + first, 1);
            if (before == last - first) params.counters[first] = 0;
            fence();
            VOLATILE("st.shared.u32 [%0], %1;" ::"r"(shared + AT_ARRIVED), "r"(before) : "memory");
        }
        sync_named<1, WARPS>();
        bool is_last = load_word(shared + AT_ARRIVED) == last - first;
        sync_named<1, WARPS>();  // before the next tile's
        if (!is_last) return false;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
        for (int block = first; block <= last; ++block) {
            const float4* from = partial + (i64)slot_of(block) * (PIECES * 32 * WARPS);
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                float4 sum = __ldcg(from + i * (32 * WARPS));
                sums[4 * i] += sum.x, sums[4 * i + 1] += sum.y, sums[4 * i + 2] += sum.z, sums[4 * i + 3] += sum.w;
            }
        }
        return true;
    }

    template <bool IS_GATED>
    __device__ __forceinline__ void store(const float* sums, int row_tile, int token_tile) const {
        const int first = row_tile * ROWS + first_row(), row = (IS_GATED ? first / 2 : first) + lane / 4;
        const bool has_row = row < params.outputs, has_next = !IS_GATED && row + 8 < params.outputs;
        // The residual of a batch is read before any of the batch is written: reads that follow writes would wait for
        // one another, each as long as memory takes.
        constexpr int BATCH = TOKENS / 8 < 4 ? TOKENS / 8 : 4;  // of 8 tokens
        int token = token_tile * TOKENS + lane % 4 * 2;
#pragma unroll
        for (int batch = 0; batch < TOKENS / 8; batch += BATCH, token += 8 * BATCH) {
            forget_value(token);
            u16 residual[4 * BATCH];
            if (params.flags & RESIDUAL)
#pragma unroll
                for (int i = 0; i < 2 * BATCH; ++i) {
                    const u16* const from = (const u16*)params.output + place_of(token + i / 2 * 8 + i % 2, row);
                    const bool has_token = token + i / 2 * 8 + i % 2 < params.token_count;
                    if (has_token && has_row) residual[2 * i] = from[0];
                    if (has_token && has_next) residual[2 * i + 1] = from[8];
                }
#pragma unroll
            for (int i = 0; i < 2 * BATCH; ++i) {
                if (token + i / 2 * 8 + i % 2 >= params.token_count) continue;
                const i64 to = place_of(token + i / 2 * 8 + i % 2, row);
                const float* const both = sums + 4 * (batch + i / 2) + i % 2;
                const float value = IS_GATED ? both[0] / (1.0f + __expf(-both[0])) * both[2] : both[0];
                if (has_row) store_one(to, value, residual[2 * i]);
                if (has_next) store_one(to + 8, both[2], residual[2 * i + 1]);
            }
        }
    }

    __device__ __forceinline__ i64 place_of(int token, int row) const { return (i64)token * params.output_stride + row; }

    __device__ __forceinline__ void store_one(i64 place, float value, u16 residual) const {
        if (params.flags & FLOAT_OUTPUT)
            ((float*)params.output)[place] = value;
        else
            ((u16*)params.output)[place] = from_float(params.flags & RESIDUAL ? value + to_float(residual) : value);
    }

    __device__ __forceinline__ void run() {
        float sums[SUMS];
        u32 operands[2][8] = {};
        Units units(params);
        wait_for_kernels();
        while (units.has_one()) {
            const int tile = units.tile(), row_tile = units.row_tile(), token_tile = units.token_tile();
            const int first_unit = tile * params.chunks, end_unit = first_unit + params.chunks;
            int add = 0;
            for (const int end = min(end_unit, units.end); units.unit < end; ++units.unit, add = 1)
                multiply_chunk(sums, operands, units.chunk(), add);
            wait_products<0>();
            pin<SUMS>(sums);
            release_tokens();
            const int first = Units::block_of(params, first_unit), last = Units::block_of(params, end_unit - 1);
            if (first < last && !reduce(sums, tile, blockIdx.x, first, last)) continue;
            if (params.gated())
                store<true>(sums, row_tile, token_tile);
            else
                store<false>(sums, row_tile, token_tile);
        }
    }
};

// hidden: by the map `tokens`, [token_count, k]; output: [token_count, outputs], rows `output_stride` apart, float32 with
// FLOAT_OUTPUT, else of the type of `hidden`. A gated weight
// has `outputs` gate rows and as many up rows below. partial: float32, the tile that a block begins with, of all blocks, then the tiles
// that they end with; counters: zeros before and after, one for every block.
extern "C" __global__ void __launch_bounds__(THREADS, 1) ggml_wgmma_gemm(
    const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap high,
    const __grid_constant__ TensorMap tokens, const char* scales, const char* subscales, void* output, float* partial,
    int* counters, int token_count, int outputs, int k, int output_stride, int token_tiles, int units,
    int flags) {
    extern __shared__ char memory[];
    u32 shared = ((u32)__cvta_generic_to_shared(memory) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < WEIGHT_STAGES; ++i) {
            init_barrier(shared + AT_BARRIERS + 8 * (WEIGHT_FULL + i), 1 + SCALE_THREADS);
            init_barrier(shared + AT_BARRIERS + 8 * (WEIGHT_EMPTY + i), WARPS);
        }
        for (int i = 0; i < TOKEN_STAGES; ++i) {
            init_barrier(shared + AT_BARRIERS + 8 * (TOKEN_FULL + i), 1);
            init_barrier(shared + AT_BARRIERS + 8 * (TOKEN_EMPTY + i), WARPS);
        }
        fence_barriers();
    }
    __syncthreads();
    start_dependents();
    if (threadIdx.x == 0)
        for (const TensorMap* map : {&values, &tokens}) VOLATILE("prefetch.tensormap [%0];" ::"l"(map) : "memory");
    const int chunks = (k + CHUNK - 1) / CHUNK;
    const Params params{&values, &high,       &tokens, scales,        subscales, output,      partial, counters,
                        token_count, outputs, k,       output_stride, chunks,    token_tiles, units, flags};
    if (warp < 4) {
        release_registers<LOADER_REGISTERS>();
        if (warp == 0 && lane == 0) load_values(params, shared);
        if (warp == 1 && lane == 0) load_tokens(params, shared);
        if (warp >= 2) load_scales(params, shared, threadIdx.x - 64);
    } else {
        take_registers<COMPUTE_REGISTERS>();
        Group{params, shared, warp / 4 - 1, warp % 4, lane}.run();
    }
}
