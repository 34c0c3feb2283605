// The zip archive itself: directory, sizes, checksums.
#include "satchel/data/npz.h"
#include "tests/fuzz/files.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {

void run(std::string_view input) {
  const Npz file(spill("a.npz", input));
  if (file.has("a")) file.floats("a", {kAny});
  if (file.has("b")) file.integers("b", {kAny, 2});
  if (file.has("format")) require(file.text("format").size() <= 64, "a text is short");
  file.names();
}

std::vector<std::string> seeds() {
  return {zip({{"a.npy", npy("<f4", "(2,)", raw<float>({1, 2}))}, {"b.npy", npy("<i4", "(1, 2)", raw<int32_t>({1, 2}))}}),
          zip({{"format.npy", npy("|S3", "()", "csr")}, {"other.txt", "hello"}}), zip({})};
}

}  // namespace satchel::fuzz
