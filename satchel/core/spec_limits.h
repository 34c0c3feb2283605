// How far the numbers of a CodecSpec may go. Private to this room.
#pragma once

#include <cstdint>

namespace satchel {

constexpr int64_t kMostBlock = int64_t{1} << 40;  // values or rows of a block: no memory holds more
constexpr int kMostScale = 1 << 20;               // projection ratio, low-pass window

}  // namespace satchel
