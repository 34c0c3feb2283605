# Headers, libraries and the package that find_package(Satchel) reads. No path of this machine goes into the package: torch and
# the CUDA runtime are found anew where it is used.
include(CMakePackageConfigHelpers)

install(TARGETS ${installed} EXPORT SatchelTargets)
install(DIRECTORY satchel/ DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/satchel" FILES_MATCHING PATTERN "*.h")

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
