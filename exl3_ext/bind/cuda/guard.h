// What a CUDA binding needs besides check.h: the device guard, the current stream, the launch.
#pragma once
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "bind/check.h"
#include "exl3/status.h"

// Declared by torch only in builds with CUDA; the symbol is looked up when the library is loaded.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream);

namespace exl3::bind {

#define EXL3_CHECK_CUDA(op, t) EXL3_CHECK(op, (t).is_cuda(), #t " is not on a CUDA device")

#define EXL3_CHECK_CUDA_ARG(op, t, dtype) \
  do {                                    \
    EXL3_CHECK_CUDA(op, t);               \
    EXL3_CHECK_DTYPE(op, t, dtype);       \
    EXL3_CHECK_CONTIGUOUS(op, t);         \
  } while (0)

// Makes the tensor's device current and holds its current stream.
class CudaLaunch {
 public:
  explicit CudaLaunch(const Tensor& t) : guard_(t.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

  template <class P>
  void run(const char* op, Status (*fn)(const P&, CudaStream), const P& params) const {
    const Status status = fn(params, stream_);
    if (status == Status::kOk) return;
    const cudaError_t error = cudaGetLastError();
    check_code(op, error);
    EXL3_CHECK(op, false, status_text(status), ": ", cudaGetErrorString(error));
  }

 private:
  static void check_code(const char* op, cudaError_t error) {
    if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorUnsupportedPtxVersion) return;
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    EXL3_CHECK(op, false, "exl3 was built without code for this GPU, of compute capability ", major,
               ".", minor, ": build it with TORCH_CUDA_ARCH_LIST=\"", major, ".", minor,
               "\" (7.5 is the least)");
  }

  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace exl3::bind
