// Attention of the block's sequence.
struct Attention : Gemv {
    i64 new_offset;  // of the new token's key in a cache

    struct Softmax {
        float maximum[GROUP], total[GROUP], sums[GROUP][8];
    };

    // Sums 4 values over 16 lanes each.
    __device__ __forceinline__ void sum_scores(float* scores) {
        bool upper = lane & 8, odd = lane & 4;
        float first = (upper ? scores[2] : scores[0]) + exchange(upper ? scores[0] : scores[2], 8);
        float second = (upper ? scores[3] : scores[1]) + exchange(upper ? scores[1] : scores[3], 8);
        float sum = (odd ? second : first) + exchange(odd ? first : second, 4);
        sum = sum_lanes<2>(sum);
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[i] = __shfl_sync(~0u, sum, (lane & 16) + 4 * i);
    }

    // Attends to two keys of each half of the warp.
    __device__ __forceinline__ void attend(
        const float (*queries)[8], const uint4* keys, const uint4* values, const bool* valid, Softmax& state) {
        float scores[4], first[8], second[8];
        unpack(keys[0], first);
        unpack(keys[1], second);
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            scores[2 * g] = queries[g][0] * first[0], scores[2 * g + 1] = queries[g][0] * second[0];
#pragma unroll
            for (int i = 1; i < 8; ++i) {
                scores[2 * g] = fmaf(queries[g][i], first[i], scores[2 * g]);
                scores[2 * g + 1] = fmaf(queries[g][i], second[i], scores[2 * g + 1]);
            }
        }
        sum_scores(scores);
        unpack(values[0], first);
        unpack(values[1], second);
#pragma unroll
        for (int i = 0; i < 8; ++i) first[i] = valid[0] ? first[i] : 0.0f, second[i] = valid[1] ? second[i] : 0.0f;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            float score = valid[0] ? scores[2 * g] : -1e30f, other = valid[1] ? scores[2 * g + 1] : -1e30f;
            float maximum = fmaxf(state.maximum[g], fmaxf(score, other));
            float before = power_of_two(state.maximum[g] - maximum);
            float weight = valid[0] ? power_of_two(score - maximum) : 0.0f;
            float other_weight = valid[1] ? power_of_two(other - maximum) : 0.0f;
            state.maximum[g] = maximum;
            state.total[g] = fmaf(state.total[g], before, weight + other_weight);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                state.sums[g][i] = fmaf(state.sums[g][i], before, fmaf(weight, first[i], other_weight * second[i]));
        }
    }

    __device__ __forceinline__ void attention(u16* key_cache, u16* value_cache, int index) {
        float queries[GROUP][8];
        Softmax state;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            state.maximum[g] = -1e30f, state.total[g] = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) state.sums[g][i] = 0.0f;
        }
        int half = 2 * warp + lane / 16;  // of a warp: each takes a key of each tile
        u32 offset = half * 2 * HEAD_DIM + 16 * (lane % 16);
#pragma unroll 1
        for (int i = 0; i < block.tiles || i == 0; i += 2) {
            uint4 keys[2] = {}, values[2] = {};
            bool valid[2];
            if (i < block.tiles) {
                u32 slot = begin() + offset;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    keys[j] = load4(slot + j * 4 * TILE_KEYS * HEAD_DIM);
                    values[j] = load4(slot + j * 4 * TILE_KEYS * HEAD_DIM + 2 * TILE_KEYS * HEAD_DIM);
                }
                end();
            }
            if (i == 0) {
                wait(block.barrier(QKV_READY), index & 1);
#pragma unroll
                for (int g = 0; g < GROUP; ++g) {
                    unpack(load4(block.shared + AT_QKV + 2 * g * HEAD_DIM + 16 * (lane % 16)), queries[g]);
#pragma unroll
                    for (int j = 0; j < 8; ++j) queries[g][j] *= params.scale_log2;
                }
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                int position = (block.split + SPLITS * (i + j)) * TILE_KEYS + half;
                valid[j] = position <= block.position;
                if (position == block.position) {  // the new token: from this layer's projection, and to the cache
                    u32 heads = block.shared + AT_QKV + 2 * ATTENTION + 16 * (lane % 16);
                    keys[j] = load4(heads), values[j] = load4(heads + 2 * HEAD_DIM);
                    *(uint4*)(key_cache + new_offset) = keys[j];
                    *(uint4*)(value_cache + new_offset) = values[j];
                }
            }
            attend(queries, keys, values, valid, state);
        }
        join_halves(state);
        if (warp >= GROUP) {
            arrive_named<2, CONSUMERS>();
        } else {
            sync_named<2, CONSUMERS>();
            send_split(block.first_tag + 2 * index);
        }
    }

    // Joins the two halves of the warp; each writes one of the two heads.
    __device__ __forceinline__ void join_halves(Softmax& state) {
        bool upper = lane >= 16;
        float maximum[GROUP], sums[8];
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            maximum[g] = fmaxf(state.maximum[g], exchange(state.maximum[g], 16));
            float weight = power_of_two(state.maximum[g] - maximum[g]);
            state.total[g] *= weight;
            state.total[g] += exchange(state.total[g], 16);
#pragma unroll
            for (int i = 0; i < 8; ++i) state.sums[g][i] *= weight;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float sent = upper ? state.sums[0][i] : state.sums[1][i];
            sums[i] = (upper ? state.sums[1][i] : state.sums[0][i]) + exchange(sent, 16);
        }
        u32 at = block.shared + AT_PARTIAL + 4 * ((warp * GROUP + upper) * HEAD_DIM + 8 * (lane % 16));
        store_float4(at, sums[0], sums[1], sums[2], sums[3]);
        store_float4(at + 16, sums[4], sums[5], sums[6], sums[7]);
        if (lane % 16 == 0)
            store_float2(block.shared + AT_PARTIAL_LSE + 8 * (warp * GROUP + upper), upper ? maximum[1] : maximum[0],
                         upper ? state.total[1] : state.total[0]);
    }

    // Joins what the warps of this block have of head `warp`, and sends each block of the team its dimensions.
    __device__ __forceinline__ void send_split(u32 tag) {
        float2 lse = load_float2(block.shared + AT_PARTIAL_LSE + 8 * (lane % CONSUMERS * GROUP + warp));
        float maximum = max_lanes<CONSUMERS / 2>(lse.x);
        float weight = power_of_two(lse.x - maximum), total = sum_lanes<CONSUMERS / 2>(lse.y * weight);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < CONSUMERS; ++i) {
            uint4 words = load4(block.shared + AT_PARTIAL + 4 * ((i * GROUP + warp) * HEAD_DIM + 4 * lane));
            float other = __shfl_sync(~0u, weight, i);
            sum.x = fmaf(other, __uint_as_float(words.x), sum.x), sum.y = fmaf(other, __uint_as_float(words.y), sum.y);
            sum.z = fmaf(other, __uint_as_float(words.z), sum.z), sum.w = fmaf(other, __uint_as_float(words.w), sum.w);
        }
        int first = warp * HEAD_DIM + 4 * lane;
        u32 receiver = block.team * TEAM + block.sequence * SPLITS + first / VALUES;
        u64* to = params.exchange + TO_SPLITS + (receiver * SPLITS + block.split) * SPLIT_WORDS;
        publish2(to + first % VALUES, __float_as_uint(sum.x), __float_as_uint(sum.y), tag);
        publish2(to + first % VALUES + 2, __float_as_uint(sum.z), __float_as_uint(sum.w), tag);
        if (first % VALUES == 0) publish2(to + VALUES, __float_as_uint(maximum), __float_as_uint(total), tag);
    }
};
