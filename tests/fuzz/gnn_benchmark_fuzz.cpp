#include "tests/fuzz/files.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {
namespace {

const std::vector<std::string> kNames = {"adj_data",   "adj_indices", "adj_indptr", "adj_shape", "attr_data", "attr_indices", "attr_indptr",
                                         "attr_shape", "attr_matrix", "labels",     "train_idx", "val_idx",   "test_idx",     "edge_attr"};

}  // namespace

void run(std::string_view input) { check_graph(load_graph(spill("a.npz", npz_of(input, kNames)))); }

std::vector<std::string> seeds() {
  const auto absent = [](std::string parts) { return parts + "\xff\xff"; };
  const std::vector<std::string> adjacency = {npy("<f4", "(3,)", raw<float>({1, 0.5, 2})), npy("<i4", "(3,)", raw<int32_t>({1, 2, 0})),
                                              npy("<i4", "(4,)", raw<int32_t>({0, 1, 2, 3})), npy("<i8", "(2,)", raw<int64_t>({3, 3}))};
  const std::string sparse = joined({npy("<f4", "(2,)", raw<float>({5, 6})), npy("<i4", "(2,)", raw<int32_t>({8, 0})),
                                     npy("<i4", "(4,)", raw<int32_t>({0, 1, 2, 2})), npy("<i8", "(2,)", raw<int64_t>({3, 9}))});
  const std::string labels = joined({npy("<i8", "(3,)", raw<int64_t>({0, 1, -1}))});
  const std::string split = joined({npy("<i8", "(1,)", raw<int64_t>({0})), npy("<i8", "(1,)", raw<int64_t>({1})), npy("<i8", "(0,)", "")});
  return {absent(joined(adjacency) + sparse + "\xff\xff" + labels + split),
          absent(absent(absent(
              absent(joined(adjacency) + std::string(8, '\xff') + joined({npy("<f8", "(3, 1)", raw<double>({1, 2, 3}))}) + labels))))};
}

}  // namespace satchel::fuzz
