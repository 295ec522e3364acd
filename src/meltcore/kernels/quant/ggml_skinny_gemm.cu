constexpr int TOKEN_STRIDE = COLUMN_WARPS * CHUNK + 16;  // 16-bit numbers: rows start 8 banks apart
constexpr int TOKEN_BYTES = SHARED_TOKENS ? TOKEN_TILES * 8 * TOKEN_STRIDE * 2 : 0;
constexpr int STAGE_BYTES = WARPS * WARP_BYTES + TOKEN_BYTES;
constexpr int WARP_SUMS = TOKEN_TILES * 32;  // of 4 numbers

// hidden: [tokens, k]; output: [tokens, ...] with `output_stride`, float32 with FLOAT_OUTPUT, else of the type of
// `hidden`; outputs: columns of it that are written. A gated
// weight has `outputs` gate rows and as many up rows below. norm, eps: with NORMALIZED, of the RMS norm of a single
// staged token, whose factor multiplies the sums. An item of work is ROW_WARPS x 16 rows of the weight and one
// of `splits` of the columns; a block takes every gridDim.x-th. partial: float32 for every item; counters: zeros before
// and after, one per ROW_WARPS x 16 rows. Sums have a fixed order: of chunks, of warps that share rows, of splits.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    ggml_skinny_gemm(const u16* hidden, const u8* values, const u8* scales, const u8* subscales, void* output,
                    float* partial, int* counters, const u16* norm, float eps, int token_count, int outputs, int k,
                    int output_stride, int all_splits, int flags) {
  const int splits = SPLITS ? all_splits : 1;  // two divisions by it take 77 instructions per item
  extern __shared__ uint4 shared[];
  __shared__ float4 warp_sums[2][COLUMN_WARPS > 1 ? WARPS * WARP_SUMS : 1];
  __shared__ float warp_squares[WARPS];
  __shared__ bool last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row_warp = warp % ROW_WARPS, column_warp = warp / ROW_WARPS;
  const bool gated = flags & GATED, normalized = STAGED && flags & NORMALIZED;
  const int tile_outputs = gated ? 8 : 16, items = (outputs + tile_outputs * ROW_WARPS - 1) / (tile_outputs * ROW_WARPS) * splits;
#if PDL
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  // Each step takes COLUMN_WARPS chunks.
  const int chunks = (k + CHUNK - 1) / CHUNK, all_steps = (chunks + COLUMN_WARPS - 1) / COLUMN_WARPS;
  u8* const ring = (u8*)shared;

  // The next step to copy, and its stage.
  int copy_item = blockIdx.x, copy_step = 0, copy_end = 0, copy_stage = 0;
  Source source;
  auto select_item = [&] {
    if (copy_item >= items) return;
    const int tile = copy_item / splits * ROW_WARPS + row_warp, split = copy_item % splits;
    copy_step = split * all_steps / splits, copy_end = (split + 1) * all_steps / splits;
    source.select(
        [&](int i) -> u32 {
          return gated ? i / 8 * outputs + min(tile * 8 + i % 8, outputs - 1) : min(tile * 16 + i, outputs - 1);
        },
        lane, k);
  };
  auto copy_weights = [&] {
    const int chunk = copy_step * COLUMN_WARPS + column_warp;
    if (copy_item < items && chunk < chunks)
      source.copy(ring + copy_stage * STAGE_BYTES + warp * WARP_BYTES, lane, values, scales, subscales, chunk, k);
  };
  auto copy_tokens = [&] {
    if (!SHARED_TOKENS || copy_item >= items) return;
    u16* to = (u16*)(ring + copy_stage * STAGE_BYTES + WARPS * WARP_BYTES);
    constexpr int PIECES = COLUMN_WARPS * CHUNK / 8;  // of 16 bytes, per token
    const int column = threadIdx.x % PIECES * 8, at = copy_step * COLUMN_WARPS * CHUNK + column;
    const int first = threadIdx.x / PIECES;
    if (TAIL && at >= k) return;
#pragma unroll
    for (int token = 0; token < TOKEN_TILES * 8; token += THREADS / PIECES)
      if (token + first < token_count)
        copy_async<16>(to + (token + first) * TOKEN_STRIDE + column, hidden + ((i64)(token + first) * k + at));
  };
  auto commit = [&] {
    asm volatile("cp.async.commit_group;" ::: "memory");
    copy_stage = copy_stage + 1 == DEPTH ? 0 : copy_stage + 1;
    if (++copy_step == copy_end) copy_item += gridDim.x, select_item();
  };

  select_item();
#pragma unroll
  for (int ahead = 0; ahead < DEPTH - 1; ahead++) {
    copy_weights();
    commit();
  }
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if (SHARED_TOKENS) {  // of the same steps
    copy_item = blockIdx.x, copy_stage = 0;
    select_item();
#pragma unroll
    for (int ahead = 0; ahead < DEPTH - 1; ahead++) {
      copy_tokens();
      commit();
    }
  }
  u16* const staged = (u16*)(ring + DEPTH * STAGE_BYTES);
  StagedTokens few((u8*)staged, token_count, chunks);
  if (STAGED) {
    const u16* const factors = normalized ? norm : nullptr;
    float squares = FEW_TOKENS ? few.stage(hidden, factors, token_count, column_warp, COLUMN_WARPS, k, lane)
                               : stage_tokens(staged, hidden, factors, token_count, column_warp, COLUMN_WARPS, k, lane);
    if (normalized) {
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) squares += __shfl_xor_sync(~0u, squares, distance);
      if (lane == 0) warp_squares[warp] = squares;  // is read behind the barrier of the first item
    }
  }
  Tokens tokens;
  const u16* token_rows[TOKEN_TILES];  // of global or staged tokens
  u32 token_places[TOKEN_TILES];       // in a stage
