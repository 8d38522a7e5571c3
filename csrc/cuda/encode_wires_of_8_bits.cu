#include "encode.h"

int zeropp::cuda::encode_wires_of_8_bits(const EncodeArguments& a, cudaStream_t stream) {
  return encode_with<Source::kWires8, 0>(a, stream);
}
