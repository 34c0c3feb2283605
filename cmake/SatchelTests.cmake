# One test program a room, each one entry of ctest; pick single tests with --gtest_filter.
find_package(GTest REQUIRED)

# What tests of many rooms share (tests/support.h). No torch.
add_library(satchel_test_support STATIC tests/support.cpp)
target_link_libraries(satchel_test_support PUBLIC satchel_core GTest::gtest PRIVATE satchel_flags)

# satchel_test(NAME LIBRARY SOURCE…); where `launcher` is set, that runs it.
function(satchel_test name library)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE ${library} satchel_test_support GTest::gtest GTest::gtest_main satchel_flags)
  # What is tested is in the library. -O0 compiles in half the time of -O1, but not tests on torch, whose headers take most of it.
  if(library STREQUAL satchel_core)
    set(level -O0)
  else()
    set(level -O1)
  endif()
  set_target_properties(${name} PROPERTIES SATCHEL_LEVEL ${level})
  target_compile_options(${name} PRIVATE ${level})
  add_test(NAME ${name} COMMAND ${launcher} "$<TARGET_FILE:${name}>")
endfunction()

satchel_test(test_core satchel_core
  tests/core/allocate_test.cpp
  tests/core/code_test.cpp
  tests/core/distribution_test.cpp
  tests/core/layout_test.cpp
  tests/core/levels_test.cpp
  tests/core/method_test.cpp
  tests/core/noise_test.cpp
  tests/core/number_test.cpp
  tests/core/projection_test.cpp
  tests/core/side_test.cpp
  tests/core/spec_test.cpp)
satchel_test(test_kernels satchel_core
  tests/kernels/block_test.cpp
  tests/kernels/boundary_test.cpp
  tests/kernels/chain_test.cpp
  tests/kernels/chance_test.cpp
  tests/kernels/edge_test.cpp
  tests/kernels/gpu_test.cpp
  tests/kernels/mixed_test.cpp
  tests/kernels/off_plane_test.cpp
  tests/kernels/registry_test.cpp
  tests/kernels/side_chance_test.cpp
  tests/kernels/side_test.cpp
  tests/kernels/sparse_test.cpp
  tests/kernels/stream_test.cpp
  tests/kernels/transform_test.cpp)
satchel_test(test_data satchel_core
  tests/data/error_text_test.cpp
  tests/data/file_format_test.cpp
  tests/data/graph_folders_test.cpp
  tests/data/graph_loaders_test.cpp
  tests/data/image_augment_test.cpp
  tests/data/image_files_test.cpp
  tests/data/image_jpeg_test.cpp
  tests/data/image_loader_test.cpp
  tests/data/image_png_test.cpp
  tests/data/image_synthetic_test.cpp
  tests/data/npy_test.cpp
  tests/data/npz_test.cpp
  tests/data/scene_boxes_test.cpp
  tests/data/scene_loader_test.cpp
  tests/data/scenes_test.cpp
  tests/data/split_test.cpp
  tests/data/synthetic_test.cpp
  tests/train/safetensors_test.cpp)
target_link_libraries(test_data PRIVATE ZLIB::ZLIB PkgConfig::libpng PkgConfig::libturbojpeg PkgConfig::libzip nlohmann_json::nlohmann_json)
satchel_test(test_plan satchel_core
  tests/plan/graph_plan_test.cpp
  tests/plan/image_memory_test.cpp
  tests/plan/image_plan_test.cpp)

# Which GPUs are compiled for, with a made-up nvidia-smi.
add_test(NAME build_architectures COMMAND "${CMAKE_COMMAND}" "-DSATCHEL_SOURCE=${PROJECT_SOURCE_DIR}"
  "-DSCRATCH=${PROJECT_BINARY_DIR}/architectures" -P "${PROJECT_SOURCE_DIR}/tests/build/architectures.cmake")

