#pragma once

// Assertions on a Status or Result that print the status when they fail.

#include <gtest/gtest.h>

#include <utility>

#include "base/status.h"

namespace torch_ckpt {

inline const Status& status_of(const Status& status) { return status; }
template <typename T>
const Status& status_of(const Result<T>& result) {
  return result.status();
}

struct IsOk {
  template <typename T>
  ::testing::AssertionResult operator()(const char* text, const T& value) const {
    const Status& status = status_of(value);
    if (status.ok()) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << text << " is " << status.to_string();
  }
};

struct HasCode {
  template <typename T>
  ::testing::AssertionResult operator()(const char* text, const char*, const T& value,
                                        StatusCode code) const {
    const Status& status = status_of(value);
    if (status.code() == code) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure()
           << text << " is " << status.to_string() << ", not " << status_code_name(code);
  }
};

inline void PrintTo(const Status& status, std::ostream* out) { *out << status.to_string(); }

}  // namespace torch_ckpt

#define EXPECT_OK(expr) EXPECT_PRED_FORMAT1(::torch_ckpt::IsOk(), expr)
#define ASSERT_OK(expr) ASSERT_PRED_FORMAT1(::torch_ckpt::IsOk(), expr)

// EXPECT_CODE(fs.remove("x"), StatusCode::kNotFound)
#define EXPECT_CODE(expr, code) EXPECT_PRED_FORMAT2(::torch_ckpt::HasCode(), expr, code)
#define ASSERT_CODE(expr, code) ASSERT_PRED_FORMAT2(::torch_ckpt::HasCode(), expr, code)

// ASSERT_OK_AND_ASSIGN(auto file, fs.open(...))
#define ASSERT_OK_AND_ASSIGN(lhs, expr) \
  ASSERT_OK_AND_ASSIGN_IMPL_(STATUS_CONCAT_(assign_result_, __LINE__), lhs, expr)
#define ASSERT_OK_AND_ASSIGN_IMPL_(result, lhs, expr) \
  auto result = (expr);                               \
  ASSERT_OK(result);                                  \
  lhs = std::move(*result)
