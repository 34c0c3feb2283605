#include "tests/fuzz/files.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {
namespace {

const std::vector<std::string> kNames = {"node_features", "node_labels", "edges", "edge_weight", "train_masks", "val_masks", "test_masks"};

}  // namespace

void run(std::string_view input) { check_graph(load_graph(spill("a.npz", npz_of(input, kNames)))); }

std::vector<std::string> seeds() {
  const std::vector<std::string> all = {
      npy("<f4", "(3, 2)", raw<float>({1, 2, 3, 4, 5, 6})), npy("<i8", "(3,)", raw<int64_t>({0, 1, -1})),
      npy("<i8", "(2, 2)", raw<int64_t>({0, 1, 2, 0})),     npy("<f4", "(2,)", raw<float>({0.5, 2})),
      npy("|b1", "(1, 3)", std::string("\1\0\0", 3)),       npy("|b1", "(1, 3)", std::string("\0\1\0", 3)),
      npy("|b1", "(1, 3)", std::string("\0\0\0", 3))};
  return {joined(all), joined({all[0]}) + "\xff\xff" + joined({all[2]}) + std::string(8, '\xff')};
}

}  // namespace satchel::fuzz
