# Public headers, libraries and the package that find_package(Satchel) reads. Of this machine's paths the package knows one, the torch it
# was built with, as the place to look where nothing else is said; the CUDA runtime is found anew where it is used.
include(CMakePackageConfigHelpers)

install(TARGETS ${installed} EXPORT SatchelTargets)
# Which headers are public is seen while they are installed, so that an edit of one needs no new configuration.
if(SATCHEL_TORCH)
  set(public_headers satchel/satchel.h)
else()
  set(public_headers satchel/core/graph_layer.h satchel/core/method.h satchel/data/graph_data.h satchel/data/image_data.h satchel/kernels/cpu/cpu.h
    satchel/plan/graph_plan.h satchel/plan/image_plan.h)
endif()
list(JOIN public_headers " " public_headers)
install(CODE "
  include(\"${PROJECT_SOURCE_DIR}/cmake/SatchelHeaders.cmake\")
  satchel_install_headers(\"${PROJECT_SOURCE_DIR}\" \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_INCLUDEDIR}\" ${public_headers})")

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/Satchel")
install(EXPORT SatchelTargets NAMESPACE Satchel:: DESTINATION "${package_dir}")
configure_package_config_file(cmake/SatchelConfig.cmake.in SatchelConfig.cmake INSTALL_DESTINATION "${package_dir}"
  NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(SatchelConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/SatchelConfig.cmake"
  "${PROJECT_BINARY_DIR}/SatchelConfigVersion.cmake"
  cmake/SatchelTorch.cmake
  DESTINATION "${package_dir}")
