# A toolchain of the ziglang wheel, for machines without a C++ compiler:
#
#   pip install ziglang cmake ninja nanobind
#   cmake -S . -B build -G Ninja --toolchain cmake/zig.cmake -DPython_EXECUTABLE="$(which python3)"
#
# The target is named, because zig's default is this very processor and this very C library: a wheel
# made here is to run on every machine that has the same kind of both.
set(GPUBRIDGE_ZIG "" CACHE FILEPATH "zig; empty: that of the ziglang wheel of Python_EXECUTABLE")
set(GPUBRIDGE_ZIG_TARGET "" CACHE STRING "as zig writes it; empty: this machine's")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES GPUBRIDGE_ZIG GPUBRIDGE_ZIG_TARGET)

if(NOT GPUBRIDGE_ZIG)
  if(NOT Python_EXECUTABLE)
    set(Python_EXECUTABLE python3)
  endif()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / 'zig')"
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE GPUBRIDGE_ZIG COMMAND_ERROR_IS_FATAL ANY)
endif()

if(NOT GPUBRIDGE_ZIG_TARGET)
  cmake_host_system_information(RESULT machine QUERY OS_PLATFORM)
  file(GLOB musl "/lib/ld-musl-*.so.1")
  if(musl)
    set(GPUBRIDGE_ZIG_TARGET "${machine}-linux-musl")
  else()
    # What wheels of manylinux_2_28 ask for: Debian 10, Ubuntu 20.04, RHEL 8 and all later ones.
    set(GPUBRIDGE_ZIG_TARGET "${machine}-linux-gnu.2.28")
  endif()
endif()

set(CMAKE_CXX_COMPILER "${GPUBRIDGE_ZIG}" c++ -target "${GPUBRIDGE_ZIG_TARGET}" -mcpu=baseline)
# nanobind names `stderr`, which Python.h of the stable ABI does not bring, nor zig's C++ library.
set(CMAKE_CXX_FLAGS_INIT "-include stdio.h")
# CMake takes one path for ar and ranlib, where zig wants a path and a word.
set(CMAKE_CXX_ARCHIVE_CREATE "\"${GPUBRIDGE_ZIG}\" ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_APPEND "\"${GPUBRIDGE_ZIG}\" ar q <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "\"${GPUBRIDGE_ZIG}\" ranlib <TARGET>")
# zig compiles each file by itself.
set(CMAKE_DISABLE_PRECOMPILE_HEADERS ON)
