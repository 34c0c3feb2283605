// What a method keeps of a norm of images, for tests that pack it themselves.
#pragma once

#include "satchel/core/keep.h"

namespace satchel::test {

inline Keep norm_keep(const Method& method, int64_t channels) {
  Site site;
  site.norm = Norm::batch;
  site.next_reads = false;
  site.image = true;
  site.width = channels;
  return *find(keeps_of(method, site), Kind::norm);
}

}  // namespace satchel::test
