// What kernels with the matrix instructions of Hopper's warp groups share, after instructions.cu.

struct alignas(64) TensorMap {
    u64 words[16];
};

template <int STAGES>
struct Ring {
    u32 slot = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// Between writes to shared memory by threads and reads of it by copies or matrix instructions.
__device__ __forceinline__ void fence_async() { VOLATILE("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void store4(u32 at, uint4 words) {
    VOLATILE("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(words.x), "r"(words.y), "r"(words.z),
             "r"(words.w) : "memory");
}

__device__ __forceinline__ void start_dependents() { VOLATILE("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_kernels() { VOLATILE("griddepcontrol.wait;" ::: "memory"); }

// Of a swizzled layout with rows of 128 bytes: groups of 8 rows are 1,024 bytes apart; where rows are the inner
// dimension of the product, groups of 64 columns are `column_bytes` apart.
__device__ __forceinline__ u64 descriptor(u32 at, int column_bytes) {
    return (u64)(at >> 4 & 0x3fff) | (u64)(column_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void begin_products() { VOLATILE("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { VOLATILE("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_products() {
    VOLATILE("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The compiler moves no access to the registers across this.
template <int COUNT>
__device__ __forceinline__ void pin(float* values) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) VOLATILE("" : "+f"(values[i])::"memory");
}

template <int COUNT>
__device__ __forceinline__ void pin(u32* values) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) VOLATILE("" : "+r"(values[i])::"memory");
}

#define OUTPUTS_8(d, i)                                                                                       \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define OUTPUTS_64(d)                                                                                           \
    OUTPUTS_8(d, 0), OUTPUTS_8(d, 8), OUTPUTS_8(d, 16), OUTPUTS_8(d, 24), OUTPUTS_8(d, 32), OUTPUTS_8(d, 40),   \
        OUTPUTS_8(d, 48), OUTPUTS_8(d, 56)
