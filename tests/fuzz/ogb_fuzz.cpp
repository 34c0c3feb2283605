// The tables as text; fuzz_gzip has the packed files themselves.
#include "tests/fuzz/files.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {
namespace {

const std::vector<std::string> kFiles = {"raw/num-node-list", "raw/num-edge-list", "raw/edge",      "raw/node-feat", "raw/node-label",
                                         "raw/edge-feat",     "split/t/train",     "split/t/valid", "split/t/test"};

}  // namespace

void run(std::string_view input) {
  static const bool made = (make_folder("g"), make_folder("g/raw"), make_folder("g/split"), make_folder("g/split/t"), true);
  require(made, "the folders are there");
  Parts parts(input);
  for (const std::string& name : kFiles) {
    std::string_view part;
    if (parts.next(part)) {
      spill("g/" + name + ".csv.gz", gzip(part));
    } else {
      remove("g/" + name + ".csv.gz");
    }
  }
  check_graph(load_graph(scratch() + "/g"));
}

std::vector<std::string> seeds() {
  return {
      joined({"4\n", "3\n", "2,0\n0,3\n2,1\n", "0.5,-1\n1e-3,2\r\n3,4\n5,6.25", "1\n0\n2.0\nnan\n", "1\n0.5\n2\n", "2\n0\n", "1\n", ""}),
      joined({"2\n", "1\n", "0,1\n", "1\n2\n", "1,0\n0,1\n"}) + "\xff\xff" + joined({"1\n", "0\n", ""})};
}

}  // namespace satchel::fuzz
