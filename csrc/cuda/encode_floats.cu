#include "encode.h"

int zeropp::cuda::encode_floats(const EncodeArguments& a, cudaStream_t stream) {
  return a.has_exponents() ? encode_with<Source::kFloat, 1>(a, stream) : encode_with<Source::kFloat, 0>(a, stream);
}
