// The words and ranges of an image run's options, and the settings of torch that it runs under. Private to this room and tools.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "satchel/train/expandable_segments.h"
#include "satchel/train/image_train.h"
#include "satchel/train/names.h"

namespace satchel {

template <>
struct Names<Decay> {
  static constexpr const char* what = "schedule";
  static constexpr std::array all{std::pair{"cosine", Decay::cosine}, std::pair{"step", Decay::step},
                                  std::pair{"onecycle", Decay::onecycle}, std::pair{"poly", Decay::poly}, std::pair{"none", Decay::none}};
};
/// Does autocast compute in 16 bits?
inline bool is_half(Amp amp) { return amp == Amp::bf16 || amp == Amp::fp16; }

/// Throws `[train] rule, got value` unless every number is in its range.
void validate(const ImageTrainOptions& options);

/// The run's learning rates, in epochs of so many steps.
Schedule schedule_of(const ImageTrainOptions& options, int64_t steps_per_epoch);

/// The model's sizes for such images; a stem for small ones where nothing else is asked for.
ImageShape shape_of(const ImageTrainOptions& options, int64_t classes, int64_t channels, int64_t height, int64_t width);

/// What the plan says that a batch keeps.
std::vector<SavedTensor> planned_saves(const ImageTrainOptions& options, const ImageShape& shape, int64_t height, int64_t width);

/// What torch's convolutions and products do on a CUDA device.
struct ConvolutionOptions {
  bool tf32 = false;              // float32 ones in TF32
  bool tries = true;              // cuDNN tries its algorithms on every new shape and keeps the fastest
  bool growing_segments = false;  // as wants_growing_segments(): of torch's allocator (expandable_segments.h)
};

/// While it lives, torch's settings are those, on a CUDA device; then as before. All threads': torch has one setting.
class ConvolutionSettings {
 public:
  ConvolutionSettings(at::Device device, const ConvolutionOptions& options);
  ~ConvolutionSettings();
  ConvolutionSettings(const ConvolutionSettings&) = delete;
  ConvolutionSettings& operator=(const ConvolutionSettings&) = delete;

 private:
  bool cuda_, products_ = false, convolutions_ = false, tries_ = false;
  std::optional<ExpandableSegments> segments_;
};

}  // namespace satchel
