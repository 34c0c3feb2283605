// PNG files through libpng. Untrusted: a cut or damaged file is an error. Private.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "satchel/data/scenes.h"

namespace satchel {

/// Does a file that begins with these bytes claim to be PNG?
bool is_png(std::span<const uint8_t> bytes);

/// Three channels of 8 bits from any kind of PNG, interlaced or not: grey is repeated, palettes are looked up, 16 bits are rounded to 8,
/// and opacity (an alpha channel, a transparent colour) is left out, as Pillow's convert("RGB") does. Gamma and colour profiles are not
/// applied. `name` is for errors.
Image decode_png(std::span<const uint8_t> bytes, const std::string& name);

/// A number a pixel: what a palette's index or a grey value of up to 8 bits says. Other kinds of PNG are refused.
Mask decode_png_mask(std::span<const uint8_t> bytes, const std::string& name);

/// A mask as a PNG file of 8-bit palette indices, in the colours that Pascal VOC gives the numbers.
std::vector<uint8_t> encode_png_mask(const Mask& mask);

}  // namespace satchel
