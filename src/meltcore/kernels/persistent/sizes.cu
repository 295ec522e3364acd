// All layers of a dense decoder for up to TOKENS sequences of one new token each, in one launch (decode_layers.py).
//
// A team of TEAM blocks, one per SM, holds the part of the layers that a rank of tensor parallelism would hold: two
// query heads with their KV head, and a part of the intermediate size. Blocks exchange values through global memory,
// that is, L2, as words of 64 bits: a float32 or two bfloat16, and the tag of the exchange. Blocks r of all teams sum
// the same rows of the row-parallel GEMVs, and each sends its sums to its own team. A word may be written again once
// its readers have sent something that the writer, directly or not, has received since. Tokens exchange apart from each
// other: all exchanges of a token are one warp's of a block, in order.
//
// SPLITS blocks of a team share the keys of a sequence.
//
// Warps of a block: CONSUMERS compute; one copies weights, keys and values to a ring of slots in shared memory, in the
// order in which they are consumed, across layers; EXCHANGERS sum, apply norms' factors, and send and receive values.
//
// Macros: TOKENS; HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS; PAGE_SIZE of the cache; TEAM, TEAMS; EXCHANGERS; SLOTS
// of the ring, and how many of them are IN_FLIGHT; MAX_TILES of keys per block whose rows in the cache shared memory
// has; EXCHANGE_WORDS of global memory.

constexpr int HEAD_DIM = 128;
constexpr int CONSUMERS = 8;
constexpr int PRODUCER = CONSUMERS, FIRST_EXCHANGER = CONSUMERS + 1;
constexpr int THREADS = 32 * (CONSUMERS + 1 + EXCHANGERS);
constexpr int PER_EXCHANGER = TOKENS / EXCHANGERS;  // tokens
constexpr int SPLITS = TEAM / TOKENS;
constexpr int GROUP = HEADS / TEAMS;              // query heads of a team, which share a KV head
constexpr int ATTENTION = GROUP * HEAD_DIM;       // columns of the output projection
constexpr int Q_ROWS = ATTENTION / TEAM;          // of a block, as the following
constexpr int KV_ROWS = HEAD_DIM / TEAM;
constexpr int QKV_ROWS = Q_ROWS + 2 * KV_ROWS;
constexpr int OUT_ROWS = HIDDEN / TEAM;
constexpr int UP_ROWS = INTERMEDIATE / (TEAM * TEAMS);
constexpr int ACTIVATED = INTERMEDIATE / TEAMS;  // of a team
constexpr int VALUES = ATTENTION / SPLITS;       // attention outputs that a block combines
constexpr int CHUNK_ROWS = 8;                       // of the two GEMVs that read all columns
constexpr int TILE_KEYS = 16;                      // keys of a tile, which the blocks of a team take in turn

constexpr int SLOT_BYTES = 16384;
constexpr int ROW_BYTES = 2 * HIDDEN;
constexpr int O_CHUNK_ROWS = 32, DOWN_CHUNK_ROWS = 16;
static_assert(HIDDEN == 1024, "a row of the weights is four units of 16 bytes per lane");
static_assert(HEADS % TEAMS == 0 && TEAMS % KV_HEADS == 0 && GROUP == 2 && TEAM == 16, "");
static_assert(TOKENS % EXCHANGERS == 0 && TEAM % TOKENS == 0 && VALUES <= HEAD_DIM, "a block combines one head");
static_assert(QKV_ROWS == 32 && UP_ROWS == 24 && OUT_ROWS == 64 && ACTIVATED == 384, "");

// --- shared memory ---------------------------------------------------------------------------------------------------

