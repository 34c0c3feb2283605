# One libFuzzer program a parser, fuzz_NAME from tests/fuzz/NAME_fuzz.cpp (preset fuzz, `make fuzz`). Needs clang.
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "SATCHEL_FUZZ needs clang, which has libFuzzer; got ${CMAKE_CXX_COMPILER_ID}")
endif()

add_library(fuzz_common STATIC tests/fuzz/files.cpp tests/fuzz/fuzz.cpp)
target_link_libraries(fuzz_common PUBLIC satchel_core ZLIB::ZLIB satchel_flags)

file(GLOB fuzz_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/fuzz/*_fuzz.cpp")
foreach(source ${fuzz_sources})
  get_filename_component(name "${source}" NAME_WE)
  string(REGEX REPLACE "_fuzz$" "" name "${name}")
  add_executable(fuzz_${name} "${source}")
  target_link_libraries(fuzz_${name} PRIVATE fuzz_common PkgConfig::libpng PkgConfig::libturbojpeg)
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
  set_target_properties(fuzz_${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/fuzzers")
endforeach()
