#include "base/xxh3.h"

#include "base/xxh3_variant.h"

namespace torch_ckpt {
namespace {

const Xxh3Variant& fastest() {
  static const Xxh3Variant* const avx2 = xxh3_avx2();
  return avx2 != nullptr ? *avx2 : kXxh3OfThisFile;
}

}  // namespace

uint64_t xxh3(Bytes bytes) { return fastest().hash(bytes.data(), bytes.size()); }

Digest128 xxh3_128(Bytes bytes) {
  const XXH128_hash_t hash = fastest().hash_128(bytes.data(), bytes.size());
  return {hash.low64, hash.high64};
}

struct Xxh3Stream::State {
  XXH3_state_t xxh3;
};

Xxh3Stream::Xxh3Stream() : state_(std::make_unique<State>()) { fastest().reset(&state_->xxh3); }
Xxh3Stream::Xxh3Stream(Xxh3Stream&&) noexcept = default;
Xxh3Stream& Xxh3Stream::operator=(Xxh3Stream&&) noexcept = default;
Xxh3Stream::~Xxh3Stream() = default;

void Xxh3Stream::update(Bytes bytes) {
  fastest().update(&state_->xxh3, bytes.data(), bytes.size());
}

uint64_t Xxh3Stream::finish() {
  const uint64_t sum = fastest().digest(&state_->xxh3);
  fastest().reset(&state_->xxh3);
  return sum;
}

Digest128 Xxh3Stream::finish_128() {
  const XXH128_hash_t hash = fastest().digest_128(&state_->xxh3);
  fastest().reset(&state_->xxh3);
  return {hash.low64, hash.high64};
}

}  // namespace torch_ckpt
