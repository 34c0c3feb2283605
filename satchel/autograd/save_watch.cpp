#include "satchel/autograd/save_watch.h"

#include <utility>

#include "satchel/autograd/step.h"
#include "satchel/core/error.h"

namespace satchel {
namespace {

struct Watched {
  SaveReport report;
};

}  // namespace

SaveWatch::SaveWatch(SaveReport report) {
  Watched& watched = step_context().part<Watched>();
  if (watched.report) fail("watch", "a thread must have one watch of saves at a time", "a second");
  watched.report = std::move(report);
}

SaveWatch::~SaveWatch() { step_context().part<Watched>().report = nullptr; }

void show_save(const std::string& name, Kind kind, const at::Tensor& x) {
  if (const SaveReport& report = step_context().part<Watched>().report; report) report(name, kind, x.detach());
}

}  // namespace satchel
