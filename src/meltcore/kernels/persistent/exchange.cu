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
    u64* exchange;  // [2][TEAM][TEAMS][token][OUT_ROWS] partial sums, then what TO_... say
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
    u32 sequence, split;  // whose keys this block reads, and which part of them
    u32 running;          // bits of the tokens that are no padding; the first always runs
    int position, tiles;  // of the sequence's new token; tiles of keys that this block reads
    u32 first_tag;

    __device__ __forceinline__ bool runs(int token) const { return TOKENS == 1 || running >> token & 1; }
    __device__ __forceinline__ void set_runs(const i64* positions, int tokens) {
        running = 1;
#pragma unroll
        for (int i = 1; i < TOKENS; ++i)
            if (i < tokens && positions[i] >= 0) running |= 1 << i;
        position = runs(sequence) ? (int)positions[sequence] : -1;
    }

    // Exchangers that run at least one token.
    __device__ __forceinline__ int exchangers() const {
        int count = 0;
#pragma unroll
        for (int i = 0; i < EXCHANGERS; ++i) {
            bool any = false;
#pragma unroll
            for (int k = 0; k < PER_EXCHANGER; ++k) any |= runs(i + k * EXCHANGERS);
            count += any;
        }
        return count;
    }

    __device__ __forceinline__ u32 barrier(int index) const { return shared + AT_BARRIERS + 8 * index; }
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

    // The row of the cache where a tile of this block's sequence begins.
    __device__ __forceinline__ int first_row(int tile) const {
        int key = ((int)block.split + SPLITS * tile) * TILE_KEYS;
        const i64* pages = params.page_table + params.rows[block.sequence] * params.table_stride;
        return (int)pages[key / PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE;
    }

    __device__ __forceinline__ int row_of(int tile) const {
        if (tile >= MAX_TILES) return first_row(tile);
        int row;
        VOLATILE("ld.shared.u32 %0, [%1];" : "=r"(row) : "r"(block.shared + AT_KEY_ROWS + 4 * tile) : "memory");
        return row;
    }

    __device__ __forceinline__ void keys(const char* maps) {
        int column = block.kv_head() * HEAD_DIM;
#pragma unroll 1
        for (int i = 0; i < block.tiles; i += 2) {
            int count = min(2, block.tiles - i);
            u32 full = begin(count * 4 * TILE_KEYS * HEAD_DIM), to = block.slot(ring);
            for (int j = 0; j < count; ++j, to += 4 * TILE_KEYS * HEAD_DIM) {
                int row = row_of(i + j);
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

