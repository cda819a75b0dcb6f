# PYDIST_HAS_CUDA: whether the CUDA kernels are built. AUTO builds them if nvcc is there and works.
include(CheckLanguage)

# Keeps ptxas's report of every object; tests/native/spills has the tests that read them. The PTX
# of sm_90, which newer devices compile for themselves, is compiled for sm_100 too, if the compiler
# can: it has other limits.
macro(pydist_report_spills)
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${PROJECT_SOURCE_DIR}/tools/ptxas_report")
  string(REGEX REPLACE "-(real|virtual)" "" PYDIST_REPORTED_ARCHITECTURES
         "${CMAKE_CUDA_ARCHITECTURES}")
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code
                  OUTPUT_VARIABLE PYDIST_GPU_CODE ERROR_QUIET)
  if(PYDIST_GPU_CODE MATCHES "sm_100\n" AND "90" IN_LIST CMAKE_CUDA_ARCHITECTURES)
    string(APPEND CMAKE_CUDA_FLAGS " -gencode=arch=compute_90,code=sm_100")
    list(APPEND PYDIST_REPORTED_ARCHITECTURES 100)
  endif()
endmacro()

# Architectures that `pip install` compiles for if none are named: those of the devices at hand.
# Without one in sight, as on a login node, it is one, whose PTX newer devices compile for themselves
# at their first use. Each more would take minutes. Left out are devices below compute capability
# 8.0, which lack instructions that the kernels have (cp.async, tensor cores of bf16 and tf32).
function(pydist_default_architectures result)
  set(${result} 80 PARENT_SCOPE)
  find_program(PYDIST_NVIDIA_SMI nvidia-smi)
  if(NOT PYDIST_NVIDIA_SMI)
    return()
  endif()
  execute_process(COMMAND "${PYDIST_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE found ERROR_QUIET TIMEOUT 30)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" found "${found}")
  list(REMOVE_DUPLICATES found)
  set(usable "")
  foreach(capability IN LISTS found)
    if(capability VERSION_LESS 8.0)
      message(STATUS "pydist: no kernels for the GPU of compute capability ${capability}: "
                     "they need 8.0 or later")
    else()
      string(REPLACE "." "" architecture ${capability})
      list(APPEND usable ${architecture})
    endif()
  endforeach()
  if(usable)
    set(${result} ${usable} PARENT_SCOPE)
  endif()
endfunction()

# Refuses architectures, as of PYDIST_CUDA_ARCHITECTURES, that the kernels can't be compiled for.
function(pydist_check_architectures)
  foreach(architecture IN LISTS ARGN)
    if(architecture MATCHES "^(all|[1-7][0-9]([^0-9]|$))")
      message(FATAL_ERROR "PYDIST_CUDA_ARCHITECTURES has ${architecture}: the kernels need compute "
                          "capability 8.0 or later, such as 80-real;90")
    endif()
  endforeach()
endfunction()

set(PYDIST_HAS_CUDA OFF)
if(PYDIST_CUDA STREQUAL "EMULATED")
  if(DEFINED SKBUILD)
    message(FATAL_ERROR "PYDIST_CUDA=EMULATED is for tests (tools/dev-build --emulated) and not to "
                        "be installed: it takes the memory of a device for the host's.")
  endif()
  set(PYDIST_HAS_CUDA ON)
  message(STATUS "pydist: CUDA kernels emulated on the host, for tests alone")
elseif(PYDIST_CUDA STREQUAL "AUTO" OR PYDIST_CUDA)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(PYDIST_CUDA_ARCHITECTURES)
      pydist_check_architectures(${PYDIST_CUDA_ARCHITECTURES})
      set(CMAKE_CUDA_ARCHITECTURES "${PYDIST_CUDA_ARCHITECTURES}")
    else()
      pydist_default_architectures(CMAKE_CUDA_ARCHITECTURES)
    endif()
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    if(PYDIST_CHECK_SPILLS)
      pydist_report_spills()
    endif()
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake 3.25 with nvcc 12 or later
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
    # Static: the module must import on machines that have no CUDA library.
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    set(PYDIST_HAS_CUDA ON)
    message(STATUS "pydist: CUDA ${CUDAToolkit_VERSION} for ${CMAKE_CUDA_ARCHITECTURES} "
                   "(if nvcc refuses the host compiler, configure with PYDIST_CUDA=OFF)")
  elseif(NOT PYDIST_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "PYDIST_CUDA=${PYDIST_CUDA}, but no working CUDA compiler was found. "
                        "Set CUDACXX to nvcc, or PYDIST_CUDA=OFF for a CPU build.")
  endif()
endif()
if(NOT PYDIST_HAS_CUDA)
  message(STATUS "pydist: built without CUDA")
endif()

# How pydist_native compiles and links its CUDA sources. Called once, before they are added.
function(pydist_configure_cuda target)
  if(NOT PYDIST_HAS_CUDA)
    return()
  endif()
  if(PYDIST_CUDA STREQUAL "EMULATED")
    # With the cuda_runtime.h and the launch/cuda.cuh that are there.
    target_include_directories(${target} BEFORE PUBLIC
                               "${PROJECT_SOURCE_DIR}/tests/native/emulated")
    return()
  endif()
  # Bodies use constexpr functions of the standard library (std::bit_cast) on the device.
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=$<IF:$<BOOL:${PYDIST_CHECK_SPILLS}>,-v,-warn-spills>>")
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  # A kernel that spills registers is a mistake, not a slow kernel: tests/native/spills fails.
  if(PYDIST_WERROR)
    target_compile_options(${target} PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=--warning-as-error>")
  endif()
endfunction()

# Adds CUDA sources of the calling folder to pydist_native, if kernels for CUDA are built.
function(pydist_add_cuda)
  if(NOT PYDIST_HAS_CUDA)
    return()
  endif()
  target_sources(pydist_native PRIVATE ${ARGN})
  if(PYDIST_CUDA STREQUAL "EMULATED")
    # By the host's compiler. Small tests run on it: compiling takes longer than they do.
    set(options -O1)
    if(NOT PYDIST_SANITIZE)
      # A word that is not aligned is an error on a device alone; here it ends the process as well
      # (SIGILL; PYDIST_SANITIZE=undefined says where).
      list(APPEND options -fsanitize=alignment,bounds -fsanitize-undefined-trap-on-error)
    endif()
    set_source_files_properties(${ARGN} TARGET_DIRECTORY pydist_native
                                PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "${options}")
  endif()
endfunction()
