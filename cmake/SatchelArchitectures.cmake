# Which GPUs the kernels are compiled for. No language, no torch: tests/build/architectures.cmake runs it as a script.

# The kernels need compute capability 8.0 (Ampere): `__reduce_*_sync`, cp.async.
set(SATCHEL_OLDEST_ARCHITECTURE 80)

# CMAKE_CUDA_ARCHITECTURES=release: machine code for every GPU since Ampere that people train on (A100; RTX 30, A40; RTX 40, L40; H100, H200;
# B200; RTX 50), and PTX of the newest for those to come.
set(SATCHEL_RELEASE_ARCHITECTURES 80-real 86-real 89-real 90-real 100-real 120)

# satchel_choose_architectures(RESULT REASON): what CMAKE_CUDA_ARCHITECTURES should be under SATCHEL_CUDA (AUTO or ON). Empty where there
# is nothing to compile for, and then REASON says why.
#   CMAKE_CUDA_ARCHITECTURES given (and not "native"): those, none older than the oldest; "release" is the list above
#   GPUs present: theirs, without those that are older
#   no GPU: with ON the PTX of the oldest, which is quick to make and which the driver of any later GPU finishes at first use
function(satchel_choose_architectures result reason)
  set(${result} "" PARENT_SCOPE)
  set(${reason} "" PARENT_SCOPE)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE output ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    set(output "")
  endif()
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${output}")
  list(REMOVE_DUPLICATES capabilities)
  set(present "")
  set(older "")
  foreach(capability IN LISTS capabilities)
    string(REPLACE "." "" architecture "${capability}")
    if(architecture LESS SATCHEL_OLDEST_ARCHITECTURE)
      list(APPEND older ${capability})
    else()
      list(APPEND present ${architecture})
    endif()
  endforeach()
  list(JOIN older ", " older_text)

  if(SATCHEL_CUDA STREQUAL "AUTO" AND NOT present)
    if(older)
      set(${reason} "the GPUs present have compute capability ${older_text}, and the kernels need 8.0 or newer" PARENT_SCOPE)
    else()
      set(${reason} "no GPU is present (nvidia-smi lists none); SATCHEL_CUDA=ON compiles for one elsewhere" PARENT_SCOPE)
    endif()
    return()
  endif()

  if(CMAKE_CUDA_ARCHITECTURES STREQUAL "release")
    set(${result} "${SATCHEL_RELEASE_ARCHITECTURES}" PARENT_SCOPE)
  elseif(CMAKE_CUDA_ARCHITECTURES AND NOT CMAKE_CUDA_ARCHITECTURES STREQUAL "native")
    foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
      string(REGEX MATCH "^[0-9]+" number "${architecture}")
      if(NOT number OR number LESS SATCHEL_OLDEST_ARCHITECTURE)
        set(${reason} "CMAKE_CUDA_ARCHITECTURES must be a list of ${SATCHEL_OLDEST_ARCHITECTURE} or newer, got ${architecture}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
    set(${result} "${CMAKE_CUDA_ARCHITECTURES}" PARENT_SCOPE)
  elseif(present)
    if(older)
      message(STATUS "satchel: GPUs of compute capability ${older_text} are left out: the kernels need 8.0 or newer")
    endif()
    set(${result} "${present}" PARENT_SCOPE)
  elseif(older)
    set(${reason} "the GPUs present have compute capability ${older_text}, and the kernels need 8.0 or newer (-DCMAKE_CUDA_ARCHITECTURES=… compiles for others)" PARENT_SCOPE)
  else()
    set(${result} ${SATCHEL_OLDEST_ARCHITECTURE}-virtual PARENT_SCOPE)
  endif()
endfunction()