#pragma unroll
  for (int tile = 0; tile < TOKEN_TILES; tile++) {
    // Past the last token the columns of another one are multiplied: no output depends on them.
    const int token = min(8 * tile + g, token_count - 1);
    token_rows[tile] = STAGED ? staged + token * staged_stride(k) : hidden + (i64)token * k;
    token_places[tile] = WARPS * WARP_BYTES + (token * TOKEN_STRIDE + column_warp * CHUNK) * 2;
  }
  int stage = 0, buffer = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int group = item / splits, split = item % splits;
    Sums acc = {};
    for (int step = split * all_steps / splits; step < (split + 1) * all_steps / splits; step++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 2) : "memory");
      if (SHARED_TOKENS)
        __syncthreads();  // all copies of this step have arrived, and all have left the step before
      else
        __syncwarp();
      copy_weights();
      copy_tokens();
      commit();
      const int chunk = step * COLUMN_WARPS + column_warp;
      const u8* base = ring + stage * STAGE_BYTES;
      stage = stage + 1 == DEPTH ? 0 : stage + 1;
      if (chunk >= chunks) continue;
      if constexpr (FEW_TOKENS) {
        multiply_few(acc[0], base + warp * WARP_BYTES, few, token_count, chunk, k - chunk * CHUNK, g, t);
        continue;
      }
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; tile++) {
        tokens.row[tile] = SHARED_TOKENS ? (const u16*)(base + token_places[tile]) : token_rows[tile] + chunk * CHUNK;
        if (FORMAT == FP8)
#pragma unroll
          for (int j = 0; j < 2; j++)
            tokens.scale[tile][j] = staged_scale(staged, min(8 * tile + 2 * t + j, token_count - 1), chunk, k);
      }
      Raw<FORMAT> raw[2];
#pragma unroll
      for (int which = 0; which < 2; which++) raw[which].read(base + warp * WARP_BYTES, 8 * which + g, t, chunk);
      multiply<FORMAT>(acc, raw, tokens, k - chunk * CHUNK, t);
    }
    if constexpr (FEW_TOKENS) finish_few(acc[0], few, t);
    // Sums of the warps that share rows, in their order. Buffers alternate, so one barrier per item is enough.
    bool stores = column_warp == 0;
    if (COLUMN_WARPS > 1) {
      float4* sums = warp_sums[buffer] + lane;
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; tile++)
        sums[warp * WARP_SUMS + tile * 32] = make_float4(acc[tile][0], acc[tile][1], acc[tile][2], acc[tile][3]);
      __syncthreads();
      if (stores)
        for (int other = row_warp + ROW_WARPS; other < WARPS; other += ROW_WARPS)
#pragma unroll
          for (int tile = 0; tile < TOKEN_TILES; tile++) {
            const float4 sum = sums[other * WARP_SUMS + tile * 32];
            acc[tile][0] += sum.x, acc[tile][1] += sum.y, acc[tile][2] += sum.z, acc[tile][3] += sum.w;
          }
      buffer ^= 1;
    }
    // Sums of the splits, in their order, by the last block to finish.
    if (splits > 1) {
      constexpr int ITEM_SUMS = ROW_WARPS * WARP_SUMS;
      float4* parts = (float4*)partial + (i64)group * splits * ITEM_SUMS + row_warp * WARP_SUMS + lane;
      if (stores) {
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; tile++)
          __stcg(parts + split * ITEM_SUMS + tile * 32,
                 make_float4(acc[tile][0], acc[tile][1], acc[tile][2], acc[tile][3]));
        __threadfence();
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        last = atomicAdd(counters + group, 1) == splits - 1;
        if (last) counters[group] = 0;
        __threadfence();
      }
      __syncthreads();
      stores &= last;
      if (stores)
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; tile++) {
          acc[tile][0] = acc[tile][1] = acc[tile][2] = acc[tile][3] = 0.0f;
          for (int other = 0; other < splits; other++) {
            const float4 sum = __ldcg(parts + other * ITEM_SUMS + tile * 32);
            acc[tile][0] += sum.x, acc[tile][1] += sum.y, acc[tile][2] += sum.z, acc[tile][3] += sum.w;
          }
        }
    }
    if (!stores) continue;
    float factor = 1.0f;  // of the norm of a single token
    if (COLUMN_WARPS > 1 && normalized) {
      float squares = 0.0f;
#pragma unroll
      for (int other = 0; other < COLUMN_WARPS; other++) squares += warp_squares[row_warp + other * ROW_WARPS];
      factor = rsqrtf(squares / k + eps);
    }
    const int row_tile = group * ROW_WARPS + row_warp;
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; tile++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int token = 8 * tile + 2 * t + j;
        if (token >= token_count) continue;
        const i64 start = (i64)token * output_stride;
#pragma unroll
        for (int which = 0; which < 2; which++) {
          const int column = gated ? row_tile * 8 + g : row_tile * 16 + which * 8 + g;
          if (column >= outputs || (gated && which)) continue;
          float value = acc[tile][2 * which + j] * factor;
          if (gated) value = value / (1.0f + __expf(-value)) * (acc[tile][2 + j] * factor);
          if (flags & FLOAT_OUTPUT) {
            ((float*)output)[start + column] = value;
            continue;
          }
          u16* const out = (u16*)output + start + column;
          *out = from_float(flags & RESIDUAL ? value + to_float(*out) : value);
        }
      }
  }
}
