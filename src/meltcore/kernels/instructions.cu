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

__device__ __forceinline__ uint4 load4(u32 at) {
    uint4 value;
    VOLATILE("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
             : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(at) : "memory");
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

__device__ __forceinline__ void store_float4(u32 at, float x, float y, float z, float w) {
    VOLATILE("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

template <int ID, int WARPS>
__device__ __forceinline__ void sync_named() { VOLATILE("bar.sync %0, %1;" ::"n"(ID), "n"(32 * WARPS) : "memory"); }

__device__ __forceinline__ void store_words(u32 at, u32 first, u32 second) {
    VOLATILE("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(first), "r"(second) : "memory");
}

__device__ __forceinline__ uint4 load_piece(const char* from) {
    u64 first, second;
    VOLATILE("{ .reg .b128 piece; ld.relaxed.gpu.global.b128 piece, [%2]; mov.b128 {%0, %1}, piece; }"
             : "=l"(first), "=l"(second) : "l"(from) : "memory");
    return make_uint4((u32)first, (u32)(first >> 32), (u32)second, (u32)(second >> 32));
}

__device__ __forceinline__ uint2 load_half_piece(const char* from) {
    u64 words;
    VOLATILE("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(words) : "l"(from) : "memory");
    return make_uint2((u32)words, (u32)(words >> 32));
}

__device__ __forceinline__ void store_piece(char* to, u64 first, u64 second) {
    VOLATILE("{ .reg .b128 piece; mov.b128 piece, {%1, %2}; st.relaxed.gpu.global.b128 [%0], piece; }"
             ::"l"(to), "l"(first), "l"(second) : "memory");
}

__device__ __forceinline__ uint4 load_global(const void* from) {
    uint4 value;
    VOLATILE("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
             : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_word(u32 at) {
    u32 word;
    VOLATILE("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
    return word;
}

// Copies what is read once per step: it is the first to leave L2.
__device__ __forceinline__ void copy_once(u32 to, const void* from, int bytes, u32 barrier) {
    VOLATILE("{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy; "
             "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
             "[%0], [%1], %2, [%3], policy; }"
             ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Loads four matrices of 8 keys and 8 dims, transposed: a lane has keys 2 * (lane % 4) and the next of dim lane / 4.
__device__ __forceinline__ uint4 load_values(u32 at) {
    uint4 value;
    VOLATILE("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
             : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(at) : "memory");
    return value;
}

__device__ __forceinline__ uint2 load_half_global(const void* from) {
    uint2 value;
    VOLATILE("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_relaxed(const u32* from) {
    u32 word;
    VOLATILE("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

__device__ __forceinline__ void load_addresses(const u64* from, u64& first, u64& second) {
    VOLATILE("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}

__device__ __forceinline__ void fence() { VOLATILE("fence.acq_rel.gpu;" ::: "memory"); }

// Orders this thread's reads of shared memory before bulk copies that follow them.
__device__ __forceinline__ void fence_reads() { VOLATILE("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void fence_barriers() { VOLATILE("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Registers per thread, which the warps of a group of four change together.
template <int COUNT>
__device__ __forceinline__ void take_registers() { VOLATILE("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

template <int COUNT>
__device__ __forceinline__ void release_registers() { VOLATILE("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Makes the compiler compute what depends on a value anew.
__device__ __forceinline__ void forget_value(int& value) { VOLATILE("" : "+r"(value)); }

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

// Multiplies two pairs of bfloat16, each rounded once.
__device__ __forceinline__ u32 multiply_pairs(u32 first, u32 second) {
    u32 pair;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(first), "r"(second));
    return pair;
}

// Adds products to 4 of the 16 x 8 sums that a warp has: of 16 rows of the first operand and 8 rows of the second.
__device__ __forceinline__ void multiply(float* sums, uint4 first, uint2 second) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(first.x), "r"(first.y), "r"(first.z), "r"(first.w), "r"(second.x), "r"(second.y));
}

// As `multiply`, of 8 columns in tf32: of each number 11 bits count. A lane's columns are lane % 4 and 4 more.
__device__ __forceinline__ void multiply_tf32(float* sums, uint4 first, uint2 second) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(first.x), "r"(first.y), "r"(first.z), "r"(first.w), "r"(second.x), "r"(second.y));
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

// Programmatic dependent launch: the next kernel may start, and this one waits for the end of the previous one.
__device__ __forceinline__ void launch_dependents() { VOLATILE("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous() { VOLATILE("griddepcontrol.wait;" ::: "memory"); }

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