constexpr int AUX_BYTES = 2 * ROW_BYTES + 4 * HEAD_DIM;  // weights of the norms of a layer
constexpr int PAD = TOKENS > 1 ? 64 : 0;  // so that two tokens' columns are in different banks
constexpr int X_STRIDE = ROW_BYTES + PAD, ATTENTION_STRIDE = 2 * ATTENTION + PAD, ACTIVATED_STRIDE = 2 * ACTIVATED + PAD;
constexpr int SUMS_PAD = TOKENS > 1 ? 4 : 0;
constexpr int QKV_STRIDE = QKV_ROWS + SUMS_PAD, UP_STRIDE = 2 * UP_ROWS + SUMS_PAD;
constexpr int AT_AUX = SLOTS * SLOT_BYTES;
constexpr int AT_PARTIAL = AT_AUX + 2 * AUX_BYTES;  // of a block's attention: [warp][head][dim]
constexpr int AT_PARTIAL_LSE = AT_PARTIAL + CONSUMERS * GROUP * HEAD_DIM * 4;
constexpr int AT_X = AT_PARTIAL_LSE + CONSUMERS * GROUP * 8;     // [token] the residual stream
constexpr int AT_QKV = AT_X + TOKENS * X_STRIDE;                 // of the team's heads, rotated, of one sequence
constexpr int AT_ATTENTION = AT_QKV + 2 * (ATTENTION + 2 * HEAD_DIM);
constexpr int AT_ACTIVATED = AT_ATTENTION + TOKENS * ATTENTION_STRIDE;
constexpr int AT_SUMS = AT_ACTIVATED + TOKENS * ACTIVATED_STRIDE;  // [warp][token][row]: a warp has a part of the columns
constexpr int AT_PAIR_SUMS = AT_SUMS + CONSUMERS * TOKENS * UP_STRIDE * 4;
constexpr int AT_FACTORS = AT_PAIR_SUMS + (TOKENS > 1 ? 8 : 1) * 4 * OUT_ROWS;
constexpr int AT_KEY_ROWS = AT_FACTORS + (TOKENS > 1 ? 0 : 4 * HIDDEN);  // of the cache: the first of a tile of keys
constexpr int AT_BARRIERS = AT_KEY_ROWS + MAX_TILES * 4;
constexpr int NUM_BARRIERS = 2 * SLOTS + 9;
constexpr int SHARED_BYTES = AT_BARRIERS + 8 * NUM_BARRIERS;
static_assert(SHARED_BYTES <= 227 * 1024, "a block has 227 KiB of shared memory at most");
static_assert(AT_BARRIERS % 16 == 0 && AT_SUMS % 16 == 0 && AT_FACTORS % 128 == 0, "");
static_assert(AT_ATTENTION % 128 == 0 && AT_ACTIVATED % 128 == 0, "halves of 128 bytes are at ^ 64");

// After those of full and of empty slots. Pairs are used in turn.
enum Barrier {
    AUX_FULL = 2 * SLOTS,
    AUX_EMPTY = AUX_FULL + 2,
    X_READY = AUX_EMPTY + 2,
    QKV_READY = X_READY + 2,
    ATTENTION_READY,
    ACTIVATED_READY
};

// --- words in global memory ------------------------------------------------------------------------------------------

constexpr int SPLIT_WORDS = VALUES + 2;  // of an attention split: values, maximum and sum
constexpr int TEAM_QKV = (ATTENTION + 2 * HEAD_DIM) / 2;
constexpr int PARTIAL_WORDS = TEAM * TEAMS * TOKENS * OUT_ROWS;
constexpr int TO_QKV = 2 * PARTIAL_WORDS;                      // [team][token][two values]
constexpr int TO_SPLITS = TO_QKV + TEAMS * TOKENS * TEAM_QKV;  // [team][receiver][split][SPLIT_WORDS]
constexpr int TO_ATTENTION = TO_SPLITS + TEAMS * TEAM * SPLITS * SPLIT_WORDS;
constexpr int TO_X = TO_ATTENTION + TEAMS * TOKENS * ATTENTION / 2;  // [2][team][token][two values]
constexpr int TO_ACTIVATED = TO_X + TEAMS * TOKENS * HIDDEN;         // [team][token][two values]
static_assert(TO_ACTIVATED + TEAMS * TOKENS * ACTIVATED / 2 <= EXCHANGE_WORDS, "all words fit");

