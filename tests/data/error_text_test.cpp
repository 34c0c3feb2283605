// Errors quote what users and files say: no byte of it may reach the terminal as a control character.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "satchel/core/error.h"
#include "satchel/core/method.h"
#include "satchel/core/spec.h"
#include "satchel/data/graph_data.h"
#include "satchel/data/image_data.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::error_of;

TEST(ErrorText, ControlCharactersAreSpelledOut) {
  const std::string odd = "a\x1b[31m\n\x7f\tb";
  for (const std::string& error :
       {error_of([&] { parse_spec(odd); }), error_of([&] { parse_methods(odd); }), error_of([&] { load_graph(odd); }),
        error_of([&] { load_images(odd); }), error_of([&] { load_graph("synthetic:" + odd); })}) {
    EXPECT_TRUE(std::none_of(error.begin(), error.end(), [](unsigned char c) { return c < 32 || c == 127; })) << error;
    EXPECT_NE(error.find("a\\x1b[31m\\x0a\\x7f\\x09b"), std::string::npos) << error;
  }
  EXPECT_EQ(error_of([] { fail("op", "größer als π"); }), "[op] größer als π");  // UTF-8 stays
}

}  // namespace
}  // namespace satchel
