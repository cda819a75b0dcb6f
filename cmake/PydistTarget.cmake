# Settings that all native targets share.

# Headers in csrc/, included as "core/box.hpp". Each one outside bindings/ compiles on its own with a
# plain C++ compiler: the target all_verify_interface_header_sets checks that.
function(pydist_configure_core target)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/*.hpp")
  list(FILTER headers EXCLUDE REGEX "/csrc/bindings/")
  target_sources(${target} INTERFACE FILE_SET HEADERS BASE_DIRS "${PROJECT_SOURCE_DIR}/csrc"
                                     FILES ${headers})
  target_compile_definitions(${target} INTERFACE
    "PYDIST_CHECK_BOUNDS=$<BOOL:${PYDIST_CHECK_BOUNDS}>")
  if(PYDIST_HAS_CUDA)
    target_compile_definitions(${target} INTERFACE PYDIST_HAS_CUDA=1)
  endif()
  if(PYDIST_SIMD AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    target_compile_definitions(${target} INTERFACE PYDIST_SIMD=1)
  endif()
  if(PYDIST_SANITIZE)
    target_compile_options(${target} INTERFACE
      "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${PYDIST_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
    target_link_options(${target} INTERFACE "-fsanitize=${PYDIST_SANITIZE}")
  endif()
endfunction()

function(pydist_configure_target target)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wconversion;-Wno-sign-conversion>")
  if(PYDIST_WERROR)
    target_compile_options(${target} PRIVATE
      "$<$<COMPILE_LANGUAGE:CXX>:-Werror>" "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
  endif()
endfunction()
