# A kernel family is a folder in csrc/ops. Its CMakeLists.txt is one call:
#
#   pydist_add_family(pool
#     CPU cpu_sum.cpp cpu_max.cpp      # once
#     ISA isa_sum.cpp isa_max.cpp      # once per instruction set, each in its own namespace
#     CUDA cuda_sum.cu cuda_max.cu     # by nvcc; where kernels are emulated, by the host's compiler
#     BIND bind.cpp)                   # pybind11; defines pydist::bindings::bind_pool
#
# ISA and CUDA may be left out. Bindings find the families in the global properties PYDIST_FAMILIES
# and PYDIST_FAMILY_BINDINGS.

# The instruction sets, and with which options their objects are compiled. isa/isa.cpp picks one at
# run time and knows the same names.
set(PYDIST_ISAS base)
set(PYDIST_ISA_OPTIONS_base "")
if(PYDIST_SIMD AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND PYDIST_ISAS x86_64_v3 x86_64_v4)
  set(PYDIST_ISA_OPTIONS_x86_64_v3 -march=x86-64-v3)
  set(PYDIST_ISA_OPTIONS_x86_64_v4 -march=x86-64-v4)
endif()

function(pydist_add_family family)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "CPU;ISA;CUDA;BIND")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_CPU OR NOT arg_BIND)
    message(FATAL_ERROR "pydist_add_family(${family}): CPU and BIND name sources, ISA and CUDA may")
  endif()
  target_sources(pydist_native PRIVATE ${arg_CPU})
  if(arg_CUDA)
    pydist_add_cuda(${arg_CUDA})
  endif()
  if(arg_ISA)
    foreach(isa IN LISTS PYDIST_ISAS)
      set(objects pydist_${family}_${isa})
      add_library(${objects} OBJECT ${arg_ISA})
      target_link_libraries(${objects} PRIVATE pydist_core)
      target_compile_definitions(${objects} PRIVATE PYDIST_ISA_NAME=${isa})
      target_compile_options(${objects} PRIVATE -ffp-contract=fast ${PYDIST_ISA_OPTIONS_${isa}})
      pydist_configure_target(${objects})
      target_sources(pydist_native PRIVATE $<TARGET_OBJECTS:${objects}>)
      set_property(GLOBAL APPEND PROPERTY PYDIST_ISA_OBJECTS $<TARGET_OBJECTS:${objects}>)
    endforeach()
  endif()
  list(TRANSFORM arg_BIND PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/")
  set_property(GLOBAL APPEND PROPERTY PYDIST_FAMILIES ${family})
  set_property(GLOBAL APPEND PROPERTY PYDIST_FAMILY_BINDINGS ${arg_BIND})
endfunction()
