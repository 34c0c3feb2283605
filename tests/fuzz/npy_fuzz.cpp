#include "satchel/data/npy.h"
#include "satchel/data/numbers.h"
#include "tests/fuzz/files.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {

void run(std::string_view input) {
  const NpyArray array = read_npy(spill("a.npy", input));
  require(static_cast<int64_t>(array.data.size()) == array.values() * array.item_bytes(), "an array has the bytes of its shape");
  require(array.strides().size() == array.shape.size(), "there is a stride a dimension");
  if (array.shape.size() > 2) return;  // the data sets have no more
  if (array.kind() == 'f') {
    floats_of(array, "a");
  } else {
    integers_of(array, "a");
  }
}

std::vector<std::string> seeds() {
  return {npy("<f4", "(3,)", raw<float>({1, 2, 3})), npy("<i8", "(2, 2)", raw<int64_t>({1, -2, 3, 4})), npy("<f2", "()", "ab"),
          npy("|b1", "(4, 1)", std::string("\1\0\1\0", 4)),
          "\x93NUMPY\x02" + std::string("\0\x3e\0\0\0", 5) + "{'descr': '<u2', 'fortran_order': True, 'shape': (2L, 1L), }  \nabcd"};
}

}  // namespace satchel::fuzz
