// All layers of a dense decoder for up to 16 sequences of one new token each, in one launch (decode_layers.py).
//
// A block, one per SM, has some rows of every weight, and an equal share of the keys of all sequences. One warp, or four
// with many keys, copies weights, keys and values to a ring of slots in shared memory, in the order of use, across
// layers. Eight warps compute (WARPS). In a GEMM a warp has a part of the columns of all the block's rows, in attention one
// KV head.
//
// Between two operations blocks exchange values through global memory, that is, L2, in pieces of 16 bytes that are
// written and read by one instruction. Memory that no block has written yet holds EMPTY, which no arithmetic yields:
// readers poll. There are three sets of this memory. Layer i uses one and empties the next, which layer i - 2 has used
// and layer i + 1 will use. A block fences once per layer, between its emptying and what all others need to go on: two
// warps fence after a barrier of all, and others publish after the next barrier. PTX promises this order only to the
// threads that fence; that it holds for the block's other threads, and for readers that do not acquire, is a property of
// the hardware, which repeats with equal bits have shown (tests/kernels/test_decode_layers.py).
//
// Macros: HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS; PAGE_SIZE of the cache; BLOCKS; SLOTS of the ring; IN_FLIGHT:
// copies at a time, so that exchanged values do not wait behind many of them; IN_FLIGHT_LONG: with more than
// MANY_TILES tiles of keys in a block; ROW_PADDING.

constexpr int HEAD_DIM = 128, TOKENS = 16;
constexpr int WARPS = 8, PRODUCER = WARPS;
constexpr int THREADS = 32 * (WARPS + 4);  // warps exchange registers in groups of four
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int GROUP = HEADS / KV_HEADS;       // query heads that share a KV head
constexpr int ATTENTION = HEADS * HEAD_DIM;   // columns of the output projection
constexpr int QKV = ATTENTION + 2 * KV_HEADS * HEAD_DIM;
constexpr int OUT_ROWS = HIDDEN / BLOCKS;     // of a block, as the following
constexpr int UP_ROWS = INTERMEDIATE / BLOCKS;
constexpr int QKV_ROWS = QKV / BLOCKS;
constexpr int TILE_KEYS = 8;
constexpr int KEY_BYTES = 2 * KV_HEADS * HEAD_DIM;  // of all KV heads
constexpr u32 EMPTY = 0xffffffffu;  // two bfloat16 or a float32 that are not numbers, of another form than arithmetic's
static_assert(OUT_ROWS == 8 && UP_ROWS == 24 && QKV_ROWS == 32, "rows of an instruction's tiles");
static_assert(HIDDEN % 256 == 0 && ATTENTION % 256 == 0 && INTERMEDIATE % 256 == 0, "a warp has groups of 32 columns");
static_assert(KV_HEADS == WARPS && GROUP == 2 && KEY_BYTES == 2 * HIDDEN, "a slot has 8 rows of a weight, or 8 keys");
static_assert(PAGE_SIZE % TILE_KEYS == 0 && 4 * TOKENS * HEADS == WARPS * BLOCKS, "a warp combines a quarter of a head");

// Of a row of weights or keys in shared memory. With padding of 64 bytes, neighboring rows are in different banks;
// without, all rows of a slot are one copy (see `load_row`).
__host__ __device__ constexpr int stride(int columns) { return 2 * columns + ROW_PADDING; }
constexpr int VALUE_STRIDE = KEY_BYTES + 16;  // of values, of which an instruction reads 8 rows
static_assert(ROW_PADDING == 64 || ROW_PADDING == 0, "");

constexpr int SLOT_BYTES = 8 * (stride(HIDDEN) > VALUE_STRIDE ? stride(HIDDEN) : VALUE_STRIDE);
constexpr int PER_OUT = 4, PER_DOWN = 2;  // rows of a slot; of HIDDEN columns it has 8
static_assert(PER_OUT * stride(ATTENTION) <= SLOT_BYTES && PER_DOWN * stride(INTERMEDIATE) <= SLOT_BYTES, "");
static_assert(SLOT_BYTES % 128 == 0, "each slot begins at the first bank");
constexpr int AT_SUMS = SLOTS * SLOT_BYTES;  // of gate and up, and of QKV
constexpr int AT_FEW_SUMS = AT_SUMS + WARPS * (2 * UP_ROWS / 8) * 512;  // of the others; queries; a new value
constexpr int AT_SQUARES = AT_FEW_SUMS + WARPS * 512;
constexpr int AT_BARRIERS = AT_SQUARES + WARPS * 64;
constexpr int SHARED_BYTES = AT_BARRIERS + 8 * 2 * SLOTS;
static_assert(SHARED_BYTES <= 227 * 1024, "a block has 227 KiB of shared memory at most");

