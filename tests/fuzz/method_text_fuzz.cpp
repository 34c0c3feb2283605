#include "satchel/core/method.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {

void run(std::string_view input) {
  for (const Method& method : parse_methods(input)) {
    const Method again = parse_method(method.name);
    require(again.input == method.input && again.norm == method.norm && again.name == method.name, "a method's name gives the method");
    validate(method, "method");
  }
}

std::vector<std::string> seeds() {
  return {"fp32,exact,blockwise,satchel",
          "blockwise,levels=even,block=16rows",
          "satchel,residual=3,mean=2.5,derivative_bits=4",
          "actnn,bits=3",
          "division",
          "gact,bits=4"};
}

}  // namespace satchel::fuzz
