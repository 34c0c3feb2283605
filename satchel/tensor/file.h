// Packed to and from a file: magic, version, checksum; a truncated or altered file is refused with what is wrong.
#pragma once

#include <string>

#include "satchel/tensor/packed.h"

namespace satchel {

/// Writes to `path` through a temporary file beside it: whole or not at all. Replaces plain files only, no link, device or pipe.
/// CUDA tensors are copied to the host first.
void write_packed(const Packed& packed, const std::string& path);

/// Reads what write_packed wrote, onto the CPU.
Packed read_packed(const std::string& path);

}  // namespace satchel
