// Few tokens by the block-quantized weights of their experts. Follows ggml_tile.cu in one source.
//
// The experts of few tokens are a few megabytes, so the time goes to waiting for the first bytes and for the launches
// around them. The warps of a block divide the columns of its rows, so that all bytes of a row are on their way at once.
// A block finds the pairs of each expert itself, which saves the launch of an alignment. Tokens are read through the L1
// cache: an expert has one or two of them.
//
// Compiled with the macros of ggml_tile.cu, SHARED_TOKENS 0, and these: SUM (1: a token's weighted sum over its experts,
// in a kernel of its own), EARLY (1: weights are read before the kernel that computes the inputs has ended; that kernel
// must let this one start only after the experts were selected), LOGITS (per lane, of a single token whose experts these
// kernels select; 0: they are given). With PDL and EARLY 0, the next kernel starts only then.

constexpr int STAGE_BYTES = WARPS * WARP_BYTES;
constexpr int NORM_TOPK_PROB = 16, SHARED_EXPERT = 32;  // further flags of a launch

__device__ __forceinline__ void launch_dependents() {
#if PDL
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_inputs() {
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}


#if LOGITS
struct Experts {
  int ids[32];
  float weights[32];
};

__device__ __forceinline__ float logit_of(u32 key) {
  const u32 bits = key >> 16;
  return to_float(bits & 0x8000 ? bits & 0x7FFF : ~bits & 0xFFFF);
}

// Selects the experts of a token by one warp, as _select_experts_kernel of moe/routing.py does. If all warps read the
// logits, the L2 cache would be asked for the same line thousands of times, which takes 3 us. logits: of `experts` experts,
// then the gate of the shared one, which is the last of `slots`. A barrier follows the ids, which other warps wait for.
__device__ __forceinline__ void select_experts(Experts& chosen, const u16* logits, int experts, int slots, int flags,
                                               int warp, int lane) {
  const bool is_shared = flags & SHARED_EXPERT;
  u32 keys[LOGITS];  // by larger logit, then by lower id; all differ
  float weight = 0.0f, total = 0.0f, gate = 0.0f;
  if (warp == 0) {
#pragma unroll
    for (int i = 0; i < LOGITS; i++) keys[i] = __ldcg(logits + min(32 * i + lane, experts - 1));  // all at once
    if (SUM && is_shared) gate = to_float(__ldcg(logits + experts));
#pragma unroll
    for (int i = 0; i < LOGITS; i++) {
      const int expert = 32 * i + lane;
      const u32 bits = keys[i] == 0x8000 ? 0 : keys[i];  // minus zero equals zero
      keys[i] = expert < experts ? (bits & 0x8000 ? ~bits & 0xFFFF : bits | 0x8000) << 16 | (0xFFFF - expert) : 0;
    }
    int id = experts;
    float largest = 0.0f;
    for (int slot = 0; slot < slots - is_shared; slot++) {
      u32 best = 0;
#pragma unroll
      for (int i = 0; i < LOGITS; i++) best = max(best, keys[i]);
      best = __reduce_max_sync(~0u, best);
      if (SUM && slot == 0) {
        largest = logit_of(best);
        if (!(flags & NORM_TOPK_PROB))
#pragma unroll
          for (int i = 0; i < LOGITS; i++)
            if (keys[i]) total += __expf(logit_of(keys[i]) - largest);
      }
      if (lane == slot) id = 0xFFFF - (best & 0xFFFF), weight = __expf(logit_of(best) - largest);
#pragma unroll
      for (int i = 0; i < LOGITS; i++)
        if (keys[i] == best) keys[i] = 0;
    }
    chosen.ids[lane] = id;
  }
  __syncthreads();
  if (!SUM || warp > 0) return;
  if (flags & NORM_TOPK_PROB) total = weight;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) total += __shfl_xor_sync(~0u, total, distance);
  chosen.weights[lane] = is_shared && lane == slots - 1 ? 1.0f / (1.0f + __expf(-gate)) : weight / total;
}
#endif

#if !SUM

constexpr int MAX_PAIRS = THREADS, CAPACITY = TOKEN_TILES * 8;  // pairs of a launch and of a tile
constexpr int WARP_SUMS = TOKEN_TILES * 32;                     // of 4 numbers

