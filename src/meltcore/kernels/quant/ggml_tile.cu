// Skinny GEMM: up to 32 tokens by a block-quantized weight, on the tensor cores (mma.sync, compute capability 8.0 or later).
//
// Weights go from global memory to registers and to the tensor cores: no value moves between threads. A k step of
// mma.m16n8k16 sums 16 columns in any order, as long as both operands agree. So thread t of the four that share a row
// takes columns 4t to 4t + 3 of the step: neighbors in memory of both operands.
//
// Quantized values are small integers, which 16-bit types hold exactly. Sums of one block of columns are float32, and
// the block's scale multiplies the sum. So no weight is rounded, and a scale costs an instruction per sum, not per value.
//
// A warp copies its next weights to shared memory while it multiplies others. Copies take whole lines of 128 bytes of a
// row, since half a line costs the L2 cache as much; the places of 16 bytes are permuted so that reads have no bank
// conflicts. Blocks stay: while the sums of some rows are stored, the weights of the next ones are on their way.
//
// Tokens: up to 8 are read through the L1 cache (SHARED_TOKENS 0), and the warps of a block share rows. More are copied
// to shared memory by the whole block, whose warps have rows of their own, so that the L2 cache is asked once per block.
//
// Compiled with the macros of ggml_bits.cu and these: TOKEN_TILES (of 8 tokens), WARPS, COLUMN_WARPS (warps that share rows), DEPTH (stages of copies), SHARED_TOKENS, STAGED (tokens for
// which there is space, or 0), SPLITS (1: several splits of the columns), TAIL (1: the columns are no multiple of a chunk),
// BLOCKS_PER_SM, PDL.

constexpr bool IN_BYTES = FORMAT == Q8_0 || FORMAT == FP8;  // a value per byte
constexpr int CHUNK = IN_BYTES ? 128 : 256;
// Values of FP8 are exact in float16, as tokens that are quantized to FP8 are.
#define HALF_MMA (HALF || FORMAT == 1)
constexpr int ROW_WARPS = WARPS / COLUMN_WARPS;
constexpr int THREADS = 32 * WARPS;

// Flags of a launch.
constexpr int GATED = 1, RESIDUAL = 2, FLOAT_OUTPUT = 4, NORMALIZED = 8;

// --- 16-bit arithmetic on pairs; integers up to 256 are exact in both types ---

__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
  u32 out;
#if HALF_MMA
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
#endif
  return out;
}

// The bits of a pair of numbers BASE + i for small integers i in the lowest bits; of 1 and of -1; and of -BASE - x.
#if HALF_MMA
constexpr u32 BASE_PAIR = 0x64006400, ONES = 0x3C003C00, MINUS_ONES = 0xBC00BC00;  // 1024 + i
constexpr __device__ u32 minus_base(u32 x) { return 0xE400E400 + x * 0x00010001; }
#else
constexpr u32 BASE_PAIR = 0x43004300, ONES = 0x3F803F80, MINUS_ONES = 0xBF80BF80;  // 128 + i
constexpr __device__ u32 minus_base(u32 x) { return 0xC300C300 + x * 0x00010001; }
#endif

__device__ __forceinline__ void mma(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if HALF_MMA
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A first product, which needs no sums of zeros.
__device__ __forceinline__ void mma_first(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if HALF_MMA
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
#endif
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  const u32 place = (u32)__cvta_generic_to_shared(shared);
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(global), "n"(BYTES) : "memory");
}

// --- the weights of a warp's 16 rows and a chunk of columns ---

