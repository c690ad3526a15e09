#pragma once

// Error handling of the C++ core.
//
// The core does not throw. A function that can fail returns a `Status`, or a `Result<T>` if it also
// has a value. `bindings/errors.cc` maps each code to one Python exception.

#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

namespace torch_ckpt {

enum class StatusCode {
  kOk,
  kInvalidArgument,  // Caller error.
  kNotFound,         // No committed checkpoint or file at this path.
  kMismatch,         // Valid checkpoint whose FQN, shape or dtype differs from the requested one.
  kCorruption,       // Stored or received bytes that fail validation.
  kStorage,          // Disk or store failure; `error_number` has the errno.
  kUnsupported,      // Not supported by this build, platform or reader.
  kCancelled,        // Stopped after a failure elsewhere.
  kInternal,         // Bug in this library.
};

// Returns the name of a code, e.g. "kStorage".
const char* status_code_name(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message, int error_number = 0)
      : code_(code), error_number_(error_number), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // The errno of a kStorage or kNotFound status, or 0.
  int error_number() const { return error_number_; }

  // "kStorage: cannot write ...", or "kOk".
  std::string to_string() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  int error_number_ = 0;
  std::string message_;
};

// Concatenates its arguments into one string.
template <typename... Args>
std::string str_cat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

inline Status ok_status() { return Status(); }

template <typename... Args>
Status invalid_argument(const Args&... args) {
  return Status(StatusCode::kInvalidArgument, str_cat(args...));
}
template <typename... Args>
Status mismatch(const Args&... args) {
  return Status(StatusCode::kMismatch, str_cat(args...));
}
template <typename... Args>
Status corruption(const Args&... args) {
  return Status(StatusCode::kCorruption, str_cat(args...));
}
template <typename... Args>
Status unsupported(const Args&... args) {
  return Status(StatusCode::kUnsupported, str_cat(args...));
}
template <typename... Args>
Status cancelled(const Args&... args) {
  return Status(StatusCode::kCancelled, str_cat(args...));
}
template <typename... Args>
Status internal_error(const Args&... args) {
  return Status(StatusCode::kInternal, str_cat(args...));
}

// Makes the status of a failed system call: "<what>: no space left on device (ENOSPC)". ENOENT maps
// to kNotFound, every other errno to kStorage.
Status errno_status(int error_number, const std::string& what);

// Either a value or an error status.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    if (status_.ok()) status_ = internal_error("a Result was made from an OK status");
  }

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  // Requires: ok().
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

// Returns the status of `expr` from the enclosing function unless it is OK.
#define RETURN_IF_ERROR(expr)                      \
  do {                                             \
    ::torch_ckpt::Status status_macro_ = (expr);   \
    if (!status_macro_.ok()) return status_macro_; \
  } while (false)

// `ASSIGN_OR_RETURN(auto file, fs.open(...))` assigns the value, or returns the error status.
#define ASSIGN_OR_RETURN(lhs, expr) \
  ASSIGN_OR_RETURN_IMPL_(STATUS_CONCAT_(result_macro_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_IMPL_(result, lhs, expr) \
  auto result = (expr);                           \
  if (!result.ok()) return result.status();       \
  lhs = std::move(*result)
#define STATUS_CONCAT_(a, b) STATUS_CONCAT_IMPL_(a, b)
#define STATUS_CONCAT_IMPL_(a, b) a##b

}  // namespace torch_ckpt
