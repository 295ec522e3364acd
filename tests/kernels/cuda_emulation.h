// Runs the blocks of a launch on the CPU: it takes the place of instructions.cu in the source of a kernel
// (cuda_emulation.py).
//
// Each thread is a fiber, and one loop switches between all of them. Blocks advance at random rates, and a copy to
// shared memory ends some rounds after its start. A store is visible to all threads immediately. So neither the order
// of memory accesses on a GPU nor the PTX instructions are tested.

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <utility>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int min(int first, int second) { return first < second ? first : second; }
inline int max(int first, int second) { return first > second ? first : second; }

#define __device__
#define __host__
#define __global__
#define __shared__
#define __align__(bytes)
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (current->thread)
#define blockIdx (current->block_index)

// --- threads, warps and blocks ---------------------------------------------------------------------------------------

constexpr size_t STACK_BYTES = 48 * 1024;
constexpr int COPY_ROUNDS = 8;  // from a copy's start to its end, at most
constexpr int MAX_ROUNDS = 2000;

// Threads that wait for each other.
struct Meeting {
    int arrived = 0, times = 0;
};

// Words that the threads of a warp exchange in one instruction. polls: some of them have not found what they need.
struct Warp {
    Meeting meeting;
    bool polls = false;
    u64 in[32][4];
    alignas(16) u64 out[32][2];
};

struct Barrier {
    int count, pending, bytes = 0, phase = 0;
    void advance() {
        if (pending == 0 && bytes == 0) phase ^= 1, pending = count;
    }
};

struct Copy {
    u32 to;
    const void* from;
    int bytes;
    u32 barrier;
    long end_round;
};

struct BlockState {
    std::vector<char> shared;
    std::map<u32, Barrier> barriers;
    std::vector<Copy> copies;
    Meeting all, named[16];
};

struct Index {
    int x;
};

struct Fiber {
    Index thread, block_index;
    Warp* warp;
    BlockState* block;
    char* stack;
    const int* watched = nullptr;  // it waits until this is not `seen`
    int seen;
    bool started = false, ended = false;
    jmp_buf registers;
};

static Fiber* current;
static long round_index;
static int launch_threads;
static jmp_buf scheduler;
static char failure[200];  // why the launch ended early
static std::function<void()> launched;

// Ends the launch.
[[noreturn]] inline void fail(const char* reason) {
    snprintf(failure, sizeof failure, "block %d, thread %d %s", current->block_index.x, current->thread.x, reason);
    _longjmp(scheduler, 1);
}

inline void yield() {
    if (!_setjmp(current->registers)) _longjmp(scheduler, 1);
}

inline void wait_while(const int& watched, int seen) {
    if (watched != seen) return;
    current->watched = &watched, current->seen = seen;
    yield();
    current->watched = nullptr;
}

static void run_fiber() {
    launched();
    current->ended = true;
    _longjmp(scheduler, 1);
}

static void resume(Fiber* fiber) {
    current = fiber;
    if (_setjmp(scheduler)) return;
    if (fiber->started) _longjmp(fiber->registers, 1);
    fiber->started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber->stack, context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&context, run_fiber, 0);
    setcontext(&context);
}

// Runs the threads of a warp until all of them wait for others, or poll. Returns how many have ended.
static int run_warp(Fiber* fibers) {
    int ended = 0;
    Warp& warp = *fibers->warp;
    warp.polls = false;
    for (bool resumed = true; resumed && !warp.polls && !failure[0];) {
        resumed = false;
        for (int i = 0; i < 32 && !failure[0]; ++i) {
            Fiber& fiber = fibers[i];
            if (fiber.ended || (fiber.watched && *fiber.watched == fiber.seen)) continue;
            resume(&fiber);
            resumed = true;
            ended += fiber.ended;
        }
    }
    return ended;
}

