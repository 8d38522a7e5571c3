// The kernels on a CPU: tiles.h, compiled for processors with AVX-512, with AVX2 and with neither. The best that the
// processor has is taken. Compilers other than GCC make one version, for what they are told to compile for.

#include <ATen/Parallel.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <algorithm>
#include <vector>

#include "../kernel_arguments.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define ZEROPP_VERSIONS

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
namespace zeropp::cpu::v4 {
#include "tiles.h"
}
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
namespace zeropp::cpu::v3 {
#include "tiles.h"
}
#pragma GCC pop_options
#endif

namespace zeropp::cpu::plain {
#include "tiles.h"
}

namespace zeropp::cpu {
namespace {

constexpr int64_t kTilesPerThread = 32;  // at least: less work is not worth a thread

template <class Arguments>
using Work = void (*)(const Arguments&, int64_t begin, int64_t end);  // on tiles [begin, end)

template <class Arguments>
void run_parallel(const Arguments& a, const Format& format, [[maybe_unused]] Work<Arguments> v4,
                  [[maybe_unused]] Work<Arguments> v3, Work<Arguments> work) {
#ifdef ZEROPP_VERSIONS
  if (__builtin_cpu_supports("x86-64-v4")) work = v4;
  else if (__builtin_cpu_supports("x86-64-v3")) work = v3;
#endif
  at::parallel_for(0, a.rows0 * a.rows1 * plain::tiles_per_row(format), kTilesPerThread,
                   [&](int64_t begin, int64_t end) { work(a, begin, end); });
}

}  // namespace

#ifndef ZEROPP_VERSIONS
namespace v4 = plain;
namespace v3 = plain;
#endif

void encode(const EncodeArguments& a) { run_parallel(a, a.wire.format, v4::encode, v3::encode, plain::encode); }
void decode(const DecodeArguments& a) { run_parallel(a, a.peers.format, v4::decode, v3::decode, plain::decode); }
void rotate(const RotateArguments& a) { run_parallel(a, a.format, v4::rotate, v3::rotate, plain::rotate); }
void move_exponents(const MoveExponentsArguments& a) {
  run_parallel(a, a.wire.format, v4::move_exponents, v3::move_exponents, plain::move_exponents);
}

}  // namespace zeropp::cpu
