struct Consumer {
    const Block& block;
    const Params& params;
    int warp, lane;
    Ring ring;

    __device__ __forceinline__ u32 begin() {
        wait(block.barrier(ring.slot), ring.phase);
        return block.slot(ring);
    }

    __device__ __forceinline__ void end() {
        __syncwarp();
        if (lane == 0) arrive(block.barrier(SLOTS + ring.slot));
        ring.next();
    }

    // Passes chunks that this warp does not need.
    __device__ __forceinline__ void pass(int chunks) {
#pragma unroll 1
        for (int i = 0; i < chunks; ++i) {
            begin();
            end();
        }
    }

    // Where this lane reads 8 columns of every 64, at first; the other 8 are at ^ 64. Odd rows begin with the upper
    // half, so that a quarter of a warp reads different banks.
    __device__ __forceinline__ u32 column_bytes() const { return lane % 4 * 16 ^ lane / 4 % 2 * 64; }

    // Loads two times 64 columns of this warp from chunks of 8 whole rows.
    template <int CHUNKS>
    __device__ __forceinline__ void load_rows(uint4 (*weights)[4]) {
        u32 offset = lane / 4 * ROW_BYTES + warp * 256 + column_bytes();
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            u32 slot = begin() + offset;
#pragma unroll
            for (int j = 0; j < 4; ++j) weights[i][j] = load4((slot + j / 2 * 128) ^ j % 2 * 64);
            end();
        }
    }

    // Of column lane / 4 of a matrix instruction: bit 0 is the half of a lane's 16 bytes, bit 1 is set for odd rows,
    // bit 2 for what the factors' upper part lacks.
    __device__ __forceinline__ u32 factor_bytes() const { return lane % 4 * 16 ^ lane / 8 % 2 * 64; }
    __device__ __forceinline__ uint2 factors_of(uint4 words) const {
        return lane / 4 % 2 ? make_uint2(words.y, words.w) : make_uint2(words.x, words.z);
    }

    // The residual stream of this warp's columns times the weight of the norm, as the sum of two bfloat16.
    __device__ __forceinline__ void load_factors(int which, uint2 norm, uint2* factors) {
        uint2 x = load2(block.shared + AT_X + which * ROW_BYTES + warp * 256 + 8 * lane);
        float a = low(x.x) * low(norm.x), b = high(x.x) * high(norm.x);
        float c = low(x.y) * low(norm.y), d = high(x.y) * high(norm.y);
        u32 at = block.shared + AT_FACTORS + warp * 512, first = pack(a, b), second = pack(c, d);
        store_words(at + 8 * lane, first, second);
        u32 rest = pack(a - low(first), b - high(first)), second_rest = pack(c - low(second), d - high(second));
        store_words(at + 256 + 8 * lane, rest, second_rest);
        __syncwarp();
        u32 from = at + lane / 16 * 256 + factor_bytes();
#pragma unroll
        for (int i = 0; i < 4; ++i) factors[i] = factors_of(load4((from + i / 2 * 128) ^ i % 2 * 64));
        __syncwarp();
    }

    // The sum of row lane / 4, in lanes of `has_result`.
    __device__ __forceinline__ float result(const float* sums) const {
        float sum = sums[0] + sums[3];
        return sum + exchange(sum, 2);
    }
    __device__ __forceinline__ bool has_result() const { return lane % 4 == lane / 4 % 2; }

    template <int CHUNKS>
    __device__ __forceinline__ void multiply_rows(const uint4 (*weights)[4], const uint2* factors, u32 to) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            float sums[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) multiply(sums, weights[chunk][i], factors[i]);
            float sum = result(sums);
            if (has_result()) store_float(to + 4 * ((warp * CHUNKS + chunk) * CHUNK_ROWS + lane / 4), sum);
        }
    }

    __device__ __forceinline__ void qkv(int index) {
        uint4 weights[4][4];
        uint2 factors[4];
        load_rows<4>(weights);
        wait(block.barrier(AUX_FULL + (index & 1)), index / 2 & 1);
        uint2 norm = load2(block.shared + AT_AUX + (index & 1) * AUX_BYTES + warp * 256 + 8 * lane);
        if (index) wait(block.barrier(X_READY), (index & 1) ^ 1);
        load_factors(0, norm, factors);
        multiply_rows<4>(weights, factors, block.shared + AT_SUMS);
        arrive_named<1, CONSUMERS + 1>();
    }

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
                int position = (block.rank + TEAM * (i + j)) * TILE_KEYS + half;
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
        u32 receiver = block.team * TEAM + first / VALUES;
        u64* to = params.exchange + TO_SPLITS + (receiver * TEAM + block.rank) * SPLIT_WORDS;
        publish2(to + first % VALUES, __float_as_uint(sum.x), __float_as_uint(sum.y), tag);
        publish2(to + first % VALUES + 2, __float_as_uint(sum.z), __float_as_uint(sum.w), tag);
        if (first % VALUES == 0) publish2(to + VALUES, __float_as_uint(maximum), __float_as_uint(total), tag);
    }

    // Multiplies 16 rows (a tile) by a half of the columns, BLOCKS times 64. A pair of warps has a tile.
    template <int BLOCKS>
    __device__ __forceinline__ void multiply_tile(const uint4 (*weights)[4], u32 vector, u32 tag) {
        float sums[2][4] = {};
        u32 from = vector + warp % 2 * BLOCKS * 128 + factor_bytes();
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                uint2 factors = factors_of(load4((from + i * 128) ^ j * 64));
                if (lane >= 16) factors = make_uint2(0, 0);
                multiply(sums[0], weights[i][j], factors);
                multiply(sums[1], weights[i][2 + j], factors);
            }
        float2 both = make_float2(result(sums[0]), result(sums[1]));
        int tile = warp / 2, row = tile * 16 + lane / 4;
        u32 at = block.shared + AT_PAIR_SUMS + 4 * row;
        if (warp % 2) {
            if (has_result()) store_float(at, both.x), store_float(at + 32, both.y);
            VOLATILE("bar.arrive %0, 64;" ::"r"(4 + tile) : "memory");
        } else {
            VOLATILE("bar.sync %0, 64;" ::"r"(4 + tile) : "memory");
            if (has_result()) {
                u64* to = params.exchange + (((tag & 1) * TEAM + block.rank) * TEAMS + block.team) * OUT_ROWS + row;
                publish(to, __float_as_uint(both.x + load_float(at)), tag);
                publish(to + 8, __float_as_uint(both.y + load_float(at + 32)), tag);
            }
        }
    }

    // Loads this warp's half of the columns of its tile, whose first row is at `tile`.
    template <int BLOCKS, int BYTES>
    __device__ __forceinline__ void load_tile(u32 tile, uint4 (*weights)[4]) {
        u32 from = tile + lane / 4 * BYTES + warp % 2 * BLOCKS * 128 + column_bytes();
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) weights[i][j] = load4((from + i * 128 + j / 2 * 8 * BYTES) ^ j % 2 * 64);
    }

    __device__ __forceinline__ void output_projection(int index, u32 tag) {
        uint4 weights[2][4];
        pass(warp / 4);
        load_tile<2, 2 * ATTENTION>(begin() + warp / 2 % 2 * 16 * 2 * ATTENTION, weights);
        end();
        pass(1 - warp / 4);
        wait(block.barrier(ATTENTION_READY), index & 1);
        multiply_tile<2>(weights, block.shared + AT_ATTENTION, tag);
    }

    __device__ __forceinline__ void gate_up(int index) {
        uint4 weights[6][4];
        uint2 factors[4];
        load_rows<6>(weights);
        uint2 norm = load2(block.shared + AT_AUX + (index & 1) * AUX_BYTES + ROW_BYTES + warp * 256 + 8 * lane);
        __syncwarp();
        if (lane == 0) arrive(block.barrier(AUX_EMPTY + (index & 1)));
        wait(block.barrier(X_READY + 1), index & 1);
        load_factors(1, norm, factors);
        multiply_rows<6>(weights, factors, block.shared + AT_UP_SUMS);
        arrive_named<3, CONSUMERS + 1>();
    }

    __device__ __forceinline__ void down(int index, u32 tag) {
        uint4 weights[3][4];
        pass(warp / 2);
        load_tile<3, 2 * ACTIVATED>(begin(), weights);
        end();
        pass(3 - warp / 2);
        wait(block.barrier(ACTIVATED_READY), index & 1);
        multiply_tile<3>(weights, block.shared + AT_ACTIVATED, tag);
    }

    i64 new_offset;  // of the new token's key in a cache

    __device__ __forceinline__ void run() {
        bool stores = block.position >= 0 && block.position / TILE_KEYS % TEAM == block.rank;
        if (stores) {
            i64 page = params.page_table[params.rows[0] * params.table_stride + block.position / PAGE_SIZE];
            i64 row = page * PAGE_SIZE + block.position % PAGE_SIZE;
            new_offset = (row * KV_HEADS + block.kv_head()) * HEAD_DIM + 8 * (lane % 16);
        }
#pragma unroll 1
        for (int index = 0; index < LAYERS; ++index) {
            u32 tag = block.first_tag + 2 * index;
            u64 keys = 0, values = 0;  // loaded long before they are used
            if (stores)
                VOLATILE("ld.global.v2.u64 {%0, %1}, [%2];"
                         : "=l"(keys), "=l"(values) : "l"(&params.layers[index].keys));
            qkv(index);
            attention((u16*)keys, (u16*)values, index);
            output_projection(index, tag);
            gate_up(index);
            down(index, tag + 1);
        }
    }
};

