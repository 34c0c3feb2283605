// JSON objects of whole numbers and lists of them (class_map.json, role.json), handed over as they are read: no tree is built, so
// files of millions of lists are read in their own size. Private.
#pragma once

#include <cstdint>
#include <string>

namespace satchel {

struct NumberSink {
  virtual ~NumberSink() = default;
  virtual void key(const std::string& name) = 0;  // what follows belongs to it
  virtual void number(int64_t value) = 0;
  virtual void open_list() = 0;
  virtual void close_list() = 0;
};

/// Throws `[load] path: rule, got value` on anything else; what the sink throws goes through.
void read_number_json(const std::string& path, NumberSink& sink);

}  // namespace satchel
