// JPEG files through libturbojpeg. Untrusted: whatever the library warns of (a cut file above all) is an error. Private.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "satchel/data/image_data.h"

namespace satchel {

/// Three channels: grey ones are repeated, CMYK (as Adobe writes it, inverted) is multiplied out. `name` is for errors.
Image decode_jpeg(std::span<const uint8_t> bytes, const std::string& name);

}  // namespace satchel