static void end_copies(BlockState& block) {
    for (size_t i = 0; i < block.copies.size();) {
        Copy copy = block.copies[i];
        if (copy.end_round > round_index) {
            ++i;
            continue;
        }
        memcpy(block.shared.data() + copy.to, copy.from, copy.bytes);
        Barrier& barrier = block.barriers.at(copy.barrier);
        barrier.bytes -= copy.bytes;
        barrier.advance();
        block.copies[i] = block.copies.back();
        block.copies.pop_back();
    }
}

template <class... P, size_t... I>
std::function<void()> with_arguments(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
    return [=] { kernel(*(P*)arguments[I]...); };
}

// Returns what went wrong, or nullptr. arguments: the address of each, as for cuLaunchKernel.
template <class... P>
const char* launch(void (*kernel)(P...), void** arguments, int blocks, int threads, int shared_bytes, u32 seed) {
    launched = with_arguments(kernel, arguments, std::index_sequence_for<P...>());
    launch_threads = threads;
    srand(seed);
    failure[0] = 0;
    size_t count = (size_t)blocks * threads;
    std::vector<BlockState> states(blocks);
    std::vector<Warp> warps(count / 32);
    std::vector<Fiber> fibers(count);
    char* stacks = (char*)mmap(nullptr, STACK_BYTES * count, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) return "there is no memory for stacks";
    for (BlockState& state : states) state.shared.resize(shared_bytes, '\xff');  // not numbers
    for (size_t i = 0; i < count; ++i) {
        Fiber& fiber = fibers[i];
        fiber.thread.x = i % threads, fiber.block_index.x = i / threads;
        fiber.warp = &warps[i / 32], fiber.block = &states[i / threads], fiber.stack = stacks + STACK_BYTES * i;
    }
    size_t ended = 0;
    for (round_index = 0; ended < count && !failure[0]; ++round_index) {
        if (round_index == MAX_ROUNDS) strcpy(failure, "threads wait for what none does");
        for (int i = 0; i < blocks && !failure[0]; ++i) {
            end_copies(states[i]);
            if (rand() % 4 == 0) continue;
            for (int j = 0; j < threads; j += 32) ended += run_warp(&fibers[(size_t)i * threads + j]);
        }
    }
    munmap(stacks, STACK_BYTES * count);
    return failure[0] ? failure : nullptr;
}

inline void meet(Meeting& meeting, int threads) {
    int times = meeting.times;
    if (++meeting.arrived == threads) meeting.arrived = 0, ++meeting.times;
    else wait_while(meeting.times, times);
}

inline void __syncthreads() { meet(current->block->all, launch_threads); }
template <int ID, int WARPS> void sync_named() { meet(current->block->named[ID], 32 * WARPS); }

// --- instructions of a warp ------------------------------------------------------------------------------------------

// The last thread that arrives computes what all threads of the warp get.
template <class Compute>
const u64* together(std::initializer_list<u64> in, Compute compute) {
    Warp& warp = *current->warp;
    int lane = current->thread.x % 32;
    std::copy(in.begin(), in.end(), warp.in[lane]);
    if (warp.meeting.arrived == 31) compute(warp);
    meet(warp.meeting, 32);
    return warp.out[lane];
}

inline void __syncwarp() { meet(current->warp->meeting, 32); }

template <class T>
T shuffle(T value, int source) {
    u64 word = 0;
    memcpy(&word, &value, sizeof value);
    word = *together({word, (u64)source}, [](Warp& warp) {
        for (int i = 0; i < 32; ++i) warp.out[i][0] = warp.in[warp.in[i][1]][0];
    });
    memcpy(&value, &word, sizeof value);
    return value;
}

inline int lane_index() { return current->thread.x % 32; }
template <class T> T __shfl_sync(u32, T value, int source) { return shuffle(value, source); }
template <class T> T __shfl_xor_sync(u32, T value, int mask) { return shuffle(value, lane_index() ^ mask); }
template <class T> T __shfl_up_sync(u32, T value, int distance) {
    return shuffle(value, lane_index() < distance ? lane_index() : lane_index() - distance);
}

inline u32 __ballot_sync(u32, bool vote) {
    return *together({vote}, [](Warp& warp) {
        u64 votes = 0;
        for (int i = 0; i < 32; ++i) votes |= warp.in[i][0] << i;
        for (int i = 0; i < 32; ++i) warp.out[i][0] = votes;
    });
}

