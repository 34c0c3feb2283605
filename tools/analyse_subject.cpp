#include "tools/analyse_subject.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "satchel/core/error.h"
#include "satchel/plan/image_shape.h"

namespace satchel::tool {
namespace {

/// A folder for one file, both gone when it goes.
class TemporaryFile {
 public:
  TemporaryFile() {
    const char* where = std::getenv("TMPDIR");
    folder_ = std::string(where == nullptr || *where == 0 ? "/tmp" : where) + "/satchel-XXXXXX";
    if (::mkdtemp(folder_.data()) == nullptr)
      fail("analyse", std::string("a fresh model needs a folder for temporary files, TMPDIR (") + std::strerror(errno) + ")", folder_);
  }
  ~TemporaryFile() {
    ::unlink(path().c_str());
    ::rmdir(folder_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  std::string path() const { return folder_ + "/run.safetensors"; }

 private:
  std::string folder_;
};

}  // namespace

std::unique_ptr<Subject> make_subject(const SubjectOptions& options) {
  const bool images = options.checkpoint.empty() ? is_image_model(options.model) : checkpoint_format(options.checkpoint) == kImageFormat;
  return images ? image_subject(options) : graph_subject(options);
}

Checkpoint trained_checkpoint(const std::string& format, const std::function<void(const std::string& path)>& train) {
  const TemporaryFile file;
  train(file.path());
  return read_checkpoint(file.path(), format);
}

std::vector<at::Tensor> parameter_gradients(const torch::nn::Module& model, const at::Tensor& loss) {
  const std::vector<at::Tensor> parameters = model.parameters();
  std::vector<at::Tensor> gradients = torch::autograd::grad({loss}, parameters, {}, /*retain_graph=*/false, /*create_graph=*/false,
                                                            /*allow_unused=*/true);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) gradients[i] = at::zeros_like(parameters[i]);
  }
  return gradients;
}

std::vector<std::string> parameter_names(const torch::nn::Module& model) {
  std::vector<std::string> names;
  for (const auto& item : model.named_parameters()) names.push_back(item.key());
  return names;
}

}  // namespace satchel::tool
