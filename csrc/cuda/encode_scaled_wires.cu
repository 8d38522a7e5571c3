#include "encode.h"

int zeropp::cuda::encode_scaled_wires(const EncodeArguments& a, cudaStream_t stream) {
  return encode_with<Source::kWires, 1>(a, stream);
}