// Exchanged values that are multiplied: [column / 32][token / 8][token % 8][column % 32].
constexpr int GROUP_BYTES = 2 * 32 * TOKENS;
constexpr int TO_QKV = 0;  // [token][QKV]
constexpr int TO_ATTENTION = TO_QKV + 2 * TOKENS * QKV;
constexpr int TO_X = TO_ATTENTION + 2 * TOKENS * ATTENTION;
constexpr int TO_ACTIVATED = TO_X + 2 * TOKENS * HIDDEN;
constexpr int TO_NEXT = TO_ACTIVATED + 2 * TOKENS * INTERMEDIATE;
constexpr int TO_PARTS = TO_NEXT + 2 * TOKENS * HIDDEN;  // [block][slot][head][PART_BYTES]: of attention
constexpr int PART_BYTES = 4 * HEAD_DIM + 16;            // sums of values; maximum and total
constexpr int SET_BYTES = TO_PARTS + BLOCKS * 2 * HEADS * PART_BYTES;
constexpr int NORM_BYTES = 2 * (2 * HIDDEN + 2 * HEAD_DIM);  // of attention, MLP, queries and keys of a layer

struct Layer {
    const char *qkv, *out, *gate_up, *down;
    char *keys, *values;
};

struct Params {
    const Layer* layers;
    const char *norms, *input;
    char* output;
    const i64 *positions, *rows, *page_table;
    const float* rotary;
    char* exchange;
    int tokens, table_stride;
    float eps, head_eps, scale_log2;
};

__device__ __forceinline__ u64 join(u32 first, u32 second) { return (u64)second << 32 | first; }

struct Ring {
    u32 slot = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
};

// A sequence's tiles of keys; a sequence of one token has a tile without keys. Tiles of all sequences are numbered on.
struct Sequence {
    int first, tiles, position;  // of the new token, which is in no tile; -1 and no tiles for padding
    int row;                     // in the page table
};

struct Block {
    const Params& params;
    u32 shared;
    int warp, lane, index;
    Sequence mine;              // sequence `lane`
    int ranges, all, begin, end;  // blocks with keys; tiles of all sequences; tiles of this block
    Ring ring;

    __device__ __forceinline__ u32 full(u32 slot) const { return shared + AT_BARRIERS + 8 * slot; }
    __device__ __forceinline__ u32 empty(u32 slot) const { return full(SLOTS + slot); }
    __device__ __forceinline__ u32 at(const Ring& of) const { return shared + of.slot * SLOT_BYTES; }

    __device__ __forceinline__ void divide() {
        mine = {0, 0, -1, 0};
        if (lane < params.tokens) {
            mine.position = (int)params.positions[lane];
            mine.row = (int)params.rows[lane];
            if (mine.position >= 0) mine.tiles = max(1, (mine.position + TILE_KEYS - 1) / TILE_KEYS);
        }
        int last = mine.tiles;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            int before = __shfl_up_sync(~0u, last, distance);
            if (lane >= distance) last += before;
        }
        mine.first = last - mine.tiles;
        all = __shfl_sync(~0u, last, 31);
        ranges = min(BLOCKS, all);
        begin = index < ranges ? (int)((i64)index * all / ranges) : 0;
        end = index < ranges ? (int)((i64)(index + 1) * all / ranges) : 0;
    }

    // The block that has a tile.
    __device__ __forceinline__ int block_of(int tile) const { return (int)(((i64)(tile + 1) * ranges - 1) / all); }

    __device__ __forceinline__ Sequence sequence(int i) const {
        return {__shfl_sync(~0u, mine.first, i), __shfl_sync(~0u, mine.tiles, i), __shfl_sync(~0u, mine.position, i),
                __shfl_sync(~0u, mine.row, i)};
    }

    // The row of the caches of a key.
    __device__ __forceinline__ i64 cache_row(int row, int key) const {
        return params.page_table[(i64)row * params.table_stride + key / PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE;
    }
};

// A warp that copies: the first of COPIERS, or one beside it. With many keys, one warp issues copies too slowly.
template <int COPIERS>
struct Producer : Block {
    static constexpr int LIMIT = COPIERS == 1 ? IN_FLIGHT : IN_FLIGHT_LONG;
    Ring landed;
    int issued;
    i64 first_row;  // of the caches: of tile begin + lane

    // The row of a slot that this lane copies.
    __device__ __forceinline__ int part() const { return COPIERS * lane + warp - PRODUCER; }

    __device__ __forceinline__ u32 take(int bytes) {
        if (++issued > LIMIT) {
            wait(full(landed.slot), landed.phase);
            landed.next();
        }
        wait(empty(ring.slot), ring.phase ^ 1);
        if (lane == 0 && warp == PRODUCER) expect(full(ring.slot), bytes);
        __syncwarp();
        return full(ring.slot);
    }

    template <int COLUMNS>
    __device__ __forceinline__ void rows(const char* weight, int row, int count) {
        u32 barrier = take(count * 2 * COLUMNS);
        const char* from = weight + (i64)row * (2 * COLUMNS);
        if (ROW_PADDING) {
            if (part() < count)
                copy_once(at(ring) + part() * stride(COLUMNS), from + part() * (2 * COLUMNS), 2 * COLUMNS, barrier);
        } else if (lane == 0 && warp == PRODUCER) {
            copy_once(at(ring), from, count * 2 * COLUMNS, barrier);
        }
        ring.next();
    }

    __device__ __forceinline__ void qkv(const Layer& layer) {
#pragma unroll 1
        for (int i = 0; i < QKV_ROWS; i += 8) rows<HIDDEN>(layer.qkv, index * QKV_ROWS + i, 8);
    }

