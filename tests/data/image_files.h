// Image files for tests.
#pragma once

#include <gtest/gtest.h>
#include <turbojpeg.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/data/files.h"

namespace satchel::testing_files {

/// An IDX file of bytes.
inline std::string idx(const std::vector<uint32_t>& sizes, const std::string& values, int type = 8) {
  std::string out(2, '\0');
  out += static_cast<char>(type);
  out += static_cast<char>(sizes.size());
  for (const uint32_t size : sizes) {
    for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(size >> shift & 0xff);
  }
  return out + values;
}

/// Three images of 4 by 5 with the bytes 0 … 59 and labels 2, 0, 1; one to test.
inline void write_idx(const Scratch& scratch, const std::string& name, bool packed) {
  const std::string folder = scratch.make_folder(name) + "/";
  std::string values;
  for (int i = 0; i < 60; ++i) values += static_cast<char>(i);
  const auto write = [&](const std::string& file, const std::string& bytes) {
    if (packed) {
      write_gzip(folder + file + ".gz", bytes);
    } else {
      spill(folder + file, bytes);
    }
  };
  write("train-images-idx3-ubyte", idx({3, 4, 5}, values));
  write("train-labels-idx1-ubyte", idx({3}, std::string("\x02\x00\x01", 3)));
  write("t10k-images-idx3-ubyte", idx({1, 4, 5}, std::string(20, '\x07')));
  write("t10k-labels-idx1-ubyte", idx({1}, "\x01"));
}

inline void remove_idx(const Scratch& scratch, const std::string& name) {
  for (const char* file : {"train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"}) {
    for (const char* end : {"-ubyte", "-ubyte.gz"}) std::remove(scratch.path(name + "/" + file + end).c_str());
  }
}

/// A JPEG file of best quality, colours not subsampled, from interleaved values.
inline std::string jpeg(const std::vector<uint8_t>& mixed, int height, int width, int format = TJPF_RGB, int subsampling = TJSAMP_444,
                        int flags = 0) {
  const auto destroy = [](void* handle) { tjDestroy(handle); };
  const std::unique_ptr<void, decltype(destroy)> handle(tjInitCompress(), destroy);
  unsigned char* bytes = nullptr;
  unsigned long length = 0;
  const int code = tjCompress2(handle.get(), mixed.data(), width, 0, height, format, &bytes, &length, subsampling, 100, flags);
  std::string out(reinterpret_cast<const char*>(bytes), code == 0 ? length : 0);
  tjFree(bytes);
  if (code != 0) throw std::runtime_error(tjGetErrorStr2(handle.get()));
  return out;
}

/// One colour.
inline std::string flat_jpeg(int height, int width, uint8_t red, uint8_t green, uint8_t blue) {
  std::vector<uint8_t> mixed;
  for (int i = 0; i < height * width; ++i) mixed.insert(mixed.end(), {red, green, blue});
  return jpeg(mixed, height, width);
}

/// train/ant: two, train/bee: one, val/bee: one; sizes differ.
inline void write_image_folder(const Scratch& scratch, const std::string& name) {
  for (const char* folder : {"", "/train", "/train/ant", "/train/bee", "/val", "/val/bee"}) scratch.make_folder(name + folder);
  spill(scratch.path(name + "/train/ant/a.jpg"), flat_jpeg(20, 30, 200, 200, 200));
  spill(scratch.path(name + "/train/ant/b.JPEG"), flat_jpeg(24, 16, 100, 100, 100));
  spill(scratch.path(name + "/train/bee/a.jpeg"), flat_jpeg(9, 40, 50, 50, 50));
  spill(scratch.path(name + "/train/bee/.hidden"), "");
  spill(scratch.path(name + "/val/bee/a.jpg"), flat_jpeg(33, 33, 0, 0, 0));
}

}  // namespace satchel::testing_files
