
// Sums, and exchanges values with other blocks: of tokens `first`, `first` + EXCHANGERS and so on.
struct Exchanger {
    const Block& block;
    const Params& params;
    int lane, first;
    float residual[PER_EXCHANGER][2];  // of this block's rows 2 * lane and 2 * lane + 1
    float squares[PER_EXCHANGER];      // of the whole residual stream, this lane's part
    float cos[4], sin[4];              // of the block's sequence

    __device__ __forceinline__ int token(int i) const { return first + i * EXCHANGERS; }
    __device__ __forceinline__ bool runs(int i) const { return block.runs(token(i)); }
    __device__ __forceinline__ bool has_sequence() const {
        return block.sequence % EXCHANGERS == first && block.runs(block.sequence);
    }

    // Waits for COUNT pairs of words of each token, `stride` words apart; a warp waits for all of its lanes.
    template <int COUNT, int TOKEN_STRIDE>
    __device__ __forceinline__ void receive(const u64* from, int stride, u32 tag, u32 (*values)[2 * COUNT]) {
        u64 words[PER_EXCHANGER][2 * COUNT];
        Watch watch;
        for (;; watch.check()) {
            bool arrived = true;
#pragma unroll
            for (int k = 0; k < PER_EXCHANGER; ++k)
                if (runs(k)) {
#pragma unroll
                    for (int i = 0; i < COUNT; ++i)
                        read2(from + token(k) * TOKEN_STRIDE + i * stride, words[k][2 * i], words[k][2 * i + 1]);
                }
#pragma unroll
            for (int k = 0; k < PER_EXCHANGER; ++k)
#pragma unroll
                for (int i = 0; i < 2 * COUNT; ++i) arrived &= has(words[k][i], tag) | !runs(k);
            if (__all_sync(~0u, arrived)) break;
        }
#pragma unroll
        for (int k = 0; k < PER_EXCHANGER; ++k)
#pragma unroll
            for (int i = 0; i < 2 * COUNT; ++i) values[k][i] = (u32)words[k][i];
    }

    // Receives 4 * 32 * COUNT values of the team for each token into shared memory, and tells the consumers.
    template <int COUNT, int STRIDE>
    __device__ __forceinline__ void receive_values(const u64* from, u32 to, int barrier, u32 tag) {
        u32 values[PER_EXCHANGER][2 * COUNT];
        receive<COUNT, 64 * COUNT>(from + 2 * lane, 64, tag, values);
#pragma unroll
        for (int k = 0; k < PER_EXCHANGER; ++k)
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                store_words(block.shared + to + token(k) * STRIDE + 256 * i + 8 * lane, values[k][2 * i],
                            values[k][2 * i + 1]);
        __syncwarp();
        if (lane == 0) arrive(block.barrier(barrier));
    }

    __device__ __forceinline__ float factor(int i) {
        return inverse_root(sum_lanes<16>(squares[i]) / HIDDEN + params.eps);
    }

