// Few tokens by a block-quantized weight: a decoder with fewer instructions than that of ggml_tile.cu.
//
// Tokens are staged in float16, multiplied by a power of two so that the largest value of a warp's columns is near 2^15.
// Values above 2^-27 of the largest in bfloat16, and 2^-24 in float16, are exact. Smaller ones lose at most 2^-35 of it.
// Quantized values are subnormal numbers of float16, which a mask decodes. What is subtracted from each value is multiplied by the sums of the token's
// columns: with them an accumulator starts.
//
// The tokens' side of mma.m16n8k16 has 8 columns. Formats in words of 8 values (column j of each of 8 blocks of 32) have
// values p and p + 4 in one register, as they are in the word, so no value moves. A single token has a column of its own
// for each block, with zeros in the other blocks: a thread has the sums of two blocks, and two scales per row instead of
// eight. Up to four tokens have two columns each, for blocks p and p + 4.

// STAGED: tokens for which there is space, 1 or 4, 4 of formats in words alone.
constexpr bool FEW_TOKENS = STAGED && (FORMAT == Q4_0 || FORMAT == INT4 || FORMAT == Q4_1 || FORMAT == Q4_K ||
                                       FORMAT == Q6_K || FORMAT == Q8_0);
constexpr int SLOTS = FEW_TOKENS ? STAGED : 1;
static_assert(SLOTS == 1 || (SLOTS == 4 && !IN_BYTES), "a single token, or up to four of a format in words");
constexpr int TOKEN_CHUNK_BYTES = IN_BYTES ? 2 * CHUNK : 4 * CHUNK;  // in words a pair per value, one of which is zero
constexpr int CHUNK_SUMS = (IN_BYTES ? 4 : 16) * SLOTS;  // of 32 columns; in words of 16: those of each half of 8 blocks
constexpr int TOKEN_PADDING = 64;  // bytes behind each token, so that neighbors are read from other banks
constexpr int ZEROS = SLOTS == 1 && !IN_BYTES ? 128 : 0;  // bytes, in other banks than what is read with them

