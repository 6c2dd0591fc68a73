// Plays commands on torch's own compiled CUDA allocator, over a CUDA runtime that counts memory and computes nothing.
//
// What it prints was recorded into the files beside it. To record again, unpack torch/lib/libc10.so,
// torch/lib/libc10_cuda.so and torch/include of torch's CUDA wheel, and the headers of the wheels nvidia-cuda-runtime and
// nvidia-cuda-crt, and build runtime.cpp into libcudart.so.13 and libnvidia-ml.so.1 and this file against all of them
// (commands at the end of runtime.cpp). Then, for each file:
//     PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ./record LIMIT < commands
//
// Commands: "a ID BYTES STREAM" allocates, "f ID" frees, "r ID STREAM" is record_stream, "w STREAM" launches work,
// "d STREAM" lets the stream finish all of it. After a, f and r it prints: allocated, active and reserved bytes, retries,
// and how often it was out of memory.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <iostream>
#include <unordered_map>

extern "C" void runtime_limit(size_t);
extern "C" void runtime_work(void*);
extern "C" void runtime_finish(void*);
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*)(c10::DeviceIndex));
}

int main(int, char** argv) {
  runtime_limit(std::stoull(argv[1]));
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  allocator->init(1);
  c10::cuda::detail::init_p2p_access_cache(1);
  std::unordered_map<long, void*> at;
  std::string command;
  long id, bytes, stream, failures = 0;
  while (std::cin >> command) {
    if (command == "a") {
      std::cin >> id >> bytes >> stream;
      try {
        at[id] = allocator->raw_alloc_with_stream(bytes, (cudaStream_t)stream);
      } catch (const c10::Error&) {
        at[id] = nullptr, failures++;
      }
    } else if (command == "f") {
      std::cin >> id;
      if (at[id]) allocator->raw_delete(at[id]);
    } else if (command == "r") {
      std::cin >> id >> stream;
      if (at[id]) {
        c10::DataPtr data(at[id], at[id], allocator->raw_deleter(), c10::Device(c10::kCUDA, 0));
        allocator->recordStream(data, c10::cuda::getStreamFromExternal((cudaStream_t)stream, 0));
        data.release_context();
      }
    } else {
      std::cin >> stream;
      command == "w" ? runtime_work((void*)stream) : runtime_finish((void*)stream);
      continue;
    }
    auto seen = allocator->getDeviceStats(0);
    std::cout << seen.allocated_bytes[0].current << ' ' << seen.active_bytes[0].current << ' '
              << seen.reserved_bytes[0].current << ' ' << seen.num_alloc_retries << ' ' << failures << '\n';
  }
}
