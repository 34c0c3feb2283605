#include "satchel/data/gzip.h"
#include "tests/fuzz/files.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {

void run(std::string_view input) {
  GzipLines lines(spill("a.gz", input));
  std::string_view line;
  int64_t count = 0;
  while (lines.next(line)) {
    require(line.find('\n') == std::string_view::npos, "a line has no end of line");
    require(lines.number() == ++count, "lines are counted");
  }
}

std::vector<std::string> seeds() { return {gzip("1,2\n3,4\r\n\n5"), gzip(""), gzip("a\n") + gzip("b\n"), gzip(std::string(3000, 'x'))}; }

}  // namespace satchel::fuzz