// In shared memory: 128 bytes of values per row, the high bits, then the scales.
constexpr int HIGH_PLACE = 16 * 128, SCALES_PLACE = HIGH_PLACE + 16 * ROW_HIGH_BYTES;
constexpr int GROUPS = 256 / GROUP, ZERO_BYTES = GROUPS < 4 ? 4 : GROUPS;  // of INT4, per chunk
constexpr bool HAS_PAIRS = FORMAT == Q4_1 || FORMAT == Q5_1;  // of a scale and a minimum for 32 columns
constexpr bool HAS_SUBSCALES = FORMAT == Q4_K || FORMAT == Q5_K;
constexpr int SCALE_BYTES = FORMAT == Q8_0   ? 8
                            : FORMAT == FP8  ? 4
                            : FORMAT == Q6_K ? 20
                            : FORMAT == INT4 ? 2 * GROUPS + ZERO_BYTES
                            : HAS_PAIRS      ? 32
                                             : 16;
constexpr int WARP_BYTES = SCALES_PLACE + 16 * SCALE_BYTES;

// Where row `row` has its piece of 16 bytes, and of its high bits.
__device__ __forceinline__ int value_place(int row, int piece) {
  return row * 128 + (piece ^ (IN_BYTES ? row % 4 * 2 : row % 2 * 4)) * 16;
}
__device__ __forceinline__ int high_place(int row, int piece) {
  if (HAS_FIFTH_BIT) return HIGH_PLACE + row * 32 + piece * 16;
  return HIGH_PLACE + row * 64 + (piece ^ row / 2 % 2 * 2) * 16;
}

// What a thread copies of every chunk of 16 rows: offsets in the packed arrays, at column 0.
struct Source {
  u32 values[4], high[2], scales, further;

  template <typename RowOf>
  __device__ __forceinline__ void select(const RowOf& row_of, int lane, int k) {
    const u32 chunks = (k + CHUNK - 1) / CHUNK;
    const u32 stride = IN_BYTES ? k : (128 + ROW_HIGH_BYTES) * chunks;
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] = row_of(4 * i + lane / 8) * stride + lane % 8 * 16;
    const u32 row = row_of(lane % 16);
    if (FORMAT == Q8_0) scales = row_of(lane / 2) * ((k / 32 + 1) / 2 * 4) + lane % 2 * 4;
    if (FORMAT == FP8) scales = row / GROUP * chunks * 4;
    if (FORMAT == Q4_0) scales = row * chunks * 16;
    if (FORMAT == INT4) scales = row * chunks * (lane < 16 ? 2 * GROUPS : ZERO_BYTES);
    if (HAS_FIFTH_BIT) high[0] = row_of(lane / 2) * stride + 128 * chunks + lane % 2 * 16;
    if (HAS_PAIRS) scales = row_of(lane / 2) * chunks * 32 + lane % 2 * 16;
    if (HAS_SUBSCALES) {
      scales = row * chunks * (lane < 16 ? 4 : 12);  // scales, then the first words of the sub-scales
      further = row * chunks * 12 + (lane < 16 ? 4 : 8);
    }
    if (FORMAT == Q6_K) {
#pragma unroll
      for (int i = 0; i < 2; i++) high[i] = row_of(8 * i + lane / 4) * stride + 128 * chunks + lane % 4 * 16;
      scales = lane < 16 ? row * chunks * 16 : row * ((chunks + 1) / 2 * 4);
    }
  }

  __device__ __forceinline__ void copy(u8* to, int lane, const u8* values_ptr, const u8* scales_ptr,
                                       const u8* subscales_ptr, u32 chunk, int k) const {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (!IN_BYTES || !TAIL || chunk * CHUNK + lane % 8 * 16 < k)
        copy_async<16>(to + value_place(4 * i + lane / 8, lane % 8), values_ptr + (values[i] + chunk * 128));
    u8* const scale_to = to + SCALES_PLACE;
    if (FORMAT == Q8_0 && (!TAIL || chunk * CHUNK + lane % 2 * 64 < k))
      copy_async<4>(scale_to + lane * 4, scales_ptr + (scales + chunk * 8));
    if (FORMAT == FP8 && lane < 16) copy_async<4>(scale_to + lane * 4, scales_ptr + (scales + chunk * 4));
    if (FORMAT == Q4_0 && lane < 16) copy_async<16>(scale_to + lane * 16, scales_ptr + (scales + chunk * 16));
    if (FORMAT == INT4) {
      if (lane < 16)
        copy_async<2 * GROUPS>(scale_to + lane * 2 * GROUPS, scales_ptr + (scales + chunk * 2 * GROUPS));
      else
        copy_async<ZERO_BYTES>(scale_to + 32 * GROUPS + lane % 16 * ZERO_BYTES,
                               subscales_ptr + (scales + chunk * ZERO_BYTES));
    }
    if (HAS_FIFTH_BIT) copy_async<16>(to + high_place(lane / 2, lane % 2), values_ptr + (high[0] + chunk * 32));
    if (HAS_PAIRS) copy_async<16>(scale_to + lane * 16, scales_ptr + (scales + chunk * 32));
    if (HAS_SUBSCALES) {
      const u8* first = lane < 16 ? scales_ptr + (scales + chunk * 4) : subscales_ptr + (scales + chunk * 12);
      copy_async<4>(scale_to + lane % 16 * 16 + lane / 16 * 4, first);
      copy_async<4>(scale_to + lane % 16 * 16 + lane / 16 * 4 + 8, subscales_ptr + (further + chunk * 12));
    }
    if (FORMAT == Q6_K) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        copy_async<16>(to + high_place(8 * i + lane / 4, lane % 4), values_ptr + (high[i] + chunk * 64));
      if (lane < 16)
        copy_async<16>(scale_to + lane * 16, subscales_ptr + (scales + chunk * 16));
      else
        copy_async<4>(scale_to + 256 + lane % 16 * 4, scales_ptr + (scales + chunk / 2 * 4));
    }
  }
};

