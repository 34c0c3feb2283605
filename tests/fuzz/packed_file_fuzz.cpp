// The header of a packed file.
#include <algorithm>

#include "satchel/kernels/codec_layout.h"
#include "satchel/tensor/file_format.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {

/// The input ends with a flag: whether the checksum is made right, which a fuzzer does not guess.
void run(std::string_view input) {
  std::vector<uint8_t> bytes(input.begin(), input.end());
  const bool repair = !bytes.empty() && (bytes.back() & 1) == 0;
  if (!bytes.empty()) bytes.pop_back();
  const size_t length = header_length(std::span(bytes).first(std::min(bytes.size(), kFileStart)));
  if (length > (size_t{1} << 20)) return;
  if (repair && length >= 4 && bytes.size() >= length - 4) {
    bytes.resize(length - 4);
    const std::vector<uint8_t> sum = checksum(bytes);
    bytes.insert(bytes.end(), sum.begin(), sum.end());
  }
  bytes.resize(std::min(bytes.size(), length));
  const FileHeader header = parse_header(bytes);
  require(header.payload >= 0 && header.shape.size() == header.strides.size(), "a header's sizes fit each other");
  const std::vector<uint8_t> again = format_header(header);
  require(format_header(parse_header(again)) == again, "what is written is read");
}

std::vector<std::string> seeds() {
  std::vector<std::string> out;
  for (const char* text : {"exact", "blockwise", "division", "bits=4,block=256", "satchel", "actnn"}) {
    FileHeader header;
    try {
      header.spec = parse_spec(text);
      header.shape = {6, 256};
      header.strides = {256, 1};
      header.has_seed = true;
      header.payload = plan_of(header.shape, header.dtype, header.spec, header.channels, header.inner, "seed").at.total;
      const std::vector<uint8_t> bytes = format_header(header);
      out.emplace_back(bytes.begin(), bytes.end());
      out.back() += '\0';
    } catch (const std::exception&) {  // a spec that is no preset any more
    }
  }
  return out;
}

}  // namespace satchel::fuzz
