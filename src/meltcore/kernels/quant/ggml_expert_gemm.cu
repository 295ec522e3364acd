// Grouped GEMM of (token, expert) pairs with block-quantized weights of experts. Follows ggml_tile.cu in one source.
//
// A block takes a tile of an expert's pairs and WARPS x 16 rows of its weight at a time; its warps have rows of their own
// and share the tokens, in shared memory. Weights are copied whole lines ahead, decoded on the way to the tensor cores.
//
// Compiled with the macros of ggml_tile.cu; COLUMN_WARPS is 1, SHARED_TOKENS is 1. A tile has 8 x TOKEN_TILES pairs.

constexpr int TOKEN_STRIDE = CHUNK + 16;  // 16-bit numbers: rows start 8 banks apart
constexpr int TILE_PAIRS = TOKEN_TILES * 8;
constexpr int STAGE_BYTES = WARPS * WARP_BYTES + TILE_PAIRS * TOKEN_STRIDE * 2;
constexpr int PIECES = CHUNK / 8;              // of 16 bytes, per token and step
constexpr int TOKEN_STEP = THREADS / PIECES;   // tokens that the block copies at a time
constexpr int TOKEN_COPIES = (TILE_PAIRS + TOKEN_STEP - 1) / TOKEN_STEP;
constexpr int MAX_TILES = 2048;

// pair_ids: [tiles * TILE_PAIRS], the pair of each row; expert_ids, num_valid: [tiles]. inputs: row pair / divisor has k
// columns. output: row `pair`, with `output_stride`; outputs: columns of it that are written. An expert has `outputs`
// rows, or as many gate rows above up rows. Blocks take every gridDim.x-th item of the tiles that have pairs.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    ggml_expert_gemm(const u16* inputs, const u8* values, const u8* scales, const u8* subscales, u16* output,
                    const int* pair_ids, const int* expert_ids, const int* num_valid, int tiles, int outputs, int k,
                    int output_stride, int divisor, int flags) {
  extern __shared__ uint4 shared[];
  __shared__ u16 used_tiles[MAX_TILES];
  __shared__ int warp_counts[WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool gated = flags & GATED;
  const int tile_outputs = gated ? 8 : 16, groups = (outputs + tile_outputs * WARPS - 1) / (tile_outputs * WARPS);
  const u32 expert_rows = gated ? 2 * outputs : outputs;
#if PDL
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  int used_count = 0;
  for (int first = 0; first < tiles; first += THREADS) {
    const int tile = first + threadIdx.x;
    const bool used = tile < tiles && num_valid[tile] > 0;
    const u32 ballot = __ballot_sync(~0u, used);
    if (lane == 0) warp_counts[warp] = __popc(ballot);
    __syncthreads();
    int place = used_count + __popc(ballot & ((1u << lane) - 1));
#pragma unroll
    for (int other = 0; other < WARPS; other++) {
      const int count = warp_counts[other];
      if (other < warp) place += count;
      used_count += count;
    }
    if (used) used_tiles[place] = tile;
    __syncthreads();
  }
  const int items = used_count * groups, steps = (k + CHUNK - 1) / CHUNK;
  u8* const ring = (u8*)shared;

  // The next step to copy, and its stage.
  int copy_item = blockIdx.x, copy_step = 0, copy_stage = 0;
  Source source;
  int token_rows[TOKEN_COPIES];  // of `inputs`, that this thread copies pieces of; -1: none
  auto select_item = [&] {
    if (copy_item >= items) return;
    const int tile = used_tiles[copy_item / groups], row_tile = copy_item % groups * WARPS + warp;
    const u32 first_row = expert_ids[tile] * expert_rows;
    const int valid = num_valid[tile];
#pragma unroll
    for (int i = 0; i < TOKEN_COPIES; i++) {
      const int slot = threadIdx.x / PIECES + i * TOKEN_STEP;
      token_rows[i] = slot < valid ? pair_ids[tile * TILE_PAIRS + slot] / divisor : -1;
    }
    source.select(
        [&](int i) -> u32 {
          return first_row + (gated ? i / 8 * outputs + min(row_tile * 8 + i % 8, outputs - 1)
                                    : min(row_tile * 16 + i, outputs - 1));
        },
        lane, k);
  };
  auto copy = [&] {
    if (copy_item < items) {
      u8* const to = ring + copy_stage * STAGE_BYTES;
      source.copy(to + warp * WARP_BYTES, lane, values, scales, subscales, copy_step, k);
      const int column = threadIdx.x % PIECES * 8, from = copy_step * CHUNK + column;
      u16* const tokens_to = (u16*)(to + WARPS * WARP_BYTES) + threadIdx.x / PIECES * TOKEN_STRIDE + column;
#pragma unroll
      for (int i = 0; i < TOKEN_COPIES; i++)
        if (token_rows[i] >= 0 && (!TAIL || from < k))
          copy_async<16>(tokens_to + i * TOKEN_STEP * TOKEN_STRIDE, inputs + (i64)token_rows[i] * k + from);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    copy_stage = copy_stage + 1 == DEPTH ? 0 : copy_stage + 1;
    if (++copy_step == steps) copy_step = 0, copy_item += gridDim.x, select_item();
  };

  select_item();
#pragma unroll
  for (int ahead = 0; ahead < DEPTH - 1; ahead++) copy();
  Tokens tokens;
  int stage = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int tile = used_tiles[item / groups], row_tile = item % groups * WARPS + warp, valid = num_valid[tile];
    Sums acc = {};
    for (int step = 0; step < steps; step++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 2) : "memory");
      __syncthreads();  // all copies of this step have arrived, and all have left the step before
      copy();
      const u8* base = ring + stage * STAGE_BYTES;
      stage = stage + 1 == DEPTH ? 0 : stage + 1;
#pragma unroll
      for (int each = 0; each < TOKEN_TILES; each++)
        // Past the last pair the columns of another one are multiplied: no output depends on them.
        tokens.row[each] = (const u16*)(base + WARPS * WARP_BYTES) + min(8 * each + g, valid - 1) * TOKEN_STRIDE;
      Raw<FORMAT> raw[2];
#pragma unroll
      for (int which = 0; which < 2; which++) raw[which].read(base + warp * WARP_BYTES, 8 * which + g, t, step);
      constexpr int HALF_TILES = (TOKEN_TILES + 1) / 2, MOST_TILES = TOKEN_TILES > 2 ? TOKEN_TILES - 1 : 1;
      if (valid <= 8 * HALF_TILES)
        multiply<FORMAT, HALF_TILES>(acc, raw, tokens, k - step * CHUNK, t);
      else if (TOKEN_TILES > 2 && valid <= 8 * MOST_TILES)
        multiply<FORMAT, MOST_TILES>(acc, raw, tokens, k - step * CHUNK, t);
      else
        multiply<FORMAT, TOKEN_TILES>(acc, raw, tokens, k - step * CHUNK, t);
    }
    store_pairs(acc, output, [&](int slot) { return pair_ids[tile * TILE_PAIRS + slot]; }, valid, row_tile, outputs,
                output_stride, gated, g, t);
  }
}