// What thread t of the four that share a row needs of its chunk.
template <int KIND>
struct Raw;

template <>
struct Raw<Q8_0> {
  uint2 values[4];  // of each block of 32 columns: 8t to 8t + 7
  u32 scales[2];
  __device__ __forceinline__ void read(const u8* from, int row, int t, int) {
#pragma unroll
    for (int block = 0; block < 4; block++)
      values[block] = *(const uint2*)(from + value_place(row, 2 * block + t / 2) + t % 2 * 8);
    const uint2 both = *(const uint2*)(from + SCALES_PLACE + row * 8);
    scales[0] = both.x, scales[1] = both.y;
  }
};

template <>
struct Raw<FP8> {
  uint2 values[4];  // as of Q8_0
  float scale;
  __device__ __forceinline__ void read(const u8* from, int row, int t, int) {
#pragma unroll
    for (int block = 0; block < 4; block++)
      values[block] = *(const uint2*)(from + value_place(row, 2 * block + t / 2) + t % 2 * 8);
    scale = *(const float*)(from + SCALES_PLACE + row * 4);
  }
};

struct Words {
  uint4 words[2];  // of each half of 16 words: 4t to 4t + 3
  __device__ __forceinline__ void read_words(const u8* from, int row, int t) {
    words[0] = *(const uint4*)(from + value_place(row, t));
    words[1] = *(const uint4*)(from + value_place(row, 4 + t));
  }
};

template <>
struct Raw<Q4_0> : Words {
  uint4 scales;
  __device__ __forceinline__ void read(const u8* from, int row, int t, int) {
    read_words(from, row, t);
    scales = *(const uint4*)(from + SCALES_PLACE + row * 16);
  }
};

// The fifth bits of values, of each half of 16 bytes: 4t to 4t + 3.
struct FifthBits {
  u32 fifth[2];
  __device__ __forceinline__ void read_bits(const u8* from, int row, int t) {
#pragma unroll
    for (int half = 0; half < 2; half++) fifth[half] = *(const u32*)(from + high_place(row, half) + t * 4);
  }
};