__device__ __forceinline__ void mma_half(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Tokens in shared memory.
struct StagedTokens {
  u8* to;
  const float* sums;
  u32 token_bytes, zeros;
  int chunks;
  float factors[2];  // of the warp's sums, for the tokens whose sums this thread has

  __device__ __forceinline__ StagedTokens(u8* staged, int token_count, int all_chunks)
      : to(staged), chunks(all_chunks) {
    token_bytes = chunks * TOKEN_CHUNK_BYTES + TOKEN_PADDING;
    zeros = token_count * token_bytes;
    sums = (const float*)(staged + zeros + ZEROS);
  }

  // Stages every `stride`-th chunk of the tokens from `first` on. norm: as of stage_tokens, for a single token. Returns
  // the sum of the squares of what a thread has staged.
  __device__ __forceinline__ float stage(const u16* from, const u16* norm, int token_count, int first, int stride, int k,
                                         int lane) {
    constexpr int PIECES = CHUNK / 8;
    const int count = first < chunks ? ((chunks - 1 - first) / stride + 1) * PIECES : 0;
    auto load = [&](int token, int column, float (&x)[8]) {
      uint4 loaded = {}, weights = {};
      if (column < k) loaded = *(const uint4*)(from + (i64)token * k + column);
      if (SLOTS == 1 && norm != nullptr && column < k) weights = *(const uint4*)(norm + column);
      const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      const u32 weight_words[4] = {weights.x, weights.y, weights.z, weights.w};
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        x[i] = to_float(words[i / 2] >> i % 2 * 16);
        squares += x[i] * x[i];
        if (SLOTS == 1 && norm != nullptr)
          x[i] = to_float(from_float(x[i] * to_float(weight_words[i / 2] >> i % 2 * 16)));
      }
      return squares;
    };
    auto column_of = [&](int piece) { return (first + piece / PIECES * stride) * CHUNK + piece % PIECES * 8; };
    float squares = 0.0f, amax[SLOTS] = {};
#pragma unroll SLOTS == 1 ? 6 : 2
    for (int piece = lane; piece < count; piece += 32) {
#pragma unroll
      for (int token = 0; token < SLOTS; token++) {
        if (token >= token_count) continue;
        float x[8];
        squares += load(token, column_of(piece), x);
#pragma unroll
        for (int i = 0; i < 8; i++) amax[token] = fmaxf(amax[token], fabsf(x[i]));
      }
    }
    float scales[SLOTS];
#pragma unroll
    for (int token = 0; token < SLOTS; token++) {
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2)
        amax[token] = fmaxf(amax[token], __shfl_xor_sync(~0u, amax[token], distance));
      // 2^14 <= amax * scale < 2^15, unless amax is below 2^-100.
      const int exponent = max((int)(__float_as_uint(amax[token]) >> 23), 27);
      scales[token] = __uint_as_float(min(127 + 14 + 127 - exponent, 254) << 23);
      const float factor = __uint_as_float(min(exponent, 254) << 23);  // times 2^10, that of 2^24 / 2^14
      const int mine = SLOTS == 1 ? 0 : lane % 2 * 2;
      if (token == mine) factors[0] = factor;
      if (token == mine + 1) factors[1] = factor;
    }
    float* const sum_to = (float*)sums;
#pragma unroll 1
    for (int piece = lane; piece < (count + 31) / 32 * 32; piece += 32) {
      const int chunk = first + piece / PIECES * stride, column = piece % PIECES * 8, plane = column / 32;
#pragma unroll
      for (int token = 0; token < SLOTS; token++) {
        if (token >= token_count) continue;
        float x[8], sum = 0.0f;
        load(token, piece < count ? column_of(piece) : k, x);
        const float scale = scales[token];
        // Values of odd blocks are masked where they are: they are 16 times as large.
        const float plane_scale = IN_BYTES || plane % 2 == 0 ? scale : scale * 0.0625f;
        u32 halves[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
          sum += x[i] * scale;
          asm("{ .reg .f16 h; .reg .b16 b; cvt.rn.f16.f32 h, %1; mov.b16 b, h; cvt.u32.u16 %0, b; }"
              : "=r"(halves[i])
              : "f"(x[i] * plane_scale));
        }
        sum *= 5.9604644775390625e-8f;  // 2^-24, as values are
        sum += __shfl_xor_sync(~0u, sum, 1);
        if (IN_BYTES) sum += __shfl_xor_sync(~0u, sum, 2);
        if (piece >= count) continue;
        u8* const token_to = to + token * token_bytes + chunk * TOKEN_CHUNK_BYTES;
        if (IN_BYTES) {
          uint4 pairs;  // values 0 and 2, 1 and 3 of a word
          pairs.x = halves[0] | halves[2] << 16, pairs.y = halves[1] | halves[3] << 16;
          pairs.z = halves[4] | halves[6] << 16, pairs.w = halves[5] | halves[7] << 16;
          *(uint4*)(token_to + column * 2) = pairs;
          if (lane % 4 == 0) sum_to[(chunk * 4 + plane) * SLOTS + token] = sum;
        } else {
          const int shift = plane / 4 * 16;
          *(uint4*)(token_to + column * 4) =
              make_uint4(halves[0] << shift, halves[1] << shift, halves[2] << shift, halves[3] << shift);
          *(uint4*)(token_to + column * 4 + 16) =
              make_uint4(halves[4] << shift, halves[5] << shift, halves[6] << shift, halves[7] << shift);
          if (lane % 2 == 0) sum_to[(chunk * 16 + piece % 4 / 2 * 8 + plane) * SLOTS + token] = sum;
        }
      }
    }
    if (ZEROS && lane < ZEROS / 16) *(uint4*)(to + zeros + lane * 16) = make_uint4(0, 0, 0, 0);
    __syncwarp();
    return squares;
  }
};