    // Row of the caches of tile `first` + lane of this block.
    __device__ __forceinline__ i64 row_of(int first) const {
        int tile = first + lane;
        i64 row = 0;
#pragma unroll 1
        for (int i = 0; i < params.tokens; ++i) {
            Sequence of = sequence(i);
            if (tile < end && tile >= of.first && tile < of.first + of.tiles)
                row = cache_row(of.row, (tile - of.first) * TILE_KEYS);
        }
        return row;
    }

    __device__ __forceinline__ void keys(const Layer& layer) {
#pragma unroll 1
        for (int first = begin; first < end; first += 32) {
            i64 of_lane = first == begin ? first_row : row_of(first);
            int count = min(32, end - first);
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                int row = (int)__shfl_sync(~0u, of_lane, i);
                rows<HIDDEN>(layer.keys, row, TILE_KEYS);
                u32 barrier = take(TILE_KEYS * KEY_BYTES);
                const char* from = layer.values + (i64)(row + part()) * KEY_BYTES;
                if (part() < TILE_KEYS) copy_once(at(ring) + part() * VALUE_STRIDE, from, KEY_BYTES, barrier);
                ring.next();
            }
        }
    }

    __device__ __forceinline__ Layer load(int layer) const {
        const Layer* from = params.layers + min(layer, LAYERS - 1);
        u64 words[6];
#pragma unroll
        for (int i = 0; i < 6; i += 2) load_addresses((const u64*)from + i, words[i], words[i + 1]);
        return {(const char*)words[0], (const char*)words[1], (const char*)words[2],
                (const char*)words[3], (char*)words[4],       (char*)words[5]};
    }

    __device__ __forceinline__ void run() {
        Layer layer = load(0);
        issued = 0;
        qkv(layer);
        first_row = row_of(begin);
#pragma unroll 1
        for (int i = 0; i < LAYERS; ++i) {
            Layer next = load(i + 1);  // long before its addresses are needed
            keys(layer);
#pragma unroll 1
            for (int row = 0; row < OUT_ROWS; row += PER_OUT)
                rows<ATTENTION>(layer.out, index * OUT_ROWS + row, PER_OUT);
#pragma unroll 1
            for (int row = 0; row < 2 * UP_ROWS; row += 8)
                rows<HIDDEN>(layer.gate_up, index * UP_ROWS + row % UP_ROWS + row / UP_ROWS * INTERMEDIATE, 8);
#pragma unroll 1
            for (int row = 0; row < OUT_ROWS; row += PER_DOWN)
                rows<INTERMEDIATE>(layer.down, index * OUT_ROWS + row, PER_DOWN);
            if (i + 1 < LAYERS) qkv(next);
            layer = next;
        }
    }
};

// A warp that computes.
//
// In GEMMs tokens are the rows of a matrix instruction, and 8 rows of a weight its columns. A lane has 16 bytes of
// token lane / 4, of token 8 + lane / 4 and of row lane / 4: the operands of two instructions. The order of columns
// does not matter as long as tokens and weights have the same. In attention the two query heads of this warp are the
// first rows; keys, and then dims of values, are the columns.
struct Consumer : Block {
    char *used, *emptied;  // sets of exchanged values
    u32 residual;          // two columns of a token, in each lane of the first two warps, whose tokens are halves
    u32 own;               // shared memory of this warp

    __device__ __forceinline__ int token(int half) const { return 8 * half + lane / 4; }
    __device__ __forceinline__ void sync() { sync_named<1, WARPS>(); }

    // Makes the compiler compute addresses anew: registers do not suffice to keep those of all layers' operations.
    __device__ __forceinline__ void forget() { forget_value(lane), forget_value(warp), forget_value(index); }