    // The sum of a row over the parts of its columns.
    template <int STRIDE>
    __device__ __forceinline__ float sum_of(int token, int row) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < CONSUMERS; ++i)
            sum += load_float(block.shared + AT_SUMS + 4 * ((i * TOKENS + token) * STRIDE + row));
        return sum;
    }

    // Normalizes and rotates a head, with the reference's rounding: a lane has 4 of its dimensions.
    __device__ __forceinline__ void rotate(u32* pairs, uint2 norm) {
        float x[4] = {low(pairs[0]), high(pairs[0]), low(pairs[1]), high(pairs[1])};
        float weight[4] = {low(norm.x), high(norm.x), low(norm.y), high(norm.y)};
        float sum = fmaf(x[0], x[0], x[1] * x[1]) + fmaf(x[2], x[2], x[3] * x[3]);
        float scale = inverse_root(sum_lanes<16>(sum) / HEAD_DIM + params.head_eps), rotated[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = rounded(rounded(x[i] * scale) * weight[i]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float other = exchange(x[i], 16);
            rotated[i] = x[i] * cos[i] + (lane < 16 ? -other : other) * sin[i];
        }
        pairs[0] = pack(rotated[0], rotated[1]), pairs[1] = pack(rotated[2], rotated[3]);
    }

    // Receives the heads of the block's sequence, and rotates them.
    __device__ __forceinline__ void receive_heads(const u64* words, uint2 q_norm, uint2 k_norm, u32 tag) {
        u64 received[2 * (GROUP + 2)];
        u32 heads[2 * (GROUP + 2)];  // of each head 4 dimensions
        Watch watch;
        for (;; watch.check()) {
            bool arrived = true;
#pragma unroll
            for (int i = 0; i < GROUP + 2; ++i) read2(words + 2 * lane + 64 * i, received[2 * i], received[2 * i + 1]);
#pragma unroll
            for (int i = 0; i < 2 * (GROUP + 2); ++i) arrived &= has(received[i], tag), heads[i] = (u32)received[i];
            if (__all_sync(~0u, arrived)) break;
        }
#pragma unroll
        for (int i = 0; i <= GROUP; ++i) rotate(heads + 2 * i, i < GROUP ? q_norm : k_norm);
#pragma unroll
        for (int i = 0; i < GROUP + 2; ++i)
            store_words(block.shared + AT_QKV + 256 * i + 8 * lane, heads[2 * i], heads[2 * i + 1]);
        __syncwarp();
        if (lane == 0) arrive(block.barrier(QKV_READY));
    }

    __device__ __forceinline__ void qkv(int index, u32 tag) {
        float scales[PER_EXCHANGER];
#pragma unroll
        for (int k = 0; k < PER_EXCHANGER; ++k) scales[k] = factor(k);
        wait(block.barrier(AUX_FULL + (index & 1)), index / 2 & 1);
        u32 norms = block.shared + AT_AUX + (index & 1) * AUX_BYTES + 2 * ROW_BYTES + 8 * lane;
        uint2 q_norm = load2(norms), k_norm = load2(norms + 2 * HEAD_DIM);
        __syncwarp();
        if (lane == 0) arrive(block.barrier(AUX_EMPTY + (index & 1)));
        sync_named<1, CONSUMERS + EXCHANGERS>();
        int kv_row = ATTENTION + (lane - Q_ROWS) / KV_ROWS * HEAD_DIM + block.rank * KV_ROWS + lane % KV_ROWS;
        int row = lane < Q_ROWS ? block.rank * Q_ROWS + lane : kv_row;
        u64* words = params.exchange + TO_QKV + block.team * (TOKENS * TEAM_QKV);
#pragma unroll
        for (int k = 0; k < PER_EXCHANGER; ++k) {
            float value = scales[k] * sum_of<QKV_STRIDE>(token(k), lane);
            u32 pair = pack(value, exchange(value, 1));
            if (lane % 2 == 0 && runs(k)) publish(words + token(k) * TEAM_QKV + row / 2, pair, tag);
        }
        if (has_sequence()) receive_heads(words + block.sequence * TEAM_QKV, q_norm, k_norm, tag);
    }

    // Combines VALUES outputs of attention from the splits of all blocks that have this sequence, and sends them.
    __device__ __forceinline__ void combine(u32 tag) {
        const u64* splits = params.exchange + TO_SPLITS + (block.team * TEAM + block.rank) * (SPLITS * SPLIT_WORDS);
        constexpr int LANES = VALUES < 32 ? VALUES : 32, OWN = VALUES / LANES;  // of these splits; values per lane
        constexpr int OWN_SPLITS = SPLITS / (32 / LANES);
        int first_split = lane / LANES * OWN_SPLITS;
        const u64* from = splits + first_split * SPLIT_WORDS + lane % LANES * OWN;
        u64 words[OWN_SPLITS][OWN], maximum_word, total_word;
        Watch watch;
        for (;; watch.check()) {
#pragma unroll
            for (int i = 0; i < OWN_SPLITS; ++i)
#pragma unroll
                for (int j = 0; j < OWN; ++j)
                    VOLATILE("ld.relaxed.gpu.global.u64 %0, [%1];"
                             : "=l"(words[i][j]) : "l"(from + i * SPLIT_WORDS + j) : "memory");
            read2(splits + lane % SPLITS * SPLIT_WORDS + VALUES, maximum_word, total_word);
            bool arrived = has(maximum_word, tag) & has(total_word, tag);
#pragma unroll
            for (int i = 0; i < OWN_SPLITS; ++i)
#pragma unroll
                for (int j = 0; j < OWN; ++j) arrived &= has(words[i][j], tag);
            if (__all_sync(~0u, arrived)) break;
        }
        float own = __uint_as_float((u32)maximum_word);
        float weight = power_of_two(own - max_lanes<SPLITS / 2>(own));
        float total = sum_lanes<SPLITS / 2>(__uint_as_float((u32)total_word) * weight), values[OWN] = {};
#pragma unroll
        for (int i = 0; i < OWN_SPLITS; ++i) {
            float other = __shfl_sync(~0u, weight, first_split + i);
#pragma unroll
            for (int j = 0; j < OWN; ++j) values[j] = fmaf(other, __uint_as_float((u32)words[i][j]), values[j]);
        }
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            if (LANES < 32) values[j] += exchange(values[j], 16);
            values[j] = total > 0.0f ? __fdividef(values[j], total) : 0.0f;
        }
        u64* to = params.exchange + TO_ATTENTION + (block.team * TOKENS + block.sequence) * (ATTENTION / 2);
        to += (block.split * VALUES + lane * OWN) / 2;
        if constexpr (OWN == 1) {
            u32 pair = pack(values[0], exchange(values[0], 1));
            if (lane < LANES && lane % 2 == 0) publish(to, pair, tag);
        } else {
#pragma unroll
            for (int j = 0; j < OWN; j += 2) publish(to + j / 2, pack(values[j], values[j + 1]), tag);
        }
    }

    __device__ __forceinline__ void attention(u32 tag) {
        if (has_sequence()) combine(tag);
        receive_values<ATTENTION / 128, ATTENTION_STRIDE>(
            params.exchange + TO_ATTENTION + block.team * (TOKENS * ATTENTION / 2), AT_ATTENTION, ATTENTION_READY, tag);
    }

    __device__ __forceinline__ void activated(u32 tag) {
        float scales[PER_EXCHANGER];
#pragma unroll
        for (int k = 0; k < PER_EXCHANGER; ++k) scales[k] = factor(k);
        sync_named<3, CONSUMERS + EXCHANGERS>();
        u64* to = params.exchange + TO_ACTIVATED + block.team * (TOKENS * ACTIVATED / 2);
#pragma unroll
        for (int k = 0; k < PER_EXCHANGER; ++k) {
            float value = 0.0f;
            if (lane < UP_ROWS) {
                int row = lane / CHUNK_ROWS * 2 * CHUNK_ROWS + lane % CHUNK_ROWS;
                float gate = scales[k] * sum_of<UP_STRIDE>(token(k), row);
                float up = scales[k] * sum_of<UP_STRIDE>(token(k), row + CHUNK_ROWS);
                value = __fdividef(gate, 1.0f + power_of_two(-1.44269504f * gate)) * up;
            }
            u32 pair = pack(value, exchange(value, 1));
            if (lane < UP_ROWS && lane % 2 == 0 && runs(k))
                publish(to + token(k) * (ACTIVATED / 2) + (block.rank * UP_ROWS + lane) / 2, pair, tag);
        }
        receive_values<ACTIVATED / 128, ACTIVATED_STRIDE>(to, AT_ACTIVATED, ACTIVATED_READY, tag);
    }

    // Adds the partial sums of all teams to this block's part of the residual stream.
    __device__ __forceinline__ void add_partial_sums(u32 tag) {
        u32 values[PER_EXCHANGER][2 * TEAMS];
        const u64* words = params.exchange + ((tag & 1) * TEAM + block.rank) * (TEAMS * TOKENS * OUT_ROWS);
        receive<TEAMS, OUT_ROWS>(words + 2 * lane, TOKENS * OUT_ROWS, tag, values);
#pragma unroll
        for (int k = 0; k < PER_EXCHANGER; ++k) {
            float sums[2] = {0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < TEAMS; ++i) {
                sums[0] += __uint_as_float(values[k][2 * i]);
                sums[1] += __uint_as_float(values[k][2 * i + 1]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (runs(k)) residual[k][i] = rounded(residual[k][i] + sums[i]);
        }
    }

    __device__ __forceinline__ void add_squares(int i, u32 pair) {
        squares[i] = fmaf(low(pair), low(pair), squares[i]);
        squares[i] = fmaf(high(pair), high(pair), squares[i]);
    }

    // Exchanges the parts of the residual stream within the team.
    __device__ __forceinline__ void share_residual(int which, u32 tag) {
        u64* words = params.exchange + TO_X + (which * TEAMS + block.team) * (TOKENS * HIDDEN / 2);
#pragma unroll
        for (int k = 0; k < PER_EXCHANGER; ++k) {
            u64* to = words + token(k) * (HIDDEN / 2) + block.rank * (OUT_ROWS / 2) + lane;
            if (runs(k)) publish(to, pack(residual[k][0], residual[k][1]), tag);
        }
        constexpr int COUNT = HIDDEN / 128;
        u32 values[PER_EXCHANGER][2 * COUNT];
        receive<COUNT, HIDDEN / 2>(words + 2 * lane, 64, tag, values);
#pragma unroll
        for (int k = 0; k < PER_EXCHANGER; ++k) {
            u32 to = block.shared + AT_X + token(k) * X_STRIDE + 8 * lane;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) store_words(to + 256 * i, values[k][2 * i], values[k][2 * i + 1]);
        }
        __syncwarp();
        if (lane == 0) arrive(block.barrier(X_READY + which));
#pragma unroll
        for (int k = 0; k < PER_EXCHANGER; ++k) {
            squares[k] = 0.0f;
#pragma unroll
            for (int i = 0; i < 2 * COUNT; ++i) add_squares(k, values[k][i]);
        }
    }

    __device__ __forceinline__ void load_state(int tokens) {
        const float4* angles = (const float4*)(params.rotary + (i64)max(block.position, 0) * HEAD_DIM) + lane % 16;
        float4 cosines = angles[0], sines = angles[HEAD_DIM / 8];
        cos[0] = cosines.x, cos[1] = cosines.y, cos[2] = cosines.z, cos[3] = cosines.w;
        sin[0] = sines.x, sin[1] = sines.y, sin[2] = sines.z, sin[3] = sines.w;
#pragma unroll
        for (int k = 0; k < PER_EXCHANGER; ++k) {
            squares[k] = residual[k][0] = residual[k][1] = 0.0f;
            if (token(k) >= tokens) continue;
            const u32* input = (const u32*)params.input + token(k) * (HIDDEN / 2);
            u32 own = input[block.rank * (OUT_ROWS / 2) + lane];
            residual[k][0] = low(own), residual[k][1] = high(own);
#pragma unroll
            for (int i = 0; i < HIDDEN / 64; ++i) add_squares(k, input[32 * i + lane]);
        }
    }

    // Runs all layers; the outputs of padding are its inputs.
    __device__ __forceinline__ void run(int tokens) {
        load_state(tokens);
        bool any = false;
#pragma unroll
        for (int k = 0; k < PER_EXCHANGER; ++k) any |= runs(k);
#pragma unroll 1
        for (int index = 0; index < LAYERS; ++index) {
            u32 tag = block.first_tag + 2 * index;
            if (!any) {
                sync_named<1, CONSUMERS + EXCHANGERS>();
                sync_named<3, CONSUMERS + EXCHANGERS>();
                continue;
            }
            qkv(index, tag);
            attention(tag);
            add_partial_sums(tag);
            share_residual(1, tag);
            activated(tag);
            add_partial_sums(tag + 1);
            if (index + 1 < LAYERS) share_residual(0, tag);
        }
        u32* output = (u32*)params.output + block.rank * (OUT_ROWS / 2);
#pragma unroll
        for (int k = 0; k < PER_EXCHANGER; ++k)
            if (block.team == 0 && token(k) < tokens)
                output[token(k) * (HIDDEN / 2) + lane] = pack(residual[k][0], residual[k][1]);
    }
};
