#include "tests/fuzz/files.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {
namespace {

const std::vector<std::string> kFiles = {"feats.npy", "class_map.json", "role.json"};
const std::vector<std::string> kArrays = {"data", "indices", "indptr", "shape", "format"};

}  // namespace

void run(std::string_view input) {
  Parts parts(input);
  spill_folder(parts, "g", kFiles);
  spill("g/adj_full.npz", npz_of(parts.rest, kArrays));
  check_graph(load_graph(scratch() + "/g"));
}

std::vector<std::string> seeds() {
  const std::string feats = npy("<f8", "(3, 1)", raw<double>({1, 2, 3}));
  const std::string arrays =
      joined({npy("|b1", "(2,)", "\1\1"), npy("<i4", "(2,)", raw<int32_t>({1, 2})), npy("<i4", "(4,)", raw<int32_t>({0, 1, 2, 2})),
              npy("<i8", "(2,)", raw<int64_t>({3, 3})), npy("|S3", "()", "csr")});
  return {joined({feats, R"({"0": 1, "2": 0})", R"({"tr": [2], "va": [0], "te": []})"}) + arrays,
          joined({feats, R"({"1": [0, 1], "0": [1, 0], "2": [0, 1.0]})", R"({"tr": [0], "va": [1], "te": [2]})"}) + arrays,
          joined({feats}) + "\xff\xff\xff\xff" + arrays};
}

}  // namespace satchel::fuzz