    // Returns slots that this warp has read.
    template <int COUNT>
    __device__ __forceinline__ void give() {
        fence_reads();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (lane == 0) arrive(empty(ring.slot));
            ring.next();
        }
    }

    // --- GEMMs -------------------------------------------------------------------------------------------------------

    // Loads COUNT pieces of row lane / 4, of which four lanes have 64 bytes each. Without padding odd rows are in the
    // banks of even ones: they load the two halves of 128 bytes in the other order.
    template <int COUNT>
    __device__ __forceinline__ void load_row(u32 from, uint4* pieces) {
        bool swaps = ROW_PADDING == 0 && lane / 4 % 2;
        from += 16 * (lane % 4);
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            uint4 first = load4(from + 64 * i + (swaps ? 64 : 0)), second = load4(from + 64 * i + (swaps ? 0 : 64));
            pieces[i] = swaps ? second : first, pieces[i + 1] = swaps ? first : second;
        }
    }

    // Loads this warp's columns of 8 * COUNT rows of HIDDEN columns.
    template <int COUNT>
    __device__ __forceinline__ void load_rows(uint4 (*weights)[HIDDEN / 256]) {
        Ring next = ring;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            wait(full(next.slot), next.phase);
            load_row<HIDDEN / 256>(at(next) + lane / 4 * stride(HIDDEN) + warp * (HIDDEN / 4), weights[i]);
            next.next();
        }
        give<COUNT>();
    }

    // Loads this warp's columns of 8 rows, of which a slot has PER.
    template <int COLUMNS, int PER>
    __device__ __forceinline__ void load_long_rows(uint4 (*weights)[COLUMNS / 256]) {
        Ring next = ring, row = ring;
#pragma unroll
        for (int i = 0; i < 8 / PER; ++i) {
            wait(full(next.slot), next.phase);
            if (i < lane / 4 / PER) row.next();
            next.next();
        }
        load_row<COLUMNS / 256>(at(row) + lane / 4 % PER * stride(COLUMNS) + warp * (COLUMNS / 4), weights[0]);
        give<8 / PER>();
    }

    // Loads this warp's columns of exchanged values, once they have been written. Tokens past the end are 0.
    template <int COLUMNS>
    __device__ __forceinline__ void receive(const char* from, uint4 (*x)[2]) {
        constexpr int GROUPS = COLUMNS / 256;
        from += warp * GROUPS * GROUP_BYTES + 16 * lane;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) x[i][0] = x[i][1] = make_uint4(0, 0, 0, 0);
        Watch watch;
        for (;; watch.check()) {
            bool arrived = true;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (token(half) < params.tokens) {
#pragma unroll
                    for (int i = 0; i < GROUPS; ++i)
                        x[i][half] = load_piece(from + i * GROUP_BYTES + half * (GROUP_BYTES / 2));
                }
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) arrived &= x[i][0].w != EMPTY && x[i][1].w != EMPTY;
            if (__all_sync(~0u, arrived)) break;
        }
    }

    // Stores the sums of COUNT tiles of rows over this warp's columns.
    template <int GROUPS, int COUNT>
    __device__ __forceinline__ void multiply_all(int to, const uint4 (*x)[2], const uint4 (*weights)[GROUPS]) {
        constexpr int CHAINS = COUNT == 1 ? 4 : 1;  // an instruction waits for the sums before it
        float sums[COUNT][CHAINS][4] = {};
#pragma unroll
        for (int i = 0; i < GROUPS; ++i)
#pragma unroll
            for (int j = 0; j < COUNT; ++j) {
                const uint4 &first = x[i][0], &second = x[i][1], &weight = weights[j][i];
                multiply(sums[j][2 * i % CHAINS], make_uint4(first.x, second.x, first.y, second.y),
                         make_uint2(weight.x, weight.y));
                multiply(sums[j][(2 * i + 1) % CHAINS], make_uint4(first.z, second.z, first.w, second.w),
                         make_uint2(weight.z, weight.w));
            }
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
#pragma unroll
            for (int chain = 1; chain < CHAINS; ++chain)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[j][0][i] += sums[j][chain][i];
            store_float4(shared + to + (warp * COUNT + j) * 512 + 16 * lane, sums[j][0][0], sums[j][0][1],
                         sums[j][0][2], sums[j][0][3]);
        }
    }

    __device__ __forceinline__ void load_norm(const char* weight, uint4* norm) {
#pragma unroll
        for (int i = 0; i < HIDDEN / 256; ++i)
            norm[i] = load_global(weight + warp * (HIDDEN / 4) + 64 * i + 16 * (lane % 4));
    }

    // Multiplies tokens by the norm's weight, and stores their sums of squares. The norm's factor follows the GEMM.
    __device__ __forceinline__ void scale(uint4 (*x)[2], const uint4* norm) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < HIDDEN / 256; ++i) {
                u32 words[4] = {x[i][half].x, x[i][half].y, x[i][half].z, x[i][half].w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    squares = fmaf(low(words[j]), low(words[j]), fmaf(high(words[j]), high(words[j]), squares));
                x[i][half] = make_uint4(multiply_pairs(words[0], norm[i].x), multiply_pairs(words[1], norm[i].y),
                                        multiply_pairs(words[2], norm[i].z), multiply_pairs(words[3], norm[i].w));
            }
            squares = sum_lanes<2>(squares);
            if (lane % 4 == 0) store_float(shared + AT_SQUARES + 4 * (warp * 16 + token(half)), squares);
        }
    }

    // Returns the norm's factor of a token.
    __device__ __forceinline__ float factor(int half) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) squares += load_float(shared + AT_SQUARES + 4 * (i * 16 + token(half)));
        return inverse_root(fmaf(squares, 1.0f / HIDDEN, params.eps));
    }

    // Returns all warps' sums of a token, and of two rows of a tile of rows: 2 * (lane % 4) and the next.
    template <int COUNT>
    __device__ __forceinline__ float2 sum_of(int from, int row_tile, int half) {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            float2 part = load_float2(shared + from + (i * COUNT + row_tile) * 512 + 16 * lane + 8 * half);
            sum.x += part.x, sum.y += part.y;
        }
        return sum;
    }

    // --- exchanges ---------------------------------------------------------------------------------------------------

    // Returns the 16 bytes of which each of four lanes has 4, in the first of them.
    __device__ __forceinline__ void gather(u32 pair, u64& first, u64& second) {
        u32 other = __shfl_xor_sync(~0u, pair, 1);
        first = join(pair, other);
        second = __shfl_xor_sync(~0u, first, 2);
    }

    // Where 8 columns of a token are among exchanged values.
    __device__ __forceinline__ static int piece_at(int token, int piece) {
        return piece / 4 * GROUP_BYTES + token * 64 + 16 * (piece % 4);
    }

    // Shares 8 columns of a token, of which each of four lanes has two.
    __device__ __forceinline__ void publish(int to, int half, u32 pair) {
        u64 first, second;
        gather(pair, first, second);
        if (lane % 4 == 0 && token(half) < params.tokens) store_piece(used + to, first, second);
    }

    __device__ __forceinline__ void empty_piece(int to) { store_piece(emptied + to, ~0ull, ~0ull); }

    // Where this warp's sums of the output projection and down are shared, of gate and up, and of QKV.
    __device__ __forceinline__ int to_own(int to) const { return to + piece_at(token(warp), index); }

    __device__ __forceinline__ int to_activated() const {
        return TO_ACTIVATED + piece_at(token(warp % 2), index * (UP_ROWS / 8) + warp / 2);
    }

    __device__ __forceinline__ int to_qkv() const {
        return TO_QKV + token(warp % 2) * (2 * QKV) + index * (2 * QKV_ROWS) + 16 * (warp / 2);
    }

    // A token, a head and a quarter of its dims, whose parts this warp joins.
    __device__ __forceinline__ int task() const { return index + warp * BLOCKS; }

    // Empties in the other set what this warp shares, for all tokens. uses: the block's parts of attention.
    __device__ __forceinline__ void empty_others(const bool (&uses)[2]) {
        if (lane % 4 == 0) {
            empty_piece(to_qkv());
            if (warp / 2 < UP_ROWS / 8) empty_piece(to_activated());
            if (warp < 2) empty_piece(to_own(TO_X)), empty_piece(to_own(TO_NEXT));
        }
        int of_task = task();
        if (lane < HEAD_DIM / 32)
            empty_piece(TO_ATTENTION + piece_at(of_task / (4 * HEADS), of_task % (4 * HEADS) * (HEAD_DIM / 32) + lane));
#pragma unroll
        for (int slot = 0; slot < 2; ++slot)
            if (uses[slot])
#pragma unroll 1
                for (int i = lane; i < GROUP * PART_BYTES / 16; i += 32)
                    empty_piece(TO_PARTS + ((index * 2 + slot) * HEADS + warp * GROUP) * PART_BYTES + 16 * i);
    }

    // --- attention ---------------------------------------------------------------------------------------------------

    // Normalizes and rotates a head, of which this lane has dims 4 * lane to 4 * lane + 3.
    __device__ __forceinline__ uint2 rotated(uint2 head, uint2 norm, float4 cosines, float4 sines) {
        float values[4] = {low(head.x), high(head.x), low(head.y), high(head.y)};
        float weights[4] = {low(norm.x), high(norm.x), low(norm.y), high(norm.y)};
        float cos[4] = {cosines.x, cosines.y, cosines.z, cosines.w}, sin[4] = {sines.x, sines.y, sines.z, sines.w};
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) squares = fmaf(values[i], values[i], squares);
        float by = inverse_root(fmaf(sum_lanes<16>(squares), 1.0f / HEAD_DIM, params.head_eps));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float value = rounded(rounded(values[i] * by) * weights[i]);
            float partner = exchange(value, 16);
            values[i] = value * cos[i] + partner * (lane < 16 ? -sin[i] : sin[i]);
        }
        return make_uint2(pack(values[0], values[1]), pack(values[2], values[3]));
    }

    __device__ __forceinline__ float dot(uint2 first, uint2 second) {
        float sum = low(first.x) * low(second.x);
        sum = fmaf(high(first.x), high(second.x), sum);
        sum = fmaf(low(first.y), low(second.y), sum);
        return sum_lanes<16>(fmaf(high(first.y), high(second.y), sum));
    }

    // Attends to tiles `tile` to `stop` of a sequence, with this warp's KV head and its two query heads.
    __device__ __forceinline__ void attend(const Sequence& of, int token, int tile, int stop, int layer) {
        bool is_first = tile == of.first, is_last = stop == of.first + of.tiles;
        const char* norm = params.norms + (i64)layer * NORM_BYTES + 4 * HIDDEN;
        uint2 query_norm = load_half_global(norm + 8 * lane);
        uint2 key_norm = load_half_global(norm + 2 * HEAD_DIM + 8 * lane);
        const float* angles = params.rotary + (i64)of.position * HEAD_DIM + lane % 16 * 4;
        float4 cosines = *(const float4*)angles, sines = *(const float4*)(angles + HEAD_DIM / 2);
        const char* from = used + TO_QKV + token * (2 * QKV) + 8 * lane;
        uint2 queries[GROUP], key = make_uint2(0, 0), value = make_uint2(0, 0);
        Watch watch;
        for (;; watch.check()) {
#pragma unroll
            for (int i = 0; i < GROUP; ++i) queries[i] = load_half_piece(from + (warp * GROUP + i) * (2 * HEAD_DIM));
            if (is_last) {
                key = load_half_piece(from + 2 * ATTENTION + warp * (2 * HEAD_DIM));
                value = load_half_piece(from + 2 * ATTENTION + KEY_BYTES + warp * (2 * HEAD_DIM));
            }
            bool arrived = key.y != EMPTY && value.y != EMPTY;
#pragma unroll
            for (int i = 0; i < GROUP; ++i) arrived &= queries[i].y != EMPTY;
            if (__all_sync(~0u, arrived)) break;
        }
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            queries[i] = rotated(queries[i], query_norm, cosines, sines);
            store_words(own + i * (2 * HEAD_DIM) + 8 * lane, queries[i].x, queries[i].y);
        }
        __syncwarp();
        uint4 rows[HEAD_DIM / 32];  // of the instruction: query heads
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; ++i)
            rows[i] = lane / 4 < GROUP ? load4(own + lane / 4 * (2 * HEAD_DIM) + 64 * i + 16 * (lane % 4))
                                       : make_uint4(0, 0, 0, 0);
        __syncwarp();
        float maximum = -1e30f, total = 0.0f, sums[HEAD_DIM / 8][4] = {};  // lane / 4: head; dims 2 * (lane % 4) of 8
        if (is_last) {  // begins with the new token
            key = rotated(key, key_norm, cosines, sines);
            float scores[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; ++i) scores[i] = dot(queries[i], key) * params.scale_log2;
            store_words(own + 8 * lane, value.x, value.y);
            __syncwarp();
            maximum = lane / 4 == 0 ? scores[0] : scores[1];
            total = lane % 4 == 0 ? 1.0f : 0.0f;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; ++i) {
                u32 pair = load_word(own + 16 * i + 4 * (lane % 4));
                sums[i][0] = low(pair), sums[i][1] = high(pair);
            }
            i64 at = (cache_row(of.row, of.position) * KV_HEADS + warp) * (2 * HEAD_DIM) + 8 * lane;
            *(uint2*)(params.layers[layer].keys + at) = key;
            *(uint2*)(params.layers[layer].values + at) = value;
            __syncwarp();
        }
