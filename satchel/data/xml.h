// XML as annotation files of boxes have it: elements and text. Private.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace satchel {

struct XmlElement {
  std::string name, text;  // text: what stands directly in it, without white space around it
  int64_t line = 1;        // where it begins
  std::vector<XmlElement> children;

  /// The first child of that name; null where there is none.
  const XmlElement* child(std::string_view name) const;
};

/// The root. Attributes are passed over, comments and the first line's <?xml …?> too; no DOCTYPE, no CDATA, no entities but the five of
/// XML. Throws `[load] path: rule, got value` that names the line; at most 64 elements within one another.
XmlElement parse_xml(std::string_view text, const std::string& path);

}  // namespace satchel
