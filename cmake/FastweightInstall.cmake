# Headers, library, and what find_package and pkg-config read.

include(CMakePackageConfigHelpers)

set(config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/fastweight")

install(
  TARGETS fastweight
  EXPORT fastweight-targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/fastweight" DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(
  EXPORT fastweight-targets
  NAMESPACE fastweight::
  DESTINATION ${config_dir})

configure_package_config_file(
  "${CMAKE_CURRENT_LIST_DIR}/fastweight-config.cmake.in" "${PROJECT_BINARY_DIR}/fastweight-config.cmake"
  INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/fastweight-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/fastweight-config.cmake" "${PROJECT_BINARY_DIR}/fastweight-config-version.cmake"
        DESTINATION ${config_dir})

# A static library's users, C programs among them, have to name what it needs; plain `pkg-config --libs` says it all.
if(BUILD_SHARED_LIBS)
  set(pc_requires "Requires.private: libhwy")
  set(pc_libs "-lfastweight")
else()
  set(pc_requires "Requires: libhwy")
  set(pc_libs "-lfastweight -lstdc++ -lm -pthread")
  if(FASTWEIGHT_CUDA)
    string(APPEND pc_libs " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
  endif()
endif()
cmake_path(RELATIVE_PATH CMAKE_INSTALL_FULL_LIBDIR BASE_DIRECTORY "${CMAKE_INSTALL_PREFIX}" OUTPUT_VARIABLE pc_libdir)
cmake_path(RELATIVE_PATH CMAKE_INSTALL_FULL_INCLUDEDIR BASE_DIRECTORY "${CMAKE_INSTALL_PREFIX}" OUTPUT_VARIABLE
           pc_includedir)
cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX BASE_DIRECTORY "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" OUTPUT_VARIABLE
           pc_up)
configure_file("${CMAKE_CURRENT_LIST_DIR}/fastweight.pc.in" "${PROJECT_BINARY_DIR}/fastweight.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/fastweight.pc" DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
