// Built where CUDA was not found; captured_cuda_on.cpp stands in elsewhere.
#include "satchel/core/error.h"
#include "satchel/train/captured.h"

namespace satchel {

struct CapturedWork::Parts {};

CapturedWork::CapturedWork(c10::Device) { fail("train", "built without CUDA"); }

CapturedWork::~CapturedWork() = default;

bool CapturedWork::captured() const { return false; }

void CapturedWork::warm_up(const std::function<void()>&) { fail("train", "built without CUDA"); }

void CapturedWork::capture(const std::function<void()>&) { fail("train", "built without CUDA"); }

void CapturedWork::replay() { fail("train", "built without CUDA"); }

}  // namespace satchel
