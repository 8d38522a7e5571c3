// The CUDA kernels in place of the CPU's.
#include "../../../csrc/cuda/kernels.cu"

namespace zeropp::cpu {
void encode(const EncodeArguments& arguments) { cuda::encode(arguments, nullptr); }
void decode(const DecodeArguments& arguments) { cuda::decode(arguments, nullptr); }
void rotate(const RotateArguments& arguments) { cuda::rotate(arguments, nullptr); }
}  // namespace zeropp::cpu