// inputs: row pair / divisor has k columns. output: row `pair`, with `output_stride`; outputs: columns of it that are
// written. An expert has `outputs` rows, or as many gate rows above up rows. An item of work is a tile of an expert's
// pairs and ROW_WARPS x 16 of its rows; a block takes every gridDim.x-th. Sums have a fixed order: of chunks, of warps.
// routing: int ids of the pairs' experts, or with LOGITS the logits of `experts` experts of one token, which is staged.
// norm, eps: with NORMALIZED, of the RMS norm of that token, whose factor multiplies the sums.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    ggml_expert_gemv(const u16* inputs, const u8* values, const u8* scales, const u8* subscales, u16* output,
                    const void* routing, const u16* norm, float eps, int experts, int pairs, int outputs, int k,
                    int output_stride, int divisor, int flags) {
  extern __shared__ uint4 shared[];
  __shared__ float4 warp_sums[2][COLUMN_WARPS > 1 ? WARPS * WARP_SUMS : 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row_warp = warp % ROW_WARPS, column_warp = warp / ROW_WARPS;
  const bool gated = flags & GATED, normalized = LOGITS && flags & NORMALIZED;
  if (!EARLY) wait_for_inputs();
  launch_dependents();

#if LOGITS
  __shared__ float warp_squares[WARPS];
  __shared__ Experts chosen;
  select_experts(chosen, (const u16*)routing, experts, pairs, flags, warp, lane);
  const int tiles = pairs;  // of a pair each
  auto expert_of = [&](int tile) { return chosen.ids[tile]; };
  auto count_of = [](int) { return 1; };
  auto pair_of = [](int tile, int) { return tile; };
#else
  __shared__ int ids[MAX_PAIRS], warp_tiles[WARPS];
  __shared__ u16 tile_of[MAX_PAIRS], tile_expert[MAX_PAIRS];
  __shared__ u8 tile_valid[MAX_PAIRS], tile_pairs[MAX_PAIRS * CAPACITY];
  // Tiles of the pairs that have one expert, in the order of their first pairs. A thread has a pair.
  const int own = threadIdx.x, expert = own < pairs ? __ldcg((const int*)routing + own) : -1;
  ids[own] = expert;
  __syncthreads();
  int rank = 0, total = 0, first = own;  // among the expert's pairs; the first pair of its tile
  if (own < pairs)
    for (int other = 0; other < pairs; other++)
      if (ids[other] == expert) {
        if (other < own) {
          if (rank % CAPACITY == 0) first = other;
          rank++;
        }
        total++;
      }
  const bool leads = own < pairs && rank % CAPACITY == 0;
  const u32 ballot = __ballot_sync(~0u, leads);
  if (lane == 0) warp_tiles[warp] = __popc(ballot);
  __syncthreads();
  int place = __popc(ballot & ((1u << lane) - 1)), tiles = 0;
#pragma unroll
  for (int other = 0; other < WARPS; other++) {
    if (other < warp) place += warp_tiles[other];
    tiles += warp_tiles[other];
  }
  if (leads) tile_of[own] = place, tile_expert[place] = expert, tile_valid[place] = min(total - rank, CAPACITY);
  __syncthreads();
  if (own < pairs) tile_pairs[tile_of[leads ? own : first] * CAPACITY + rank % CAPACITY] = own;
  __syncthreads();
  auto expert_of = [&](int tile) { return tile_expert[tile]; };
  auto count_of = [&](int tile) { return tile_valid[tile]; };
  auto pair_of = [&](int tile, int slot) { return tile_pairs[tile * CAPACITY + slot]; };
#endif

  const int tile_outputs = gated ? 8 : 16, groups = (outputs + tile_outputs * ROW_WARPS - 1) / (tile_outputs * ROW_WARPS);
  const int items = tiles * groups, chunks = (k + CHUNK - 1) / CHUNK, steps = (chunks + COLUMN_WARPS - 1) / COLUMN_WARPS;
  const u32 expert_rows = gated ? 2 * outputs : outputs;
  u8* const ring = (u8*)shared;

  // The next step to copy, and its stage.
  int copy_item = blockIdx.x, copy_step = 0, copy_stage = 0;
  Source source;
  auto select_item = [&] {
    if (copy_item >= items) return;
    const u32 first_row = expert_of(copy_item / groups) * expert_rows;
    const int row_tile = copy_item % groups * ROW_WARPS + row_warp;
    source.select(
        [&](int i) -> u32 {
          return first_row + (gated ? i / 8 * outputs + min(row_tile * 8 + i % 8, outputs - 1)
                                    : min(row_tile * 16 + i, outputs - 1));
        },
        lane, k);
  };
  auto copy = [&] {
    const int chunk = copy_step * COLUMN_WARPS + column_warp;
    if (copy_item < items && chunk < chunks)
      source.copy(ring + copy_stage * STAGE_BYTES + warp * WARP_BYTES, lane, values, scales, subscales, chunk, k);
    asm volatile("cp.async.commit_group;" ::: "memory");
    copy_stage = copy_stage + 1 == DEPTH ? 0 : copy_stage + 1;
    if (++copy_step == steps) copy_step = 0, copy_item += gridDim.x, select_item();
  };

  select_item();
#pragma unroll
  for (int ahead = 0; ahead < DEPTH - 1; ahead++) copy();
  if (EARLY) wait_for_inputs();
  u16* const staged = (u16*)(ring + DEPTH * STAGE_BYTES);
  float squares = 0.0f;
  if (STAGED) squares = stage_tokens(staged, inputs, normalized ? norm : nullptr, pairs / divisor, warp, WARPS, k, lane);
#if LOGITS
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) squares += __shfl_xor_sync(~0u, squares, distance);
  if (lane == 0) warp_squares[warp] = squares;
#endif
  if (STAGED) __syncthreads();  // each warp has copied some columns for all
  Tokens tokens;
  int stage = 0, buffer = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int tile = item / groups, valid = count_of(tile);
    const u16* rows[TOKEN_TILES];
#pragma unroll
    for (int each = 0; each < TOKEN_TILES; each++) {
      // Past the last pair the columns of another one are multiplied: no output depends on them.
      const int row = pair_of(tile, min(8 * each + g, valid - 1)) / divisor;
      rows[each] = STAGED ? staged + row * staged_stride(k) : inputs + (i64)row * k;
    }
    Sums acc = {};
    for (int step = 0; step < steps; step++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 2) : "memory");
      __syncwarp();
      copy();
      const int chunk = step * COLUMN_WARPS + column_warp;
      const u8* base = ring + stage * STAGE_BYTES + warp * WARP_BYTES;
      stage = stage + 1 == DEPTH ? 0 : stage + 1;
      if (chunk >= chunks) continue;
