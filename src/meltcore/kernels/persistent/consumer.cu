// Computes all layers.
struct Consumer : Attention {
    __device__ __forceinline__ u32 norms(int index) const { return block.shared + AT_AUX + (index & 1) * AUX_BYTES; }

    __device__ __forceinline__ void qkv(int index) {
        uint4 weights[4][4];
        load_rows<4>(weights);
        wait(block.barrier(AUX_FULL + (index & 1)), index / 2 & 1);
        Norm norm = load_norm(norms(index));
        if (index) wait(block.barrier(X_READY), (index & 1) ^ 1);
        multiply_rows<4, QKV_STRIDE>(weights, norm);
        arrive_named<1, CONSUMERS + EXCHANGERS>();
    }

    __device__ __forceinline__ void output_projection(int index, u32 tag) {
        uint4 weights[2][4];
        pass(warp / 4);
        load_tile<2, 2 * ATTENTION>(begin() + warp / 2 % 2 * 16 * 2 * ATTENTION, weights);
        end();
        pass(1 - warp / 4);
        wait(block.barrier(ATTENTION_READY), index & 1);
        multiply_tile<2, ATTENTION_STRIDE>(weights, block.shared + AT_ATTENTION, tag);
    }

    __device__ __forceinline__ void gate_up(int index) {
        uint4 weights[6][4];
        load_rows<6>(weights);
        Norm norm = load_norm(norms(index) + ROW_BYTES);
        wait(block.barrier(X_READY + 1), index & 1);
        multiply_rows<6, UP_STRIDE>(weights, norm);
        arrive_named<3, CONSUMERS + EXCHANGERS>();
        __syncwarp();
        if (lane == 0) arrive(block.barrier(AUX_EMPTY + (index & 1)));
    }

    __device__ __forceinline__ void down(int index, u32 tag) {
        uint4 weights[3][4];
        pass(warp / 2);
        load_tile<3, 2 * ACTIVATED>(begin(), weights);
        end();
        pass(3 - warp / 2);
        wait(block.barrier(ACTIVATED_READY), index & 1);
        multiply_tile<3, ACTIVATED_STRIDE>(weights, block.shared + AT_ACTIVATED, tag);
    }

    __device__ __forceinline__ void run() {
        bool stores = block.position >= 0 && block.position / TILE_KEYS % SPLITS == block.split;
        if (stores) {
            i64 page = params.page_table[params.rows[block.sequence] * params.table_stride + block.position / PAGE_SIZE];
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
            if (block.runs(block.sequence)) attention((u16*)keys, (u16*)values, index);
            output_projection(index, tag);
            gate_up(index);
            down(index, tag + 1);
        }
    }
};

