// What the kernels of block-quantized weights in CUDA C++ share, their first file but for instructions.cu and wgmma.cu.
//
// Macros: FORMAT (a constant below; INT4 with GROUP and BF16_SCALES; FP8 with GROUP, the rows that share a scale), HALF (1: float16 tokens, 0: bfloat16).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

constexpr int FP8 = 1, Q8_0 = 8, Q4_0 = 2, Q4_1 = 3, Q5_1 = 7, Q4_K = 12, Q5_K = 13, Q6_K = 14, INT4 = 4;
constexpr bool HAS_FIFTH_BIT = FORMAT == Q5_1 || FORMAT == Q5_K;
// Bytes of a row and a chunk with the bits above the lowest four of each value.
constexpr int ROW_HIGH_BYTES = FORMAT == Q6_K ? 64 : HAS_FIFTH_BIT ? 32 : 0;

template <u32 LUT>
__device__ __forceinline__ u32 lop3(u32 a, u32 b, u32 c) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(out) : "r"(a), "r"(b), "r"(c), "n"(LUT));
  return out;
}
__device__ __forceinline__ u32 and_or(u32 a, u32 b, u32 c) { return lop3<0xEA>(a, b, c); }
__device__ __forceinline__ u32 and_xor(u32 a, u32 b, u32 c) { return lop3<0x6A>(a, b, c); }

__device__ __forceinline__ float half_to_float(u32 bits) {
  float out;
  asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(out) : "h"((u16)bits));
  return out;
}

__device__ __forceinline__ float to_float(u16 bits) {
#if HALF
  return half_to_float(bits);
#else
  return __uint_as_float((u32)bits << 16);
#endif
}

__device__ __forceinline__ u16 from_float(float value) {
  u16 out;
#if HALF
  asm("{ .reg .f16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h; }" : "=h"(out) : "f"(value));
#else
  asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, %1; mov.b16 %0, h; }" : "=h"(out) : "f"(value));
#endif
  return out;
}

__device__ __forceinline__ u32 to_pair(float first, float second) {
  u32 out;
#if HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
#endif
  return out;
}

