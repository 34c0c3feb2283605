// Files of every layout, whole and damaged, in a folder that goes away again.
#pragma once

#include <gtest/gtest.h>
#include <zip.h>
#include <zlib.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "tests/support.h"

namespace satchel::testing_files {

using test::holds;
using test::Scratch;
using test::slurp;
using test::spill;

/// An .npy file; the shape as Python writes it.
inline std::string npy_text(const std::string& descr, const std::string& shape, const std::string& values, bool fortran = false) {
  const std::string dict = "{'descr': '" + descr + "', 'fortran_order': " + (fortran ? "True" : "False") + ", 'shape': " + shape + ", }\n";
  std::string out = "\x93NUMPY";
  out += '\x01';
  out += '\0';
  out += static_cast<char>(dict.size() & 0xff);
  out += static_cast<char>(dict.size() >> 8);
  return out + dict + values;
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  std::string out(values.size() * sizeof(T), '\0');
  if (!values.empty()) std::memcpy(out.data(), values.data(), out.size());
  return out;
}

template <class T>
std::string npy(const std::vector<T>& values, std::string shape = "") {
  if (shape.empty()) shape = "(" + std::to_string(values.size()) + ",)";
  const char kind = std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
  return npy_text((sizeof(T) == 1 ? "|" : "<") + std::string(1, kind) + std::to_string(sizeof(T)), shape, bytes_of(values));
}

using Arrays = std::map<std::string, std::string>;  // name without ".npy" → bytes of an .npy file

inline void write_npz(const std::string& path, const Arrays& arrays, bool deflate = true) {
  std::remove(path.c_str());
  zip_t* archive = zip_open(path.c_str(), ZIP_CREATE, nullptr);
  ASSERT_NE(archive, nullptr);
  for (const auto& [name, bytes] : arrays) {
    zip_source_t* source = zip_source_buffer(archive, bytes.data(), bytes.size(), 0);
    const zip_int64_t index = zip_file_add(archive, (name + ".npy").c_str(), source, 0);
    ASSERT_GE(index, 0);
    ASSERT_EQ(zip_set_file_compression(archive, static_cast<zip_uint64_t>(index), deflate ? ZIP_CM_DEFLATE : ZIP_CM_STORE, 0), 0);
  }
  ASSERT_EQ(zip_close(archive), 0) << zip_strerror(archive);
}

inline void write_gzip(const std::string& path, const std::string& text) {
  gzFile file = gzopen(path.c_str(), "wb");
  ASSERT_NE(file, nullptr);
  ASSERT_EQ(gzwrite(file, text.data(), static_cast<unsigned>(text.size())), static_cast<int>(text.size()));
  gzclose(file);
}

/// What a call throws, with the scratch folder's own path cut away; "accepted" where it throws nothing.
template <class Call>
std::string error_of(const Call& call, const Scratch& scratch) {
  std::string text = test::error_of(call);
  const std::string folder = scratch.path("");
  for (size_t at = text.find(folder); at != std::string::npos; at = text.find(folder)) text.erase(at, folder.size());
  return text;
}

}  // namespace satchel::testing_files
