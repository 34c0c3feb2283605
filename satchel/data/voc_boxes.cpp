// Pascal VOC with boxes: ImageSets/Main/train.txt and val.txt (or trainval.txt and test.txt) name images, Annotations/NAME.xml has their
// objects, JPEGImages/NAME.jpg the pixels. Corners are pixels counted from 1, both included; objects marked difficult count as crowds.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <span>
#include <sstream>
#include <string>

#include "satchel/data/graph_layouts.h"
#include "satchel/data/image_layouts.h"
#include "satchel/data/numbers.h"
#include "satchel/data/printable.h"
#include "satchel/data/scene_layouts.h"
#include "satchel/data/xml.h"

namespace satchel {
namespace {

constexpr uint64_t kMostXml = uint64_t{16} << 20, kMostList = uint64_t{256} << 20;

std::string text_of_file(const std::string& path, uint64_t most) {
  const std::vector<uint8_t> bytes = read_file(path, most);
  return {bytes.begin(), bytes.end()};
}

/// One object as the file has it.
struct VocObject {
  std::string name;
  ObjectBox box;
  int64_t line = 0;
};

class VocFile {
 public:
  VocFile(const std::string& path, std::string name) : path_(path), name_(std::move(name)) {
    const std::string text = text_of_file(path, kMostXml);
    const XmlElement root = parse_xml(text, path);
    if (root.name != "annotation") wrong(root.line, "must have the root <annotation>", "<" + root.name + ">");
    const XmlElement& size = needed(root, "size");
    width_ = number(needed(size, "width"));
    height_ = number(needed(size, "height"));
    if (!(width_ >= 1 && height_ >= 1))
      wrong(size.line, "must have a width and height of 1 or more", std::to_string(width_) + " × " + std::to_string(height_));
    for (const XmlElement& e : root.children) {
      if (e.name == "object") objects.push_back(object(e));
    }
  }
  std::vector<VocObject> objects;

 private:
  [[noreturn]] void wrong(int64_t line, const std::string& rule, const std::string& got) const {
    refuse(path_ + ": line " + std::to_string(line), rule, got);
  }
  const XmlElement& needed(const XmlElement& in, const char* name) const {
    const XmlElement* found = in.child(name);
    if (found == nullptr) wrong(in.line, "must have <" + std::string(name) + "> in <" + in.name + ">", "none");
    return *found;
  }
  double number(const XmlElement& e) const {
    double value = 0;
    const char* end = e.text.data() + e.text.size();
    const auto [at, error] = std::from_chars(e.text.data(), end, value);
    if (error != std::errc() || at != end || !std::isfinite(value)) wrong(e.line, "<" + e.name + "> must be a number", printable(e.text));
    return value;
  }
  VocObject object(const XmlElement& e) const {
    VocObject o;
    o.line = e.line;
    o.name = needed(e, "name").text;
    if (o.name.empty()) wrong(e.line, "an object must have a name", "''");
    const XmlElement& box = needed(e, "bndbox");
    const double left = number(needed(box, "xmin")) - 1, top = number(needed(box, "ymin")) - 1;
    const double right = number(needed(box, "xmax")), bottom = number(needed(box, "ymax"));
    const auto text = [&] {
      std::ostringstream s;
      s << left + 1 << ", " << top + 1 << " to " << right << ", " << bottom << " in " << width_ << " × " << height_;
      return s.str();
    };
    if (!(right > left && bottom > top)) wrong(box.line, "a box must have an area", text());
    if (left < -1 || top < -1 || right > width_ + 1 || bottom > height_ + 1) wrong(box.line, "a box must lie in its image", text());
    o.box.left = static_cast<float>(std::max(left, 0.0));
    o.box.top = static_cast<float>(std::max(top, 0.0));
    o.box.right = static_cast<float>(std::min(right, width_));
    o.box.bottom = static_cast<float>(std::min(bottom, height_));
    if (!(o.box.right > o.box.left && o.box.bottom > o.box.top)) wrong(box.line, "a box must have an area in its image", text());
    if (const XmlElement* difficult = e.child("difficult")) o.box.crowd = number(*difficult) != 0;
    return o;
  }