struct Subscales {
  u32 both, subscales[3];
  __device__ __forceinline__ void read_scales(const u8* from, int row) {
    const uint4 all = *(const uint4*)(from + SCALES_PLACE + row * 16);
    both = all.x, subscales[0] = all.y, subscales[1] = all.z, subscales[2] = all.w;
  }
  __device__ __forceinline__ u32 low(int plane) const { return subscales[plane / 4] >> (8 * (plane % 4)); }
  __device__ __forceinline__ u32 top(int plane) const { return subscales[2] >> (8 * (plane % 4) + 4 * (plane / 4)); }
  __device__ __forceinline__ float scale(int plane) const {
    return half_to_float(both) * (float)((low(plane) & 15) | (top(plane) & 3) << 4);
  }
  // What is added to each value after scaling.
  __device__ __forceinline__ float minimum(int plane) const {
    return -half_to_float(both >> 16) * (float)((low(plane) >> 4 & 15) | (top(plane) >> 2 & 3) << 4);
  }
};

struct Pairs {
  u32 pairs[8];
  __device__ __forceinline__ void read_scales(const u8* from, int row) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 four = *(const uint4*)(from + SCALES_PLACE + row * 32 + i * 16);
      pairs[4 * i] = four.x, pairs[4 * i + 1] = four.y, pairs[4 * i + 2] = four.z, pairs[4 * i + 3] = four.w;
    }
  }
  __device__ __forceinline__ float scale(int plane) const { return half_to_float(pairs[plane]); }
  __device__ __forceinline__ float minimum(int plane) const { return half_to_float(pairs[plane] >> 16); }
};

template <typename Scales>
struct WithMinima : Words, Scales {
  __device__ __forceinline__ void read(const u8* from, int row, int t, int) {
    this->read_words(from, row, t);
    this->read_scales(from, row);
  }
};

template <typename Scales>
struct WithFifthBits : WithMinima<Scales>, FifthBits {
  __device__ __forceinline__ void read(const u8* from, int row, int t, int chunk) {
    WithMinima<Scales>::read(from, row, t, chunk);
    this->read_bits(from, row, t);
  }
};

template <>
struct Raw<Q4_1> : WithMinima<Pairs> {};
template <>
struct Raw<Q4_K> : WithMinima<Subscales> {};
template <>
struct Raw<Q5_1> : WithFifthBits<Pairs> {};
template <>
struct Raw<Q5_K> : WithFifthBits<Subscales> {};

template <>
struct Raw<INT4> : Words {
  u32 scales[GROUPS / 2], zeros[ZERO_BYTES / 4];
  __device__ __forceinline__ void read(const u8* from, int row, int t, int) {
    read_words(from, row, t);
#pragma unroll
    for (int i = 0; i < GROUPS / 2; i++) scales[i] = ((const u32*)(from + SCALES_PLACE + row * 2 * GROUPS))[i];
#pragma unroll
    for (int i = 0; i < ZERO_BYTES / 4; i++)
      zeros[i] = ((const u32*)(from + SCALES_PLACE + 32 * GROUPS + row * ZERO_BYTES))[i];
  }
  __device__ __forceinline__ float scale(int plane) const {
    const int group = plane * GROUPS / 8;
    const u32 bits = scales[group / 2];
    if (BF16_SCALES) return __uint_as_float(group % 2 ? bits & 0xFFFF0000 : bits << 16);
    return half_to_float(bits >> (group % 2 * 16));
  }
  // The pair -BASE - zero; zero points are stored as 8 - zero.
  __device__ __forceinline__ u32 minus_zero(int plane) const {
    const int group = plane * GROUPS / 8;
    return minus_base(8 - (int)(signed char)(zeros[group / 4] >> (group % 4 * 8)));
  }
};

template <>
struct Raw<Q6_K> : Words {
  uint2 high[2];  // 2 bits of each value: half words 4t to 4t + 3
  uint4 subscales;
  u32 scale;
  __device__ __forceinline__ void read(const u8* from, int row, int t, int chunk) {
    read_words(from, row, t);
#pragma unroll
    for (int half = 0; half < 2; half++)
      high[half] = *(const uint2*)(from + high_place(row, 2 * half + t / 2) + t % 2 * 8);
    subscales = *(const uint4*)(from + SCALES_PLACE + row * 16);
    scale = *(const u32*)(from + SCALES_PLACE + 256 + row * 4) >> (chunk % 2 * 16);
  }
};

