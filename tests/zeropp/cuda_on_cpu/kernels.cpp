// The CUDA kernels in place of the CPU's.
#include <stdexcept>
#include <string>

#include "../../../csrc/cuda/encode_16_bits.cu"
#include "../../../csrc/cuda/encode_floats.cu"
#include "../../../csrc/cuda/encode_scaled_wires.cu"
#include "../../../csrc/cuda/encode_scaled_wires_of_8_bits.cu"
#include "../../../csrc/cuda/encode_wires.cu"
#include "../../../csrc/cuda/encode_wires_of_8_bits.cu"
#include "../../../csrc/cuda/kernels.cu"
#include "../../../csrc/cuda/moves.cu"

namespace zeropp::cpu {

static void check(int error) {
  if (error != cudaSuccess) throw std::runtime_error("CUDA would refuse this launch: error " + std::to_string(error));
}

void encode(const EncodeArguments& arguments) { check(cuda::encode(arguments, nullptr)); }
void decode(const DecodeArguments& arguments) { check(cuda::decode(arguments, nullptr)); }
void rotate(const RotateArguments& arguments) { check(cuda::rotate(arguments, nullptr)); }
void move_exponents(const MoveExponentsArguments& arguments) { check(cuda::move_exponents(arguments, nullptr)); }
}  // namespace zeropp::cpu
