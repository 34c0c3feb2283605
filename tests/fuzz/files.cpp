#include "tests/fuzz/files.h"

#include <zlib.h>

#include <algorithm>
#include <limits>

#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {
namespace {

void put(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

/// What a local and a central header have in common, from the version needed to the length of extra fields.
std::string about(const std::string& name, const std::string& content) {
  std::string out;
  put(out, 20, 2);
  put(out, 0, 2);           // flags
  put(out, 0, 2);           // stored
  put(out, 0x00210000, 4);  // 1980-01-01
  put(out, crc32(0, reinterpret_cast<const Bytef*>(content.data()), static_cast<uInt>(content.size())), 4);
  put(out, content.size(), 4);
  put(out, content.size(), 4);
  put(out, name.size(), 2);
  put(out, 0, 2);
  return out;
}

bool rising(const std::vector<int64_t>& nodes, int64_t count) {
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i] < 0 || nodes[i] >= count || (i > 0 && nodes[i] <= nodes[i - 1])) return false;
  }
  return true;
}

void check_split(const GraphData& data, const Split& split) {
  require(!split.train.empty(), "a split has nodes to train on");
  std::vector<int> times(static_cast<size_t>(data.nodes), 0);
  for (const auto* part : {&split.train, &split.valid, &split.test}) {
    require(rising(*part, data.nodes), "a part of a split rises within the nodes");
    for (const int64_t node : *part) {
      require(++times[static_cast<size_t>(node)] == 1, "a node is in one part of a split");
      require(data.labels.empty() || data.labels[static_cast<size_t>(node)] >= 0, "a node of a split has a label");
    }
  }
}

}  // namespace

std::string npy(const std::string& descr, const std::string& shape, const std::string& values) {
  const std::string dict = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }\n";
  std::string out = "\x93NUMPY\x01";
  out += '\0';
  put(out, dict.size(), 2);
  return out + dict + values;
}

std::string zip(const std::vector<std::pair<std::string, std::string>>& files) {
  std::string out, directory;
  for (const auto& [name, content] : files) {
    put(directory, 0x02014b50, 4);
    put(directory, 20, 2);  // made by
    directory += about(name, content);
    put(directory, 0, 8);  // comment, disk, attributes
    put(directory, 0, 2);
    put(directory, out.size(), 4);
    directory += name;
    put(out, 0x04034b50, 4);
    out += about(name, content) + name + content;
  }
  const size_t start = out.size();
  out += directory;
  put(out, 0x06054b50, 4);
  put(out, 0, 4);
  put(out, files.size(), 2);
  put(out, files.size(), 2);
  put(out, directory.size(), 4);
  put(out, start, 4);
  put(out, 0, 2);
  return out;
}

std::string gzip(std::string_view text) {
  z_stream stream{};
  require(deflateInit2(&stream, 1, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK, "zlib starts");
  std::string out(deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  require(deflate(&stream, Z_FINISH) == Z_STREAM_END, "zlib packs");
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

std::string npz_of(std::string_view input, const std::vector<std::string>& names) {
  std::vector<std::pair<std::string, std::string>> files;
  Parts parts(input);
  for (const std::string& name : names) {
    std::string_view part;
    if (parts.next(part)) files.emplace_back(name + ".npy", part);
  }
  return zip(files);
}

void check_graph(const GraphData& data) {
  require(data.nodes > 0 && static_cast<int64_t>(data.start.size()) == data.nodes + 1, "edges have a start a node and one more");
  require(data.start.front() == 0 && std::is_sorted(data.start.begin(), data.start.end()), "starts rise from 0");
  require(data.start.back() == static_cast<int64_t>(data.target.size()), "starts end with the number of edges");
  require(std::all_of(data.target.begin(), data.target.end(), [&](int32_t t) { return t >= 0 && t < data.nodes; }), "targets are nodes");
  require(data.weight.empty() || data.weight.size() == data.target.size(), "there is a weight an edge, or none");
  require(std::all_of(data.weight.begin(), data.weight.end(), [](float w) { return w >= 0 && w <= std::numeric_limits<float>::max(); }),
          "weights are finite");
  const Features& x = data.features;
  require(x.rows == data.nodes && x.columns > 0, "there is a row of features a node");
  require(x.sparse() ? x.column.size() == x.value.size() && x.start.back() == static_cast<int64_t>(x.column.size())
                     : static_cast<int64_t>(x.dense.size()) == x.rows * x.columns,
          "features have their sizes");
  require(!data.has_labels() || data.labels.size() == static_cast<size_t>(data.nodes) ||
              data.targets.size() == static_cast<size_t>(data.nodes * data.classes),
          "there is a label a node");
  const int64_t most = data.task == Task::binary ? 2 : data.classes;
  require(std::all_of(data.labels.begin(), data.labels.end(), [&](int32_t l) { return l >= -1 && l < most; }), "labels are classes");
  for (const Split& split : data.splits) check_split(data, split);
}

}  // namespace satchel::fuzz
