#include "satchel/core/spec.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {

void run(std::string_view input) {
  const CodecSpec spec = parse_spec(input);
  require(parse_spec(to_string(spec)) == spec, "a spec's text gives the spec");
  validate(spec, "spec");
}

std::vector<std::string> seeds() {
  return {"exact",
          "blockwise,block=16rows,levels=even",
          "bits=4,block=256,rounding=nearest",
          "division,bits=3",
          "satchel,bits=2",
          "actnn,project=8",
          "gact"};
}

}  // namespace satchel::fuzz
