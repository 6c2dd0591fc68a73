// A CUDA runtime for one device that gives out addresses, counts bytes up to a limit, and finishes work when it is told.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>

static size_t limit_bytes, used;
static uint64_t next_address = 1ull << 44, next_handle = 1;
static std::unordered_map<uint64_t, size_t> segments, handles;
static std::unordered_map<void*, long> launched, finished;  // by stream
static cudaError_t last = cudaSuccess;
struct Event {
  void* stream = nullptr;
  long mark = -1;
};
static cudaError_t failed(cudaError_t error) { return last = error; }

extern "C" {
void runtime_limit(size_t bytes) { limit_bytes = bytes; }
void runtime_work(void* stream) { launched[stream]++; }
void runtime_finish(void* stream) { finished[stream] = launched[stream]; }

cudaError_t cudaMalloc(void** at, size_t bytes) {
  if (used + bytes > limit_bytes) return failed(cudaErrorMemoryAllocation);
  used += bytes;
  segments[next_address] = bytes;
  *at = (void*)next_address;
  next_address += (bytes + (1 << 21) - 1) >> 21 << 21;
  return cudaSuccess;
}
cudaError_t cudaFree(void* at) {
  if (auto found = segments.find((uint64_t)at); found != segments.end()) used -= found->second, segments.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = limit_bytes, *free = limit_bytes - used;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int) {
  memset(of, 0, sizeof *of);
  of->totalGlobalMem = limit_bytes, of->major = 9, of->multiProcessorCount = 132;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  auto was = last;
  return last = cudaSuccess, was;
}
const char* cudaGetErrorName(cudaError_t) { return "error"; }
const char* cudaGetErrorString(cudaError_t) { return "error"; }
cudaError_t cudaDeviceSynchronize() { return finished = launched, cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = (cudaEvent_t) new Event, cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete (Event*)event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *(Event*)event = {stream, launched[stream]};
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto* asked = (Event*)event;
  return finished[asked->stream] >= asked->mark ? cudaSuccess : failed(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  auto* asked = (Event*)event;
  finished[asked->stream] = std::max(finished[asked->stream], asked->mark);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* is) {
  return *is = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) { return *least = 0, *most = -5, cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return *stream = (cudaStream_t)++next_handle, cudaSuccess;
}

static CUresult yes() { return CUDA_SUCCESS; }
static CUresult zero(int* value) { return *value = 0, CUDA_SUCCESS; }
static CUresult granularity(size_t* bytes) { return *bytes = 1 << 21, CUDA_SUCCESS; }
static CUresult reserve(CUdeviceptr* at, size_t bytes) {
  *at = next_address, next_address += bytes;
  return CUDA_SUCCESS;
}
static CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes) {
  if (used + bytes > limit_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  used += bytes;
  handles[*handle = next_handle++] = bytes;
  return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle handle) {
  used -= handles[handle], handles.erase(handle);
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* found) {
  static const std::unordered_map<std::string, void*> functions = {
      {"cuMemGetAllocationGranularity", (void*)granularity}, {"cuMemAddressReserve", (void*)reserve},
      {"cuMemCreate", (void*)create}, {"cuMemRelease", (void*)release}, {"cuDeviceGetAttribute", (void*)zero},
      {"cuDeviceGet", (void*)zero}};
  auto known = functions.find(name);
  *function = known == functions.end() ? (void*)yes : known->second;
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return *device = (void*)1, 0; }
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType() { return 3; }  // not supported
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return 3; }
int nvmlDeviceGetComputeRunningProcesses() { return 3; }
}
// All else that libc10_cuda.so names (nm -D --undefined-only) and never calls here: stubs.c made of its output.
//     nm -D --undefined-only libc10_cuda.so | sed -n 's/.* U \(cuda[A-Za-z]*\)@.*/int __attribute__((weak)) \1(){return 1;}/p' > stubs.c
//     gcc -fPIC -c stubs.c && g++ -fPIC -c -std=c++17 -I INCLUDE_CUDA runtime.cpp
//     echo 'libcudart.so.13 { global: *; };' > map && g++ -shared -o libcudart.so.13 runtime.o stubs.o -Wl,--version-script=map
//     cp libcudart.so.13 libnvidia-ml.so.1
//     g++ -std=c++20 -I INCLUDE_TORCH -I INCLUDE_CUDA record.cpp -o record -L. -l:libc10_cuda.so -l:libc10.so -l:libcudart.so.13
