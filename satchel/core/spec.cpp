#include "satchel/core/spec.h"

#include "satchel/core/error.h"
#include "satchel/core/spec_limits.h"

namespace satchel {
namespace {

constexpr CodecSpec make(int bits, int64_t block, Levels levels, Transform transform = Identity{}) {
  CodecSpec spec;
  spec.bits = bits;
  spec.block = block;
  spec.levels = levels;
  spec.transform = transform;
  return spec;
}

constexpr CodecSpec actnn() {
  CodecSpec spec = make(2, 256, Levels::even);
  spec.per_sample = true;
  return spec;
}

constexpr CodecSpec one_sided() {
  CodecSpec spec = make(2, 256, Levels::optimal);
  spec.side = Side::one_sided;
  return spec;
}

constexpr Preset kPresets[] = {
    {"exact", "random projection 8:1, 2 bits, one block a row", make(2, kRow, Levels::even, RandomProjection{})},
    {"blockwise", "random projection 8:1, 2 bits, blocks of 64 rows, optimal levels", make(2, -64, Levels::optimal, RandomProjection{})},
    {"actnn", "2 bits, blocks of 256 values of one sample", actnn()},
    {"division", "averages over 8x8 in bf16, the rest in 2 bits, one block a map", make(2, kMap, Levels::even, LowPass{})},
    {"gact", "4 bits, blocks of 256 values", make(4, 256, Levels::even)},
    {"satchel", "one-sided code, 2 bits in all, blocks of 256 values", one_sided()},
};

void validate_transform(const CodecSpec& spec, const char* op) {
  if (const auto* p = std::get_if<RandomProjection>(&spec.transform)) {
    if (p->ratio < 1 || p->ratio > kMostScale) fail(op, "projection ratio must be 1 to 2^20", p->ratio);
    if (p->rows < 0 || p->rows > kMostBlock) fail(op, "rows a projection matrix must be 1 to 2^40, or 0 for all", p->rows);
  }
  if (const auto* p = std::get_if<LowPass>(&spec.transform)) {
    if (p->size < 1 || p->size > kMostScale) fail(op, "low-pass window must be 1 to 2^20", p->size);
    if (p->part > Part::high) fail(op, "part must be both, low or high", int(p->part));
    if (p->part != Part::both && spec.bits == kKeep) fail(op, "part=low and part=high take 1 to 8 bits", spec.bits);
  }
}

void validate_side(const CodecSpec& spec, const char* op) {
  if (spec.side == Side::none) return;
  if (!std::holds_alternative<Identity>(spec.transform)) {
    const bool low_pass = std::holds_alternative<LowPass>(spec.transform);
    fail(op, "a side code takes no transform", low_pass ? "a low-pass" : "a projection");
  }
  if (spec.side == Side::both && (spec.bits < 2 || spec.bits > 4)) fail(op, "side=both takes 2 to 4 bits", spec.bits);
  if (spec.side != Side::both && spec.bits != 2 && spec.bits != 3) {
    fail(op, spec.side == Side::relu ? "side=relu takes 2 or 3 bits" : "side=one takes 2 or 3 bits", spec.bits);
  }
}

}  // namespace

std::span<const Preset> presets() { return kPresets; }

void validate(const CodecSpec& spec, const char* op) {
  if ((spec.bits < 1 || spec.bits > 8) && spec.bits != kKeep) fail(op, "bits must be 1 to 8 or 32", spec.bits);
  if (spec.block == 0 || spec.block > kMostBlock || (spec.block < -kMostBlock && spec.block != kMap)) {
    fail(op, "block must be 1 to 2^40, row, Nrows or map", spec.block);
  }
  if (static_cast<size_t>(spec.levels) >= std::size(kLevelNames))
    fail(op, "levels must be " + std::string(kLevelChoices), int(spec.levels));
  if (spec.rounding > Rounding::nearest) fail(op, "rounding must be stochastic or nearest", int(spec.rounding));
  if (spec.header > HeaderType::f32) fail(op, "header must be bf16 or f32", int(spec.header));
  if (spec.side > Side::both) fail(op, "side must be none, one, relu or both", int(spec.side));
  if (spec.off > Off::sampled) fail(op, "off must be mean or sampled", int(spec.off));
  validate_transform(spec, op);
  validate_side(spec, op);
}

}  // namespace satchel
