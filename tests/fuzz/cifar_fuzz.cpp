#include "satchel/data/image_data.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {
namespace {

/// Which files, then rows of labels only: the 3072 bytes of pixels that follow each are made here.
std::string rows(std::string_view labels, size_t each) {
  std::string out;
  for (size_t i = 0; i < labels.size(); i += each) {
    out += labels.substr(i, each);
    if (labels.size() - i >= each) out.append(3072, 'p');
  }
  return out;
}

}  // namespace

void run(std::string_view input) {
  static const bool made = (make_folder("ten"), make_folder("hundred"), true);
  require(made, "the folders are there");
  Parts parts(input);
  std::string_view train, test, names;
  parts.next(train);
  parts.next(test);
  const bool named = parts.next(names);
  const bool ten = parts.rest.starts_with('1');
  const std::string folder = ten ? "ten/" : "hundred/";
  const size_t each = ten ? 1 : 2;
  spill(folder + (ten ? "data_batch_1.bin" : "train.bin"), rows(train, each));
  spill(folder + (ten ? "test_batch.bin" : "test.bin"), rows(test, each));
  const std::string meta = folder + (ten ? "batches.meta.txt" : "fine_label_names.txt");
  remove(meta);
  if (named) spill(meta, names);
  const ImageSets sets = load_images(scratch() + "/" + folder);
  for (const ImageData* data : {&sets.train, &sets.test}) {
    require(static_cast<int64_t>(data->pixels.size()) == data->count() * 3072, "images have their sizes");
    for (const int32_t label : data->labels) require(label >= 0 && label < data->classes, "labels are classes");
  }
}

std::vector<std::string> seeds() {
  return {joined({std::string("\0\3\11", 3), "\1", "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n"}) + "1",
          joined({std::string("\0\3\11\143", 4), "\1\2"}) + "\xff\xff" + "2"};
}

}  // namespace satchel::fuzz