// Values p and p + 4 of a word, as subnormal numbers, 16 times as large if p is odd. shifted: the word >> 8; top: of
// Q6_K, the high bits of values 0 to 3 in the low half, of 4 to 7 in the high one.
__device__ __forceinline__ u32 decode_subnormal(u32 word, u32 shifted, u32 top, int p) {
  const u32 from = p / 2 ? shifted : word;
  if (FORMAT == Q6_K) {
    const u32 moved = p == 0   ? and_xor(top << 4, 0x00300030, 0x00200020)
                      : p == 1 ? and_xor(top << 6, 0x03000300, 0x02000200)
                      : p == 2 ? and_xor(top, 0x00300030, 0x00200020)
                               : and_xor(top << 2, 0x03000300, 0x02000200);
    return and_or(from, p % 2 ? 0x00F000F0 : 0x000F000F, moved);
  }
  if (FORMAT == Q4_0 || FORMAT == INT4)
    return p % 2 ? and_xor(from, 0x00F000F0, 0x00800080) : and_xor(from, 0x000F000F, 0x00080008);
  return from & (p % 2 ? 0x00F000F0 : 0x000F000F);
}

// The scales and minima of a row and of COUNT blocks of 32 columns from COUNT * index on. from: a chunk's scales.
template <int COUNT>
__device__ __forceinline__ void read_scales(float (&scales)[COUNT], float (&minima)[COUNT], const u8* from, int row,
                                            int index) {
  if constexpr (FORMAT == Q4_0) {
    u32 pairs[COUNT / 2];
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) pairs[i] = ((const u32*)(from + row * 16 + 2 * COUNT * index))[i];
#pragma unroll
    for (int i = 0; i < COUNT; i++) scales[i] = half_to_float(pairs[i / 2] >> (i % 2 * 16));
  } else if constexpr (FORMAT == INT4) {
    const u16* all = (const u16*)(from + row * 2 * GROUPS);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (i * GROUPS / 8 == (i - 1) * GROUPS / 8 && i) {
        scales[i] = scales[i - 1];
        continue;
      }
      const u16 bits = all[(COUNT * index + i) * GROUPS / 8];
      scales[i] = BF16_SCALES ? __uint_as_float((u32)bits << 16) : half_to_float(bits);
    }
  } else if constexpr (FORMAT == Q4_1) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const u32 pair = ((const u32*)(from + row * 32 + 4 * COUNT * index))[i];
      scales[i] = half_to_float(pair), minima[i] = half_to_float(pair >> 16);
    }
  } else {
    const uint4 all = *(const uint4*)(from + row * 16);
    const int first = COUNT * index;
    const u32 low = (first / 4 ? all.z : all.y) >> (first % 4 * 8), high = all.w >> (first % 4 * 8 + first / 4 * 4);
    const float scale = half_to_float(all.x), minimum = -half_to_float(all.x >> 16);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      scales[i] = scale * (float)((low >> (8 * i) & 15) | (high >> (8 * i) & 3) << 4);
      minima[i] = minimum * (float)((low >> (8 * i + 4) & 15) | (high >> (8 * i + 2) & 3) << 4);
    }
  }
}

// What is subtracted from the values of a row and such blocks, negative. Minima are added to the sums.
template <int COUNT>
__device__ __forceinline__ void read_offsets(float (&offsets)[COUNT], const u8* from, int row, int index) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    offsets[i] = FORMAT == Q4_0 ? -8.0f : FORMAT == Q6_K ? -32.0f : 0.0f;
    if (FORMAT != INT4) continue;
    const signed char* zeros = (const signed char*)(from + 32 * GROUPS + row * ZERO_BYTES);
    const bool known = i && i * GROUPS / 8 == (i - 1) * GROUPS / 8;
    offsets[i] = known ? offsets[i - 1] : (float)(zeros[(COUNT * index + i) * GROUPS / 8] - 8);
  }
}

// The scales of Q6_K, two for each such block: of its first and its last 16 columns.
template <int COUNT>
__device__ __forceinline__ void read_subscales(float (&scales)[2 * COUNT], const u8* from, int row, int index, int chunk) {
  const float scale = half_to_float(*(const u32*)(from + 256 + row * 4) >> (chunk % 2 * 16));
#pragma unroll
  for (int i = 0; i < COUNT / 2; i++) {
    const u32 four = ((const u32*)(from + row * 16 + 2 * COUNT * index))[i];
#pragma unroll
    for (int j = 0; j < 4; j++) scales[4 * i + j] = scale * (float)(signed char)(four >> (8 * j));
  }
}

