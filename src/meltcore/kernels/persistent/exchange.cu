// --- the two warps that copy and exchange ----------------------------------------------------------------------------

struct Layer {
    const char *qkv, *gate_up, *attention_norm, *mlp_norm, *q_norm, *k_norm;
    u16 *keys, *values;
};

struct Params {
    const Layer* layers;
    const char* maps;  // of each layer: output projection, down projection, keys, values
    const u16* input;
    u16* output;
    const i64 *positions, *rows, *page_table;
    const float* rotary;
    u64* exchange;  // [2][TEAM][TEAMS][OUT_ROWS] partial sums, then what TO_... say
    u32* epoch;
    int table_stride;
    float eps, head_eps, scale_log2;
};

struct Ring {
    u32 slot = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
};

struct Block {
    u32 shared, rank, team;
    int position, tiles;  // of the new token; tiles of keys that this block reads
    u32 first_tag;

    __device__ __forceinline__ u32 barrier(int index) const { return barrier_at(shared, index); }
    __device__ __forceinline__ u32 slot(const Ring& ring) const { return shared + ring.slot * SLOT_BYTES; }
    __device__ __forceinline__ int kv_head() const { return team / (TEAMS / KV_HEADS); }
};

struct Producer {
    const Block& block;
    const Params& params;
    Ring ring, landed;
    int issued;

    __device__ __forceinline__ u32 begin(int bytes) {
        if (++issued > IN_FLIGHT) {  // exchanged words wait behind what is in flight
            wait(block.barrier(landed.slot), landed.phase);
            landed.next();
        }
        wait(block.barrier(SLOTS + ring.slot), ring.phase ^ 1);
        u32 full = block.barrier(ring.slot);
        expect(full, bytes);
        return full;
    }

    __device__ __forceinline__ void rows(const char* weight, int first_row) {
        u32 full = begin(CHUNK_ROWS * ROW_BYTES);
        copy(block.slot(ring), weight + (i64)first_row * ROW_BYTES, CHUNK_ROWS * ROW_BYTES, full);
        ring.next();
    }

    __device__ __forceinline__ void box(const char* map, int column, int row, int bytes) {
        u32 full = begin(bytes);
        copy_box(block.slot(ring), map, column, row, full);
        ring.next();
    }

    __device__ __forceinline__ void norms(const Layer& layer, int index) {
        int side = index & 1;
        if (index > 1) wait(block.barrier(AUX_EMPTY + side), (index / 2 + 1) & 1);
        u32 full = block.barrier(AUX_FULL + side), to = block.shared + AT_AUX + side * AUX_BYTES;
        expect(full, AUX_BYTES);
        copy(to, layer.attention_norm, ROW_BYTES, full);
        copy(to + ROW_BYTES, layer.mlp_norm, ROW_BYTES, full);
        copy(to + 2 * ROW_BYTES, layer.q_norm, 2 * HEAD_DIM, full);
        copy(to + 2 * ROW_BYTES + 2 * HEAD_DIM, layer.k_norm, 2 * HEAD_DIM, full);
    }

    __device__ __forceinline__ void qkv(const Layer& layer) {
        int row = block.team * ATTENTION + block.rank * Q_ROWS;
        int kv_row = HEADS * HEAD_DIM + block.kv_head() * HEAD_DIM + block.rank * KV_ROWS;
#pragma unroll 1
        for (int i = 0; i < Q_ROWS; i += CHUNK_ROWS) rows(layer.qkv, row + i);
#pragma unroll 1
        for (int i = 0; i < 2 * KV_ROWS; i += CHUNK_ROWS)
            rows(layer.qkv, kv_row + i % KV_ROWS + i / KV_ROWS * KV_HEADS * HEAD_DIM);
    }

    __device__ __forceinline__ void keys(const char* maps) {
        int column = block.kv_head() * HEAD_DIM;
#pragma unroll 1
        for (int i = 0; i < block.tiles; i += 2) {
            int count = min(2, block.tiles - i);
            u32 full = begin(count * 4 * TILE_KEYS * HEAD_DIM), to = block.slot(ring);
            for (int j = 0; j < count; ++j, to += 4 * TILE_KEYS * HEAD_DIM) {
                int row;
                VOLATILE("ld.shared.u32 %0, [%1];"
                         : "=r"(row) : "r"(block.shared + AT_KEY_ROWS + 4 * (i + j)) : "memory");
                copy_box(to, maps + 256, column, row, full);
                copy_box(to + 2 * TILE_KEYS * HEAD_DIM, maps + 384, column, row, full);
            }
            ring.next();
        }
    }

