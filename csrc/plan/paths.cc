#include "plan/paths.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "plan/plan_wire.h"
#include "plan/wire.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kPathsMagic = "TCPP";
constexpr uint32_t kPathsVersion = 1;
constexpr int64_t kMaxPosition = (int64_t{1} << 62) - 1;  // Twice this value is still a varint.

// Removes `prefix` from the start of `text`. Returns false if `text` starts differently.
bool consume(std::string_view prefix, std::string_view* text) {
  if (!text->starts_with(prefix)) return false;
  text->remove_prefix(prefix.size());
  return true;
}

// Returns whether the keys make up the path's FQN and can be encoded.
bool is_sound(const StatePath& path) {
  std::string_view rest = path.fqn;
  for (const auto& key : path.keys) {
    if (&key != path.keys.data() && !consume(".", &rest)) return false;
    if (const auto* text = std::get_if<std::string>(&key)) {
      if (!consume(*text, &rest)) return false;
      continue;
    }
    const int64_t position = std::get<int64_t>(key);
    if (position < 0 || position > kMaxPosition) return false;
    if (!consume(std::to_string(position), &rest)) return false;
  }
  return !path.keys.empty() && rest.empty();
}

void write_keys(const StatePath& path, WireWriter* out) {
  out->varint(std::ssize(path.keys));
  for (const auto& key : path.keys) {
    if (const auto* text = std::get_if<std::string>(&key)) {
      out->varint(2 * std::ssize(*text));
    } else {
      out->varint(2 * std::get<int64_t>(key) + 1);
    }
  }
}

bool read_keys(WireReader* reader, StatePath* path) {
  int64_t count;
  if (!reader->varint(&count) || count == 0) return false;
  std::string_view rest = path->fqn;
  for (int64_t i = 0; i < count; ++i) {
    int64_t key;
    if (!reader->varint(&key)) return false;
    if (i > 0 && !consume(".", &rest)) return false;
    if (key % 2 == 0) {
      if (key / 2 > std::ssize(rest)) return false;
      path->keys.emplace_back(std::string(rest.substr(0, static_cast<size_t>(key / 2))));
      rest.remove_prefix(static_cast<size_t>(key / 2));
    } else {
      if (!consume(std::to_string(key / 2), &rest)) return false;
      path->keys.emplace_back(key / 2);
    }
  }
  return rest.empty();
}

bool read_paths(WireReader* reader, int64_t nbytes, std::vector<StatePath>* out) {
  int64_t count;
  // A path has at least four bytes: larger counts are malformed.
  if (!reader->varint(&count) || count > reader->left() / 4) return false;
  out->reserve(static_cast<size_t>(count));
  int64_t text = 0;
  for (int64_t i = 0; i < count; ++i) {
    int64_t shared;
    std::string_view rest;
    if (!reader->varint(&shared) || !reader->word(&rest)) return false;
    const std::string_view former = i == 0 ? std::string_view() : out->back().fqn;
    if (shared > std::ssize(former)) return false;
    text += shared + std::ssize(rest);
    if (text > kMaxTextGrowth * (nbytes - reader->left())) return false;
    StatePath path;
    path.fqn.reserve(static_cast<size_t>(shared) + rest.size());
    path.fqn = former.substr(0, static_cast<size_t>(shared));
    path.fqn += rest;
    if (!read_keys(reader, &path)) return false;
    out->push_back(std::move(path));
  }
  return reader->left() == 0;
}

}  // namespace

Result<std::vector<std::byte>> encode(const std::vector<StatePath>& paths) {
  WireWriter out;
  out.varint(std::ssize(paths));
  std::string_view former;
  int64_t text = 0;
  for (const StatePath& path : paths) {
    const std::string& fqn = path.fqn;
    if (!is_sound(path)) return invalid_argument("the keys of '", fqn, "' do not make up its name");
    text += std::ssize(fqn);
    const auto same = std::mismatch(fqn.begin(), fqn.end(), former.begin(), former.end()).first;
    const int64_t shared = text <= kMaxTextGrowth * out.size() ? same - fqn.begin() : 0;
    out.varint(shared);
    out.word(std::string_view(fqn).substr(static_cast<size_t>(shared)));
    write_keys(path, &out);
    former = fqn;
  }
  return out.finish(kPathsMagic, kPathsVersion);
}

Result<std::vector<StatePath>> decode_paths(Bytes bytes) {
  ASSIGN_OR_RETURN(const Bytes body,
                   open_wire(bytes, kPathsMagic, kPathsVersion, "a list of paths"));
  WireReader reader(body);
  std::vector<StatePath> out;
  if (!read_paths(&reader, ssize(body), &out)) {
    return corruption("a list of paths of ", bytes.size(), " bytes is unsound");
  }
  return out;
}

}  // namespace torch_ckpt
