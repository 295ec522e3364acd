// --- the kernel -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_layers(
    const Layer* layers, const char* maps, const u16* input, u16* output, const i64* positions, const i64* rows,
    const i64* page_table, const float* rotary, u64* exchange, u32* epoch, int tokens, int table_stride, float eps,
    float head_eps, float scale_log2) {
    extern __shared__ __align__(1024) char memory[];
    Params params{layers,   maps,     input, output,       positions, rows,     page_table,
                  rotary,   exchange, epoch, table_stride, eps,       head_eps, scale_log2};
    Block block;
    block.shared = (u32)__cvta_generic_to_shared(memory);
    block.team = blockIdx.x / TEAM, block.rank = blockIdx.x % TEAM;
    block.sequence = block.rank / SPLITS, block.split = block.rank % SPLITS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Producer producer{block, params, Ring(), Ring(), 0};
    if (warp == PRODUCER && lane == 0) {
        for (int i = 0; i < SLOTS; ++i) {
            init_barrier(block.barrier(i), 1);
            init_barrier(block.barrier(SLOTS + i), CONSUMERS);
        }
        for (int i = 0; i < 2; ++i) init_barrier(block.barrier(AUX_FULL + i), 1);
        VOLATILE("fence.mbarrier_init.release.cluster;" ::: "memory");
        producer.norms(layers[0], 0);
        producer.qkv(layers[0]);
    }
    __syncwarp();
    block.set_runs(positions, tokens);
    if (warp == FIRST_EXCHANGER && lane == 0) {
        int exchangers = block.exchangers();
        for (int i = 0; i < 2; ++i) {
            init_barrier(block.barrier(AUX_EMPTY + i), CONSUMERS + exchangers);
            init_barrier(block.barrier(X_READY + i), exchangers);
        }
        init_barrier(block.barrier(QKV_READY), 1);
        init_barrier(block.barrier(ATTENTION_READY), exchangers);
        init_barrier(block.barrier(ACTIVATED_READY), exchangers);
    }
    u32 last_epoch;
    VOLATILE("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(last_epoch) : "l"(epoch) : "memory");
    block.first_tag = (last_epoch + 1) * (2 * LAYERS);
    int all_tiles = (block.position + TILE_KEYS) / TILE_KEYS;  // with that of the new token
    block.tiles = (all_tiles + SPLITS - 1 - (int)block.split) / SPLITS;
    for (int i = threadIdx.x; i < min(block.tiles, MAX_TILES); i += THREADS)
        VOLATILE("st.shared.u32 [%0], %1;" ::"r"(block.shared + AT_KEY_ROWS + 4 * i), "r"(producer.first_row(i))
                 : "memory");
    for (int i = threadIdx.x; i < tokens * (HIDDEN / 8); i += THREADS) {
        uint4 words = ((const uint4*)input)[i];
        VOLATILE("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(block.shared + AT_X + i / (HIDDEN / 8) * X_STRIDE + 16 * (i % (HIDDEN / 8))),
                 "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w) : "memory");
    }
    __syncthreads();
    if (warp == PRODUCER) {
        if (lane == 0) {
            producer.rest(layers[0], maps);
#pragma unroll 1
            for (int index = 1; index < LAYERS; ++index) {
                producer.norms(layers[index], index);
                producer.qkv(layers[index]);
                producer.rest(layers[index], maps + index * 512);
            }
        }
        __syncwarp();
    } else if (warp >= FIRST_EXCHANGER) {
        Exchanger{block, params, lane, warp - FIRST_EXCHANGER}.run(tokens);
    } else {
        Consumer{{{{block, params, warp, lane, Ring()}}}}.run();
    }
    // Block 0 ends after every block has read the epoch: it has received something from all of them.
    if (blockIdx.x == 0 && warp == FIRST_EXCHANGER && lane == 0) *epoch = last_epoch + 1;
}
