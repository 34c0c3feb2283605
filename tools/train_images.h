// `satchel train` of image models: the options that only they have, and the runs.
#pragma once

#include <CLI/App.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "satchel/train/image_train.h"
#include "satchel/train/pretrained.h"
#include "tools/train_runs.h"

namespace satchel::tool {

struct TrainCommand;

struct ImageTrainCommand : RunsCommand {
  std::string amp = "none", schedule = "cosine";
  std::vector<double> milestones;
  bool small_stem = false, large_stem = false, no_augment = false, no_nesterov = false, contiguous = false, skip_broken = false;
  bool gamma_given = false;
  ImageTrainOptions options;
};

constexpr const char* kImageGroup = "Image models";

/// Adds --batch, --schedule …, in a group of their own. What graphs have too (--data, --epochs, --lr …) is the caller's.
void add_image_options(CLI::App& train, ImageTrainCommand& command);

/// Throws UsageError where an option of that group was given: of the other kind of model, it would be silently without effect.
void refuse_given(const CLI::App& train, const std::string& group, const std::string& model);

/// The options of one run.
ImageTrainOptions image_options(const ImageTrainCommand& command, const Method& method, uint64_t seed);
/// Names of JPEG and PNG files that lie in a folder itself, sorted.
std::vector<std::string> image_files_in(const std::string& folder);

/// What both kinds of model have goes over where it was given: their defaults differ.
ImageTrainCommand image_command(const TrainCommand& command, const CLI::App& train);

/// What the text of --help says of image models.
const char* image_train_help();

void run_train_images(const ImageTrainCommand& command);

/// Does a run read its --weights, or does it go on from a checkpoint?
bool starts_from_weights(const ImageTrainOptions& options);
/// Says what of a file of weights is left out, if anything is.
void print_left_out(const std::string& file, const ClassifierFit& fit);

/// Throws UsageError for a graph given to an image model (or the checkpoint of one), which would only say that there is no such folder.
void refuse_graph(const char* op, const std::string& data, const std::string& model);

/// What `satchel predict` reads: the test images of a data set (or, without any, those to train on), or the image files of a folder, by
/// name.
struct ImagesToPredict {
  ImageData data;
  bool labelled = false;
};
ImagesToPredict images_to_predict(const std::string& where);

}  // namespace satchel::tool
