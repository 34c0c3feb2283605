// Packs what any libtorch model saves for backward: the model's code stays as it is.
//
//   at::Tensor loss;
//   {
//     const satchel::Packing packing;
//     loss = loss_of(model->forward(x));
//     std::cout << packing.report();
//   }
//   loss.backward();
//
// After every function of torch's the autograd nodes that it has made are looked at, and what they saved is replaced by a packed form where
// the policy table (python/satchel/policy.json, which Python reads too) has a row for the node and the field. docs/packing.md
#pragma once

#include <cstdint>
#include <iosfwd>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace satchel {

struct PackingOptions {
  int local = 2;             // bits of what only a parameter's gradient reads: inputs of linear and convolution layers, batch norms
  int flow = 4;              // … of what the gradient flows through: slopes of activations, other norms, factors
  int attention = 8;         // … of attention's operands. Each 1 to 8, or 32: exact
  int64_t min_bytes = 4096;  // smaller tensors stay exact
  std::vector<std::string> include = {}, exclude = {};  // patterns (fnmatch) of nodes and fields: "GeluBackward0", "Mul*.other"
  bool report = true;                                   // fill report(): some microseconds a function
};

/// One saved field.
struct PackingLine {
  std::string node, field;  // "ConvolutionBackward0", "input"; the field is empty where the table does not name it
  std::vector<int64_t> shape;
  std::string dtype;
  std::string kept;           // "2 bits", "mask", …; "exact: why"
  int64_t before, after = 0;  // bytes. Memory that several fields share counts once, where it is saved first
};

struct PackingReport {
  std::vector<PackingLine> lines;     // in the order of the forward pass
  std::map<std::string, int> hidden;  // nodes that do not show what they save, and how many: exact

  /// Bytes that torch alone would keep, and that are kept. Parameters are left out.
  int64_t before() const;
  int64_t after() const;
  /// A table by node, field and form, the largest first, and the sum.
  std::string text() const;
};
std::ostream& operator<<(std::ostream& out, const PackingReport& report);

/// Packs in the thread that made it, from its constructor to stop() or its destructor; backward may run inside or outside. Of several in
/// one thread the innermost serves. Throws `[packing] …` on options that do not fit.
class Packing {
 public:
  explicit Packing(PackingOptions options = {});
  ~Packing();
  Packing(const Packing&) = delete;
  Packing& operator=(const Packing&) = delete;

  /// Packs no more. To call in the same thread; a second call does nothing.
  void stop();
  /// What was saved so far.
  const PackingReport& report() const;

 private:
  class Walk;
  friend struct PackingThread;
  std::unique_ptr<Walk> walk_;
};

}  // namespace satchel
