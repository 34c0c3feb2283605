// Lines of a guard's report, the fields that its options name, and the codes that several readers share. Private to this room.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "satchel/autograd/packing.h"
#include "satchel/autograd/packing_forms.h"

namespace satchel {

inline const void* memory_of(const at::Tensor& t) { return t.storage().unsafeGetStorageImpl(); }
/// While it is held no other memory has this address; the values themselves may go.
using WeakMemory = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// Counts memory once: before packing where it is saved first, after it where it is first kept as it is.
class PackingMeter {
 public:
  /// after: bytes of the packed form; none where the tensor itself is kept.
  void add(PackingReport& report, std::pair<std::string_view, std::string_view> node_field, const at::Tensor& t, const std::string& kept,
           std::optional<int64_t> after);

 private:
  struct Counted {
    WeakMemory memory;
    bool before = false, after = false;
  };
  std::unordered_map<const void*, Counted> counted_;
};

/// include and exclude: patterns of "node" or "node.field".
class FieldNames {
 public:
  FieldNames(std::vector<std::string> include, std::vector<std::string> exclude);
  bool want(std::string_view node, std::string_view field);

 private:
  std::vector<std::string> include_, exclude_;
  std::map<std::pair<std::string_view, std::string_view>, bool> known_;  // the table's own texts
};

/// Codes of tensors that still stand in memory as they were coded. A code lives as long as one of its readers.
class SharedCodes {
 public:
  /// The code of t in that many bits, and whether it is new.
  std::pair<KeptFormPtr, bool> find_or_make(const at::Tensor& t, int bits, const std::function<KeptFormPtr()>& make);

 private:
  using Key = std::tuple<const void*, int64_t, std::vector<int64_t>, std::vector<int64_t>, at::ScalarType, int64_t, int>;
  struct Entry {
    WeakMemory memory;
    std::weak_ptr<const KeptForm> form;
  };
  std::map<Key, Entry> codes_;
  size_t most_ = 256;  // entries, before those without readers go
};

}  // namespace satchel
