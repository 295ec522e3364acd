// Measures the metrics of `meltcore certify` with the CUDA runtime, cuBLAS and NCCL from C++; shares no code with it.
// Prints one JSON object per line: {"key": ..., "gpus": [...], "value": ...}, in the units of the certificate.
//
// nvcc -O2 -arch=native certify_check.cu -lcublas -lcurand [-DWITH_NCCL -I.../include -L.../lib -lnccl]

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <curand.h>

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#ifdef WITH_NCCL
#include <nccl.h>
#endif

#define CHECK(call)                                                                        \
  do {                                                                                     \
    auto status = (call);                                                                  \
    if (status != 0) {                                                                     \
      fprintf(stderr, "%s:%d: %s gave %d\n", __FILE__, __LINE__, #call, (int)status);      \
      exit(1);                                                                             \
    }                                                                                      \
  } while (0)

namespace {

constexpr int kRepeats = 7;
constexpr double kGroupS = 0.1;
constexpr double kPairGroupS = 0.03;  // eight GPUs have 84 pairs to measure

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Returns the median seconds of one launch on `device`, over groups of `long_s`.
double SecondsOf(int device, double warm_s, double long_s, const std::function<void()>& launch) {
  CHECK(cudaSetDevice(device));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  auto group_s = [&](int count) {
    CHECK(cudaSetDevice(device));
    CHECK(cudaEventRecord(begin));
    for (int i = 0; i < count; ++i) launch();
    CHECK(cudaSetDevice(device));
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    return ms / 1e3;
  };
  group_s(3);
  double one_s = std::max(1e-6, group_s(3) / 3);
  group_s(std::max(1, int(warm_s / one_s)));
  int count = std::max(1, int(long_s / one_s));
  std::vector<double> found;
  for (int i = 0; i < kRepeats; ++i) found.push_back(group_s(count) / count);
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  return Median(found);
}

// The same with the host's clock, for work on two devices: `launch` enqueues once, `wait` waits for all of it.
double HostSecondsOf(double long_s, const std::function<void()>& launch, const std::function<void()>& wait) {
  auto group_s = [&](int count) {
    auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < count; ++i) launch();
    wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  group_s(3);
  int count = std::max(1, int(long_s / (group_s(10) / 10)));
  std::vector<double> found;
  for (int i = 0; i < kRepeats; ++i) found.push_back(group_s(count) / count);
  return Median(found);
}

void Print(const char* key, const std::vector<int>& gpus, double value) {
  printf("{\"key\": \"%s\", \"gpus\": [", key);
  for (size_t i = 0; i < gpus.size(); ++i) printf("%s%d", i ? ", " : "", gpus[i]);
  printf("], \"value\": %.6g}\n", value);
  fflush(stdout);
}

__global__ void ToBf16(const float* from, __nv_bfloat16* to, size_t count) {
  size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  if (i < count) to[i] = __float2bfloat16(from[i]);
}

__nv_bfloat16* RandomNormal(size_t count, unsigned long long seed) {
  float* wide;
  __nv_bfloat16* narrow;
  CHECK(cudaMalloc(&wide, count * sizeof(float)));
  CHECK(cudaMalloc(&narrow, count * sizeof(__nv_bfloat16)));
  curandGenerator_t generator;
  CHECK(curandCreateGenerator(&generator, CURAND_RNG_PSEUDO_PHILOX4_32_10));
  CHECK(curandSetPseudoRandomGeneratorSeed(generator, seed));
  CHECK(curandGenerateNormal(generator, wide, count, 0.0f, 1.0f));
  ToBf16<<<(count + 255) / 256, 256>>>(wide, narrow, count);
  CHECK(cudaDeviceSynchronize());
  CHECK(curandDestroyGenerator(generator));
  CHECK(cudaFree(wide));
  return narrow;
}

void Product(int device) {
  const int n = 8192;
  CHECK(cudaSetDevice(device));
  auto* a = RandomNormal(size_t(n) * n, 1);
  auto* b = RandomNormal(size_t(n) * n, 2);
  __nv_bfloat16* c;
  CHECK(cudaMalloc(&c, size_t(n) * n * sizeof(*c)));
  cublasHandle_t handle;
  CHECK(cublasCreate(&handle));
  void* workspace;
  const size_t workspace_bytes = 32 << 20;  // recommended by cuBLAS for Hopper
  CHECK(cudaMalloc(&workspace, workspace_bytes));
  CHECK(cublasSetWorkspace(handle, workspace, workspace_bytes));
  const float one = 1, zero = 0;
  double s = SecondsOf(device, 1.0, kGroupS, [&] {
    CHECK(cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, a, CUDA_R_16BF, n, b, CUDA_R_16BF, n, &zero, c,
                       CUDA_R_16BF, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  });
  Print("gemm/bf16/8192x8192x8192", {device}, 2.0 * n * n * n / s / 1e12);
  CHECK(cublasDestroy(handle));
  for (void* memory : {(void*)a, (void*)b, (void*)c, workspace}) CHECK(cudaFree(memory));
}

void Memory(int device) {
  const size_t size = size_t(2) << 30;
  CHECK(cudaSetDevice(device));
  void *from, *to;
  CHECK(cudaMalloc(&from, size));
  CHECK(cudaMalloc(&to, size));
  CHECK(cudaMemset(from, 1, size));
  double s = SecondsOf(device, 0.3, kGroupS, [&] { CHECK(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice)); });
  Print("memory/copy", {device}, 2.0 * size / s / 1e9);
  CHECK(cudaFree(from));
  CHECK(cudaFree(to));
}

// Moves this thread to the CPUs of the GPU's socket, so that host buffers are allocated in its memory.
void StayNear(int device) {
  char bus_id[32], path[96], list[4096] = "";
  CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device));
  for (char* at = bus_id; *at; ++at) *at = char(tolower(*at));
  snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/local_cpulist", bus_id);
  FILE* file = fopen(path, "r");
  if (file == nullptr) return;
  const bool told = fgets(list, sizeof(list), file) != nullptr;
  fclose(file);
  cpu_set_t near;
  CPU_ZERO(&near);
  for (char* at = list; told && *at >= '0' && *at <= '9';) {
    long first = strtol(at, &at, 10), last = first;
    if (*at == '-') last = strtol(at + 1, &at, 10);
    for (long cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &near);
    if (*at == ',') ++at;
  }
  sched_setaffinity(0, sizeof(near), &near);  // fails where the job may use none of them; the thread then stays where it is
}

