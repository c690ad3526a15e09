#include "base/status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <string>

#include "support/status_matchers.h"

namespace torch_ckpt::status_test {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(StatusTest, IsOkUntilToldOtherwise) {
  EXPECT_OK(Status());
  EXPECT_EQ(ok_status().to_string(), "kOk");
}

TEST(StatusTest, PrintsItsCodeAndMessage) {
  EXPECT_EQ(mismatch("layer.", 3, " has ", 2, " dimensions").to_string(),
            "kMismatch: layer.3 has 2 dimensions");
}

TEST(StatusTest, EveryMakerGivesItsOwnCode) {
  EXPECT_EQ(invalid_argument("x").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(mismatch("x").code(), StatusCode::kMismatch);
  EXPECT_EQ(corruption("x").code(), StatusCode::kCorruption);
  EXPECT_EQ(unsupported("x").code(), StatusCode::kUnsupported);
  EXPECT_EQ(cancelled("x").code(), StatusCode::kCancelled);
  EXPECT_EQ(internal_error("x").code(), StatusCode::kInternal);
}

TEST(StatusTest, EveryCodeHasANameOfItsOwn) {
  for (int code = 0; code <= static_cast<int>(StatusCode::kInternal); ++code) {
    const std::string name = status_code_name(static_cast<StatusCode>(code));
    EXPECT_THAT(name, StartsWith("k"));
    for (int other = 0; other < code; ++other) {
      EXPECT_NE(name, status_code_name(static_cast<StatusCode>(other)));
    }
  }
}

TEST(StatusTest, ErrnoStatusSaysWhatFailedAndWhy) {
  const Status status = errno_status(ENOSPC, "cannot write 8 bytes at 0 of a");
  EXPECT_EQ(status.code(), StatusCode::kStorage);
  EXPECT_EQ(status.error_number(), ENOSPC);
  EXPECT_THAT(status.message(), StartsWith("cannot write 8 bytes at 0 of a: "));
  EXPECT_THAT(status.message(), EndsWith("(ENOSPC)"));
  EXPECT_THAT(errno_status(12345, "x").message(), HasSubstr("12345"));
  // "Not there" is something callers act on; every other errno is a failed disk to them.
  EXPECT_EQ(errno_status(ENOENT, "x").code(), StatusCode::kNotFound);
  EXPECT_EQ(errno_status(ENOTDIR, "x").code(), StatusCode::kStorage);
  EXPECT_EQ(errno_status(EACCES, "x").code(), StatusCode::kStorage);
}

TEST(ResultTest, HoldsAValueOrTheReasonWhyNot) {
  const Result<int> value = 3;
  ASSERT_OK(value);
  EXPECT_EQ(*value, 3);
  const Result<int> none = corruption("torn");
  EXPECT_FALSE(none.ok());
  EXPECT_EQ(none.status().code(), StatusCode::kCorruption);
}

// A Result without value must never look like success, or its reader would take what is not there.
TEST(ResultTest, MadeFromAnOkStatusIsAnError) {
  const Result<int> result = ok_status();
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), StatusCode::kInternal);
}

Status first_error(const Status& a, const Status& b) {
  RETURN_IF_ERROR(a);
  RETURN_IF_ERROR(b);
  return ok_status();
}

TEST(StatusMacrosTest, ReturnIfErrorStopsAtTheFirstError) {
  EXPECT_OK(first_error(ok_status(), ok_status()));
  EXPECT_EQ(first_error(ok_status(), cancelled("b")).message(), "b");
  EXPECT_EQ(first_error(cancelled("a"), cancelled("b")).message(), "a");
}

Result<int> sum(Result<std::unique_ptr<int>> a, Result<std::unique_ptr<int>> b) {
  ASSIGN_OR_RETURN(const auto left, std::move(a));
  ASSIGN_OR_RETURN(const auto right, std::move(b));
  return *left + *right;
}

TEST(StatusMacrosTest, AssignOrReturnMovesTheValueOut) {
  const Result<int> total = sum(std::make_unique<int>(1), std::make_unique<int>(2));
  ASSERT_OK(total);
  EXPECT_EQ(*total, 3);
  EXPECT_EQ(sum(std::make_unique<int>(1), cancelled("b")).status().message(), "b");
}

}  // namespace
}  // namespace torch_ckpt::status_test