inline bool __all_sync(u32 mask, bool vote) {
    bool all = __ballot_sync(mask, vote) == ~0u;
    if (!all) current->warp->polls = true, yield();
    return all;
}

// --- arithmetic ------------------------------------------------------------------------------------------------------

inline int __ffs(u32 bits) { return __builtin_ffs(bits); }
inline float __fdividef(float first, float second) { return first / second; }
inline float power_of_two(float value) { return exp2f(value); }
inline float inverse_root(float value) { return 1.0f / sqrtf(value); }

inline u32 __float_as_uint(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

inline float __uint_as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline float low(u32 pair) { return __uint_as_float(pair << 16); }
inline float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

inline u16 to_bf16(float value) {
    if (value != value) return 0x7fff;
    u32 bits = __float_as_uint(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float rounded(float value) { return __uint_as_float((u32)to_bf16(value) << 16); }
inline u32 pack(float first, float second) { return to_bf16(first) | (u32)to_bf16(second) << 16; }
inline u32 multiply_pairs(u32 first, u32 second) { return pack(low(first) * low(second), high(first) * high(second)); }
inline float exchange(float value, int distance) { return __shfl_xor_sync(~0u, value, distance); }

template <int FIRST> float max_lanes(float value) {
    for (int distance = FIRST; distance; distance /= 2) value = fmaxf(value, exchange(value, distance));
    return value;
}

template <int FIRST> float sum_lanes(float value) {
    for (int distance = FIRST; distance; distance /= 2) value += exchange(value, distance);
    return value;
}

// mma.m16n8k16: lane 4 * i + j has columns 2 * j, 2 * j + 1, and those 8 later, of rows i and i + 8.
inline void multiply(float* sums, uint4 left, uint2 right) {
    u64 words[] = {left.x | (u64)left.y << 32, left.z | (u64)left.w << 32, right.x | (u64)right.y << 32};
    together({words[0], words[1], words[2], (u64)sums}, [](Warp& warp) {
        float a[16][16], b[16][8], c[16][8] = {};
        for (int lane = 0; lane < 32; ++lane) {
            u32 words[6];
            memcpy(words, warp.in[lane], sizeof words);
            int row = lane / 4, column = lane % 4 * 2;
            for (int i = 0; i < 4; ++i) {
                float* to = &a[row + i % 2 * 8][column + i / 2 * 8];
                to[0] = low(words[i]), to[1] = high(words[i]);
            }
            for (int i = 0; i < 2; ++i)
                b[column + i * 8][row] = low(words[4 + i]), b[column + i * 8 + 1][row] = high(words[4 + i]);
        }
        for (int i = 0; i < 16; ++i)
            for (int k = 0; k < 16; ++k)
                for (int j = 0; j < 8; ++j) c[i][j] += a[i][k] * b[k][j];
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) ((float*)warp.in[lane][3])[i] += c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    });
}

// mma.m16n8k8 of tf32: lane 4 * i + j has columns j and j + 4 of rows i and i + 8, of which the last 13 bits are ignored.
inline void multiply_tf32(float* sums, uint4 left, uint2 right) {
    u64 words[] = {left.x | (u64)left.y << 32, left.z | (u64)left.w << 32, right.x | (u64)right.y << 32};
    together({words[0], words[1], words[2], (u64)sums}, [](Warp& warp) {
        float a[16][8], b[8][8], c[16][8] = {};
        for (int lane = 0; lane < 32; ++lane) {
            u32 words[6];
            memcpy(words, warp.in[lane], sizeof words);
            for (u32& word : words) word &= 0xffffe000u;
            for (int i = 0; i < 4; ++i) a[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = __uint_as_float(words[i]);
            for (int i = 0; i < 2; ++i) b[lane % 4 + i * 4][lane / 4] = __uint_as_float(words[4 + i]);
        }
        for (int i = 0; i < 16; ++i)
            for (int k = 0; k < 8; ++k)
                for (int j = 0; j < 8; ++j) c[i][j] += a[i][k] * b[k][j];
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) ((float*)warp.in[lane][3])[i] += c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    });
}

// --- memory ----------------------------------------------------------------------------------------------------------

struct Watch {
    void check() {}  // MAX_ROUNDS bounds all waits
};

inline Barrier& barrier_at(u32 at) {
    auto found = current->block->barriers.find(at);
    if (found == current->block->barriers.end()) fail("uses a barrier that is not initialized");
    return found->second;
}

inline void init_barrier(u32 at, int count) { current->block->barriers[at] = {count, count}; }

inline void expect(u32 at, int bytes) {
    Barrier& barrier = barrier_at(at);
    barrier.bytes += bytes;
    if (--barrier.pending < 0) fail("arrives at a barrier too often");
    barrier.advance();
}

inline void arrive(u32 at) { expect(at, 0); }

inline void wait(u32 at, u32 parity) { wait_while(barrier_at(at).phase, parity); }

inline void copy_once(u32 to, const void* from, int bytes, u32 barrier) {
    if (to % 16 || (u64)from % 16 || bytes % 16) fail("copies from or to an address that is not aligned");
    if (to + bytes > current->block->shared.size()) fail("copies past shared memory");
    current->block->copies.push_back({to, from, bytes, barrier, round_index + rand() % COPY_ROUNDS});
}

template <class T>
T load(const void* from) {
    if ((u64)from % sizeof(T)) fail("loads from an address that is not aligned");
    T value;
    memcpy(&value, from, sizeof value);
    return value;
}

template <class T>
void store(void* to, T value) {
    if ((u64)to % sizeof(T)) fail("stores to an address that is not aligned");
    memcpy(to, &value, sizeof value);
}

inline char* shared_at(u32 at) {
    if (at >= current->block->shared.size()) fail("accesses what is past shared memory");
    return current->block->shared.data() + at;
}

#define __cvta_generic_to_shared(memory) 0
inline uint4 load4(u32 at) { return load<uint4>(shared_at(at)); }
inline u32 load_word(u32 at) { return load<u32>(shared_at(at)); }
inline float load_float(u32 at) { return load<float>(shared_at(at)); }
inline float2 load_float2(u32 at) { return load<float2>(shared_at(at)); }
inline void store_float(u32 at, float value) { store(shared_at(at), value); }
inline void store_float4(u32 at, float x, float y, float z, float w) { store(shared_at(at), float4{x, y, z, w}); }
inline void store_words(u32 at, u32 first, u32 second) { store(shared_at(at), uint2{first, second}); }
inline uint4 load_piece(const char* from) { return load<uint4>(from); }
inline uint2 load_half_piece(const char* from) { return load<uint2>(from); }
inline uint4 load_global(const void* from) { return load<uint4>(from); }
inline uint2 load_half_global(const void* from) { return load<uint2>(from); }
inline u32 load_relaxed(const u32* from) { return *from; }
inline void load_addresses(const u64* from, u64& first, u64& second) { first = from[0], second = from[1]; }

inline void store_piece(char* to, u64 first, u64 second) {
    alignas(16) u64 words[] = {first, second};
    store(to, load<uint4>(words));
}

// ldmatrix.x4.trans: lane 8 * i + j has the address of row j of matrix i.
inline uint4 load_values(u32 at) {
    const u64* out = together({(u64)shared_at(at)}, [](Warp& warp) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                const u16 *first = (const u16*)warp.in[8 * i + lane % 4 * 2][0],
                          *second = (const u16*)warp.in[8 * i + lane % 4 * 2 + 1][0];
                ((u32*)warp.out[lane])[i] = first[lane / 4] | (u32)second[lane / 4] << 16;
            }
    });
    return load<uint4>(out);
}

// What has no meaning here.
inline void fence() {}
inline void fence_reads() {}
inline void fence_barriers() {}
inline void launch_dependents() {}
inline void wait_for_previous() {}
inline void forget_value(int&) {}
template <int COUNT> void take_registers() {}
template <int COUNT> void release_registers() {}
