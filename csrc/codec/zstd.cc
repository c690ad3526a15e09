#include "codec/zstd.h"

#if TORCH_CKPT_HAVE_ZSTD
#define ZSTD_STATIC_LINKING_ONLY  // For ZSTD_c_literalCompressionMode.
#include <zstd.h>

#include <memory>
#endif

namespace torch_ckpt {

#if TORCH_CKPT_HAVE_ZSTD
namespace {

// Gaps and planes rarely repeat, but some values are frequent. So the search for repetitions is cut
// short, and Huffman codes are always tried: smaller than level 1, and twice as fast.
constexpr int kLevel = -10;

struct Freeing {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

// Returns this thread's context, or null if memory is short.
ZSTD_CCtx* compression() {
  thread_local std::unique_ptr<ZSTD_CCtx, Freeing> context;
  if (context == nullptr) {
    context.reset(ZSTD_createCCtx());
    if (context == nullptr) return nullptr;
    // A later libzstd may not have this parameter, which no interface promises.
    const size_t refused = ZSTD_CCtx_setParameter(context.get(), ZSTD_c_literalCompressionMode,
                                                  static_cast<int>(ZSTD_ps_enable));
    ZSTD_CCtx_setParameter(context.get(), ZSTD_c_compressionLevel,
                           ZSTD_isError(refused) != 0 ? 1 : kLevel);
  }
  return context.get();
}

ZSTD_DCtx* decompression() {
  thread_local std::unique_ptr<ZSTD_DCtx, Freeing> context;
  if (context == nullptr) context.reset(ZSTD_createDCtx());
  return context.get();
}

}  // namespace

Status zstd_available() { return ok_status(); }

int64_t zstd_bound(int64_t nbytes) {
  return static_cast<int64_t>(ZSTD_compressBound(static_cast<size_t>(nbytes)));
}

Result<int64_t> zstd_compress(Bytes from, std::byte* to) {
  ZSTD_CCtx* const context = compression();
  if (context == nullptr) return internal_error("no memory to compress ", from.size(), " bytes");
  const size_t nbytes =
      ZSTD_compress2(context, to, ZSTD_compressBound(from.size()), from.data(), from.size());
  if (ZSTD_isError(nbytes) != 0) {
    return internal_error("cannot compress ", from.size(), " bytes: ", ZSTD_getErrorName(nbytes));
  }
  return static_cast<int64_t>(nbytes);
}

Status zstd_decompress(Bytes from, MutableBytes to) {
  ZSTD_DCtx* const context = decompression();
  if (context == nullptr) return internal_error("no memory to decompress ", to.size(), " bytes");
  const size_t nbytes =
      ZSTD_decompressDCtx(context, to.data(), to.size(), from.data(), from.size());
  if (ZSTD_isError(nbytes) != 0) {
    return corruption("a compressed stream is damaged: ", ZSTD_getErrorName(nbytes));
  }
  if (nbytes != to.size()) {
    return corruption("a compressed stream has ", nbytes, " bytes, expected ", to.size());
  }
  return ok_status();
}

#else

Status zstd_available() {
  return unsupported(
      "this build has no libzstd, which differences between versions need: "
      "apt-get install libzstd-dev, then build torch-ckpt again");
}

int64_t zstd_bound(int64_t nbytes) { return nbytes; }

Result<int64_t> zstd_compress(Bytes, std::byte*) { return zstd_available(); }

Status zstd_decompress(Bytes, MutableBytes) { return zstd_available(); }

#endif

}  // namespace torch_ckpt
