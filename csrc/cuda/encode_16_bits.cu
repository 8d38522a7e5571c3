#include "encode.h"

int zeropp::cuda::encode_16_bits(const EncodeArguments& a, cudaStream_t stream) {
  return a.has_exponents() ? encode_with<Source::k16Bit, 1>(a, stream) : encode_with<Source::k16Bit, 0>(a, stream);
}
