// --- matrix products -------------------------------------------------------------------------------------------------

#define REGISTERS_64                                                                                                 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "  \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// Scores of 64 queries and 128 keys from 16 dims; ADD: to those of the dims before.
template <int ADD>
__device__ __forceinline__ void multiply_keys(float* scores, u64 queries, u64 keys) {
    VOLATILE("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
             "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " REGISTERS_64 ", %64, %65, p, 1, 1, 0, 0; }"
             : OUTPUTS_64(scores) : "l"(queries), "l"(keys), "n"(ADD));
}

// Adds the products of 64 x 16 weights and 16 values of 128 dims. The values' inner dimension is that of the product.
__device__ __forceinline__ void multiply_values(float* sums, const u32* weights, u64 values) {
    VOLATILE("{ .reg .pred p; setp.ne.b32 p, 1, 0;\n"
             "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " REGISTERS_64
             ", {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
             : OUTPUTS_64(sums) : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values));
}

// --- computing -------------------------------------------------------------------------------------------------------

// A thread has two rows of the tile, lane / 4 and 8 more of its warp's 16, and of every 8 columns two.
struct Head {
    const Params& params;
    u32 shared;
    int group, warp, lane;  // 0 or 1; of the warp group; of the warp
    Ring<2> query_ring;
    Ring<KEY_STAGES> key_ring;
    Ring<VALUE_STAGES> value_ring;
    float maximum[2], total[2];

    __device__ __forceinline__ u32 barrier(int index) const { return shared + AT_BARRIERS + 8 * index; }
    __device__ __forceinline__ u32 queries() const {
        return shared + query_ring.slot * QUERY_BYTES + group * HEAD_BYTES;
    }
    __device__ __forceinline__ u32 values() const { return shared + AT_VALUES + value_ring.slot * BLOCK_BYTES; }

    __device__ __forceinline__ void release(int index) const {
        if (lane == 0) arrive(barrier(index));
    }
    __device__ __forceinline__ void sync_group() const { sync_threads(3 + group, 128); }

    __device__ __forceinline__ void begin_scores(float* scores) {
        u64 query = descriptor(queries(), 16);
        u64 keys = descriptor(shared + AT_KEYS + key_ring.slot * BLOCK_BYTES, 16);
        wait(barrier(KEYS_FULL + key_ring.slot), key_ring.phase);
        pin<64>(scores);
        begin_products();
        multiply_keys<0>(scores, query, keys);
#pragma unroll
        for (int i = 1; i < HEAD_DIM / 16; ++i)
            multiply_keys<1>(scores, query + (i / 4 * QUERY_HALF + i % 4 * 32) / 16,
                             keys + (i / 4 * BLOCK_HALF + i % 4 * 32) / 16);
        commit_products();
    }

    __device__ __forceinline__ void end_scores() {
        release(KEYS_EMPTY + key_ring.slot);
        key_ring.next();
    }

    __device__ __forceinline__ void begin_sums(float* sums, u32* weights) {
        u64 from = descriptor(values(), BLOCK_HALF);
        wait(barrier(VALUES_FULL + value_ring.slot), value_ring.phase);
        pin<64>(sums);
        pin<32>(weights);
        begin_products();
#pragma unroll
        for (int i = 0; i < BLOCK_KEYS / 16; ++i) multiply_values(sums, weights + 4 * i, from + i * 16 * 128 / 16);
        commit_products();
    }

    __device__ __forceinline__ void end_sums() {
        release(VALUES_EMPTY + value_ring.slot);
        value_ring.next();
    }

    __device__ __forceinline__ void mask(float* scores, int first_key, int context_len, int end) const {
        int column = first_key + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int limit = min(context_len + warp * 16 + lane / 4 + 8 * r, end - 1) - column;
#pragma unroll
            for (int i = 0; i < BLOCK_KEYS / 8; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (8 * i + j > limit) scores[4 * i + 2 * r + j] = __uint_as_float(0xff800000u);
        }
    }

    // Replaces scores by weights, and returns in `rescale` what older sums are multiplied by.
    __device__ __forceinline__ void softmax(float* scores, float* rescale) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) largest[i] = fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]);
