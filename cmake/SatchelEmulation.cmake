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

add_executable(test_emulation EXCLUDE_FROM_ALL ${translated}
  tests/emulation/codec_test.cpp
  tests/emulation/emulator.cpp
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
target_compile_options(test_emulation PRIVATE -O1 -Wno-sign-compare -Wno-unknown-pragmas -Wno-unused-parameter -Wno-unused-but-set-parameter
  -Wno-maybe-uninitialized)
target_link_libraries(test_emulation PRIVATE satchel_core satchel_test_support GTest::gtest GTest::gtest_main satchel_flags)