    __device__ __forceinline__ void rest(const Layer& layer, const char* maps) {
        keys(maps);
#pragma unroll 1
        for (int i = 0; i < OUT_ROWS; i += O_CHUNK_ROWS)
            box(maps, block.team * ATTENTION, block.rank * OUT_ROWS + i, O_CHUNK_ROWS * ATTENTION * 2);
        int row = block.team * ACTIVATED + block.rank * UP_ROWS;
#pragma unroll 1
        for (int i = 0; i < UP_ROWS; i += CHUNK_ROWS) {
            rows(layer.gate_up, row + i);
            rows(layer.gate_up, INTERMEDIATE + row + i);
        }
#pragma unroll 1
        for (int i = 0; i < OUT_ROWS; i += DOWN_CHUNK_ROWS)  // its map has columns of two numbers
            box(maps + 128, block.team * ACTIVATED / 2, block.rank * OUT_ROWS + i, DOWN_CHUNK_ROWS * ACTIVATED * 2);
    }
};

struct Exchanger {
    const Block& block;
    const Params& params;
    int lane;
    float residual[2];  // of this block's rows 2 * lane and 2 * lane + 1
    float squares;      // of the whole residual stream, this lane's part
    float cos[4], sin[4];

    // Receives 4 * 32 * COUNT values of the team into shared memory, and tells the consumers.
    template <int COUNT>
    __device__ __forceinline__ void receive_values(const u64* from, u32 to, int barrier, u32 tag) {
        u32 values[2 * COUNT];
        receive<COUNT>(from + 2 * lane, 64, tag, values);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            store_words(block.shared + to + 256 * i + 8 * lane, values[2 * i], values[2 * i + 1]);
        __syncwarp();
        if (lane == 0) arrive(block.barrier(barrier));
    }

    __device__ __forceinline__ float factor() {
        return inverse_root(sum_lanes<16>(squares) / HIDDEN + params.eps);
    }

