#include "encode.h"

int zeropp::cuda::encode_wires(const EncodeArguments& a, cudaStream_t stream) {
  return encode_with<Source::kWires, 0>(a, stream);
}