void Host(int device) {
  const size_t size = size_t(256) << 20;
  StayNear(device);
  CHECK(cudaSetDevice(device));
  void *ours, *host;
  CHECK(cudaMalloc(&ours, size));
  CHECK(cudaHostAlloc(&host, size, cudaHostAllocDefault));
  double down = SecondsOf(device, 0.3, kGroupS, [&] { CHECK(cudaMemcpyAsync(ours, host, size, cudaMemcpyHostToDevice)); });
  Print("host/host-to-device", {device}, size / down / 1e9);
  double up = SecondsOf(device, 0.3, kGroupS, [&] { CHECK(cudaMemcpyAsync(host, ours, size, cudaMemcpyDeviceToHost)); });
  Print("host/device-to-host", {device}, size / up / 1e9);
  CHECK(cudaFree(ours));
  CHECK(cudaFreeHost(host));
}

void* BufferOn(int device, size_t size) {
  void* memory;
  CHECK(cudaSetDevice(device));
  CHECK(cudaMalloc(&memory, size));
  return memory;
}

void Reach(int from, int to) {
  int direct = 0;
  CHECK(cudaDeviceCanAccessPeer(&direct, from, to));
  if (!direct) return;
  CHECK(cudaSetDevice(from));
  if (cudaDeviceEnablePeerAccess(to, 0) == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
}

void Peer(int first, int second) {
  const size_t size = size_t(256) << 20;
  void *from = BufferOn(first, size), *to = BufferOn(second, size);
  Reach(first, second);
  double s = SecondsOf(first, 0.05, kPairGroupS, [&] { CHECK(cudaMemcpyPeerAsync(to, second, from, first, size)); });
  Print("peers/unidirectional", {first, second}, size / s / 1e9);
  CHECK(cudaFree(from));
  CHECK(cudaFree(to));
}

void PeerBothWays(int first, int second) {
  const size_t size = size_t(256) << 20;
  void *ours[2] = {BufferOn(first, size), BufferOn(first, size)};
  void *theirs[2] = {BufferOn(second, size), BufferOn(second, size)};
  Reach(first, second);
  Reach(second, first);
  cudaStream_t there, back;
  CHECK(cudaSetDevice(first));
  CHECK(cudaStreamCreateWithFlags(&there, cudaStreamNonBlocking));
  CHECK(cudaSetDevice(second));
  CHECK(cudaStreamCreateWithFlags(&back, cudaStreamNonBlocking));
  double s = HostSecondsOf(
      kPairGroupS,
      [&] {
        CHECK(cudaMemcpyPeerAsync(theirs[0], second, ours[0], first, size, there));
        CHECK(cudaMemcpyPeerAsync(ours[1], first, theirs[1], second, size, back));
      },
      [&] {
        CHECK(cudaStreamSynchronize(there));
        CHECK(cudaStreamSynchronize(back));
      });
  Print("peers/bidirectional", {first, second}, 2 * size / s / 1e9);
  CHECK(cudaStreamDestroy(there));
  CHECK(cudaStreamDestroy(back));
  for (void* memory : {ours[0], ours[1], theirs[0], theirs[1]}) CHECK(cudaFree(memory));
}

#ifdef WITH_NCCL
// One communicator per GPU, all in this thread, each with a stream and a buffer.
struct Ring {
  std::vector<int> devices;
  std::vector<ncclComm_t> comms;
  std::vector<cudaStream_t> streams;
  std::vector<void*> buffers;
  std::vector<void*> shards;  // a GPU's shard in all-gather and reduce-scatter

  Ring(int gpus, size_t most) : devices(gpus), comms(gpus), streams(gpus), buffers(gpus), shards(gpus) {
    for (int i = 0; i < gpus; ++i) devices[i] = i;
    CHECK(ncclCommInitAll(comms.data(), gpus, devices.data()));
    for (int i = 0; i < gpus; ++i) {
      buffers[i] = BufferOn(i, most);
      shards[i] = BufferOn(i, most / gpus);
      // A blocking stream: the timing events on the default stream wait for it.
      CHECK(cudaStreamCreate(&streams[i]));
      CHECK(cudaMemset(buffers[i], 0, most));
      CHECK(cudaMemset(shards[i], 0, most / gpus));
      CHECK(cudaDeviceSynchronize());
    }
  }

  ~Ring() {
    for (size_t i = 0; i < devices.size(); ++i) {
      CHECK(cudaSetDevice(devices[i]));
      CHECK(cudaFree(buffers[i]));
      CHECK(cudaFree(shards[i]));
      CHECK(ncclCommDestroy(comms[i]));
      CHECK(cudaStreamDestroy(streams[i]));
    }
  }

  void Reduce(size_t size) {
    CHECK(ncclGroupStart());
    for (size_t i = 0; i < devices.size(); ++i)
      CHECK(ncclAllReduce(buffers[i], buffers[i], size / sizeof(float), ncclFloat, ncclSum, comms[i], streams[i]));
    CHECK(ncclGroupEnd());
  }

  void Gather(size_t size) {
    const size_t part = size / devices.size() / sizeof(float);
    CHECK(ncclGroupStart());
    for (size_t i = 0; i < devices.size(); ++i)
      CHECK(ncclAllGather(shards[i], buffers[i], part, ncclFloat, comms[i], streams[i]));
    CHECK(ncclGroupEnd());
  }

  void Scatter(size_t size) {
    const size_t part = size / devices.size() / sizeof(float);
    CHECK(ncclGroupStart());
    for (size_t i = 0; i < devices.size(); ++i)
      CHECK(ncclReduceScatter(buffers[i], shards[i], part, ncclFloat, ncclSum, comms[i], streams[i]));
    CHECK(ncclGroupEnd());
  }
};

// Bus bandwidth: every byte of `size` crosses a link `passes` times, except the shard that a GPU already has.
void PrintRing(const Ring& ring, const char* operation, int passes, size_t size, const char* name, double s) {
  const int gpus = int(ring.devices.size());
  char key[64];
  snprintf(key, sizeof(key), "collectives/%s/%d/%s", operation, gpus, name);
  Print(key, ring.devices, double(passes) * (gpus - 1) / gpus * size / s / 1e9);
}

void AllReduce(Ring& ring, size_t size, const char* name) {
  PrintRing(ring, "all_reduce", 2, size, name, SecondsOf(0, 0.3, kGroupS, [&] { ring.Reduce(size); }));
}

void GatherAndScatter(Ring& ring, size_t size, const char* name) {
  PrintRing(ring, "all_gather", 1, size, name, SecondsOf(0, 0.3, kGroupS, [&] { ring.Gather(size); }));
  PrintRing(ring, "reduce_scatter", 1, size, name, SecondsOf(0, 0.3, kGroupS, [&] { ring.Scatter(size); }));
}

// Many collectives in one graph per GPU: launching eight takes one thread longer than a small all-reduce.
void AllReduceInGraphs(Ring& ring, size_t size, const char* name) {
  const int many = 50;
  const size_t gpus = ring.devices.size();
  ring.Reduce(size);  // connects, which must not happen during a capture
  for (size_t i = 0; i < gpus; ++i) {
    CHECK(cudaSetDevice(ring.devices[i]));
    CHECK(cudaDeviceSynchronize());
  }
  for (auto stream : ring.streams) CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < many; ++i) ring.Reduce(size);
  std::vector<cudaGraph_t> graphs(gpus);
  std::vector<cudaGraphExec_t> ready(gpus);
  // Graphs are instantiated after the last capture: a capturing thread may make few other calls.
  for (size_t i = 0; i < gpus; ++i) CHECK(cudaStreamEndCapture(ring.streams[i], &graphs[i]));
  for (size_t i = 0; i < gpus; ++i) {
    CHECK(cudaSetDevice(ring.devices[i]));
    CHECK(cudaGraphInstantiate(&ready[i], graphs[i], 0));
  }
  double s = SecondsOf(0, 0.3, kGroupS, [&] {
    for (size_t i = 0; i < gpus; ++i) {
      CHECK(cudaSetDevice(ring.devices[i]));
      CHECK(cudaGraphLaunch(ready[i], ring.streams[i]));
    }
  });
  PrintRing(ring, "all_reduce", 2, size, name, s / many);
  for (size_t i = 0; i < gpus; ++i) {
    CHECK(cudaSetDevice(ring.devices[i]));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaGraphExecDestroy(ready[i]));
    CHECK(cudaGraphDestroy(graphs[i]));
  }
}
#endif

}  // namespace

int main(int argc, char** argv) {
  const bool peers = argc > 1 && argv[1][0] == '1';
  int count = 0;
  CHECK(cudaGetDeviceCount(&count));
  for (int device = 0; device < count; ++device) {
    Product(device);
    Memory(device);
    Host(device);
  }
  for (int first = 0; peers && first < count; ++first)
    for (int second = 0; second < count; ++second)
      if (first != second) Peer(first, second);
  for (int first = 0; peers && first < count; ++first)
    for (int second = first + 1; second < count; ++second) PeerBothWays(first, second);
#ifdef WITH_NCCL
  if (count > 1) {
    Ring ring(count, size_t(1) << 30);
    AllReduce(ring, size_t(1) << 30, "1GiB");
    if (peers) {
      GatherAndScatter(ring, size_t(1) << 30, "1GiB");
      AllReduce(ring, size_t(256) << 20, "256MiB");
      AllReduce(ring, size_t(64) << 20, "64MiB");
      AllReduceInGraphs(ring, size_t(1) << 20, "1MiB");
    }
  }
#endif
  return 0;
}
