// PTX instructions of batch_layers.cu, beside those of src/meltcore/kernels/instructions.cu.
// tests/kernels/cuda_emulation.h takes the place of both on a CPU.

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

__device__ __forceinline__ u32 product(u32 first, u32 second) {
    u32 pair;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(first), "r"(second));
    return pair;
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

__device__ __forceinline__ void fence_barriers() { VOLATILE("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Registers per thread, which the warps of a group of four change together.
template <int COUNT>
__device__ __forceinline__ void take_registers() { VOLATILE("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

template <int COUNT>
__device__ __forceinline__ void release_registers() { VOLATILE("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Makes the compiler compute what depends on a value anew.
__device__ __forceinline__ void forget_value(int& value) { VOLATILE("" : "+r"(value)); }
