#include "satchel/train/safetensors.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {
namespace {

std::string file(const std::string& json, const std::string& values) {
  std::string out(8, '\0');
  const uint64_t length = json.size();
  std::memcpy(out.data(), &length, sizeof length);
  return out + json + values;
}

}  // namespace

void run(std::string_view input) {
  const TensorFile read = read_safetensors(spill("a.safetensors", input));
  for (const StoredTensor& tensor : read.tensors) {
    int64_t bytes = size_of(tensor.type);
    for (const int64_t size : tensor.shape) bytes *= size;
    require(static_cast<int64_t>(tensor.bytes.size()) == bytes, "a tensor has the bytes of its shape");
    require(read.find(tensor.name) == &tensor, "names are unique");
  }
  const std::string path = scratch() + "/b.safetensors";
  write_safetensors(path, read);
  require(read_safetensors(path) == read, "what is written is read");
}

std::vector<std::string> seeds() {
  return {file(R"({"__metadata__":{"epoch":"3"},"w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})", "abcdefgh"),
          file(R"({"a":{"dtype":"BOOL","shape":[0,3],"data_offsets":[0,0]},"b":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}} )", "xy"),
          file("{}", "")};
}

}  // namespace satchel::fuzz