# The order of rooms, links of README and docs, and the tables of results: python3's standard library only.
find_package(Python3 QUIET COMPONENTS Interpreter)
if(Python3_FOUND)
  add_test(NAME house_order COMMAND "${Python3_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/scripts/check_house.py")
  add_test(NAME docs_links COMMAND "${Python3_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/scripts/check_links.py")
  add_test(NAME docs_reproduce COMMAND "${Python3_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/scripts/reproduce.py" --check)
  add_test(NAME docs_scripts COMMAND "${Python3_EXECUTABLE}" -B -m unittest discover -s "${PROJECT_SOURCE_DIR}/tests/docs" -p "*_test.py")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND NOT SATCHEL_SANITIZE)
    include(SatchelEmulation)
  endif()
endif()

if(SATCHEL_TORCH)
  satchel_test(test_tensor satchel
    tests/tensor/chain_test.cpp
    tests/tensor/chance_test.cpp
    tests/tensor/errors_test.cpp
    tests/tensor/file_test.cpp
    tests/tensor/golden_test.cpp
    tests/tensor/low_pass_last_test.cpp
    tests/tensor/mask_test.cpp
    tests/tensor/per_sample_test.cpp
    tests/tensor/ops_test.cpp
    tests/tensor/pack_test.cpp
    tests/tensor/rounding_test.cpp
    tests/tensor/side_test.cpp
    tests/tensor/split_product_test.cpp
    tests/tensor/extra_bit_test.cpp
    tests/tensor/transform_test.cpp)
  target_link_libraries(test_tensor PRIVATE ZLIB::ZLIB)
  target_precompile_headers(test_tensor PRIVATE <ATen/ATen.h> <gtest/gtest.h>)  # two thirds of each file's time

  satchel_test(test_autograd satchel
    tests/autograd/before_norm_test.cpp
    tests/autograd/bf16_test.cpp
    tests/autograd/cases.cpp
    tests/autograd/conv_cases.cpp
    tests/autograd/gradient.cpp
    tests/autograd/gradient_test.cpp
    tests/autograd/loss_test.cpp
    tests/autograd/image_cases.cpp
    tests/autograd/packing_rows_test.cpp
    tests/autograd/packing_test.cpp
    tests/autograd/pair_test.cpp
    tests/autograd/pairs.cpp
    tests/autograd/reader_test.cpp
    tests/autograd/report_test.cpp
    tests/autograd/seeds_test.cpp
    tests/autograd/statistics_test.cpp
    tests/graph/adjacency_test.cpp
    tests/graph/csr_test.cpp
    tests/graph/input_test.cpp
    tests/graph/multiply_test.cpp
    tests/graph/parts_test.cpp
    tests/graph/weighted_test.cpp
    tests/models/graph_model_test.cpp)
  target_precompile_headers(test_autograd PRIVATE <torch/nn/module.h> <gtest/gtest.h>)
  target_link_libraries(test_autograd PRIVATE nlohmann_json::nlohmann_json)
  set_source_files_properties(tests/autograd/packing_rows_test.cpp PROPERTIES
    COMPILE_DEFINITIONS SATCHEL_POLICY="${PROJECT_SOURCE_DIR}/python/satchel/policy.json")

  # 60 seconds of random programs; SATCHEL_FUZZ_SECONDS says otherwise.
  satchel_test(test_fuzz satchel
    tests/autograd/fuzz_program.cpp
    tests/autograd/fuzz_steps.cpp
    tests/autograd/fuzz_torch_steps.cpp
    tests/autograd/fuzz_test.cpp)
  target_precompile_headers(test_fuzz REUSE_FROM test_autograd)

  satchel_test(test_nn satchel
    tests/autograd/gradient.cpp
    tests/models/image_model_test.cpp
    tests/models/segmentation_test.cpp
    tests/models/torchvision_names_test.cpp
    tests/nn/conv_test.cpp
    tests/nn/convert_test.cpp
    tests/nn/gate_test.cpp
    tests/nn/linear_test.cpp
    tests/nn/mlp_bytes_test.cpp
    tests/nn/norm_test.cpp
    tests/nn/pool_test.cpp
    tests/nn/waiting_test.cpp
    tests/plan/kept_test.cpp
    tests/plan/bit_allocator_images_test.cpp
    tests/plan/bit_allocator_test.cpp)
  target_precompile_headers(test_nn REUSE_FROM test_autograd)

  satchel_test(test_detect satchel
    tests/autograd/box_loss_test.cpp
    tests/autograd/roi_align_test.cpp
    tests/models/detection_test.cpp
    tests/train/box_score_test.cpp
    tests/train/detect_train_test.cpp)
  target_link_libraries(test_detect PRIVATE nlohmann_json::nlohmann_json)
  target_precompile_headers(test_detect REUSE_FROM test_autograd)

  satchel_test(test_train satchel
    tests/graph/gin_test.cpp
    tests/train/graph_layers_test.cpp
    tests/train/graph_task_test.cpp
    tests/train/expandable_segments_test.cpp
    tests/train/image_train_test.cpp
    tests/train/async_scalar_test.cpp
    tests/train/memory_test.cpp
    tests/train/metrics_test.cpp
    tests/train/optimizer_test.cpp
    tests/train/pretrained_test.cpp
    tests/train/schedule_test.cpp
    tests/train/segment_train_test.cpp
    tests/train/step_test.cpp
    tests/train/threads_test.cpp
    tests/train/train_checkpoint_test.cpp
    tests/train/train_f16_test.cpp
    tests/train/train_test.cpp)
  target_precompile_headers(test_train REUSE_FROM test_autograd)

  satchel_test(test_tools satchel_core
    tests/tools/analyse_test.cpp
    tests/tools/bench_bias_test.cpp
    tests/tools/bench_chain_test.cpp
    tests/tools/data_command_test.cpp
    tests/tools/data_options_test.cpp
    tests/tools/graph_layers_test.cpp
    tests/tools/overwrite_test.cpp
    tests/tools/plan_command_test.cpp
    tests/tools/plan_image_test.cpp
    tests/tools/report_test.cpp
    tests/tools/tool_test.cpp
    tests/tools/bench_graph_test.cpp
    tests/tools/predict_command_test.cpp
    tests/tools/train_command_test.cpp
    tests/tools/train_detect_test.cpp
    tests/tools/train_images_test.cpp
    tests/tools/train_segment_test.cpp
    tests/tools/words_test.cpp)
  target_link_libraries(test_tools PRIVATE nlohmann_json::nlohmann_json PkgConfig::libturbojpeg PkgConfig::libzip ZLIB::ZLIB)
  target_compile_definitions(test_tools PRIVATE SATCHEL_TOOL="$<TARGET_FILE:satchel_tool>")
  add_dependencies(test_tools satchel_tool)
  set_tests_properties(test_tools PROPERTIES COST 100)  # the longest: ctest starts it first

  foreach(example pack_tensor packing train_graph train_images)
    add_executable(${example} examples/${example}.cpp)
    target_link_libraries(${example} PRIVATE satchel satchel_flags)
    target_compile_options(${example} PRIVATE -O0)  # as those tests
    add_test(NAME example_${example} COMMAND ${example})
  endforeach()

  # README's program, word for word.
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/README.md")
  file(READ "${PROJECT_SOURCE_DIR}/README.md" readme)
  if(NOT readme MATCHES "```cpp\n([^`]*)```")
    message(FATAL_ERROR "README.md must have a program in C++")
  endif()
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/readme.cpp" CONTENT "${CMAKE_MATCH_1}" @ONLY)
  add_executable(readme "${PROJECT_BINARY_DIR}/readme.cpp")
  target_link_libraries(readme PRIVATE satchel satchel_flags)
  target_compile_options(readme PRIVATE -O0)
  add_test(NAME example_readme COMMAND readme)

  # What find_package(Satchel) gives a program elsewhere. A sanitized library would force its sanitizers on that program.
  if(NOT SATCHEL_SANITIZE)
    add_test(NAME consumer COMMAND "${PROJECT_SOURCE_DIR}/tests/consumer/run.sh"
      "${CMAKE_COMMAND}" "${PROJECT_BINARY_DIR}" "${SATCHEL_TORCH_FOLDER}" "${CMAKE_MAKE_PROGRAM}")
  endif()
