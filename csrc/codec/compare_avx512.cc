// The comparison of blocks with AVX-512: it compresses vectors, so the time does not depend on
// how many elements have changed.

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,bmi,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi2")
#define TORCH_CKPT_HAVE_AVX512 1
#define TORCH_CKPT_COMPARE_VECTOR 64
#else
#define TORCH_CKPT_HAVE_AVX512 0
#endif

#include "codec/compare_variant.h"

namespace torch_ckpt {

const CompareVariant* compare_avx512() {
#if TORCH_CKPT_HAVE_AVX512
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vbmi2"))
    return &kCompareOfThisFile;
#endif
  return nullptr;
}

}  // namespace torch_ckpt
