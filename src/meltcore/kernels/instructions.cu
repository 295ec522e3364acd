typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// --- instructions ----------------------------------------------------------------------------------------------------

#define VOLATILE asm volatile

__device__ __forceinline__ void init_barrier(u32 barrier, int count) {
    VOLATILE("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    VOLATILE("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, int bytes) {
    VOLATILE("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits are bounded: what never comes ends the process's work on this device with an error, instead of hanging it.
constexpr u32 MAX_WAIT_NS = 2000000000;

struct Watch {
    u32 tries = 0, start = 0;
    __device__ __forceinline__ void check() {
        if (++tries % 4096) return;
        u32 now;
        VOLATILE("mov.u32 %0, %%globaltimer_lo;" : "=r"(now));
        if (tries == 4096) start = now;
        if (now - start > MAX_WAIT_NS) __trap();
    }
};

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    Watch watch;
    for (;; watch.check()) {
        u32 done;
        VOLATILE(
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
        if (done) return;
    }
}

__device__ __forceinline__ void copy(u32 to, const void* from, int bytes, u32 barrier) {
    VOLATILE("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
             ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_box(u32 to, const void* map, int column, int row, u32 barrier) {
    VOLATILE("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
             "[%0], [%1, {%2, %3}], [%4];"
             ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ u64 tagged(u32 value, u32 tag) { return (u64)tag << 32 | value; }

__device__ __forceinline__ void publish(u64* to, u32 value, u32 tag) {
    VOLATILE("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(tagged(value, tag)) : "memory");
}

__device__ __forceinline__ void publish2(u64* to, u32 first, u32 second, u32 tag) {
    VOLATILE("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};"
             ::"l"(to), "l"(tagged(first, tag)), "l"(tagged(second, tag)) : "memory");
}

__device__ __forceinline__ void read2(const u64* from, u64& first, u64& second) {
    VOLATILE("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}

__device__ __forceinline__ bool has(u64 word, u32 tag) { return (u32)(word >> 32) == tag; }

__device__ __forceinline__ uint4 load4(u32 at) {
    uint4 value;
    VOLATILE("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
             : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(at) : "memory");
    return value;
}

__device__ __forceinline__ uint2 load2(u32 at) {
    uint2 value;
    VOLATILE("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(at) : "memory");
    return value;
}

__device__ __forceinline__ float load_float(u32 at) {
    float value;
    VOLATILE("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
    return value;
}

__device__ __forceinline__ float2 load_float2(u32 at) {
    float2 value;
    VOLATILE("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(at) : "memory");
    return value;
}

__device__ __forceinline__ void store_float(u32 at, float value) {
    VOLATILE("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}

__device__ __forceinline__ void store_float2(u32 at, float x, float y) {
    VOLATILE("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void store_float4(u32 at, float x, float y, float z, float w) {
    VOLATILE("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

__device__ __forceinline__ void store_half(u32 at, u16 value) {
    VOLATILE("st.shared.u16 [%0], %1;" ::"r"(at), "h"(value) : "memory");
}

template <int ID, int WARPS>
__device__ __forceinline__ void arrive_named() { VOLATILE("bar.arrive %0, %1;" ::"n"(ID), "n"(32 * WARPS) : "memory"); }

template <int ID, int WARPS>
__device__ __forceinline__ void sync_named() { VOLATILE("bar.sync %0, %1;" ::"n"(ID), "n"(32 * WARPS) : "memory"); }

__device__ __forceinline__ void store_words(u32 at, u32 first, u32 second) {
    VOLATILE("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(first), "r"(second) : "memory");
}

// --- arithmetic ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u16 to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float rounded(float value) { return __uint_as_float((u32)to_bf16(value) << 16); }

__device__ __forceinline__ u32 pack(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ __forceinline__ void unpack(uint4 words, float* values) {
    values[0] = low(words.x), values[1] = high(words.x), values[2] = low(words.y), values[3] = high(words.y);
    values[4] = low(words.z), values[5] = high(words.z), values[6] = low(words.w), values[7] = high(words.w);
}

// Adds to the sums of 8 rows their products with 32 columns of a vector.
//
// A lane has 16 bytes of row lane / 4, of which it multiplies two halves: the matrix instruction has 16 rows, and takes
// the halves for rows lane / 4 and 8 + lane / 4. The order of columns does not matter as long as weights and factors
// have the same. Each of the instruction's 8 columns has other factors (see `factors_of`), of which a row needs some.
__device__ __forceinline__ void multiply(float* sums, uint4 weights, uint2 factors) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(weights.x), "r"(weights.y), "r"(weights.z), "r"(weights.w), "r"(factors.x), "r"(factors.y));
}

__device__ __forceinline__ float power_of_two(float value) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
    return power;
}

__device__ __forceinline__ float inverse_root(float value) {
    float root;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(value));
    return root;
}

__device__ __forceinline__ float exchange(float value, int distance) { return __shfl_xor_sync(~0u, value, distance); }

// Over the lanes whose indices differ by less than 2 * FIRST.
template <int FIRST>
__device__ __forceinline__ float max_lanes(float value) {
#pragma unroll
    for (int distance = FIRST; distance; distance /= 2) value = fmaxf(value, exchange(value, distance));
    return value;
}

template <int FIRST>
__device__ __forceinline__ float sum_lanes(float value) {
#pragma unroll
    for (int distance = FIRST; distance; distance /= 2) value += exchange(value, distance);
    return value;
}

