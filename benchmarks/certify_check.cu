// The same figures as `meltcore certify`, by another road: CUDA runtime, cuBLAS and NCCL from C++, no line shared with it.
// One JSON object a line: {"key": ..., "gpus": [...], "value": ...}, in the units of the certificate.
//
// nvcc -O2 -arch=native certify_check.cu -lcublas -lcurand [-DWITH_NCCL -I.../include -L.../lib -lnccl]

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <curand.h>

#include <algorithm>
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

constexpr int kRepeats = 9;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Median seconds of one launch on `device`, over groups long enough for the events' resolution.
double SecondsOf(int device, double warm_s, const std::function<void()>& launch) {
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
  int count = std::max(1, int(0.1 / one_s));
  std::vector<double> found;
  for (int i = 0; i < kRepeats; ++i) found.push_back(group_s(count) / count);
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
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
  const size_t workspace_bytes = 32 << 20;  // what cuBLAS asks for on Hopper
  CHECK(cudaMalloc(&workspace, workspace_bytes));
  CHECK(cublasSetWorkspace(handle, workspace, workspace_bytes));
  const float one = 1, zero = 0;
  double s = SecondsOf(device, 1.0, [&] {
    CHECK(cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, a, CUDA_R_16BF, n, b, CUDA_R_16BF, n, &zero, c,
                       CUDA_R_16BF, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  });
  Print("product/bf16/8192x8192x8192", {device}, 2.0 * n * n * n / s / 1e12);
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
  double s = SecondsOf(device, 0.3, [&] { CHECK(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice)); });
  Print("memory/copy", {device}, 2.0 * size / s / 1e9);
  CHECK(cudaFree(from));
  CHECK(cudaFree(to));
}

void Host(int device) {
  const size_t size = size_t(256) << 20;
  CHECK(cudaSetDevice(device));
  void *ours, *host;
  CHECK(cudaMalloc(&ours, size));
  CHECK(cudaHostAlloc(&host, size, cudaHostAllocDefault));
  double down = SecondsOf(device, 0.3, [&] { CHECK(cudaMemcpyAsync(ours, host, size, cudaMemcpyHostToDevice)); });
  Print("host/to-device", {device}, size / down / 1e9);
  double up = SecondsOf(device, 0.3, [&] { CHECK(cudaMemcpyAsync(host, ours, size, cudaMemcpyDeviceToHost)); });
  Print("host/to-host", {device}, size / up / 1e9);
  CHECK(cudaFree(ours));
  CHECK(cudaFreeHost(host));
}

void Peer(int first, int second) {
  const size_t size = size_t(256) << 20;
  void *from, *to;
  CHECK(cudaSetDevice(second));
  CHECK(cudaMalloc(&to, size));
  CHECK(cudaSetDevice(first));
  CHECK(cudaMalloc(&from, size));
  int direct = 0;
  CHECK(cudaDeviceCanAccessPeer(&direct, first, second));
  if (direct) {
    cudaError_t enabled = cudaDeviceEnablePeerAccess(second, 0);
    if (enabled == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
  }
  double s = SecondsOf(first, 0.05, [&] { CHECK(cudaMemcpyPeerAsync(to, second, from, first, size)); });
  Print("peers/one-way", {first, second}, size / s / 1e9);
  CHECK(cudaFree(from));
  CHECK(cudaSetDevice(second));
  CHECK(cudaFree(to));
}

#ifdef WITH_NCCL
void AllReduce(int gpus, size_t size, const char* name) {
  std::vector<int> devices(gpus);
  for (int i = 0; i < gpus; ++i) devices[i] = i;
  std::vector<ncclComm_t> comms(gpus);
  std::vector<cudaStream_t> streams(gpus);
  std::vector<void*> buffers(gpus);
  CHECK(ncclCommInitAll(comms.data(), gpus, devices.data()));
  for (int i = 0; i < gpus; ++i) {
    CHECK(cudaSetDevice(i));
    // A blocking stream: events on the default stream, where the clock is read, wait for it.
    CHECK(cudaStreamCreate(&streams[i]));
    CHECK(cudaMalloc(&buffers[i], size));
    CHECK(cudaMemset(buffers[i], 0, size));
    CHECK(cudaDeviceSynchronize());
  }
  double s = SecondsOf(0, 0.3, [&] {
    CHECK(ncclGroupStart());
    for (int i = 0; i < gpus; ++i)
      CHECK(ncclAllReduce(buffers[i], buffers[i], size / sizeof(float), ncclFloat, ncclSum, comms[i], streams[i]));
    CHECK(ncclGroupEnd());
  });
  char key[64];
  snprintf(key, sizeof(key), "collectives/all_reduce/%d/%s", gpus, name);
  Print(key, devices, 2.0 * (gpus - 1) / gpus * size / s / 1e9);
  for (int i = 0; i < gpus; ++i) {
    CHECK(cudaSetDevice(i));
    CHECK(cudaFree(buffers[i]));
    CHECK(cudaStreamDestroy(streams[i]));
    CHECK(ncclCommDestroy(comms[i]));
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
#ifdef WITH_NCCL
  if (count > 1) {
    if (peers) AllReduce(count, size_t(256) << 20, "256MiB");
    AllReduce(count, size_t(1) << 30, "1GiB");
  }
#endif
  return 0;
}