  const std::string& path_;
  std::string name_;
  double width_ = 0, height_ = 0;
};

struct VocPart {
  SceneData data;
  std::vector<std::vector<VocObject>> objects;
  std::vector<std::string> files;
};

VocPart read_part(const std::string& root, const std::string& list) {
  VocPart part;
  std::istringstream lines(text_of_file(list, kMostList));
  std::string line;
  for (int64_t at = 1; std::getline(lines, line); ++at) {
    std::istringstream words(line);
    std::string name, mark;
    if (!(words >> name)) continue;
    if (words >> mark && mark != "1" && mark != "0" && mark != "-1")
      refuse(list + ": line " + std::to_string(at), "must be a name, and perhaps 1, 0 or -1", printable(line));
    if (name.find('/') != name.npos) refuse(list + ": line " + std::to_string(at), "must be a name without a folder", printable(name));
    std::string image = root + "/JPEGImages/" + name + ".jpg";
    if (!exists(image)) image = root + "/JPEGImages/" + name + ".png";
    if (!exists(image)) refuse(list + ": line " + std::to_string(at), "must name an image in JPEGImages (.jpg or .png)", printable(name));
    const std::string file = root + "/Annotations/" + name + ".xml";
    if (!exists(file)) refuse(list + ": line " + std::to_string(at), "must name a file in Annotations (.xml)", printable(name));
    part.data.paths.push_back(std::move(image));
    part.objects.push_back(VocFile(file, name).objects);
    part.files.push_back(file);
  }
  if (part.data.paths.empty()) refuse(list, "must name images", "none");
  part.data.count = static_cast<int64_t>(part.data.paths.size());
  return part;
}

/// Names of the training objects: VOC's twenty where all are among them, else those that occur, sorted.
std::vector<std::string> names_of(const VocPart& part) {
  std::set<std::string> names;
  for (const auto& objects : part.objects) {
    for (const VocObject& o : objects) names.insert(o.name);
  }
  const std::span<const char* const> usual = voc_class_names();
  const auto is_usual = [&](const std::string& name) { return std::ranges::find(usual, name) != usual.end(); };
  if (std::ranges::all_of(names, is_usual)) return {usual.begin(), usual.end()};
  return {names.begin(), names.end()};
}

void set_labels(VocPart& part, const std::vector<std::string>& names) {
  part.data.class_names = names;
  part.data.classes = static_cast<int64_t>(names.size());
  for (size_t i = 0; i < part.objects.size(); ++i) {
    std::vector<ObjectBox>& boxes = part.data.objects.emplace_back();
    for (VocObject& o : part.objects[i]) {
      const auto found = std::ranges::find(names, o.name);
      if (found == names.end())
        refuse(part.files[i] + ": line " + std::to_string(o.line), "an object's class must be one of the training images'",
               printable(o.name));
      o.box.label = static_cast<int32_t>(found - names.begin());
      boxes.push_back(o.box);
    }
  }
}

}  // namespace

bool is_voc_boxes(const std::string& folder, const std::vector<std::string>& names) {
  const auto has = [&](const char* name) { return std::ranges::find(names, name) != names.end(); };
  return has("JPEGImages") && has("Annotations") && is_folder(folder + "/ImageSets/Main");
}

SceneSets load_voc_boxes(const std::string& root) {
  const std::string at = root + "/ImageSets/Main/";
  const bool halves = exists(at + "train.txt");
  const std::string train = at + (halves ? "train.txt" : "trainval.txt"),
                    test = at + (exists(at + "val.txt") && halves ? "val.txt" : "test.txt");
  if (!exists(train)) refuse(at, "must have train.txt or trainval.txt", listed(names_in(at)));
  VocPart trained = read_part(root, train), tested;
  const std::vector<std::string> names = names_of(trained);
  set_labels(trained, names);
  SceneSets sets;
  if (exists(test)) {
    tested = read_part(root, test);
    set_labels(tested, names);
    sets.test = std::move(tested.data);
  }
  sets.train = std::move(trained.data);
  sets.mean = {0.485F, 0.456F, 0.406F};  // ImageNet's, as for image folders
  sets.deviation = {0.229F, 0.224F, 0.225F};
  return sets;
}

}  // namespace satchel
