// 64 bits of all bytes: tells data sets apart and shows damage, no more. Private to this room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace satchel {

class Digest {
 public:
  template <class T>
  void add(const std::vector<T>& values) {
    add(std::as_bytes(std::span(values)));
  }
  void add(const std::string& text) { add(std::as_bytes(std::span(text))); }
  void add(std::span<const std::byte> values) {
    const std::byte* bytes = values.data();
    const size_t size = values.size();
    mix(size);
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
      uint64_t word;
      std::memcpy(&word, bytes + i, 8);
      mix(word);
    }
    for (; i < size; ++i) mix(static_cast<uint64_t>(bytes[i]));
  }
  std::string text() const {
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(state_));
    return digits;
  }

 private:
  void mix(uint64_t word) {
    state_ = (state_ ^ word) * 0x9E3779B97F4A7C15u;
    state_ ^= state_ >> 29;
  }
  uint64_t state_ = 0x243F6A8885A308D3u;
};

}  // namespace satchel
