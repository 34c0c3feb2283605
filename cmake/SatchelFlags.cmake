# satchel_flags: what every target of this build is compiled with.
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(SATCHEL_CCACHE ccache)
mark_as_advanced(SATCHEL_CCACHE)
if(SATCHEL_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${SATCHEL_CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${SATCHEL_CCACHE}")
endif()

add_library(satchel_flags INTERFACE)
# No fused multiply-add that the source does not spell out: all kernels must write the same bytes.
# -Wrestrict is off because g++ 12 sees it in its own std::string.
target_compile_options(satchel_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;$<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>;-ffp-contract=off>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;--expt-relaxed-constexpr;-Xcompiler=-ffp-contract=off>")
if(SATCHEL_FUZZ)
  target_compile_options(satchel_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
if(SATCHEL_SANITIZE)
  # -O1 -g1: at -O2 -g the vector kernels take three times as long to compile. Tests have a level of their own.
  set(sanitizers -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_compile_options(satchel_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${sanitizers};$<$<NOT:$<BOOL:$<TARGET_PROPERTY:SATCHEL_LEVEL>>>:-O1>;-g1;-UNDEBUG;-D_GLIBCXX_ASSERTIONS>")
  target_link_options(satchel_flags INTERFACE ${sanitizers})
endif()
