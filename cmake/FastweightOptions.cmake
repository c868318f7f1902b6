# What every target of this project is compiled with.

if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(FASTWEIGHT_CCACHE ccache)
  mark_as_advanced(FASTWEIGHT_CCACHE)
  if(FASTWEIGHT_CCACHE)
    set(CMAKE_C_COMPILER_LAUNCHER "${FASTWEIGHT_CCACHE}")
    set(CMAKE_CXX_COMPILER_LAUNCHER "${FASTWEIGHT_CCACHE}")
  endif()
endif()

if(FASTWEIGHT_FUZZ AND NOT FASTWEIGHT_SANITIZE)
  message(FATAL_ERROR "FASTWEIGHT_FUZZ=ON needs FASTWEIGHT_SANITIZE, for example address,undefined")
endif()
if(FASTWEIGHT_FUZZ AND NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "FASTWEIGHT_FUZZ=ON needs clang, the compiler is ${CMAKE_CXX_COMPILER_ID}")
endif()

# Options for the C and C++ files of a target; nvcc has others.
function(fastweight_host_options target)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:C,CXX>:${ARGN}>")
endfunction()

function(fastweight_options target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(
    ${target}
    PROPERTIES CXX_EXTENSIONS OFF
               C_STANDARD 99
               C_EXTENSIONS OFF
               POSITION_INDEPENDENT_CODE ON)

  # Fused multiply-adds stand in the SIMD and the CUDA code by name. Contracting others would let the compiler choose
  # the rounding.
  fastweight_host_options(${target} -ffp-contract=off)
  fastweight_host_options(${target} -Wall -Wextra -Wpedantic -Wshadow -Wno-missing-field-initializers)
  # CMake 3.25 has no word for C++20 in CUDA.
  target_compile_options(
    ${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-fmad=false;-Xcompiler=-Wall,-Wextra,-Wshadow>")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Vectors never cross a library boundary. The others misfire in GCC 12 and 13: on the undefined operands of its own
    # AVX-512 intrinsics, and inside the standard library's sort and string code. The sanitizers look for these.
    fastweight_host_options(${target} -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized -Wno-array-bounds
                            -Wno-stringop-overflow -Wno-restrict)
  else()
    # clang 14 captures a structured binding only as `[x = x]`, which is a shadow to clang 19. GCC looks for all others.
    fastweight_host_options(${target} -Wno-shadow)
  endif()
  if(FASTWEIGHT_WERROR)
    fastweight_host_options(${target} -Werror)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror>")
  endif()

  if(FASTWEIGHT_SANITIZE)
    fastweight_sanitize(${target})
  endif()
endfunction()

# Kernels are deep trees of inlined functions, in which full instrumentation takes minutes per file. Left out is what
# costs most and finds least beside the address checks: scopes of temporaries, null and object-size tests, and all
# instruction sets but one, on x86 AVX2, which the processor must have.
function(fastweight_sanitize target)
  target_compile_options(${target} PRIVATE -fsanitize=${FASTWEIGHT_SANITIZE} -fno-sanitize-recover=all
                                           -fno-omit-frame-pointer -g1)
  target_link_options(${target} PRIVATE -fsanitize=${FASTWEIGHT_SANITIZE})
  target_compile_definitions(${target} PRIVATE HWY_COMPILE_ONLY_STATIC)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    target_compile_options(${target} PRIVATE -march=haswell -maes) # all that Highway's AVX2 takes
  endif()
  if(FASTWEIGHT_SANITIZE MATCHES "address")
    target_compile_options(${target} PRIVATE -fno-sanitize-address-use-after-scope)
  endif()
  if(NOT target STREQUAL "fastweight")
    # These checks triple the time to compile the JSON library.
    target_compile_options(${target} PRIVATE -fno-sanitize=undefined)
  elseif(FASTWEIGHT_SANITIZE MATCHES "undefined")
    target_compile_options(${target} PRIVATE -fno-sanitize=null,object-size,vptr,pointer-overflow,alignment)
  endif()
endfunction()