    __device__ __forceinline__ float sum_of(u32 sums, int rows, int row) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < CONSUMERS; ++i) sum += load_float(sums + 4 * (i * rows + row));
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

    __device__ __forceinline__ void qkv(int index, u32 tag) {
        float scale = factor();
        wait(block.barrier(AUX_FULL + (index & 1)), index / 2 & 1);
        u32 norms = block.shared + AT_AUX + (index & 1) * AUX_BYTES + 2 * ROW_BYTES + 8 * lane;
        uint2 q_norm = load2(norms), k_norm = load2(norms + 2 * HEAD_DIM);
        __syncwarp();
        if (lane == 0) arrive(block.barrier(AUX_EMPTY + (index & 1)));
        sync_named<1, CONSUMERS + 1>();
        float value = scale * sum_of(block.shared + AT_SUMS, QKV_ROWS, lane);
        u32 pair = pack(value, exchange(value, 1));
        int kv_row = ATTENTION + (lane - Q_ROWS) / KV_ROWS * HEAD_DIM + block.rank * KV_ROWS + lane % KV_ROWS;
        int row = lane < Q_ROWS ? block.rank * Q_ROWS + lane : kv_row;
        u64* words = params.exchange + TO_QKV + block.team * TEAM_QKV;
        if (lane % 2 == 0) publish(words + row / 2, pair, tag);
        u32 heads[2 * (GROUP + 2)];  // of each head 4 dimensions
        receive<GROUP + 2>(words + 2 * lane, 64, tag, heads);
#pragma unroll
        for (int i = 0; i <= GROUP; ++i) rotate(heads + 2 * i, i < GROUP ? q_norm : k_norm);
#pragma unroll
        for (int i = 0; i < GROUP + 2; ++i)
            store_words(block.shared + AT_QKV + 256 * i + 8 * lane, heads[2 * i], heads[2 * i + 1]);
        __syncwarp();
        if (lane == 0) arrive(block.barrier(QKV_READY));
    }

    // Combines VALUES outputs of attention from the splits of all blocks, and exchanges them.
    __device__ __forceinline__ void attention(u32 tag) {
        const u64* splits = params.exchange + TO_SPLITS + (block.team * TEAM + block.rank) * (TEAM * SPLIT_WORDS);
        int first = lane / 16 * (TEAM / 2);
        u64 words[TEAM / 2], maximum_word, total_word;
        Watch watch;
        for (;; watch.check()) {
#pragma unroll
            for (int i = 0; i < TEAM / 2; ++i)
                VOLATILE("ld.relaxed.gpu.global.u64 %0, [%1];"
                         : "=l"(words[i]) : "l"(splits + (first + i) * SPLIT_WORDS + lane % 16) : "memory");
            read2(splits + lane % TEAM * SPLIT_WORDS + VALUES, maximum_word, total_word);
            bool arrived = has(maximum_word, tag) & has(total_word, tag);
#pragma unroll
            for (int i = 0; i < TEAM / 2; ++i) arrived &= has(words[i], tag);
            if (__all_sync(~0u, arrived)) break;
        }
        float own = __uint_as_float((u32)maximum_word);
        float weight = power_of_two(own - max_lanes<TEAM / 2>(own));
        float total = sum_lanes<TEAM / 2>(__uint_as_float((u32)total_word) * weight), sum = 0.0f;
#pragma unroll
        for (int i = 0; i < TEAM / 2; ++i)
            sum = fmaf(__shfl_sync(~0u, weight, first + i), __uint_as_float((u32)words[i]), sum);
        sum += exchange(sum, 16);
        float value = total > 0.0f ? __fdividef(sum, total) : 0.0f;
        u32 pair = pack(value, exchange(value, 1));
        u64* to = params.exchange + TO_ATTENTION + block.team * (ATTENTION / 2);
        if (lane < VALUES && lane % 2 == 0) publish(to + (block.rank * VALUES + lane) / 2, pair, tag);
        receive_values<ATTENTION / 128>(to, AT_ATTENTION, ATTENTION_READY, tag);
    }

    __device__ __forceinline__ void activated(u32 tag) {
        float scale = factor(), value = 0.0f;
        sync_named<3, CONSUMERS + 1>();
        if (lane < UP_ROWS) {
            int row = lane / CHUNK_ROWS * 2 * CHUNK_ROWS + lane % CHUNK_ROWS;
            float gate = scale * sum_of(block.shared + AT_UP_SUMS, 2 * UP_ROWS, row);
            float up = scale * sum_of(block.shared + AT_UP_SUMS, 2 * UP_ROWS, row + CHUNK_ROWS);
            value = __fdividef(gate, 1.0f + power_of_two(-1.44269504f * gate)) * up;
        }
        u32 pair = pack(value, exchange(value, 1));
        u64* to = params.exchange + TO_ACTIVATED + block.team * (ACTIVATED / 2);
        if (lane < UP_ROWS && lane % 2 == 0) publish(to + (block.rank * UP_ROWS + lane) / 2, pair, tag);
        receive_values<ACTIVATED / 128>(to, AT_ACTIVATED, ACTIVATED_READY, tag);
    }

    // Adds the partial sums of all teams to this block's part of the residual stream.
    __device__ __forceinline__ void add_partial_sums(u32 tag) {
        u32 values[2 * TEAMS];
        const u64* words = params.exchange + ((tag & 1) * TEAM + block.rank) * (TEAMS * OUT_ROWS);
        receive<TEAMS>(words + 2 * lane, OUT_ROWS, tag, values);
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < TEAMS; ++i) {
            sums[0] += __uint_as_float(values[2 * i]);
            sums[1] += __uint_as_float(values[2 * i + 1]);
        }
        residual[0] = rounded(residual[0] + sums[0]), residual[1] = rounded(residual[1] + sums[1]);
    }

    __device__ __forceinline__ void add_squares(u32 pair) {
        squares = fmaf(low(pair), low(pair), squares);
        squares = fmaf(high(pair), high(pair), squares);
    }

    // Exchanges the parts of the residual stream within the team.
    __device__ __forceinline__ void share_residual(int which, u32 tag) {
        u64* words = params.exchange + TO_X + (which * TEAMS + block.team) * (HIDDEN / 2);
        publish(words + block.rank * (OUT_ROWS / 2) + lane, pack(residual[0], residual[1]), tag);
        constexpr int COUNT = HIDDEN / 128;
        u32 values[2 * COUNT];
        receive<COUNT>(words + 2 * lane, 64, tag, values);
        squares = 0.0f;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            store_words(block.shared + AT_X + which * ROW_BYTES + 256 * i + 8 * lane, values[2 * i], values[2 * i + 1]);
            add_squares(values[2 * i]);
            add_squares(values[2 * i + 1]);
        }
        __syncwarp();
        if (lane == 0) arrive(block.barrier(X_READY + which));
    }

    __device__ __forceinline__ void run() {
        const float4* angles = (const float4*)(params.rotary + (i64)max(block.position, 0) * HEAD_DIM) + lane % 16;
        float4 cosines = angles[0], sines = angles[HEAD_DIM / 8];
        cos[0] = cosines.x, cos[1] = cosines.y, cos[2] = cosines.z, cos[3] = cosines.w;
        sin[0] = sines.x, sin[1] = sines.y, sin[2] = sines.z, sin[3] = sines.w;
        const u32* input = (const u32*)params.input;
        u32 own = input[block.rank * (OUT_ROWS / 2) + lane];
        residual[0] = low(own), residual[1] = high(own), squares = 0.0f;
#pragma unroll
        for (int i = 0; i < HIDDEN / 64; ++i) add_squares(input[32 * i + lane]);
#pragma unroll 1
        for (int index = 0; index < LAYERS; ++index) {
            u32 tag = block.first_tag + 2 * index;
            qkv(index, tag);
            attention(tag);
            add_partial_sums(tag);
            share_residual(1, tag);
            activated(tag);
            add_partial_sums(tag + 1);
            if (index + 1 < LAYERS) share_residual(0, tag);
        }
        u32* output = (u32*)params.output + block.rank * (OUT_ROWS / 2);
        if (block.team == 0) output[lane] = pack(residual[0], residual[1]);
    }
};

