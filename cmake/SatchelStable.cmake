# satchel_stable_module(TARGET FOLDER CORE): the codec as torch ops over torch's stable ABI, a module that Python loads. FOLDER holds torch's
# include/ and lib/, CORE is a static library of core and kernels. Nothing but its registrations is seen from outside, so that a process
# may hold libsatchel too.
function(satchel_stable_module target folder core)
  cmake_path(GET CMAKE_CURRENT_FUNCTION_LIST_DIR PARENT_PATH root)
  if(SATCHEL_TENSOR_CUDA)
    set(on_or_off on)
  else()
    set(on_or_off off)
  endif()
  add_library(${target} MODULE
    "${root}/satchel/kernels/chunks.cpp"
    "${root}/satchel/kernels/coding.cpp"
    "${root}/satchel/kernels/epilogue_codes.cpp"
    "${root}/satchel/stable/activations.cpp"
    "${root}/satchel/stable/coders.cpp"
    "${root}/satchel/stable/interned.cpp"
    "${root}/satchel/stable/layers.cpp"
    "${root}/satchel/stable/norms.cpp"
    "${root}/satchel/stable/ops.cpp"
    "${root}/satchel/stable/parallel.cpp"
    "${root}/satchel/stable/place_${on_or_off}.cpp"
    "${root}/satchel/stable/pools.cpp")
  target_include_directories(${target} PRIVATE "${root}")
  target_include_directories(${target} SYSTEM PRIVATE "${folder}/include")
  target_compile_definitions(${target} PRIVATE TORCH_TARGET_VERSION=0x020a000000000000)  # torch 2.10 and later
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O2>)
  target_link_libraries(${target} PRIVATE ${core} satchel_flags "${folder}/lib/libtorch_cpu.so")
  if(SATCHEL_TENSOR_CUDA)
    target_link_libraries(${target} PRIVATE "${folder}/lib/libtorch_cuda.so")
  endif()
  target_link_options(${target} PRIVATE LINKER:--exclude-libs,ALL LINKER:-Bsymbolic LINKER:--gc-sections LINKER:--no-undefined)
  # torch is in the process before the module is: its libraries are found by name, and no path of this machine stays in the file.
  set_target_properties(${target} PROPERTIES
    PREFIX "" OUTPUT_NAME _satchel CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON SKIP_BUILD_RPATH ON INSTALL_RPATH "")
endfunction()
