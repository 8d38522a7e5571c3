// For every scale, up to a power of two, and every tie between two codes of 8 bits or fewer: of the values about the tie, does
// quotient_of round to the same integer as the quotient? Prints how many do not, for it and for the product alone.

#include <cstdio>

#include "../../csrc/block_arithmetic.h"

using namespace zeropp;

int main() {
  uint64_t wrong = 0, wrong_products = 0;
  for (int code = 0; code < 127; code++) {
    uint32_t wrong_of_code = 0, wrong_products_of_code = 0;
    for (uint32_t mantissa = 0; mantissa < 1u << 23; mantissa++) {
      const float scale = float_of(0x3f800000u | mantissa), reciprocal = 1 / scale;
      const uint32_t tie = bits_of((float(code) + 0.5f) * scale);
      for (uint32_t bits = tie - 4; bits <= tie + 4; bits++) {
        const float value = float_of(bits);
        const uint32_t right = bits_of(value / scale + kIntegers);
        wrong_of_code += bits_of(quotient_of(value, scale, reciprocal) + kIntegers) != right;
        wrong_products_of_code += bits_of(value * reciprocal + kIntegers) != right;
      }
    }
    wrong += wrong_of_code;
    wrong_products += wrong_products_of_code;
  }
  std::printf("%llu %llu\n", (unsigned long long)wrong, (unsigned long long)wrong_products);
}