endif()

# What needs a GPU, one program a family of kernels; elsewhere ctest says that it was skipped. `test_cuda` builds them all, and
# scripts/sanitize_cuda.sh runs them under compute-sanitizer.
if(SATCHEL_TENSOR_CUDA)
  set(launcher "${PROJECT_SOURCE_DIR}/scripts/with_gpu.sh")
  add_custom_target(test_cuda)
  # satchel_cuda_test(FAMILY SOURCE…)
  function(satchel_cuda_test family)
    set(name test_cuda_${family})
    satchel_test(${name} satchel ${ARGN})
    target_link_libraries(${name} PRIVATE CUDA::cudart)
    target_precompile_headers(${name} REUSE_FROM test_tensor)
    set_tests_properties(${name} PROPERTIES LABELS cuda SKIP_RETURN_CODE 77 RESOURCE_LOCK gpu)  # some measure the GPU's memory
    add_dependencies(test_cuda ${name})
  endfunction()

  satchel_cuda_test(codec
    tests/cuda/per_sample_cuda_test.cpp
    tests/cuda/pack_cuda_test.cpp
    tests/cuda/stream_cuda_test.cpp
    tests/cuda/extra_bit_cuda_test.cpp
    tests/cuda/transform_cuda_test.cpp)
  satchel_cuda_test(low_pass
    tests/cuda/low_pass_last_cuda_test.cpp
    tests/cuda/norm_low_pass_cuda_test.cpp)
  satchel_cuda_test(norm_act
    tests/autograd/gradient.cpp
    tests/cuda/chain_cuda_test.cpp
    tests/cuda/f16_cuda_test.cpp
    tests/cuda/mlp_bytes_cuda_test.cpp
    tests/cuda/norm_act_cuda_test.cpp)
  satchel_cuda_test(norm_block
    tests/cuda/norm_block_cuda_test.cpp)
  satchel_cuda_test(row_norm
    tests/cuda/row_norm_cuda_test.cpp)
  satchel_cuda_test(norm_image
    tests/cuda/norm_add_cuda_test.cpp
    tests/cuda/norm_image_cuda_test.cpp
    tests/cuda/pool_cuda_test.cpp)
  satchel_cuda_test(product
    tests/cuda/loss_cuda_test.cpp
    tests/cuda/norm_act_product_cuda_test.cpp
    tests/cuda/project_product_cuda_test.cpp
    tests/cuda/sparse_cuda_test.cpp)
  satchel_cuda_test(split
    tests/autograd/gradient.cpp
    tests/cuda/split_layer_cuda_test.cpp
    tests/cuda/split_product_cuda_test.cpp)
  satchel_cuda_test(autograd
    tests/autograd/cases.cpp
    tests/autograd/conv_cases.cpp
    tests/autograd/gradient.cpp
    tests/autograd/image_cases.cpp
    tests/cuda/autograd_cuda_test.cpp
    tests/cuda/epilogue_cuda_test.cpp
    tests/cuda/bf16_cuda_test.cpp
    tests/cuda/packing_cuda_test.cpp
    tests/cuda/torch_rules_cuda_test.cpp)
  satchel_cuda_test(train
    tests/cuda/detect_cuda_test.cpp
    tests/cuda/image_train_cuda_test.cpp
    tests/cuda/segment_cuda_test.cpp
    tests/cuda/train_cuda_test.cpp)
endif()