#pragma unroll
      for (int each = 0; each < TOKEN_TILES; each++) {
        tokens.row[each] = rows[each] + chunk * CHUNK;
        if (FORMAT == FP8)
#pragma unroll
          for (int j = 0; j < 2; j++)
            tokens.scale[each][j] =
                staged_scale(staged, pair_of(tile, min(8 * each + 2 * t + j, valid - 1)) / divisor, chunk, k);
      }
      Raw<FORMAT> raw[2];
#pragma unroll
      for (int which = 0; which < 2; which++) raw[which].read(base, 8 * which + g, t, chunk);
      if (valid <= 8)
        multiply<FORMAT, 1>(acc, raw, tokens, k - chunk * CHUNK, t);
      else
        multiply<FORMAT, TOKEN_TILES>(acc, raw, tokens, k - chunk * CHUNK, t);
    }
    // Sums of the warps that share rows, in their order. Buffers alternate, so one barrier per item is enough.
    if (COLUMN_WARPS > 1) {
      float4* sums = warp_sums[buffer] + lane;
#pragma unroll
      for (int each = 0; each < TOKEN_TILES; each++)
        if (8 * each < valid)
          sums[warp * WARP_SUMS + each * 32] = make_float4(acc[each][0], acc[each][1], acc[each][2], acc[each][3]);
      __syncthreads();
      if (column_warp == 0)
        for (int other = row_warp + ROW_WARPS; other < WARPS; other += ROW_WARPS)
#pragma unroll
          for (int each = 0; each < TOKEN_TILES; each++)
            if (8 * each < valid) {
              const float4 sum = sums[other * WARP_SUMS + each * 32];
              acc[each][0] += sum.x, acc[each][1] += sum.y, acc[each][2] += sum.z, acc[each][3] += sum.w;
            }
      buffer ^= 1;
      if (column_warp > 0) continue;
    }
#if LOGITS
    if (normalized) {
      squares = 0.0f;
#pragma unroll
      for (int other = 0; other < WARPS; other++) squares += warp_squares[other];
      const float factor = rsqrtf(squares / k + eps);
#pragma unroll
      for (int i = 0; i < 4; i++) acc[0][i] *= factor;
    }
#endif
    store_pairs(acc, output, [&](int slot) { return pair_of(tile, slot); }, valid,
                item % groups * ROW_WARPS + row_warp, outputs, output_stride, gated, g, t);
  }
}

#else