__device__ __forceinline__ u32 word_of(const uint4& words, int index) {
  return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

// A byte of two words, twice each: in the low bytes of two half words, and in the high ones, which are masked later.
__device__ __forceinline__ u32 byte_pair(u32 first, u32 second, int index) {
  return __byte_perm(first, second, index * 0x11 | (4 + index) * 0x1100);
}

// Four signed bytes as two pairs.
__device__ __forceinline__ void decode_bytes(u32 word, u32& first, u32& second) {
  const u32 low = __byte_perm(word, 0, 0x1100), high = __byte_perm(word, 0, 0x3322);
#if HALF_MMA
  first = fma_pair(and_xor(low, 0x00FF00FF, BASE_PAIR | 0x00800080), ONES, minus_base(128));
  second = fma_pair(and_xor(high, 0x00FF00FF, BASE_PAIR | 0x00800080), ONES, minus_base(128));
#else
  // The lowest 7 bits and the sign's -128, of which each fits the 7 bits after 128's leading one.
  first = fma_pair(and_or(low, 0x00800080, BASE_PAIR), MINUS_ONES, and_or(low, 0x007F007F, BASE_PAIR));
  second = fma_pair(and_or(high, 0x00800080, BASE_PAIR), MINUS_ONES, and_or(high, 0x007F007F, BASE_PAIR));
#endif
}

// Four values of FP8 (e4m3) as two pairs.
__device__ __forceinline__ void decode_fp8(u32 word, u32& first, u32& second) {
#if FORMAT == 1
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(first), "=r"(second)
      : "r"(word));
#endif
}

// Two values of 4 to 6 bits, of the plane in the low (odd 0) or the high (odd 1) halves of the bytes. `top`: their high
// bits, by bytes as `bytes`. Q6_K: those of the low half at bits 0 and 1, those of the high half at bits 2 and 3; a
// fifth bit: that of the low half at bit 0, that of the high half at bit 1.
// `minus_zero`: of INT4.
__device__ __forceinline__ u32 decode_nibbles(u32 bytes, u32 top, u32 minus_zero, int odd) {
  const u32 nibbles = odd ? bytes >> 4 : bytes;
  if (FORMAT == INT4) return fma_pair(and_xor(nibbles, 0x000F000F, BASE_PAIR | 0x00080008), ONES, minus_zero);
  if (FORMAT == Q4_0) return fma_pair(and_xor(nibbles, 0x000F000F, BASE_PAIR | 0x00080008), ONES, minus_base(8));
  if (FORMAT == Q4_K || FORMAT == Q4_1) return fma_pair(and_or(nibbles, 0x000F000F, BASE_PAIR), ONES, minus_base(0));
  if (HAS_FIFTH_BIT) {
    const u32 fifth = and_or(odd ? top << 3 : top << 4, 0x00100010, BASE_PAIR);
    return fma_pair(and_or(nibbles, 0x000F000F, fifth), ONES, minus_base(0));
  }
  const u32 moved = and_xor(odd ? top << 2 : top << 4, 0x00300030, BASE_PAIR | 0x00200020);
  return fma_pair(and_or(nibbles, 0x000F000F, moved), ONES, minus_base(32));
}

struct Tokens {
  const u16* row[TOKEN_TILES];  // of the tokens whose columns this thread loads, at column 0 of the chunk
  float scale[TOKEN_TILES][2];  // with FP8: of the chunk, of the tokens whose sums this thread has

  template <typename V>
  __device__ __forceinline__ V load(int tile, int column) const {
    return *(const V*)(row[tile] + column);
  }
};