#pragma unroll 1
        for (; tile < stop; tile += 2) {
            bool has_second = tile + 1 < stop;
            Ring slots[4] = {ring};
#pragma unroll
            for (int i = 1; i < 4; ++i) slots[i] = slots[i - 1], slots[i].next();
            float scores[2][2][4] = {};  // [tile][chain]
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (i && !has_second) continue;
                wait(full(slots[2 * i].slot), slots[2 * i].phase);
                uint4 keys[HEAD_DIM / 32];
                load_row<HEAD_DIM / 32>(at(slots[2 * i]) + lane / 4 * stride(HIDDEN) + warp * (2 * HEAD_DIM), keys);
#pragma unroll
                for (int j = 0; j < HEAD_DIM / 32; ++j) {
                    multiply(scores[i][0], make_uint4(rows[j].x, 0, rows[j].y, 0), make_uint2(keys[j].x, keys[j].y));
                    multiply(scores[i][1], make_uint4(rows[j].z, 0, rows[j].w, 0), make_uint2(keys[j].z, keys[j].w));
                }
            }
            int first_key = (tile - of.first) * TILE_KEYS + lane % 4 * 2;
            float values[4], largest = maximum;
            bool valid[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                valid[i] = (i < 2 || has_second) && first_key + i / 2 * TILE_KEYS + i % 2 < of.position;
                values[i] = (scores[i / 2][0][i % 2] + scores[i / 2][1][i % 2]) * params.scale_log2;
                if (valid[i]) largest = fmaxf(largest, values[i]);
            }
            largest = max_lanes<2>(largest);
            float before = power_of_two(maximum - largest);
            maximum = largest;
            total *= before;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[i] = valid[i] ? power_of_two(values[i] - largest) : 0.0f;
                total += values[i];
            }
            uint4 weights = make_uint4(pack(values[0], values[1]), 0, pack(values[2], values[3]), 0);
            u32 masks[2];  // of values past the end, which may be anything
