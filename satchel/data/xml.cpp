#include "satchel/data/xml.h"

#include <algorithm>
#include <utility>

#include "satchel/data/numbers.h"
#include "satchel/data/printable.h"

namespace satchel {
namespace {

constexpr int kMostDepth = 64;

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' || c == '.' || c == ':';
}

class XmlReader {
 public:
  XmlReader(std::string_view text, const std::string& path) : rest_(text), path_(path) {}

  XmlElement document() {
    if (rest_.starts_with("\xef\xbb\xbf")) take(3);
    skip_space();
    if (rest_.starts_with("<?")) take_past("?>", "<?…?> must end");
    skip_between();
    XmlElement root = element(0);
    skip_between();
    if (!rest_.empty()) wrong("nothing may follow the root element", rest_);
    return root;
  }

 private:
  [[noreturn]] void wrong(const std::string& rule, std::string_view got) const {
    refuse(path_ + ": line " + std::to_string(line_) + ":", rule, got.empty() ? "the file's end" : printable(got));
  }
  void take(size_t count) {
    line_ += std::ranges::count(rest_.substr(0, count), '\n');
    rest_.remove_prefix(count);
  }
  void take_past(std::string_view end, const char* rule) {
    const size_t at = rest_.find(end);
    if (at == rest_.npos) wrong(rule, rest_);
    take(at + end.size());
  }
  void skip_space() {
    const auto at = std::ranges::find_if_not(rest_, is_space);
    take(static_cast<size_t>(at - rest_.begin()));
  }
  void skip_between() {
    for (skip_space(); rest_.starts_with("<!--"); skip_space()) take_past("-->", "a comment must end with -->");
  }
  std::string name() {
    const auto size = static_cast<size_t>(std::ranges::find_if_not(rest_, is_name) - rest_.begin());
    if (size == 0) wrong("a tag must have a name", rest_);
    std::string found(rest_.substr(0, size));
    take(size);
    return found;
  }
  /// name="value" as often as it stands there.
  void skip_attributes() {
    for (skip_space(); !rest_.empty() && is_name(rest_[0]); skip_space()) {
      name();
      skip_space();
      if (!rest_.starts_with('=')) wrong("an attribute must have a value", rest_);
      take(1);
      skip_space();
      if (!rest_.starts_with('"') && !rest_.starts_with('\'')) wrong("an attribute's value must stand in quotes", rest_);
      const std::string quote(rest_.substr(0, 1));
      take(1);
      take_past(quote, "a quote must end");
    }
  }

  XmlElement element(int depth) {
    if (depth >= kMostDepth) wrong("elements may stand at most 64 deep", rest_);
    if (!rest_.starts_with('<') || rest_.starts_with("<!") || rest_.starts_with("<?") || rest_.starts_with("</"))
      wrong("an element must begin with <name", rest_);
    XmlElement e;
    e.line = line_;
    take(1);
    e.name = name();
    skip_attributes();
    if (rest_.starts_with("/>")) {
      take(2);
      return e;
    }
    if (!rest_.starts_with('>')) wrong("a tag must end with >", rest_);
    take(1);
    content(e, depth);
    return e;
  }

  void content(XmlElement& e, int depth) {
    for (;;) {
      const size_t size = std::min(rest_.find('<'), rest_.size());
      e.text += plain(rest_.substr(0, size));
      take(size);
      if (rest_.empty()) wrong("<" + e.name + "> of line " + std::to_string(e.line) + " must end", rest_);
      if (rest_.starts_with("<!--")) {
        take_past("-->", "a comment must end with -->");
      } else if (rest_.starts_with("</")) {
        take(2);
        const std::string end = name();
        skip_space();
        if (end != e.name || !rest_.starts_with('>'))
          wrong("</" + e.name + "> must end the element of line " + std::to_string(e.line), "</" + end);
        take(1);
        break;
      } else {
        e.children.push_back(element(depth + 1));
      }
    }
    const auto first = std::ranges::find_if_not(e.text, is_space);
    e.text.erase(e.text.begin(), first);
    while (!e.text.empty() && is_space(e.text.back())) e.text.pop_back();
  }

  std::string plain(std::string_view text) const {
    static constexpr std::pair<std::string_view, char> kEntities[] = {
        {"&lt;", '<'}, {"&gt;", '>'}, {"&amp;", '&'}, {"&quot;", '"'}, {"&apos;", '\''}};
    std::string out;
    while (!text.empty()) {
      if (text[0] != '&') {
        out += text[0];
        text.remove_prefix(1);
        continue;
      }
      const auto* found = std::ranges::find_if(kEntities, [&](const auto& e) { return text.starts_with(e.first); });
      if (found == std::end(kEntities)) wrong("& must begin &lt; &gt; &amp; &quot; or &apos;", text);
      out += found->second;
      text.remove_prefix(found->first.size());
    }
    return out;
  }

  std::string_view rest_;
  const std::string& path_;
  int64_t line_ = 1;
};

}  // namespace

const XmlElement* XmlElement::child(std::string_view wanted) const {
  const auto found = std::ranges::find(children, wanted, &XmlElement::name);
  return found == children.end() ? nullptr : &*found;
}

XmlElement parse_xml(std::string_view text, const std::string& path) { return XmlReader(text, path).document(); }

}  // namespace satchel
