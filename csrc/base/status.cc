#include "base/status.h"

#include <cerrno>
#include <cstring>

namespace torch_ckpt {

const char* status_code_name(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "kOk";
    case StatusCode::kInvalidArgument:
      return "kInvalidArgument";
    case StatusCode::kNotFound:
      return "kNotFound";
    case StatusCode::kMismatch:
      return "kMismatch";
    case StatusCode::kCorruption:
      return "kCorruption";
    case StatusCode::kStorage:
      return "kStorage";
    case StatusCode::kUnsupported:
      return "kUnsupported";
    case StatusCode::kCancelled:
      return "kCancelled";
    case StatusCode::kInternal:
      return "kInternal";
  }
  return "unknown";
}

std::string Status::to_string() const {
  if (ok()) return status_code_name(code_);
  return str_cat(status_code_name(code_), ": ", message_);
}

Status errno_status(int error_number, const std::string& what) {
  const char* name = strerrorname_np(error_number);
  const char* text = strerrordesc_np(error_number);
  const StatusCode code = error_number == ENOENT ? StatusCode::kNotFound : StatusCode::kStorage;
  return Status(code,
                str_cat(what, ": ", text ? text : "unknown error", " (",
                        name ? name : std::to_string(error_number), ")"),
                error_number);
}

}  // namespace torch_ckpt