#pragma unroll
            for (int i = 0; i < 2; ++i)
                masks[i] = (valid[2 * i] ? 0xffffu : 0) | (valid[2 * i + 1] ? 0xffff0000u : 0);
            u32 offset = lane % 8 * VALUE_STRIDE + warp * (2 * HEAD_DIM) + lane / 8 * 16;
            wait(full(slots[1].slot), slots[1].phase);
            if (has_second) wait(full(slots[3].slot), slots[3].phase);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 32; ++i) {
                uint4 first = load_values(at(slots[1]) + offset + 64 * i), second = make_uint4(0, 0, 0, 0);
                if (has_second) second = load_values(at(slots[3]) + offset + 64 * i);
                u32 pairs[4][2] = {{first.x, second.x}, {first.y, second.y}, {first.z, second.z}, {first.w, second.w}};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float* sum = sums[4 * i + j];
                    sum[0] *= before, sum[1] *= before;
                    multiply(sum, weights, make_uint2(pairs[j][0] & masks[0], pairs[j][1] & masks[1]));
                }
            }
            if (has_second)
                give<4>();
            else
                give<2>();
        }
        total = sum_lanes<2>(total);
        int head = warp * GROUP + lane / 4;
        if (is_first && is_last) {
            float by = __fdividef(1.0f, total);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; ++i) {
                u64 first, second;
                gather(pack(sums[i][0] * by, sums[i][1] * by), first, second);
                if (lane < 4 * GROUP && lane % 4 == 0)
                    store_piece(used + TO_ATTENTION + piece_at(token, head * (HEAD_DIM / 8) + i), first, second);
            }
        } else if (lane < 4 * GROUP) {
            char* to = used + TO_PARTS + ((index * 2 + is_first) * HEADS + head) * PART_BYTES;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i += 2)
                store_piece(to + 32 * i + 16 * (lane % 4),
                            join(__float_as_uint(sums[i][0]), __float_as_uint(sums[i][1])),
                            join(__float_as_uint(sums[i + 1][0]), __float_as_uint(sums[i + 1][1])));
            if (lane % 4 == 0)
                store_piece(to + 4 * HEAD_DIM, join(__float_as_uint(maximum), __float_as_uint(total)), 0);
        }
    }

    // Joins the parts of a sequence that several blocks have, for a quarter of a head's dims.
    //
    // Eight lanes have the 16 bytes of the quarter in a part; the warp's four groups of eight have parts in turn.
    __device__ __forceinline__ void combine(int token, int head, int quarter) {
        if (token >= params.tokens) return;
        Sequence of = sequence(token);
        int first_block = of.tiles ? block_of(of.first) : 0;
        int parts = of.tiles ? block_of(of.first + of.tiles - 1) + 1 - first_block : 0;
        if (parts == 1) return;
        constexpr int GROUPS = 4, COUNT = 8;
        float maximum = -1e30f, total = 0.0f, sums[4] = {};
#pragma unroll 1
        for (int start = lane / 8; start - lane / 8 < parts; start += GROUPS * COUNT) {
            uint4 pieces[COUNT];
            uint2 ends[COUNT];  // maximum and total
            Watch watch;
            for (;; watch.check()) {
                bool arrived = true;
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    int part = start + GROUPS * i;
                    pieces[i] = make_uint4(0, 0, 0, 0), ends[i] = make_uint2(__float_as_uint(-1e30f), 0);
                    if (part < parts) {
                        int slot = (first_block + part) * 2 + (part == 0);  // the first part begins in its block
                        const char* from = used + TO_PARTS + (slot * HEADS + head) * PART_BYTES;
                        pieces[i] = load_piece(from + HEAD_DIM * quarter + 16 * (lane % 8));
                        ends[i] = load_half_piece(from + 4 * HEAD_DIM);
                    }
                }
#pragma unroll
                for (int i = 0; i < COUNT; ++i) arrived &= pieces[i].w != EMPTY && ends[i].y != EMPTY;
                if (__all_sync(~0u, arrived)) break;
            }
            float largest = maximum;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) largest = fmaxf(largest, __uint_as_float(ends[i].x));
            float before = power_of_two(maximum - largest);
            maximum = largest;
            total *= before;
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[j] *= before;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                float weight = power_of_two(__uint_as_float(ends[i].x) - maximum);
                total = fmaf(weight, __uint_as_float(ends[i].y), total);
                u32 words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[j] = fmaf(weight, __uint_as_float(words[j]), sums[j]);
            }
        }