// activated: [top_k, k], of one token. output: `outputs` columns; with RESIDUAL it holds the residual, to which the sum
// is added. An item of work is 16 rows of all the token's experts. A warp takes every COLUMN_WARPS-th chunk, of which there
// are at least as many, of one expert after the other. Sums have a fixed order: of chunks, of a warp's experts, of warps.
// routing: int ids of the experts, or with LOGITS the logits of `experts` experts instead of `topk_weights`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    ggml_expert_sum(const u16* activated, const u8* values, const u8* scales, const u8* subscales, u16* output,
                    const void* routing, const float* topk_weights, int experts, int top_k, int outputs, int k,
                    int flags) {
  extern __shared__ uint4 shared[];
  __shared__ float warp_sums[2][WARPS][16];
  constexpr int SLOTS = WARPS / COLUMN_WARPS;  // experts at a time
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int expert_warp = warp % SLOTS, column_warp = warp / SLOTS;
  const int groups = (outputs + 15) / 16, chunks = (k + CHUNK - 1) / CHUNK, rounds = (top_k + SLOTS - 1) / SLOTS;
  u8* const ring = (u8*)shared;

  if (!EARLY) wait_for_inputs();
#if LOGITS
  __shared__ Experts chosen;
  select_experts(chosen, (const u16*)routing, experts, top_k, flags, warp, lane);
  auto expert_of = [&](int slot) { return chosen.ids[slot]; };
  auto weight_of = [&](int slot) { return chosen.weights[slot]; };
#else
  auto expert_of = [&](int slot) { return __ldcg((const int*)routing + slot); };  // L1 may hold those of an earlier layer
  auto weight_of = [&](int slot) { return topk_weights[slot]; };
#endif
  // The next step to copy, and its stage.
  int copy_group = blockIdx.x, copy_round = 0, copy_chunk = column_warp, copy_stage = 0;
  bool copies = false;
  Source source;
  auto select_rows = [&] {
    const int slot = copy_round * SLOTS + expert_warp;
    copies = copy_group < groups && slot < top_k;
    if (!copies) return;
    const u32 first_row = (u32)expert_of(slot) * outputs;
    source.select([&](int i) -> u32 { return first_row + min(copy_group * 16 + i, outputs - 1); }, lane, k);
  };
  auto copy = [&] {
    if (copies)
      source.copy(ring + copy_stage * STAGE_BYTES + warp * WARP_BYTES, lane, values, scales, subscales, copy_chunk, k);
    asm volatile("cp.async.commit_group;" ::: "memory");
    copy_stage = copy_stage + 1 == DEPTH ? 0 : copy_stage + 1;
    copy_chunk += COLUMN_WARPS;
    if (copy_chunk < chunks) return;
    copy_chunk = column_warp;
    if (++copy_round == rounds) copy_round = 0, copy_group += gridDim.x;
    select_rows();
  };

  select_rows();
#pragma unroll
  for (int ahead = 0; ahead < DEPTH - 1; ahead++) copy();
  if (EARLY) wait_for_inputs();
  launch_dependents();  // not before: the blocks of the next kernel have no registers beside these
  if (LOGITS) __syncthreads();  // the first warp has written the weights
  Tokens tokens;
  int stage = 0, buffer = 0;
  u16* const staged = (u16*)(ring + DEPTH * STAGE_BYTES) + expert_warp * staged_stride(k);
  for (int group = blockIdx.x; group < groups; group += gridDim.x) {
    float first = 0.0f, second = 0.0f;  // of rows g and g + 8
    for (int round = 0; round < rounds; round++) {
      const int slot = round * SLOTS + expert_warp;
      if (slot < top_k && (rounds > 1 || group == blockIdx.x)) {
        __syncwarp();  // the warp has read the columns of another expert
        stage_tokens(staged, activated + slot * k, nullptr, 1, column_warp, COLUMN_WARPS, k, lane);
      }
      Sums acc = {};
      for (int chunk = column_warp; chunk < chunks; chunk += COLUMN_WARPS) {
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 2) : "memory");
        __syncwarp();
        copy();
        const u8* base = ring + stage * STAGE_BYTES + warp * WARP_BYTES;
        stage = stage + 1 == DEPTH ? 0 : stage + 1;
        if (slot >= top_k) continue;
        tokens.row[0] = staged + chunk * CHUNK;
        if (FORMAT == FP8) tokens.scale[0][0] = tokens.scale[0][1] = staged_scale(staged, 0, chunk, k);
        Raw<FORMAT> raw[2];
#pragma unroll
        for (int which = 0; which < 2; which++) raw[which].read(base, 8 * which + g, t, chunk);
        multiply<FORMAT>(acc, raw, tokens, k - chunk * CHUNK, t);
      }
      if (slot < top_k) {
        const float weight = weight_of(slot);
        first += weight * acc[0][0], second += weight * acc[0][2];
      }
    }
    if (t == 0) warp_sums[buffer][warp][g] = first, warp_sums[buffer][warp][8 + g] = second;
    __syncthreads();
    const int column = group * 16 + threadIdx.x;
    if (threadIdx.x < 16 && column < outputs) {
      float sum = 0.0f;
#pragma unroll
      for (int other = 0; other < WARPS; other++) sum += warp_sums[buffer][other][threadIdx.x];
      output[column] = from_float(flags & RESIDUAL ? sum + to_float(output[column]) : sum);
    }
    buffer ^= 1;  // one barrier per item is enough
  }
}

#endif
