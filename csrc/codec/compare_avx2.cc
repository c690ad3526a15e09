// The comparison of blocks with AVX2.

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,bmi,popcnt")
#define TORCH_CKPT_HAVE_AVX2 1
#define TORCH_CKPT_COMPARE_VECTOR 32
#else
#define TORCH_CKPT_HAVE_AVX2 0
#endif

#include "codec/compare_variant.h"

namespace torch_ckpt {

const CompareVariant* compare_avx2() {
#if TORCH_CKPT_HAVE_AVX2
  if (__builtin_cpu_supports("avx2")) return &kCompareOfThisFile;
#endif
  return nullptr;
}

}  // namespace torch_ckpt
