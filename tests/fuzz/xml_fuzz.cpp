#include "satchel/data/xml.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {
namespace {

int64_t count(const XmlElement& e) {
  int64_t sum = 1;
  require(!e.name.empty() && e.line >= 1, "an element has a name and a line");
  for (const XmlElement& child : e.children) sum += count(child);
  return sum;
}

}  // namespace

void run(std::string_view input) {
  require(count(parse_xml(input, "a.xml")) * 4 <= static_cast<int64_t>(input.size()), "an element takes four bytes or more: <a/>");
}

std::vector<std::string> seeds() {
  return {
      "<annotation><size><width>50</width><height>40</height></size><object><name>dog</name><bndbox><xmin>1</xmin></bndbox></object>"
      "</annotation>",
      "<?xml version=\"1.0\"?>\n<!-- x --><a k='1' >\n <b> 1 &lt; 2 </b><b/>\n</a> "};
}

}  // namespace satchel::fuzz
