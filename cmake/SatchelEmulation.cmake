# test_emulation: the CUDA kernels as C++ (tests/emulation), a thread a fiber, so that their bytes are compared where there is no GPU. Not part of
# `all`: `make check` builds and runs it. x86-64 alone, and no sanitizer, which would have to know of the fibers' stacks.
set(emulated "${PROJECT_BINARY_DIR}/emulated")
set(emulation "${PROJECT_SOURCE_DIR}/tests/emulation")
file(GLOB kernel_headers CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/satchel/kernels/cuda/*.cuh")
set(kernels block_decode block_encode chain column_moments column_sums epilogue_backward epilogue_forward epilogue_forward_act loss low_pass low_pass_last
  low_pass_last_decode low_pass_stream_encode low_pass_stream_measure narrow norm_act_product norm_low_pass
  per_sample pool project project_product row_norm_backward row_norm_forward side_decode side_encode slope sparse)
set(kernel_sources ${kernels})
list(TRANSFORM kernel_sources PREPEND "${PROJECT_SOURCE_DIR}/satchel/kernels/cuda/")
list(TRANSFORM kernel_sources APPEND ".cu")
set(translated ${kernels})
list(TRANSFORM translated PREPEND "${emulated}/satchel/kernels/cuda/")
list(TRANSFORM translated APPEND ".cu.cpp")
add_custom_command(OUTPUT ${translated}
  COMMAND "${Python3_EXECUTABLE}" "${emulation}/translate.py" "${emulated}" ${kernel_headers} ${kernel_sources}
  DEPENDS "${emulation}/translate.py" ${kernel_headers} ${kernel_sources} VERBATIM)

set(emulation_flags -O1 -Wno-sign-compare -Wno-unknown-pragmas -Wno-unused-parameter -Wno-unused-but-set-parameter -Wno-maybe-uninitialized)
add_library(satchel_emulated OBJECT EXCLUDE_FROM_ALL ${translated} tests/emulation/emulator.cpp tests/emulation/split_product.cpp)
target_include_directories(satchel_emulated BEFORE PRIVATE "${emulated}" "${emulation}")
target_compile_options(satchel_emulated PRIVATE ${emulation_flags})
target_link_libraries(satchel_emulated PRIVATE satchel_core satchel_flags)

add_executable(test_emulation EXCLUDE_FROM_ALL $<TARGET_OBJECTS:satchel_emulated>
  tests/emulation/codec_test.cpp
  tests/emulation/epilogue_test.cpp
  tests/emulation/loss_test.cpp
  tests/emulation/low_pass_test.cpp
  tests/emulation/norm_act_product_test.cpp
  tests/emulation/norm_block_test.cpp
  tests/emulation/per_sample_test.cpp
  tests/emulation/pool_test.cpp
  tests/emulation/project_test.cpp
  tests/emulation/row_norm_test.cpp
  tests/emulation/sparse_test.cpp)
target_include_directories(test_emulation BEFORE PRIVATE "${emulated}" "${emulation}")
target_compile_options(test_emulation PRIVATE ${emulation_flags})
target_link_libraries(test_emulation PRIVATE satchel_core satchel_test_support GTest::gtest GTest::gtest_main satchel_flags)

# test_emulated_cuda: tests/cuda on a device of torch's that is emulated too, so that the library's way on CUDA runs as well. With CUDA in the
# library a GPU runs them, and there is no such program.
if(SATCHEL_TORCH AND SATCHEL_TENSOR_CUDA)
  add_custom_target(test_emulated_cuda COMMAND "${CMAKE_COMMAND}" -E rm -f test_emulated_cuda)
elseif(SATCHEL_TORCH)
  add_executable(test_emulated_cuda EXCLUDE_FROM_ALL $<TARGET_OBJECTS:satchel_emulated>
    tests/emulation/torch_device.cpp
    tests/autograd/cases.cpp
    tests/autograd/conv_cases.cpp
    tests/autograd/gradient.cpp
    tests/autograd/image_cases.cpp
    tests/cuda/autograd_cuda_test.cpp
    tests/cuda/bf16_cuda_test.cpp
    tests/cuda/chain_cuda_test.cpp
    tests/cuda/detect_cuda_test.cpp
    tests/cuda/epilogue_cuda_test.cpp
    tests/cuda/extra_bit_cuda_test.cpp
    tests/cuda/f16_cuda_test.cpp
    tests/cuda/image_train_cuda_test.cpp
    tests/cuda/loss_cuda_test.cpp
    tests/cuda/low_pass_last_cuda_test.cpp
    tests/cuda/mlp_bytes_cuda_test.cpp
    tests/cuda/norm_act_cuda_test.cpp
    tests/cuda/norm_act_product_cuda_test.cpp
    tests/cuda/norm_add_cuda_test.cpp
    tests/cuda/norm_block_cuda_test.cpp
    tests/cuda/norm_image_cuda_test.cpp
    tests/cuda/norm_low_pass_cuda_test.cpp
    tests/cuda/pack_cuda_test.cpp
    tests/cuda/packing_cuda_test.cpp
    tests/cuda/per_sample_cuda_test.cpp
    tests/cuda/pool_cuda_test.cpp
    tests/cuda/project_product_cuda_test.cpp
    tests/cuda/row_norm_cuda_test.cpp
    tests/cuda/segment_cuda_test.cpp
    tests/cuda/sparse_cuda_test.cpp
    tests/cuda/split_layer_cuda_test.cpp
    tests/cuda/train_cuda_test.cpp
    tests/cuda/transform_cuda_test.cpp)
  target_include_directories(test_emulated_cuda BEFORE PRIVATE "${emulation}")
  target_compile_options(test_emulated_cuda PRIVATE -O1)
  target_precompile_headers(test_emulated_cuda REUSE_FROM test_tensor)
  target_link_libraries(test_emulated_cuda PRIVATE satchel satchel_test_support GTest::gtest GTest::gtest_main satchel_flags)
endif()
