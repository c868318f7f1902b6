# The CUDA compiler and the static runtime: the library has no CUDA library to load, and runs where there is none.
# Emulated, only CUDA's headers are used.
# What FASTWEIGHT_CUDA=AUTO found stays in FASTWEIGHT_CUDA as ON or OFF.

if(FASTWEIGHT_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(FASTWEIGHT_CUDA ON)
  else()
    set(FASTWEIGHT_CUDA OFF)
  endif()
  message(STATUS "CUDA backend: ${FASTWEIGHT_CUDA}")
endif()
if(NOT FASTWEIGHT_CUDA)
  return()
endif()

if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "${FASTWEIGHT_CUDA_ARCHITECTURES}")
endif()
# Those for which there are wgmma and TMA.
set(FASTWEIGHT_SM90_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES})
list(FILTER FASTWEIGHT_SM90_ARCHITECTURES INCLUDE REGEX "^90a")
if(FASTWEIGHT_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${FASTWEIGHT_CCACHE}")
endif()
if(NOT FASTWEIGHT_EMULATE_CUDA)
  enable_language(CUDA)
endif()
if(NOT FASTWEIGHT_EMULATE_CUDA AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
  message(FATAL_ERROR "The CUDA backend needs nvcc 12.0 or newer for C++20, found ${CMAKE_CUDA_COMPILER_VERSION}: "
                      "name another one with CUDACXX=/path/to/nvcc, or leave it out with FASTWEIGHT_CUDA=OFF")
endif()
find_package(CUDAToolkit REQUIRED)
