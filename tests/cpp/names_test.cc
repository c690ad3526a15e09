#include "plan/names.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace torch_ckpt::names_test {
namespace {

TEST(NamesTest, RandomNamesAreFoundUnderTheirNumbers) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    Names names;
    std::map<std::string, int64_t> oracle;
    std::vector<std::string> in_order;
    for (int i = 0; i < 2000; ++i) {
      std::string name(random() % 4, 'a');
      for (char& c : name) c = static_cast<char>(random() % 12);
      const auto found = oracle.find(name);
      ASSERT_EQ(names.size(), std::ssize(in_order));
      ASSERT_EQ(names.find(name), found == oracle.end() ? -1 : found->second);
      if (found != oracle.end()) {
        ASSERT_EQ(names.intern(name), found->second);
        continue;
      }
      if (random() % 50 == 0) names.reserve(names.size() + static_cast<int64_t>(random() % 500));
      ASSERT_EQ(names.intern(name), std::ssize(in_order));
      oracle[name] = std::ssize(in_order);
      in_order.push_back(name);
    }
    const Names moved = std::move(names);
    ASSERT_EQ(moved.size(), std::ssize(in_order));
    for (size_t i = 0; i < in_order.size(); ++i) {
      ASSERT_EQ(moved[static_cast<int64_t>(i)], in_order[i]);
      ASSERT_EQ(moved.find(in_order[i]), static_cast<int64_t>(i));
    }
  }
}

}  // namespace
}  // namespace torch_ckpt::names_test
