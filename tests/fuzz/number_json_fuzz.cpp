#include "satchel/data/number_json.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {
namespace {

/// Lists open and close in turn, and every number has a key before it.
struct Sink final : NumberSink {
  void key(const std::string&) override {
    require(!open, "no key stands in a list");
    keyed = true;
  }
  void number(int64_t) override { require(keyed, "a number has a key"); }
  void open_list() override {
    require(keyed && !open, "lists do not nest");
    open = true;
  }
  void close_list() override {
    require(open, "a list that ends has begun");
    open = false;
  }
  bool keyed = false, open = false;
};

}  // namespace

void run(std::string_view input) {
  Sink sink;
  read_number_json(spill("a.json", input), sink);
  require(!sink.open, "every list ends");
}

std::vector<std::string> seeds() {
  return {R"({"0": 1, "2": -3, "1": 1e3})", R"({"tr": [0, 1, 2], "va": [], "te": [3.0]})", R"({"a": "b"})", R"({"\u00e9": [true, null]})"};
}

}  // namespace satchel::fuzz