#pragma unroll
            for (int i = 4; i < BLOCK_KEYS / 8; ++i)
                largest[i % 4] = fmaxf(largest[i % 4], fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
            float found = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
            float next = fmaxf(maximum[r], max_lanes<2>(found));
            // A row may have seen no key yet.
            float offset = next == __uint_as_float(0xff800000u) ? 0.0f : next * params.scale_log2;
            rescale[r] = power_of_two(fmaf(maximum[r], params.scale_log2, -offset));
            maximum[r] = next;
            float sum[2] = {0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < BLOCK_KEYS / 8; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& score = scores[4 * i + 2 * r + j];
                    score = power_of_two(fmaf(score, params.scale_log2, -offset));
                    sum[j] += score;
                }
            total[r] = fmaf(total[r], rescale[r], sum[0] + sum[1]);
        }
    }

    __device__ __forceinline__ static void convert(const float* scores, u32* weights) {
#pragma unroll
        for (int i = 0; i < BLOCK_KEYS / 4; ++i) weights[i] = pack(scores[2 * i], scores[2 * i + 1]);
    }

    // What a page holds after the last key may be anything, and zero times infinity is not zero.
    __device__ __forceinline__ void clear_values(int valid) {
        wait(barrier(VALUES_FULL + value_ring.slot), value_ring.phase);
        int key = warp * 32 + lane;
        if (key >= valid) {
            u32 at = values() + key * 128;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                u32 part = at + (i ^ key % 8) * 16;
                store4(part, make_uint4(0, 0, 0, 0));
                store4(part + BLOCK_HALF, make_uint4(0, 0, 0, 0));
            }
        }
        fence_async();
        sync_group();
    }

    // Scores of a block, while the sums take in the block before it.
    template <bool MASKED>
    __device__ __forceinline__ void step(const Items& item, int block, float* scores, u32* weights, float* sums) {
        float rescale[2];
        sync_threads(1 + group, 256);
        begin_scores(scores);
        begin_sums(sums, weights);
        arrive_threads(2 - group, 256);
        wait_products<1>();
        pin<64>(scores);
        end_scores();
        if (MASKED) mask(scores, block * BLOCK_KEYS, item.context_len, item.end());
        softmax(scores, rescale);
        wait_products<0>();
        pin<64>(sums);
        pin<32>(weights);
        end_sums();
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i] *= rescale[i / 2 % 2];
        convert(scores, weights);
    }

    __device__ __forceinline__ void store(const Items& item, const float* sums) {
        sync_group();  // the queries have been read by all
        u32 from = queries() + warp * 16 * 256;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float factor = __fdividef(1.0f, sum_lanes<2>(total[r]));
            int row = lane / 4 + 8 * r;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; ++i)
                VOLATILE("st.shared.u32 [%0], %1;" ::"r"(from + row * 256 + (i ^ row % 8) * 16 + lane % 4 * 4),
                         "r"(pack(sums[4 * i + 2 * r] * factor, sums[4 * i + 2 * r + 1] * factor)) : "memory");
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int row = 2 * i + lane / 16, query = warp * 16 + row;
            uint4 words = load4(from + row * 256 + (lane % 16 ^ row % 8) * 16);
            if (query < item.num_queries) {
                i64 head = (i64)(item.first_token + query) * HEADS + item.head + group;
                ((uint4*)(params.out + head * HEAD_DIM))[lane % 16] = words;
            }
        }
        __syncwarp();
        release(QUERIES_EMPTY + query_ring.slot);
        query_ring.next();
    }

    __device__ __forceinline__ void run() {
        float scores[64], sums[64], rescale[2];
        u32 weights[32];
        Items item(params);
        if (group == 1) arrive_threads(1, 256);  // head 0 begins
        while (item.next()) {
            int block = item.blocks() - 1;
            wait(barrier(QUERIES_FULL + query_ring.slot), query_ring.phase);
#pragma unroll
            for (int r = 0; r < 2; ++r) maximum[r] = __uint_as_float(0xff800000u), total[r] = 0.0f;
#pragma unroll
            for (int i = 0; i < 64; ++i) sums[i] = 0.0f;
            begin_scores(scores);
            wait_products<0>();
            pin<64>(scores);
            end_scores();
            mask(scores, block * BLOCK_KEYS, item.context_len, item.end());
            softmax(scores, rescale);
            convert(scores, weights);
            int valid = item.end() - block * BLOCK_KEYS;
            if (valid < BLOCK_KEYS) clear_values(valid);
            --block;
#pragma unroll 1
            for (; block >= 0 && (block + 1) * BLOCK_KEYS - 1 > item.context_len; --block)
                step<true>(item, block, scores, weights, sums);
#pragma unroll 1
            for (; block >= 0; --block) step<false>(item, block, scores, weights, sums);
            begin_sums(sums, weights);
            wait_products<0>();
            pin<64>(sums);
            end_sums();
            store(item, sums);
        }
        if (group == 0) sync_threads(1, 256);  // the other head's last turn
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) prefill_attention_wgmma(
    const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, const u16* qkv,
    const u16* weight, const float* rotary, const i64* page_table, const int4* tiles, u16* out, int num_tiles,
    int qkv_stride, int table_stride, float eps, float scale_log2) {
    extern __shared__ char memory[];
    u32 shared = ((u32)__cvta_generic_to_shared(memory) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    Params params{&keys, &values, qkv,        weight,       rotary, page_table, tiles,
                  out,   num_tiles, qkv_stride, table_stride, eps,    scale_log2};
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        auto init = [&](int first, int count, int arrivals) {
            for (int i = 0; i < count; ++i) init_barrier(shared + AT_BARRIERS + 8 * (first + i), arrivals);
        };
        init(KEYS_FULL, KEY_STAGES, 1);
        init(KEYS_EMPTY, KEY_STAGES, 8);
        init(VALUES_FULL, VALUE_STAGES, 1);
        init(VALUES_EMPTY, VALUE_STAGES, 8);
        init(QUERIES_FULL, 2, QUERY_WARPS);
        init(QUERIES_EMPTY, 2, 8);
        fence_barriers();
    }
    if (NORM && warp == 1 && lane < HEAD_DIM / 8)
        store4(shared + AT_WEIGHT + 16 * lane, __ldg((const uint4*)params.weight + lane));
    __syncthreads();
    if (warp < 8) {
        release_registers<LOADER_REGISTERS>();
        if (warp == 0)
            load_keys_and_values(params, shared, lane);
        else
            load_queries(params, shared, warp - 1, lane);
    } else {
        take_registers<COMPUTE_REGISTERS>();
        Head{params, shared, warp / 4 - 2, warp % 4, lane}.run();
    }
}
