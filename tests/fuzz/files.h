// Whole files for seeds, and containers that fuzz targets wrap their input in: a fuzzer does not guess checksums.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "satchel/data/graph_data.h"

namespace satchel::fuzz {

template <class T>
std::string raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

/// An .npy file; the shape as Python writes it.
std::string npy(const std::string& descr, const std::string& shape, const std::string& values);

/// A zip archive of stored files.
std::string zip(const std::vector<std::pair<std::string, std::string>>& files);

std::string gzip(std::string_view text);

/// An npz file of these arrays in the fixed order of a target, from an input of Parts: an array that is absent is left out.
std::string npz_of(std::string_view input, const std::vector<std::string>& names);

/// What load_graph() promises of what it gives back.
void check_graph(const GraphData& data);

}  // namespace satchel::fuzz
