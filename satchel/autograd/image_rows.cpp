#include "satchel/autograd/image_rows.h"

#include <ATen/ops/empty_strided.h>

#include "satchel/autograd/node.h"

namespace satchel {
namespace {

/// N×spatial×C, a view.
at::Tensor channels_to_end(const at::Tensor& x) { return x.movedim(1, -1); }

std::vector<int64_t> channels_last_strides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  int64_t run = sizes[1];
  for (size_t d = sizes.size(); d-- > 2;) {
    strides[d] = run;
    run *= sizes[d];
  }
  strides[0] = run;
  return strides;
}

}  // namespace

at::Tensor rows_of_image(const at::Tensor& x) {
  if (!is_image(x)) return x.contiguous();
  int64_t rows = x.size(0);
  for (int64_t d = 2; d < x.dim(); ++d) rows *= x.size(d);
  // Values in order first, then the view: an expanded gradient can be viewed as rows without having its own.
  return channels_to_end(x).contiguous().view({rows, x.size(1)});
}

at::Tensor image_of_rows(const at::Tensor& rows, at::IntArrayRef sizes) {
  if (sizes.empty()) return rows;
  std::vector<int64_t> last(sizes.begin(), sizes.end());
  last.erase(last.begin() + 1);
  last.push_back(sizes[1]);
  return rows.view(last).movedim(-1, 1).variable_data();
}

std::vector<int64_t> image_sizes(const at::Tensor& x) { return is_image(x) ? x.sizes().vec() : std::vector<int64_t>(); }

at::Tensor in_channels_last(const at::Tensor& x) {
  const std::vector<int64_t> strides = channels_last_strides(x.sizes());
  if (x.strides() == at::IntArrayRef(strides)) return x;
  return channels_to_end(x).contiguous().as_strided(x.sizes(), strides);
}

at::Tensor empty_channels_last(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty_strided(sizes, channels_last_strides(sizes), options);
}

at::Tensor take_or_clone_rows(at::Tensor&& g) {
  if (!is_image(g)) return take_or_clone(std::move(g));
  const bool alone = g.use_count() == 1 && g.storage().use_count() == 1;
  at::Tensor rows = rows_of_image(g);
  return alone || !rows.is_alias_of(g) ? rows : rows.clone();
}

}  // namespace satchel
