// ActNN's level 5: torch's allocator grows its segments while a run lasts, and everything else that the process asked of it stays.
#include "satchel/train/expandable_segments.h"

#include <c10/core/AllocatorConfig.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "satchel/plan/image_plan.h"
#include "satchel/train/image_options.h"

namespace satchel {
namespace {

using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;

/// Sets torch's allocator and puts it back.
class Settings {
 public:
  explicit Settings(const std::string& text) { c10::CachingAllocator::setAllocatorSettings(text); }
  ~Settings() { c10::CachingAllocator::setAllocatorSettings(before_.empty() ? "expandable_segments:False" : before_); }

 private:
  std::string before_ = c10::CachingAllocator::getAllocatorSettings();
};

TEST(GrowingSegmentsTest, KeepWhatTheProcessAskedFor) {
  const Settings settings("max_split_size_mb:512,garbage_collection_threshold:0.8");
  {
    const ExpandableSegments segments(c10::kCPU);
    EXPECT_TRUE(Config::use_expandable_segments());
    EXPECT_EQ(Config::max_split_size(), size_t{512} << 20);
    EXPECT_EQ(Config::garbage_collection_threshold(), 0.8);
  }
  EXPECT_FALSE(Config::use_expandable_segments());
  EXPECT_EQ(Config::max_split_size(), size_t{512} << 20);
  EXPECT_EQ(Config::garbage_collection_threshold(), 0.8);
}

TEST(GrowingSegmentsTest, StayWhereTheyGrewBefore) {
  const Settings settings("expandable_segments:True");
  std::optional<ExpandableSegments> segments(std::in_place, c10::kCPU);
  segments.reset();
  EXPECT_TRUE(Config::use_expandable_segments());
}

TEST(GrowingSegmentsTest, AreOfMethodsThatPack) {
  for (const char* method : {"actnn,level=5", "actnn", "actnn,level=3", "division", "satchel"}) {
    EXPECT_TRUE(wants_growing_segments(parse_method(method))) << method;
  }
  EXPECT_FALSE(wants_growing_segments(parse_method("fp32")));
}

}  // namespace
}  // namespace satchel
