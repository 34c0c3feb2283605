# Torch's C++ side, as an imported target made from the wheel's folder. find_package(Torch) would want a CUDA toolkit even for a
# CPU build and add flags of its own. The build uses this file and, installed beside it, so does SatchelConfig.

# satchel_find_torch(RESULT [KNOWN]): the folder that holds torch's include/ and lib/: SATCHEL_TORCH_DIR, else what Torch_DIR points to,
# else, unless Python3_EXECUTABLE is set, KNOWN where it exists, else the torch of Python3_EXECUTABLE or of the first python3; empty where
# there is none.
function(satchel_find_torch result)
  set(folder "${SATCHEL_TORCH_DIR}")
  if(NOT folder AND Torch_DIR)
    cmake_path(ABSOLUTE_PATH Torch_DIR NORMALIZE OUTPUT_VARIABLE folder)
    cmake_path(APPEND folder "../../..")
    cmake_path(NORMAL_PATH folder)
  endif()
  if(NOT folder AND NOT Python3_EXECUTABLE AND ARGC GREATER 1 AND EXISTS "${ARGV1}/include/ATen/ATen.h")
    set(folder "${ARGV1}")
  endif()
  if(NOT folder)
    find_package(Python3 COMPONENTS Interpreter)
    if(Python3_FOUND)
      execute_process(
        COMMAND "${Python3_EXECUTABLE}" -c "import importlib.util as u; print(*u.find_spec('torch').submodule_search_locations)"
        OUTPUT_VARIABLE folder ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    endif()
  endif()
  set(${result} "${folder}" PARENT_SCOPE)
endfunction()

# satchel_torch_target(FOLDER WITH_CUDA): makes Satchel::torch.
function(satchel_torch_target folder with_cuda)
  add_library(Satchel::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(Satchel::torch INTERFACE "${folder}/include" "${folder}/include/torch/csrc/api/include")
  # Without -fopenmp at::parallel_for is silently serial.
  target_compile_options(Satchel::torch INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-fopenmp>")
  # DT_RPATH rather than DT_RUNPATH: only the former also serves the libraries that a library needs.
  target_link_options(Satchel::torch INTERFACE -fopenmp LINKER:--disable-new-dtags)
  if(with_cuda)
    # No symbol of libtorch_cuda is called; it registers torch's CUDA ops as it is loaded, so the linker must not drop it.
    target_link_libraries(Satchel::torch INTERFACE
      "-Wl,--push-state,--no-as-needed" "${folder}/lib/libtorch_cuda.so" "-Wl,--pop-state" "${folder}/lib/libc10_cuda.so")
  endif()
  target_link_libraries(Satchel::torch INTERFACE "${folder}/lib/libtorch_cpu.so" "${folder}/lib/libc10.so")
endfunction()