// Half a chunk's words of rows g and g + 8: 4 of each.
struct HalfWords {
  u32 words[2][4], shifted[2][4], top[2][4];
  __device__ __forceinline__ HalfWords(const u8* base, int half, int g, int t) {
#pragma unroll
    for (int which = 0; which < 2; which++) {
      const uint4 four = *(const uint4*)(base + value_place(8 * which + g, 4 * half + t));
      uint2 high = {};
      if (FORMAT == Q6_K) high = *(const uint2*)(base + high_place(8 * which + g, 2 * half + t / 2) + t % 2 * 8);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        words[which][i] = word_of(four, i), shifted[which][i] = words[which][i] >> 8;
        top[which][i] = FORMAT == Q6_K ? __byte_perm(i / 2 ? high.y : high.x, 0, i % 2 ? 0x4342 : 0x4140) : 0;
      }
    }
  }
  __device__ __forceinline__ void multiply(float (&sums)[4], const uint4& b, int p) const {
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int which = i % 2, word = 2 * pair + i / 2;
        a[i] = decode_subnormal(words[which][word], shifted[which][word], top[which][word], p);
      }
      mma_half(sums, a, pair ? b.z : b.x, pair ? b.w : b.y);
    }
  }
};

// Adds the products of a chunk of columns, of which `columns` exist. base: the weights in shared memory. acc: of rows g
// and g + 8, as mma has them. In words the four threads of a row have parts of a single token's sum, or every second
// thread has parts of the sums of the same two tokens.
__device__ __forceinline__ void multiply_few(float (&acc)[4], const u8* base, const StagedTokens& tokens, int token_count,
                                             int chunk, int columns, int g, int t) {
  const u8* const staged = tokens.to + chunk * TOKEN_CHUNK_BYTES;
  const float* const totals = tokens.sums + chunk * CHUNK_SUMS;
  const u8* const scales_from = base + SCALES_PLACE;
  if constexpr (IN_BYTES) {
    uint2 scales[2];
#pragma unroll
    for (int which = 0; which < 2; which++) scales[which] = *(const uint2*)(scales_from + (8 * which + g) * 8);
#pragma unroll
    for (int block = 0; block < 4; block++) {
      if (TAIL && 32 * block >= columns) break;
      const uint4 b = *(const uint4*)(staged + 64 * block + 16 * t);
      const float start = -128.0f * totals[block];
      float sums[4] = {start, 0.0f, start, 0.0f};
      uint2 values[2];
#pragma unroll
      for (int which = 0; which < 2; which++)
        values[which] = *(const uint2*)(base + value_place(8 * which + g, 2 * block + t / 2) + t % 2 * 8);
#pragma unroll
      for (int part = 0; part < 2; part++) {
        u32 a[4];
#pragma unroll
        for (int which = 0; which < 2; which++) {
          const u32 word = part ? values[which].y : values[which].x;
          a[which] = and_xor(word, 0x00FF00FF, 0x00800080);
          a[which + 2] = and_xor(word >> 8, 0x00FF00FF, 0x00800080);
        }
        mma_half(sums, a, part ? b.z : b.x, part ? b.w : b.y);
      }
#pragma unroll
      for (int which = 0; which < 2; which++) {
        const u32 pair = block / 2 ? scales[which].y : scales[which].x;
        acc[2 * which] += sums[2 * which] * half_to_float(block % 2 ? pair >> 16 : pair);
      }
    }
  } else if constexpr (SLOTS == 1) {
    float sums[2][4];  // of each half of the words: of row g and blocks 2t and 2t + 1, of row g + 8
    float2 total[2];
#pragma unroll
    for (int half = 0; half < 2; half++) total[half] = *(const float2*)(totals + half * 8 + 2 * t);
#pragma unroll
    for (int which = 0; which < 2; which++) {
      float offsets[2];
      read_offsets(offsets, scales_from, 8 * which + g, t);
#pragma unroll
      for (int half = 0; half < 2; half++)
        sums[half][2 * which] = offsets[0] * total[half].x, sums[half][2 * which + 1] = offsets[1] * total[half].y;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const HalfWords words(base, half, g, t);
#pragma unroll
      for (int p = 0; p < 4; p++) {
        const u8* place = g % 4 == p ? staged + g * 128 + t * 16 : tokens.to + tokens.zeros;
        words.multiply(sums[half], *(const uint4*)(place + half * 64), p);
      }
    }
    if (TAIL && 64 * t >= columns) return;  // scales behind the last column may be any numbers
#pragma unroll
    for (int which = 0; which < 2; which++) {
      const int row = 8 * which + g;
      if constexpr (FORMAT == Q6_K) {
        float scales[4];
        read_subscales<2>(scales, scales_from, row, t, chunk);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (TAIL && i / 2 && 64 * t + 32 >= columns) continue;
          acc[2 * which] += scales[i] * sums[i % 2][2 * which + i / 2];
        }
      } else {
        float scales[2], minima[2] = {};
        read_scales(scales, minima, scales_from, row, t);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          if (TAIL && i && 64 * t + 32 >= columns) continue;
          acc[2 * which] += scales[i] * (sums[0][2 * which + i] + sums[1][2 * which + i]);
          if (FORMAT == Q4_1 || FORMAT == Q4_K)
            acc[2 * which] += minima[i] * (i ? total[0].y + total[1].y : total[0].x + total[1].x);
        }
      }
    }
  } else {
    // Column n of the tokens' side is token n % 4, in blocks p and p + 4 for n / 4 = 0 and 1.
    const u32 row = min(g % 4, token_count - 1) * tokens.token_bytes + chunk * TOKEN_CHUNK_BYTES + g / 4 * 512 + t * 16;
    const float* const total_from = totals + t / 2 * 4 * SLOTS + 2 * (t % 2);
    const HalfWords words[2] = {HalfWords(base, 0, g, t), HalfWords(base, 1, g, t)};
    float offsets[2][4], scales[2][4], minima[2][4] = {}, subscales[2][8];
#pragma unroll
    for (int which = 0; which < 2; which++) {
      read_offsets(offsets[which], scales_from, 8 * which + g, t / 2);
      if constexpr (FORMAT == Q6_K)
        read_subscales<4>(subscales[which], scales_from, 8 * which + g, t / 2, chunk);
      else
        read_scales(scales[which], minima[which], scales_from, 8 * which + g, t / 2);
    }
#pragma unroll
    for (int p = 0; p < 4; p++) {
      if (TAIL && 32 * p >= columns) break;
      float2 total[2];
#pragma unroll
      for (int half = 0; half < 2; half++) total[half] = *(const float2*)(total_from + (half * 8 + p) * SLOTS);
      float2 all = total[0];
      all.x += total[1].x, all.y += total[1].y;
      const bool exists = !TAIL || 32 * (p + t / 2 * 4) < columns;
      float sums[4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (half == 0 || FORMAT == Q6_K)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const float2 from = FORMAT == Q6_K ? total[half] : all;
            sums[j] = offsets[j / 2][p] * (j % 2 ? from.y : from.x);
          }
        words[half].multiply(sums, *(const uint4*)(tokens.to + (row + p * 128 + half * 64)), p);
        if (FORMAT == Q6_K && exists)
#pragma unroll
          for (int j = 0; j < 4; j++) acc[j] += subscales[j / 2][2 * p + half] * sums[j];
      }
      if (FORMAT != Q6_K && exists)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          acc[j] += scales[j / 2][p] * sums[j];
          if (FORMAT == Q4_1 || FORMAT == Q4_K) acc[j] += minima[j / 2][p] * (j % 2 ? all.y : all.x);
        }
    }
  }
}

// Adds the parts of sums that multiply_few left in threads, and multiplies by the warp's factors.
__device__ __forceinline__ void finish_few(float (&acc)[4], const StagedTokens& tokens, int t) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (SLOTS == 1 && j % 2) continue;
    if (!IN_BYTES && SLOTS == 1) acc[j] += __shfl_xor_sync(~0u, acc[j], 1);
    if (!IN_BYTES) acc[j] += __shfl_xor_sync(~0u, acc[j], 2);
    acc[j] = acc[j] * 1024.0f * tokens.factors[j % 2];
  }
}

