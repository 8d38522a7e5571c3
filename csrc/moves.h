// Moved codes, as the operators call them; megatron_zpp/zeropp/wire/moves.py is the definition.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernel_arguments.h"

namespace zeropp::cpu {
// values: one row; old: a wire buffer whose scales are kept where they fit, or null.
void requantize(const Format&, const void* values, Type, const uint8_t* old, uint8_t* wire);
at::Tensor encode_moves(const Format&, const at::Tensor& old, const at::Tensor& now);
void apply_moves(const Format&, const uint8_t* moves, int64_t num_bytes, uint8_t* wire);
}  // namespace zeropp::cpu
