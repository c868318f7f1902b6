# The CUDA compiler and the static runtime: the library has no CUDA library to load, and runs where there is none.
# Emulated, only CUDA's headers are used.

if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "${FASTWEIGHT_CUDA_ARCHITECTURES}")
endif()
if(FASTWEIGHT_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${FASTWEIGHT_CCACHE}")
endif()
if(NOT FASTWEIGHT_EMULATE_CUDA)
  enable_language(CUDA)
endif()
if(NOT FASTWEIGHT_EMULATE_CUDA AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
  message(FATAL_ERROR "FASTWEIGHT_CUDA=ON needs nvcc 12.0 or newer for C++20, found ${CMAKE_CUDA_COMPILER_VERSION}")
endif()
find_package(CUDAToolkit REQUIRED)