// Copies a warp's columns of some tokens [.., k] to shared memory: those of every `stride`-th chunk from `first` on. All
// loads are on their way at once, while each step would wait for its own. With FP8 a chunk of a token is quantized, and
// its scale follows the values. norm: columns are multiplied by these weights before; or null. Returns the sum of the
// squares of what a thread has copied.
__device__ __forceinline__ int staged_stride(int k) {
  return k + 32 + (FORMAT == FP8 ? (k / CHUNK + 3) / 4 * 8 : 0);
}
__device__ __forceinline__ float stage_tokens(u16* to, const u16* from, const u16* norm, int tokens, int first, int stride,
                                              int k, int lane) {
  constexpr int PIECES = CHUNK / 8;  // of 16 bytes
  const int chunks = (k + CHUNK - 1) / CHUNK, count = first < chunks ? ((chunks - 1 - first) / stride + 1) * PIECES : 0;
  float squares = 0.0f;
  for (int token = 0; token < tokens; token++) {
    u16* const token_to = to + token * staged_stride(k);
#pragma unroll 4
    for (int piece = lane; piece < count; piece += 32) {
      const int chunk = first + piece / PIECES * stride, column = chunk * CHUNK + piece % PIECES * 8;
      if (TAIL && column >= k) continue;
      const uint4 loaded = *(const uint4*)(from + (i64)token * k + column);
      if (FORMAT != FP8 && norm == nullptr) {
        *(uint4*)(token_to + column) = loaded;
        continue;
      }
      const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      uint4 factors = {};
      if (norm != nullptr) factors = *(const uint4*)(norm + column);
      const u32 factor_words[4] = {factors.x, factors.y, factors.z, factors.w};
      float x[8], amax = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        x[i] = to_float(words[i / 2] >> i % 2 * 16);
        squares += x[i] * x[i];
        if (norm != nullptr) x[i] *= to_float(factor_words[i / 2] >> i % 2 * 16);
        amax = fmaxf(amax, fabsf(x[i]));
      }
      u32 pairs[4];
#if FORMAT == 1
      const u32 group = lane < 16 ? 0x0000FFFF : 0xFFFF0000;  // of the lanes that have this chunk
#pragma unroll
      for (int distance = 1; distance < 16; distance *= 2) amax = fmaxf(amax, __shfl_xor_sync(group, amax, distance));
      amax = fmaxf(amax, 1e-20f);
      const float inverse = __fdiv_rn(448.0f, amax);
#pragma unroll
      for (int i = 0; i < 4; i++)
        asm("{ .reg .b16 both; cvt.rn.satfinite.e4m3x2.f32 both, %1, %2; cvt.rn.f16x2.e4m3x2 %0, both; }"
            : "=r"(pairs[i])
            : "f"(x[2 * i + 1] * inverse), "f"(x[2 * i] * inverse));
      if (lane % 16 == 0) ((float*)(token_to + k + 32))[chunk] = __fdiv_rn(amax, 448.0f);
#else
#pragma unroll
      for (int i = 0; i < 4; i++) pairs[i] = to_pair(x[2 * i], x[2 * i + 1]);
#endif
      *(uint4*)(token_to + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
  __syncwarp();
  return squares;
}
// The scale of a staged token's chunk.
__device__ __forceinline__ float staged_scale(const u16* staged, int token, int chunk, int k) {
  return ((const float*)(staged + token * staged_stride(k) + k + 32))[chunk];
}

using Sums = float[TOKEN_TILES][4];

template <int TILES>
__device__ __forceinline__ void add_scaled(Sums& acc, const float (&sums)[TILES][4], float first, float second) {
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    acc[tile][0] += sums[tile][0] * first;
    acc[tile][1] += sums[tile][1] * first;
    acc[tile][2] += sums[tile][2] * second;
    acc[tile][3] += sums[tile][3] * second;
  }
}

// Adds the products of a chunk of columns, of which `columns` exist, of the first TILES tiles of tokens. raw: of rows g and g + 8.
template <int KIND, int TILES = TOKEN_TILES>  // FORMAT: a template discards the branches of other formats
__device__ __forceinline__ void multiply(Sums& acc, const Raw<KIND> (&raw)[2],
                                         const Tokens& tokens, int columns, int t) {
  constexpr bool HAS_MINIMA = KIND == Q4_1 || KIND == Q5_1 || KIND == Q4_K || KIND == Q5_K;
  if constexpr (KIND == FP8) {
    float sums[TILES][4];
#pragma unroll
    for (int block = 0; block < 4; block++) {
      u32 b[TILES][2][2];
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const uint4 loaded = tokens.load<uint4>(tile, 32 * block + 8 * t);
        b[tile][0][0] = loaded.x, b[tile][0][1] = loaded.y, b[tile][1][0] = loaded.z, b[tile][1][1] = loaded.w;
      }
#pragma unroll
      for (int part = 0; part < 2; part++) {
        u32 a[4];
        const uint2 first = raw[0].values[block], second = raw[1].values[block];
        decode_fp8(part ? first.y : first.x, a[0], a[2]);
        decode_fp8(part ? second.y : second.x, a[1], a[3]);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
          if (block == 0 && part == 0)
            mma_first(sums[tile], a, b[tile][part]);
          else
            mma(sums[tile], a, b[tile][part]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int j = 0; j < 4; j++) acc[tile][j] += sums[tile][j] * (raw[j / 2].scale * tokens.scale[tile][j % 2]);
  } else if constexpr (KIND == Q8_0) {
#pragma unroll
    for (int block = 0; block < 4; block++) {
      const int column = 32 * block;
      if (TAIL && column >= columns) break;
      u32 b[TILES][2][2];
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const uint4 loaded = tokens.load<uint4>(tile, column + 8 * t);
        b[tile][0][0] = loaded.x, b[tile][0][1] = loaded.y, b[tile][1][0] = loaded.z, b[tile][1][1] = loaded.w;
      }
      float sums[TILES][4];
#pragma unroll
      for (int part = 0; part < 2; part++) {
        u32 a[4];
        const uint2 first = raw[0].values[block], second = raw[1].values[block];
        decode_bytes(part ? first.y : first.x, a[0], a[2]);
        decode_bytes(part ? second.y : second.x, a[1], a[3]);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
          if (part == 0)
            mma_first(sums[tile], a, b[tile][part]);
          else
            mma(sums[tile], a, b[tile][part]);
      }
      const u32 shift = block % 2 * 16;
      add_scaled(acc, sums, half_to_float(raw[0].scales[block / 2] >> shift),
                 half_to_float(raw[1].scales[block / 2] >> shift));
    }
  } else {
    // Planes of a group of INT4 have one sum.
    constexpr int SUM_PLANES = KIND == INT4 ? 8 / GROUPS : 1;
    float sums[2][TILES][4];
#pragma unroll
    for (int byte = 0; byte < 4; byte++) {
      const int column = 64 * byte;  // of the even plane; the odd one has the next 32
      if (TAIL && column >= columns) break;
      float totals[2][TILES][4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 b[2][TILES][2];
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
#pragma unroll
          for (int tile = 0; tile < TILES; tile++) {
            const int place = column + 32 * odd;  // of a plane
            uint2 loaded = {};
            if (!TAIL || place < columns) loaded = tokens.load<uint2>(tile, place + 16 * half + 4 * t);
            b[odd][tile][0] = loaded.x, b[odd][tile][1] = loaded.y;
          }
        u32 bytes[4], top[4] = {};
#pragma unroll
        for (int which = 0; which < 2; which++) {
          const uint4 words = raw[which].words[half];
          bytes[which] = byte_pair(words.x, words.y, byte);
          bytes[which + 2] = byte_pair(words.z, words.w, byte);
          if constexpr (KIND == Q6_K) {
            // Half word j of the high bits: 2 bits of each of word j's values.
            const uint2 high = raw[which].high[half];
            top[which] = high.x >> (4 * byte) & 0x000F000F;
            top[which + 2] = high.y >> (4 * byte) & 0x000F000F;
          }
          if constexpr (KIND == Q5_1 || KIND == Q5_K) {
            const u32 bits = raw[which].fifth[half] >> (2 * byte);
            top[which] = __byte_perm(bits, 0, 0x4140);
            top[which + 2] = __byte_perm(bits, 0, 0x4342);
          }
        }
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
          u32 a[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            u32 minus_zero = 0;
            if constexpr (KIND == INT4) minus_zero = raw[i % 2].minus_zero(2 * byte + odd);
            a[i] = decode_nibbles(bytes[i], top[i], minus_zero, odd);
          }
#pragma unroll
          for (int tile = 0; tile < TILES; tile++) {
            float(&sum)[4] = sums[SUM_PLANES > 1 ? 0 : odd][tile];
            if ((half == 0 && (2 * byte + odd) % SUM_PLANES == 0) || KIND == Q6_K)
              mma_first(sum, a, b[odd][tile]);
            else
              mma(sum, a, b[odd][tile]);
          }
        }
        if constexpr (KIND == Q6_K) {  // a scale per 16 columns
#pragma unroll
          for (int odd = 0; odd < 2; odd++) {
            float scales[2];
#pragma unroll
            for (int which = 0; which < 2; which++) {
              const u32 pair = word_of(raw[which].subscales, byte) >> (16 * odd + 8 * half);
              scales[which] = half_to_float(raw[which].scale) * (float)(signed char)pair;
            }
            add_scaled(acc, sums[odd], scales[0], scales[1]);
          }
        }
        if constexpr (HAS_MINIMA) {
          const u32 ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
          for (int odd = 0; odd < 2; odd++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
              if (half == 0)
                mma_first(totals[odd][tile], ones, b[odd][tile]);
              else
                mma(totals[odd][tile], ones, b[odd][tile]);
        }
      }
      if constexpr (KIND != Q6_K) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
          if ((2 * byte + odd + 1) % SUM_PLANES != 0) continue;
          float scales[2];
          if constexpr (KIND == Q4_0) {
#pragma unroll
            for (int which = 0; which < 2; which++)
              scales[which] = half_to_float(word_of(raw[which].scales, byte) >> (16 * odd));
          } else if constexpr (KIND == INT4) {
#pragma unroll
            for (int which = 0; which < 2; which++) scales[which] = raw[which].scale(2 * byte + odd);
          } else {
            float minima[2];
#pragma unroll
            for (int which = 0; which < 2; which++) {
              const int plane = 2 * byte + odd;
              scales[which] = raw[which].scale(plane), minima[which] = raw[which].minimum(plane);
            }
            add_scaled(acc, totals[odd], minima[0], minima[1]);
          }
          add_scaled(acc, sums[SUM_PLANES > 1 ? 0 : odd], scales[0], scales[1]);
        }
      }
    }
  }
}

// Stores the sums of a tile of (token, expert) pairs. pair_of: the row of `output` that a slot of the tile has. gated: the
// result is silu(gate) * up, and rows g and g + 8 of the tile are gate and up of one column.
template <typename PairOf>
__device__ __forceinline__ void store_pairs(const Sums& acc, u16* output, const PairOf& pair_of, int valid, int row_tile,
                                            int outputs, int output_stride, bool gated, int g, int t) {
#pragma unroll
  for (int each = 0; each < TOKEN_TILES; each++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int slot = 8 * each + 2 * t + j;
      if (slot >= valid) continue;
      u16* out = output + (i64)pair_of(slot) * output_stride;
#pragma unroll
      for (int which = 0; which < 2; which++) {
        const int column = gated ? row_tile * 8 + g : row_tile * 16 + which * 8 + g;
        if (column >= outputs || (gated && which)) continue;
        float value = acc[each][2 * which + j];
        if (gated) value = value / (1.0f + __expf(-value)) * acc[each][2 + j];
        out[column] = from_float(value);
      }
    }
}