#pragma unroll
        for (int distance = 8; distance < 32; distance *= 2) {
            float largest = fmaxf(maximum, exchange(maximum, distance)), weight = power_of_two(maximum - largest);
            maximum = largest;
            total *= weight;
            total += exchange(total, distance);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                sums[j] *= weight;
                sums[j] += exchange(sums[j], distance);
            }
        }
        float by = parts ? __fdividef(1.0f, total) : 0.0f;  // padding is 0
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u64 first, second;
            gather(pack(sums[2 * i] * by, sums[2 * i + 1] * by), first, second);
            int piece = head * (HEAD_DIM / 8) + quarter * (HEAD_DIM / 32) + lane / 4 * 2 + i;
            if (lane < 8 && lane % 4 == 0) store_piece(used + TO_ATTENTION + piece_at(token, piece), first, second);
        }
    }

    __device__ __forceinline__ void attention(int layer) {
        forget();
        bool uses[2] = {layer < 2, layer < 2};  // parts: at first all are emptied, since other steps have used others
#pragma unroll 1
        for (int tile = begin; tile < end;) {
            int token = __ffs(__ballot_sync(~0u, mine.first <= tile && tile < mine.first + mine.tiles)) - 1;
            Sequence of = sequence(token);
            int stop = min(end, of.first + of.tiles);
            attend(of, token, tile, stop, layer);
            uses[0] |= tile > of.first, uses[1] |= tile == of.first;
            tile = stop;
        }
        combine(task() / (4 * HEADS), task() / 4 % HEADS, task() % 4);
        empty_others(uses);
    }

    // --- layers ------------------------------------------------------------------------------------------------------

    __device__ __forceinline__ void select(int set) {
        used = params.exchange + (i64)(set % 3) * SET_BYTES;
        emptied = params.exchange + (i64)((set + 1) % 3) * SET_BYTES;
    }

    // Adds this warp's tokens of a GEMM to the residual stream.
    __device__ __forceinline__ void add() {
        float2 sum = sum_of<1>(AT_FEW_SUMS, 0, warp);
        residual = pack(low(residual) + sum.x, high(residual) + sum.y);
    }

    __device__ __forceinline__ float swiglu(float gate, float up) {
        return __fdividef(gate, 1.0f + power_of_two(-1.44269504f * gate)) * up;
    }

    // Computes QKV of the layer that `select` has selected the set of.
    __device__ __forceinline__ void qkv(const char* from, const char* norm_weight) {
        constexpr int COUNT = QKV_ROWS / 8;
        uint4 weights[COUNT][HIDDEN / 256], norm[HIDDEN / 256], x[HIDDEN / 256][2];
        forget();
        load_norm(norm_weight, norm);
        load_rows<COUNT>(weights);
        if (from) {
            receive<HIDDEN>(from, x);
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < HIDDEN / 256; ++i)
                    x[i][half] = token(half) < params.tokens
                                     ? load_global(params.input + token(half) * (2 * HIDDEN) + warp * (HIDDEN / 4) +
                                                   64 * i + 16 * (lane % 4))
                                     : make_uint4(0, 0, 0, 0);
        }
        scale(x, norm);
        multiply_all<HIDDEN / 256, COUNT>(AT_SUMS, x, weights);
        sync();
        int half = warp % 2, row_tile = warp / 2;
        float2 sum = sum_of<COUNT>(AT_SUMS, row_tile, half);
        float by = factor(half);
        publish(to_qkv(), half, pack(by * sum.x, by * sum.y));
    }

    __device__ __forceinline__ void run(int set) {
        own = shared + AT_FEW_SUMS + warp * 512;
        residual = 0;
        i64 own_columns = (i64)token(warp) * HIDDEN + index * OUT_ROWS + 2 * (lane % 4);
        bool owns = warp < 2, valid = owns && token(warp) < params.tokens;
        if (valid) residual = *(const u32*)(params.input + 2 * own_columns);
        select(set);
        qkv(nullptr, params.norms);
#pragma unroll 1
        for (int layer = 0; layer < LAYERS; ++layer) {
            const char* norms = params.norms + (i64)layer * NORM_BYTES;
            attention(layer);
            forget();
            {  // output projection
                uint4 weights[1][ATTENTION / 256], x[ATTENTION / 256][2];
                load_long_rows<ATTENTION, PER_OUT>(weights);
                receive<ATTENTION>(used + TO_ATTENTION, x);
                multiply_all<ATTENTION / 256, 1>(AT_FEW_SUMS, x, weights);
                sync();
                if (owns) {
                    add();
                    publish(to_own(TO_X), warp, residual);
                }
            }
            forget();
            {  // gate and up
                constexpr int COUNT = 2 * UP_ROWS / 8;
                uint4 weights[COUNT][HIDDEN / 256], norm[HIDDEN / 256], x[HIDDEN / 256][2];
                load_norm(norms + 2 * HIDDEN, norm);
                load_rows<COUNT>(weights);
                receive<HIDDEN>(used + TO_X, x);
                scale(x, norm);
                multiply_all<HIDDEN / 256, COUNT>(AT_SUMS, x, weights);
                sync();
                int half = warp % 2, row_tile = warp / 2;
                if (row_tile < UP_ROWS / 8) {
                    float2 gate = sum_of<COUNT>(AT_SUMS, row_tile, half);
                    float2 up = sum_of<COUNT>(AT_SUMS, row_tile + UP_ROWS / 8, half);
                    float by = factor(half);
                    publish(to_activated(), half, pack(swiglu(by * gate.x, by * up.x), swiglu(by * gate.y, by * up.y)));
                } else {
                    // What the block has emptied, before `sync` above, is empty for every block that receives NEXT.
                    fence();
                }
            }
            forget();
            {  // down
                uint4 weights[1][INTERMEDIATE / 256], x[INTERMEDIATE / 256][2];
                load_long_rows<INTERMEDIATE, PER_DOWN>(weights);
                receive<INTERMEDIATE>(used + TO_ACTIVATED, x);
                multiply_all<INTERMEDIATE / 256, 1>(AT_FEW_SUMS, x, weights);
                sync();
                if (owns) {
                    add();
                    publish(to_own(TO_NEXT), warp, residual);
                }
            }
            if (layer + 1 == LAYERS) break;
            const char* from = used + TO_NEXT;
            select(++set);
            qkv(from, norms + NORM_BYTES);
        }
        if (valid) *(u32*)(params.output + 2 * own_columns) = residual;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_layers(
    const Layer* layers, const char* norms, const char* input, char* output, const i64* positions, const i64* rows,
    const i64* page_table, const float* rotary, char* exchange, u32* first_set, int tokens, int table_stride, float eps,
    float head_eps, float scale_log2) {
    extern __shared__ __align__(1024) char memory[];
    Params params{layers, norms,    input,  output,       positions, rows,     page_table,
                  rotary, exchange, tokens, table_stride, eps,       head_eps, scale_log2};
    Block block{params, (u32)__cvta_generic_to_shared(memory), (int)threadIdx.x / 32, (int)threadIdx.x % 32,
                (int)blockIdx.x};
    if (threadIdx.x == PRODUCER * 32) {
        for (int i = 0; i < SLOTS; ++i) {
            init_barrier(block.full(i), 1);
            init_barrier(block.empty(i), WARPS);
        }
        fence_barriers();
    }
    u32 set = load_relaxed(first_set);
    block.divide();
    __syncthreads();
    if (threadIdx.x < 32 * WARPS) {
        take_registers<CONSUMER_REGISTERS>();
        Consumer{block}.run((int)set);
        // Block 0 ends after every block has read the set: it has received something from all of them.
        if (threadIdx.x == 0 && blockIdx.x == 0) *first_set = (set + LAYERS) % 3;
    } else {
        release_registers<PRODUCER_REGISTERS>();
        if (block.end - block.begin > MANY_TILES)
            Producer<4>{block}.run();
        else if (block.warp == PRODUCER)
            Producer<1>{block}.run();
    }
}
