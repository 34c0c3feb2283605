# satchel_op_objects: what Python's ops (satchel/stable) need of core and kernels, compiled once. libsatchel takes these objects too, and the
# wheel (python/CMakeLists.txt) has nothing else: a source that is missing here links in neither.
cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH root)
add_library(satchel_op_objects OBJECT
  "${root}/satchel/core/keep.cpp"
  "${root}/satchel/core/levels.cpp"
  "${root}/satchel/core/method.cpp"
  "${root}/satchel/core/method_text.cpp"
  "${root}/satchel/core/normal.cpp"
  "${root}/satchel/core/spec.cpp"
  "${root}/satchel/core/spec_text.cpp"
  "${root}/satchel/kernels/codec_layout.cpp"
  "${root}/satchel/kernels/cpu/low_pass.cpp"
  "${root}/satchel/kernels/cpu/narrow.cpp"
  "${root}/satchel/kernels/cpu/project.cpp"
  "${root}/satchel/kernels/cpu/registry.cpp"
  "${root}/satchel/kernels/cpu/scalar.cpp"
  "${root}/satchel/kernels/cpu/slope.cpp")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND NOT SATCHEL_FUZZ)  # no parser needs them, and clang 14 cannot compile them
  set(avx2 "${root}/satchel/kernels/cpu/avx2.cpp")
  set(avx512 "${root}/satchel/kernels/cpu/avx512.cpp")
  target_sources(satchel_op_objects PRIVATE "${avx2}" "${avx512}")
  set_source_files_properties("${avx2}" PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c;-mbmi2")
  # g++ 12 takes its own _mm512_undefined_ps() for a mistake.
  set_source_files_properties("${avx512}" PROPERTIES COMPILE_OPTIONS
    "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mfma;-mf16c;-mbmi2;-Wno-maybe-uninitialized;-Wno-uninitialized")
endif()
if(SATCHEL_WITH_CUDA)
  set(kernels block_decode block_encode chain column_moments epilogue_backward epilogue_forward epilogue_forward_act low_pass low_pass_last
    low_pass_last_decode low_pass_stream_encode low_pass_stream_measure narrow pool project row_norm_backward row_norm_forward side_decode
    side_encode slope)
  list(TRANSFORM kernels PREPEND "${root}/satchel/kernels/cuda/")
  list(TRANSFORM kernels APPEND ".cu")
  target_sources(satchel_op_objects PRIVATE ${kernels} "${root}/satchel/kernels/cuda/launch.cpp")
  target_link_libraries(satchel_op_objects PRIVATE CUDA::toolkit)
else()
  target_sources(satchel_op_objects PRIVATE "${root}/satchel/kernels/cuda/none.cpp" "${root}/satchel/kernels/cuda/slope_none.cpp")
endif()
target_include_directories(satchel_op_objects PRIVATE "${root}")
target_compile_features(satchel_op_objects PRIVATE cxx_std_20)
target_link_libraries(satchel_op_objects PRIVATE satchel_flags)
set_target_properties(satchel_op_objects PROPERTIES POSITION_INDEPENDENT_CODE ON)

# What is above as a library, of which a module exports nothing.
add_library(satchel_ops STATIC $<TARGET_OBJECTS:satchel_op_objects>)
target_include_directories(satchel_ops PUBLIC "${root}")
target_compile_features(satchel_ops PUBLIC cxx_std_20)
set_target_properties(satchel_ops PROPERTIES EXCLUDE_FROM_ALL ON)
