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

if(FASTWEIGHT_FUZZ AND NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "FASTWEIGHT_FUZZ=ON needs clang, the compiler is ${CMAKE_CXX_COMPILER_ID}")
endif()

function(fastweight_options target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(
    ${target}
    PROPERTIES CXX_EXTENSIONS OFF
               C_STANDARD 99
               C_EXTENSIONS OFF
               POSITION_INDEPENDENT_CODE ON)

  # Fused multiply-adds stand in the SIMD code by name. Contracting others would let the compiler choose the rounding.
  target_compile_options(${target} PRIVATE -ffp-contract=off)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wno-missing-field-initializers)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Vectors never cross a library boundary. The others misfire in GCC 12 and 13: on the undefined operands of its own
    # AVX-512 intrinsics, and inside the standard library's sort and string code. The sanitizers look for these.
    target_compile_options(${target} PRIVATE -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized -Wno-array-bounds
                                             -Wno-stringop-overflow -Wno-restrict)
  endif()
  if(FASTWEIGHT_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()

  set(sanitizers ${FASTWEIGHT_SANITIZE})
  if(FASTWEIGHT_FUZZ)
    list(APPEND sanitizers fuzzer-no-link)
  endif()
  if(sanitizers)
    list(JOIN sanitizers "," sanitizers)
    target_compile_options(
      ${target} PRIVATE -fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
    target_link_options(${target} PRIVATE -fsanitize=${sanitizers})
    if(NOT target STREQUAL "fastweight")
      # These checks triple the time to compile the JSON library.
      target_compile_options(${target} PRIVATE -fno-sanitize=undefined)
    endif()
  endif()
endfunction()
